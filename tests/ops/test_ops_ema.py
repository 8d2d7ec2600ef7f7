"""The average of weights against float64, its first values, steps that are not finite, and the swap of bits."""

from __future__ import annotations

import math

import pytest
import torch
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.ema import ema_step, ema_workspace, swap
from tilegrad.kernels.guard import guard, guard_workspace

F32, F64 = torch.float32, torch.float64


def ranges(dtype: torch.dtype, seed: int) -> list[Tensor]:
    return [randn(n, dtype=dtype, seed=seed + n) for n in (1, 63, 1023)]


def run(params: list[Tensor], ema: list[Tensor], t: int, decay: float, norm: float = 1.0) -> None:
    scratch = poisoned(ema_workspace(params[0]))
    dtype = params[0].dtype
    ema_step(params, torch.tensor(norm, dtype=dtype), torch.tensor(float(t)), decay, ema=ema, scratch=scratch)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("decay", [0.1, 0.9, 0.999])
@pytest.mark.parametrize("t", [0, 1, 2, 8, 9, 81, 5000])
def test_a_step_of_the_average_follows_its_equations(dtype: torch.dtype, decay: float, t: int) -> None:
    params, ema = ranges(dtype, 0), ranges(dtype, 7)
    w = 1.0 if t <= 1 else 1.0 - min(decay, (1 + t) / (10 + t))
    want = [e.double() + w * (p.double() - e.double()) for p, e in zip(params, ema, strict=True)]
    run(params, ema, t, decay)
    rounding = 4 * torch.finfo(dtype).eps
    for p, e, exact in zip(params, ema, want, strict=True):
        assert ((e.double() - exact).abs() <= rounding * (p.double().abs() + exact.abs() + 1)).all()
        assert t > 1 or torch.equal(e, p), "the first average is the weights, to the bit"


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("t", [2, 500])
def test_a_step_that_is_not_finite_changes_no_bit(norm: float, t: int) -> None:
    params, ema = ranges(F32, 0), ranges(F32, 7)
    before = [x.clone() for x in ema]
    run(params, ema, t, 0.9, norm)
    assert all(torch.equal(a, b) for a, b in zip(ema, before, strict=True))


@pytest.mark.parametrize("norm", [math.nan, 1.0])
def test_before_and_after_the_first_update_the_average_equals_the_weights(norm: float) -> None:
    """If the first steps are skipped t stays 0, and the average equals the initial weights."""
    params, ema = ranges(F32, 0), ranges(F32, 7)
    run(params, ema, 0 if math.isnan(norm) else 1, 0.9, norm)
    assert all(torch.equal(a, b) for a, b in zip(ema, params, strict=True))


@pytest.mark.parametrize(("norm", "want"), [(1.0, 4.0), (math.nan, 3.0), (math.inf, 3.0)])
def test_the_guard_counts_finite_steps_where_adamw_does_not(norm: float, want: float) -> None:
    step, in_a_row = torch.tensor(3.0), torch.tensor(0.0)
    guard(
        torch.tensor(1.0),
        10,
        norm=torch.tensor(norm),
        in_a_row=in_a_row,
        step=step,
        scratch=poisoned(guard_workspace()),
    )
    assert step == want and in_a_row == float(want == 3.0)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_two_swaps_restore_every_bit(dtype: torch.dtype) -> None:
    a, b = randn(70, dtype=dtype, seed=1), randn(70, dtype=dtype, seed=2)
    a[:4] = torch.tensor([math.nan, -0.0, math.inf, 5e-324], dtype=dtype)
    ints = torch.int32 if dtype == F32 else torch.int64
    was = [x.view(ints).clone() for x in (a, b)]
    swap(a, b)
    assert torch.equal(a.view(ints), was[1]) and torch.equal(b.view(ints), was[0])
    swap(a, b)
    assert torch.equal(a.view(ints), was[0]) and torch.equal(b.view(ints), was[1])


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    params = ranges(F32, 0)
    for decay in (0.0, 1.0, -0.5, math.nan):
        with pytest.raises(ValueError, match=r"^decay: got .*; accepted: a number above 0 and below 1$"):
            run(params, ranges(F32, 1), 3, decay)
    with pytest.raises(ValueError, match=r"^ema: got torch.float64 \(1,\) on cpu; accepted: torch.float32 \(1,\)"):
        run(params, ranges(F64, 1), 3, 0.9)
    with pytest.raises(ValueError, match=r"^scratch: ema got no 'w'"):
        ema_step(params, torch.tensor(1.0), torch.tensor(3.0), 0.9, ema=ranges(F32, 1))
    with pytest.raises(ValueError, match=r"^b: got torch.float32 \(63,\)"):
        swap(params[0], params[1])
