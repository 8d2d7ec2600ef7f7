"""The checkpoint with the lowest validation loss: it is kept, named, resumed from and generated from."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import small_run

from tilegrad import Engine
from tilegrad.cli import main
from tilegrad.pretrained.weights import open_weights
from tilegrad.training.checkpoint import load_checkpoint, read_state
from tilegrad.training.run import train

RUN = small_run(steps=10, warmup_steps=2, eval_interval=2, checkpoint_interval=3, sample_tokens=4)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")


def evaluations(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """The validation losses by step."""
    monkeypatch.setattr(Engine, "evaluate", lambda self, *_batch, **_ends: losses[self.steps])


def best(folder: str = "run") -> Path:
    (path,) = Path(folder, "best").iterdir()
    return path


def test_the_best_checkpoint_is_kept_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: dict[int, torch.Tensor] = {}

    def evaluate(self: Engine, *_batch: torch.Tensor, **_ends: torch.Tensor) -> float:
        weights[self.steps] = self.params["wte.weight"].clone()
        return {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: float("nan")}[self.steps]

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    result = train(RUN, Path("run"))
    assert result.best is not None
    assert (result.best.path, result.best.step, result.best.validation_loss) == (best(), 4, 2.0)
    assert torch.equal(load_checkpoint(best()).tensors["wte.weight"], weights[4])
    assert read_state(best())["validation_loss"] == 2.0
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "validation 2.0000 after 4 steps, best/000002-step-4" in page


def test_the_best_checkpoint_survives_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: 3.0, 4: 2.0, 6: 2.1})
    train(replace(RUN, train=replace(RUN.train, steps=6)), Path("run"))
    evaluations(monkeypatch, {8: 2.2, 10: 2.05})
    result = train(RUN, Path("run"), resume=True)
    assert result.best is not None and (result.best.step, result.best.validation_loss) == (4, 2.0)
    evaluations(monkeypatch, {10: 2.05, 12: 1.5})
    result = train(replace(RUN, train=replace(RUN.train, steps=12)), Path("run"), resume=True)
    assert result.best is not None and (result.best.step, result.best.path) == (12, best())


def test_a_damaged_best_checkpoint_does_not_stop_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 2.5})
    train(replace(RUN, train=replace(RUN.train, steps=6)), Path("run"))
    (best() / "manifest.json").write_text("{", encoding="utf-8")
    result = train(RUN, Path("run"), resume=True)
    assert result.best is not None and (result.best.step, result.best.path) == (8, best())


def test_a_run_without_an_evaluation_has_no_best_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    result = train(replace(RUN, train=replace(RUN.train, eval_batches=0)), Path("run"))
    assert result.best is None and not Path("run/best").exists()
    assert main(["generate", "run", "--best", "--max-tokens", "2"]) == 2
    assert capsys.readouterr().err == (
        "tilegrad: run: got no best checkpoint; accepted: a run with an evaluation (train.eval_interval)\n"
    )


def test_a_run_resumes_from_its_best_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.5, 10: 2.5})
    train(RUN, Path("run"))
    after = load_checkpoint(max(Path("run/checkpoints").iterdir())).tensors
    result = train(RUN, Path("run"), resume=best())
    assert result.steps == 10
    again = load_checkpoint(max(Path("run/checkpoints").iterdir()))
    assert again.path.name == "000007-step-10" and all(torch.equal(after[name], again.tensors[name]) for name in after)


def test_a_run_that_died_before_its_first_checkpoint_resumes_from_the_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluations(monkeypatch, {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.5, 10: 2.5})
    train(RUN, Path("run"))
    shutil.rmtree("run/checkpoints")
    with pytest.raises(ValueError, match="run: holds a run already"):
        train(RUN, Path("run"))
    starts: list[int] = []

    def show(event: str, numbers: dict[str, Any]) -> None:
        if event == "start":
            starts.append(numbers["step"])

    assert train(None, Path("run"), resume=True, show=show).steps == 10 and starts == [4]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    evaluations(monkeypatch, {2: 1.0, 4: 2.0})
    sizes = "--model.n_layer 1 --model.n_embd 16 --seq-len 12 --batch-size 2 --train.eval_interval 2 --steps 4"
    assert main(["train", "--data", "text.txt", "--out", "run", *sizes.split(), "--learning-rate", "0.5"]) == 0
    return capsys.readouterr().out


def test_generate_uses_the_best_checkpoint_on_request(printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"best validation loss +1\.0000 after 2 steps", printed)
    assert "The best weights: run/best/000001-step-2 (tilegrad generate run --best)" in printed
    texts = []
    for flags in (["run"], ["run", "--best"], [str(best())]):
        assert main(["generate", *flags, "--temperature", "0", "--prompt", "the ", "--max-tokens", "20"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1] == texts[2]


def test_the_folders_of_checkpoints_are_refused_by_the_name_of_their_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluations(monkeypatch, dict.fromkeys((2, 4, 6, 8, 10), 2.0))
    train(RUN, Path("run"))
    for folder, remedy in (("run/best", "run with --best"), ("run/checkpoints", "run")):
        assert main(["generate", folder, "--max-tokens", "1"]) == 2
        assert capsys.readouterr().err.endswith(f"or a folder of weights, such as {remedy}\n")


def test_the_best_checkpoint_is_exported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    evaluations(monkeypatch, {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.2, 10: 2.3})
    train(RUN, Path("run"))
    assert main(["export", "run", "newest"]) == 0
    assert main(["export", "run", "best", "--best", "--max-shard-size", "4KB"]) == 0
    assert [line.split(", ")[1] for line in capsys.readouterr().out.splitlines()] == ["after 10 steps", "after 4 steps"]
    params, want = open_weights(Path("best")).read(), load_checkpoint(best()).tensors
    assert all(torch.equal(x, want[name]) for name, x in params.items())
    assert not torch.equal(open_weights(Path("newest")).read()["wte.weight"], want["wte.weight"])
    assert Path("best/model.safetensors.index.json").is_file()
    assert main(["export", str(best()), "out", "--best"]) == 2
    assert "best: got True with the checkpoint" in capsys.readouterr().err
    assert main(["export", "run", "out", "--max-shard-size", "big"]) == 2
    assert "max_shard_size: got 'big'; accepted: bytes" in capsys.readouterr().err
    assert not Path("out").exists()
