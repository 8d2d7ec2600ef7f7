"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write `path` under a temporary name beside it, put it on disk, then rename it: a reader sees what was there before
    or all of `pieces`. One writer for one path at a time."""
    staged = path.with_name(f".{path.name}.staged")
    with staged.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    sync(path.parent)
