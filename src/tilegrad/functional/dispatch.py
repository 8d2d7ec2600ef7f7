"""Three dispatch paths for attention: cached C++ call, eager autograd.Function, torch.library op.

    path        what runs                                              for which calls
    fast path   the whole call in C++ (eager.cpp, if it was built)     plain tensors, only q, k and v, no mode, no
                                                                       transform, a signature that ran before
    eager       an autograd.Function around the kernel                 plain tensors, no mode, no transform
    op          a torch.library op (library.py)                        compile, export, fake tensors, subclasses,
                                                                       dispatch and function modes, torch.func, tracing

The eager path and the op check, allocate and run through the same two functions of call.py. In a small call, torch's dispatcher
takes most of the time and Python the rest. The eager path skips the dispatcher, and the fast path skips both. All paths give
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from ..kernels import cache
from ..kernels.attention import table
from ..kernels.attention.checks import check_options
from ..kernels.attention.mask import Mask
from . import call
from .eager import load
from .library import attend_by_op, backward_by_op, mask_of, numbers_of, tensors_of
from .scratch import number_of

if TYPE_CHECKING:
    from ..memory.managed.manager import AttentionBufferManager

_PLAIN = frozenset((Tensor, Parameter))
_DEVICES = frozenset(("cpu", "cuda"))
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, return_lse: bool, deterministic: bool | None, kernel: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns o, or (o, lse). Both are differentiable."""
    # cache_key is None while torch.compile traces
    if not mask.has_tensors and mask.cache_key is not None and call.fast_path is not None:
        found = call.fast_path.attend(q, k, v, mask.cache_key, kernel, table.ATTENTION, deterministic, return_lse)
        if found is not None:
            return found  # type: ignore[no-any-return]
    seed = mask.seed
    if mask.dropout_p or seed is not None:
        check_options(q, k, v, mask)
        seed = seed_tensor(mask, q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not is_traced_or_transformed():
        mask = mask if seed is mask.seed else replace(mask, seed=seed)
        held = tensors_of(mask, seed) if mask.has_tensors else ()
        casts = torch._C._is_any_autocast_enabled()
        key = None if casts else call.forward_key(q, k, v, mask, kernel)
        if key is not None and (q.is_cuda or q.is_cpu) or is_plain_tensor(q, k, v, *held):
            if casts:
                q, k, v = call.autocast(q, k, v)
                key = call.forward_key(q, k, v, mask, kernel)
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learned(mask)):
                options = (mask, key, return_lse, deterministic, kernel, 0)
                return _apply_eagerly(options, q, k, v, *held)  # type: ignore[no-any-return]
            o, lse = call.forward(q, k, v, mask, kernel, key)
            return (o, lse) if return_lse else o
    return attend_by_op(q, k, v, mask, seed, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


def _learned(mask: Mask) -> bool:
    return mask.has_tensors and any(x is not None and x.requires_grad for x in (mask.bias, mask.sinks))


def seed_tensor(mask: Mask, device: torch.device) -> Tensor | None:
    """The seed as a tensor, drawn if dropout has no seed. Without dropout, the caller's tensor, or None."""
    seed = mask.seed
    if seed is None and mask.dropout_p:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        signed = seed - 2**64 if seed >= 2**63 else seed
        return torch.full((), signed, dtype=torch.int64, device=device) if mask.dropout_p else None
    return seed


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
    """Whether the tensors have ordinary memory: no subclass or fake tensor, no pending negation, no zero tensor without
    memory."""
    for x in (q, *others):
        if x is not None and (type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor()):
            return False
    return q.device.type in _DEVICES


class _EagerAttention(torch.autograd.Function):
    """A kernel and its backward, without the dispatcher: apply(options, q, k, v), or, if the mask has tensors,
    apply(options, q, k, v, bias, alibi_slopes, sinks, seed, cu_seqlens_q, cu_seqlens_k, intervals)."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, *held: Tensor | None) -> Any:
        mask, key, return_lse, deterministic, kernel, manager = options
        both = manager != 0
        o, lse = call.forward(q, k, v, mask, kernel, key, manager=manager, for_both=both, backward=deterministic)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse, *held)
        # Autograd saves the tensors of the mask, so the options hold only its numbers.
        ctx.options = (numbers_of(mask) if held else mask, deterministic, kernel, manager)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> Any:
        q, k, v, o, lse, *held = ctx.saved_tensors
        mask, deterministic, kernel, manager = ctx.options
        if not held:
            _, need_q, need_k, need_v = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, False, False)
        else:
            _, need_q, need_k, need_v, need_bias, _, need_sinks, *_ = ctx.needs_input_grad
            wanted = (need_q, need_k, need_v, need_bias, need_sinks)
        if do is None:
            if dlse is None:
                return (None,) * len(ctx.needs_input_grad)
            do = torch.zeros_like(o)
        mask = mask_of(*held, *mask) if held else mask
        reads = (q, k, v, o, lse, do, dlse)
        dq, dk, dv, dbias, dsinks = _backward_of_eager(reads, mask, wanted, kernel, deterministic, manager)
        return (None, dq, dk, dv, dbias, None, dsinks, None, None, None, None) if held else (None, dq, dk, dv)


_apply_eagerly = super(torch.autograd.Function, _EagerAttention).apply  # skips Function.apply's check for transforms


def _backward_of_eager(
    reads: Sequence[Any],
    mask: Mask,
    wanted: tuple[bool, ...],
    kernel: str | None,
    deterministic: bool,  # noqa: FBT001
    manager: int = 0,
) -> tuple[Tensor | None, ...]:
    """Runs the kernel if the tensors are plain, otherwise the op."""
    q, k, v, o, lse, do, dlse = reads
    held = tensors_of(mask, mask.seed)
    batched = _is_batched(do) or dlse is not None and _is_batched(dlse)  # torch.autograd.grad(…, is_grads_batched=True)
    if not batched and not torch.is_grad_enabled() and not is_traced_or_transformed():
        key = call.backward_key(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic, manager)
        if key is not None or is_plain_tensor(q, k, v, o, lse, do, dlse, *held):
            return call.backward(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic, key, manager)
    return backward_by_op(tuple(reads), (*held, *numbers_of(mask), deterministic, kernel), wanted)


def managed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, manager: AttentionBufferManager) -> Tensor:
    """`tilegrad.attention` for a mask without sinks or packed sequences, with scratch from the manager.

    Only for eager calls, not for torch.compile or torch.func transforms.
    """
    check_options(q, k, v, mask)
    mask = replace(mask, seed=seed_tensor(mask, q.device))
    q, k, v = call.autocast(q, k, v)
    number = number_of(manager)
    for_both = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learned(mask))
    key = call.forward_key(q, k, v, mask, None, for_both=for_both)
    if not for_both:
        return call.forward(q, k, v, mask, None, key, manager=number)[0]
    options = (mask, key, False, torch.are_deterministic_algorithms_enabled(), None, number)
    held = tensors_of(mask, mask.seed) if mask.has_tensors else ()
    return _apply_eagerly(options, q, k, v, *held)  # type: ignore[no-any-return]


def load_fast_path() -> None:
    """Loads eager.cpp, if it was built. Known signatures then run in C++."""
    found = load()
    call.fast_path = None if isinstance(found, str) else found
    if call.fast_path is not None:
        call.fast_path.use(Parameter, _backward_of_eager, cache.MOST_ENTRIES)


load_fast_path()
