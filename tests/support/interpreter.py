"""Triton's interpreter, which is chosen at import: a test file runs its interpreted tests in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")


def in_the_interpreter(*arguments: str) -> None:
    """pytest with these arguments, a file first, in a process where Triton interprets."""
    quiet = ["-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning"]  # numpy's, in the interpreter
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *quiet, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_XDIST")]:
        del environment[name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]


def round_bfloat16() -> None:
    """From here on the interpreter rounds float32 to bfloat16 as a device does, to the nearest and ties to even. By itself it
    cuts off: such numbers err twice as far and to one side, which the closeness rule sees."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(x: NDArray[Any], source: Any, target: Any, mode: Any) -> NDArray[Any]:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)  # type: ignore[no-any-return]
        bits = np.ascontiguousarray(x).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        return np.where(np.isnan(x), (bits >> 16) | 0x40, nearest).astype(np.uint16).reshape(x.shape)

    interpreter._convert_float = rounded
