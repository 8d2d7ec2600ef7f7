"""Slabs: regions of memory that are cut into blocks, each with a storage of its own.

A block is a uint8 tensor over a part of its region, and its *storage* has only this part. So the use count of the
storage counts references to this block, not to the slab. On a CPU a region is reserved address space: a page takes
memory once it is written, and a freed block returns its whole pages to the system (MADV_DONTNEED). Otherwise (CUDA,
pinned) a region is one real allocation, which is kept until its last block is freed.

`idle_bytes` are bytes that a slab has from the system but that are in no block. The manager counts them as reserved.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import attrgetter, call, is_, itemgetter
from threading import get_ident
from typing import ClassVar, TypeVar, TypeVarTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Ts = TypeVarTuple("Ts")
R = TypeVar("R")

MIB = 1 << 20
_MAP_NORESERVE = 0x4000
_LAZY_BYTES = 256 * MIB
_LOOK_AGAIN_S = 1e-4
_OFFSET, _STORAGE, _FIRST = attrgetter("offset"), attrgetter("storage"), itemgetter(0)
_IS_NONE = partial(is_, None)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def own_storage(part: Tensor) -> Tensor:
    """A tensor over the same memory as the uint8 view `part`, with a storage of exactly these bytes. It keeps the memory
    alive."""
    return from_dlpack(part)


class Region:
    """One range of memory: pages on demand for CPU memory that is not pinned, else one allocation."""

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
        self.layout: tuple[tuple[Block, ...], tuple[tuple[int, int], ...]] = ((), ((0, nbytes),))  # blocks and gaps

    def block(self, offset: int, nbytes: int) -> Tensor:
        return own_storage(self._bytes[offset : offset + nbytes])

    def kept(self, offset: int, nbytes: int) -> int:
        """The number of bytes of [offset, offset + nbytes) that `release` cannot return: all of them, or the ends that share a
        page with other blocks."""
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

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Sorted by offset."""
        return self.layout[0]

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first byte, last byte + 1) of each range that is in no block."""
        return self.layout[1]

    def add(self, block: Block) -> None:
        blocks, gaps = self.layout
        index, gap = bisect(blocks, block.offset, key=_OFFSET), bisect(gaps, block.offset, key=_FIRST) - 1
        first, last = gaps[gap]
        remaining = [(a, b) for a, b in ((first, block.offset), (block.end, last)) if a < b]
        self.layout = (*blocks[:index], block, *blocks[index:]), (*gaps[:gap], *remaining, *gaps[gap + 1 :])

    def remove(self, block: Block) -> None:
        """Removes a block and returns its whole pages to the system."""
        blocks, gaps = self.layout
        index = blocks.index(block)
        first = blocks[index - 1].end if index else 0
        last = blocks[index + 1].offset if index + 1 < len(blocks) else self.nbytes
        self.release(first, min(last, round_up(block.end, mmap.PAGESIZE) if last == self.nbytes else last) - first)
        around = (*(gap for gap in gaps if gap[1] <= first), (first, last), *(gap for gap in gaps if gap[0] >= last))
        self.layout = (*blocks[:index], *blocks[index + 1 :]), around

    def idle_bytes(self) -> int:
        """Bytes that the region has from the system but that are in no block. A lazy region without blocks has no written
        page."""
        if not self.lazy:
            return sum(last - first for first, last in self.gaps)
        return sum(self.kept(first, last - first) for first, last in self.gaps if last < self.nbytes)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self._bytes.record_stream(stream)


@dataclass(slots=True, eq=False)
class Block:
    """Bytes that a strategy gave to the manager; `nbytes` includes rounding. A block of a slab is in use as long as its storage
    exists."""

    strategy: str
    nbytes: int
    region: Region | None = None
    offset: int = 0
    storage: weakref.ref[torch.UntypedStorage] | None = None
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.offset + self.nbytes


_WHOLE_PAGES_FROM = 1 << 16


def size_class(nbytes: int) -> int:
    """The smallest size class ≥ nbytes: multiples of 64 bytes up to 2 KiB, then 32 classes per doubling. From 64 KiB on
    a class is also a multiple of a page, because a lazy region returns only whole pages."""
    if nbytes <= 1024:
        return max(64, round_up(nbytes, 64))
    step = max(64, 1 << ((nbytes - 1).bit_length() - 6))
    return round_up(nbytes, max(step, 4096) if nbytes >= _WHOLE_PAGES_FROM else step)


def _dead(blocks: tuple[Block, ...]) -> list[Block]:
    """The blocks whose storage no longer exists. Only C code runs here: a reference that Python code held to a storage
    would be counted by another thread."""
    return list(compress(blocks, map(_IS_NONE, map(call, map(_STORAGE, blocks)))))


class Slab:
    """Blocks cut from the smallest gap that fits.

    The only state is the layout of each region, which one assignment replaces, and a block lasts as long as its
    storage. So nothing needs to be undone after an interrupt: the next `sweep` finds the blocks without references. The
    caller runs one change at a time.
    """

    strategy: ClassVar[str]
    least_bytes: ClassVar[int]  # minimum size of a region that is one real allocation

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.device, self.pinned = device, pinned
        self.lazy = device.type == "cpu" and not pinned
        self.regions: list[Region] = []
        self._dropped: deque[object] = deque()  # one entry for each storage that has died since the last sweep

    def rounded(self, nbytes: int, alignment: int) -> tuple[int, int]:
        """The size and the alignment of a block for a request."""
        raise NotImplementedError

    def take(self, nbytes: int, alignment: int) -> tuple[Tensor, Block]:
        self.sweep()
        size, alignment = self.rounded(nbytes, alignment)
        region, offset = self._fit(size, alignment) or self._grow(size, alignment)
        base = region.block(offset, size)
        storage = weakref.ref(base.untyped_storage(), self._dropped.append)
        block = Block(self.strategy, size, region, offset, storage)
        region.add(block)
        return base, block

    def sweep(self) -> None:
        """Frees the blocks that nothing references, and returns their whole pages to the system."""
        dropped = len(self._dropped)
        for region in list(self.regions):
            for block in _dead(region.blocks) if dropped else ():
                region.remove(block)
            if not region.blocks and (len(self.regions) > 1 or not region.lazy):
                self.regions.remove(region)
        for _ in range(dropped):
            self._dropped.popleft()

    def _fit(self, size: int, alignment: int) -> tuple[Region, int] | None:
        best, least = None, sys.maxsize
        for region in self.regions:
            for offset, end in region.gaps:
                start = round_up(region.address + offset, alignment) - region.address
                if start + size <= end and end - offset < least:
                    best, least = (region, start), end - offset
        return best

    def _grow(self, size: int, alignment: int) -> tuple[Region, int]:
        room = round_up(size + alignment, 2 * MIB)
        region = Region(self.device, max(room, _LAZY_BYTES if self.lazy else self.least_bytes), pinned=self.pinned)
        self.regions.append(region)
        return region, -region.address % alignment

    def idle_bytes(self) -> int:
        return sum(region.idle_bytes() for region in list(self.regions))

    def fragmentation(self) -> tuple[int, int]:
        """(bytes in holes below the highest block, bytes up to the end of this block), summed over all regions."""
        taken = [region.blocks for region in list(self.regions)]
        extent = sum(blocks[-1].end for blocks in taken if blocks)
        return extent - sum(block.nbytes for blocks in taken for block in blocks), extent


class BucketSlab(Slab):
    """Blocks in size classes, so that the gap left by one block fits the next block of its class."""

    strategy, least_bytes = "bucketed", 4 * MIB

    def rounded(self, nbytes: int, alignment: int) -> tuple[int, int]:
        size = round_up(size_class(nbytes), alignment)
        return size, max(alignment, mmap.PAGESIZE) if size >= _WHOLE_PAGES_FROM else alignment


class BestFitSlab(Slab):
    """Blocks of whole pages, or of multiples of 512 bytes if the region is not lazy."""

    strategy, least_bytes = "fragment_aware", 0

    def rounded(self, nbytes: int, alignment: int) -> tuple[int, int]:
        granule = mmap.PAGESIZE if self.lazy else 512
        return round_up(nbytes, granule), max(alignment, granule)


class Exclusive:
    """Runs one function at a time among all threads.

    It uses no lock, which an interrupt could leave locked. Instead `Context.run` enters a context, calls the function and
    leaves the context in C, and raises if the context is already entered. A forked child uses new contexts, because the thread
    that entered the old one may not exist there.
    """

    def __init__(self) -> None:
        self._contexts: dict[int, Context] = {}
        self._owner = 0

    def run(self, act: Callable[[*Ts], R], *args: *Ts) -> R:
        """Returns act(*args). Raises Nested if this thread is already inside, which happens in finalizers."""
        while True:
            context = self._contexts.setdefault(_forks, Context())
            try:
                return context.run(self._own, partial(act, *args))
            except RuntimeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # `act` raised it: an error of the context itself has no frame below this one
                if self._owner == get_ident():
                    raise Nested from None
            time.sleep(_LOOK_AGAIN_S)

    def _own(self, act: Callable[[], R]) -> R:
        self._owner = get_ident()
        try:
            return act()
        finally:
            self._owner = 0


class Nested(RuntimeError):
    """This thread is already inside the exclusive function."""


def _forked() -> None:
    global _forks
    _forks += 1


_forks = 0
os.register_at_fork(after_in_child=_forked)
