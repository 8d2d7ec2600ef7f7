"""What this installation can run, and what to do where it can't: one line for each part.

`--build` compiles the native CPU kernel from the sources that come with the package.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

from . import __version__
from .kernels.attention.mask import Mask
from .kernels.attention.problem import Problem
from .kernels.attention.table import ATTENTION
from .kernels.cpu import build as native_build
from .kernels.cpu import library as native_library


def doctor(*, build: bool = False) -> int:
    """Prints the report; exit code 1 if a build was asked for and failed."""
    if build:
        try:
            print(f"built {native_build.build()}")
        except RuntimeError as error:
            print(f"tilegrad: the native kernel was not built: {error}", file=sys.stderr)
            return 1
        native_library.library.cache_clear()
    width = max(len(name) for name, _ in report())
    for name, line in report():
        print(f"{name:<{width}}  {line}")
    return 0


def report() -> Iterator[tuple[str, str]]:
    yield "tilegrad", f"{__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    yield "CPU", f"{platform.machine()}, {torch.get_num_threads()} threads (torch.set_num_threads changes it)"
    yield (
        "compiler",
        native_build.compiler() or "none: $CXX, c++, g++ and clang++ are not there (Debian: apt install g++)",
    )
    yield "native kernel", _native()
    yield "Triton", _triton()
    yield "CUDA", _cuda()
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"on {device}", f"{str(dtype).removeprefix('torch.')} attention: {_order(device, dtype)}"


def _native() -> str:
    found = native_library.library()
    if isinstance(found, str):
        return f"missing: it {found}"
    return (
        f"{native_build.LIBRARY}, instruction sets {', '.join(native_library.supported())} (TILEGRAD_ISA asks for one)"
    )


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "missing: pip install triton; it is for CUDA devices"


def _cuda() -> str:
    if not torch.cuda.is_available():
        return "no device" if torch.version.cuda else "no device: this torch is built for the CPU"
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return ", ".join(
        f"{name} ({'.'.join(map(str, torch.cuda.get_device_capability(n)))})" for n, name in enumerate(names)
    )


def _order(device: str, dtype: torch.dtype) -> str:
    """Kernels that take a plain call there, in the table's order: the first runs."""
    q = torch.empty(1, 1, 64, 64, device=device, dtype=dtype)
    problem = Problem(q, q, q, Mask())
    return ", then ".join(row.name for row in ATTENTION.rows if not row.by_name_only and row.refuses(problem) is None)
