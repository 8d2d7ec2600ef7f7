"""Files that are whole or absent, whatever happens while they are written. Their modes follow the umask, and no symbolic
link is written through."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> int:
    """A descriptor of the file `path`, which is new: what had its name, left by a killed process or a link, has gone."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write `path` under a temporary name next to it, put it on disk, then rename it: a reader sees what was there before
    or all of `pieces`. Where the disk refuses, what was written goes again. One writer for one path at a time."""
    staged = path.with_name(f".{path.name}.staged")
    try:
        with os.fdopen(create(staged), "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
        sync(path.parent)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise named(error, path) from error


def check_replaceable(path: Path, mark: str) -> None:
    """Refused where `path` is there, and the beginning of it does not say, by `mark`, that tilegrad wrote it."""
    if path.is_file():
        with path.open("rb") as file:
            if mark.encode("utf-8") in file.read(4096):
                return
    if path.exists():
        raise ValueError(f"{path}: got a file that tilegrad did not write; accepted: a new name")


def named(error: OSError, path: Path) -> OSError:
    """The error with the path that it is about: a failed write does not know it."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """`save_file`, whose own error hides the system's, and whose file has mode 0600 whatever the umask is."""
    os.close(create(path))
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, **({"metadata": metadata} if metadata else {}))
        path.chmod(mode)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)|code: (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1] or number[2])
        raise OSError(code, os.strerror(code)) from error
