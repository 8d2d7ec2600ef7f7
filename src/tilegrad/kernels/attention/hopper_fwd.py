"""Attention's forward on Hopper (sm_90a, Gluon): programs that stay, each a loader and two or three warpgroups that multiply.

The equations are triton_fwd.py's; a warpgroup owns 64 rows of a tile and walks the columns last to first, so that the tiles
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

**Order.** A program takes tile after tile of rows, the same list in its loader and its warpgroups: while the last products of a
tile drain, q and k of the next are on their way. Tiles are dealt out in rounds, forth and back, so that under a causal edge a
program with long tiles in one round has short ones in the next. `wave` heads are walked together, chosen so that their k and v
stay in L2. Packed sequences are cut into slots of tiles, sequence b from slot cu_seqlens_q[b] / rows + b on, which needs no
sums over lengths; each slot has a program of its own, and one without rows does nothing.

Rows beyond the end are cut off by TMA; those of packed sequences, where the next sequence follows, by predicated stores.
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

from . import triton_mask

LOWEST = gl.constexpr(-1e38)
ROWS = gl.constexpr(64)  # of a warpgroup
SEQUENCES = gl.constexpr(128)  # looked at together for the one that owns a slot

band_tiles = gluon.jit(triton_mask.band_tiles.fn)
tanh = gluon.jit(triton_mask.tanh.fn)
to_base = gluon.jit(triton_mask.to_base.fn)
from_base = gluon.jit(triton_mask.from_base.fn)


class Work(NamedTuple):
    """What all tiles of a call share; None where the call has no such feature."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    sinks: Any
    sinks_h: Any
    batch: Any
    heads: Any
    group: Any
    row_tiles: Any
    wave: Any
    tq: Any
    tk: Any
    left: Any
    right: Any
    factor: Any
    softcap: Any


class Rings(NamedTuple):
    q: Any
    k: Any
    v: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any


class Tile(NamedTuple):
    """Rows start … of head h of sequence b, and the columns' tiles first … last that they see."""

    b: Any
    h: Any
    start: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any
    first: Any
    last: Any


class Out(NamedTuple):
    o_desc: Any
    o: Any
    lse: Any
    o_h: Any
    o_t: Any
    lse_b: Any
    lse_h: Any
    lse_t: Any


@gluon.jit
def _rounds(work):
    """Tiles of this program: one in each whole round, and perhaps one in the last."""
    tiles = work.row_tiles * work.heads * work.batch
    if work.cu_seqlens_q is not None:
        tiles = work.row_tiles * work.heads
    programs = gl.num_programs(0)
    whole = tiles // programs
    return whole + (_place(whole) < tiles - whole * programs).to(gl.int32)


@gluon.jit
def _place(turn):
    """This program's place in a round: forth in even rounds, back in odd ones."""
    here = gl.program_id(0)
    return gl.where(turn % 2 == 0, here, gl.num_programs(0) - 1 - here)


@gluon.jit
def _sequence_of(slot, work, TILE: gl.constexpr):
    """The last b with cu_seqlens_q[b] / TILE + b ≤ slot."""
    SPREAD: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    found = slot * 0
    for begin in range(0, work.batch, SEQUENCES):
        b = begin + gl.arange(0, SEQUENCES, layout=SPREAD)
        ends = gl.load(work.cu_seqlens_q + b, mask=b < work.batch, other=2**30)
        found += gl.sum((ends // TILE + b <= slot).to(gl.int32), 0)
    return found - 1


@gluon.jit
def _tile(turn, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    index = turn * gl.num_programs(0) + _place(turn)
    start_q = index * 0
    start_k = index * 0
    tq = work.tq
    tk = work.tk
    if work.cu_seqlens_q is not None:
        h = index % work.heads
        slot = index // work.heads
        b = _sequence_of(slot, work, TILE)
        start_q = gl.load(work.cu_seqlens_q + b)
        start_k = gl.load(work.cu_seqlens_k + b)
        tq = gl.load(work.cu_seqlens_q + b + 1) - start_q
        tk = gl.load(work.cu_seqlens_k + b + 1) - start_k
        m = slot - (start_q // TILE + b)
    else:
        heads = work.heads * work.batch
        turns = index // (work.row_tiles * work.wave)
        begin = turns * work.wave
        size = gl.minimum(work.wave, heads - begin)
        rest = index - begin * work.row_tiles
        m = rest // size
        h = (begin + rest % size) % work.heads
        b = (begin + rest % size) // work.heads
        if work.right is not None:
            m = work.row_tiles - 1 - m
    start = m * TILE
    first, _, _, last = band_tiles(start, gl.minimum(start + TILE, tq), tk - tq, work.left, work.right, tk, BLOCK_N)
    return Tile(b, h, start, start_q, start_k, tq, tk, first, gl.maximum(last, first + 1))


@gluon.jit
def _load(q_desc, k_desc, v_desc, rings, work, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr):
    Q_SLOTS: gl.constexpr = rings.q_ready.shape[0] // WARPGROUPS
    SLOTS: gl.constexpr = rings.k.shape[0]
    turn = 0
    for n in range(_rounds(work)):
        tile = _tile(n, work, ROWS * WARPGROUPS, BLOCK_N)
        if not PACKED or tile.start < tile.tq:
            b = tile.b
            if PACKED:
                b = tile.b * 0
            for w in gl.static_range(WARPGROUPS):
                slot = n % Q_SLOTS * WARPGROUPS + w
                mbarrier.wait(rings.q_free.index(slot), n // Q_SLOTS & 1 ^ 1)
                mbarrier.expect(rings.q_ready.index(slot), q_desc.block_type.nbytes)
                row = tile.start_q + tile.start + w * ROWS
                tma.async_copy_global_to_shared(
                    q_desc, [b, tile.h, row, 0], rings.q_ready.index(slot), rings.q.index(slot)
                )
            for j in range(tile.last - tile.first):
                slot = turn % SLOTS
                phase = turn // SLOTS & 1 ^ 1
                row = tile.start_k + (tile.last - 1 - j) * BLOCK_N
                mbarrier.wait(rings.k_free.index(slot), phase)
                mbarrier.expect(rings.k_ready.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [b, tile.h // work.group, row, 0], rings.k_ready.index(slot), rings.k.index(slot)
                )
                mbarrier.wait(rings.v_free.index(slot), phase)
                mbarrier.expect(rings.v_ready.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [b, tile.h // work.group, row, 0], rings.v_ready.index(slot), rings.v.index(slot)
                )
                turn += 1


@gluon.jit
def _pass_by(tiles, turn, rings):
    """Hand back tiles of columns that no row of this warpgroup sees; the turn after them."""
    SLOTS: gl.constexpr = rings.k.shape[0]
    for _ in range(tiles):
        slot = turn % SLOTS
        phase = turn // SLOTS & 1
        mbarrier.wait(rings.k_ready.index(slot), phase)
        mbarrier.arrive(rings.k_free.index(slot), count=1)
        mbarrier.wait(rings.v_ready.index(slot), phase)
        mbarrier.arrive(rings.v_free.index(slot), count=1)
        turn += 1
    return turn


@gluon.jit
def _log2_scores(x, work, NEGATIVE: gl.constexpr):
    """(x, factor): base-2 scores are x · factor, factor > 0."""
    factor = work.factor
    if work.softcap is not None:
        sign: gl.constexpr = -1.0 if NEGATIVE else 1.0
        x = work.softcap * tanh(x * (sign * work.factor / work.softcap), EXACT=False)
        factor = work.factor * 0.0 + 1.0
    elif NEGATIVE:
        x = -x
    return x, factor


@gluon.jit
def _hide(x, i, start, tile, work, BLOCK_N: gl.constexpr):
    j = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, x.type.layout))[None, :]
    seen = j < tile.tk
    if work.left is not None:
        seen &= i + (tile.tk - tile.tq) - j <= work.left
    if work.right is not None:
        seen &= i + (tile.tk - tile.tq) - j >= -work.right
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def _write(acc, row_max, row_sum, tile, start, slot, out, PACKED: gl.constexpr, D: gl.constexpr):
    some = row_sum > 0.0
    row_sum = gl.where(some, row_sum, 1.0)
    if out.lse is not None:
        rows = start + gl.arange(0, ROWS, layout=row_sum.type.layout)
        value = gl.where(some, from_base(row_max + gl.log2(row_sum), EXACT=False), float("-inf"))
        lse = out.lse + gl.cast(tile.b, gl.int64) * out.lse_b + gl.cast(tile.h, gl.int64) * out.lse_h
        gl.store(lse + (tile.start_q + rows).to(gl.int64) * out.lse_t, value, mask=rows < tile.tq)
    if out.o_desc is not None:
        BLOCK_D: gl.constexpr = acc.shape[1]
        scale = gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, acc.type.layout))
        o = (acc * scale[:, None]).to(slot.dtype)
        slot.reshape([ROWS, BLOCK_D]).store(o)
        if PACKED and start + ROWS > tile.tq:
            _store_rows(slot.reshape([ROWS, BLOCK_D]), tile, start, out, D)
        else:
            fence_async_shared()
            b = tile.b
            if PACKED:
                b = tile.b * 0
            tma.async_copy_shared_to_global(out.o_desc, [b, tile.h, tile.start_q + start, 0], slot)


@gluon.jit
def _store_rows(o, tile, start, out, D: gl.constexpr):
    """Those rows of o that the sequence has, 16 bytes a thread."""
    BLOCK_D: gl.constexpr = o.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    i = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))[:, None]
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, COPY))[None, :]
    at = out.o + gl.multiple_of(gl.cast(tile.h, gl.int64) * out.o_h, 8)
    rows = gl.multiple_of((tile.start_q + i).to(gl.int64) * out.o_t, [8, 8])
    gl.store(at + rows + d, o.load(COPY), mask=(i < tile.tq) & (d < D))


@gluon.jit
def _start_rows(tile, work, S: gl.constexpr):
    """(row_max, row_sum) before the first column: nothing, or the sink."""
    row_max = gl.full((ROWS,), LOWEST, gl.float32, layout=gl.SliceLayout(1, S))
    row_sum = gl.zeros((ROWS,), gl.float32, layout=gl.SliceLayout(1, S))
    if work.sinks is not None:
        sink = to_base(gl.load(work.sinks + tile.h * work.sinks_h).to(gl.float32), EXACT=False)
        row_max = gl.maximum(row_max, sink)
        row_sum = gl.exp2(sink - row_max)
    return row_max, row_sum


@gluon.jit
def _own_columns(W: gl.constexpr, tile, work, BLOCK_N: gl.constexpr):
    """(first, full, full_end, last) of this warpgroup's rows, at least one tile; one beyond the end takes just one."""
    start = tile.start + W * ROWS
    stop = gl.minimum(start + ROWS, tile.tq)
    first, full, full_end, last = band_tiles(start, stop, tile.tk - tile.tq, work.left, work.right, tile.tk, BLOCK_N)
    if work.left is None and work.right is None:
        first = tile.first
        last = tile.last
    else:
        first = gl.where(start < tile.tq, gl.minimum(first, tile.last - 1), tile.first)
        last = gl.where(start < tile.tq, gl.maximum(gl.minimum(last, tile.last), first + 1), first + 1)
    return first, full, full_end, last


@gluon.jit
def _first_product(W: gl.constexpr, n, turn, last, tile, work, rings, WARPGROUPS: gl.constexpr, S: gl.constexpr):
    """q kᵀ of a tile's last columns, on its way, and the turn of its k."""
    Q_SLOTS: gl.constexpr = rings.q_ready.shape[0] // WARPGROUPS
    SLOTS: gl.constexpr = rings.k.shape[0]
    BLOCK_N: gl.constexpr = rings.k.shape[3]
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    if work.left is not None or work.right is not None:
        turn = _pass_by(tile.last - last, turn, rings)
    q_slot = n % Q_SLOTS * WARPGROUPS + W
    slot = turn % SLOTS
    mbarrier.wait(rings.q_ready.index(q_slot), n // Q_SLOTS & 1)
    mbarrier.wait(rings.k_ready.index(slot), turn // SLOTS & 1)
    q = rings.q.index(q_slot).reshape([ROWS, BLOCK_D])
    k = rings.k.index(slot).reshape([BLOCK_N, BLOCK_D])
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S)
    return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True), turn


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
    nothing = gl.zeros((ROWS, BLOCK_N), gl.float32, layout=S)
    rounds = _rounds(work)
    tile = _tile(0, work, TILE, BLOCK_N)
    first, full, full_end, last = _own_columns(W, tile, work, BLOCK_N)
    turn = 0
    for n in range(rounds):
        if PACKED:
            tile = _tile(n, work, TILE, BLOCK_N)
            first, full, full_end, last = _own_columns(W, tile, work, BLOCK_N)
        if not PACKED or tile.start < tile.tq:
            start = tile.start + W * ROWS
            i = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))[:, None]
            row_max, row_sum = _start_rows(tile, work, S)
            acc = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=O)
            q_slot = n % Q_SLOTS * WARPGROUPS + W
            q = rings.q.index(q_slot).reshape([ROWS, BLOCK_D])

            s, turn = _first_product(W, n, turn, last, tile, work, rings, WARPGROUPS, S)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(rings.k_free.index(turn % SLOTS), count=1)
            if Q_SLOTS > 1:
                tma.store_wait(0)
                mbarrier.arrive(rings.q_free.index((n + 1) % Q_SLOTS * WARPGROUPS + W), count=1, pred=n > 0)
            x, factor = _log2_scores(s, work, NEGATIVE)
            at = last - 1
            if (at < full) | (at >= full_end):
                x = _hide(x, i, at * BLOCK_N, tile, work, BLOCK_N)
            new_max = gl.maximum(row_max, gl.max(x, 1) * factor)
            p = gl.exp2(x * factor - new_max[:, None])
            row_sum = row_sum * gl.exp2(row_max - new_max) + gl.sum(p, 1)
            row_max = new_max
            p = gl.convert_layout(p.to(dtype), P)
            for j in range(1, last - first):
                before = turn % SLOTS
                before_phase = turn // SLOTS & 1
                turn += 1
                slot = turn % SLOTS
                mbarrier.wait(rings.k_ready.index(slot), turn // SLOTS & 1)
                k = rings.k.index(slot).reshape([BLOCK_N, BLOCK_D])
                s = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(rings.v_ready.index(before), before_phase)
                v = rings.v.index(before).reshape([BLOCK_N, BLOCK_D])
                acc = warpgroup_mma(p, v, acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(rings.k_free.index(slot), count=1)
                x, factor = _log2_scores(s, work, NEGATIVE)
                at = last - 1 - j
                if (at < full) | (at >= full_end):
                    x = _hide(x, i, at * BLOCK_N, tile, work, BLOCK_N)
                new_max = gl.maximum(row_max, gl.max(x, 1) * factor)
                alpha = gl.exp2(row_max - new_max)
                p_next = gl.exp2(x * factor - new_max[:, None])
                row_sum = row_sum * alpha + gl.sum(p_next, 1)
                row_max = new_max
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(rings.v_free.index(before), count=1)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
                p = gl.convert_layout(p_next.to(dtype), P)
            slot = turn % SLOTS
            mbarrier.wait(rings.v_ready.index(slot), turn // SLOTS & 1)
            v = rings.v.index(slot).reshape([BLOCK_N, BLOCK_D])
            acc = warpgroup_mma(p, v, acc, is_async=True)
            beyond = first - tile.first
            following = tile
            if not PACKED:  # found while the last product runs
                following = _tile(n + 1, work, TILE, BLOCK_N)
                first, full, full_end, last = _own_columns(W, following, work, BLOCK_N)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(rings.v_free.index(slot), count=1)
            turn += 1
            if work.left is not None:
                turn = _pass_by(beyond, turn, rings)

            _write(acc, row_max, row_sum, tile, start, rings.q.index(q_slot), out, PACKED, D)
            if Q_SLOTS == 1:
                tma.store_wait(0)
                mbarrier.arrive(rings.q_free.index(q_slot), count=1)
            tile = following
    tma.store_wait(0)


TENSORS = ["cu_seqlens_q", "cu_seqlens_k", "sinks", "lse"]  # not o: TMA has it aligned
SIZES = ["o_h", "o_t", "lse_b", "lse_h", "lse_t", "sinks_h", "batch", "heads", "group", "row_tiles", "wave", "tq", "tk"]


@gluon.jit(do_not_specialize=[*TENSORS, *SIZES, "left", "right"])
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, sinks,
    o_desc, o, lse,
    o_h, o_t, lse_b, lse_h, lse_t, sinks_h,
    batch, heads, group, row_tiles, wave, tq, tk, left, right, factor, softcap,
    WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
    Q_SLOTS: gl.constexpr, NEGATIVE: gl.constexpr,
):  # fmt: skip
    PACKED: gl.constexpr = cu_seqlens_q is not None
    dtype: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
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
        cu_seqlens_q,
        cu_seqlens_k,
        sinks,
        sinks_h,
        batch,
        heads,
        group,
        row_tiles,
        wave,
        tq,
        tk,
        left,
        right,
        factor,
        softcap,
    )
    out = Out(o_desc, o, lse, o_h, o_t, lse_b, lse_h, lse_t)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend, (0, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (1, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_load, (q_desc, k_desc, v_desc, rings, work, WARPGROUPS, BLOCK_N, PACKED)),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (0, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (1, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_attend, (2, rings, work, out, WARPGROUPS, BLOCK_N, BLOCK_D, D, NEGATIVE, PACKED)),
            (_load, (q_desc, k_desc, v_desc, rings, work, WARPGROUPS, BLOCK_N, PACKED)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
