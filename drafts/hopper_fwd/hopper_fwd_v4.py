"""Attention's forward on Hopper (sm_90a, Gluon): programs that stay, each a loader and two or three warpgroups that multiply.

The equations are triton_fwd.py's; a warpgroup owns 64 rows of a tile and walks the columns last to first, so that the tiles
which the causal edge crosses come first. Only tiles that an edge crosses are masked, and a warpgroup passes by those that
none of its rows sees. Its products never stop between tiles of rows:

    s = q kᵀ of the first tile of columns        p = softmax step of s
    for each further tile of columns:
      issue s = q kᵀ        issue acc += p v of the one before        wait for s
      p = softmax step of s, while acc is still being added to        wait for acc        acc ∘= alpha
    and at the last, where there is a next tile of rows:
      issue s = q kᵀ of its first columns        issue acc += p v        …        o = acc / row_sum        acc = 0

**Handshake.** Shared memory holds rings of slots: q (rows of one warpgroup), k and v (one tile of columns). Each slot has two
mbarriers. The loader, one warp, waits until a slot is free (every warpgroup that reads it has arrived), tells `ready` how many
bytes will come and starts the TMA copies. A warpgroup waits for `ready`, multiplies and arrives at `free`. The n-th use of a
slot is phase n & 1 of both; a wait for the phase before the first returns at once. o leaves through the slot of its own q;
the slot goes back to the loader a tile later, when the copy out has been read. The loader also decides which tile of rows comes
next and leaves a note of it; a note is overwritten only after its readers have given q slots back, so notes are never free'd.

**Order.** Dense tiles are dealt out in rounds, forth and back, so that under a causal edge a program with long tiles in one
round has short ones in the next; `wave` heads are walked together, chosen so that their k and v stay in L2. Packed sequences
are cut into slots of tiles, sequence b from slot cu_seqlens_q[b] / rows + b on, which needs no sums over lengths; programs take
them one by one from a counter, and a slot without rows is skipped. Rows beyond the end are cut off by TMA; those of packed
sequences, where the next sequence follows, by predicated stores.
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
NOTES = gl.constexpr(4)
END = gl.constexpr(-1)  # where rows start in the note after the last

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
    taken: Any  # counter of packed tiles
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
    notes: Any
    note_ready: Any


class Tile(NamedTuple):
    """Rows start … of head h of sequence b, which has tq rows from start_q on and tk columns from start_k (the loader's) on."""

    b: Any
    h: Any
    start: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any


class Span(NamedTuple):
    """Tiles of columns of a warpgroup: first … last, without an edge full … full_end; and how many of the program's it
    passes by, before its first step and behind its last."""

    before: Any
    first: Any
    full: Any
    full_end: Any
    last: Any
    behind: Any


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
def _next_index(n, work):
    """Which tile this program takes in its n-th turn."""
    if work.cu_seqlens_q is not None:
        return gl.atomic_add(work.taken, 1)
    else:
        here = gl.program_id(0)
        programs = gl.num_programs(0)
        return n * programs + gl.where(n % 2 == 0, here, programs - 1 - here)


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
def _tile(index, work, TILE: gl.constexpr):
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
        begin = index // (work.row_tiles * work.wave) * work.wave
        size = gl.minimum(work.wave, work.heads * work.batch - begin)
        rest = index - begin * work.row_tiles
        m = rest // size
        h = (begin + rest % size) % work.heads
        b = (begin + rest % size) // work.heads
        if work.right is not None:
            m = work.row_tiles - 1 - m
    return Tile(b, h, m * TILE, start_q, start_k, tq, tk)


@gluon.jit
def _program_columns(tile, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first, last) tile of columns that some row sees; at least one, so that rows that see nothing are written too."""
    stop = gl.minimum(tile.start + TILE, tile.tq)
    first, _, _, last = band_tiles(tile.start, stop, tile.tk - tile.tq, work.left, work.right, tile.tk, BLOCK_N)
    return first, gl.maximum(last, first + 1)


@gluon.jit
def _span(W: gl.constexpr, tile, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of the program's tiles a warpgroup leaves out at most one on either side: its rows are no more than a tile away."""
    program_first, program_last = _program_columns(tile, work, TILE, BLOCK_N)
    start = tile.start + W * ROWS
    stop = gl.minimum(start + ROWS, tile.tq)
    first, full, full_end, last = band_tiles(
        start, stop, tile.tk - tile.tq, work.left, work.right, tile.tk, BLOCK_N
    )
    inside = start < tile.tq
    if work.left is None:
        first = program_first
    else:
        first = gl.where(inside, gl.minimum(first, program_last - 1), program_first)
    if work.right is None:
        last = program_last
    else:
        last = gl.where(inside, gl.maximum(gl.minimum(last, program_last), first + 1), program_last)
    return Span(program_last - last, first, full, full_end, last, first - program_first)


@gluon.jit
def _leave_note(n, tile, start, rings, PACKED: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = n % NOTES
    rings.notes.b.index(slot).store(gl.full((1,), tile.b, gl.int32, layout=ONE))
    rings.notes.h.index(slot).store(gl.full((1,), tile.h, gl.int32, layout=ONE))
    rings.notes.start.index(slot).store(gl.full((1,), start, gl.int32, layout=ONE))
    if PACKED:
        rings.notes.start_q.index(slot).store(gl.full((1,), tile.start_q, gl.int32, layout=ONE))
        rings.notes.tq.index(slot).store(gl.full((1,), tile.tq, gl.int32, layout=ONE))
        rings.notes.tk.index(slot).store(gl.full((1,), tile.tk, gl.int32, layout=ONE))
    mbarrier.arrive(rings.note_ready.index(slot), count=1)


@gluon.jit
def _read(note, slot):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(note.index(slot).load(ONE), 0)


@gluon.jit
def _read_note(n, rings, work, PACKED: gl.constexpr):
    slot = n % NOTES
    mbarrier.wait(rings.note_ready.index(slot), n // NOTES & 1)
    notes = rings.notes
    b = _read(notes.b, slot)
    h = _read(notes.h, slot)
    start = _read(notes.start, slot)
    if PACKED:
        return Tile(b, h, start, _read(notes.start_q, slot), start * 0, _read(notes.tq, slot), _read(notes.tk, slot))
    else:
        return Tile(b, h, start, start * 0, start * 0, work.tq, work.tk)


@gluon.jit
def _load(q_desc, k_desc, v_desc, rings, work, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr):
    Q_SLOTS: gl.constexpr = rings.q_ready.shape[0] // WARPGROUPS
    SLOTS: gl.constexpr = rings.k.shape[0]
    TILE: gl.constexpr = ROWS * WARPGROUPS
    tiles = work.row_tiles * work.heads
    if not PACKED:
        tiles = tiles * work.batch
    turn = 0
    n = 0
    index = _next_index(0, work)
    while index < tiles:
        tile = _tile(index, work, TILE)
        if not PACKED or tile.start < tile.tq:
            _leave_note(n, tile, tile.start, rings, PACKED)
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
            first, last = _program_columns(tile, work, TILE, BLOCK_N)
            for j in range(last - first):
                slot = turn % SLOTS
                phase = turn // SLOTS & 1 ^ 1
                row = tile.start_k + (last - 1 - j) * BLOCK_N
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
            n += 1
        index = _next_index(n, work)
    nothing = index * 0
    _leave_note(n, Tile(nothing, nothing, nothing, nothing, nothing, nothing, nothing), nothing + END, rings, PACKED)


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
def _add_values(p, acc, turn, rings):
    """acc + p v with the v of a turn, on its way."""
    SLOTS: gl.constexpr = rings.v.shape[0]
    BLOCK_N: gl.constexpr = rings.v.shape[3]
    BLOCK_D: gl.constexpr = rings.v.shape[4]
    mbarrier.wait(rings.v_ready.index(turn % SLOTS), turn // SLOTS & 1)
    v = rings.v.index(turn % SLOTS).reshape([BLOCK_N, BLOCK_D])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _softmax_step(s, row_max, row_sum, at, start, tile, span, work, BLOCK_N: gl.constexpr, NEGATIVE: gl.constexpr):
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
        i = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s.type.layout))[:, None]
        j = at * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
        seen = j < tile.tk
        if work.left is not None:
            seen &= i + (tile.tk - tile.tq) - j <= work.left
        if work.right is not None:
            seen &= i + (tile.tk - tile.tq) - j >= -work.right
        x = gl.where(seen, x, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(x, 1) * factor)
    p = gl.exp2(x * factor - new_max[:, None])
    alpha = gl.exp2(row_max - new_max)
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


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
    tile = _read_note(0, rings, work, PACKED)
    if not PACKED or tile.start != END:
        n = 0
        span = _span(W, tile, work, TILE, BLOCK_N)
        turn = _pass_by(span.before, gl.to_tensor(0), rings)
        q = rings.q.index(W).reshape([ROWS, BLOCK_D])
        mbarrier.wait(rings.q_ready.index(W), 0)
        s = warpgroup_mma_wait(0, deps=(_scores(q, turn, rings, S),))
        mbarrier.arrive(rings.k_free.index(turn % SLOTS), count=1)
        row_max, row_sum = _start_rows(tile, work, S)
        p, row_max, row_sum, _ = _softmax_step(
            s, row_max, row_sum, span.last - 1, tile.start + W * ROWS, tile, span, work, BLOCK_N, NEGATIVE
        )
        p = gl.convert_layout(p.to(dtype), P)
        acc = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=O)
        more = tile.start != END
        while more:
            start = tile.start + W * ROWS
            q_slot = n % Q_SLOTS * WARPGROUPS + W
            q = rings.q.index(q_slot).reshape([ROWS, BLOCK_D])
            for j in range(1, span.last - span.first):
                s = _scores(q, turn + 1, rings, S)
                acc = _add_values(p, acc, turn, rings)
                s = warpgroup_mma_wait(1, deps=(s,))
                mbarrier.arrive(rings.k_free.index((turn + 1) % SLOTS), count=1)
                p_next, row_max, row_sum, alpha = _softmax_step(
                    s, row_max, row_sum, span.last - 1 - j, start, tile, span, work, BLOCK_N, NEGATIVE
                )
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(rings.v_free.index(turn % SLOTS), count=1)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
                p = gl.convert_layout(p_next.to(dtype), P)
                turn += 1
            if Q_SLOTS > 1:
                tma.store_wait(0)
                mbarrier.arrive(rings.q_free.index((n + Q_SLOTS - 1) % Q_SLOTS * WARPGROUPS + W), count=1, pred=n > 0)

            following = _read_note(n + 1, rings, work, PACKED)
            more = following.start != END
            if more:
                next_span = _span(W, following, work, TILE, BLOCK_N)
                next_slot = (n + 1) % Q_SLOTS * WARPGROUPS + W
                next_q = rings.q.index(next_slot).reshape([ROWS, BLOCK_D])
                next_max, next_sum = _start_rows(following, work, S)
                if Q_SLOTS > 1:
                    next_turn = _pass_by(span.behind, turn + 1, rings)
                    next_turn = _pass_by(next_span.before, next_turn, rings)
                    mbarrier.wait(rings.q_ready.index(next_slot), (n + 1) // Q_SLOTS & 1)
                    s = _scores(next_q, next_turn, rings, S)
                    acc = _add_values(p, acc, turn, rings)
                    s = warpgroup_mma_wait(1, deps=(s,))
                    mbarrier.arrive(rings.k_free.index(next_turn % SLOTS), count=1)
                    p_next, next_max, next_sum, _ = _softmax_step(
                        s, next_max, next_sum, next_span.last - 1, following.start + W * ROWS, following, next_span, work,
                        BLOCK_N, NEGATIVE,
                    )  # fmt: skip
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(rings.v_free.index(turn % SLOTS), count=1)
                    p = gl.convert_layout(p_next.to(dtype), P)
                    _write(acc, row_max, row_sum, tile, start, rings.q.index(q_slot), out, PACKED, D)
                else:
                    acc = warpgroup_mma_wait(0, deps=(_add_values(p, acc, turn, rings),))
                    mbarrier.arrive(rings.v_free.index(turn % SLOTS), count=1)
                    _write(acc, row_max, row_sum, tile, start, rings.q.index(q_slot), out, PACKED, D)
                    tma.store_wait(0)
                    mbarrier.arrive(rings.q_free.index(q_slot), count=1)
                    next_turn = _pass_by(span.behind, turn + 1, rings)
                    next_turn = _pass_by(next_span.before, next_turn, rings)
                    mbarrier.wait(rings.q_ready.index(next_slot), (n + 1) // Q_SLOTS & 1)
                    s = warpgroup_mma_wait(0, deps=(_scores(next_q, next_turn, rings, S),))
                    mbarrier.arrive(rings.k_free.index(next_turn % SLOTS), count=1)
                    p_next, next_max, next_sum, _ = _softmax_step(
                        s, next_max, next_sum, next_span.last - 1, following.start + W * ROWS, following, next_span, work,
                        BLOCK_N, NEGATIVE,
                    )  # fmt: skip
                    p = gl.convert_layout(p_next.to(dtype), P)
                acc = gl.zeros((ROWS, BLOCK_D), gl.float32, layout=O)
                row_max = next_max
                row_sum = next_sum
                tile = following
                span = next_span
                turn = next_turn
                n += 1
        acc = warpgroup_mma_wait(0, deps=(_add_values(p, acc, turn, rings),))
        slot = rings.q.index(n % Q_SLOTS * WARPGROUPS + W)
        _write(acc, row_max, row_sum, tile, tile.start + W * ROWS, slot, out, PACKED, D)
    tma.store_wait(0)


TENSORS = ["cu_seqlens_q", "cu_seqlens_k", "sinks", "lse", "taken"]  # not o: TMA has it aligned
SIZES = ["o_h", "o_t", "lse_b", "lse_h", "lse_t", "sinks_h", "batch", "heads", "group", "row_tiles", "wave", "tq", "tk"]


@gluon.jit(do_not_specialize=[*TENSORS, *SIZES, "left", "right"])
def _attention_fwd_kernel(
    q_desc, k_desc, v_desc, cu_seqlens_q, cu_seqlens_k, sinks,
    o_desc, o, lse, taken,
    o_h: gl.int64, o_t: gl.int64, lse_b: gl.int64, lse_h: gl.int64, lse_t: gl.int64, sinks_h: gl.int64,
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
        start_q=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word) if PACKED else None,
        start_k=None,
        tq=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word) if PACKED else None,
        tk=gl.allocate_shared_memory(gl.int32, [NOTES, 1], word) if PACKED else None,
    )
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
        note_ready=gl.allocate_shared_memory(gl.int64, [NOTES, 1], barrier),
    )
    for slot in gl.static_range(Q_SLOTS * WARPGROUPS):
        mbarrier.init(rings.q_ready.index(slot), count=1)
        mbarrier.init(rings.q_free.index(slot), count=1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(rings.k_ready.index(slot), count=1)
        mbarrier.init(rings.k_free.index(slot), count=WARPGROUPS)
        mbarrier.init(rings.v_ready.index(slot), count=1)
        mbarrier.init(rings.v_free.index(slot), count=WARPGROUPS)
    for slot in gl.static_range(NOTES):
        mbarrier.init(rings.note_ready.index(slot), count=1)
    work = Work(
        cu_seqlens_q, cu_seqlens_k, sinks, sinks_h, taken, batch, heads, group, row_tiles, wave, tq, tk, left, right,
        factor, softcap,
    )  # fmt: skip
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
        ], [4, 4, 1], [160, 160, 32])  # fmt: skip
