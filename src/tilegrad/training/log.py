"""A run's log: one JSON object per line, only ever appended to, and optionally TensorBoard's curves."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from ..text.atomic import create, named

Record = dict[str, Any]
EVENTS = "events.out.tfevents."  # what the names of TensorBoard's files begin with


class RunLog:
    """Appends records to a file. Each is flushed at once, and all are synced to disk when the log is closed.

    A record has `step`, `kind` and numbers: {"step": 10, "kind": "train", "loss": 2.5}. A number that is not finite is
    written as null. The kind "resume" means that the run continued from that step: earlier records of later steps no
    longer count (`read_log`). An incomplete last line, left by a killed process, is cut off.

    tensorboard        a folder: every number also becomes a point of the curve "name/kind" there
    hyper_parameters   name → value; TensorBoard compares runs by them, with the losses as metrics
    """

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: Path | None = None,
        hyper_parameters: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = open(path, "a", encoding="utf-8", opener=_open_no_follow)  # noqa: SIM115
        try:
            self._curves = None if tensorboard is None else _Curves(tensorboard, hyper_parameters)
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
        if self._curves is not None:
            self._curves.append(step, kind, values)

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise named(error, self._path) from error
        finally:
            if self._curves is not None:
                self._curves.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # the first error is the one to report
            self.close()


def read_log(path: Path) -> list[Record]:
    """The records, without those that a later "resume" replaced and without an incomplete last line. Any other line that is
    not a record raises ValueError with its number."""
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


def tensorboard_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


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
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Curves:
    """A file of TensorBoard's events. SummaryWriter is not used, because its thread prints a traceback when the disk is
    full."""

    def __init__(self, folder: Path, hyper_parameters: Mapping[str, object]) -> None:
        if not tensorboard_installed():
            raise ImportError("tensorboard: not installed, and its curves need it; pip install 'tilegrad[tensorboard]'")
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{EVENTS}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._path = folder / name
        self._file = os.fdopen(create(self._path), "wb")
        self._records = RecordWriter(self._file)
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()])
        if hyper_parameters:  # `SummaryWriter.add_hparams` would write them into another folder
            plain = {
                name: value if isinstance(value, bool | int | float | str) else str(value)
                for name, value in hyper_parameters.items()
            }
            summaries = hparams(plain, dict.fromkeys(("loss/train", "loss/validation"), math.nan))
            self._write(Event(wall_time=time.time(), summary=one).SerializeToString() for one in summaries)

    def append(self, step: int, kind: str, values: Mapping[str, object]) -> None:
        points = {f"{name}/{kind}": value for name, value in values.items() if isinstance(value, int | float)}
        now, summaries = time.time(), [self._scalar(name, value) for name, value in points.items()]
        self._write(self._event(wall_time=now, step=step, summary=one).SerializeToString() for one in summaries)

    def _write(self, events: Iterable[bytes]) -> None:
        """The first error is raised, and nothing is written after it."""
        try:
            if not self._file.closed:
                for event in events:
                    self._records.write(event)
                self._file.flush()
        except OSError as error:
            self.close()
            raise named(error, self._path) from error

    def close(self) -> None:
        with suppress(OSError):  # `_write` has raised it
            self._file.close()
