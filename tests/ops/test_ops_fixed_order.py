"""Ops of an invariant forward: the bits of a row depend only on that row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import bounds
from support.guard import Guard
from support.interpreter import interpreting
from support.native import needs_library
from support.ops import DTYPES, poisoned, randn
from torch import Tensor

from tilegrad.kernels.activation import (
    ACTIVATION,
    activation_bwd,
    activation_fwd,
    activation_workspace,
    swiglu_bwd,
    swiglu_fwd,
)
from tilegrad.kernels.activation import Problem as ActivationProblem
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.cpu import abi, rows
from tilegrad.kernels.cross_entropy import cross_entropy_fwd, cross_entropy_workspace
from tilegrad.kernels.linear import (
    FEW_ROWS,
    FEW_ROWS_BFLOAT16,
    LINEAR,
    Problem,
    fixed_order,
    linear_fwd,
    linear_workspace,
    per_head_linear_fwd,
    torch_fixed_order,
)
from tilegrad.kernels.norm import layernorm_fwd, norm_workspace, rmsnorm_fwd
from tilegrad.kernels.op import observe
from tilegrad.kernels.rope import rope_fwd, rope_table, rope_workspace

F32, BF16 = torch.float32, torch.bfloat16
KERNELS = [
    *(pytest.param("fixed_order", x, w, marks=needs_library) for x, w in ((F32, F32), (BF16, BF16), (BF16, F32))),
    *(
        pytest.param("torch_fixed_order", x, w)
        for x, w in ((torch.float64,) * 2, (F32, F32), (BF16, BF16), (BF16, F32))
    ),
]
SHAPES = ((101, 37, 50), (67, 129, 5), (61, 1101, 33), (3, 1, 1), (50, 64, 133), (17, 2064, 21))  # (N, Cin, Cout)
SMALL = ((19, 37, 5),)  # for the slow kernel


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product(x: Tensor, w: Tensor, b: Tensor | None, kernel: str | None = None, scale: float = 1.0) -> Tensor:
    y = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=x.dtype)
    shapes = linear_workspace(x, w, backward=False, bias=b is not None, invariant=True, kernel=kernel)
    linear_fwd(x, w, b, y=y, scale=scale, invariant=True, kernel=kernel, scratch=poisoned(shapes))
    return y


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tma", [False, True])
def test_a_product_in_triton_has_the_same_bits_for_any_number_of_rows(
    tma: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to FEW rows, different programs compute the splits of K; above, one program does, with TMA or without. NumPy's
    product of two tiles adds in an order that depends on their sizes, so this test makes the interpreter add in the order
    of K."""
    pytest.importorskip("triton", reason="needs Triton")
    from triton.runtime import interpreter

    from tilegrad.kernels.linear import triton_ops

    def dot_in_order(_builder: object, a: Any, b: Any, c: Any, *_: object) -> Any:
        total = np.zeros_like(c.data)
        for k in range(a.data.shape[1]):
            total += a.data[:, k : k + 1] * b.data[k : k + 1]
        return interpreter.TensorHandle(c.data + total, c.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)
    monkeypatch.setattr(triton_ops, "takes_tma", lambda *_: tma)
    monkeypatch.setattr(triton_ops, "MANY", triton_ops.FEW + 1)
    monkeypatch.setattr(triton_ops, "SPLIT", 768 if splits == 1 else 192)

    k, m = (516, 72) if tma else (515, 70)
    x, w, b = randn(triton_ops.FEW + 7, k, dtype=F32), randn(m, k, dtype=F32, seed=1), randn(m, dtype=F32, seed=2)
    with interpreting():
        found = {n: product(x[:n], w, b, "triton") for n in (1, 3, triton_ops.FEW, triton_ops.FEW + 1, len(x))}
    y = bounds.of(x) @ bounds.of(w).mT + bounds.of(b)
    exact = x.double() @ w.double().T + b.double()
    assert_close({"y": found[len(x)]}, {"y": exact}, bounds.bounds(F32, {"y": y}))
    for n, got in found.items():
        assert torch.equal(got, found[len(x)][:n]), n


def test_tma_is_for_aligned_rows_of_half_precision_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from tilegrad.kernels.linear import triton_ops

    class OnHopper:
        device = SimpleNamespace(type="cuda")

        def __init__(self, x: Tensor) -> None:
            self.x = x

        def __getattr__(self, name: str) -> object:
            return getattr(self.x, name)

    def taken(*tensors: Tensor) -> bool:
        return triton_ops.takes_tma(*map(OnHopper, tensors))  # type: ignore[arg-type]

    monkeypatch.setattr(triton_ops, "capability", lambda _device: (9, 0))
    x = torch.zeros(9, 32, dtype=BF16)
    assert taken(x, x[:, :7], x.half())
    for refused in (
        x.float(),
        x[:0],
        x[:, :0],
        x[:1].expand(9, 32),
        x[:, ::2],
        x[:, 1:],
        torch.zeros(9, 31, dtype=BF16),
    ):
        assert not taken(refused, x) and (refused.dtype == F32 or not taken(x, refused))
    monkeypatch.setattr(triton_ops, "capability", lambda _device: (8, 9))
    assert not taken(x)


def operands(shape: tuple[int, int, int], x_dtype: torch.dtype, w_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The operands; rows of x have gaps."""
    n, k, m = shape
    return randn(n, k + 3, dtype=x_dtype)[:, :k], randn(m, k, dtype=w_dtype), randn(m, dtype=w_dtype, seed=1)


@pytest.mark.parametrize(("kernel", "x_dtype", "w_dtype"), KERNELS)
def test_a_product_in_fixed_order_is_close_to_float64(kernel: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    """If x is bfloat16, a float32 w or b counts as its nearest bfloat16."""
    for shape in SHAPES if kernel == "fixed_order" else SMALL:
        check_close(shape, kernel, x_dtype, w_dtype)


def check_close(shape: tuple[int, int, int], kernel: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    x, w, b = operands(shape, x_dtype, w_dtype)
    short_w, short_b = w.to(x_dtype), b.to(x_dtype)
    for rows_ in (x, x[:1], x[:7]):
        exact = rows_.double() @ short_w.double().t()
        y = bounds.of(rows_) @ bounds.of(short_w).mT
        right = bounds.bounds(x_dtype, {"y": y, "y + b": y + bounds.of(short_b), "2y": y * 2.0})
        got = {
            "y": product(rows_, w, None, kernel),
            "y + b": product(rows_, w, b, kernel),
            "2y": product(rows_, w, None, kernel, scale=2.0),
        }
        assert_close(got, {"y": exact, "y + b": exact + short_b.double(), "2y": 2 * exact}, right)
        assert torch.equal(got["y + b"], product(rows_, short_w, short_b, kernel))


@pytest.mark.parametrize(("kernel", "x_dtype", "w_dtype"), KERNELS)
def test_the_bits_of_a_row_depend_on_that_row_alone(kernel: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for shape in SHAPES if kernel == "fixed_order" else SMALL:
        x, w, b = operands(shape, x_dtype, w_dtype)
        whole = product(x, w, b, kernel)
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for n in {min(n, len(x)) for n in (1, 2, 3, 4, 5, 6, 7, 12, 13, 17, 49, len(x))}:
                first = len(x) - n
                some = product(x[first:], w, b, kernel)
                assert torch.equal(some, whole[first:]), (shape, count, n)


@needs_library
@pytest.mark.parametrize(("field", "wrong"), [("k", -1), ("m", -1), ("n", -1), ("scale", 1e-3)])
def test_canary_a_product_of_other_sizes_is_seen(monkeypatch: pytest.MonkeyPatch, field: str, wrong: float) -> None:
    pack = abi.pack_fixed_order

    def wrongly(*values: Any) -> bytes:
        fields = dict(zip((name for name, *_ in abi.FixedOrder._fields_), values, strict=True))
        return pack(**fields | {field: fields[field] + wrong})

    monkeypatch.setattr(fixed_order, "pack_fixed_order", wrongly)
    with pytest.raises(AssertionError, match="y: "):
        check_close((70, 37, 50), "fixed_order", F32, F32)


@needs_library
def test_canary_torchs_product_is_not_invariant() -> None:
    """This shows that the tests can fail: a BLAS adds the products of one row and of 64 rows in different orders."""
    x, w = randn(64, 768, dtype=F32), randn(768, 768, dtype=F32)
    assert not torch.equal(torch.mm(x[:1], w.t()), torch.mm(x, w.t())[:1])
    assert torch.equal(product(x[:1], w, None), product(x, w, None)[:1])


@pytest.mark.parametrize(("kernel", "x_dtype", "w_dtype"), KERNELS)
def test_products_write_only_y(kernel: str, x_dtype: torch.dtype, w_dtype: torch.dtype) -> None:
    for n in (1, 7, 29):
        x, w, b = operands((n, 45, 31), x_dtype, w_dtype)
        y = torch.zeros(n, 40, dtype=x_dtype)[:, :31]
        scratch = poisoned(linear_workspace(x, w, backward=False, invariant=True, kernel=kernel))
        guard = Guard()
        with observe(guard):
            linear_fwd(x, w, b, y=y, invariant=True, kernel=kernel, scratch=scratch)
        assert guard.calls and torch.equal(y, product(x, w, b, kernel))


@pytest.mark.parametrize(("kernel", "x_dtype", "w_dtype"), KERNELS)
def test_products_may_have_no_rows_or_columns_and_numbers_that_are_not_finite(
    kernel: str, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> None:
    x, w, b = operands((5, 6, 3), x_dtype, w_dtype)
    assert product(x[:0], w, b, kernel).shape == (0, 3)
    assert torch.equal(product(x[:, :0], w[:, :0], b, kernel), b.to(x_dtype).expand(5, 3))
    w[1, 2], w[2, 0] = torch.nan, torch.inf
    y = product(x, w, b, kernel)
    assert bool(y[:, 1].isnan().all()) and bool(y[:, 2].isinf().all()) and bool(y[:, 0].isfinite().all())


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_scratch_of_many_rows_is_enough_for_fewer(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, products: bool
) -> None:
    monkeypatch.setattr("tilegrad.kernels.linear._has_bf16_products", lambda: products)
    w, selected = torch.empty(512, 256, dtype=dtype), set()
    for invariant in (False, True):
        planned = linear_workspace(torch.empty(200, 256, dtype=dtype), w, backward=False, invariant=invariant)
        for n in (1, FEW_ROWS, FEW_ROWS + 1, FEW_ROWS_BFLOAT16, FEW_ROWS_BFLOAT16 + 1):
            x = torch.empty(n, 256, dtype=dtype)
            selected.add(LINEAR.select(Problem(x, w, invariant)).name)
            for name, (shape, kind) in linear_workspace(x, w, backward=False, invariant=invariant).items():
                assert planned[name][1] == kind and math.prod(shape) <= math.prod(planned[name][0]), (n, name)
    assert dtype == F32 or ("bf16" if products else "tiled") in selected


@needs_library
def test_the_table_selects_a_fixed_order_for_invariant_problems_and_for_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.empty(512, 256)
    for n, w_, invariant, backward, want in (
        (64, w, True, False, "fixed_order"), (1, w, True, False, "fixed_order"), (FEW_ROWS, w, False, False, "fixed_order"),
        (FEW_ROWS, w[:9], False, False, None), (FEW_ROWS + 1, w, False, False, None), (FEW_ROWS, w, False, True, None),
        (1, w, False, False, "fixed_order"),
        (64, torch.empty(256, 512).t(), True, False, "torch_fixed_order"),
    ):  # fmt: skip
        found = LINEAR.select(Problem(torch.empty(n, w_.shape[1]), w_, invariant, backward)).name
        assert found == want or (want is None and "fixed_order" not in found), (n, invariant, backward)
    bf16 = Problem(torch.empty(1, 256, dtype=BF16), w)
    assert "fixed_order" not in LINEAR.select(bf16).name  # it would round w, which no other kernel does
    assert LINEAR.select(bf16._replace(w=w.bfloat16())).name == "fixed_order"
    for products, most in ((True, FEW_ROWS), (False, FEW_ROWS_BFLOAT16)):
        monkeypatch.setattr("tilegrad.kernels.linear._has_bf16_products", lambda products=products: products)
        for n in (most, most + 1):
            found = LINEAR.select(Problem(torch.empty(n, 256, dtype=BF16), w.bfloat16())).name
            assert found == ("fixed_order" if n == most else "bf16" if products else "tiled")
    reasons = LINEAR.explain(Problem(torch.empty(64, 256), w, invariant=True)).reasons
    for name in ("native", "torch"):
        assert "depends on the number of rows" in reasons[name] or "OpenBLAS" in reasons[name]
    monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")
    assert LINEAR.select(Problem(torch.empty(64, 256), w, invariant=True)).name == "torch_fixed_order"
    meta = Problem(torch.empty(64, 256, device="meta"), w, invariant=True)
    with pytest.raises(ValueError, match="runs on the CPU, not on meta"):
        LINEAR.select(meta)


@needs_library
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_per_head_products_and_losses_are_invariant(dtype: torch.dtype) -> None:
    x, w, b = randn(40, 3 * 7, dtype=dtype), randn(3, 7, 7, dtype=dtype), randn(3, 7, dtype=dtype)
    scratch = poisoned(linear_workspace(x, w, backward=False, invariant=True))
    y, some = torch.empty_like(x), torch.empty_like(x[:3])
    per_head_linear_fwd(x, w, b, y=y, invariant=True, scratch=scratch)
    per_head_linear_fwd(x[:3], w, b, y=some, invariant=True)
    assert torch.equal(some, y[:3])
    table, targets, one = randn(97, 21, dtype=dtype), torch.arange(40), torch.tensor(1.0)
    losses = []
    for n in (1, 40):
        i = targets.clone()
        i[1:] = -1
        loss = torch.empty(())
        shapes = cross_entropy_workspace(x[:n], table, backward=False, invariant=True)
        cross_entropy_fwd(x[:n], table, i[:n], one, loss=loss, invariant=True, scratch=poisoned(shapes))
        losses.append(loss)
    assert torch.equal(*losses)


@needs_library
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["gelu", "tanh", "relu", "relu2", "swiglu"])
def test_an_activation_has_the_same_bits_at_any_position(kind: str, dtype: torch.dtype) -> None:
    h, up = 3 * randn(40_001, dtype=dtype), randn(40_001, dtype=dtype, seed=1)

    def of(i: slice, *, again: bool = False) -> Tensor:
        h_, up_ = h[i].clone(), up[i].clone()
        a, d = torch.empty_like(h_), torch.ones_like(h_)
        rows = (-1, 7) if len(h_) % 7 == 0 else (-1, 1)
        up_gate, shaped = torch.cat([up_.view(rows), h_.view(rows)], 1), a.view(rows)
        if kind == "swiglu" and again:
            scratch = poisoned(activation_workspace(shaped, "swiglu", sums=False, invariant=True))
            swiglu_bwd(d.view(rows), up_gate, dup_gate=up_gate, a=shaped, invariant=True, scratch=scratch)
        elif kind == "swiglu":
            swiglu_fwd(up_gate, a=shaped, invariant=True)
        elif again:
            activation_bwd(d, h_, kind, dh=d, a=a, invariant=True)
        else:
            activation_fwd(h_, kind, a=a, invariant=True)
        return a

    whole = of(slice(None))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for i in (slice(0, 1), slice(3, 10), slice(1, 19), slice(7, 40_000), slice(0, 33_333)):
            assert torch.equal(of(i), whole[i]) and torch.equal(of(i, again=True), whole[i]), (count, i)
    x, g, ones = h[:5000], up[:5000], torch.ones(5000)
    if kind == "swiglu":
        exact, right = x.double() * torch.sigmoid(x.double()) * g.double(), bounds.swiglu(x, g, ones)
    else:
        right = bounds.activation(kind, x, ones)
        exact = {"tanh": torch.tanh, "relu": torch.relu, "relu2": _relu2}.get(kind, _gelu)(x.double())
    assert_close({"a": whole[:5000]}, {"a": exact}, {"a": right["a"]})


def _gelu(h: Tensor) -> Tensor:
    return torch.nn.functional.gelu(h, approximate="tanh")


def _relu2(h: Tensor) -> Tensor:
    return torch.relu(h).square()


@needs_library
def test_silu_of_large_inputs_agrees_with_float64() -> None:
    gate = torch.tensor([-3e38, -1e4, -88.5, -87.0, -20.0, 0.0, 20.0, 88.5, 1e4, 3e38, torch.nan])
    a = torch.empty_like(gate)
    swiglu_fwd(torch.cat([torch.ones_like(gate), gate])[None], a=a[None], invariant=True)
    exact = (gate.double() * torch.sigmoid(gate.double()))[:-1]
    assert a[-1].isnan() and bool(((a[:-1] - exact).abs() <= 1e-6 * exact.abs() + 1e-36).all())


def test_without_the_library_invariant_activations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")
    for kind in ("gelu", "tanh", "swiglu"):
        with pytest.raises(ValueError, match=r"activation: got a call that no kernel takes: .*with other functions"):
            ACTIVATION.select(ActivationProblem(torch.empty(4), kind, (), invariant=True))
    for kind in ("relu", "relu2"):
        assert ACTIVATION.select(ActivationProblem(torch.empty(4), kind, (), invariant=True)).name == "torch"


@needs_library
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_bits_of_norms_and_rotary_positions_depend_only_on_the_row(dtype: torch.dtype) -> None:
    x, w = randn(300, 45, dtype=dtype), randn(45, dtype=dtype)

    def norms(n: int) -> list[Tensor]:
        scratch = poisoned(norm_workspace(x[:n], backward=False))
        y, z, mean, rstd = torch.empty_like(x[:n]), torch.empty_like(x[:n]), torch.empty(n), torch.empty(n)
        layernorm_fwd(x[:n], w, w, 1e-5, y=y, mean=mean, rstd=rstd, scratch=scratch)
        rmsnorm_fwd(x[:n], w, 1e-5, y=z, rstd=rstd, scratch=scratch)
        return [y, z]

    heads = randn(4, 300, 7, 22, dtype=dtype)
    cos, sin = torch.empty(300, 11), torch.empty(300, 11)
    rope_table(1e4, 22, 300, cos=cos, sin=sin)

    def rotated(b: int, t: int) -> Tensor:
        given = heads[:b, :t].clone(memory_format=torch.contiguous_format)
        rope_fwd(given, cos, sin, y=given, scratch=poisoned(rope_workspace(given)))
        return given

    every, turned = norms(300), rotated(4, 300)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for n in (1, 3, 64, 299):
            assert all(torch.equal(a, b[:n]) for a, b in zip(norms(n), every, strict=True)), (count, n)
            assert torch.equal(rotated(3, n), turned[:3, :n]), (count, n)


def test_without_a_compiler_a_row_is_added_by_halves() -> None:
    """It checks the scratch, and the order of additions for 5 columns: (0 + 4) + 2, then 1 + 3, then their sum."""
    x, w = randn(1, 5, dtype=F32), randn(1, 5, dtype=F32)
    p = (x * w)[0]
    assert torch.equal(product(x, w, None, "torch_fixed_order")[0, 0], ((p[0] + p[4]) + p[2]) + (p[1] + p[3]))
    shapes = torch_fixed_order.workspace(x.bfloat16(), w, bias=True)
    assert shapes["products"] == ((1, 8), F32) and set(shapes) == {"products", "x32", "w16", "w32", "b16", "b32"}
    assert all(dtype in DTYPES for _, dtype in shapes.values())
