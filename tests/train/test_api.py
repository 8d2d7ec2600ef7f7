"""Runs from Python: tilegrad.train, tilegrad.load, tilegrad.presets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegrad
from tilegrad.cli import main
from tilegrad.model import reference
from tilegrad.training.checkpoint import load_checkpoint
from tilegrad.training.generation import WindowSlides
from tilegrad.training.sections import run_from

CONTENT: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 1, "n_embd": 16, "block_size": 32},
    "train": {"steps": 4, "batch_size": 2, "seq_len": 12, "eval_interval": 2, "eval_batches": 1, "sample_tokens": 4},
    "data": {"files": ["text.txt"]},
}
TOML = "\n".join(
    f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    for section, values in CONTENT.items()
)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    Path("my.toml").write_text(TOML, encoding="utf-8")


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(max(Path(folder, "checkpoints").iterdir())).tensors


def test_a_file_a_dictionary_and_a_config_give_the_same_run() -> None:
    events: list[str] = []
    results = [
        tilegrad.train("my.toml"),
        tilegrad.train(Path("my.toml"), "runs/path"),
        tilegrad.train(CONTENT, show=lambda event, _numbers: events.append(event)),
        tilegrad.train(run_from(CONTENT, "here")),
    ]
    assert main(["train", "my.toml", "--out", "command"]) == 0
    folders = [Path("runs/my"), Path("runs/path"), Path("runs/tiny"), Path("runs/run")]
    assert [result.folder for result in results] == folders and "validation" in events
    assert len({(result.steps, result.train_loss, result.validation_loss) for result in results}) == 1
    asked = weights("command")
    for folder in folders:
        here = weights(folder)
        assert here.keys() == asked.keys() and all(torch.equal(here[name], asked[name]) for name in asked)
    assert all((folder / "run.json").read_bytes() == Path("command/run.json").read_bytes() for folder in folders)


def test_a_run_can_be_resumed_from_python() -> None:
    tilegrad.train(CONTENT, "run")
    assert tilegrad.train(resume="run").steps == 4
    assert tilegrad.train({"train": {"steps": 6}}, resume="run").steps == 6
    assert tilegrad.train(
        run_from(CONTENT | {"train": CONTENT["train"] | {"steps": 6, "warmup_steps": 0}}, ""), resume="run"
    )
    with pytest.raises(ValueError, match="batch_size: got 4; accepted: the run's value, 2, when resuming"):
        tilegrad.train({"train": {"batch_size": 4}}, resume="run")
    with pytest.raises(ValueError, match="out: got other; accepted: the run's folder, run, when resuming"):
        tilegrad.train(out="other", resume="run")


def test_bad_arguments_of_train_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config: got 'step' in \[train\]"):
        tilegrad.train({"train": {"step": 3}})
    with pytest.raises(FileNotFoundError, match=r"none.toml: no such configuration; `tilegrad init none.toml`"):
        tilegrad.train("none.toml")
    assert not Path("runs").exists()


def test_a_loaded_model_has_weights_logits_and_a_tokenizer() -> None:
    result = tilegrad.train(CONTENT, "run")
    model = tilegrad.load("run")
    saved = weights("run")
    assert model.config == run_from(CONTENT, "").model and model.step == 4 and model.tokenizer.vocab_size == 256
    assert set(model.params) == {name for name in saved if f"m.{name}" in saved} and "wpe.weight" in model.params
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.params.items())
    logits = model.logits("the quick")
    assert torch.equal(logits, model.logits([*b"the quick"])) and not logits.requires_grad
    n = reference.hidden_states(model.params, torch.tensor([[*b"the quick"]]), model.config)[0]
    torch.testing.assert_close(logits, n @ model.params["wte.weight"].T)
    likeliest = chr(int(logits[-1].argmax()))
    assert model.generate("the quick", 1, temperature=0.0) == "the quick" + likeliest
    assert model.generate("the", 9, seed=1) == model.generate("the", 9, seed=1) != model.generate("the", 9, seed=2)
    assert result.best is not None and tilegrad.load("run", best=True).step == result.best.step
    assert tilegrad.load(result.best.path).checkpoint == result.best.path


@pytest.mark.parametrize("loss", ["cross_entropy", "embedding_mse"])
def test_logits_of_a_text_equal_those_of_its_prefixes(loss: str) -> None:
    tilegrad.train(CONTENT | {"model": CONTENT["model"] | {"loss": loss}}, "run")
    model = tilegrad.load("run")
    whole = model.logits("the quick")
    assert whole.shape == (9, 256)
    for length in (1, 5, 9):
        torch.testing.assert_close(whole[length - 1], model.logits("the quick"[:length])[-1], rtol=1e-4, atol=1e-5)


def test_bad_arguments_of_a_loaded_model_are_refused() -> None:
    tilegrad.train(CONTENT, "run")
    model = tilegrad.load("run")
    with pytest.raises(ValueError, match="tokens: got 33 in all; accepted: 1 … block_size, 32"):
        model.logits("x" * 33)
    with pytest.raises(ValueError, match="tokens: got 0 in all"):
        model.logits("")
    with pytest.raises(ValueError, match="tokens: got 256; accepted: 0 … 255"):
        model.logits([256])
    with pytest.raises(ValueError, match="tokens: got -1; accepted: 0 … 255"):
        model.logits([-1])
    assert model.logits([0, 255]).shape == (2, 256) and model.logits([0] * 32).shape == (32, 256)
    with pytest.raises(FileNotFoundError, match="none: no such folder; accepted: the folder of a run"):
        tilegrad.load("none")
    with pytest.raises(ValueError, match="best: got True with the checkpoint"):
        tilegrad.load(model.checkpoint, best=True)
    Path("run/data/tokenizer.json").write_text('{"model": {"type": "bytes"} }', encoding="utf-8")
    with pytest.raises(ValueError, match="accepted: the tokenizer of the checkpoint"):
        tilegrad.load("run")


def test_text_longer_than_block_size_slides_the_window_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    tilegrad.train(CONTENT, "run")
    model = tilegrad.load("run")
    with pytest.warns(WindowSlides, match="43 tokens are more than block_size, 32: the window slides") as caught:
        text = model.generate("the", 40)
    assert len(caught) == 1 and text.startswith("the")
    assert main(["generate", "run", "--prompt", "the", "--max-tokens", "40"]) == 0
    out, error = capsys.readouterr()
    assert out == f"{text}\n" and error == (
        "tilegrad: 43 tokens are more than block_size, 32: the window slides, and a token "
        "attends to the last 16 to 32 before it\n"
    )
    assert main(["generate", "run", "--prompt", "the", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().err == ""


def test_presets_are_complete_configs_of_runs() -> None:
    presets = tilegrad.presets()
    assert presets["tiny"] == run_from({}, "") and presets["gpt2"].model.n_layer == 12
    presets["tiny"] = replace(presets["tiny"], train=replace(presets["tiny"].train, steps=1, warmup_steps=0))
    assert tilegrad.presets()["tiny"] == run_from({}, "")


def test_the_name_train_is_a_function_and_does_not_import_torch() -> None:
    assert callable(tilegrad.train) and tilegrad.train.__module__ == "tilegrad.training.api"
    here = os.environ | {"PYTHONPATH": str(Path(tilegrad.__file__).parents[1])}
    code = "import tilegrad, sys, tilegrad.training.keys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=here)
