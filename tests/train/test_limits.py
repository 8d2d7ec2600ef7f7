"""Impossible requests are refused at once: sizes beyond the limits, nesting, text that memory can't hold, a full disk."""

from __future__ import annotations

import gzip
import json
import re
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import CONFIG

import tilegrad
from tilegrad.cli import main
from tilegrad.data import documents
from tilegrad.data.documents import read_documents
from tilegrad.data.prepare import prepare
from tilegrad.data.tokenizer import load_tokenizer, train_bpe
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.weights import write_weights
from tilegrad.training.config import LIMITS, MAX_STEP_TOKENS, RunConfig, TrainConfig
from tilegrad.training.sections import run_from

KEYS = {
    "model": ("n_layer", "vocab_size", "block_size", "n_head", "n_embd", "ffn_dim", "n_kv_head", "window", "head_size"),
    "train": ("steps", "batch_size", "gradient_accumulation", "seq_len", "eval_interval", "keep_checkpoints", "seed",
              "warmup_steps", "decay_steps", "eval_batches", "checkpoint_interval", "log_interval", "sample_tokens",
              "epochs", "patience"),
    "data": ("bpe_vocab_size", "documents"),
}  # fmt: skip


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, keys in KEYS.items() for key in keys])
def test_a_size_beyond_its_limit_is_refused_at_once(section: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    for value in (LIMITS[key] + 1, 10**9 + 1, 10**12, 2**63, 10**20):
        if value > LIMITS[key]:
            assert main(["plan", f"--{section}.{key}", str(value)]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"tilegrad: {key}: got {value}; accepted: ") and said.count("\n") == 1, said
    assert time.process_time() - begin < 5
    assert {name for keys in KEYS.values() for name in keys} == LIMITS.keys()


def test_a_step_of_more_tokens_than_memory_holds_is_refused() -> None:
    most = MAX_STEP_TOKENS // 128 // 8
    run_from({"train": {"gradient_accumulation": most}}, "flags")
    with pytest.raises(
        ValueError, match=r"gradient_accumulation × batch_size × seq_len: got .*; accepted: at most 67,108,864"
    ):
        run_from({"train": {"gradient_accumulation": most, "batch_size": 9}}, "flags")
    with pytest.raises(ValueError, match="batch_size: got 9223372036854775807; accepted: an int ≥ 1, at most 65,536"):
        tilegrad.Engine(CONFIG, 2**63 - 1, 4)


def test_the_limits_are_those_of_the_documentation() -> None:
    table = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8").split("### Limits")[1]
    table = table.split("\n#")[0]
    told: dict[str, int] = {}
    for names, most in re.findall(r"^\| (`.*?) \| ([\d,]+) \|", table, re.MULTILINE):
        if "×" not in names:
            told |= dict.fromkeys(re.findall(r"`(\w+)`", names), int(most.replace(",", "")))
    assert told == {name: most for name, most in LIMITS.items() if not name.endswith("_interval")}


@pytest.mark.parametrize("value", [-2, -1.0, True, "x", 1.5, 2**70])
def test_only_minus_one_means_automatic(value: Any) -> None:
    assert RunConfig(train=TrainConfig(steps=100, warmup_steps=-1)).train.warmup_steps == 5
    with pytest.raises(
        ValueError, match=r"warmup_steps: got .*; accepted: an int ≥ 0, or -1: a twentieth of the steps"
    ):
        TrainConfig(steps=100, warmup_steps=value)


@pytest.mark.parametrize(
    "values",
    [{"norm_eps": 0}, {"qkv_bias": 1}, {"window_layers": [True]}, {"window_layers": [[]]}, {"rope_theta": 10**400}],
)
def test_a_model_refuses_values_of_another_type(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(values))}: got"):
        ModelConfig(vocab_size=9, block_size=8, n_layer=2, n_head=2, n_embd=8, **values)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "a.toml",
            "[model]\nn_layer = " + "[" * 5000 + "]" * 5000,
            "a.toml, line 2: got values nested deeper than 100",
        ),
        ("a.toml", "[model]\n" + "a." * 5000 + "a = 1", "a.toml: got values nested deeper than 100"),
        ("a.toml", "[model]\nn_layer = 0x" + "f" * 5000, "n_layer': got an integer of 20,000 bits"),
        ("a.toml", "[model]\nn_layer = 1" + "0" * 5000, "a.toml: is not TOML"),
        ("a.jsonl", '{"text": "a"}\n' + "[" * 200_000, "a.jsonl, line 2: "),
        ("a.jsonl", '{"text": "a"}\n' + '{"a":' * 200_000, "a.jsonl, line 2: "),
        ("a.jsonl", r'{"text": "\ud800"}', "a.jsonl, line 1: got half of a surrogate pair in 'text'"),
    ],
)
def test_the_error_for_deep_nesting_or_a_number_of_thousands_of_digits_is_one_sentence(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    file = str(tmp_path / name)
    arguments = [file] if name.endswith(".toml") else ["--data", file]
    assert main(["train", *arguments, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert words in said and str(tmp_path) in said and said.count("\n") == 1, said
    assert main(["plan", "--model.n_layer", "[" * 5000]) == 2
    assert "n_layer: got" in capsys.readouterr().err


def test_a_gzip_bomb_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    bomb = tmp_path / "a.txt.gz"
    with gzip.open(bomb, "wb", 9) as file:
        for _ in range(64):
            file.write(b"a" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(
        ValueError,
        match=r"a.txt.gz: got [\d,]+ bytes that decompress to more than \d+ MiB; accepted: at most 100 times",
    ):
        read_documents([bomb])
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()
    small = tmp_path / "b.txt.gz"
    small.write_bytes(gzip.compress(b"a" * (1 << 20), 9))  # it grows a thousand times, but is small
    assert read_documents([small]).characters == 1 << 20


def test_a_line_or_a_document_that_memory_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "memory_limit", lambda _: 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 1000)
    (tmp_path / "b.jsonl").write_text('{"text": "short"}\n' + json.dumps({"text": "a" * 30}), encoding="utf-8")
    assert read_documents([tmp_path]).lengths == [1000, 5, 30]
    (tmp_path / "b.jsonl").write_text('{"text": "short"}\n' + json.dumps({"text": "a" * 60}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.jsonl: got a line of more than 50 B, half of this machine's memory"):
        read_documents([tmp_path])
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("tilegrad.data.tokenizer.memory_limit", lambda _: 100)
    text = "the whale, the white whale " * 20
    plain = train_bpe(text, 264)
    pieces = [text[begin : begin + 10] for begin in range(0, len(text), 10)]
    assert np.concatenate([*plain.encode_pieces(pieces)]).tolist() == plain.encode(text).tolist()
    content = json.loads(plain.json()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"tokenizer.json: got a text of more than 50 B, half of this machine's memory"
    ):
        [*load_tokenizer(tmp_path / "tokenizer.json").encode_pieces(pieces)]


def test_memory_of_prepared_data_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """14 MB in one text and 3 MB in lines become tokens of bytes: all in one sequence, then each document by itself."""
    line = json.dumps({"text": "It was the whiteness of the whale – " * 50})
    (tmp_path / "a.txt").write_text(
        "Call me Ishmael – some years ago, never mind how long. " * 250_000, encoding="utf-8"
    )
    (tmp_path / "b.jsonl").write_text("\n".join([line] * 1500), encoding="utf-8")
    for packing in (False, True):
        tracemalloc.start()
        file, _ = prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "data", packing=packing)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(file.tokens) > 16_000_000 and peak < 12 << 20, f"{packing}: {peak:,} bytes"


def test_the_error_of_import_and_export_on_a_full_disk_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files simulates the full disk."""
    params = tilegrad.Engine(CONFIG, 1, 4).params
    write_weights(tmp_path / "model", params, CONFIG)
    out, soft = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft[1]))
    try:
        assert main(["import", str(tmp_path / "model"), "--out", str(out)]) == 1
        with pytest.raises(OSError, match="File too large") as caught:
            write_weights(out, params, CONFIG, max_shard_bytes=1000)  # `export` calls this function
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert capsys.readouterr().err == f"tilegrad: [Errno 27] File too large: '{out}'\n"
    assert caught.value.filename == str(out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_memory_of_a_generated_text_follows_its_length_not_the_context(tmp_path: Path) -> None:
    """A config.json may have a context of millions of tokens, because the files of a rope model do not grow with it."""
    from dataclasses import replace

    from support.models import LLAMA

    config = replace(LLAMA, n_layer=1, vocab_size=256)
    write_weights(tmp_path / "model", tilegrad.Engine(config, 1, 4).params, config)
    content = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(content | {"max_position_embeddings": LIMITS["block_size"]}), encoding="utf-8"
    )
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": {"type": "bytes"}}', encoding="utf-8")
    begin = time.process_time()
    assert tilegrad.load(tmp_path / "model").generate("Call me ", max_tokens=4).startswith("Call me ")
    assert time.process_time() - begin < 5
