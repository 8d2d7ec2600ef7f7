"""The four ways to obtain a buffer's bytes; the first that applies is used.

bucketed         < 1 MiB, reuse high           a size class of one slab
numa_aware       > 16 MiB, CPU, > 1 node       pages bound to the calling thread's node, checked with the kernel
fragment_aware   > 2 × typical_size_mb         best fit with coalescing in a slab
direct           everything else               the allocator of torch
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..types import BufferConfig
from . import numa
from .slab import MIB, BestFitSlab, Block, BucketSlab, Region, own_storage, round_up

STRATEGIES = ("bucketed", "numa_aware", "fragment_aware", "direct")


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    nbytes: int
    device: torch.device
    config: BufferConfig
    pinned: bool

    @property
    def alignment(self) -> int:
        return max(64, self.config.alignment or 1)

    @property
    def sliceable(self) -> bool:
        """Whether memory of this device can be cut into storages of their own."""
        return self.device.type in ("cpu", "cuda")


class Strategy(Protocol):
    def applies(self, request: AllocationRequest) -> bool: ...

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        """uint8 bytes, at least as many as asked, under a storage of their own; and what to give back for them."""
        ...

    def give_back(self, request: AllocationRequest, block: Block) -> None: ...

    def idle_bytes(self) -> int: ...


class Bucketed:
    def __init__(self) -> None:
        self._slabs: dict[tuple[torch.device, bool], BucketSlab] = {}

    def applies(self, request: AllocationRequest) -> bool:
        config = request.config
        small = 0 < request.nbytes < MIB
        return small and config.prefer_bucketed and config.reuse_frequency == "high" and request.sliceable

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        where = (request.device, request.pinned)
        if where not in self._slabs:
            self._slabs[where] = BucketSlab(request.device, pinned=request.pinned)
        return self._slabs[where].take(request.nbytes, request.alignment)

    def give_back(self, request: AllocationRequest, block: Block) -> None:
        self._slabs[request.device, request.pinned].give_back(block, request.alignment)

    def idle_bytes(self) -> int:
        return sum(slab.idle_bytes for slab in self._slabs.values())


class NumaAware:
    """One region per buffer, bound to the calling thread's node. Where the kernel refuses: a warning, and aside."""

    def __init__(self, nodes: Callable[[], Sequence[int]] = numa.nodes, *, min_nodes: int = 2) -> None:
        self._usable = numa.supported() and len(nodes()) >= min_nodes

    def applies(self, request: AllocationRequest) -> bool:
        return (
            self._usable
            and request.config.prefer_numa
            and request.device.type == "cpu"
            and not request.pinned
            and request.nbytes > 16 * MIB
        )

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        region = Region(request.device, request.nbytes + request.alignment, pinned=False)
        node = numa.current_node()
        numa.bind(region.address, round_up(region.nbytes, region.granule), node)
        if numa.bound_nodes(region.address) != [node]:
            raise OSError(f"mbind to node {node} reported success, the kernel names {numa.bound_nodes(region.address)}")
        start = -region.address % request.alignment
        return region.block(start, request.nbytes), Block("numa_aware", request.nbytes, region)

    def refuse(self, error: OSError) -> None:
        self._usable = False
        warnings.warn(f"NUMA binding is not possible here ({error}): using the next strategy", stacklevel=2)

    def give_back(self, request: AllocationRequest, block: Block) -> None:
        block.region = None

    def idle_bytes(self) -> int:
        return 0


class FragmentAware:
    def __init__(self) -> None:
        self._slabs: dict[tuple[torch.device, bool], BestFitSlab] = {}

    def applies(self, request: AllocationRequest) -> bool:
        return request.nbytes > 2 * request.config.typical_size_mb * MIB and request.sliceable

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        where = (request.device, request.pinned)
        if where not in self._slabs:
            self._slabs[where] = BestFitSlab(request.device, pinned=request.pinned)
        return self._slabs[where].take(request.nbytes, request.alignment)

    def give_back(self, request: AllocationRequest, block: Block) -> None:
        self._slabs[request.device, request.pinned].give_back(block, request.alignment)

    def idle_bytes(self) -> int:
        return sum(slab.idle_bytes for slab in self._slabs.values())

    def fragmentation(self) -> float:
        """The share of the slabs' extent that is holes between blocks: 0 is none."""
        parts = [slab.fragmentation() for slab in self._slabs.values()]
        extent = sum(extent for _, extent in parts)
        return sum(holes for holes, _ in parts) / extent if extent else 0.0


class Direct:
    def applies(self, request: AllocationRequest) -> bool:
        return True

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        spare = request.alignment if request.alignment > 64 else 0
        whole = torch.empty(request.nbytes + spare, dtype=torch.uint8, device=request.device, pin_memory=request.pinned)
        if not spare:
            return whole, Block("direct", request.nbytes)
        start = -whole.data_ptr() % request.alignment
        return own_storage(whole[start : start + request.nbytes]), Block("direct", request.nbytes + spare)

    def give_back(self, request: AllocationRequest, block: Block) -> None:
        """The tensor was the only owner: nothing is left to return."""

    def idle_bytes(self) -> int:
        return 0


class Strategies:
    """The four in order, with how often each was used."""

    def __init__(self, numa_aware: NumaAware | None = None) -> None:
        self._numa = numa_aware or NumaAware()
        self._fragment = FragmentAware()
        self._by_name: dict[str, Strategy] = dict(
            zip(STRATEGIES, (Bucketed(), self._numa, self._fragment, Direct()), strict=True)
        )
        self.counts = dict.fromkeys(STRATEGIES, 0)

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        for name, strategy in self._by_name.items():
            if not strategy.applies(request):
                continue
            try:
                base, block = strategy.take(request)
            except OSError as error:
                if strategy is not self._numa:
                    raise
                self._numa.refuse(error)
                continue
            if base.data_ptr() % request.alignment and request.nbytes:
                raise RuntimeError(f"{name} gave address {base.data_ptr():#x}, not aligned to {request.alignment}")
            self.counts[name] += 1
            return base, block
        raise AssertionError("direct applies to every request")

    def give_back(self, request: AllocationRequest, block: Block) -> None:
        self._by_name[block.strategy].give_back(request, block)

    def idle_bytes(self) -> int:
        return sum(strategy.idle_bytes() for strategy in self._by_name.values())

    def fragmentation(self) -> float:
        return self._fragment.fragmentation()
