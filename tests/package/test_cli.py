"""The command line: output, exit codes and sentences."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilegrad
from tilegrad import Engine, ModelConfig
from tilegrad.cli import build_parser, doctor, main
from tilegrad.cli.arguments import given_keys
from tilegrad.engine import engine, gradcheck, machine
from tilegrad.engine.planning import plan_model
from tilegrad.engine.recompute import choose_recompute
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels.cpu import library
from tilegrad.memory.managed import pressure
from tilegrad.model.config import PRESETS
from tilegrad.specification import flash_cases as check
from tilegrad.training.config import AdapterConfig, DataConfig, OptimizerConfig, RunConfig, TrainConfig
from tilegrad.training.sections import read_toml, run_from


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    words = ("init", "demo", "train", "generate", "chat", "evaluate", "plan", "check", "gradcheck", "bench")
    assert all(word in out for word in (*words, "exact, hand-derived"))
    assert build_parser().prog == "tilegrad"


def test_help_answers_within_a_second_and_loads_no_torch() -> None:
    code = (
        "import sys; from tilegrad.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    best = float("inf")
    for _ in range(3):
        start = children_seconds()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, children_seconds() - start)
    assert best < 1.0


@pytest.mark.parametrize("locale", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}])
def test_help_is_shown_in_every_locale(locale: dict[str, str]) -> None:
    path = {"PYTHONPATH": str(Path(tilegrad.__file__).parents[1])}
    command = [sys.executable, "-m", "tilegrad", "train", "--help"]
    done = subprocess.run(command, capture_output=True, env=os.environ | path | locale)
    assert (done.returncode, done.stderr) == (0, b"") and b"n_embd" in done.stdout


def children_seconds() -> float:
    """Processor time of child processes in seconds, which a busy machine does not change."""
    return sum(os.times()[2:4])


def test_tilegrad_without_a_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("usage: tilegrad") and "generate" in out and error == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["chekc"], "invalid choice: 'chekc' .*did you mean 'check'"),
        (["bench", "attenton"], "did you mean 'attention'"),
        (["check"], "the following arguments are required: WHAT"),
        (["check", "flash", "--breif"], r"unrecognized arguments: --breif \(did you mean --brief\?\)"),
        (["--verson"], r"--verson \(did you mean --version\?\)"),
        (["train", "--n_layer", "6"], r"--n_layer \(did you mean --model.n_layer\?\)"),
        (["plan", "--batch_size=6"], r"--batch_size=6 \(did you mean --batch-size\?\)"),
        (["generate", "run", "--temprature", "1"], r"--temprature \(did you mean --temperature\?\)"),
        (["export", "run", "out", "--dtype", "float23"], "did you mean 'float32'"),
        (["init", "--xyzzy"], "unrecognized arguments: --xyzzy\n$"),
    ],
)
def test_a_misspelt_command_or_flag_is_refused_with_what_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith("usage: tilegrad") and re.search(meant, error), error


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"step": 3}}, r"got 'step' in \[train\] \(did you mean 'steps'\?\); accepted: "),
        ({"train": {"n_layer": 3}}, r"got 'n_layer' in \[train\] \(did you mean 'n_layer' in \[model\]\?\)"),
        ({"model": {"Batch-Size": 3}}, r"did you mean 'batch_size' in \[train\]"),
        ({"trian": {}}, r"got \[trian\] \(did you mean \[train\]\?\); accepted: the sections"),
        ({"preset": "tiny"}, r"got 'preset' in no section \(did you mean 'preset' in \[model\]\?\)"),
        ({"data": {"xyzzy": 3}}, r"got 'xyzzy' in \[data\]; accepted: "),
    ],
)
def test_a_misspelt_key_is_refused_with_what_was_meant(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        tilegrad.train(sections, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_field_of_a_model_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"^n_heads: .*\(did you mean 'n_head'\?\); accepted: "):
        ModelConfig.from_dict({"n_heads": 3})


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("torch.bfloat16", "bfloat16"), ("fp32", "float32"), ("f32", "float32"),
        ("float", "float32"), ("fp64", "float64"), ("double", "float64"), ("float32", "float32"),
    ],
)  # fmt: skip
def test_a_dtype_may_be_spelt_in_several_ways(
    typed: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = build_parser().parse_args(["train", "--dtype", typed])
    assert run_from(given_keys(args), "flags").train.dtype == name
    (tmp_path / "run.toml").write_text(f"[train]\ndtype = '{typed}'\n", encoding="utf-8")
    assert run_from(read_toml(tmp_path / "run.toml"), "run.toml").train.dtype == name
    assert RunConfig(train=TrainConfig(dtype=typed)).train.dtype == name
    assert build_parser().parse_args(["export", "run", "out", "--dtype", typed]).dtype == name
    assert build_parser().parse_args(["bench", "attention", "--dtype", typed]).dtype == name
    assert main(["plan", "--dtype", typed, "--model.n_layer", "1"]) == 0
    assert f"tokens, {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("typed", ["bf17", "fp16", "half", "int8", "Auto", ""])
def test_an_unknown_dtype_is_refused_as_it_was_typed(typed: str) -> None:
    with pytest.raises(ValueError, match=f"^dtype: got '{typed}'; accepted: 'auto', 'float32'"):
        TrainConfig(dtype=typed)


def test_a_dtype_of_torch_is_accepted() -> None:
    assert RunConfig(train=TrainConfig(dtype=torch.float64)).train.dtype == "float64"  # type: ignore[arg-type]
    assert run_from({"train": {"dtype": torch.bfloat16}}, "here").train.dtype == "bfloat16"
    wrong: object
    for wrong in (torch.float16, 3, None, []):
        with pytest.raises(ValueError, match=f"^dtype: got {re.escape(repr(wrong))}; accepted: 'auto', "):
            TrainConfig(dtype=wrong)  # type: ignore[arg-type]


def on_this_machine() -> str:
    """The name of the kernel that this machine selects: native, or tiled without a library."""
    q = torch.zeros(1, 1, 4, 4)
    return tilegrad.explain(q, q, q).kernel


def test_check_flash_prints_what_the_document_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "flash"]) == 0
    out = capsys.readouterr().out
    for words in (
        "Q (4 × 4)", "dO (4 × 4)", "O (4 × 4)", "dQ by whole matrices (4 × 4)", f"dK by {on_this_machine()} (128 × 64)",
        "max difference", "average", "above 0.001", "above 0.005", "0 of 8192",
    ):  # fmt: skip
        assert words in out
    assert out.count("PASS") == 2 and "FAIL" not in out


def test_check_flash_has_the_cases_of_the_document() -> None:
    first, second = check.flash_cases()
    assert first.tolerance == 1e-3 and second.tolerance == 5e-3
    assert first.q.tolist() == first.k.tolist() and first.q[0, 0].trace() == 4
    assert first.v[0, 0, 2, 3].item() == pytest.approx(1.1) and first.do.equal(first.v)
    assert second.q.shape == (1, 1, 128, 64) and second.q.abs().max() <= 0.5


def test_canary_check_flash_fails_on_a_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.kernels.attention import tiled

    right = tiled._bwd_delta
    monkeypatch.setattr(tiled, "_bwd_delta", lambda *a, delta, **k: (right(*a, delta=delta, **k), delta.add_(0.1)))
    assert main(["check", "flash", "--brief", "--kernel", "tiled"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_error_for_a_bad_value_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "flash", "--kernel", "nope"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilegrad: kernel: got 'nope'; accepted: None or one of ") and error.count("\n") == 1


def test_gradcheck_passes_and_its_canary_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck, "SAMPLES", 6)
    assert main(["gradcheck"]) == 0
    assert "PASS" in capsys.readouterr().out
    from tilegrad.kernels.attention import tiled

    right = tiled._bwd_delta
    monkeypatch.setattr(tiled, "_bwd_delta", lambda *a, delta, **k: (right(*a, delta=delta, **k), delta.mul_(1.001)))
    assert main(["gradcheck", "--kernel", "tiled"]) == 1
    assert "FAIL: q, k, bias, sinks" in capsys.readouterr().out


def test_gradcheck_ignores_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradcheck", "--against", "autograd"]) == 2
    assert "against: got 'autograd' without --preset; accepted: " in capsys.readouterr().err
    assert main(["gradcheck", "--preset", "tiny", "--kernel", "tiled"]) == 2
    assert "kernel: got 'tiled' with --preset" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--preset", "gpt2"], ["--preset", "llama-135m", "--against", "autograd"]])
def test_gradcheck_of_a_model_passes(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck, "SAMPLES", 2)
    assert main(["gradcheck", *arguments]) == 0
    out = capsys.readouterr().out
    assert "blocks.1.attn.qkv.weight" in out and "PASS" in out


@pytest.mark.parametrize("against", ["differences", "autograd"])
def test_canary_gradcheck_of_a_model_sees_a_small_factor(monkeypatch: pytest.MonkeyPatch, against: str) -> None:
    """The wrong gradient is as small as those of a model usually are. The error is relative to it."""
    monkeypatch.setattr(gradcheck, "SAMPLES", 6)
    right = Engine.gradients

    def wrong(self: Engine, tokens: Tensor, targets: Tensor) -> float:
        loss = right(self, tokens, targets)
        self.grads["blocks.1.ffn.up.weight"].mul_(1 + 3e-5)
        return loss

    monkeypatch.setattr(Engine, "gradients", wrong)
    results = {r.tensor: r for r in gradcheck.check_model(PRESETS["tiny"], against=against)}
    assert [name for name, r in results.items() if not r.passed] == ["blocks.1.ffn.up.weight"]
    assert results["blocks.1.ffn.up.weight"].relative_error == pytest.approx(3e-5, rel=0.05)


def test_plan_prints_tables_and_json_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--preset", "gpt2", "--batch-size", "16", "--dtype", "bfloat16", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "gpt2, batch 16 × 1024 tokens, bfloat16" in out and "sharing saves" in out and "blocks.11" in out
    assert "the document" not in out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["plan", "--preset", "tiny", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    budget = data["peak_bytes"] - data["peak_bytes"] // 12
    assert main(["plan", "--preset", "tiny", "--memory-budget", str(budget), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= budget
    assert main(["plan", "--preset", "tiny", "--memory-budget", "1MB"]) == 2
    assert "memory_budget: got 1,000,000 bytes; accepted: at least" in capsys.readouterr().err


def test_check_document_prints_the_table_of_the_specification(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "document"]) == 0
    assert re.search(r"feed-forward +12,598,272 +12,595,200", capsys.readouterr().out)


def test_presets_and_dtypes_of_the_help_are_those_of_the_code() -> None:
    from tilegrad.cli import arguments
    from tilegrad.model.config import PRESETS
    from tilegrad.training.config import DTYPES

    assert tuple(PRESETS) == arguments.PRESETS
    assert set(arguments.DTYPES) == set(DTYPES) and all(isinstance(getattr(torch, d), torch.dtype) for d in DTYPES)


def test_a_run_trains_resumes_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "run.toml", str(tmp_path / "run")
    config.write_text(
        "[model]\npreset = 'tiny'\nn_layer = 1\nn_embd = 16\n"
        "[train]\nsteps = 3\nwarmup_steps = 1\nbatch_size = 2\nseq_len = 8\n"
        "sample_tokens = 5\neval_batches = 1\n",
        encoding="utf-8",
    )
    assert main(["train", str(config), "--out", out]) == 0
    printed = capsys.readouterr().out
    assert (
        "step      3 of 3" in printed
        and "validation loss" in printed
        and "memory planned" in printed
        and "A sample:" in printed
    )
    assert main(["train", str(config), "--out", out]) == 2
    assert "holds a run already; resume it (--resume)" in capsys.readouterr().err
    assert main(["train", str(config), "--out", out, "--resume", "--steps", "5"]) == 0
    assert "resumed from" in capsys.readouterr().out
    assert main(["generate", out, "--prompt", "Whale", "--max-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("Whale")
    config.write_text("[train]\nstep = 3\n", encoding="utf-8")
    assert main(["train", str(config), "--out", str(tmp_path / "b")]) == 2
    assert "got 'step' in [train] (did you mean 'steps'?); accepted:" in capsys.readouterr().err


SMALL = (
    "[model]\npreset = 'tiny'\nn_layer = 1\nn_embd = 16\n"
    "[train]\nsteps = 3\nwarmup_steps = 1\nbatch_size = 2\nseq_len = 8\nsample_tokens = 5\neval_batches = 1\n"
)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("run.toml").write_text(SMALL, encoding="utf-8")
        assert main(["train", "run.toml", "--out", "my run"]) == 0
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("my run")


def test_a_resume_takes_its_settings_from_the_folder(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").unlink()
    assert main(["train", "--resume", str(trained), "--steps", "5"]) == 0
    assert "step      5 of 5" in capsys.readouterr().out
    assert main(["train", "--out", str(trained), "--resume", "--steps", "6", "--learning-rate", "1e-4"]) == 0
    assert "step      6 of 6" in capsys.readouterr().out
    ran = json.loads((trained / "run.json").read_text(encoding="utf-8"))
    assert (ran["model"]["n_layer"], ran["train"]["steps"], ran["train"]["learning_rate"]) == (1, 6, 1e-4)
    oldest = min((trained / "checkpoints").iterdir())
    assert main(["train", "--resume", str(oldest)]) == 0
    assert f"resumed from {oldest} at step 3" in capsys.readouterr().out
    newest = max((trained / "checkpoints").iterdir())
    assert main(["train", "--resume", str(newest), "--out", str(trained)]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-size", "4"], "batch_size: got 4; accepted: the run's value, 2, when resuming"),
        (["--seq-len", "4"], "seq_len: got 4; accepted: the run's value, 8, when resuming"),
        (["--seed", "4"], "seed: got 4; accepted: the run's value, 0, when resuming"),
        (["--dtype", "bfloat16"], "dtype: got 'bfloat16'; accepted: the run's value, 'float32', when resuming"),
        (["--data", "a.txt"], "files: got ['a.txt']; accepted: the run's value, [], when resuming"),
        (["--preset", "gpt2"], "preset: got 'gpt2'; accepted: none when resuming, because the run has its own model"),
        (["other.toml"], "n_embd: got 32; accepted: the run's value, 16, when resuming"),
        (["heads.toml"], "n_head: got 2; accepted: the run's value, 4, when resuming"),
        (["--out", "other"], "out: got other; accepted: the run's folder, my run, when resuming"),
        (["--steps", "2"], "steps: got 2; accepted: at least 3, which are done"),
    ],
)
def test_a_key_that_a_resume_may_not_change_is_refused_by_name(
    trained: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.toml").write_text(SMALL.replace("n_embd = 16", "n_embd = 32"), encoding="utf-8")
    Path("heads.toml").write_text("[model]\nn_head = 2\n", encoding="utf-8")
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    assert main(["train", "--resume", str(trained), *flags]) == 2
    assert capsys.readouterr().err == f"tilegrad: {message}\n"
    assert {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()} == before
    assert not Path("other").exists()


def test_a_resume_without_a_run_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in (["--resume"], ["--resume", "none"], ["--resume", "none/checkpoints/000001-step-5"]):
        assert main(["train", *flags]) == 2
    assert main(["train", "--data", "none.txt"]) == 2 and main(["train", "--device", "cuda:99"]) == 2
    assert list(tmp_path.iterdir()) == [] and "Traceback" not in capsys.readouterr().err


def test_an_empty_prompt_is_refused_and_never_replaced(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = "tilegrad: prompt: got ''; accepted: a text of at least one token\n"
    for words in ([""], ["--prompt", ""]):
        assert main(["generate", str(trained), *words]) == 2
        assert capsys.readouterr()[1] == refused
    assert main(["generate", str(trained), "a", "--prompt", "b"]) == 2
    assert capsys.readouterr().err == "tilegrad: prompt: got 'a' and --prompt 'b'; accepted: one of them\n"
    assert main(["generate", str(trained), "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("Call me ")


def test_a_tiny_temperature_gives_the_tokens_of_temperature_0(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for temperature in ("0", "1e-300"):
        assert main(["generate", str(trained), "the", "--max-tokens", "5", "--temperature", temperature]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    for flag, value in (
        ("--temperature", "inf"),
        ("--temperature", "nan"),
        ("--seed", str(1 << 64)),
        ("--top-k", "-1"),
    ):
        assert main(["generate", str(trained), flag, value]) == 2
        assert capsys.readouterr().err.startswith(f"tilegrad: {flag.strip('-').replace('-', '_')}: got ")


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "my rum"],
        ["export", "my rum", "out"],
        ["train", "--resume", "my rum"],
        ["train", "--out", "my rum", "--resume"],
    ],
)
@pytest.mark.usefixtures("trained")
def test_the_error_for_a_missing_folder_names_the_nearest_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    accepted = "the folder of a run, or a checkpoint in it"
    if words[0] != "train":
        accepted = "the folder of a run, a checkpoint in it, or a folder of weights"
    assert capsys.readouterr().err == f"tilegrad: my rum: no such folder (did you mean my run?); accepted: {accepted}\n"
    assert not Path("my rum").exists() and not Path("out").exists()


def test_the_error_for_a_folder_without_a_model_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for words in (["generate", "notes"], ["chat", "notes"], ["export", "notes", "out"]):
        assert main(words) == 2
        assert capsys.readouterr().err == (
            "tilegrad: notes: got neither checkpoints/ nor config.json in it; accepted: the folder of a run, a checkpoint "
            "in it, or a folder of weights\n"
        )


def test_missing_weights_and_a_file_instead_of_a_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine", encoding="utf-8")
    for words in (["import", "nope"], ["train", "--init", "nope"]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("tilegrad: nope: no such folder or file; accepted: ")
    assert main(["train", "--resume", "notes.txt"]) == 2
    assert capsys.readouterr().err.startswith("tilegrad: notes.txt: got a file; accepted: the folder of a run")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("names", "flags", "said"),
    [
        (["empty.txt"], [], "empty.txt: got no text; accepted: "),
        (["empty.txt"], ["--data.tokenizer", "bpe"], "empty.txt: got no text; accepted: "),
        (["short.txt"], [], "short.txt: got 3 tokens; accepted: at least seq_len + 1 = 129; "),
        (["empty.txt", "short.txt"], ["--seq-len", "3"], "empty.txt, short.txt: got 3 tokens; accepted: at least seq_len"),
    ],
)  # fmt: skip
def test_the_error_for_a_short_text_names_it(
    names: list[str], flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("abc", encoding="utf-8")
    assert main(["train", "--data", *names, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"tilegrad: {said}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"]


def test_generate_refuses_a_tokenizer_of_another_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(trained), "--max-tokens", "2"]) == 0
    (trained / "data" / "tokenizer.json").write_text('{"model": {"type":   "bytes"}}', encoding="utf-8")
    assert main(["generate", str(trained), "--max-tokens", "2"]) == 2
    assert "tokenizer.json: got a tokenizer of sha256" in capsys.readouterr().err


def test_the_demo_trains_and_says_whether_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.training import config, sections

    monkeypatch.chdir(tmp_path)
    short = config.TrainConfig(steps=2, warmup_steps=1, batch_size=2, seq_len=16, eval_batches=1, sample_tokens=4)
    monkeypatch.setattr(sections, "preset_run", lambda _name: config.RunConfig(PRESETS["tiny"], short))
    assert main(["demo"]) == 1
    assert main(["demo"]) == 1
    assert "did NOT learn" in capsys.readouterr().out
    assert (tmp_path / "runs/demo/report.html").exists() and (tmp_path / "runs/demo-2/report.html").exists()


def test_init_writes_every_key_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.training.sections import preset_run

    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0 and main(["init", "my.toml"]) == 0
    assert "tilegrad train my.toml" in capsys.readouterr().out
    assert run_from(read_toml(Path("run.toml")), "run.toml") == preset_run("tiny")
    shown = re.sub(r"(?m)^#(?=\w+ = )", "", Path("my.toml").read_text(encoding="utf-8"))
    Path("my.toml").write_text(shown, encoding="utf-8")
    every = run_from(read_toml(Path("my.toml")), "run.toml")
    assert every == replace(preset_run("tiny"), lora=AdapterConfig())  # it shows the true defaults
    keys = {section: set(values) for section, values in tomllib.loads(shown).items()}
    assert keys["model"] - {"preset"} == {f.name for f in fields(ModelConfig)}
    assert keys["train"] == {f.name for f in fields(TrainConfig)}
    assert keys["optimizer"] == {f.name for f in fields(OptimizerConfig)}
    assert keys["data"] == {f.name for f in fields(DataConfig)}
    assert keys["lora"] == {f.name for f in fields(AdapterConfig)}
    assert main(["init", "my.toml"]) == 2
    assert "my.toml: got a file that already exists" in capsys.readouterr().err
    assert Path("my.toml").read_text(encoding="utf-8") == shown


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_shows_every_key_with_its_default_and_loads_no_torch(command: str) -> None:
    code = f"import sys; from tilegrad.cli import main\ntry: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, capture_output=True, text=True
    )
    for section, kind in (
        ("model", ModelConfig),
        ("train", TrainConfig),
        ("optimizer", OptimizerConfig),
        ("data", DataConfig),
        ("lora", AdapterConfig),
    ):
        for field in fields(kind):
            about = re.search(rf"--{section}\.{field.name}\b(.*?)\(default:", done.stdout, re.DOTALL)
            assert about and "\n  --" not in about[1], field.name
    assert "--train.steps X, --steps X" in done.stdout


def test_every_key_is_a_flag_that_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        "[model]\nn_layer = 1\nn_embd = 16\n[train]\nsteps = 9\nmemory_budget = '1.5GB'\n", encoding="utf-8"
    )
    flags = ["--model.n_head", "2", "--train.steps", "40", "--data.files", "a.txt", "b.txt", "--model.bias", "false"]
    args = build_parser().parse_args(["train", "run.toml", *flags, "--learning-rate", "1e-2", "--model.window", "none"])
    run = run_from(given_keys(args), "flags")
    assert (run.model.n_layer, run.model.n_head, run.model.bias, run.model.window) == (1, 2, False, None)
    assert (run.train.steps, run.train.learning_rate, run.train.memory_budget) == (40, 1e-2, 1_500_000_000)
    assert run.data.files == ("a.txt", "b.txt")


def test_the_error_for_a_text_instead_of_a_configuration_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Call me Ishmael.", encoding="utf-8")
    assert main(["train", "book.txt"]) == 2 and main(["train", "none.toml"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "book.txt: is not TOML" in first and "with --data" in first
    assert "`tilegrad init none.toml` writes one" in second


def test_plan_of_a_file_has_the_bytes_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.toml"
    file.write_text(SMALL, encoding="utf-8")
    assert main(["plan", str(file)]) == 0
    assert "my, batch 2 × 8 tokens, float32" in capsys.readouterr().out
    assert main(["plan", str(file), "--json", "--batch-size", "4"]) == 0
    planned = json.loads(capsys.readouterr().out)["peak_bytes"]
    run = run_from({"model": {"n_layer": 1, "n_embd": 16}, "train": {"batch_size": 4, "seq_len": 8}}, "here")
    made = tilegrad.Engine(run.model, run.train.batch_size, run.train.seq_len, **run.step_options)
    assert planned == made.plan.peak_bytes


def test_plan_says_how_many_bytes_of_gradients_share_memory_with_activations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gradients = 4 * sum(p.numel() for p in tilegrad.Engine(tilegrad.presets()["tiny"].model, 1, 8).params.values())
    for micro_batches, shared, roles in ((1, gradients, 0), (2, 0, 1)):
        flags = ["plan", "--preset", "tiny", "--train.gradient_accumulation", str(micro_batches)]
        assert main([*flags, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["shared_gradients_bytes"] == shared
        assert sum(row["name"] == "grads" for row in found["roles"]) == roles
        assert main(flags) == 0
        said = capsys.readouterr().out
        assert (f"({shared:,} bytes), in the memory of the activations" in said) == (not roles)


def test_a_resume_accepts_keys_as_flags(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(trained), "--model.n_layer", "2"]) == 2
    assert capsys.readouterr().err == "tilegrad: n_layer: got 2; accepted: the run's value, 1, when resuming\n"
    assert main(["train", "--resume", str(trained), "--train.steps", "30", "--train.memory_budget", "1GB"]) == 0
    ran = json.loads((trained / "run.json").read_text(encoding="utf-8"))["train"]
    assert (ran["steps"], ran["warmup_steps"], ran["memory_budget"]) == (30, 1, 10**9)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("device", ["cuda:99", "mps", "xpu", "meta", "gpu", "cuda:x", "7"])
def test_the_error_for_a_missing_device_is_one_sentence(
    command: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tilegrad: device: got ") and "; accepted: cpu" in error
    assert error.count("\n") == 1 and len(error) < 140 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_the_error_for_cuda_names_a_torch_built_for_the_cpu(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--device", "cuda"]) == 2
    assert "device: got 'cuda' (this torch is built for the CPU); accepted: cpu" in capsys.readouterr().err


class Missing:
    """An importer that has none of these packages."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_error_for_bpe_without_its_library_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokenizers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing("tokenizers"), *sys.meta_path])
    assert main(["train", "--data.tokenizer", "bpe", "--out", "run"]) == 2
    assert capsys.readouterr().err == (
        "tilegrad: tokenizer: got BPE, and tokenizers is not installed; accepted: 'bytes', or BPE after "
        "pip install 'tilegrad[bpe]'\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["doctor", "plan", "train", "demo"])
def test_the_error_of_a_command_without_torch_is_one_sentence(command: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        f"from tilegrad.cli import main\nsys.exit(main([{command!r}]))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(tilegrad.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (2, "tilegrad: torch: not installed; pip install torch\n")
    assert list(tmp_path.iterdir()) == []


def test_an_import_error_of_tilegrad_is_not_reported_as_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_options: object) -> int:
        raise ImportError("cannot import name 'x' from 'tilegrad.train'", name="tilegrad.train")

    monkeypatch.setattr(doctor, "doctor", broken)
    with pytest.raises(ImportError, match="cannot import name"):
        main(["doctor"])


def test_a_plan_larger_than_memory_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "memory_limit", lambda _device: 3 << 20)
    monkeypatch.setattr(engine, "Arenas", lambda _plan: pytest.fail("allocated"))
    flags = ["--model.n_layer", "1", "--batch-size", "4"]
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(
        r"tilegrad: memory: got a plan of \d\.\d\d MiB; accepted: at most 3\.00 MiB, which is all that cpu has; give a "
        r"smaller batch_size or seq_len, or a memory_budget below that\n",
        error,
    )
    assert list(tmp_path.iterdir()) == []
    assert main(["plan", *flags]) == 0
    assert error.removeprefix("tilegrad: ") in capsys.readouterr().out


def test_plan_says_whether_it_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model.n_layer", "1", "--batch-size", "4"]
    fits = "it fits: cpu has 9.00 GiB free, of 10.00 GiB in all"
    lacks = r"it does not fit now: cpu has 3.00 MiB free, of 10.00 GiB in all; end other programs, or give a smaller batch_size"
    unknown = "whether it fits is unknown: cpu does not report its free memory"
    cases = ((9 << 30, 10 << 30, fits, True), (3 << 20, 10 << 30, lacks, False), (None, None, unknown, None))
    for free, limit, said, answer in cases:
        monkeypatch.setattr(pressure, "memory_available", lambda _device, free=free: free)
        monkeypatch.setattr(machine, "memory_limit", lambda _device, limit=limit: limit)
        assert main(flags) == 0
        assert said in capsys.readouterr().out
        assert main([*flags, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["free_bytes"], data["memory_bytes"], data["fits"]) == (free, limit, answer)
    assert main([*flags, "--fit"]) == 2
    assert "fit: got cpu, whose free memory is unknown here; give --memory-budget" in capsys.readouterr().err
    assert main([*flags, "--fit", "--memory-budget", "10MB"]) == 0
    assert "the largest batch that fits is " in capsys.readouterr().out


def test_plan_of_generation_has_the_bytes_of_the_decoder(capsys: pytest.CaptureFixture[str]) -> None:
    from tilegrad.engine.decoder import decoder_spec, plan_decoder
    from tilegrad.model.config import PRESETS

    arguments = ["--generate", "--preset", "tiny", "--batch-size", "3", "--device", "cpu"]
    for more, capacity in (
        ([], 128),
        (["--max-tokens", "20", "--prompt-tokens", "9"], 28),
        (["--max-tokens", "999"], 128),
        *([] if isinstance(library.library(), str) else [(["--train.invariant", "true"], 128)]),
    ):
        assert main(["plan", *arguments, *more, "--json", "--fit"]) == 0
        found = json.loads(capsys.readouterr().out)
        how: Any = {"device": "cpu", "dtype": torch.float32, "invariant": "--train.invariant" in more}
        plan = plan_decoder(decoder_spec(PRESETS["tiny"], 3, capacity, **how))
        assert found["peak_bytes"] == plan.peak_bytes and found["largest_batch_size"] >= 3
        cache = next(row["at_most_bytes"] for row in found["roles"] if row["name"] == "cache")
        assert cache == 4 * 2 * 3 * 128 * capacity * 4  # layers, k and v, sequences, channels, tokens, bytes
    for more, words in (
        (["--generate", "--max-tokens", "0"], "max-tokens: got 0; accepted: an int ≥ 1"),
        (["--generate", "--prompt-tokens", "9"], "prompt-tokens: got 9; accepted: --prompt-tokens with --max-tokens"),
        (["--generate", "--world-size", "2"], "world-size: got 2 with --generate; accepted: 1"),
        (["--generate", "--memory-budget", "1000000"], "memory-budget: got 1000000 with --generate; accepted: None"),
        (["--max-tokens", "5"], "max-tokens: got 5 without --generate; give both"),
        (["--repetition-penalty", "1.2"], "repetition-penalty: got 1.2 without --generate; give both"),
        (["--generate", "--repetition-penalty", "0"], "repetition_penalty: got 0.0; accepted: a finite number > 0"),
    ):
        assert main(["plan", "--preset", "tiny", *more]) == 2
        assert words in capsys.readouterr().err


def test_plan_finds_the_largest_batch_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["plan", "--batch-size", "1", "--model.n_layer", "1", "--model.n_embd", "16", "--model.block_size", "16"]
    run = run_from(given_keys(build_parser().parse_args(flags)), "flags")
    sizes = (16, torch.float32, torch.device("cpu"))

    @functools.cache
    def peak(batch_size: int, budget: int | None) -> float:
        """The peak of the plan that `train` would make; infinite where it refuses the budget."""
        try:
            spec = StepSpec(run.model, batch_size, *sizes, accumulate=False)
            choice, _ = choose_recompute(spec, budget)
        except ValueError:
            return float("inf")
        return plan_model(replace(spec, recompute=choice)).peak_bytes

    five = int(peak(5, None))
    for limit, budget in ((five, None), (five - 1, None), (1, None), (1 << 30, five), (five, 1 << 30)):
        monkeypatch.setattr(pressure, "memory_available", lambda _device, limit=limit: limit)
        given = [] if budget is None else ["--memory-budget", str(budget)]
        assert main([*flags, "--json", "--fit", *given]) == 0
        found = json.loads(capsys.readouterr().out)
        fitting = {b: x for b in range(1, 9) if (x := peak(b, budget)) <= limit}
        assert found["largest_batch_size"] == max(fitting, default=0) < 8, (limit, budget)
        assert found["largest_batch_bytes"] == fitting.get(max(fitting, default=0))
    assert main([*flags, "--fit", "--memory-budget", "1000"]) == 2
    assert re.search(r"accepted: at least .* recomputed; no batch fits, not even one of", capsys.readouterr().err)


def test_plan_overwrites_only_its_own_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes, page = tmp_path / "notes.html", tmp_path / "page.html"
    notes.write_text("<!doctype html>mine", encoding="utf-8")
    assert main(["plan", "--html", str(notes)]) == 2 and main(["plan", "--html", str(tmp_path)]) == 2
    assert f"{notes}: got a file that tilegrad did not write; accepted: a new name" in capsys.readouterr().err
    assert notes.read_text(encoding="utf-8") == "<!doctype html>mine"
    for batch_size in ("1", "2"):
        assert main(["plan", "--html", str(page), "--batch-size", batch_size]) == 0
        assert f"batch {batch_size} × 128 tokens" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_the_error_for_too_little_memory_is_a_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_options: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "doctor", broken)
    assert main(["doctor"]) == 1
    assert "memory: not enough for these sizes; use a smaller batch_size, seq_len or model\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "host"], ["bench", "attention"], ["check", "flash"]])
def test_an_unknown_device_is_refused_by_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("gpu", "mps", "cuda:99", "["):
        assert main([*command, "--device", device]) == 2
        assert capsys.readouterr().err.startswith(f"tilegrad: device: got {device!r}")


def test_data_files_may_be_one_string(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("the quick brown fox " * 40, encoding="utf-8")
    Path("my.toml").write_text(SMALL + "[data]\nfiles = 'x.txt'\n", encoding="utf-8")
    assert main(["train", "my.toml", "--out", "run"]) == 0
    assert "1 document in 1 file, 800 bytes" in capsys.readouterr().out
    with pytest.raises(ValueError, match=re.escape("files: got 'x.txt'; accepted: names of files, such as ['x.txt']")):
        DataConfig(files="x.txt")  # type: ignore[arg-type]


def test_bucket_sizes_on_the_command_line_are_in_mib() -> None:
    from tilegrad.cli.arguments import add_ranks, sharding_of
    from tilegrad.engine.spec import BUCKET_BYTES

    parser = argparse.ArgumentParser()
    add_ranks(parser)
    assert sharding_of(parser.parse_args([]))["bucket_bytes"] == BUCKET_BYTES
    assert sharding_of(parser.parse_args(["--bucket-mb", "1.5"]))["bucket_bytes"] == 1.5 * 2**20


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--bucket-mb", "1e400"], "bucket-mb: got inf; accepted: MiB"),
        (["plan", "--bucket-mb", "nan"], "bucket-mb: got nan; accepted: MiB"),
        (["plan", "--bucket-mb", "0"], "bucket-mb: got 0; accepted: MiB"),
        (["train", "--timeout", "inf"], "timeout: got inf; accepted: seconds"),
        (["bench", "attention", "--plot", "new.out"], "plot: got 'new.out'; accepted: a name that ends with .png"),
    ],
)
def test_a_bad_flag_value_is_refused_before_any_work(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"tilegrad: {said}")
    assert list(tmp_path.iterdir()) == []
