"""The closeness rule itself: what it takes and what it complains of."""

from __future__ import annotations

import pytest
import torch
from support.ops import randn
from torch import Tensor

from tilegrad.kernels.closeness import Bound, assert_close, complaints, ratios, rounding

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def exactly(x64: Tensor) -> Bound:
    """Of an algorithm that rounds nothing but its output."""
    return Bound(torch.zeros_like(x64), torch.zeros_like(x64))


def said(got: Tensor, x64: Tensor, bound: Bound | None = None) -> str:
    return "; ".join(complaints({"x": got}, {"x": x64}, {"x": bound or exactly(x64)}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_of_the_output_is_taken_at_every_size(dtype: torch.dtype) -> None:
    for size in (0, 1, 2, 7, 100, 10000):
        for scale in (1.0, float(torch.finfo(dtype).tiny), 0.0):
            x64 = scale * randn(size, seed=size)
            assert said(x64.to(dtype), x64) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_numbers_round_alike(dtype: torch.dtype) -> None:
    for value in (1 / 3, 1 + 1e-3, 0.7):
        x64 = torch.full((10000,), value, dtype=torch.float64)
        assert said(x64.to(dtype), x64) == ""


def test_a_rounded_factor_is_taken_where_its_bound_is_written_down() -> None:
    t, y = randn(5000), randn(5000, seed=1)
    got = (t.bfloat16().double() * y).bfloat16()
    bound = Bound((rounding(t, torch.bfloat16) * y**2).sqrt(), torch.zeros_like(t))
    assert said(got, t * y, bound) == ""
    assert "largest error" in said(got, t * y)


def test_each_of_the_three_tests_sees_what_the_others_do_not() -> None:
    x64 = randn(10000).abs() + 1
    right = x64.bfloat16()
    one_off = right.clone()
    one_off[77] *= 1.01
    assert "largest error" in said(one_off, x64) and "factor" not in said(one_off, x64)
    factor = (1.0005 * x64).bfloat16()
    wide = Bound(torch.full_like(x64, 2**-9), torch.zeros_like(x64))
    assert "factor" in said(factor, x64, wide) and "largest" not in said(factor, x64, wide)
    noisy = x64 + 4 * 2**-9 * randn(10000, seed=2).sign()
    assert "root mean square" in said(noisy, x64, wide) and "largest" not in said(noisy, x64, wide)


def test_shapes_names_nan_and_infinities() -> None:
    x64 = torch.tensor([1.0, -torch.inf, 3.0], dtype=torch.float64)
    assert said(x64.float(), x64) == ""
    assert "shape" in said(x64[:2].float(), x64)
    assert "NaN" in said(torch.tensor([1.0, -torch.inf, torch.nan]), x64)
    assert "infinities" in said(torch.tensor([1.0, -torch.inf, torch.inf]), x64)
    assert "infinities" in said(torch.tensor([1.0, torch.inf, 3.0]), x64)
    assert complaints({"y": x64}, {"x": x64}, {"x": exactly(x64)})
    with pytest.raises(AssertionError, match="NaN"):
        assert_close({"x": x64 * torch.nan}, {"x": x64}, {"x": exactly(x64)})


def test_a_number_that_should_be_zero_may_not_be_anything() -> None:
    x64 = torch.zeros(10, dtype=torch.float64)
    assert said(x64.float(), x64) == "" and "largest" in said(x64.float() + 1e-30, x64)
    assert ratios(x64.float(), x64, exactly(x64)) == (0.0, 0.0, 0.0)
