"""Dilated attention, compared with the usual formulation by gathers on SDPA: forward + backward, interleaved in one process.

    ours       tilegrad.dilated_attention, with buffers from torch's allocator
    managed    tilegrad.dilated_attention, with an AttentionBufferManager
    captured   `ours` as one replayed CUDA graph: the time of the device, without launches
    gather …   gathered.py on each backend of SDPA

`ours` is checked against the float64 oracle before it is timed, on a small ragged problem with the same heads and rates. If the
check fails, nothing is timed. Times are medians of rounds, in each of which every contender runs once; a ratio is the median of
the ratios of the rounds. Memory is the peak of a forward + backward without q, k, v, y, their gradients and earlier
allocations. torch's allocator counts it on CUDA, including the cache of a manager, which starts empty; on a CPU it is not
measured. The hit rate of the manager counts from the third iteration on.
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from tilegrad.bench.timing import Thunk, interleaved
from tilegrad.engine.machine import device_or_default
from tilegrad.functional.dilated import reference
from tilegrad.functional.dilated.functional import check_pattern, dilated_attention
from tilegrad.functional.dilated.pattern import MODES, Mode
from tilegrad.kernels.attention import cpu
from tilegrad.kernels.closeness import complaints
from tilegrad.memory.managed.manager import AttentionBufferManager, create_attention_buffer_manager
from tilegrad.text.environment import environment
from tilegrad.text.table import table

from .gathered import backends_on, gathered

SEGMENTS, RATES = (2048, 8192, 32768), (1, 4, 16)
LENGTHS = {"cuda": (32768, 65536, 131072, 262144, 524288), "cpu": (4096, 8192, 16384)}
CPU_SEGMENTS = (256, 1024, 4096)
HEADS, HEAD_DIM = 16, 64
FLAT = 0.20  # the most by which the time per token may vary over the lengths
# Goals: the first two against gather, the third against `ours`.
FASTER, MEMORY, MANAGED, HIT_RATE = 1.3, 0.5, 0.95, 0.95
CHECKED_TOKENS = 150
ERRORS_OF_A_PEER = (RuntimeError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of q, k, v (B, T, H, D) and a mode; heads, segments and rates are the same for every T."""

    mode: Mode
    t: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    h: int
    d: int
    b: int
    causal: bool

    def new(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        g = torch.Generator(device).manual_seed(0)
        shape = (self.b, self.t, self.h, self.d)
        return [torch.randn(shape, generator=g, device=device, dtype=torch.float32).to(dtype) for _ in range(4)]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the result; if there is no result, `note` says why."""

    mode: str
    t: int
    kernel: str
    ms: float | None = None
    ns_per_token: float | None = None
    extra_bytes: int | None = None
    hit_rate: float | None = None
    rounds_ms: tuple[float, ...] = ()
    note: str = ""


def check(problem: Problem, dtype: torch.dtype, device: torch.device) -> str:
    """The complaints of the closeness rule about a short sequence with a partial segment in every branch; "" if it holds."""
    t = CHECKED_TOKENS
    segments = [
        max(1, s * t // (2 * max(problem.segments))) + r for s, r in zip(problem.segments, problem.rates, strict=True)
    ]
    g = torch.Generator().manual_seed(0)
    form = (2, t, problem.h, problem.d)
    q, k, v, dy = (
        torch.randn(form, generator=g, dtype=torch.float64).to(device, dtype).transpose(1, 2) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = dilated_attention(q, k, v, segments, problem.rates, mode=problem.mode, causal=problem.causal)
    got = dict(zip(("o", "dq", "dk", "dv"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))
    attended = reference.pairs(problem.h, t, segments, problem.rates, mode=problem.mode, causal=problem.causal).to(
        device
    )
    exact = reference.gradients(q, k, v, dy, attended, mode=problem.mode)
    order = sorted(range(len(attended)), key=lambda i: problem.rates[i])
    exp_error = cpu.exp_error(dtype) if device.type == "cpu" else 0.0
    with torch.no_grad():
        bounds = reference.bounds(q, k, v, dy, attended[order], exact, mode=problem.mode, exp_error=exp_error)
    return "; ".join(complaints(got, exact, bounds))


def _step(attend: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor) -> Thunk:
    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, dy)

    return step


def _captured(step: Thunk, device: torch.device) -> Thunk:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _extra_bytes(step: Thunk, device: torch.device, returned_bytes: int) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - returned_bytes


def _hit_rate(step: Thunk, manager: AttentionBufferManager) -> float:
    """The hit rate of the manager from the third iteration on."""
    counts = []
    for steps in (2, 4):
        for _ in range(steps):
            step()
        stats = manager.get_stats()
        counts.append((stats["cache_hits"], stats["cache_misses"]))
    (hits, misses), (more_hits, more_misses) = counts
    asked = more_hits - hits + more_misses - misses
    return (more_hits - hits) / asked if asked else 1.0


def measure(
    problem: Problem, dtype: torch.dtype, device: torch.device, peers: Sequence[str], repeats: int
) -> list[Row]:
    *inputs, dy = problem.new(dtype, device)
    leaves = [x.requires_grad_() for x in inputs]
    manager = create_attention_buffer_manager()
    pattern: dict[str, Any] = {"mode": problem.mode, "causal": problem.causal}

    def ours(manager: AttentionBufferManager | None) -> Callable[..., Tensor]:
        def attend(*qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv)
            y = dilated_attention(q, k, v, problem.segments, problem.rates, manager=manager, **pattern)
            return y.transpose(1, 2)

        return attend

    def peer(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v: gathered(q, k, v, problem.segments, problem.rates, backend=backend, **pattern)

    attends = {"ours": ours(None), "managed": ours(manager)} | {f"gather {name}": peer(name) for name in peers}
    steps = {name: _step(attend, leaves, dy) for name, attend in attends.items()}
    notes: dict[str, str] = {}
    extra: dict[str, int | None] = {}
    returned = 4 * inputs[0].nbytes  # y, dq, dk, dv
    for name, step in list(steps.items()):
        try:
            step()
        except ERRORS_OF_A_PEER as error:
            if not name.startswith("gather"):
                raise
            notes[name] = str(error).splitlines()[0][:80]
            del steps[name]
            continue
        manager.clear_cache()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        extra[name] = _extra_bytes(step, device, returned)
    hit_rate = _hit_rate(steps["managed"], manager)
    if device.type == "cuda":
        steps["captured"], extra["captured"] = _captured(steps["ours"], device), extra["ours"]
    rows = [Row(problem.mode, problem.t, name, note=note) for name, note in notes.items()]
    for name, ms in interleaved(steps, repeats, device).items():
        middle = median(ms)
        per_token = 1e6 * middle / (problem.b * problem.t)
        rate = hit_rate if name == "managed" else None
        rows.append(Row(problem.mode, problem.t, name, middle, per_token, extra[name], rate, tuple(ms)))
    return rows


def _ratio(rows: Sequence[Row], mode: str, t: int, over: str, under: str) -> float | None:
    """The median over rounds of (time of `over`) / (time of `under`)."""
    found = {row.kernel: row.rounds_ms for row in rows if (row.mode, row.t) == (mode, t) and row.rounds_ms}
    if over not in found or under not in found:
        return None
    return median(a / b for a, b in zip(found[over], found[under], strict=True))


def _spread(rows: Sequence[Row], mode: str, kernel: str) -> float:
    """(time per token of the slowest T) / (time per token of the fastest T) − 1."""
    found = [x for row in rows if (row.mode, row.kernel) == (mode, kernel) and (x := row.ns_per_token) is not None]
    return max(found) / min(found) - 1


def _gib(n: int | None) -> str:
    return "–" if n is None else f"{n / 2**30:.3f}"


def report(rows: Sequence[Row]) -> str:
    """The table, followed by each goal with its result."""
    lines = []
    for row in rows:
        if row.ms is None:
            lines.append((row.mode, row.t, row.kernel, row.note, "", "", "", ""))
            continue
        speedup = _ratio(rows, row.mode, row.t, row.kernel, "ours")
        ratio = "" if row.kernel == "ours" or speedup is None else f"{speedup:.2f}"
        hits = "" if row.hit_rate is None else f"{row.hit_rate:.0%}"
        figures = (f"{row.ms:.3f}", f"{row.ns_per_token:.1f}", _gib(row.extra_bytes), ratio, hits)
        lines.append((row.mode, row.t, row.kernel, *figures))
    header = ("mode", "T", "", "ms", "ns/token", "GiB beyond", "time of ours", "hits")
    return "\n".join([table(header, lines), "", *verdicts(rows)])


def verdicts(rows: Sequence[Row]) -> list[str]:
    found = []
    for mode in dict.fromkeys(row.mode for row in rows):
        ours_by_t = {
            row.t: row for row in rows if (row.mode, row.kernel) == (mode, "ours") and row.ns_per_token is not None
        }
        if not ours_by_t:
            continue
        found.append(f"{mode}: time per token within {_spread(rows, mode, 'ours'):.0%} over all T (at most {FLAT:.0%})")
        if any((row.mode, row.kernel) == (mode, "captured") for row in rows):
            found[-1] += f", captured {_spread(rows, mode, 'captured'):.0%}"
        for t, row in ours_by_t.items():
            peers = [
                r for r in rows if (r.mode, r.t) == (mode, t) and r.kernel.startswith("gather") and r.ms is not None
            ]
            speedups = [x for r in peers if (x := _ratio(rows, mode, t, r.kernel, "ours")) is not None]
            managed = _ratio(rows, mode, t, "ours", "managed")
            line = f"{mode} T {t}: {min(speedups, default=0.0):.2f}× the fastest gather (at least {FASTER})"
            theirs = [r.extra_bytes for r in peers if r.extra_bytes]
            if row.extra_bytes is not None and theirs:
                line += f", {row.extra_bytes / min(theirs):.2f} of the least memory (at most {MEMORY})"
            line += f", managed {managed:.2f}× the speed without (at least {MANAGED})" if managed else ""
            found.append(line)
    rates_of_hits = [row.hit_rate for row in rows if row.hit_rate is not None]
    found.append(f"hit rate from the third iteration: {min(rates_of_hits, default=0.0):.0%} (at least {HIT_RATE:.0%})")
    return found


def bench_dilated(
    *, device: str | None = None, dtype: str | None = None, modes: Sequence[str] = MODES, lengths: Sequence[int] | None = None,
    segments: Sequence[int] | None = None, rates: Sequence[int] = RATES, heads: int = HEADS, head_dim: int = HEAD_DIM,
    batch_size: int = 1, causal: bool = False, peers: Sequence[str] | None = None, repeats: int = 10, json: bool = False,
    out: str | None = None,
) -> int:  # fmt: skip
    """Prints times, memory and ratios (or JSON lines), and appends the JSON lines to the file `out`. Returns the exit code, 1
    if the results of tilegrad are wrong."""
    where = torch.device(device_or_default(device))
    dtype = dtype or ("bfloat16" if where.type == "cuda" else "float32")
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(dtype)
    if kind is None:
        raise ValueError(f"dtype: got {dtype!r}; accepted: 'bfloat16', 'float16' or 'float32'")
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2")
    sizes = {"lengths": lengths or (), "segments": segments or (), "rates": rates}
    sizes |= {"heads": [heads], "head_dim": [head_dim], "batch_size": [batch_size]}
    for name, given in sizes.items():
        if any(not 1 <= n < 1 << 31 for n in given):
            raise ValueError(f"{name}: got {', '.join(map(str, given))}; accepted: 1 … 2³¹ − 1")
    chosen = tuple(segments or (SEGMENTS if where.type == "cuda" else CPU_SEGMENTS))
    theirs = backends_on(where) if peers is None else tuple(peers)
    if set(theirs) - set(backends_on(where)):
        raise ValueError(f"peers: got {list(theirs)}; accepted: names among {', '.join(backends_on(where))}")
    about = environment(where, kind) | {"heads": heads, "head_dim": head_dim, "batch_size": batch_size}
    about |= {"causal": causal, "segments": chosen, "rates": tuple(rates)}
    rows: list[Row] = []
    wrong = False
    for mode in modes:
        check_pattern(chosen, list(rates), mode)
        for t in lengths or LENGTHS[where.type]:
            problem = Problem(cast(Mode, mode), t, chosen, tuple(rates), heads, head_dim, batch_size, causal)
            complaint = check(problem, kind, where) if t == (lengths or LENGTHS[where.type])[0] else ""
            wrong |= bool(complaint)
            new = (
                [Row(mode, t, "ours", note=f"WRONG: {complaint}")]
                if complaint
                else measure(problem, kind, where, theirs, repeats)
            )
            rows += new
            for line in (json_format.dumps(asdict(row) | about) for row in new):
                if json:
                    print(line, flush=True)
                if out:
                    with open(out, "a", encoding="utf-8") as file:
                        file.write(line + "\n")
            if complaint:
                break
    if not json:
        print(", ".join(f"{name} {value}" for name, value in about.items() if value is not None) + "\n")
        print(report(rows))
    return int(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dilated", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--dtype", help="bfloat16, float16 or float32 (default: bfloat16 on CUDA, else float32)")
    add("--modes", nargs="+", metavar="NAME", help="head_groups, longnet (default: both)")
    add("--lengths", type=int, nargs="+", metavar="T", help="default: 32768 … 524288 on CUDA, 4096 … 16384 else")
    add("--segments", type=int, nargs="+", metavar="S", help="default: 2048 8192 32768 on CUDA, 256 1024 4096 else")
    add("--rates", type=int, nargs="+", metavar="R", help="default: 1 4 16")
    add("--heads", type=int, default=16, metavar="H", help="default: %(default)s")
    add("--head-dim", type=int, default=64, metavar="D", help="default: %(default)s")
    add("--batch-size", type=int, default=1, metavar="B", help="default: %(default)s")
    add("--causal", action="store_true")
    add("--peers", nargs="*", metavar="NAME", help="flash, cudnn; sdpa on a CPU (default: all)")
    add("--repeats", type=int, default=10, metavar="N", help="interleaved rounds (default: %(default)s)")
    add("--json", action="store_true", help="JSON lines instead of the table")
    add("--out", metavar="FILE", help="append the JSON lines to a file")
    given = vars(parser.parse_args(arguments))
    return bench_dilated(**{name: value for name, value in given.items() if value is not None})


if __name__ == "__main__":
    sys.exit(main())
