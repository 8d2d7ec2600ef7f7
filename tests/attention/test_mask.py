"""The pairs that a mask lets attend, and the ranges and views that follow: every small case is compared pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.kernels import interval_edges

from tilegrad.kernels.attention.mask import (
    Mask,
    attends,
    distance,
    four_dims,
    interned_mask,
    masked_by,
    packed,
    sequences,
)

SIDES = (None, 0, 1, 3)


def masks() -> list[Mask]:
    return [Mask(causal=causal, window=(left, right)) for causal in (False, True) for left in SIDES for right in SIDES]


def pairs(mask: Mask, tq: int, tk: int) -> torch.Tensor:
    """attends(i, j) from the docstring, one pair at a time, (Tq, Tk)."""
    left, right = mask.window or (None, None)
    right = 0 if mask.causal else right

    def inside(i: int, j: int) -> bool:
        d = i + tk - tq - j
        return (left is None or d <= left) and (right is None or -right <= d)

    return torch.tensor([[inside(i, j) for j in range(tk)] for i in range(tq)], dtype=torch.bool).reshape(tq, tk)


def hull(seen: torch.Tensor) -> tuple[int, int] | None:
    """The first index that is True, and one more than the last."""
    where = seen.nonzero().flatten().tolist()
    return (where[0], where[-1] + 1) if where else None


@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (3, 6), (6, 3), (5, 5)])
def test_ranges_of_rows_and_columns_and_whole_tiles_follow_from_the_pairs(tq: int, tk: int) -> None:
    gap = distance(torch.arange(tq), torch.arange(tk), tq, tk)
    for mask in masks():
        seen = pairs(mask, tq, tk)
        assert torch.equal(attends(mask, gap), seen)
        for a, b in itertools.combinations(range(tq + 1), 2):
            columns, want = mask.columns_of(range(a, b), tq, tk), hull(seen[a:b].any(0))
            assert (columns.start, columns.stop) == want if want else not columns
        for a, b in itertools.combinations(range(tk + 1), 2):
            rows, want = mask.rows_of(range(a, b), tq, tk), hull(seen[:, a:b].any(1))
            assert (rows.start, rows.stop) == want if want else not rows
        for (a, b), (c, d) in itertools.product(
            itertools.combinations(range(tq + 1), 2), itertools.combinations(range(tk + 1), 2)
        ):
            assert mask.unmasked(range(a, b), range(c, d), tq, tk) == bool(seen[a:b, c:d].all())


@pytest.mark.parametrize("n", [1, 2])
def test_intervals_mask_out_the_rows_that_they_name(n: int) -> None:
    """Every start and end up to 4 of the first and the second interval."""
    rows, runs = 4, [(a, b) for a in range(5) for b in range(a, 5)]
    columns = list(itertools.product(runs, repeat=n))
    intervals = torch.tensor([[[x for run in column for x in run] for column in columns]] * 2).int()[:, None]
    want = [[any(a <= i < b for a, b in column) for column in columns] for i in range(rows)]
    assert masked_by(intervals, torch.arange(rows)).tolist() == [[want]] * 2


def test_edges_say_which_tiles_are_masked_out_and_which_are_unmasked() -> None:
    g = torch.Generator().manual_seed(0)
    rows, reached = 9, set()
    for tile, columns, n in itertools.product((1, 2, 3), (0, 1, 4, 7), (1, 2)):
        for _ in range(40):
            intervals = torch.randint(0, rows + 1, (1, 2, columns, n, 2), generator=g).sort(-1).values.flatten(3).int()
            edges = interval_edges(intervals, tile)
            assert edges.shape == (1, 2, -(-columns // tile), n, 4)
            masked = masked_by(intervals, torch.arange(rows))
            for h, t in itertools.product(range(2), range(edges.shape[2])):
                of_tile, of = masked[0, h, :, t * tile : (t + 1) * tile], edges[0, h, t].tolist()
                all_of_row, any_of_row = of_tile.all(1).tolist(), of_tile.any(1).tolist()
                for a, b in itertools.combinations(range(rows + 1), 2):
                    out = any(last <= a and b <= least for _, last, least, _ in of)
                    unmasked = all(b <= first or most <= a for first, _, _, most in of)
                    assert not out or all(all_of_row[a:b])
                    assert not unmasked or not any(any_of_row[a:b])
                    if tile == 1 and n == 1:  # with one column and one interval the edges decide
                        assert out == all(all_of_row[a:b]) and unmasked != any(any_of_row[a:b])
                    reached.add((out, unmasked))
    assert reached == {(True, False), (False, True), (False, False)}


def test_views_of_bias_slopes_and_packed_sequences_have_the_right_numbers() -> None:
    bias = torch.zeros(5, 7)
    assert four_dims(bias).shape == (1, 1, 5, 7) and four_dims(bias[None, None]).shape == (1, 1, 5, 7)
    of_heads, of_all = torch.arange(3.0), torch.arange(12.0).reshape(4, 3)
    assert torch.equal(Mask(alibi_slopes=of_heads).slopes(range(1, 3)), of_heads[None])  # type: ignore[arg-type]
    assert torch.equal(Mask(alibi_slopes=of_all).slopes(range(1, 3)), of_all[1:3])  # type: ignore[arg-type]
    assert Mask().slopes(range(2)) is None
    ends = torch.tensor([0, 2, 2, 5])
    assert list(sequences(ends, 2 * ends)) == [
        (0, slice(0, 2), slice(0, 4)), (1, slice(2, 2), slice(4, 4)), (2, slice(2, 5), slice(4, 10)),
    ]  # fmt: skip
    x = torch.arange(30).reshape(5, 2, 3)
    one = packed(x, slice(2, 5))
    assert one.shape == (1, 2, 3, 3) and torch.equal(one[0, 1, 0], x[2, 1])


def test_properties_of_a_mask() -> None:
    of_bool, of_float, ends = torch.ones(1, dtype=torch.bool), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    assert Mask(bias=of_float).float_bias is of_float and Mask(bias=of_float).bool_bias is None
    assert Mask(bias=of_bool).bool_bias is of_bool and Mask(bias=of_bool).float_bias is None
    assert Mask().float_bias is None and Mask().bool_bias is None
    assert Mask(scale=0.3).scale_for(16) == 0.3 and Mask().scale_for(16) == 0.25
    assert Mask(cu_seqlens_q=ends).varlen and not Mask().varlen
    assert not Mask().has_tensors and Mask(seed=1).has_tensors and Mask(sinks=of_float).has_tensors
    assert [id(x) for x in Mask(bias=of_float, seed=3, cu_seqlens_k=ends).tensors] == [id(of_float), id(ends)]
    assert [id(x) for x in Mask(intervals=ends, sinks=of_float).tensors] == [id(of_float), id(ends)]
    assert Mask(intervals=ends).has_tensors and Mask(intervals=ends).cache_key is Mask().cache_key
    interned = interned_mask(causal=True, window=None, scale=None, softcap=0.0, dropout_p=0.0)
    assert Mask(causal=True).cache_key is Mask(causal=True, sinks=of_float).cache_key is interned
    assert Mask(causal=True).cache_key != Mask(causal=1).cache_key  # type: ignore[arg-type]
    assert Mask(window=[1, 2]).cache_key is None  # type: ignore[arg-type]
    assert repr(Mask()) == (
        "Mask(causal=False, window=None, scale=None, softcap=0.0, bias=None, alibi_slopes=None, sinks=None, dropout_p=0.0, "
        "seed=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, "
        "intervals=None)"
    )
