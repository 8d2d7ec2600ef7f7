"""Layer norm and RMS norm against autograd."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support import bounds
from support.fused import check_fused_norm
from support.ops import (
    DTYPES,
    RAGGED,
    acc,
    allocated_bytes,
    assert_factors_are_seen,
    assert_rounded,
    assert_true,
    poisoned,
    randn,
)
from torch import Tensor

from tilegrad.kernels.cpu import rows
from tilegrad.kernels.cpu.library import library
from tilegrad.kernels.norm import (
    NORM,
    Gradients,
    cpu,
    layernorm_bwd,
    layernorm_fwd,
    norm_workspace,
    rmsnorm_bwd,
    rmsnorm_fwd,
    torch_ops,
)
from tilegrad.kernels.scratch import Form, Scratch, blocks
from tilegrad.kernels.table import Problem

EPS = 1e-5


@pytest.fixture(autouse=True, params=["native", "torch"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The native library computes rows of float32 and bfloat16; without it torch does."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")
    return str(request.param)


def layernorm(x: Tensor, w: Tensor, b: Tensor | None) -> dict[str, Tensor]:
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPS).rsqrt()
    y = (x - mean) * rstd * w
    return {"y": y if b is None else y + b, "mean": mean[:, 0], "rstd": rstd[:, 0]}


def rmsnorm(x: Tensor, w: Tensor, b: None) -> dict[str, Tensor]:
    assert b is None
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return {"y": x * rstd * w, "rstd": rstd[:, 0]}


def run(inputs: Mapping[str, Any], dy: Tensor, *, rms: bool) -> dict[str, Tensor]:
    x, w, b = inputs["x"], inputs["w"], inputs["b"]
    n, c = x.shape
    forward, backward = (poisoned(norm_workspace(x, backward=backward)) for backward in (False, True))
    out: dict[str, Any] = {
        "y": torch.full((n, c), torch.nan, dtype=x.dtype),
        "rstd": torch.full((n,), torch.nan, dtype=acc(x.dtype)),
    }
    grads: dict[str, Any] = {"dx": torch.zeros(n, c, dtype=x.dtype), "dw": torch.zeros(c, dtype=acc(x.dtype))}
    if rms:
        rmsnorm_fwd(x, w, EPS, **out, scratch=forward)
        rmsnorm_bwd(dy, x, w, out["rstd"], **grads, scratch=backward)
        return out | grads
    out["mean"] = torch.full((n,), torch.nan, dtype=acc(x.dtype))
    if b is not None:
        grads["db"] = torch.zeros(c, dtype=acc(x.dtype))
    layernorm_fwd(x, w, b, EPS, **out, scratch=forward)
    layernorm_bwd(dy, x, w, out["mean"], out["rstd"], **grads, scratch=backward)
    return out | grads


def build(n: int, c: int, dtype: torch.dtype, *, bias: bool) -> tuple[dict[str, Any], Tensor]:
    x = randn(n, 2 * c, dtype=dtype)[:, c:] + 0.5
    b = randn(c, dtype=dtype, seed=2) if bias else None
    return {"x": x, "w": randn(c, dtype=dtype), "b": b}, randn(n, c, dtype=dtype, seed=1)


def assert_right(got: dict[str, Tensor], inputs: dict[str, Any], dy: Tensor, *, rms: bool) -> None:
    allowed = bounds.norm(**inputs, dy=dy, eps=EPS, rms=rms)
    assert_true(got, rmsnorm if rms else layernorm, inputs, {"y": dy}, allowed)


def check(n: int, c: int, dtype: torch.dtype, *, rms: bool, bias: bool) -> None:
    inputs, dy = build(n, c, dtype, bias=bias)
    assert_right(run(inputs, dy, rms=rms), inputs, dy, rms=rms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", RAGGED)
@pytest.mark.parametrize("block", [100, 1 << 16])
def test_norms_agree_with_autograd(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int, block: int) -> None:
    monkeypatch.setitem(torch_ops.BLOCK, "cpu", block)
    for c in (16, 63, 113):
        check(n, c, dtype, rms=True, bias=False)
        check(n, c, dtype, rms=False, bias=True)
    check(n, 48, dtype, rms=False, bias=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rms", "bias"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("block", [100, 1 << 16])
def test_norms_can_add_a_branch_recompute_the_output_and_sum_dx(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rms: bool, bias: bool, block: int
) -> None:
    monkeypatch.setitem(torch_ops.BLOCK, "cpu", block)
    for n, c in ((1, 1), (63, 48), (113, 63)):
        check_fused_norm(n, c, dtype, rms=rms, bias=bias, device="cpu", kernel=None)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_norms_accumulate_and_none_is_not_computed(dtype: torch.dtype, rms: bool) -> None:
    inputs, dy = build(20, 30, dtype, bias=not rms)
    x, w, once = inputs["x"], inputs["w"], run(inputs, dy, rms=rms)
    scratch = poisoned(norm_workspace(x, backward=True))
    for name in ("dx", "dw") if rms else ("dx", "dw", "db"):
        again = once[name].clone()
        one: dict[str, Any] = {name: again}
        if rms:
            rmsnorm_bwd(dy, x, w, once["rstd"], scratch=scratch, **one)
        else:
            layernorm_bwd(dy, x, w, once["mean"], once["rstd"], scratch=scratch, **one)
        assert (again - 2 * once[name]).abs().max() <= 2 * torch.finfo(again.dtype).eps * again.abs().max(), name


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameter_gradients_that_do_not_accumulate_overwrite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rms: bool
) -> None:
    monkeypatch.setitem(torch_ops.BLOCK, "cpu", 100)
    inputs, dy = build(20, 30, dtype, bias=not rms)
    x, w, want = inputs["x"], inputs["w"], run(inputs, dy, rms=rms)
    got: dict[str, Any] = {name: torch.full_like(want[name], torch.nan) for name in ("dw", "db") if name in want}
    scratch, dx = poisoned(norm_workspace(x, backward=True)), want["dx"].clone()
    if rms:
        rmsnorm_bwd(dy, x, w, want["rstd"], dx=dx, **got, accumulate=False, scratch=scratch)
    else:
        layernorm_bwd(dy, x, w, want["mean"], want["rstd"], dx=dx, **got, accumulate=False, scratch=scratch)
    assert all(torch.equal(got[name], want[name]) for name in got)
    assert not torch.equal(dx, want["dx"]), "the residual stream adds all the same"


def test_float32_weights_of_bfloat16_norms_give_the_bits_of_bfloat16_ones() -> None:
    inputs, dy = build(63, 48, torch.bfloat16, bias=True)
    wide = {name: x if name == "x" else x.float() for name, x in inputs.items() if x is not None}
    got, want = run(wide, dy, rms=False), run(inputs, dy, rms=False)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_of_many_rows_agree_with_autograd(dtype: torch.dtype, rms: bool) -> None:
    """Sums over rows are as close as those of torch, which are pairwise."""
    check(4095, 64, dtype, rms=rms, bias=not rms)


@pytest.mark.parametrize("rms", [False, True])
def test_bfloat16_is_rounded_to_the_nearest(rms: bool) -> None:
    inputs, dy = build(63, 77, torch.bfloat16, bias=not rms)
    wide = run({name: None if x is None else x.float() for name, x in inputs.items()}, dy.float(), rms=rms)
    got = run(inputs, dy, rms=rms)
    for name in ("y", "dx"):
        assert_rounded(got[name], wide[name])


def test_a_large_mean_does_not_cancel_digits() -> None:
    inputs, dy = build(63, 48, torch.float32, bias=True)
    inputs["x"] = inputs["x"] + 1000.0
    assert_right(run(inputs, dy, rms=False), inputs, dy, rms=False)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_norms_are_the_same_with_1_2_and_4_threads(rms: bool, dtype: torch.dtype) -> None:
    inputs, dy = build(113, 63, dtype, bias=not rms)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(run(inputs, dy, rms=rms))
    finally:
        torch.set_num_threads(before)
    first, *others = results
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_columns_with_gaps_are_an_error() -> None:
    inputs, dy = build(20, 30, torch.float32, bias=True)
    inputs["x"] = randn(30, 20, dtype=torch.float32).t()
    with pytest.raises(ValueError, match=r"x: got strides \(1, 20\); accepted: any with the last one 1"):
        run(inputs, dy, rms=False)
    inputs, dy = build(20, 30, torch.float32, bias=False)
    x, w, rstd = inputs["x"], inputs["w"], torch.ones(20)
    with pytest.raises(ValueError, match=r"dw: got strides \(2,\)"):
        rmsnorm_bwd(dy, x, w, rstd, dw=torch.zeros(30, 2)[:, 0], scratch=poisoned(norm_workspace(x, backward=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
def test_norms_allocate_no_memory(dtype: torch.dtype, rms: bool) -> None:
    inputs, dy = build(300, 96, dtype, bias=not rms)
    x, w, b = inputs["x"], inputs["w"], inputs["b"]
    out = run(inputs, dy, rms=rms)
    scratch = poisoned(norm_workspace(x, backward=False) | norm_workspace(x, backward=True))

    def call() -> None:
        if rms:
            rmsnorm_fwd(x, w, EPS, y=out["y"], rstd=out["rstd"], scratch=scratch)
            rmsnorm_bwd(dy, x, w, out["rstd"], dx=out["dx"], dw=out["dw"], scratch=scratch)
        else:
            layernorm_fwd(x, w, b, EPS, y=out["y"], mean=out["mean"], rstd=out["rstd"], scratch=scratch)
            layernorm_bwd(dy, x, w, out["mean"], out["rstd"], dx=out["dx"], dw=out["dw"], db=out["db"], scratch=scratch)

    assert allocated_bytes(call) <= 1024


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_canary_a_forgotten_block_of_rows_is_seen(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rms: bool
) -> None:
    right, native = blocks, cpu.bwd

    def but_the_last(dy: Tensor, x: Tensor, *others: Any, out: Gradients, scratch: Scratch) -> None:
        assert out.dx is not None
        native(dy[:-1], x[:-1], *others, out=out._replace(dx=out.dx[:-1]), scratch=scratch)

    monkeypatch.setitem(torch_ops.BLOCK, "cpu", 480)
    check(63, 48, dtype, rms=rms, bias=False)
    inputs, dy = build(63, 48, dtype, bias=False)
    want = run(inputs, dy, rms=rms)
    monkeypatch.setattr(torch_ops, "blocks", lambda n, size: list(right(n, size))[:-1])
    monkeypatch.setattr(cpu, "bwd", but_the_last)
    got = run(inputs, dy, rms=rms)
    for name in ("dx", "dw"):
        assert_right({name: want[name]}, inputs, dy, rms=rms)
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_right({name: got[name]}, inputs, dy, rms=rms)


@pytest.mark.parametrize("rms", [False, True])
def test_canary_a_factor_in_bfloat16_is_seen(rms: bool) -> None:
    inputs, dy = build(113, 96, torch.bfloat16, bias=not rms)
    got = run(inputs, dy, rms=rms)
    assert_factors_are_seen(got, functools.partial(assert_right, inputs=inputs, dy=dy, rms=rms), 1.005, 1.0001)


def test_errors_of_norms_say_what_is_accepted() -> None:
    x, w, each = randn(4, 6), randn(6), randn(4)
    for fn, match in (
        (lambda: layernorm_fwd(x, w, None, 0.0, y=x, mean=each, rstd=each), "eps: got 0.0; accepted: a number > 0"),
        (lambda: rmsnorm_fwd(x, randn(5), EPS, y=x, rstd=each), r"w: got .*\(5,\).*accepted: .*\(6,\)"),
        (lambda: rmsnorm_fwd(x, w, EPS, y=x, rstd=each.float()), "rstd: got .*float32.*accepted: .*float64"),
        (lambda: rmsnorm_bwd(x, x, w, each, dx=x.clone()), "scratch: norm got no 'torch.centred'"),
        (lambda: rmsnorm_bwd(x, x, w, each, dx=x.clone(), dw=randn(7)), r"dw: got .*\(7,\)"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()


def test_a_named_kernel_of_a_norm_runs_or_raises() -> None:
    x, w, rstd = randn(4, 6, dtype=torch.float32), randn(6, dtype=torch.float32), torch.empty(4)
    results = []
    for name in (NORM.select(Problem(x)).name, "torch"):
        y = torch.full_like(x, torch.nan)
        rmsnorm_fwd(
            x, w, EPS, y=y, rstd=rstd, kernel=name, scratch=poisoned(norm_workspace(x, backward=False, kernel=name))
        )
        results.append(y)
    assert torch.allclose(results[1], rmsnorm(x, w, None)["y"], rtol=1e-6)
    assert torch.allclose(results[0], results[1], rtol=1e-6)
    assert norm_workspace(x, backward=True, kernel="torch").keys() >= {"torch.centred", "torch.sum"}
    x, w, rstd = x.double(), w.double(), rstd.double()
    with pytest.raises(ValueError, match=r"got 'native', which can't run this call: .*accepted: 'torch'"):
        rmsnorm_fwd(x, w, EPS, y=x.clone(), rstd=rstd, kernel="native")
    told = NORM.explain(Problem(x))
    assert told.kernel == "torch" and told.reasons["torch"].startswith("runs: the first")


@pytest.mark.usefixtures("on_hopper")
def test_the_table_selects_native_norms_for_float32_and_bfloat16(where: str) -> None:
    for dtype in DTYPES:
        native = where == "native" and dtype != torch.float64 and not isinstance(library(), str)
        assert NORM.select(Problem(randn(4, 6, dtype=dtype))).name == ("native" if native else "torch")
    if where == "native":
        on_cuda = Problem(Form((4, 6), torch.float32, torch.device("cuda")))
        assert NORM.explain(on_cuda).reasons["native"] == "runs on the CPU, not on cuda"
