"""Slabs: one region of memory cut into blocks, each with a storage of its own.

A block is a uint8 tensor over part of its region whose *storage* is only that part, so that the storage's use count
tells who still holds the block, not who holds the slab. On CPU a region is reserved address space: a page costs memory
once it is written, and a block that is given back returns its whole pages to the system (MADV_DONTNEED). Elsewhere
(CUDA, pinned) a region is one real allocation, kept until its last block comes back.

`idle_bytes` is what a slab holds from the system and has not cut into blocks: it counts as the manager's.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

MIB = 1 << 20
_MAP_NORESERVE = 0x4000
_LAZY_BYTES = 256 * MIB


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def own_storage(part: Tensor) -> Tensor:
    """The same memory as the uint8 view `part`, under a storage of exactly its bytes; keeps part's memory alive."""
    return from_dlpack(part)


class Region:
    """One stretch of memory: pages on demand for plain CPU memory, else one allocation."""

    def __init__(self, device: torch.device, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.lazy = device.type == "cpu" and not pinned
        self._pages: mmap.mmap | None = None
        if self.lazy:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._pages = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), flags=flags)
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.address = self._bytes.data_ptr()
        self.granule = mmap.PAGESIZE if self.lazy else 512

    def block(self, offset: int, nbytes: int) -> Tensor:
        return own_storage(self._bytes[offset : offset + nbytes])

    def kept(self, offset: int, nbytes: int) -> int:
        """What [offset, offset + nbytes) still costs after `release`: all of it, or the ends that share a page."""
        if not self.lazy:
            return nbytes
        first, last = round_up(offset, mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        return nbytes - max(0, last - first)

    def release(self, offset: int, nbytes: int) -> None:
        """Returns the whole pages of the range to the system; their content reads as zero afterwards."""
        if self._pages is None:
            return
        first, last = round_up(offset, mmap.PAGESIZE), (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self._bytes.record_stream(stream)


@dataclass(slots=True, eq=False)
class Block:
    """Bytes that a strategy handed to the manager; `nbytes` is all they cost, rounding included."""

    strategy: str
    nbytes: int
    region: Region | None = None
    offset: int = 0
    slab: BucketSlab | BestFitSlab | None = None


_WHOLE_PAGES_FROM = 1 << 16


def size_class(nbytes: int) -> int:
    """The smallest class ≥ nbytes, wasting under 1/16: multiples of 64 bytes up to 1 KiB, then 32 classes per doubling;
    from 64 KiB on also whole pages, which a lazy region can return."""
    if nbytes <= 1024:
        return max(64, round_up(nbytes, 64))
    step = max(64, 1 << ((nbytes - 1).bit_length() - 6))
    return round_up(nbytes, max(step, 4096) if nbytes >= _WHOLE_PAGES_FROM else step)


@dataclass(slots=True, eq=False)
class _Shelf:
    """One region of a bucket slab: blocks are cut at `top`, and a freed block waits for its class."""

    region: Region
    top: int = 0
    live: int = 0
    free: dict[tuple[int, int], list[int]] = field(default_factory=dict)


class BucketSlab:
    """Blocks in size classes; a freed block serves its own class only, so nothing is searched and nothing splits."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device, self.pinned = device, pinned
        self.idle_bytes = 0
        self._shelves: list[_Shelf] = []

    def take(self, nbytes: int, alignment: int) -> tuple[Tensor, Block]:
        size = round_up(size_class(nbytes), alignment)
        if size >= _WHOLE_PAGES_FROM:
            alignment = max(alignment, mmap.PAGESIZE)
        for shelf in self._shelves:
            waiting = shelf.free.get((size, alignment))
            if waiting:
                offset = waiting.pop()
                self.idle_bytes -= shelf.region.kept(offset, size)
                return self._cut(shelf, offset, size)
        for shelf in self._shelves:
            offset = self._aligned_top(shelf, alignment)
            if offset + size <= shelf.region.nbytes:
                break
        else:
            shelf = self._grow(size + alignment)
            offset = self._aligned_top(shelf, alignment)
        if not shelf.region.lazy:
            self.idle_bytes -= size
        shelf.top = offset + size
        return self._cut(shelf, offset, size)

    def _cut(self, shelf: _Shelf, offset: int, size: int) -> tuple[Tensor, Block]:
        shelf.live += 1
        return shelf.region.block(offset, size), Block("bucketed", size, shelf.region, offset, self)

    def _aligned_top(self, shelf: _Shelf, alignment: int) -> int:
        return round_up(shelf.region.address + shelf.top, alignment) - shelf.region.address

    def _grow(self, at_least: int) -> _Shelf:
        lazy = self.device.type == "cpu" and not self.pinned
        region = Region(self.device, max(at_least, _LAZY_BYTES if lazy else 4 * MIB), pinned=self.pinned)
        self._shelves.append(_Shelf(region))
        if not region.lazy:
            self.idle_bytes += region.nbytes
        return self._shelves[-1]

    def give_back(self, block: Block, alignment: int) -> None:
        shelf = next(s for s in self._shelves if s.region is block.region)
        shelf.live -= 1
        shelf.region.release(block.offset, block.nbytes)
        if block.nbytes >= _WHOLE_PAGES_FROM:
            alignment = max(alignment, mmap.PAGESIZE)
        shelf.free.setdefault((block.nbytes, alignment), []).append(block.offset)
        self.idle_bytes += shelf.region.kept(block.offset, block.nbytes)
        if shelf.live:
            return
        if not shelf.region.lazy:
            self.idle_bytes -= shelf.region.nbytes
            self._shelves.remove(shelf)
            return
        for (size, _), offsets in shelf.free.items():
            self.idle_bytes -= sum(shelf.region.kept(offset, size) for offset in offsets)
        shelf.region.release(0, shelf.region.nbytes)
        shelf.free.clear()
        shelf.top = 0


@dataclass(slots=True, eq=False)
class _Stretch:
    """One region of a best-fit slab; `free` is its free ranges (offset, size) by offset, never two that touch."""

    region: Region
    free: list[tuple[int, int]]


class BestFitSlab:
    """Blocks cut from the smallest free range that holds them; a freed block merges with its free neighbours."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device, self.pinned = device, pinned
        self._stretches: list[_Stretch] = []

    @property
    def idle_bytes(self) -> int:
        return sum(size for s in self._stretches if not s.region.lazy for _, size in s.free)

    def take(self, nbytes: int, alignment: int) -> tuple[Tensor, Block]:
        stretch, index, size = self._fit(nbytes, alignment) or self._grow(nbytes, alignment)
        offset, free = stretch.free[index]
        stretch.free[index : index + 1] = [(offset + size, free - size)] if free > size else []
        start = round_up(stretch.region.address + offset, alignment) - stretch.region.address
        return stretch.region.block(start, offset + size - start), Block(
            "fragment_aware", size, stretch.region, offset, self
        )

    def _fit(self, nbytes: int, alignment: int) -> tuple[_Stretch, int, int] | None:
        best: tuple[int, _Stretch, int, int] | None = None
        for stretch in self._stretches:
            for index, (offset, free) in enumerate(stretch.free):
                skip = -(stretch.region.address + offset) % alignment
                size = round_up(nbytes + skip, stretch.region.granule)
                if size <= free and (best is None or free < best[0]):
                    best = (free, stretch, index, size)
        return best and best[1:]

    def _grow(self, nbytes: int, alignment: int) -> tuple[_Stretch, int, int]:
        lazy = self.device.type == "cpu" and not self.pinned
        room = round_up(nbytes + alignment, 2 * MIB)
        region = Region(self.device, max(room, _LAZY_BYTES) if lazy else room, pinned=self.pinned)
        self._stretches.append(_Stretch(region, [(0, region.nbytes)]))
        size = round_up(nbytes + -region.address % alignment, region.granule)
        return self._stretches[-1], 0, size

    def give_back(self, block: Block, alignment: int) -> None:
        stretch = next(s for s in self._stretches if s.region is block.region)
        stretch.region.release(block.offset, block.nbytes)
        free, first, last = stretch.free, block.offset, block.offset + block.nbytes
        at = bisect_left(free, (first, 0))
        if at < len(free) and free[at][0] == last:
            last += free.pop(at)[1]
        if at and sum(free[at - 1]) == first:
            first = free.pop(at - 1)[0]
            at -= 1
        free.insert(at, (first, last - first))
        if last - first == stretch.region.nbytes and (len(self._stretches) > 1 or not stretch.region.lazy):
            self._stretches.remove(stretch)

    def fragmentation(self) -> tuple[int, int]:
        """(bytes in holes below the highest block, bytes up to that block), over all regions."""
        holes = extent = 0
        for stretch in self._stretches:
            top = stretch.region.nbytes
            if stretch.free and sum(stretch.free[-1]) == top:
                top = stretch.free[-1][0]
            extent += top
            holes += sum(size for offset, size in stretch.free if offset < top)
        return holes, extent
