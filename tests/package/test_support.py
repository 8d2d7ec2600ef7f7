"""Tests of the shared support code that otherwise only a GPU would run."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import conftest
import pytest
from support.forked import python
from support.sweep import Verdict, report

from tilegrad.kernels.cpu import library
from tilegrad.native import build


def test_a_sweep_is_reported_as_json(tmp_path: Path) -> None:
    verdicts = [Verdict(1, 3, ["specification 1, seed 0: wrong"], Counter({"fwd": 2})), Verdict(0, 2)]
    line = report("some", verdicts, tmp_path)
    assert line.startswith("some: 4 of 5 random shapes of 2 specifications pass")
    found = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert (found["shapes"], found["passed"]) == (5, 4)
    assert [row["specification"] for row in found["specifications"]] == [0, 1]
    assert found["specifications"][1]["specialised"] == {"fwd": 2}


def test_forked_code_gives_the_output_and_exit_code_of_a_new_process() -> None:
    done = python("import sys; print(sys.argv[1:]); sys.exit(3)", "a", "b")
    assert (done.stdout, done.stderr, done.returncode) == ("['a', 'b']\n", "", 3)
    done = python("1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -9
    with pytest.raises(subprocess.TimeoutExpired):
        python("import time; time.sleep(60)", timeout=0.1)


def test_the_first_run_reports_that_it_compiles(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    monkeypatch.setattr(build, "build", lambda: capsys.readouterr().out or pytest.fail("compiles without a word"))
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "none.so")
    monkeypatch.setattr(pytestconfig, "addinivalue_line", lambda _name, _line: None)
    library.library.cache_clear()
    try:
        conftest.pytest_configure(pytestconfig)
        assert capsys.readouterr().out.startswith("… 0 s")
    finally:
        monkeypatch.undo()
        library.library.cache_clear()
