"""A whole training step against the same model in eager PyTorch: forward, backward, clipping, AdamW, on a CPU.

The peer is `tilegrad.model.reference` under autograd with `torch.optim.AdamW(fused=True)`; for bfloat16 under `torch.autocast`.
Every figure comes from a fresh process:

    memory   one process per contender, malloc told to return what is freed (RETURN): peak resident bytes of two steps −
             those after the imports − 4 · parameter bytes (parameters, gradients, two moments; all are float32)
    speed    one process for both, malloc told to keep what is freed (KEEP): first the check, then a step each to warm up,
             then pairs of steps in alternating order; the speed-up is the median over pairs of eager / ours

The check: with ref the eager float32 gradient of the same parameters and batch, and ‖·‖ the Euclidean norm,

    |loss − ref| ≤ tolerance · |ref|      ‖g − ref‖ ≤ tolerance · max(‖ref‖, 10⁻⁴ · the largest ‖ref‖)

for every tensor (q, k and v of a qkv apart: v's is far larger at the start; k's bias has none in exact arithmetic), and
the losses after the timed steps agree as well. A cell that fails has no speed-up. A process that takes longer than its
limit is ended, and the table says so.
"""

from __future__ import annotations

import json as json_format
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..model import reference
from ..model.config import PRESETS, ModelConfig
from ..model.transformer import declare
from ..text.atomic import check_replaceable
from ..text.environment import environment
from ..text.table import table

CELLS = (("float32", 1, 1024), ("float32", 4, 64), ("bfloat16", 1, 1024), ("bfloat16", 4, 64))
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
SPEED_TARGET, MEMORY_TARGET = 1.05, 0.6
LIMIT_S = 150.0
TITLE = "# Training step against eager PyTorch"  # what the file --out begins with
SOLO_STEPS = 2  # the second has gradients, moments and activations
LEARNING_RATE = 1e-4
KEEP = {  # else eager pays for page faults in every step. torch's aarch64 builds have mimalloc, others use glibc's malloc
    "MALLOC_MMAP_MAX_": "0",  # glibc takes no MALLOC_MMAP_THRESHOLD_ above 32 MiB, and silently
    "MALLOC_TRIM_THRESHOLD_": str(1 << 36),
    "MALLOC_TOP_PAD_": str(1 << 26),
    "MIMALLOC_PURGE_DELAY": "-1",
}
RETURN = {"MIMALLOC_PURGE_DELAY": "0"}  # glibc does so for large blocks unless it is told not to
FAULTS_BYTES = 1 << 26  # of a step, above which a note says that malloc did not obey
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20

Kind = Literal["ours", "eager", "speed"]
KINDS: tuple[Kind, ...] = ("ours", "eager", "speed")


@dataclass(frozen=True, slots=True)
class Cell:
    """A problem: one batch of B sequences of T tokens."""

    preset: str
    dtype: str
    batch_size: int
    seq_len: int

    @property
    def config(self) -> ModelConfig:
        return PRESETS[self.preset]

    def batch(self) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, self.config.vocab_size, (self.batch_size, self.seq_len + 1), generator=g)
        return tokens[:, :-1], tokens[:, 1:]

    def __str__(self) -> str:
        return f"{self.dtype} B={self.batch_size} T={self.seq_len}"


class Contender(Protocol):
    def step(self) -> float: ...


class Ours:
    """The engine's step."""

    def __init__(self, cell: Cell) -> None:
        dtype = getattr(torch, cell.dtype)
        self.engine = Engine(cell.config, cell.batch_size, cell.seq_len, dtype=dtype)
        self.tokens, self.targets = cell.batch()

    def step(self) -> float:
        return self.engine.step(self.tokens, self.targets, learning_rate=LEARNING_RATE)

    def gradients(self) -> tuple[float, Mapping[str, Tensor]]:
        """Of the loss at the present parameters, by the path that `step` takes."""
        return self.engine.gradients(self.tokens, self.targets), self.engine.grads


class Eager:
    """The same step by autograd, on copies of `params` or on fresh random ones."""

    def __init__(self, cell: Cell, params: Mapping[str, Tensor] | None = None) -> None:
        self.config, self.bf16 = cell.config, cell.dtype == "bfloat16"
        self.tokens, self.targets = cell.batch()
        if params is None:
            handles = declare(cell.config, 1, 1, torch.float32, "cpu").params
            params = {name: torch.randn(p.master.shape).mul_(0.02) for name, p in handles.items()}
        self.params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
        matrices = [p for p in self.params.values() if p.ndim >= 2]
        vectors = [p for p in self.params.values() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def _backward(self, *, bf16: bool) -> float:
        self.optimizer.zero_grad(set_to_none=True)  # the faster way: autograd adds nothing to zeros
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = reference.loss(self.params, self.tokens, self.targets, self.config)
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        loss = self._backward(bf16=self.bf16)
        torch.nn.utils.clip_grad_norm_(self.params.values(), 1.0)
        self.optimizer.step()
        return loss

    def gradients(self, *, bf16: bool | None = None) -> tuple[float, Mapping[str, Tensor]]:
        """Of the loss at the present parameters; bf16=False in float32 whatever the cell's dtype."""
        loss = self._backward(bf16=self.bf16 if bf16 is None else bf16)
        return loss, {name: p.grad for name, p in self.params.items() if p.grad is not None}


# ── the check ──


def disagreement(
    loss: float, grads: Mapping[str, Tensor], ref_loss: float, ref: Mapping[str, Tensor], tolerance: float
) -> str:
    """'' where the rule at the top holds, else what breaks it."""
    if not abs(loss - ref_loss) <= tolerance * abs(ref_loss):
        return f"loss {loss:.6f}, reference {ref_loss:.6f}, allowed {tolerance:.0e} of it"
    if grads.keys() != ref.keys():
        return f"gradients of other parameters: {', '.join(sorted(grads.keys() ^ ref.keys()))}"
    norms = {name: float(g.norm()) for name, g in ref.items()}
    floor = 1e-4 * max(norms.values())
    for name, g in ref.items():
        error = float((grads[name] - g).norm()) / max(norms[name], floor)
        if not error <= tolerance:
            return f"gradient of {name} is off by {error:.1e} of its norm, allowed {tolerance:.0e}"
    return ""


def parts(config: ModelConfig, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients with every qkv cut into q, k and v."""
    heads = [n * config.head_dim for n in (config.n_head, config.kv_heads, config.kv_heads)]
    out: dict[str, Tensor] = {}
    for name, g in grads.items():
        cut = zip("qkv", g.split(heads), strict=True) if ".attn.qkv." in name else ()
        out |= {f"{name} ({part})": x for part, x in cut} or {name: g}
    return out


def check(cell: Cell, ours: Ours, eager: Eager) -> str:
    """'' if both contenders compute the float32 gradient, else which one does not, and where."""
    ref_loss, grads = eager.gradients(bf16=False)
    ref = parts(cell.config, {name: g.clone() for name, g in grads.items()} if eager.bf16 else grads)
    for name, contender in (("tilegrad", ours), ("eager", eager)) if eager.bf16 else (("tilegrad", ours),):
        loss, grads = contender.gradients()
        wrong = disagreement(loss, parts(cell.config, grads), ref_loss, ref, TOLERANCE[cell.dtype])
        if wrong:
            return f"{name}: {wrong}"
    return ""


# ── what a process of its own measures ──


def measure_speed(cell: Cell, repeats: int, limit_s: float) -> dict[str, Any]:
    """Pairs of steps, as many as begin within the limit, one at least; {'wrong': reason} where the check is red."""
    began = time.perf_counter()
    ours = Ours(cell)
    eager = Eager(cell, ours.engine.params)
    wrong = check(cell, ours, eager)
    if wrong:
        return {"wrong": wrong}
    contenders: dict[str, Contender] = {"ours": ours, "eager": eager}
    losses = {name: contender.step() for name, contender in contenders.items()}
    ms: dict[str, list[float]] = {name: [] for name in contenders}
    faults: dict[str, list[int]] = {name: [] for name in contenders}
    pair_s = 0.0
    while len(ms["ours"]) < repeats:
        start = time.perf_counter()
        if ms["ours"] and start - began + pair_s > limit_s:
            break
        for name in ("eager", "ours") if len(ms["ours"]) % 2 else ("ours", "eager"):
            faults_before, step_began = _page_faults(), time.perf_counter()
            losses[name] = contenders[name].step()
            ms[name].append(1e3 * (time.perf_counter() - step_began))
            faults[name].append(_page_faults() - faults_before)
        pair_s = time.perf_counter() - start
    gap = abs(losses["ours"] - losses["eager"]) / max(abs(losses["eager"]), 1e-9)
    if not gap <= 10 * TOLERANCE[cell.dtype]:
        steps = len(ms["ours"]) + 1
        return {"wrong": f"after {steps} steps the loss is {losses['ours']:.6f}, eager's {losses['eager']:.6f}"}
    return {"ms": ms, "page_faults": faults, "losses": losses}


def measure_memory(cell: Cell, kind: Kind) -> dict[str, Any]:
    """Peak resident bytes of one contender, and its last step's time."""
    before = _resident("VmRSS")
    contender: Contender = Ours(cell) if kind == "ours" else Eager(cell)
    took = 0.0
    for _ in range(SOLO_STEPS):
        began = time.perf_counter()
        contender.step()
        took = time.perf_counter() - began
    params = contender.engine.params if isinstance(contender, Ours) else contender.params  # type: ignore[attr-defined]
    kept = 4 * sum(p.numel() for p in params.values()) * torch.float32.itemsize
    peak = _resident("VmHWM") - before
    return {"peak_bytes": peak, "kept_bytes": kept, "beyond_bytes": peak - kept, "step_ms": 1e3 * took}


def _resident(field: str) -> int:
    """Bytes. Not getrusage's maximum: a process inherits that one from whoever started it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"{field}: /proc/self/status has no such line; the memory bench needs Linux")


def _page_faults() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _worker(request: Mapping[str, Any]) -> None:
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch, on a CPU without bf16 instructions
    cell, kind = Cell(**request["cell"]), request["kind"]
    speed = kind == "speed"
    result = measure_speed(cell, request["repeats"], request["limit_s"]) if speed else measure_memory(cell, kind)
    print(json_format.dumps(result))


def _in_a_process(cell: Cell, kind: Kind, repeats: int, limit_s: float) -> dict[str, Any]:
    """The worker's answer; {'late': seconds} where it was ended, {'failed': message} where it broke."""
    request = {"cell": asdict(cell), "kind": kind, "repeats": repeats, "limit_s": limit_s}
    command = [sys.executable, "-m", "tilegrad.bench.training", "--worker", json_format.dumps(request)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "MIMALLOC_"))}
    late = 3 * limit_s if kind == "speed" else limit_s  # a speed process ends itself, but for one pair
    env |= KEEP if kind == "speed" else RETURN
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=late)
    except subprocess.TimeoutExpired:
        return {"late": late}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        return {"failed": f"exit code {done.returncode}: {lines[-1]}"}
    answer: dict[str, Any] = json_format.loads(done.stdout.splitlines()[-1])
    return answer


# ── the report ──


@dataclass(frozen=True, slots=True)
class Row:
    """One cell's result; None where there is no figure, and `notes` say why."""

    cell: Cell
    ours_ms: float | None = None
    eager_ms: float | None = None
    speed_up: float | None = None
    q1: float | None = None
    q3: float | None = None
    pairs: int = 0
    ours_beyond_bytes: int | None = None
    eager_beyond_bytes: int | None = None
    memory_ratio: float | None = None
    wrong: bool = False
    notes: tuple[str, ...] = ()
    raw: Mapping[str, Any] | None = None


def row_of(cell: Cell, ours: Mapping[str, Any], eager: Mapping[str, Any], speed: Mapping[str, Any] | None) -> Row:
    """From the answers of the three processes; speed is None where a contender alone was too slow for pairs."""
    values: dict[str, Any] = {"raw": {"ours": ours, "eager": eager, "speed": speed}}
    notes = [_excuse(answer, what) for answer, what in ((ours, "tilegrad alone"), (eager, "eager alone"))]
    beyond = [answer.get("beyond_bytes") for answer in (ours, eager)]
    values |= {"ours_beyond_bytes": beyond[0], "eager_beyond_bytes": beyond[1]}
    values |= {"ours_ms": ours.get("step_ms"), "eager_ms": eager.get("step_ms")}
    if beyond[0] is not None and beyond[1] is not None and beyond[1] > 0:
        values["memory_ratio"] = beyond[0] / beyond[1]
    if speed is None:
        notes.append("no pairs: nothing was checked, so there is no speed-up; a time shown is of a step alone")
    elif "wrong" in speed:
        notes.append(f"WRONG, so there is no speed-up: {speed['wrong']}")
        values["wrong"] = True
    elif "ms" in speed:
        ms = speed["ms"]
        ratios = [theirs / own for theirs, own in zip(ms["eager"], ms["ours"], strict=True)]
        q1, _, q3 = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        values |= {"ours_ms": median(ms["ours"]), "eager_ms": median(ms["eager"]), "pairs": len(ratios)}
        values |= {"speed_up": median(ratios), "q1": q1, "q3": q3}
        notes += [
            f"{name} takes {median(counts):.0f} page faults a step: malloc did not keep what was freed"
            for name, counts in speed["page_faults"].items()
            if median(counts) * PAGE_BYTES > FAULTS_BYTES
        ]
    else:
        notes.append(_excuse(speed, "the pairs") + "; a time shown is of a step alone")
    return Row(cell, notes=tuple(note for note in notes if note), **values)


def _excuse(answer: Mapping[str, Any], what: str) -> str:
    if "late" in answer:
        return f"{what}: ended after {answer['late']:.0f} s, its limit"
    return f"{what}: failed, {answer['failed']}" if "failed" in answer else ""


def report(rows: Sequence[Row]) -> str:
    header = (
        "cell", "ours ms", "eager ms", "speed-up", "q1", "q3", "pairs", "target",
        "ours MiB", "eager MiB", "memory", "target",
    )  # fmt: skip
    lines = [
        [
            str(r.cell), _number(r.ours_ms, ".0f"), _number(r.eager_ms, ".0f"), _number(r.speed_up, ".2f", "×"),
            _number(r.q1, ".2f"), _number(r.q3, ".2f"), r.pairs, _verdict(r.speed_up, SPEED_TARGET, least=True),
            _number(r.ours_beyond_bytes, ".0f", of=_MIB), _number(r.eager_beyond_bytes, ".0f", of=_MIB),
            _number(r.memory_ratio, ".2f", "×"), _verdict(r.memory_ratio, MEMORY_TARGET, least=False),
        ]
        for r in rows
    ]  # fmt: skip
    notes = [f"{r.cell}: {note}" for r in rows for note in r.notes]
    return "\n".join([table(header, lines), *notes])


def _number(value: float | None, form: str, unit: str = "", of: int = 1) -> str:
    return "–" if value is None else f"{value / of:{form}}{unit}"


def _verdict(value: float | None, target: float, *, least: bool) -> str:
    sign = "≥" if least else "≤"
    if value is None:
        return f"{sign} {target:g}"
    return f"{sign} {target:g} {'met' if (value >= target if least else value <= target) else 'missed'}"


def machine() -> dict[str, Any]:
    """What a figure depends on, beside the code."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, subprocess.CalledProcessError):
        listing = subprocess.run(
            ["lscpu"], env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True, check=True
        ).stdout
        names = [line.split(":", 1)[1].strip() for line in listing.splitlines() if line.startswith("Model name:")]
        cpu = names[0] if names else cpu
    about = environment(torch.device("cpu"), torch.float32)
    about = {name: about[name] for name in ("tilegrad", "commit", "torch", "python", "date")}
    return {
        "cpu": cpu, "architecture": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "bf16_products": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), "load_average": os.getloadavg()[0],
        **about, "libc": " ".join(platform.libc_ver()), "malloc_speed": KEEP, "malloc_memory": RETURN,
    }  # fmt: skip


def bench_training(
    *, preset: str = "gpt2", cells: Sequence[tuple[str, int, int]] = CELLS, repeats: int = 5, limit_s: float = LIMIT_S,
    json: bool = False, out: Path | None = None,
) -> int:  # fmt: skip
    """Prints the step against eager's, as a table or as JSON lines (the machine, then a cell each); `out` gets both. The
    exit code is 1 where a check was red or a process failed. limit_s: a contender alone is ended after it, and no pair
    begins after it."""
    if out is not None:
        check_replaceable(out, TITLE)
    problems = _problems(preset, cells, repeats, limit_s)
    about = {**machine(), "preset": preset, "command": _command(preset, cells, repeats, limit_s)}
    rows = []
    for cell in problems:
        answers: dict[Kind, dict[str, Any]] = {}
        for kind in KINDS:
            if kind == "speed" and not all("step_ms" in answer for answer in answers.values()):
                continue
            print(f"{cell}: {'both, in pairs' if kind == 'speed' else f'{kind} alone'} …", file=sys.stderr, flush=True)
            answers[kind] = _in_a_process(cell, kind, repeats, limit_s)
        rows.append(row_of(cell, answers["ours"], answers["eager"], answers.get("speed")))
    lines = "\n".join(json_format.dumps(line) for line in (about, *map(asdict, rows)))
    title = (
        f"{preset} training step, CPU ({about['cpu']}, {about['threads']} threads), median of interleaved pairs; "
        "MiB: peak beyond parameters, gradients and moments"
    )
    text = f"{title}\n{report(rows)}"
    print(lines if json else text)
    if out is not None:
        facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
        out.write_text(f"{TITLE}\n\n{facts}\n\n```\n{text}\n```\n\n```json\n{lines}\n```\n", encoding="utf-8")
    failed = any("failed" in (answer or {}) for row in rows for answer in (row.raw or {}).values())
    return int(failed or any(row.wrong for row in rows))


def _command(preset: str, cells: Sequence[tuple[str, int, int]], repeats: int, limit_s: float) -> str:
    command = f"tilegrad bench training --preset {preset} --repeats {repeats}"
    if len(cells) == 1:
        command += f" --dtype {cells[0][0]} --batch-size {cells[0][1]} --seq-len {cells[0][2]}"
    elif tuple(cells) != CELLS:
        command += f", with cells={tuple(cells)}"
    return command if limit_s == LIMIT_S else f"{command}, with limit_s={limit_s:g}"


def _problems(preset: str, cells: Sequence[tuple[str, int, int]], repeats: int, limit_s: float) -> list[Cell]:
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}; accepted: {', '.join(PRESETS)}")
    if not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"repeats: got {repeats!r}; accepted: an int ≥ 1, the pairs of steps per cell")
    if not 0.0 < limit_s < math.inf:
        raise ValueError(f"limit_s: got {limit_s!r}; accepted: seconds > 0")
    if not Path("/proc/self/status").exists():
        raise RuntimeError("bench training: resident bytes are read from /proc, which is not here; run it on Linux")
    longest = PRESETS[preset].block_size
    for dtype, batch_size, seq_len in cells:
        if dtype not in TOLERANCE:
            raise ValueError(f"dtype: got {dtype!r}; accepted: {', '.join(TOLERANCE)}")
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size!r}; accepted: an int ≥ 1")
        if not 1 <= seq_len <= longest:
            raise ValueError(f"seq_len: got {seq_len!r}; accepted: 1 … {longest}, the block size of {preset}")
    return [Cell(preset, *cell) for cell in cells]


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--worker":
        raise SystemExit("this module runs as a process of `tilegrad bench training`; call that")
    _worker(json_format.loads(sys.argv[2]))
