"""A call of attention on plain tensors: check, allocate outputs and scratch, run the kernel.

Once per signature, the sizes of allocations are computed and the kernel is prepared. In later calls only addresses change. All
scratch of a call is one buffer, from torch or from a manager (scratch.py). If fast_path.cpp was built and supports the
signature, it runs all later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..kernels.attention.api import PreparedCall, Signature, forget, keep, recall, select, signature
from ..kernels.attention.checks import check_values
from ..kernels.attention.cpu import NativeRun
from ..kernels.attention.mask import Mask
from ..kernels.attention.problem import Backward, Forward, lse_dtype, output_shapes
from ..kernels.checks import rows_aligned
from ..kernels.cuda_launch import Plan
from ..kernels.scratch import Layout
from ..memory.types import BufferType
from . import compile_ahead
from .scratch import borrow

Reads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]  # q, k, v, o, lse, do, dlse
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
fast_path: ModuleType | None = None  # fast_path.cpp


def new_outputs(q: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """New o and lse. o has q's memory order, for example (B, T, H, D) if q is a view of such a tensor. lse is contiguous."""
    o_shape, lse_shape = output_shapes(q, v, mask)
    if len(o_shape) == 4 and q.stride(1) < q.stride(2):
        _, h, t, d = o_shape
        o = q.new_empty_strided(o_shape, (t * h * d, d, h * d, 1))  # not a view, so that it may be changed in place
    else:
        o = q.new_empty(o_shape)
    return o, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def new_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Mask, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """New tensors for GRADIENTS; None if not wanted."""
    want_q, want_k, want_v, want_bias, want_sinks = wanted
    return (
        torch.empty_like(q) if want_q else None,
        torch.empty_like(k) if want_k else None,
        torch.empty_like(v) if want_v else None,
        torch.empty_like(mask.float_bias) if want_bias and mask.float_bias is not None else None,
        torch.zeros_like(mask.sinks) if want_sinks and mask.sinks is not None else None,  # dsinks accumulates
    )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Casts to the autocast dtype of q's device, if autocast is enabled for it. float64 is not cast."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))


def compiles(x: Tensor) -> bool:
    """Whether kernels are compiled for x when they first run."""
    return x.is_cuda


def forward_key(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: str | None, *, for_both: bool = False
) -> Signature | None:
    return signature(("new", kernel, torch.get_num_threads(), for_both), (q, k, v), mask)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    kernel: str | None,
    key: Signature | None,
    *,
    manager: int = 0,
    for_both: bool = False,
    backward: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Checks, allocates, runs. Returns o, lse. `key` is from `forward_key`. `for_both`: the scratch also fits the backward.
    `backward`: whether the backward that follows is deterministic; None if none follows."""
    prepared, device = recall(key), q.device
    if prepared is None:
        selection = select(q, k, v, mask, {}, kernel, backward=False)
        backward_scratch = select(q, k, v, mask, {}, kernel, backward=True).scratch if for_both else {}
        layout = Layout(selection.scratch)
        work_bytes = max(layout.nbytes, Layout(backward_scratch).nbytes)
        o, lse = new_outputs(q, v, mask)
        if backward is not None and compiles(q):
            compile_ahead.start(q, k, v, mask, o, lse, kernel, deterministic=backward)
    else:
        (shape, strides, dtype), (lse_shape, lse_strides, lse_type) = prepared.outputs
        like_q = prepared.o_like_q
        o = torch.empty_like(q) if like_q else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=lse_type, device=device)
        work_bytes = prepared.work_bytes
    check_values(q, k, mask)
    work, lender = borrow(manager, BufferType.TEMP, work_bytes, device)
    try:
        call = Forward(q, k, v, mask, o, lse, (work,))
        if prepared is None:
            outputs = tuple((tuple(x.shape), x.stride(), x.dtype) for x in (o, lse))
            like_q = o.shape == q.shape and o.stride() == torch.empty_like(q).stride()
            run = selection.prepare(call, layout.of)
            prepared = keep(key, PreparedCall(selection, run, outputs, like_q, work_bytes))
            if key is not None and not manager:
                _register_fast_path(prepared, call, (q, k, v), (o, lse), kernel, deterministic=False)
        prepared.run(call)
    finally:
        if lender is not None:
            lender.deallocate(work, BufferType.TEMP)
    return o, lse


def backward_key(
    reads: Reads, mask: Mask, wanted: tuple[bool, ...], kernel: str | None, manager: int = 0, *, deterministic: bool
) -> Signature | None:
    call = ("new", kernel, torch.get_num_threads(), manager != 0, deterministic, wanted)
    return signature(call, reads, mask)


def backward(
    reads: Reads,
    mask: Mask,
    wanted: tuple[bool, ...],
    kernel: str | None,
    key: Signature | None,
    manager: int = 0,
    *,
    deterministic: bool,
) -> tuple[Tensor | None, ...]:
    """Checks, allocates, runs. Returns dq, dk, dv, dbias, dsinks, or None if not wanted. `key` is from `backward_key`."""
    q, k, v, o, lse, do, dlse = reads
    prepared, device = recall(key), q.device
    if prepared is None and not rows_aligned(do):  # not every kernel reads unaligned rows; a prepared kernel does
        do = do.clone(memory_format=torch.contiguous_format)
        key = backward_key((q, k, v, o, lse, do, dlse), mask, wanted, kernel, manager, deterministic=deterministic)
        prepared = recall(key)
    gradients = dq, dk, dv, dbias, dsinks = new_gradients(q, k, v, mask, wanted)
    if prepared is None:
        compile_ahead.wait()
        given = {"o": o, "lse": lse, "do": do, "dlse": dlse, **dict(zip(GRADIENTS, gradients, strict=True))}
        selection = select(q, k, v, mask, given, kernel, backward=True, deterministic=deterministic)
        forward_scratch = select(q, k, v, mask, {}, kernel, backward=False).scratch if manager else {}
        layout = Layout(selection.scratch)
        work_bytes = max(layout.nbytes, Layout(forward_scratch).nbytes)
    else:
        work_bytes = prepared.work_bytes
    check_values(q, k, mask)
    work, lender = borrow(manager, BufferType.TEMP, work_bytes, device)
    try:
        call = Backward(q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, (work,), deterministic)
        if prepared is None:
            prepared = keep(key, PreparedCall(selection, selection.prepare(call, layout.of), work_bytes=work_bytes))
            if key is not None and not manager:
                _register_fast_path(prepared, call, call[:7], (dq, dk, dv), kernel, deterministic=deterministic)
        prepared.run(call)
    finally:
        if lender is not None:
            lender.deallocate(work, BufferType.TEMP)
    return gradients


def _register_fast_path(
    prepared: PreparedCall,
    call: Forward | Backward,
    reads: tuple[Tensor | None, ...],
    new: tuple[Tensor | None, ...],
    kernel: str | None,
    *,
    deterministic: bool,
) -> None:
    """Registers this signature with fast_path.cpp, if it was built and supports the signature. fast_path.cpp then runs all
    later calls."""
    q, mask, run = call.q, call.mask, prepared.run
    if fast_path is None or mask.has_tensors or not isinstance(run, NativeRun | Plan):
        return
    if q.is_cuda and q.dtype is torch.float32:  # the keys of fast_path.cpp lack torch's precision of float32 products
        return
    wanted = sum(1 << i for i, x in enumerate(new) if x is not None)
    if fast_path.add_program(
        mask.cache_key,
        kernel,
        prepared.selection.table,
        deterministic,
        wanted,
        reads,
        new,
        prepared.work_bytes,
        run.program if isinstance(run, NativeRun) else None,
        run if isinstance(run, Plan) else None,
    ):
        forget()
