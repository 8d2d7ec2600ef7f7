"""Dilated attention as ops of torch.library: what compilers, transforms, fake tensors and modes see.

    tilegrad::dilated_fwd(q, k, v, …) → (y, lse)          tilegrad::dilated_bwd(q, k, v, y, lse, dy, …) → (dq, dk, dv)

functional.py loads this on first need: an eager call goes without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..call import autocast
from ..library import batching_rule
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


def _no_second_derivative(*_: Any) -> tuple[None, ...]:
    raise NotImplementedError(
        "tilegrad.dilated_attention has no second derivative; call backward or grad without create_graph=True"
    )


def _no_forward_mode(*_: Any) -> NoReturn:
    raise NotImplementedError("tilegrad.dilated_attention has no forward-mode derivative; use reverse mode")


class _Dilated(torch.autograd.Function):
    """dilated_fwd as torch.func's transforms take it."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.dilated_fwd(*arguments))
    setup_context = staticmethod(_save)
    backward = staticmethod(_backward)
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


class _DilatedBackward(torch.autograd.Function):
    """dilated_bwd likewise."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: torch.ops.tilegrad.dilated_bwd(*arguments))
    setup_context = staticmethod(lambda ctx, inputs, output: None)  # noqa: ARG005
    backward = staticmethod(_no_second_derivative)  # type: ignore[assignment]
    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]  # torch's own names a ctx


def _vmap(op: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """With a seed each sample is a call, so that all drop alike where the seed is one, and by their own where each has one."""
    return batching_rule(op, tensors, lambda _in_dims, arguments: arguments[tensors] is None)


def _fwd_under_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    q, k, v = autocast(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        return torch.ops.tilegrad.dilated_fwd(q, k, v, *rest)  # type: ignore[no-any-return]


for _device in ("CPU", "CUDA"):
    _library.impl("dilated_fwd", forward, _device)
    _library.impl("dilated_bwd", backward, _device)
    _library.impl("dilated_fwd", _fwd_under_autocast, f"Autocast{_device}")
torch.library.register_fake("tilegrad::dilated_fwd", _fwd_fake, lib=_library)
torch.library.register_fake("tilegrad::dilated_bwd", _bwd_fake, lib=_library)
torch.library.register_autograd("tilegrad::dilated_fwd", _backward, setup_context=_save, lib=_library)
torch.library.register_autograd("tilegrad::dilated_bwd", _no_second_derivative, lib=_library)
torch.library.register_vmap("tilegrad::dilated_fwd", _vmap(torch.ops.tilegrad.dilated_fwd, 3), lib=_library)
torch.library.register_vmap("tilegrad::dilated_bwd", _vmap(torch.ops.tilegrad.dilated_bwd, 6), lib=_library)


def dilated_fwd(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The op, or around it an autograd.Function where torch.func is at work."""
    transformed = torch._C._are_functorch_transforms_active()
    return (_Dilated.apply if transformed else torch.ops.tilegrad.dilated_fwd)(*arguments)  # type: ignore[no-any-return]


def dilated_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    transformed = torch._C._are_functorch_transforms_active()
    return (_DilatedBackward.apply if transformed else torch.ops.tilegrad.dilated_bwd)(*arguments)  # type: ignore[no-any-return]
