"""Muon's step against the singular value decomposition in float64, against torch's Muon, and against bad input."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from support.muon import muon_reference, orthogonal, singular_values
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.muon import (
    COEFFICIENTS,
    MARGINS,
    Matrices,
    Matrix,
    MuonConfig,
    muon_step,
    muon_workspace,
    torch_ops,
)

F32, F64 = torch.float32, torch.float64
SHAPES = ((6, 10), (10, 6), (6, 10), (8, 8), (1, 5), (7, 1))  # two matrices of one shape are multiplied together


def layout(gap: int = 3) -> tuple[tuple[Matrix, ...], int]:
    found, at = [], 0
    for rows, columns in SHAPES:
        found.append(Matrix(at, rows, columns))
        at = found[-1].stop + gap
    return tuple(found), at


class Step:
    """Two ranges, each with all shapes and with zeros in the gaps."""

    def __init__(self, dtype: torch.dtype, *, rounded: bool = False) -> None:
        matrices, n = layout()
        self.matrices = [matrices, matrices]
        inside = torch.zeros(n, dtype=dtype)
        for x in matrices:
            inside[x.start : x.stop] = 1.0
        self.params, self.grads, self.m = (
            [randn(n, dtype=dtype, seed=seed + i) * inside for i in (0, 1)] for seed in (0, 2, 4)
        )
        self.rounded = [torch.zeros(n, dtype=torch.bfloat16) for _ in range(2)] if rounded else None
        self.norm = torch.linalg.vector_norm(torch.cat(self.grads))

    def run(
        self,
        muon: MuonConfig,
        learning_rate: float | Tensor = 0.1,
        weight_decay: float = 0.1,
        max_norm: float = 1.0,
        t: int = 1,
    ) -> None:
        scratch = poisoned(muon_workspace(self.params[0], muon, self.matrices))
        muon_step(
            self.norm, learning_rate, muon, self.matrices, weight_decay, max_norm,
            step=torch.tensor(float(t)), params=self.params, grads=self.grads, m=self.m, rounded=self.rounded, scratch=scratch,
        )  # fmt: skip

    def each(self, ranges: list[Tensor]) -> list[Tensor]:
        pairs = ((r, x) for r, own in zip(ranges, self.matrices, strict=True) for x in own)
        return [r[x.start : x.stop].view(x.rows, x.columns).clone() for r, x in pairs]


@pytest.mark.parametrize(
    ("nesterov", "orthogonalization", "scale", "cautious"),
    list(itertools.product((True, False), COEFFICIENTS, ("spectral", "rms"), (True, False))),
)
def test_a_step_equals_one_by_the_singular_value_decomposition(
    nesterov: bool, orthogonalization: Any, scale: Any, cautious: bool
) -> None:
    muon = MuonConfig(0.8, nesterov, orthogonalization, scale, learning_rate_factor=3.0, cautious=cautious)
    step = Step(F64, rounded=True)
    before = [step.each(x) for x in (step.params, step.grads, step.m)]
    max_norm = float(step.norm) / 2
    step.run(muon, torch.tensor(0.1, dtype=F64), weight_decay=0.2, max_norm=max_norm)
    clip = max_norm / (float(step.norm) + 1e-6)
    for p, g, m, new_p, new_m in zip(*before, step.each(step.params), step.each(step.m), strict=True):
        want, momentum = muon_reference(p, g, m, muon, learning_rate=0.1, weight_decay=0.2, clip=clip)
        assert float((new_m - momentum).abs().max()) < 1e-13
        assert float((new_p - want).abs().max()) < 1e-11
    assert step.rounded is not None
    for p, copy in zip(step.params, step.rounded, strict=True):
        assert torch.equal(copy, p.bfloat16())


@pytest.mark.parametrize("t", [1, 2, 5, 9])
def test_the_momentum_rises_over_the_warm_up(t: int) -> None:
    muon, step = MuonConfig(0.95, momentum_warmup=4), Step(F64)
    before = [step.each(x) for x in (step.params, step.grads, step.m)]
    step.run(muon, max_norm=math.inf, t=t)
    for p, g, m, new_p, new_m in zip(*before, step.each(step.params), step.each(step.m), strict=True):
        want, momentum = muon_reference(p, g, m, muon, learning_rate=0.1, weight_decay=0.1, t=t)
        assert float((new_m - momentum).abs().max()) < 1e-13
        assert float((new_p - want).abs().max()) < 1e-11


def test_without_a_warm_up_the_weight_of_a_gradient_is_rounded_once() -> None:
    step = Step(torch.float32)
    wanted = [m.lerp(g, torch.tensor(1.0 - 0.95)) for m, g in zip(step.m, step.grads, strict=True)]
    step.run(MuonConfig(0.95), max_norm=math.inf)
    assert all(map(torch.equal, step.m, wanted))


def test_the_gaps_between_matrices_stay_zero() -> None:
    step = Step(F64)
    step.run(MuonConfig(cautious=True))
    inside = torch.zeros_like(step.params[0], dtype=torch.bool)
    for x in step.matrices[0]:
        inside[x.start : x.stop] = True
    assert all(not r[~inside].any() and bool(r[inside].all()) for r in (*step.params, *step.m))


@pytest.mark.parametrize(
    ("name", "least", "low", "high"), [("newton_schulz", 0.01, 0.68, 1.14), ("polar_express", 0.003, 0.85, 1.15)]
)
def test_singular_values_end_within_the_documented_bound(name: Any, least: float, low: float, high: float) -> None:
    s = torch.logspace(math.log10(least), 0.0, 100_001, dtype=F64)
    found = singular_values(s / MARGINS[name], name)
    assert low < float(found.min()) and float(found.max()) < high
    assert float(found.min()) < low + 0.01 and float(found.max()) > high - 0.01, (
        "the bound is no larger than it must be"
    )


def test_the_polar_factor_is_near_the_exact_one() -> None:
    u = randn(24, 40, dtype=F64)
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    assert float((s / s.norm()).min()) > 0.01
    for name, bound in (("newton_schulz", 0.32), ("polar_express", 0.15)):
        assert float(torch.linalg.matrix_norm(orthogonal(u, name) - left @ right, 2)) < bound


@pytest.mark.parametrize("block", [1, 60, 1 << 24])
def test_matrices_multiplied_together_have_the_results_of_single_ones(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, step = Step(F32), Step(F32)
    whole.run(MuonConfig(cautious=True))
    monkeypatch.setattr(torch_ops, "BLOCK", block)
    monkeypatch.setattr(torch_ops, "CAUTIOUS_BLOCK", block)
    step.run(MuonConfig(cautious=True))
    for a, b in zip(whole.params, step.params, strict=True):
        assert float((a - b).abs().max()) < 1e-5


@pytest.mark.parametrize(("scale", "adjust"), [("spectral", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_are_close_to_those_of_torch(scale: Any, adjust: str, nesterov: bool) -> None:
    """torch's Muon multiplies in bfloat16, so an update differs by up to 3 % of its largest element."""
    muon, p = MuonConfig(0.9, nesterov, scale=scale), randn(24, 16, dtype=F32)
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.3, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust
    )
    ours, m = p.clone().view(-1), torch.zeros(24 * 16)
    matrices: list[Matrices] = [(Matrix(0, 24, 16),)]
    for i in range(3):
        before, g = ours.clone(), randn(24, 16, dtype=F32, seed=10 + i)
        with torch.no_grad():
            theirs.copy_(ours.view(24, 16))
        theirs.grad = g.clone()
        optimizer.step()
        muon_step(
            g.norm(), 0.1, muon, matrices, 0.3, math.inf, step=torch.tensor(i + 1.0), params=[ours],
            grads=[g.view(-1).clone()], m=[m], scratch=poisoned(muon_workspace(ours, muon, matrices)),
        )  # fmt: skip
        update = (ours - before).abs().max()
        assert float((theirs.detach().view(-1) - ours).abs().max()) < 0.03 * float(update)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cautious", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, cautious: bool) -> None:
    step = Step(F32, rounded=True)
    step.grads[1][2] = bad
    step.norm = torch.linalg.vector_norm(torch.cat(step.grads))
    before = [x.clone() for x in (*step.params, *step.m)]
    step.run(MuonConfig(cautious=cautious))
    assert all(torch.equal(a, b) for a, b in zip(before, (*step.params, *step.m), strict=True))


def test_a_gradient_of_zeros_gives_an_update_of_zeros() -> None:
    step = Step(F32)
    for x in (*step.grads, *step.m):
        x.zero_()
    before = [x.clone() for x in step.params]
    step.norm.zero_()
    step.run(MuonConfig(), weight_decay=0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, step.params, strict=True))


def test_on_a_gpu_products_are_in_bfloat16() -> None:
    meta = torch.empty(8, device="meta")
    shapes = muon_workspace(meta, MuonConfig(), [(Matrix(0, 2, 4),)])
    assert shapes["torch.x"][1] == torch.bfloat16 and shapes["torch.norms"][1] == F32
    assert "torch.signs" not in shapes
    assert muon_workspace(torch.empty(8), MuonConfig(), [(Matrix(0, 2, 4),)])["torch.x"][1] == F32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"momentum": 1.0}, "momentum: got 1.0; accepted: a number from 0 to below 1.0"),
        ({"momentum": True}, "momentum: got True; accepted"),
        ({"momentum_warmup": 1.0}, "momentum_warmup: got 1.0; accepted: an int, 0 to 1,000,000,000"),
        ({"momentum_warmup": -1}, "momentum_warmup: got -1; accepted: an int"),
        (
            {"momentum": 0.8, "momentum_warmup": 3},
            "momentum_warmup: got 3 with momentum 0.8; accepted: 0, or a momentum of at least 0.85",
        ),
        ({"nesterov": 1}, "nesterov: got 1; accepted: True or False"),
        ({"orthogonalization": "svd"}, "orthogonalization: got 'svd'; accepted: 'newton_schulz' or 'polar_express'"),
        ({"scale": "adam"}, "scale: got 'adam'; accepted: 'spectral' or 'rms'"),
        ({"learning_rate_factor": -1.0}, "learning_rate_factor: got -1.0; accepted: a finite number ≥ 0"),
        ({"learning_rate_factor": math.nan}, "learning_rate_factor: got nan; accepted: a finite number ≥ 0"),
    ],
)
def test_bad_settings_of_muon_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MuonConfig(**given)


@pytest.mark.parametrize(
    "matrices", [(Matrix(0, 3, 3), Matrix(8, 2, 2)), (Matrix(90, 4, 4),), (Matrix(-1, 2, 2),), (Matrix(0, 0, 3),)]
)
def test_matrices_out_of_order_or_outside_their_range_are_refused(matrices: tuple[Matrix, ...]) -> None:
    x = [torch.zeros(100)]
    with pytest.raises(ValueError, match=r"^matrices: got Matrix\(.*accepted: matrices in order, inside 100 elements"):
        muon_step(torch.tensor(1.0), 0.1, MuonConfig(), [matrices], step=torch.tensor(1.0), params=x, grads=x, m=x)
