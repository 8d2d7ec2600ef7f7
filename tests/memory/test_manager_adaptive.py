"""The manager's four enhancements: adaptive cache size, pattern learning, sharing across modules, profiling."""

import itertools
import json
import re
import threading
from typing import Any

import pytest
import torch

from tilegrad.memory import AttentionBufferManager, BufferType
from tilegrad.memory.managed.pattern import PatternLearner, demand
from tilegrad.memory.managed.pressure import AdaptiveLimit, memory_pressure
from tilegrad.memory.managed.profile import Profile

pytestmark = pytest.mark.usefixtures("hits")
Q, K, V, OUT, SCORES = BufferType.QUERY, BufferType.KEY, BufferType.VALUE, BufferType.OUTPUT, BufferType.SCORES
CPU = torch.device("cpu")
MIB = 1 << 20


class Pressure:
    def __init__(self):
        self.level = 0.0

    def __call__(self, _device):
        return self.level


@pytest.fixture
def pressure():
    return Pressure()


def fill(manager, count=8):
    held = [manager.allocate(Q, (MIB,), torch.uint8) for _ in range(count)]
    for t in held:
        manager.deallocate(t)


def test_the_cache_shrinks_under_pressure_and_grows_again(pressure):
    manager = AttentionBufferManager(pressure=pressure)
    fill(manager)
    assert manager.get_stats()["bytes_cached"] == 8 * MIB
    pressure.level = 0.9
    manager.end_iteration()
    assert manager.get_stats()["bytes_cached"] == 4 * MIB
    assert manager.get_stats()["cache_limits"] == {"cpu": 4 * MIB}
    fill(manager)
    assert manager.get_stats()["bytes_cached"] == 4 * MIB
    pressure.level = 0.99
    manager.end_iteration()
    fill(manager)
    assert manager.get_stats()["bytes_cached"] == 0
    pressure.level = 0.8
    manager.end_iteration()
    assert manager.get_stats()["cache_limits"] == {"cpu": 0}
    pressure.level = 0.5
    seen = []
    for _ in range(6):
        manager.end_iteration()
        fill(manager)
        seen.append(manager.get_stats()["bytes_cached"] // MIB)
    assert seen[0] < 8
    assert seen == sorted(seen)
    assert seen[-1] == 8
    assert manager.get_stats()["cache_limits"] == {}


def test_pressure_is_read_also_without_end_iteration(pressure, monkeypatch):
    monkeypatch.setattr("tilegrad.memory.managed.cache._PRESSURE_EVERY_S", 0.0)
    manager = AttentionBufferManager(pressure=pressure, lightweight=True)
    fill(manager)
    pressure.level = 0.99
    for _ in range(256):
        manager.deallocate(manager.allocate(Q, (MIB,), torch.uint8))
    assert manager.get_stats()["bytes_cached"] == 0


def test_a_pressure_source_must_give_a_share(pressure):
    manager = AttentionBufferManager(pressure=pressure)
    manager.allocate(Q, (4,))
    pressure.level = 85.0
    with pytest.raises(ValueError, match=r"got 85.0 from the pressure source; accepted: a float"):
        manager.end_iteration()


def test_the_adaptive_limit_is_none_before_and_after_pressure():
    limit = AdaptiveLimit()
    limit.feel(0.84, 100)
    assert limit.max_bytes is None
    for level, expected in ((0.85, 50), (0.8, 50), (0.86, 20), (0.7, 40), (0.7, 80), (0.7, None)):
        limit.feel(level, 40 if expected == 20 else 100)
        assert limit.max_bytes == expected


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("version", [1, 2])
def test_memory_pressure_follows_the_tightest_limit_of_the_cgroups(tmp_path, version):
    root = tmp_path
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n", encoding="utf-8")
    assert memory_pressure(CPU, root) == pytest.approx(0.1)
    group = root / ("sys/fs/cgroup/memory/a/b" if version == 1 else "sys/fs/cgroup/a/b")
    group.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    line = "4:memory:/a/b" if version == 1 else "0::/a/b"
    (root / "proc/self/cgroup").write_text(f"3:cpu:/\n{line}\n", encoding="utf-8")
    unlimited = str(1 << 62) if version == 1 else "max"
    (group / names[0]).write_text(unlimited + "\n", encoding="utf-8")
    (group / names[1]).write_text("500\n", encoding="utf-8")
    assert memory_pressure(CPU, root) == pytest.approx(0.1)
    (group.parent / names[0]).write_text("1000\n", encoding="utf-8")
    (group.parent / names[1]).write_text("950\n", encoding="utf-8")
    (group.parent / "memory.stat").write_text(f"anon 1\n{names[2]} 250\n", encoding="utf-8")
    assert memory_pressure(CPU, root) == pytest.approx(0.7)


def test_memory_pressure_of_a_gpu_counts_unused_bytes_of_its_allocator_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 5)
    assert memory_pressure(torch.device("cuda", 0)) == pytest.approx(0.55)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: -90)
    assert memory_pressure(torch.device("cuda", 0)) == 0.0
    assert memory_pressure(torch.device("meta")) == 0.0


def test_the_pressure_of_this_machine_is_a_share():
    assert 0 < memory_pressure(CPU) < 1


def test_demand_counts_the_buffers_held_beyond_those_at_the_start():
    events = [("a", 1), ("a", 1), ("b", -1), ("a", -1), ("a", 1), ("b", 1), ("c", 1), ("c", -1)]
    assert demand(events) == {"a": (3, 2), "b": (1, 0), "c": (1, 1)}


def test_three_equal_iterations_are_a_pattern():
    learner: PatternLearner[str] = PatternLearner()
    for seen in ({"a": (1, 1)}, {"a": (2, 1)}, {"a": (2, 1)}):
        learner.observe(seen)
        assert learner.plan == {}
    learner.observe({"a": (2, 1)})
    assert learner.plan == {"a": 1}
    learner.observe({})
    assert (learner.plan, learner.broken) == ({}, 1)


def iteration(manager, length, layers=12):
    """Twelve queries at once (more than are cached), scores one at a time, an output that the caller drops."""
    held = [manager.allocate(Q, (length, 64)) for _ in range(layers)]
    for _ in range(3):
        manager.deallocate(manager.allocate(SCORES, (8, length, 64)))
    manager.allocate(OUT, (length, 64))
    for t in held:
        manager.deallocate(t)
    manager.end_iteration()


def misses(manager):
    return manager.get_stats()["cache_misses"]


@pytest.mark.parametrize("lightweight", [True, False])
def test_an_iteration_of_a_learned_pattern_has_no_misses(lightweight, pressure):
    manager = AttentionBufferManager(lightweight=lightweight, pressure=pressure)
    counts = []
    for _ in range(8):
        before = misses(manager)
        iteration(manager, 1000)
        counts.append(misses(manager) - before)
    assert counts[0] > 0
    assert counts[2] > 0, "without the pattern an iteration of this kind always misses"
    assert counts[3:] == [0] * 5
    assert manager.get_stats()["pattern"] == {"alike": 8, "broken": 0, "learned": True, "followed": True}


def test_after_an_iteration_of_another_pattern_the_new_one_is_learned(pressure):
    manager = AttentionBufferManager(pressure=pressure)
    for _ in range(5):
        iteration(manager, 1000)
    iteration(manager, 3000)
    stats = manager.get_stats()
    assert stats["pattern"] == {"alike": 1, "broken": 1, "learned": False, "followed": False}
    assert stats["per_type"]["query"]["buffers_cached"] <= 10
    assert stats["bytes_in_use"] == 0
    for _ in range(2):
        iteration(manager, 3000)
    before = misses(manager)
    iteration(manager, 3000)
    assert misses(manager) == before


def test_a_pattern_beyond_max_bytes_is_not_followed(pressure):
    manager = AttentionBufferManager(max_bytes=MIB, pressure=pressure)
    for _ in range(4):
        iteration(manager, 1000)
    stats = manager.get_stats()
    assert (stats["pattern"]["learned"], stats["pattern"]["followed"]) == (True, False)
    assert stats["bytes_cached"] <= MIB


def test_an_iteration_too_long_to_record_is_not_learned(pressure, monkeypatch):
    monkeypatch.setattr("tilegrad.memory.managed.manager._MAX_EVENTS", 16)
    manager = AttentionBufferManager(pressure=pressure)
    for _ in range(5):
        iteration(manager, 1000)
    assert manager.get_stats()["pattern"]["learned"] is False


def test_scopes_have_their_own_counts_and_share_buffers(hits):
    manager = AttentionBufferManager.shared(f"test scopes, hits by {hits}")
    with manager.scope("layer.0"):
        t = manager.allocate(Q, (1000,))
        assert manager.get_stats()["per_scope"]["layer.0"]["bytes_in_use"] == 4000
    manager.deallocate(t)
    with manager.scope("layer.1"):
        with manager.scope("layer.1.mlp"):
            inner = manager.allocate(K, (1000,))
        manager.deallocate(manager.allocate(Q, (1000,)))
    manager.deallocate(inner)
    scopes = manager.get_stats()["per_scope"]
    zero = {"allocations": 1, "cache_hits": 0, "bytes_allocated": 4000, "bytes_in_use": 0, "bytes_peak": 4000}
    assert scopes == {"layer.0": zero, "layer.1": {**zero, "cache_hits": 1}, "layer.1.mlp": zero}


def test_scopes_of_threads_do_not_mix():
    manager = AttentionBufferManager()
    inside, done = threading.Event(), threading.Event()

    def other():
        with manager.scope("other"):
            inside.set()
            done.wait(5)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    manager.allocate(Q, (4,))
    done.set()
    thread.join()
    assert manager.get_stats()["per_scope"] == {}


def test_a_lightweight_manager_keeps_no_scopes():
    manager = AttentionBufferManager(lightweight=True)
    with manager.scope("layer"):
        manager.allocate(Q, (4,))
    assert manager.get_stats()["per_scope"] == {}


@pytest.fixture
def profiled():
    manager: Any = AttentionBufferManager(enable_profiling=True)
    with manager.scope("layer.0"):
        a, b = manager.allocate(Q, (1000,)), manager.allocate(Q, (2000,))
        manager.deallocate(a)
        manager.deallocate(b)
        manager.allocate(OUT, (3000,))
    manager.kept = manager.allocate(K, (10,))
    return manager


def test_a_profile_has_the_numbers_of_each_type(profiled):
    per_type = profiled.get_stats()["per_type"]
    row = per_type["query"]
    assert (row["count"], row["bytes"], row["high_water_bytes"]) == (2, 12_000, 12_000)
    assert row["time_ms"] > 0
    assert row["mean_lifetime_ms"] > 0
    assert per_type["output"]["mean_lifetime_ms"] > 0, "a dropped buffer ends too"
    assert per_type["key"]["mean_lifetime_ms"] == 0
    assert per_type["value"]["count"] == 0


def test_times_of_a_profile_are_those_of_the_clock(monkeypatch):
    ticks = itertools.count(1_000_000, 1_000_000)
    monkeypatch.setattr(Profile, "now", lambda _profile: next(ticks))
    manager = AttentionBufferManager(enable_profiling=True)
    a = manager.allocate(Q, (1000,))  # begun at 1, finished at 2
    b = manager.allocate(Q, (500,))  # 3, 4
    manager.deallocate(a)  # 5, 6
    manager.deallocate(b)  # 7, 8
    c = manager.allocate(Q, (1000,))  # 9, 10
    del c
    row = manager.get_stats()["per_type"]["query"]  # the profile sees at 11 that c was dropped
    assert (row["count"], row["bytes"], row["high_water_bytes"]) == (3, 10_000, 6000)
    assert row["time_ms"] == 5.0
    assert row["mean_lifetime_ms"] == (5 + 5 + 2) / 3
    assert manager._profile is not None
    assert [(life.first_ns, life.last_ns) for life in manager._profile.lives()] == [
        (1e6, 6e6), (3e6, 8e6), (9e6, 11e6)
    ]  # fmt: skip


def test_a_chrome_trace_has_every_buffer(profiled, tmp_path):
    profiled.get_stats()
    profiled.export_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    begins = [e for e in trace["traceEvents"] if e["ph"] == "b"]
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "e"}
    assert [e["name"] for e in begins] == [
        "QUERY (1000,) float32",
        "QUERY (2000,) float32",
        "OUTPUT (3000,) float32",
        "KEY (10,) float32",
    ]
    assert [e["args"]["freed"] for e in begins] == [True, True, True, False]
    assert [e["args"]["scope"] for e in begins] == ["layer.0"] * 3 + [""]
    lives = [(life.first_ns / 1000, life.last_ns) for life in profiled._profile.lives()]
    assert [e["ts"] for e in begins] == [first for first, _ in lives], "microseconds"
    assert [ends[n]["ts"] for n in range(3)] == [last / 1000 for _, last in lives[:3]]
    assert ends[3]["ts"] >= begins[3]["ts"]
    levels = [e["args"]["QUERY"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(levels) == 12_000
    assert levels[-1] == 0


def test_lifetimes_beyond_the_limit_are_counted(profiled, monkeypatch, tmp_path):
    monkeypatch.setattr("tilegrad.memory.managed.profile.MAX_LIVES", 3)
    profiled.get_stats()
    profiled.deallocate(profiled.kept)
    profiled.export_trace(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["otherData"] == {"lives_dropped": 1}


def test_html_page_needs_nothing_from_the_network(profiled, tmp_path):
    profiled.export_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "QUERY (1000,) float32" in page
    assert "layer.0" in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)


def test_the_page_counts_every_buffer_that_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr("tilegrad.memory.managed.profile.MAX_LIVES", 12)
    manager = AttentionBufferManager(enable_profiling=True)
    for _ in range(6):  # six layers of one shape: all buffers of a type share a name
        made = [manager.allocate(type, (4, 64), torch.float32) for type in (BufferType.QUERY, BufferType.KEY)]
        made.append(manager.allocate(BufferType.VALUE, (4, 64), torch.float32))
        for buffer in made:
            manager.deallocate(buffer)
    manager.export_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    legend = page.split('<tbody id="legend">')[1].split("</tbody>")[0]
    assert re.findall(r'data-series="(\w+)".*?<td class="number">(\d+)</tr>', legend) == [
        ("value", "4"), ("key", "4"), ("query", "4"),
    ]  # fmt: skip
    assert "<dt>buffers</dt><dd>18</dd>" in page
    assert "<dt>not shown</dt><dd>6 buffers</dd>" in page


def test_exports_without_profiling_name_the_remedy(tmp_path):
    for export in ("export_trace", "export_html"):
        with pytest.raises(ValueError, match="enable_profiling=True"):
            getattr(AttentionBufferManager(), export)(tmp_path / "x")


def test_idle_bytes_of_slabs_count_as_reserved(pressure, monkeypatch):
    manager = AttentionBufferManager(pressure=pressure)
    monkeypatch.setattr(manager._cache.strategies, "idle_bytes", lambda: 1000)
    held = manager.allocate(Q, (MIB,), torch.uint8)
    stats = manager.get_stats()
    assert (stats["bytes_reserved"], stats["bytes_peak"]) == (MIB + 1000, MIB + 1000)
    del held


def test_the_high_water_mark_counts_requested_bytes(pressure):
    manager = AttentionBufferManager(pressure=pressure)
    manager.deallocate(manager.allocate(Q, (5 * MIB,), torch.uint8))
    held = [manager.allocate(Q, (4 * MIB,), torch.uint8), manager.allocate(K, (2 * MIB,), torch.uint8)]
    assert manager.get_stats()["bytes_live"] == manager._cache._high_water == 6 * MIB
    del held


def test_a_pattern_of_exactly_max_bytes_is_followed_without_new_buffers(pressure):
    manager = AttentionBufferManager(max_bytes=MIB, pressure=pressure)
    manager.deallocate(manager.allocate(K, (MIB // 2,), torch.uint8))
    made = []
    for _ in range(6):
        manager.deallocate(manager.allocate(Q, (MIB,), torch.uint8))
        manager.end_iteration()
        made.append(sum(manager.get_stats()["strategies"].values()))
    stats = manager.get_stats()
    assert stats["pattern"]["followed"] is True
    assert made[-1] == made[-2]


def test_a_followed_pattern_caches_only_its_own_buffers(pressure):
    manager = AttentionBufferManager(pressure=pressure)
    for t in [manager.allocate(Q, (MIB,), torch.uint8), manager.allocate(K, (MIB // 2,), torch.uint8)]:
        manager.deallocate(t)
    assert manager.get_stats()["bytes_cached"] == MIB + MIB // 2
    manager.end_iteration()
    for _ in range(4):
        manager.deallocate(manager.allocate(Q, (MIB,), torch.uint8))
        manager.end_iteration()
    assert manager.get_stats()["bytes_cached"] == MIB
