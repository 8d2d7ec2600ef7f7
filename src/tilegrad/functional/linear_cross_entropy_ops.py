"""The ops of `linear_cross_entropy`, registered with torch. The logits of all rows never exist at the same time.

    reduction       forward                                        backward                        saved for the backward
    "mean", "sum"   loss, dx, dw, dbias in one pass: 3 products    a multiplication by g m         dx (N, C), dw (V, C), dbias
    "none"          the losses: 1 product                          logits, dx, dw: 3 products      x

g is the gradient of the loss. With "mean" and "sum" g is one number, so the backward only multiplies finished gradients.
For a mean over n rows the forward multiplies by 2ᵏ = 2^⌊log₂ 1/n⌋, the backward by g and by m = 2⁻ᵏ / n. If the forward
multiplied by 1 / n, the gradient (p − 1) / n of the logit of a target with probability p ≈ 0 would be about −1 / n. Rounding
this number to bfloat16 would scale the gradients of all such rows by up to 1 ± 2⁻⁸; −2ᵏ is exact.

With "none", dw is a sum over rows with a different factor g for each row, so the backward computes the logits again. With
float16 the backward always does this, because gradients would underflow in a forward that does not know the loss scale. dw and
dbias are accumulated in float32 (float64 for float64), multiplied by g, and rounded once. w, bias and targets are saved too,
but these are the caller's tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_workspace
from ..kernels.cross_entropy.terms import Terms
from ..kernels.scratch import accumulation_dtype, new_scratch
from .differentiable import batching_rule, register

_OPTIONS = "float softcap, float label_smoothing, float z_loss, str reduction, int ignore_index, ScalarType dtype"
_library = torch.library.Library("tilegrad", "FRAGMENT")
_library.define(
    f"linear_cross_entropy_fwd(Tensor x, Tensor w, Tensor targets, Tensor? bias, {_OPTIONS}, bool[] wanted) "
    "-> (Tensor loss, Tensor dx, Tensor dw, Tensor dbias)"
)
_library.define(
    "linear_cross_entropy_bwd(Tensor g, Tensor? x, Tensor w, Tensor targets, Tensor? bias, Tensor dx, Tensor dw, "
    f"Tensor dbias, {_OPTIONS}, bool[] wanted) -> (Tensor dx, Tensor dw, Tensor dbias)"
)


def _forward(
    x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None, softcap: float, label_smoothing: float, z_loss: float,
    reduction: str, ignore_index: int, dtype: torch.dtype, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    loss, *gradients = _new_outputs(x, w, targets, bias, reduction, dtype, wanted)
    dx, dw, dbias = (y if want else None for y, want in zip(gradients, wanted, strict=True))
    terms = Terms(softcap, label_smoothing, z_loss)
    with torch.autocast(x.device.type, enabled=False):
        x_cast, w_cast, bias_cast = _cast(x, dtype), _cast(w, dtype), None if bias is None else _cast(bias, dtype)
        checked_targets, scale = _targets_and_scale(targets, ignore_index, w.shape[0], reduction, loss.dtype)
        reads = x_cast, w_cast, checked_targets, scale, bias_cast
        shapes = cross_entropy_workspace(*reads[:2], backward=any(wanted), bias=reads[4], terms=terms)
        scratch = new_scratch(shapes, x.device)
        if not any(wanted):
            per_row = reduction == "none"
            cross_entropy_fwd(
                *reads, loss=None if per_row else loss, losses=loss if per_row else None, terms=terms, scratch=scratch
            )
        else:
            power, rest = _power_of_two(scale)
            dx_cast = dx if dx is None or dx.dtype == dtype else torch.empty_like(reads[0])
            reads = *reads[:3], power, reads[4]
            cross_entropy_bwd(
                *reads, loss=loss, dx=dx_cast, dw=dw, dbias=dbias, accumulate=False, terms=terms, scratch=scratch
            )
            loss.mul_(rest)
            if dx is not None and dx_cast is not None and dx_cast is not dx:
                dx.copy_(dx_cast)
    return loss, *gradients


def _backward(
    g: Tensor, x: Tensor | None, w: Tensor, targets: Tensor, bias: Tensor | None, dx: Tensor, dw: Tensor, dbias: Tensor,
    softcap: float, label_smoothing: float, z_loss: float, reduction: str, ignore_index: int, dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    finished = (dx, dw, dbias)
    forms = (dx if x is None else x, w, w if bias is None else bias)
    if x is None:
        _, scale = _targets_and_scale(targets, ignore_index, w.shape[0], reduction, accumulation_dtype(dtype))
        g = g * _power_of_two(scale)[1]
        return tuple(
            _scaled(y, g, like.dtype) if want else _empty(w)
            for y, like, want in zip(finished, forms, wanted, strict=True)
        )
    terms, acc = Terms(softcap, label_smoothing, z_loss), accumulation_dtype(dtype)
    with torch.autocast(x.device.type, enabled=False):
        x_cast, w_cast, bias_cast = _cast(x, dtype), _cast(w, dtype), None if bias is None else _cast(bias, dtype)
        checked_targets, scale = _targets_and_scale(targets, ignore_index, w.shape[0], reduction, acc)
        scale = (g if reduction == "none" else scale * g).contiguous()
        reads = x_cast, w_cast, checked_targets, scale, bias_cast
        dtypes = (dtype, acc, acc)
        written = [
            torch.empty(y.shape, dtype=t, device=w.device) if want else None
            for y, t, want in zip(forms, dtypes, wanted, strict=True)
        ]
        new_dx, new_dw, new_dbias = written
        shapes = cross_entropy_workspace(*reads[:2], backward=True, bias=reads[4], terms=terms)
        scratch = new_scratch(shapes, x.device)
        cross_entropy_bwd(*reads, dx=new_dx, dw=new_dw, dbias=new_dbias, accumulate=False, terms=terms, scratch=scratch)
    del scratch, reads  # frees memory before gradients are rounded
    return tuple(_empty(w) if y is None else y.to(like.dtype) for y, like in zip(written, forms, strict=True))


def _new_outputs(
    x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, dtype: torch.dtype, wanted: list[bool]
) -> tuple[Tensor, ...]:
    """loss, dx in x's dtype, dw and dbias in the accumulation dtype; gradients that are not wanted are empty."""
    acc, (want_x, want_w, want_bias) = accumulation_dtype(dtype), wanted
    return (
        x.new_empty(targets.shape if reduction == "none" else (), dtype=acc),
        x.new_empty(x.shape) if want_x else _empty(w),
        w.new_empty(w.shape, dtype=acc) if want_w else _empty(w),
        bias.new_empty(bias.shape, dtype=acc) if want_bias and bias is not None else _empty(w),
    )


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, with contiguous columns and without overlapping rows."""
    y = y.to(dtype)
    return y if y.stride(-1) == 1 and (y.ndim == 1 or y.stride(0) >= y.shape[1]) else y.contiguous()


def _scaled(y: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """y · g, rounded once, to `dtype`. g gets y's number of dimensions, because type promotion ignores a 0-d tensor's dtype."""
    return torch.mul(y, g.view((1,) * y.ndim), out=torch.empty(y.shape, dtype=dtype, device=y.device))


def _targets_and_scale(
    targets: Tensor, ignore_index: int, v: int, reduction: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(targets with −1 for ignored rows, the factor of the loss as a 0-d tensor). Checks the values of targets. The kernels of
    this function must run between a cast of w and the first product, because the first product may load w before the previous
    kernel has ended (linear/few_rows.py)."""
    ignored = targets == ignore_index
    valid = (ignored | (targets >= 0) & (targets < v)).all()
    accepted = f"0 … {v - 1}, or ignore_index = {ignore_index}"
    if targets.device.type != "cpu":
        torch._assert_async(valid, f"targets: got a value out of range; accepted: {accepted}")
    elif not valid:
        wrong = targets[~(ignored | (targets >= 0) & (targets < v))][0]
        raise ValueError(f"targets: got {int(wrong)}; accepted: {accepted}")
    count = (targets.numel() - ignored.sum()).clamp(min=1).to(dtype)
    return targets.masked_fill(ignored, -1), count.reciprocal() if reduction == "mean" else torch.ones_like(count)


def _power_of_two(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The largest power of two 2ᵏ ≤ scale, and m = 2⁻ᵏ scale in [1, 2)."""
    mantissa, _ = torch.frexp(scale)  # in [½, 1)
    rest = 2 * mantissa
    return scale / rest, rest


def _forward_fake(x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, reduction, _, dtype, wanted = rest
    return _new_outputs(x, w, targets, bias, reduction, dtype, wanted)


def _backward_fake(g: Tensor, x: Tensor | None, w: Tensor, *rest: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    _, bias, dx, *_, wanted = rest  # `rest` begins with targets
    forms = (dx if x is None else x, w, w if bias is None else bias)
    return tuple(y.new_empty(y.shape) if want else _empty(w) for y, want in zip(forms, wanted, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, targets, bias, *options, wanted = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(None if any(wanted) else x, w, targets, bias, *output[1:])
    ctx.options = options


def _gradient(ctx: Any, g: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    need_x, need_w, _, need_bias, *rest = ctx.needs_input_grad
    none = (None,) * len(rest)
    if g is None:
        return None, None, None, None, *none
    wanted = [need_x, need_w, need_bias]
    gradients = backward(g, *ctx.saved_tensors, *ctx.options, wanted)
    dx, dw, dbias = (y if want else None for y, want in zip(gradients, wanted, strict=True))
    return dx, dw, None, dbias, *none


def _vmap(op: Any) -> Any:
    return batching_rule(op, 0, lambda _in_dims, _arguments: False)


forward, backward = register(
    _library,
    "linear_cross_entropy",
    "tilegrad.linear_cross_entropy",
    (_forward, _backward),
    (_forward_fake, _backward_fake),
    _save,
    _gradient,
    (_vmap(torch.ops.tilegrad.linear_cross_entropy_fwd), _vmap(torch.ops.tilegrad.linear_cross_entropy_bwd)),
    casts=False,
)
