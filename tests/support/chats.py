"""Chat templates of real models, and a small model with a tokenizer that knows their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import BpeTokenizer, train_bpe
from tilegrad.engine.engine import Engine
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.weights import write_weights

CHATML = (  # Qwen2.5, SmolLM2
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
BARE = (  # writes no special token
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "gemma": GEMMA, "bare": BARE}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
)
RAISES = "{{ raise_exception('no talk today') }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def tokenizer_with_special_tokens() -> BpeTokenizer:
    found = train_bpe(default_text().read_text(encoding="utf-8")[:20_000], 300)
    found.inner.add_special_tokens(list(SPECIAL))
    return BpeTokenizer(found.inner)


def write_chat_model(folder: Path, template: str | None, *, block_size: int = 128) -> BpeTokenizer:
    """Writes a folder of weights with a tokenizer, whose EOS is </s>, and a chat template."""
    tokenizer = tokenizer_with_special_tokens()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, block_size=block_size, n_layer=1, n_head=2, n_embd=16, norm="rmsnorm",
        position="rope", activation="swiglu", bias=False,
    )  # fmt: skip
    file = folder.with_name(f"{folder.name}-tokenizer.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tokenizer.json(), encoding="utf-8")
    write_weights(folder, Engine(config, 1, 1, seed=3).params, config, tokenizer=file)
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer
