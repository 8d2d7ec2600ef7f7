"""Dilated attention as torch.library ops, for compilers, transforms, fake tensors and modes.

    tilegrad::dilated_fwd(q, k, v, …) → (y, lse)          tilegrad::dilated_bwd(q, k, v, y, lse, dy, …) → (dq, dk, dv)

functional.py loads this module on first use; eager calls do not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..differentiable import batching_rule, register
from .run import backward, forward, new_gradients, new_outputs

_OPTIONS = (
    "Tensor? seed, int[] segment_lengths, int[] dilation_rates, str mode, bool causal, float? scale, float dropout_p, "
    "bool deterministic, str? kernel, bool training, int manager"
)
_library = torch.library.Library("tilegrad", "FRAGMENT")
_library.define(f"dilated_fwd(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor y, Tensor lse)")
_library.define(
    f"dilated_bwd(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy, {_OPTIONS}, bool[] wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv)"
)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return new_outputs(q, v)


def _bwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(new_gradients(q, k, v, rest[-1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.options = inputs[4:]


def _backward(ctx: Any, dy: Tensor | None, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, seed, y, lse = ctx.saved_tensors
    none = (None,) * len(ctx.needs_input_grad)
    if dy is None:
        return none
    wanted = list(ctx.needs_input_grad[:3])
    grads = dilated_bwd(q, k, v, y, lse, dy, seed, *ctx.options, wanted)
    dq, dk, dv = (g if want else None for g, want in zip(grads, wanted, strict=True))
    return (dq, dk, dv, *none[3:])


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """With a seed, each sample is a separate call, so its dropout mask depends on the seed, not on its place in the batch."""
    return batching_rule(op, tensors, lambda _in_dims, arguments: arguments[tensors] is None)


dilated_fwd, dilated_bwd = register(
    _library,
    "dilated",
    "tilegrad.dilated_attention",
    (forward, backward),
    (_fwd_fake, _bwd_fake),
    _save,
    _backward,
    (_vmap(torch.ops.tilegrad.dilated_fwd, 3), _vmap(torch.ops.tilegrad.dilated_bwd, 6)),
)
