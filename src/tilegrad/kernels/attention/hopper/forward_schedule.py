"""Which rows and columns each program of Hopper's forward takes, and the partition that loads them; the products are
forward.py's, and its docstring has the handshake.

**Order.** A program takes tile after tile of rows, and while the last products of one drain, q and k of the next are on their
way. The loader decides: before it loads a tile it leaves a note of it for the warpgroups, in a ring of its own. It is never
more than two tiles ahead of the slowest (q's slots), so of four notes none is overwritten that is still read; and a warpgroup
has to hand back every tile of columns before it waits for the next note, else both wait for ever.
Dense tiles are dealt out in rounds, forth and back, so that a program with long tiles (causal, or full of rows) in one round
has short ones in the next; `wave` heads are walked together, chosen so that their k and v stay in L2. Packed sequences are cut
into slots of tiles, sequence b from slot cu_seqlens_q[b] / rows + b on, which needs no sums over lengths; programs take them
one by one from a counter and skip those without rows.

Tiles of rows are counted from the end of a sequence: the one that is not full is the first, which has the least to do under a
causal edge.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..triton import scores as triton_mask

ROWS = gl.constexpr(64)  # of a warpgroup
SEQUENCES = gl.constexpr(128)  # looked at together for the one that owns a slot
NOTES = gl.constexpr(4)  # of tiles of rows, kept at once
END = gl.constexpr(-(2**30))  # where rows start in the note after the last

band_tiles = gluon.jit(triton_mask.band_tiles.fn)


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
    """Rows start … of head h of sequence b, which has tq rows from start_q on and tk columns from start_k on, and the columns'
    tiles first … last that they see. A note is all of it but start_k."""

    b: Any
    h: Any
    start: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any
    first: Any
    last: Any


class Span(NamedTuple):
    """Of a warpgroup: tiles that it passes by before the first that it takes; those it takes, first … last, without an edge
    full … full_end; the column that its row 0 stands at; columns in all."""

    before: Any
    first: Any
    full: Any
    full_end: Any
    last: Any
    diagonal: Any
    tk: Any


@gluon.jit
def _next_index(n, work):
    """Which tile this program takes in its n-th turn."""
    if work.cu_seqlens_q is not None:
        return gl.atomic_add(work.taken, 1, sem="relaxed")
    else:
        here = gl.program_id(0)
        programs = gl.num_programs(0)
        return n * programs + gl.where(n % 2 == 0, here, programs - 1 - here)


@gluon.jit
def _tiles(work):
    """Tiles of rows of the whole call; of packed sequences the slots."""
    tiles = work.row_tiles * work.heads
    if work.cu_seqlens_q is None:
        tiles = tiles * work.batch
    return tiles


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
def _tile(index, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
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
    start = tq - (m + 1) * TILE
    first, _, _, last = band_tiles(gl.maximum(start, 0), start + TILE, tk - tq, work.left, work.right, tk, BLOCK_N)
    return Tile(b, h, start, start_q, start_k, tq, tk, first, gl.maximum(last, first + 1))


@gluon.jit
def _span(W: gl.constexpr, tile, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """What rows of warpgroup W see, at least one tile; a warpgroup whose rows lie before row 0 takes just the last."""
    start = tile.start + W * ROWS
    first, full, full_end, last = band_tiles(
        gl.maximum(start, 0), start + ROWS, tile.tk - tile.tq, work.left, work.right, tile.tk, BLOCK_N
    )
    first = gl.minimum(first, tile.last - 1)
    last = gl.maximum(gl.minimum(last, tile.last), first + 1)
    if W * ROWS + ROWS < TILE:
        none = start + ROWS <= 0
        last = gl.where(none, tile.last, last)
        first = gl.where(none, tile.last - 1, first)
    return Span(tile.last - last, first, full, full_end, last, start + tile.tk - tile.tq, tile.tk)


@gluon.jit
def _leave(note, slot, value):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    note.index(slot).store(gl.full((1,), value, gl.int32, layout=ONE))


@gluon.jit
def _leave_note(n, tile, start, rings):
    slot = n % NOTES
    _leave(rings.notes.b, slot, tile.b)
    _leave(rings.notes.h, slot, tile.h)
    _leave(rings.notes.start, slot, start)
    _leave(rings.notes.start_q, slot, tile.start_q)
    _leave(rings.notes.tq, slot, tile.tq)
    _leave(rings.notes.tk, slot, tile.tk)
    _leave(rings.notes.first, slot, tile.first)
    _leave(rings.notes.last, slot, tile.last)
    mbarrier.arrive(rings.note_ready.index(slot), count=1)


@gluon.jit
def read_number(note, slot):
    """A number of a note; the maximum of one is a scalar."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(note.index(slot).load(ONE), 0)


@gluon.jit
def read_note(n, rings, work):
    slot = n % NOTES
    start_q = n * 0
    tq = work.tq
    tk = work.tk
    if work.cu_seqlens_q is not None:
        start_q = read_number(rings.notes.start_q, slot)
        tq = read_number(rings.notes.tq, slot)
        tk = read_number(rings.notes.tk, slot)
    return Tile(
        read_number(rings.notes.b, slot), read_number(rings.notes.h, slot), read_number(rings.notes.start, slot),
        start_q, n * 0, tq, tk, read_number(rings.notes.first, slot), read_number(rings.notes.last, slot),
    )  # fmt: skip


@gluon.jit
def next_span(W: gl.constexpr, n, rings, work, TILE: gl.constexpr, BLOCK_N: gl.constexpr):
    """This warpgroup's columns in turn n, and whether there is one."""
    mbarrier.wait(rings.note_ready.index(n % NOTES), n // NOTES & 1)
    tile = read_note(n, rings, work)
    return _span(W, tile, work, TILE, BLOCK_N), tile.start != END


@gluon.jit
def load(q_desc, k_desc, v_desc, rings, work, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, PACKED: gl.constexpr):
    Q_SLOTS: gl.constexpr = rings.q_ready.shape[0] // WARPGROUPS
    SLOTS: gl.constexpr = rings.k.shape[0]
    TILE: gl.constexpr = ROWS * WARPGROUPS
    turn = 0
    n = 0
    index = _next_index(0, work)
    while index < _tiles(work):
        tile = _tile(index, work, TILE, BLOCK_N)
        if not PACKED or tile.start > -TILE:
            _leave_note(n, tile, tile.start, rings)
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
            n += 1
        index = _next_index(n, work)
    nothing = index * 0
    end = Tile(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    _leave_note(n, end, nothing + END, rings)


@gluon.jit
def pass_by(tiles, turn, rings):
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
