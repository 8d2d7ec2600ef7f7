"""The four ways to obtain the bytes of a buffer; the first that applies is used.

bucketed         < 1 MiB, reuse high           a size class of one slab
numa_aware       > 16 MiB, CPU, > 1 node       pages bound to the calling thread's node, verified by get_mempolicy
fragment_aware   > 2 × typical_size_mb         best fit with coalescing in a slab
direct           everything else               torch's allocator
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..types import BufferConfig
from . import numa
from .slab import MIB, BestFitSlab, Block, BucketSlab, Exclusive, Nested, Region, Slab, own_storage, round_up

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
        """Whether memory of this device can be cut into blocks with storages of their own."""
        return self.device.type in ("cpu", "cuda")


class Strategy(Protocol):
    def applies(self, request: AllocationRequest) -> bool: ...

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        """At least `nbytes` uint8 bytes with a storage of their own. They are freed when that storage dies."""
        ...


class _Slabs:
    """A strategy with one slab for each device and kind of memory; one thread at a time changes them."""

    slab: ClassVar[type[Slab]]

    def __init__(self) -> None:
        self._slabs: dict[tuple[torch.device, bool], Slab] = {}
        self._exclusive = Exclusive()

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        where = (request.device, request.pinned)
        slab = self._slabs.get(where) or self._slabs.setdefault(where, self.slab(where[0], pinned=where[1]))
        return self._exclusive.run(slab.take, request.nbytes, request.alignment)

    def sweep(self) -> None:
        for slab in list(self._slabs.values()):
            with suppress(Nested):  # called by a finalizer during a change: the next sweep does this
                self._exclusive.run(slab.sweep)

    def idle_bytes(self) -> int:
        return sum(slab.idle_bytes() for slab in list(self._slabs.values()))


class Bucketed(_Slabs):
    slab = BucketSlab

    def applies(self, request: AllocationRequest) -> bool:
        config = request.config
        small = 0 < request.nbytes < MIB
        return small and config.prefer_bucketed and config.reuse_frequency == "high" and request.sliceable


class NumaAware:
    """One region per buffer, bound to the node of the calling thread. If Linux refuses, this strategy warns and is not
    used again."""

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
        numa.bind(region.address, round_up(region.nbytes, mmap.PAGESIZE), node)
        if numa.bound_nodes(region.address) != [node]:
            raise OSError(f"mbind to node {node} succeeded, but get_mempolicy says {numa.bound_nodes(region.address)}")
        start = -region.address % request.alignment
        return region.block(start, request.nbytes), Block("numa_aware", request.nbytes)

    def refuse(self, error: OSError) -> None:
        self._usable = False
        warnings.warn(f"NUMA binding is not possible here ({error}): using the next strategy", stacklevel=2)


class FragmentAware(_Slabs):
    slab = BestFitSlab

    def applies(self, request: AllocationRequest) -> bool:
        return request.nbytes > 2 * request.config.typical_size_mb * MIB and request.sliceable

    def fragmentation(self) -> float:
        """The share of holes between blocks in the slabs, from 0 (no holes) to 1."""
        parts = [slab.fragmentation() for slab in self._slabs.values()]
        extent = sum(extent for _, extent in parts)
        return sum(holes for holes, _ in parts) / extent if extent else 0.0


class Direct:
    def applies(self, request: AllocationRequest) -> bool:
        return True

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        spare = request.alignment if request.alignment > 64 else 0
        base = torch.empty(request.nbytes + spare, dtype=torch.uint8, device=request.device, pin_memory=request.pinned)
        if not spare:
            return base, Block("direct", request.nbytes)
        start = -base.data_ptr() % request.alignment
        return own_storage(base[start : start + request.nbytes]), Block("direct", request.nbytes + spare)


class Strategies:
    """The four strategies in order, and how often each was used."""

    def __init__(self, numa_aware: NumaAware | None = None) -> None:
        self._numa = numa_aware or NumaAware()
        self._bucketed, self._fragment = Bucketed(), FragmentAware()
        self._by_name: dict[str, Strategy] = dict(
            zip(STRATEGIES, (self._bucketed, self._numa, self._fragment, Direct()), strict=True)
        )
        self.counts = dict.fromkeys(STRATEGIES, 0)

    def take(self, request: AllocationRequest) -> tuple[Tensor, Block]:
        for name, strategy in self._by_name.items():
            if not strategy.applies(request):
                continue
            try:
                base, block = strategy.take(request)
            except Nested:  # a finalizer allocates while this thread changes the slab
                continue
            except OSError as error:
                if strategy is not self._numa:
                    raise
                self._numa.refuse(error)
                continue
            if base.data_ptr() % request.alignment and request.nbytes:
                raise RuntimeError(f"{name} returned address {base.data_ptr():#x}, not aligned to {request.alignment}")
            self.counts[name] += 1
            return base, block
        raise AssertionError("direct applies to every request")

    def sweep(self) -> None:
        """Frees the blocks of slabs that nothing references."""
        self._bucketed.sweep()
        self._fragment.sweep()

    def idle_bytes(self) -> int:
        return self._bucketed.idle_bytes() + self._fragment.idle_bytes()

    def fragmentation(self) -> float:
        return self._fragment.fragmentation()
