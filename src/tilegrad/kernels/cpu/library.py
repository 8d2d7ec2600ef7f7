"""The native library at run time: loaded if it fits the sources here, run on torch's threads, with the best instruction set.

TILEGRAD_ISA=portable, avx2, avx512 or amx asks for another; one that the library or the processor lacks raises. float64
has the portable kernels only. AMX kernels take bfloat16; other dtypes then run on AVX-512.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import warnings
from pathlib import Path

import torch

from ...native import build
from .abi import mismatch

ISAS = ("portable", "avx2", "avx512", "amx")
SLOW = "attention runs on plain torch ops"
_environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
_ASKED = b"TILEGRAD_ISA"
_children: list[int] = []  # process ids of forked children, in them
os.register_at_fork(after_in_child=lambda: _children.append(os.getpid()))


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or the reason why it can't be used and what to do."""
    if os.name != "posix":
        return f"runs on POSIX systems only, not {os.name}"
    if not build.LIBRARY.exists():
        return f"was not built at install; {build.HOW}"
    built_from = build.LIBRARY.read_bytes()  # before it is loaded: a process loads a path once
    if build.digest().encode() not in built_from:
        return f"was built from other sources than those here; {build.HOW}"
    if build.is_cut(built_from):
        return f"can't be loaded (its file is cut off); {build.HOW}"
    try:
        found = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return f"can't be loaded ({error}); {build.HOW}"
    other = mismatch(found)
    if other is not None:
        return f"was built with {other} (cpu/abi.py)"
    found.tilegrad_native_supported.restype = ctypes.c_int64
    found.tilegrad_native_scratch.restype = ctypes.c_int64
    found.tilegrad_native_scratch.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    found.tilegrad_native_run.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    found.tilegrad_native_run.restype = None
    for name in ("norm_fwd", "norm_bwd", "gelu", "gemm"):
        function = getattr(found, f"tilegrad_native_{name}")
        function.argtypes, function.restype = (ctypes.c_char_p,), None
    return found


@functools.cache
def warn_if_missing() -> None:
    """Say once in a process that attention runs on plain torch ops because there is no library."""
    found = library()
    if isinstance(found, str):
        warnings.warn(f"{SLOW}: the native kernel, about four times faster, {found}", stacklevel=2)


@functools.cache
def native() -> ctypes.CDLL:
    """The library, on torch's own threads and with its BLAS where these can be found."""
    found = library()
    assert not isinstance(found, str), found
    runtime = openmp()
    if runtime is not None:
        found.tilegrad_native_use_openmp(ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p))
    torchs = blas()
    if not isinstance(torchs, str):
        functions = (torchs.sgemm_, torchs.omp_get_max_threads, torchs.omp_set_num_threads)
        found.tilegrad_native_use_blas(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return found


@functools.cache
def blas() -> ctypes.CDLL | str:
    """What torch is linked with, if OpenBLAS on OpenMP's threads is among it; else the reason why its BLAS is not called here.

    Names are looked up as for torch itself, so `sgemm_` is the function that torch's products call."""
    linked = ctypes.CDLL(torch._C.__file__)
    if not hasattr(linked, "openblas_get_parallel"):
        return "needs a torch with OpenBLAS; the products of this torch are another library's"
    if linked.openblas_get_parallel() != 2:
        return "needs a torch whose OpenBLAS runs on OpenMP's threads; this one's has threads of its own"
    return linked


def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; GNU's, Intel's and LLVM's all export GOMP_parallel. None in a forked child:
    the runtime would wait there for threads that did not survive the fork."""
    if _children:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = {line[line.index("/") :] for line in lines if re.search(r"/lib(gomp|iomp5|omp)\b[^/]*\.so", line)}
    torchs = sorted(path for path in paths if "torch" in path) or sorted(paths)
    if len(torchs) != 1:
        return None
    runtime = ctypes.CDLL(torchs[0])
    return runtime if hasattr(runtime, "GOMP_parallel") else None


@functools.cache
def supported() -> tuple[str, ...]:
    """Instruction sets that the library and this processor share, the best last."""
    bits = native().tilegrad_native_supported()
    return tuple(name for n, name in enumerate(ISAS) if bits >> n & 1)


def isa() -> int:
    """The instruction set of the next call: `Isa` of csrc/native.cpp, an index of ISAS.

    The environment's own dictionary is read: os.environ.get of a missing name takes 1.7 µs, because it raises inside.
    """
    return _isa(_environment.get(_ASKED))


@functools.cache
def _isa(encoded: bytes | None) -> int:
    asked = None if encoded is None else os.fsdecode(encoded)
    if asked and asked not in supported():
        raise ValueError(f"TILEGRAD_ISA: got {asked!r}; accepted: one of {', '.join(map(repr, supported()))} here")
    return ISAS.index(asked or supported()[-1])
