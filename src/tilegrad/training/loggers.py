"""Loggers that get a run's numbers besides log.jsonl: TensorBoard, Weights & Biases, MLflow (`train.log`).

Each number becomes a point of the curve "name/kind", such as loss/train. A resumed run continues the same run in wandb and in
MLflow, whose ids are in loggers.json in the run's folder. Environment variables that these packages document choose servers,
projects and offline modes: WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.

A logger that fails (a full disk, no network) never ends a run: a message on stderr says so, and the run continues without it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..text.atomic import create, named, write_whole
from ..text.untrusted import read_json, shown

LOGGERS = ("tensorboard", "wandb", "mlflow")
EVENTS = "events.out.tfevents."  # prefix of the names of TensorBoard's files
IDS = "loggers.json"
_ID = re.compile(r"[\w-]{1,128}")
_BATCH, _PARAMS, _FLUSH_S = 900, 100, 1.0  # MLflow accepts 1,000 points in a call, and 100 parameters

Points = Mapping[str, float]


class Logger(Protocol):
    def append(self, step: int, points: Points) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Loggers:
    """The loggers of a run. A logger that fails gets no more numbers."""

    def __init__(self, names: Iterable[str], folder: Path, hyper_parameters: Mapping[str, object]) -> None:
        self._open: dict[str, Logger] = {}
        for name in names:
            self._try(name, partial(self._begin, name, folder, hyper_parameters))

    def _begin(self, name: str, folder: Path, hyper_parameters: Mapping[str, object]) -> None:
        self._open[name] = _KINDS[name](folder, hyper_parameters)

    def append(self, step: int, kind: str, values: Mapping[str, object]) -> None:
        points = {f"{name}/{kind}": value for name, value in values.items() if isinstance(value, int | float)}
        for name, logger in [*self._open.items()] if points else []:
            self._try(name, partial(logger.append, step, points))

    def close(self, *, failed: bool = False) -> None:
        for name, logger in [*self._open.items()]:
            self._try(name, partial(logger.close, failed=failed))
        self._open.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        faults = _faults(name)
        try:
            action()
        except faults as error:
            self._open.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            with suppress(OSError):
                sentence = f"tilegrad: {name}: {reason}; the run continues without it, and log.jsonl has every number"
                print(sentence, file=sys.stderr, flush=True)


def check_installed(names: Iterable[str]) -> None:
    for name in names:
        if not installed(name):
            raise ImportError(f"log: got {name!r}, which is not installed; pip install 'tilegrad[{name}]'")


def installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # None: only a folder of this name, such as wandb's own files


def _faults(name: str) -> tuple[type[Exception], ...]:
    """The errors that a logger may raise: built-in ones, and those that its package defines."""
    usual = (OSError, ValueError, RuntimeError, ImportError)
    with suppress(ImportError):
        if name == "wandb":
            import wandb

            return (*usual, wandb.Error)
        if name == "mlflow":
            from mlflow.exceptions import MlflowException

            return (*usual, MlflowException)
    return usual


def _saved_id(folder: Path, name: str) -> str | None:
    """The id of this run in the logger `name`; None if it has none yet."""
    file = folder / IDS
    if not file.exists():
        return None
    ids = read_json(file)
    value = ids.get(name) if isinstance(ids, dict) else None
    if value is not None and (not isinstance(value, str) or not _ID.fullmatch(value)):
        raise ValueError(f"{file}: got {shown(value)} for {name}; accepted: an id; delete this file to log a new run")
    return value


def _save_id(folder: Path, name: str, value: str) -> None:
    file = folder / IDS
    saved = read_json(file) if file.exists() else {}
    ids = {**(saved if isinstance(saved, dict) else {}), name: value}
    write_whole(file, [json.dumps(ids).encode("utf-8") + b"\n"])


class _TensorBoard:
    """A TensorBoard event file. SummaryWriter is not used, because its thread prints a traceback when the disk is full."""

    def __init__(self, run: Path, hyper_parameters: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import hparams, scalar

        self._event, self._scalar = Event, scalar
        folder = run / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{EVENTS}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._path = folder / name
        self._file = os.fdopen(create(self._path), "wb")
        self._records = RecordWriter(self._file)
        self._write([Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()])
        if hyper_parameters:  # SummaryWriter.add_hparams would write hyper-parameters into another folder
            summaries = hparams(_plain(hyper_parameters), dict.fromkeys(("loss/train", "loss/validation"), math.nan))
            self._write(Event(wall_time=time.time(), summary=one).SerializeToString() for one in summaries)

    def append(self, step: int, points: Points) -> None:
        now, summaries = time.time(), [self._scalar(name, value) for name, value in points.items()]
        self._write(self._event(wall_time=now, step=step, summary=one).SerializeToString() for one in summaries)

    def _write(self, events: Iterable[bytes]) -> None:
        try:
            for event in events:
                self._records.write(event)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing flushes the rest, and fails again
                self._file.close()
            raise named(error, self._path) from error

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        self._file.close()


class _Wandb:
    def __init__(self, run: Path, hyper_parameters: Mapping[str, object]) -> None:
        import wandb

        if (run / "wandb").is_symlink():
            raise ValueError(f"{run / 'wandb'}: got a symbolic link; accepted: no such folder, or one that wandb made")
        own = _saved_id(run, "wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tilegrad"),
            name=run.name,
            id=own or secrets.token_hex(4),
            resume="allow",
            dir=run,
            config=_plain(hyper_parameters),
            settings=wandb.Settings(console="off"),  # otherwise wandb captures stdout
        )
        if own is None:
            _save_id(run, "wandb", self._run.id)
        self._run.define_metric("step")  # wandb's own steps only grow; a resumed run may go back
        self._run.define_metric("*", step_metric="step")

    def append(self, step: int, points: Points) -> None:
        self._run.log({"step": step, **points})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow:
    """Points are sent about once a second, because each call waits for the server."""

    def __init__(self, run: Path, hyper_parameters: Mapping[str, object]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        self._waiting: list[Any] = []
        self._sent_at = time.monotonic()
        own = _saved_id(run, "mlflow")
        if own is not None:
            self._client.update_run(own, status="RUNNING")
            self._id = own
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "tilegrad")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        _save_id(run, "mlflow", self._id)
        params = [Param(key, str(value)) for key, value in _plain(hyper_parameters).items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])

    def append(self, step: int, points: Points) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(name, float(value), now, step) for name, value in points.items()]
        if len(self._waiting) >= _BATCH // 2 or time.monotonic() - self._sent_at > _FLUSH_S:
            self._send()

    def _send(self) -> None:
        for at in range(0, len(self._waiting), _BATCH):
            self._client.log_batch(self._id, metrics=self._waiting[at : at + _BATCH])
        self._waiting, self._sent_at = [], time.monotonic()

    def close(self, *, failed: bool) -> None:
        self._send()
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


_KINDS: Mapping[str, Callable[[Path, Mapping[str, object]], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
}


def chosen_loggers(log: str | Sequence[str]) -> tuple[str, ...]:
    """The loggers that `train.log` names; auto: TensorBoard, if it is installed."""
    if log == "auto":
        return ("tensorboard",) if installed("tensorboard") else ()
    if log == "none":
        return ()
    return (log,) if isinstance(log, str) else tuple(log)


def _plain(values: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """Values in types that the packages accept."""
    return {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()}
