"""AdamW on lean states: in every kernel the bits of stochastic rounding in Python's integers; gradients kept in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.interpreter import run_by
from support.native import MISSING
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.adamw import ADAMW, Problem, adamw_step, adamw_workspace
from tilegrad.kernels.global_norm import global_norm, global_norm_workspace
from tilegrad.kernels.residual import keep_gradient, keep_gradient_workspace
from tilegrad.kernels.stochastic_rounding import MOMENTS, PARAMETERS, Place

BF16, F32 = torch.bfloat16, torch.float32
KINDS = {  # params, grads, moments
    "moments": (F32, F32, BF16),
    "no masters": (BF16, F32, F32),
    "gradients": (F32, BF16, F32),
    "all": (BF16, BF16, BF16),
}
EXACT = (0.5, 0.75)  # 1 − β of the first step is exact for both, and so is its root for the second


@pytest.fixture(params=["torch", "native", "triton"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "native" and isinstance(MISSING, str):
        pytest.skip(f"the native library {MISSING}")
    with run_by(request.param, request):
        yield request.param


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Philox4×32-10 of Salmon et al., 2011, in Python's integers."""
    c, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        x, y = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(y >> 32) ^ c[1] ^ key[0], y & 0xFFFFFFFF, (x >> 32) ^ c[3] ^ key[1], x & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def words(n: int, first: int, step: int, stream: int, seed: int) -> list[int]:
    found = []
    for i in range(first, first + n):
        quad = i // 4
        found.append(philox((quad & 0xFFFFFFFF, quad >> 32, step, stream), seed)[i % 4])
    return found


def rounded(x: np.ndarray[Any, Any], bits: list[int]) -> Tensor:
    """r(x) by its definition: the number above if the random 16 bits exceed its distance."""
    out = []
    for value, random in zip(x.tolist(), bits, strict=True):
        below = int(np.float32(value).view(np.uint32)) & 0xFFFF0000
        down, up = (float(np.uint32(each & 0xFFFFFFFF).view(np.float32)) for each in (below, below + 0x10000))
        share = 0.0 if math.isinf(up) else (abs(value) - abs(down)) / (abs(up) - abs(down))
        out.append(up if random + share * 65536 >= 65536 else down)
    return torch.tensor(out, dtype=torch.float64).to(BF16)


class States:
    """Flat states, and a method that takes a step."""

    def __init__(self, kind: str, n: int, kernel: str | None, seed: int = 5) -> None:
        p, g, m = KINDS[kind]
        self.params, self.grads = randn(n, dtype=F32).to(p), torch.zeros(n, dtype=g)
        self.m, self.v = torch.zeros(n, dtype=m), torch.zeros(n, dtype=m)
        self.step, self.norm, self.seed, self.kernel = torch.zeros(()), torch.ones(()), torch.tensor(seed), kernel
        self.copy = torch.zeros(n, dtype=BF16) if p == F32 else None
        self.scratch = poisoned(adamw_workspace(self.params, lean=True, kernel=kernel))

    def update(
        self, rate: float, betas: tuple[float, float] = EXACT, decayed: int = 0, cuts: tuple[int, ...] = (), **how: Any
    ) -> None:
        ends = (0, *cuts, len(self.params))
        parts = [slice(a, b) for a, b in pairwise(ends)]
        given = {name: [getattr(self, name)[i] for i in parts] for name in ("params", "grads", "m", "v")}
        copies = None if self.copy is None else [self.copy[i] for i in parts]
        places = how.pop("places", [(Place(0, i.start),) for i in parts])
        within = [min(max(decayed - i.start, 0), i.stop - i.start) for i in parts]
        adamw_step(
            self.norm, rate, within, 0.25, how.pop("max_norm", math.inf), betas, 2.0**-20, self.seed, places,
            **given, step=self.step, rounded=copies, scratch=self.scratch, kernel=self.kernel,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("params", "m", "v", "step")}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.view(torch.int16 if a.dtype == BF16 else torch.int32), b.view(torch.int16 if b.dtype == BF16 else torch.int32)
    )


@pytest.mark.parametrize(("kind", "seed", "first"), [*((kind, 5, 0) for kind in KINDS), ("all", 2**40 + 3, 2**34 - 64)])
def test_a_step_has_the_bits_of_the_definition(kernel: str, kind: str, seed: int, first: int) -> None:
    n, rate, decayed = 131, 2.0**-7, 50
    s = States(kind, n, kernel, seed)
    s.grads.copy_(randn(n, dtype=F32, seed=1))
    s.m.copy_(randn(n, dtype=F32, seed=2))
    s.v.copy_(randn(n, dtype=F32, seed=3).square())
    g, m, v, p = (x.float().numpy().copy() for x in (s.grads, s.m, s.v, s.params))
    s.update(rate, decayed=decayed, places=[(Place(0, first),)])
    m = m * np.float32(0.5) + g * np.float32(0.5)
    v = v * np.float32(0.75) + g * g * np.float32(0.25)
    p[:decayed] -= p[:decayed] * np.float32(rate / 4)
    p -= m * np.float32(2 * rate) / (np.sqrt(v) * np.float32(2.0) + np.float32(2.0**-20))
    drawn = {stream: words(n, first, 1, stream, seed) for stream in (MOMENTS, PARAMETERS)}
    low, high = [w & 0xFFFF for w in drawn[MOMENTS]], [w >> 16 for w in drawn[MOMENTS]]
    own = [w & 0xFFFF for w in drawn[PARAMETERS]]
    for name, x, bits in (("m", m, low), ("v", v, high), ("params", p, own)):
        got = getattr(s, name)
        assert same(got, rounded(x, bits) if got.dtype == BF16 else torch.from_numpy(x)), name
    assert s.copy is None or same(s.copy, s.params.to(BF16))


def test_exact_numbers_do_not_change_and_no_finite_number_becomes_infinite(kernel: str) -> None:
    """m = (m + g) / 2 is the number itself for m = g, or for m = 0 and g twice as large, which the interpreter needs."""
    largest = float(torch.finfo(BF16).max)
    given = [0.0, -0.0, 1.0, -3.5, 2.0**-130, -(2.0**-133), largest, -largest, math.inf, -math.inf, math.nan]
    s = States("moments", 4 * len(given), kernel)
    s.m.copy_(torch.tensor(given * 4))
    s.grads.copy_(s.m)
    before, subnormal = s.m.clone(), (s.m.abs() < 2.0**-126) & (s.m != 0)
    s.grads[subnormal] *= 2
    s.m[subnormal] = 0.0
    s.update(0.0)
    assert same(s.m[:10], before[:10]) and s.m[10].isnan()
    s.m.fill_(largest)
    s.grads.fill_(float(torch.finfo(F32).max))
    s.update(0.0)
    assert (s.m == largest).all(), "between the largest bfloat16 and infinity"
    s.m.fill_(math.nan)
    s.m.view(torch.int16).fill_(0x7F81)  # a NaN whose truncation in another dtype must not be infinity
    s.update(0.0)
    assert s.m.isnan().all()


@pytest.mark.parametrize("value", [1 + 2.0**-9, -(1 + 3 * 2.0**-10), 1e-3, 2.0**-130 + 2.0**-142])
def test_the_mean_of_a_rounded_number_is_the_number(kernel: str, value: float) -> None:
    n, x = 1 << 14, float(np.float32(value))
    mean, variance = 0.0, 0.0
    seeds = range(1 if kernel == "triton" else 12)
    for seed in seeds:
        s = States("moments", n, kernel, seed)
        s.grads.fill_(2 * x)
        s.update(0.0)
        found = s.m.double()
        assert len(found.unique()) == 2
        mean, variance = mean + float(found.mean()) / len(seeds), max(variance, float(found.var()))
    assert variance > 0 and abs(mean - x) < 5 * math.sqrt(variance / (n * len(seeds)))


def test_parameters_move_by_updates_below_their_precision(kernel: str) -> None:
    """With rounding to the nearest, a parameter of 1 would not move by 2⁻¹²."""
    n = 1 << 14
    s = States("all", n, kernel)
    s.params.fill_(1.0)
    s.grads.fill_(1.0)
    s.update(2.0**-12)
    moved = 1.0 - s.params.double()
    assert abs(float(moved.mean()) - 2.0**-12) < 5 * math.sqrt(2.0**-12 * 2.0**-8 / n)


def test_v_decays_where_rounding_to_the_nearest_freezes_it(kernel: str) -> None:
    s, nearest, steps = States("moments", 256, kernel), torch.ones(256, dtype=BF16), 40
    s.v.fill_(1.0)
    for _ in range(steps):
        s.update(0.0, (0.9, 0.999))
        nearest.copy_(nearest.float() * 0.999)
    assert torch.equal(nearest, torch.ones_like(nearest))
    want = 0.999**steps
    assert abs(float(s.v.double().mean()) - want) < 5 * math.sqrt((1 - want) * 2.0**-8 / 256)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_ranges_have_the_bits_of_one_step(kernel: str, kind: str) -> None:
    n = 304

    def stepped(*cuts: int, **how: Any) -> dict[str, Tensor]:
        s = States(kind, n, kernel)
        for t in range(2):
            s.grads.copy_(randn(n, dtype=F32, seed=t + 1))
            s.update(1e-2, decayed=90, cuts=cuts, **how)
        return s.tensors()

    whole = stepped()
    for found in (stepped(64, 160), stepped(places=[(Place(0, 0), Place(32, 32), Place(96, 96))])):
        assert all(torch.equal(found[name], x) for name, x in whole.items())
    other = stepped(places=[(Place(0, 4),)])
    rounds = kind != "gradients"
    assert all(torch.equal(other[name], x) for name, x in whole.items()) != rounds, "other elements, other bits"


@pytest.mark.skipif(isinstance(MISSING, str), reason="compares with the native kernel")
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_kernel_agrees_with_that_of_torch(kind: str) -> None:
    """On some CPUs torch fuses multiply-adds and the native kernel does not. So float32 numbers may differ in the last bits,
    and a rounded number may, rarely, be the neighbouring one."""
    n, states = 70_003, []
    for kernel in ("torch", "native"):
        s = States(kind, n, kernel)
        for t in range(5):
            s.grads.copy_(randn(n, dtype=F32, seed=t + 1) * 3)
            s.norm.fill_(math.nan if t == 3 else 1.7 * t)
            s.update(3e-3, (0.9, 0.95), decayed=30_001, max_norm=1.0)
        states.append(s.tensors())
    assert states[0]["step"] == 4
    for name, a in states[0].items():
        b = states[1][name]
        if a.dtype == F32:
            assert bool(((a - b).abs() <= 2.0**-21 * (a.abs() + 3e-3)).all()), name
        else:
            assert bool(((a - b).abs() <= 2.0**-7 * a.abs()).all()) and int((a != b).sum()) <= n // 1000, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_not_finite_changes_nothing(kernel: str, kind: str) -> None:
    s = States(kind, 40, kernel)
    s.grads.fill_(1.0)
    s.update(1e-2)
    before = s.tensors()
    for bad in (math.nan, math.inf):
        s.grads[3] = s.norm = torch.tensor(bad)
        s.update(1e-2, decayed=20)
    assert all(torch.equal(x, before[name]) for name, x in s.tensors().items())


@pytest.mark.usefixtures("kernels")
def test_the_norm_of_bfloat16_gradients_is_right() -> None:
    for n in (1, 63, 3 * 2**16 + 5):
        g, norm = randn(n, dtype=F32).to(BF16), torch.zeros(())
        global_norm(g, norm=norm, scratch=poisoned(global_norm_workspace(g)))
        assert abs(float(norm) / float(g.double().norm()) - 1) < 1e-5


def test_kept_gradients_are_rounded_once_for_each_micro_batch() -> None:
    n, total = 1 << 12, torch.full((1 << 12,), math.nan, dtype=BF16)
    exact = torch.zeros(n, dtype=torch.float64)
    for i in range(16):
        g = randn(n, dtype=F32, seed=i)
        old = total.float()
        keep_gradient(g, total=total, accumulate=i > 0, scratch=poisoned(keep_gradient_workspace(g)))
        assert torch.equal(total, (old + g if i else g).to(BF16))
        exact += g
        error = float((total.double() - exact).norm() / exact.norm())
        assert error < (0.002 if i == 0 else 0.002 * math.sqrt(i + 1))


def test_errors_of_lean_states_say_what_is_accepted() -> None:
    s = States("moments", 8, "torch")
    given: dict[str, Any] = {"params": s.params, "grads": s.grads, "m": s.m, "v": s.v, "step": s.step}
    for changed, seed, places, match in (
        ({}, None, (Place(0, 0),), "seed: got None .*; accepted: a 0-d torch.int64 tensor"),
        ({}, s.seed.int(), (Place(0, 0),), "seed: got torch.int32 .*; accepted: torch.int64"),
        ({}, s.seed, (Place(0, 2),), "places: got .*; accepted: multiples of 4"),
        ({"v": s.v.float()}, s.seed, (Place(0, 0),), "v: got torch.float32 .*; accepted: torch.bfloat16"),
        (
            {"params": s.params.double()},
            s.seed,
            (Place(0, 0),),
            "params: got torch.float64; accepted: torch.float32 or",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            adamw_step(s.norm, 1e-3, 0, 0.1, 1.0, EXACT, 1e-8, seed, places, **given | changed, scratch=s.scratch)
    assert "is for lean states" in ADAMW.explain(Problem(s.params)).reasons["native"]
    with pytest.raises(ValueError, match=r"total: got torch\.float32.*; accepted: torch\.bfloat16"):
        keep_gradient(s.params, total=s.params, accumulate=True)
