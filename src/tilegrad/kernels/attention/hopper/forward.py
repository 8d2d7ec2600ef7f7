"""Attention's forward on Hopper (sm_90a, Gluon): programs that stay, each a loader and one to three warpgroups that multiply.

The equations are forward.py's; a warpgroup owns 64 rows of a tile and walks the columns last to first, so that the tiles
which the causal edge crosses come first. Only tiles that an edge crosses are masked, and a warpgroup passes by those that
none of its rows sees:

    s = q kᵀ of the first tile of columns        p = softmax step of s
    for each further tile of columns:
      issue s = q kᵀ        issue acc += p v of the one before        wait for s
      p = softmax step of s        wait for acc        acc ∘= alpha
    acc += p v of the last        o = acc / row_sum

**Handshake.** Shared memory holds rings of slots: q (rows of one warpgroup), k and v (one tile of columns). Each slot has two
mbarriers. The loader, one warp, waits until a slot is free (every warpgroup that reads it has arrived), tells `ready` how many
bytes will come and starts the TMA copies. A warpgroup waits for `ready`, multiplies and arrives at `free`. The n-th use of a
slot is phase n & 1 of both; a wait for the phase before the first returns at once. o leaves through the slot of its own q,
which has served then; the slot goes back to the loader when the copy out has been read, in the next tile if there are two.

Which tiles a program takes, and who loads them: forward_schedule.py.

**Edges.** Rows of a tile before row 0 are zeros, or of the sequence before, and are not written: by predicated stores, for TMA
writes nothing from before the beginning. Columns beyond the end are hidden; those of packed sequences, which belong
to the next one, are cleared in v.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton import scores as triton_mask
from .forward_schedule import NOTES, ROWS, Rings, Tile, Work, load, next_span, pass_by, read_note, read_number

LOWEST = gl.constexpr(-1e38)

tanh = gluon.jit(triton_mask.tanh.fn)
to_base = gluon.jit(triton_mask.to_base.fn)
from_base = gluon.jit(triton_mask.from_base.fn)


class Out(NamedTuple):
    o_desc: Any
    o: Any
    lse: Any
    o_b: Any
    o_h: Any
    o_t: Any
    lse_b: Any
    lse_h: Any
    lse_t: Any


@gluon.jit
def _scores(q, turn, rings, S: gl.constexpr):
    """q kᵀ with the k of a turn, on its way."""
    SLOTS: gl.constexpr = rings.k.shape[0]
    BLOCK_N: gl.constexpr = rings.k.shape[3]
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    mbarrier.wait(rings.k_ready.index(turn % SLOTS), turn // SLOTS & 1)
    k = rings.k.index(turn % SLOTS).reshape([BLOCK_N, BLOCK_D])
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_values(p, acc, turn, rows, rings, PACKED: gl.constexpr):
    """acc + p v with the v of a turn, on its way. Of packed sequences only `rows` rows of it: p is 0 for those of the next
    sequence, but 0 · NaN would not be."""
    SLOTS: gl.constexpr = rings.v.shape[0]
    BLOCK_N: gl.constexpr = rings.v.shape[3]
    BLOCK_D: gl.constexpr = rings.v.shape[4]
    mbarrier.wait(rings.v_ready.index(turn % SLOTS), turn // SLOTS & 1)
    v = rings.v.index(turn % SLOTS).reshape([BLOCK_N, BLOCK_D])
    if PACKED and rows < BLOCK_N:
        _clear_rows(v, rows)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _clear_rows(v, rows):
    """v[rows:] = 0; each warpgroup for itself, with the same result."""
    BLOCK_N: gl.constexpr = v.shape[0]
    BLOCK_D: gl.constexpr = v.shape[1]
    AT_ONCE: gl.constexpr = 2048 // BLOCK_D
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    j = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPY))[:, None]
    for start in gl.static_range(0, BLOCK_N, AT_ONCE):
        if rows < start + AT_ONCE:
            part = v.slice(start, AT_ONCE, dim=0)
            x = part.load(COPY)
            part.store(gl.where(j < rows - start, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _softmax_step(s, row_max, row_sum, at, span, work, BLOCK_N: gl.constexpr, NEGATIVE: gl.constexpr):
    """(p, row_max, row_sum, alpha) after the scores s of tile `at` of columns."""
    x = s
    factor = work.factor
    if work.softcap is not None:
        sign: gl.constexpr = -1.0 if NEGATIVE else 1.0
        x = work.softcap * tanh(x * (sign * work.factor / work.softcap), EXACT=False)
        factor = work.factor * 0.0 + 1.0
    elif NEGATIVE:
        x = -x
    if (at < span.full) | (at >= span.full_end):
        place = span.diagonal + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))
        end = place * 0 + (span.tk - 1)
        if work.right is not None:
            end = gl.minimum(end, place + work.right)
        j = at * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
        x = gl.where(j <= end[:, None], x, float("-inf"))
        if work.left is not None:
            x = gl.where(j >= (place - work.left)[:, None], x, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(x, 1) * factor)
    p = gl.exp2(x * factor - new_max[:, None])
    alpha = gl.exp2(row_max - new_max)
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _start_rows(n, rings, work, S: gl.constexpr):
    """(row_max, row_sum) before the first column: nothing, or the sink."""
    row_max = gl.full((ROWS,), LOWEST, gl.float32, layout=gl.SliceLayout(1, S))
    row_sum = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, S))
    if work.sinks is not None:
        sink = to_base(
            gl.load(work.sinks + read_number(rings.notes.h, n % NOTES) * work.sinks_h).to(gl.float32), EXACT=False
        )
        row_max = gl.maximum(row_max, sink)
        row_sum = gl.exp2(sink - row_max)
    return row_max, row_sum


@gluon.jit
def _write(acc, row_max, row_sum, tile, start, slot, out, PACKED: gl.constexpr, D: gl.constexpr):
    some = row_sum > 0.0
    row_sum = gl.where(some, row_sum, 1.0)
    if out.lse is not None:
        rows = start + gl.arange(0, ROWS, layout=row_sum.type.layout)
        value = gl.where(some, from_base(row_max + gl.log2(row_sum), EXACT=False), float("-inf"))
        lse = out.lse + gl.cast(tile.b, gl.int64) * out.lse_b + gl.cast(tile.h, gl.int64) * out.lse_h
        gl.store(lse + (tile.start_q + rows).to(gl.int64) * out.lse_t, value, mask=rows >= 0)
    if out.o_desc is not None:
        BLOCK_D: gl.constexpr = acc.shape[1]
        scale = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, acc.type.layout))
        o = (acc * scale[:, None]).to(slot.dtype)
        slot.reshape([ROWS, BLOCK_D]).store(o)
        fence_async_shared()
        if start < 0:
            _store_rows(slot.reshape([ROWS, BLOCK_D]), tile, start, out, D)
        else:
            b = tile.b
            if PACKED:
                b = tile.b * 0
            tma.async_copy_shared_to_global(out.o_desc, [b, tile.h, tile.start_q + start, 0], slot)


@gluon.jit
def _store_rows(o, tile, start, out, D: gl.constexpr):
    """Rows of o from row 0 on, 16 bytes a thread."""
    BLOCK_D: gl.constexpr = o.shape[1]
    AT_ONCE: gl.constexpr = 2048 // BLOCK_D
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))[None, :]
    head = out.o + gl.multiple_of(gl.cast(tile.b, gl.int64) * out.o_b, 8)
    head += gl.multiple_of(gl.cast(tile.h, gl.int64) * out.o_h, 8)
    for n in gl.static_range(0, ROWS, AT_ONCE):
        i = start + n + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, COPY))[:, None]
        rows = gl.multiple_of((tile.start_q + i).to(gl.int64) * out.o_t, [8, 8])
        gl.store(head + rows + d, o.slice(n, AT_ONCE, dim=0).load(COPY), mask=(i >= 0) & (d < D))


@gluon.jit
def _attend(
    W: gl.constexpr, rings, work, out, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
    D: gl.constexpr, NEGATIVE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = rings.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    TILE: gl.constexpr = ROWS * WARPGROUPS
    Q_SLOTS: gl.constexpr = rings.q_ready.shape[0] // WARPGROUPS
    SLOTS: gl.constexpr = rings.k.shape[0]
    n = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    span, more = next_span(W, n, rings, work, TILE, BLOCK_N)
    while more:
        q_slot = n % Q_SLOTS * WARPGROUPS + W
        q = rings.q.index(q_slot).reshape([ROWS, BLOCK_D])
        row_max, row_sum = _start_rows(n, rings, work, S)
        acc = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=O)

        turn = pass_by(span.before, turn, rings)
        mbarrier.wait(rings.q_ready.index(q_slot), n // Q_SLOTS & 1)
        s = warpgroup_mma_wait(0, deps=(_scores(q, turn, rings, S),))
        mbarrier.arrive(rings.k_free.index(turn % SLOTS), count=1)
        if Q_SLOTS > 1:
            tma.store_wait(0)
            mbarrier.arrive(rings.q_free.index((n + 1) % Q_SLOTS * WARPGROUPS + W), count=1, pred=n > 0)
        p, row_max, row_sum, _ = _softmax_step(s, row_max, row_sum, span.last - 1, span, work, BLOCK_N, NEGATIVE)
        p = gl.convert_layout(p.to(dtype), P)
        for j in range(1, span.last - span.first):
            s = _scores(q, turn + 1, rings, S)
            at = span.last - 1 - j
            acc = _add_values(p, acc, turn, span.tk - (at + 1) * BLOCK_N, rings, PACKED)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(rings.k_free.index((turn + 1) % SLOTS), count=1)
            p_next, row_max, row_sum, alpha = _softmax_step(s, row_max, row_sum, at, span, work, BLOCK_N, NEGATIVE)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(rings.v_free.index(turn % SLOTS), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
            p = gl.convert_layout(p_next.to(dtype), P)
            turn += 1
        acc = _add_values(p, acc, turn, span.tk - span.first * BLOCK_N, rings, PACKED)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(rings.v_free.index(turn % SLOTS), count=1)
        tile = read_note(n, rings, work)
        turn = pass_by(span.first - tile.first, turn + 1, rings)
        span, more = next_span(W, n + 1, rings, work, TILE, BLOCK_N)

        _write(acc, row_max, row_sum, tile, tile.start + W * ROWS, rings.q.index(q_slot), out, PACKED, D)
        if Q_SLOTS == 1:
            tma.store_wait(0)
            mbarrier.arrive(rings.q_free.index(q_slot), count=1)
        n += 1
    tma.store_wait(0)


TENSORS = ["cu_seqlens_q", "cu_seqlens_k", "sinks", "lse", "taken"]  # not o: TMA has it aligned
STRIDES = ["o_b", "o_h", "o_t", "lse_b", "lse_h", "lse_t", "sinks_h"]
SIZES = ["batch", "heads", "group", "row_tiles", "wave", "tq", "tk", "left", "right"]


@gluon.jit(do_not_specialize=[*TENSORS, *STRIDES, *SIZES])
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, sinks,
    o_desc, o, lse, taken,
    o_b, o_h, o_t, lse_b, lse_h, lse_t, sinks_h,
    batch, heads, group, row_tiles, wave, tq, tk, left, right, factor, softcap,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = cu_seqlens_q is not None
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = Tile(
        b=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        h=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        start=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        start_q=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        start_k=None,
        tq=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        tk=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        first=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
        last=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word),
    )
    note_ready = gl.allocate_shared_memory(gl.int64, [NOTES, 1], barrier)
    for slot in gl.static_range(NOTES):
        mbarrier.init(note_ready.index(slot), count=1)
    rings = Rings(
        q=gl.allocate_shared_memory(dtype, [Q_SLOTS * WARPGROUPS, 1, 1, ROWS, BLOCK_D], q_desc.layout),
        k=gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK_N, BLOCK_D], k_desc.layout),
        v=gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, BLOCK_N, BLOCK_D], v_desc.layout),
        q_ready=gl.allocate_shared_memory(gl.int64, [Q_SLOTS * WARPGROUPS, 1], barrier),
        q_free=gl.allocate_shared_memory(gl.int64, [Q_SLOTS * WARPGROUPS, 1], barrier),
        k_ready=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier),
        k_free=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier),
        v_ready=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier),
        v_free=gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier),
        notes=notes,
        note_ready=note_ready,
    )
    for slot in gl.static_range(Q_SLOTS * WARPGROUPS):
        mbarrier.init(rings.q_ready.index(slot), count=1)
        mbarrier.init(rings.q_free.index(slot), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(rings.k_ready.index(slot), count=1)
        mbarrier.init(rings.k_free.index(slot), count=WARPGROUPS)
        mbarrier.init(rings.v_ready.index(slot), count=1)
        mbarrier.init(rings.v_free.index(slot), count=WARPGROUPS)
    work = Work(
        cu_seqlens_q, cu_seqlens_k, sinks, sinks_h, taken, batch, heads, group, row_tiles, wave, tq, tk, left, right,
        factor, softcap,
    )  # fmt: skip
    out = Out(o_desc, o, lse, o_b, o_h, o_t, lse_b, lse_h, lse_t)
    WIDE: gl.constexpr = BLOCK_D == 256 and right is not None  # else ptxas would spill a little there
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_attend, (0, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (load, (q_desc, k_desc, v_desc, rings, work, WARPGROUPS, BLOCK_N, PACKED)),
        ], [1], [40])  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend, (0, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (1, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (load, (q_desc, k_desc, v_desc, rings, work, WARPGROUPS, BLOCK_N, PACKED)),
        ], [4, 1], [240 if WIDE else 232, 32 if WIDE else 40])  # fmt: skip
    elif WARPGROUPS == 3:
        gl.warp_specialize([
            (_attend, (0, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (1, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (2, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (load, (q_desc, k_desc, v_desc, rings, work, WARPGROUPS, BLOCK_N, PACKED)),
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
