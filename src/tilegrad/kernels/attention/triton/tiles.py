"""Tile sizes of each kernel: a table written by `python -m benchmarks.tune`.

A row is selected by

    architecture      10 · compute capability: 80 Ampere, 90 Hopper, 100 and 120 Blackwell; otherwise the next lower one, or 80
    bits              16, 32, or 64 if float32 is converted to float64 for GEMMs
    head dimension    padded to a power of two
    band              whether the call is causal or has a window; INTERVALS, if it has intervals

The table is committed, so tests run the same tiles as users, and a captured step never tunes. A tile that needs more shared
memory than the device has is replaced by the next of `SMALLER`.

Architecture 100 (B200) uses Hopper's rows up to head dimension 128. Accumulators of wider heads are in tensor memory (TMEM), so
dk and dv need no separate passes. Architecture 120 (RTX 50) has the MMA instructions of 80, without warpgroups or TMEM, and
uses Ampere's tiles.
"""

from __future__ import annotations

import functools
from typing import NamedTuple


class Tile(NamedTuple):
    m: int  # rows
    n: int  # columns
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One tile per kernel; `decode` is the forward for at most 16 rows. `dk` and `dv`, if given, are separate passes that
    recompute the scores: a wide head leaves no registers for two accumulators."""

    fwd: Tile
    decode: Tile
    dkdv: Tile
    dq: Tile
    dk: Tile | None = None
    dv: Tile | None = None


INTERPRETER = 0
LEAST = 16  # rows, and columns, of any tile
SMALLER = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))

# Half-precision rows that are not 16-byte aligned are loaded element by element. With larger tiles such loads gave wrong
# results of the forward on an H200 (Triton 3.6, wgmma, D ≠ Dv). These tiles are too small for wgmma.
UNALIGNED = (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))

# The forward of an invariant problem and attention over a cache add in the same order: both use the same tile and the same
# columns per split for every batch, length and capacity. With 64 rows both use wgmma on Hopper. n, stages and SPLIT may be
# tuned; SPLIT must be a multiple of every n. With n = 64, the forward of heads above 64 would spill registers on sm_90.
SPLIT = 256
ORDERED = {  # largest head dimension → (tile of half precision, tile of float32)
    64: (Tile(64, 64, 4, 3), Tile(16, 32, 4, 2)),
    128: (Tile(64, 32, 4, 3), Tile(16, 32, 8, 1)),
    256: (Tile(64, 32, 8, 3), Tile(16, 32, 8, 1)),
    512: (Tile(16, 32, 4, 1), Tile(16, 16, 8, 1)),
}


def ordered(bits: int, d: int, dv: int) -> Tile:
    """The tile for these head dimensions; one of UNALIGNED if rows of half precision can't be 16-byte aligned."""
    if bits == 16 and (d % 8 or dv % 8):
        return UNALIGNED[0]
    tile16, tile32 = ORDERED[min(n for n in ORDERED if n >= max(d, dv))]
    return tile16 if bits == 16 else tile32


Key = tuple[int, int, int, int]  # architecture, bits, head dimension (padded), band
INTERVALS = 2  # a separate band, because these loops keep the runs of a list and the ends of intervals in registers

TABLE: dict[Key, Tiles] = {
    # table begins
    (0, 32, 64, False): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
    (80, 16, 64, False): Tiles(Tile(128, 64, 4, 3), Tile(16, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (80, 16, 128, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    (80, 16, 256, False): Tiles(Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 4, 1)),
    (80, 16, 512, False): Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 4, 1), Tile(16, 16, 8, 1), Tile(32, 16, 8, 1)),
    (80, 32, 64, False): Tiles(Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (80, 32, 128, False): Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (80, 32, 256, False): Tiles(Tile(16, 32, 8, 1), Tile(16, 32, 4, 1), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    (80, 32, 512, False): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (80, 64, 64, False): Tiles(Tile(64, 32, 4, 2), Tile(16, 64, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (80, 64, 128, False): Tiles(Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 4, 2)),
    (80, 64, 256, False): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    (80, 64, 512, False): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (90, 16, 64, False): Tiles(Tile(128, 64, 8, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    (90, 16, 64, True): Tiles(Tile(64, 64, 4, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    (90, 16, 128, False): Tiles(Tile(128, 128, 8, 3), Tile(16, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    (90, 16, 128, True): Tiles(Tile(128, 128, 8, 3), Tile(16, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    (90, 16, 128, 2): Tiles(Tile(128, 64, 8, 3), Tile(16, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    (90, 16, 256, False): Tiles(
        Tile(128, 64, 8, 2),
        Tile(16, 64, 4, 2),
        Tile(32, 64, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(32, 128, 8, 3),
        Tile(64, 128, 8, 2),
    ),
    (90, 16, 512, False): Tiles(
        Tile(64, 32, 8, 2),
        Tile(16, 64, 8, 2),
        Tile(16, 16, 8, 1),
        Tile(64, 16, 8, 2),
        Tile(16, 64, 8, 2),
        Tile(32, 64, 8, 2),
    ),
    (90, 64, 256, False): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 8, 1), Tile(32, 32, 8, 1)),
    (100, 16, 256, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    (100, 16, 512, False): Tiles(Tile(64, 32, 8, 2), Tile(16, 32, 4, 1), Tile(16, 16, 8, 1), Tile(32, 16, 8, 1)),
    (120, 16, 64, False): Tiles(Tile(128, 64, 4, 3), Tile(16, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (120, 16, 128, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    (120, 16, 256, False): Tiles(Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 4, 1)),
    (120, 16, 512, False): Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 4, 1), Tile(16, 16, 8, 1), Tile(32, 16, 8, 1)),
    # table ends
}


@functools.cache
def candidates(kernel: str, key: Key) -> tuple[Tile, ...]:
    """The tiles to try, in order."""
    tile: Tile = getattr(row(key), kernel)
    return (tile, *(t for t in SMALLER if t.m <= tile.m and t.n <= tile.n and t != tile))


def set_row(key: Key, tiles: Tiles) -> None:
    """Changes the table of this process, for tuning."""
    TABLE[key] = tiles
    candidates.cache_clear()
    row.cache_clear()


@functools.cache
def row(key: Key) -> Tiles:
    """The nearest row: by bits, then by head dimension, then the newest architecture that is not newer than this one, then by
    band."""
    architecture, bits, head_dim, band = key

    def distance(other: Key) -> tuple[bool, int, bool, int, int]:
        a, other_bits, d, other_band = other
        if INTERPRETER in (a, architecture):
            return a != architecture, 0, False, 0, 0
        return other_bits != bits, abs(d - head_dim), a > architecture, abs(architecture - a), abs(other_band - band)

    return TABLE[min(TABLE, key=distance)]
