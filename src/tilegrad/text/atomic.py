"""Atomic writes of files: a file is complete or absent, whatever happens during the write. File modes follow the umask, and
nothing is written through a symbolic link."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until the file, or the entries of the folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> int:
    """Creates the file `path`, and returns its descriptor. An existing file or link with this name is deleted first."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Writes `pieces` into `path`, so that a reader finds either the old file or all of `pieces`."""
    with whole_file(path) as staged, staged.open("wb") as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields an empty file with a temporary name, to write into. At the end of this context it is synced to disk and renamed
    to `path`. After an error or an interrupt it is deleted. Only one process at a time may write to a path."""
    staged = staged_name(path)
    try:
        os.close(create(staged))
        yield staged
        sync(staged)
        staged.replace(path)
        sync(path.parent)
    except OSError as error:
        raise named(error, path) from error
    finally:
        staged.unlink(missing_ok=True)


def staged_name(path: Path) -> Path:
    """The temporary name under which `whole_file` writes `path`."""
    return path.with_name(f".{path.name}.staged")


def check_new(path: Path) -> None:
    """Refuses a path that exists: user files are never overwritten."""
    if path.exists() or path.is_symlink():
        kind = "folder" if path.is_dir() else "file"
        raise ValueError(f"{path}: got a {kind} that already exists; accepted: a new name")


def check_replaceable(path: Path, mark: str) -> None:
    """Refuses a path that exists, unless its first 4096 bytes contain `mark`, which says that tilegrad wrote it."""
    if path.is_file():
        with path.open("rb") as file:
            if mark.encode("utf-8") in file.read(4096):
                return
    if path.exists():
        raise ValueError(f"{path}: got a file that tilegrad did not write; accepted: a new name")


def named(error: OSError, path: Path) -> OSError:
    """The error with the path added, because the error of a write names no path."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Like `save_file`, but raises OSError with the error number of the system, and the file mode follows the umask instead of
    being 0600."""
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
