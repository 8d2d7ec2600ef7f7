"""The producer warp of Hopper's backward: takes work tiles and loads them by TMA.

For each work tile: k and v once, and q, do, neg_lse2 and delta of every tile of rows that attends to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_barriers import DO, INPUT_THREADS, Q
from .backward_scheduler import (
    FLAG_BITS,
    LAST,
    MASKED,
    WorkTile,
    first_row,
    head_and_column,
    publish_tile,
    row_tile,
    take_tile,
    tma_coordinates,
    work_tile,
)
from .gluon_names import tma_load
from .pieces import load_tile
from .pipeline import named_acquire, named_drain, producer_acquire, stage_of, write_word


class Inputs(NamedTuple):
    """What the producer warp fills: pipelines of tiles, and what comes with a stage of q (neg_lse2, row_info) or do (delta)."""

    q: Any
    do: Any
    k: Any
    v: Any
    neg_lse2: Any
    delta: Any
    row_info: Any


class Sources(NamedTuple):
    """What the producer warp loads from, by TMA; q, k, v and do in pieces."""

    q_descs: Any
    k_descs: Any
    v_descs: Any
    do_descs: Any
    neg_lse2_desc: Any
    delta_desc: Any
    rows_b: Any
    rows_h: Any


@gluon.jit
def _load_columns(sources, params, tile, inputs, iteration, BLOCK_N: gl.constexpr):
    at = tma_coordinates(params, tile.b, tile.start_k, tile.tk, tile.kv_head, tile.n * BLOCK_N)
    producer_acquire(inputs.k, iteration)
    load_tile(sources.k_descs, at, inputs.k, 0)
    producer_acquire(inputs.v, iteration)
    load_tile(sources.v_descs, at, inputs.v, 0)


@gluon.jit
def _load_rows(descs, at, row_desc, row, rows, pipeline, state):
    """A tile of q or do and what comes with it: neg_lse2 or delta, from `row` on."""
    stage = stage_of(state, pipeline.full.shape[0])
    load_tile(descs, at, pipeline, stage, row_desc.block_type.nbytes)
    tma_load(row_desc, [row], pipeline.full.index(stage), rows.index(stage))


@gluon.jit
def _load_tile(
    sources, params, tile, iteration, state, inputs, tile_info,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DO_FIRST: gl.constexpr,
):  # fmt: skip
    """q and do of every tile of rows, do first or q first; k and v after the first q, because their stages are released later
    than q's."""
    VARLEN: gl.constexpr = params.cu_seqlens_q is not None
    publish_tile(tile_info, iteration, tile, VARLEN)
    row = first_row(tile.b, tile.start_q, sources.rows_b, VARLEN)
    g = tile.begin // gl.maximum(tile.count, 1)
    i = tile.begin - g * tile.count
    for step in range(tile.begin, tile.end):
        h = tile.kv_head * params.group + g
        m = row_tile(tile, i)
        at = tma_coordinates(params, tile.b, tile.start_q, tile.tq, h, m * BLOCK_M)
        flags = gl.where(step == tile.end - 1, LAST, 0) + gl.where(i < tile.masked, MASKED, 0)
        padded_row = h * sources.rows_h + row + m * BLOCK_M
        if DO_FIRST:
            named_acquire(inputs.do, state, DO, INPUT_THREADS)
            _load_rows(sources.do_descs, at, sources.delta_desc, padded_row, inputs.delta, inputs.do, state)
        named_acquire(inputs.q, state, Q, INPUT_THREADS)
        write_word(inputs.row_info, stage_of(state, inputs.row_info.shape[0]), (m << FLAG_BITS) + flags)
        _load_rows(sources.q_descs, at, sources.neg_lse2_desc, padded_row, inputs.neg_lse2, inputs.q, state)
        if step == tile.begin:
            _load_columns(sources, params, tile, inputs, iteration, BLOCK_N)
        if not DO_FIRST:
            named_acquire(inputs.do, state, DO, INPUT_THREADS)
            _load_rows(sources.do_descs, at, sources.delta_desc, padded_row, inputs.delta, inputs.do, state)
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
    """The producer warp. `state`: of the pipelines q and do; of k and v it is `iteration`."""
    VARLEN: gl.constexpr = params.cu_seqlens_q is not None
    iteration = 0
    state = 0
    before = 0
    t, part = take_tile(tile_counter, params)
    sequences = params.batch if VARLEN else 1
    for b in range(0, sequences):
        start_q = 0
        start_k = 0
        tq = params.tq + (t >> 31)  # tq, but unknown before: else it takes a register of the whole kernel
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
                b_of = b
                kv_head = (t - before) // col_tiles
                n = t - before - kv_head * col_tiles
            else:
                head, n = head_and_column(t, params, col_tiles)
                b_of = head // params.kv_heads
                kv_head = head - b_of * params.kv_heads
            if DESCENDING:
                n = col_tiles - 1 - n
            tile = work_tile(b_of, kv_head, n, start_q, start_k, tq, tk, params, part, t, BLOCK_M, BLOCK_N)
            state = _load_tile(
                sources, params, tile, iteration, state, inputs, tile_info, BLOCK_M, BLOCK_N, DO_FIRST
            )  # fmt: skip
            iteration += 1
            t, part = take_tile(tile_counter, params)
        before = after
    publish_tile(tile_info, iteration, WorkTile(-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), VARLEN)
    named_drain(inputs.q, state, Q, INPUT_THREADS)
    named_drain(inputs.do, state, DO, INPUT_THREADS)
