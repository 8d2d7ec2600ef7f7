"""The native library at run time: loaded if it matches the sources, and run on torch's threads with the best instruction set.

TILEGRAD_ISA=portable, avx2, avx512 or amx selects another instruction set. A call raises if the library or the processor lacks
it. float64 has portable kernels only. AMX kernels take bfloat16; with amx other dtypes run on AVX-512.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...native import build
from ..op import Calls
from .abi import mismatch

ISAS = ("portable", "avx2", "avx512", "amx")
SLOW = "attention runs on plain torch ops"
_CPU = torch.device("cpu")  # comparing two devices takes a tenth of the time of reading `x.device.type`
_environment: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
_VARIABLE = b"TILEGRAD_ISA"
_children: list[int] = []  # in a forked child: the process ids of itself and of its forked ancestors
os.register_at_fork(after_in_child=lambda: _children.append(os.getpid()))


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, or the reason why it can't be used and what to do."""
    if os.name != "posix":
        return f"runs on POSIX systems only, not on {os.name}"
    if not build.LIBRARY.exists():
        return f"was not built at install; {build.HOW}"
    built_from = build.LIBRARY.read_bytes()  # read before loading, because a process loads a path only once
    if build.digest().encode() not in built_from:
        return f"was built from other sources than this package's; {build.HOW}"
    if build.is_cut(built_from):
        return f"can't be loaded (its file is truncated); {build.HOW}"
    try:
        loaded = ctypes.CDLL(str(build.LIBRARY))
    except OSError as error:
        return f"can't be loaded ({error}); {build.HOW}"
    other = mismatch(loaded)
    if other is not None:
        return f"was built with {other} (cpu/abi.py)"
    for name in ("supported", "scratch", "panel_bytes"):
        getattr(loaded, f"tilegrad_native_{name}").restype = ctypes.c_int64
    loaded.tilegrad_native_scratch.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    loaded.tilegrad_native_run.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    loaded.tilegrad_native_run.restype = None
    loaded.tilegrad_native_run_all.restype = None
    functions = ("norm_fwd", "norm_bwd", "activation", "sample", "lean_adamw", "gemm", "fixed_order", "cache_write")
    for name in (*functions, "attention_fwd"):
        function = getattr(loaded, f"tilegrad_native_{name}")
        function.argtypes, function.restype = (ctypes.c_char_p,), None
    return loaded


def refusal(device: torch.device) -> str | None:
    """Why native kernels cannot run on tensors of this device; None if they can."""
    if device != _CPU and device.type != "cpu":
        return _not_a_cpu(device)
    loaded = library()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def _not_a_cpu(device: torch.device) -> str:
    return f"runs on the CPU, not on {device.type}"


@functools.cache
def warn_if_missing() -> None:
    """Warns once per process that attention runs on plain torch ops because there is no library."""
    loaded = library()
    if isinstance(loaded, str):
        warnings.warn(f"{SLOW}: the native kernel, about four times faster, {loaded}", stacklevel=2)


@functools.cache
def native() -> ctypes.CDLL:
    """The library, set up with torch's OpenMP threads and BLAS if these can be found."""
    loaded = library()
    assert not isinstance(loaded, str), loaded
    runtime = openmp()
    if runtime is not None:
        loaded.tilegrad_native_use_openmp(ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p))
    linked = blas()
    if not isinstance(linked, str):
        functions = (linked.sgemm_, linked.omp_get_max_threads, linked.omp_set_num_threads)
        loaded.tilegrad_native_use_blas(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return loaded


@functools.cache
def blas() -> ctypes.CDLL | str:
    """The libraries that torch is linked with, if they include OpenBLAS on OpenMP threads; otherwise the reason why not.

    The system resolves names as it does for torch, so `sgemm_` is the function that torch's matrix products call."""
    linked = ctypes.CDLL(torch._C.__file__)
    if not hasattr(linked, "openblas_get_parallel"):
        return "needs a torch with OpenBLAS; this torch uses another BLAS"
    if linked.openblas_get_parallel() != 2:
        return "needs a torch whose OpenBLAS uses OpenMP threads; this OpenBLAS has its own threads"
    return linked


def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; GNU's, Intel's and LLVM's all export GOMP_parallel. None in a forked child,
    where the runtime would wait for threads that the fork did not copy."""
    if _children:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
    paths = {line[line.index("/") :] for line in lines if re.search(r"/lib(gomp|iomp5|omp)\b[^/]*\.so", line)}
    candidates = sorted(path for path in paths if "torch" in path) or sorted(paths)
    if len(candidates) != 1:
        return None
    runtime = ctypes.CDLL(candidates[0])
    return runtime if hasattr(runtime, "GOMP_parallel") else None


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A function of the library and the structure that it takes."""

    function: Callable[[bytes], None]
    structure: bytes

    def __call__(self) -> None:
        self.function(self.structure)


def run_native(function: Callable[[bytes], None], structure: bytes) -> NativeCall:
    """Runs a call and returns it, so that `record` (kernels/op.py) can list it."""
    call = NativeCall(function, structure)
    call()
    return call


def merge_native(calls: Calls) -> Calls:
    """Merges successive native calls into one call. A call from Python takes about 50 µs after a product with large weights;
    the kernel of a norm takes only 8 µs."""
    merged: Calls = []
    for _, group in itertools.groupby(calls, lambda call: isinstance(call, NativeCall)):
        listed = list(group)
        natives = [call for call in listed if isinstance(call, NativeCall)]
        merged += [_run_all(natives)] if natives else listed
    return merged


def _run_all(calls: Sequence[NativeCall]) -> Callable[[], object]:
    n = len(calls)
    functions = (ctypes.c_void_p * n)(*(ctypes.cast(call.function, ctypes.c_void_p).value for call in calls))  # type: ignore[arg-type]
    structures = (ctypes.c_char_p * n)(*(call.structure for call in calls))  # keeps a reference to each
    return functools.partial(native().tilegrad_native_run_all, ctypes.c_int64(n), functions, structures)


@functools.cache
def supported() -> tuple[str, ...]:
    """The instruction sets that the library and this processor have; the best is last."""
    bits = native().tilegrad_native_supported()
    return tuple(name for n, name in enumerate(ISAS) if bits >> n & 1)


def isa() -> int:
    """The instruction set of the next call: `Isa` of csrc/native.cpp, an index of ISAS.

    Reads the dict inside os.environ, because os.environ.get of a missing name raises an error internally and takes 1.7 µs.
    """
    return _isa(_environment.get(_VARIABLE))


@functools.cache
def _isa(encoded: bytes | None) -> int:
    name = None if encoded is None else os.fsdecode(encoded)
    if name and name not in supported():
        raise ValueError(f"TILEGRAD_ISA: got {name!r}; accepted on this machine: {', '.join(map(repr, supported()))}")
    return ISAS.index(name or supported()[-1])
