"""A plugin of pytest for the mutants. It records which functions of the package each test calls, or runs chosen tests.

CALLED=file   writes {test: [passed, seconds, [path:line of each function called]]}, calls on ranks included
UNTRACED=1    leaves the functions out
PICKED=file   runs the tests that the file names, one in a line, in its order
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = f"{Path(__file__).resolve().parents[2]}/"
_found: dict[str, tuple[bool, float, list[str]]] = {}
_passed: dict[str, bool] = {}
_codes: dict[int, CodeType] = {}


def _note(frame: FrameType, _event: str, _argument: Any) -> None:
    code = frame.f_code
    _codes[id(code)] = code


def _ours() -> set[str]:
    called = {f"{code.co_filename.removeprefix(ROOT)}:{code.co_firstlineno}" for code in _codes.values()}
    return {name for name in called if name.startswith("src/")}


@contextmanager
def on_a_rank() -> Iterator[None]:
    """Records the functions that a test calls in a process that it started."""
    _codes.clear()
    sys.settrace(_note)
    try:
        yield
    finally:
        sys.settrace(None)
        with Path(f"{os.environ['CALLED']}.ranks").open("a", encoding="utf-8") as lines:
            lines.writelines(f"{name}\n" for name in _ours())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PICKED" in os.environ:
        place = {name: n for n, name in enumerate(Path(os.environ["PICKED"]).read_text(encoding="utf-8").splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if "CALLED" not in os.environ:
        return (yield)
    _codes.clear()
    began = time.perf_counter()
    if "UNTRACED" not in os.environ:
        threading.settrace(_note)
        sys.settrace(_note)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)
        seconds = time.perf_counter() - began
        ours, ranks = _ours(), Path(f"{os.environ['CALLED']}.ranks")
        if ranks.exists():
            ours |= set(ranks.read_text(encoding="utf-8").splitlines())
            ranks.unlink()
        _found[item.nodeid] = (_passed.pop(item.nodeid, False), seconds, sorted(ours))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _passed[report.nodeid] = report.outcome == "passed"


def pytest_sessionfinish() -> None:
    if "CALLED" in os.environ:
        Path(os.environ["CALLED"]).write_text(json.dumps(_found), encoding="utf-8")
