"""Train a contender for a given time.

    clock     counts the seconds of training, without evaluations. Before it starts, steps with learning rate 0 compile, capture
              and allocate; they change moments, but no weights
    rate      depends on the share of the time that is over: it rises for WARMUP, stays at the peak, and falls to 0 in the
              last DECAY
    loss      is in bits per byte, Σ nll / ln 2 / bytes, over the same validation windows each time (training/evaluation.py)

The host submits at most STRETCH steps, waits for the device and reads the clock. Near the end it submits as many steps as fit
into the rest of the time at the speed of the last ones, so a run ends about a step before its time. With `steps`
instead of seconds, a run does not depend on any clock.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tilegrad.training.schedule import learning_rate

from ..contenders import Batches, resident_bytes
from .contenders import CONTENDERS, SIZES, Task, Trained, weights_sha256
from .data import Data, open_data

WARMUP, DECAY = 0.02, 0.4  # shares of the time
STRETCH = 10
WARM_STEPS = 4
_PARTS = 1 << 20  # the schedule counts parts of the time instead of steps


@dataclass(frozen=True, slots=True)
class Settings:
    """steps: train for so many steps instead of `seconds`. rate: the peak of the learning rate, None for the contender's own.
    evaluations: their number; the last is at the end. eval_tokens: validation targets of an evaluation, at least one batch."""

    data: Path
    contender: str
    seed: int = 0
    seconds: float = 300.0
    steps: int | None = None
    size: str = "124m"
    device: str = "cuda"
    rate: float | None = None
    evaluations: int = 30
    eval_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        if self.contender not in CONTENDERS:
            raise ValueError(f"case: got {self.contender!r}; accepted: {', '.join(CONTENDERS)}")
        if self.size not in SIZES:
            raise ValueError(f"size: got {self.size!r}; accepted: {', '.join(SIZES)}")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds: got {self.seconds}; accepted: a finite number > 0")
        for name in ("steps", "evaluations", "eval_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; accepted: an int ≥ 1")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate: got {self.rate}; accepted: a finite number > 0")
        if self.device == "cpu" and CONTENDERS[self.contender].needs_gpu:
            raise ValueError(
                f"device: got 'cpu' with {self.contender}; accepted: 'cuda', because it has float8 products"
            )

    @property
    def limit(self) -> str:
        return f"{self.seconds:g} s" if self.steps is None else f"{self.steps} steps"

    def share(self, clock: float, steps: int) -> float:
        """The share of the time that is over."""
        return clock / self.seconds if self.steps is None else steps / self.steps


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the curve: bits per byte after these seconds of training, and after these steps."""

    seconds: float
    steps: int
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a run. start_s: seconds before the clock started. weights_sha256: the digest of the final parameters."""

    contender: str
    seed: int
    size: str
    rate: float
    limit: str
    data_sha256: str
    curve: tuple[Point, ...]
    steps: int
    tokens: int
    seconds: float
    peak_bytes: int
    start_s: float
    loss: float
    weights_sha256: str

    @property
    def bits_per_byte(self) -> float:
        return self.curve[-1].bits_per_byte


class Validation:
    """Windows that are spread evenly over the validation tokens."""

    def __init__(self, data: Data, task: Task, eval_tokens: int) -> None:
        size, tokens = task.size, data.validation
        count = max(1, eval_tokens // (size.batch_size * size.seq_len)) * size.batch_size
        if len(tokens) <= size.seq_len:
            accepted = f"more than seq_len ({size.seq_len})"
            raise ValueError(f"data: got {len(tokens)} validation tokens; accepted: {accepted}")
        starts = np.linspace(0, len(tokens) - size.seq_len - 1, count).astype(np.int64)
        windows = tokens[starts[:, None] + np.arange(size.seq_len + 1)].astype(np.int64)
        self._bytes = int(data.token_bytes[windows[:, 1:]].sum(dtype=np.int64))
        self._batches = torch.from_numpy(windows).split(size.batch_size)

    def bits_per_byte(self, contender: Trained) -> float:
        nll = 0.0
        for windows in self._batches:
            tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
            nll += contender.evaluate(tokens, targets) * targets.numel()
        return nll / math.log(2) / self._bytes


def rate_at(share: float, peak: float) -> float:
    """The learning rate when this share of the time is over."""
    warmup, decay = int(WARMUP * _PARTS), int(DECAY * _PARTS)
    at = min(int(share * _PARTS), _PARTS - 1)
    return learning_rate(
        at, peak=peak, floor=0.0, warmup_steps=warmup, total_steps=_PARTS, schedule="trapezoid", decay_steps=decay
    )


def train(settings: Settings) -> Run:
    began = time.perf_counter()
    data, chosen, size = open_data(settings.data), CONTENDERS[settings.contender], SIZES[settings.size]
    task = Task(size, data.manifest.vocab_size, settings.device, settings.seed)
    validation = Validation(data, task, settings.eval_tokens)
    contender = chosen.build(task)
    text = torch.from_numpy(data.train.astype(np.int64))
    batches = Batches(task.entry(size.gpt2(task.vocab_size)), text)
    peak = chosen.rate if settings.rate is None else settings.rate
    for _ in range(WARM_STEPS):
        contender.submit(*batches.next(), 0.0)
    loss = contender.loss()
    curve = [Point(0.0, 0, validation.bits_per_byte(contender))]
    start_s, clock, steps, step_s = time.perf_counter() - began, 0.0, 0, 0.0
    while count := next_steps(settings, clock, steps, step_s):
        before = time.perf_counter()
        for i in range(count):
            share = settings.share(clock + i * step_s, steps + i)
            contender.submit(*batches.next(), rate_at(share, peak))
        loss = contender.loss()
        step_s = (time.perf_counter() - before) / count
        clock, steps = clock + count * step_s, steps + count
        if settings.share(clock, steps) >= len(curve) / settings.evaluations:
            curve.append(Point(clock, steps, validation.bits_per_byte(contender)))
    if curve[-1].steps < steps:
        curve.append(Point(clock, steps, validation.bits_per_byte(contender)))
    peak_bytes = torch.cuda.max_memory_allocated() if settings.device != "cpu" else resident_bytes("VmHWM")
    return Run(
        settings.contender, settings.seed, settings.size, peak, settings.limit, data.manifest.train.sha256, tuple(curve),
        steps, steps * size.batch_size * size.seq_len, clock, peak_bytes, start_s, loss, weights_sha256(contender),
    )  # fmt: skip


def next_steps(settings: Settings, clock: float, steps: int, step_s: float) -> int:
    """The number of steps until the host next waits; 0 at the end."""
    if settings.steps is not None:
        return min(STRETCH, settings.steps - steps)
    return min(STRETCH, max(0, int((settings.seconds - clock) / step_s))) if step_s else 1
