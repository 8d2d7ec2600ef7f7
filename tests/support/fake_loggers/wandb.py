"""The calls of wandb that training/loggers.py makes. Runs are files of JSON lines in dir/wandb, one for each call of `init`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAIL_AT: list[str] = []  # names of calls that fail


class Error(Exception):
    pass


class Settings:
    def __init__(self, console: str) -> None:
        self.console = console


class Run:
    def __init__(self, file: Path, id: str) -> None:
        self.id, self._file = id, file

    def _write(self, call: str, **values: Any) -> None:
        if call in FAIL_AT:
            raise Error(f"no network\nin {call}")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"call": call, **values}) + "\n")

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self._write("define_metric", name=name, step_metric=step_metric)

    def log(self, values: dict[str, Any]) -> None:
        self._write("log", values=values)

    def finish(self, exit_code: int) -> None:
        self._write("finish", exit_code=exit_code)


def init(
    *, project: str, name: str, id: str, resume: str, dir: Path, config: dict[str, Any], settings: Settings
) -> Run:
    if "init" in FAIL_AT:
        raise Error("no API key")
    folder = dir / "wandb"
    folder.mkdir(exist_ok=True)
    run = Run(folder / f"offline-run-{len([*folder.iterdir()])}-{id}.jsonl", id)
    run._write("init", project=project, name=name, resume=resume, config=config, console=settings.console)
    return run
