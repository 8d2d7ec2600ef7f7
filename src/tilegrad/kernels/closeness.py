"""The closeness rule: a result must agree with its float64 oracle up to the rounding that the algorithm may do.

A kernel's docstring and its op's bounds say which intermediate numbers are rounded to the inputs' dtype, once each. Others are
computed in the accumulation dtype. kernels/attention/bounds.py has the bounds of attention, tests/support/bounds.py the bounds
of the other ops. u, a, z are the unit roundoffs (eps / 2) of the inputs' dtype, of the accumulator (`accumulation_dtype`) and
of the output's dtype. Roundings are modeled as independent and uniform with variance u² x² / 3, which gives the variance σ² of
the error of each number. The accumulator's roundings add up to a · B to this error. A sum of n terms t adds to B six standard
deviations of the rounding error of its n partial sums:

    √n · √(4 (Σt)² + 2 Σt²)

With e = x − x64, each tensor has three tests; m is its number of distinct values, because equal values have equal errors:

    max     |e| ≤ 6 σ + a B + 1.01 z |x64|                                      for each number
    mean    rms(e) ≤ (1.5 + 6/√m) · rms(√(σ² + (a B / 3)² + (z x64)² / 3))
    slope   |⟨e − r, x64⟩| ≤ 6 · sd⟨e − r, x64⟩ + Σ (a B / 3) |x64|              finds a wrong factor; roundings have both signs

r is the error of rounding x64 itself to the output's dtype. It is known, and it is biased if exact numbers are close to numbers
of that dtype: for large h, gelu'(h) da is always slightly larger than da, which has that dtype. Infinities must be where x64
has them, and there must be no NaN. The rule never compares with another kernel or with the largest number of a call, and no
tensor is exempt. Below tiny, the smallest normal number, a rounding errs by up to z · tiny.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

SIGMAS = 6.0


class Bound(NamedTuple):
    """How far the numbers of one tensor may be from the oracle, without the rounding of the output itself."""

    sigma: Tensor  # standard deviation of each number's error, float64, shaped as the output
    accumulated: Tensor  # a B, in the same shape
    slope: Tensor | None = None  # sd⟨e, x64⟩; None if no two numbers share a rounding: then √(Σ σ² x64²)


def roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The variance of one rounding of x to `dtype`: (u max(|x|, tiny))² / 3, and 0 if x is 0."""
    return (x.abs().clamp(min=torch.finfo(dtype).tiny) * roundoff(dtype)).square().masked_fill(x == 0, 0.0) / 3


def complaints(got: Mapping[str, Tensor], exact: Mapping[str, Tensor], bounds: Mapping[str, Bound]) -> list[str]:
    """One line for each violation of the rule by `got`; [] if it is satisfied."""
    if got.keys() != exact.keys():
        return [f"tensors: got {sorted(got)}; accepted: {sorted(exact)}"]
    return [line for name, x in got.items() for line in _complaints(name, x, exact[name], bounds[name])]


def assert_close(got: Mapping[str, Tensor], exact: Mapping[str, Tensor], bounds: Mapping[str, Bound]) -> None:
    lines = complaints(got, exact, bounds)
    assert not lines, "; ".join(lines)


class Ratios(NamedTuple):
    """The error of each test divided by its bound; above 1 the test fails."""

    max: float
    mean: float
    slope: float


def ratios(x: Tensor, x64: Tensor, bound: Bound) -> Ratios:
    """The three tests, over the finite numbers."""
    finite = torch.isfinite(x64)
    given = x64, bound.sigma, bound.accumulated, x
    y, sigma, acc, x = (z.reshape(-1) for z in given) if finite.all() else (z[finite] for z in given)
    if not y.numel():
        return Ratios(0.0, 0.0, 0.0)
    e, out = x.double() - y, roundoff(x.dtype) * y.abs().clamp(min=torch.finfo(x.dtype).tiny)
    typical = sigma.square() + (acc / 3).square() + out.square() / 3
    values, which = y.unique(return_inverse=True)
    rounded = torch.zeros_like(values).index_add_(0, which, out * y).square().sum() / 3
    nearest = y.to(x.dtype).double()
    r = torch.where(nearest.isfinite(), nearest - y, 0.0)
    shared = (sigma * y).square().sum() if bound.slope is None else bound.slope.square()
    along = SIGMAS * (shared + 2 * rounded).sqrt() + (acc / 3 * y.abs()).sum()
    least = torch.finfo(torch.float64).tiny  # avoids division by 0
    return Ratios(
        float((e.abs() / (SIGMAS * sigma + acc + 1.01 * out).clamp(min=least)).max()),
        float((e.square().mean() / typical.mean().clamp(min=least)).sqrt())
        / (1.5 + SIGMAS / math.sqrt(values.numel())),
        float(((e - r) * y).sum().abs() / along.clamp(min=least)),
    )


def _complaints(name: str, x: Tensor, x64: Tensor, bound: Bound) -> list[str]:
    if x.shape != x64.shape:
        return [f"{name}: shape {tuple(x.shape)}; accepted: {tuple(x64.shape)}"]
    if x.isnan().any():
        return [f"{name}: NaN"]
    infinite = x64.isinf()
    if not torch.equal(x.isinf(), infinite) or not torch.equal(x[infinite].double(), x64[infinite]):
        return [f"{name}: infinities are not where the oracle has them"]
    tests = ("largest error", "root mean square error", "factor of x64 in the error")
    named = zip(tests, ratios(x, x64, bound), strict=True)
    return [f"{name}: {what} {ratio:.2f} × its bound" for what, ratio in named if not ratio <= 1]
