"""`tilegrad.bench.memory`: the cost of a cache hit and the peak over a trace, with room for a noisy machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

import tilegrad
from tilegrad.bench.memory import CASES, TARGET, bench_memory, pair_ratios, replay, varying_lengths
from tilegrad.memory import AttentionBufferManager, BufferType
from tilegrad.memory.managed import hit


@pytest.mark.parametrize("lightweight", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_peak_over_a_trace_is_close_to_the_live_bytes(lightweight, seed):
    manager = AttentionBufferManager(lightweight=lightweight, pressure=lambda _device: 0.0)
    steps = list(varying_lengths(10_000, seed))
    assert sum(step.shape is not None for step in steps) >= 10_000
    reserved, live = replay(manager, iter(steps))
    assert live > 50 << 20
    assert reserved <= 1.05 * live
    stats = manager.get_stats()
    assert stats["bytes_in_use"] == 0
    assert stats["cache_hit_rate"] > 0.6


RESIDENT = """
import sys
from pathlib import Path
import torch
from tilegrad.bench.memory import replay, varying_lengths
from tilegrad.memory import AttentionBufferManager

class Filled(AttentionBufferManager):  # writes its buffers, because only written pages are resident
    def allocate(self, *arguments, **options):
        return super().allocate(*arguments, **options).fill_(1.0)

def most(): return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

steps = list(varying_lengths(int(sys.argv[1])))
replay(Filled(pressure=lambda _device: 0.0), iter(steps[:100]))
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
before = most()
counted, _ = replay(Filled(pressure=lambda _device: 0.0), iter(steps))
print(most() - before, counted)
"""
AT_ONCE = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def resident_and_counted(allocations: int) -> tuple[int, int]:
    """Peaks of a new process and of the manager's count. torch allocates by mimalloc on aarch64, which keeps freed pages for
    some milliseconds, and by glibc elsewhere, which keeps them below a threshold; here both return them at once."""
    there = os.environ | AT_ONCE | {"PYTHONPATH": str(Path(tilegrad.__file__).parents[1])}
    command = [sys.executable, "-c", RESIDENT, str(allocations)]
    done = subprocess.run(command, env=there, capture_output=True, text=True, check=True)
    resident, counted = map(int, done.stdout.split())
    return resident, counted


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("allocations", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_resident_memory_is_close_to_the_counted_bytes(allocations: int) -> None:
    """The tolerance is four huge pages, because a buffer may share one with a freed buffer; code and objects need less."""
    resident, counted = resident_and_counted(allocations)
    assert 0.9 * counted < resident < counted + 4 * (2 << 20), (resident, counted)


def test_the_trace_is_deterministic_and_varied():
    a, b = list(varying_lengths(500)), list(varying_lengths(500))
    assert a == b
    assert len({step.shape for step in a if step.type is BufferType.QUERY}) > 20


def test_a_pair_costs_at_most_what_torch_empty_costs(hits):
    """In C++, which takes less than half of it. Through Python a pair must be within 1.5 × of it, and within 6 × for
    alternating shapes: its cost depends on the process's place in the instruction cache. The best quarter of a shared
    machine's rounds counts, and a pair that costs too much does so in each of five windows."""
    bounds = {name: TARGET if hits == "C++" else 6.0 if "alternating" in name else 1.5 for name in CASES}
    dear: dict[str, list[float]] = {}
    for _ in range(5):
        ratios = pair_ratios(40)
        dear = {name: best for name in CASES if median(best := sorted(ratios[name])[:10]) > bounds[name]}
        if not dear:
            break
    assert not dear


def test_the_report_has_every_case(capsys):
    assert bench_memory(repeats=4) == 0
    table = capsys.readouterr().out
    assert "lightweight, same shape" in table
    assert "target ≤ 1.05" in table
    assert ("hits through Python" if isinstance(hit.load(), str) else "hits in C++") in table
    assert bench_memory(repeats=4, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["pair_over_torch_empty"]) == set(CASES)
    assert report["trace"]["ratio"] <= 1.05
    with pytest.raises(ValueError, match="repeats: got 2; accepted: at least 4"):
        bench_memory(repeats=2)
