"""float8 products: rounded factors under the closeness rule, and the scales that follow what was seen."""

from __future__ import annotations

import math

import pytest
import torch
from support.bounds import bounds, of
from support.ops import poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu as device
from tilegrad.kernels.activation import activation_fwd
from tilegrad.kernels.closeness import SIGMAS, Bound, complaints
from tilegrad.kernels.fp8_linear import (
    FP8,
    FP8_LINEAR,
    Problem,
    fill_state,
    fp8_activation_fwd,
    fp8_linear_fwd,
    fp8_linear_workspace,
    fp8_quantize_fwd,
    fp8_scale_step,
)
from tilegrad.kernels.fp8_linear.state import FIRST, FIRST_PART, LARGEST, STATE
from tilegrad.kernels.scratch import Form

N, CIN, COUT = 37, 64, 48
gpu = pytest.mark.gpu


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    x, w, b = randn(N, CIN, seed=seed), randn(COUT, CIN, seed=seed + 1), randn(COUT, seed=seed + 2)
    return x.bfloat16(), (0.1 * w).bfloat16(), b.bfloat16()


def state_after(x: Tensor, *, weight: bool = False) -> Tensor:
    """As a step leaves it in which x was seen."""
    state = torch.empty(STATE, device=x.device)
    fill_state(state, weight=weight)
    state[FIRST_PART + 2] = x.abs().max().float()
    fp8_scale_step(state=state, kernel=None if x.is_cuda else "torch")
    return state


def bound(x: Tensor, w: Tensor, b: Tensor, s_x: float, s_w: float) -> dict[str, Bound]:
    rounded_x, rounded_w = (of(a.cpu().double() / s).rounded(FP8) for a, s in ((x, s_x), (w, s_w)))
    y = bounds(torch.bfloat16, {"y": rounded_x @ rounded_w.mT * (s_x * s_w) + of(b.cpu().double())})["y"]
    return {"y": y._replace(accumulated=y.accumulated + cut_off(x, w)) if x.is_cuda else y}


def cut_off(x: Tensor, w: Tensor) -> Tensor:
    """What float8's tensor cores lose. They add 32 products and the sum so far at a time, each cut off, towards zero, 13 bits
    below the largest of them. So in m = K/32 rounds a sum loses half a unit in each, and 33 m numbers of either sign vary by a
    twelfth of its square each. The unit is 2⁻¹³ of the partial sums, whose root mean square is √((Σt)²/3 + Σt²/6)."""
    x, w = x.cpu().double(), w.cpu().double()
    rounds = math.ceil(x.shape[1] / 32)
    partial = ((x @ w.mT).square() / 3 + x.square() @ w.square().mT / 6).sqrt()
    return 2.0**-13 * (rounds / 2 + SIGMAS * math.sqrt(33 * rounds / 12)) * partial


def run(x: Tensor, w: Tensor, b: Tensor | None, x_state: Tensor, w_state: Tensor, kernel: str | None) -> Tensor:
    y = torch.full((x.shape[0], w.shape[0]), math.nan, dtype=x.dtype, device=x.device)
    x8 = torch.empty(x.shape, dtype=FP8, device=x.device)
    scratch = {name: t.to(x.device) for name, t in poisoned(fp8_linear_workspace(x, w, kernel=kernel)).items()}
    fp8_quantize_fwd(x, x8=x8, state=x_state, kernel=kernel)
    fp8_linear_fwd(x8, x_state, w, b, y=y, state=w_state, scratch=scratch, kernel=kernel)
    return y


def check(x: Tensor, w: Tensor, b: Tensor, kernel: str | None, factor: float = 1.0) -> list[str]:
    x_state, w_state = state_after(x), state_after(w, weight=True)
    y = run(x, w, b, x_state, w_state, kernel)
    assert torch.equal(y, run(x, w, b, x_state, w_state, kernel)), "forwards of one step have the same bits"
    allowed = bound(x, w, b, float(x_state[0]), float(w_state[0]))
    return complaints({"y": (y * factor).to(y.dtype).cpu()}, exact(x, w, b), allowed)


def exact(x: Tensor, w: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {"y": x.cpu().double() @ w.cpu().double().T + b.cpu().double()}


def test_a_product_is_as_close_as_its_rounded_factors_allow() -> None:
    assert not check(*given(), "torch")


def test_canary_a_wrong_scale_is_seen() -> None:
    _, w, b = given()
    x = randn(512, CIN, seed=9).bfloat16()
    assert not check(x, w, b, "torch") and check(x, w, b, "torch", factor=1.03)


def test_what_is_larger_than_a_step_before_is_cut_off_and_the_next_step_knows() -> None:
    x, w, b = given()
    x_state, w_state = state_after(x), state_after(w, weight=True)
    before = w_state[0].clone()
    y = run(10 * x, w, b, x_state, w_state, "torch")
    assert complaints({"y": y}, exact(10 * x, w, b), bound(10 * x, w, b, float(x_state[0]), float(before)))
    assert x_state[FIRST_PART:].max() == (10 * x).abs().max()
    for state in (x_state, w_state):
        fp8_scale_step(state=state, kernel="torch")
        assert not state[1:].any()
    assert w_state[0] == before and x_state[0] == (10 * x).abs().max().float() / LARGEST
    assert not check(10 * x, w, b, "torch")


@pytest.mark.parametrize("spoiled", [math.inf, 0.0])
def test_a_scale_outlives_what_is_not_finite_and_a_step_that_saw_nothing(spoiled: float) -> None:
    state = state_after(given()[0])
    before = state[0].clone()
    state[FIRST_PART + 3] = spoiled
    fp8_scale_step(state=state, kernel="torch")
    assert state[0] == before and not state[1:].any()


def test_a_scale_follows_small_magnitudes_too() -> None:
    state = state_after(given()[0])
    state[FIRST_PART] = 0.25
    fp8_scale_step(state=state, kernel="torch")
    assert float(state[0]) == pytest.approx(0.25 / 448.0)


@pytest.mark.parametrize("kind", ["gelu", "relu", "tanh"])
def test_an_activation_is_rounded_as_if_formed_first(kind: str) -> None:
    h, a = randn(N, CIN).bfloat16(), torch.empty(N, CIN, dtype=torch.bfloat16)
    activation_fwd(h, kind, a=a, kernel="torch")
    states, rounded = [state_after(a), state_after(a)], [torch.empty(N, CIN, dtype=FP8) for _ in range(2)]
    fp8_activation_fwd(h, kind, a8=rounded[0], state=states[0], kernel="torch")
    fp8_quantize_fwd(a, x8=rounded[1], state=states[1], kernel="torch")
    assert torch.equal(*(x.view(torch.uint8) for x in rounded)) and torch.equal(*states)


def test_a_cpu_is_refused_by_name() -> None:
    x, w, _ = given()
    with pytest.raises(ValueError, match=r"scaled_mm.*needs a CUDA device, not cpu"):
        FP8_LINEAR.select(Problem(x, w))


def test_float8_products_need_8_9_and_sides_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "refusal", lambda _x: None)
    for found, sides, reason in (
        ((8, 8), (32, 48), "needs compute capability 8.9 or newer for float8 products; cuda has 8.8"),
        ((8, 9), (32, 48), None),
        ((9, 0), (16, 48), None),
        ((9, 0), (32, 40), r"takes w with both sizes multiples of 16, not (32, 40)"),
        ((9, 0), (40, 32), r"takes w with both sizes multiples of 16, not (40, 32)"),
    ):
        monkeypatch.setattr(device, "capability", lambda _device, found=found: found)
        w = Form(sides, torch.bfloat16, torch.device("cuda"))
        assert FP8_LINEAR.rows[0].refuses(Problem(w, w)) == reason


def test_the_state_before_the_first_step_and_its_length() -> None:
    """The first scales stand for magnitudes of 16 in activations and 1 in weights; 448 is e4m3's largest number."""
    for weight, largest in ((False, 16.0), (True, 1.0)):
        state = torch.full(STATE, torch.nan)
        fill_state(state, weight=weight)
        assert float(state[0]) == pytest.approx(largest / 448.0) and not state[1:].any()
    assert torch.finfo(FP8).max == LARGEST and FIRST_PART == 4 and STATE[0] > FIRST_PART


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["plain", "strided", "nan", "gelu"])
def test_interpreted_rounding_sees_every_number_and_a_nan(kind: str) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm, torch_ops

    x = randn(1000, 2 * CIN).bfloat16()
    x = x[:, :CIN] if kind == "strided" else x
    if kind == "nan":
        x[3, 5] = math.nan
    states, rounded = [torch.empty(STATE) for _ in range(2)], [torch.empty(x.shape, dtype=FP8) for _ in range(2)]
    for state, x8, module in zip(states, rounded, (scaled_mm, torch_ops), strict=True):
        fill_state(state, weight=False)
        if kind == "gelu":
            module.activation(x, kind, a8=x8, state=state, scratch={})
        else:
            module.quantize(x, x8=x8, state=state, scratch={})
    got, want = (x8.float().nan_to_num(1.0) for x8 in rounded)
    assert (got / want).nan_to_num(1.0)[want.abs() > 1.0].sub(0.8).abs().max() <= 0.4  # the interpreter loses carries
    seen = states[0][FIRST_PART:].max()
    if kind == "nan":
        assert seen == math.inf
    else:
        assert seen == pytest.approx(float(states[1][FIRST_PART:].max()), rel=1e-2)
    scaled_mm.scale_step(state=states[0], scratch={})
    assert states[0][0] == (FIRST["x"] / LARGEST if kind == "nan" else seen / LARGEST) and not states[0][1:].any()


@gpu
@pytest.mark.parametrize(("n", "cin", "cout"), [(37, 64, 48), (1000, 768, 2304), (4096, 3072, 768)])
def test_on_a_gpu_it_is_as_close(n: int, cin: int, cout: int) -> None:
    x, w, b = randn(n, cin).bfloat16(), (0.02 * randn(cout, cin, seed=1)).bfloat16(), randn(cout).bfloat16()
    given = x.cuda(), w.cuda(), b.cuda()
    found = check(*given, None)
    assert not found, found
    assert n < 1000 or check(*given, None, factor=1.01), "a hundredth too much is seen"
