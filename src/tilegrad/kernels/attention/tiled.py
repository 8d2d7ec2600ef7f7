"""Tiled attention in plain torch ops: O(T) memory, every feature, every device, no allocation.

A *slab* is a number of sequences × kv heads that are computed at once. The rows of the G = Hq / Hkv query heads of a kv head
are stacked: a tile of scores is (slab, G·M, N), and one GEMM sums the gradient of a kv head over its query heads. Tiles outside
the band, and tiles that intervals mask out in the whole slab, are not computed. Only tiles that an edge crosses are masked.

    forward, for each tile of rows:                      backward, for each tile of columns:
      row_max = sink, row_sum = 1 (or lowest, 0)           for each tile of rows that attends:
      for each tile of columns in band:                      p  = exp(s − lse)
        s = scores                                           dp = do vᵀ ∘ keep / (1 − dropout_p)
        new_max = max(row_max, max s)                        ds = p ∘ (dp − delta)
        p = exp(s − new_max)                                 dv += (p ∘ keep)ᵀ do / (1 − dropout_p)
        alpha = exp(row_max − new_max)                       dbias += ds
        row_sum = alpha · row_sum + Σ p                      ds ∘= 1 − tanh²
        acc = alpha · acc + (p ∘ keep) v                     dq += scale · ds k
      o = acc / row_sum / (1 − dropout_p)                    dk += scale · dsᵀ q
      lse = row_max + log row_sum                        delta = rowsum(do ∘ o) − dlse, before the loop

row_max starts at the dtype's lowest number, not at −inf. So without a sink, a row that attends to nothing ends with row_sum =
0, o = 0, lse = −inf and no NaN. Tiles are copied into the scratch in the accumulation dtype (float32; float64 for float64), so
any strides are accepted. Scratch is O(slab · tile + T · D), and T×T only for the gradient of a T×T bias in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..philox import WORK_BUFFERS, Key, drop_mask, round_keys
from ..scratch import Scratch, Shapes, Views, accumulation_dtype
from .mask import Mask, edges_of_tile, four_dims, packed, sequences
from .problem import Backward, Forward, Sizes, sizes_of

TILE = 256  # rows, and columns, of a tile
SLAB = 1 << 21  # scores computed at once

Edges = list[list[int]]  # the edges of the intervals of a tile of columns: `edges_of_tile` of mask.py


@dataclass(frozen=True, slots=True)
class Cut:
    """How a call is divided: tiles of at most m × n, slabs of `batches` sequences × `heads` kv heads, `group` = Hq / Hkv."""

    m: int
    n: int
    batches: int
    heads: int
    group: int

    @classmethod
    def of(cls, sizes: Sizes) -> Cut:
        """The largest slab with at most SLAB scores: whole sequences, or heads of one sequence. Lengths count as the next power
        of two, so that `workspace` can bound the slabs of all shorter calls. Packed sequences are computed one by one."""
        m, n = (min(TILE, 1 << max(0, t - 1).bit_length()) for t in (sizes.tq, sizes.tk))
        heads = min(sizes.hkv, max(1, SLAB // (sizes.group * m * n)))
        all_heads = heads == sizes.hkv and not sizes.varlen
        batches = min(sizes.batch, SLAB // (sizes.hq * m * n)) if all_heads else 1
        return cls(max(1, min(m, sizes.tq)), max(1, min(n, sizes.tk)), max(1, batches), heads, sizes.group)

    def slabs(self, sequences: int, kv_heads: int) -> Iterator[tuple[range, range]]:
        for b in range(0, sequences, self.batches):
            for h in range(0, kv_heads, self.heads):
                yield range(b, min(b + self.batches, sequences)), range(h, min(h + self.heads, kv_heads))


def _tiles(span: range) -> Iterator[range]:
    for start in range(span.start, span.stop, TILE):
        yield range(start, min(start + TILE, span.stop))


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    """The scratch grows with every size, so it suffices for a call on fewer or shorter sequences."""
    sizes = sizes_of(q, k, v, mask)
    needs: Shapes = {}
    longest = max(sizes.tq, sizes.tk, 1)
    for t in {min(1 << power, longest) for power in range(TILE.bit_length())} | {longest}:
        shorter = sizes._replace(tq=min(t, sizes.tq), tk=min(t, sizes.tk))
        for name, (shape, dtype) in _scratch_of(shorter, q.dtype, mask, backward=backward).items():
            needs[name] = max(shape, needs.get(name, (shape, dtype))[0]), dtype
    return needs


def _scratch_of(sizes: Sizes, dtype: torch.dtype, mask: Mask, *, backward: bool) -> Shapes:
    cut, acc = Cut.of(sizes), accumulation_dtype(dtype)
    d, dv = sizes.d, sizes.dv
    cols = cut.batches * cut.heads * cut.n
    rows = cut.batches * cut.heads * cut.group * cut.m
    all_rows = cut.batches * cut.heads * cut.group * sizes.tq
    scores = rows * cut.n
    lengths = {"q": rows * d, "k_t": cols * d, "s": scores}
    if backward:
        lengths |= {"k": cols * d, "v_t": cols * dv}
        lengths |= {"do": rows * dv, "o": rows * dv, "dp": scores, "dq": rows * d, "dk": cols * d, "dv": cols * dv}
        lengths |= {"delta": all_rows, "lse": all_rows}
        if mask.sinks is not None:
            lengths |= {"dsinks": sizes.hq, "dsinks_part": cut.heads * cut.group}
        if dtype != acc:
            lengths["dq_sum"] = all_rows * d
        if mask.softcap:
            lengths["tanh"] = scores
        if mask.float_bias is not None and mask.float_bias.dtype != acc:
            lengths["dbias"] = prod(mask.float_bias.shape)
    else:
        lengths |= {"v": cols * dv, "acc": rows * dv, "row_max": rows, "row_sum": rows, "new_max": rows, "alpha": rows}
    if mask.float_bias is not None:
        lengths["bias"] = scores
    if mask.alibi_slopes is not None:
        lengths |= {"slopes": cut.batches * cut.heads * cut.group, "distance": cut.m * cut.n}
    shapes: Shapes = {name: ((length,), acc) for name, length in lengths.items()}
    shapes["index"] = ((max(sizes.tq, sizes.tk, sizes.hq, sizes.batch),), torch.int64)
    shapes["gap"] = ((cut.m * cut.n,), torch.int64)
    shapes["masked_out"] = ((2 * cut.m * cut.n,), torch.bool)
    if backward:
        shapes["empty"] = ((all_rows,), torch.bool)
    if mask.bool_bias is not None:
        shapes["bias_masked"] = ((scores,), torch.bool)
    if mask.intervals is not None:
        pairs, pairs_of_tile = mask.intervals.shape[-1] // 2, cut.batches * cut.heads * cut.m * cut.n
        shapes["columns"] = ((cols * pairs * 2,), torch.int64)
        shapes["empty_intervals"] = ((cols * pairs,), torch.bool)
        shapes["edges"] = ((-(-sizes.tk // TILE) * pairs * 4,), torch.int64)
        shapes["interval_masked"] = ((2 * pairs_of_tile,), torch.bool)
    if mask.dropout_p:
        shapes["philox"] = ((WORK_BUFFERS * scores,), torch.int64)
        shapes["dropped"] = ((scores,), torch.bool)
    return shapes


def prepare_fwd(call: Forward, views: Views) -> Callable[[Forward], None]:
    cut = Cut.of(sizes_of(call.q, call.k, call.v, call.mask))
    return lambda call: _run_forward(call, cut, views(*call.memory))


def prepare_bwd(call: Backward, views: Views) -> Callable[[Backward], None]:
    cut = Cut.of(sizes_of(call.q, call.k, call.v, call.mask))
    return lambda call: _run_backward(call, cut, views(*call.memory))


def _run_forward(call: Forward, cut: Cut, scratch: Scratch) -> None:
    q, k, v, mask, o, lse, *_ = call
    keys = _round_keys(mask, scratch)
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        _fwd(call, 0, cut, keys, scratch)
        return
    for b, i, j in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
        ob = None if o is None else packed(o, i)
        lseb = None if lse is None else lse[None, :, i]
        sequence = call._replace(q=packed(q, i), k=packed(k, j), v=packed(v, j), o=ob, lse=lseb)
        _fwd(sequence, b, cut, keys, scratch)


def _run_backward(call: Backward, cut: Cut, scratch: Scratch) -> None:
    q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, *_ = call
    keys = _round_keys(mask, scratch)
    dbias_sum = None
    if dbias is not None:
        dbias_sum = (scratch["dbias"].view(dbias.shape) if "dbias" in scratch else dbias).zero_()
    dsinks_sum = None if dsinks is None else scratch["dsinks"].zero_()
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        dbias4 = None if dbias_sum is None else four_dims(dbias_sum)
        _bwd(call._replace(dbias=dbias4, dsinks=dsinks_sum), 0, cut, keys, scratch)
    else:
        for b, i, j in sequences(mask.cu_seqlens_q, mask.cu_seqlens_k):
            dlseb = None if dlse is None else dlse[None, :, i]
            dqb, dkb, dvb = (None if x is None else packed(x, at) for x, at in ((dq, i), (dk, j), (dv, j)))
            reads = packed(q, i), packed(k, j), packed(v, j), packed(o, i), lse[None, :, i], packed(do, i), dlseb
            sequence = Backward(*reads, mask, dqb, dkb, dvb, None, dsinks_sum, call.memory, call.deterministic)
            _bwd(sequence, b, cut, keys, scratch)
    if dbias is not None and dbias_sum is not None and dbias_sum is not dbias:
        dbias.copy_(dbias_sum)
    if dsinks is not None and dsinks_sum is not None:
        dsinks.add_(dsinks_sum)


def _round_keys(mask: Mask, scratch: Scratch) -> list[tuple[Key, Key]]:
    torch.arange(scratch["index"].shape[0], out=scratch["index"])
    return round_keys(mask.seed) if mask.dropout_p and mask.seed is not None else []


@dataclass(frozen=True, slots=True)
class Slab:
    """A slab of a dense problem, and its tiles in the scratch. `first` is the index of the problem's first sequence."""

    batch: range
    heads: range  # kv heads
    group: int
    tq: int
    tk: int
    mask: Mask
    first: int
    keys: list[tuple[Key, Key]]
    scratch: Scratch
    edges: list[Edges] = field(default_factory=list)  # the edges of every TILE columns, if the mask has intervals

    def __post_init__(self) -> None:
        if self.mask.intervals is not None:
            self.edges.extend(self.edges_of_tiles(self.mask.intervals))

    @property
    def size(self) -> int:
        return len(self.batch) * len(self.heads)

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def buffer(self, name: str, *shape: int) -> Tensor:
        return self.scratch[name][: prod(shape)].view(shape)

    def rows(self, x: Tensor, i: range) -> Tensor:
        """A tile of a tensor with query heads: (batches, query heads, M, …)."""
        return x[self.batch.start : self.batch.stop, self.query_heads, i.start : i.stop]

    def cols(self, x: Tensor, j: range) -> Tensor:
        """A tile of a tensor with kv heads: (batches, kv heads, N, …)."""
        return x[self.batch.start : self.batch.stop, self.heads.start : self.heads.stop, j.start : j.stop]

    def load(self, name: str, tile: Tensor) -> Tensor:
        """Copies a tile into the scratch, (slab, G·M or N, D)."""
        copy = self.buffer(name, *tile.shape).copy_(tile)
        return copy.view(self.size, -1, tile.shape[-1])

    def load_transposed(self, name: str, tile: Tensor) -> Tensor:
        """Copies a tile of columns into the scratch, (slab, D, N). Every BLAS is faster, and some much faster, if
        neither factor is transposed."""
        b, h, n, d = tile.shape
        return self.buffer(name, b, h, d, n).copy_(tile.mT).view(self.size, d, n)

    def by_head(self, tile: Tensor, i: range) -> Tensor:
        """(slab, G·M, …) viewed as (batches, query heads, M, …)."""
        heads = len(self.heads) * self.group
        return tile.view(len(self.batch), heads, len(i), *tile.shape[2:])

    def scores(self, q: Tensor, k_t: Tensor, i: range, j: range, *, tanh: Tensor | None) -> Tensor:
        """The scores s of mask.py, (slab, G·M, N). tanh(x / softcap) is written to `tanh`, if given, for the backward."""
        mask = self.mask
        s = self.buffer("s", self.size, q.shape[1], len(j))
        alpha = mask.scale_for(q.shape[2]) / (mask.softcap or 1.0)
        torch.baddbmm(s, q, k_t, beta=0.0, alpha=alpha, out=s)
        if mask.softcap:
            s.tanh_()
            if tanh is not None:
                tanh.copy_(s)
            s.mul_(mask.softcap)
        by_head = self.by_head(s, i)
        if mask.float_bias is not None:
            bias = self.bias_tile(four_dims(mask.float_bias), i, j)
            by_head.add_(self.buffer("bias", *bias.shape).copy_(bias))
        unmasked = mask.unmasked(i, j, self.tq, self.tk)
        slopes = mask.slopes(range(self.first + self.batch.start, self.first + self.batch.stop))
        if slopes is not None or not unmasked:
            index, gap = self.scratch["index"], self.buffer("gap", len(i), len(j))
            torch.sub(index[i.start : i.stop, None], index[j.start : j.stop], out=gap).add_(self.tk - self.tq)
            if slopes is not None:
                slopes = slopes[:, self.query_heads, None, None]
                slopes = self.buffer("slopes", *slopes.shape).copy_(slopes)
                by_head.addcmul_(self.buffer("distance", *gap.shape).copy_(gap).abs_(), slopes, value=-1.0)
            if not unmasked:
                by_head.masked_fill_(self.masked_out(gap), -torch.inf)
        if mask.intervals is not None:
            self.mask_intervals(by_head, mask.intervals, i, j)
        if mask.bool_bias is not None:
            attends = self.bias_tile(four_dims(mask.bool_bias), i, j)
            masked = self.buffer("bias_masked", *attends.shape)
            by_head.masked_fill_(torch.logical_not(attends, out=masked), -torch.inf)
        return s

    def masked_out(self, gap: Tensor) -> Tensor:
        """(M, N), True where the band masks a pair out."""
        left, right = self.mask.band
        far, near = self.buffer("masked_out", 2, *gap.shape).unbind()
        far.zero_() if left is None else torch.gt(gap, left, out=far)
        near.zero_() if right is None else torch.lt(gap, -right, out=near)
        return far.logical_or_(near)

    def columns(self, intervals: Tensor, j: range) -> Tensor:
        """A copy of the intervals of a tile of columns, (batches or 1, kv heads or 1, N, n, 2)."""
        if intervals.shape[0] > 1:
            intervals = intervals[self.batch.start : self.batch.stop]
        if intervals.shape[1] > 1:
            intervals = intervals[:, self.heads.start : self.heads.stop]
        tile = intervals[:, :, j.start : j.stop].unflatten(-1, (-1, 2))
        return self.buffer("columns", *tile.shape).copy_(tile)

    def edges_of_tiles(self, intervals: Tensor) -> list[Edges]:
        """The edges of every TILE columns, over all heads of the slab."""
        tiles = list(_tiles(range(self.tk)))
        edges = self.buffer("edges", len(tiles), intervals.shape[-1] // 2, 4)
        for t, j in enumerate(tiles):
            columns = self.columns(intervals, j).flatten(0, 2)[None, None]
            empty = self.buffer("empty_intervals", *columns.shape[:-1])
            edges_of_tile(columns, empty=empty, edges=edges[t][None, None])
        return edges.tolist()

    def computed(self, i: range, j: range) -> bool:
        """False if intervals mask out the whole tile, in all heads of the slab."""
        tiles = self.edges[j.start // TILE : -(-j.stop // TILE)]
        masked_out = (any(last <= i.start and i.stop <= least for _, last, least, _ in edges) for edges in tiles)
        return not tiles or not all(masked_out)

    def mask_intervals(self, by_head: Tensor, intervals: Tensor, i: range, j: range) -> None:
        """by_head = −∞ where an interval masks a pair out, if any edge crosses the tile."""
        tiles = self.edges[j.start // TILE : -(-j.stop // TILE)]
        if all(i.stop <= first or most <= i.start for edges in tiles for first, _, _, most in edges):
            return
        columns = self.columns(intervals, j)
        rows = self.scratch["index"][i.start : i.stop, None]
        b, h, n = columns.shape[:3]
        inside, before_end = self.buffer("interval_masked", 2, b, h, len(i), n).unbind()
        s = by_head.unflatten(1, (-1, self.group))
        for interval in range(columns.shape[3]):
            start, end = columns[:, :, None, :, interval].unbind(-1)
            torch.ge(rows, start, out=inside).logical_and_(torch.lt(rows, end, out=before_end))
            s.masked_fill_(inside[:, :, None], -torch.inf)

    def dropped(self, i: range, j: range) -> Tensor:
        """(slab, G·M, N), True where dropout drops a pair."""
        h = self.query_heads
        shape = (len(self.batch), h.stop - h.start, len(i), len(j))
        index, dropped = self.scratch["index"], self.buffer("dropped", *shape)
        first = self.first + self.batch.start
        drop_mask(
            self.keys,
            self.mask.dropout_p,
            index[first : first + len(self.batch)],
            index[h],
            index[i.start : i.stop],
            index[j.start : j.stop],
            dropped=dropped,
            work=self.buffer("philox", WORK_BUFFERS, *shape),
        )
        return dropped.view(self.size, -1, len(j))

    def bias_tile(self, bias: Tensor, i: range, j: range) -> Tensor:
        """The part of a (B, Hq, Tq, Tk) bias for this tile; broadcast dimensions stay 1."""
        h = self.query_heads
        for dim, (start, stop) in enumerate(
            ((self.batch.start, self.batch.stop), (h.start, h.stop), (i.start, i.stop), (j.start, j.stop))
        ):
            if bias.shape[dim] != 1:
                bias = bias.narrow(dim, start, stop - start)
        return bias

    def add_to_bias(self, ds: Tensor, dbias: Tensor, i: range, j: range) -> None:
        """dbias += ds, summed over the dimensions that the bias is broadcast over."""
        part, by_head = self.bias_tile(dbias, i, j), self.by_head(ds, i)
        dims = [dim for dim in range(4) if part.shape[dim] != by_head.shape[dim]]
        part.add_(torch.sum(by_head, dims, keepdim=True, out=self.buffer("bias", *part.shape)) if dims else by_head)


def _fwd(call: Forward, first: int, cut: Cut, keys: list[tuple[Key, Key]], scratch: Scratch) -> None:
    q, k, v, mask, o, lse, *_ = call
    tq, tk = q.shape[2], k.shape[2]
    for batch, heads in cut.slabs(q.shape[0], k.shape[1]):
        slab = Slab(batch, heads, cut.group, tq, tk, mask, first, keys, scratch)
        for i in _tiles(range(tq)):
            _fwd_rows(slab, q, k, v, i, o=o, lse=lse)


def _fwd_rows(slab: Slab, q: Tensor, k: Tensor, v: Tensor, i: range, *, o: Tensor | None, lse: Tensor | None) -> None:
    mask, dv = slab.mask, v.shape[-1]
    qi = slab.load("q", slab.rows(q, i))
    acc = slab.buffer("acc", slab.size, qi.shape[1], dv).zero_()
    row_max, row_sum, new_max, alpha = (
        slab.buffer(name, slab.size, qi.shape[1]) for name in ("row_max", "row_sum", "new_max", "alpha")
    )
    lowest = torch.finfo(acc.dtype).min
    if mask.sinks is None:
        row_max.fill_(lowest)
        row_sum.zero_()
    else:
        slab.by_head(row_sum, i).copy_(mask.sinks[slab.query_heads, None])
        torch.clamp(row_sum, min=lowest, out=row_max)
        row_sum.sub_(row_max).exp_()

    for j in _tiles(mask.columns_of(i, slab.tq, slab.tk)):
        if not slab.computed(i, j):
            continue
        k_t, vj = slab.load_transposed("k_t", slab.cols(k, j)), slab.load("v", slab.cols(v, j))
        s = slab.scores(qi, k_t, i, j, tanh=None)
        torch.maximum(torch.amax(s, -1, out=new_max), row_max, out=new_max)
        p = s.sub_(new_max[..., None]).exp_()
        torch.sub(row_max, new_max, out=alpha).exp_()
        row_max.copy_(new_max)
        row_sum.mul_(alpha).add_(torch.sum(p, -1, out=new_max))
        if mask.dropout_p:
            p.masked_fill_(slab.dropped(i, j), 0.0)
        acc.mul_(alpha[..., None]).baddbmm_(p, vj)

    if lse is not None:
        slab.rows(lse, i).copy_(slab.by_head(torch.log(row_sum, out=alpha).add_(row_max), i))
    if o is not None:
        row_sum.clamp_(min=torch.finfo(acc.dtype).tiny).mul_(1.0 - mask.dropout_p)
        slab.rows(o, i).copy_(slab.by_head(acc.div_(row_sum[..., None]), i))


def _bwd(call: Backward, first: int, cut: Cut, keys: list[tuple[Key, Key]], scratch: Scratch) -> None:
    q, k, _, o, lse, do, dlse, mask, dq, _, _, _, dsinks, *_ = call
    tq, tk, d = q.shape[2], k.shape[2], q.shape[3]
    for batch, heads in cut.slabs(q.shape[0], k.shape[1]):
        slab = Slab(batch, heads, cut.group, tq, tk, mask, first, keys, scratch)
        rows = (len(batch), len(heads) * cut.group, tq)
        lse_rows, delta = slab.buffer("lse", *rows), slab.buffer("delta", *rows)
        _bwd_delta(slab, o, lse, do, dlse, lse_rows=lse_rows, delta=delta)
        dq_sum = None
        if dq is not None:
            dq_sum = (slab.buffer("dq_sum", *rows, d) if "dq_sum" in scratch else slab.rows(dq, range(tq))).zero_()
        for j in _tiles(range(tk)):
            _bwd_cols(slab, call, lse_rows, delta, j, dq_sum=dq_sum)
        if dq is not None and dq_sum is not None and "dq_sum" in scratch:
            slab.rows(dq, range(tq)).copy_(dq_sum)
        if dsinks is not None and mask.sinks is not None:
            p_sink = lse_rows.neg_().add_(mask.sinks[slab.query_heads, None]).exp_()
            part = slab.buffer("dsinks_part", rows[1])
            dsinks[slab.query_heads].sub_(torch.sum(p_sink.mul_(delta), (0, 2), out=part))


def _bwd_delta(
    slab: Slab, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, *, lse_rows: Tensor, delta: Tensor
) -> None:
    """delta = rowsum(do ∘ o) − dlse, and 0 in rows with lse = −inf. lse_rows is lse, but the lowest finite
    number replaces −inf."""
    all_rows = range(slab.tq)
    lse_rows.copy_(slab.rows(lse, all_rows))
    for i in _tiles(all_rows):
        o_do = slab.load("do", slab.rows(do, i)).mul_(slab.load("o", slab.rows(o, i)))
        delta[:, :, i.start : i.stop].copy_(slab.by_head(torch.sum(o_do, -1, out=slab.buffer("q", *o_do.shape[:2])), i))
    if dlse is not None:
        delta.sub_(slab.rows(dlse, all_rows))
        delta.masked_fill_(torch.eq(lse_rows, -torch.inf, out=slab.buffer("empty", *lse_rows.shape)), 0.0)
    lse_rows.clamp_(min=torch.finfo(lse_rows.dtype).min)


def _bwd_cols(slab: Slab, call: Backward, lse_rows: Tensor, delta: Tensor, j: range, *, dq_sum: Tensor | None) -> None:
    q, k, v, do, dk, dv, dbias = call.q, call.k, call.v, call.do, call.dk, call.dv, call.dbias
    mask, scale = slab.mask, slab.mask.scale_for(q.shape[-1])
    kept = 1.0 / (1.0 - mask.dropout_p)
    kj = slab.load("k", slab.cols(k, j))
    k_t, v_t = slab.load_transposed("k_t", slab.cols(k, j)), slab.load_transposed("v_t", slab.cols(v, j))
    dkj, dvj = slab.buffer("dk", *kj.shape).zero_(), slab.buffer("dv", *v_t.mT.shape).zero_()
    for i in _tiles(mask.rows_of(j, slab.tq, slab.tk)):
        if not slab.computed(i, j):
            continue
        qi, doi = slab.load("q", slab.rows(q, i)), slab.load("do", slab.rows(do, i))
        shape = (slab.size, qi.shape[1], len(j))
        tanh = slab.buffer("tanh", *shape) if mask.softcap else None
        s = slab.scores(qi, k_t, i, j, tanh=tanh)
        slab.by_head(s, i).sub_(lse_rows[:, :, i.start : i.stop, None])
        p = s.exp_()
        dp = torch.bmm(doi, v_t, out=slab.buffer("dp", *shape))
        dropped = slab.dropped(i, j) if mask.dropout_p else None
        if dropped is not None:
            dp.masked_fill_(dropped, 0.0).mul_(kept)
        slab.by_head(dp, i).sub_(delta[:, :, i.start : i.stop, None])
        ds = dp.mul_(p)
        if dropped is not None:
            p.masked_fill_(dropped, 0.0)
        if dv is not None:
            dvj.baddbmm_(p.mT, doi, alpha=kept)
        if dbias is not None:
            slab.add_to_bias(ds, dbias, i, j)
        if tanh is not None:
            ds.mul_(tanh.square_().neg_().add_(1.0))
        if dq_sum is not None:
            dqi = slab.buffer("dq", *qi.shape)
            torch.baddbmm(dqi, ds, kj, beta=0.0, alpha=scale, out=dqi)
            dq_sum[:, :, i.start : i.stop].add_(slab.by_head(dqi, i))
        if dk is not None:
            dkj.baddbmm_(ds.mT, qi, alpha=scale)
    if dk is not None:
        slab.cols(dk, j).copy_(dkj.view(len(slab.batch), -1, *dkj.shape[1:]))
    if dv is not None:
        slab.cols(dv, j).copy_(dvj.view(len(slab.batch), -1, *dvj.shape[1:]))
