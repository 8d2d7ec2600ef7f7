"""Masks in O(T) numbers: for each column, one or two intervals of rows that do not attend to it.

Every function returns options of `tilegrad.attention`. Pass them with two stars, next to any other options:

    tilegrad.attention(q, k, v, **tilegrad.masks.documents(cu_seqlens), softcap=30.0)

    documents         a token attends to the tokens of its own document
    prefix            tokens of a prefix attend to the whole prefix; later tokens attend causally
    shared_question   a question and several answers: each answer attends to the question and to itself
    from_bool         any bool matrix that has at most two intervals in each column
    from_block_mask   FlexAttention's BlockMask, with the same limit
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from .kernels.attention.checks import TENSOR, require
from .kernels.attention.mask import four_dims

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["IntervalMask", "documents", "from_block_mask", "from_bool", "prefix", "shared_question"]

CHUNK = 1 << 22  # pairs of a row and a column that are read at a time, but at least one column
MOST = 2  # the most intervals of a column
Integers = Tensor | Sequence[int] | Sequence[Sequence[int]]


class IntervalMask(TypedDict):
    """Two options of `tilegrad.attention`: intervals (B or 1, Hkv or 1, Tk, 2 or 4), and causal. Rows that causal masks out
    need no interval."""

    causal: bool
    intervals: Tensor


def documents(cu_seqlens: Integers, *, causal: bool = True, device: torch.device | str | None = None) -> IntervalMask:
    """Documents end to end in a sequence: document n has the tokens cu_seqlens[n] to cu_seqlens[n + 1].

    cu_seqlens (D + 1,), or (B, D + 1) for documents of different lengths in each sequence of a batch. Empty documents are
    accepted, so a sequence with fewer documents can be padded with them. The last number is T. If cu_seqlens is on a GPU,
    reading T synchronizes with the GPU. With causal=False, tokens also attend to later tokens of their document.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 2, 4, 10, 32)
    >>> two = tilegrad.masks.documents([[0, 4, 10], [0, 7, 10]])
    >>> two["intervals"][0, 0, :, 0].tolist()  # the first row after the document of a column
    [4, 4, 4, 4, 10, 10, 10, 10, 10, 10]
    >>> o = tilegrad.attention(q, k, v, **two)
    >>> alone = tilegrad.attention(q[:1, :, 4:], k[:1, :, 4:], v[:1, :, 4:], causal=True)
    >>> torch.allclose(o[:1, :, 4:], alone, atol=1e-6)
    True
    """
    require(isinstance(causal, bool), "causal", causal, "True or False", TypeError)
    ends = _integers("cu_seqlens", cu_seqlens, device)
    t = _total("cu_seqlens", ends)
    accepted = "numbers that start at 0, never decrease, and end at the same T in all sequences"
    grows = ends.shape[1] > 1 and not ends[:, 0].any() and bool((ends.diff() >= 0).all())
    require(grows and bool((ends[:, -1] == t).all()), "cu_seqlens", ends.tolist(), accepted, show=str)
    segments = _segments(ends[:, 1:], t)
    first, after = ends.gather(1, segments), ends.gather(1, segments + 1)
    if causal:
        return _options(after, torch.full_like(after, t), causal=True)
    return _options(torch.zeros_like(first), first, after, torch.full_like(after, t), causal=False)


def prefix(lengths: Integers, length: int, *, device: torch.device | str | None = None) -> IntervalMask:
    """Prefix-LM: the first lengths[b] tokens of sequence b attend to each other, and later tokens attend causally.

    lengths (B,), or (1,) for all sequences; `length` is T.

    >>> import torch, tilegrad
    >>> mask = tilegrad.masks.prefix([2, 0], 4)
    >>> mask["causal"], mask["intervals"][:, 0].tolist()  # rows 0 to j − 1 do not attend to a column j after the prefix
    (False, [[[0, 0], [0, 0], [0, 2], [0, 3]], [[0, 0], [0, 1], [0, 2], [0, 3]]])
    """
    is_int, accepted = isinstance(length, int) and not isinstance(length, bool), "an int ≥ 0, the tokens of a sequence"
    require(is_int, "length", length, accepted, TypeError)
    require(length >= 0, "length", length, accepted)
    numbers = _integers("lengths", lengths, device)
    require(len(numbers) == 1, "lengths", f"shape {tuple(numbers.shape)}", "a number for each sequence, (B,)", show=str)
    inside = bool(((numbers >= 0) & (numbers <= length)).all())
    require(inside, "lengths", numbers[0].tolist(), f"0 to {length}, the tokens of a sequence", show=str)
    j = torch.arange(length, device=numbers.device)
    stop = torch.where(j < numbers.mT, 0, j)
    return _options(torch.zeros_like(stop), stop, causal=False)


def shared_question(lengths: Integers, *, device: torch.device | str | None = None) -> IntervalMask:
    """A question and its answers end to end: each token attends to the question and to its own answer, causally.

    lengths (1 + A,): tokens of the question, then of each answer; or (B, 1 + A), where each row has the sum T. Give padding as
    one more answer.

    >>> import torch, tilegrad
    >>> q, k, v = torch.randn(3, 1, 4, 9, 32)
    >>> o = tilegrad.attention(q, k, v, **tilegrad.masks.shared_question([4, 2, 3]))
    >>> second = torch.cat([torch.arange(4), torch.arange(6, 9)])  # the question and the second answer alone
    >>> alone = tilegrad.attention(q[:, :, second], k[:, :, second], v[:, :, second], causal=True)
    >>> torch.allclose(o[:, :, 6:], alone[:, :, 4:], atol=1e-6)
    True
    """
    numbers = _integers("lengths", lengths, device)
    ends = numbers.cumsum(1)
    t = _total("lengths", ends)
    accepted = "numbers ≥ 0 of the question and of each answer, with the same sum in all sequences"
    fits = bool((numbers >= 0).all()) and bool((ends[:, -1] == t).all())
    require(fits, "lengths", numbers.tolist(), accepted, show=str)
    segments = _segments(ends, t)
    after = torch.where(segments == 0, t, ends.gather(1, segments))
    return _options(after, torch.full_like(after, t), causal=True)


def from_bool(mask: Tensor) -> IntervalMask:
    """The exact intervals of a bool matrix, True = attends, as in a bool bias. Raises an error that names the first column with
    more than two runs of rows that do not attend. mask is (Tq, Tk), (H, Tq, Tk) or (B, H, Tq, Tk), where B and H may be 1.
    H is otherwise the number of kv heads, because query heads that share a kv head share its intervals. Rows are not broadcast:
    expand a mask of columns, (B, 1, 1, Tk), with mask.expand(-1, -1, Tq, -1).

    causal is True in the result if no row attends to a later token. A column may then have two runs below the diagonal. One run
    is enough for a tree in depth-first order, and for a window with tokens at the start that are never evicted:

    >>> import torch, tilegrad
    >>> i, j = torch.arange(6)[:, None], torch.arange(6)
    >>> kept = tilegrad.masks.from_bool((j <= i) & ((j < 1) | (i - j < 3)))
    >>> kept["causal"], kept["intervals"][0, 0].tolist()
    (True, [[0, 0], [4, 6], [5, 6], [0, 0], [0, 0], [0, 0]])
    """
    require(isinstance(mask, Tensor), "mask", type(mask).__name__, TENSOR, TypeError, show=str)
    require(mask.dtype == torch.bool, "mask", mask.dtype, "bool, True where a row attends to a column", TypeError)
    require(
        2 <= mask.ndim <= 4, "mask", f"shape {tuple(mask.shape)}", "(Tq, Tk), (H, Tq, Tk) or (B, H, Tq, Tk)", show=str
    )
    intervals = intervals_of_bool(mask)
    if isinstance(intervals, str):
        raise ValueError(f"mask: got {intervals}")
    return intervals


def from_block_mask(block_mask: BlockMask) -> IntervalMask:
    """The exact intervals of a BlockMask of torch.nn.attention.flex_attention. Refuses the same masks as `from_bool`.

    The mask_mod is evaluated in chunks of columns: at most 4 Mi pairs at a time, or one column if a column has more pairs.
    With Tq ≠ Tk, a causal mask_mod is usually aligned at the top left, but `causal` at the bottom right. The intervals mask out
    the pairs that FlexAttention masks out.

    >>> import torch, tilegrad
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> document = torch.tensor([0] * 100 + [1] * 200)
    >>> same = create_block_mask(lambda b, h, i, j: (i >= j) & (document[i] == document[j]), None, None, 300, 300, device="cpu")
    >>> ours = tilegrad.masks.from_block_mask(same)
    >>> by_ends = tilegrad.masks.from_bool((document[:, None] == document).tril())
    >>> ours["causal"], torch.equal(ours["intervals"], by_ends["intervals"])
    (True, True)
    """
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    valid = isinstance(block_mask, BlockMask)
    require(valid, "block_mask", type(block_mask).__name__, "what create_block_mask returns", TypeError, show=str)
    b, h = block_mask.kv_num_blocks.shape[:2]
    tq, tk = block_mask.seq_lengths
    device, (block_rows, block_columns) = block_mask.kv_num_blocks.device, block_mask.BLOCK_SIZE
    partial = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    rows = torch.arange(tq, device=device) // block_rows

    def attends(columns: range) -> Tensor:
        def shifted(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return block_mask.mask_mod(b, h, i, j + columns.start)

        at = torch.arange(columns.start, columns.stop, device=device) // block_columns
        pairs = create_mask(shifted, b, h, tq, len(columns), device=str(device))
        return full[:, :, rows][..., at] | partial[:, :, rows][..., at] & pairs

    intervals = _intervals_of(attends, (b, h, tq, tk), device)
    if isinstance(intervals, str):
        raise ValueError(f"block_mask: got {intervals}")
    return intervals


def intervals_of_bool(mask: Tensor) -> IntervalMask | str:
    """The intervals of a bool tensor, or the reason why `from_bool` refuses it."""
    mask = four_dims(mask)
    for dim in (0, 1):  # an expanded dimension has equal elements
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return _intervals_of(lambda columns: mask[..., columns.start : columns.stop], tuple(mask.shape), mask.device)


def _intervals_of(
    attends: Callable[[range], Tensor], shape: tuple[int, ...], device: torch.device
) -> IntervalMask | str:
    """The intervals of a bool matrix (B, H, Tq, Tk), from its parts attends(columns) (B, H, Tq, N).

    With causal, no pair above the diagonal needs an interval. So causal=True is tried first, and causal=False only if a pair
    above the diagonal attends. A column has at least as many runs without causal, so a refusal with causal is final."""
    *_, tq, tk = shape
    last = torch.arange(tq, device=device)[:, None] + (tk - tq)  # the last column that causal lets a row attend to
    for causal in (True, False):
        parts = [torch.zeros(*shape[:2], 0, 2 * MOST, dtype=torch.int32, device=device)]
        for columns in _chunks(shape):
            part = attends(columns)
            if causal:
                later = torch.arange(columns.start, columns.stop, device=device) > last
                if bool((part & later).any()):
                    break
                part = part | later
            count, intervals = _runs(~part)
            if bool((count > MOST).any()):
                b, h, j = (count > MOST).nonzero()[0].tolist()
                return (
                    f"{count[b, h, j]} runs of rows that do not attend to column {columns.start + j} (batch {b}, head {h}); "
                    f"accepted: at most {MOST} in each column (a bool bias takes any number)"
                )
            parts.append(intervals)
        else:
            break
    intervals = torch.cat(parts, 2)
    starts, ends = intervals[..., 0::2], intervals[..., 1::2]
    if not bool((starts < ends).all(-1).any()):  # one interval is enough: the other one is empty, 0 to 0
        intervals = torch.cat([starts.sum(-1, keepdim=True), ends.sum(-1, keepdim=True)], -1).int()
    return {"causal": causal, "intervals": intervals}


def _runs(masked: Tensor) -> tuple[Tensor, Tensor]:
    """The number of runs of True in each column of (B, H, Tq, N): (B, H, N) int32, and the first and the last run,
    (B, H, N, 4) int32. If a column has more than MOST runs, the second result is the first result again.

    A single run is the first interval if it starts at row 0, otherwise the second, so that neighbouring columns have similar
    intervals. The unused interval is 0 to 0."""
    b, h, tq, n = masked.shape
    if not tq:
        empty = torch.zeros(b, h, n, 2 * MOST, dtype=torch.int32, device=masked.device)
        return empty[..., 0], empty
    changes, top, bottom = masked[:, :, 1:] ^ masked[:, :, :-1], masked[:, :, 0], masked[:, :, -1]
    count = (changes.sum(2, dtype=torch.int32) + top + bottom) // 2
    if bool((count > MOST).any()):
        return count, count
    edges = changes.nonzero()
    rows, column = edges[:, 2] + 1, (edges[:, 0] * h + edges[:, 1]) * n + edges[:, 3]
    starts = masked[edges[:, 0], edges[:, 1], rows, edges[:, 3]]
    (start, last_start), (end, last_end) = (
        [
            torch.full((b * h * n,), none, device=masked.device)
            .scatter_reduce_(0, column[chosen], rows[chosen], reduce)
            .view(b, h, n)
            for none, reduce in ((tq, "amin"), (0, "amax"))
        ]
        for chosen in (starts, ~starts)
    )
    start, last_end = start.masked_fill(top, 0), last_end.masked_fill(bottom, tq)
    no_first, no_last = (count == 0) | (count == 1) & (start > 0), (count == 0) | (count == 1) & (start == 0)
    runs = [start.masked_fill(no_first, 0), end.masked_fill(no_first, 0)]
    runs += [last_start.masked_fill(no_last, 0), last_end.masked_fill(no_last, 0)]
    return count, torch.stack(runs, -1).int()


def _chunks(shape: tuple[int, ...]) -> Iterator[range]:
    b, h, tq, tk = shape
    step = max(1, CHUNK // max(1, b * h * tq))
    for first in range(0, tk, step):
        yield range(first, min(first + step, tk))


def _blocks(count: Tensor, indices: Tensor) -> Tensor:
    """(B, H, row blocks, column blocks) bool: True for the first `count` block columns that `indices` lists in each row."""
    n = indices.shape[-1]
    listed = torch.arange(n, device=count.device) < count[..., None]
    blocks = torch.zeros(*indices.shape[:-1], n + 1, dtype=torch.bool, device=count.device)
    return blocks.scatter_(-1, torch.where(listed, indices, n).long(), value=True)[..., :n]


def _integers(name: str, x: Integers, device: torch.device | str | None) -> Tensor:
    """x as (B, N) int64. A tensor with one dimension has B = 1."""
    kinds = "integers (int32, int64, a list of ints, or lists of ints with one length)"
    try:
        given = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        # None, a str, lists of different lengths, an int of more than 64 bits
        raise TypeError(f"{name}: got {x!r}; accepted: {kinds}") from None
    require(given.dtype in (torch.int32, torch.int64), name, given.dtype, kinds, TypeError)
    numbers = given.to(device)
    accepted = "(N,), or (B, N) for each sequence of a batch, N ≥ 1"
    fits = numbers.ndim in (1, 2) and numbers.numel()
    require(fits, name, f"shape {tuple(numbers.shape)}", accepted, show=str)
    return numbers.long().reshape(-1, numbers.shape[-1])


def _total(name: str, ends: Tensor) -> int:
    t = int(ends[0, -1])
    require(t >= 0, name, t, "numbers ≥ 0")
    return t


def _segments(ends: Tensor, t: int) -> Tensor:
    """The index of each token's segment, (B, T), from the ends of the segments (B, N)."""
    tokens = torch.arange(t, device=ends.device).repeat(len(ends), 1)
    return torch.searchsorted(ends.contiguous(), tokens, right=True)


def _options(*edges: Tensor, causal: bool) -> IntervalMask:
    """edges: start and end of each interval, (B, T) each."""
    return {"causal": causal, "intervals": torch.stack(edges, -1)[:, None].int()}
