"""The launches of intervals.py and their scratch, for every kernel of attention on a GPU."""

from __future__ import annotations

import torch

from ...gpu import ceil_div
from ...scratch import Scratch, Shapes
from ..mask import Mask
from ..problem import Sizes
from .arguments import Arguments, band_arguments, interval_arguments, pairs_of
from .fit import KernelCall
from .intervals import CHUNK, _edges_kernel, _last_kernel, _list_kernel
from .scores import MOST_RUNS


def list_shapes(sizes: Sizes, mask: Mask, least: int) -> Shapes:
    """The buffers of `list_calls` for tiles of at least `least` rows and columns; none without intervals."""
    if mask.intervals is None:
        return {}
    tiles = ceil_div(max(sizes.tq, sizes.tk), least) * (4 * MOST_RUNS.value + 2)
    return edge_shapes(sizes, mask, least) | {"runs": ((mask.intervals.shape[:2].numel() * tiles,), torch.int32)}


def last_shapes(sizes: Sizes, mask: Mask, least: int) -> Shapes:
    """The buffer of `last_calls` for tiles of at least `least` rows; none without intervals."""
    if mask.intervals is None:
        return {}
    return {"last_tiles": ((mask.intervals.shape[:2].numel() * ceil_div(sizes.tq, least),), torch.int32)}


def edge_shapes(sizes: Sizes, mask: Mask, least: int) -> Shapes:
    """The buffer of `edges_calls` for tiles of at least `least` columns; none without intervals."""
    if mask.intervals is None:
        return {}
    edges = mask.intervals.shape[:2].numel() * max(1, ceil_div(sizes.tk, least)) * 4 * pairs_of(mask)
    return {"edges": ((edges,), torch.int32)}


def list_calls(
    scratch: Scratch, sizes: Sizes, mask: Mask, m: int, n: int, *, columns: bool, first_row: int = 0
) -> list[KernelCall]:
    """The calls that list the tiles of columns which each tile of m rows visits or, with `columns`, the tiles of rows for each
    tile of n columns; none without intervals. The first tile of rows begins at first_row ≤ 0."""
    if mask.intervals is None:
        return []
    row_tiles, heads = ceil_div(sizes.tq - first_row, m), mask.intervals.shape[:2].numel()
    shared = _tile_arguments(scratch, sizes, mask, m, n, row_tiles)
    arguments = shared | {"runs": scratch["runs"], "first_row": first_row, "COLUMNS": columns}
    programs = heads * (ceil_div(sizes.tk, n) if columns else row_tiles)
    return [*edges_calls(scratch, sizes, mask, n), KernelCall(_list_kernel, (programs,), arguments, {})]


def last_calls(scratch: Scratch, sizes: Sizes, mask: Mask, m: int, n: int) -> list[KernelCall]:
    """The call that writes the index of the last tile of n columns that each tile of m rows visits; none without intervals. The
    call reads the results of `edges_calls`."""
    if mask.intervals is None:
        return []
    row_tiles, heads = ceil_div(sizes.tq, m), mask.intervals.shape[:2].numel()
    arguments = _tile_arguments(scratch, sizes, mask, m, n, row_tiles) | {"last_tiles": scratch["last_tiles"]}
    return [KernelCall(_last_kernel, (heads * row_tiles,), arguments, {})]


def _tile_arguments(scratch: Scratch, sizes: Sizes, mask: Mask, m: int, n: int, row_tiles: int) -> Arguments:
    return {
        "edges": scratch["edges"],
        "row_tiles": row_tiles,
        "col_tiles": ceil_div(sizes.tk, n),
        "tq": sizes.tq,
        "tk": sizes.tk,
        **band_arguments(sizes, mask),
        "PAIRS": pairs_of(mask),
        "BLOCK_M": m,
        "BLOCK_N": n,
        "CHUNK": CHUNK,
    }


def edges_calls(scratch: Scratch, sizes: Sizes, mask: Mask, n: int) -> list[KernelCall]:
    """The call that writes the edges of tiles of n columns; none without intervals or columns."""
    if mask.intervals is None or not sizes.tk:
        return []
    (batch, heads), col_tiles = mask.intervals.shape[:2], ceil_div(sizes.tk, n)
    arguments = interval_arguments(mask) | {
        "edges": scratch["edges"],
        "heads": heads,
        "col_tiles": col_tiles,
        "tk": sizes.tk,
        "PAIRS": pairs_of(mask),
        "BLOCK_N": n,
    }
    return [KernelCall(_edges_kernel, (col_tiles * heads * batch,), arguments, {})]
