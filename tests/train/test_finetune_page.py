"""docs/finetune.md: every command runs, in order, in one folder, with a small model made on the spot.

The commands are those of the page. A run gets a few flags more, because 20,000 random parameters need larger steps, and more
of them, than a model that has learned to talk.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.chats import SPECIAL

from tilegrad.cli import main
from tilegrad.data.tokenizer import train_bpe
from tilegrad.engine.engine import Engine
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.weights import write_weights
from tilegrad.training import loop

pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[bpe]'")
pytest.importorskip("jinja2", reason="needs pip install 'tilegrad[chat]'")
pytest.importorskip("gguf", reason="needs pip install 'tilegrad[gguf]'")

PAGE = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text(encoding="utf-8")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LARGER_STEPS = ["--learning-rate", "2e-2", "--train.min_learning_rate", "2e-3", "--train.sample_tokens", "0"]
MORE_EPOCHS = ["--train.epochs", "12"]


def blocks(kind: str) -> list[str]:
    """The page's blocks of one language: `sh` is run here, `console` needs other programs."""
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_model(folder: Path, text: str) -> None:
    tokenizer = train_bpe(text, 330)
    tokenizer.inner.add_special_tokens(list(SPECIAL))
    file = folder.with_name("tokenizer.json")
    file.write_text(tokenizer.json(), encoding="utf-8")
    config = ModelConfig(
        vocab_size=330 + len(SPECIAL), block_size=512, n_layer=2, n_head=2, n_embd=32, ffn_dim=64, norm="rmsnorm",
        position="rope", activation="swiglu", bias=False,
    )  # fmt: skip
    params = Engine(config, 1, 1, seed=3).params
    params["wte.weight"].mul_(10)
    params["ln_f.weight"].mul_(3)  # a frozen head whose logits tell tokens apart, as a trained one does
    write_weights(folder, params, config, tokenizer=file)
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
