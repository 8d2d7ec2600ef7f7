"""Reading and writing GGUF: tensors, types, tokenizers and text, compared with the package gguf, transformers and the
safetensors export."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models import CONFIG, LLAMA, QWEN3

from tilegrad import Engine, ModelConfig
from tilegrad.cli import main
from tilegrad.data.chat_template import load_chat_template
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import find_eos, load_tokenizer, train_bpe
from tilegrad.kernels.rope.frequencies import RopeScaling
from tilegrad.pretrained.gguf.container import open_container
from tilegrad.pretrained.gguf.read import import_gguf
from tilegrad.pretrained.gguf.tokenizer import PRE, byte_characters
from tilegrad.pretrained.gguf.write import GGML_TYPES, write_gguf
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training.generation import draw

gguf = pytest.importorskip("gguf", reason="needs pip install 'tilegrad[gguf]'")
tokenizers = pytest.importorskip("tokenizers", reason="needs pip install 'tilegrad[gguf]'")
SMALL = replace(LLAMA, n_embd=32, ffn_dim=64, n_layer=2)
KINDS = {
    "gpt2": CONFIG,
    "gpt2, untied": replace(CONFIG, tie_embeddings=False, ffn_dim=40),
    "llama": LLAMA,
    "llama, tied, biases": replace(LLAMA, tie_embeddings=True, qkv_bias=True, proj_bias=True, ffn_bias=True),
    "llama, wide heads": replace(LLAMA, head_size=6, rope_theta=5e5),
    "llama, rope of llama 3": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, original=8)),
    "llama, llama 3 with other numbers": replace(
        LLAMA, rope_scaling=RopeScaling("llama3", 32.0, original=16, low=0.7, high=3.0), rope_theta=5e5
    ),
    "llama, rope of yarn": replace(LLAMA, rope_scaling=RopeScaling("yarn", 4.0, original=6, attention_factor=0.8)),
    "llama, linear rope": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0), rope_theta=500.0),
    "mistral": replace(LLAMA, window=5, head_size=6),
    "qwen2": replace(LLAMA, qkv_bias=True, window=5, window_layers=(1,), norm_eps=1e-6),
    "qwen2, yarn, tied": replace(
        LLAMA, qkv_bias=True, tie_embeddings=True, rope_scaling=RopeScaling("yarn", 4.0, original=8)
    ),
    "qwen3": replace(QWEN3, qkv_bias=False, rope_scaling=None),
}
TEXTS = (
    "Hello world! 12345 it's we'LL\n\n  x\t y  ",
    "naïve café — 北京 1314151天 🦙🦙 ’quoted’",
    "<|im_start|>user\nhi there<|im_end|>\n<tool>a</tool>   trailing  ",
    "'''```....!!!??? I'VE\r\n\r\n 3 33 333 3333",
    "e\u0301 \ufb01 \x00\x7f",
    "",
    "\n",
)


def engine_of(config: ModelConfig) -> Engine:
    engine = Engine(config, 1, 4)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.2)
    return engine


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_and_read_model_equals_the_safetensors_export(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind]
    params = engine_of(config).params
    found = write_gguf(tmp_path / "m.gguf", params, config)
    assert found.kind == kind.split(",")[0]
    assert ("no window" in "; ".join(found.notes)) == (config.window is not None)
    import_gguf(tmp_path / "m.gguf", tmp_path / "in")
    write_weights(tmp_path / "out", params, config)
    a, b = (open_weights(tmp_path / name) for name in ("in", "out"))
    assert replace(a.config, dropout=b.config.dropout) == b.config
    back, same = a.read(), b.read()
    assert back.keys() == same.keys() == params.keys()
    assert all(torch.equal(back[name], x) and torch.equal(same[name], x) for name, x in params.items())
    texts = [list(draw(x.config, p, [1, 2, 3], 8, temperature=0.0)) for x, p in ((a, back), (b, same))]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_transformers_reads_the_same_tensors_and_config(kind: str, tmp_path: Path) -> None:
    """transformers has its own reader of GGUF, with its own names and permutation."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = replace(KINDS[kind], window=None, window_layers=None, tie_embeddings=True)
    params = engine_of(config).params
    write_gguf(tmp_path / "m.gguf", params, config)
    write_weights(tmp_path / "out", params, config)
    ours = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_config(ours)
    found = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)
    want = load_file(tmp_path / "out" / "model.safetensors")
    assert found["tensors"].keys() == want.keys()
    assert all(torch.equal(torch.as_tensor(x), want[name]) for name, x in found["tensors"].items())
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings"]
    names += ["num_key_value_heads", "rms_norm_eps", "vocab_size"]
    for name in names if kind != "gpt2" else ("n_embd", "n_layer", "n_head", "layer_norm_epsilon"):
        assert found["config"][name] == pytest.approx(getattr(ours, name), rel=1e-6), name


def test_the_package_gguf_reads_the_container(tmp_path: Path) -> None:
    file = saved(tmp_path)
    mine, theirs = open_container(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert mine.values == fields
    assert list(mine.tensors) == [x.name for x in theirs.tensors]
    for x in theirs.tensors:
        assert mine.tensors[x.name].shape == tuple(reversed(x.shape.tolist()))
        assert torch.equal(mine.tensor(x.name), torch.from_numpy(np.array(x.data)))


def saved(tmp_path: Path, name: str = "m.gguf", config: ModelConfig = SMALL, **given: Any) -> Path:
    config = replace(config, vocab_size=300)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(
        train_bpe(default_text().read_text(encoding="utf-8")[20_000:30_000], 290).json(), encoding="utf-8"
    )
    write_gguf(tmp_path / name, engine_of(config).params, config, tokenizer=tokenizer, **given)
    return tmp_path / name


def test_every_type_is_read_to_the_bits_of_the_package_gguf(tmp_path: Path) -> None:
    draw, count = np.random.default_rng(0), 0
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        raw = draw.integers(0, 256, (3, 2 * size), np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
        writer.add_tensor("x", raw, raw_dtype=kind)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
        try:
            with np.errstate(all="ignore"):
                want = gguf.quants.dequantize(raw, kind)
        except NotImplementedError:
            with pytest.raises(ValueError, match=f"got 'x' of type {kind.name}; accepted: types that gguf dequantizes"):
                open_container(tmp_path / "t.gguf")
            continue
        got = open_container(tmp_path / "t.gguf").tensor("x").numpy()
        assert got.shape == (3, 2 * block) and got.tobytes() == want.astype(np.float32).tobytes(), kind.name
        count += 1
    assert count > 20


@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_matrices_have_the_dtype_and_vectors_are_float32(dtype: str, tmp_path: Path) -> None:
    params = engine_of(replace(SMALL, vocab_size=300)).params
    file = saved(tmp_path, dtype=dtype)
    kind = getattr(gguf.GGMLQuantizationType, GGML_TYPES[dtype])
    for name, entry in open_container(file).tensors.items():
        assert entry.kind == (kind if len(entry.shape) == 2 else 0), name
    import_gguf(file, tmp_path / "in")
    for name, x in open_weights(tmp_path / "in").read().items():
        want = params[name]
        if want.ndim == 2:
            want = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(want.numpy(), kind), kind))
        assert torch.equal(x, want), name


def test_rows_that_q8_0_does_not_divide_become_float16_with_a_message(tmp_path: Path) -> None:
    found = write_gguf(tmp_path / "m.gguf", engine_of(LLAMA).params, LLAMA, dtype="q8_0")
    tensors = open_container(tmp_path / "m.gguf").tensors
    short = [name for name, entry in tensors.items() if entry.kind == gguf.GGMLQuantizationType.F16]
    assert short and any(f"{len(short)} matrices are float16" in note for note in found.notes)
    large = {name: x * 1e6 for name, x in engine_of(LLAMA).params.items()}
    with pytest.raises(ValueError, match=r"token_embd.weight: got .*; accepted: at most 65504 in float16, or"):
        write_gguf(tmp_path / "n.gguf", large, LLAMA, dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def tokenizer_of(name: str) -> Any:
    """A small tokenizer with this pre-tokenizer, special tokens, and BOS if the real one has it."""
    pre = PRE[name]
    content = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre.ignore_merges)).to_str())
    content |= {"pre_tokenizer": pre.pre_tokenizer, "normalizer": pre.normalizer}
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    out = tokenizers.Tokenizer.from_str(json.dumps(content))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, special_tokens=special
    )
    text = default_text().read_text(encoding="utf-8")[20_000:40_000] + "北京 naïve 123 456 78 12 é " * 50
    out.train_from_iterator([text], trainer)
    out.add_tokens(["<tool>", "</tool>"])
    if pre.add_bos:
        out.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", pair="<|endoftext|> $A $B", special_tokens=[("<|endoftext|>", 0)]
        )
    return out


@pytest.mark.parametrize("name", PRE)
def test_a_written_and_read_tokenizer_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    inner, origin, config = tokenizer_of(name), tmp_path / "origin", replace(SMALL, vocab_size=420)
    origin.mkdir()
    (origin / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (origin / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    write_gguf(tmp_path / "m.gguf", engine_of(config).params, config, origin=origin)
    values = open_container(tmp_path / "m.gguf").values
    assert (values["tokenizer.ggml.pre"], values["tokenizer.ggml.add_bos_token"]) == (name, PRE[name].add_bos)
    assert (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"]) == (0, 2)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types) == 420
    assert [types[tokens.index(t)] for t in ("<|im_end|>", "<tool>", "Ġ", "[PAD419]")] == [3, 4, 1, 5]
    import_gguf(tmp_path / "m.gguf", tmp_path / "in")
    back = load_tokenizer(tmp_path / "in" / "tokenizer.json")
    assert back.vocab_size == inner.get_vocab_size()
    for text in TEXTS:
        ids = inner.encode(text).ids
        assert back.encode(text).tolist() == ids
        assert back.decode(ids) == inner.decode(ids, skip_special_tokens=False)
    read = json.loads((tmp_path / "in" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (read["bos_token"], read["eos_token"], read["chat_template"]) == (
        "<|endoftext|>",
        "<|im_end|>",
        "{{ messages }}",
    )
    assert json.loads((tmp_path / "in" / "config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2
    write_gguf(tmp_path / "again.gguf", open_weights(tmp_path / "in").read(), config, origin=tmp_path / "in")
    again = open_container(tmp_path / "again.gguf").values
    assert {k: v for k, v in again.items() if k.startswith("tokenizer")} == {
        k: v for k, v in values.items() if k.startswith("tokenizer")
    }


@pytest.mark.parametrize("end", ["<|end_of_text|>", "<end_of_turn>"])
@pytest.mark.parametrize("home", ["origin", "next to the tokenizer"])
def test_eos_and_the_template_are_those_of_training(home: str, end: str, tmp_path: Path) -> None:
    inner, config = (
        tokenizers.Tokenizer.from_str(train_bpe("a book about a whale", 260).json()),
        replace(SMALL, vocab_size=300),
    )
    inner.add_special_tokens([end])
    (tmp_path / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}), encoding="utf-8")
    given: dict[str, Any] = {"origin": tmp_path} if home == "origin" else {"tokenizer": tmp_path / "tokenizer.json"}
    write_gguf(tmp_path / "m.gguf", engine_of(config).params, config, **given)
    values, template = open_container(tmp_path / "m.gguf").values, load_chat_template(tmp_path)
    assert template is not None and values["tokenizer.chat_template"] == template.source == "{{ messages }}"
    found = find_eos(tmp_path, load_tokenizer(tmp_path / "tokenizer.json"))
    assert values["tokenizer.ggml.eos_token_id"] == found == 260


def test_the_eos_that_the_post_processor_adds_counts_before_the_named_one(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_str(train_bpe("a book about a whale", 260).json())
    inner.add_special_tokens(["<|endoftext|>", "<end>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", 261)]
    )
    (tmp_path / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}', encoding="utf-8")
    config = replace(SMALL, vocab_size=300)
    write_gguf(tmp_path / "m.gguf", engine_of(config).params, config, origin=tmp_path)
    values = open_container(tmp_path / "m.gguf").values
    assert (values["tokenizer.ggml.eos_token_id"], values["tokenizer.ggml.add_eos_token"]) == (261, True)
    import_gguf(tmp_path / "m.gguf", tmp_path / "in")
    back = load_tokenizer(tmp_path / "in" / "tokenizer.json")
    assert back.encode("a whale").tolist() == inner.encode("a whale").ids


def test_a_tokenizer_of_bytes_has_no_merges_and_no_letter_is_eos(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_text('{"model": {"type": "bytes"}}', encoding="utf-8")
    config = replace(SMALL, vocab_size=256)
    write_gguf(tmp_path / "m.gguf", engine_of(config).params, config, tokenizer=tmp_path / "bytes.json")
    values = open_container(tmp_path / "m.gguf").values
    assert values["tokenizer.ggml.eos_token_id"] == 255  # a byte that no UTF-8 has
    assert values["tokenizer.ggml.tokens"] == byte_characters() and len({*byte_characters()}) == 256
    import_gguf(tmp_path / "m.gguf", tmp_path / "in")
    back = load_tokenizer(tmp_path / "in" / "tokenizer.json")
    assert all(back.encode(text).tolist() == list(text.encode()) for text in TEXTS)
    assert "eos_token" not in json.loads((tmp_path / "in" / "tokenizer_config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pre_tokenizer": {"type": "Whitespace"}},
            "pre_tokenizer: got .*Whitespace.*; accepted: the settings of gpt-2, smollm",
        ),
        ({"normalizer": {"type": "NFC"}}, "normalizer: got .*NFC.*; ignore_merges: got False; accepted"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "model: got 'WordLevel'"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}, "model: got 'Unigram'; accepted: 'BPE'"),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    content = json.loads(train_bpe("a book about a whale", 260).json()) | changed
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = replace(SMALL, vocab_size=300)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        write_gguf(tmp_path / "m.gguf", engine_of(config).params, config, tokenizer=tmp_path / "tokenizer.json")
    assert not (tmp_path / "m.gguf").exists()


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path: Path) -> None:
    config = replace(SMALL, vocab_size=280)
    saved(tmp_path)
    with pytest.raises(ValueError, match="got 290 tokens; accepted: at most 280, the model's vocabulary"):
        write_gguf(tmp_path / "n.gguf", engine_of(config).params, config, tokenizer=tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(QWEN3, qkv_bias=False), "llama.cpp does not run this qwen3: rope_scaling.kind: got llama3"),
        (replace(QWEN3, rope_scaling=None, proj_bias=True), "llama.cpp does not run this qwen3: qkv_bias: got True"),
        (replace(LLAMA, qkv_bias=True, head_size=6), "llama.cpp does not run this qwen2: head_size: got 6"),
        (
            replace(LLAMA, rope_scaling=RopeScaling("yarn", 4.0, beta_fast=16.0)),
            r"beta_fast, beta_slow: got \(16.0, 1.0\); accepted: 32 and 1",
        ),
        (replace(CONFIG, activation="relu"), "activation: got 'relu'"),
    ],
)
def test_a_model_that_llama_cpp_cannot_compute_is_not_exported(
    config: ModelConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        write_gguf(tmp_path / "m.gguf", engine_of(config).params, config)
    assert not list(tmp_path.iterdir())


def rewritten(file: Path, **changed: Any) -> Path:
    """The file with other metadata; a value of None drops its key."""
    old, out = gguf.GGUFReader(file), file.with_name("changed.gguf")
    writer = gguf.GGUFWriter(out, changed.pop("architecture", "llama"))
    values = {name: (field.contents(), field.types) for name, field in old.fields.items()}
    for name, value in changed.items():
        kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
        values[name] = (value, [getattr(gguf.GGUFValueType, kinds[type(value)])]) if value is not None else (None, [])
    for name, (value, types) in values.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and types:
            writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    for x in old.tensors:
        writer.add_tensor(x.name, np.array(x.data), raw_dtype=x.tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "bert"}, "general.architecture: got 'bert'; accepted: 'llama', 'qwen2', 'qwen3', 'gpt2'"),
        ({"architecture": "qwen2"}, "qwen2.attention.head_count: got none"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale: got 0.5; accepted: no such key"),
        ({"llama.expert_count": 8}, "llama.expert_count: got 8; accepted: 0"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: got 4; accepted: 8"),
        ({"llama.attention.head_count": [4, 4]}, "num_attention_heads: got .4, 4.; accepted: an int"),
        ({"llama.block_count": 3}, "missing tensors: .*blk.2"),
        ({"llama.block_count": 1}, "unexpected tensors: .*blk.1"),
        ({"llama.block_count": 2**31}, "num_hidden_layers: got 2147483648; accepted: 1 … 256"),
        ({"llama.feed_forward_length": 65}, r"got shape \(64, 32\); accepted: \(65, 32\), by the metadata"),
        ({"llama.context_length": None}, "llama.context_length: got none; accepted: a number"),
        ({"llama.rope.scaling.type": "longrope"}, "rope_parameters: got .*longrope"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: got .1.; accepted: a number for each token"),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "tokenizer.ggml.tokens: got a token twice"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "tokenizer.ggml: not a tokenizer that Hugging Face tokenizers can use"),
    ],
)
def test_an_unsupported_feature_of_a_gguf_file_is_named(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = rewritten(saved(tmp_path), **changed)
    with pytest.raises(ValueError, match=f"changed.gguf: .*{message}"):
        import_gguf(file, tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_frequencies_other_than_those_of_llama3_are_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, config=replace(SMALL, rope_scaling=RopeScaling("llama3", 8.0, original=8)))
    bytes_ = file.read_bytes()
    entry = open_container(file).tensors["rope_freqs.weight"]
    wrong = np.linspace(1, 7, entry.shape[0], dtype=np.float32).tobytes()
    file.write_bytes(bytes_[: entry.start] + wrong + bytes_[entry.start + len(wrong) :])
    with pytest.raises(ValueError, match=r"rope_freqs.weight: got .*; accepted: the factors of llama3's rope"):
        import_gguf(file, tmp_path / "in")


def test_an_unknown_pre_tokenizer_is_reported_and_a_tokenizer_file_replaces_it(tmp_path: Path) -> None:
    file = rewritten(saved(tmp_path), **{"tokenizer.ggml.pre": "default"})
    found = import_gguf(file, tmp_path / "in")
    assert "give one by --tokenizer tokenizer.json" in found.notes[0] and "'default'" in found.notes[0]
    assert not (tmp_path / "in" / "tokenizer.json").exists()
    assert not import_gguf(file, tmp_path / "two", tokenizer=tmp_path / "tokenizer.json").notes
    assert load_tokenizer(tmp_path / "two" / "tokenizer.json").vocab_size == 290


def sentencepiece_ids(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """The oracle: joins the first pair of neighbours whose token has the best score, until there is none."""
    pieces = [*("▁" + text).replace(" ", "▁")] if text else []
    while joined := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
        i = min(joined)[1]
        pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
    return [i for p in pieces for i in ([ids[p]] if p in ids else [ids[f"<0x{byte:02X}>"] for byte in p.encode()])]


def test_a_sentencepiece_tokenizer_is_read_and_written(tmp_path: Path) -> None:
    text = default_text().read_text(encoding="utf-8")[20_000:40_000].replace("\n", " ")
    counts = Counter("▁" + word for word in text.split())
    words = [word for word, _ in counts.most_common(60) if len(word) > 2]
    pieces = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, len(word) + 1)}
    single = sorted({c for c in text if c.isascii() and c.isprintable() and c != " "} | {"▁"})
    normal = sorted(pieces, key=lambda p: (-sum(n * word.count(p) for word, n in counts.items()), p)) + single
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    types = [2, 3, 3, *[6] * 256, *[1] * len(normal)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(normal))]
    config = replace(SMALL, vocab_size=len(tokens))
    write_gguf(tmp_path / "m.gguf", engine_of(config).params, config)
    named = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "bos_token_id": 1}
    values: dict[str, Any] = {f"tokenizer.ggml.{key}": value for key, value in named.items()}
    import_gguf(rewritten(tmp_path / "m.gguf", **values), tmp_path / "in")
    write_gguf(tmp_path / "again.gguf", engine_of(config).params, config, origin=tmp_path / "in")
    again = open_container(tmp_path / "again.gguf").values
    assert {key: again[key] for key in values if "scores" not in key} == {
        k: v for k, v in values.items() if "scores" not in k
    }
    back, ids = load_tokenizer(tmp_path / "in" / "tokenizer.json"), {token: i for i, token in enumerate(tokens)}
    for given in (scores, again["tokenizer.ggml.scores"]):
        assert isinstance(given, list)
        known = {token: float(str(score)) for token, score, kind in zip(tokens, given, types, strict=True) if kind == 1}
        for sample in (*TEXTS[:2], text[5000:6000], "the  whale ", ""):
            want = [1, *sentencepiece_ids(sample, known, ids)]
            assert back.encode(sample).tolist() == want
            assert back.decode(want[1:]) == sample
    file = tmp_path / "in" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    merges = content["model"]["merges"]
    i = next(i for i, (a, b) in enumerate(pairwise(merges)) if "".join(a) == "".join(b))  # two splits of one token
    for wrong in (merges[1:], [*merges[:i], *merges[i + 1 :], merges[i]]):
        content["model"]["merges"] = wrong
        file.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ValueError, match=r"tokenizer.json: merges: got some that no scores of SentencePiece give"):
            write_gguf(tmp_path / "no.gguf", engine_of(config).params, config, origin=tmp_path / "in")


def test_a_part_of_a_split_model_is_refused_with_the_command_that_joins_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path)
    part = rewritten(file, **{"split.no": 1, "split.count": 3}).rename(tmp_path / "m-00002-of-00003.gguf")
    assert main(["import", str(part), "--out", str(tmp_path / "in")]) == 2
    assert (
        "m-00002-of-00003.gguf: got part 1 of 3 of a model, numbered from 0; accepted: one file: llama-gguf-split --merge"
        in (capsys.readouterr().err)
    )
    assert not (tmp_path / "in").exists()
    import_gguf(rewritten(file, **{"split.no": 0, "split.count": 1}), tmp_path / "whole")


def test_the_command_line_exports_a_run_as_gguf_and_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of weights is trained and exported as GGUF. The imported model writes the text of the safetensors export."""
    monkeypatch.chdir(tmp_path)
    text = default_text().read_text(encoding="utf-8")[20_000:30_000]
    Path("book.txt").write_text(text, encoding="utf-8")
    config = replace(SMALL, vocab_size=300, block_size=64, tie_embeddings=True)
    write_weights(Path("model"), engine_of(config).params, config)
    Path("model/tokenizer.json").write_text(train_bpe(text, 290).json(), encoding="utf-8")
    flags = ["--data", "book.txt", "--steps", "4", "--batch-size", "2", "--seq-len", "16", "--learning-rate", "1e-3"]
    assert main(["train", "--init", "model", "--out", "run", *flags, "--train.eval_batches", "0"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "book.gguf", "--gguf"]) == 0
    assert "book.gguf: a llama model for llama.cpp and Ollama, after 4 steps" in capsys.readouterr().out
    assert main(["export", "run", "out"]) == 0
    assert main(["import", "book.gguf"]) == 0
    assert main(["export", "models/book", "again.gguf", "--gguf"]) == 0
    assert "steps" not in capsys.readouterr().out.splitlines()[-1]
    a, b = open_container(Path("book.gguf")), open_container(Path("again.gguf"))
    assert [*a.tensors] == [*b.tensors]
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in a.tensors)
    written = []
    for folder in ("out", "models/book"):
        assert main(["generate", folder, "Call me", "--max-tokens", "12", "--temperature", "0"]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    before = Path("book.gguf").read_bytes()
    for words, message in (
        (["export", "run", "book.gguf", "--gguf"], "already exists"),
        (["export", "run", "x.gguf", "--gguf", "--dtype", "float64"], "dtype: got float64; accepted: float32, float16"),
        (["export", "run", "x.gguf", "--gguf", "--max-shard-size", "1GB"], "accepted: none with --gguf"),
        (["export", "run", "x", "--dtype", "q8_0"], "dtype: got q8_0; accepted: q8_0 with --gguf"),
        (["export", "model", "x", "--best"], "best: got model, a folder of weights; accepted: --best with a run"),
        (["import", "book.gguf"], "already exists"),
        (["import", "model", "--out", "x", "--tokenizer", "y"], "tokenizer: got y; accepted: none with a folder"),
        (["generate", "book.gguf"], "got a GGUF file; accepted: the folder that `tilegrad import book.gguf` writes"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert Path("book.gguf").read_bytes() == before and not list(Path().glob("x*"))


def test_a_failed_export_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match=r"No space left on device: .*m.gguf"):
        write_gguf(tmp_path / "m.gguf", engine_of(SMALL).params, SMALL)
    assert not list(tmp_path.iterdir())


def test_the_error_without_the_package_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (
        lambda: import_gguf(file, tmp_path / "in"),
        lambda: write_gguf(tmp_path / "x.gguf", engine_of(SMALL).params, SMALL),
    ):
        with pytest.raises(ImportError, match=r"pip install 'tilegrad\[gguf\]'"):
            call()
