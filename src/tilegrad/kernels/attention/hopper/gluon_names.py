"""What Gluon of Triton 3.6 to 3.9 names differently, under one name each.

    barrier          of all threads of a partition: gl.thread_barrier, from 3.7 on gl.barrier
    tma_load         a box into shared memory: tma.async_copy_global_to_shared, from 3.8 on tma.async_load
    tma_store        a box out of it: tma.async_copy_shared_to_global, from 3.8 on tma.async_store
    tma_reduce_add   a box added to memory: from 3.8 on tma.async_atomic_add, before that without a name in Python
    beginning        of a buffer, as another tensor: from 3.8 on a reinterpretation leaves no bytes out

tma.store_wait waits for reads of shared memory alone in all of them: read_only, its default from 3.8 on, is what 3.6 emits.
"""

from __future__ import annotations

import math
from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def tma_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """tensor[coord …] += src, asynchronously."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def beginning(buffer: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The first bytes of a buffer as a tensor: the first of as many such tensors as fill it."""
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    whole, part = (
        math.prod(_unwrap_if_constexpr(n) for n in sizes) * of.primitive_bitwidth
        for sizes, of in ((buffer.shape, buffer.dtype), (shape, dtype))
    )
    if whole == part:
        return _semantic.memdesc_reinterpret(buffer, dtype, shape, layout)
    many = _semantic.memdesc_reinterpret(buffer, dtype, [whole // part, *shape], layout)
    return _semantic.memdesc_index(many, _semantic.to_tensor(0))
