"""A call of attention on plain tensors: it is checked, its outputs and scratch are allocated, and its kernel runs.

What a call allocates is worked out once for each signature, and its kernel is prepared for it: from call to call addresses
change. All scratch of a call is one buffer. Where eager.cpp was built and takes the signature, it does the same from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..kernels.attention.api import Selected, Signature, forget, recall, select_bwd, select_fwd, signature
from ..kernels.attention.checks import check_lengths
from ..kernels.attention.mask import Mask
from ..kernels.attention.problem import lse_dtype, output_shapes, rows_aligned
from ..kernels.cuda_launch import Plan
from ..kernels.scratch import Layout

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
known: ModuleType | None = None  # eager.cpp


def new_outputs(q: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """o in q's memory order, so that a transposed view of (B, T, H, D) gives one back; lse contiguous."""
    o_shape, lse_shape = output_shapes(q, v, mask)
    if len(o_shape) == 4 and q.stride(1) < q.stride(2):
        _, h, t, d = o_shape
        o = q.new_empty_strided(o_shape, (t * h * d, d, h * d, 1))  # no view: it may be changed in place
    else:
        o = q.new_empty(o_shape)
    return o, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def new_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """GRADIENTS, None for those not wanted."""
    want_q, want_k, want_v, want_bias, want_sinks = wanted
    return (
        torch.empty_like(q) if want_q else None,
        torch.empty_like(k) if want_k else None,
        torch.empty_like(v) if want_v else None,
        torch.empty_like(mask.float_bias) if want_bias and mask.float_bias is not None else None,
        torch.zeros_like(mask.sinks) if want_sinks and mask.sinks is not None else None,  # it accumulates
    )


def forward_key(q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: str | None) -> Signature | None:
    return signature(("new", kernel, torch.get_num_threads()), (q, k, v), mask)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, kernel: str | None, key: Signature | None
) -> tuple[Tensor, Tensor]:
    """Checks, allocates, runs: o, lse. `key`: of `forward_key`."""
    selected, device = recall(key), q.device
    if selected is None:
        selected = select_fwd(q, k, v, mask, o=None, lse=None, kernel=kernel)
        o, lse = new_outputs(q, v, mask)
        work = _new_work(Layout(selected.scratch).nbytes, device)
        selected = selected.prepared(key, "fwd", (o, lse), work, q, k, v, mask, o=o, lse=lse)
        _make_known(selected, key, (q, k, v), mask, (o, lse), kernel)
    else:
        (shape, strides, dtype), (lse_shape, lse_strides, lse_type) = selected.forms
        like_q = selected.o_like_q
        o = torch.empty_like(q) if like_q else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        lse = torch.empty_strided(lse_shape, lse_strides, dtype=lse_type, device=device)
        work = _new_work(selected.work_bytes, device)
    if mask.varlen:
        check_lengths(q, k, mask)
    if selected.run is None:
        selected.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=Layout(selected.scratch).of(work))
    else:
        held = () if mask.bare else mask.tensors
        selected.run((q, k, v, o, lse, *held, work), mask)
    return o, lse


def backward_key(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask,
    wanted: tuple[bool, ...], kernel: str | None, deterministic: bool,  # noqa: FBT001
) -> Signature | None:  # fmt: skip
    call = ("new", kernel, deterministic, torch.get_num_threads(), wanted)
    return signature(call, (q, k, v, o, lse, do, dlse), mask)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask,
    wanted: tuple[bool, ...], kernel: str | None, deterministic: bool, key: Signature | None,  # noqa: FBT001
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Checks, allocates, runs: dq, dk, dv, dbias, dsinks, None for those not wanted. `key`: of `backward_key`."""
    selected, device = recall(key), q.device
    if selected is None and not rows_aligned(do):  # not every kernel can read it; what is remembered is read as it is
        do = do.clone(memory_format=torch.contiguous_format)
        key = backward_key(q, k, v, o, lse, do, dlse, mask, wanted, kernel, deterministic)
        selected = recall(key)
    gradients = dq, dk, dv, dbias, dsinks = new_gradients(q, k, v, mask, wanted)
    if selected is None:
        named = dict(zip(GRADIENTS, gradients, strict=True))
        others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **named}
        selected = select_bwd(q, k, v, mask, others, kernel=kernel, deterministic=deterministic)
        work = _new_work(Layout(selected.scratch).nbytes, device)
        reads = (q, k, v, o, lse, do, dlse, mask)
        selected = selected.prepared(key, "bwd", (), work, *reads, **named, deterministic=deterministic)
        _make_known(selected, key, reads[:7], mask, (dq, dk, dv), kernel, deterministic=deterministic)
    else:
        work = _new_work(selected.work_bytes, device)
    if mask.varlen:
        check_lengths(q, k, mask)
    if selected.run is None:
        selected.module.bwd(
            q, k, v, o, lse, do, dlse, mask, dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks,
            scratch=Layout(selected.scratch).of(work), deterministic=deterministic,
        )  # fmt: skip
    else:
        held = () if mask.bare else mask.tensors
        given = (q, k, v, o, lse, do, dlse, *held, dq, dk, dv, dbias, dsinks, work)
        selected.run([x for x in given if x is not None], mask)
    return gradients


def _make_known(
    selected: Selected, key: Signature | None, reads: tuple[Tensor | None, ...], mask: Mask,
    new: tuple[Tensor | None, ...], kernel: str | None, *, deterministic: bool = False,
) -> None:  # fmt: skip
    """Calls of this signature go by C++ from now on, where it is there and takes them."""
    q, run = reads[0], selected.run
    if known is None or key is None or not mask.bare or run is None or q is None:
        return
    native, plan = getattr(run, "native", None), run if isinstance(run, Plan) else None
    if native is None and plan is None:
        return
    if q.is_cuda and q.dtype is torch.float32:  # the precision of its products is an option of torch's
        return
    wanted = sum(1 << i for i, x in enumerate(new) if x is not None)
    if known.add_program(
        mask, mask.numbers, kernel, selected.table, deterministic, wanted, reads, new, selected.work_bytes, native, plan
    ):
        forget()


def _new_work(size: int, device: torch.device) -> Tensor:
    """One buffer for all scratch of a call."""
    return torch.empty_strided((size,), (1,), dtype=torch.uint8, device=device) if size else _no_work(device)


@functools.cache
def _no_work(device: torch.device) -> Tensor:
    """Of kernels that need none."""
    return torch.empty(0, dtype=torch.uint8, device=device)
