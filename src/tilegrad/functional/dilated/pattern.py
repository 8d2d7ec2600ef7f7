"""Dilated positions as strided views: the calls of attention that make up a branch, and where their rows are in memory.

A branch (s, r) cuts T positions into segments of s. The last segment may be shorter, and s is at most T. Each head has an
offset < r. In a segment the positions offset, offset + r, … of a head attend to each other. Nothing is gathered: in
x (B, H, T, D), which may have any strides, a move along an axis of a branch is a constant step in (b, h, t):

    rows of a segment        (0, 0, r)     L = ⌈(s − offset) / r⌉ of them
    segments                 (0, 0, s)
    heads of one offset      (0, 1, 0)
    heads h = c·r + j, whose offset is j     j steps by (0, 1, 1), one head and one position; c steps by (0, r, 0)
    sequences                (1, 0, 0)

Attention takes two axes besides the rows. Two axes can be merged if, in every tensor, the outer stride is the inner stride
times the inner size: B and segments of (B, T, H, D), or heads and segments of (B, H, T, D), if s divides T. If more than two
axes remain, the smallest ones become loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from torch import Tensor

Mode = Literal["head_groups", "longnet"]
MODES: tuple[str, ...] = get_args(Mode)
ROWS_PER_CALL = 1 << 19  # most rows of all heads of a call, to limit its scratch; far fewer rows keep a GPU busy

Step = tuple[int, int, int]  # over (b, h, t)


class Axis(NamedTuple):
    n: int
    step: Step


class View(NamedTuple):
    """Where the elements of a call are in a tensor: the arguments of as_strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    def of(self, x: Tensor) -> Tensor:
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.start)


class StridedCall(NamedTuple):
    """One call of attention: axes over x (B, H, T, …) that begin at `origin`."""

    origin: Step
    batch: Axis
    heads: Axis
    rows: Axis

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch.n, self.heads.n, self.rows.n

    def view_of(self, x: Tensor) -> View:
        """(batch, heads, rows, D) of x (B, H, T, D), or (batch, heads, rows) of x (B, H, T)."""
        strides = x.stride()
        axes = [_dot(axis.step, strides) for axis in (self.batch, self.heads, self.rows)]
        return View((*self.shape, *x.shape[3:]), (*axes, *strides[3:]), _dot(self.origin, strides))

    def of(self, x: Tensor) -> Tensor:
        return self.view_of(x).of(x)


class Branch(NamedTuple):
    """The heads that a branch covers, its rate, and its calls. No two calls share a position of a head."""

    heads: range
    rate: int
    calls: tuple[StridedCall, ...]

    @property
    def covers_all(self) -> bool:
        return self.rate == 1


def _dot(step: Step, strides: Sequence[int]) -> int:
    return step[0] * strides[0] + step[1] * strides[1] + step[2] * strides[2]


def head_groups(heads: int, branches: int) -> list[range]:
    """Contiguous groups of heads, one per branch; the first groups get the remainder."""
    size, more = divmod(heads, branches)
    ends = [0, *itertools.accumulate(size + (g < more) for g in range(branches))]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


@lru_cache(1024)
def branches(
    shape: Step,
    strides: tuple[tuple[int, ...], ...],
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    mode: Mode,
) -> tuple[Branch, ...]:
    """The branches of x (B, H, T, D) for tensors of these strides; in "longnet" sorted by rate."""
    h = shape[1]
    pairs = zip(segment_lengths, dilation_rates, strict=True)
    if mode == "head_groups":
        groups = zip(head_groups(h, len(segment_lengths)), pairs, strict=True)
        return tuple(
            Branch(heads, r, tuple(_calls(shape, strides, s, r, heads, g % r)))
            for g, (heads, (s, r)) in enumerate(groups)
        )
    by_rate = sorted(pairs, key=lambda branch: branch[1])
    return tuple(Branch(range(h), r, tuple(_calls(shape, strides, s, r, range(h), None))) for s, r in by_rate)


def _calls(
    shape: Step, strides: tuple[tuple[int, ...], ...], segment: int, rate: int, heads: range, offset: int | None
) -> Iterator[StridedCall]:
    """offset=None: head h begins at h mod rate."""
    b, _, t = shape
    s = min(segment, t)
    full_segments, tail = divmod(t, s)
    for first, n, length in ((0, full_segments, s), (full_segments * s, 1, tail)):
        of_heads = _one_offset(heads, offset, length, rate) if offset is not None else _by_head(heads, length, rate)
        for (h, shift), axes, rows in of_heads:
            if rows > 0:
                batch_axes = [Axis(b, (1, 0, 0)), Axis(n, (0, 0, length)), *axes]
                yield from _merged_calls((0, h, first + shift), batch_axes, Axis(rows, (0, 0, rate)), strides)


Heads = tuple[tuple[int, int], list[Axis], int]  # ((first head, its offset), axes of the heads, rows of a segment)


def _one_offset(heads: range, offset: int, length: int, rate: int) -> Iterator[Heads]:
    yield (heads.start, offset), [Axis(len(heads), (0, 1, 0))], -(-(length - offset) // rate)


def _by_head(heads: range, length: int, rate: int) -> Iterator[Heads]:
    """Heads c·rate + j: whole blocks of `rate` heads, then the rest. Offsets j < length mod rate have one more row."""
    full_blocks, rest = divmod(len(heads), rate)
    rows, longer = divmod(length, rate)
    for first, blocks, width in ((0, full_blocks, rate), (full_blocks * rate, 1, rest)):
        for low, high, n in ((0, min(longer, width), rows + 1), (longer, width, rows)):
            if blocks and high > low:
                yield (first + low, low), [Axis(blocks, (0, rate, 0)), Axis(high - low, (0, 1, 1))], n


def _merged_calls(
    origin: Step, axes: list[Axis], rows: Axis, strides: tuple[tuple[int, ...], ...]
) -> Iterator[StridedCall]:
    """Calls of at most ROWS_PER_CALL rows, or of one head. Axes are merged as far as the strides of every tensor allow."""
    axes = [axis for axis in axes if axis.n > 1]
    while pair := next((p for p in itertools.permutations(axes, 2) if _merge(*p, strides)), None):
        outer, inner = pair
        axes = [axis for axis in axes if axis is not outer and axis is not inner]
        axes.append(Axis(outer.n * inner.n, inner.step))
    one = Axis(1, (0, 0, 0))
    batch, heads, *looped = (*sorted(axes, key=lambda axis: -axis.n), one, one)
    for index in itertools.product(*(range(axis.n) for axis in looped)):
        start = _moved(origin, looped, index)
        most_heads = max(1, ROWS_PER_CALL // rows.n)
        for h in range(0, heads.n, most_heads):
            few_heads = Axis(min(most_heads, heads.n - h), heads.step)
            most_sequences = max(1, most_heads // few_heads.n)
            for b in range(0, batch.n, most_sequences):
                first = _moved(start, (batch, heads), (b, h))
                yield StridedCall(first, Axis(min(most_sequences, batch.n - b), batch.step), few_heads, rows)


def _merge(outer: Axis, inner: Axis, strides: tuple[tuple[int, ...], ...]) -> bool:
    return all(_dot(outer.step, x) == inner.n * _dot(inner.step, x) for x in strides)


def _moved(origin: Step, axes: Sequence[Axis], index: Sequence[int]) -> Step:
    b, h, t = (origin[i] + sum(n * axis.step[i] for axis, n in zip(axes, index, strict=True)) for i in range(3))
    return b, h, t
