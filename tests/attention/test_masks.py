"""tilegrad.masks: every constructor against its definition pair by pair, conversions that are exact or refused, bad input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import tilegrad
from tilegrad import masks
from tilegrad.kernels.attention.mask import Mask, attends, distance, masked_by
from tilegrad.masks import IntervalMask


def pairs(mask: IntervalMask, tq: int, tk: int) -> Tensor:
    """Whether each row attends to each column, (B, H, Tq, Tk)."""
    intervals = mask["intervals"]
    assert intervals.dtype == torch.int32 and intervals.is_contiguous() and intervals.shape[2] == tk
    band = attends(Mask(mask["causal"]), distance(torch.arange(tq), torch.arange(tk), tq, tk))
    return band & ~masked_by(intervals, torch.arange(tq))


def by_definition(t: int, attended: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[attended(i, j) for j in range(t)] for i in range(t)], dtype=torch.bool).reshape(t, t)


LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@settings(max_examples=60)
@given(lengths=LENGTHS, causal=st.booleans())
def test_a_document_mask_equals_its_definition(lengths: list[int], causal: bool) -> None:
    """Two sequences of one batch, the second with the documents of the first in reverse."""
    both, want = [lengths, lengths[::-1]], []
    for each in both:
        of = [n for n, length in enumerate(each) for _ in range(length)]
        want.append(by_definition(len(of), lambda i, j, of=of: of[i] == of[j] and (j <= i or not causal)))  # type: ignore[misc]
    ends = torch.tensor(both).cumsum(1)
    mask = masks.documents(torch.cat([torch.zeros(2, 1), ends], 1).int(), causal=causal)
    t = sum(lengths)
    assert mask["causal"] == causal and mask["intervals"].shape == (2, 1, t, 2 if causal else 4)
    assert torch.equal(pairs(mask, t, t), torch.stack(want)[:, None])


@settings(max_examples=40)
@given(t=st.integers(0, 9), data=st.data())
def test_a_prefix_mask_equals_its_definition(t: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, t), min_size=1, max_size=3))
    want = [by_definition(t, lambda i, j, p=p: j <= i or (i < p and j < p)) for p in lengths]  # type: ignore[misc]
    mask = masks.prefix(torch.tensor(lengths), t)
    assert torch.equal(pairs(mask, t, t), torch.stack(want)[:, None]) and mask["intervals"].shape[-1] == 2


@settings(max_examples=60)
@given(lengths=LENGTHS)
def test_a_shared_question_mask_equals_its_definition(lengths: list[int]) -> None:
    of = [n for n, length in enumerate(lengths) for _ in range(length)]
    want = by_definition(len(of), lambda i, j: j <= i and of[j] in (0, of[i]))
    mask = masks.shared_question(lengths)
    assert torch.equal(pairs(mask, len(of), len(of)), want[None, None]) and mask["intervals"].shape[-1] == 2


def runs_of(column: list[bool]) -> int:
    """Runs of False."""
    return sum(not a and (i == 0 or column[i - 1]) for i, a in enumerate(column))


def expected(matrix: Tensor) -> tuple[bool, list[int]]:
    """(causal of from_bool's result, the number of runs of each column that then need an interval)."""
    (tq, tk) = matrix.shape[-2:]
    later = torch.arange(tk) > torch.arange(tq)[:, None] + tk - tq
    causal = not bool((matrix & later).any())
    needed = matrix | later if causal else matrix
    return causal, [runs_of(column) for column in needed.flatten(0, 1).mT.flatten(0, 1).tolist()]


def test_any_bool_matrix_is_exact_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of matrix, with chunks of one column and of several."""
    g, reached = torch.Generator().manual_seed(0), Counter[tuple[bool, int | str]]()
    for n in range(400):
        monkeypatch.setattr(masks, "CHUNK", (1, 64, 1 << 22)[n % 3])
        b, h, tq, tk = (
            int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 3), (1, 3), (1, 9), (0, 9))
        )
        matrix = torch.rand(b, h, tq, tk, generator=g) < (0.3, 0.8, 0.97)[n % 7 % 3]
        if n % 2 == 0:
            matrix = matrix.tril(tk - tq)
        if n % 11 == 0:
            matrix = matrix.cummax(2).values
        causal, runs = expected(matrix)
        if max(runs, default=0) > 2:
            with pytest.raises(
                ValueError, match=r"mask: got \d runs of rows that do not attend to column \d .batch ., head .\)"
            ) as e:
                masks.from_bool(matrix)
            words = str(e.value).replace(",", " ").replace(")", " ").split()
            got, j, at, head = int(words[2]), int(words[12]), int(words[14]), int(words[16])
            assert runs[(at * h + head) * tk + j] == got > 2
            reached[causal, "refused"] += 1
            continue
        found = masks.from_bool(matrix)
        assert found["causal"] == causal and torch.equal(pairs(found, tq, tk), matrix)
        assert found["intervals"].shape == (b, h, tk, 4 if max(runs, default=0) > 1 else 2)
        reached[causal, max(runs, default=0)] += 1
    assert masks.from_bool(torch.ones(0, 3).bool())["intervals"].tolist() == [[[[0, 0]] * 3]]
    assert {(c, r) for c in (False, True) for r in (1, 2, "refused")} <= set(reached) and min(reached.values()) > 3


def tree(parents: list[int]) -> Tensor:
    """A node attends to itself and to its ancestors."""

    def ancestors(i: int) -> set[int]:
        return {i} | (ancestors(parents[i]) if parents[i] >= 0 else set())

    return by_definition(len(parents), lambda i, j: j in ancestors(i))


def test_trees_and_eviction_are_one_interval_and_expanded_masks_stay_small() -> None:
    depth_first = tree([-1, 0, 1, 1, 0, 4, 5, 4])
    found = masks.from_bool(depth_first)
    assert (
        found["causal"]
        and found["intervals"].shape == (1, 1, 8, 2)
        and torch.equal(pairs(found, 8, 8)[0, 0], depth_first)
    )
    i, j = torch.arange(40)[:, None], torch.arange(40)
    evicted = (j <= i) & ((j < 4) | (i - j < 9))
    found = masks.from_bool(evicted.expand(3, 2, 40, 40))
    assert found["intervals"].shape == (1, 1, 40, 2) and torch.equal(pairs(found, 40, 40)[0, 0], evicted)


DOCUMENT = torch.tensor([0] * 100 + [1] * 20 + [2] * 140)
MODS: dict[str, Callable[..., Tensor]] = {
    "causal": lambda _b, _h, i, j: i >= j,
    "bidirectional documents": lambda _b, _h, i, j: DOCUMENT[i] == DOCUMENT[j],
    "prefix": lambda b, _h, i, j: (i >= j) | (j < 40 + 50 * b),
    "window by head": lambda _b, h, i, j: (i >= j) & (i - j < 70 * (h + 1)),
}


@pytest.mark.parametrize("chunk", [2_600, masks.CHUNK])
@pytest.mark.parametrize("name", MODS)
def test_block_masks_become_intervals(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "CHUNK", chunk)
    b, h = (2 if name == "prefix" else None), (2 if name == "window by head" else None)
    block = create_block_mask(MODS[name], b, h, 260, 260, device="cpu")
    found = masks.from_block_mask(block)
    assert torch.equal(pairs(found, 260, 260), create_mask(MODS[name], b, h, 260, 260, device="cpu"))
    assert found["causal"] == (name in ("causal", "window by head"))


def test_a_block_mask_follows_its_blocks_and_its_function() -> None:
    """Blocks that are not listed are masked out whatever the function returns, full blocks attend; 200 rows and 300 columns."""
    count, indices = torch.tensor([[[1, 1]]]).int(), torch.tensor([[[[1, 0, 2], [2, 1, 0]]]]).int()
    whole_count, whole_indices = torch.tensor([[[1, 0]]]).int(), torch.tensor([[[[0, 1, 2], [0, 1, 2]]]]).int()
    block = BlockMask.from_kv_blocks(
        count,
        indices,
        whole_count,
        whole_indices,
        BLOCK_SIZE=128,
        mask_mod=lambda _b, _h, i, j: j >= i,
        seq_lengths=(200, 300),
    )
    i, j = torch.arange(200)[:, None], torch.arange(300)
    want = (i < 128) & (j < 128) | (i < 128) & (j // 128 == 1) & (j >= i) | (i >= 128) & (j // 128 == 2) & (j >= i)
    assert torch.equal(pairs(masks.from_block_mask(block), 200, 300)[0, 0], want)


def test_a_block_mask_with_more_runs_is_refused() -> None:
    block = create_block_mask(lambda _b, _h, i, j: (i // 16 + j // 200) % 2 == 0, None, None, 260, 260, device="cpu")
    with pytest.raises(
        ValueError, match=r"block_mask: got 8 runs of rows that do not attend to column 0 .*accepted: at most 2"
    ):
        masks.from_block_mask(block)


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: masks.documents(torch.tensor([0.0, 4.0])), TypeError, "cu_seqlens: got torch.float32; accepted: integers"),
    (lambda: masks.documents([]), TypeError, "cu_seqlens: got torch.float32"),
    (lambda: masks.documents(None), TypeError, "cu_seqlens: got None; accepted: integers"),  # type: ignore[arg-type]
    (lambda: masks.documents("04"), TypeError, "cu_seqlens: got '04'; accepted: integers"),  # type: ignore[arg-type]
    (lambda: masks.documents([[0, 4], [0, 2, 4]]), TypeError, r"cu_seqlens: got \[\[0, 4\], .*lists of ints with one length"),
    (lambda: masks.documents([0, 2**70]), TypeError, f"cu_seqlens: got .*{2**70}.*; accepted: integers"),
    (lambda: masks.documents([0, 4], causal=1), TypeError, "causal: got 1; accepted: True or False"),  # type: ignore[arg-type]
    (lambda: masks.documents(torch.tensor([[[0, 4]]])), ValueError, r"cu_seqlens: got shape \(1, 1, 2\)"),
    (lambda: masks.documents([0]), ValueError, r"cu_seqlens: got \[\[0\]\]; accepted: numbers that start at 0"),
    (lambda: masks.documents([1, 4]), ValueError, "cu_seqlens: got .* start at 0"),
    (lambda: masks.documents([0, 4, 3]), ValueError, "cu_seqlens: got .* never decrease"),
    (lambda: masks.documents([0, -4]), ValueError, "cu_seqlens: got -4; accepted: numbers ≥ 0"),
    (lambda: masks.documents([[0, 4], [0, 5]]), ValueError, "cu_seqlens: got .* the same T in all sequences"),
    (lambda: masks.prefix([5], 4), ValueError, r"lengths: got \[5\]; accepted: 0 to 4"),
    (lambda: masks.prefix([2], 10.5), TypeError, "length: got 10.5; accepted: an int"),  # type: ignore[arg-type]
    (lambda: masks.prefix([0], -1), ValueError, "length: got -1; accepted: an int"),
    (lambda: masks.prefix([-1], 4), ValueError, r"lengths: got \[-1\]"),
    (lambda: masks.prefix([[1], [2]], 4), ValueError, r"lengths: got shape \(2, 1\); accepted: a number for each sequence"),
    (lambda: masks.shared_question([4, -1, 3]), ValueError, "lengths: got .* numbers ≥ 0"),
    (lambda: masks.shared_question([[4, 1], [4, 2]]), ValueError, "lengths: got .* the same sum in all sequences"),
    (lambda: masks.from_bool([[True]]), TypeError, "mask: got list; accepted: a tensor"),  # type: ignore[arg-type]
    (lambda: masks.from_bool(torch.ones(2, 2)), TypeError, "mask: got torch.float32; accepted: bool"),
    (lambda: masks.from_bool(torch.ones(2).bool()), ValueError, r"mask: got shape \(2,\)"),
    (lambda: masks.from_block_mask(torch.ones(2, 2)), TypeError, "block_mask: got Tensor; accepted: what create_block_mask"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_a_bad_argument_of_a_mask_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kernel", ["reference", "tiled", None])
def test_a_mask_gives_the_options_of_a_call_and_equals_a_bool_bias(kernel: str | None) -> None:
    """Each sequence and each kv head, which two query heads share, has its own mask."""
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    matrix = torch.rand(2, 2, 40, 40).cummax(2).values.tril() > 0.5
    mask, bias = masks.from_bool(matrix), matrix.repeat_interleave(2, 1)
    by_intervals = tilegrad.attention(q, k, v, **mask, kernel=kernel)
    by_bias = tilegrad.attention(q, k, v, bias=bias, kernel=kernel)
    assert torch.allclose(by_intervals, by_bias, rtol=0, atol=1e-13)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (by_intervals, by_bias)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
