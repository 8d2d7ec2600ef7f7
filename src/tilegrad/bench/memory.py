"""The cost of managed buffers, as two ratios.

time    one allocate + deallocate pair ÷ one `x = torch.empty(shape); del x`, in CPU time of the thread. Batches of pairs and
        of torch.empty alternate, so a change in the speed of the machine affects both.
bytes   the peak of reserved bytes (in use + cached + idle in slabs) ÷ the peak of requested live bytes, over a trace of
        sequences of varying length
"""

from __future__ import annotations

import json as json_format
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles

import torch

from ..engine.capture import without_garbage_collection
from ..memory import AttentionBufferManager, BufferType
from ..memory.managed import hit
from ..text.environment import environment

SHAPE = (2, 1024, 8, 64)
OTHER_SHAPE = (2, 1000, 8, 64)
_BATCH = 100

CASES = (
    "lightweight, same shape",
    "tracked, same shape",
    "lightweight, alternating shapes",
    "tracked, alternating shapes",
)
TARGET = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a trace. It allocates buffer number `name` if there is a shape, otherwise it frees the buffer."""

    name: int
    type: BufferType
    shape: tuple[int, ...] | None


def varying_lengths(allocations: int = 10_000, seed: int = 0) -> Iterator[Step]:
    """A trace of attention over sequences of varying length T, with at least `allocations` allocations.

    At most eight sequences are in flight, and each has a cache (2, T, 8, 64) until it ends. After each new sequence, two layers
    run, each on a random sequence in flight. A layer allocates q, k, v and the output (1, T, 8, 64) and one block of scores and
    of probabilities (8, 128, T), then frees them in random order.
    """
    rng = random.Random(seed)
    name = 0
    in_flight: list[tuple[int, int]] = []
    while name < allocations:
        if in_flight and (len(in_flight) == 8 or rng.random() < 0.3):
            cache, length = in_flight.pop(rng.randrange(len(in_flight)))
            yield Step(cache, BufferType.CACHE, None)
        length = min(4096, 16 + int(rng.paretovariate(1.2) * 100))
        in_flight.append((name, length))
        yield Step(name, BufferType.CACHE, (2, length, 8, 64))
        name += 1
        for _ in range(2):
            length = rng.choice(in_flight)[1]
            qkv = [(t, (1, length, 8, 64)) for t in (BufferType.QUERY, BufferType.KEY, BufferType.VALUE)]
            scores = [(t, (8, 128, length)) for t in (BufferType.SCORES, BufferType.WEIGHTS)]
            first = name
            buffers = [*qkv, *scores, (BufferType.OUTPUT, qkv[0][1])]
            for type, shape in buffers:
                yield Step(name, type, shape)
                name += 1
            for offset in rng.sample(range(len(buffers)), len(buffers)):
                yield Step(first + offset, buffers[offset][0], None)
    for cache, _ in in_flight:
        yield Step(cache, BufferType.CACHE, None)


def replay(manager: AttentionBufferManager, steps: Iterator[Step]) -> tuple[int, int]:
    """Run a trace. Returns (peak of reserved bytes, peak of requested live bytes)."""
    buffers: dict[int, torch.Tensor] = {}
    live = peak_live = 0
    for step in steps:
        if step.shape is None:
            tensor = buffers.pop(step.name)
            live -= tensor.nbytes
            manager.deallocate(tensor, step.type)
        else:
            tensor = buffers[step.name] = manager.allocate(step.type, step.shape, zero_init=False)
            live += tensor.nbytes
            peak_live = max(peak_live, live)
        del tensor
    return manager.get_stats()["bytes_peak"], peak_live


def _empty() -> None:
    for _ in range(_BATCH):
        x = torch.empty(SHAPE)
        del x


def _pairs(manager: AttentionBufferManager, *shapes: tuple[int, ...]) -> Callable[[], None]:
    take, give, query = manager.allocate, manager.deallocate, BufferType.QUERY
    cycle = list(shapes) * (_BATCH // len(shapes))

    def run() -> None:
        for shape in cycle:
            x = take(query, shape)
            give(x, query)
            del x

    return run


def pair_ratios(repeats: int) -> dict[str, list[float]]:
    """case → ratios of the rounds: time of a batch of pairs ÷ mean time of the torch.empty batches before and after it"""
    cases: dict[str, Callable[[], None]] = {}
    for name, lightweight in (("lightweight", True), ("tracked", False)):
        cases[f"{name}, same shape"] = _pairs(AttentionBufferManager(lightweight=lightweight), SHAPE)
        cases[f"{name}, alternating shapes"] = _pairs(
            AttentionBufferManager(lightweight=lightweight), SHAPE, OTHER_SHAPE
        )
    for run in (_empty, *cases.values()):
        run()
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    with without_garbage_collection():
        for _ in range(repeats):
            for name, run in cases.items():
                before, case, after = _timed(_empty), _timed(run), _timed(_empty)
                ratios[name].append(2 * case / (before + after))
    return ratios


def _timed(run: Callable[[], None]) -> int:
    began = time.thread_time_ns()
    run()
    return time.thread_time_ns() - began


def bench_memory(*, repeats: int = 200, json: bool = False) -> int:
    """Print the cost of the buffer manager on CPU, as a table or as one JSON object. Returns the exit code 0."""
    if repeats < 4:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 4, because the report has quartiles")
    ratios = pair_ratios(repeats)
    manager = AttentionBufferManager(lightweight=True)
    reserved, live = replay(manager, varying_lengths())
    hit_rate = manager.get_stats()["cache_hit_rate"]
    rows = {}
    for name, values in ratios.items():
        low, _, high = quantiles(values, n=4)
        rows[name] = {"median": median(values), "q1": low, "q3": high, "target": TARGET}
    hits = "through Python" if isinstance(hit.load(), str) else "in C++"
    if json:
        trace = {"peak_reserved_bytes": reserved, "peak_live_bytes": live, "ratio": reserved / live, "target": 1.05}
        report = {"shape": SHAPE, "repeats": repeats, "hits": hits, "pair_over_torch_empty": rows, "trace": trace}
        about = environment(torch.device("cpu"), torch.float32)
        print(
            json_format.dumps(
                {**report, "trace_hit_rate": hit_rate, **about, "command": "tilegrad bench memory --json"}
            )
        )
        return 0
    print(
        f"allocate + deallocate over torch.empty + del, {SHAPE} float32, CPU, {repeats} interleaved rounds of {_BATCH}, "
        f"cache hits {hits}"
    )
    print(f"  {'':32}{'median':>8}{'q1':>8}{'q3':>8}{'target':>9}")
    for name, row in rows.items():
        print(
            f"  {name:32}{row['median']:8.2f}{row['q1']:8.2f}{row['q3']:8.2f}{'≤ ' + format(row['target'], '.2f'):>9}"
        )
    print("trace of varying lengths, at least 10,000 allocations")
    mib = 1 << 20
    print(f"  peak reserved {reserved / mib:.1f} MiB over peak live {live / mib:.1f} MiB", end="")
    print(f" = {reserved / live:.3f} (target ≤ 1.05), hit rate {hit_rate:.1%}")
    return 0
