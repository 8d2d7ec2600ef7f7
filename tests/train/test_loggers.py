"""Weights & Biases and MLflow get every number of log.jsonl. CI has stand-ins with the same calls (support/fake_loggers); the
packages themselves are tested in their offline modes, where they are installed."""

from __future__ import annotations

import importlib
import json
import math
import struct
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

import tilegrad
from tilegrad.cli import main
from tilegrad.training import loggers
from tilegrad.training.config import TrainConfig
from tilegrad.training.log import read_log

FAKES = Path(__file__).parents[1] / "support" / "fake_loggers"
SMALL = (
    "--model.n_layer", "1", "--model.n_head", "2", "--model.n_embd", "16", "--model.block_size", "16", "--batch-size", "2",
    "--data", "text.txt", "--out", "run", "--train.eval_interval", "2", "--train.eval_batches", "1",
    "--train.checkpoint_interval", "2", "--train.sample_tokens", "0",
)  # fmt: skip
Point = tuple[str, int, float]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 12, encoding="utf-8")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, list[str]]]:
    """Imports get the stand-ins. Yields package → names of calls that fail."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("wandb", "mlflow")}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlflow.json"))
    yield {name: importlib.import_module(name).FAIL_AT for name in ("wandb", "mlflow")}
    for name in [name for name in sys.modules if name.split(".")[0] in ("wandb", "mlflow")]:
        del sys.modules[name]


def logged() -> list[Point]:
    """The numbers of log.jsonl, resumed steps included."""
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        (f"{name}/{line['kind']}", line["step"], value)
        for line in lines
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    ]


def of_wandb() -> tuple[list[Point], list[dict[str, Any]]]:
    files = sorted(Path("run/wandb").glob("offline-run-*.jsonl"))
    calls = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    logs = [call["values"] for call in calls if call["call"] == "log"]
    return [(name, log["step"], log[name]) for log in logs for name in log if name != "step"], calls


def of_mlflow() -> tuple[list[Point], dict[str, Any]]:
    (run,) = json.loads(Path("mlflow.json").read_text(encoding="utf-8"))["runs"].values()
    return [(name, step, value) for name, step, value in run["metrics"]], run


@pytest.mark.usefixtures("fakes")
def test_loggers_have_the_numbers_of_the_log_and_a_resumed_run_continues_them() -> None:
    both = ["--log", '["wandb", "mlflow"]']
    assert main(["train", *SMALL, "--steps", "4", *both]) == 0
    # trains steps 3 and 4 again
    assert main(["train", "--resume", "run/checkpoints/000001-step-2", "--steps", "6"]) == 0
    assert main(["train", "--resume", "run", "--steps", "7", "--log", "none"]) == 0
    numbers = [point for point in logged() if point[1] <= 6]
    assert len([point for point in numbers if point[0] == "loss/train"]) == 4 + 4
    points, calls = of_wandb()
    assert points == numbers
    begun = [call for call in calls if call["call"] == "init"]
    assert len(begun) == 2 and begun[0]["config"]["train.steps"] == 4 and begun[0]["console"] == "off"
    assert [call["exit_code"] for call in calls if call["call"] == "finish"] == [0, 0]
    ids = json.loads(Path("run/loggers.json").read_text(encoding="utf-8"))
    assert all(file.stem.endswith(ids["wandb"]) for file in Path("run/wandb").iterdir())
    points, run = of_mlflow()
    assert points == numbers and run["status"] == "FINISHED" and run["name"] == "run"
    assert run["params"]["train.steps"] == "4" and run["params"]["model.n_kv_head"] == "None"
    assert not Path("run/tensorboard").exists()


@pytest.mark.parametrize("call", ["init", "log", "finish", "create_run", "log_batch", "set_terminated"])
def test_the_error_of_a_logger_is_one_sentence_and_the_run_continues(
    call: str, fakes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    name, other = ("wandb", "mlflow") if call in ("init", "log", "finish") else ("mlflow", "wandb")
    fakes[name].append(call)
    assert main(["train", *SMALL, "--steps", "3", "--log", '["wandb", "mlflow"]']) == 0
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and error.startswith(f"tilegrad: {name}: ")
        and f"no {'API' if call == 'init' else 'net'}" in error
    )
    assert error.endswith("; the run continues without it, and log.jsonl has every number\n")
    assert [record["step"] for record in read_log(Path("run/log.jsonl")) if record["kind"] == "train"] == [1, 2, 3]
    points = of_mlflow()[0] if other == "mlflow" else of_wandb()[0]
    assert points == logged()


def test_the_error_for_an_invalid_id_is_a_sentence(
    fakes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not fakes["wandb"]
    assert main(["train", *SMALL, "--steps", "2", "--log", "wandb"]) == 0
    Path("run/loggers.json").write_text('{"wandb": "../../x", "mlflow": "0"}', encoding="utf-8")
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--steps", "3", "--log", '["wandb", "mlflow"]']) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert "run/loggers.json: got '../../x' for wandb; accepted: an id; delete this file to log a new run" in first
    assert "mlflow: MlflowException: Run with id=0 not found" in second


def test_wandb_does_not_write_through_a_link(fakes: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert not fakes["wandb"]
    assert main(["train", *SMALL, "--steps", "2", "--log", "none"]) == 0
    Path("mine").mkdir()
    Path("run/wandb").symlink_to(Path("mine").absolute())
    assert main(["train", "--resume", "run", "--steps", "3", "--log", "wandb"]) == 0
    assert "run/wandb: got a symbolic link" in capsys.readouterr().err and not [*Path("mine").iterdir()]


def test_a_run_that_ends_with_an_error_is_marked_as_failed(
    fakes: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not fakes["mlflow"]
    monkeypatch.setattr(tilegrad.Engine, "evaluate", lambda *_, **_ends: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", *SMALL, "--steps", "2", "--log", '["wandb", "mlflow"]'])
    assert of_mlflow()[1]["status"] == "FAILED" and of_wandb()[1][-1] == {"call": "finish", "exit_code": 1}


@pytest.mark.parametrize("name", loggers.LOGGERS)
def test_a_logger_that_is_not_installed_is_refused_with_the_pip_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).mkdir()  # wandb leaves a folder with its name, which Python takes for a package
    found = importlib.util.find_spec
    folder = PathFinder.find_spec(name, [str(Path.cwd())])  # whether or not the package is installed
    assert folder is not None and folder.origin is None
    spec = folder if name != "tensorboard" else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda word: spec if word == name else found(word))
    assert main(["train", *SMALL, "--log", name]) == 2
    assert (
        capsys.readouterr().err
        == f"tilegrad: log: got '{name}', which is not installed; pip install 'tilegrad[{name}]'\n"
    )
    assert not Path("run").exists()


@pytest.mark.parametrize("given", ["wandbs", 3, None, ["auto"], ["wandb", "wandb"], ["none"], [[]], True])
def test_an_unknown_logger_is_refused(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^log: got .*; accepted: 'auto', 'none', or tensorboard, wandb, mlflow, or a list"
    ):
        TrainConfig(log=given)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records in a file of wandb, in LevelDB's log format: blocks of 32 KiB with pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not loggers.installed("wandb"), reason="wandb is not installed (pip install 'tilegrad[wandb]')")
def test_the_real_wandb_gets_the_numbers_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    for steps in (["--steps", "3"], ["--resume", "run", "--steps", "5"]):
        assert main(["train", *(SMALL if "--resume" not in steps else ()), *steps, "--log", "wandb"]) == 0
    files = sorted(Path("run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    records = [record for file in files for record in wandb_records(file)]
    histories = [wandb_items(record.history.item) for record in records]
    points = [(k, found["step"], found[k]) for found in histories for k in found if k != "step" and k[0] != "_"]
    assert sorted(points) == sorted(logged())
    config = next(wandb_items(record.run.config.update) for record in records if record.HasField("run"))
    assert config["train.steps"] == 3 and config["model.n_embd"] == 16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not loggers.installed("mlflow"), reason="mlflow is not installed (pip install 'tilegrad[mlflow]')")
def test_the_real_mlflow_gets_the_numbers_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/m.db")
    for steps in (["--steps", "3"], ["--resume", "run", "--steps", "5"]):
        assert main(["train", *(SMALL if "--resume" not in steps else ()), *steps, "--log", "mlflow"]) == 0
    client = MlflowClient()
    run = json.loads(Path("run/loggers.json").read_text(encoding="utf-8"))["mlflow"]
    found = client.get_run(run)
    points = [(k, each.step, each.value) for k in found.data.metrics for each in client.get_metric_history(run, k)]
    assert sorted(points) == sorted(logged())
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "3" and found.data.params["model.n_embd"] == "16"


def test_numbers_that_are_not_finite_are_logged_as_they_are(fakes: dict[str, list[str]]) -> None:
    assert not fakes["wandb"]
    Path("run").mkdir()
    log = loggers.Loggers(["wandb"], Path("run"), {})
    log.append(3, "train", {"loss": math.inf, "note": "text"})
    log.close()
    assert of_wandb()[0] == [("loss/train", 3, math.inf)]
