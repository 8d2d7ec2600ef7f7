"""Scratch that a manager holds: buffers for the length of a call, and attention that works in them.

A call takes one TEMP buffer and lays all of its scratch into it: one request each time, so that a cache of a few buffers
serves it. Where a backward follows, the forward asks for as many bytes as the backward: buffers of two sizes in turn would
drive each other out of the cache. An op of torch.library can't take a manager. It takes the manager's number, and 0 stands for
none. What is returned or kept for the backward is torch's, never the manager's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..kernels.attention.api import select_bwd, select_fwd
from ..kernels.attention.checks import check_options
from ..kernels.attention.mask import Mask
from ..kernels.attention.problem import lse_dtype, output_shapes, rows_aligned
from ..kernels.scratch import Layout
from ..memory.types import BufferType

if TYPE_CHECKING:
    from ..memory.managed.manager import AttentionBufferManager

_managers: WeakValueDictionary[int, AttentionBufferManager] = WeakValueDictionary()


def number_of(manager: AttentionBufferManager | None) -> int:
    """What stands for a manager in the arguments of an op."""
    if manager is None:
        return 0
    _managers[id(manager)] = manager
    return id(manager)


number_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorators load all of Dynamo


@contextmanager
def borrowed(number: int, type: BufferType, nbytes: int, device: torch.device) -> Iterator[Tensor]:
    """Bytes, uninitialised. A manager that is gone, as its module may be before a backward, counts as none."""
    manager = _managers.get(number)
    if manager is None or not nbytes:
        yield torch.empty(nbytes, dtype=torch.uint8, device=device)
        return
    buffer = manager.allocate(type, (nbytes,), torch.uint8, device, zero_init=False)
    try:
        yield buffer
    finally:
        manager.deallocate(buffer, type)


NO_OTHERS: dict[str, Tensor | None] = dict.fromkeys(
    ("o", "lse", "do", "dlse", "dq", "dk", "dv", "dbias", "dsinks")
)  # before they are there; those of ours lie as every kernel can read and write them


def managed_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, manager: AttentionBufferManager) -> Tensor:
    """`tilegrad.attention` of a mask without sinks or packed sequences, its scratch in buffers of the manager's.

    It is for eager calls: neither torch.compile nor torch.func's transforms go through it.
    """
    check_options(q, k, v, mask)
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    if mask.dropout_p and mask.seed is None:
        mask = replace(mask, seed=torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device))
    with torch.autocast(device, enabled=False):
        return cast(Tensor, _Managed.apply(q, k, v, mask.bias, mask, number_of(manager)))


class _Managed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask, number: int) -> Tensor:
        del bias  # the mask's own, here for autograd
        o_shape, lse_shape = output_shapes(q, v, mask)
        o, lse = q.new_empty(o_shape), q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))
        fwd = select_fwd(q, k, v, mask, o=o, lse=lse, kernel=None)
        layout = Layout(fwd.scratch)
        ctx.nbytes = layout.nbytes
        if any(ctx.needs_input_grad):
            bwd = select_bwd(q, k, v, mask, NO_OTHERS, kernel=None, deterministic=False)
            ctx.nbytes = max(ctx.nbytes, Layout(bwd.scratch).nbytes)
        with borrowed(number, BufferType.TEMP, ctx.nbytes, q.device) as temp:
            fwd.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=layout.of(temp))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask, ctx.number = mask, number
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, o, lse), mask = ctx.saved_tensors, ctx.mask
        do = do if rows_aligned(do) else do.contiguous()
        wanted = zip(("dq", "dk", "dv", "dbias"), (q, k, v, mask.float_bias), ctx.needs_input_grad, strict=False)
        grads = {name: torch.empty_like(x) if want and x is not None else None for name, x, want in wanted}
        others = NO_OTHERS | {"o": o, "lse": lse, "do": do} | grads
        deterministic = torch.are_deterministic_algorithms_enabled()
        bwd = select_bwd(q, k, v, mask, others, kernel=None, deterministic=deterministic)
        layout = Layout(bwd.scratch)
        with borrowed(ctx.number, BufferType.TEMP, max(ctx.nbytes, layout.nbytes), q.device) as temp:
            bwd.module.bwd(
                q, k, v, o, lse, do, None, mask, **grads, dsinks=None,
                scratch=layout.of(temp), deterministic=deterministic,
            )  # fmt: skip
        return *grads.values(), None, None
