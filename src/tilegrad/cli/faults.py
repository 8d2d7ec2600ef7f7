"""Reports of errors: a command prints one sentence on stderr. If several ranks have the same error, one of them prints it. A
report does not fail if the encoding of the terminal lacks a character, or if nobody reads stdout or stderr any more."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def escape_what_cannot_be_shown() -> None:
    """Print a character that the encoding of the terminal lacks as an escape, such as \\u2026, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        # surrogateescape is the default in locale C
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def complain(sentence: object) -> None:
    """Print a sentence on stderr. If several ranks have the same sentence, only the first rank that calls this prints it."""
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
    from ..engine.dist import mesh

    return mesh.said_already(sentence)


def silence(stream: TextIO) -> None:
    """Redirect a stream that nobody reads to the null device, so that later writes and the flush at exit do not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
