"""The log survives when a run is killed. The report shows the log and needs no other file."""

from __future__ import annotations

import html
import json
import math
import resource
import shutil
import subprocess
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.page import Page, check_alone

from tilegrad.memory.page import Span, timeline_page
from tilegrad.memory.types import BufferType
from tilegrad.text import environment
from tilegrad.training.log import RunLog, read_log
from tilegrad.training.report import run_report, run_tables
from tilegrad.training.resident import Resident
from tilegrad.training.sections import preset_run


def test_records_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.jsonl"
    with RunLog(path) as run:
        run.append(1, "train", {"loss": 0.1 + 0.2, "tokens": 7, "note": "a\nb"})
        assert read_log(path) == [{"step": 1, "kind": "train", "loss": 0.1 + 0.2, "tokens": 7, "note": "a\nb"}]
        run.append(1, "validation", {"loss": math.nan, "other": -math.inf})
    assert read_log(path)[1] == {"step": 1, "kind": "validation", "loss": None, "other": None}
    run.close()
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path) as run:
        run.append(1, "train", {"loss": 3.0})
        run.append(2, "train", {"loss": 2.0})
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2):
        path.write_bytes(whole[:-cut])
        assert [r["step"] for r in read_log(path)] == [1], cut
        with RunLog(path) as run:
            run.append(3, "train", {"loss": 1.0})
        assert [r["step"] for r in read_log(path)] == [1, 3], cut
    path.write_bytes(b'{"st')
    with RunLog(path) as run:
        run.append(1, "train", {})
    assert read_log(path) == [{"step": 1, "kind": "train"}]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"step": 1}', "", "\\xff"])
def test_a_damaged_line_inside_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 1, "kind": "train"}}\n{line}\n{{"step": 2, "kind": "train"}}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 is not a record"):
        read_log(path)


def test_records_after_the_step_of_a_resume_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RunLog(path) as run:
        for step in (1, 2, 3, 4):
            run.append(step, "train", {"loss": float(step)})
        run.append(2, "validation", {"loss": 9.0})
    with RunLog(path) as run:
        run.append(2, "resume", {})
        run.append(3, "train", {"loss": 30.0})
    assert [(r["step"], r["kind"], r.get("loss")) for r in read_log(path)] == [
        (1, "train", 1.0), (2, "train", 2.0), (2, "validation", 9.0), (2, "resume", None), (3, "train", 30.0),
    ]  # fmt: skip
    assert len(path.read_text(encoding="utf-8").splitlines()) == 7, "nothing that was written is rewritten"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    chosen = {"train.steps": 7, "model.activation": "gelu", "data.files": ["a.txt"]}
    with RunLog(tmp_path / "log.jsonl", loggers=["tensorboard"], hyper_parameters=chosen) as run:
        run.append(3, "train", {"loss": 1.5, "note": "text"})
        run.append(4, "train", {"loss": 1.25})
        run.append(4, "validation", {"loss": 1.75})
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["loss/train", "loss/validation"]
    assert [(e.step, e.value) for e in found.Scalars("loss/train")] == [(3, 1.5), (4, 1.25)]
    plugin = HParamsPluginData.FromString(found.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    assert plugin.session_start_info.hparams["train.steps"].number_value == 7
    assert plugin.session_start_info.hparams["model.activation"].string_value == "gelu"
    assert plugin.session_start_info.hparams["data.files"].string_value == "['a.txt']"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 60, 300, 700])
def test_the_error_of_a_disk_without_room_for_tensorboard_names_the_file(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of TensorBoard would print a traceback."""
    pytest.importorskip("tensorboard")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(
        RunLog, "append", lambda self, *values: self._loggers.append(*values)
    )  # log.jsonl has its own test
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    threads = set(threading.enumerate())
    try:
        with RunLog(tmp_path / "log.jsonl", loggers=["tensorboard"], hyper_parameters={"a": 1}) as run:
            for step in range(200):
                run.append(step, "t", {"loss": 1.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert set(threading.enumerate()) <= threads  # no thread writes on its own
    error = capsys.readouterr().err
    assert error.startswith("tilegrad: tensorboard: OSError: [Errno 27] File too large: ") and error.count("\n") == 1
    assert f"{tmp_path}/tensorboard/events" in error and error.endswith(
        "; the run continues without it, and log.jsonl has every number\n"
    )


class RunPage(Page):
    def curves(self, chart: int) -> dict[str, list[tuple[int, float | None]]]:
        data: list[dict[str, Any]] = json.loads(self.text["script"][0])
        return {line["name"]: list(zip(line["x"], line["y"], strict=True)) for line in data[chart]["series"]}


MEMORY = timeline_page("step", [Span("x", BufferType.TEMP, 0, 1, 64)], unit="op", facts={"device": "cpu"})
RECORDS: list[dict[str, Any]] = [
    {"step": s, "kind": "train", "loss": 5.0 - s / 4, "learning_rate": s * 1e-4}
    | {"gradient_norm": 1.0 + s, "tokens_per_second": 100.0, "measured_bytes": s << 20}
    for s in range(1, 11)
]
RECORDS.insert(5, {"step": 5, "kind": "validation", "loss": 4.5})
RECORDS.append({"step": 10, "kind": "validation", "loss": 2.75})
FACTS = {"device": "cpu", "parameters": "1,024"}


def page(**change: Any) -> str:
    return run_report(**({"title": "a run", "records": RECORDS, "facts": FACTS, "sample": "the whale"} | change))


def test_the_page_has_every_value_of_the_log() -> None:
    found = RunPage(page(unigram_entropy=3.125, planned_bytes=3 << 20, memory_page=MEMORY))
    assert found.curves(0) == {
        "train": [(s, 5.0 - s / 4) for s in range(1, 11)],
        "validation": [(5, 4.5), (10, 2.75)],
    }
    assert found.curves(1) == {"": [(s, s * 1e-4) for s in range(1, 11)]}
    assert found.curves(2) == {"": [(s, 1.0 + s) for s in range(1, 11)]}
    assert found.curves(3) == {"": [(s, 100.0) for s in range(1, 11)]}
    assert found.curves(4) == {"": [(s, float(s)) for s in range(1, 11)]}
    assert json.loads(found.text["script"][0])[0]["levels"] == [{"name": "unigram entropy", "y": 3.125}]
    assert json.loads(found.text["script"][0])[4]["levels"] == [{"name": "planned", "y": 3.0}]
    assert [chart["from_zero"] for chart in json.loads(found.text["script"][0])] == [False, True, True, True, True]
    with pytest.raises(ValueError, match="not JSON compliant"):
        page(unigram_entropy=float("nan"))
    assert found.text["h1"] == ["a run"] and found.text["pre"] == ["the whale"]
    assert {"cpu", "1,024"} <= set(found.text["dd"])
    assert found.tags.count("canvas") == 10
    assert found.attributes["iframe"]["srcdoc"] == MEMORY


def test_the_tables_have_hyper_parameters_the_data_the_machine_and_memory_by_role() -> None:
    run = preset_run("tiny")
    held = Resident(100 << 20, {"params": 60 << 20, "activations": 40 << 20}, 7 << 20, 9 << 20, "cpu")
    records = [{"step": 0, "kind": "data", "files": 2, "documents": 3, "bytes": 4567, "tokens": 1234}, *RECORDS]
    tables = run_tables(run, records, {"torch": "2.11", "device": "a CPU"}, held)
    found = RunPage(page(tables=tables))
    assert {"Model", "Training", "Data", "Text", "Environment", "Memory by role"} <= set(found.text["h2"])
    cells = found.text["td"]
    for part in run.plain().values():
        assert all(name in cells for name in part)
    for name, value in (
        ("documents", "3"),
        ("bytes", "4,567"),
        ("tokens", "1,234"),
        ("torch", "2.11"),
        ("device", "a CPU"),
    ):
        assert (name, value) in pairwise(cells)
    for name, value in (("params", "60.00 MiB"), ("the plan's arenas", "100.00 MiB"), ("planned", "100.00 MiB")):
        assert (name, value) in pairwise(cells)
    assert str(held) == "107.00 MiB = 100.00 MiB of the plan + 7.00 MiB memory of torch, BLAS and Python"


def test_a_resumed_step_is_drawn_once_and_a_bad_one_is_a_gap() -> None:
    records = [{"step": s, "kind": "train", "loss": y} for s, y in ((1, 4.0), (2, 9.0), (2, 3.0), (3, None))]
    assert RunPage(page(records=records)).curves(0) == {"train": [(1, 4.0), (2, 3.0), (3, None)]}
    assert RunPage(page(records=records)).curves(1) == {"": []}


def test_a_long_run_has_a_running_mean() -> None:
    losses: list[float | None] = [math.sin(s) + 3 for s in range(300)]
    losses[100] = None
    found = RunPage(page(records=[{"step": s, "kind": "train", "loss": y} for s, y in enumerate(losses)])).curves(0)
    assert list(found) == ["train", "mean of 5"]
    assert [y for _, y in found["train"]] == losses
    for step, mean in found["mean of 5"]:
        known = [y for y in losses[max(0, step - 2) : step + 3] if y is not None]
        assert mean == pytest.approx(sum(known) / len(known), rel=1e-9)


def test_a_run_without_records_has_a_page() -> None:
    found = RunPage(page(records=[], sample="", facts={}))
    assert found.curves(0) == {"train": []}
    assert "pre" not in found.tags and "iframe" not in found.tags


def test_the_page_needs_no_network() -> None:
    text = page(unigram_entropy=3.0, memory_page=MEMORY)
    check_alone(text)


def test_the_page_escapes_all_text() -> None:
    evil = '</script></pre></iframe><img src=x onerror="alert(1)"><!--data-->&'
    clean = RunPage(page(memory_page="a", tables={"Data": [("files", "a")]}))
    records = [*RECORDS, {"step": 11, "kind": "train", "loss": evil}]  # a log that someone edited
    facts = {evil: evil, "parameters": evil}
    found = RunPage(
        page(title=evil, records=records, facts=facts, sample=evil, memory_page=evil, tables={evil: [(evil, evil)]})
    )
    assert found.tags == clean.tags
    assert found.text["h1"] == found.text["pre"] == [evil]
    assert found.attributes["iframe"]["srcdoc"] == evil
    assert html.escape(evil) in page(title=evil)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_environment_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    said = environment.environment(torch.device("cpu"), torch.bfloat16)
    assert (said["commit"], said["dtype"], said["cudnn"]) == ("unknown", "bfloat16", None)
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert environment.environment(torch.device("cpu"), torch.bfloat16)["commit"] == head
