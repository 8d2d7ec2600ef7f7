"""One name for each Gluon function that Triton 3.6 to 3.9 name differently.

    barrier          synchronises a partition: gl.thread_barrier, from 3.7 on gl.barrier
    tma_load         box → shared memory: tma.async_copy_global_to_shared, from 3.8 on tma.async_load
    tma_store        shared memory → box: tma.async_copy_shared_to_global, from 3.8 on tma.async_store
    tma_reduce_add   box += shared memory: from 3.8 on tma.async_atomic_add, before that not exposed in Python
    beginning        the first bytes of a buffer as another tensor: from 3.8 on reinterpreting must use all bytes

tma.store_wait waits only until shared memory has been read, in every version: read_only is the default from 3.8 on, and 3.6
emits the same.
"""

from __future__ import annotations

import math

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
    """tensor[coord …] += src, asynchronously"""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def beginning(buffer, dtype, shape, layout, _semantic=None):
    """The first bytes of a buffer as a tensor: element 0 of the buffer viewed as an array of such tensors."""
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    shape = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    buffer_bits = math.prod(_unwrap_if_constexpr(n) for n in buffer.shape) * buffer.dtype.primitive_bitwidth
    tensor_bits = math.prod(shape) * dtype.primitive_bitwidth
    if buffer_bits == tensor_bits:
        return _semantic.memdesc_reinterpret(buffer, dtype, shape, layout)
    tensors = _semantic.memdesc_reinterpret(buffer, dtype, [buffer_bits // tensor_bits, *shape], layout)
    return _semantic.memdesc_index(tensors, _semantic.to_tensor(0))
