"""tilegrad.linear_cross_entropy and further terms of the op, against whole matrices in float64 and torch's functions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.ops import DTYPES, acc, poisoned, randn
from torch import Tensor
from torch.autograd import forward_ad

import tilegrad
from tilegrad.functional import linear_cross_entropy_ops
from tilegrad.functional.linear_cross_entropy import Reduction
from tilegrad.kernels import gpu, linear
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.cross_entropy import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_workspace,
    reference,
    torch_ops,
)
from tilegrad.kernels.cross_entropy.terms import Terms

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum", "none")
COMBINATIONS = [  # bias, softcap, label_smoothing, z_loss: every pair of options occurs together
    (True, 0.0, 0.0, 0.0),
    (False, 3.0, 0.0, 0.0),
    (False, 0.0, 0.2, 0.0),
    (False, 0.0, 0.0, 0.03),
    (True, 3.0, 0.0, 0.03),
    (False, 3.0, 0.2, 0.03),
    (True, 3.0, 0.2, 0.03),
]
INTERPRETED = [  # each option alone and all at once; only the softcap has its own code for float32 in Triton's kernel
    *((torch.bfloat16, COMBINATIONS[n]) for n in (1, 2, 3, 6)),
    (torch.float32, COMBINATIONS[6]),
]
MORE = [(dtype, each) for dtype in (torch.bfloat16, torch.float32) for each in COMBINATIONS]


class Inputs(NamedTuple):
    x: Tensor
    w: Tensor
    targets: Tensor
    bias: Tensor | None


def build(n: int, c: int, v: int, dtype: torch.dtype, *, bias: bool, ignore_index: int = -1) -> Inputs:
    targets = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(n))
    targets[::5], targets[-1] = ignore_index, v - 1
    return Inputs(
        randn(n, c, dtype=dtype),
        randn(v, c, dtype=dtype, seed=1),
        targets,
        randn(v, dtype=dtype, seed=2) if bias else None,
    )


def small_chunks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", 4 * size)
    monkeypatch.setattr(torch_ops, "BLOCK", size // 3)
    if gpu.interpreting():
        from tilegrad.kernels.cross_entropy import triton_ops

        monkeypatch.setitem(triton_ops.CHUNK, "cpu", 4 * size)
        monkeypatch.setattr(triton_ops, "LEAST", 4 * size)
        monkeypatch.setattr(triton_ops, "TILE", 32)


def run(given: Inputs, terms: Terms, inv_total: Tensor) -> dict[str, Tensor]:
    """Runs the fused step and the losses of rows. The backward alone must have the bits of the step."""
    x, w, targets, bias = given
    a, nan = acc(x.dtype), torch.nan
    gradients: dict[str, Any] = {"dx": torch.full_like(x, nan), "dw": torch.full_like(w, nan, dtype=a)}
    if bias is not None:
        gradients["dbias"] = torch.full_like(bias, nan, dtype=a)
    alone = {name: y.clone() for name, y in gradients.items()}
    loss, losses = torch.tensor(nan, dtype=a), torch.full((len(x),), nan, dtype=a)
    forward, backward = (
        poisoned(cross_entropy_workspace(x, w, backward=both, bias=bias, terms=terms)) for both in (False, True)
    )
    reads: Any = (x, w, targets, inv_total, bias)
    cross_entropy_bwd(*reads, loss=loss, **gradients, accumulate=False, terms=terms, scratch=backward)
    cross_entropy_fwd(*reads, losses=losses, terms=terms, scratch=forward)
    cross_entropy_bwd(*reads, **alone, accumulate=False, terms=terms, scratch=backward)
    assert all(torch.equal(gradients[name], alone[name]) for name in alone)
    again = {name: y.clone() for name, y in alone.items()}
    cross_entropy_bwd(*reads, **again, terms=terms, scratch=backward)  # accumulates
    for name in alone:
        wide = name != "dx"
        torch.testing.assert_close(again[name], alone[name] * (2 if wide else 1), rtol=1e-5 if wide else 0, atol=1e-6)
    return {"loss": loss, "losses": losses, **gradients}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kernels", "dtype", "options"),
    [
        *(("torch", *each) for each in itertools.product(DTYPES, COMBINATIONS)),
        *(("triton", *each) for each in INTERPRETED),
        *(pytest.param("triton", *each, marks=pytest.mark.slow) for each in MORE if each not in INTERPRETED),
    ],
    indirect=["kernels"],
)
def test_every_kernel_is_close_to_the_oracle(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: tuple[bool, float, float, float]
) -> None:
    small_chunks(monkeypatch, 1000)
    bias, terms = options[0], Terms(*options[1:])
    shapes = ((6, 16, 50), (2, 16, 83)) if gpu.interpreting() else ((23, 16, 50), (9, 16, 131))
    for (n, c, v), by_row in zip(shapes, (True, False), strict=True):
        given = build(n, c, v, dtype, bias=bias)
        inv_total = (randn(n, dtype=acc(dtype), seed=3) if by_row else torch.tensor(1 / 64)).to(acc(dtype))
        got = run(given, terms, inv_total)
        exact = reference.exact(*given[:3], inv_total.double(), given.bias, terms)
        assert_close(got, exact, reference.bounds(*given[:3], inv_total.double(), given.bias, terms))


@pytest.mark.usefixtures("kernels")
def test_a_bias_much_larger_than_the_products_is_not_rounded_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 torch.addmm rounded strided products both before and after it added a bias."""
    small_chunks(monkeypatch, 1000)
    given, inv_total = build(6, 16, 50, torch.bfloat16, bias=True), torch.tensor(1 / 64)
    given = given._replace(bias=torch.full((50,), 256.0, dtype=torch.bfloat16))
    read = (*given[:3], inv_total.double(), given.bias, Terms())
    assert_close(run(given, Terms(), inv_total), reference.exact(*read), reference.bounds(*read))


@pytest.mark.parametrize("left_out", ["bias", "softcap", "label_smoothing", "z_loss"])
def test_canary_a_missing_term_is_seen(left_out: str) -> None:
    given, terms = build(23, 16, 50, torch.bfloat16, bias=True), Terms(3.0, 0.2, 0.03)
    got = run(given, terms, torch.tensor(1 / 64))
    less = terms if left_out == "bias" else terms._replace(**{left_out: 0.0})
    bias = None if left_out == "bias" else given.bias
    exact = reference.exact(*given[:3], 1 / 64, bias, less)
    allowed = reference.bounds(*given[:3], 1 / 64, bias, less)
    for name in exact:
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_close({name: got[name]}, {name: exact[name]}, {name: allowed[name]})


def plain(
    x: Tensor, w: Tensor, targets: Tensor, *, bias: Tensor | None = None, softcap: float | None = None,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """The loss by torch's functions on all logits."""
    logits = F.linear(x, w, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    flat, rows = logits.reshape(-1, w.shape[0]), targets.reshape(-1)
    each = F.cross_entropy(flat, rows, reduction="none", label_smoothing=label_smoothing, ignore_index=ignore_index)
    kept = rows != ignore_index
    each = each + torch.where(kept, z_loss * flat.logsumexp(-1) ** 2, 0.0)
    if not z_loss and reduction != "none":
        return F.cross_entropy(
            flat, rows, reduction=reduction, label_smoothing=label_smoothing, ignore_index=ignore_index
        )
    total = {"sum": each.sum(), "mean": each.sum() / kept.sum()}
    return each.reshape(targets.shape) if reduction == "none" else total[reduction]


def leaves(n: int, c: int, v: int, dtype: torch.dtype = torch.float64, *, bias: bool = True) -> Inputs:
    x, w, targets, b = build(n, c, v, dtype, bias=bias, ignore_index=-100)
    return Inputs(x.requires_grad_(), w.requires_grad_(), targets, b.requires_grad_() if b is not None else None)


def results(fn: Callable[..., Tensor], given: Inputs, **options: Any) -> list[Tensor]:
    """The result of a function, and the gradients of its product with random numbers."""
    y = fn(*given[:3], bias=given.bias, **options)
    read = [t for t in (given.x, given.w, given.bias) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, read, randn(*y.shape, dtype=y.dtype, seed=7))]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_equals_torch(monkeypatch: pytest.MonkeyPatch, reduction: Reduction) -> None:
    small_chunks(monkeypatch, 400)
    for bias, softcap, smoothing, z_loss in itertools.product((False, True), (None, 2.0), (0.0, 0.1, 1.0), (0.0, 0.01)):
        options = {"softcap": softcap, "label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
        given = leaves(23, 8, 30, bias=bias)
        for got, want in zip(
            results(tilegrad.linear_cross_entropy, given, **options), results(plain, given, **options), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("kernels", "dtype", "reduction"),
    [
        *itertools.product(("torch",), (torch.float32, torch.bfloat16), REDUCTIONS),
        *(("triton", torch.bfloat16, reduction) for reduction in ("mean", "none")),
        *(pytest.param("triton", torch.float32, reduction, marks=pytest.mark.slow) for reduction in ("mean", "none")),
    ],
    indirect=["kernels"],
)
def test_short_dtypes_are_close_to_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reduction: Reduction
) -> None:
    """g is ½, so that the last product does not round."""
    small_chunks(monkeypatch, 1000)
    given, terms = leaves(23, 16, 50, dtype), Terms(3.0, 0.1, 0.01)
    options: dict[str, Any] = dict(zip(("softcap", "label_smoothing", "z_loss"), terms, strict=True))
    y = tilegrad.linear_cross_entropy(*given[:3], bias=given.bias, reduction=reduction, **options)
    g = torch.full_like(y, 0.5) if reduction != "none" else randn(23, dtype=torch.float32, seed=4)
    y.backward(g)
    targets = given.targets.masked_fill(given.targets == -100, -1)
    scale = g.double() / (int((targets >= 0).sum()) if reduction == "mean" else 1)
    tensors = [t.detach() for t in (given.x, given.w, given.bias) if t is not None]
    read = (tensors[0], tensors[1], targets, scale, tensors[2], terms)
    exact, allowed = reference.exact(*read), reference.bounds(*read)
    assert y.dtype == torch.float32
    assert (
        given.x.grad is not None and given.w.grad is not None and given.bias is not None and given.bias.grad is not None
    )
    got = {"dx": given.x.grad, "dw": given.w.grad, "dbias": given.bias.grad}
    got |= {"losses": y.detach() * g} if reduction == "none" else {"loss": y.detach() * g}
    assert {t.dtype for name, t in got.items() if name.startswith("d")} == {dtype}
    assert_close(got, {name: exact[name] for name in got}, allowed)


@pytest.mark.usefixtures("kernels")
def test_a_mean_is_not_biased_by_the_rounding_of_1_over_n() -> None:
    """1 / 115 is 1.0033 times the nearest bfloat16, and (p − 1) / 115 rounds to that where p is small."""
    n, c, v = 115, 16, 1024
    x, w = randn(n, c, dtype=torch.bfloat16), randn(v, c, dtype=torch.bfloat16, seed=1).mul_(c**-0.5)
    targets = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(0))
    loss = tilegrad.linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), targets)
    dx, dw = torch.autograd.grad(loss, (x, w))
    read = (x.detach(), w.detach(), targets, 1 / n)
    exact, got = reference.exact(*read), {"loss": loss.detach(), "dx": dx, "dw": dw}
    assert_close(got, {name: exact[name] for name in got}, reference.bounds(*read))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_cross_entropy_passes_gradcheck(reduction: Reduction) -> None:
    x, w, targets, bias = leaves(4, 3, 4)
    assert bias is not None

    def fn(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return tilegrad.linear_cross_entropy(
            x, w, targets, bias=bias, softcap=2.0, label_smoothing=0.1, z_loss=0.1, reduction=reduction
        )

    assert torch.autograd.gradcheck(fn, (x, w, bias))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_input_alone_may_require_a_gradient(reduction: Reduction) -> None:
    for needs in itertools.product((False, True), repeat=3):
        given = leaves(9, 4, 6)
        for t, need in zip((given.x, given.w, given.bias), needs, strict=True):
            assert t is not None
            t.requires_grad_(need)
        if not any(needs):
            assert not tilegrad.linear_cross_entropy(*given[:3], bias=given.bias).requires_grad
            continue
        got, want = (results(fn, given, reduction=reduction) for fn in (tilegrad.linear_cross_entropy, plain))
        assert len(got) == 1 + sum(needs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_inputs_may_have_leading_dimensions_and_strides_and_backward_may_run_twice() -> None:
    x = randn(4, 3, 5).permute(2, 1, 0).requires_grad_()  # (5, 3, 4), columns not contiguous
    w, targets = randn(4, 6, seed=1).t().requires_grad_(), torch.arange(15).reshape(3, 5).t() % 6
    for reduction in REDUCTIONS:
        y = tilegrad.linear_cross_entropy(x, w, targets, reduction=reduction)
        want = plain(x, w, targets, reduction=reduction)
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-13)
        assert y.shape == (targets.shape if reduction == "none" else ())
        first, second = (torch.autograd.grad(y.sum() * k, (x, w), retain_graph=True) for k in (1.0, 2.0))
        for a, b, c in zip(first, second, torch.autograd.grad(want.sum(), (x, w)), strict=True):
            torch.testing.assert_close(b, 2 * a, rtol=1e-12, atol=0)
            torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-13)
    one = tilegrad.linear_cross_entropy(x[0, 0], w, targets[0, 0])  # no leading dimension
    torch.testing.assert_close(one, plain(x[0, :1], w, targets[0, :1]), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_rows_or_targets_the_loss_is_0(reduction: Reduction) -> None:
    w, bias = randn(6, 4, dtype=torch.float32), torch.zeros(6)
    for n in (0, 3):
        given = Inputs(torch.ones(n, 4), w, torch.full((n,), -100), bias)
        for t in (given.x, w, bias):
            t.requires_grad_()
        y, *gradients = results(tilegrad.linear_cross_entropy, given, reduction=reduction, z_loss=0.1)
        assert y.shape == ((n,) if reduction == "none" else ()) and not y.any()
        assert not any(t.any() for t in gradients)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_and_infinities_propagate_and_stay_out_of_ignored_rows(reduction: Reduction) -> None:
    x, w, _, bias = build(6, 4, 7, torch.float32, bias=True)
    targets = torch.tensor([-100, 1, 2, 3, -100, 5])
    assert bias is not None
    bias[0] = -torch.inf  # the index that an ignored row reads
    x[0] = torch.nan
    x.requires_grad_()
    y = tilegrad.linear_cross_entropy(x, w, targets, bias=bias, reduction=reduction)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and dx.isfinite().all() and not dx[0].any()
    impossible = targets.clone()
    impossible[1] = 0
    assert tilegrad.linear_cross_entropy(x, w, impossible, bias=bias, reduction=reduction).max() == torch.inf
    smooth = tilegrad.linear_cross_entropy(x, w, targets, bias=bias, label_smoothing=0.1, reduction="sum")
    assert smooth == torch.inf
    with torch.no_grad():
        x[1] = torch.nan
    y = tilegrad.linear_cross_entropy(x, w, targets, bias=bias, reduction=reduction)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.isnan().any() and dx[1].isnan().all() and dx[2:].isfinite().all()


def test_a_mean_only_multiplies_in_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies by all digits of g, even if x is bfloat16."""
    given = leaves(10, 4, 6, torch.bfloat16)  # 8 targets, so that 1 / 8 is a power of two
    loss = tilegrad.linear_cross_entropy(*given[:3], bias=given.bias)
    monkeypatch.setattr(linear_cross_entropy_ops, "cross_entropy_bwd", None)
    once, more = (torch.autograd.grad(loss, given.x, torch.tensor(g), retain_graph=True)[0] for g in (1.0, 1.203))
    assert torch.equal(more, (once.float() * 1.203).bfloat16())


def test_an_ignored_index_may_be_a_class() -> None:
    given = leaves(9, 4, 6)
    targets = given.targets.masked_fill(given.targets == -100, 2)
    for a, b in zip(
        *(
            results(fn, given._replace(targets=targets), ignore_index=2)
            for fn in (tilegrad.linear_cross_entropy, plain)
        ),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_torch_compile_captures_one_graph() -> None:
    compiled = torch.compile(tilegrad.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for reduction, autocast in (("mean", False), ("none", True)):
        given = leaves(9, 4, 6, torch.float32)
        options: dict[str, Any] = {"reduction": reduction, "z_loss": 0.01, "softcap": 3.0}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            both = [results(fn, given, **options) for fn in (compiled, tilegrad.linear_cross_entropy)]
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_torch_func_runs_the_same_backward() -> None:
    given = leaves(6, 4, 5, bias=False)
    x, w, targets = (t.detach() for t in given[:3])

    def loss(w: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        return tilegrad.linear_cross_entropy(x, w, targets)

    (want,) = torch.autograd.grad(loss(given.w, x, targets), given.w)
    three = torch.func.grad(lambda *given: 3 * loss(*given))(w, x, targets)
    torch.testing.assert_close(three, 3 * want, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.func.grad(loss)(w, x, targets), want, rtol=1e-12, atol=0)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, x[:, None], targets[:, None])
    for i, own in enumerate(each):
        torch.testing.assert_close(own, torch.func.grad(loss)(w, x[i : i + 1], targets[i : i + 1]), rtol=1e-12, atol=0)


# warnings of torch's decompositions for jvp
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
def test_second_derivatives_and_forward_mode_raise_an_error() -> None:
    given = leaves(6, 4, 5, bias=False)
    (dx,) = torch.autograd.grad(tilegrad.linear_cross_entropy(*given[:3]), given.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy has no second derivative"):
        dx.sum().backward()
    x, w, targets = (t.detach() for t in given[:3])
    with forward_ad.dual_level():
        tilegrad.linear_cross_entropy(x, w, targets)
        with pytest.raises(NotImplementedError, match="linear_cross_entropy has no forward-mode derivative"):
            tilegrad.linear_cross_entropy(x, forward_ad.make_dual(w, w), targets)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_rounds_the_inputs_and_keeps_float32_gradients(
    monkeypatch: pytest.MonkeyPatch, reduction: Reduction
) -> None:
    """On a CPU with bf16 instructions torch's product would round dw (kernels/linear/bf16.py)."""
    monkeypatch.setattr(linear, "_has_bf16_products", lambda: False)
    given = leaves(23, 16, 50, torch.float32)
    short = Inputs(*(t.detach().bfloat16() if t.is_floating_point() else t for t in given if t is not None))
    for t in (short.x, short.w, short.bias):
        assert t is not None
        t.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(tilegrad.linear_cross_entropy, given, reduction=reduction)
    want = results(tilegrad.linear_cross_entropy, short, reduction=reduction)
    assert torch.equal(got[0], want[0]) and {t.dtype for t in got} == {torch.float32}
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.bfloat16(), b, rtol=2**-7, atol=0)  # dx is rounded before g
    assert not torch.equal(got[2], got[2].bfloat16().float())
    wide = leaves(9, 4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilegrad.linear_cross_entropy(*wide[:3]).dtype == torch.float64


@pytest.mark.gpu
def test_float16_has_the_gradients_of_its_loss_scale() -> None:
    """Without the scale, 1 / N times small numbers would underflow."""
    given = build(64, 8, 20, torch.float32, bias=False, ignore_index=-100)
    x, w, targets = (t.cuda() for t in given[:3])
    x, w = (x * 1e-3).half().requires_grad_(), w.half().requires_grad_()
    scale = 2.0**14
    got = torch.autograd.grad(tilegrad.linear_cross_entropy(x, w, targets) * scale, (x, w))
    want = torch.autograd.grad(plain(x.double(), w.double(), targets) * scale, (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3 * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(False, 0.0, 0.0, 0.0), *COMBINATIONS])
def test_on_a_gpu_results_are_close_to_the_oracle(
    dtype: torch.dtype, options: tuple[bool, float, float, float]
) -> None:
    """There are rows for several chunks. V is not a multiple of 64, so that the last tile is smaller."""
    bias, terms = options[0], Terms(*options[1:])
    x, w, targets, b = (t if t is None else t.cuda() for t in build(700, 48, 50257, dtype, bias=bias))
    assert x is not None and w is not None and targets is not None
    read = [t.requires_grad_() for t in (x, w, b) if t is not None]
    losses = tilegrad.linear_cross_entropy(
        x, w, targets, bias=b, softcap=terms.softcap or None, label_smoothing=terms.label_smoothing,
        z_loss=terms.z_loss, reduction="none", ignore_index=-1,
    )  # fmt: skip
    g = randn(700, dtype=acc(dtype), seed=5).cuda()
    gradients = torch.autograd.grad(losses, read, g)
    given = (x.detach(), w.detach(), targets, g.double(), None if b is None else b.detach(), terms)
    exact, allowed = reference.exact(*given), reference.bounds(*given)
    got = {"losses": losses.detach() * g, **dict(zip(("dx", "dw", "dbias"), gradients, strict=False))}
    assert_close(got, {name: exact[name] for name in got}, allowed)


@pytest.mark.gpu
def test_a_target_out_of_range_stops_a_gpu() -> None:
    """It runs in its own process, because after an assertion a process cannot use the device."""
    code = (
        "import torch, tilegrad\n"
        "x, w = torch.zeros(2, 8, device='cuda'), torch.zeros(9, 8, device='cuda')\n"
        "tilegrad.linear_cross_entropy(x, w, torch.tensor([1, 9], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "ssert" in done.stderr


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_whole_matrix_of_logits_never_exists(monkeypatch: pytest.MonkeyPatch, reduction: Reduction) -> None:
    """The most bytes in use at one time, counted by torch's profiler, are those of a chunk and of the gradients."""
    from torch.profiler import ProfilerActivity, profile

    n, c, v, chunk = 600, 8, 2000, 1 << 18
    monkeypatch.setitem(torch_ops.CHUNK, "cpu", chunk)
    given = leaves(n, c, v, torch.float32, bias=False)

    def step() -> None:
        tilegrad.linear_cross_entropy(*given[:3], reduction=reduction).sum().backward()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = max(itertools.accumulate(events))
    gradients = 4 * (n * c + v * c)
    assert 0 < most < chunk + 3 * gradients + (1 << 17) < 4 * n * v / 4


def test_errors_of_bad_arguments_say_what_is_accepted() -> None:
    x, w, targets, bias = build(4, 3, 5, torch.float32, bias=True, ignore_index=-100)
    given: dict[str, Any] = {"x": x, "w": w, "targets": targets, "bias": bias}
    for change, error, match in (
        ({"x": x.tolist()}, TypeError, "x: got list; accepted: a tensor"),
        ({"bias": 1.0}, TypeError, "bias: got float; accepted: a tensor"),
        ({"x": x.int()}, ValueError, r"x: got torch.int32, shape \(4, 3\); accepted: \(…, C\), C ≥ 1, of float32"),
        (
            {"x": x[:, :0], "w": w[:, :0]},
            ValueError,
            r"x: got torch.float32, shape \(4, 0\); accepted: \(…, C\), C ≥ 1",
        ),
        ({"x": x.half(), "w": w.half(), "bias": None}, ValueError, "x: got float16 on a CPU; accepted: bfloat16"),
        ({"w": w[:, :2]}, ValueError, r"w: got shape \(5, 2\); accepted: \(V, 3\)"),
        ({"w": w[:0], "bias": None}, ValueError, r"w: got shape \(0, 3\); accepted: \(V, 3\), V ≥ 1"),
        (
            {"w": w.double()},
            ValueError,
            r"w: got torch.float64; accepted: torch.float32, .* \(call .to\(torch.float32\)\)",
        ),
        ({"bias": w[0]}, ValueError, r"bias: got shape \(3,\); accepted: \(5,\)"),
        ({"bias": torch.zeros(5).half()}, ValueError, "bias: got torch.float16; accepted: torch.float32"),
        ({"w": torch.empty(5, 3, device="meta")}, ValueError, "w: got meta; accepted: cpu, where x is"),
        ({"targets": targets[:3]}, ValueError, r"targets: got shape \(3,\); accepted: \(4,\)"),
        ({"targets": targets.int()}, ValueError, r"targets: got torch.int32; accepted: torch.int64 \(call .long\(\)\)"),
        ({"targets": targets.clone().fill_(5)}, ValueError, "targets: got 5; accepted: 0 … 4, or ignore_index = -100"),
        (
            {"targets": targets.clone().fill_(-1)},
            ValueError,
            "targets: got -1; accepted: 0 … 4, or ignore_index = -100",
        ),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0; accepted: None, or a number > 0"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing: got 1.5; accepted: a number from 0 to 1"),
        ({"z_loss": float("nan")}, ValueError, "z_loss: got nan; accepted: a finite number"),
        ({"reduction": "avg"}, ValueError, "reduction: got 'avg'; accepted: 'mean', 'sum', 'none'"),
        ({"ignore_index": None}, TypeError, "ignore_index: got None; accepted: an int"),
        ({"ignore_index": 2**63}, ValueError, f"ignore_index: got {2**63}; accepted: an int of 64 bits"),
    ):
        arguments = given | change
        with pytest.raises(error, match=match):
            tilegrad.linear_cross_entropy(arguments.pop("x"), arguments.pop("w"), arguments.pop("targets"), **arguments)
