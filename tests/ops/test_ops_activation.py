"""Elementwise ops against autograd: activations, rotary positions, residual sums and dropout."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import bounds
from support.fused import check_fused_activation
from support.ops import (
    DTYPES,
    acc,
    allocated_bytes,
    assert_factors_are_seen,
    assert_rounded,
    assert_true,
    poisoned,
    randn,
)
from torch import Tensor

from tilegrad.kernels import activation, gpu
from tilegrad.kernels.activation import (
    ACTIVATION,
    KINDS,
    Problem,
    activation_bwd,
    activation_fwd,
    activation_workspace,
    swiglu_bwd,
    swiglu_fwd,
)
from tilegrad.kernels.activation import torch_ops as activation_torch_ops
from tilegrad.kernels.cpu import rows
from tilegrad.kernels.cpu.library import library
from tilegrad.kernels.dropout import dropout_fwd, dropout_workspace
from tilegrad.kernels.dropout import torch_ops as dropout_torch_ops
from tilegrad.kernels.residual import add_fwd, copy_fwd, zero_fwd
from tilegrad.kernels.rope import rope_bwd, rope_fwd, rope_table, rope_workspace
from tilegrad.kernels.rope import torch_ops as rope_torch_ops

FORMULAS = {
    "gelu": lambda h: {"a": 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))},
    "tanh": lambda h: {"a": torch.tanh(h)},
    "relu": lambda h: {"a": torch.relu(h)},
    "relu2": lambda h: {"a": torch.relu(h).square()},
}


def swiglu(gate: Tensor, up: Tensor) -> dict[str, Tensor]:
    return {"a": gate * torch.sigmoid(gate) * up}


@pytest.fixture(params=["native", "torch"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library computes gelu and relu2 of contiguous float32; without it torch does."""
    if request.param == "torch":
        monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")


def run(kind: str, h: Tensor, da: Tensor) -> dict[str, Tensor]:
    a, dh = torch.full_like(h, torch.nan), torch.full_like(h, torch.nan)
    activation_fwd(h, kind, a=a)
    activation_bwd(da, h, kind, dh=dh)
    return {"a": a, "dh": dh}


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_agree_with_autograd(kind: str, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (63, 5), (113, 64)):
        h, da = 3 * randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
        got = run(kind, h, da)
        assert_true(got, FORMULAS[kind], {"h": h}, {"a": da}, bounds.activation(kind, h, da))
        in_place = da.clone()
        activation_bwd(in_place, h, kind, dh=in_place)
        assert torch.equal(in_place, got["dh"])


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "swiglu"])
def test_the_backward_can_recompute_the_output_and_sum_gradients(kind: str, dtype: torch.dtype) -> None:
    for n, c in ((1, 1), (63, 48), (113, 63)):
        check_fused_activation(kind, n, c, dtype, device="cpu", kernel=None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_large_inputs_saturate_without_nan(kind: str, dtype: torch.dtype) -> None:
    h = torch.tensor([-1e4, -200.0, -45.0, 0.0, 45.0, 200.0, 1e4], dtype=dtype)
    got = run(kind, h, torch.ones_like(h))
    right = {"tanh": [0.0] * 3, "relu2": (2 * h[4:]).tolist()}.get(kind, [1.0] * 3)
    far = [0.0, 0.0, 0.0, None, *right]
    for x, want in zip(got["dh"].tolist(), far, strict=True):
        assert want is None or abs(x - want) < 1e-30


@pytest.mark.usefixtures("where")
def test_gelu_of_large_negative_inputs_is_zero() -> None:
    h = torch.tensor([-3e38, -1e36, -1e19, -50.0])
    a = torch.empty_like(h)
    activation_fwd(h, "gelu", a=a)
    assert a.abs().max() < 1e-30


def test_gelu_of_bfloat16_is_rounded_to_the_nearest() -> None:
    h, da = 3 * randn(63, 37, dtype=torch.bfloat16), randn(63, 37, dtype=torch.bfloat16, seed=1)
    if isinstance(library(), str):
        pytest.skip("without the native library gelu is torch's own")
    h[0, :2] = torch.nan
    wide = run("gelu", h.float(), da.float())
    for name, x in run("gelu", h, da).items():
        assert bool(x[0, :2].isnan().all())
        assert_rounded(x, wide[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_agrees_with_autograd(dtype: torch.dtype) -> None:
    for shape in ((1, 1), (63, 5), (113, 64)):
        up_gate, da = 3 * randn(shape[0], 2 * shape[1], dtype=dtype), randn(*shape, dtype=dtype, seed=1)
        a, dup_gate = (torch.full_like(x, torch.nan) for x in (da, up_gate))
        scratch = poisoned(activation_workspace(da, "swiglu", sums=False))
        swiglu_fwd(up_gate, a=a)
        swiglu_bwd(da, up_gate, dup_gate=dup_gate, scratch=scratch)
        (up, gate), (dup, dgate) = up_gate.chunk(2, 1), dup_gate.chunk(2, 1)
        out = {"a": a, "dup": dup, "dgate": dgate}
        assert_true(out, swiglu, {"gate": gate, "up": up}, {"a": da}, bounds.swiglu(gate, up, da))
        again, in_place = da.clone(), up_gate.clone()
        swiglu_bwd(again, in_place, dup_gate=in_place, a=again, scratch=scratch)
        assert torch.equal(in_place, dup_gate) and torch.equal(again, a)


def test_swiglu_in_blocks_of_rows_agrees_with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_torch_ops, "BLOCK", {"cpu": 64})
    test_swiglu_agrees_with_autograd(torch.float32)


@pytest.mark.parametrize(
    ("shape", "a", "error"),
    [
        ((3, 5), (3, 2), "up_gate: got shape (3, 5)"),
        ((3, 4), (3, 4), "a: got"),
        ((3, 4), None, "a: got strides (1, 3); accepted: a contiguous tensor"),
    ],
)
def test_swiglu_refuses_wrong_shapes(shape: tuple[int, int], a: tuple[int, int] | None, error: str) -> None:
    out = torch.empty(2, 3).t() if a is None else torch.empty(a)
    with pytest.raises(ValueError, match=re.escape(error)):
        swiglu_fwd(torch.empty(shape), a=out)


def tables(theta: float, d: int, t: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = torch.empty(t, d // 2, dtype=dtype), torch.empty(t, d // 2, dtype=dtype)
    rope_table(theta, d, t, cos=cos, sin=sin)
    return cos, sin


def rotate_half(x: Tensor) -> dict[str, Tensor]:
    """Llama's formula: x cos + rotate_half(x) sin, with cos and sin repeated for both halves."""
    t, d = x.shape[1], x.shape[3]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angle = torch.arange(t, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), -1)[:, None]
    rotated = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    return {"y": x * angle.cos().to(x.dtype) + rotated * angle.sin().to(x.dtype)}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [300, 1 << 16])
def test_rope_equals_the_formula_of_llama(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, block: int) -> None:
    if gpu.interpreting() and block > 300:
        pytest.skip("Triton's kernel has no such blocks")
    monkeypatch.setitem(rope_torch_ops.BLOCK, "cpu", block)
    some, many = (5, 9) if gpu.interpreting() else (23, 63)  # a program of Triton's kernel has one token
    for b, t, h, d in ((1, 1, 1, 2), (2, some, 3, 10), (1, many, 2, 64)):
        fused = randn(b, t, 3 * h * d, dtype=dtype)
        x, dy = fused[..., h * d : 2 * h * d].view(b, t, h, d), randn(b, t, h, d, dtype=dtype, seed=1)
        cos, sin = tables(10000.0, d, t + 3, acc(dtype))
        y, dx = torch.full_like(dy, torch.nan), torch.full_like(dy, torch.nan)
        scratch = poisoned(rope_workspace(x))
        rope_fwd(x, cos, sin, y=y, scratch=scratch)
        rope_bwd(dy, cos, sin, dx=dx, scratch=scratch)
        assert_true({"y": y, "dx": dx}, rotate_half, {"x": x}, {"y": dy}, bounds.rope(x, dy))
        rope_fwd(x, cos, sin, y=x, scratch=scratch)
        rope_bwd(dy, cos, sin, dx=dy, scratch=scratch)
        assert torch.equal(x, y) and torch.equal(dy, dx)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_of_packed_rows_equals_that_of_each_document(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(rope_torch_ops.BLOCK, "cpu", 300)
    b, t, h, d, ends = 2, 12, 3, 10, [0, 1, 5, 12, 21, 24]
    x, positions = (
        randn(b, t, h, d, dtype=dtype),
        torch.cat([torch.arange(z - a) for a, z in pairwise(ends)]).view(b, t),
    )
    cos, sin = tables(10000.0, d, t, acc(dtype))
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    scratch = poisoned(rope_workspace(x, packed=True))
    rope_fwd(x, cos, sin, positions, y=y, scratch=scratch)
    rope_bwd(x, cos, sin, positions, dx=dx, scratch=scratch)
    for a, z in pairwise(ends):
        one, want = x.flatten(0, 1)[a:z][None], torch.empty(1, z - a, h, d, dtype=dtype)
        rope_fwd(one, cos, sin, y=want, scratch=scratch)
        assert torch.equal(y.flatten(0, 1)[a:z], want[0])
        rope_bwd(one, cos, sin, dx=want, scratch=scratch)
        assert torch.equal(dx.flatten(0, 1)[a:z], want[0])


def test_bad_positions_are_refused() -> None:
    x, (cos, sin) = randn(2, 3, 1, 4), tables(10000.0, 4, 3, torch.float64)
    for positions, message in (
        (torch.zeros(2, 3, dtype=torch.int32), r"positions: got torch.int32 \(2, 3\)"),
        (torch.zeros(6, dtype=torch.int64), r"positions: got torch.int64 \(6,\).*accepted: torch.int64 \(2, 3\)"),
        (torch.zeros(3, 2, dtype=torch.int64).t(), "positions: got strides"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_fwd(x, cos, sin, positions, y=x)


def test_add_copy_and_zero_give_their_results() -> None:
    x, f = randn(5, 7), randn(5, 7, seed=1)
    want = x + f
    add_fwd(x, f, y=x)
    assert torch.equal(x, want)
    half = torch.empty(7, 5, dtype=torch.bfloat16).t()
    copy_fwd(x, y=half)
    assert torch.equal(half, want.to(torch.bfloat16))
    zero_fwd(x=x)
    assert not x.any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_uses_the_shared_mask(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from tilegrad.kernels.philox import philox, round_keys, threshold

    n, c, p, seed, layer = 63, 113, 0.3, 2**40 + 5, 7
    counter = [
        torch.arange(c).expand(n, c).clone(), torch.arange(n)[:, None].expand(n, c).clone(),
        torch.full((n, c), layer), torch.full((n, c), 0xFFFFFFFF),
    ]  # fmt: skip
    philox(counter, round_keys(seed), (torch.empty(n, c, dtype=torch.int64), torch.empty(n, c, dtype=torch.int64)))
    kept = counter[0] >= threshold(p)
    assert 0.68 < kept.double().mean() < 0.72
    kept = kept[:9] if gpu.interpreting() else kept  # a program of Triton's kernel has one row
    x = randn(*kept.shape, dtype=dtype)
    for block in (100,) if gpu.interpreting() else (100, 1 << 15):  # Triton's kernel does not use these blocks
        monkeypatch.setitem(dropout_torch_ops.BLOCK, "cpu", block)
        scratch = poisoned(dropout_workspace(x))
        y, dx = torch.full_like(x, torch.nan), x.clone()
        dropout_fwd(x, seed, p, layer, y=y, scratch=scratch)
        dropout_fwd(dx, torch.tensor(seed), p, layer, y=dx, scratch=scratch)
        assert torch.equal(y, torch.where(kept, x * (1 / (1 - p)), 0.0).to(dtype)) and torch.equal(dx, y)
    other = torch.empty_like(x)
    dropout_fwd(x, seed, p, layer + 1, y=other, scratch=scratch)
    assert not torch.equal(other, y)
    dropout_fwd(x, seed, 0.0, layer, y=other)
    assert torch.equal(other, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_ops_allocate_no_memory(dtype: torch.dtype) -> None:
    x, da, a, b = (randn(64, 128, dtype=dtype, seed=i) for i in range(4))
    cos, sin = tables(10000.0, 32, 64, acc(dtype))
    heads, rotated = x.view(1, 64, 4, 32), a.view(1, 64, 4, 32)
    scratch = poisoned(rope_workspace(heads) | dropout_workspace(x))
    half = da[:, :64].contiguous()
    gated = poisoned(activation_workspace(half, "swiglu", sums=False))

    def call() -> None:
        for kind in KINDS:
            activation_fwd(x, kind, a=a)
            activation_bwd(da, x, kind, dh=a)
        swiglu_fwd(x, a=half)
        swiglu_bwd(half, x, dup_gate=b, a=half, scratch=gated)
        add_fwd(x, da, y=a)
        copy_fwd(x, y=a)
        zero_fwd(x=a)
        rope_fwd(heads, cos, sin, y=rotated, scratch=scratch)
        rope_bwd(heads, cos, sin, dx=rotated, scratch=scratch)
        dropout_fwd(x, 5, 0.1, 0, y=a, scratch=scratch)

    assert allocated_bytes(call) <= 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_canary_one_wrong_element_is_seen(dtype: torch.dtype) -> None:
    h, da = randn(63, 5, dtype=dtype), randn(63, 5, dtype=dtype, seed=1)
    for kind in KINDS:
        for name in ("a", "dh"):
            got = run(kind, h, da)
            got[name][62, 4] += 0.2
            with pytest.raises(AssertionError, match=f"{name}: "):
                assert_true(got, FORMULAS[kind], {"h": h}, {"a": da}, bounds.activation(kind, h, da))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("kind", [*KINDS, "swiglu"])
def test_canary_a_factor_in_bfloat16_is_seen(kind: str) -> None:
    """gelu and tanh saturate at ±1 or h for many numbers, all of which a factor changes equally."""
    h, up, da = (randn(113, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    given: Any
    if kind == "swiglu":
        up_gate, a = torch.cat([up, h], 1), torch.empty_like(h)
        dup_gate = torch.empty_like(up_gate)
        swiglu_fwd(up_gate, a=a)
        swiglu_bwd(da, up_gate, dup_gate=dup_gate, scratch=poisoned(activation_workspace(h, "swiglu", sums=False)))
        dup, dgate = dup_gate.chunk(2, 1)
        got = {"a": a, "dgate": dgate, "dup": dup}
        given = (swiglu, {"gate": h, "up": up}, {"a": da}, bounds.swiglu(h, up, da))
    else:
        got, given = run(kind, h, da), (FORMULAS[kind], {"h": h}, {"a": da}, bounds.activation(kind, h, da))
    assert_factors_are_seen(got, lambda tensors: assert_true(tensors, *given), 1.005)


@pytest.mark.usefixtures("kernels")
def test_canary_a_factor_of_a_rotation_is_seen() -> None:
    x, dy = (randn(1, 63, 2, 32, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    cos, sin = tables(10000.0, 32, 63, torch.float32)
    y, dx, scratch = torch.empty_like(x), torch.empty_like(x), poisoned(rope_workspace(x))
    rope_fwd(x, cos, sin, y=y, scratch=scratch)
    rope_bwd(dy, cos, sin, dx=dx, scratch=scratch)
    given = (rotate_half, {"x": x}, {"y": dy}, bounds.rope(x, dy))
    assert_factors_are_seen({"y": y, "dx": dx}, lambda tensors: assert_true(tensors, *given), 1.005)


def test_canary_a_rope_that_rotates_neighbours_is_seen() -> None:
    x, dy = randn(1, 9, 1, 8), randn(1, 9, 1, 8, seed=1)
    cos, sin = tables(10000.0, 8, 9, torch.float64)
    y, order = torch.empty_like(x), [0, 2, 4, 6, 1, 3, 5, 7]
    rope_fwd(x[..., order].contiguous(), cos, sin, y=y, scratch=poisoned(rope_workspace(x)))
    with pytest.raises(AssertionError, match="y: "):
        assert_true({"y": y}, rotate_half, {"x": x}, {"y": dy}, bounds.rope(x, dy))


def test_errors_of_elementwise_ops_say_what_is_accepted() -> None:
    x, odd = randn(4, 6), randn(1, 2, 1, 3)
    cos = torch.empty(1, 1)
    for fn, match in (
        (lambda: activation_fwd(x, "swish", a=x), "kind: got 'swish'; accepted: one of 'gelu', 'tanh', 'relu'"),
        (lambda: activation_bwd(x, x, "gelu", dh=randn(4, 5)), r"dh: got .*accepted: .*\(4, 6\)"),
        (lambda: swiglu_fwd(x, a=x), r"a: got .*accepted: .*\(4, 3\)"),
        (lambda: add_fwd(x, x.float(), y=x), "f: got .*float32.*accepted: .*float64"),
        (lambda: dropout_fwd(x, 0, 1.0, 0, y=x), "dropout_p: got 1.0; accepted: a number p, 0 ≤ p < 1"),
        (lambda: dropout_fwd(x, 0, 0.5, -1, y=x), "layer_counter: got -1"),
        (lambda: dropout_fwd(x, 0, 0.5, 0, y=x), "scratch: dropout got no 'torch.index'"),
        (lambda: rope_fwd(odd, cos, cos, y=odd), "x: got .*accepted: an even head dimension"),
        (lambda: rope_table(0.0, 4, 1, cos=cos, sin=cos), "theta: got 0.0"),
        (lambda: rope_table(1e4, 3, 1, cos=cos, sin=cos), "d: got 3; accepted: an even head dimension"),
        (lambda: rope_fwd(randn(1, 2, 1, 2), cos.double(), cos.double(), y=randn(1, 2, 1, 2)), r"cos: got .*\(2, 1\)"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()
    assert activation.KINDS == KINDS


def test_contiguous_gelu_and_relu2_are_native_and_a_named_kernel_runs_or_raises() -> None:
    h = randn(4, 6, dtype=torch.float32)
    if isinstance(library(), str):
        pytest.skip("there is no native library")
    assert [ACTIVATION.select(Problem(h, kind, (h,))).name for kind in KINDS] == ["native", "torch", "torch", "native"]
    assert ACTIVATION.select(Problem(h, "gelu", (h.t().contiguous().t(),))).name == "torch"
    for kind, x, why in (
        ("relu", h, "has gelu, relu2 and, for invariant problems, tanh and swiglu, not relu"),
        ("gelu", h.t(), "takes contiguous tensors"),
        ("gelu", h.double(), "takes float32 and bfloat16, not float64"),
    ):
        with pytest.raises(ValueError, match=f"got 'native', which can't run this call: {why}; accepted: 'torch'"):
            activation_fwd(x, kind, a=torch.empty_like(x), kernel="native")
    with pytest.raises(
        ValueError,
        match="can't run this call: has gelu, relu2 and, for invariant problems, tanh and swiglu, not swiglu",
    ):
        swiglu_fwd(h, a=torch.empty(4, 3), kernel="native")
    a, b = torch.empty_like(h), torch.empty_like(h)
    activation_fwd(h, "gelu", a=a, kernel="native")
    activation_fwd(h, "gelu", a=b, kernel="torch")
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
