"""Runs: exact resume, signals, bad configs, the contents of the folder."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilegrad import Engine, ModelConfig
from tilegrad.engine.state import counters
from tilegrad.text.spelling import byte_count
from tilegrad.training import loop
from tilegrad.training.checkpoint import load_checkpoint
from tilegrad.training.config import DataConfig, RunConfig, TrainConfig
from tilegrad.training.log import read_log
from tilegrad.training.manifest import DamagedCheckpoint
from tilegrad.training.run import train
from tilegrad.training.sections import read_toml, run_from

MODEL = ModelConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, dropout=0.1)
SETTINGS = TrainConfig(
    steps=8, batch_size=3, seq_len=12, gradient_accumulation=2, warmup_steps=2, eval_interval=3, eval_batches=1,
    checkpoint_interval=4, log_interval=1, sample_tokens=6,
)  # fmt: skip


def run_on_a_text_in(folder: Path) -> RunConfig:
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return RunConfig(MODEL, SETTINGS, DataConfig(files=(str(text),)))


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return run_on_a_text_in(tmp_path)


def last_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(max((folder / "checkpoints").iterdir())).tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(run: RunConfig, tmp_path: Path, dtype: str) -> None:
    run = replace(run, train=replace(run.train, dtype=dtype))
    whole = train(run, tmp_path / "whole")
    train(replace(run, train=replace(run.train, steps=8)), tmp_path / "part")
    halfway = next(p for p in (tmp_path / "part" / "checkpoints").iterdir() if p.name.endswith("step-4"))
    resumed = train(run, tmp_path / "part", resume=halfway)
    assert (resumed.train_loss, resumed.validation_loss, resumed.sample) == (
        whole.train_loss,
        whole.validation_loss,
        whole.sample,
    )
    a, b = last_tensors(tmp_path / "whole"), last_tensors(tmp_path / "part")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    losses = [
        [r["loss"] for r in read_log(tmp_path / f / "log.jsonl") if r["kind"] == "train"] for f in ("whole", "part")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_a_run_folder_has_its_documented_files(run: RunConfig, tmp_path: Path) -> None:
    events: list[str] = []
    result = train(run, tmp_path / "run", show=lambda event, _numbers: events.append(event))
    folder = tmp_path / "run"
    assert {"run.json", "data", "log.jsonl", "checkpoints", "report.html"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["model"]["n_embd"] == 16
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=.https?://", page) and "unigram entropy" in page
    assert events[:2] == ["data", "start"] and events.count("train") == 8 and events.count("validation") == 3
    assert (
        0.9 * result.planned_bytes < sum(result.measured.arenas.values()) <= result.planned_bytes
        and result.planned_bytes > 0
        and result.sample
    )


def test_a_validation_loss_of_zero_is_reported(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "evaluate", lambda *_batch, **_ends: 0.0)
    assert train(run, tmp_path / "run").validation_loss == 0.0
    assert ", validation 0.0000" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_run_learns_its_text(run: RunConfig, tmp_path: Path) -> None:
    settings = replace(run.train, steps=60, learning_rate=1e-2, eval_interval=0, checkpoint_interval=0)
    result = train(replace(run, model=replace(MODEL, dropout=0.0), train=settings), tmp_path / "run")
    assert result.validation_loss is not None
    assert result.validation_loss < result.unigram_entropy - 0.5


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_is_offered(run: RunConfig, tmp_path: Path) -> None:
    train(run, tmp_path / "run")
    first, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    file = last / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedCheckpoint, match=last.name) as error:
        train(run, tmp_path / "run", resume=True)
    assert error.value.previous == first
    assert train(run, tmp_path / "run", resume=first).steps == 8


@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_manifest_is_refused_and_the_previous_checkpoint_is_offered(
    run: RunConfig, tmp_path: Path, named: bool
) -> None:
    train(run, tmp_path / "run")
    first, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (last / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is not a manifest") as error:
        train(run, tmp_path / "run", resume=last if named else True)
    assert (error.value.path, error.value.previous) == (last, first)


WINDOWED = [
    {"window": 4, "window_layers": [0]},
    {
        "window": 4,
        "window_layers": [],
        "position": "rope",
        "rope_scaling": {"kind": "yarn", "factor": 2.0, "original": 16},
    },
]


@pytest.mark.parametrize("model", WINDOWED)
def test_a_run_with_keys_that_are_lists_is_stopped_and_resumes_to_the_same_bits(
    run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tilegrad.cli import main

    monkeypatch.chdir(tmp_path)
    keys = replace(run, model=replace(run.model, n_layer=2, **model)).plain()
    assert run_from(json.loads(json.dumps(keys)), "run.json").plain() == keys
    Path("run.toml").write_text(
        as_toml(keys | {"model": {**keys["model"], **model}}), encoding="utf-8"
    )  # not every key of rope_scaling
    assert main(["train", "run.toml", "--out", "whole"]) == 0

    def interrupt(event: str, numbers: dict[str, Any]) -> None:
        if event == "train" and numbers["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    assert train(run_from(read_toml(Path("run.toml")), "run.toml"), Path("part"), show=interrupt).stopped_by == "SIGINT"
    assert main(["train", "run.toml", "--resume", "part"]) == 0
    a, b = last_tensors(Path("whole")), last_tensors(Path("part"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert main(["generate", "part", "--max-tokens", "3"]) == 0
    assert main(["export", "part", "out"]) == 2
    assert "accepted" in capsys.readouterr().err  # GPT-2 has no window


def as_toml(content: dict[str, dict[str, Any]]) -> str:
    def value(x: object) -> str:
        if isinstance(x, dict):
            return "{" + ", ".join(f"{name} = {value(inner)}" for name, inner in x.items()) + "}"
        return "'none'" if x is None else json.dumps(x)

    return "".join(
        f"[{section}]\n" + "".join(f"{name} = {value(x)}\n" for name, x in keys.items())
        for section, keys in content.items()
    )


@pytest.mark.parametrize("value", [(1, 2), math.inf, torch.tensor(1)])
def test_a_value_that_cannot_be_saved_is_refused_before_the_first_step(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(loop, "counters", lambda engine: {**counters(engine), "more": value})
    monkeypatch.setattr(Engine, "submit", None)
    with pytest.raises((TypeError, ValueError), match=r"state\['engine'\]\['more'\].* JSON"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_number_that_no_checkpoint_can_hold_is_refused_by_name() -> None:
    for name in ("learning_rate", "min_learning_rate", "weight_decay", "max_norm"):
        with pytest.raises(ValueError, match=f"{name}'?: got inf; accepted: a finite number"):
            run_from({"train": {name: math.inf}}, "run.toml")


def test_an_unfinished_first_save_is_not_a_run(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed in its first save leaves a hidden folder: a new run begins there, and there is none to resume."""

    def killed(_tensors: object, _path: Path) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("tilegrad.text.atomic.save_file", killed)
        with pytest.raises(SystemExit):
            train(run, tmp_path / "run")
    assert (tmp_path / "run" / "best" / ".staged").is_dir()
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        train(run, tmp_path / "run", resume=True)
    assert train(run, tmp_path / "run").steps == 8
    assert not (tmp_path / "run" / "best" / ".staged").exists()


def test_commands_that_would_lose_or_mix_runs_are_refused(run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        train(run, tmp_path / "run", resume=True)
    train(run, tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already"):
        train(run, tmp_path / "run")
    with pytest.raises(ValueError, match="n_embd: got 32; accepted: the run's value, 16, when resuming"):
        train(replace(run, model=replace(MODEL, n_embd=32)), tmp_path / "run", resume=True)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, byte for byte."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_resume_needs_only_the_folder(run: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(replace(run, train=replace(run.train, steps=6)), folder)
    Path(run.data.files[0]).unlink()
    assert train(None, folder, resume=True).steps == 6
    longer = replace(run, train=replace(run.train, steps=8, learning_rate=5e-4, log_interval=3, checkpoint_interval=0))
    assert train(longer, folder, resume=folder).steps == 8
    text = replace(longer.data, format="text", packing=False, too_long="split")
    assert json.loads((folder / "run.json").read_text(encoding="utf-8")) == replace(longer, data=text).plain()
    with pytest.raises(ValueError, match="config: got None; accepted: a RunConfig or its sections"):
        train(None, tmp_path / "new")


def test_a_finished_run_is_not_saved_again(run: RunConfig, tmp_path: Path) -> None:
    train(run, tmp_path / "run")
    saved = contents(tmp_path / "run" / "checkpoints")
    train(None, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run" / "checkpoints") == saved


def other_tokenizer(folder: Path) -> None:
    (folder / "data" / "tokenizer.json").write_text('{"model": {"type": "bytes"} }', encoding="utf-8")


def other_data(folder: Path) -> None:
    """Tokens and tokenizer of another text, which match each other but not the weights."""
    from tilegrad.data.prepare import prepare

    text = folder.parent / "other.txt"
    text.write_text("call me ishmael. some years ago, never mind how long precisely. " * 40, encoding="utf-8")
    prepare([text], folder / "data")


def longer_checkpoint(folder: Path) -> None:
    from tilegrad.training.checkpoint import save_checkpoint

    found = load_checkpoint(max((folder / "checkpoints").iterdir()))
    save_checkpoint(folder / "checkpoints", found.step, found.tensors | {"more": torch.zeros(1)}, found.state)


def edited(folder: Path) -> None:
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    content["train"]["seed"] = 7
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")


def torn(folder: Path) -> None:
    os.truncate(folder / "run.json", 100)


def no_manifest(folder: Path) -> None:
    (max((folder / "checkpoints").iterdir()) / "manifest.json").unlink()


SPOILT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "batch_size": (None, {"batch_size": 4}, "batch_size: got 4; accepted: the run's value, 3, when resuming"),
    "seed": (None, {"seed": 1}, "seed: got 1; accepted: the run's value, 0"),
    "dtype": (None, {"dtype": "bfloat16"}, "dtype: got 'bfloat16'; accepted: the run's value, 'float32'"),
    "warmup": (None, {"warmup_steps": 1}, "warmup_steps: got 1; accepted: the run's value, 2"),
    "fewer steps": (None, {"steps": 7}, "steps: got 7; accepted: at least 8, which are done"),
    "device": (None, {"device": "cuda:99"}, "device: got 'cuda:99'[ ;]"),
    "tokenizer": (other_tokenizer, {}, "tokenizer.json: got a tokenizer of sha256 .*; accepted: the tokenizer of tokens.bin"),
    "data": (other_data, {}, "tokens_sha256: got .*, as in the saved position"),
    "no tokens": (lambda f: (f / "data" / "tokens.bin").unlink(), {}, "tokens.bin: no such file; put the run's own file back"),
    "tensors": (longer_checkpoint, {}, r"only in the checkpoint: \['more'\]"),
    "edited": (edited, {}, "run.json: seed: got 7; accepted: the run's value, 0"),
    "torn": (torn, {}, "run.json: .*; without this file, the checkpoint's own configuration is used"),
    "no manifest": (no_manifest, {}, "manifest.json is missing; the one before it is good: .*step-4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run and its folder, of which a test spoils a copy."""
    home = tmp_path_factory.mktemp("ended")
    run = run_on_a_text_in(home)
    train(run, home / "run")
    return run, home / "run"


@pytest.mark.parametrize("name", SPOILT)
def test_a_refused_resume_writes_nothing(ended: tuple[RunConfig, Path], tmp_path: Path, name: str) -> None:
    spoil, changes, message = SPOILT[name]
    run, folder = ended[0], tmp_path / "run"
    shutil.copytree(ended[1], folder)
    if spoil:
        spoil(folder)
    before = contents(folder)
    # these keys would change run.json
    asked = replace(run, train=replace(run.train, **({"log_interval": 3} | changes)))
    with pytest.raises(ValueError if name != "no tokens" else FileNotFoundError, match=message):
        train(asked, folder, resume=True)
    assert contents(folder) == before


def without_digest(folder: Path) -> None:
    """An older checkpoint, without the digest of the tokenizer."""
    from tilegrad.training.checkpoint import save_checkpoint

    found = load_checkpoint(max((folder / "checkpoints").iterdir()))
    assert found.state.pop("tokenizer_sha256")
    save_checkpoint(folder / "checkpoints", found.step, found.tensors, found.state)


def test_a_tokenizer_of_other_weights_is_refused(run: RunConfig, tmp_path: Path) -> None:
    from tilegrad.data.tokenizer import ByteTokenizer
    from tilegrad.training.checkpoint import read_state
    from tilegrad.training.folder import own_data, own_tokenizer

    folder = tmp_path / "run"
    train(run, folder)
    state = read_state(max((folder / "checkpoints").iterdir()))
    assert own_tokenizer(folder, state) == ByteTokenizer() == own_data(folder, state)[1]
    with pytest.raises(ValueError, match="accepted: the tokenizer of the checkpoint, 0000"):
        own_data(folder, state | {"tokenizer_sha256": 64 * "0"})
    other_tokenizer(folder)
    with pytest.raises(ValueError, match="accepted: the tokenizer of the checkpoint"):
        own_tokenizer(folder, state)


def test_a_checkpoint_without_the_digest_still_loads(run: RunConfig, tmp_path: Path) -> None:
    from tilegrad.data.tokenizer import ByteTokenizer
    from tilegrad.training.checkpoint import read_state
    from tilegrad.training.folder import own_tokenizer

    folder = tmp_path / "run"
    train(replace(run, train=replace(run.train, steps=6)), folder)
    without_digest(folder)
    state = read_state(max((folder / "checkpoints").iterdir()))
    assert own_tokenizer(folder, state) == ByteTokenizer()
    assert train(run, folder, resume=True).steps == 8
    other_data(folder)
    with pytest.raises(ValueError, match="got tokens with which the checkpoint was not trained"):
        own_tokenizer(folder, state)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception]]] = {
    "no file": ({}, {"files": ("none.txt",)}, FileNotFoundError),
    "raw JSON": ({}, {"files": ("array.json",)}, ValueError),
    "a device": ({"device": "cuda:99"}, {}, ValueError),
    "a budget": ({"memory_budget": 1000}, {}, ValueError),
    "little text": ({"batch_size": 2, "seq_len": 16}, {"files": ("short.txt",)}, ValueError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_run_leaves_no_folder(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("short", encoding="utf-8")
    Path("array.json").write_text("[]", encoding="utf-8")
    settings, data, error = REFUSED[name]
    bad = replace(run, train=replace(run.train, **settings), data=replace(run.data, **data))
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(error):
        train(bad, Path("runs/deep/run"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        train(run, Path("runs/deep/run"), resume=True)
    assert sorted(tmp_path.rglob("*")) == there
    Path("mine").mkdir()
    with pytest.raises(error):
        train(bad, Path("mine"))
    assert list(Path("mine").iterdir()) == []


def test_sigterm_saves_and_exits_cleanly(run: RunConfig, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        "[model]\nvocab_size = 256\nblock_size = 16\nn_layer = 1\nn_head = 2\nn_embd = 16\n"
        "[train]\nsteps = 100000\nbatch_size = 2\nseq_len = 12\nlog_interval = 1\nsample_tokens = 4\n"
        f"[data]\nfiles = [{run.data.files[0]!r}]\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tilegrad", "train", str(config), "--out", str(folder)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step      5"):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=300)
    assert process.returncode == 143 and "SIGTERM after step" in rest
    saved = load_checkpoint(max((folder / "checkpoints").iterdir()))
    assert saved.step >= 5 and (folder / "report.html").exists()


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"preset": "tiny", "n_layers": 2}},
        r"got 'n_layers' in \[model\] \(did you mean 'n_layer'\?\); accepted: ",
    ),
    (
        {"training": {}},
        r"got \[training\] \(did you mean \[train\]\?\); accepted: the sections \[model\], \[train\], \[optimizer\], \[data\]",
    ),
    ({"model": {"preset": "huge"}}, "preset: got 'huge'; accepted: tiny"),
    ({"train": {"steps": 0}}, "steps: got 0; accepted: an int ≥ 1"),
    ({"train": {"dtype": "int8"}}, "dtype: got 'int8'"),
    ({"train": {"warmup_steps": 1000}}, "warmup_steps: got 1000; accepted: less than steps"),
    ({"train": {"learning_rate": "fast"}}, "learning_rate: got 'fast'"),
    ({"train": {"memory_budget": "1.5XB"}}, "memory_budget: got '1.5XB'; accepted: bytes, or a number with KB, MB"),
    ({"data": {"files": 3}}, "files: got 3; accepted: names of files"),
    ({"data": {"tokenizer": "words"}}, "tokenizer: got 'words'; accepted: 'bytes', 'bpe', or"),
    ({"data": {"bpe_vocab_size": 255}}, "bpe_vocab_size: got 255; accepted: an int from 256"),
    ({"data": {"bpe_vocab_size": 300.0}}, "bpe_vocab_size: got 300.0; accepted: an int from 256"),
    ({"data": {"validation_fraction": 1}}, "validation_fraction: got 1; accepted: at least 0 and less than 1"),
    ({"train": {"seq_len": 4096}}, "seq_len: got 4096; accepted: at most block_size, 128"),
    (
        {"model": {"vocab_size": 256}, "data": {"tokenizer": "bpe", "bpe_vocab_size": 9999}},
        "vocab_size: got 256; accepted: at least the tokenizer's size, 9999",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[m for _, m in BAD])
def test_a_bad_config_of_a_run_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_from(content, "run.toml")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7", 7), ("7B", 7), ("7 b", 7), ("3KB", 3000), ("3kib", 3072), ("2MB", 2_000_000), ("2MiB", 1 << 21),
        ("1.5GB", 1_500_000_000), ("1.5GiB", 3 << 29), ("0.5KB", 500),
    ],
)  # fmt: skip
def test_sizes_with_units_are_read(text: str, count: int) -> None:
    assert byte_count(text) == count


def test_a_run_can_be_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "tiny"\nn_layer = 6\n[train]\nsteps = 70\n[data]\nfiles = ["a.txt"]\n', encoding="utf-8"
    )
    run = run_from(read_toml(file), "run.toml")
    assert (run.model.n_layer, run.model.n_embd, run.train.steps, run.data.files) == (6, 128, 70, ("a.txt",))
    file.write_text("\ufeff[train]\nsteps = 7\n", encoding="utf-8")
    assert run_from(read_toml(file), "run.toml").train.steps == 7
    file.write_text("[model\n", encoding="utf-8")
    with pytest.raises(ValueError, match="is not TOML"):
        run_from(read_toml(file), "run.toml")


def test_defaults_follow_the_given_keys() -> None:
    run = run_from({"model": {"block_size": 64}, "train": {"steps": 100}, "data": {"tokenizer": "bpe"}}, "run.toml")
    assert (run.train.seq_len, run.train.warmup_steps, run.model.vocab_size) == (64, 5, 4096)
    run = run_from({"model": {"block_size": 64}, "train": {"steps": 100, "seq_len": 8, "warmup_steps": 7}}, "run.toml")
    assert (run.train.seq_len, run.train.warmup_steps, run.model.vocab_size) == (8, 7, 256)
    assert run_from({"data": {"files": "one.txt"}}, "run.toml").data.files == ("one.txt",)
    assert RunConfig(train=TrainConfig(steps=10)).train.warmup_steps == 0 and RunConfig().train.warmup_steps == 50
    assert RunConfig(MODEL).train.seq_len == MODEL.block_size
    gpt2 = run_from({"model": {"preset": "gpt2"}}, "run.toml")
    assert (gpt2.train.warmup_steps, gpt2.train.seq_len, gpt2.model.vocab_size) == (500, 1024, 50257)


def test_an_older_run_resumes_with_the_end_of_its_text_as_validation(run: RunConfig, tmp_path: Path) -> None:
    from tilegrad.training.checkpoint import save_checkpoint

    ended = replace(run, data=replace(run.data, validation="end"))
    folder, whole = tmp_path / "run", train(ended, tmp_path / "whole")
    train(ended, folder)
    found = load_checkpoint(next(p for p in (folder / "checkpoints").iterdir() if p.name.endswith("step-4")))
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for saved in (found.state["run"], content):
        del saved["data"]["validation"], saved["data"]["text_field"]
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    save_checkpoint(folder / "checkpoints", found.step, found.tensors, found.state)
    with pytest.raises(ValueError, match="validation: got 'windows'; accepted: the run's value, 'end', when resuming"):
        train(run, folder, resume=True)
    assert train(ended, folder, resume=True).validation_loss == whole.validation_loss
    drawn = train(run, tmp_path / "drawn")
    assert drawn.validation_loss not in (None, whole.validation_loss)


def test_an_older_run_of_epochs_resumes_to_the_same_bits(run: RunConfig, tmp_path: Path) -> None:
    """A saved run has both steps and epochs, which a new one may not have."""
    from tilegrad.training.checkpoint import save_checkpoint

    settings = replace(run.train, epochs=1, batch_size=16, checkpoint_interval=2, keep_checkpoints=9)
    folder = tmp_path / "run"
    whole = train(replace(run, train=settings), folder)
    found = load_checkpoint(next(p for p in (folder / "checkpoints").iterdir() if p.name.endswith("step-2")))
    content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    for saved in (found.state["run"], content):
        del saved["train"]["masters"], saved["train"]["gradients"], saved["optimizer"]["moments"]
    (folder / "run.json").write_text(json.dumps(content), encoding="utf-8")
    save_checkpoint(folder / "checkpoints", found.step, found.tensors, found.state)
    got = train(None, folder, resume=True)
    assert (got.steps, got.validation_loss) == (whole.steps, whole.validation_loss)
    assert content["train"]["epochs"] == 1 and whole.steps > 2
