"""`tilegrad generate`: prompts from the command line, files and stdin; output as text or as lines of JSON."""

from __future__ import annotations

import codecs
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.decoders import ScriptedDecoder, scripted
from support.pairwise import covering

import tilegrad
from tilegrad.cli import build_parser, main
from tilegrad.cli import generation as command
from tilegrad.engine.decoder import Decoder
from tilegrad.kernels.cpu import library
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
    Path("marked.txt").write_bytes(codecs.BOM_UTF8 + b"the\na\n")
    assert prompts("--prompt-file", "prompts.txt") == ["the", " é\u2028x ", "二"]
    assert prompts("--prompt-file", "marked.txt") == ["the", "a"]
    assert prompts("--prompt-file", "-", stdin="a\nb") == ["a", "b"]
    assert prompts("--prompt-file", "-", stdin="\ufeffa\nb") == prompts("a", "b")
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
    monkeypatch.setattr(command, "_PROGRESS_S", 0.0)
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


FLAGS: dict[str, tuple[object, ...]] = {  # flag of `generate` → some of its values; None: the flag is not given
    "text": (("the",), ("a longer prompt", "the"), ("a", "b", "c", "d")),
    "max_tokens": (1, 9, 40),
    "num_samples": (1, 3),
    "batch_size": (None, 1, 2),
    "temperature": (0.0, 0.8),
    "top_k": (None, 5),
    "top_p": (1.0, 0.9),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (None, 1.0, 0.5, 1.5),
    "seed": (0, 7),
    "dtype": (None, "float32", "float64", "bfloat16"),
    "invariant": (False, True),
    "stop": (None, "e"),
    "no_eos": (False, True),
    "json": (False, True),
    "logprobs": (False, True),
    "verbose": (False, True),
    "averaged": (True, False),
}
NOT_DRAWN = {"help", "run_folder", "prompt", "prompt_file", "best", "init", "average", "device"}


def is_accepted(spec: dict[str, Any]) -> bool:
    """Whether `generate` takes this combination of values on this machine."""
    without_library = isinstance(library.library(), str)
    invariant = spec.get("invariant") and (without_library or spec.get("dtype") == "float64")
    return not invariant and not (spec.get("logprobs") and not spec.get("json", True))


def flags_of(command: Any, spec: dict[str, Any]) -> list[str]:
    """The values of a specification as a command line."""
    words = []
    for action in command._actions:
        value = spec.get(action.dest)
        if not action.option_strings or value is None or value is action.default:
            continue
        words += [action.option_strings[0], *([] if action.nargs == 0 else [str(value)])]
    return words


def test_a_plan_has_the_bytes_that_generate_allocates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders: list[Decoder] = []

    def recorded(*given: Any, **options: Any) -> Decoder:
        decoders.append(Decoder(*given, **options))
        return decoders[-1]

    monkeypatch.setattr(generation, "Decoder", recorded)
    command = build_parser().parse_args(["generate", "run"]).parser
    assert {action.dest for action in command._actions} == {*FLAGS} | NOT_DRAWN
    model = tilegrad.load("run")
    keys = [word for name, value in SMALL["model"].items() for word in (f"--model.{name}", str(value))]
    keys += ["--model.vocab_size", str(model.config.vocab_size)]
    for spec in covering(FLAGS, is_accepted):
        assert main(["generate", "run", *spec["text"], *flags_of(command, spec), "--device", "cpu"]) == 0, spec
        sequences = len(spec["text"]) * spec["num_samples"]
        planned = {
            "--batch-size": min(sequences, spec["batch_size"] or 32),
            "--max-tokens": spec["max_tokens"],
            "--prompt-tokens": max(len(model.tokenizer.encode(text)) for text in spec["text"]),
            "--repetition-penalty": spec["repetition_penalty"],
            "--dtype": spec["dtype"] or "float32",
            "--train.invariant": str(spec["invariant"]).lower(),
        }
        words = [str(word) for pair in planned.items() for word in pair if pair[1] is not None]
        capsys.readouterr()
        assert main(["plan", "--generate", *keys, "--device", "cpu", *words, "--json"]) == 0, capsys.readouterr().err
        found = json.loads(capsys.readouterr().out)
        in_place = {"frozen"} - decoders[-1].plan.arenas.keys()  # the weights of the model, which are not copied
        rows = [row["at_most_bytes"] for row in found["roles"] if row["name"] in in_place]
        assert len(rows) == len(in_place)
        assert found["peak_bytes"] - sum(rows) == decoders[-1].arenas.nbytes, spec
    assert len(decoders) > 10
