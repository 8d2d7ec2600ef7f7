"""Who walks which tile in Hopper's backward: the order of tiles, and the two partitions that only move data.

A program takes tiles of columns one after the other, the next where it is needed next: `taken` counts them for all
programs. `load` takes a tile, works out which rows see it, and tells the others by a record in shared memory; with every
tile of rows it leaves a note. So partitions that multiply hold none of this in registers.

A ring hands buffers over by pairs of barriers, "full" (the reader waits for it) and "empty" (the writer does): the n-th use
of a ring of S slots is slot n % S in phase n // S, and every partition counts uses for itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .tma import tma_reduce_add

RECORDS = gl.constexpr(2)
FIELDS = gl.constexpr(15)  # of a ColumnTile
RECORD = gl.constexpr(32)  # words of one; behind the fields, whether dk and dv of the tile are to be stored
DK = gl.constexpr(0)  # which of the two, in records and in the sums of shared tiles
DV = gl.constexpr(1)
CROSSED = gl.constexpr(1)  # in a note on a tile of rows: an edge crosses it
LAST = gl.constexpr(2)  # it is the last of its tile of columns
NOTE_BITS = gl.constexpr(2)  # above these, its number
WRAP = gl.constexpr(2**30)  # of packed sequences: the row at which every one of them ends, see packed_descriptor


class Call(NamedTuple):
    """What a program is told about the call; left and right are None where nothing lies beyond them."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    batch: Any
    kv_heads: Any
    all_heads: Any  # batch · kv_heads
    group: Any
    tq: Any
    tk: Any
    left: Any
    right: Any
    span: Any  # kv heads walked together
    splits: Any  # programs that share the rows of a tile of columns; None: one


class ColumnTile(NamedTuple):
    """BLOCK_N columns of one kv head from n · BLOCK_N on, and the tiles of rows that see them: `count` from `first` on for
    each query head of the group. An edge crosses `crossed` of them at the beginning and `masked` in all: these are walked
    first, then the others. Of all these steps the program takes begin … end; b is −1 when no tile is left."""

    b: Any
    kv_head: Any
    n: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any
    first: Any
    crossed: Any
    inner: Any  # how many no edge crosses
    masked: Any
    count: Any
    begin: Any
    end: Any
    index: Any  # of the tile among all that are taken


class Ring(NamedTuple):
    """Slots with their two barriers."""

    slots: Any
    full: Any
    empty: Any


class Inputs(NamedTuple):
    """What `load` fills: rings of tiles, and rows and notes that come with q and do."""

    q: Any
    do: Any
    k: Any
    v: Any
    shift: Any
    delta: Any
    notes: Any


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def ring(desc, SLOTS: gl.constexpr, READERS: gl.constexpr = 1):
    """Slots for boxes of a descriptor."""
    slots = gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)  # noqa: RUF005 (in a kernel)
    return Ring(slots, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.jit
def acquire(ring, use):
    """The writer's: the slot of a use, once its readers are done."""
    S: gl.constexpr = ring.empty.shape[0]
    mbarrier.wait(ring.empty.index(use % S), ((use // S) & 1) ^ 1)
    return ring.slots.index(use % S)


@gluon.jit
def await_full(ring, use):
    """The reader's: the slot of a use, once it is written."""
    S: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(use % S), (use // S) & 1)
    return ring.slots.index(use % S)


@gluon.jit
def release(bars, use):
    S: gl.constexpr = bars.shape[0]
    mbarrier.arrive(bars.index(use % S), count=1)


@gluon.jit
def write(numbers, i, value):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(i).store(gl.full([1], value, gl.int32, layout=L))


@gluon.jit
def read(numbers, i):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(numbers.index(i).load(L), 0)


@gluon.jit
def _tell(records, turn, tile, VARLEN: gl.constexpr):
    """Write the record of a turn."""
    mbarrier.wait(records.empty.index(turn % RECORDS), ((turn // RECORDS) & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        if VARLEN or (i < 3 or i > 6):
            write(records.slots, turn % RECORDS * RECORD + i, tile[i])
    release(records.full, turn)


@gluon.jit
def hear(records, turn, call):
    """Wait for the record of a turn. It stays until `release(records.empty, …)`."""
    mbarrier.wait(records.full.index(turn % RECORDS), (turn // RECORDS) & 1)
    return recall(records, turn, call)


@gluon.jit
def recall(records, turn, call):
    """The record of a turn, read again: what is read when it is needed holds no registers before."""
    at = turn % RECORDS * RECORD
    start_q = 0
    start_k = 0
    tq = call.tq
    tk = call.tk
    if call.cu_seqlens_q is not None:
        start_q = read(records.slots, at + 3)
        start_k = read(records.slots, at + 4)
        tq = read(records.slots, at + 5)
        tk = read(records.slots, at + 6)
    return ColumnTile(
        read(records.slots, at), read(records.slots, at + 1), read(records.slots, at + 2), start_q, start_k, tq, tk,
        read(records.slots, at + 7), read(records.slots, at + 8), read(records.slots, at + 9),
        read(records.slots, at + 10), read(records.slots, at + 11), read(records.slots, at + 12),
        read(records.slots, at + 13), read(records.slots, at + 14),
    )  # fmt: skip


@gluon.jit
def _row_tile(tile, i):
    """The i-th tile of rows of the walk."""
    crossed = tile.first + i + gl.where(i < tile.crossed, 0, tile.inner)
    return gl.where(i < tile.masked, crossed, tile.first + tile.crossed + i - tile.masked)


@gluon.jit
def _dense_place(t, call, col_tiles):
    """(head, n) of the t-th tile: `span` heads together, and of these all first columns, then all second ones …"""
    run = t // (call.span * col_tiles)
    within = t - run * call.span * col_tiles
    width = gl.minimum(call.span, call.all_heads - run * call.span)
    n = within // width
    return run * call.span + within - n * width, n


@gluon.jit
def _column_tile(
    b, kv_head, n, start_q, start_k, tq, tk, call, part, index, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    start = n * BLOCK_N
    stop = gl.minimum(start + BLOCK_N, tk)
    shift = tq - tk
    first = n * 0
    full = n * 0
    last = (tq + BLOCK_M - 1) // BLOCK_M
    if call.right is not None:
        first = gl.maximum(start + shift - call.right, 0) // BLOCK_M
        full = (gl.maximum(stop - 1 + shift - call.right, 0) + BLOCK_M - 1) // BLOCK_M
    if call.left is not None:
        last = (gl.maximum(gl.minimum(tq, stop + shift + call.left), 0) + BLOCK_M - 1) // BLOCK_M
    last = gl.maximum(last, first)
    full = gl.minimum(gl.maximum(full, first), last)
    full_end = last  # rows beyond the end need no mask: their shift makes p = 0
    if call.left is not None:
        full_end = gl.minimum(gl.maximum(start + shift + call.left + 1, 0) // BLOCK_M, last)
    full = gl.where(start + BLOCK_N > tk, last, full)  # columns beyond the end do
    full_end = gl.maximum(full, full_end)
    inner = full_end - full
    count = last - first
    begin = n * 0
    end = count * call.group
    if call.splits is not None:
        begin = end * part // call.splits
        end = end * (part + 1) // call.splits
    return ColumnTile(
        b, kv_head, n, start_q, start_k, tq, tk, first, full - first, inner, count - inner, count, begin, end, index
    )


@gluon.jit
def _take(taken, call):
    """(tile, part of it) that is next."""
    t = gl.atomic_add(taken, 1)
    part = 0
    if call.splits is not None:
        part = t % call.splits
        t = t // call.splits
    return t, part


@gluon.jit
def first_row(b, start_q, rows_b, VARLEN: gl.constexpr):
    """Where sequence b begins in shift and delta. Packed sequences are padded to multiples of rows_b there, for TMA reads
    a row of numbers only from multiples of 16 bytes on."""
    return (start_q + b * rows_b) // rows_b * rows_b if VARLEN else b * rows_b


@gluon.jit
def _at(call, b, start, size, h, row, column):
    """Coordinates of a row of sequence b for TMA; of packed sequences in the axes of packed_descriptor."""
    if call.cu_seqlens_q is None:
        return b, h, row, column
    else:
        return WRAP, start + size, h, WRAP - size + row, column


@gluon.jit
def _load_columns(k_desc, v_desc, call, tile, inputs, turn, BLOCK_N: gl.constexpr):
    at = _at(call, tile.b, tile.start_k, tile.tk, tile.kv_head, tile.n * BLOCK_N, 0)
    k_s = acquire(inputs.k, turn)
    mbarrier.expect(inputs.k.full.index(0), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, at, inputs.k.full.index(0), k_s)
    v_s = acquire(inputs.v, turn)
    mbarrier.expect(inputs.v.full.index(0), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, at, inputs.v.full.index(0), v_s)


@gluon.jit
def _load_tile(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, inputs, records, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """q and do of every tile of rows, and behind the first q, k and v: their slots are free later than q's."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    Q_SLOTS: gl.constexpr = inputs.q.full.shape[0]
    DO_SLOTS: gl.constexpr = inputs.do.full.shape[0]
    _tell(records, turn, tile, VARLEN)
    row = first_row(tile.b, tile.start_q, rows_b, VARLEN)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * call.group + g
        m = _row_tile(tile, i)
        at = _at(call, tile.b, tile.start_q, tile.tq, h, m * BLOCK_M, 0)
        note = gl.where(step == tile.end - 1, LAST, 0) + gl.where(i < tile.masked, CROSSED, 0)
        q_s = acquire(inputs.q, use)
        write(inputs.notes, use % Q_SLOTS, (m << NOTE_BITS) + note)
        full = inputs.q.full.index(use % Q_SLOTS)
        mbarrier.expect(full, q_desc.block_type.nbytes + shift_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, at, full, q_s)
        shift_s = inputs.shift.index(use % Q_SLOTS)
        tma.async_copy_global_to_shared(shift_desc, [h * rows_h + row + m * BLOCK_M], full, shift_s)
        if step == tile.begin:
            _load_columns(k_desc, v_desc, call, tile, inputs, turn, BLOCK_N)
        do_s = acquire(inputs.do, use)
        full = inputs.do.full.index(use % DO_SLOTS)
        mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, at, full, do_s)
        delta_s = inputs.delta.index(use % DO_SLOTS)
        tma.async_copy_global_to_shared(delta_desc, [h * rows_h + row + m * BLOCK_M], full, delta_s)
        use += 1
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)
    if tile.begin == tile.end:
        _load_columns(k_desc, v_desc, call, tile, inputs, turn, BLOCK_N)
    return use


@gluon.jit
def load(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, inputs, records, taken, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that takes tiles, tells the others and loads."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    turn = 0
    use = 0
    before = 0
    t, part = _take(taken, call)
    sequences = call.batch if VARLEN else 1
    for b in range(0, sequences):
        start_q = 0
        start_k = 0
        tq = call.tq
        tk = call.tk
        heads = call.kv_heads
        if VARLEN:
            start_q = gl.load(call.cu_seqlens_q + b)
            start_k = gl.load(call.cu_seqlens_k + b)
            tq = gl.load(call.cu_seqlens_q + b + 1) - start_q
            tk = gl.load(call.cu_seqlens_k + b + 1) - start_k
        else:
            heads = call.all_heads
        col_tiles = (tk + BLOCK_N - 1) // BLOCK_N
        after = before + col_tiles * heads
        while t < after:
            if VARLEN:
                b_of = b
                kv_head = (t - before) // col_tiles
                n = t - before - kv_head * col_tiles
            else:
                head, n = _dense_place(t, call, col_tiles)
                b_of = head // call.kv_heads
                kv_head = head - b_of * call.kv_heads
            if DESCENDING:
                n = col_tiles - 1 - n
            tile = _column_tile(b_of, kv_head, n, start_q, start_k, tq, tk, call, part, t, BLOCK_M, BLOCK_N)
            use = _load_tile(
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, inputs, records,
                rows_b, rows_h, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            turn += 1
            t, part = _take(taken, call)
        before = after
    _tell(records, turn, ColumnTile(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), VARLEN)


@gluon.jit
def reduce(
    dq_desc, dk_desc, dv_desc, call, inputs, dq_ring, records, turns, row_tiles, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr,
    OUT_SLOTS: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that brings the dq of every tile of rows to memory; behind the last of them come dv and dk."""
    DTYPE: gl.constexpr = inputs.k.slots.dtype
    turn = 0
    use = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        use = _reduce_rows(
            dq_desc, call, tile, dq_ring, use, turns, row_tiles, rows_b, rows_h,
            BLOCK_M, BLOCK_N, D, SLICES, DESCENDING,
        )  # fmt: skip
        at = _at(call, tile.b, tile.start_k, tile.tk, tile.kv_head, tile.n * BLOCK_N, 0)
        use = _store(dv_desc, at, call, dq_ring, use, records, turn, DV, DTYPE, BLOCK_N, D, OUT_SLOTS)
        use = _store(dk_desc, at, call, dq_ring, use, records, turn, DK, DTYPE, BLOCK_N, D, OUT_SLOTS)
        release(records.empty, turn)
        turn += 1
        tile = hear(records, turn, call)


@gluon.jit
def _reduce_rows(
    dq_desc, call, tile, dq_ring, use, turns, row_tiles, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """dq of every tile of rows of a tile of columns, added to memory; with `turns` in order, and the first is stored. A slot is
    given back when the next addition is under way."""
    gl.static_assert(dq_ring.full.shape[0] > 1)
    row = first_row(tile.b, tile.start_q, rows_b, call.cu_seqlens_q is not None)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * call.group + g
        m = _row_tile(tile, i)
        before = 1
        if turns is not None:
            before = _before(m, tile, call, BLOCK_M, BLOCK_N, DESCENDING)
            counter = turns + ((tile.b * call.kv_heads * call.group + h) * row_tiles + m)
            if before > 0:
                _wait_until(counter, before)
        for part in gl.static_range(SLICES):
            dq_s = await_full(dq_ring, use)
            at = [h * rows_h + row + m * BLOCK_M, part * (D // SLICES)]
            if before == 0:
                tma.async_copy_shared_to_global(dq_desc, at, dq_s)
            else:
                tma_reduce_add(dq_desc, at, dq_s)
            if (step > tile.begin) | (part > 0):
                tma.store_wait(1)
                release(dq_ring.empty, use - 1)
            use += 1
        if turns is not None:
            _settle()
            gl.atomic_add(counter, 1, sem="release")
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)
    if tile.begin < tile.end:
        tma.store_wait(0)
        release(dq_ring.empty, use - 1)
    return use


@gluon.jit
def out_slot(dq_ring, use, call, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, OUT_SLOTS: gl.constexpr):
    """A slot of dq, or all of them, as a tile of dk or dv."""
    BOX: gl.constexpr = [1, 1, BLOCK_N, D] if call.cu_seqlens_q is None else [1, 1, 1, BLOCK_N, D]
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, DTYPE)
    if OUT_SLOTS == 1:
        return dq_ring.slots.index(use % dq_ring.full.shape[0])._reinterpret(DTYPE, BOX, L)
    else:
        gl.static_assert(dq_ring.full.shape[0] == OUT_SLOTS)
        return dq_ring.slots._reinterpret(DTYPE, [1] + BOX, L).index(0)  # noqa: RUF005 (in a kernel)


@gluon.jit
def _store(
    desc, at, call, dq_ring, use, records, turn, which,
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    """dk or dv to memory; of a shared tile only if the program is the last of those that share it."""
    for part in gl.static_range(OUT_SLOTS):
        await_full(dq_ring, use + part)
    if desc is not None:
        wanted = 1
        if call.splits is not None:
            wanted = read(records.slots, turn % RECORDS * RECORD + FIELDS + which)
        if wanted != 0:
            tma.async_copy_shared_to_global(desc, at, out_slot(dq_ring, use, call, DTYPE, BLOCK_N, D, OUT_SLOTS))
            tma.store_wait(0)
    for part in gl.static_range(OUT_SLOTS):
        release(dq_ring.empty, use + part)
    return use + OUT_SLOTS


@gluon.jit
def _before(m, tile, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DESCENDING: gl.constexpr):
    """How many tiles of columns add to row tile m before tile.n does."""
    back = m * BLOCK_M + tile.tk - tile.tq
    if DESCENDING:
        last = (tile.tk + BLOCK_N - 1) // BLOCK_N
        if call.right is not None:
            last = gl.minimum(last, (back + BLOCK_M + call.right + BLOCK_N - 1) // BLOCK_N)
        return last - 1 - tile.n
    else:
        first = m * 0
        if call.left is not None:
            first = gl.maximum(back - call.left, 0) // BLOCK_N
        return tile.n - first


@gluon.jit
def _instructions(code: gl.constexpr):
    """Of every thread of the warp, in their place among the others."""
    gl.inline_asm_elementwise(
        code + " mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _wait_until(counter, value):
    """Until a counter has come so far, and what was in memory then is what TMA finds there."""
    while gl.atomic_add(counter, 0, sem="acquire") < value:
        pass
    _instructions("fence.proxy.async.global;")


@gluon.jit
def _settle():
    """Until what the warp stored or added by TMA is in memory, not only read from shared memory. The thread that sent it waits;
    the one that tells other programs may be another, so they meet."""
    _instructions("cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff;")
