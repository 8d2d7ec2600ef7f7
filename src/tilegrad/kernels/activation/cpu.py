"""Activations in C++: one pass over contiguous memory, or with swiglu over rows. The loops are in cpu/csrc/rows/norm_gelu.cpp.
The bits of an element do not depend on its position. torch computes the gradients of tanh and swiglu."""

from __future__ import annotations

import torch
from torch import Tensor

from ..column_sum import cpu as column_sum
from ..cpu.abi import pack_activation
from ..cpu.library import NativeCall, isa, native, run_native
from ..cpu.rows import DTYPES
from ..scratch import Scratch, Shapes, TensorLike
from . import NATIVE_KINDS, Sums, torch_ops

KINDS = {"gelu": 0, "tanh": 1, "swiglu": 2, "relu2": 3}  # `ActivationKind` of csrc/rows/norm_gelu.h


def workspace(x: TensorLike, kind: str, *_: object, backward: bool = True, sums: bool = True) -> Shapes:
    return {} if kind in NATIVE_KINDS else torch_ops.workspace(x, kind, backward=backward, sums=sums)


def fwd(h: Tensor, kind: str, *, a: Tensor, scratch: Scratch) -> NativeCall:
    return _run(h, kind, a=a.data_ptr())


def bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch) -> None:
    if kind not in NATIVE_KINDS:
        torch_ops.bwd(da, h, kind, dh=dh, a=None, sums=sums, scratch=scratch)
    else:
        _run(h, kind, da=da.data_ptr(), dh=dh.data_ptr())
        for total in sums.tensors:
            column_sum.fwd(dh, sums=total, accumulate=sums.accumulate, scratch={})
    if a is not None:
        fwd(h, kind, a=a, scratch=scratch)


def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, scratch: Scratch) -> NativeCall:
    return _run(gate, "swiglu", up=up.data_ptr(), a=a.data_ptr(), columns=gate.shape[1], stride=gate.stride(0))


def swiglu_bwd(
    da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor, a: Tensor | None, sums: Sums, scratch: Scratch
) -> None:
    torch_ops.swiglu_bwd(da, gate, up, dgate=dgate, dup=dup, a=a, sums=sums, scratch=scratch, forward=swiglu_fwd)


def _run(h: Tensor, kind: str, **fields: int) -> NativeCall:
    n, threads, dtype = h.numel(), torch.get_num_threads(), DTYPES[h.dtype]
    fields = {"columns": max(n, 1), "stride": n} | fields
    call = pack_activation(n=n, threads=threads, isa=isa(), dtype=dtype, kind=KINDS[kind], h=h.data_ptr(), **fields)
    return run_native(native().tilegrad_native_activation, call)
