"""`tilegrad evaluate`: its numbers for runs, checkpoints and weights, against the log, the float64 oracle and counting."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import tilegrad
from tilegrad.cli import main
from tilegrad.cli.progress import watch
from tilegrad.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from tilegrad.engine.scorer import Scorer
from tilegrad.training import evaluation, loop
from tilegrad.training.log import read_log

TEXT = "the quick brown fox – naïve, 二匹の狐 🦊 – jumps over the lazy dog.\n" * 20
OTHER = "a naïve dog jumps over 🦊, and the brown fox is lazy. " * 9


@pytest.fixture(autouse=True)
def in_a_folder_with_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    Path("other.txt").write_text(OTHER, encoding="utf-8")


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    with contextlib.chdir(folder):
        Path("text.txt").write_text(TEXT, encoding="utf-8")
        trained()
    return folder / "run"


@pytest.fixture
def run(bytes_run: Path) -> None:
    """A run with the defaults, as run/ in the current folder. No test writes into it."""
    Path("run").symlink_to(bytes_run)


def trained(folder: str = "run", **change: Any) -> tilegrad.training.loop.RunResult:
    """A run that evaluates all of its held-out data."""
    content: dict[str, dict[str, Any]] = {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 32},
        "train": {"steps": 2, "batch_size": 3, "seq_len": 13, "eval_batches": 1000, "sample_tokens": 0},
        "data": {"files": ["text.txt"]},
        "optimizer": {},
    }
    for key, value in change.items():
        section, name = key.split("_", 1)
        content[section][name] = value
    return tilegrad.train(content, folder)


def oracle(folder: str, text: str, window: int) -> tuple[float, int]:
    """(Σ nll, targets) of windows, from the reference model's logits in float64."""
    model = tilegrad.load(folder)
    ids = torch.from_numpy(model.tokenizer.encode(text).astype("int64"))
    model = tilegrad.TrainedModel(
        model.config, {n: p.double() for n, p in model.params.items()}, model.tokenizer, 0, model.checkpoint
    )
    total = 0.0
    for at in range(0, len(ids) - 1, window):
        piece = ids[at : at + window + 1]
        total += float(cross_entropy(model.logits(piece[:-1].tolist()), piece[1:], reduction="sum"))
    return total, len(ids) - 1


@pytest.mark.parametrize(
    ("tokenizer", "validation", "dtype"),
    [("bytes", "windows", "float64"), ("bpe", "end", "float32"), ("bpe", "windows", "bfloat16")],
)
def test_the_loss_of_a_run_is_that_of_its_log_and_the_loss_of_a_text_that_of_the_oracle(
    tokenizer: str, validation: str, dtype: str
) -> None:
    result = trained(data_tokenizer=tokenizer, data_bpe_vocab_size=300, data_validation=validation, train_dtype=dtype)
    own = tilegrad.evaluate("run")
    assert own.loss == result.validation_loss and own.perplexity == math.exp(own.loss)
    assert result.best is not None and tilegrad.evaluate(result.best.path).loss == own.loss
    found = [tilegrad.evaluate("run", "other.txt", dtype="float64", batch_size=b, seq_len=7) for b in (3, 2)]
    total, count = oracle("run", OTHER, 7)
    for one in found:
        assert one.tokens == count and one.loss == pytest.approx(total / count, rel=1e-12)
        first = ByteTokenizer().encode(OTHER)[:1]
        assert one.bytes == len(OTHER.encode()) - len(first)  # both tokenizers begin with the letter a
        assert one.bits_per_byte == pytest.approx(total / math.log(2) / one.bytes, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_stages": [{"steps": 1, "window": 3}, {}]},
        {"train_dtype": "bfloat16", "train_masters": "none", "optimizer_moments": "bfloat16"},
    ],
    ids=["stages", "lean"],
)
def test_settings_of_the_training_do_not_limit_an_evaluation(settings: dict[str, Any]) -> None:
    trained(**settings)
    found = tilegrad.evaluate("run", "other.txt", dtype="float64", batch_size=2, seq_len=7)
    total, count = oracle("run", OTHER, 7)
    assert found.loss == pytest.approx(total / count, rel=1e-12)


def test_exported_weights_have_the_loss_of_their_run(capsys: pytest.CaptureFixture[str]) -> None:
    trained(data_tokenizer="bpe", data_bpe_vocab_size=300)
    assert main(["export", "run", "weights"]) == 0
    flags = ["--data", "other.txt", "text.txt", "--seq-len", "13", "--batch-size", "3", "--json"]
    capsys.readouterr()
    results = []
    for source in (["run"], ["run", "--best"], ["weights"], ["weights/model.safetensors"]):
        assert main(["evaluate", *source, *flags]) == 0
        results.append(json.loads(capsys.readouterr().out))
        assert results[-1].pop("seconds") >= 0
    assert {*results[0]} == {"loss", "perplexity", "bits_per_byte", "tokens", "bytes", "weights"}
    assert all(result == results[0] for result in results)
    assert main(["evaluate", "weights"]) == 2
    assert capsys.readouterr().err == (
        "tilegrad: data: got none; accepted: text, because weights is a folder of weights without validation data\n"
    )


@pytest.mark.parametrize("packing", [True, False])
def test_new_documents_are_packed_and_cut_as_in_the_run(packing: bool) -> None:
    texts = ["a fox", "a lazy dog", "a fox that jumps over a lazy dog"] * 9
    Path("lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    trained(data_files=["lines.jsonl"], data_packing=packing, data_too_long="drop" if packing else "auto")
    found = tilegrad.evaluate("run", ["lines.jsonl"]).tokens
    lengths = [len(text) + len("\n\n") for text in texts]
    assert found == (sum(n - 1 for n in lengths if n <= 14) if packing else sum(lengths) - 1)


@pytest.mark.usefixtures("run")
def test_the_table_has_the_numbers_of_a_text_shorter_than_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.txt").write_text("Fox.", encoding="utf-8")
    Path("letter.txt").write_text("F", encoding="utf-8")
    capsys.readouterr()
    assert main(["evaluate", "run", "--data", "short.txt", "--dtype", "fp64"]) == 0
    rows = dict(re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[2:])
    total, count = oracle("run", "Fox.", 3)
    assert (rows["tokens"], rows["bytes"]) == ("3", "3") and rows["loss"] == f"{total / count:.4f}"
    assert rows["bits per byte"] == f"{total / math.log(2) / 3:.4f}"
    assert main(["evaluate", "run", "--data", "letter.txt"]) == 2
    assert "tilegrad: tokens: got 1; accepted: at least one window" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--seq-len", "7"], "seq_len: got 7; accepted: the run's value, 13, because the held-out rows depend "),
        (["run", "--seq-len", "33", "--data", "text.txt"], "seq_len: got 33; accepted: at most block_size, 32"),
        (["run", "--batch-size", "0"], "batch_size: got 0; accepted: an int ≥ 1"),
        (["run", "--data", "none.txt"], "none.txt: no such text file or folder"),
        (["run", "--device", "gpu"], "device: got 'gpu'"),
        (["nothing"], "nothing: no such folder"),
        (["run/best", "--best"], "run/best: got no best checkpoint; accepted"),
    ],
)  # fmt: skip
def test_bad_arguments_of_evaluate_are_refused_with_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["evaluate", *words]) == 2
    out, error = capsys.readouterr()
    assert out == "" and f"tilegrad: {said}" in error and error.count("\n") == 1


def test_a_run_without_held_out_data_needs_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    trained(data_validation_fraction=0)
    assert main(["evaluate", "run"]) == 2
    assert (
        "got a run that holds out nothing for validation; accepted: a text, given by --data" in capsys.readouterr().err
    )
    assert tilegrad.evaluate("run", ["other.txt"]).tokens == len(OTHER.encode()) - 1


def test_a_loss_other_than_cross_entropy_has_neither_perplexity_nor_bits() -> None:
    result = trained(model_loss="embedding_mse")
    found = tilegrad.evaluate("run")
    assert (found.loss, found.perplexity, found.bits_per_byte) == (result.validation_loss, None, None)


@pytest.mark.usefixtures("run")
def test_diverged_weights_are_null_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for loss, want in ((math.nan, None), (800.0, 800.0)):
        monkeypatch.setattr(Scorer, "loss", lambda *_, loss=loss, **_ends: loss)
        assert main(["evaluate", "run", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["loss"] == want and found["perplexity"] is None


@pytest.mark.usefixtures("run")
def test_a_long_evaluation_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "_PROGRESS_S", -1.0)
    capsys.readouterr()
    assert main(["evaluate", "run", "--json"]) == 0
    out, error = capsys.readouterr()
    lines = error.splitlines()
    batches = len(lines)
    assert batches > 2 and json.loads(out)
    assert lines[-1].startswith(f"{batches} of {batches} batches, loss so far {json.loads(out)['loss']:.4f}")
    with watch() as show:
        show("evaluate", {"batch": 1, "batches": 2, "loss": 1.5, "tokens": 3})
    assert capsys.readouterr().out == "1 of 2 batches, loss so far 1.5000\n"


def test_evaluate_reads_all_held_out_data() -> None:
    """With few eval_batches a run itself evaluates only a part of it."""
    trained(train_eval_batches=1)
    logged = [record["loss"] for record in read_log(Path("run/log.jsonl")) if record["kind"] == "validation"]
    assert tilegrad.evaluate("run").loss != logged[-1]


def sentencepiece() -> Tokenizer:
    """A tokenizer like Llama 2's: a space is ▁, and text without a token is encoded as bytes."""
    library = pytest.importorskip("tokenizers")
    pieces = [f"<0x{n:02X}>" for n in range(256)] + ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "é", "▁t"]
    vocabulary = {piece: n for n, piece in enumerate(["<s>", "<unk>", *pieces])}
    model = library.models.BPE(vocabulary, [("▁", "t")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    inner = library.Tokenizer(model)
    inner.add_special_tokens(["<s>"])
    inner.normalizer = library.normalizers.Replace(" ", "▁")
    inner.decoder = library.decoders.Sequence(
        [library.decoders.Replace("▁", " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    )
    from tilegrad.data.tokenizer import BpeTokenizer

    return BpeTokenizer(inner)


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "SentencePiece"])
def test_the_bytes_of_tokens_equal_those_of_their_text(kind: str) -> None:
    made: dict[str, Callable[[], Tokenizer]] = {
        "bytes": ByteTokenizer,
        "byte-level": lambda: train_bpe(TEXT, 300),
        "SentencePiece": sentencepiece,
    }
    tokenizer = made[kind]()
    lengths = tokenizer.byte_lengths()
    assert lengths is not None and len(lengths) == tokenizer.vocab_size
    for text in (TEXT, OTHER, "é", "🦊 to\n\t"):
        assert int(lengths[tokenizer.encode(text)].sum()) == len(text.encode())
        assert tokenizer.decode([int(n) for n in tokenizer.encode(text)]) == text


def test_special_tokens_have_no_bytes_and_an_unknown_decoder_gives_none() -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer: Any = train_bpe(TEXT, 300)
    tokenizer.inner.add_special_tokens(["<|end|>"])
    tokenizer.inner.add_tokens(["naïveté"])
    lengths = type(tokenizer)(tokenizer.inner).byte_lengths()
    assert [int(n) for n in lengths[300:]] == [0, len("naïveté".encode())]
    tokenizer.inner.decoder = library.decoders.WordPiece()
    assert tokenizer.byte_lengths() is None
