"""Attention over a cache in C++, by the forward of attention/cpu.py. The C++ appends the new rows of k and v to the caches at
`positions`, and each query attends up to its position.

The loops have the same order as in the forward of attention (cpu/csrc/attention/forward.h and amx_forward.h), so the bits are
the same. A thread computes the query heads of one kv head of one sequence.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..attention.cpu import by_head, from_cache_line, size_fields
from ..attention.mask import Mask
from ..cpu.abi import pack_cache_write, pack_call
from ..cpu.library import NativeCall, native, run_native
from ..scratch import Form, Scratch, Shapes, TensorLike, accumulation_dtype

if TYPE_CHECKING:
    from . import Caches

_CAUSAL = Mask(causal=True)
_FORWARD = 0


def workspace(cache: TensorLike, n_head: int, rows: int | None = None) -> Shapes:
    return {} if rows is not None else _workspace(tuple(cache.shape), n_head, cache.dtype, torch.get_num_threads())


@functools.lru_cache
def _workspace(shape: tuple[int, ...], n_head: int, dtype: torch.dtype, _threads: int) -> Shapes:
    """The scratch of `fwd`. It grows with the number of threads, so this number is part of the cache key."""
    b, _, _, d = shape
    q, k = (Form(size, dtype, torch.device("cpu")) for size in ((b, n_head, 1, d), shape))
    acc = accumulation_dtype(dtype)
    decoding = pack_call(**size_fields(q, k, _CAUSAL), positions=1)  # any address but 0; it is not read
    needed_bytes = native().tilegrad_native_scratch(decoding, _FORWARD)
    return {"native": (((needed_bytes + 64) // acc.itemsize,), acc)}  # 64: room to align to a cache line


def fwd(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Mask, *, o: Tensor, caches: Caches, scratch: Scratch
) -> NativeCall:
    k_cache, v_cache = caches
    memory = scratch["native"]
    address, nbytes = from_cache_line(memory, memory.nbytes)
    call = pack_call(
        **size_fields(q[:, :, None], v_cache, mask),
        positions=positions.data_ptr(),
        scratch=address,
        scratch_bytes=nbytes,
        q=_row(q),
        k=(k_cache.data_ptr(), *k_cache.stride()),
        v=(v_cache.data_ptr(), *v_cache.stride()),
        o=_row(o),
        k_new=_row(k),
        v_new=_row(v),
        sinks=by_head(mask.sinks),
        slopes=by_head(mask.alibi_slopes),
    )
    return run_native(native().tilegrad_native_attention_fwd, call)


def _row(x: Tensor) -> tuple[int, ...]:
    """The fields of `View` (cpu/abi.py) for x (B, H, D) as (B, H, 1, D)."""
    return x.data_ptr(), x.stride(0), x.stride(1), 0, 1


def write(k: Tensor, v: Tensor, slots: Tensor, *, k_cache: Tensor, v_cache: Tensor, scratch: Scratch) -> None:
    b, hkv, capacity, d = k_cache.shape
    size = k.element_size()
    call = pack_cache_write(
        n=len(k),
        b=b,
        hkv=hkv,
        capacity=capacity,
        head_bytes=d * size,
        k_bytes=k.stride(0) * size,
        v_bytes=v.stride(0) * size,
        threads=torch.get_num_threads(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        slots=slots.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
    )
    native().tilegrad_native_cache_write(call)
