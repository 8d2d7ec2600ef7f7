"""The dQ store warps of Hopper's backward: they add dq of every row tile to global memory by TMA, and store dk and dv.

There is one warp for both MMA warpgroups, or one for each. Deterministic calls add to a tile of dq in the order of the tile
scheduler: semaphores in global memory, one per row tile and dQ store warp, count the work tiles that have added to dq
and, with intervals, the skipped work tiles before them. A CTA waits only for work tiles taken before its own, so there
is no deadlock.

The rows of dq are permuted in groups of eight, in shared memory and therefore in dq_acc: row 4c + d is at line 2d + c. Without
the permutation, stores to shared memory would have two-way bank conflicts.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .backward_scheduler import (
    DK,
    DV,
    first_row,
    read_tile,
    row_tile,
    skipped_tiles,
    stored_word,
    tma_coordinates,
    wait_for_tile,
)
from .gluon_names import beginning, tma_reduce_add, tma_store
from .pipeline import DQ_FULL, DQ_THREADS, consumer_release, named_arrive, named_wait, read_word

# The outputs of the dQ store warps: TMA descriptors (dk_desc, dv_desc: None if not wanted), dq_semaphores (None if additions
# are unordered) with `row_tiles` per query head, and the strides of dq_acc.
Gradients = namedtuple("Gradients", "dq_desc dk_desc dv_desc dq_semaphores row_tiles rows_b rows_h")


@gluon.constexpr_function
def dq_layout(M, N):
    """The layout of a dq stage (rows, columns): TMA's 128-byte swizzle of float32, with every eight lines permuted."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [4, 4], [1, 8], [2, 16]]
    row = 8
    while row < M:
        bases.append([row, 0])
        row *= 2
    column = 32
    while column < N:
        bases.append([0, column])
        column *= 2
    return gl.SharedLinearLayout(bases)


@gluon.jit
def dq_line(row):
    """The line of dq_acc that holds a row."""
    return row - row % 8 + row % 4 * 2 + row // 4 % 2


@gluon.jit
def dq_stage(W: gl.constexpr, count, dq_pipeline):
    """The stage of MMA warpgroup W, once the dQ store warp has released it; `count` is how often the stage was used before."""
    mbarrier.wait(dq_pipeline.empty.index(W), (count & 1) ^ 1)
    opaque = W + (count >> 30)  # W, but the compiler doesn't know: otherwise it would keep addresses in registers
    return dq_pipeline.stages.index(opaque)


@gluon.jit
def send_dq(W: gl.constexpr, dq, count, dq_pipeline):
    """Sends dq of warpgroup W to the dQ store warp."""
    M: gl.constexpr = dq.shape[0]
    N: gl.constexpr = dq.shape[1]
    beginning(dq_stage(W, count, dq_pipeline), gl.float32, [M, N], dq_layout(M, N)).store(dq)
    fence_async_shared()
    named_arrive(DQ_FULL + W, DQ_THREADS)


@gluon.constexpr_function
def dkdv_columns(D):
    """Columns of a TMA box of dk and dv; may exceed D."""
    return 64 if D == 64 else 128


@gluon.jit
def send_dkdv(W: gl.constexpr, x, count, dq_pipeline, DTYPE: gl.constexpr, D: gl.constexpr):
    """Sends a part of dk or dv, in pieces of columns, to the dQ store warp."""
    M: gl.constexpr = x[0].shape[0]
    N: gl.constexpr = dkdv_columns(D)
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, N], DTYPE)
    stage = beginning(dq_stage(W, count, dq_pipeline), DTYPE, [M, N], L)
    for i in gl.static_range(len(x)):
        stage.slice(i * x[0].shape[1], x[i].shape[1], 1).store(x[i].to(DTYPE))
    fence_async_shared()
    named_arrive(DQ_FULL + W, DQ_THREADS)


@gluon.jit
def store_dq(
    W: gl.constexpr, WARPS: gl.constexpr, gradients, params, dq_pipeline, tile_info, DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """dQ store warp W of WARPS; dv and dk of a work tile follow its last dq."""
    iteration = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        _add_row_tiles(
            W, WARPS, gradients, params, tile, iteration, dq_pipeline, tile_info, BLOCK_M, BLOCK_N, D, DESCENDING
        )
        for part in gl.static_range(W, 4, WARPS):
            _store_dkdv(gradients, part, tile, params, dq_pipeline, tile_info, iteration, DTYPE, BLOCK_N, D)
        consumer_release(tile_info, iteration)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)


@gluon.jit
def _add_row_tiles(
    W: gl.constexpr, WARPS: gl.constexpr, gradients, params, tile, iteration, dq_pipeline, tile_info,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """Adds dq of every row tile of a work tile to memory. With `dq_semaphores` additions are ordered, and the first is a store.
    The parts come from the two warpgroups alternately."""
    dq_desc = gradients.dq_desc
    ROWS: gl.constexpr = dq_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = dq_desc.block_type.shape[1]
    PARTS: gl.constexpr = (D + COLUMNS - 1) // COLUMNS  # per row; TMA drops what exceeds D
    row = first_row(tile.b, tile.start_q, gradients.rows_b, params.cu_seqlens_q is not None)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for _ in range(tile.begin, tile.end):
        if params.edges is not None:
            tile = read_tile(
                tile_info, iteration + (i >> 30), params
            )  # adds 0, opaque to the compiler, to save registers
        h = tile.kv_head * params.group + g
        m = row_tile(tile, i, params)
        before = 1
        more = 1
        if gradients.dq_semaphores is not None:
            before = earlier_tiles(m, tile, params, BLOCK_M, BLOCK_N, DESCENDING)
            if params.edges is not None:
                skipped = _skipped_before(m, before, tile, params, BLOCK_M, BLOCK_N)
                before -= skipped
                more += skipped
            number = (tile.b * params.kv_heads * params.group + h) * gradients.row_tiles + m
            counter = gradients.dq_semaphores + (number * WARPS + W)
            if before > 0:
                wait_for_semaphore(counter, before)
        line = h * gradients.rows_h + row + m * BLOCK_M
        for part in gl.static_range(W, (BLOCK_M // ROWS) * PARTS, WARPS):
            coordinates = [line + part // PARTS * ROWS, part % PARTS * COLUMNS]
            dq_s = dq_pipeline.stages.index(part % 2)
            named_wait(DQ_FULL + part % 2, DQ_THREADS)
            if before == 0:
                tma_store(dq_desc, coordinates, dq_s)
            else:
                tma_reduce_add(dq_desc, coordinates, dq_s)
            tma.store_wait(0)
            mbarrier.arrive(dq_pipeline.empty.index(part % 2), count=1)
        if gradients.dq_semaphores is not None:
            wait_until_in_memory()
            gl.atomic_add(counter, more, sem="release")
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)


@gluon.jit
def _store_dkdv(
    gradients, part: gl.constexpr, tile, params, dq_pipeline, tile_info, iteration,
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Stores a part of dk or dv; a split work tile is stored by the CTA that added last."""
    # Up to D 128 each warpgroup sends 64 columns of dv, then of dk; beyond, one sends dv and the other dk.
    W: gl.constexpr = part % 2
    which: gl.constexpr = DV if (W if D > 128 else part // 2) == 0 else DK
    desc = gradients.dv_desc if which == DV else gradients.dk_desc
    HALF: gl.constexpr = 0 if D > 128 else W  # which half of the work tile's columns
    COLUMNS: gl.constexpr = dkdv_columns(D)
    BOX: gl.constexpr = [1, 1, 64, COLUMNS] if params.cu_seqlens_q is None else [1, 1, 1, 64, COLUMNS]
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, DTYPE)
    named_wait(DQ_FULL + W, DQ_THREADS)
    if desc is not None:
        complete = 1
        if params.splits is not None:
            complete = read_word(tile_info.stages, stored_word(iteration, which, HALF))
        if complete != 0:
            row = tile.n * BLOCK_N + HALF * 64
            column = part // 2 * COLUMNS if D > 128 else 0
            coordinates = tma_coordinates(params, tile.b, tile.start_k, tile.tk, tile.kv_head, row)
            stage = beginning(dq_pipeline.stages.index(W), DTYPE, BOX, L)
            tma_store(desc, coordinates + (column,), stage)  # noqa: RUF005 (device code)
            tma.store_wait(0)
    mbarrier.arrive(dq_pipeline.empty.index(W), count=1)


@gluon.jit
def earlier_tiles(m, tile, params, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DESCENDING: gl.constexpr):
    """How many work tiles add to row tile m before tile.n does: the semaphore value to wait for."""
    back = m * BLOCK_M + tile.tk - tile.tq
    if DESCENDING:
        last = (tile.tk + BLOCK_N - 1) // BLOCK_N
        if params.right is not None:
            last = gl.minimum(last, (back + BLOCK_M + params.right + BLOCK_N - 1) // BLOCK_N)
        return last - 1 - tile.n
    else:
        first = m * 0
        if params.left is not None:
            first = gl.maximum(back - params.left, 0) // BLOCK_N
        return tile.n - first


@gluon.jit
def _skipped_before(m, before, tile, params, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many column tiles, in descending order, row tile m has skipped since it last visited one. If it has visited none, it
    has skipped all `before` tiles before tile.n."""
    place = tile.b * params.last_tiles_b + tile.kv_head * params.last_tiles_h + m
    skipped = before
    if gl.load(params.last_tiles + place) != tile.n:
        skipped = skipped_tiles(m, tile, params, BLOCK_M, BLOCK_N)
    return skipped


@gluon.jit
def _inline_asm(code: gl.constexpr):
    """Instructions executed by every thread of the warp, in program order."""
    CODE: gl.constexpr = code + " mov.b32 $0, $1;"
    gl.inline_asm_elementwise(CODE, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_semaphore(counter, value):
    """Waits until the counter has reached a value; later TMA operations see everything written before."""
    while gl.atomic_add(counter, 0, sem="acquire") < value:
        pass
    _inline_asm("fence.proxy.async.global;")


@gluon.jit
def wait_until_in_memory():
    """Waits until what the warp stored or added by TMA is in global memory. One thread issues the TMA and waits for it, but
    another may release the semaphore, so a warp barrier follows."""
    _inline_asm("cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff;")
