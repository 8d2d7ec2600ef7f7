"""The calls of MLflow that training/loggers.py makes. The tracking URI is the name of a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .entities import Metric, Param
from .exceptions import MlflowException

FAIL_AT: list[str] = []  # names of calls that fail


class MlflowClient:
    def __init__(self) -> None:
        self._file = Path(os.environ["MLFLOW_TRACKING_URI"])

    def _store(self, call: str) -> dict[str, Any]:
        if call in FAIL_AT:
            raise MlflowException(f"no network in {call}")
        found: dict[str, Any] = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        return {"experiments": {}, "runs": {}} | found

    def _save(self, store: dict[str, Any]) -> None:
        self._file.write_text(json.dumps(store), encoding="utf-8")

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        found = self._store("get_experiment_by_name")["experiments"].get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str) -> str:
        store = self._store("create_experiment")
        store["experiments"][name] = str(len(store["experiments"]))
        self._save(store)
        return str(store["experiments"][name])

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        store = self._store("create_run")
        run_id = f"{len(store['runs']):032x}"
        store["runs"][run_id] = {"experiment": experiment_id, "name": run_name, "metrics": [], "params": {}}
        self._save(store)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        store = self._store("update_run")
        if run_id not in store["runs"]:
            raise MlflowException(f"Run with id={run_id} not found")
        store["runs"][run_id]["status"] = status
        self._save(store)

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100, "MLflow refuses more"
        store = self._store("log_batch")
        run = store["runs"][run_id]
        run["metrics"] += [[m.key, m.step, m.value] for m in metrics]
        run["params"] |= {p.key: p.value for p in params}
        self._save(store)

    def set_terminated(self, run_id: str, status: str) -> None:
        self._store("set_terminated")
        self.update_run(run_id, status)
