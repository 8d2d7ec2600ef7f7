"""What a command says, whatever its terminal can show; and how it ends where it can't go on: one sentence on stderr, also
where nobody reads stdout any more."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def escape_what_cannot_be_shown() -> None:
    """A character that is not in the terminal's encoding, or is half of one, is written as \\u2026 and raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):  # the latter: locale C
            stream.reconfigure(errors="backslashreplace")


def complain(sentence: object) -> None:
    """On stderr, once: of several ranks with one complaint the first has it."""
    try:
        if not _said_already(str(sentence)):
            print(f"tilegrad: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)


def _said_already(sentence: str) -> bool:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    from ..dist.mesh import said_already

    return said_already(sentence)


def silence(stream: TextIO) -> None:
    """Nothing reads it any more: what is left to be written goes nowhere, and fails nowhere, not even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
