"""Attention over a cache by torch ops: any device and dtype.

    for each tile of columns:
      s = scores       new_max = max(row_max, max s)     p = exp(s − new_max)       alpha = exp(row_max − new_max)
      row_sum = alpha · row_sum + Σ p                    acc = alpha · acc + p v
    o = acc / row_sum

On a CPU sequences are computed one by one, each over its own columns. On a GPU the host does not read positions, so a tile
covers as many sequences as fit in BLOCK, and the tiles cover all columns. In columns without a token, p = 0 and v counts as 0.
All numbers are in the accumulation dtype (float32; float64 for float64).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.mask import Mask
from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks

if TYPE_CHECKING:
    from . import Caches

TILE = 256  # columns
ROWS = 1024  # rows that `write` copies at once
BLOCK = 1 << 24  # most elements of a tile of k on a GPU


def _sequences(cache: TensorLike) -> int:
    """The number of sequences that are computed together."""
    b, hkv, capacity, d = cache.shape
    if cache.device.type == "cpu":
        return min(1, b)
    return min(b, max(1, BLOCK // max(1, hkv * min(TILE, capacity) * d)))


def workspace(cache: TensorLike, n_head: int, rows: int | None = None) -> Shapes:
    (_, hkv, capacity, d), acc = cache.shape, accumulation_dtype(cache.dtype)
    if rows is not None:
        n = min(rows, ROWS)
        shapes: Shapes = dict.fromkeys(("new", "old"), ((n * hkv * d,), cache.dtype))
        shapes |= dict.fromkeys(("row", "slot", "source"), ((n,), torch.int64)) | {"index": ((n * hkv,), torch.int64)}
        shapes |= {"heads": ((hkv,), torch.int64), "last": ((), torch.int64)}
        return shapes | dict.fromkeys(("inside", "below"), ((n,), torch.bool))
    b, n = _sequences(cache), min(TILE, capacity)
    elements = {"s": b * n_head * n, "distance": b * n}
    elements |= dict.fromkeys(("q", "acc"), b * n_head * d) | dict.fromkeys(("k", "v"), b * hkv * n * d)
    elements |= dict.fromkeys(("row_max", "row_sum", "new_max", "alpha", "slopes"), b * n_head)
    shapes = {name: ((size,), acc) for name, size in elements.items()}
    shapes |= {"new": ((b * hkv * d,), cache.dtype), "column": ((n,), torch.int64), "gap": ((b * n,), torch.int64)}
    return (
        shapes
        | {"place": ((b,), torch.int64)}
        | dict.fromkeys(("masked", "far"), ((b * n,), torch.bool))
        | {"inside": ((b,), torch.bool), "below": ((b,), torch.bool), "empty": ((b * n_head,), torch.bool)}
    )


def _buffer(scratch: Scratch, name: str, *shape: int) -> Tensor:
    return scratch[name][: prod(shape)].view(shape)


def _inside(x: Tensor, end: int, scratch: Scratch) -> Tensor:
    """0 ≤ x < end"""
    inside, below = _buffer(scratch, "inside", len(x)), _buffer(scratch, "below", len(x))
    torch.ge(x, 0, out=inside)
    return torch.logical_and(inside, torch.lt(x, end, out=below), out=inside)


def write(k: Tensor, v: Tensor, slots: Tensor, *, k_cache: Tensor, v_cache: Tensor, scratch: Scratch) -> None:
    """The host does not read `slots`, so every row writes something. If some slots of a block are
    inside the cache, a row with a slot outside repeats the write of the last row with a slot inside. If no slot is inside, the
    block writes the old numbers of one slot back."""
    b, hkv, capacity, d = k_cache.shape
    for i in blocks(len(k), ROWS):
        n = i.stop - i.start
        slot, row, source = (_buffer(scratch, name, n) for name in ("slot", "row", "source"))
        index, new, old = (
            _buffer(scratch, "index", n, hkv),
            *(_buffer(scratch, x, n, hkv * d) for x in ("new", "old")),
        )
        inside = _inside(slots[i], b * capacity, scratch)
        torch.arange(n, out=row)
        torch.amax(torch.mul(row, inside, out=source), 0, out=scratch["last"])
        torch.where(inside, row, scratch["last"], out=source)
        torch.index_select(slots[i], 0, source, out=slot)
        inside = _inside(slot, b * capacity, scratch)[:, None]
        slot.clamp_(0, b * capacity - 1)
        torch.floor_divide(slot, capacity, out=row)
        torch.add(row.mul_(hkv)[:, None], torch.arange(hkv, out=scratch["heads"]), out=index)
        index.mul_(capacity).add_(slot.remainder_(capacity)[:, None])
        for x, cache in ((k, k_cache), (v, v_cache)):
            flat = cache.view(-1, d)
            torch.index_select(x[i].view(n, hkv * d), 0, source, out=new)
            torch.index_select(flat, 0, index.view(-1), out=old.view(-1, d))
            torch.where(inside, new, old, out=new)
            flat.index_copy_(0, index.view(-1), new.view(-1, d))


def fwd(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Mask, *, o: Tensor, caches: Caches, scratch: Scratch
) -> None:
    k_cache, v_cache = caches
    hkv = k_cache.shape[1]
    for i in blocks(len(q), _sequences(k_cache)):
        for new, cache in ((k[i], k_cache[i]), (v[i], v_cache[i])):
            _append(new, positions[i], cache, scratch)
        group = q[i].unflatten(1, (hkv, -1))
        _attend(group, positions[i], mask, i, o[i].unflatten(1, (hkv, -1)), k_cache[i], v_cache[i], scratch)


def _append(new: Tensor, positions: Tensor, cache: Tensor, scratch: Scratch) -> None:
    """cache[b, :, positions[b]] = new[b]. If the position is outside the cache, the row nearest to it is written back."""
    b, hkv, capacity, d = cache.shape
    inside, row = _inside(positions, capacity, scratch), _buffer(scratch, "new", b, hkv, 1, d)
    place = torch.clamp(positions, 0, capacity - 1, out=_buffer(scratch, "place", b))
    index = place[:, None, None, None].expand(b, hkv, 1, d)
    torch.gather(cache, 2, index, out=row)
    torch.where(inside[:, None, None, None], new[:, :, None], row, out=row)
    cache.scatter_(2, index, row)


def _columns(positions: Tensor, mask: Mask, capacity: int) -> Iterator[slice]:
    """Tiles of the columns that a row of the block may attend to. On a CPU a block is one sequence, and its position limits
    the columns."""
    start, stop, left = 0, capacity, mask.band[0]
    if positions.device.type == "cpu":
        position = int(positions)
        stop = position + 1 if 0 <= position < capacity else 0
        start = max(0, position - left) if left is not None else 0
    for tile in blocks(max(0, stop - start), TILE):
        yield slice(start + tile.start, start + tile.stop)


def _attend(
    q: Tensor, positions: Tensor, mask: Mask, i: slice, o: Tensor, k_cache: Tensor, v_cache: Tensor, scratch: Scratch
) -> None:
    """Writes o (B, Hkv, G, D) of the B sequences i, where G query heads share a kv head."""
    b, hkv, group, d = q.shape
    capacity, left = k_cache.shape[2], mask.band[0]
    heads = b * hkv
    queries = _buffer(scratch, "q", b, hkv, group, d).copy_(q).view(heads, group, d)
    acc = _buffer(scratch, "acc", heads, group, d).zero_()
    row_max, row_sum, new_max, alpha = (
        _buffer(scratch, name, heads, group, 1) for name in ("row_max", "row_sum", "new_max", "alpha")
    )
    inside = _inside(positions, capacity, scratch)
    row_sum.fill_(0.0 if mask.sinks is None else 1.0)
    row_max.fill_(torch.finfo(row_max.dtype).min)
    if mask.sinks is not None:
        row_max.view(b, hkv, group).copy_(mask.sinks.view(hkv, group)).clamp_(min=torch.finfo(row_max.dtype).min)
    slopes = mask.slopes(range(i.start, i.stop))
    if slopes is not None:
        slopes = _buffer(scratch, "slopes", b, hkv, group, 1).copy_(slopes.unflatten(1, (hkv, group))[..., None])
    for j in _columns(positions, mask, capacity):
        n = j.stop - j.start
        column = torch.arange(j.start, j.stop, out=_buffer(scratch, "column", n))
        gap = torch.sub(positions[:, None], column, out=_buffer(scratch, "gap", b, n))
        masked, far = _buffer(scratch, "masked", b, n), _buffer(scratch, "far", b, n)
        torch.lt(gap, 0, out=masked).logical_or_(torch.logical_not(inside, out=_buffer(scratch, "below", b))[:, None])
        if left is not None:
            masked.logical_or_(torch.gt(gap, left, out=far))
        keys = _buffer(scratch, "k", b, hkv, n, d).copy_(k_cache[:, :, j]).view(heads, n, d)
        values = _buffer(scratch, "v", b, hkv, n, d).copy_(v_cache[:, :, j])
        values.masked_fill_(masked[:, None, :, None], 0.0)
        s = torch.bmm(queries, keys.mT, out=_buffer(scratch, "s", heads, group, n)).mul_(mask.scale_for(d))
        if mask.softcap:
            s.div_(mask.softcap).tanh_().mul_(mask.softcap)
        scores = s.view(b, hkv, group, n)
        if slopes is not None:
            distance = _buffer(scratch, "distance", b, 1, 1, n).copy_(gap[:, None, None])
            scores.addcmul_(slopes, distance, value=-1.0)
        scores.masked_fill_(masked[:, None, None], -torch.inf)
        torch.amax(s, -1, keepdim=True, out=new_max)
        torch.maximum(row_max, new_max, out=new_max)
        torch.sub(row_max, new_max, out=alpha).exp_()
        s.sub_(new_max).exp_()
        row_sum.mul_(alpha).add_(torch.sum(s, -1, keepdim=True, out=row_max))
        row_max.copy_(new_max)
        acc.mul_(alpha).baddbmm_(s, values.view(heads, n, d))
    row_sum.masked_fill_(torch.eq(row_sum, 0.0, out=_buffer(scratch, "empty", heads, group, 1)), 1.0)
    o.copy_(acc.div_(row_sum).view(b, hkv, group, d))
