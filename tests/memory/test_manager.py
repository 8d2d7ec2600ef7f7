"""AttentionBufferManager: which buffers it hands out, which it caches, and which leave the cache."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.threads import switching_often

from tilegrad.memory import (
    AttentionBufferManager,
    BufferConfig,
    BufferStateError,
    BufferType,
    create_attention_buffer_manager,
)
from tilegrad.memory.managed import cache as cache_module
from tilegrad.memory.types import DEFAULT_CONFIGS

Q, K, V, OUT = BufferType.QUERY, BufferType.KEY, BufferType.VALUE, BufferType.OUTPUT
SHAPE = (2, 1024, 8, 64)
NO_PRESSURE: dict[str, Any] = {"pressure": lambda _device: 0.0}


@pytest.fixture(params=[True, False], ids=["lightweight", "tracked"])
def manager(request, hits):  # noqa: ARG001  of both kinds
    return AttentionBufferManager(lightweight=request.param, **NO_PRESSURE)


def rates(manager):
    stats = manager.get_stats()
    return stats["cache_hits"], stats["cache_misses"]


def test_the_package_is_imported_without_torch():
    code = "import sys, tilegrad.memory as m; m.BufferType; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_the_specification_runs():
    manager = create_attention_buffer_manager(enable_reuse=True, enable_preallocation=False, lightweight=True)
    query = manager.allocate(Q, shape=SHAPE, dtype=torch.float32, device="cpu")
    key = manager.allocate(K, shape=SHAPE)
    value = manager.allocate(V, shape=SHAPE)
    address = query.data_ptr()
    for tensor, type in ((query, Q), (key, K), (value, V)):
        manager.deallocate(tensor, type)
    again = manager.allocate(Q, shape=SHAPE)
    assert again.data_ptr() == address
    stats = manager.get_stats()
    assert (stats["cache_hits"], stats["cache_misses"], stats["cache_hit_rate"]) == (1, 3, 0.25)


def test_stats_have_every_key_of_the_specification(manager):
    named = "cache_hits cache_misses cache_hit_rate bytes_in_use bytes_cached bytes_peak evictions quarantined"
    assert {*named.split(), "strategies", "per_type"} <= manager.get_stats().keys()
    assert set(manager.get_stats()["per_type"]) == set(BufferType)
    assert manager.get_stats()["pattern"] == {"alike": 0, "broken": 0, "learned": False, "followed": False}


def test_default_configs_are_those_of_the_table():
    zeroed = {t for t, c in DEFAULT_CONFIGS.items() if c.zero_init}
    numa = {t for t, c in DEFAULT_CONFIGS.items() if c.prefer_numa}
    bucketed = {t for t, c in DEFAULT_CONFIGS.items() if c.prefer_bucketed}
    assert zeroed == {OUT, BufferType.CACHE}
    assert numa == {BufferType.SCORES, BufferType.WEIGHTS, BufferType.CACHE}
    assert bucketed == set(BufferType) - numa
    assert [t for t, c in DEFAULT_CONFIGS.items() if c.prefer_pinned] == [BufferType.COMM]
    assert DEFAULT_CONFIGS[BufferType.MASK].alignment == 64
    sizes = [DEFAULT_CONFIGS[t].typical_size_mb for t in BufferType]
    assert sizes == [1, 1, 1, 1, 4, 4, 0.5, 2, 0.1, 8]
    assert [DEFAULT_CONFIGS[t].reuse_frequency for t in BufferType] == [
        *["high"] * 4, "medium", "low", *["high"] * 3, "medium"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"typical_size_mb": 0}, "typical_size_mb: got 0; accepted: a positive"),
        ({"reuse_frequency": "often"}, "reuse_frequency: got 'often'; accepted: high, medium, low"),
        ({"lifetime": "long"}, "lifetime: got 'long'; accepted: ephemeral, iteration, persistent"),
        ({"alignment": 48}, "alignment: got 48; accepted: None or a power of two"),
        ({"alignment": True}, "alignment: got True"),
        ({"alignment": 0}, "alignment: got 0"),
        ({"zero_init": None}, "zero_init: got None; accepted: True or False"),
    ],
)
def test_a_bad_config_value_is_named_in_the_error(change, error):
    good = {"typical_size_mb": 1.0, "reuse_frequency": "high", "lifetime": "iteration"}
    with pytest.raises((ValueError, TypeError), match=error):
        BufferConfig(**{**good, **change})
    assert BufferConfig(1.0, "high", "iteration", alignment=1).alignment == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nonsense", (2,)), "type: got 'nonsense'; accepted: QUERY"),
        ((Q, (-1,)), r"shape: got \(-1,\); accepted:"),
        ((Q, (2.5,)), r"shape: got \(2.5,\); accepted:"),
        ((Q, (2,), "float32"), "dtype: got 'float32'; accepted: a torch.dtype"),
    ],
)
def test_a_bad_request_is_named_in_the_error(manager, arguments, error):
    with pytest.raises((ValueError, TypeError), match=error):
        manager.allocate(*arguments)
    assert rates(manager) == (0, 0)


def test_contradicting_options_are_refused():
    with pytest.raises(ValueError, match="enable_profiling=True with"):
        AttentionBufferManager(enable_profiling=True, lightweight=True)
    with pytest.raises(ValueError, match="debug=True with"):
        AttentionBufferManager(debug=True, lightweight=True)
    with pytest.raises(ValueError, match="max_bytes: got -1"):
        AttentionBufferManager(max_bytes=-1)
    with pytest.raises(ValueError, match="enable_reuse"):
        AttentionBufferManager(enable_reuse=False, enable_preallocation=True)
    with pytest.raises(TypeError, match="custom_configs"):
        AttentionBufferManager(custom_configs={Q: {}})  # type: ignore[dict-item]


def test_the_factory_gives_a_tracked_manager_where_profiling_is_on(tmp_path):
    create_attention_buffer_manager(enable_profiling=True).export_trace(tmp_path / "t.json")
    assert (tmp_path / "t.json").stat().st_size


def all_dtypes():
    found = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    return sorted((d for d in found if "qint" not in str(d) and "quint" not in str(d)), key=str)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_buffers_of_every_dtype_are_allocated(manager, dtype):
    for _ in range(2):
        t = manager.allocate(BufferType.MASK, (3, 5), dtype=dtype, zero_init=True)
        assert (t.dtype, t.shape, t.is_contiguous()) == (dtype, (3, 5), True)
        assert not any(t.untyped_storage()[:15].tolist())
        manager.deallocate(t)
    assert rates(manager) == (1, 1)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), [2, 3], torch.Size([4])])
def test_buffers_of_any_shape_are_allocated(manager, shape):
    for _ in range(2):
        t = manager.allocate(Q, shape)
        assert t.shape == tuple(shape)
        t.fill_(1)
        manager.deallocate(t, Q)
    assert rates(manager) == (1, 1)


def test_all_spellings_of_a_device_share_a_free_list(manager):
    for device in (None, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        manager.deallocate(manager.allocate(Q, (64,), device=device))
    assert rates(manager) == (4, 1)


def test_cuda_without_an_index_is_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert cache_module.one_device("cuda") == cache_module.one_device(torch.device("cuda")) == torch.device("cuda:3")
    assert cache_module.one_device("cuda:0") == torch.device("cuda:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")
def test_cuda_without_cuda_names_the_remedy(manager):
    with pytest.raises(ValueError, match="CUDA is not available here; use device='cpu'"):
        manager.allocate(Q, (4,), device="cuda")


def test_without_a_device_torchs_default_is_used(manager):
    with torch.device("meta"):
        assert manager.allocate(Q, (4,)).device.type == "meta"
        assert AttentionBufferManager(device="cpu").allocate(Q, (4,)).device.type == "cpu"
    assert manager.allocate(Q, (4,)).device.type == "cpu"


def test_buffers_are_zeroed_by_their_type_or_by_the_argument(manager):
    for type, asked, zero in ((OUT, None, True), (OUT, False, False), (Q, None, False), (Q, True, True)):
        manager.clear_cache()
        t = manager.allocate(type, (4096,), zero_init=asked)
        t.fill_(7)
        manager.deallocate(t)
        t = manager.allocate(type, (4096,), zero_init=asked)
        assert t.abs().max() == (0 if zero else 7)
        manager.deallocate(t)


def test_a_cached_buffer_serves_any_dtype(manager):
    t = manager.allocate(Q, (1000, 1000))
    address = t.data_ptr()
    manager.deallocate(t)
    for shape, dtype in [((500, 2000), torch.float32), ((900, 1000), torch.int32), ((500, 1000), torch.int64)]:
        t = manager.allocate(Q, shape, dtype)
        assert (t.data_ptr(), t.shape, t.dtype) == (address, shape, dtype)
        t.fill_(3)
        assert bool((t == 3).all())
        manager.deallocate(t)
    assert rates(manager) == (3, 1)


def test_a_buffer_serves_requests_of_at_least_its_size_over_1_25(manager):
    manager.deallocate(manager.allocate(Q, (1_000_000,)))
    manager.deallocate(manager.allocate(Q, (800_500,)))
    assert rates(manager) == (1, 1)
    manager.deallocate(manager.allocate(Q, (799_000,)))
    manager.deallocate(manager.allocate(Q, (1_002_000,)))
    assert rates(manager) == (1, 3)


def test_buffer_types_do_not_share_buffers(manager):
    manager.deallocate(manager.allocate(Q, (64,)))
    manager.allocate(K, (64,))
    assert rates(manager) == (0, 2)


def test_without_reuse_no_buffer_is_cached():
    manager = AttentionBufferManager(enable_reuse=False)
    for _ in range(3):
        manager.deallocate(manager.allocate(Q, SHAPE))
    stats = manager.get_stats()
    assert (stats["cache_misses"], stats["bytes_cached"], stats["evictions"]) == (3, 0, 0)
    with pytest.raises(ValueError, match="enable_reuse=True"):
        manager.preallocate_buffers(1, 8, 2, 4)


@pytest.mark.parametrize(("type", "limit"), [(Q, 10), (BufferType.SCORES, 5), (BufferType.WEIGHTS, 5)])
def test_the_number_of_cached_buffers_is_limited_per_type_and_device(manager, type, limit):
    held = [manager.allocate(type, (1000,)) for _ in range(12)]
    for t in held:
        manager.deallocate(t)
    stats = manager.get_stats()
    assert (stats["per_type"][type]["buffers_cached"], stats["evictions"]) == (limit, 12 - limit)


def test_the_least_recently_freed_buffer_is_evicted_first():
    manager = AttentionBufferManager(max_bytes=3 << 20, **NO_PRESSURE)
    types = (Q, K, V, OUT)
    held = {t: manager.allocate(t, (1 << 18,)) for t in types}
    for t in (Q, K, V):
        manager.deallocate(held[t])
    manager.deallocate(manager.allocate(Q, (1 << 18,)))
    manager.deallocate(held[OUT])
    stats = manager.get_stats()
    assert (stats["bytes_cached"], stats["evictions"]) == (3 << 20, 1)
    assert [stats["per_type"][t]["buffers_cached"] for t in types] == [1, 0, 1, 1]


def test_cached_buffers_are_evicted_before_the_high_water_mark_rises(manager):
    for n in (1 << 22, 3 << 20, 1 << 21):
        manager.deallocate(manager.allocate(Q, (n,), torch.uint8))
        manager.deallocate(manager.allocate(K, (n,), torch.uint8))
    stats = manager.get_stats()
    assert stats["bytes_peak"] == 1 << 22
    assert stats["bytes_in_use"] == 0
    assert stats["evictions"] > 0


def test_the_context_manager_frees_its_buffer_also_after_an_error(manager):
    def fails():
        with manager.buffer(Q, (64,)) as t:
            assert t.shape == (64,)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    with manager.buffer(Q, (64,)):
        pass
    assert rates(manager) == (1, 1)


def test_clear_cache_of_one_type_and_of_all(manager):
    for type in (Q, BufferType.TEMP):
        manager.deallocate(manager.allocate(type, (64,)))
    kept = manager.allocate(K, (64,))
    manager.clear_cache(BufferType.TEMP)
    per_type = manager.get_stats()["per_type"]
    assert (per_type["query"]["buffers_cached"], per_type["temp"]["buffers_cached"]) == (1, 0)
    manager.clear_cache()
    stats = manager.get_stats()
    assert (stats["bytes_cached"], stats["bytes_in_use"]) == (0, 64 * 4)
    kept.fill_(1)
    manager.deallocate(kept)


def test_preallocated_buffers_are_handed_out_next(manager):
    manager.preallocate_buffers(2, 128, 8, 64)
    manager.preallocate_buffers(2, 128, 8, 64)
    cached = manager.get_stats()["bytes_cached"]
    assert cached == 4 * 2 * 128 * 8 * 64 * 4 + 2 * 2 * 8 * 128 * 128 * 4
    rows, squares = (Q, K, V, OUT), (BufferType.SCORES, BufferType.WEIGHTS)
    held = [manager.allocate(t, (2, 128, 8, 64)) for t in rows] + [
        manager.allocate(t, (2, 8, 128, 128)) for t in squares
    ]
    assert rates(manager) == (6, 0)
    assert manager.get_stats()["bytes_in_use"] == cached
    assert float(held[3].abs().max()) == 0


def test_preallocate_takes_the_device_as_its_fifth_argument(manager):
    manager.preallocate_buffers(2, 16, 4, 8, torch.device("cpu"))
    stats = manager.get_stats()
    assert stats["preallocated_buffers"] == stats["cached_buffers"] == 6
    manager.preallocate_buffers(2, 16, 4, 8, "cpu", torch.bfloat16, types=(Q,))
    manager.allocate(Q, (2, 16, 4, 8), torch.bfloat16)
    manager.allocate(Q, (2, 16, 4, 8))
    stats = manager.get_stats()
    assert (stats["preallocated_buffers"], stats["cached_buffers"]) == (7, 5)
    assert stats["buffer_types"] is stats["per_type"]
    assert stats["buffer_types"][Q]["allocations"] == stats["cache_hits"] == 2
    with pytest.raises(TypeError, match=r"device: got torch.float32; accepted: a device; pass the dtype"):
        manager.preallocate_buffers(2, 16, 4, 8, torch.float32)


def test_the_options_of_a_manager_are_attributes_that_cannot_be_set():
    scores = BufferConfig(8.0, "high", "persistent", zero_init=False)
    manager = AttentionBufferManager(custom_configs={BufferType.SCORES: scores})
    assert (manager.enable_reuse, manager.enable_preallocation) == (True, False)
    assert manager.configs == {**DEFAULT_CONFIGS, BufferType.SCORES: scores}
    assert create_attention_buffer_manager(enable_reuse=False).enable_reuse is False
    with pytest.raises(AttributeError):
        manager.enable_reuse = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        manager.configs[Q] = scores  # type: ignore[index]


def test_one_buffer_of_each_type_can_be_preallocated(manager):
    manager.preallocate_buffers(1, 1, 1, 1, types=(Q,))
    assert manager.get_stats()["per_type"]["query"]["buffers_cached"] == 1


def test_the_buffer_preallocated_first_is_evicted_first():
    rows, square = 2 * 128 * 8 * 64 * 4, 2 * 8 * 128 * 128 * 4
    manager = AttentionBufferManager(max_bytes=4 * rows + 2 * square, **NO_PRESSURE)
    manager.preallocate_buffers(2, 128, 8, 64)
    manager.deallocate(manager.allocate(BufferType.CACHE, (rows,), torch.uint8))
    per_type = manager.get_stats()["per_type"]
    cached = [per_type[t]["buffers_cached"] for t in (Q, K, V, OUT, BufferType.SCORES, BufferType.CACHE)]
    assert cached == [0, 1, 1, 1, 1, 1]


def test_preallocation_that_cannot_fit_is_refused():
    manager = AttentionBufferManager(max_bytes=1000)
    with pytest.raises(ValueError, match="exceed max_bytes=1000"):
        manager.preallocate_buffers(2, 128, 8, 64)
    with pytest.raises(ValueError, match="seq_len: got 0; accepted: "):
        manager.preallocate_buffers(2, 0, 8, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pins COMM where CUDA exists")
def test_enable_preallocation_caches_the_typical_sizes():
    with pytest.warns(UserWarning, match="COMM"):
        manager = AttentionBufferManager(enable_preallocation=True, **NO_PRESSURE)
    assert all(cached["buffers_cached"] == 1 for cached in manager.get_stats()["per_type"].values())
    for type, config in DEFAULT_CONFIGS.items():
        manager.allocate(type, (int(config.typical_size_mb * 2**20) // 4,), torch.float32)
    assert rates(manager) == (10, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")
def test_comm_without_cuda_warns_once(manager):
    with pytest.warns(UserWarning, match="COMM buffers are not pinned") as caught:
        manager.allocate(BufferType.COMM, (64,))
    manager.allocate(BufferType.COMM, (64,))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    stats = manager.get_stats()
    assert stats["pinned"] is False
    assert stats["per_type"]["comm"]["pinned"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")
def test_the_comm_warning_turned_into_an_error_stops_only_one_allocation(manager):
    with pytest.raises(UserWarning, match="COMM"):
        manager.allocate(BufferType.COMM, (64,))
    assert manager.allocate(BufferType.COMM, (64,)).shape == (64,)


def test_there_is_one_shared_manager_per_name():
    a, b = AttentionBufferManager.shared("one"), AttentionBufferManager.shared("two")
    assert a is AttentionBufferManager.shared("one")
    assert a is not b


def test_threads_never_share_a_buffer(manager):
    errors = []

    def work(number):
        for step in range(300):
            shape = (64 + 8 * (step % 5),)
            t = manager.allocate(Q, shape, torch.int64, zero_init=False)
            t.fill_(number)
            held = manager.allocate(K, (16,), torch.int64)
            if not bool((t == number).all()):
                errors.append((number, step))
            manager.deallocate(held, K)
            manager.deallocate(t, Q)

    switching_often(work, 4)
    assert not errors
    stats = manager.get_stats()
    assert stats["cache_hits"] + stats["cache_misses"] == 4 * 300 * 2
    assert (stats["bytes_in_use"], stats["quarantined"]) == (0, 0)
    cached = sum(slot.nbytes for pool in manager._cache.pools.values() for slot in pool.free)
    assert stats["bytes_cached"] == cached


def test_many_different_shapes_do_not_grow_the_bookkeeping(manager, monkeypatch):
    monkeypatch.setattr(cache_module, "_MAX_FREE_LISTS", 32)
    for n in range(1, 200):
        manager.deallocate(manager.allocate(Q, (n * 64,)))
        assert len(manager._cache.free_lists) <= 32
    assert manager.get_stats()["bytes_in_use"] == 0


def test_a_manager_refuses_the_buffers_of_another_manager(manager):
    t = manager.allocate(Q, (8,))
    with pytest.raises(BufferStateError, match="came from elsewhere"):
        AttentionBufferManager().deallocate(t)
    manager.deallocate(t)


class Cached:
    """The attributes of a slot that the choice among cached buffers reads."""

    def __init__(self, nbytes):
        self.nbytes = self.storage_bytes = nbytes


@pytest.mark.parametrize(
    ("cached", "in_use", "slack", "taken"),
    [
        ((99,), 0, 0, None),  # the request has 100 bytes
        ((100,), 0, 0, 100),
        ((125,), 0, 0, 125),
        ((126,), 0, 0, None),
        ((120, 110, 115), 0, 0, 110),
        ((110, 120), 0, 0, 110),
        ((120,), 880, 500, 120),  # the mark of 1,000 bytes is reached, not passed
        ((120,), 930, 500, 120),  # passed by a twentieth
        ((120,), 931, 500, None),
        ((120,), 1000, 500, None),
        ((120,), 1000, 30, 120),  # slack of a twentieth
        ((120,), 1000, 31, None),
    ],
)
def test_the_smallest_buffer_that_fits_is_taken_unless_it_raises_the_high_water_mark(
    manager, cached, in_use, slack, taken
):
    cache = manager._cache
    cache.slots[0] = SimpleNamespace(nbytes=in_use, slack=slack)
    cache.most_held, cache._high_water = in_use + sum(cached), 1000
    free = {Cached(nbytes): torch.empty(0) for nbytes in cached}
    found = cache._best_fit(SimpleNamespace(nbytes=100, most=125, pool=SimpleNamespace(free=free)))
    assert (found and found.nbytes) == taken


def test_a_cached_buffer_of_another_shape_counts_as_a_hit_of_its_scope():
    manager = AttentionBufferManager(**NO_PRESSURE)
    manager.deallocate(manager.allocate(Q, (64, 10)))
    with manager.scope("another"):
        manager.deallocate(manager.allocate(Q, (10, 64)))
    assert manager.get_stats()["per_scope"]["another"]["cache_hits"] == 1
