"""How large a tile each kernel walks with: a committed table, written by `tilegrad bench attention --tune`.

A row is chosen by architecture (90 = compute capability 9.0; the nearest one below, or the first there is), bits of the
numbers multiplied (64 where float32 is widened for its products), the head dimension padded to a power of two, and whether
a band (causal or window) is there. Tests run what users run, and a captured step never tunes. Tiles below a row's own
follow as `SMALLER`: a tile whose shared memory does not fit the device makes way for the next. Of 100 only the widest head
has a row of its own, for sums are not in registers there; 120 multiplies as 80 does.
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
    """One tile for each kernel; `decode` is the forward for at most 16 rows. Where `dk` and `dv` are given they are walked
    apart, with the scores computed once more: a wide head leaves no registers for two accumulators."""

    fwd: Tile
    decode: Tile
    dkdv: Tile
    dq: Tile
    dk: Tile | None = None
    dv: Tile | None = None


INTERPRETER = 0
SMALLER = (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))

# Half-precision rows that do not begin at multiples of 16 bytes are loaded element by element. With larger tiles such
# loads gave wrong forwards on an H200 (Triton 3.6, warpgroup products, D ≠ Dv); these are too small for those products.
UNALIGNED = (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1))

# (architecture, bits, head dimension, band)
TABLE: dict[tuple[int, int, int, bool], Tiles] = {
    # table begins
    (0, 32, 64, False): Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),
    (80, 16, 64, False): Tiles(Tile(128, 64, 4, 3), Tile(16, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (80, 16, 128, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    (80, 16, 256, False): Tiles(Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 4, 1)),
    (80, 32, 64, False): Tiles(Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (80, 32, 128, False): Tiles(Tile(32, 32, 8, 1), Tile(16, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (80, 32, 256, False): Tiles(Tile(16, 32, 8, 1), Tile(16, 32, 4, 1), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
    (80, 64, 64, False): Tiles(Tile(64, 32, 4, 2), Tile(16, 64, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (80, 64, 128, False): Tiles(Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2), Tile(32, 32, 4, 2)),
    (80, 64, 256, False): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    (90, 16, 64, False): Tiles(Tile(128, 64, 8, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    (90, 16, 64, True): Tiles(Tile(64, 64, 4, 3), Tile(16, 128, 4, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    (90, 16, 128, False): Tiles(Tile(128, 128, 8, 3), Tile(16, 64, 4, 3), Tile(64, 128, 8, 3), Tile(128, 64, 8, 3)),
    (90, 16, 128, True): Tiles(Tile(128, 128, 8, 3), Tile(16, 64, 4, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 3)),
    (90, 16, 256, False): Tiles(
        Tile(128, 64, 8, 2),
        Tile(16, 64, 4, 2),
        Tile(32, 64, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(32, 128, 8, 3),
        Tile(64, 128, 8, 2),
    ),
    (90, 16, 256, True): Tiles(
        Tile(128, 64, 8, 2),
        Tile(16, 64, 4, 2),
        Tile(32, 64, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(32, 128, 8, 3),
        Tile(64, 128, 8, 2),
    ),
    (90, 64, 256, False): Tiles(Tile(16, 32, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 8, 1), Tile(32, 32, 8, 1)),
    (100, 16, 256, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 2), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    (120, 16, 64, False): Tiles(Tile(128, 64, 4, 3), Tile(16, 64, 4, 3), Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    (120, 16, 128, False): Tiles(Tile(128, 64, 8, 2), Tile(16, 64, 4, 3), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
    (120, 16, 256, False): Tiles(Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), Tile(32, 64, 8, 1), Tile(64, 32, 4, 1)),
    # table ends
}


@functools.cache
def candidates(kernel: str, architecture: int, bits: int, head_dim: int, band: bool) -> tuple[Tile, ...]:
    """Tiles to try in order. `head_dim` is padded."""
    own = row(architecture, bits, head_dim, band)
    tile: Tile = getattr(own, kernel)
    return (tile, *(t for t in SMALLER if t.m <= tile.m and t.n <= tile.n and t != tile))


def set_row(key: tuple[int, int, int, bool], tiles: Tiles) -> None:
    """Change the table of this process; only tuning does."""
    TABLE[key] = tiles
    candidates.cache_clear()
    row.cache_clear()


@functools.cache
def row(architecture: int, bits: int, head_dim: int, band: bool) -> Tiles:
    """The nearest row: bits and head dimension first, then the newest architecture not above, then the band."""

    def distance(key: tuple[int, int, int, bool]) -> tuple[bool, int, bool, int, bool]:
        a, other_bits, d, other_band = key
        if INTERPRETER in (a, architecture):
            return a != architecture, 0, False, 0, False
        return other_bits != bits, abs(d - head_dim), a > architecture, abs(architecture - a), other_band != band

    return TABLE[min(TABLE, key=distance)]
