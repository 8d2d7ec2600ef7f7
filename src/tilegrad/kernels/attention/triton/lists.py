"""The launches of intervals.py and their scratch, for every kernel of attention on a GPU."""

from __future__ import annotations

import torch

from ...scratch import Scratch, Shapes
from ..mask import Mask
from ..problem import Sizes
from .arguments import interval_arguments, pairs_of
from .fit import KernelCall
from .intervals import CHUNK, _edges_kernel, _list_kernel
from .scores import MOST_RUNS


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def list_shapes(sizes: Sizes, mask: Mask, least: int) -> Shapes:
    """Buffers for tiles of at least `least` rows and columns; none without intervals."""
    if mask.intervals is None:
        return {}
    tiles = _ceil_div(max(sizes.tq, sizes.tk), least)
    runs = mask.intervals.shape[0] * mask.intervals.shape[1] * tiles * (4 * MOST_RUNS.value + 2)
    return edge_shapes(sizes, mask, least) | {"runs": ((runs,), torch.int32)}


def edge_shapes(sizes: Sizes, mask: Mask, least: int) -> Shapes:
    """The buffer of `edges_calls` for tiles of at least `least` columns; none without intervals."""
    if mask.intervals is None:
        return {}
    own = mask.intervals.shape[0] * mask.intervals.shape[1]
    edges = own * max(1, _ceil_div(sizes.tk, least)) * 4 * pairs_of(mask)
    return {"edges": ((edges,), torch.int32)}


def edges_calls(scratch: Scratch, sizes: Sizes, mask: Mask, n: int) -> list[KernelCall]:
    """The call that writes the edges of the intervals in tiles of n columns; none without columns."""
    if mask.intervals is None or not sizes.tk:
        return []
    (batch, heads), col_tiles = mask.intervals.shape[:2], _ceil_div(sizes.tk, n)
    arguments = interval_arguments(mask) | {
        "edges": scratch["edges"],
        "heads": heads,
        "col_tiles": col_tiles,
        "tk": sizes.tk,
        "PAIRS": pairs_of(mask),
        "BLOCK_N": n,
    }
    return [KernelCall(_edges_kernel, (col_tiles * heads * batch,), arguments, {})]


def list_calls(
    scratch: Scratch, sizes: Sizes, mask: Mask, m: int, n: int, *, columns: bool, first_row: int = 0
) -> list[KernelCall]:
    """The calls that list the tiles that each tile of m rows visits, or each tile of n columns. Tiles of rows begin at
    first_row ≤ 0."""
    if mask.intervals is None:
        return []
    row_tiles, col_tiles = _ceil_div(sizes.tq - first_row, m), _ceil_div(sizes.tk, n)
    batch, heads = mask.intervals.shape[:2]
    arguments = {
        "edges": scratch["edges"],
        "runs": scratch["runs"],
        "row_tiles": row_tiles,
        "col_tiles": col_tiles,
        "first_row": first_row,
        "tq": sizes.tq,
        "tk": sizes.tk,
        "left": sizes.left,
        "right": sizes.right,
        "PAIRS": pairs_of(mask),
        "BLOCK_M": m,
        "BLOCK_N": n,
        "COLUMNS": columns,
        "CHUNK": CHUNK,
    }
    programs = (col_tiles if columns else row_tiles) * heads * batch
    return [*edges_calls(scratch, sizes, mask, n), KernelCall(_list_kernel, (programs,), arguments, {})]
