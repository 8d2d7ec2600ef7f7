"""Launches of compiled Triton kernels through the CUDA driver: arguments are packed once, and a launch is one ctypes call.

    Launch   a kernel and its arguments, in memory as cuLaunchKernelEx reads them
    Plan     the launches of all calls of one signature: constants are packed once, addresses at each call

Triton's own launcher binds, specialises and parses every argument at every launch: 60 to 200 µs. This module uses Triton's
compiler but not its launcher. The parameters of a kernel are its arguments in order, without constexprs, and then two scratch
addresses, which are null:

    pointer    8 bytes            tensor descriptor    a tensor map of 128 bytes, the shape in int32, the strides in int64
    number     in its own type

The driver copies the parameters at a launch, so a launch may be repeated, and captured in a CUDA graph. A plan caches packed
launches by stream and addresses, which are the same in every training step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from . import triton_version
from .cache import remember

MAP_BYTES = 128  # size and alignment of a tensor map
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not called the CUDA runtime yet
NUMBERS = {
    "i1": "b", "u1": "B", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
USUAL = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "instrumentation_mode": ""}
ACCEPTED = "a kernel of a supported Triton, with one CTA per cluster, an ordinary launch and no scratch"
PROMOTE_128_BYTES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

Encoder = Callable[[int, int], None]  # writes a tensor map: (destination, address of the tensor)
_Call = tuple[Callable[..., int], tuple[Any, ...]]  # a driver function and its arguments
_data_ptr = Tensor.data_ptr


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number_of_attributes", ctypes.c_uint),
    ]


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def current_stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_device() -> int:
    return int(torch._C._cuda_getDevice())


def _encoder(descriptor: Any, meta: dict[str, Any]) -> Encoder:
    rank, itemsize, dtype = len(descriptor.shape), descriptor.base.element_size(), MAP_DTYPES[descriptor.base.dtype]
    shape = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    outer_strides = [itemsize * s for s in reversed(descriptor.strides[:-1])]  # the last stride is 1 and not passed
    strides = (ctypes.c_uint64 * rank)(*outer_strides)
    box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*(1,) * rank)
    encode = driver().cuTensorMapEncodeTiled
    rest = (shape, strides, box, ones, 0, meta["swizzle"], PROMOTE_128_BYTES, 0)
    device = descriptor.base.device.index

    def write(place: int, address: int) -> None:
        arguments = (ctypes.c_void_p(place), dtype, rank, ctypes.c_void_p(address), *rest)
        _call((encode, arguments), device, "cuTensorMapEncodeTiled")

    return write


def _call(call: _Call, device: int, name: str) -> None:
    """Calls the driver. If the thread has no CUDA context yet (as in autograd's threads), makes one and calls again."""
    function, arguments = call
    code = function(*arguments)
    if code == NO_CONTEXT:
        _make_context(device)
        code = function(*arguments)
    if code:
        _raise(code, name)


def _make_context(device: int) -> None:
    """Makes the device's context current in this thread, as any call of the CUDA runtime does."""
    torch.cuda.mem_get_info(device)


def _raise(code: int, call: str) -> NoReturn:
    name = ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(name))
    raise RuntimeError(f"CUDA: {call} returned {(name.value or b'an unknown error').decode()} ({code})")


def refusal(compiled: Any) -> str | None:
    """Why this module cannot launch a kernel that Triton compiled; None if it can."""
    unknown = triton_version.parameters_refusal()
    if unknown:
        return f"cannot be launched here: this launcher {unknown}"
    metadata = compiled.metadata
    for name, usual in USUAL.items():
        if getattr(metadata, name, usual) != usual:
            return f"has {name}={getattr(metadata, name)}"
    scratch = [name for name in ("global_scratch_size", "profile_scratch_size") if getattr(metadata, name, 0)]
    return f"has {scratch[0]}" if scratch else None


class Launch:
    """A compiled kernel with its arguments. It keeps its tensors until a plan takes them; `bind` then needs addresses only."""

    def __init__(self, compiled: Any, grid: Sequence[int], arguments: Sequence[Any], device: int) -> None:
        unfit = refusal(compiled)
        if unfit:
            raise RuntimeError(f"kernel: got {compiled.metadata.name}, which {unfit}; accepted: {ACCEPTED}")
        self.device, self._compiled, self._grid = device, compiled, (*grid, 1, 1)[:3]
        self._numbers, self._offsets = bytearray(), list[int]()
        self._pointers, self._maps = list[int](), list[tuple[int, Encoder]]()  # offsets in the packed parameters
        pointers, bases = list[Tensor](), list[Tensor]()
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for kind, x in zip(compiled.src.signature.values(), arguments, strict=True):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                self._maps.append((self._place(MAP_BYTES), _encoder(x, next(metas))))
                bases.append(x.base)
                for code, numbers in (("i", x.shape), ("q", x.strides)):
                    for number in numbers:
                        self._number(code, number)
            elif kind.startswith("*"):
                self._pointers.append(self._place(8))
                pointers.append(x)
            else:
                self._number(NUMBERS[kind], x)
        for _scratch in range(2):
            self._place(8)
        self._tensors = (*pointers, *bases)

    def _place(self, size: int) -> int:
        """The offset of a new parameter of `size` bytes, a power of two."""
        start = -(-len(self._numbers) // size) * size
        self._numbers += bytes(start + size - len(self._numbers))
        self._offsets.append(start)
        return start

    def _number(self, code: str, number: float) -> None:
        start = self._place(struct.calcsize(code))
        struct.pack_into(code, self._numbers, start, number)

    def take_tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors, in the order in which `bind` takes their addresses, and releases them."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def bind(self, stream: int, addresses: Sequence[int]) -> _Call:
        """The launch on a stream, with the tensors at these addresses."""
        memory = ctypes.create_string_buffer(len(self._numbers) + MAP_BYTES)
        start = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES
        ctypes.memmove(start, bytes(self._numbers), len(self._numbers))
        for offset, address in zip(self._pointers, addresses, strict=False):
            ctypes.c_uint64.from_address(start + offset).value = address
        for (offset, encode), address in zip(self._maps, addresses[len(self._pointers) :], strict=True):
            encode(start + offset, address)
        parameters = (ctypes.c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))
        compiled, metadata = self._compiled, self._compiled.metadata
        compiled.run  # noqa: B018  # loads the kernel onto the device
        config = _Config(*self._grid, 32 * metadata.num_warps, 1, 1, metadata.shared, stream, None, 0)
        first = ctypes.c_void_p(ctypes.addressof(config))
        first.kept = (memory, config, parameters, compiled)  # type: ignore[attr-defined]  # kept alive
        function, at = ctypes.c_void_p(compiled.function), ctypes.c_void_p(ctypes.addressof(parameters))
        return driver().cuLaunchKernelEx, (first, function, at, None)


class Zero:
    """Zeroes an int32 tensor, as one of the launches of a plan."""

    def __init__(self, x: Tensor) -> None:
        self._tensors: tuple[Tensor, ...] = (x,)
        self._n = x.numel()

    def take_tensors(self) -> tuple[Tensor, ...]:
        tensors, self._tensors = self._tensors, ()
        return tensors

    def bind(self, stream: int, addresses: Sequence[int]) -> _Call:
        where = ctypes.c_uint64(addresses[0])
        return driver().cuMemsetD32Async, (where, 0, ctypes.c_size_t(self._n), ctypes.c_void_p(stream))


_kept: dict[tuple[object, ...], tuple[_Call, ...]] = {}  # (plan, stream, addresses) → launches


class HasTensors(Protocol):
    """A call that lists the tensors whose addresses its launches need."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...


class Plan:
    """The launches of all calls whose tensors have the sizes, strides, dtypes and alignment of the tensors of `call`.

    The tensors of a call are distinct objects, although two may have the same address. An argument of a kernel is one of these
    tensors, or a view of a tensor in `viewed`. The viewed tensor is found by the address of the view. So it must start at that
    address, or be contiguous and share no memory with other tensors.
    """

    def __init__(
        self, launches: Sequence[Launch | Zero], call: HasTensors, viewed: Sequence[Tensor], device: int
    ) -> None:
        self._device = device
        numbers = {id(x): i for i, x in enumerate(call.tensors)}
        self._launches = tuple((each, [_slot(x, numbers, viewed) for x in each.take_tensors()]) for each in launches)

    def __call__(self, call: HasTensors) -> None:
        device = self._device
        if current_device() != device:
            with torch.cuda.device(device):
                self(call)
            return
        stream = current_stream(device)
        key = (self, stream, *map(_data_ptr, call.tensors))
        calls = _kept.get(key)
        if calls is None:
            calls = remember(_kept, key, self._bound(stream, key[2:]))
        for each in calls:
            function, arguments = each
            if function(*arguments):
                _call(each, device, "a launch")

    def numbers(self, stream: int, addresses: Sequence[int]) -> tuple[list[list[int]], object]:
        """Returns the launches of a call for fast_path.cpp, each as the address of a function and its four arguments, and the
        objects that must stay alive while the launches are used."""
        calls = self._bound(stream, addresses)
        return [[_number(x) for x in (_address(f), *arguments)] for f, arguments in calls], calls

    def answered(self, code: int) -> None:
        """Handles the error code of a launch. If this thread has no CUDA context, makes one, and the caller launches again. Any
        other code raises."""
        if code != NO_CONTEXT:
            _raise(code, "a launch")
        _make_context(self._device)

    def _bound(self, stream: int, addresses: Sequence[Any]) -> tuple[_Call, ...]:
        return tuple([each.bind(stream, [addresses[i] + more for i, more in slots]) for each, slots in self._launches])


def _address(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


def _number(x: Any) -> int:
    """A ctypes argument as an int."""
    return int(getattr(x, "value", x) or 0)


def _slot(x: Tensor, numbers: dict[int, int], viewed: Sequence[Tensor]) -> tuple[int, int]:
    """Finds x among the caller's tensors: (index of the tensor, offset of x in bytes)."""
    number = numbers.get(id(x))
    if number is not None:
        return number, 0
    address = x.data_ptr()
    starts = [tensor.data_ptr() for tensor in viewed]
    if address in starts:  # an expanded bias can be recognised only by its first address
        return numbers[id(viewed[starts.index(address)])], 0
    (base,) = (tensor for tensor, start in zip(viewed, starts, strict=True) if start < address < start + tensor.nbytes)
    return numbers[id(base)], address - base.data_ptr()
