"""The contenders of a training benchmark. Each has a process of its own, which lives while its problem is measured.

So the memory of each contender is measured alone, and speeds are measured in turn: only one process works at a time. On a CPU
memory and speed depend on malloc. Where speed is measured, malloc keeps freed pages, because eager PyTorch would have page
faults in every step. Where memory is measured, malloc returns freed pages. All contenders begin with the same parameters and
read the same stream of random tokens.

    start     builds the model and trains CHECK_STEPS steps on one fixed batch; the losses must fall alike (`disagreement`)
    run       back-to-back steps on new tokens, with a learning rate so small that the loss does not change
    profile   the device's kernels in a few steps
    curve     the losses of a whole run on a text
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tilegrad.bench.timing import Thunk
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import ByteTokenizer
from tilegrad.data.tokens import open_tokens
from tilegrad.engine.engine import Engine
from tilegrad.engine.optimizer import StepResult
from tilegrad.training.schedule import learning_rate

from .breakdown import Launch, launches_of
from .cases import Case
from .energy import joules
from .large_peers import LargePeer
from .peer import Peer, PeerForm

Kind = Literal["ours", "compiled", "eager", "liger", "torchao"]
CHECK_STEPS = 5
CHECK_RATE, SPEED_RATE = 1e-4, 1e-6
FALL_TOLERANCE = 0.1
WARM_SECONDS, PROFILED_STEPS = 0.5, 3
AHEAD_STEPS = 2
MALLOC = {  # torch's aarch64 builds have mimalloc, others use glibc's malloc
    "keep": {
        "MALLOC_MMAP_MAX_": "0",  # glibc ignores a MALLOC_MMAP_THRESHOLD_ above 32 MiB without a message
        "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
        "MALLOC_TOP_PAD_": str(1 << 26),
        "MIMALLOC_PURGE_DELAY": "-1",
    },
    "return": {"MIMALLOC_PURGE_DELAY": "0"},  # glibc returns large blocks by default
}
FAULTS_BYTES = 1 << 26  # with more bytes of page faults in a step, a note says that malloc did not keep pages
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CURVE_PEAK, CURVE_FLOOR, CURVE_WARMUP = 6e-4, 6e-5, 0.1  # learning rate of `curve`; warm-up as a share of its steps


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender (tilegrad or a peer, by `kind`), and the case that it runs."""

    kind: Kind
    case: Case
    form: PeerForm = field(default_factory=PeerForm)
    seed: int = 0
    check_steps: int = CHECK_STEPS
    malloc: Literal["keep", "return"] = "keep"  # what malloc does with freed pages, on a CPU

    @property
    def device(self) -> str:
        return self.case.device

    @property
    def name(self) -> str:
        return f"ours {self.case.name}" if self.kind == "ours" else self.kind


Answer = dict[str, Any]  # the results of a start or of a round, or {"failed": why}


class Contender(Protocol):
    def submit(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        """Run a step; on a GPU without waiting for it."""

    def loss(self) -> float:
        """The loss of the last step; waits for it."""


class Ours:
    """The step of an engine, in the micro-batches of the case."""

    def __init__(self, entry: Entry) -> None:
        case, problem = entry.case, entry.case.problem
        if problem.batch_size % case.micro_batches:
            raise ValueError(f"micro_batches: got {case.micro_batches}; accepted: a divisor of {problem.batch_size}")
        self.micro_batches = case.micro_batches
        self.engine = Engine(
            problem.config, problem.batch_size // case.micro_batches, problem.seq_len, device=entry.device,
            dtype=getattr(torch, problem.dtype), seed=entry.seed, memory_budget=case.budget_bytes, linear=case.linear,
            head=case.head, states=case.states, muon=case.muon, accumulate=case.micro_batches > 1, betas=case.adamw.betas,
            eps=case.adamw.eps, weight_decay=case.adamw.weight_decay, max_norm=case.adamw.max_norm,
        )  # fmt: skip
        self._results: list[StepResult] = []

    def submit(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        x, y = (given.chunk(self.micro_batches) for given in (tokens, targets))
        self.engine.submit(x, y, learning_rate)
        self._results = self.engine.finished() or self._results

    def loss(self) -> float:
        self._results = self.engine.finished(wait=True) or self._results
        return self._results[-1].loss

    def evaluate(self, tokens: Tensor, targets: Tensor) -> float:
        """The mean loss of a batch."""
        return self.engine.evaluate(tokens, targets)


def contender(entry: Entry) -> Contender:
    if entry.kind == "ours":
        return Ours(entry)
    problem = entry.case.problem
    if entry.kind in ("liger", "torchao"):
        given = (problem.config, entry.case.micro_batches)
        return LargePeer(*given, seed=entry.seed, torchao=entry.kind == "torchao", device=entry.device)
    device, dtype, compiled = torch.device(entry.device), getattr(torch, problem.dtype), entry.kind == "compiled"
    sizes = (problem.config, problem.batch_size, problem.seq_len)
    return Peer(*sizes, device, seed=entry.seed, form=entry.form, compiled=compiled, dtype=dtype)


class Batches:
    """Batches of tokens (B, T) and targets, random or windows of a text, in pinned memory for a GPU."""

    def __init__(self, entry: Entry, text: Tensor | None = None) -> None:
        problem = entry.case.problem
        self.sizes = problem.batch_size, problem.seq_len
        self.vocab_size, self.text, self.pinned = problem.config.vocab_size, text, entry.device != "cpu"
        self.generator = torch.Generator().manual_seed(entry.seed)

    def next(self) -> tuple[Tensor, Tensor]:
        b, t = self.sizes
        if self.text is None:
            drawn = torch.randint(0, self.vocab_size, (b, t + 1), generator=self.generator)
        else:
            starts = torch.randint(0, len(self.text) - t, (b, 1), generator=self.generator)
            drawn = self.text[starts + torch.arange(t + 1)]
        tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        return (tokens.pin_memory(), targets.pin_memory()) if self.pinned else (tokens, targets)


class Sustained(NamedTuple):
    """Steps back to back: their number, and the seconds from the start of the first to the end of the last."""

    steps: int
    seconds: float


def sustained(step: Thunk, seconds: float, device: torch.device) -> Sustained:
    """Run `step` repeatedly for at least `seconds`. The host stays at most AHEAD_STEPS steps ahead of the current stream, so
    the device never waits for the host; a step on another stream must limit this itself. A long run shows the speed that
    a power-capped GPU sustains."""
    pending: deque[torch.cuda.Event] = deque()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began, steps = time.perf_counter(), 0
    while not steps or time.perf_counter() - began < seconds:
        step()
        steps += 1
        if device.type == "cuda":
            pending.append(torch.cuda.Event())
            pending[-1].record()
            if len(pending) > AHEAD_STEPS:
                pending.popleft().synchronize()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Sustained(steps, time.perf_counter() - began)


class Measured:
    """A contender with its measurements, in its own process."""

    def __init__(self, entry: Entry) -> None:
        began = time.perf_counter()
        self.entry, self.device = entry, torch.device(entry.device)
        self._resident_before = resident_bytes("VmRSS") if self.device.type == "cpu" else 0
        self.contender: Contender = contender(entry)
        self.batches = Batches(entry)
        tokens, targets = self.batches.next()
        losses = [self._loss_of(tokens, targets, CHECK_RATE) for _ in range(entry.check_steps)]
        self.started: Answer = {"losses": losses, "start_s": time.perf_counter() - began}
        self.started |= self._peak("start_")
        if isinstance(self.contender, Ours):
            self.started["planned_bytes"] = self.contender.engine.plan.peak_bytes
        elif isinstance(self.contender, Peer | LargePeer):
            self.started["sdpa"] = self.contender.backend

    def _peak(self, prefix: str = "") -> dict[str, int | None]:
        """Peak bytes since the last call: of tensors, and of the memory that torch reserved for tensors. On a CPU: the peak of
        resident bytes, without the bytes that were resident after the imports."""
        if self.device.type != "cuda":
            peak = resident_bytes("VmHWM") - self._resident_before
            return {f"{prefix}allocated_bytes": peak, f"{prefix}reserved_bytes": None}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return {f"{prefix}allocated_bytes": allocated, f"{prefix}reserved_bytes": reserved}

    def _loss_of(self, tokens: Tensor, targets: Tensor, rate: float) -> float:
        self.contender.submit(tokens, targets, rate)
        return self.contender.loss()

    def _step(self) -> None:
        self.contender.submit(*self.batches.next(), SPEED_RATE)

    def run(self, seconds: float) -> Answer:
        faults, before = getrusage(RUSAGE_SELF).ru_minflt, joules()
        done = sustained(self._step, seconds, self.device)
        faults = getrusage(RUSAGE_SELF).ru_minflt - faults
        counts: Answer = {"steps": done.steps, "seconds": done.seconds, "page_faults": faults / done.steps}
        after = joules()
        counts |= {"joules": None if before is None or after is None else after - before}
        return {**counts, "loss": self.contender.loss(), **self._peak()}

    def profile(self) -> list[Launch]:
        sustained(self._step, WARM_SECONDS, self.device)
        return launches_of(self._step, PROFILED_STEPS)

    def curve(self, steps: int, tokens: Path | None = None) -> list[float]:
        """Losses on a file of prepared tokens; None: on the text that ships with the package, byte by byte."""
        if tokens is None:
            text = torch.from_numpy(ByteTokenizer().encode(default_text().read_text(encoding="utf-8")).astype("int64"))
        else:
            text = torch.from_numpy(open_tokens(tokens).tokens.astype("int64"))
        batches, losses = Batches(self.entry, text), []
        for i in range(steps):
            rate = learning_rate(
                i, peak=CURVE_PEAK, floor=CURVE_FLOOR, warmup_steps=int(CURVE_WARMUP * steps), total_steps=steps
            )
            losses.append(self._loss_of(*batches.next(), rate))
        return losses


def resident_bytes(field: str) -> int:
    """Resident bytes of this process: VmRSS now, VmHWM at the peak. The maximum of getrusage is not used, because a process
    inherits it from its parent."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{field}: /proc/self/status has no such line; memory on a CPU is measured on Linux")


def disagreement(losses: Sequence[float], reference: Sequence[float], *, same_optimizer: bool = True) -> str:
    """A sentence about the difference if the losses do not begin alike and fall alike, else "". The first losses may differ by
    FALL_TOLERANCE / 10 of the loss, and the falls over the steps of the check by FALL_TOLERANCE of the fall of the reference.
    With same_optimizer=False the losses must begin alike, and fall by any amount."""
    fall, expected = (values[0] - values[-1] for values in (losses, reference))
    if not abs(losses[0] - reference[0]) <= FALL_TOLERANCE / 10 * abs(reference[0]):
        return f"the first loss is {losses[0]:.4f}, the peer's {reference[0]:.4f}"
    if not same_optimizer:
        return (
            "" if fall > 0 else f"in {len(losses) - 1} steps the loss does not fall: {losses[0]:.4f}, {losses[-1]:.4f}"
        )
    if not abs(fall - expected) <= FALL_TOLERANCE * abs(expected):
        steps = len(losses) - 1
        return f"in {steps} steps the loss falls by {fall:.4f}, the peer's by {expected:.4f}"
    return ""


class Worker:
    """The process of a contender. `ask` sends a request, `answer` waits for the result: {"failed": why} if the process failed
    or took too long."""

    def __init__(self, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        self.entry = entry
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, entry))
        with _environment(MALLOC[entry.malloc] if entry.device == "cpu" else {}):
            self._process.start()
        there.close()

    def ask(self, method: str, *arguments: object) -> None:
        self._here.send((method, arguments))

    def answer(self, limit_s: float) -> Any:
        try:
            if not self._here.poll(limit_s):
                return {"failed": f"no answer within {limit_s:.0f} s"}
            return self._here.recv()
        except EOFError:
            self._process.join(10)
            return {"failed": f"the process ended with exit code {self._process.exitcode}"}

    def close(self) -> None:
        self._process.terminate()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self._here.close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """In this context, new processes inherit these variables instead of the malloc settings of this process."""
    ours = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "MIMALLOC_"))]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(ours)


def _work(there: Connection, entry: Entry) -> None:
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch warns on a CPU without bf16 instructions
    os.dup2(sys.stderr.fileno(), 1)  # stdout is for the report
    try:
        measured = Measured(entry)
        there.send(measured.started)
        while True:
            method, arguments = there.recv()
            there.send(getattr(measured, method)(*arguments))
    except EOFError:
        return
    except (RuntimeError, ValueError, TypeError, ImportError, NotImplementedError) as error:
        traceback.print_exc()
        there.send({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
