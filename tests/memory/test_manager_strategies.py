"""The four strategies: which one is used, and that each does what it says."""

import ctypes
import functools
import gc
import mmap
import os
import platform
import random
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegrad.memory import AttentionBufferManager, BufferConfig, BufferType
from tilegrad.memory.managed import numa
from tilegrad.memory.managed.slab import MIB, BestFitSlab, BucketSlab, Region, size_class
from tilegrad.memory.managed.strategies import NumaAware, Strategies
from tilegrad.memory.types import DEFAULT_CONFIGS

CPU = torch.device("cpu")
Q, SCORES = BufferType.QUERY, BufferType.SCORES
needs_numa = pytest.mark.skipif(not numa.supported(), reason="NUMA calls are known for Linux on x86_64 and aarch64")


def resident_kib():
    line = next(
        row for row in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if row.startswith("VmRSS")
    )
    return int(line.split()[1])


@pytest.mark.parametrize(
    ("type", "nbytes", "strategy"),
    [
        (Q, MIB - 1, "bucketed"),
        (Q, MIB, "direct"),
        (Q, 2 * MIB, "direct"),
        (Q, 2 * MIB + 1, "fragment_aware"),
        (BufferType.TEMP, MIB + 1, "fragment_aware"),
        (SCORES, MIB // 2, "direct"),
        (SCORES, 8 * MIB + 1, "fragment_aware"),
        (SCORES, 16 * MIB, "fragment_aware"),
        (SCORES, 16 * MIB + 1, "numa_aware"),
        (BufferType.CACHE, 17 * MIB, "numa_aware"),
        (Q, 17 * MIB, "fragment_aware"),
        (BufferType.MASK, 0, "direct"),
    ],
)
@needs_numa
def test_the_first_strategy_that_applies_is_used_and_counted(type, nbytes, strategy):
    manager = AttentionBufferManager(strategies=Strategies(NumaAware(min_nodes=1)))
    manager.allocate(type, (nbytes,), torch.uint8, zero_init=False)
    assert {name: n for name, n in manager.get_stats()["strategies"].items() if n} == {strategy: 1}


def test_the_numa_strategy_needs_more_than_one_node():
    manager = AttentionBufferManager(strategies=Strategies(NumaAware(lambda: [0])))
    manager.allocate(SCORES, (17 * MIB,), torch.uint8)
    assert manager.get_stats()["strategies"]["fragment_aware"] == 1


@pytest.mark.parametrize("alignment", [64, 256, 4096, 1 << 16])
@pytest.mark.parametrize("nbytes", [100, 10_000, MIB + 1, 9 * MIB])
@pytest.mark.parametrize("bucketed", [True, False])
def test_addresses_have_the_alignment_of_the_config(alignment, nbytes, bucketed):
    config = BufferConfig(1.0, "high", "persistent", prefer_bucketed=bucketed, alignment=alignment)
    manager = AttentionBufferManager(custom_configs={BufferType.MASK: config})
    held = [manager.allocate(BufferType.MASK, (nbytes + 7 * n,), torch.bool) for n in range(4)]
    assert [t.data_ptr() % alignment for t in held] == [0] * 4
    for t in held:
        t.fill_(value=True)
    assert all(bool(t.all()) for t in held)


def test_an_unaligned_block_is_refused(monkeypatch):
    monkeypatch.setattr(BucketSlab, "rounded", lambda _self, nbytes, _alignment: (nbytes + 8, 1))
    manager = AttentionBufferManager()
    held = manager.allocate(Q, (16,))
    with pytest.raises(RuntimeError, match="not aligned to 64"):
        manager.allocate(Q, (15,))
    del held


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 1024, 1025, 4097, 99_999, MIB - 1])
def test_size_classes_waste_less_than_a_sixteenth(n):
    size = size_class(n)
    assert n <= size
    assert size_class(size) == size
    assert size % 64 == 0
    assert size < max(n + 64, n * (1 + 1 / 16) + 64)


@pytest.mark.parametrize(("nbytes", "name"), [(0, "direct"), (1, "bucketed"), (MIB - 1, "bucketed"), (MIB, "direct")])
def test_from_one_byte_up_to_a_mebibyte_buffers_are_bucketed(nbytes, name):
    manager = AttentionBufferManager()
    manager.allocate(Q, (nbytes,), torch.uint8)
    assert manager.get_stats()["strategies"][name] == 1


def test_small_buffers_are_parts_of_one_slab():
    manager = AttentionBufferManager()
    held = [manager.allocate(t, (1000,)) for t in (Q, BufferType.KEY, BufferType.TEMP) for _ in range(3)]
    addresses = sorted(t.data_ptr() for t in held)
    assert [b - a for a, b in pairwise(addresses)] == [size_class(4000)] * 8
    assert {t.untyped_storage().nbytes() for t in held} == {size_class(4000)}


def test_a_freed_block_is_used_again_for_its_size_class():
    slab = BucketSlab(CPU, pinned=False)
    blocks = [slab.take(1000, 64) for _ in range(3)]
    address = blocks.pop(1)[0].data_ptr()
    slab.sweep()
    assert slab.idle_bytes() == 1024
    blocks.append(slab.take(990, 64))
    assert blocks[-1][0].data_ptr() == address
    assert slab.idle_bytes() == 0


def test_a_region_without_blocks_needs_no_garbage_collector():
    slab = BestFitSlab(CPU, pinned=False)
    blocks = [slab.take(200 * MIB, 64) for _ in range(2)]
    assert len(slab.regions) == 2 and slab.idle_bytes() >= 0
    region = weakref.ref(slab.regions[1])
    gc.disable()
    try:
        blocks.pop()
        slab.sweep()
        assert region() is None and len(slab.regions) == 1
    finally:
        gc.enable()


def test_best_fit_merges_neighbouring_holes_and_reports_their_sizes():
    slab = BestFitSlab(CPU, pinned=False)
    taken: list[Any] = [slab.take(n * MIB, 64) for n in (3, 2, 4, 1, 2)]
    assert slab.fragmentation() == (0, 12 * MIB)
    start = taken[0][0].data_ptr()
    taken[1] = taken[3] = None
    slab.sweep()
    assert slab.fragmentation() == (3 * MIB, 12 * MIB)
    taken[3] = slab.take(MIB, 64)
    assert taken[3][0].data_ptr() == start + 9 * MIB
    taken[2] = None
    assert slab.take(6 * MIB, 64)[0].data_ptr() == start + 3 * MIB


def test_fragmentation_is_in_the_stats():
    manager = AttentionBufferManager()
    held = [manager.allocate(Q, (n * MIB,), torch.uint8) for n in (3, 3, 3)]
    manager.deallocate(held.pop(1))
    manager.clear_cache()
    assert manager.get_stats()["fragmentation"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_slabs_never_overlap_and_no_byte_is_lost(seed):
    dice = random.Random(seed)
    for slab in (BestFitSlab(CPU, pinned=False), BucketSlab(CPU, pinned=False)):
        held: dict[int, torch.Tensor] = {}
        for step in range(400):
            if held and dice.random() < 0.45:
                kept = held.pop(dice.choice(list(held)))
                assert bool((kept == kept[0]).all()), "pages of a block that is held were returned"
                del kept
            else:
                alignment = dice.choice([64, 64, 4096, 8192])
                n = dice.randrange(1, 200_000)
                base = held[step] = slab.take(n, alignment)[0].fill_(1 + step % 255)
                assert base.numel() >= n
                assert base.data_ptr() % alignment == 0
                del base
            spans = sorted((b.data_ptr(), b.data_ptr() + b.numel()) for b in held.values())
            assert all(last <= first for (_, last), (first, _) in pairwise(spans))
        held.clear()
        slab.sweep()
        assert slab.idle_bytes() == 0
    assert BestFitSlab(CPU, pinned=False).fragmentation() == (0, 0)


@pytest.mark.parametrize("slab", [BestFitSlab, BucketSlab])
def test_a_region_with_a_live_block_is_kept_and_its_free_space_is_used_again(slab):
    """Only the first page of each block is written; the rest is address space."""
    slab = slab(torch.device("cpu"), pinned=False)
    (first, one), (small, two), (third, three) = slab.take(200 * MIB, 64), slab.take(MIB, 64), slab.take(200 * MIB, 64)
    assert one.region is two.region is not three.region
    small[:8] = 7
    address = first.data_ptr()
    del first
    slab.sweep()
    assert small[:8].tolist() == [7] * 8
    again, four = slab.take(200 * MIB, 64)
    assert four.region is one.region and again.data_ptr() == address
    del again, small, third
    slab.sweep()
    assert slab.idle_bytes() == 0 and len(slab.regions) == 1
    slab.take(MIB, 64)
    slab.sweep()
    assert slab.idle_bytes() == 0


def test_a_region_with_a_hole_in_the_middle_is_kept():
    """The first and last block have one page each: the hole between them is as far from one end as from the other."""
    slab, page = BestFitSlab(CPU, pinned=False), mmap.PAGESIZE
    first, one = slab.take(page, 64)
    region = slab.regions[0]
    midst, two = slab.take(region.nbytes - 2 * page, 64)
    last, three = slab.take(page, 64)
    assert one.region is two.region is three.region is region and three.end == region.nbytes
    other, _ = slab.take(page, 64)
    assert len(slab.regions) == 2
    del midst
    slab.sweep()
    assert slab.regions[0] is region
    assert slab.fragmentation() == (region.nbytes - 2 * page, region.nbytes + page)
    first[:8], last[:8] = 3, 4
    assert slab.take(2 * page, 64)[1].offset == page, "the smallest hole that fits"
    del other


def test_the_only_lazy_region_is_kept_and_one_of_two_is_released():
    slab = BestFitSlab(CPU, pinned=False)
    slab.take(MIB, 64)
    slab.sweep()
    assert [list(region.gaps) for region in slab.regions] == [[(0, slab.regions[0].nbytes)]]
    taken = [slab.take(slab.regions[0].nbytes, 64)[0], slab.take(MIB, 64)[0]]
    assert len(slab.regions) == 2
    while taken:
        del taken[0]
        slab.sweep()
        assert len(slab.regions) == 1


def test_a_released_range_keeps_the_pages_that_it_covers_in_part():
    page, region = mmap.PAGESIZE, Region(CPU, 4 * MIB, pinned=False)
    if not region.lazy:
        pytest.skip("memory here is not returned by pages")
    assert region.kept(0, 3 * page) == 0
    assert region.kept(100, 3 * page) == page
    assert region.kept(100, 50) == 50
    assert region.kept(page - 1, page + 2) == 2


def test_clear_cache_returns_memory_to_the_system():
    manager = AttentionBufferManager()
    t = manager.allocate(Q, (64 * MIB,), torch.uint8)
    before = resident_kib()
    t.fill_(1)
    assert resident_kib() - before > 60 * 1024
    manager.deallocate(t)
    manager.clear_cache()
    assert resident_kib() - before < 4 * 1024
    assert manager.get_stats()["bytes_reserved"] == 0


def page_node(address):
    """The node that holds the page of `address`; raises OSError where the page was never touched."""
    page, status = ctypes.c_void_p(address), ctypes.c_int()
    number = {"x86_64": 279, "aarch64": 239}[platform.machine()]
    move_pages = functools.partial(ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_long(number), ctypes.c_int(0))
    failed = move_pages(ctypes.c_ulong(1), ctypes.byref(page), None, ctypes.byref(status), ctypes.c_int(0))
    error = ctypes.get_errno() if failed else -status.value
    if error > 0:
        raise OSError(error, f"move_pages: {os.strerror(error)}")
    return status.value


@needs_numa
def test_numa_memory_is_bound_and_the_kernel_says_so():
    manager = AttentionBufferManager(strategies=Strategies(NumaAware(min_nodes=1)))
    t = manager.allocate(SCORES, (17 * MIB,), torch.uint8)
    t.fill_(1)
    for address in (t.data_ptr(), t.data_ptr() + t.numel() - 1):
        assert numa.bound_nodes(address) == [page_node(address)]
        assert page_node(address) in numa.nodes()
    plain = torch.ones(17 * MIB, dtype=torch.uint8)
    assert numa.bound_nodes(plain.data_ptr()) == []
    manager.deallocate(t)
    again = manager.allocate(SCORES, (17 * MIB,), torch.uint8)
    assert manager.get_stats()["cache_hits"] == 1
    assert float(again[-1]) == 1


@needs_numa
@pytest.mark.parametrize("broken", ["bind", "bound_nodes"])
def test_the_next_strategy_is_used_where_the_kernel_refuses(monkeypatch, broken):
    def refuses(*_):
        raise PermissionError(1, "mbind: Operation not permitted")

    def nowhere(_address):
        return []

    monkeypatch.setattr(numa, broken, refuses if broken == "bind" else nowhere)
    manager = AttentionBufferManager(strategies=Strategies(NumaAware(min_nodes=1)))
    with pytest.warns(UserWarning, match="NUMA binding is not possible here"):
        manager.allocate(SCORES, (17 * MIB,), torch.uint8)
    manager.allocate(SCORES, (17 * MIB,), torch.uint8)
    counts = manager.get_stats()["strategies"]
    assert (counts["numa_aware"], counts["fragment_aware"]) == (0, 2)


def test_nodes_are_read_from_the_bits_of_the_kernels_mask(monkeypatch):
    def answer(name, mode, mask, *_):
        assert name == "get_mempolicy"
        mode._obj.value, mask._obj[0], mask._obj[1] = numa._MPOL_BIND, 1 << 3 | 1 << 63, 1 << 1

    monkeypatch.setattr(numa, "_syscall", answer)
    assert numa.bound_nodes(0) == [3, 63, 65]


def test_lists_of_nodes_are_parsed(tmp_path):
    assert numa.nodes(tmp_path) == [0]
    folder = tmp_path / "devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0-2,5\n", encoding="utf-8")
    assert numa.nodes(tmp_path) == [0, 1, 2, 5]
    (folder / "has_memory").write_text("1\n", encoding="utf-8")
    assert numa.nodes(tmp_path) == [1]


def test_custom_config_changes_the_strategy():
    config = BufferConfig(16.0, "high", "iteration", prefer_bucketed=False, prefer_numa=True, zero_init=False)
    manager = AttentionBufferManager(custom_configs={SCORES: config})
    manager.allocate(SCORES, (9 * MIB,), torch.uint8)
    assert manager.get_stats()["strategies"]["direct"] == 1
    assert DEFAULT_CONFIGS[SCORES].typical_size_mb == 4


gpu = pytest.mark.gpu


@gpu
def test_comm_is_pinned_where_cuda_exists():
    manager = AttentionBufferManager()
    for n in (1000, MIB, 5 * MIB):
        assert manager.allocate(BufferType.COMM, (n,), torch.uint8).is_pinned()
    assert manager.get_stats()["per_type"]["comm"]["pinned"] is True


@gpu
def test_all_spellings_of_a_cuda_device_share_a_free_list():
    manager = AttentionBufferManager()
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
        manager.deallocate(manager.allocate(Q, (2, 1024, 8, 64), device=device))
    assert manager.get_stats()["cache_hits"] == 3


@gpu
@pytest.mark.parametrize("nbytes", [1000, MIB + 4, 9 * MIB, 40 * MIB])
def test_cuda_buffers_are_reused_and_returned_to_the_allocator(nbytes):
    manager = AttentionBufferManager(device="cuda", debug=True)
    before = torch.cuda.memory_allocated()
    t = manager.allocate(Q, (nbytes // 4,), zero_init=True)
    assert float(t.sum()) == 0
    address = t.data_ptr()
    manager.deallocate(t)
    del t
    t = manager.allocate(Q, (nbytes // 4,))
    assert t.data_ptr() == address
    assert bool(t.isnan().all())
    view = t[:1]
    manager.deallocate(t)
    assert manager.get_stats()["quarantined"] == 1
    del t, view
    manager.clear_cache()
    assert torch.cuda.memory_allocated() == before


@gpu
@pytest.mark.parametrize("nbytes", [4096, 2 * MIB, 64 * MIB])
def test_another_stream_waits_before_it_uses_a_buffer_freed_on_the_first(nbytes):
    manager = AttentionBufferManager(device="cuda", lightweight=True)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        t = manager.allocate(Q, (nbytes // 4,))
        address = t.data_ptr()
        torch.cuda._sleep(200_000_000)
        t.fill_(1)
        manager.deallocate(t)
        del t
    with torch.cuda.stream(second):
        t = manager.allocate(Q, (nbytes // 4,))
        assert t.data_ptr() == address
        t.fill_(2)
    torch.cuda.synchronize()
    assert float(t.min()) == 2
