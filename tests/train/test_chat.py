"""`tilegrad generate` ends at EOS, and `tilegrad chat` talks by the chat template. Where the answer
matters the model's tokens are scripted, so that prompts, output and history can be compared exactly."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoders import ScriptedDecoder, scripted

import tilegrad
from tilegrad.cli import main
from tilegrad.data.tokenizer import (
    ByteTokenizer,
    TextStream,
    Tokenizer,
    decode_known,
    eos_token_ids,
    load_tokenizer,
    train_bpe,
)
from tilegrad.engine.engine import Engine
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.weights import write_weights
from tilegrad.training import chat, generation
from tilegrad.training.chat import Chat, end_of_turn

pytest.importorskip("jinja2", reason="needs pip install 'tilegrad[chat]'")
pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")

TEXT = "the quick brown fox 🦊 jumps over the lazy dog. naïve, 二匹の狐. " * 12
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = train_bpe(TEXT, 300)
TOKENIZER.inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
END_OF_TEXT, START, END = 300, 301, 302
MODEL = ModelConfig(vocab_size=304, block_size=96, n_layer=1, n_head=2, n_embd=16)
TINY = [
    "--steps",
    "2",
    "--batch-size",
    "2",
    "--seq-len",
    "48",
    "--train.eval_batches",
    "1",
    "--train.sample_tokens",
    "0",
]


def ids(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER.encode(text)]


@pytest.fixture(scope="module")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "weights"
    write_weights(folder, Engine(MODEL, 1, 4).params, MODEL)
    (folder / "tokenizer.json").write_text(TOKENIZER.json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def weights(written_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(written_once, tmp_path / "weights")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Makes the model write these tokens, whatever its logits. Returns the prompts that it reads."""

    def play(*tokens: int) -> list[list[int]]:
        left = iter(tokens)
        read: list[list[int]] = []

        def decoder(*sizes: Any, **options: object) -> ScriptedDecoder:
            made = scripted(lambda *_: next(left))(*sizes, **options)
            made.read = read
            return made

        for module in (chat, generation):
            monkeypatch.setattr(module, "Decoder", decoder)
        return read

    return play


Script = Callable[..., list[list[int]]]


def test_generate_ends_before_eos_unless_it_is_ignored(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    fox = ids(" fox")
    for flags, want in (([], "the fox"), (["--no-eos"], "the fox<|endoftext|>.")):
        script(*fox, END_OF_TEXT, *ids("."))
        most = len(fox) + 1 + len(ids("."))
        assert main(["generate", "weights", "the", "--max-tokens", str(most), *flags]) == 0
        assert capsys.readouterr().out == f"{want}\n"
    script(END_OF_TEXT)
    assert tilegrad.load("weights").generate("the", 5) == "the"


def test_a_text_ends_with_the_tokens_that_the_files_name(weights: Path) -> None:
    tokenizer = load_tokenizer(weights / "tokenizer.json")
    assert eos_token_ids(weights, tokenizer) == {END_OF_TEXT}
    (weights / "generation_config.json").write_text(f'{{"eos_token_id": [{END}, {END_OF_TEXT}]}}', encoding="utf-8")
    assert tilegrad.load(weights).eos_token_ids == {END_OF_TEXT, END}
    (weights / "tokenizer_config.json").unlink()
    config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    (weights / "generation_config.json").write_text("{}", encoding="utf-8")
    (weights / "config.json").write_text(json.dumps(config | {"eos_token_id": START}), encoding="utf-8")
    assert tilegrad.load(weights).eos_token_ids == {START}
    assert eos_token_ids(weights, ByteTokenizer()) == frozenset()
    for wrong in (-1, 303, "x", True, [END, 1.5]):
        (weights / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}), encoding="utf-8")
        with pytest.raises(
            ValueError, match=r"generation_config.json: eos_token_id: got .*; accepted: a token of tokenizer"
        ):
            tilegrad.load(weights)


@pytest.mark.parametrize("data", ["text", "conversations"])
def test_a_run_has_the_eos_and_the_template_of_its_initial_weights(data: str, weights: Path) -> None:
    (weights / "generation_config.json").write_text(f'{{"eos_token_id": [{END}]}}', encoding="utf-8")
    lines = [{"messages": [{"role": r, "content": f"fox {n}"} for r in ("user", "assistant")]} for n in range(40)]
    Path("lines.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    Path("text.txt").write_text(TEXT * 5, encoding="utf-8")
    file = {"text": "text.txt", "conversations": "lines.jsonl"}[data]
    assert main(["train", "--init", "weights", "--data", file, "--out", "run", *TINY]) == 0
    shutil.rmtree(weights)
    model = tilegrad.load("run")
    assert model.eos_token_ids == {END_OF_TEXT, END}
    assert model.chat_template is not None and model.chat_template.source == CHATML
    found = tilegrad.evaluate("run")
    assert found.bytes is not None and found.bits_per_byte is not None and found.tokens > 0
    assert tilegrad.evaluate("run", file).tokens > found.tokens
    assert main(["chat", "run", "--once", "fox", "--max-tokens", "2"]) == 0


def conversation(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def test_a_conversation_keeps_its_messages_and_ends_each_turn(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["naïve 🦊", "the 二匹", "dog", "fox"]
    tokens = [ids(answer) for answer in answers]
    read = script(*tokens[0], END, *tokens[1], END_OF_TEXT, *tokens[2], END, *tokens[3], END)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("fox?\n\n  jumps 狐 \n/reset\nover\n/system  quick\ndog\n/exit\nnever read\n")
    )
    assert main(["chat", "weights", "--system", "lazy"]) == 0
    out, error = capsys.readouterr()
    assert out == "".join(f"{answer}\n" for answer in answers) and error == ""
    begin = "<|im_start|>assistant\n"
    system, first = ("system", "lazy"), (("user", "fox?"), ("assistant", answers[0]))
    assert read == [
        ids(conversation(system, first[0]) + begin),
        ids(conversation(system, *first, ("user", "jumps 狐")) + begin),
        ids(conversation(system, ("user", "over")) + begin),
        ids(conversation(("system", "quick"), ("user", "over"), ("assistant", "dog"), ("user", "dog")) + begin),
    ]


def test_text_is_shown_while_it_is_written(script: Script) -> None:
    tokens = ids("the 🐺 三")
    assert len(tokens) > 6, "the wolf has four bytes, and no token of its own"
    script(*tokens, END)
    pieces = list(Chat(tilegrad.load("weights")).answer("x"))
    assert "".join(pieces) == "the 🐺 三" and "�" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) >= 3 and "🐺" in pieces


def test_each_answer_has_its_own_noise() -> None:
    """It depends on the number of answers before it, also across /reset."""

    def answers() -> list[str]:
        chat, found = Chat(tilegrad.load("weights"), max_tokens=9), []
        for _ in range(3):
            found.append("".join(chat.answer("x")))
            chat.reset()
        return found

    assert len({*answers()}) == 3 and answers() == answers()


def test_text_that_is_not_utf8_is_refused_and_the_chat_goes_on(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(*ids("dog"), END)
    monkeypatch.setattr(sys, "stdin", io.StringIO("fo\udcff\n/system \udce9\nfox\n/system\nfox\n"))
    assert main(["chat", "weights"]) == 0
    assert capsys.readouterr() == (
        "dog\n",
        "tilegrad: message: got half of a surrogate pair in 'fo\\udcff'; accepted: text that UTF-8 can encode\n"
        "tilegrad: system: got half of a surrogate pair in '\\udce9'; accepted: text that UTF-8 can encode\n",
    )
    for flag in ("--system", "--once"):
        assert main(["chat", "weights", "--once", "fox", flag, "\udcff"]) == 2
        assert "got half of a surrogate pair in '\\udcff'; accepted: " in capsys.readouterr().err


def test_a_template_without_an_end_token_has_no_end_of_turn(weights: Path) -> None:
    model = tilegrad.load(weights)
    assert model.chat_template is not None and end_of_turn(model.chat_template, TOKENIZER) == {END}
    for source in ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "{{ messages[0].content }}"):
        (weights / "chat_template.jinja").write_text(source, encoding="utf-8")
        template = tilegrad.load(weights).chat_template
        assert template is not None and end_of_turn(template, TOKENIZER) == frozenset()


def test_a_cut_answer_and_a_message_without_room_are_reported(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dog = ids(".")
    assert len(dog) == 1
    script(*dog * 400)
    assert main(["chat", "weights", "--once", "fox", "--max-tokens", "3"]) == 0
    out, error = capsys.readouterr()
    assert out == "...\n" and error == "tilegrad: answer: cut after 3 tokens, because max_tokens is 3\n"
    room = MODEL.block_size + 1 - len(ids(conversation(("user", "fox")) + "<|im_start|>assistant\n"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"fox\n{'dog ' * 99}\n/rest now\nfox\n"))
    assert main(["chat", "weights"]) == 0
    out, error = capsys.readouterr()
    assert out == f"{'.' * room}\n" * 2
    full, lines = (
        f"tilegrad: answer: cut after {room} tokens, because the context is full, 96 tokens",
        error.splitlines(),
    )
    assert lines.pop(2) == "tilegrad: /rest now: no such command; accepted: /reset, /system TEXT, /exit"
    assert lines[0] == lines[3] == full and lines[1].startswith("tilegrad: context: got a message of ")
    assert lines[1].endswith("; accepted: at most 96, the model's block_size")
    assert lines[2] == "tilegrad: context: full, 96 tokens; the oldest messages are not read any more"
    assert main(["chat", "weights", "--once", "dog " * 99]) == 2
    assert "context: got a message of" in capsys.readouterr().err


def test_a_full_context_drops_whole_turns_with_one_message(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fox, begin = ids("fox"), "<|im_start|>assistant\n"
    read = script(*([*fox, END] * 9))
    said = [f"dog {n}" for n in range(7)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*said, "/reset", "over"])))
    assert main(["chat", "weights", "--system", "lazy", "--max-tokens", "12"]) == 0
    out, error = capsys.readouterr()
    assert out == "fox\n" * 8
    assert error == "tilegrad: context: full, 96 tokens; the oldest messages are not read any more\n"
    system, turns = ("system", "lazy"), [turn for text in said for turn in (("user", text), ("assistant", "fox"))]
    shortest = 0
    for n, prompt in enumerate(read[:7]):
        wanted = [turns[2 * first : 2 * n + 1] for first in range(n + 1)]
        texts = [ids(conversation(system, *those) + begin) for those in wanted]
        first = next(first for first, tokens in enumerate(texts) if len(tokens) <= 96 + 1 - 12)
        assert prompt == texts[first], n
        shortest = max(shortest, first)
    assert shortest >= 2 and read[7] == ids(conversation(system, ("user", "over")) + begin)


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_ctrl_c_ends_a_chat_without_a_traceback(
    where: str, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    script(*ids("the"))
    if where == "prompt":
        monkeypatch.setattr("builtins.input", interrupted)
    else:
        monkeypatch.setattr(ScriptedDecoder, "submit", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("fox\n"))
    assert main(["chat", "weights"]) == 130
    assert capsys.readouterr().err == ""


def test_a_model_that_cannot_chat_is_refused_with_a_sentence(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    small = ["--model.n_layer", "1", "--model.n_embd", "16", "--model.block_size", "48"]
    assert main(["train", "--data", "text.txt", "--out", "run", *small, *TINY]) == 0
    capsys.readouterr()
    (weights / "chat_template.jinja").unlink()
    for source in ("run", "weights"):
        assert main(["chat", source, "--once", "x"]) == 2
        error = capsys.readouterr().err
        assert "got no chat template; accepted: weights with chat_template.jinja" in error
        assert error.endswith("to continue a text, use `tilegrad generate`\n") and error.count("\n") == 1
    for words, said in (
        (["weights", "--once", " "], "once: got ' '; accepted: a text"),
        (["nope"], "nope: no such folder"),
        (["weights", "--best"], "best: got weights, a folder of weights; accepted: --best with a run"),
    ):
        assert main(["chat", *words]) == 2
        assert said in capsys.readouterr().err
    (weights / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    for words, said in (
        (["--max-tokens", "0"], "max_tokens: got 0; accepted: an int ≥ 1"),
        (["--temperature", "-1"], "temperature: got -1.0"),
    ):
        assert main(["chat", "weights", "--once", "x", *words]) == 2
        assert said in capsys.readouterr().err


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
    stream = TextStream(tokenizer, after=after)
    yield from map(stream.add, tokens)
    yield stream.rest()


@given(st.lists(st.integers(0, 255), max_size=24), st.lists(st.integers(0, 302), max_size=12))
def test_streamed_text_equals_the_decoded_text(raw: list[int], tokens: list[int]) -> None:
    """The bytes may be valid or not. Text that was shown never changes."""
    for tokenizer, given_tokens in (
        (ByteTokenizer(), raw),
        (ByteTokenizer(), [*TEXT.encode()[: len(raw)]]),
        (TOKENIZER, tokens),
    ):
        assert "".join(stream_text(tokenizer, given_tokens)) == decode_known(tokenizer, given_tokens)
        before = ids("the ") if tokenizer is TOKENIZER else [*b"the "]
        assert "".join(stream_text(tokenizer, given_tokens, after=before)) == decode_known(tokenizer, given_tokens)


def test_streamed_text_is_shown_as_soon_as_it_is_final() -> None:
    def pieces(data: bytes) -> Iterator[str]:
        return stream_text(ByteTokenizer(), data)

    assert list(pieces("aé".encode())) == ["a", "", "é", ""]
    assert list(pieces(b"\xff\xffa\xf0\x9f")) == ["", "�", "�a", "", "", "�"]
    assert "".join(stream_text(ByteTokenizer(), [0xC3, 300, 0xA9, 97])) == "���a"
