"""Which versions of Triton the kernels know, where they rely on more of it than the language.

    parameters   how a compiled kernel takes its parameters (cuda_launch.py): 3.6, with which launches ran on a GPU; by their
                 sources 3.7 and 3.9 pass them alike
    Gluon        names and compiler of attention's Hopper kernels: 3.6, with which they run on a GPU

A newer version may change either without an error, so what relies on it refuses, and says so. What differs by name is in
attention/hopper/gluon_names.py. What differs without one:

    3.7   ptxas is given --regAllocOptLevel=2
    3.9   compiles for sm_90 with CUDA 13.4's ptxas; kernels of a launch that names no enable_fp_fusion warn
"""

from __future__ import annotations

import functools
import re
from typing import Any

Version = tuple[int, int]


PARAMETERS: tuple[Version, Version] = ((3, 6), (3, 6))  # the first version and the last
GLUON: tuple[Version, Version] = ((3, 6), (3, 6))


def installed() -> str:
    import triton

    return str(triton.__version__)


@functools.cache
def _refusal(version: str, known: tuple[Version, Version]) -> str | None:
    """What is wrong with a version; None for a known one."""
    found, (first, last) = re.match(r"(\d+)\.(\d+)", version), known
    if found and first <= (int(found[1]), int(found[2])) <= last:
        return None
    names = dict.fromkeys(f"{major}.{minor}" for major, minor in known)
    return f"knows Triton {' to '.join(names)}, and {version} is installed"


@functools.cache
def launch_options() -> dict[str, Any]:
    """Triton's options that every launch names, whatever their defaults: a·b + c is one instruction."""
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if installed().startswith("3.9"):
        options["ptx_options"] = "--regAllocOptLevel=4"
    return options


def gluon_refusal() -> str | None:
    """Why no Gluon kernel runs with the Triton that is installed; None where they do."""
    return _refusal(installed(), GLUON)


def parameters_refusal() -> str | None:
    """Why only Triton itself can launch what it compiled; None where cuda_launch.py can."""
    return _refusal(installed(), PARAMETERS)
