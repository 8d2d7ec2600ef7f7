"""Sizes of a call, and the addresses of its rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilegrad import Mask
from tilegrad.kernels.attention.mask import attends, distance
from tilegrad.kernels.attention.problem import (
    Problem,
    Sizes,
    lse_strides,
    output_shapes,
    row_strides,
    sizes_and_strides,
    tma_refusal,
)
from tilegrad.kernels.checks import rows_aligned


def test_the_problem_has_the_sizes_of_a_dense_call() -> None:
    q, k, v = torch.empty(2, 6, 5, 48), torch.empty(2, 3, 9, 48), torch.empty(2, 3, 9, 20)
    sizes = Problem(q, k, v, Mask(causal=True, window=(4, None))).sizes
    assert sizes == Sizes(2, 6, 3, 5, 9, 48, 20, 4, 0)
    assert (sizes.varlen, sizes.group, sizes.block_d, sizes.block_dv) == (False, 2, 64, 32)
    assert output_shapes(q, v, Mask()) == ((2, 6, 5, 20), (2, 6, 5))


def test_the_problem_has_the_sizes_of_packed_sequences() -> None:
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


def test_rows_are_aligned_if_they_begin_at_multiples_of_16_bytes() -> None:
    memory = torch.empty(4096, dtype=torch.bfloat16)
    assert memory.data_ptr() % 16 == 0
    for offset, stride, n in itertools.product((0, 1, 4, 8), (8, 12, 16, 24), (1, 3)):
        x = memory[offset:].as_strided((1, n, 2, 8), (7, stride, 64, 1))
        begins = {x[0, h, t].data_ptr() % 16 for h in range(n) for t in range(2)}
        assert rows_aligned(x) == (begins == {0}), (offset, stride, n)
        assert (tma_refusal("x", x, varlen=False) is None) == rows_aligned(x)
    assert not rows_aligned(memory.as_strided((1, 1, 2, 8), (64, 64, 64, 2)))
    assert not rows_aligned(memory[:8].expand(1, 1, 2, 8)), "rows that are one another's are nobody's"
    packed_too_short = memory[:24].view(1, 1, 2, 12)
    assert packed_too_short.is_contiguous() and not rows_aligned(packed_too_short)
    assert rows_aligned(memory[:16].view(1, 1, 2, 8)) and not rows_aligned(memory[1:17].view(1, 1, 2, 8))


def test_head_dimensions_are_padded_to_powers_of_two() -> None:
    for d, want in ((1, 32), (31, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 256), (257, 512)):
        q, v = torch.empty(1, 1, 1, d), torch.empty(1, 1, 1, 1)
        assert Problem(q, q, v, Mask()).sizes.block_d == want
        assert Problem(v, v, q, Mask()).sizes.block_dv == want


def test_the_problem_has_strides_of_sequences_heads_and_rows() -> None:
    x, lse = torch.empty(2, 3, 5, 7), torch.empty(2, 3, 5)
    assert row_strides(x, varlen=False) == (105, 35, 7) and lse_strides(lse, varlen=False) == (15, 5, 1)
    assert row_strides(x[0], varlen=True) == (0, 7, 35) and lse_strides(lse[0], varlen=True) == (0, 5, 1)
    assert row_strides(None, varlen=False) == lse_strides(None, varlen=True) == (0, 0, 0)
    assert sizes_and_strides(x, varlen=False) == ([2, 3, 5, 7], [105, 35, 7, 1])
    assert sizes_and_strides(x[0], varlen=True) == ([1, 5, 3, 7], [0, 7, 35, 1])


def test_strides_that_tma_cannot_take_are_refused() -> None:
    """A stride of 2⁴⁰ bytes is too large if there is a second row."""

    class Far:
        dtype, shape = torch.bfloat16, (1, 1, 2, 8)

        def __init__(self, rows: int, stride: int) -> None:
            self.shape, self.strides = (1, 1, rows, 8), (64, 64, stride, 1)

        def stride(self) -> tuple[int, ...]:
            return self.strides

    for rows, stride, taken in (
        (2, 2**39, False),
        (2, 2**39 - 8, True),
        (1, 2**39, True),
        (2, 12, False),
        (3, 0, False),
    ):
        assert (tma_refusal("x", Far(rows, stride), varlen=False) is None) == taken, (rows, stride)
    assert tma_refusal("x", torch.empty(4, 1, 8, dtype=torch.bfloat16), varlen=True) is None
