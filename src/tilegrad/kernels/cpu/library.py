"""The native library at run time: on torch's own threads, with the best instruction set that the processor has.

TILEGRAD_ISA=portable, avx2, avx512 or amx asks for another; one that is not there raises. float64 has the portable version
only, and AMX is for bfloat16's products: other dtypes then run on AVX-512.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

from .build import library as library

ISAS = ("portable", "avx2", "avx512", "amx")
_children: list[int] = []  # process ids of forked children, in them
os.register_at_fork(after_in_child=lambda: _children.append(os.getpid()))


@functools.cache
def native() -> ctypes.CDLL:
    """The library, on torch's own threads where its OpenMP runtime can be found."""
    found = library()
    assert not isinstance(found, str), found
    runtime = openmp()
    if runtime is not None:
        found.tilegrad_native_join(ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p))
    return found


def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; every one of them has GNU's entry points. None in a forked child: there its
    threads are gone, and it waits for them."""
    if _children:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
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
    asked = os.environ.get("TILEGRAD_ISA")
    if asked and asked not in supported():
        raise ValueError(f"TILEGRAD_ISA: got {asked!r}; accepted: one of {', '.join(map(repr, supported()))} here")
    return ISAS.index(asked or supported()[-1])
