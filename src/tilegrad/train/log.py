"""What happened in a run: one JSON object for a line, only ever appended to, and TensorBoard beside it where asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from .atomic import named

Record = dict[str, Any]


class NoLog:
    """Of a rank that is not the first: nothing is written."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def append(self, step: int, kind: str, numbers: Mapping[str, Any]) -> None:
        pass


class RunLog:
    """Appends records to a file, each handed to the system at once, and all of them on disk when it is closed.

    A record has `step`, `kind` and what was measured: {"step": 10, "kind": "train", "loss": 2.5}. JSON has no number that
    is not finite: it is written as null. The kind "resume" says that the run went on from that step, and that what was
    logged after it did not happen (`read_log`). A last line without its end, left by a killed process, is cut off.

    tensorboard        a folder: every number also becomes a point of the curve "name/kind" there
    hyper_parameters   of the run, by name: TensorBoard compares runs by them, with the losses as metrics
    """

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: Path | None = None,
        hyper_parameters: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._tensorboard = None if tensorboard is None else _summary_writer(tensorboard)
        if self._tensorboard is not None and hyper_parameters:
            _add_hyper_parameters(self._tensorboard, hyper_parameters)
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, kind: str, values: Mapping[str, object]) -> None:
        record = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise named(error, self._path) from error
        if self._tensorboard is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._tensorboard.add_scalar(f"{name}/{kind}", value, step)

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if self._tensorboard is not None:
                self._tensorboard.close()
        except OSError as error:
            raise named(error, self._path) from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError) if error is not None else nullcontext():  # the first error is the one to hear of
            self.close()


def read_log(path: Path) -> list[Record]:
    """The records of the run as it counts: without those after the step of a later "resume", and without a torn last
    line. Any other line that is not a record is an error that names it."""
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


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        os.truncate(path, end)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary_writer(folder: Path) -> Any:
    if not tensorboard_installed():
        raise ImportError("curves for TensorBoard need it installed: pip install 'tilegrad[tensorboard]'")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _add_hyper_parameters(writer: Any, values: Mapping[str, object]) -> None:
    """Into the run's own folder, where `SummaryWriter.add_hparams` would make another."""
    from torch.utils.tensorboard.summary import hparams

    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
    }
    for summary in hparams(plain, dict.fromkeys(("loss/train", "loss/validation"), math.nan)):
        writer.file_writer.add_summary(summary)
