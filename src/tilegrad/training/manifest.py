"""The manifest of a checkpoint: step, state, size and sha256 of every file, and a digest of itself."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict, cast

from ..kernels.checks import is_count
from ..text.atomic import sha256_of, sync
from ..text.untrusted import read_bytes, shown
from .state import RunState, check_run_state, check_shapes

_FORMAT, _VERSION = "tilegrad checkpoint", 1
TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
SHARD = re.compile(r"shard-\d{5}-[\w-]+\.safetensors")
MOST = 1 << 62  # the largest step, and the largest offset in a tensor


class FileEntry(TypedDict):
    bytes: int
    sha256: str


class Manifest(TypedDict):
    step: int
    files: dict[str, FileEntry]
    state: RunState


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files have changed, or whose version this tilegrad does not read. `previous` is the newest good
    checkpoint before it, or None."""

    def __init__(self, path: Path, reason: str, previous: Path | None = None) -> None:
        self.path, self.reason, self.previous = path, reason, previous
        remedy = f"the one before it is good: {previous}" if previous else "there is no good one before it"
        super().__init__(f"{path}: damaged, {reason}; {remedy}")


def check_state(state: Mapping[str, object]) -> None:
    """Raise if JSON would not restore the state unchanged."""
    _check_plain(dict(state), "state")


def _check_plain(value: object, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            _check_plain(inner, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif isinstance(value, float) and value - value != 0.0:
        raise ValueError(f"{where}: got {value}; accepted: a finite number, because JSON has no other")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{where}: {type(value).__name__} is not JSON; use dict, list, str, int, float, bool or None")


def file_entry(file: Path) -> FileEntry:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def write_manifest(staged: Path, step: int, files: Mapping[str, FileEntry], state: Mapping[str, object]) -> None:
    """Write the manifest of files that are already synced, then sync the manifest and the folder. If a file is missing or
    has another size than was written, OSError is raised first."""
    for name, what in files.items():
        with (staged / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
        if size != what["bytes"]:
            raise OSError(errno.EIO, f"{size} bytes where {what['bytes']} were written", str(staged / name))
    content = {"format": _FORMAT, "version": _VERSION, "step": step, "files": dict(files), "state": dict(state)}
    manifest = json.dumps(content | {"sha256": _digest(content)}, indent=1, allow_nan=False)
    (staged / MANIFEST).write_text(manifest + "\n", encoding="utf-8")
    sync(staged / MANIFEST)
    sync(staged)


def read_manifest(path: Path) -> Manifest:
    """The manifest, after a check of its digest, its state (state.py) and the sizes of the files that it names."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        content = json.loads(read_bytes(path / MANIFEST))
        claimed, digest = content.pop("sha256"), _digest(content)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(path, f"{MANIFEST} is not a manifest ({error})") from error
    if claimed != digest:
        raise DamagedCheckpoint(path, f"{MANIFEST} does not have the digest that it says")
    if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        raise DamagedCheckpoint(path, f"{MANIFEST} is not of {_FORMAT!r} version {_VERSION}, which this tilegrad reads")
    step, state, files = (content.get(name) for name in ("step", "state", "files"))
    is_valid = is_count(step, MOST, 0) and isinstance(state, dict) and isinstance(files, dict)
    if not is_valid or not ([*files] == [TENSORS] or _are_shards(files)):
        raise DamagedCheckpoint(path, f"{MANIFEST} does not name a step, a state and {TENSORS}")
    _check_files(path, files)
    try:
        if "run" in state:
            check_run_state(state, step)
        if _are_shards(files):
            check_shapes(state)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{MANIFEST}: {error}") from error
    return cast(Manifest, content)


def _check_files(path: Path, files: Mapping[str, object]) -> None:
    """Check that each file exists and has its size, and that the folder has no other shard, which DCP would read too."""
    for name, what in files.items():
        if not (path / name).is_file():
            raise DamagedCheckpoint(path, f"{name} is missing")
        size, expected = (path / name).stat().st_size, what.get("bytes") if isinstance(what, dict) else what
        if size != expected or not isinstance(what, dict):
            raise DamagedCheckpoint(path, f"{name} has {size} bytes, not {shown(expected)}")
    others = sorted(file.name for file in path.glob("*.safetensors") if file.name not in files)
    if others:
        raise DamagedCheckpoint(path, f"{others[0]} is there, and {MANIFEST} does not name it")


def _are_shards(files: Mapping[str, object]) -> bool:
    return bool(files) and all(SHARD.fullmatch(name) for name in files)


def is_complete(path: Path) -> bool:
    """Whether the manifest is right and every file exists and has its size; the bytes are not read."""
    try:
        read_manifest(path)
    except (DamagedCheckpoint, FileNotFoundError):
        return False
    return True


def _digest(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode("utf-8")).hexdigest()
