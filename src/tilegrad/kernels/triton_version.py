"""The Triton versions that the kernels support. Two parts of the code rely on more than the language:

    parameters   how a compiled kernel takes its parameters (cuda_launch.py)
    Gluon        names and compiler of attention's Hopper kernels; attention/hopper/gluon_names.py has the renamed ones

Versions 3.6 to 3.9 were tested on an H200. A newer version may change either part without an error, so both parts refuse a
newer version with a message.

Compiled for sm_90, Hopper's backward of plain bfloat16 calls spills 8 bytes at D 64, outside of its loop; with Triton 3.8 the
forward spills 12 bytes at D 256. Triton 3.9 has the ptxas of CUDA 13.4. With the option --regAllocOptLevel=2, which Triton
passes since 3.7, this ptxas spills more, although the kernels then keep less of q and v in registers (`takes_more_registers`):

    bytes stored and loaded   hopper: backward at D 96: 116, at D 256: 108; forward at D 128: 148, at D 256: 280
    bytes of the stack        triton: dk and dv at D 64: 16, at D 128: 48; forward at D 256: 56; norm's backward at C 8192: 24

Level 4 is ptxas's default; Triton chose 2 because of a bug in CUDA 13's ptxas. At level 4 this ptxas spills less, and full
attention at D 64 was 4 % faster when its backward still kept more in registers (benchmarks/2026-11-17-triton.md). Level 4
was close to the reference in three calls on an H200. No other calls were compared, so level 4 is not used. Triton 3.9 also
warns if a launch does not say whether multiply-adds are fused.
"""

from __future__ import annotations

import functools
import re
from typing import Any

Version = tuple[int, int]
PARAMETERS: tuple[Version, Version] = ((3, 6), (3, 9))  # first and last version
GLUON: tuple[Version, Version] = ((3, 6), (3, 9))


def installed() -> str:
    import triton

    return str(triton.__version__)


def _number(version: str) -> Version | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


@functools.cache
def _refusal(version: str, supported: tuple[Version, Version]) -> str | None:
    """Why a version is not supported; None if it is."""
    number, (first, last) = _number(version), supported
    if number and first <= number <= last:
        return None
    names = dict.fromkeys(f"{major}.{minor}" for major, minor in supported)
    return f"supports Triton {' to '.join(names)}, but {version} is installed"


def takes_more_registers() -> bool:
    """Whether the ptxas of the installed Triton leaves fewer registers to main loops. With Triton 3.9 main loops spill
    values that fit in registers with 3.6 to 3.8."""
    return (_number(installed()) or (0, 0)) >= (3, 9)


def launch_options() -> dict[str, Any]:
    """Triton options that every launch sets explicitly: fused multiply-adds are on."""
    return {"enable_fp_fusion": True}


def gluon_refusal() -> str | None:
    """Why no Gluon kernel runs with the installed Triton; None if Gluon kernels run."""
    return _refusal(installed(), GLUON)


def parameters_refusal() -> str | None:
    """Why cuda_launch.py cannot launch a kernel that the installed Triton compiled; None if it can."""
    return _refusal(installed(), PARAMETERS)
