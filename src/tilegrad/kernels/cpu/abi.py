"""The structures of the native library's C ABI: each function takes a pointer to a structure.

They repeat C++ definitions field by field: Call and CacheWrite of csrc/attention, Norm and Activation of
csrc/rows/norm_gelu.h, Sample of csrc/rows/sampling.h, LeanAdamW of csrc/rows/adamw.h, Gemm and FixedOrder of csrc/gemm. The
library reports the offset of each field (csrc/layout.h), and loading compares them (`mismatch`). Packing is derived from the
same definitions: struct.Struct fills a structure in half the time of ctypes.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

# `Dtype` of csrc/dtype.h
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}
NO_DTYPE = -1  # the dtype of an absent tensor

_INT, _INT32, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_double
_CODES = {_INT: "q", _INT32: "i", _POINTER: "P", _DOUBLE: "d"}  # format characters of struct.Struct


def _fields(names: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class View(ctypes.Structure):
    """Strides are in elements."""

    _fields_ = [*_fields("data", _POINTER), *_fields("b h t d", _INT)]


class Rows(ctypes.Structure):
    _fields_ = [*_fields("data", _POINTER), *_fields("stride", _INT)]


class Call(ctypes.Structure):
    _fields_ = [
        *_fields("dtype b hq hkv tq tk d dv left right threads isa sinks_dtype slopes_dtype", _INT),
        *_fields("bias_dtype dbias_dtype dkv_dtype dropout_threshold seed", _INT),
        *_fields("cu_seqlens_q cu_seqlens_k positions scratch", _POINTER),
        *_fields("scratch_bytes", _INT),
        *_fields("q k v o lse k_new v_new do_ dlse dq dk dv_ dsinks sinks slopes bias dbias intervals", View),
        *_fields("scale softcap dropout_p", _DOUBLE),
    ]


class CacheWrite(ctypes.Structure):
    _fields_ = [
        *_fields("n b hkv capacity head_bytes k_bytes v_bytes threads", _INT),
        *_fields("k v slots k_cache v_cache", _POINTER),
    ]


class Norm(ctypes.Structure):
    _fields_ = [
        *_fields("n c threads isa accumulate dtype param_dtype", _INT),
        *_fields("x y dy dx", Rows),
        *_fields("w b mean rstd dw db", _POINTER),
        *_fields("eps", _DOUBLE),
        *_fields("f x1", Rows),
    ]


class Activation(ctypes.Structure):
    _fields_ = [*_fields("n threads isa dtype kind columns stride", _INT), *_fields("h up a da dh", _POINTER)]


class Sample(ctypes.Structure):
    _fields_ = [
        *_fields("n v threads isa mass_bits", _INT),
        *_fields("logits seen numbers places", Rows),
        *_fields("settings seeds sequences drawn tokens logprobs", _POINTER),
    ]


class LeanAdamW(ctypes.Structure):
    _fields_ = [
        *_fields("n decayed first step seed threads isa params_dtype grads_dtype moments_dtype", _INT),
        *_fields("params grads m v rounded scalars", _POINTER),
    ]


class Gemm(ctypes.Structure):
    _fields_ = [
        *_fields("transpose_a transpose_b m n k lda ldb ldc accumulate threads", _INT32),  # BLAS takes int32
        *_fields("a b c", _POINTER),
    ]


class FixedOrder(ctypes.Structure):
    _fields_ = [
        *_fields("n m k threads isa dtype w_dtype b_dtype", _INT),
        *_fields("x w y", Rows),
        *_fields("b scratch", _POINTER),
        *_fields("scale", _DOUBLE),
    ]


STRUCTURES = (View, Rows, Call, CacheWrite, Norm, Activation, Sample, LeanAdamW, Gemm, FixedOrder)


def _format(structure: type[ctypes.Structure]) -> str:
    return "".join(_CODES.get(kind) or _format(kind) for _, kind in structure._fields_)  # type: ignore[misc, arg-type]


def packer(structure: type[ctypes.Structure]) -> Callable[..., bytes]:
    """pack(field=…, …) → the structure's bytes.

    A sub-structure is passed as the tuple of its fields. A missing field is 0, a missing sub-structure is absent (all 0).
    """
    layout = struct.Struct(_format(structure))
    assert layout.size == ctypes.sizeof(structure)
    parts = {name: (0,) * len(kind._fields_) for name, kind in structure._fields_ if kind not in _CODES}  # type: ignore
    names = [field[0] for field in structure._fields_]
    parameters = ", ".join(f"{name}={parts.get(name, 0)}" for name in names)
    arguments = ", ".join(f"*{name}" if name in parts else name for name in names)
    function: Callable[..., bytes] = eval(f"lambda {parameters}: pack({arguments})", {"pack": layout.pack})
    return function


pack_call, pack_norm, pack_activation = packer(Call), packer(Norm), packer(Activation)
pack_gemm, pack_fixed_order = packer(Gemm), packer(FixedOrder)
pack_sample, pack_cache_write, pack_lean_adamw = packer(Sample), packer(CacheWrite), packer(LeanAdamW)


class _Offset(ctypes.Structure):
    """The offset of a field or, with an empty name, the size of the structure. `Place` of csrc/layout.h."""

    _fields_ = [("structure", ctypes.c_char_p), ("field", ctypes.c_char_p), ("offset", ctypes.c_int64)]


def _offsets() -> Iterator[tuple[tuple[str, str], int]]:
    for structure in STRUCTURES:
        for field in structure._fields_:
            yield (structure.__name__, field[0]), getattr(structure, field[0]).offset
        yield (structure.__name__, ""), ctypes.sizeof(structure)


def mismatch(library: ctypes.CDLL) -> str | None:
    """The first field whose offset in the library differs from these definitions; None if all agree."""
    library.tilegrad_native_layout.restype = ctypes.POINTER(_Offset)
    offsets = itertools.takewhile(lambda entry: entry.structure, iter(library.tilegrad_native_layout()))
    theirs = {(entry.structure.decode(), entry.field.decode()): entry.offset for entry in offsets}
    ours = dict(_offsets())
    for structure, field in ours | theirs:
        in_library, in_python = theirs.get((structure, field)), ours.get((structure, field))
        if in_library != in_python:
            what = f"field {field}" if field else "its end"
            return f"a different layout of {structure}: {what} {_at(in_library)} in the library, {_at(in_python)} in Python"
    return None


def _at(offset: int | None) -> str:
    return "missing" if offset is None else f"at {offset}"
