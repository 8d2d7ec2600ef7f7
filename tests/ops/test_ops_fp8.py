"""float8 products: rounded factors under the closeness rule, both memory orders, and scales that follow the magnitudes."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from support.bounds import bounds, of
from support.ops import allocated_bytes, poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu as device
from tilegrad.kernels.activation import activation_fwd, swiglu_fwd
from tilegrad.kernels.closeness import SIGMAS, Bound, complaints
from tilegrad.kernels.cross_entropy import cross_entropy_bwd, cross_entropy_workspace
from tilegrad.kernels.fp8_head import fp8_cross_entropy_step, fp8_cross_entropy_workspace
from tilegrad.kernels.fp8_linear import (
    FP8,
    FP8_LINEAR,
    GRADIENT,
    Factor,
    Problem,
    even,
    fill_state,
    format_of,
    fp8_activation_bwd,
    fp8_activation_fwd,
    fp8_activation_workspace,
    fp8_product_fwd,
    fp8_product_workspace,
    fp8_quantize_fwd,
    fp8_scale_step,
    fp8_softmax_bwd,
)
from tilegrad.kernels.fp8_linear.largest import largest_of, set_largest
from tilegrad.kernels.fp8_linear.state import FIRST, FIRST_PART, FOLLOWED, FORMAT, JUMPS, LARGEST, STATE
from tilegrad.kernels.scratch import Form
from tilegrad.kernels.table import Where

N, CIN, COUT = 37, 64, 48
Product = Literal["y", "dx", "dw"]
PRODUCTS: tuple[Product, ...] = ("y", "dx", "dw")
gpu = pytest.mark.gpu


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops use the products of kernel `torch`."""
    from dataclasses import replace

    from tilegrad.kernels import fp8_linear
    from tilegrad.kernels.table import Table

    row = replace(FP8_LINEAR.rows[1], by_name_only=None)
    monkeypatch.setattr(fp8_linear, "FP8_LINEAR", Table("fp8_linear", (row,)))


def given(n: int = N, cin: int = CIN, cout: int = COUT, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w, b, dy = randn(n, cin, seed=seed), randn(cout, cin, seed=seed + 1), randn(cout, seed=seed + 2), randn(n, cout)
    return x.bfloat16(), (0.1 * w).bfloat16(), b.bfloat16(), (1e-3 * dy).bfloat16()


def by_name(x: Tensor) -> str | None:
    return None if x.is_cuda else "torch"


def step(*states: Tensor) -> float:
    jumps = torch.full((), math.nan, device=states[0].device)
    fp8_scale_step(states=list(states), jumps=jumps, kernel=by_name(jumps))
    return float(jumps)


def state_after(x: Tensor, factor: Factor = "x") -> Tensor:
    """The state after a step that has seen x."""
    state = torch.empty(STATE, device=x.device)
    fill_state(state, factor)
    state[FIRST_PART + 2] = x.abs().max().float()
    step(state)
    return state


def rounded(x: Tensor, factor: Factor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x to x8 and x8t."""
    n, c = x.shape
    dtype = format_of(factor)
    x8, x8t = torch.empty(n, c, dtype=dtype, device=x.device), torch.empty(c, even(n), dtype=dtype, device=x.device)
    fp8_quantize_fwd(x, x8=x8, x8t=x8t, state=state, kernel=by_name(x))
    return x8, x8t


def factors(product: Product, x: Tensor, w: Tensor, dy: Tensor) -> tuple[tuple[Tensor, Factor], tuple[Tensor, Factor]]:
    """The factors A and B of A Bᵀ before rounding, and their kinds."""
    both: dict[Product, tuple[tuple[Tensor, Factor], tuple[Tensor, Factor]]] = {
        "y": ((x, "x"), (w, "w")),
        "dx": ((dy, "dy"), (w.T, "w")),
        "dw": ((dy.T, "dy"), (x.T, "x")),
    }
    return both[product]


def bound(
    product: Product, x: Tensor, w: Tensor, dy: Tensor, b: Tensor | None, before: Tensor | None
) -> dict[str, Bound]:
    """On a CPU the oracle multiplies factors that are not rounded, and the bound counts their rounding. On a GPU it multiplies
    the rounded factors, because the errors of the tensor cores are too small to be seen among those of rounding."""
    (a, a_is), (other, b_is) = factors(product, x, w, dy)
    s_a, s_b = (float(state_after(t, f)[0]) for t, f in ((a, a_is), (other, b_is)))
    a64, b64 = operands(product, x, w, dy)
    rounded_a, rounded_b = of(a64 / s_a), of(b64 / s_b)
    if not a.is_cuda:
        rounded_a, rounded_b = rounded_a.rounded(format_of(a_is)), rounded_b.rounded(format_of(b_is))
    out = rounded_a @ rounded_b.mT * (s_a * s_b)
    for added in (b, before):
        out = out if added is None else out + of(added.cpu().double())
    found = bounds(torch.float32 if product == "dw" else torch.bfloat16, {product: out})[product]
    if a.is_cuda:
        found = found._replace(accumulated=found.accumulated + cut_off(a64, b64.T, precise=product == "dw"))
    return {product: found}


def operands(product: Product, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of the oracle's A Bᵀ in float64: the factors; on a GPU after they are rounded."""
    (a, a_is), (other, b_is) = factors(product, x, w, dy)
    if not a.is_cuda:
        return a.double(), other.double()
    a64, b64 = (_after_rounding(t, f) for t, f in ((a, a_is), (other, b_is)))
    return a64, b64


def _after_rounding(x: Tensor, factor: Factor) -> Tensor:
    """x or its transpose is contiguous, and is what the op rounds."""
    state = state_after(x, factor)
    x8 = rounded(x, factor, state)[0] if x.is_contiguous() else rounded(x.T, factor, state)[1][:, : x.shape[1]]
    return x8.cpu().double() * float(state[0])


def cut_off(a: Tensor, b: Tensor, *, precise: bool) -> Tensor:
    """The error of float8's tensor cores. They add 32 products and the sum so far at a time, truncating each 13 bits below the
    largest. So in each of m = K/32 rounds a sum loses half a unit, and 33 m numbers of either sign each add a variance of a
    twelfth of its square. The unit is 2⁻¹³ of the partial sums, whose root mean square is √((Σt)²/3 + Σt²/6).
    precise: a sum begins again after 128 products, so its partial sums are smaller by √(128/K), and its sign is random."""
    k = a.shape[1]
    rounds = math.ceil(k / 32)
    squares = a.square() @ b.square()
    if precise and k > 128:
        unit = 2.0**-13 * (squares * (128 / k)).sqrt()
        return unit * (SIGMAS * math.sqrt(rounds) / 2 + SIGMAS * math.sqrt(33 * rounds / 12))
    partial = ((a @ b).square() / 3 + squares / 6).sqrt()
    return 2.0**-13 * (rounds / 2 + SIGMAS * math.sqrt(33 * rounds / 12)) * partial


def run(product: Product, x: Tensor, w: Tensor, dy: Tensor, b: Tensor | None, before: Tensor | None) -> Tensor:
    states = {"x": state_after(x), "w": state_after(w, "w"), "dy": state_after(dy, "dy")}
    (x8, x8t), (w8, w8t), (dy8, dy8t) = (rounded(t, f, states[f]) for t, f in ((x, "x"), (w, "w"), (dy, "dy")))  # type: ignore[arg-type]
    (_, a_is), (_, b_is) = factors(product, x, w, dy)
    a8, b8 = {"y": (x8, w8), "dx": (dy8, w8t), "dw": (dy8t, x8t)}[product]
    dtype = torch.float32 if product == "dw" else torch.bfloat16
    out = torch.full((a8.shape[0], b8.shape[0]), math.nan, dtype=dtype, device=x.device)
    if before is not None:
        out.copy_(before)
    shapes = fp8_product_workspace(b8, None if before is None else out, kernel=by_name(x))
    scratch = {name: t.to(x.device) for name, t in poisoned(shapes).items()}
    fp8_product_fwd(
        a8, states[a_is], b8, states[b_is], b,
        out=out, accumulate=before is not None, precise=product == "dw", scratch=scratch, kernel=by_name(x),
    )  # fmt: skip
    return out


def exact(product: Product, x: Tensor, w: Tensor, dy: Tensor, b: Tensor | None, before: Tensor | None) -> Tensor:
    a, other = operands(product, x, w, dy)
    found = a @ other.T
    for added in (b, before):
        found = found if added is None else found + added.cpu().double()
    return found


def check(
    product: Product, x: Tensor, w: Tensor, b: Tensor, dy: Tensor, *, adds: bool = False, factor: float = 1.0
) -> list[str]:
    bias, before = b if product == "y" else None, None
    if adds:
        bias, before = None, torch.ones_like(exact(product, x, w, dy, None, None)).to(x.device)
        before = before.float() if product == "dw" else before.bfloat16()
    out = run(product, x, w, dy, bias, before)
    assert torch.equal(out, run(product, x, w, dy, bias, before)), "products of one step have the same bits"
    allowed = bound(product, x, w, dy, bias, before)
    return complaints(
        {product: (out * factor).to(out.dtype).cpu()}, {product: exact(product, x, w, dy, bias, before)}, allowed
    )


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_is_as_close_as_its_rounded_factors_allow(product: Product, adds: bool) -> None:
    assert not check(product, *given(), adds=adds)


@pytest.mark.parametrize("product", PRODUCTS)
def test_canary_a_wrong_scale_is_seen(product: Product) -> None:
    """There are 512 rows, because with more rows the small bias of rounding itself would show."""
    many = given(512, seed=9)
    assert not check(product, *many) and check(product, *many, factor=1.05)


def test_rows_after_the_last_count_as_zero_and_both_orders_are_the_same_numbers() -> None:
    x = given()[0]
    x8, x8t = rounded(x, "x", state_after(x))
    assert x8t.shape == (CIN, 48) and not x8t[:, N:].view(torch.uint8).any()
    assert torch.equal(x8t[:, :N].view(torch.uint8), x8.view(torch.uint8).t())
    for only in ({"x8": torch.empty_like(x8)}, {"x8t": torch.empty_like(x8t)}):
        fp8_quantize_fwd(x, **only, state=state_after(x), kernel="torch")
        ((name, found),) = only.items()
        assert torch.equal(found.view(torch.uint8), (x8 if name == "x8" else x8t).view(torch.uint8))


@pytest.mark.parametrize(("factor", "largest"), [("x", 448.0), ("dy", 57344.0)])
def test_a_number_larger_than_before_is_clipped_and_the_next_step_has_its_scale(factor: Factor, largest: float) -> None:
    x = given()[0]
    state = state_after(x, factor)
    before = state[0].clone()
    x8, _ = rounded(10 * x, factor, state)
    assert x8.float().abs().max() == largest and (x8.float() * before - 10 * x).abs().max() > 1.0
    assert state[FIRST_PART:].max() == (10 * x).abs().max()
    assert step(state) == 0.0 and not state[FIRST_PART:].any()
    assert state[0] == (10 * x).abs().max().float() / largest
    x8, _ = rounded(10 * x, factor, state)
    assert (x8.float() * state[0] - 10 * x).abs().max() < 3.0


@pytest.mark.parametrize("spoiled", [math.inf, 0.0])
def test_a_scale_is_kept_after_infinite_numbers_and_after_a_step_without_numbers(spoiled: float) -> None:
    state = state_after(given()[0])
    before = state[0].clone()
    state[FIRST_PART + 3] = spoiled
    assert step(state) == 0.0
    assert state[0] == before and not state[FIRST_PART:].any()


def test_jumps_of_a_magnitude_are_counted_from_the_second_step_on() -> None:
    states = [torch.empty(STATE) for _ in range(3)]
    for state in states:
        fill_state(state, "x")
    seen = [(1e6, 1.0, 1.0), (1e6, 101.0, 99.0), (1.0, 1.0, 1.0), (99.0, 101.0, 2.0)]
    counts = []
    for magnitudes in seen:
        for state, magnitude in zip(states, magnitudes, strict=True):
            state[FIRST_PART + 7] = magnitude
        counts.append(step(*states))
    assert counts == [0.0, 1.0, 0.0, 1.0]
    assert [float(state[JUMPS]) for state in states] == [0.0, 2.0, 0.0]


def in_arena(device: str = "cpu", count: int = 3) -> tuple[Tensor, list[Tensor]]:
    """(arena, states); each element of the arena has another value."""
    arena = torch.arange(1.0, 1.0 + count * (STATE[0] + 12), device=device).view(count, -1)
    return arena, [row[8 : 8 + STATE[0]] for row in arena]


def check_largest(device: str) -> None:
    for count in (1, 3):
        arena, states = in_arena(device, count)
        largest, before = torch.full((count,), math.nan, device=device), arena.clone()
        largest_of(states, largest=largest)
        assert torch.equal(arena, before) and torch.equal(largest, torch.stack([state[-1] for state in states]))
        set_largest(largest, states=states)
        for state, old in zip(states, before, strict=True):
            assert torch.equal(state[:FIRST_PART], old[8 : 8 + FIRST_PART]) and not state[FIRST_PART + 1 :].any()
        assert torch.equal(arena[:, -4:], before[:, -4:]) and torch.equal(arena[:, 8 + FIRST_PART], largest)
    states[1][STATE[0] - 5], states[2][FIRST_PART] = math.nan, math.inf
    largest_of(states, largest=largest)
    assert largest[1:].tolist() == [math.inf] * 2 and largest[0] == states[0][FIRST_PART], "a maximum can lose a NaN"


def test_the_largest_magnitudes_of_all_states_are_read_and_written() -> None:
    check_largest("cpu")
    _, states = in_arena()
    largest = torch.empty(3)
    assert allocated_bytes(lambda: largest_of(states, largest=largest)) == 0
    assert allocated_bytes(lambda: set_largest(largest, states=states)) == 0
    for other in ([states[0], states[2], states[1]], [states[0], states[1], states[2].clone()]):
        with pytest.raises(ValueError, match="states: got tensors that are not equally spaced; accepted: those of one"):
            largest_of(other, largest=largest)
    with pytest.raises(ValueError, match="largest: got"):
        set_largest(largest[:2], states=states)


@gpu
def test_on_a_gpu_the_largest_magnitudes_of_all_states_are_read_and_written() -> None:
    check_largest("cuda")


@pytest.mark.parametrize("kind", ["gelu", "relu", "relu2", "tanh", "swiglu"])
def test_an_activation_is_rounded_once(kind: str) -> None:
    h = randn(N, 2 * CIN if kind == "swiglu" else CIN).bfloat16()
    a = torch.empty(N, CIN)
    if kind == "swiglu":
        swiglu_fwd(h.float(), a=a, kernel="torch")
    else:
        activation_fwd(h.float(), kind, a=a, kernel="torch")
    states = [state_after(a), state_after(a)]
    rows, columns = (torch.empty(shape, dtype=FP8) for shape in ((N, CIN), (CIN, 48)))
    fp8_activation_fwd(h, kind, a8=rows, a8t=columns, state=states[0], kernel="torch")
    wanted = rounded(a, "x", states[1])
    for x, y in zip((rows, columns), wanted, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert torch.equal(*states)


def backward_of_activation(
    da: Tensor, h: Tensor, kind: str, module: ModuleType | None, dtype: torch.dtype = GRADIENT
) -> dict[str, Tensor]:
    """dh8, dh8t, a, Σ dh + 1 and the state, by the op or by a module of a kernel."""
    n, width = h.shape
    state = state_after(da, "dy")
    got = {"a": torch.full_like(da, math.nan), "dh_sum": torch.ones(width, device=h.device)}
    got |= {
        name: torch.empty(s, dtype=dtype, device=h.device)
        for name, s in (("dh8", (n, width)), ("dh8t", (width, even(n))))
    }
    if module is None:
        shapes = fp8_activation_workspace(da, kind, sums=True, kernel=by_name(da))
        scratch = {name: t.to(h.device) for name, t in poisoned(shapes).items()}
        a, dh_sum, dh8, dh8t = (got[name] for name in ("a", "dh_sum", "dh8", "dh8t"))
        where: Where = {"scratch": scratch, "kernel": by_name(da)}
        fp8_activation_bwd(da, h, kind, dh8=dh8, dh8t=dh8t, a=a, dh_sum=dh_sum, state=state, **where)
    else:
        total = got.pop("dh_sum")
        sums = total.chunk(2) if kind == "swiglu" else (total,)
        scratch = poisoned(module.workspace(da, None, None, len(sums)))
        module.activation_bwd(da, h, kind, **got, sums=sums, accumulate=True, state=state, scratch=scratch)
        got["dh_sum"] = total
    return got | {"state": state}


def exact_backward_of_activation(da: Tensor, h: Tensor, kind: str) -> dict[str, Tensor]:
    """dh and a in float64."""
    h64 = h.cpu().double().requires_grad_()
    up, gate = h64.chunk(2, 1) if kind == "swiglu" else (h64, h64)
    a = {
        "gelu": lambda: F.gelu(h64, approximate="tanh"), "relu": lambda: F.relu(h64), "relu2": lambda: F.relu(h64).square(),
        "tanh": lambda: torch.tanh(h64), "swiglu": lambda: F.silu(gate) * up,
    }[kind]()  # fmt: skip
    (dh,) = torch.autograd.grad(a, h64, da.cpu().double())
    return {"dh": dh, "a": a.detach()}


def check_backward_of_activation(got: dict[str, Tensor], da: Tensor, h: Tensor, kind: str, *, carries: bool) -> None:
    """Both orders have the same numbers, which are those of float64 rounded once. carries: whether the cast to float8 carries
    into the exponent, which Triton's interpreter does not."""
    got, want = {name: x.cpu() for name, x in got.items()}, exact_backward_of_activation(da, h, kind)
    n, dh, s = len(da), want["dh"], float(got["state"][0])
    assert torch.equal(got["dh8t"][:, :n].view(torch.uint8), got["dh8"].view(torch.uint8).t())
    assert not got["dh8t"][:, n:].view(torch.uint8).any()
    error = (got["dh8"].double() * s - dh.clamp(-LARGEST["dy"] * s, LARGEST["dy"] * s)).abs()
    allowed = (0.1252 if carries else 0.501) * dh.abs() + 2.0**-16 * s
    assert (error <= allowed).all(), float((error / allowed).max())
    assert not ((0.4 * got["dh8"].double() * s - dh).abs() <= allowed).all(), "a wrong factor is seen"
    torch.testing.assert_close(got["a"].double(), want["a"], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(got["dh_sum"].double(), 1.0 + dh.sum(0), rtol=1e-5, atol=1e-6)
    assert float(got["state"][FIRST_PART:].max()) == pytest.approx(float(dh.abs().max()), rel=1e-5)


ACTIVATIONS = ("gelu", "relu", "relu2", "tanh", "swiglu")


def of_activation(kind: str, n: int = N, c: int = CIN) -> tuple[Tensor, Tensor]:
    return (1e-3 * randn(n, c)).bfloat16(), randn(n, 2 * c if kind == "swiglu" else c, seed=1).bfloat16()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_gradient_of_an_activation_is_rounded_once(kind: str) -> None:
    da, h = of_activation(kind)
    check_backward_of_activation(backward_of_activation(da, h, kind, None), da, h, kind, carries=True)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_interpreted_gradients_of_activations_are_rounded_once(kind: str) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm

    da, h = of_activation(kind, 150, 80)
    check_backward_of_activation(backward_of_activation(da, h, kind, scaled_mm), da, h, kind, carries=False)


def test_an_activation_with_more_columns_than_the_state_has_room_for_is_refused() -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm
    from tilegrad.kernels.fp8_linear.round_both_orders import BLOCK_C
    from tilegrad.kernels.fp8_linear.state import PARTS

    x = torch.empty(1, PARTS * BLOCK_C + 1, dtype=torch.bfloat16)
    x8, state = torch.empty(x.shape, dtype=GRADIENT), torch.zeros(STATE)
    options: dict[str, Any] = {"dh8t": None, "a": None, "sums": (), "accumulate": True, "state": state, "scratch": {}}
    with pytest.raises(ValueError, match=rf"da: got {x.shape[1]} columns; accepted: at most {x.shape[1] - 1}"):
        scaled_mm.activation_bwd(x, x, "gelu", dh8=x8, **options)


def gradient_of_logits(
    softcap: float, n: int = 50, v: int = 144
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The arguments of `fp8_softmax_bwd`, and dl in float64."""
    logits, targets = (3.0 * randn(n, v)).bfloat16(), torch.arange(n) % v
    targets[::5] = -1
    inv_total = torch.tensor(1.0 / 40)
    x = logits.double()
    x = softcap * torch.tanh(x / softcap) if softcap else x
    row_max = x.amax(1).masked_fill(targets < 0, math.inf)
    factor = (inv_total / (x - row_max[:, None]).exp().sum(1)).masked_fill(targets < 0, 0.0)
    p = x.softmax(1)
    p[torch.arange(n), targets.clamp(min=0)] -= 1.0
    dl = (p * inv_total * (1.0 - (x / softcap) ** 2 if softcap else 1.0)).masked_fill((targets < 0)[:, None], 0.0)
    return (logits, targets, row_max.float(), factor.float(), inv_total), dl


def check_gradient_of_logits(softcap: float, module: ModuleType | None, device: str = "cpu") -> None:
    given, dl = gradient_of_logits(softcap)
    logits, targets, row_max, factor, inv_total = (t.to(device) for t in given)
    state = torch.zeros(STATE, device=device)
    state[0], state[FORMAT] = float(inv_total) / LARGEST["dy"], LARGEST["dy"]
    dl8, dl8t = (torch.empty(s, dtype=GRADIENT, device=device) for s in (dl.shape, (dl.shape[1], even(len(dl)))))
    if module is None:
        fp8_softmax_bwd(
            logits, targets, row_max, factor, inv_total, softcap, state, dl8=dl8, dl8t=dl8t, kernel=by_name(dl8)
        )
    else:
        module.softmax_bwd(
            logits, targets, row_max, factor, inv_total, softcap, dl8=dl8, dl8t=dl8t, state=state, scratch={}
        )
    assert torch.equal(dl8t[:, : len(dl)].view(torch.uint8), dl8.view(torch.uint8).t())
    assert not dl8t[:, len(dl) :].view(torch.uint8).any() and not state[FIRST_PART:].any()
    found = dl8.cpu().double() * float(state[0])
    relative = 0.127 if module is None else 0.51  # the interpreter drops carries
    allowed = relative * dl.abs() + 2.0**-16 * float(state[0])
    assert ((found - dl).abs() <= allowed).all()
    assert not ((0.4 * found - dl).abs() <= allowed).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_gradient_of_logits_is_rounded_once(softcap: float) -> None:
    check_gradient_of_logits(softcap, None)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_interpreted_gradient_of_logits_is_rounded_once(softcap: float) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm

    check_gradient_of_logits(softcap, scaled_mm)


def head(n: int, v: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = randn(n, CIN).bfloat16(), (0.3 * randn(v, CIN, seed=1)).bfloat16()
    targets = torch.arange(n) % v
    targets[::5] = -1
    return x, w, targets, torch.tensor(1.0 / max(1, int((targets >= 0).sum())))


def step_of_head(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, before: Tensor | None, softcap: float = 0.0
) -> dict[str, Tensor]:
    states = state_after(x), state_after(w, "w")
    (x8, x8t), (w8, w8t) = rounded(x, "x", states[0]), rounded(w, "w", states[1])
    loss, dx = torch.full((), math.nan, device=x.device), torch.full_like(x, math.nan)
    dw = torch.full(w.shape, math.nan, device=x.device) if before is None else before.clone()
    shapes = fp8_cross_entropy_workspace(x, w, backward=True, accumulate=before is not None)
    scratch = {name: t.to(x.device) for name, t in poisoned(shapes).items()}
    fp8_cross_entropy_step(
        x8, x8t, states[0], w8, w8t, states[1], targets, inv_total,
        loss=loss, dx=dx, dw=dw, accumulate=before is not None, softcap=softcap, scratch=scratch,
    )  # fmt: skip
    return {"loss": loss, "dx": dx, "dw": dw}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("n", "v", "least", "rows"), [(37, 48, 1 << 27, (37, 37)), (100, 80, 3500, (16, 32)), (16, 16, 1, (16, 16))]
)
@pytest.mark.parametrize(("adds", "softcap"), [(False, 0.0), (True, 0.0), (True, 0.4)])
def test_a_head_in_float8_equals_the_head_of_its_rounded_factors(
    n: int, v: int, least: int, rows: tuple[int, int], adds: bool, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without chunks and groups of chunks, the outputs equal those of the loss on the rounded x and w up to the
    rounding of dl, which is random and at most 2⁻³ of a number of e5m2."""
    from tilegrad.kernels import fp8_head

    monkeypatch.setattr(fp8_head, "LEAST", least)
    monkeypatch.setattr(fp8_head, "OF_X", 0)
    assert fp8_head.Rows.of(n, CIN, v) == rows
    x, w, targets, inv_total = head(n, v)
    before = torch.ones(v, CIN) if adds else None
    got = step_of_head(x, w, targets, inv_total, before, softcap)
    x64, w64 = ((r.double() * float(s[0])).requires_grad_() for r, s in (
        (rounded(x, "x", state_after(x))[0], state_after(x)), (rounded(w, "w", state_after(w, "w"))[0], state_after(w, "w")),
    ))  # fmt: skip
    logits = x64 @ w64.T
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = torch.nn.functional.cross_entropy(capped, targets, ignore_index=-1)
    dx, dw = torch.autograd.grad(loss, (x64, w64))
    dw = dw + (0.0 if before is None else before)
    assert float(got["loss"]) == pytest.approx(float(loss.detach()), rel=2e-2)
    p = capped.softmax(-1).detach()
    p[torch.arange(n), targets.clamp(min=0)] -= 1.0
    if softcap:
        p *= 1.0 - (capped.detach() / softcap) ** 2
    dl = (p * inv_total).masked_fill((targets < 0)[:, None], 0.0)
    for name, want, spread in (("dx", dx, dl.square() @ w64.square()), ("dw", dw, dl.square().T @ x64.square())):
        error = (got[name].double() - want).abs()
        allowed = SIGMAS * 2.0**-3 * spread.detach().sqrt() + 2.0**-6 * want.abs()
        assert bool((error <= allowed).all()), (name, float((error / allowed).max()))
        assert not bool((1.5 * got[name].double() - want).abs().le(allowed).all()), "half too much is seen"


@pytest.mark.usefixtures("on_cpu")
def test_a_head_without_targets_has_no_gradient() -> None:
    x, w, targets, _ = head(32, 48)
    got = step_of_head(x, w, targets.fill_(-1), torch.tensor(0.0), None)
    assert float(got["loss"]) == 0.0 and not got["dx"].any() and not got["dw"].any()


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"x8": None, "x8t": None}, "x8, x8t: got neither; accepted: at least one"),
        ({"x8": torch.empty(N, CIN)}, "x8: got torch.float32"),
        ({"x8t": torch.empty(CIN, N, dtype=FP8)}, "x8t: got"),
        ({"x8": torch.empty(CIN, N, dtype=FP8).t()}, "x8: got torch.float8_e4m3fn, strides (1, 37)"),
    ],
)
def test_wrong_outputs_of_a_float8_product_are_refused(what: dict[str, Tensor | None], error: str) -> None:
    x = given()[0]
    with pytest.raises(ValueError, match=re.escape(error)):
        fp8_quantize_fwd(x, **what, state=state_after(x), kernel="torch")


def test_the_error_on_a_cpu_names_the_device() -> None:
    x, w, *_ = given()
    with pytest.raises(ValueError, match=r"scaled_mm.*needs a CUDA device, not cpu"):
        FP8_LINEAR.select(Problem(x, w))


def test_float8_products_need_compute_capability_8_9_and_sizes_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_initial_state_has_its_length_and_its_scales() -> None:
    """The first scales are for magnitudes of 16 in activations and 1 in weights and gradients."""
    factor: Factor
    for factor, first in FIRST.items():  # type: ignore[assignment]
        state = torch.full(STATE, torch.nan)
        fill_state(state, factor)
        assert float(state[0]) == pytest.approx(first / LARGEST[factor]) and state[FORMAT] == LARGEST[factor]
        assert not state[FIRST_PART:].any() and not state[JUMPS : FOLLOWED + 1].any()
        assert torch.finfo(format_of(factor)).max == LARGEST[factor]
    assert FIRST_PART == 4 and STATE[0] > FIRST_PART and GRADIENT != FP8


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", ["plain", "strided", "nan", "gelu", "swiglu", "gradient"])
def test_interpreted_rounding_sees_every_number_and_a_nan(kind: str) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm, torch_ops

    factor: Factor = "dy" if kind == "gradient" else "x"
    x = randn(200, 2 * CIN).bfloat16()
    x = x[:, :CIN] if kind == "strided" else x
    if kind == "nan":
        x[3, 5] = math.nan
    n, c = x.shape[0], x.shape[1] // (2 if kind == "swiglu" else 1)
    found = []
    for module in (scaled_mm, torch_ops):
        state = torch.empty(STATE)
        fill_state(state, factor)
        x8, x8t = (torch.ones(shape, dtype=format_of(factor)) for shape in ((n, c), (c, even(n))))
        if kind in ("gelu", "swiglu"):
            module.activation(x, kind, a8=x8, a8t=x8t, state=state, scratch={})
        else:
            module.quantize(x, x8=x8, x8t=x8t, state=state, scratch={})
        assert torch.equal(x8t[:, :n].float().nan_to_num(), x8.t().float().nan_to_num())
        assert not x8t[:, n:].float().any()
        found.append((state, x8))
    if kind == "plain":  # one memory order only
        for name, wanted in (("x8", found[0][1]), ("x8t", found[0][1].t())):
            only, state = torch.empty(c if name == "x8t" else n, wanted.shape[1], dtype=FP8), found[0][0].clone()
            scaled_mm.quantize(x, **{"x8": None, "x8t": None} | {name: only}, state=state, scratch={})
            assert torch.equal(only.view(torch.uint8), wanted.contiguous().view(torch.uint8))
    got, want = (x8.float().nan_to_num(1.0) for _, x8 in found)
    assert (got / want).nan_to_num(1.0)[want.abs() > 1.0].sub(0.8).abs().max() <= 0.4  # the interpreter drops carries
    seen, other = (state[FIRST_PART:].max() for state, _ in found)
    if kind == "nan":
        assert seen == math.inf
    else:
        assert seen == pytest.approx(float(other), rel=1e-2)
    state, jumps = found[0][0], torch.empty(())
    scaled_mm.scale_step(states=[state], jumps=jumps, scratch={})
    assert jumps == 0.0 and not state[FIRST_PART:].any()
    assert state[0] == (FIRST["x"] / LARGEST["x"] if kind == "nan" else seen / LARGEST[factor])


@pytest.mark.usefixtures("interpreter")
def test_interpreted_scales_equal_those_of_torch_in_one_launch() -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm, torch_ops

    seen = [(1e6, 1.0, math.inf), (1.0, 101.0, 3.0), (99.0, 0.0, 400.0)]
    results = []
    for module in (scaled_mm, torch_ops):
        arena, counts = torch.zeros(3, STATE[0] + 4), []
        states = [row[: STATE[0]] for row in arena]
        for state in states:
            fill_state(state, "x")
        for magnitudes in seen:
            for state, magnitude in zip(states, magnitudes, strict=True):
                state[FIRST_PART + 9] = magnitude
            jumps = torch.empty(())
            module.scale_step(states=states, jumps=jumps, scratch={})
            counts.append(float(jumps))
        results.append((arena, counts))
    assert results[0][1] == results[1][1] == [0.0, 1.0, 1.0] and torch.equal(results[0][0], results[1][0])


@pytest.mark.usefixtures("on_cpu")
def test_canary_a_head_without_float8_is_seen() -> None:
    """This shows that the test of the head in float8 can fail."""
    x, w, targets, inv_total = head(37, 48)
    loss, dx = torch.empty(()), torch.empty_like(x)
    scratch = poisoned(cross_entropy_workspace(x, w, backward=True))
    cross_entropy_bwd(x, w, targets, inv_total, loss=loss, dx=dx, scratch=scratch)
    got = step_of_head(x, w, targets, inv_total, None)
    assert float(loss) == pytest.approx(float(got["loss"]), rel=2e-2) and not torch.equal(dx, got["dx"])


@gpu
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("n", "cin", "cout"), [(37, 64, 48), (1000, 768, 2304), (4096, 3072, 768)])
def test_on_a_gpu_a_product_is_close_to_that_of_its_rounded_factors(
    n: int, cin: int, cout: int, adds: bool, product: Product
) -> None:
    x, w, b, dy = (t.cuda() for t in given(n, cin, cout))
    found = check(product, x, w, b, dy, adds=adds and product != "y")
    assert not found, found
    assert n < 1000 or check(product, x, w, b, dy, factor=1.02), "two hundredths too much are seen"


@gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_on_a_gpu_gradients_of_activations_are_rounded_once(kind: str) -> None:
    da, h = (t.cuda() for t in of_activation(kind, 1000, 768))
    check_backward_of_activation(backward_of_activation(da, h, kind, None), da, h, kind, carries=True)


@gpu
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_on_a_gpu_the_gradient_of_logits_is_rounded_once(softcap: float) -> None:
    check_gradient_of_logits(softcap, None, "cuda")


@gpu
@pytest.mark.parametrize(("factor", "largest"), [("x", 448.0), ("dy", 57344.0)])
def test_on_a_gpu_a_number_larger_than_before_is_clipped_and_a_nan_is_kept(factor: Factor, largest: float) -> None:
    x = given()[0].cuda()
    state = state_after(x, factor)
    large = 10 * x
    large[3, 5], large[4, 6] = math.nan, -math.inf
    x8, _ = rounded(large, factor, state)
    found = x8.float()
    assert found[3, 5].isnan() and found[4, 6] == -largest and found.nan_to_num().abs().max() == largest
    assert state[FIRST_PART:].max() == math.inf


@gpu
@pytest.mark.parametrize("factor", ["x", "dy"])
def test_on_a_gpu_numbers_are_rounded_to_the_nearest(factor: Factor) -> None:
    x = given(1000, 3072)[0].cuda()
    state = state_after(x, factor)
    wanted = (x.float() * (1.0 / state[0])).to(format_of(factor))
    assert torch.equal(rounded(x, factor, state)[0].view(torch.uint8), wanted.view(torch.uint8))


@gpu
def test_on_a_gpu_both_orders_have_the_same_numbers() -> None:
    x = given(1000, 3072)[0].cuda()
    x8, x8t = rounded(x, "x", state_after(x))
    assert torch.equal(x8t[:, :1000].view(torch.uint8), x8.view(torch.uint8).t())
    assert not x8t[:, 1000:].view(torch.uint8).any()


def test_columns_that_are_not_a_multiple_of_16_are_refused() -> None:
    x = randn(48, 37).bfloat16()
    with pytest.raises(ValueError, match="x: got 37 columns; accepted: a multiple of 16, with any number of rows"):
        rounded(x, "x", state_after(x))
    da, h, logits = randn(16, 24).bfloat16(), randn(16, 2 * 24).bfloat16(), randn(16, 40).bfloat16()
    x8, state, row, one = torch.empty(16, 48, dtype=GRADIENT), state_after(h), torch.ones(16), torch.ones(())
    with pytest.raises(ValueError, match=r"act\(h\): got 24 columns"):
        fp8_activation_fwd(h, "swiglu", a8=x8[:, :24].contiguous().view(FP8), state=state, kernel="torch")
    with pytest.raises(ValueError, match=r"act\(h\): got 24 columns"):
        fp8_activation_bwd(da, h, "swiglu", dh8=x8, state=state, kernel="torch")
    with pytest.raises(ValueError, match="logits: got 40 columns"):
        fp8_softmax_bwd(logits, row.long(), row, row, one, 0.0, state, dl8=x8, dl8t=x8, kernel="torch")
