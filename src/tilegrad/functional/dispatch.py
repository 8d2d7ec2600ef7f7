"""Three dispatch paths for attention: cached C++ call, eager autograd.Function, torch.library op.

    path        what runs                                                which calls
    fast path   the whole call in C++, if fast_path.cpp was built        plain tensors, only q, k and v, no mode, no
                                                                         transform, a signature that ran before
    eager       an autograd.Function around the kernel (autograd.py)     plain tensors, no mode, no transform
    op          a torch.library op (library.py)                          compile, export, fake tensors, subclasses,
                                                                         dispatch and function modes, torch.func, tracing

The eager path and the op check, allocate and run through the same two functions of call.py. In a small call, torch's dispatcher
takes most of the time and Python the rest. The eager path skips the dispatcher, and the fast path also skips Python. All paths
give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import cache
from ..kernels.attention import table
from ..kernels.attention.checks import check_options
from ..kernels.attention.mask import Mask
from ..kernels.philox import signed
from . import call
from .autograd import apply_eagerly, backward_of_eager, is_plain_tensor, is_traced_or_transformed
from .fast_path import load
from .library import attend_by_op, tensors_of
from .scratch import number_of

if TYPE_CHECKING:
    from ..memory.managed.manager import AttentionBufferManager


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
    if mask.dropout_p or seed is not None or q is None or k is None or v is None:
        check_options(q, k, v, mask)
        seed = seed_tensor(mask, q.device)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not is_traced_or_transformed():
        mask = mask if seed is mask.seed else replace(mask, seed=seed)
        mask_tensors = tensors_of(mask, seed) if mask.has_tensors else ()
        casts = torch._C._is_any_autocast_enabled()
        key = None if casts else call.forward_key(q, k, v, mask, kernel)
        if key is not None and (q.is_cuda or q.is_cpu) or is_plain_tensor(q, k, v, *mask_tensors):
            if casts:
                q, k, v = call.autocast(q, k, v)
                key = call.forward_key(q, k, v, mask, kernel)
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _needs_grad(mask)):
                options = (mask, key, return_lse, deterministic, kernel, 0)
                return apply_eagerly(options, q, k, v, *mask_tensors)  # type: ignore[no-any-return]
            o, lse = call.forward(q, k, v, mask, kernel, key)
            return (o, lse) if return_lse else o
    return attend_by_op(q, k, v, mask, seed, return_lse=return_lse, deterministic=deterministic, kernel=kernel)


def _needs_grad(mask: Mask) -> bool:
    return mask.has_tensors and any(x is not None and x.requires_grad for x in (mask.bias, mask.sinks))


def seed_tensor(mask: Mask, device: torch.device) -> Tensor | None:
    """The seed as a tensor, drawn if dropout has no seed. Without dropout, the caller's tensor, or None."""
    seed = mask.seed
    if seed is None and mask.dropout_p:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, int):
        return torch.full((), signed(seed), dtype=torch.int64, device=device) if mask.dropout_p else None
    return seed


def managed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, manager: AttentionBufferManager) -> Tensor:
    """`tilegrad.attention` for a mask without sinks or packed sequences, with scratch from the manager.

    Only for eager calls, not for torch.compile or torch.func transforms.
    """
    check_options(q, k, v, mask)
    mask = replace(mask, seed=seed_tensor(mask, q.device))
    q, k, v = call.autocast(q, k, v)
    number = number_of(manager)
    for_both = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _needs_grad(mask))
    key = call.forward_key(q, k, v, mask, None, for_both=for_both)
    if not for_both:
        return call.forward(q, k, v, mask, None, key, manager=number)[0]
    options = (mask, key, False, torch.are_deterministic_algorithms_enabled(), None, number)
    mask_tensors = tensors_of(mask, mask.seed) if mask.has_tensors else ()
    return apply_eagerly(options, q, k, v, *mask_tensors)  # type: ignore[no-any-return]


def load_fast_path() -> None:
    """Loads fast_path.cpp, if it was built. Registered signatures then run in C++."""
    found = load()
    call.fast_path = None if isinstance(found, str) else found
    if call.fast_path is not None:
        call.fast_path.use(Parameter, backward_of_eager, cache.MOST_ENTRIES)


load_fast_path()
