"""Conversations → tokens → training: which tokens are targets, where documents end, and errors of bad files."""

from __future__ import annotations

import json
import os
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.chats import LOOPS, RAISES, TEMPLATES, write_chat_model
from support.decoders import scripted
from support.models import equal

import tilegrad
from tilegrad.cli import main
from tilegrad.data.chat_template import Conversation
from tilegrad.data.conversations import trained_tokens
from tilegrad.data.documents import find_format
from tilegrad.data.prepare import load_prepared, prepare
from tilegrad.data.tokenizer import BpeTokenizer, Encoded, eos_token_ids, find_eos, load_tokenizer
from tilegrad.training import generation, loop
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint
from tilegrad.training.schedule import learning_rate

pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("jinja2", reason="needs Jinja2")

TALKS = [("Who spoke?", "It was Ahab."), ("A whale?", "White — as snow"), ("Name?", "Ishmael")]
ENDS = {"chatml": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "bare": "\n</s>"}
SPACED = ("mistral", "bare")  # a space before the answer, which its first token may contain
SMALL: dict[str, dict[str, Any]] = {"model": {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 64}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, template in {**TEMPLATES, "none": None, "raises": RAISES, "loops": LOOPS, "silent": "hello"}.items():
        write_chat_model(folder / name, template)
    return {path.name: path for path in folder.iterdir() if path.is_dir()}


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())


def line(format: str, asked: str, answer: str) -> dict[str, object]:
    found: dict[str, dict[str, object]] = {
        "messages": {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]},
        "prompt": {"prompt": asked, "completion": answer},
        "response": {"prompt": asked, "response": answer},
        "instruction": {"instruction": asked, "input": "", "output": answer},
    }
    return found[format]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return path


def chats(path: Path, format: str = "prompt", count: int = 24) -> Path:
    words = ["sea", "ship", "whale", "white", "harpoon", "captain"]
    return write(path, [line(format, f"Say {words[i % 6]} {i}", " ".join(words[: 1 + i % 6])) for i in range(count)])


@pytest.mark.parametrize("template", [*TEMPLATES, "none"])
@pytest.mark.parametrize("format", ["messages", "prompt", "response", "instruction"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_the_targets_are_the_tokens_of_the_assistant(
    template: str, format: str, train_on: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    file = write(tmp_path / "chats.jsonl", [line(format, *talk) for talk in TALKS])
    found: Any = find_format([file], "text")
    assert found == {"response": "prompt"}.get(format, format)
    arguments: dict[str, Any] = {
        "tokenizer": str(models[template] / "tokenizer.json"),
        "format": found,
        "train_on": train_on,
    }
    if (template, format) == ("none", "messages"):
        with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: messages: got no chat template; accepted: "):
            prepare([file], tmp_path / "data", **arguments)
        return
    tokens, tokenizer = prepare([file], tmp_path / "data", **arguments)
    assert tokens.documents is not None and len(tokens.documents.ends) == len(TALKS)
    begin = 0
    for end, (asked, answer) in zip(tokens.documents.ends.tolist(), TALKS, strict=True):
        trained = tokens.documents.trained(begin, end)
        document = tokens.tokens[begin:end]
        assert asked in tokenizer.decode(document.tolist())
        said = tokenizer.decode(document[trained].tolist())
        if train_on == "assistant":
            assert said.removeprefix(" " * (template in SPACED)) == answer + ENDS.get(template, "</s>")
        else:
            assert trained.tolist() == [False] + [True] * (end - begin - 1)
        begin = end
    again, _ = load_prepared(tmp_path / "data", documents=True)
    assert np.array_equal(again.tokens, tokens.tokens) and again.documents is not None
    assert np.array_equal(again.documents.ends, tokens.documents.ends)
    assert find_eos(tmp_path / "data", tokenizer) == tokenizer.token_id("</s>")


@pytest.mark.parametrize("template", TEMPLATES)
def test_only_the_answers_of_a_long_conversation_are_targets(
    template: str, models: dict[str, Path], tmp_path: Path
) -> None:
    turns = [message for talk in TALKS for message in line("messages", *talk)["messages"]]  # type: ignore[attr-defined]
    file = write(tmp_path / "chats.jsonl", [{"messages": turns}])
    tokens, tokenizer = prepare(
        [file], tmp_path / "data", tokenizer=str(models[template] / "tokenizer.json"), format="messages"
    )
    assert tokens.documents is not None
    trained = tokens.documents.trained(0, len(tokens.tokens))
    edges = np.flatnonzero(np.diff(trained)) + 1
    parts = [part for part, one in zip(np.split(tokens.tokens, edges), np.split(trained, edges), strict=True) if one[0]]
    said = [tokenizer.decode(part.tolist()).removeprefix(" " * (template in SPACED)) for part in parts]
    end = ENDS[template]
    assert said == [
        answer + (end if number == 2 else end.removesuffix("</s>") or end) for number, (_, answer) in enumerate(TALKS)
    ]


def newest(folder: Path) -> Any:
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


@pytest.mark.parametrize(
    ("template", "format", "packing", "train_on"),
    [
        ("chatml", "messages", True, "assistant"),
        ("none", "instruction", False, "all"),
    ],
)
def test_a_run_of_epochs_learns_answers_and_can_be_extended(
    template: str, format: str, packing: bool, train_on: str, models: dict[str, Path], tmp_path: Path
) -> None:
    data = {"files": [str(chats(tmp_path / "chats.jsonl", format))], "packing": packing, "train_on": train_on}
    train = {
        "init": str(models[template]), "batch_size": 2, "seq_len": 64, "learning_rate": 3e-3, "eval_interval": 3,
        "checkpoint_interval": 0, "sample_tokens": 4, "weight_decay": 0.0,
    }  # fmt: skip
    events: list[tuple[str, Any]] = []
    whole = tilegrad.train(
        {"train": {**train, "epochs": 3}, "data": data}, tmp_path / "whole", show=lambda *event: events.append(event)
    )
    numbers = dict(events[::-1])
    assert numbers["data"]["format"] == format and numbers["data"]["held_out"] == 2 and numbers["start"]["epochs"] == 3
    assert numbers["start"]["steps"] == whole.steps
    assert packing == (numbers["data"]["padding"] < 0.4) and whole.steps == (33 if not packing else whole.steps) < 34
    losses = [n["loss"] for event, n in events if event == "validation"]
    assert losses[-1] < losses[0] - 0.1
    epoch, index = (newest(tmp_path / "whole").state["data"][name] for name in ("epoch", "index"))
    assert (epoch, index) in ((2, numbers["data"]["rows"]), (3, 1)) or packing, "three epochs, and the rest of a step"
    (tmp_path / "chats.jsonl").unlink()
    longer = tilegrad.train({"train": {"steps": whole.steps + 2}}, resume=tmp_path / "whole")
    assert longer.steps == whole.steps + 2 and newest(tmp_path / "whole").state["run"]["train"]["epochs"] is None


@pytest.mark.parametrize("packing", [True, False])
def test_tokens_per_second_count_prompts_and_no_padding(
    packing: bool, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr("tilegrad.training.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    data = {"files": [str(chats(tmp_path / "chats.jsonl"))], "packing": packing, "validation_fraction": 0.0}
    train = {
        "init": str(models["chatml"]), "batch_size": 1, "seq_len": 64, "epochs": 2, "log_interval": 1, "eval_batches": 0,
        "sample_tokens": 0,
    }  # fmt: skip
    events: list[tuple[str, Any]] = []
    tilegrad.train({"train": train, "data": data}, tmp_path / "run", show=lambda *event: events.append(event))
    steps, counts = [n for event, n in events if event == "train"], dict(events[::-1])["data"]
    total = 2 * (counts["tokens"] - counts["cut_tokens"] - counts["documents"])  # the last token is only a target
    assert sum(n["tokens_per_second"] for n in steps) == steps[-1]["tokens_seen"] == total, (
        "a step takes one second here"
    )
    assert total < len(steps) * 64 and counts["trained"] < total / 2


def test_a_stopped_run_of_epochs_resumes_to_the_same_bits(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content: dict[str, dict[str, Any]] = {
        "train": {
            "init": str(models["chatml"]),
            "batch_size": 2,
            "seq_len": 48,
            "epochs": 2,
            "gradient_accumulation": 2,
        },
        "data": {"files": [str(chats(tmp_path / "chats.jsonl", "messages"))]},
    }
    whole = tilegrad.train(content, tmp_path / "whole")
    tokenizer = load_tokenizer(models["chatml"] / "tokenizer.json")
    (eos,) = eos_token_ids(tmp_path / "whole" / "data", tokenizer)
    with monkeypatch.context() as patch:
        script = [eos - 1, eos, *tokenizer.encode("after the end"), *[0] * 999]
        patch.setattr(generation, "Decoder", scripted(lambda _, draws: int(script[draws])))
        sample = tilegrad.train(content, tmp_path / "sampled").sample
        assert sample.endswith(tokenizer.decode([eos - 1])) and "after the end" not in sample
    genuine = learning_rate

    def stop(step: int, **options: Any) -> float:
        if step == 3:
            monkeypatch.setattr(loop, "learning_rate", genuine)
            os.kill(os.getpid(), signal.SIGINT)
        return genuine(step, **options)

    monkeypatch.setattr(loop, "learning_rate", stop)
    stopped = tilegrad.train(content, tmp_path / "run")
    assert (stopped.steps, stopped.stopped_by) == (4, "SIGINT")
    assert tilegrad.train(None, resume=tmp_path / "run").steps == whole.steps
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "run")
    assert equal(a.tensors, b.tensors) and a.state["data"] == b.state["data"]
    assert a.state["run"]["train"]["epochs"] == 2 and a.state["run"]["data"]["format"] == "messages"


def test_a_run_ends_when_the_validation_loss_stops_improving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.engine.engine import Engine

    losses = [5.0, 4.0, 4.5, 4.1, 3.0]
    monkeypatch.setattr(Engine, "evaluate", lambda self, *_batch, **_ends: losses[self.steps // 2 - 1])
    content: dict[str, dict[str, Any]] = {
        **SMALL,
        "train": {"steps": 20, "batch_size": 1, "eval_interval": 2, "eval_batches": 1, "patience": 2},
    }
    result = tilegrad.train(content, tmp_path / "run")
    assert (result.steps, result.stopped_by) == (8, None) and result.best is not None and result.best.step == 4
    assert result.ended_early == "no better validation loss than 4.0000, after 4 steps, in 2 evaluations"
    assert "8 of 20: no better" in result.report.read_text(encoding="utf-8")
    assert tilegrad.train(None, resume=tmp_path / "run").steps == 8, "it has no patience left"
    longer = tilegrad.train({"train": {"patience": 3, "steps": 10}}, resume=tmp_path / "run")
    assert (longer.steps, longer.ended_early) == (10, None) and longer.best is not None and longer.best.step == 10


BAD: list[tuple[str, str, list[Any], str]] = [
    ("chatml", "auto", ['{"messages": [{"role": "user", "content": "x"}]}'], "line 1: messages: got no message of the"),
    ("chatml", "auto", [line("messages", "a", "b"), '{"messages": ['], "line 2: is not JSON"),
    ("chatml", "auto", [line("messages", "a", "b"), "", '{"messages": []}'], "line 3: messages: got []; accepted: a list of"),
    ("chatml", "auto", [line("messages", "a", "b"), line("prompt", "a", "b")], "line 2: got the format prompt; accepted: mess"),
    ("chatml", "prompt", [line("messages", "a", "b")], "line 1: got the keys 'messages'; accepted: an object with 'prompt'"),
    ("chatml", "auto", ['{"prompt": "a"}'], "line 1: got the keys 'prompt'; accepted: an object with a string in 'text'"),
    ("chatml", "messages", [""], "got no line; accepted: .jsonl with a conversation in each line"),
    ("chatml", "messages", ["[1]"], "line 1: got list; accepted: an object"),
    ("chatml", "auto", [line("messages", "a", "b"), "[1]"], "line 2: got list; accepted: an object"),
    ("chatml", "auto", [line("messages", "a", "b"), '{"text": "a"}'], "line 2: got the format text; accepted: messages, as in"),
    ("chatml", "auto", [r'{"prompt": "a", "completion": "\ud800"}'], "line 1: got half of a surrogate pair"),
    ("raises", "auto", [line("messages", "a", "b")], "line 1: the chat template refuses this conversation: no talk today"),
    ("loops", "auto", [line("messages", "a", "b")],
     "line 1: the chat template refuses this conversation: the template ran more than"),
    ("gemma", "auto", [line("messages", "a", "b"), {"messages": [{"role": "system", "content": "x"}, {"role": "assistant",
     "content": "y"}]}], "line 2: the chat template refuses this conversation: System role not supported"),
    ("mistral", "auto", [{"messages": [{"role": "assistant", "content": "x"}]}], "line 1: the chat template refuses"),
    ("none", "auto", [line("messages", "a", "b")], "line 1: messages: got no chat template"),
    ("chatml", "auto", ['{"text": 5}'], "line 1: got 5 in 'text'; accepted: an object with a string in 'text'"),
    ("silent", "auto", [line("messages", "a", "b")], "line 1: messages[1]: the chat template writes nothing of this message"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "format", "lines", "words"), BAD)
def test_a_bad_line_is_one_sentence_with_its_file_and_number(
    model: str, format: str, lines: list[Any], words: str, models: dict[str, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("tilegrad.data.sandbox.MAX_LINES", 2000)
    file = write(tmp_path / "bad.jsonl", lines)
    words_of_command = ["--init", str(models[model]), "--data.format", format]
    assert main(["train", "--data", str(file), "--out", str(tmp_path / "run"), *words_of_command]) == 2
    said = capsys.readouterr().err
    assert words in said and str(file) in said and said.count("\n") == 1, said
    assert not (tmp_path / "run").exists()
    assert main(["data", str(file), *words_of_command]) == 2 and capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.epochs", "2", "--steps", "5"], "epochs: got 2 and steps 5; accepted: one of them"),
        (["--train.epochs", "0"], "epochs: got 0; accepted: an int ≥ 1"),
        (["--data.documents", "1"], "documents: got 1; accepted: an int from 2 to"),
        (["--data.packing", "maybe"], "packing: got 'maybe'; accepted: true, false, or none"),
        (["--data.too_long", "shrink"], "too_long: got 'shrink'; accepted: 'auto', 'cut', 'split', 'drop', 'refuse'"),
        (["--data.text_field="], "text_field: got ''; accepted: the name of a field"),
        (["--model.n_embd", "64"], "n_embd: got 64 with init"),
        (["--model.n_layer", "9"], "n_layer: got 9 with init"),
        (["--preset", "gpt2"], "preset: got 'gpt2' with init"),
        (["--lora.layers", "all", "q"], "lora.layers: got ['all', 'q']; accepted: 'all' alone, or names out of q,"),
        (["--data.train_on", "user"], "train_on: got 'user'; accepted: 'assistant', 'all'"),
        (
            ["--data.format", "chat"],
            "format: got 'chat'; accepted: 'auto', 'text', 'messages', 'prompt', 'instruction'",
        ),
        (["--train.patience", "2", "--train.eval_interval", "0"], "patience: got 2 with eval_interval 0"),
        (
            ["--data.too_long", "refuse", "--seq-len", "8"],
            "too_long: got 24 documents longer than seq_len, 8; the longest is",
        ),
        (
            ["--data.too_long", "drop", "--seq-len", "4"],
            "files: got no document with a target within seq_len, 4; accepted: ",
        ),
        (
            ["--train.epochs", "1", "--train.warmup_steps", "500"],
            "epochs: got 1, which is 3 steps, with warmup_steps 500",
        ),
    ],
)
def test_the_error_for_values_that_do_not_fit_is_one_sentence(
    flags: list[str], words: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path / "chats.jsonl")
    out = tmp_path / "run"
    assert main(["train", "--init", str(models["chatml"]), "--data", str(file), "--out", str(out), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said
    assert not out.exists()


def test_texts_and_conversations_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.", encoding="utf-8")
    chats(tmp_path / "b.jsonl")
    with pytest.raises(
        ValueError, match=r"files: got .*a\.txt \(text\) and .*b\.jsonl \(prompt\); accepted: files of one format"
    ):
        find_format([tmp_path], "text")
    with pytest.raises(ValueError, match=r"a\.txt: got a text; accepted: \.jsonl"):
        prepare([tmp_path], tmp_path / "data", format="prompt")
    assert find_format([tmp_path / "a.txt"], "text") == "text"
    (tmp_path / "b.json").touch()
    with pytest.raises(
        ValueError, match=r"b\.json: got a file of kind '\.json'.*write each object into a line of its own"
    ):
        find_format([tmp_path / "b.json"], "text")
    long = write(tmp_path / "long.jsonl", [line("prompt", "a", "b" * (5 << 20))])
    assert find_format([long], "text") == "prompt", "its first line has more than 5 MiB"
    write(tmp_path / "c.jsonl", [{"text": "x", "messages": []}])
    assert find_format([tmp_path / "c.jsonl"], "text") == "text", "a line with the text's field is text"


def test_eos_ends_each_document_of_a_text(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Call me Ishmael.", encoding="utf-8")
    write(tmp_path / "b.jsonl", [{"text": "Some years ago"}, {"text": ""}])
    file, tokenizer = prepare(
        [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "data", tokenizer=str(models["none"] / "tokenizer.json")
    )
    assert tokenizer.decode(file.tokens.tolist()) == "Call me Ishmael.</s>Some years ago</s></s>"
    assert file.documents is not None and file.documents.bits is None
    ends = file.documents.ends.tolist()
    assert file.tokens[np.array(ends) - 1].tolist() == [tokenizer.token_id("</s>")] * 3


def test_our_own_bpe_has_an_eos_where_there_are_several_documents(tmp_path: Path) -> None:
    text = "the whale, the white whale, the whale that was white; " * 20
    write(tmp_path / "lines.jsonl", [{"text": text}, {"text": text}])
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    many, tokenizer = prepare([tmp_path / "lines.jsonl"], tmp_path / "many", tokenizer="bpe", vocab_size=270)
    assert tokenizer.decode(many.tokens.tolist()) == f"{text}<|endoftext|>" * 2
    assert tokenizer.vocab_size == 270 and many.tokens[-1] == 269
    one, tokenizer = prepare([tmp_path / "one.txt"], tmp_path / "one", tokenizer="bpe", vocab_size=270)
    assert one.documents is None and tokenizer.decode(one.tokens.tolist()) == text
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["tokenizer.json", "tokens.bin"]
    bare, tokenizer = prepare([tmp_path / "lines.jsonl"], tmp_path / "bare", tokenizer="bpe", vocab_size=256)
    assert bare.documents is None and tokenizer.decode(bare.tokens.tolist()) == f"{text}\n\n" * 2, "no token to spare"


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "config.json": {"eos_token_id": 5}}, "<|im_end|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|eot_id|>"}}}, "<|eot_id|>"),
        ({"tokenizer_config.json": {"eos_token": None}, "generation_config.json": {"eos_token_id": [97, 5]}}, 97),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 3}}, 3),
        ({}, "</s>"),
    ],
)
def test_eos_is_found_in_the_files_of_a_model(
    files: dict[str, Any], eos: str | int, models: dict[str, Path], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(models["none"] / "tokenizer.json")
    assert find_eos(tmp_path, tokenizer) == (tokenizer.token_id(eos) if isinstance(eos, str) else eos)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", {"eos_token": "<none>"}, "eos_token: got '<none>', which is not in tokenizer.json"),
        ("tokenizer_config.json", [], "tokenizer_config.json: got list; accepted: an object"),
        (
            "generation_config.json",
            {"eos_token_id": 99999},
            "eos_token_id: got 99999; accepted: a token of tokenizer.json",
        ),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id: got 'x'"),
    ],
)
def test_an_eos_that_is_not_a_token_is_refused(
    name: str, content: object, words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        find_eos(tmp_path, load_tokenizer(models["none"] / "tokenizer.json"))


def test_damaged_documents_are_written_again_and_a_resumed_run_refuses_them(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = chats(tmp_path / "chats.jsonl")
    arguments: dict[str, Any] = {"tokenizer": str(models["chatml"] / "tokenizer.json"), "format": "prompt"}
    prepare([file], tmp_path / "data", **arguments)
    path, config = (tmp_path / "data" / name for name in ("documents.bin", "tokenizer_config.json"))
    whole = path.read_bytes()
    written = (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns
    prepare([file], tmp_path / "data", **arguments)
    assert (tmp_path / "data" / "tokens.bin").stat().st_mtime_ns == written, "nothing changed"
    path.write_bytes(whole[:-1] + b"\0")
    prepare([file], tmp_path / "data", **arguments)
    assert path.read_bytes() == whole
    changed, _ = prepare([file], tmp_path / "data", **arguments, train_on="all")
    assert path.read_bytes() != whole and json.loads(config.read_text(encoding="utf-8"))["eos_token"] == "</s>"
    assert changed.documents is not None
    run = tmp_path / "run"
    command = ["train", "--init", str(models["chatml"]), "--data", str(file), "--steps", "2", "--seq-len", "64"]
    assert main([*command, "--out", str(run)]) == 0
    (run / "data" / "documents.bin").write_bytes(whole[:-2])
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 2
    assert "documents.bin: " in capsys.readouterr().err
    (run / "data" / "documents.bin").unlink()
    assert main(["train", "--resume", str(run), "--steps", "3"]) == 2
    assert "documents.bin: no such file; put the run's own file back" in capsys.readouterr().err


def test_texts_are_packed_on_request_and_long_ones_are_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 12, encoding="utf-8")
    write(tmp_path / "b.jsonl", [{"text": f"line {i} " * (1 + i % 5)} for i in range(20)])
    events: list[tuple[str, Any]] = []
    content: dict[str, dict[str, Any]] = {
        **SMALL,
        "train": {"epochs": 2, "batch_size": 2, "seq_len": 48, "eval_interval": 0},
        "data": {"files": [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], "packing": True},
    }
    result = tilegrad.train(content, tmp_path / "run", show=lambda *event: events.append(event))
    counts = dict(events[::-1])["data"]
    assert counts["pieces"] == 20 + 3 and counts["cut"] == counts["dropped"] == 0
    assert result.validation_loss is not None
    state = newest(tmp_path / "run").state
    assert state["run"]["data"] | {"files": []} == state["run"]["data"] | {
        "files": [], "format": "text", "packing": True, "too_long": "split",
    }  # fmt: skip


def test_the_preview_shows_the_targets_of_a_run(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "chats.jsonl", [line("prompt", *talk) for talk in [("Hi\x1b[0m", "Yes \x9b"), *TALKS] * 5])
    command = ["data", str(file), "--init", str(models["chatml"]), "--seq-len", "96"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["format"], found["eos"], found["pieces"]) == (20, "prompt", "</s>", 20)
    assert [part["trained"] for part in found["example"]] == [False, True, False]
    assert found["example"][1]["text"] == "Yes \x9b<|im_end|>"
    assert 0 < found["trained_share"] < 1 and found["padding_share"]["packed"] < found["padding_share"]["padded"]
    shares = {}
    for documents, packing in (("2", "true"), ("2", "false"), ("3", "false")):
        assert main([*command, "--json", "--data.documents", documents, "--data.packing", packing]) == 0
        shares[documents, packing] = json.loads(capsys.readouterr().out)["padding_share"]
    padded = found["padding_share"]["padded"]
    assert shares["2", "true"] == shares["2", "false"] == {"packed": padded, "padded": padded}, "one, and padding"
    assert shares["3", "false"] == found["padding_share"], "no row has room for three of these"
    assert sum(found["histogram"].values()) == 20 and found["lengths"]["least"] <= found["lengths"]["median"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "20 conversations (prompt) in 1 file" in said and "⟦Yes \\x9b<|im_end|>⟧" in said and "\x1b" not in said
    assert "Hi\\x1b[0m" in said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command) == 0
    assert "\x1b[32mYes \\x9b<|im_end|>\x1b[0m" in capsys.readouterr().out
    (tmp_path / "a.txt").write_text("Call me Ishmael. " * 20, encoding="utf-8")
    assert main(["data", str(tmp_path / "a.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["tokens"], found["padding_share"], found["trained_share"]) == (1, 340, {}, 1)
    assert [(part["text"][:3], part["trained"]) for part in found["example"]] == [("C", False), ("all", True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "chats.jsonl"], "nothing is written"


def test_truncation_and_padding_in_a_tokenizer_are_ignored(models: dict[str, Path], tmp_path: Path) -> None:
    given = json.loads((models["chatml"] / "tokenizer.json").read_text(encoding="utf-8"))
    file = tmp_path / "tokenizer.json"
    counts = set()
    for settings in (
        {},
        {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        {
            "padding": {
                "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
            }
        },
    ):  # fmt: skip
        file.write_text(json.dumps(given | settings), encoding="utf-8")
        counts.add(len(load_tokenizer(file).encode("the whale was white as snow")))
    assert len(counts) == 1 and counts.pop() > 3


def test_tokens_after_a_special_token_in_an_answer_are_still_targets() -> None:
    text = "<u>x<a>one <s> two<e>\n"
    begin, end = text.index("one"), len(text)
    pieces = ["<u>", "x", "<a>", "one", " ", "<s>", " two", "<e>", "\n"]
    starts = np.cumsum([0, *map(len, pieces)])
    special = np.array([piece.startswith("<") for piece in pieces])
    encoded = Encoded(np.arange(len(pieces)), starts[:-1], starts[1:], special)
    assert trained_tokens(Conversation(text, ((begin, end),)), encoded).tolist() == [False] * 3 + [True] * 5 + [False]
    special[7] = False  # a template whose turns end with plain text
    assert trained_tokens(Conversation(text, ((begin, end),)), encoded).tolist() == [False] * 3 + [True] * 6


def test_patience_without_validation_and_init_without_adapters_are_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, init = chats(tmp_path / "few.jsonl", count=4), str(models["chatml"])
    train = ["train", "--init", init, "--data", str(few), "--out", str(tmp_path / "run"), "--train.patience", "1"]
    assert main([*train, "--steps", "2", "--batch-size", "2", "--seq-len", "48"]) == 2
    assert "patience: got 1, but validation_fraction 0.1 of this data holds out nothing" in capsys.readouterr().err
    assert main(["generate", init, "--init", init, "--max-tokens", "1"]) == 2
    assert "init: got" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_by_the_preview_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = tmp_path / "model", chats(tmp_path / "chats.jsonl")
    write_chat_model(model, TEMPLATES["chatml"])
    tokenizer = load_tokenizer(model / "tokenizer.json")
    size = tokenizer.vocab_size
    assert isinstance(tokenizer, BpeTokenizer)
    tokenizer.inner.add_special_tokens(["<|more|>"])
    (model / "tokenizer.json").write_text(tokenizer.inner.to_str(), encoding="utf-8")
    words = f"vocab_size: got {size} of the weights in {model}; accepted: at least the tokenizer's size, {size + 1}"
    for command in (["data", str(file)], ["train", "--data", str(file), "--out", str(tmp_path / "run")]):
        assert main([*command, "--init", str(model)]) == 2
        assert words in capsys.readouterr().err
