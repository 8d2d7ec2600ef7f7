"""Tensors as Hopper's copy engine (TMA) sees them, and launches that skip what Triton works out anew at each call.

    tile   any strided (B, H, T, D), or packed (total, H, D) seen as (1, H, total, D), in boxes of (1, 1, rows, columns)
    row    a contiguous float32 vector in boxes of `rows`

Nothing is copied: (B, T, H, D) and one third of a fused qkv buffer are strides like any others. Reads beyond the tensor
give zeros, writes and additions beyond it are dropped: that is how tails of T and of D are handled.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from ..problem import ALIGNED_BYTES, four_dims

GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@builtin
def tma_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """tensor[coord …] += src, asynchronously: Triton 3.6 has the instruction but no Python name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@functools.cache
def layout_of(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout in shared memory that TMA writes and wgmma reads."""
    if len(box) == 1:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=1)
    return gl.NVMMASharedLayout.get_default_for(list(box), GL_DTYPE[dtype])


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """Triton's descriptor without its checks at each call: `problem.tma_refusal` made them."""

    def __post_init__(self) -> None:
        pass


def tile_descriptor(x: Tensor, varlen: bool, rows: int, columns: int) -> Descriptor:
    """x in boxes of (1, 1, rows, columns); columns may exceed D."""
    box = (1, 1, rows, columns)
    sizes, strides = four_dims(x, varlen)
    if 1 in sizes:  # the stride of an axis of 1 means nothing, but TMA wants it in order
        strides = [s if n > 1 else ALIGNED_BYTES for n, s in zip(sizes[:3], strides, strict=False)] + [1]
    return Descriptor(x, sizes, strides, list(box), layout_of(box, x.dtype))


def row_descriptor(x: Tensor, rows: int) -> Descriptor:
    """A contiguous vector in boxes of `rows`."""
    return Descriptor(x, [x.numel()], [1], [rows], layout_of((rows,), x.dtype))


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one; nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


compiled_kernels: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, key: tuple[Any, ...], grid: int, arguments: tuple[Any, ...], num_warps: int) -> None:
    """kernel[(grid,)](*arguments): the first time through Triton, then straight to what it compiled for `key`.

    The key must tell apart whatever changes the code: dtypes, boxes, constexprs, which arguments are None. The kernel
    specialises on nothing else (do_not_specialize, numbers with a type), else a stale kernel would run.
    """
    key = (kernel, torch.cuda.current_device() if torch.cuda.is_available() else -1, *key)
    compiled = compiled_kernels.get(key)
    if compiled is None:
        compiled_kernels[key] = kernel[(grid,)](*arguments, num_warps=num_warps)
    else:
        compiled[(grid, 1, 1)](*arguments)


class Launch:
    """A kernel with its arguments, ready to run any number of times: tensor maps encoded, addresses taken, and nothing of
    Triton's in Python left between a call and the driver. It holds addresses, not tensors: whoever keeps one keeps it under
    the addresses, sizes and strides it was made of."""

    __slots__ = ("_arguments", "_device", "_grid", "_start", "_stream")

    def __init__(self, compiled: Any, grid: int, arguments: tuple[Any, ...], device: int) -> None:
        launcher, maps = compiled.run, iter(compiled.metadata.tensordesc_meta or ())
        flat: list[Any] = []
        for x in arguments:
            if isinstance(x, Descriptor):
                flat += make_tensordesc_arg(x, next(maps))
            else:
                flat.append(x.data_ptr() if isinstance(x, Tensor) else x)
        self._start = launcher.launch
        if inspect.isfunction(self._start):  # Triton's wrapper, which encodes descriptors anew at each call
            self._start = inspect.getclosurevars(self._start).nonlocals["launcher"]
        self._device, self._grid, self._stream = device, grid, driver.active.get_current_stream
        options = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        self._arguments = (compiled.function, *options, compiled.packed_metadata, None, None, None, *flat)

    def __call__(self) -> None:
        self._start(self._grid, 1, 1, self._stream(self._device), *self._arguments)


def prepare(kernel: Any, key: tuple[Any, ...], grid: int, arguments: tuple[Any, ...], num_warps: int) -> Launch:
    """The launch of kernel[(grid,)](*arguments) on the current device; `key` as for `launch`."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, *key)
    compiled = compiled_kernels.get(key)
    if compiled is None:
        compiled = compiled_kernels[key] = kernel.warmup(*arguments, grid=(grid,), num_warps=num_warps)
    return Launch(compiled, grid, arguments, device)
