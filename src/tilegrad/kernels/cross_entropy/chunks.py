"""Chunks of rows whose logits exist at the same time, and the scratch of their products."""

from __future__ import annotations

from collections.abc import Iterator

from ..linear import linear_workspace, rounds_weights
from ..scratch import Form, Shapes, TensorLike, below, blocks, larger

_EVEN = 256  # a larger number of rows is rounded down to a multiple of this


def most_rows(n: int, v: int, itemsize: int, size: int, even: int = _EVEN) -> int:
    """The most rows of a chunk with `size` bytes of logits. It never decreases with n, so scratch for a large batch
    also fits a small one."""
    rows = size // (max(v, 1) * itemsize)
    return max(1, min(n, rows - rows % even if rows > even else rows))


def chunks(n: int, most: int, multiple: int = 1) -> Iterator[slice]:
    """0 … n in the fewest chunks, of about equal size. All but the last are multiples of `multiple` if `most` allows."""
    size = -(-n // max(-(-n // most), 1)) or 1
    return blocks(n, min(most, -(-size // multiple) * multiple))


def products_workspace(
    x: TensorLike, w: TensorLike, rows: int, *, backward: bool, invariant: bool = False, bias: bool = False
) -> Shapes:
    """Scratch of l = x wᵀ, with or without a bias, on `rows` rows and, in a backward, of its gradients. "w" is w rounded once
    for all chunks."""
    v, c = w.shape
    shapes: Shapes = {}
    if rounds_weights(x, w):
        shapes["w"] = ((v, c), x.dtype)
        w = Form((v, c), x.dtype, x.device)
    chunk = Form((rows, c), x.dtype, x.device)
    products = linear_workspace(chunk, w, backward=False, bias=bias, invariant=invariant)
    if backward:
        products = larger(products, linear_workspace(chunk, w, backward=True, bias=bias))
    return shapes | below("linear", products)
