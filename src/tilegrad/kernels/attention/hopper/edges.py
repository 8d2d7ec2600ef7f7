"""The edges of a tile of columns, as ../triton/intervals.py computes them. A column has one interval or two. The first
intervals of a tile have four edges: least start, largest start, least end, largest end. Its second intervals have four more.

`params` of the forward or of the backward has the pointer `edges`, its strides edges_b between sequences and edges_h between
kv heads, counted in tiles, and `second`, which is None if a column has one interval."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def edges_of(b, kv_head, n, params):
    """Pointer to the four or eight edges of tile n."""
    NUMBERS: gl.constexpr = 4 if params.second is None else 8
    return params.edges + (b * params.edges_b + kv_head * params.edges_h + n) * NUMBERS


@gluon.jit
def masks_all(edges, start, stop, params):
    """Whether the first interval of every column contains all rows [start, stop), or the second interval of every column does.
    If so, the tile is skipped."""
    masked = (gl.load(edges + 1) <= start) & (gl.load(edges + 2) >= stop)
    if params.second is not None:
        masked |= (gl.load(edges + 5) <= start) & (gl.load(edges + 6) >= stop)
    return masked


@gluon.jit
def masks_some(edges, start, stop, params):
    """Whether an interval of a column may contain a row of [start, stop). If so, each element of the tile is tested."""
    masked = (gl.load(edges) < stop) & (start < gl.load(edges + 3))
    if params.second is not None:
        masked |= (gl.load(edges + 4) < stop) & (start < gl.load(edges + 7))
    return masked
