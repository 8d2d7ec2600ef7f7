"""The progress of a run, in a pipe and in a terminal."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest

from tilegrad.cli import progress
from tilegrad.cli.progress import watch

START = {
    "parameters": 1, "tokens": 2, "planned_bytes": 3 << 20, "unigram_entropy": 1.0, "step": 100, "steps": 400, "folder": "run",
    "resumed_from": None, "ranks": 1, "micro_batches": 1, "idle_ranks": 0, "trained_parameters": 1,
}  # fmt: skip
TRAIN = {
    "loss": 2.5, "learning_rate": 1e-3, "gradient_norm": 0.5, "skipped": 0, "tokens_per_second": 1234.0, "steps": 400,
    "planned_bytes": 3 << 20, "measured_bytes": 4 << 20,
}  # fmt: skip


def test_a_plain_line_has_elapsed_time_time_left_and_tokens_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with watch(out) as show:
        clock[0] = 1050.0  # time before the first step does not count
        show("start", START)
        for step, now in ((101, 1060.0), (200, 1150.0), (399, 5050.0), (400, 5051.0)):
            clock[0] = now
            show("train", TRAIN | {"step": step, "tokens_seen": step * 1024})
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    said = [
        re.search(r"tok/s  ([\d,]+) tokens seen  (\S+) elapsed, (\S+) left  memory 3.00 MiB planned", l) for l in lines
    ]
    assert [match and match.groups() for match in said] == [
        ("103,424", "0:10", "49:50"), ("204,800", "1:40", "3:20"), ("408,576", "1:06:40", "0:13"),
        ("409,600", "1:06:41", "0:00"),
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_has_times_and_tokens_and_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    large: dict[str, Any] = TRAIN | {"steps": 10_000, "tokens_per_second": 123_456.0, "measured_bytes": 5 << 30}
    with watch(out) as show:
        show("start", START | {"steps": 10_000})
        show("train", large | {"step": 5000, "tokens_seen": 5_242_880_000})
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).replace("\r", "\n")
    (line,) = {line.strip() for line in plain.splitlines() if "tok/s" in line}
    assert re.search(r"5000/10000 loss 2.500 123,456 tok/s 5.2B tok 5.* 0:00:0\d .* left$", line), line
    assert max(map(len, plain.splitlines()[3:])) <= 80


def test_time_left_follows_from_the_mean_speed_when_sequences_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    clock = [1000.0]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    out = Terminal()
    with watch(out) as show:
        show("generate", {"sequence": 0, "sequences": 400, "tokens": 0, "tokens_per_second": 0.0})
        for batch in (1, 2, 3):
            clock[0] += 40.0
            for number in range(4 * batch - 3, 4 * batch + 1):
                clock[0] += 0.001
                numbers = {"sequence": number, "sequences": 400, "tokens": number, "tokens_per_second": 1.0}
                show("generate", numbers)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert re.search(r"12/400 .* 1:04:4\d left", plain), plain  # 388 more, at 120 s for 12


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda _name: None)
    out = Terminal()
    with watch(out) as show:
        show("start", START)
        show("train", TRAIN | {"step": 101, "tokens_seen": 1})
    assert " elapsed, " in out.getvalue()
