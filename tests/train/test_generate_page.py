"""docs/generate.md: every command runs with a small model that the test makes, and every error is printed as on the page."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.chats import CHATML, write_chat_model

from tilegrad.cli import main
from tilegrad.kernels.cpu import library

pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")
pytest.importorskip("jinja2", reason="needs pip install 'tilegrad[chat]'")

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_chat_model(folder / "models" / "smollm2", CHATML)
    (folder / "prompts.txt").write_text(blocks("text")[1], encoding="utf-8")
    (folder / "gap.txt").write_text("a\n\nb\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def test_every_command_of_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [words for line in "".join(blocks("sh")).splitlines() if (words := shlex.split(line, comments=True))]
    assert len(lines) >= 7
    for program, *words in lines:
        assert program == "tilegrad"
        monkeypatch.setattr(sys, "stdin", io.StringIO("fox?\n/system lazy\n/reset\n/exit\nnever read\n"))
        assert main(words) == 0, (words, capsys.readouterr().err)
        out, error = capsys.readouterr()
        assert ("tokens/s" in error) == ("--verbose" in words)
        if "--json" in words:
            found = [json.loads(line) for line in out.splitlines()]
            keys = {"prompt", "text", "tokens", "finish"} | ({"logprobs"} if "--logprobs" in words else set())
            assert len(found) in (3, 4) and all(one.keys() == keys for one in found)
            assert all(f"`{key}`" in PAGE for key in keys)
        elif words[0] == "generate":
            assert out.startswith("Call me")


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    invariance, code = blocks("python")
    if not isinstance(library.library(), str):  # invariance needs it
        exec(compile(invariance, "generate.md", "exec"), {})
    exec(compile(code, "generate.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("models/none a", "models/none: no such folder"),
        ("models/smollm2 ''", "prompt: got ''; accepted: a text of at least one token"),
        (
            "models/smollm2 caf\udce9",
            r"prompt: got half of a surrogate pair in 'caf\udce9'; accepted: text that UTF-8 can encode",
        ),
        ("models/smollm2 a --stop ''", "stop: got ''; accepted: a text of at least one character"),
        ("models/smollm2 a --top-p 0", "top_p: got 0.0; accepted: a number in (0, 1]"),
        ("models/smollm2 a --device cuda:99", "device: got 'cuda:99'"),
        ("models/smollm2 a --logprobs", "logprobs: got --logprobs without --json"),
        ("models/smollm2 --prompt-file gap.txt", "got no text in line 2; accepted: a prompt in each line"),
    ],
)
def test_the_errors_of_the_page_are_printed(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *shlex.split(command)]) == 2
    assert words in capsys.readouterr().err and f"`{words}" in PAGE
