"""TMA: copies boxes of a tensor to shared memory and back, as late as the waits allow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from torch import Tensor

from support.gluon.schedule import task
from support.gluon.shared_memory import Barrier, Shared


class Descriptor:
    """A tensor as TMA sees it: addresses are taken modulo 2⁶⁴."""

    layout = None

    def __init__(self, x: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> None:
        self.x, self.sizes, self.strides, self.dtype = x, sizes, strides, x.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(box) * x.element_size(), shape=box)

    def part(self, at: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the tensor inside the box at `at`, and its place in the box."""
        box, size = self.block_type.shape, self.x.element_size()
        assert at[-1] * size % 16 == 0, "TMA begins at multiples of 16 bytes"
        lows = [max(int(a), 0) for a in at]
        ends = [max(low, min(a + n, most)) for low, a, n, most in zip(lows, at, box, self.sizes, strict=True)]
        counts = [end - low for low, end in zip(lows, ends, strict=True)]
        inside = tuple(slice(low - a, end - a) for low, end, a in zip(lows, ends, at, strict=True))
        if 0 in counts:
            return self.x.new_empty(counts), inside
        offset = size * sum(low * int(stride) for low, stride in zip(lows, self.strides, strict=True)) % 2**64 // size
        strides = [int(stride) if n > 1 else 0 for n, stride in zip(counts, self.strides, strict=True)]
        return self.x.as_strided(counts, strides, self.x.storage_offset() + offset), inside


def tma_load(desc: Descriptor, at: Sequence[int], ready: Barrier, to: Shared) -> None:
    def fill() -> None:
        inside, part = desc.part(at)
        to.x.zero_()
        to.x[part] = inside

    to.x.fill_(math.nan)
    ready.loads.append((desc.block_type.nbytes, fill))
    ready.schedule.pause()


def _send_box(desc: Descriptor, at: Sequence[int], of: Shared, add: bool) -> None:
    assert min(at) >= 0, f"TMA writes from {at}"
    here = task()
    here.program.check_fenced(of.x)

    def read() -> Callable[[], object]:
        inside, part = desc.part(at)
        box = of.x[part].clone()
        return functools.partial(inside.add_ if add else inside.copy_, box)

    here.stores.append(read)
    here.schedule.pause()


def store_wait(left: int) -> None:
    here = task()
    here.schedule.pause()
    while len(here.stores) > left:
        here.schedule.writes.append((here, here.stores.pop(0)()))


def tma_store(desc: Descriptor, at: Sequence[int], of: Shared) -> None:
    _send_box(desc, at, of, add=False)


def tma_reduce_add(desc: Descriptor, at: Sequence[int], of: Shared) -> None:
    _send_box(desc, at, of, add=True)


tma = SimpleNamespace(store_wait=store_wait)
