"""Which versions of Triton the kernels know, where they rely on more of it than the language.

    parameters   how a compiled kernel takes its parameters (cuda_launch.py): 3.6, with which launches ran on a GPU; by their
                 sources 3.7 and 3.9 pass them alike
    Gluon        names and compiler of attention's Hopper kernels: 3.6, with which they run on a GPU

A newer version may change either without an error, so what relies on it refuses, and says so. What is in the way of Gluon's
newer versions, as their compilers say it for sm_90:

    3.7   gl.thread_barrier is gl.barrier; the forward at D 256 spills 44 bytes; the rest compiles as it is
    3.8   also: _reinterpret to a smaller size is an error (backward_store_dq.py, twice)
    3.9   also: tma.async_copy_global_to_shared and async_copy_shared_to_global are async_load and async_store

tma.store_wait waits for reads of shared memory alone in all of them: read_only, its default from 3.8 on, is what 3.6 emits.
"""

from __future__ import annotations

import functools
import re

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


def gluon_refusal() -> str | None:
    """Why no Gluon kernel runs with the Triton that is installed; None where they do."""
    return _refusal(installed(), GLUON)


def parameters_refusal() -> str | None:
    """Why only Triton itself can launch what it compiled; None where cuda_launch.py can."""
    return _refusal(installed(), PARAMETERS)
