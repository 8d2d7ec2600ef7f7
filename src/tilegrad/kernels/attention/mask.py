"""Which rows attend to which columns, and how scores change: a frozen dataclass that every kernel of the op reads.

Rows i < Tq and columns j < Tk are aligned at the bottom right: row i is at column i + Tk − Tq.

    distance(i, j) = i + Tk − Tq − j
    attends(i, j)  = −right ≤ distance ≤ left          None = open on that side; causal closes the right side at 0
                     and i in no interval of column j  intervals (B or 1, Hkv or 1, Tk, 2·n), n = 1 or 2: start ≤ i < end
    s(i, j)        = scale · q_i·k_j                   scale defaults to 1/√D
                   → c · tanh(s / c)                   softcap c > 0
                   → s + bias(i, j)                    masked out where a bool bias is False or a float bias is −inf
                   → s − alibi_slopes[h] · |distance|
                   → −∞ where masked out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ..cache import remember

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)
# The fields of `Mask` that are tensors; a seed may be an int too.
MASK_TENSORS = ("bias", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k", "intervals")
NEVER = 2**31 - 1  # larger than the index of any row
NUMBERS = frozenset((bool, int, float, NoneType))
_interned: dict[tuple[object, ...], Mask] = {}  # by numbers and their types, because 1 == True


def interned_mask(
    causal: bool,  # noqa: FBT001
    window: Window | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
) -> Mask:
    """The mask with these options, from the cache if the cache has it."""
    cached = None
    if not torch.compiler.is_compiling() and (window is None or type(window) is tuple):
        values = (causal, *(NO_WINDOW if window is None else window), scale, softcap, dropout_p, 0, 0)
        try:
            cached = _interned.get((values, tuple(map(type, values))))
        except TypeError:  # unhashable: check_options raises later
            cached = None
    return Mask(causal, window, scale, softcap, dropout_p=dropout_p) if cached is None else cached


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The options of a call of attention: masks, bias, dropout, packing. With cu_seqlens the batch is packed sequences."""

    causal: bool = False
    window: Window | None = None
    scale: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None  # broadcastable to (B, Hq, Tq, Tk)
    alibi_slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sinks: Tensor | None = None  # (Hq,)
    dropout_p: float = 0.0
    seed: int | Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    intervals: Tensor | None = None  # (B or 1, Hkv or 1, Tk, 2 or 4) int32: rows that do not attend to a column
    # The interned mask with the same numbers, or None if calls with this mask are not cached.
    cache_key: Mask | None = field(init=False, repr=False)
    has_tensors: bool = field(init=False, repr=False)  # also True for an int seed

    def __post_init__(self) -> None:
        no_options = self.bias is self.alibi_slopes is self.sinks is self.seed is None
        no_tensors = no_options and self.cu_seqlens_q is self.cu_seqlens_k is self.intervals is None
        object.__setattr__(self, "has_tensors", not no_tensors)
        object.__setattr__(self, "cache_key", self._find_interned())

    def _find_interned(self) -> Mask | None:
        window = NO_WINDOW if self.window is None else self.window
        if type(window) is not tuple or torch.compiler.is_compiling():
            return None
        longest = self.max_seqlen_q, self.max_seqlen_k
        values = (self.causal, *window, self.scale, self.softcap, self.dropout_p, *longest)
        types = tuple(map(type, values))
        if not NUMBERS.issuperset(types):
            return None
        mask = _interned.get((values, types))
        if mask is None and not self.has_tensors:
            mask = remember(_interned, (values, types), self)
        if mask is None:
            no_tensors: dict[str, Any] = dict.fromkeys(MASK_TENSORS)
            mask = replace(self, **no_tensors)
        return mask

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the mask, which a memory trace counts as read."""
        values = [getattr(self, name) for name in MASK_TENSORS]
        return tuple(x for x in values if x is not None and not isinstance(x, int))

    @property
    def band(self) -> Window:
        """(left, right): how far from the diagonal a row attends on each side; None: no limit."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def float_bias(self) -> Tensor | None:
        return None if self.bias is None or self.bias.dtype == torch.bool else self.bias

    @property
    def bool_bias(self) -> Tensor | None:
        return None if self.bias is None or self.bias.dtype != torch.bool else self.bias

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def slopes(self, batch: range) -> Tensor | None:
        """Slopes of these sequences, (len(batch) or 1, Hq)."""
        if self.alibi_slopes is None:
            return None
        return self.alibi_slopes[None] if self.alibi_slopes.ndim == 1 else self.alibi_slopes[batch.start : batch.stop]

    def columns_of(self, rows: range, tq: int, tk: int) -> range:
        """The columns that the band lets some row of `rows` attend to, as one range."""
        left, right = self.band
        first = 0 if left is None else max(0, rows.start + tk - tq - left)
        last = tk if right is None else min(tk, rows.stop + tk - tq + right)
        return range(first, max(first, last))

    def rows_of(self, columns: range, tq: int, tk: int) -> range:
        """The rows that the band lets attend to some column of `columns`, as one range."""
        left, right = self.band
        first = 0 if right is None else max(0, columns.start - (tk - tq) - right)
        last = tq if left is None else min(tq, columns.stop - (tk - tq) + left)
        return range(first, max(first, last))

    def unmasked(self, rows: range, columns: range, tq: int, tk: int) -> bool:
        """True if the band masks out no pair of this tile."""
        left, right = self.band
        nearest = rows.start + tk - tq - (columns.stop - 1)
        farthest = rows.stop - 1 + tk - tq - columns.start
        return (left is None or farthest <= left) and (right is None or nearest >= -right)


def distance(rows: Tensor, columns: Tensor, tq: int, tk: int) -> Tensor:
    """i + Tk − Tq − j, (M, N) int64."""
    return rows[:, None] + (tk - tq) - columns


def attends(mask: Mask, gap: Tensor) -> Tensor:
    """The band as a bool matrix over distances `gap`."""
    left, right = mask.band
    inside = torch.ones_like(gap, dtype=torch.bool)
    if left is not None:
        inside &= gap <= left
    if right is not None:
        inside &= gap >= -right
    return inside


def masked_by(intervals: Tensor, rows: Tensor) -> Tensor:
    """(B, H, M, N) bool, True where an interval masks a pair out.       intervals (B, H, N, 2·n) of N columns   rows (M,)"""
    starts, ends = intervals.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, N, n)
    i = rows[:, None, None]
    masked: Tensor = (i >= starts[:, :, None]) & (i < ends[:, :, None])
    return masked.any(-1)


def edges_of_tile(columns: Tensor, *, empty: Tensor, edges: Tensor) -> None:
    """edges (B, H, n, 4): for each of the n intervals, its least start, largest start, least end and largest end over the N
    columns of a tile. `columns` (B, H, N, n, 2) has the intervals and is overwritten.

    Rows a … b − 1 of the tile are all masked out if largest start ≤ a and b ≤ least end for one of the n intervals. No interval
    masks any of them out if b ≤ least start or largest end ≤ a for all n. An empty interval counts as start = 2³¹ − 1 and
    end = −1, so it fails the first test and never fails the second.
    """
    starts, ends = columns.unbind(-1)
    torch.ge(starts, ends, out=empty)
    starts.masked_fill_(empty, NEVER)
    ends.masked_fill_(empty, -1)
    for first, x in ((0, starts), (2, ends)):
        torch.amin(x, 2, out=edges[..., first])
        torch.amax(x, 2, out=edges[..., first + 1])


def four_dims(bias: Tensor) -> Tensor:
    """A view of a bias, or of its gradient, with the four dimensions (B, Hq, Tq, Tk), each of which may be 1."""
    return bias[(None,) * (4 - bias.ndim)]


def sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """(b, rows of q, rows of k) of each packed sequence."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(ends_q) - 1):
        yield b, slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])


def packed(x: Tensor, rows: slice) -> Tensor:
    """One sequence of a packed tensor (total, H, D) as a batch of one, (1, H, T, D), without a copy."""
    return x[rows].transpose(0, 1)[None]
