"""Who walks which tile in Hopper's backward: the order of tiles, and the two partitions that only move data.

A program takes tiles of columns one after the other, the next where it is needed next: `taken` counts them for all
programs. `load` takes a tile, works out which rows see it, and tells the others by a record in shared memory; the partition
that multiplies has no registers to spare for it. Of packed sequences only tiles that exist are taken.

Rings hand buffers over by pairs of barriers, "full" (waited for by the reader) and "empty" (waited for by the writer): the
n-th use of a ring of S buffers is buffer n % S in phase n // S, and every partition counts uses for itself.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .hopper_tma import tma_reduce_add

FIELDS = gl.constexpr(16)  # of a record, a power of two; ColumnTile has 12
END = gl.constexpr(-1)  # as a count: there are no more tiles


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


class ColumnTile(NamedTuple):
    """BLOCK_N columns of one kv head from n · BLOCK_N on, and the tiles of rows that see them: `count` from `first` on. An
    edge crosses `crossed` of them at the beginning and `masked` in all: these are walked first, then the others."""

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


class Ring(NamedTuple):
    """Buffers with their two barriers."""

    buffer: Any
    full: Any
    empty: Any


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def acquire(ring, use, SLOTS: gl.constexpr):
    """The writer's: the buffer of a use, once its last reader is done."""
    mbarrier.wait(ring.empty.index(use % SLOTS), ((use // SLOTS) & 1) ^ 1)
    return ring.buffer.index(use % SLOTS)


@gluon.jit
def await_full(ring, use, SLOTS: gl.constexpr):
    """The reader's: the buffer of a use, once it is written."""
    mbarrier.wait(ring.full.index(use % SLOTS), (use // SLOTS) & 1)
    return ring.buffer.index(use % SLOTS)


@gluon.jit
def release(bars, use, SLOTS: gl.constexpr):
    mbarrier.arrive(bars.index(use % SLOTS), count=1)


@gluon.jit
def row_tile(tile, i):
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
def _column_tile(b, kv_head, n, start_q, start_k, tq, tk, call, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
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
    return ColumnTile(b, kv_head, n, start_q, start_k, tq, tk, first, full - first, inner, count - inner, count)


@gluon.jit
def _tell(ring, turn, tile, VARLEN: gl.constexpr):
    """Write the record of a turn."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ring.empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
    for i in gl.static_range(12):
        if VARLEN or (i < 3 or i > 6):
            ring.buffer.index(turn % 2 * FIELDS + i).store(gl.full([1], tile[i], gl.int32, layout=L))
    release(ring.full, turn, 2)


@gluon.jit
def _field(ring, turn, I: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(ring.buffer.index(turn % 2 * FIELDS + I).load(L), 0)


@gluon.jit
def hear(ring, turn, call):
    """Wait for the record of a turn. It stays until `release(ring.empty, …)`."""
    mbarrier.wait(ring.full.index(turn % 2), (turn // 2) & 1)
    return record(ring, turn, call)


@gluon.jit
def record(ring, turn, call):
    """The record of a turn, read again: what is not needed in between holds no registers."""
    start_q = 0
    start_k = 0
    tq = call.tq
    tk = call.tk
    if call.cu_seqlens_q is not None:
        start_q = _field(ring, turn, 3)
        start_k = _field(ring, turn, 4)
        tq = _field(ring, turn, 5)
        tk = _field(ring, turn, 6)
    return ColumnTile(
        _field(ring, turn, 0), _field(ring, turn, 1), _field(ring, turn, 2), start_q, start_k, tq, tk,
        _field(ring, turn, 7), _field(ring, turn, 8), _field(ring, turn, 9), _field(ring, turn, 10),
        _field(ring, turn, 11),
    )  # fmt: skip


@gluon.jit
def first_row(b, start_q, rows_b, VARLEN: gl.constexpr):
    """Where sequence b begins in shift and delta. Packed sequences are padded to multiples of rows_b there."""
    return (start_q + b * rows_b) // rows_b * rows_b if VARLEN else b * rows_b


@gluon.jit
def _load_tile(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, q_ring, do_ring, shift_s, delta_s,
    k_ring, v_ring, tiles_ring, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
):  # fmt: skip
    """q and do of every row tile, and behind the first of them k and v, whose buffers are free later."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    _tell(tiles_ring, turn, tile, VARLEN)
    b = 0 if VARLEN else tile.b
    for g in range(0, call.group):
        h = tile.kv_head * call.group + g
        row = h * rows_h + first_row(tile.b, tile.start_q, rows_b, VARLEN)
        for i in range(0, tile.count):
            m = row_tile(tile, i) * BLOCK_M
            q_s = acquire(q_ring, use, Q_SLOTS)
            full = q_ring.full.index(use % Q_SLOTS)
            mbarrier.expect(full, q_desc.block_type.nbytes + shift_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, h, tile.start_q + m, 0], full, q_s)
            tma.async_copy_global_to_shared(shift_desc, [row + m], full, shift_s.index(use % Q_SLOTS))
            if (g == 0) & (i == 0):
                _load_columns(k_desc, v_desc, tile, b, k_ring, v_ring, turn, BLOCK_N)
            do_s = acquire(do_ring, use, DO_SLOTS)
            full = do_ring.full.index(use % DO_SLOTS)
            mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(do_desc, [b, h, tile.start_q + m, 0], full, do_s)
            tma.async_copy_global_to_shared(delta_desc, [row + m], full, delta_s.index(use % DO_SLOTS))
            use += 1
    if tile.count == 0:
        _load_columns(k_desc, v_desc, tile, b, k_ring, v_ring, turn, BLOCK_N)
    return use


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
def load(
    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, q_ring, do_ring, shift_s, delta_s, k_ring, v_ring,
    tiles_ring, taken, rows_b, rows_h, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that takes tiles, loads them and tells the others. `taken` counts the tiles that programs took."""
    turn = 0
    use = 0
    t = gl.atomic_add(taken, 1)
    if call.cu_seqlens_q is None:
        col_tiles = (call.tk + BLOCK_N - 1) // BLOCK_N
        tiles = col_tiles * call.kv_heads * call.batch
        while t < tiles:
            head, n = _dense_place(t, call, col_tiles)
            if DESCENDING:
                n = col_tiles - 1 - n
            b = head // call.kv_heads
            tile = _column_tile(b, head - b * call.kv_heads, n, 0, 0, call.tq, call.tk, call, BLOCK_M, BLOCK_N)
            use = _load_tile(
                q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, q_ring, do_ring,
                shift_s, delta_s, k_ring, v_ring, tiles_ring, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS,
            )  # fmt: skip
            turn += 1
            t = gl.atomic_add(taken, 1)
    else:
        before = 0
        for b in range(0, call.batch):
            start_q = gl.load(call.cu_seqlens_q + b)
            start_k = gl.load(call.cu_seqlens_k + b)
            tq = gl.load(call.cu_seqlens_q + b + 1) - start_q
            tk = gl.load(call.cu_seqlens_k + b + 1) - start_k
            col_tiles = (tk + BLOCK_N - 1) // BLOCK_N
            after = before + col_tiles * call.kv_heads
            while t < after:
                kv_head = (t - before) // col_tiles
                n = t - before - kv_head * col_tiles
                if DESCENDING:
                    n = col_tiles - 1 - n
                tile = _column_tile(b, kv_head, n, start_q, start_k, tq, tk, call, BLOCK_M, BLOCK_N)
                use = _load_tile(
                    q_desc, k_desc, v_desc, do_desc, shift_desc, delta_desc, call, tile, turn, use, q_ring, do_ring,
                    shift_s, delta_s, k_ring, v_ring, tiles_ring, rows_b, rows_h, BLOCK_M, BLOCK_N, Q_SLOTS, DO_SLOTS,
                )  # fmt: skip
                turn += 1
                t = gl.atomic_add(taken, 1)
            before = after
    end = ColumnTile(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, END)
    _tell(tiles_ring, turn, end, call.cu_seqlens_q is not None)


@gluon.jit
def reduce(
    dq_desc, dk_desc, dv_desc, call, dq_ring, tiles_ring, semaphores, row_tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr, SLOTS: gl.constexpr,
    DESCENDING: gl.constexpr,
):  # fmt: skip
    """The partition that adds each row tile's dq to memory; behind a column tile's last, its dv and dk come the same way."""
    VARLEN: gl.constexpr = call.cu_seqlens_q is not None
    turn = 0
    use = 0
    tile = hear(tiles_ring, turn, call)
    while tile.count != END:
        b = 0 if VARLEN else tile.b
        for g in range(0, call.group):
            h = tile.kv_head * call.group + g
            for i in range(0, tile.count):
                m = row_tile(tile, i)
                if semaphores is not None:
                    semaphore = semaphores + ((tile.b * call.kv_heads * call.group + h) * row_tiles + m)
                    _wait_until(semaphore, _before(m, tile, call, BLOCK_M, BLOCK_N, DESCENDING))
                for part in gl.static_range(SLICES):
                    dq_s = await_full(dq_ring, use, SLOTS)
                    tma_reduce_add(dq_desc, [b, h, tile.start_q + m * BLOCK_M, part * (D // SLICES)], dq_s)
                    tma.store_wait(0)
                    release(dq_ring.empty, use, SLOTS)
                    use += 1
                if semaphores is not None:
                    _settle()
                    gl.atomic_add(semaphore, 1, sem="release")
        at = [b, tile.kv_head, tile.start_k + tile.n * BLOCK_N, 0]
        whole = is_whole(tile, call, BLOCK_N)
        for part in gl.static_range(2):
            out_s = await_full(dq_ring, use, SLOTS)
            out_s = out_s._reinterpret(dk_desc.dtype, [1, 1, BLOCK_N, D], dk_desc.layout)
            if whole:
                if part == 0:
                    tma.async_copy_shared_to_global(dv_desc, at, out_s)
                else:
                    tma.async_copy_shared_to_global(dk_desc, at, out_s)
                tma.store_wait(0)
            release(dq_ring.empty, use, SLOTS)
            use += 1
        release(tiles_ring.empty, turn, 2)
        turn += 1
        tile = hear(tiles_ring, turn, call)


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
