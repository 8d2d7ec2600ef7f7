"""The producer warp of Hopper's backward: takes work tiles and loads their tensors by TMA.

It loads k and v once per work tile, and q, do, neg_lse2 and delta of every row tile that attends to the work tile.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_scheduler import (
    FLAG_BITS,
    LAST,
    WorkTile,
    first_row,
    head_and_column,
    masked_flags,
    publish_tile,
    row_tile,
    take_tile,
    tma_coordinates,
    work_tile,
)
from .gluon_names import tma_load
from .pieces import load_tile
from .pipeline import (
    DO_EMPTY,
    INPUT_THREADS,
    Q_EMPTY,
    named_acquire,
    named_drain,
    producer_acquire,
    stage_of,
    write_word,
)

# Pipelines that the producer warp fills. neg_lse2 and row_info come with a stage of q, delta with a stage of do.
Inputs = namedtuple("Inputs", "q do k v neg_lse2 delta row_info")

# TMA descriptors that the producer warp loads from (q, k, v and do in pieces), and the strides of neg_lse2 and delta.
Sources = namedtuple("Sources", "q_descs k_descs v_descs do_descs neg_lse2_desc delta_desc rows_b rows_h")


@gluon.jit
def _load_columns(sources, params, tile, inputs, iteration, BLOCK_N: gl.constexpr):
    coordinates = tma_coordinates(params, tile.b, tile.start_k, tile.tk, tile.kv_head, tile.n * BLOCK_N)
    producer_acquire(inputs.k, iteration)
    load_tile(sources.k_descs, coordinates, inputs.k, 0)
    producer_acquire(inputs.v, iteration)
    load_tile(sources.v_descs, coordinates, inputs.v, 0)


@gluon.jit
def _load_rows(descs, coordinates, row_desc, row, rows, pipeline, state):
    """Loads a tile of q with neg_lse2, or of do with delta; `row` is the tile's first row in neg_lse2 or delta."""
    stage = stage_of(state, pipeline.full.shape[0])
    load_tile(descs, coordinates, pipeline, stage, row_desc.block_type.nbytes)
    tma_load(row_desc, [row], pipeline.full.index(stage), rows.index(stage))


@gluon.jit
def _load_do(sources, coordinates, row, inputs, state):
    named_acquire(inputs.do, state, DO_EMPTY, INPUT_THREADS)
    _load_rows(sources.do_descs, coordinates, sources.delta_desc, row, inputs.delta, inputs.do, state)


@gluon.jit
def _load_tile(
    sources, params, tile, iteration, state, inputs, tile_info,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DO_FIRST: gl.constexpr,
):  # fmt: skip
    """Loads q and do of every row tile, do first if DO_FIRST. k and v follow the first q, because q's stages are released
    before theirs."""
    VARLEN: gl.constexpr = params.cu_seqlens_q is not None
    publish_tile(tile_info, iteration, tile, params)
    BITS: gl.constexpr = FLAG_BITS if params.edges is None else FLAG_BITS + 1
    row = first_row(tile.b, tile.start_q, sources.rows_b, VARLEN)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * params.group + g
        m = row_tile(tile, i, params)
        coordinates = tma_coordinates(params, tile.b, tile.start_q, tile.tq, h, m * BLOCK_M)
        flags = gl.where(step == tile.end - 1, LAST, 0) + masked_flags(tile, i, m, params, BLOCK_M)
        padded_row = h * sources.rows_h + row + m * BLOCK_M
        if DO_FIRST:
            _load_do(sources, coordinates, padded_row, inputs, state)
        named_acquire(inputs.q, state, Q_EMPTY, INPUT_THREADS)
        write_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]), (m << BITS) + flags)
        _load_rows(sources.q_descs, coordinates, sources.neg_lse2_desc, padded_row, inputs.neg_lse2, inputs.q, state)
        if step == tile.begin:
            _load_columns(sources, params, tile, inputs, iteration, BLOCK_N)
        if not DO_FIRST:
            _load_do(sources, coordinates, padded_row, inputs, state)
        state += 1
        i += 1
        g = gl.where(i == tile.count, g + 1, g)
        i = gl.where(i == tile.count, 0, i)
    if tile.begin == tile.end:
        _load_columns(sources, params, tile, inputs, iteration, BLOCK_N)
    return state


@gluon.jit
def load(
    sources, params, inputs, tile_info, tile_counter,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DESCENDING: gl.constexpr, DO_FIRST: gl.constexpr,
):  # fmt: skip
    """The producer warp. `state` counts the stages of q and do, `iteration` the stages of k and v."""
    VARLEN: gl.constexpr = params.cu_seqlens_q is not None
    iteration = 0
    state = 0
    before = 0
    t, part = take_tile(tile_counter, params)
    sequences = params.batch if VARLEN else 1
    for b in range(0, sequences):
        start_q = 0
        start_k = 0
        tq = params.tq + (t >> 31)  # adds 0, opaque to the compiler: otherwise tq takes a register in the whole kernel
        tk = params.tk
        heads = params.kv_heads
        if VARLEN:
            start_q = gl.load(params.cu_seqlens_q + b)
            start_k = gl.load(params.cu_seqlens_k + b)
            tq = gl.load(params.cu_seqlens_q + b + 1) - start_q
            tk = gl.load(params.cu_seqlens_k + b + 1) - start_k
        else:
            heads = params.all_heads
        col_tiles = (tk + BLOCK_N - 1) // BLOCK_N
        after = before + col_tiles * heads
        while t < after:
            if VARLEN:
                tile_b = b
                kv_head = (t - before) // col_tiles
                n = t - before - kv_head * col_tiles
            else:
                head, n = head_and_column(t, params, col_tiles)
                tile_b = head // params.kv_heads
                kv_head = head - tile_b * params.kv_heads
            if DESCENDING:
                n = col_tiles - 1 - n
            tile = work_tile(tile_b, kv_head, n, start_q, start_k, tq, tk, params, part, t, BLOCK_M, BLOCK_N)
            state = _load_tile(sources, params, tile, iteration, state, inputs, tile_info, BLOCK_M, BLOCK_N, DO_FIRST)
            iteration += 1
            t, part = take_tile(tile_counter, params)
        before = after
    no_tile = WorkTile(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    publish_tile(tile_info, iteration, no_tile, params)
    named_drain(inputs.q, state, Q_EMPTY, INPUT_THREADS)
    named_drain(inputs.do, state, DO_EMPTY, INPUT_THREADS)
