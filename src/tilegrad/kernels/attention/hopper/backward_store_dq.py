"""The dQ store warp of Hopper's backward: adds dq of every tile of rows to memory by TMA, and stores dk and dv.

Deterministic calls add to a tile of dq in the order of the tile scheduler: a semaphore in memory counts the work tiles that
have added to it. A CTA waits only for work tiles taken before its own, so the wait ends.

Rows of dq are permuted among eight, in shared memory and so in dq_acc: row 4c + d is line 2d + c. In the order of rows the
threads of a warp would store two to a bank.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .backward_scheduler import (
    DK,
    DV,
    INFO_STAGES,
    INFO_WORDS,
    TILE_FIELDS,
    first_row,
    row_tile,
    tma_coordinates,
    wait_for_tile,
)
from .pipeline import consumer_release, consumer_wait, read_word
from .tma import tma_reduce_add


@gluon.constexpr_function
def dq_layout(M, N):
    """A stage of dq as (rows, columns): TMA's 128-byte swizzle of float32 with the lines of each eight permuted."""
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
    """The line of dq_acc that has a row."""
    return row - row % 8 + row % 4 * 2 + row // 4 % 2


@gluon.jit
def store_dq(
    dq_desc, dk_desc, dv_desc, params, inputs, dq_pipeline, tile_info, dq_semaphores, row_tiles, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr,
    OUT_STAGES: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """The dQ store warp; dv and dk of a work tile come after the last of its dq."""
    DTYPE: gl.constexpr = inputs.k.stages.dtype
    iteration = 0
    state = 0
    tile = wait_for_tile(tile_info, iteration, params)
    while tile.b >= 0:
        state = _add_row_tiles(
            dq_desc, params, tile, dq_pipeline, state, dq_semaphores, row_tiles, rows_b, rows_h,
            BLOCK_M, BLOCK_N, D, SLICES, DESCENDING,
        )  # fmt: skip
        at = tma_coordinates(params, tile.b, tile.start_k, tile.tk, tile.kv_head, tile.n * BLOCK_N, 0)
        state = _store_dkdv(
            dv_desc, at, params, dq_pipeline, state, tile_info, iteration, DV, DTYPE, BLOCK_N, D, OUT_STAGES
        )
        state = _store_dkdv(
            dk_desc, at, params, dq_pipeline, state, tile_info, iteration, DK, DTYPE, BLOCK_N, D, OUT_STAGES
        )
        consumer_release(tile_info, iteration)
        iteration += 1
        tile = wait_for_tile(tile_info, iteration, params)


@gluon.jit
def _add_row_tiles(
    dq_desc, params, tile, dq_pipeline, state, dq_semaphores, row_tiles, rows_b, rows_h,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLICES: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """dq of every tile of rows of a work tile, added to memory; with `dq_semaphores` in order, and the first is stored. A stage
    is released when the next addition is under way."""
    gl.static_assert(dq_pipeline.full.shape[0] > 1)
    row = first_row(tile.b, tile.start_q, rows_b, params.cu_seqlens_q is not None)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * params.group + g
        m = row_tile(tile, i)
        before = 1
        if dq_semaphores is not None:
            before = earlier_tiles(m, tile, params, BLOCK_M, BLOCK_N, DESCENDING)
            counter = dq_semaphores + ((tile.b * params.kv_heads * params.group + h) * row_tiles + m)
            if before > 0:
                wait_for_semaphore(counter, before)
        for part in gl.static_range(SLICES):
            dq_s = consumer_wait(dq_pipeline, state)
            at = [h * rows_h + row + m * BLOCK_M, part * (D // SLICES)]
            if before == 0:
                tma.async_copy_shared_to_global(dq_desc, at, dq_s)
            else:
                tma_reduce_add(dq_desc, at, dq_s)
            if (step > tile.begin) | (part > 0):
                tma.store_wait(1)
                consumer_release(dq_pipeline, state - 1)
            state += 1
        if dq_semaphores is not None:
            wait_until_in_memory()
            gl.atomic_add(counter, 1, sem="release")
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)
    if tile.begin < tile.end:
        tma.store_wait(0)
        consumer_release(dq_pipeline, state - 1)
    return state


@gluon.jit
def out_stage(
    dq_pipeline, state, params, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, OUT_STAGES: gl.constexpr
):
    """A stage of dq, or all of them, as a tile of dk or dv."""
    BOX: gl.constexpr = [1, 1, BLOCK_N, D] if params.cu_seqlens_q is None else [1, 1, 1, BLOCK_N, D]
    L: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, DTYPE)
    if OUT_STAGES == 1:
        return dq_pipeline.stages.index(state % dq_pipeline.full.shape[0])._reinterpret(DTYPE, BOX, L)
    else:
        gl.static_assert(dq_pipeline.full.shape[0] == OUT_STAGES)
        return dq_pipeline.stages._reinterpret(DTYPE, [1] + BOX, L).index(0)  # noqa: RUF005 (in a kernel)


@gluon.jit
def _store_dkdv(
    desc, at, params, dq_pipeline, state, tile_info, iteration, which,
    DTYPE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, OUT_STAGES: gl.constexpr,
):  # fmt: skip
    """dk or dv to memory; of a split work tile only by the CTA that was the last to add."""
    for part in gl.static_range(OUT_STAGES):
        consumer_wait(dq_pipeline, state + part)
    if desc is not None:
        wanted = 1
        if params.splits is not None:
            wanted = read_word(tile_info.stages, iteration % INFO_STAGES * INFO_WORDS + TILE_FIELDS + which)
        if wanted != 0:
            out = out_stage(dq_pipeline, state, params, DTYPE, BLOCK_N, D, OUT_STAGES)
            tma.async_copy_shared_to_global(desc, at, out)
            tma.store_wait(0)
    for part in gl.static_range(OUT_STAGES):
        consumer_release(dq_pipeline, state + part)
    return state + OUT_STAGES


@gluon.jit
def earlier_tiles(m, tile, params, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DESCENDING: gl.constexpr):
    """The number of work tiles that add to row tile m before tile.n does: the value of the semaphore to wait for."""
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
def _inline_asm(code: gl.constexpr):
    """Instructions of every thread of the warp, kept in program order."""
    gl.inline_asm_elementwise(
        code + " mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def wait_for_semaphore(counter, value):
    """Until a counter has reached a value; then TMA reads what was in memory at that moment."""
    while gl.atomic_add(counter, 0, sem="acquire") < value:
        pass
    _inline_asm("fence.proxy.async.global;")


@gluon.jit
def wait_until_in_memory():
    """Until what the warp stored or added by TMA is in memory, not only read from shared memory. One thread issued the TMA and
    waits for it, another may release the semaphore: hence the warp barrier."""
    _inline_asm("cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff;")
