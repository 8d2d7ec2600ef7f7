"""The producer warp of Hopper's forward: takes work tiles and loads them by TMA.

For each work tile: q of every warpgroup, then k and v of every block of columns, last to first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .forward_scheduler import (
    END,
    K_BARRIER,
    ROWS,
    WorkTile,
    kv_threads,
    next_index,
    publish_tile,
    v_barrier,
    work_tile,
    work_tiles,
)
from .pieces import load_tile
from .pipeline import named_acquire, named_drain


@gluon.jit
def load(
    q_descs, k_descs, v_descs, pipelines, params, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, VARLEN: gl.constexpr
):
    Q_STAGES: gl.constexpr = pipelines.q.full.shape[0] // WARPGROUPS
    STAGES: gl.constexpr = pipelines.k.full.shape[0]
    TILE: gl.constexpr = ROWS * WARPGROUPS
    THREADS: gl.constexpr = kv_threads(WARPGROUPS)
    kv_state = 0
    iteration = 0
    index = next_index(0, params)
    while index < work_tiles(params):
        tile = work_tile(index, params, TILE, BLOCK_N)
        if not VARLEN or tile.start > -TILE:
            publish_tile(iteration, tile, tile.start, pipelines)
            b = tile.b
            if VARLEN:
                b = tile.b * 0
            for w in gl.static_range(WARPGROUPS):
                stage = iteration % Q_STAGES * WARPGROUPS + w
                mbarrier.wait(pipelines.q.empty.index(stage), iteration // Q_STAGES & 1 ^ 1)
                load_tile(q_descs, (b, tile.h, tile.start_q + tile.start + w * ROWS), pipelines.q, stage)
            for j in range(tile.last - tile.first):
                stage = kv_state % STAGES
                row = tile.start_k + (tile.last - 1 - j) * BLOCK_N
                at = (b, tile.h // params.group, row)
                named_acquire(pipelines.k, kv_state, K_BARRIER, THREADS)
                load_tile(k_descs, at, pipelines.k, stage)
                named_acquire(pipelines.v, kv_state, v_barrier(STAGES), THREADS)
                load_tile(v_descs, at, pipelines.v, stage)
                kv_state += 1
            iteration += 1
        index = next_index(iteration, params)
    nothing = index * 0
    end = WorkTile(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    publish_tile(iteration, end, nothing + END, pipelines)
    named_drain(pipelines.k, kv_state, K_BARRIER, THREADS)
    named_drain(pipelines.v, kv_state, v_barrier(STAGES), THREADS)
