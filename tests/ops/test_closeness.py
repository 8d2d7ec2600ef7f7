"""The closeness rule itself: which results it accepts and which it rejects."""

from __future__ import annotations

import math

import pytest
import torch
from support.ops import randn
from torch import Tensor

from tilegrad.kernels.closeness import Bound, assert_close, complaints, ratios, rounding

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def exactly(x64: Tensor) -> Bound:
    """The bound of an algorithm that rounds only its output."""
    return Bound(torch.zeros_like(x64), torch.zeros_like(x64))


def said(got: Tensor, x64: Tensor, bound: Bound | None = None) -> str:
    return "; ".join(complaints({"x": got}, {"x": x64}, {"x": bound or exactly(x64)}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_rounding_of_the_output_is_accepted_at_every_magnitude(dtype: torch.dtype) -> None:
    for size in (0, 1, 2, 7, 100, 10000):
        for scale in (1.0, float(torch.finfo(dtype).tiny), 0.0):
            x64 = scale * randn(size, seed=size)
            assert said(x64.to(dtype), x64) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_numbers_have_the_same_rounding(dtype: torch.dtype) -> None:
    for value in (1 / 3, 1 + 1e-3, 0.7):
        x64 = torch.full((10000,), value, dtype=torch.float64)
        assert said(x64.to(dtype), x64) == ""


def test_a_rounded_factor_is_accepted_if_the_bound_includes_it() -> None:
    t, y = randn(5000), randn(5000, seed=1)
    got = (t.bfloat16().double() * y).bfloat16()
    bound = Bound((rounding(t, torch.bfloat16) * y**2).sqrt(), torch.zeros_like(t))
    assert said(got, t * y, bound) == ""
    assert "largest error" in said(got, t * y)


def test_each_of_the_three_checks_sees_an_error_that_the_others_miss() -> None:
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


def test_wrong_shapes_names_nan_and_infinities_are_rejected() -> None:
    x64 = torch.tensor([1.0, -torch.inf, 3.0], dtype=torch.float64)
    assert said(x64.float(), x64) == ""
    assert "shape" in said(x64[:2].float(), x64)
    assert "NaN" in said(torch.tensor([1.0, -torch.inf, torch.nan]), x64)
    assert "infinities" in said(torch.tensor([1.0, -torch.inf, torch.inf]), x64)
    assert "infinities" in said(torch.tensor([1.0, torch.inf, 3.0]), x64)
    assert complaints({"y": x64}, {"x": x64}, {"x": exactly(x64)})
    with pytest.raises(AssertionError, match="NaN"):
        assert_close({"x": x64 * torch.nan}, {"x": x64}, {"x": exactly(x64)})


def test_a_number_that_should_be_zero_must_be_zero() -> None:
    x64 = torch.zeros(10, dtype=torch.float64)
    assert said(x64.float(), x64) == "" and "largest" in said(x64.float() + 1e-30, x64)
    assert ratios(x64.float(), x64, exactly(x64)) == (0.0, 0.0, 0.0)


X64 = [1.1, -2.3, 0.7, 0.7, 5e-40, -0.31]
SIGMA, ACCUMULATED, WRONG = (
    [0.01, 0.02, 0.003, 0.004, 0.001, 0.0],
    [0.02, 0.003, 0.01, 0.02, 0.005, 0.03],
    [0.04, -0.03, 0.02, 0.01, 0.003, 0.02],
)


@pytest.mark.parametrize("slope", [None, 0.05])
def test_the_three_ratios_equal_their_formulas(slope: float | None) -> None:
    """max, mean and slope from the docstring for bfloat16: z = eps / 2, and tiny is that of float32."""
    x64 = torch.tensor(X64, dtype=torch.float64)
    x = (x64 + torch.tensor(WRONG, dtype=torch.float64)).bfloat16()
    z, tiny, m = 2.0**-8, 2.0**-126, 5  # 0.7 occurs twice
    e = [float(a) - b for a, b in zip(x, X64, strict=True)]
    own = [z * max(abs(y), tiny) for y in X64]
    r = [float(y.bfloat16()) - float(y) for y in x64]
    largest = max(abs(d) / (6 * s + a + 1.01 * o) for d, s, a, o in zip(e, SIGMA, ACCUMULATED, own, strict=True))
    typical = [s**2 + (a / 3) ** 2 + o**2 / 3 for s, a, o in zip(SIGMA, ACCUMULATED, own, strict=True)]
    mean = math.sqrt(sum(d**2 for d in e) / sum(typical)) / (1.5 + 6 / math.sqrt(m))
    alike = [own[0] * 1.1, own[1] * 2.3, 2 * own[2] * 0.7, own[4] * X64[4], own[5] * 0.31]
    of_output = 2 * sum(one**2 for one in alike) / 3  # variance of r and of e
    shared = sum((s * y) ** 2 for s, y in zip(SIGMA, X64, strict=True)) if slope is None else slope**2
    along = 6 * math.sqrt(shared + of_output) + sum(a / 3 * abs(y) for a, y in zip(ACCUMULATED, X64, strict=True))
    factor = abs(sum((d - k) * y for d, k, y in zip(e, r, X64, strict=True))) / along
    bound = Bound(
        torch.tensor(SIGMA, dtype=torch.float64),
        torch.tensor(ACCUMULATED, dtype=torch.float64),
        None if slope is None else torch.tensor(slope, dtype=torch.float64),
    )
    assert ratios(x, x64, bound) == pytest.approx((largest, mean, factor), rel=1e-9)


def test_ratios_are_zero_if_no_number_is_finite() -> None:
    for x64 in (torch.zeros(0, dtype=torch.float64), torch.full((2,), torch.inf, dtype=torch.float64)):
        assert ratios(x64.float(), x64, exactly(x64)) == (0.0, 0.0, 0.0)


def test_a_number_at_its_bound_is_accepted() -> None:
    x64 = torch.ones(4, dtype=torch.float64)
    bound = Bound(torch.zeros_like(x64), torch.full_like(x64, 2.0**-4 - 1.01 * 2.0**-8))
    at = x64.clone()
    at[0] += 2.0**-4
    assert ratios(at.bfloat16(), x64, bound).max == 1.0 and said(at.bfloat16(), x64, bound) == ""
    at[0] += 2.0**-7
    assert "largest" in said(at.bfloat16(), x64, bound)


def test_a_number_beyond_the_dtype_has_no_known_rounding() -> None:
    x64 = torch.tensor([70000.0, 1.0], dtype=torch.float64)
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    ratio = ratios(x, x64, exactly(x64)).slope
    rounded = 2 * ((2.0**-11 * 70000**2) ** 2 + 2.0**-22) / 3
    assert ratio == pytest.approx((70000 - 65504) * 70000 / (6 * math.sqrt(rounded)), rel=1e-9)


def test_the_variance_of_a_rounding_equals_its_formula() -> None:
    x = torch.tensor([3.0, -0.5, 0.0, 1e-42], dtype=torch.float64)
    u, tiny = 2.0**-8, 2.0**-126
    want = [(3 * u) ** 2 / 3, (0.5 * u) ** 2 / 3, 0.0, (tiny * u) ** 2 / 3]
    assert rounding(x, torch.bfloat16).tolist() == pytest.approx(want, rel=1e-12, abs=0)
