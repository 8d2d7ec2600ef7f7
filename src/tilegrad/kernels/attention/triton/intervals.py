"""Interval masks on the device: small kernels that run before an attention kernel and find the tiles that each tile visits.

    edges   for each tile of columns and each interval of a column: least start, largest start, least end, largest end
            (mask.edges_of_tile)
    list    for each tile of rows, the tiles of columns that it visits; or for each tile of columns, the tiles of rows that it
            visits
    last    for each tile of rows, the last tile of columns that it visits; for Hopper's deterministic backward

A column has one or two intervals. A pair of a tile of rows [start, stop) and a tile of columns is

    masked out   (and in no list) if the band masks it out, or if the first interval of every column contains all these rows, or
                 the second interval of every column does: largest start ≤ start and stop ≤ least end
    unmasked     if no edge of the band crosses it, and no interval of any column contains one of these rows: stop ≤ least start
                 or largest end ≤ start, for the first and for the second intervals
    masked       otherwise: each of its elements is tested

A list has at most MOST_RUNS runs of unmasked tiles and as many of masked tiles (scores.py), so its size does not grow with the
sequence. If there are more runs of either kind, all later tiles up to the end of the band count as masked, so the list still
has every pair that attends. The lists of T rows cost T² / (BLOCK_M · BLOCK_N) comparisons and 4 · (4 · MOST_RUNS + 2) · T /
BLOCK_M bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import steps
from .scores import MOST_RUNS, band_tiles

CHUNK = 256  # tiles that a program of `_list_kernel` tests at once
BEYOND = tl.constexpr(2**31 - 1)  # after every row
SIZES = ["intervals_b", "intervals_h", "heads", "row_tiles", "col_tiles", "first_row"]
SIZES += ["tq", "tk", "left", "right"]


@triton.jit(do_not_specialize=SIZES)
def _edges_kernel(
    intervals, edges, intervals_b, intervals_h, heads, col_tiles, tk, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) // col_tiles
    j = tl.program_id(0) % col_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    intervals += steps(n // heads, intervals_b, 1) + steps(n % heads, intervals_h, 1)
    edges += steps(tl.program_id(0), 4 * PAIRS, 1)
    for pair in tl.static_range(PAIRS):
        starts = tl.load(intervals + j * (2 * PAIRS) + 2 * pair, mask=j < tk, other=0)
        ends = tl.load(intervals + j * (2 * PAIRS) + 2 * pair + 1, mask=j < tk, other=0)
        nonempty = (starts < ends) & (j < tk)  # an empty interval has no row; columns from tk on change no edge
        tl.store(edges + 4 * pair, tl.min(tl.where(nonempty, starts, BEYOND), 0))
        tl.store(edges + 4 * pair + 1, tl.max(tl.where(nonempty, starts, tl.where(j < tk, BEYOND, -1)), 0))
        tl.store(edges + 4 * pair + 2, tl.min(tl.where(nonempty, ends, tl.where(j < tk, -1, BEYOND)), 0))
        tl.store(edges + 4 * pair + 3, tl.max(tl.where(nonempty, ends, -1), 0))


@triton.jit
def _kinds(edges, cols, starts, stops, n, unmasked, unmasked_end, visited, PAIRS: tl.constexpr):
    """The kind of each pair of a tile `cols` of columns and rows [starts, stops): 0 not visited, 1 unmasked, 2 masked. n: the
    visited tile, of columns or of rows. No edge of the band crosses the visited tiles [unmasked, unmasked_end)."""
    masked_out = n < 0
    masked = (n < unmasked) | (n >= unmasked_end)
    for pair in tl.static_range(PAIRS):
        pointers = edges + cols * (4 * PAIRS) + 4 * pair
        least_start = tl.load(pointers, mask=visited, other=0)
        largest_start = tl.load(pointers + 1, mask=visited, other=0)
        least_end = tl.load(pointers + 2, mask=visited, other=0)
        largest_end = tl.load(pointers + 3, mask=visited, other=0)
        masked_out |= (largest_start <= starts) & (stops <= least_end)
        masked |= (least_start < stops) & (starts < largest_end)
    return tl.where(visited & (masked_out == 0), tl.where(masked, 2, 1), 0)


@triton.jit
def _runs_of(kind, previous, runs, MASKED: tl.constexpr):
    """(whether a run begins at each tile, the number of the latest run at each tile), for runs of unmasked tiles or, with
    MASKED, of masked tiles. `runs`: how many runs begin before these tiles."""
    begins = (kind == MASKED + 1) & (previous != MASKED + 1)
    return begins, runs + tl.cumsum(begins.to(tl.int32), 0) - 1


@triton.jit
def _add_runs(runs, n, kind, begins, number, tiles, count, MASKED: tl.constexpr):
    """Writes the runs that begin among the tiles n. Returns the numbers of tiles and of runs so far."""
    of_kind = (kind == MASKED + 1).to(tl.int32)
    before = tiles + tl.cumsum(of_kind, 0) - of_kind
    pointers = runs + 2 * MOST_RUNS * MASKED + number
    tl.store(pointers, before, mask=begins)
    tl.store(pointers + MOST_RUNS, n - before, mask=begins)
    return tiles + tl.sum(of_kind, 0), count + tl.sum(begins.to(tl.int32), 0)


@triton.jit(do_not_specialize=SIZES)
def _list_kernel(
    edges,
    runs,
    row_tiles, col_tiles, first_row, tq, tk, left, right,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Lists the tiles that one tile of rows visits, or one tile of columns if COLUMNS. Tile 0 of rows begins at first_row ≤ 0:
    Hopper's forward aligns its tiles with the last row, so its first tile may begin before row 0."""
    axis_tiles = col_tiles if COLUMNS else row_tiles
    tile = tl.program_id(0) % axis_tiles
    edges += steps(tl.program_id(0) // axis_tiles, 4 * PAIRS, 1) * col_tiles
    runs += steps(tl.program_id(0), 4 * MOST_RUNS + 2, 1)
    if COLUMNS:
        start = tile * BLOCK_N
        first, unmasked, unmasked_end, last = band_tiles(
            start, tl.minimum(start + BLOCK_N, tk), tq - tk, right, left, tq, BLOCK_M
        )
    else:
        start = tl.maximum(first_row + tile * BLOCK_M, 0)
        stop = tl.minimum(first_row + tile * BLOCK_M + BLOCK_M, tq)
        first, unmasked, unmasked_end, last = band_tiles(start, stop, tk - tq, left, right, tk, BLOCK_N)
    last = tl.minimum(last, row_tiles if COLUMNS else col_tiles)  # a list has no tile after the last
    cut = last  # from here on all tiles count as masked
    tiles = first * 0
    masked_tiles = first * 0
    count = first * 0
    masked_count = first * 0
    for base in tl.range(first, last, CHUNK):
        n = base + tl.arange(0, CHUNK)
        before = (n > first) & (n <= last)  # whether a visited tile comes before n
        if COLUMNS:
            rows = n * BLOCK_M
            kind = _kinds(
                edges, tile + n * 0, rows, tl.minimum(rows + BLOCK_M, tq), n, unmasked, unmasked_end, n < last, PAIRS
            )
            previous = _kinds(edges, tile + n * 0, rows - BLOCK_M, rows, n - 1, unmasked, unmasked_end, before, PAIRS)
        else:
            kind = _kinds(edges, n, start, stop, n, unmasked, unmasked_end, n < last, PAIRS)
            previous = _kinds(edges, n - 1, start, stop, n - 1, unmasked, unmasked_end, before, PAIRS)
        for _again in tl.static_range(2):
            kind = tl.where((n >= cut) & (n < last), 2, kind)
            previous = tl.where((n > cut) & (n <= last), 2, previous)
            begins, number = _runs_of(kind, previous, count, MASKED=False)
            masked_begins, masked_number = _runs_of(kind, previous, masked_count, MASKED=True)
            full = (begins & (number >= MOST_RUNS)) | (masked_begins & (masked_number >= MOST_RUNS - 1))
            cut = tl.minimum(cut, tl.min(tl.where(full, n, last), 0))
        tiles, count = _add_runs(runs, n, kind, begins, number, tiles, count, MASKED=False)
        masked_tiles, masked_count = _add_runs(
            runs, n, kind, masked_begins, masked_number, masked_tiles, masked_count, MASKED=True
        )
    r = tl.arange(0, MOST_RUNS)
    tl.store(runs + r, tl.full([MOST_RUNS], BEYOND, tl.int32), mask=r >= count)
    tl.store(runs + 2 * MOST_RUNS + r, tl.full([MOST_RUNS], BEYOND, tl.int32), mask=r >= masked_count)
    tl.store(runs + 4 * MOST_RUNS, tiles)
    tl.store(runs + 4 * MOST_RUNS + 1, masked_tiles)


@triton.jit(do_not_specialize=SIZES)
def _last_kernel(
    edges,
    last_tiles,
    row_tiles, col_tiles, tq, tk, left, right,
    PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The last tile of columns that a tile of rows visits, −1 if it visits none."""
    start = tl.program_id(0) % row_tiles * BLOCK_M
    stop = tl.minimum(start + BLOCK_M, tq)
    edges += steps(tl.program_id(0) // row_tiles, 4 * PAIRS, 1) * col_tiles
    first, unmasked, unmasked_end, last = band_tiles(start, stop, tk - tq, left, right, tk, BLOCK_N)
    last_tile = first * 0 - 1
    for base in tl.range(first, last, CHUNK):
        n = base + tl.arange(0, CHUNK)
        kind = _kinds(edges, n, start, stop, n, unmasked, unmasked_end, n < last, PAIRS)
        last_tile = tl.maximum(last_tile, tl.max(tl.where(kind != 0, n, -1), 0))
    tl.store(last_tiles + tl.program_id(0), last_tile)
