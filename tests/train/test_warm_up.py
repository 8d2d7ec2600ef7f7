"""`tilegrad warm-up`: the kernels of a run are compiled before it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilegrad.training.warm_up
from tilegrad.cli import main
from tilegrad.kernels.op import Call, observe
from tilegrad.training.run import train
from tilegrad.training.sections import run_from, settled
from tilegrad.training.warm_up import WarmUp, run_on_zeros, warm_up

MODEL = {"preset": "tiny", "n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 64}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "accumulation": {"train": {"gradient_accumulation": 3}},
    "stages": {"train": {"stages": [{"steps": 1, "seq_len": 16, "window": 8}, {"seq_len": 32, "batch_size": 2}]}},
    "packed rows, Muon, an average": {"data": {"packing": True}, "optimizer": {"name": "muon", "ema": 0.9}},
}


def called(run: Callable[[], object]) -> set[tuple[object, ...]]:
    """The ops that a function calls, with the dtypes that they read, and how many tensors they write and add to."""
    seen = set()

    def watch(call: Call) -> None:
        seen.add((call.name, *(x.dtype for x in call.reads), len(call.writes), len(call.accumulates)))
        call.run()

    with observe(watch):
        run()
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_the_step_on_zeros_calls_every_op_of_the_run(tmp_path: Path, name: str) -> None:
    sections = {"model": MODEL} | RUNS[name]
    sections["train"] = {"steps": 2, "batch_size": 4, "seq_len": 32, "eval_batches": 1, "device": "cpu"} | sections.get(
        "train", {}
    )
    zeros = called(lambda: run_on_zeros(settled(run_from(sections, "test"))))
    real = called(lambda: train(sections, tmp_path / "run"))
    assert real and real <= zeros, real - zeros


def test_on_a_cpu_only_the_modules_are_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor: Any = importlib.import_module("tilegrad.cli.doctor")
    for home in (doctor.hit, doctor.fast_path):
        monkeypatch.setattr(home, "load", lambda: object())
    monkeypatch.setattr(doctor.native_library, "library", lambda: object())
    assert main(["warm-up", "--preset", "tiny", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "On a CPU only the C++ modules are compiled. The native kernel is there.\n"
    with pytest.raises(ValueError, match="device: got 'cpu'; accepted: a CUDA device"):
        warm_up(run_from({"train": {"device": "cpu"}}, "test"), lambda *_: None)


def test_missing_modules_are_built(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    doctor: Any = importlib.import_module("tilegrad.cli.doctor")

    def none() -> str:
        return "was not built"

    none.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.native_library, "library", none)
    monkeypatch.setattr(doctor.native_build, "build", lambda: "the kernel")
    for home in (doctor.hit, doctor.fast_path):
        monkeypatch.setattr(home, "load", none)
        monkeypatch.setattr(home, "MODULE", SimpleNamespace(build=lambda: "a module"))
    assert main(["warm-up", "--preset", "tiny", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("built ") == 3


def test_what_triton_compiles_is_shown_and_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")

    def run(_config: object) -> None:
        for kernel, cached in (("_norm_kernel", False), ("_norm_kernel", True), ("_dq_kernel", False)):
            times = SimpleNamespace(total=1_500_000)
            triton.knobs.compilation.listener(
                src=SimpleNamespace(name=kernel), metadata={}, metadata_group={}, times=times, cache_hit=cached
            )

    monkeypatch.setattr(tilegrad.training.warm_up, "check_device", lambda _device: None)
    monkeypatch.setattr("tilegrad.engine.machine.check_device", lambda _device: None)
    monkeypatch.setattr(tilegrad.training.warm_up, "run_on_zeros", run)
    assert main(["warm-up", "--preset", "tiny", "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "compiled norm_kernel in 1.5 s", "compiled dq_kernel in 1.5 s",
        "Triton compiled 2 kernels and found 1 in its cache: 0 s in all",
    ]  # fmt: skip
    assert triton.knobs.compilation.listener is None
    assert warm_up(run_from({"train": {"device": "cuda"}}, "test"), lambda *_: None).compiled == 2
    assert WarmUp(1, 2, 3.0).cached == 2 and not torch.cuda.is_initialized()
