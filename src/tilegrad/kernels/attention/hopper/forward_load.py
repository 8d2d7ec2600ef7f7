"""The producer warp of Hopper's forward: takes work tiles and loads q, k and v by TMA.

For each work tile it loads q of every warpgroup, then the blocks of k and v, last columns first. Without turns it loads in the
order in which the warpgroups consume and release stages: k of a block, then v of the previous block. In full attention this is
7 to 11 % faster at D 256, and 3 % at D 192, than k and v of the same block. With turns it was 9 % slower at D 128, because
ptxas moved one warpgroup's wait for acc right after its wait for s. A test counts the instructions between these waits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .edges import edges_of, masks_some
from .forward_scheduler import (
    END,
    ROWS,
    WorkTile,
    blocks_of,
    listed,
    next_index,
    nth_block,
    publish_tile,
    takes_turns,
    work_tile,
    work_tiles,
)
from .pieces import load_tile
from .pipeline import K_EMPTY, kv_threads, named_acquire, named_drain, write_word


@gluon.jit
def _load_block(descs, coordinates, pipeline, state, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Loads one block of k or v and returns the next state."""
    named_acquire(pipeline, state, BARRIER, THREADS)
    load_tile(descs, coordinates, pipeline, state % pipeline.full.shape[0])
    return state + 1


@gluon.jit
def _load_list(
    k_descs, v_descs, tile, blocks, k_state, v_state, pipelines, params, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """Loads the blocks of a list in the order of `load`, each with its word, and returns the next states."""
    TILE: gl.constexpr = ROWS * WARPGROUPS
    THREADS: gl.constexpr = kv_threads(WARPGROUPS)
    TURNS: gl.constexpr = takes_turns(WARPGROUPS, BLOCK_D)
    V_EMPTY: gl.constexpr = K_EMPTY + pipelines.k.full.shape[0]
    h = tile.h // params.group
    row = tile.first
    for n in range(tile.last):
        block = nth_block(n, blocks)
        word = block * 2
        if n < tile.masked:
            edges = edges_of(tile.b, h, block, params)
            word += gl.where(masks_some(edges, gl.maximum(tile.start, 0), tile.start + TILE, params), 1, 0)
        previous = row
        row = block * BLOCK_N
        named_acquire(pipelines.k, k_state, K_EMPTY, THREADS)
        stage = k_state % pipelines.k.full.shape[0]
        write_word(pipelines.block_info, stage, word)
        load_tile(k_descs, (tile.b, h, row), pipelines.k, stage)
        k_state += 1
        if TURNS:
            v_state = _load_block(v_descs, (tile.b, h, row), pipelines.v, v_state, V_EMPTY, THREADS)
        elif n > 0:
            v_state = _load_block(v_descs, (tile.b, h, previous), pipelines.v, v_state, V_EMPTY, THREADS)
    if not TURNS:
        v_state = _load_block(v_descs, (tile.b, h, row), pipelines.v, v_state, V_EMPTY, THREADS)
    return k_state, v_state


@gluon.jit
def load(
    q_descs, k_descs, v_descs, pipelines, params, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    Q_STAGES: gl.constexpr = pipelines.q.full.shape[0] // WARPGROUPS
    TILE: gl.constexpr = ROWS * WARPGROUPS
    THREADS: gl.constexpr = kv_threads(WARPGROUPS)
    TURNS: gl.constexpr = takes_turns(WARPGROUPS, BLOCK_D)
    V_EMPTY: gl.constexpr = K_EMPTY + pipelines.k.full.shape[0]
    k_state = gl.to_tensor(0)
    v_state = gl.to_tensor(0)
    iteration = 0
    index = next_index(0, params)
    while index < work_tiles(params):
        tile = work_tile(index, params, TILE, BLOCK_N)
        if not VARLEN or tile.start > -TILE:
            if params.intervals is not None:
                blocks = blocks_of(tile, params, TILE)
                tile = listed(tile, blocks, params)
            publish_tile(iteration, tile, tile.start, pipelines)
            b = tile.b
            if VARLEN:
                b = tile.b * 0
            for w in gl.static_range(WARPGROUPS):
                stage = iteration % Q_STAGES * WARPGROUPS + w
                mbarrier.wait(pipelines.q.empty.index(stage), iteration // Q_STAGES & 1 ^ 1)
                load_tile(q_descs, (b, tile.h, tile.start_q + tile.start + w * ROWS), pipelines.q, stage)
            h = tile.h // params.group
            row = tile.start_k + (tile.last - 1) * BLOCK_N
            if params.intervals is not None:
                k_state, v_state = _load_list(
                    k_descs, v_descs, tile, blocks, k_state, v_state, pipelines, params, WARPGROUPS, BLOCK_N, BLOCK_D
                )
            elif TURNS:
                for _ in range(tile.last - tile.first):
                    k_state = _load_block(k_descs, (b, h, row), pipelines.k, k_state, K_EMPTY, THREADS)
                    v_state = _load_block(v_descs, (b, h, row), pipelines.v, v_state, V_EMPTY, THREADS)
                    row -= BLOCK_N
            else:
                k_state = _load_block(k_descs, (b, h, row), pipelines.k, k_state, K_EMPTY, THREADS)
                for _ in range(1, tile.last - tile.first):
                    k_state = _load_block(k_descs, (b, h, row - BLOCK_N), pipelines.k, k_state, K_EMPTY, THREADS)
                    v_state = _load_block(v_descs, (b, h, row), pipelines.v, v_state, V_EMPTY, THREADS)
                    row -= BLOCK_N
                v_state = _load_block(v_descs, (b, h, row), pipelines.v, v_state, V_EMPTY, THREADS)
            iteration += 1
        index = next_index(iteration, params)
    zero = index * 0
    no_tile = WorkTile(zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    publish_tile(iteration, no_tile, zero + END, pipelines)
    named_drain(pipelines.k, k_state, K_EMPTY, THREADS)
    named_drain(pipelines.v, v_state, V_EMPTY, THREADS)
