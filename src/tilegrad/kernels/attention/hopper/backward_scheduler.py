"""The tile scheduler of Hopper's backward: which columns a persistent CTA computes next, and which rows attend to them.

A work tile is BLOCK_N columns of one kv head. CTAs take work tiles from a counter in global memory. The producer warp computes
which rows attend to the tile and publishes the tile's info in shared memory, a pipeline of INFO_STAGES stages. Each row tile
comes with one word of row info: its index and two flags, or three with intervals. So the MMA warpgroups keep no tile info in
registers.

**Intervals.** The rows that one interval masks out in every column of a work tile are one range of row tiles, a gap. With two
intervals there are at most two gaps, and no row tile in a gap is visited. The producer and the dQ store warps compute the
visited row tiles from the same gaps, in ascending order.
"""

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .edges import edges_of, masks_all, masks_some
from .pipeline import consumer_wait, producer_acquire, producer_commit, read_word, stage_of, write_word
from .tma import SEQUENCE_END

INFO_STAGES = gl.constexpr(2)
TILE_FIELDS = gl.constexpr(15)  # the number of fields of a WorkTile
INFO_WORDS = gl.constexpr(32)  # per stage: the fields, then whether each half of dk and dv is to be stored
DK = gl.constexpr(0)  # DK, DV: the values of `which`, the gradient of a word of tile info or of a split-K sum
DV = gl.constexpr(1)
MASKED = gl.constexpr(1)  # flag: an edge of the band crosses the row tile
LAST = gl.constexpr(2)  # flag: the last row tile of the work tile
GAP_WORD = gl.constexpr(24)  # in tile info, the first word of the gaps
TESTED = gl.constexpr(32)  # column tiles that a dQ store warp tests at a time
FLAG_BITS = gl.constexpr(2)  # row info is (index << FLAG_BITS) + flags; with intervals there is one more flag
PARTIAL = gl.constexpr(4)  # that flag: an interval of a column contains a row of the tile

# Arguments that all work tiles share. left, right: None where that side is unbounded.
#   all_heads           batch · kv_heads
#   group               query heads per kv head
#   heads_per_section   kv heads whose tiles are taken together, an L2 section
#   splits              CTAs that share the rows of a work tile; None: one
#   intervals           column 0 of the first kv head; strides in elements
#   second              offset in elements from the first interval of a column to the second; None if a column has one interval
#   edges, last_tiles   results of ../triton/intervals.py for each tile; strides between sequences and kv heads, in tiles
Params = namedtuple(
    "Params",
    "cu_seqlens_q cu_seqlens_k batch kv_heads all_heads group tq tk left right heads_per_section splits "
    "intervals second intervals_b intervals_h edges edges_b edges_h last_tiles last_tiles_b last_tiles_h",
)

# Columns n · BLOCK_N … of a kv head, and the row tiles that attend to them: `count` from `first` on, in each query head of the
# group. `masked` of them need a mask: the first `masked_before`, and those after the `unmasked` ones. Masked tiles are computed
# first. The CTA computes steps begin … end of count · group. `index` is the tile's number in the counter's order; b is −1 after
# the last tile. With intervals, row tiles are visited in ascending order without the gaps: gap_tiles from `gap` on and
# gap2_tiles from gap2 on.
WorkTile = namedtuple(
    "WorkTile",
    "b kv_head n start_q start_k tq tk first masked_before unmasked masked count begin end index "
    "gap gap_tiles gap2 gap2_tiles",
)


@gluon.jit
def publish_tile(tile_info, iteration, tile, params):
    """Called by the producer: writes the info of the iteration's work tile."""
    VARLEN: gl.constexpr = params.cu_seqlens_q is not None
    producer_acquire(tile_info, iteration)
    for i in gl.static_range(TILE_FIELDS):
        if VARLEN or (i < 3 or i > 6):
            write_word(tile_info.stages, stage_of(iteration, INFO_STAGES) * INFO_WORDS + i, tile[i])
    if params.edges is not None:
        for i in gl.static_range(4):
            word = stage_of(iteration, INFO_STAGES) * INFO_WORDS + GAP_WORD + i
            write_word(tile_info.stages, word, tile[TILE_FIELDS + i])
    producer_commit(tile_info, iteration)


@gluon.jit
def wait_for_tile(tile_info, iteration, params):
    """Called by a consumer: waits for the iteration's work tile. Its info is valid until consumer_release(tile_info, …)."""
    consumer_wait(tile_info, iteration)
    return read_tile(tile_info, iteration, params)


@gluon.jit
def read_tile(tile_info, iteration, params):
    """Like wait_for_tile, without the wait. A field that is read again where it is used takes no register before that."""
    words = tile_info.stages
    first = stage_of(iteration, INFO_STAGES) * INFO_WORDS
    start_q = 0
    start_k = 0
    tq = params.tq
    tk = params.tk
    if params.cu_seqlens_q is not None:
        start_q = read_word(words, first + 3)
        start_k = read_word(words, first + 4)
        tq = read_word(words, first + 5)
        tk = read_word(words, first + 6)
    gap = 0
    gap_tiles = 0
    gap2 = 0
    gap2_tiles = 0
    if params.edges is not None:
        gap = read_word(words, first + GAP_WORD)
        gap_tiles = read_word(words, first + GAP_WORD + 1)
        gap2 = read_word(words, first + GAP_WORD + 2)
        gap2_tiles = read_word(words, first + GAP_WORD + 3)
    return WorkTile(
        read_word(words, first), read_word(words, first + 1), read_word(words, first + 2), start_q, start_k, tq, tk,
        read_word(words, first + 7), read_word(words, first + 8), read_word(words, first + 9), read_word(words, first + 10),
        read_word(words, first + 11), read_word(words, first + 12), read_word(words, first + 13), read_word(words, first + 14),
        gap, gap_tiles, gap2, gap2_tiles,
    )  # fmt: skip


@gluon.jit
def stored_word(iteration, which: gl.constexpr, HALF: gl.constexpr):
    """The word of tile info that says whether half HALF of dk or dv is to be stored."""
    return stage_of(iteration, INFO_STAGES) * INFO_WORDS + TILE_FIELDS + 2 * which + HALF


@gluon.jit
def row_tile(tile, i, params):
    """The index of the i-th row tile; masked ones come first, except with intervals."""
    if params.edges is None:
        masked = tile.first + i + gl.where(i < tile.masked_before, 0, tile.unmasked)
        return gl.where(i < tile.masked, masked, tile.first + tile.masked_before + i - tile.masked)
    else:
        m = tile.first + i
        m += gl.where(m >= tile.gap, tile.gap_tiles, 0)
        return m + gl.where(m >= tile.gap2, tile.gap2_tiles, 0)


@gluon.jit
def masked_flags(tile, i, m, params, BLOCK_M: gl.constexpr):
    """MASKED and PARTIAL of the i-th row tile, m."""
    if params.edges is None:
        return gl.where(i < tile.masked, MASKED, 0)
    else:
        edges = edges_of(tile.b, tile.kv_head, tile.n, params)
        before = m - tile.first - tile.masked_before
        masked = (before < 0) | (before >= tile.unmasked)
        partial = masks_some(edges, m * BLOCK_M, gl.minimum(m * BLOCK_M + BLOCK_M, tile.tq), params)
        return gl.where(masked, MASKED, 0) + gl.where(partial, PARTIAL, 0)


@gluon.jit
def row_of(row_info, params, BLOCK_M: gl.constexpr):
    """The first row of the row tile."""
    BITS: gl.constexpr = FLAG_BITS if params.edges is None else FLAG_BITS + 1
    return (row_info >> BITS) * BLOCK_M


@gluon.jit
def head_and_column(t, params, col_tiles):
    """(head, n) of the t-th work tile: within a section, column tile 0 of every head, then column tile 1 of every head …"""
    section = t // (params.heads_per_section * col_tiles)
    within = t - section * params.heads_per_section * col_tiles
    heads = gl.minimum(params.heads_per_section, params.all_heads - section * params.heads_per_section)
    n = within // heads
    return section * params.heads_per_section + within - n * heads, n


@gluon.jit
def _gap(edges, first, last, tq, BLOCK_M: gl.constexpr):
    """The row tiles (begin, end) among first … last that the interval with these edges masks out."""
    largest_start = gl.minimum(gl.load(edges + 1), tq)
    least_end = gl.load(edges + 2)
    begin = gl.minimum(gl.maximum((largest_start + BLOCK_M - 1) // BLOCK_M, first), last)
    end = gl.where(least_end >= tq, last, least_end // BLOCK_M)
    return begin, gl.minimum(gl.maximum(end, begin), last)


@gluon.jit
def _gaps(b, kv_head, n, first, last, tq, params, BLOCK_M: gl.constexpr):
    """(begin, end, begin, end) of the two gaps of a work tile in ascending order, without overlap."""
    edges = edges_of(b, kv_head, n, params)
    begin, end = _gap(edges, first, last, tq, BLOCK_M)
    if params.second is None:
        return begin, end, last, last
    else:
        begin2, end2 = _gap(edges + 4, first, last, tq, BLOCK_M)
        later = gl.where(begin2 < begin, begin, begin2)
        later_end = gl.where(begin2 < begin, end, end2)
        end = gl.where(begin2 < begin, end2, end)
        later = gl.maximum(later, end)
        return gl.minimum(begin, begin2), end, later, gl.maximum(later, later_end)


@gluon.jit
def skipped_tiles(m, tile, params, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many column tiles row tile m skips between tile.n and the next tile that it visits. There must be such a tile."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [TESTED], [gl.num_warps()], [0])
    NUMBERS: gl.constexpr = 4 if params.second is None else 8
    start = m * BLOCK_M
    stop = gl.minimum(start + BLOCK_M, tile.tq)
    head = edges_of(tile.b, tile.kv_head, 0, params)
    n_after = gl.arange(0, TESTED, layout=SPREAD)
    skipped = m * 0
    visited = skipped + TESTED
    while visited == TESTED:
        n = gl.minimum(tile.n + 1 + skipped + n_after, (tile.tk + BLOCK_N - 1) // BLOCK_N - 1)
        edges = head + n * NUMBERS
        visited = gl.min(gl.where(masks_all(edges, start, stop, params), TESTED, n_after), 0)
        skipped += visited
    return skipped


@gluon.jit
def work_tile(
    b, kv_head, n, start_q, start_k, tq, tk, params, part, index, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Column tile n of a kv head: the row tiles that attend to it, and which of them split `part` computes."""
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
    unmasked_end = last  # rows beyond the end need no mask, because neg_lse2 makes their p 0
    if params.left is not None:
        unmasked_end = gl.minimum(gl.maximum(start + shift + params.left + 1, 0) // BLOCK_M, last)
    unmasked = gl.where(start + BLOCK_N > tk, last, unmasked)  # columns beyond the end need a mask
    unmasked_end = gl.maximum(unmasked, unmasked_end)
    count_unmasked = unmasked_end - unmasked
    count = last - first
    gap = 0
    gap_tiles = 0
    gap2 = 0
    gap2_tiles = 0
    if params.edges is not None:
        gap, gap_end, gap2, gap2_end = _gaps(b, kv_head, n, first, last, tq, params, BLOCK_M)
        gap_tiles = gap_end - gap
        gap2_tiles = gap2_end - gap2
        count -= gap_tiles + gap2_tiles
    begin = n * 0
    end = count * params.group
    if params.splits is not None:
        begin = end * part // params.splits
        end = end * (part + 1) // params.splits
    return WorkTile(
        b, kv_head, n, start_q, start_k, tq, tk, first, unmasked - first, count_unmasked,
        count - count_unmasked, count, begin, end, index, gap, gap_tiles, gap2, gap2_tiles,
    )  # fmt: skip


@gluon.jit
def take_tile(tile_counter, params):
    """Takes the next (work tile, split)."""
    t = gl.atomic_add(tile_counter, 1)
    part = 0
    if params.splits is not None:
        part = t % params.splits
        t = t // params.splits
    return t, part


@gluon.jit
def first_row(b, start_q, rows_b, VARLEN: gl.constexpr):
    """The first row of sequence b in neg_lse2 and delta. Packed sequences are padded to multiples of rows_b there, because TMA
    loads start at multiples of 16 bytes."""
    return (start_q + b * rows_b) // rows_b * rows_b if VARLEN else b * rows_b


@gluon.jit
def tma_coordinates(params, b, start, size, h, row):
    """TMA coordinates of a row of sequence b, without the column; for packed sequences as in varlen_descriptor."""
    if params.cu_seqlens_q is None:
        return b, h, row
    else:
        return SEQUENCE_END, start + size, h, SEQUENCE_END - size + row
