"""float8 products: rounded factors under the closeness rule, and the scales that follow what was seen."""

from __future__ import annotations

import math

import pytest
import torch
from support.bounds import bounds, of
from support.interpreter import INTERPRETED, in_the_interpreter, interpreted
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels.closeness import Bound, assert_close, complaints
from tilegrad.kernels.fp8_linear import (
    FP8_LINEAR,
    LARGEST,
    STATE,
    Problem,
    fill_state,
    fp8_linear_fwd,
    fp8_linear_workspace,
    fp8_scale_step,
)

FP8 = torch.float8_e4m3fn
N, CIN, COUT = 37, 64, 48
gpu = pytest.mark.gpu


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = randn(N, CIN, seed=seed), randn(COUT, CIN, seed=seed + 1), randn(COUT, seed=seed + 2)
    return x.bfloat16(), (0.1 * w).bfloat16(), b.bfloat16()


def state_after(x: Tensor, w: Tensor) -> Tensor:
    """As a step leaves it in which x and w were seen."""
    state = torch.empty(STATE, device=x.device)
    fill_state(state)
    state[0, 4:6], state[1, 4] = x.abs().max().float(), w.abs().max().float()
    fp8_scale_step(state=state)
    return state


def bound(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> dict[str, Bound]:
    s_x, s_w = state[:, 0].double().cpu()
    factors = (of(a.cpu().double() / s).rounded(FP8) for a, s in ((x, s_x), (w, s_w)))
    rounded_x, rounded_w = factors
    return bounds(torch.bfloat16, {"y": rounded_x @ rounded_w.mT * (s_x * s_w) + of(b.cpu().double())})


def run(x: Tensor, w: Tensor, b: Tensor | None, state: Tensor, kernel: str | None) -> Tensor:
    y = torch.full((x.shape[0], w.shape[0]), math.nan, dtype=x.dtype, device=x.device)
    scratch = {name: t.to(x.device) for name, t in poisoned(fp8_linear_workspace(x, w, kernel=kernel)).items()}
    fp8_linear_fwd(x, w, b, y=y, state=state, scratch=scratch, kernel=kernel)
    return y


def exact(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"y": x.cpu().double() @ w.cpu().double().T + b.cpu().double()}


def test_a_product_is_as_close_as_its_rounded_factors_allow() -> None:
    x, w, b = given()
    state = state_after(x, w)
    assert_close({"y": run(x, w, b, state, "torch")}, exact(x, w, b), bound(x, w, b, state))


def test_canary_a_wrong_scale_is_seen() -> None:
    _, w, b = given()
    x = randn(512, CIN, seed=9).bfloat16()
    state = state_after(x, w)
    y = run(x, w, b, state, "torch")
    assert complaints({"y": (y * 1.03).to(y.dtype)}, exact(x, w, b), bound(x, w, b, state))


def test_what_is_larger_than_a_step_before_is_cut_off_and_the_next_step_knows() -> None:
    x, w, b = given()
    state = state_after(x, w)
    run(10 * x, w, None, state, "torch")
    assert state[0, 4:].max() == (10 * x).abs().max()
    before = state[:, 0].clone()
    fp8_scale_step(state=state)
    assert not state[:, 4:].any() and state[1, 0] == before[1]
    assert state[0, 0] == (10 * x).abs().max().float() / LARGEST
    y = run(10 * x, w, b, state, "torch")
    assert_close({"y": y}, exact(10 * x, w, b), bound(10 * x, w, b, state))


@pytest.mark.parametrize("spoiled", [math.inf, 0.0])
def test_a_scale_outlives_what_is_not_finite_and_a_step_that_saw_nothing(spoiled: float) -> None:
    x, w, _ = given()
    state = state_after(x, w)
    before = state[:, 0].clone()
    state[0, 5] = spoiled
    fp8_scale_step(state=state)
    assert torch.equal(state[:, 0], before) and not state[:, 4:].any()


def test_forwards_of_one_step_have_the_same_bits() -> None:
    x, w, b = given()
    state = state_after(x, w)
    assert torch.equal(run(x, w, b, state, "torch"), run(x, w, b, state, "torch"))


def test_a_cpu_is_refused_by_name() -> None:
    x, w, _ = given()
    with pytest.raises(ValueError, match=r"scaled_mm.*needs a CUDA device, not cpu"):
        FP8_LINEAR.select(Problem(x, w))


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    in_the_interpreter(str(request.path), "-k", "interpreted")


@interpreted
@pytest.mark.parametrize("kind", ["plain", "strided", "nan"])
def test_interpreted_rounding_sees_every_number_and_a_nan(kind: str) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm

    x = randn(1000, 2 * CIN).bfloat16()
    x = x[:, :CIN] if kind == "strided" else x
    if kind == "nan":
        x[3, 5] = math.nan
    state = torch.empty(STATE)
    fill_state(state)
    x8 = torch.empty(x.shape, dtype=FP8)
    scaled_mm.quantize(x, state=state[0], a8=x8)
    seen = state[0, 4:].max()
    assert seen == (math.inf if kind == "nan" else x.float().abs().max())
    scaled_mm.scale_step(state=state)
    assert (
        state[0, 0] == (16.0 / LARGEST if kind == "nan" else x.float().abs().max() / LARGEST) and not state[:, 4:].any()
    )


@gpu
@pytest.mark.parametrize(("n", "cin", "cout"), [(37, 64, 48), (1000, 768, 2304), (4096, 3072, 768)])
def test_on_a_gpu_it_is_as_close(n: int, cin: int, cout: int) -> None:
    x, w, b = (
        randn(n, cin).bfloat16().cuda(),
        (0.02 * randn(cout, cin, seed=1)).bfloat16().cuda(),
        randn(cout).bfloat16().cuda(),
    )
    state = state_after(x, w)
    y = run(x, w, b, state, None)
    assert state[0, 4:].max() == x.abs().max() and state[1, 4:].max() == w.abs().max()
    assert_close({"y": y.cpu()}, exact(x, w, b), bound(x, w, b, state))
    assert torch.equal(y, run(x, w, b, state, None))
