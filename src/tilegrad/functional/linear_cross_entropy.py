"""Linear layer and cross-entropy as one differentiable function. The first call registers the ops (linear_cross_entropy_ops.py)
with torch, because that takes 8 ms."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..kernels.attention.checks import DTYPES, TENSOR, require
from ..kernels.checks import is_number
from .differentiable import has_tangent, raise_forward_mode

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """F.cross_entropy(softcap(F.linear(x, w, bias)), targets, …) with exact gradients, without ever storing all logits.

    x (…, C), w (V, C), bias (V,), targets (…) int64. With l = softcap(x wᵀ + bias), ε = label_smoothing and
    lse = log Σ exp l, a row with target t has the loss

        (1 − ε) (lse − l[t]) + ε (lse − mean l) + z_loss · lse²

    softcap           c > 0: l = c · tanh(l / c); None: no cap
    label_smoothing   0 ≤ ε ≤ 1, as in torch's cross_entropy
    z_loss            factor of lse², 0 for none
    reduction         "mean" over the rows whose target is not ignore_index (0 if there is no such row), "sum", or "none":
                      the loss of each row, in the shape of targets
    ignore_index      a row with this target has loss 0 and gradient 0

    The loss is float32 (float64 for float64). The gradients of w and bias are sums in float32, rounded once. Under autocast x,
    w and bias are rounded to the autocast dtype, unless x is float64; gradients of float32 weights stay float32. x and w are
    copied if their columns are not contiguous. A target that is neither in 0 … V − 1 nor ignore_index raises; on a GPU it
    fails a device-side assertion, as in torch. Second derivatives and forward-mode AD raise NotImplementedError.

    >>> import torch, tilegrad
    >>> x, w = torch.randn(32, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
    >>> targets = torch.randint(0, 1000, (32,))
    >>> loss = tilegrad.linear_cross_entropy(x, w, targets, label_smoothing=0.1)
    >>> loss.backward()
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ w.t(), targets, label_smoothing=0.1))
    True
    >>> tilegrad.linear_cross_entropy(x.view(2, 16, 64), w, targets.view(2, 16), reduction="none").shape
    torch.Size([2, 16])
    """
    from . import linear_cross_entropy_ops as ops

    _check_tensors(x, w, targets, bias)
    _check_options(softcap, label_smoothing, z_loss, reduction, ignore_index)
    if has_tangent(x, w, bias):
        raise_forward_mode("tilegrad.linear_cross_entropy")
    autocast = x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    if dtype == torch.float16 and x.device.type == "cpu":
        raise ValueError("x: got float16 on a CPU; accepted: bfloat16, float32 or float64 on a CPU, float16 on a GPU")
    transformed = torch._C._are_functorch_transforms_active()
    in_one_pass = reduction != "none" and dtype != torch.float16 and torch.is_grad_enabled() and not transformed
    wanted = [in_one_pass and y is not None and y.requires_grad for y in (x, w, bias)]
    terms = (float(softcap or 0.0), float(label_smoothing), float(z_loss))
    loss: Tensor = ops.forward(
        x.reshape(-1, x.shape[-1]), w, targets.reshape(-1), bias, *terms, reduction, ignore_index, dtype, wanted
    )[0]
    return loss.reshape(targets.shape) if reduction == "none" else loss


def _check_tensors(x: Tensor, w: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("x", x), ("w", w), ("targets", targets), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name != "bias"):
            raise TypeError(f"{name}: got {type(tensor).__name__}; accepted: {TENSOR}")
        if isinstance(tensor, Tensor) and tensor.device != x.device:
            raise ValueError(
                f"{name}: got {tensor.device}; accepted: {x.device}, where x is (call .to({x.device.type!r}))"
            )
    if x.ndim < 1 or x.shape[-1] < 1 or x.dtype not in DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"x: got {x.dtype}, shape {tuple(x.shape)}; accepted: (…, C), C ≥ 1, of {accepted}")
    if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.shape[0] < 1:
        raise ValueError(
            f"w: got shape {tuple(w.shape)}; accepted: (V, {x.shape[-1]}), V ≥ 1, because x has {x.shape[-1]} columns"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}; accepted: ({w.shape[0]},), one for each row of w")
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"targets: got shape {tuple(targets.shape)}; accepted: {tuple(x.shape[:-1])}, the shape of x without C"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets: got {targets.dtype}; accepted: torch.int64 (call .long())")
    cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    for name, tensor in (("w", w), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and not (cast and tensor.dtype in DTYPES[:3]):
            accepted = f"{x.dtype}, as x has (call .to({x.dtype})), or autocast"
            raise ValueError(f"{name}: got {tensor.dtype}; accepted: {accepted}")


def _check_options(
    softcap: float | None, label_smoothing: float, z_loss: float, reduction: str, ignore_index: int
) -> None:
    capped = softcap is None or is_number(softcap) and 0.0 < softcap < float("inf")
    require(capped, "softcap", softcap, "None, or a number > 0")
    smooth = is_number(label_smoothing) and 0.0 <= label_smoothing <= 1.0
    require(smooth, "label_smoothing", label_smoothing, "a number from 0 to 1")
    require(is_number(z_loss) and abs(z_loss) < float("inf"), "z_loss", z_loss, "a finite number, 0 for none")
    require(reduction in get_args(Reduction), "reduction", reduction, ", ".join(map(repr, get_args(Reduction))))
    is_int = isinstance(ignore_index, int) and not isinstance(ignore_index, bool)
    require(is_int, "ignore_index", ignore_index, "an int", TypeError)
    require(-(2**63) <= ignore_index < 2**63, "ignore_index", ignore_index, "an int of 64 bits, as targets have")
