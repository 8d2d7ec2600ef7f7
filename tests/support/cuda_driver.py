"""CUDA's driver without a GPU. It reads the arguments of a launch from memory, as the real driver copies them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tilegrad.kernels import cuda_launch

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_KINDS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip


class Map(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled for a tensor map. Sizes are in its order, columns first."""

    address: int
    dtype: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class Started(NamedTuple):
    """A launch: programs, threads, bytes of shared memory, stream, function, and the address of the parameters."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    stream: int | None
    function: int
    parameters: int


class FakeDriver:
    """Records kernels and zeroed memory in `calls`. The first calls return the codes in `answers`."""

    def __init__(self, patch: pytest.MonkeyPatch, device: int = 0, stream: int = 7) -> None:
        self.calls: list[Any] = []
        self.maps: dict[int, Map] = {}  # tensor maps by address
        self.answers: list[int] = []
        self.stream = stream
        self._functions = SimpleNamespace(
            cuLaunchKernelEx=ctypes.CFUNCTYPE(_INT, *[_POINTER] * 4)(self._launch),
            cuMemsetD32Async=ctypes.CFUNCTYPE(_INT, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, _POINTER)(
                self._zero
            ),
            cuTensorMapEncodeTiled=ctypes.CFUNCTYPE(_INT, _POINTER, _INT, _INT, *[_POINTER] * 5, *[_INT] * 4)(
                self._encode
            ),
            cuGetErrorName=lambda _code, name: setattr(name._obj, "value", b"CUDA_ERROR_OF_A_TEST"),
        )
        patch.setattr(cuda_launch, "driver", lambda: self._functions)
        patch.setattr(cuda_launch, "current_stream", lambda _device: self.stream)
        patch.setattr(cuda_launch, "current_device", lambda: device)
        patch.setattr(cuda_launch, "_kept", {})

    def _answer(self) -> int:
        return self.answers.pop(0) if self.answers else 0

    def _launch(self, config: int, function: int, parameters: int, _extra: int) -> int:
        of = cuda_launch._Config.from_address(config)
        grid = (of.grid_x, of.grid_y, of.grid_z)
        self.calls.append(Started(grid, of.block_x, of.shared_bytes, of.stream, function, parameters))
        return self._answer()

    def _zero(self, address: int, value: int, n: int, _stream: int) -> int:
        self.calls.append(("zero", address, value, n))
        return self._answer()

    def _encode(self, to: int, dtype: int, rank: int, address: int, *more: int) -> int:
        def read(kind: Any, at: int, n: int) -> tuple[int, ...]:
            return tuple((kind * n).from_address(at))

        sizes, strides, box, steps, interleave, swizzle, promotion, fill = more
        assert to % 128 == 0 and read(ctypes.c_uint32, steps, rank) == (1,) * rank
        assert (interleave, promotion, fill) == (0, 2, 0)
        self.maps[to] = Map(
            address, dtype, read(ctypes.c_uint64, sizes, rank), read(ctypes.c_uint64, strides, rank - 1),
            read(ctypes.c_uint32, box, rank), swizzle,
        )  # fmt: skip
        return self._answer()

    def parameters(self, started: Started, kinds: Sequence[str]) -> list[Any]:
        """The values of a kernel's parameters, whose types are `kinds`: "*…", "map", and Triton's numbers."""
        places = (_POINTER * len(kinds)).from_address(started.parameters)
        read: list[Any] = []
        for place, kind in zip(places, kinds, strict=True):
            if kind == "map":
                read.append(self.maps[place])
            else:
                number: Any = ctypes.c_uint64 if kind.startswith("*") else _KINDS[kind]
                read.append(number.from_address(place).value)
        return read
