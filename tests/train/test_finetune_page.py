"""docs/finetune.md: every command runs, in order, in one folder, with a small model that the test makes.

The commands are those of the page. A run gets a few more flags, because 30,000 random parameters need more and larger
steps than a pretrained model.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chats import SPECIAL

from tilegrad.cli import main
from tilegrad.data.tokenizer import train_bpe
from tilegrad.engine.engine import Engine
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.weights import write_weights

pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")
pytest.importorskip("jinja2", reason="needs pip install 'tilegrad[chat]'")
pytest.importorskip("gguf", reason="needs pip install 'tilegrad[gguf]'")

PAGE = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text(encoding="utf-8")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LARGER_STEPS = [
    *("--learning-rate", "2e-2", "--train.min_learning_rate", "2e-3"),
    *("--train.sample_tokens", "0", "--log", "none"),
]
# flags of one run
FLAGS = {"runs/chat": ["--train.epochs", "14"], "runs/mine": ["--train.epochs", "1", "--seq-len", "128"]}
ANSWER = r"Ahoy, \w+!\n"  # processors round differently, so the name may differ; the answer ends by itself


def blocks(kind: str) -> list[str]:
    """The page's blocks of one language: `sh` and `python` run here, `bash` needs other programs."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_model(folder: Path, text: str) -> None:
    """A Llama with a tokenizer learnt from `text`, ChatML's template and random weights."""
    tokenizer = train_bpe(text, 330)
    tokenizer.inner.add_special_tokens(list(SPECIAL))
    file = folder.with_name("tokenizer.json")
    file.write_text(tokenizer.json(), encoding="utf-8")
    config = ModelConfig(
        vocab_size=330 + len(SPECIAL), block_size=512, n_layer=2, n_head=2, n_embd=32, ffn_dim=64, norm="rmsnorm",
        position="rope", activation="swiglu", bias=False,
    )  # fmt: skip
    params = Engine(config, 1, 1, seed=3).params
    params["wte.weight"].mul_(10)  # so that the frozen head separates tokens, as a trained one does
    params["ln_f.weight"].mul_(3)
    write_weights(folder, params, config, tokenizer=file)
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `chats.jsonl`, as the page writes it, and `model`."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        data, _packing = blocks("python")
        exec(compile(data, "finetune.md", "exec"), {})
        write_model(Path("model"), Path("chats.jsonl").read_text(encoding="utf-8") * 3)
    return folder


@pytest.fixture(autouse=True)
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def validation_losses(run: str) -> list[float]:
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "validation"]


def test_every_command_of_the_page_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}
    for words in commands():
        program, command, *rest = words
        assert program == "tilegrad"
        if command == "train" and "--resume" not in rest:
            rest += LARGER_STEPS + FLAGS.get(rest[-1], [])
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi, I am Eva!\n/exit\n"))
        assert main([command, *rest]) == 0, (words, capsys.readouterr().err)
        said[" ".join(words[1:])] = capsys.readouterr().out
    assert {words.split()[0] for words in said} == {
        *("data", "train", "init", "plan", "evaluate", "chat", "export", "import")
    }
    losses = validation_losses("runs/chat")
    assert losses[-1] < losses[0] - 0.5
    before, after = (
        float(re.search(r"^loss +([\d.]+)", said[f"evaluate {name} --data chats.jsonl"], re.MULTILINE)[1])  # type: ignore[index]
        for name in ("model", "runs/chat")
    )
    assert after < 1.5 < before
    answers = [text for words, text in said.items() if words.startswith("chat ")]
    greedy, sampled, of_gguf = answers
    assert re.fullmatch(ANSWER, greedy) and re.fullmatch(ANSWER, of_gguf) and sampled.strip(), answers
    shown = blocks("text")[0].split("…")[0].splitlines()
    assert shown and all(line in said["data chats.jsonl --init model --seq-len 128"] for line in shown)
    planned = said["plan --preset llama-135m --seq-len 512 --lora.rank 16"]
    for role, size in re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+ [MG]iB)", PAGE, re.MULTILINE):
        assert re.search(rf"^{role} .* {re.escape(size)} ", planned, re.MULTILINE), role


def test_the_packed_batch_of_the_page_trains_a_step() -> None:
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[1], "finetune.md", "exec"), names)
    assert 3 < names["loss"] < 5


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --data.too_long refuse --seq-len 20", "too_long: got 40 documents longer than seq_len"),
        ("train --seq-len 4096", "seq_len: got 4096; accepted: at most block_size"),
        ("train --train.epochs 2 --steps 5", "epochs: got 2 and steps 5; accepted: one of them"),
        ("train --train.freeze head", "freeze: got 'head', which no parameter matches"),
        ("train --init ORG/NAME", "ORG/NAME: no such folder or file"),
        ("train --init none --lora.rank 4", "init: got None with adapters ([lora])"),
        ("evaluate model", "data: got none"),
        ("export model out --dtype q8_0", "dtype: got q8_0"),
    ],
)
def test_the_errors_of_the_page_are_printed(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = command.split()
    if given[0] == "train":
        given[1:1] = ["--init", "model", "--data", "chats.jsonl", "--out", "refused"]
    assert main(given) == 2
    assert words in capsys.readouterr().err and f"`{words}" in PAGE
    assert not Path("refused").exists()
