"""The tile scheduler of Hopper's backward: which columns a persistent CTA takes, and which rows attend to them.

A work tile is BLOCK_N columns of one kv head. CTAs take work tiles from one counter in memory, each the next when it needs one.
The producer warp takes a tile, works out which rows attend to it, and publishes the tile's info in shared memory, a pipeline of
INFO_STAGES; with every tile of rows comes one word of row info, its number and two flags. So the MMA warpgroups hold none of
this in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import consumer_wait, producer_acquire, producer_commit, read_word, stage_of, write_word
from .tma import SEQUENCE_END

INFO_STAGES = gl.constexpr(2)  # work tiles whose info is kept
TILE_FIELDS = gl.constexpr(15)  # of a WorkTile
INFO_WORDS = gl.constexpr(32)  # of a stage: the fields, and behind them whether each half of dk and dv is to be stored
DK = gl.constexpr(0)  # which of the two, in tile info and in split-K sums
DV = gl.constexpr(1)
MASKED = gl.constexpr(1)  # flag of a tile of rows: an edge of the band crosses it
LAST = gl.constexpr(2)  # flag: it is the last of its work tile
FLAG_BITS = gl.constexpr(2)  # above these in a word of row info, the tile's number


class Params(NamedTuple):
    """What all work tiles of a call share; left and right are None where nothing is masked out on that side."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    batch: Any
    kv_heads: Any
    all_heads: Any  # batch · kv_heads
    group: Any  # query heads per kv head
    tq: Any
    tk: Any
    left: Any
    right: Any
    heads_per_section: Any  # kv heads whose tiles are taken together, an L2 section
    splits: Any  # CTAs that share the rows of a work tile; None: one


class WorkTile(NamedTuple):
    """BLOCK_N columns of one kv head from n · BLOCK_N on, and the tiles of rows that attend to them: `count` from `first` on
    for each query head of the group. An edge crosses `masked_before` of them at the beginning and `masked` in all: these come
    first, then the unmasked ones. Of all these steps the CTA takes begin … end; b is −1 when no tile is left."""

    b: Any
    kv_head: Any
    n: Any
    start_q: Any
    start_k: Any
    tq: Any
    tk: Any
    first: Any
    masked_before: Any
    unmasked: Any
    masked: Any
    count: Any
    begin: Any
    end: Any
    index: Any  # of the tile in the order of the counter


@gluon.jit
def publish_tile(tile_info, iteration, tile, VARLEN: gl.constexpr):
    """The producer's: the info of an iteration's work tile."""
    producer_acquire(tile_info, iteration)
    for i in gl.static_range(TILE_FIELDS):
        if VARLEN or (i < 3 or i > 6):
            write_word(tile_info.stages, stage_of(iteration, INFO_STAGES) * INFO_WORDS + i, tile[i])
    producer_commit(tile_info, iteration)


@gluon.jit
def wait_for_tile(tile_info, iteration, params):
    """A consumer's: the info of an iteration's work tile, once it is there. It stays until `consumer_release(tile_info, …)`."""
    consumer_wait(tile_info, iteration)
    return read_tile(tile_info, iteration, params)


@gluon.jit
def read_tile(tile_info, iteration, params):
    """The same, read again: what is read when it is needed holds no registers before."""
    words = tile_info.stages
    at = stage_of(iteration, INFO_STAGES) * INFO_WORDS
    start_q = 0
    start_k = 0
    tq = params.tq
    tk = params.tk
    if params.cu_seqlens_q is not None:
        start_q = read_word(words, at + 3)
        start_k = read_word(words, at + 4)
        tq = read_word(words, at + 5)
        tk = read_word(words, at + 6)
    return WorkTile(
        read_word(words, at), read_word(words, at + 1), read_word(words, at + 2), start_q, start_k, tq, tk,
        read_word(words, at + 7), read_word(words, at + 8), read_word(words, at + 9), read_word(words, at + 10),
        read_word(words, at + 11), read_word(words, at + 12), read_word(words, at + 13), read_word(words, at + 14),
    )  # fmt: skip


@gluon.jit
def stored_word(iteration, which: gl.constexpr, HALF: gl.constexpr):
    """The word of tile info that says whether dk or dv, of a half of the columns, is to be stored."""
    return stage_of(iteration, INFO_STAGES) * INFO_WORDS + TILE_FIELDS + 2 * which + HALF


@gluon.jit
def row_tile(tile, i):
    """The number of the i-th tile of rows: masked ones first."""
    masked = tile.first + i + gl.where(i < tile.masked_before, 0, tile.unmasked)
    return gl.where(i < tile.masked, masked, tile.first + tile.masked_before + i - tile.masked)


@gluon.jit
def head_and_column(t, params, col_tiles):
    """(head, n) of the t-th work tile: in a section of heads all first columns, then all second ones …"""
    section = t // (params.heads_per_section * col_tiles)
    within = t - section * params.heads_per_section * col_tiles
    heads = gl.minimum(params.heads_per_section, params.all_heads - section * params.heads_per_section)
    n = within // heads
    return section * params.heads_per_section + within - n * heads, n


@gluon.jit
def work_tile(
    b, kv_head, n, start_q, start_k, tq, tk, params, part, index, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Columns n of a kv head: which rows attend to them, in tiles, and the share of split `part` of them."""
    start = n * BLOCK_N
    stop = gl.minimum(start + BLOCK_N, tk)
    shift = tq - tk
    first = n * 0
    unmasked = n * 0
    last = (tq + BLOCK_M - 1) // BLOCK_M
    if params.right is not None:
        first = gl.maximum(start + shift - params.right, 0) // BLOCK_M
        unmasked = (gl.maximum(stop - 1 + shift - params.right, 0) + BLOCK_M - 1) // BLOCK_M
    if params.left is not None:
        last = (gl.maximum(gl.minimum(tq, stop + shift + params.left), 0) + BLOCK_M - 1) // BLOCK_M
    last = gl.maximum(last, first)
    unmasked = gl.minimum(gl.maximum(unmasked, first), last)
    unmasked_end = last  # rows beyond the end need no mask: their neg_lse2 makes p = 0
    if params.left is not None:
        unmasked_end = gl.minimum(gl.maximum(start + shift + params.left + 1, 0) // BLOCK_M, last)
    unmasked = gl.where(start + BLOCK_N > tk, last, unmasked)  # columns beyond the end do
    unmasked_end = gl.maximum(unmasked, unmasked_end)
    count_unmasked = unmasked_end - unmasked
    count = last - first
    begin = n * 0
    end = count * params.group
    if params.splits is not None:
        begin = end * part // params.splits
        end = end * (part + 1) // params.splits
    return WorkTile(
        b, kv_head, n, start_q, start_k, tq, tk, first, unmasked - first, count_unmasked,
        count - count_unmasked, count, begin, end, index,
    )  # fmt: skip


@gluon.jit
def take_tile(tile_counter, params):
    """(work tile, split of it) that is next."""
    t = gl.atomic_add(tile_counter, 1)
    part = 0
    if params.splits is not None:
        part = t % params.splits
        t = t // params.splits
    return t, part


@gluon.jit
def first_row(b, start_q, rows_b, VARLEN: gl.constexpr):
    """Where sequence b begins in neg_lse2 and delta. Packed sequences are padded to multiples of rows_b there, because TMA
    loads from multiples of 16 bytes on."""
    return (start_q + b * rows_b) // rows_b * rows_b if VARLEN else b * rows_b


@gluon.jit
def tma_coordinates(params, b, start, size, h, row):
    """Where a row of sequence b begins for TMA, but for the column; of packed sequences in the axes of varlen_descriptor."""
    if params.cu_seqlens_q is None:
        return b, h, row
    else:
        return SEQUENCE_END, start + size, h, SEQUENCE_END - size + row
