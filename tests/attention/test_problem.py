"""Sizes of a call, and where its rows begin in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilegrad import Mask
from tilegrad.kernels.attention.mask import attends, distance
from tilegrad.kernels.attention.problem import Problem, Sizes, output_shapes, rows_aligned, tma_refusal


def test_sizes_of_a_dense_call() -> None:
    q, k, v = torch.empty(2, 6, 5, 48), torch.empty(2, 3, 9, 48), torch.empty(2, 3, 9, 20)
    sizes = Problem(q, k, v, Mask(causal=True, window=(4, None))).sizes
    assert sizes == Sizes(2, 6, 3, 5, 9, 48, 20, 4, 0)
    assert (sizes.varlen, sizes.group, sizes.block_d, sizes.block_dv) == (False, 2, 64, 32)
    assert output_shapes(q, v, Mask()) == ((2, 6, 5, 20), (2, 6, 5))


def test_sizes_of_packed_sequences() -> None:
    q, k, v = torch.empty(12, 4, 8), torch.empty(15, 2, 8), torch.empty(15, 2, 6)
    ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 12], [0, 5, 15]))
    mask = Mask(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=7, max_seqlen_k=10)
    sizes = Problem(q, k, v, mask).sizes
    assert sizes == Sizes(2, 4, 2, 7, 10, 8, 6, None, None, 12, 15) and sizes.varlen
    assert output_shapes(q, v, mask) == ((12, 4, 6), (4, 12))


@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (4, 7), (7, 4), (5, 5)])
def test_a_side_of_the_band_is_none_exactly_where_it_masks_nothing_out(tq: int, tk: int) -> None:
    q, k = torch.empty(1, 1, tq, 8), torch.empty(1, 1, tk, 8)
    gap = distance(torch.arange(tq), torch.arange(tk), tq, tk)
    for side in range(tq + tk):
        left, right = Mask(window=(side, None)), Mask(window=(None, side))
        assert (Problem(q, k, k, left).sizes.left is None) == bool(attends(left, gap).all())
        assert (Problem(q, k, k, right).sizes.right is None) == bool(attends(right, gap).all())


def test_aligned_rows_are_those_that_begin_at_multiples_of_16_bytes() -> None:
    memory = torch.empty(4096, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    for offset, stride, n in itertools.product((0, 1, 4, 8), (8, 12, 16, 24), (1, 3)):
        x = memory[offset:].as_strided((1, n, 2, 8), (7, stride, 64, 1))
        begins = {x[0, h, t].data_ptr() % 16 for h in range(n) for t in range(2)}
        assert rows_aligned(x) == (begins == {0}), (offset, stride, n)
        assert (tma_refusal("x", x, varlen=False) is None) == rows_aligned(x)
    assert not rows_aligned(memory.as_strided((1, 1, 2, 8), (64, 64, 64, 2)))
    assert not rows_aligned(memory[:8].expand(1, 1, 2, 8)), "rows that are one another's are nobody's"
