"""How a command ends that can't go on: one sentence on stderr, also where nobody reads stdout any more."""

from __future__ import annotations

import os
import sys
from typing import TextIO


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
