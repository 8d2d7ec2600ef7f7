"""Runs with adapters and with frozen parameters: the contents of a checkpoint, resume to the same bits, different base
weights, merged and unmerged models, every key and its errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import CONFIG, LLAMA, QWEN3, equal

import tilegrad
from tilegrad import Engine
from tilegrad.cli import main
from tilegrad.data.documents import default_text
from tilegrad.data.tokenizer import train_bpe
from tilegrad.model.lora import LoraConfig
from tilegrad.model.reference import hidden_states, logits_of
from tilegrad.pretrained.adapters import adapter_shapes, merge
from tilegrad.pretrained.weights import open_weights, write_weights
from tilegrad.training import loop
from tilegrad.training.checkpoint import latest_checkpoint, load_adapters, load_checkpoint
from tilegrad.training.config import AdapterConfig
from tilegrad.training.keys import keys
from tilegrad.training.manifest import DamagedCheckpoint, _digest
from tilegrad.training.schedule import learning_rate
from tilegrad.training.sections import run_from

SIZE: dict[str, Any] = {"vocab_size": 280, "block_size": 24, "n_layer": 2}
KINDS = {
    "gpt2": replace(CONFIG, **SIZE),
    "llama": replace(LLAMA, **SIZE),
    "qwen3": replace(QWEN3, **SIZE | {"n_layer": 2}, qkv_bias=False),
}
TRAIN: dict[str, Any] = {
    "init": "base", "steps": 4, "batch_size": 2, "seq_len": 12, "learning_rate": 3e-2, "warmup_steps": 0,
    "eval_interval": 2, "eval_batches": 2, "checkpoint_interval": 2, "sample_tokens": 3,
}  # fmt: skip
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "dropout": 0.1}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tokenizer, base weights, and a run that has trained adapters of them."""
    home = tmp_path_factory.mktemp("originals")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(loop, "chosen_loggers", lambda _log: ())
        text = default_text().read_text(encoding="utf-8")[:3000]
        Path("text.txt").write_text(text, encoding="utf-8")
        Path("tokenizer.json").write_text(train_bpe(text, 270).json(), encoding="utf-8")
        base("llama", "base")
        tilegrad.train(run(), "run")
    return home


@pytest.fixture(autouse=True)
def in_a_copy(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a copy of the originals as the current folder; the run's base weights are those in the copy."""
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "chosen_loggers", lambda _log: ())
    change_manifests("run", lambda state: state["base"].update(folder=str(tmp_path / "base")))


def change_manifests(run: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the saved state in all checkpoints of a run, with the right digest."""
    for manifest in Path(run).glob("*/*/manifest.json"):
        content = json.loads(manifest.read_text(encoding="utf-8"))
        change(content["state"])
        del content["sha256"]
        manifest.write_text(json.dumps(content | {"sha256": _digest(content)}), encoding="utf-8")


def base(kind: str, folder: str, seed: int = 5, **options: Any) -> None:
    config = KINDS[kind]
    params = Engine(config, 1, 4, seed=seed).params
    for p in params.values():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.1)
    write_weights(Path(folder), params, config, tokenizer=Path("tokenizer.json"), **options)


def run(lora: dict[str, Any] | None = LORA, **train: Any) -> dict[str, dict[str, Any]]:
    return {"train": TRAIN | train, "data": {"files": ["text.txt"]}, **({} if lora is None else {"lora": lora})}


def newest(folder: str) -> Any:
    path = latest_checkpoint(Path(folder) / "checkpoints")
    assert path is not None
    return load_checkpoint(path)


def stops_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(now: int, **options: Any) -> float:
        if now == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return learning_rate(now, **options)

    monkeypatch.setattr(loop, "learning_rate", rate)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpt2", {"lora": LORA}),
        ("gpt2", {"lora": None, "freeze": ["blocks.0.*", "wte.*"], "dtype": "bfloat16"}),
        ("gpt2", {"lora": None, "freeze": "wte.*", "dtype": "bfloat16", "gradients": "bfloat16"}),
        ("llama", {"lora": LORA | {"layers": ["q", "down"]}, "freeze": "blocks.0.attn*", "dtype": "float64"}),
        ("qwen3", {"lora": LORA | {"layers": "attention", "dropout": 0.0}, "gradient_accumulation": 2}),
    ],
    ids=str,
)
def test_a_stopped_run_resumes_to_the_same_bits(
    kind: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base(kind, "weights")
    config = run(**keys, init="weights", steps=3)
    whole = tilegrad.train(config, "whole")
    with monkeypatch.context() as patch:
        stops_after(2, patch)
        assert tilegrad.train(config, "stopped").stopped_by == "SIGINT"
    resumed = tilegrad.train(None, resume="stopped")
    assert (resumed.steps, resumed.train_loss, resumed.validation_loss) == (3, whole.train_loss, whole.validation_loss)
    assert equal(newest("stopped").tensors, newest("whole").tensors) and resumed.sample == whole.sample
    a = tilegrad.load("stopped")
    assert equal(a.params, tilegrad.load("whole").params)
    assert whole.best is not None and tilegrad.load("whole", best=True).step == whole.best.step
    assert main(["export", "stopped", "out"]) == 0
    assert equal(open_weights(Path("out")).read(), {name: x.float() for name, x in a.params.items()})


def test_a_checkpoint_has_only_the_adapters_and_their_moments() -> None:
    saved = newest("run")
    names = {name.removeprefix("m.").removeprefix("v.") for name in saved.tensors} - {"adam_step"}
    assert all(name.endswith((".lora_a", ".lora_b")) for name in names)
    assert {*saved.tensors} == {f"{kind}{name}" for kind in ("", "m.", "v.") for name in names} | {"adam_step"}
    assert saved.state["base"]["sha256"] == open_weights(Path("base")).sha256()
    assert not Path("run/frozen.safetensors").exists()
    assert all(x.any() for name, x in saved.tensors.items() if name.endswith("lora_b"))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_and_unmerged_adapters_have_the_same_logits(kind: str) -> None:
    config, lora, tokens = KINDS[kind], LoraConfig(rank=3, alpha=6), torch.arange(12)[None]
    generator = torch.Generator().manual_seed(2)
    params = {name: x.double() for name, x in Engine(config, 1, 4).params.items()}
    adapters = {
        name: torch.randn(shape, generator=generator).double() for name, shape in adapter_shapes(config, lora).items()
    }
    both = params | adapters
    unmerged = logits_of(params, hidden_states(both, tokens, config, lora)[0], config)
    plain = logits_of(params, hidden_states(params, tokens, config)[0], config)
    merge(params, adapters, config, lora)
    merged = logits_of(params, hidden_states(params, tokens, config)[0], config)
    assert float((merged - unmerged).abs().max()) < 1e-12 * float(unmerged.abs().max())
    assert float((plain - unmerged).abs().max()) > 0.1 * float(unmerged.abs().max()), "the adapters do nothing"


def test_a_loaded_run_is_merged() -> None:
    config, lora, adapters = load_adapters(newest("run").path)
    want = open_weights(Path("base")).read()
    merge(want, adapters.tensors, config, lora)
    assert equal(tilegrad.load("run").params, want)


def test_different_base_weights_are_refused_and_moved_ones_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = tilegrad.load("run").generate("the", 4)
    Path("base").rename("moved")
    moved = r"base: no such folder or file; .*pass their folder with --init"
    for act in (lambda: tilegrad.load("run"), lambda: tilegrad.train({"train": {"steps": 6}}, resume="run")):
        with pytest.raises(FileNotFoundError, match=moved):
            act()
    assert tilegrad.load("run", init="moved").generate("the", 4) == text
    base("llama", "base", seed=6)
    differs = (
        r"^init: got .*base, weights of sha256 \w{12}…; accepted: those that the adapters were trained on, \w{12}…"
    )
    for act in (lambda: tilegrad.load("run"), lambda: tilegrad.train({"train": {"steps": 6}}, resume="run")):
        with pytest.raises(ValueError, match=differs):
            act()
    base("gpt2", "other")
    with pytest.raises(ValueError, match=r"^gpt2: got a model with blocks.0.ffn.up_gate.weight"):
        tilegrad.load("run", init="other")
    shutil.rmtree("base")
    base("llama", "shards", max_shard_bytes=20_000)
    assert len([*Path("shards").glob("*.safetensors")]) > 1
    assert tilegrad.train({"train": {"steps": 5, "init": "shards"}}, resume="run").steps == 5
    shutil.rmtree("moved")
    assert tilegrad.train({"train": {"steps": 6}}, resume="run").steps == 6, "the new place was not recorded"
    assert main(["generate", "run", "the", "--max-tokens", "2", "--init", "shards"]) == 0
    assert main(["export", "run", "out", "--init", "shards", "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "adapter", "--adapter", "--init", "shards"]) == 2
    assert "init: got a value with --adapter" in capsys.readouterr().err


def test_an_export_of_merged_weights_is_rounded_once() -> None:
    assert main(["export", "run", "out", "--dtype", "bf16"]) == 0
    config, lora, adapters = load_adapters(newest("run").path)
    a, b = (adapters.tensors[f"blocks.1.ffn.down.lora_{x}"].double() for x in "ab")
    w = load_file("base/model.safetensors")["model.layers.1.mlp.down_proj.weight"].double()
    got = load_file("out/model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert config.n_layer == 2 and torch.equal(got, (w + lora.scale * b @ a).float().bfloat16())


def test_a_run_continues_from_exported_adapters() -> None:
    tilegrad.train(run(LORA | {"layers": ["v", "up"]}), "first")
    assert main(["export", "first", "adapter", "--adapter", "--best"]) == 0
    first, best = (
        tilegrad.load("first", best=True),
        json.loads(Path("adapter/adapter_config.json").read_text(encoding="utf-8")),
    )
    assert (best["r"], best["lora_alpha"], best["target_modules"]) == (3, 6, ["up_proj", "v_proj"])
    result = tilegrad.train(run({"adapter": "adapter"}, learning_rate=0.0, min_learning_rate=0.0), "second")
    path = latest_checkpoint(Path("first/best"))
    assert path is not None and result.validation_loss == load_checkpoint(path).state["validation_loss"]
    own = run_from(json.loads(Path("second/run.json").read_text(encoding="utf-8")), "run.json").lora
    assert own == AdapterConfig(3, 6, ("v", "up"), 0.1, "adapter")
    shutil.rmtree("adapter")
    assert tilegrad.train({"train": {"steps": 5}}, resume="second").steps == 5, "it needs the adapters again"
    assert equal(tilegrad.load("second").params, first.params)
    with pytest.raises(FileNotFoundError, match="adapter: no such folder"):
        tilegrad.train(run({"adapter": "adapter"}), "third")
    assert not Path("third").exists()


def test_keys_that_differ_from_the_adapters_are_refused() -> None:
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    for name, value, own in (("rank", 8, 3), ("alpha", 8, 6.0), ("layers", "ffn", "'all'")):
        with pytest.raises(ValueError, match=rf"^lora.{name}: got .*{value}.*; accepted: {own}, as in adapter"):
            tilegrad.train(run({"adapter": "adapter", name: value}), "new")
        assert not Path("new").exists()
    base("gpt2", "other")
    with pytest.raises(
        ValueError, match=r"which other has no adapter for; accepted: .* of qkv, proj, up, down in 2 blocks"
    ):
        tilegrad.train(run({"adapter": "adapter"}, init="other"), "new")


def test_frozen_parameters_are_copied_once_and_the_base_may_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    before = open_weights(Path("base")).read()
    shutil.rmtree("run")
    tilegrad.train(run(None, freeze=["blocks.*", "wte.*"]), "run")
    shutil.rmtree("base")
    frozen = load_file("run/frozen.safetensors")
    assert {*frozen} == {name for name in before if name.startswith(("blocks.", "wte."))}
    assert all(torch.equal(x, before[name]) for name, x in frozen.items())
    assert {*newest("run").tensors} == {
        f"{k}{n}" for k in ("", "m.", "v.") for n in ("ln_f.weight", "lm_head.weight")
    } | {"adam_step"}
    tilegrad.train({"train": {"steps": 6}}, resume="run")
    model = tilegrad.load("run")
    assert {n for n, x in model.params.items() if torch.equal(x, before[n])} == {*frozen}
    assert main(["export", "run", "out"]) == 0
    assert main(["export", "run", "adapter", "--adapter"]) == 2
    assert "got a checkpoint without adapters; accepted: one of a run with [lora]" in capsys.readouterr().err
    save_file(frozen | {"wte.weight": frozen["wte.weight"] + 1}, "run/frozen.safetensors")
    for act in (lambda: tilegrad.load("run"), lambda: tilegrad.train({"train": {"steps": 8}}, resume="run")):
        with pytest.raises(
            ValueError, match=r"frozen.safetensors: got weights of sha256 .*; accepted: the weights of the checkpoint"
        ):
            act()
    Path("run/frozen.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"frozen.safetensors: no such file"):
        tilegrad.load("run")


def test_random_weights_can_be_frozen_but_have_no_adapters() -> None:
    small: dict[str, dict[str, Any]] = {
        "model": {"n_layer": 1, "n_embd": 16},
        "train": {"steps": 2, "batch_size": 2, "seq_len": 12, "freeze": "wte.*"},
    }
    tilegrad.train(small, "small")
    assert [*load_file("small/frozen.safetensors")] == ["wte.weight"]
    assert tilegrad.train({"train": {"steps": 3}}, resume="small").steps == 3
    lean = small | {"train": small["train"] | {"dtype": "bfloat16", "masters": "none"}}
    tilegrad.train(lean, "lean")
    assert {x.dtype for x in tilegrad.load("lean").params.values()} == {torch.float32}
    with pytest.raises(
        ValueError, match=r"^init: got None with adapters \(\[lora\]\); accepted: the folder of the weights"
    ):
        tilegrad.train(small | {"lora": {"rank": 2}}, "no")
    assert not Path("no").exists()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"lora": {"rank": 0}}, "lora.rank: got 0; accepted: an int ≥ 1"),
    "alpha": ({"lora": {"alpha": 0}}, r"lora.alpha: got 0; accepted: a number > 0"),
    "dropout": ({"lora": {"dropout": 1.0}}, r"lora.dropout: got 1.0; accepted: a number, 0 ≤ dropout < 1"),
    "layers": ({"lora": {"layers": "atention"}}, r"lora.layers: got 'atention' \(did you mean 'attention'\?\); accepted: "),
    "layers of another model": (
        {"lora": {"layers": ["qkv"]}}, "lora.layers: got 'qkv', which this model does not have; accepted: q, k, v, proj",
    ),
    "adapter": ({"lora": {"adapter": 3}}, "lora.adapter: got 3; accepted: None, or the name of a folder"),
    "key": ({"lora": {"ranks": 3}}, r"got 'ranks' in \[lora\] \(did you mean 'rank'\?\)"),
    "freeze": ({"train": TRAIN | {"freeze": [3]}}, "freeze: got .*; accepted: patterns of parameters' names"),
    "pattern": ({"train": TRAIN | {"freeze": "wtf.*"}}, r"freeze: got 'wtf\.\*', which no parameter matches"),
    "everything": ({"train": TRAIN | {"freeze": "*"}}, r"freeze: got '\*', which freeze every parameter"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_keys_are_refused_before_a_folder_is_made(what: str) -> None:
    changed, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        tilegrad.train(run(None) | changed, "new")
    assert not Path("new").exists()


def test_a_resumed_run_keeps_its_adapters() -> None:
    tilegrad.train(run(), resume="run")
    for asked, message in (
        ({"lora": {"rank": 4}}, "^lora.rank: got 4; accepted: the run's value, 3, when resuming"),
        ({"lora": {"layers": ["q"]}}, "^lora.layers: got .*; accepted: the run's value, 'all', when resuming"),
        ({"train": {"freeze": ["wte.*"]}}, r"^freeze: got \['wte.*'\]; accepted: the run's value, \[\], when resuming"),
    ):
        with pytest.raises(ValueError, match=message):
            tilegrad.train(asked, resume="run")
    tilegrad.train(run(None), "plain-run")
    with pytest.raises(ValueError, match=r"^lora.rank: got 4; accepted: the run's value, None, when resuming"):
        tilegrad.train({"lora": {"rank": 4}}, resume="plain-run")
    with pytest.raises(ValueError, match=r"^init: got 'plain'; accepted: the run's value, 'base', when resuming"):
        tilegrad.train({"train": {"init": "plain"}}, resume="plain-run")
    assert "lora" not in json.loads(Path("plain-run/run.json").read_text(encoding="utf-8"))


def test_older_runs_without_these_keys_are_resumed() -> None:
    """The folder of their initial weights is gone: no missing key of the model is read from it."""
    tilegrad.train(run(None), "older")

    def without(saved: dict[str, Any]) -> None:
        assert saved["train"].pop("freeze") == [] and saved["model"].pop("window_layers") is None
        assert saved["train"]["init"] == "base" and saved["model"].pop("rope_scaling") is None

    change_manifests("older", lambda state: without(state["run"]))
    content = json.loads(Path("older/run.json").read_text(encoding="utf-8"))
    without(content)
    Path("older/run.json").write_text(json.dumps(content), encoding="utf-8")
    Path("base").rename("moved")
    assert tilegrad.train({"train": {"steps": 5}}, resume="older").steps == 5
    assert tilegrad.evaluate("older", device="cpu").tokens > 0


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"base": None}, "base: got None; accepted: an object"),
        ({"base": {"folder": 3, "sha256": "0" * 64}}, "base.folder: got 3; accepted: the name of a folder"),
        ({"base": {"folder": "x", "sha256": "0"}}, "base.sha256: got '0'; accepted: a sha256"),
        ({"frozen_sha256": 1}, "frozen_sha256: got 1; accepted: a sha256"),
        ({"run.lora": {"rank": 0}}, "run.lora.rank: got 0"),
        ({"run.lora": 7}, "run.lora: got 7; accepted: an object"),
    ],
)
def test_a_manifest_with_false_frozen_weights_counts_as_damaged(state: dict[str, Any], message: str) -> None:
    def lie(saved: dict[str, Any]) -> None:
        for name, value in state.items():
            section, _, key = name.rpartition(".")
            (saved[section] if section else saved)[key] = value

    change_manifests("run", lie)
    with pytest.raises(DamagedCheckpoint, match=message):
        tilegrad.load("run")
    with pytest.raises(DamagedCheckpoint, match=message):
        tilegrad.train({"train": {"steps": 8}}, resume="run")


def test_the_number_of_trained_parameters_is_printed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--init", "base", "--data", "text.txt", "--out", "new", "--steps", "1", "--train.sample_tokens", "0"]
    assert main(["train", *flags, "--seq-len", "12", "--lora.rank", "2", "--lora.layers", "q", "v"]) == 0
    every = sum(x.numel() for x in open_weights(Path("base")).read().values())
    own = sum(x.numel() for name, x in newest("new").tensors.items() if name.startswith("blocks."))
    said = f"{every + own:,} parameters, of which {own:,} are trained ({own / (every + own):.2%})"
    assert said in capsys.readouterr().out
    page = Path("new/report.html").read_text(encoding="utf-8")
    assert f"{every + own:,} parameters, {own:,} of them trained, 2 layers" in page and "<h2>Adapters</h2>" in page


def test_the_plan_of_adapters_needs_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama-135m", "--seq-len", "64", "--lora.rank", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (frozen,) = (row for row in plan["roles"] if row["name"] == "frozen")
    assert frozen["at_most_bytes"] == pytest.approx(134_515_008 * 4, rel=1e-3)
    assert main(["plan", "--train.freeze", "wte.*", "blocks.0.*"]) == 0
    assert "frozen" in capsys.readouterr().out
    assert main(["plan", "--preset", "gpt2", "--lora.layers", "q"]) == 2
    assert (
        "lora.layers: got 'q', which this model does not have; accepted: qkv, proj, up, down" in capsys.readouterr().err
    )


def test_the_flags_of_adapters_set_their_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--init", "base", "--lora.rank", "0", "--out", "new"]) == 2
    assert "lora.rank: got 0; accepted: an int ≥ 1" in capsys.readouterr().err
    assert main(["train", "--lora.rank", "4", "--out", "new"]) == 2
    assert "accepted: the folder of the weights to adapt (--init DIR)" in capsys.readouterr().err
    assert not Path("new").exists()


def test_init_finetune_writes_a_run_that_starts_once_two_names_are_filled_in(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "--finetune"]) == 0
    assert "Fill in train.init and data.files, then: tilegrad train finetune.toml" in capsys.readouterr().out
    assert main(["init", "--finetune"]) == 2, "a file that is there is overwritten"
    text = Path("finetune.toml").read_text(encoding="utf-8")
    known = {(key.section, key.name) for key in keys()}
    if ("data", "format") not in known:
        pytest.skip("needs the keys of conversations")
    assert {(section, name) for section, values in tomllib.loads(text).items() for name in values} <= known
    assert main(["train", "finetune.toml"]) == 2 and "MODEL: no such folder" in capsys.readouterr().err
    lines = [{"prompt": f"What is {i} + 1?", "completion": f"It is {i + 1}."} for i in range(40)]
    Path("talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    small = text.replace('"MODEL"', '"base"').replace("CONVERSATIONS.jsonl", "talk.jsonl")
    Path("finetune.toml").write_text(small, encoding="utf-8")
    flags = ["--seq-len", "24", "--train.epochs", "1", "--train.sample_tokens", "0", "--out", "new"]
    assert main(["train", "finetune.toml", *flags]) == 0
    own = run_from(json.loads(Path("new/run.json").read_text(encoding="utf-8")), "run.json")
    assert own.lora == AdapterConfig(16, 32, "all", 0.05) and own.data.files == ("talk.jsonl",)
