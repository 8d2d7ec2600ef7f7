"""`tilegrad generate`: prompts from the command line, files and stdin; output as text or as lines of JSON."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.decoders import ScriptedDecoder, scripted

import tilegrad
from tilegrad.cli import generation as command
from tilegrad.cli import main
from tilegrad.training import generation

SMALL: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 32},
    "train": {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 0, "sample_tokens": 0, "log": "none"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tilegrad.train(SMALL, folder / "run")
    return folder


@pytest.fixture(autouse=True)
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def lines(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    assert main(["generate", "run", "--json", *words]) == code, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_sequence_has_a_line_of_json_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["the", "é 🦊", "--num-samples", "2", "--max-tokens", "6", "--seed", "3"]
    found = lines(capsys, *words)
    expected = tilegrad.generate("run", ["the", "é 🦊"], num_samples=2, max_tokens=6, seed=3)
    assert [(f["prompt"], f["text"], tuple(f["tokens"]), f["finish"]) for f in found] == [
        (one.prompt, one.text, one.tokens, one.finish) for one in expected
    ]
    assert [list(one) for one in found] == [["prompt", "text", "tokens", "finish"]] * 4
    assert found == lines(capsys, *words, "--batch-size", "1")
    assert all(len(one["logprobs"]) == 6 for one in lines(capsys, *words, "--logprobs"))
    assert all(one["logprobs"][0] < 0 for one in lines(capsys, *words, "--logprobs"))


def test_prompts_come_from_files_and_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def prompts(*words: str, stdin: str = "") -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return [one["prompt"] for one in lines(capsys, *words, "--max-tokens", "1")]

    Path("prompts.txt").write_bytes("the\r\n é\u2028x \n二\n".encode())
    assert prompts("--prompt-file", "prompts.txt") == ["the", " é\u2028x ", "二"]
    assert prompts("--prompt-file", "-", stdin="a\nb") == ["a", "b"]
    assert prompts("-", stdin="a\n\nb\n") == ["a\n\nb"]
    assert prompts("x", "-", "y", stdin="mid") == ["x", "mid", "y"]
    assert prompts("--prompt", "one") == ["one"] and prompts() == ["Call me "]
    assert prompts("x", "--seed", "1", "y") == ["x", "y"]
    with pytest.raises(SystemExit):
        main(["generate", "run", "x", "--sed", "1"])
    assert "unrecognized arguments: --sed (did you mean --seed?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b", "--prompt", "c"], "prompt: got 'a b' and --prompt 'c'; accepted: one of them"),
        (
            ["--prompt", "c", "--prompt-file", "f"],
            "prompt: got --prompt 'c' and --prompt-file 'f'; accepted: one of them",
        ),
        (["-", "-"], "prompt: got '-', which reads stdin, more than once; accepted: once"),
        (["--prompt-file", "nope"], "nope: no such file; accepted: a file"),
        (["--prompt-file", "gap.txt"], "gap.txt: got no text in line 2; accepted: a prompt in each line"),
        (["--prompt-file", "empty.txt"], "empty.txt: got no text in line 1; accepted: a prompt in each line"),
        (["a", ""], "prompts[1]: got ''; accepted: a text of at least one token"),
        (["a", "--stop", ""], "stop: got ''; accepted: a text of at least one character, or a list of such texts"),
        (["a", "--top-p", "0"], "top_p: got 0.0; accepted: a number in (0, 1]"),
        (["a", "--logprobs"], "logprobs: got --logprobs without --json; accepted: both"),
        (["a", "--num-samples", "0"], "num_samples: got 0; accepted: an int ≥ 1"),
        (["a", "--device", "cuda:99"], "device: got 'cuda:99'"),
    ],
)
def test_errors_of_generate_are_sentences(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("gap.txt").write_text("a\n\nb\n", encoding="utf-8")
    Path("empty.txt").touch()
    assert main(["generate", "run", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"tilegrad: {said}") and error.count("\n") == 1


class Interrupted(ScriptedDecoder):
    """Ctrl-C comes in the sixth step."""

    def submit(self) -> None:
        if self.steps == 5:
            raise KeyboardInterrupt
        super().submit()


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    script = scripted(lambda sequence, draws: ord("a") + draws + sequence, kind=Interrupted)
    monkeypatch.setattr(generation, "Decoder", script)


@pytest.mark.usefixtures("interrupted")
def test_one_sequence_is_printed_while_it_is_written_and_ctrl_c_keeps_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "run", "the ", "--max-tokens", "20"]) == 130
    assert capsys.readouterr() == ("the abcdef\n", "")


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_the_sequences_that_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, *"wxyz", "--max-tokens", "3", "--batch-size", "1", code=130)
    assert [one["prompt"] + one["text"] for one in found] == ["wabc", "xbcd"]
    assert main(["generate", "run", *"wxyz", "--max-tokens", "3", "--batch-size", "1"]) == 130
    assert capsys.readouterr().out == "── 1 of 4 ──\nwabc\n── 2 of 4 ──\nxbcd\n"


def test_many_sequences_show_progress_and_verbose_shows_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SHOWN_S", 0.0)
    assert main(["generate", "run", "a", "b", "--max-tokens", "3", "--verbose"]) == 0
    error = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"1 of 2 sequences, 3 tokens, [\d,.]+ tokens/s", error[0]) and error[1].startswith("2 of 2 seq")
    assert re.fullmatch(r"tilegrad: 6 tokens in \d+\.\d\d s, [\d,.]+ tokens/s", error[2]) and len(error) == 3
    assert main(["generate", "run", "a", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_is_on_stderr_and_not_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", Terminal())
    found = lines(capsys, "a", "b", "--max-tokens", "3")
    assert [one["prompt"] for one in found] == ["a", "b"]
    assert isinstance(sys.stderr, Terminal) and "2 of 2 sequences, 6 tokens" in sys.stderr.getvalue()


def test_stop_strings_end_a_text_and_slides_of_the_window_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = lines(capsys, "the ", "--max-tokens", "40", "--temperature", "1")
    stop = next(c for c in whole["text"][2:] if c != "�")
    (ended,) = lines(capsys, "the ", "--max-tokens", "40", "--temperature", "1", "--stop", "never", "--stop", stop)
    assert ended["text"] == whole["text"].partition(stop)[0] and ended["finish"] == "stop"
    assert main(["generate", "run", "x" * 40, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err == (
        "tilegrad: prompt: got 40 tokens, and only the last 32 are read; 42 tokens are more than block_size, 32: the window "
        "slides, and a token attends to the last 16 to 32 before it\n"
    )
