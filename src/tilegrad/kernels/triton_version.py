"""Which versions of Triton the kernels know, where they rely on more of it than the language.

    parameters   how a compiled kernel takes its parameters (cuda_launch.py)
    Gluon        names and compiler of attention's Hopper kernels; attention/hopper/gluon_names.py has what is named differently

Kernels of 3.6 to 3.9 were run on an H200. A newer version may change either without an error, so what relies on it refuses,
and says so.

Compiled for sm_90, plain calls of bfloat16 spill 8 bytes in Hopper's backward at D 64, outside of its loop, and with 3.8 12 in
the forward at D 256. 3.9 has the ptxas of CUDA 13.4, and as Triton calls it (--regAllocOptLevel=2, since 3.7) it spills more,
though less of q and v is in registers with it (`takes_more_registers`):

    bytes stored and loaded   hopper: backward at D 96: 116, at D 256: 108; forward at D 128: 148, at D 256: 280
    bytes of the stack        triton: dk and dv at D 64: 16, at D 128: 48; forward at D 256: 56; norm's backward at C 8192: 24

With ptxas's own level, 4, it spills less, and Hopper's backward of D 64 was 4 % faster in full attention when it spilled
(benchmarks/2026-11-17-triton.md). Triton chose 2 because of an error of CUDA 13's ptxas. Level 4 was close to the
reference in three calls on an H200; more were not compared, so it is not asked for. 3.9 also warns of a launch that leaves
fused multiply-adds to the default.
"""

from __future__ import annotations

import functools
import re
from typing import Any

Version = tuple[int, int]


PARAMETERS: tuple[Version, Version] = ((3, 6), (3, 9))  # the first version and the last
GLUON: tuple[Version, Version] = ((3, 6), (3, 9))


def installed() -> str:
    import triton

    return str(triton.__version__)


def _number(version: str) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


@functools.cache
def _refusal(version: str, known: tuple[Version, Version]) -> str | None:
    """What is wrong with a version; None for a known one."""
    found, (first, last) = _number(version), known
    if found and first <= found <= last:
        return None
    names = dict.fromkeys(f"{major}.{minor}" for major, minor in known)
    return f"knows Triton {' to '.join(names)}, and {version} is installed"


def takes_more_registers() -> bool:
    """Whether ptxas, as this Triton calls it, leaves main loops fewer registers: with 3.9 they spill what they hold with 3.6 to
    3.8."""
    return (_number(installed()) or (0, 0)) >= (3, 9)


def launch_options() -> dict[str, Any]:
    """Triton's options that every launch names, whatever their defaults: a·b + c is one instruction."""
    return {"enable_fp_fusion": True}


def gluon_refusal() -> str | None:
    """Why no Gluon kernel runs with the Triton that is installed; None where they do."""
    return _refusal(installed(), GLUON)


def parameters_refusal() -> str | None:
    """Why only Triton itself can launch what it compiled; None where cuda_launch.py can."""
    return _refusal(installed(), PARAMETERS)
