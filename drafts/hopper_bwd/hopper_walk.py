"""Who walks which tile in Hopper's backward: the order of tiles, and the two partitions that only move data.

A program takes tiles of columns one after the other, the next where it is needed next: `taken` counts them for all
programs. `load` takes a tile, works out which rows see it, and tells the others by a record in shared memory; with every
tile of rows it leaves a note. So the partition that multiplies holds none of this in registers.

A ring hands buffers over by pairs of barriers, "full" (the reader waits for it) and "empty" (the writer does): the n-th use
of a ring of S slots is slot n % S in phase n // S, and every partition counts uses for itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper_tma import tma_reduce_add

RECORDS = gl.constexpr(2)
FIELDS = gl.constexpr(14)  # of a ColumnTile
RECORD = gl.constexpr(16)  # words of one
CROSSED = gl.constexpr(1)  # in a note on a tile of rows: an edge crosses it
LAST = gl.constexpr(2)  # it is the last of its tile of columns
NOTE_BITS = gl.constexpr(2)  # above these, its number


class Call(NamedTuple):
    """What a program is told about the call; left and right are None where nothing lies beyond them."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    batch: Any
    kv_heads: Any
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


class Ring(NamedTuple):
    """Slots with their two barriers."""

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def barriers(N: gl.constexpr, READERS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=READERS)
    return bars


@gluon.jit
def acquire(ring, use, SLOTS: gl.constexpr):
    """The writer's: the slot of a use, once its readers are done."""
    mbarrier.wait(ring.empty.index(use % SLOTS), ((use // SLOTS) & 1) ^ 1)
    return ring.slots.index(use % SLOTS)


@gluon.jit
def await_full(ring, use, SLOTS: gl.constexpr):
    """The reader's: the slot of a use, once it is written."""
    mbarrier.wait(ring.full.index(use % SLOTS), (use // SLOTS) & 1)
    return ring.slots.index(use % SLOTS)


@gluon.jit
def release(bars, use, SLOTS: gl.constexpr):
    mbarrier.arrive(bars.index(use % SLOTS), count=1)


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
    release(records.full, turn, RECORDS)


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
        read(records.slots, at + 13),
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
    width = gl.minimum(call.span, call.batch * call.kv_heads - run * call.span)
    n = within // width
    return run * call.span + within - n * width, n


@gluon.jit
def _column_tile(b, kv_head, n, start_q, start_k, tq, tk, call, part, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
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
        b, kv_head, n, start_q, start_k, tq, tk, first, full - first, inner, count - inner, count, begin, end
    )


@gluon.jit
def first_row(b, start_q, rows_b, VARLEN: gl.constexpr):
    """Where sequence b begins in shift and delta. Packed sequences are padded to multiples of rows_b there, for TMA reads
    a row of numbers only from multiples of 16 bytes on."""
    return (start_q + b * rows_b) // rows_b * rows_b if VARLEN else b * rows_b


@gluon.jit
def _load_columns(k_desc, v_desc, tile, b, k_ring, v_ring, turn, BLOCK_N: gl.constexpr):
    at = [b, tile.kv_head, tile.start_k + tile.n * BLOCK_N, 0]
    k_s = acquire(k_ring, turn, 1)
    mbarrier.expect(k_ring.full.index(0), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, at, k_ring.full.index(0), k_s)
    v_s = acquire(v_ring, turn, 1)
    mbarrier.expect(v_ring.full.index(0), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, at, v_ring.full.index(0), v_s)


@gluon.jit
def _load_tile(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, q_ring, do_ring, notes, shift_s, delta_s,
    k_ring, v_ring, records, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
):  # fmt: skip
    """q and do of every tile of rows, and behind the first q, k and v: their slots are free later than q's."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    _tell(records, turn, tile, VARLEN)
    b = 0 if VARLEN else tile.b
    at = first_row(tile.b, tile.start_q, rows_b, VARLEN)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * call.group + g
        m = _row_tile(tile, i)
        note = gl.where(step == tile.end - 1, LAST, 0) + gl.where(i < tile.masked, CROSSED, 0)
        q_s = acquire(q_ring, use, Q_SLOTS)
        write(notes, use % Q_SLOTS, (m << NOTE_BITS) + note)
        full = q_ring.full.index(use % Q_SLOTS)
        mbarrier.expect(full, q_desc.block_type.nbytes + shift_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h, tile.start_q + m * BLOCK_M, 0], full, q_s)
        tma.async_copy_global_to_shared(shift_desc, [h * rows_h + at + m * BLOCK_M], full, shift_s.index(use % Q_SLOTS))
        if step == tile.begin:
            _load_columns(k_desc, v_desc, tile, b, k_ring, v_ring, turn, BLOCK_N)
        do_s = acquire(do_ring, use, DO_SLOTS)
        full = do_ring.full.index(use % DO_SLOTS)
        mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(do_desc, [b, h, tile.start_q + m * BLOCK_M, 0], full, do_s)
        tma.async_copy_global_to_shared(
            delta_desc, [h * rows_h + at + m * BLOCK_M], full, delta_s.index(use % DO_SLOTS)
        )
        use += 1
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)
    if tile.begin == tile.end:
        _load_columns(k_desc, v_desc, tile, b, k_ring, v_ring, turn, BLOCK_N)
    return use


@gluon.jit
def load(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, notes, shift_s, delta_s, k_ring, v_ring,
    records, taken, rows_b, rows_h, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that takes tiles, tells the others and loads."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    turn = 0
    use = 0
    before = 0
    t = gl.atomic_add(taken, 1)
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
            heads = call.kv_heads * call.batch
        col_tiles = (tk + BLOCK_N - 1) // BLOCK_N
        after = before + col_tiles * heads
        if call.splits is not None:
            after = before + col_tiles * heads * call.splits
        while t < after:
            place = t - before
            part = 0
            if call.splits is not None:
                place = (t - before) // call.splits
                part = t - before - place * call.splits
            if VARLEN:
                b_of = b
                kv_head = place // col_tiles
                n = place - kv_head * col_tiles
            else:
                head, n = _dense_place(place, call, col_tiles)
                b_of = head // call.kv_heads
                kv_head = head - b_of * call.kv_heads
            if DESCENDING:
                n = col_tiles - 1 - n
            tile = _column_tile(b_of, kv_head, n, start_q, start_k, tq, tk, call, part, BLOCK_M, BLOCK_N)
            use = _load_tile(
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, q_ring, do_ring, notes,
                shift_s, delta_s, k_ring, v_ring, records, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS,
            )  # fmt: skip
            turn += 1
            t = gl.atomic_add(taken, 1)
        before = after
    _tell(records, turn, ColumnTile(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), VARLEN)


@gluon.jit
def reduce(
    dq_desc, dk_desc, dv_desc, call, dq_ring, records, semaphores, row_tiles,
    DTYPE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr,
    SLOTS: gl.constexpr, OUT_SLOTS: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that adds the dq of every tile of rows to memory; behind the last of them come dv and dk. A slot is given
    back when the next addition is under way, where there are slots for that and additions need not be in memory by then."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    AHEAD: gl.constexpr = SLOTS > 1 and semaphores is None
    turn = 0
    use = 0
    tile = hear(records, turn, call)
    while tile.b >= 0:
        b = 0 if VARLEN else tile.b
        g = tile.begin // gl.maximum(tile.count, 1)
        i = tile.begin - g * tile.count
        for step in range(tile.begin, tile.end):
            h = tile.kv_head * call.group + g
            m = _row_tile(tile, i)
            if semaphores is not None:
                semaphore = semaphores + ((tile.b * call.kv_heads * call.group + h) * row_tiles + m)
                _wait_until(semaphore, _before(m, tile, call, BLOCK_M, BLOCK_N, DESCENDING))
            for part in gl.static_range(SLICES):
                dq_s = await_full(dq_ring, use, SLOTS)
                tma_reduce_add(dq_desc, [b, h, tile.start_q + m * BLOCK_M, part * (D // SLICES)], dq_s)
                if AHEAD:
                    if (step > tile.begin) | (part > 0):
                        tma.store_wait(1)
                        release(dq_ring.empty, use - 1, SLOTS)
                else:
                    tma.store_wait(0)
                    release(dq_ring.empty, use, SLOTS)
                use += 1
            if semaphores is not None:
                _settle()
                gl.atomic_add(semaphore, 1, sem="release")
            i += 1
            g = gl.where(i == tile.count, g + 1, g)
            i = gl.where(i == tile.count, 0, i)
        if AHEAD:  # noqa: SIM102 (known when compiled)
            if tile.begin < tile.end:
                tma.store_wait(0)
                release(dq_ring.empty, use - 1, SLOTS)
        if call.splits is None:
            at = [b, tile.kv_head, tile.start_k + tile.n * BLOCK_N, 0]
            whole = is_whole(tile, call, BLOCK_N)
            use = _store(dv_desc, at, whole, dq_ring, use, DTYPE, BLOCK_N, D, SLOTS, OUT_SLOTS)
            use = _store(dk_desc, at, whole, dq_ring, use, DTYPE, BLOCK_N, D, SLOTS, OUT_SLOTS)
        release(records.empty, turn, RECORDS)
        turn += 1
        tile = hear(records, turn, call)


@gluon.jit
def out_slot(
    dq_ring, use,
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    """A slot of dq, or all of them, as a tile of dk or dv."""
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_N, D], DTYPE)
    if OUT_SLOTS == 1:
        return dq_ring.slots.index(use % SLOTS)._reinterpret(DTYPE, [1, 1, BLOCK_N, D], L)
    else:
        gl.static_assert(OUT_SLOTS == SLOTS)
        return dq_ring.slots._reinterpret(DTYPE, [1, 1, 1, BLOCK_N, D], L).index(0)


@gluon.jit
def _store(
    desc, at, whole, dq_ring, use,
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, OUT_SLOTS: gl.constexpr,
):  # fmt: skip
    for part in gl.static_range(OUT_SLOTS):
        await_full(dq_ring, use + part, SLOTS)
    out_s = out_slot(dq_ring, use, DTYPE, BLOCK_N, D, SLOTS, OUT_SLOTS)
    if desc is not None:  # noqa: SIM102 (known when compiled; `whole` is not)
        if whole:
            tma.async_copy_shared_to_global(desc, at, out_s)
            tma.store_wait(0)
    for part in gl.static_range(OUT_SLOTS):
        release(dq_ring.empty, use + part, SLOTS)
    return use + OUT_SLOTS


@gluon.jit
def is_whole(tile, call, BLOCK_N: gl.constexpr):
    """True if TMA may store the tile: it drops what lies beyond a tensor's end, but not beyond a packed sequence's."""
    if call.cu_seqlens_q is None:
        return tile.n >= 0
    else:
        return (tile.n + 1) * BLOCK_N <= tile.tk


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
def _wait_until(semaphore, value):
    while gl.atomic_add(semaphore, 0, sem="acquire") != value:
        pass


@gluon.jit
def _settle():
    """Until this thread's additions by TMA are in memory, not only read from shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r",
        [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
