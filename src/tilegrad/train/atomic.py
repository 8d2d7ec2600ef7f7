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
    or all of `pieces`. Where the disk refuses, what was written goes again. One writer for one path at a time."""
    staged = path.with_name(f".{path.name}.staged")
    try:
        with staged.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync(path.parent)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise named(error, path) from error


def named(error: OSError, path: Path) -> OSError:
    """The error with the path that it is about: a failed write does not know it."""
    return OSError(error.errno, error.strerror or str(error), str(path))
