"""A run's log: one JSON object per line. A run only appends to it. Loggers (loggers.py) get the same numbers."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from ..text.atomic import named
from .loggers import Loggers

Record = dict[str, Any]


class RunLog:
    """Appends records to a file. Each record is flushed at once, and the file is synced to disk when the log is closed.

    A record has `step`, `kind` and numbers: {"step": 10, "kind": "train", "loss": 2.5}. A number that is not finite is
    written as null. The kind "resume" means that the run continued from that step: `read_log` leaves out the records of later
    steps that come before it in the file. An incomplete last line, left by a killed process, is cut off.

    loggers            names of loggers that get every number as well
    hyper_parameters   name → value; loggers compare runs by them
    """

    def __init__(
        self,
        path: Path,
        *,
        loggers: Iterable[str] = (),
        hyper_parameters: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = open(path, "a", encoding="utf-8", opener=_open_no_follow)  # noqa: SIM115
        try:
            self._loggers = Loggers(loggers, path.parent, hyper_parameters)
        except BaseException:
            self._file.close()
            raise

    def append(self, step: int, kind: str, values: Mapping[str, object]) -> None:
        record = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise named(error, self._path) from error
        self._loggers.append(step, kind, values)

    def close(self, *, failed: bool = False) -> None:
        if self._file.closed:
            return
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise named(error, self._path) from error
        finally:
            self._loggers.close(failed=failed)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # the first error is the one to report
            self.close(failed=error is not None)


def read_log(path: Path) -> list[Record]:
    """The records, without those that a later "resume" replaced and without an incomplete last line. Any other line that is
    not a record raises ValueError with the number of the line."""
    records: list[Record] = []
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step, kind = record["step"], record["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is not a record ({error}); remove that line to read the rest"
            ) from error
        if kind == "resume":
            records = [earlier for earlier in records if earlier["step"] <= step]
        records.append(record)
    return records


def _open_no_follow(path: str, flags: int) -> int:
    """Like `open`, but follows no symbolic link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{path}: got a symbolic link; accepted: no such file, or a run's own log") from error


def _cut_torn_line(path: Path) -> None:
    if not path.exists() or path.is_symlink():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
