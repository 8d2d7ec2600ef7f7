"""Triton's interpreter, which is chosen at import: a test file runs its interpreted tests in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
