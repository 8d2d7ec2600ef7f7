"""How a command reports an error: one sentence on stderr, printed once even with several ranks, in any encoding, and also
when stdout is closed."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def escape_what_cannot_be_shown() -> None:
    """Write a character that is not in the terminal's encoding as \\u2026 instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):  # locale C has the latter
            stream.reconfigure(errors="backslashreplace")


def complain(sentence: object) -> None:
    """Print a sentence on stderr; if several ranks have the same one, the first prints it."""
    try:
        if not said_already(str(sentence)):
            print(f"tilegrad: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        silence(sys.stdout)


def said_already(sentence: str) -> bool:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return False
    from ..dist import mesh

    return mesh.said_already(sentence)


def silence(stream: TextIO) -> None:
    """Redirect a closed stream to the null device, so that later writes and the flush at exit do not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
