"""The autograd.Function of attention in eager mode. Calls that a compiler or a transform must see use the op (library.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from ..kernels.attention.mask import Mask
from . import call
from .library import backward_by_op, mask_of, numbers_of, tensors_of

_PLAIN = frozenset((Tensor, Parameter))
_DEVICES = frozenset(("cpu", "cuda"))
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_traced_or_transformed() -> bool:
    """Whether a compiler, a transform, a mode, a tracer or forward-mode AD must see the op."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack()
        and not all(type(mode) is DeviceContext for mode in torch.overrides._get_current_function_mode_stack())
    )


def is_plain_tensor(q: Any, *others: Any) -> bool:
    """Whether q is on a CPU or a CUDA device and no tensor is a subclass, a fake tensor, a negated view or a zero tensor."""
    for x in (q, *others):
        if x is not None and (type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor()):
            return False
    return q.device.type in _DEVICES


class _EagerAttention(torch.autograd.Function):
    """A kernel and its backward, without the dispatcher. apply takes (options, q, k, v), followed by all of
    (bias, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, intervals) if the mask has tensors."""

    @staticmethod
    def forward(
        ctx: Any, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *mask_tensors: Tensor | None
    ) -> Any:
        mask, key, return_lse, deterministic, kernel, manager = options
        managed = manager != 0
        o, lse = call.forward(q, k, v, mask, kernel, key, manager=manager, for_both=managed, backward=deterministic)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, *mask_tensors)
        # Autograd saves the tensors of the mask, so `options` has only the numbers of the mask.
        ctx.options = (numbers_of(mask) if mask_tensors else mask, deterministic, kernel, manager)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, o, lse, *mask_tensors = ctx.saved_tensors
        mask, deterministic, kernel, manager = ctx.options
        if not mask_tensors:
            _, need_q, need_k, need_v = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, False, False)
        else:
            _, need_q, need_k, need_v, need_bias, _, need_sinks, *_ = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, need_bias, need_sinks)
        if do is None:
            if dlse is None:
                return (None,) * len(ctx.needs_input_grad)
            do = torch.zeros_like(o)
        mask = mask_of(*mask_tensors, *mask) if mask_tensors else mask
        tensors = (q, k, v, o, lse, do, dlse)
        dq, dk, dv, dbias, dsinks = backward_of_eager(tensors, mask, wanted, kernel, deterministic, manager)
        return (None, dq, dk, dv, dbias, None, dsinks, None, None, None, None) if mask_tensors else (None, dq, dk, dv)


apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply  # skips Function.apply's check for transforms


def backward_of_eager(
    tensors: Sequence[Any],
    mask: Mask,
    wanted: tuple[bool, ...],
    kernel: str | None,
    deterministic: bool,  # noqa: FBT001
    manager: int = 0,
) -> tuple[Tensor | None, ...]:
    """Runs the kernel. If the call is batched, differentiated, traced or transformed, or a tensor is not plain: runs the op."""
    *_, do, dlse = reads = tuple(tensors)
    mask_tensors = tensors_of(mask, mask.seed)
    batched = _is_batched(do) or dlse is not None and _is_batched(dlse)  # torch.autograd.grad(…, is_grads_batched=True)
    if not batched and not torch.is_grad_enabled() and not is_traced_or_transformed():
        key = call.backward_key(reads, mask, wanted, kernel, manager, deterministic=deterministic)
        if key is not None or is_plain_tensor(*reads, *mask_tensors):
            return call.backward(reads, mask, wanted, kernel, key, manager, deterministic=deterministic)
    return backward_by_op(reads, (*mask_tensors, *numbers_of(mask), deterministic, kernel), wanted)
