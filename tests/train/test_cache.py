"""ORG/NAME in Hugging Face's cache is imported, fine-tuned, evaluated and used to generate, without the network."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from tilegrad.cli import main
from tilegrad.data.tokenizer import train_bpe
from tilegrad.engine.engine import Engine
from tilegrad.model.config import ModelConfig
from tilegrad.pretrained.cache import cache_folder, cached_model
from tilegrad.pretrained.weights import open_weights, write_weights

TEXT = "the quick brown fox jumps over the lazy dog. " * 12
REVISION = "0123456789abcdef" * 2 + "01234567"
MODEL = ModelConfig(vocab_size=260, block_size=16, n_layer=1, n_head=2, n_embd=16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """models--some-org--a.Model-1 with its files as links into blobs; returns the folder of the model."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(socket, "socket", lambda *_: pytest.fail("a socket was opened"))
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    write_weights(Path("weights"), Engine(MODEL, 1, 4).params, MODEL)
    Path("weights/tokenizer.json").write_text(train_bpe(TEXT, 260).json(), encoding="utf-8")
    model = tmp_path / ".cache/huggingface/hub/models--some-org--a.Model-1"
    snapshot = model / "snapshots" / REVISION
    for folder in (model / "blobs", model / "refs", snapshot):
        folder.mkdir(parents=True)
    for number, file in enumerate(Path("weights").iterdir()):
        shutil.copy(file, model / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (model / "refs" / "main").write_text(REVISION, encoding="utf-8")
    return model


def test_a_name_in_the_cache_is_used_like_a_folder_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    name = "some-org/a.Model-1"
    assert main(["import", name]) == 0
    assert capsys.readouterr().out.startswith("models/a.Model-1: a gpt2 model")
    want, got = open_weights(Path("weights")).read(), open_weights(Path("models/a.Model-1")).read()
    assert want.keys() == got.keys() and all(torch.equal(got[n], p) for n, p in want.items())
    assert (
        main(["train", "--init", name, "--data", "text.txt", "--steps", "2", "--batch-size", "2", "--out", "run"]) == 0
    )
    assert json.loads(Path("run/run.json").read_text(encoding="utf-8"))["train"]["init"] == name
    capsys.readouterr()
    outputs = []
    for words in (["evaluate", "--data", "text.txt"], ["generate", "--max-tokens", "4", "--prompt", "fox"]):
        for source in (name, "weights"):
            assert main([words[0], source, *words[1:]]) == 0
            outputs.append(capsys.readouterr().out.splitlines()[:5])
    assert outputs[0] == outputs[1] and outputs[2] == outputs[3]
    shutil.rmtree(".cache")
    assert main(["train", "--resume", "run", "--steps", "3"]) == 0


def test_a_folder_with_the_name_is_used_before_the_cache() -> None:
    shutil.copytree("weights", "some-org/a.Model-1")
    assert open_weights(Path("some-org/a.Model-1")).folder == Path("some-org/a.Model-1")


def test_the_cache_is_found_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert cache_folder() == tmp_path / "hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/hub")
    assert cache_folder() == Path("/hub")


@pytest.mark.parametrize("command", [["import"], ["train", "--out", "run", "--init"], ["evaluate", "--seq-len", "4"]])
def test_the_error_for_a_missing_model_says_how_to_download_it(
    command: list[str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "other/model"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "other/model: no such folder" in error
    if command[0] != "evaluate":  # for evaluate the name could be a run
        assert f"which {cache.parent} does not have" in error
        assert error.endswith("download it first: hf download other/model --local-dir model, and give model\n")
    assert main([*command[:1], *command[1:], "deep/er/model"]) == 2
    assert "hf download" not in capsys.readouterr().err
    assert not Path("run").exists() and not Path("models").exists()


def test_an_incomplete_model_counts_as_missing(cache: Path) -> None:
    (cache / "snapshots" / REVISION / "config.json").unlink()
    assert cached_model(Path("some-org/a.Model-1")) is None
    with pytest.raises(FileNotFoundError, match=r"hf download some-org/a.Model-1"):
        open_weights(Path("some-org/a.Model-1"))


@pytest.mark.parametrize("revision", ["../../../../secret", "main", REVISION + "0", "é" * 40, ""])
def test_an_invalid_revision_is_refused(revision: str, cache: Path) -> None:
    (cache / "refs" / "main").write_text(revision, encoding="utf-8")
    with pytest.raises(ValueError, match=r"refs/main: got '.*; accepted: a revision of 40 hexadecimal digits"):
        open_weights(Path("some-org/a.Model-1"))


def test_links_to_paths_outside_the_model_are_refused(cache: Path, tmp_path: Path) -> None:
    name, snapshot = Path("some-org/a.Model-1"), cache / "snapshots" / REVISION
    weights = snapshot / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "weights/model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.safetensors: got a link to .*; accepted: a file in the folder, or in blobs/"
    ):
        open_weights(name)
    shutil.rmtree(snapshot)
    snapshot.symlink_to(tmp_path / "weights")
    with pytest.raises(ValueError, match=f"{REVISION}: got a link to .*weights; accepted: a folder of the cache"):
        open_weights(name)
    (cache / "refs" / "main").unlink()
    (cache / "refs" / "main").symlink_to(tmp_path / "text.txt")
    with pytest.raises(ValueError, match="refs/main: got a link to"):
        open_weights(name)
