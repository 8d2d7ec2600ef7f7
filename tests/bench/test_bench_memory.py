"""`tilegrad.bench.memory`: the cost of a cache hit and the peak over a trace, with room for a noisy machine."""

import json
from statistics import median

import pytest

from tilegrad.bench.memory import TARGETS, bench_memory, pair_ratios, replay, varying_lengths
from tilegrad.memory import AttentionBufferManager, BufferType


@pytest.mark.parametrize("lightweight", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_peak_over_a_trace_of_varying_lengths(lightweight, seed):
    manager = AttentionBufferManager(lightweight=lightweight, pressure=lambda _device: 0.0)
    steps = list(varying_lengths(10_000, seed))
    assert sum(step.shape is not None for step in steps) >= 10_000
    reserved, live = replay(manager, iter(steps))
    assert live > 50 << 20
    assert reserved <= 1.05 * live
    stats = manager.get_stats()
    assert stats["bytes_in_use"] == 0
    assert stats["cache_hit_rate"] > 0.6


def test_the_trace_is_deterministic_and_varied():
    a, b = list(varying_lengths(500)), list(varying_lengths(500))
    assert a == b
    assert len({step.shape for step in a if step.type is BufferType.QUERY}) > 20


def test_a_pair_costs_about_what_torch_empty_costs():
    """Targets are 1.0, and 2.0 for another shape. On a shared machine the best quarter of the rounds must be within 1.5 × of
    them; within 3 × for another shape, whose cost depends on where the process happens to lie in the instruction cache."""
    ratios = pair_ratios(40)
    for name, target in TARGETS.items():
        best = sorted(ratios[name])[:10]
        assert median(best) <= (3.0 if "another" in name else 1.5) * target, (name, best)


def test_the_report(capsys):
    assert bench_memory(repeats=4) == 0
    table = capsys.readouterr().out
    assert "lightweight, same shape" in table
    assert "target ≤ 1.05" in table
    assert bench_memory(repeats=4, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["pair_over_torch_empty"]) == set(TARGETS)
    assert report["trace"]["ratio"] <= 1.05
    with pytest.raises(ValueError, match="repeats: got 2; accepted: at least 4"):
        bench_memory(repeats=2)
