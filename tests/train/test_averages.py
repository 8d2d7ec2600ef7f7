"""Averages of weights: an engine keeps them, a run evaluates and saves them, and they are loaded and exported."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONFIG, batch, clones, equal
from torch import Tensor

import tilegrad
from tilegrad import Engine, MuonConfig
from tilegrad.cli import main
from tilegrad.data.tokenizer import train_bpe
from tilegrad.engine.state import averaged, counters, restore_counters, write_param
from tilegrad.model.lora import LoraConfig
from tilegrad.pretrained.adapters import merge, open_adapter
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training import loop
from tilegrad.training.checkpoint import load_checkpoint, load_model, save_checkpoint
from tilegrad.training.export import export_adapter, export_run
from tilegrad.training.log import read_log
from tilegrad.training.manifest import DamagedCheckpoint

DECAY = 0.8
SMALL = replace(CONFIG, n_layer=1)
BATCH = batch(SMALL, 2, 9)
ENGINES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"muon": MuonConfig()},
    "muon alone": {"muon": MuonConfig(), "freeze": ("w*", "*ln*", "*.bias")},
    "adapters": {"lora": LoraConfig(2, 4)},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64, "freeze": ("wte.*",)},
}


def engine_of(name: str) -> Engine:
    return Engine(SMALL, 2, 9, ema=DECAY, **ENGINES[name])


def average_of(engine: Engine) -> dict[str, Tensor]:
    tensors = engine.tensors()
    return {name: tensors[f"ema.{name}"] for name in engine.grads}


@pytest.mark.parametrize("name", ENGINES)
def test_the_average_is_over_the_weights_after_each_step(name: str) -> None:
    engine = engine_of(name)
    want = {n: engine.params[n].to(torch.float64, copy=True) for n in engine.grads}
    assert equal(average_of(engine), {n: engine.params[n] for n in engine.grads}), "of the initial weights"
    for t in range(1, 9):
        engine.step(*BATCH, 1e-2)
        w = 1.0 if t == 1 else 1.0 - min(DECAY, (1 + t) / (10 + t))
        for n, x in want.items():
            x += w * (engine.params[n].double() - x)
    assert float(engine.optimizer.adam_step) == 8
    exact = 1e-14 if engine.dtype == torch.float64 else 1e-6
    for n, x in average_of(engine).items():
        assert (x.double() - want[n]).abs().max() <= exact * (1 + want[n].abs().max()), n
        assert not torch.equal(x, engine.params[n]), n


@pytest.mark.parametrize("name", ENGINES)
def test_inside_averaged_the_engine_has_the_average_and_afterwards_the_same_bits(name: str) -> None:
    engine = engine_of(name)
    for _ in range(3):
        engine.step(*BATCH, 1e-2)
    before, loss = clones(engine.tensors()), engine.evaluate(*BATCH)
    other = Engine(SMALL, 2, 9, **ENGINES[name])
    for n, x in engine.params.items():
        write_param(other, n, before.get(f"ema.{n}", x))
    with averaged(engine):
        assert equal({n: engine.params[n] for n in engine.grads}, {n: before[f"ema.{n}"] for n in engine.grads})
        assert engine.evaluate(*BATCH) == other.evaluate(*BATCH) != loss
    assert equal(engine.tensors(), before) and engine.evaluate(*BATCH) == loss
    with pytest.raises(OSError, match="full"), averaged(engine):
        raise OSError("full")
    assert equal(engine.tensors(), before)


def test_calls_that_would_mix_weights_and_average_are_refused() -> None:
    engine = engine_of("adamw")
    engine.gradients(*BATCH)
    with averaged(engine):
        for call in (
            lambda: engine.step(*BATCH, 1e-2),
            lambda: engine.optimizer_step(1e-2),
            engine.tensors,
            averaged(engine).__enter__,
        ):
            with pytest.raises(
                RuntimeError, match=r"^\w+: got a call inside `averaged`, which has swapped the weights"
            ):
                call()
    engine.forward(*BATCH)
    with averaged(engine):
        pass
    with pytest.raises(RuntimeError, match="backward: got no forward"):
        engine.backward()
    with pytest.raises(ValueError, match=r"^ema: got 0.0, .*; accepted: an engine with a decay above 0$"):
        averaged(Engine(SMALL, 2, 9)).__enter__()


@pytest.mark.parametrize("name", ["adamw", "muon alone"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_is_not_finite_does_not_change_the_average(name: str, steps: int) -> None:
    engine = engine_of(name)
    for _ in range(steps):
        engine.step(*BATCH, 1e-2)
    before = clones(engine.tensors())
    engine.gradients(*BATCH)
    next(iter(engine.grads.values())).view(-1)[0] = math.nan
    assert math.isnan(engine.optimizer_step(1e-2))
    assert equal(engine.tensors(), before) and float(engine.optimizer.adam_step) == steps


@pytest.mark.parametrize("name", ["muon", "adapters"])
def test_a_resumed_engine_continues_its_average_to_the_same_bits(name: str) -> None:
    engine, again = engine_of(name), engine_of(name)
    for _ in range(3):
        engine.step(*BATCH, 1e-2)
    into = again.tensors()
    for n, x in engine.tensors().items():
        into[n].copy_(x)
    assert equal(again.tensors(), engine.tensors()), "a loaded average stays"
    restore_counters(again, counters(engine))
    for _ in range(2):
        engine.step(*BATCH, 1e-2)
        again.step(*BATCH, 1e-2)
    assert equal(engine.tensors(), again.tensors())


# ── runs ──

STEPS, SAVED = 8, (4, 6, 8)
RUN: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 1, "n_embd": 16, "n_head": 2, "block_size": 16},
    "train": {
        "steps": STEPS, "batch_size": 2, "seq_len": 12, "learning_rate": 1e-2, "eval_interval": 2, "eval_batches": 99,
        "checkpoint_interval": 2, "sample_tokens": 4,
    },
    "data": {"files": ["text.txt"]},
}  # fmt: skip
AVERAGED = RUN | {"optimizer": {"ema": 0.9}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """averaged/ has an average, plain/ has none, adapters/ has adapters and an average. No test writes into them."""
    folder = tmp_path_factory.mktemp("averages")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "chosen_loggers", lambda _log: ())
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
        tilegrad.train(AVERAGED, "averaged")
        tilegrad.train(RUN, "plain")
        base = tilegrad.load("plain")
        bpe = train_bpe(Path("text.txt").read_text(encoding="utf-8"), 256)
        Path("tokenizer.json").write_text(bpe.json(), encoding="utf-8")
        write_weights(Path("weights"), base.params, base.config, tokenizer=Path("tokenizer.json"))
        adapters = {"train": RUN["train"] | {"init": "weights"}, "data": RUN["data"], "lora": {"rank": 2}}
        tilegrad.train(adapters | {"optimizer": {"ema": 0.9}}, "adapters")
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checkpoints(run: Path) -> list[dict[str, Tensor]]:
    paths = sorted((run / "checkpoints").iterdir())
    assert [int(path.name.rpartition("-")[2]) for path in paths] == list(SAVED)
    return [load_checkpoint(path).tensors for path in paths]


def test_a_run_evaluates_and_samples_with_the_average(runs: Path) -> None:
    run = runs / "averaged"
    records = [r for r in read_log(run / "log.jsonl") if r["kind"] == "validation"]
    assert [r["step"] for r in records] == [2, 4, 6, 8] and {r["weights"] for r in records} == {"averaged"}
    plain = [r for r in read_log(runs / "plain" / "log.jsonl") if r["kind"] == "validation"]
    assert all("weights" not in r for r in plain)
    averaged_, raw = tilegrad.evaluate(run), tilegrad.evaluate(run, averaged=False)
    assert averaged_.loss == records[-1]["loss"] != raw.loss
    assert (averaged_.weights, raw.weights) == ("averaged", "raw")
    best = tilegrad.evaluate(run, best=True)
    assert best.loss == min(r["loss"] for r in records)
    assert raw.loss == pytest.approx(plain[-1]["loss"], abs=1e-6), "an average changes no weight"


def test_the_average_changes_no_bit_of_the_weights(runs: Path) -> None:
    for with_it, without in zip(checkpoints(runs / "averaged"), checkpoints(runs / "plain"), strict=True):
        assert equal({n: x for n, x in with_it.items() if not n.startswith("ema.")}, without)


def test_a_run_loads_its_average_or_its_weights(runs: Path) -> None:
    *_, newest = checkpoints(runs / "averaged")
    model, raw = tilegrad.load(runs / "averaged"), tilegrad.load(runs / "averaged", averaged=False)
    assert equal(model.params, {n: newest[f"ema.{n}"] for n in model.params}) and model.weights == "averaged"
    assert equal(raw.params, {n: newest[n] for n in raw.params}) and raw.weights == "raw"
    plain = tilegrad.load(runs / "plain")
    assert equal(plain.params, raw.params) and plain.weights == "raw"
    export_run(runs / "averaged", Path("exported"))
    assert equal(open_weights(Path("exported")).read(), model.params)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_export_is_the_mean_of_the_newest_checkpoints(runs: Path, count: int) -> None:
    saved = checkpoints(runs / "averaged")[-count:]
    found = export_run(runs / "averaged", Path("exported"), average=count)
    exported, loaded = open_weights(Path("exported")).read(), tilegrad.load(runs / "averaged", average=count)
    for name, x in exported.items():
        want = torch.stack([each[name].double() for each in saved]).mean(0)
        assert torch.equal(x, want.float()) and torch.equal(loaded.params[name], x)
    words = f"mean of {count} checkpoint{'s' * (count > 1)}"
    assert (found.step, found.weights, loaded.weights) == (STEPS, words, words)


def test_a_mean_leaves_out_steps_that_a_resumed_run_trained_again(runs: Path) -> None:
    shutil.copytree(runs / "averaged", "run")
    first = next(Path("run", "checkpoints").glob("*-step-4"))
    tilegrad.train({"train": {"learning_rate": 1e-3, "steps": 7, "keep_checkpoints": 9}}, resume=first)
    saved = sorted(Path("run", "checkpoints").iterdir())
    assert [int(path.name.rpartition("-")[2]) for path in saved] == [4, 6, 8, 6, 7]
    tensors = [load_checkpoint(saved[i]).tensors for i in (0, 3, 4)]
    model = tilegrad.load("run", average=3)
    for name, x in model.params.items():
        assert torch.equal(x, torch.stack([each[name].double() for each in tensors]).mean(0).float())
    with pytest.raises(ValueError, match=r"^average: got 4; accepted: an int from 1 to 3, "):
        tilegrad.load("run", average=4)


@pytest.mark.parametrize("given", [{}, {"averaged": False}, {"average": 3}])
def test_adapters_are_averaged_before_they_are_merged(runs: Path, given: dict[str, Any]) -> None:
    saved = checkpoints(runs / "adapters")
    base, merged = open_weights(runs / "weights"), tilegrad.load(runs / "adapters", **given)
    export_adapter(runs / "adapters", Path("adapter"), **given)
    adapter = open_adapter(Path("adapter"), base)
    params, found = base.read(), adapter.read()
    if "average" in given:
        want = {n: torch.stack([each[n].double() for each in saved]).mean(0).float() for n in found}
    else:
        want = {n: saved[-1][n if given else f"ema.{n}"] for n in found}
    assert equal(found, want)
    merge(params, found, base.config, adapter.lora)
    assert equal(merged.params, params)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"average": 4},
            r"average: got 4; accepted: an int from 1 to 3, as many checkpoints as .*averaged/checkpoints has",
        ),
        ({"average": 0}, r"average: got 0; accepted: an int from 1 to 3"),
        ({"average": True}, r"average: got True; accepted: an int from 1 to 3"),
        ({"average": 1.5}, r"average: got 1.5; accepted: an int from 1 to 3"),
        ({"average": 2, "best": True}, r"average: got 2 with best; accepted: a number with a run's folder"),
    ],
)
def test_a_mean_that_a_run_does_not_have_is_refused(runs: Path, given: dict[str, Any], message: str) -> None:
    for call in (tilegrad.load, tilegrad.evaluate, lambda run, **how: export_run(run, Path("out"), **how)):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(runs / "averaged", **given)
    assert not Path("out").exists()


def test_a_mean_of_weights_outside_a_run_is_refused(runs: Path) -> None:
    newest = max((runs / "averaged" / "checkpoints").iterdir())
    with pytest.raises(ValueError, match=rf"^average: got 2 with the checkpoint {newest}; accepted: "):
        tilegrad.load(newest, average=2)
    for call in (tilegrad.load, lambda run, **how: export_run(run, Path("out"), **how)):
        with pytest.raises(
            ValueError, match=r"^average: got 2 with .*weights, a folder of weights; accepted: a number"
        ):
            call(runs / "weights", average=2)


def test_the_command_line_says_which_weights_it_used(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert main([*words]) == 0
        out, err = capsys.readouterr()
        return out + err

    run, generate = str(runs / "averaged"), ("--max-tokens", "2", "--temperature", "0")
    assert "tilegrad: weights: averaged\n" in said("generate", run, *generate)
    assert "weights" not in said("generate", run, *generate, "--no-averaged")
    assert "tilegrad: weights: mean of 2 checkpoints\n" in said("generate", run, *generate, "--average", "2")
    assert json.loads(said("evaluate", run, "--json", "--average", "2"))["weights"] == "mean of 2 checkpoints"
    table = said("evaluate", run).split("\n")
    assert ["weights", "averaged"] in [line.split() for line in table]
    assert said("export", run, "a").endswith("after 8 steps, weights: averaged\n")
    assert said("export", run, "b", "--no-averaged").endswith("after 8 steps\n")
    assert said("export", run, "c", "--average", "3").endswith("weights: mean of 3 checkpoints\n")
    assert said("export", str(runs / "adapters"), "d", "--adapter").endswith("weights: averaged\n")


def test_a_checkpoint_with_half_an_average_is_damaged(runs: Path) -> None:
    newest = load_checkpoint(max((runs / "averaged" / "checkpoints").iterdir()))
    for name, x in (("ema.wte.weight", None), ("ema.other", torch.ones(1)), ("ema.wte.weight", torch.ones(2))):
        tensors = {n: y for n, y in newest.tensors.items() if n != name} | ({} if x is None else {name: x})
        path = save_checkpoint(Path("run/checkpoints"), newest.step, tensors, newest.state)
        with pytest.raises(
            DamagedCheckpoint, match=rf"got {name} of dtype and shape .*; accepted: .*, as its parameter"
        ):
            load_model(path)
