"""Checks of the fused ops: they have the bits of their pieces, and column sums of their outputs obey the closeness rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegrad.kernels.activation import activation_bwd, activation_fwd, activation_workspace, swiglu_bwd, swiglu_fwd
from tilegrad.kernels.closeness import assert_close
from tilegrad.kernels.norm import (
    layernorm_bwd,
    layernorm_fwd,
    norm_workspace,
    rmsnorm_bwd,
    rmsnorm_fwd,
)

from . import bounds
from .ops import acc, poisoned, randn

EPS = 1e-5


def assert_column_sums(got: dict[str, Tensor], summed: dict[str, Tensor]) -> None:
    """Each tensor in `got` is the sum over rows of the tensor with its name in `summed`."""
    for name, x in summed.items():
        allowed = bounds.bounds(x.dtype, {name: bounds.of(x).sum(0)})
        assert_close({name: got[name]}, {name: x.double().sum(0)}, allowed)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compares bits; on a device, whose compiler may fuse products and sums, up to a rounding."""
    for name, x in want.items():
        if x.device.type == "cpu":
            assert torch.equal(got[name], x), name
        else:
            a, z = torch.finfo(acc(x.dtype)).eps, torch.finfo(x.dtype).eps
            torch.testing.assert_close(got[name], x, rtol=2 * z, atol=64 * a * float(x.abs().max()), msg=name)


def check_fused_norm(
    n: int, c: int, dtype: torch.dtype, *, rms: bool, bias: bool, device: str, kernel: str | None
) -> None:
    """Rows of inputs have gaps. The branch is added, the output is written again over dy, and dx is added up."""
    x, f, dy = (randn(n, 2 * c, dtype=dtype, seed=seed).to(device)[:, c:] for seed in (0, 1, 2))
    w, b = randn(c, dtype=dtype, seed=3).to(device), randn(c, dtype=dtype, seed=4).to(device) if bias else None
    forward, backward = (spoiled(norm_workspace(x, backward=which, kernel=kernel), x) for which in (False, True))

    def out(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=kind, device=device)

    def fwd(x: Tensor, f: Any, **joined: Any) -> dict[str, Any]:
        got: dict[str, Any] = {"y": out((n, c), dtype), "rstd": out((n,), acc(dtype))}
        options: dict[str, Any] = {"scratch": forward, "kernel": kernel}
        if rms:
            rmsnorm_fwd(x, w, EPS, f, **got, **joined, **options)
        else:
            got["mean"] = out((n,), acc(dtype))
            layernorm_fwd(x, w, b, EPS, f, **got, **joined, **options)
        return got

    x1 = out((n, c), dtype)
    got, want = fwd(x, f, x1=x1), fwd(x + f, None)
    assert torch.equal(x1, x + f)
    assert_same(got, want)
    in_place = x.clone()
    again = fwd(in_place, f, x1=in_place)
    assert torch.equal(in_place, x1)
    assert_same({"y": again["y"]}, {"y": got["y"]})

    def bwd(dy: Tensor, **more: Any) -> dict[str, Any]:
        grads: dict[str, Any] = {"dx": x.clone(), "dw": out((c,), acc(dtype))}
        options: dict[str, Any] = {"accumulate": False, "scratch": backward, "kernel": kernel}
        if rms:
            rmsnorm_bwd(dy, x1, w, got["rstd"], **grads, **more, **options)
            return grads
        if bias:
            grads["db"] = out((c,), acc(dtype))
        layernorm_bwd(dy, x1, w, got["mean"], got["rstd"], b, **grads, **more, **options)
        return grads

    plain, over, dx_sum = bwd(dy), dy.clone(), out((c,), acc(dtype))
    fused = bwd(over, y=over, dx_sum=dx_sum)
    assert_same(fused | {"y": over}, plain | {"y": got["y"]})
    assert_column_sums({"dx_sum": dx_sum}, {"dx_sum": fused["dx"]})


def check_fused_activation(kind: str, n: int, c: int, dtype: torch.dtype, *, device: str, kernel: str | None) -> None:
    """SwiGLU's output is written over da and its gradients over up and gate; else the output over h, the gradient over da."""
    h, up, da = (3 * randn(n, c, dtype=dtype, seed=seed).to(device) for seed in (0, 1, 2))
    scratch = spoiled(activation_workspace(h, kind, kernel=kernel), h)

    def out(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=kind, device=device)

    plain: dict[str, Any]
    fused: dict[str, Any]
    sums: dict[str, Any]
    a, over, again = out(n, c), da.clone(), h.clone()
    if kind == "swiglu":
        up_gate = torch.cat([up, h], 1)
        in_place = up_gate.clone()
        plain, fused = {"dup_gate": out(n, 2 * c)}, {"dup_gate": in_place}
        sums = {"dup_gate_sum": out(2 * c, kind=acc(dtype))}
        swiglu_fwd(up_gate, a=a, kernel=kernel)
        swiglu_bwd(da, up_gate, **plain, scratch=scratch, kernel=kernel)
        again = over
        swiglu_bwd(over, in_place, **fused, a=again, **sums, accumulate=False, scratch=scratch, kernel=kernel)
    else:
        plain, fused, sums = {"dh": out(n, c)}, {"dh": over}, {"dh_sum": out(c, kind=acc(dtype))}
        activation_fwd(h, kind, a=a, kernel=kernel)
        activation_bwd(da, h, kind, **plain, kernel=kernel)
        activation_bwd(over, again, kind, **fused, a=again, **sums, accumulate=False, scratch=scratch, kernel=kernel)
    assert_same(fused | {"a": again}, plain | {"a": a})
    assert_column_sums(sums, {f"{name}_sum": x for name, x in plain.items()})
    if kind != "swiglu":
        before = sums["dh_sum"].clone()
        activation_bwd(da, h, kind, dh=out(n, c), dh_sum=sums["dh_sum"], scratch=scratch, kernel=kernel)
        assert_same({"dh_sum": sums["dh_sum"]}, {"dh_sum": 2 * before})


def spoiled(shapes: Any, x: Tensor) -> dict[str, Tensor]:
    return {name: buffer.to(x.device) for name, buffer in poisoned(shapes).items()}
