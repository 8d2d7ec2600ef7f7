"""The memory of the optimizer: flat ranges over the arenas, its part of the trace, its state."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, batch, clones, equal
from torch.profiler import ProfilerActivity, profile

import tilegrad
from tilegrad import Engine, LoraConfig, ModelConfig, MuonConfig
from tilegrad.cli import main
from tilegrad.engine.optimizer import Optimizer
from tilegrad.engine.planning import plan_model, step_report
from tilegrad.engine.spec import StepSpec
from tilegrad.engine.state import counters, restore_counters
from tilegrad.memory.planned.arena import Arenas, plan_memory
from tilegrad.memory.planned.trace import bind
from tilegrad.model.transformer import parameters
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint
from tilegrad.training.sections import resumed, run_from

CPU = torch.device("cpu")
GAPS = replace(CONFIG, n_embd=12)  # not a multiple of a cache line, so that arenas have gaps
NORM = {"cpu": {"scratch.optimizer.global_norm.torch.parts"}, "cuda": {"scratch.optimizer.global_norm.triton.squares"}}
GUARD = {"scratch.optimizer.guard.halted", "scratch.optimizer.guard.spoiled"}
ADAMW = {
    "cpu": {"scratch.optimizer.adamw.torch.grad_scale", "scratch.optimizer.adamw.torch.found_inf"},
    "cuda": {"scratch.optimizer.adamw.triton.decision"},
}


@pytest.mark.parametrize("config", [CONFIG, LLAMA, GAPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flat_ranges_have_one_layout_and_decayed_parameters_come_first(config: ModelConfig, dtype: torch.dtype) -> None:
    engine = Engine(config, 2, 8, dtype=dtype)
    o, tensors = engine.optimizer, engine.tensors()
    assert o.v is not None
    ranges = {
        "": (o.params, engine.params),
        "d": (o.grads, engine.grads),
        "m": (o.m, {name: tensors[f"m.{name}"] for name in engine.params}),
        "v": (o.v, {name: tensors[f"v.{name}"] for name in engine.params}),
    }
    for name, p in engine.params.items():
        starts = {(x[name].data_ptr() - flat.data_ptr()) // p.element_size() for flat, x in ranges.values()}
        assert len(starts) == 1 and (starts.pop() < o.owned[0].decayed) == (p.ndim >= 2), name
    for flat, x in ranges.values():
        flat.fill_(1.0)
        assert all((y == 1.0).all() for y in x.values())
        assert flat.numel() >= sum(y.numel() for y in x.values())
        flat.fill_(0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_optimizers_scratch_lives_during_its_step_and_shares_addresses(
    device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
        request.getfixturevalue("on_hopper")
    plan = plan_model(StepSpec(CONFIG, 2, 8, torch.float32, torch.device(device)))
    ops, live, activations = plan.trace.ops, plan.trace.live, plan.arenas["activations"]
    norm, guard, update = ops.index("global_norm"), ops.index("guard"), ops.index("adamw_step")
    assert (guard, update) == (norm + 1, norm + 2) and ops.count("global_norm") == ops.count("adamw_step") == 1
    assert ops[norm - 1] == "embedding_bwd" and ops[update + 1] == "embedding_fwd"
    assert {name for name in activations.offsets if "optimizer" in name} == (NORM[device] | GUARD | ADAMW[device])
    for op, scratch in ((norm, NORM[device]), (guard, GUARD), (update, ADAMW[device])):
        assert all(live[name] == ((op, op),) for name in scratch)
        alive = {name for name in activations.offsets if any(first <= op <= last for first, last in live[name])}
        assert alive == scratch, "nothing else is alive then"
    own = NORM[device] | GUARD | ADAMW[device]
    end = max(activations.offsets[name] + plan.trace.handles[name].nbytes for name in own)
    others = (offset for name, offset in activations.offsets.items() if name not in own)
    assert min(others) < end, "it shares addresses"
    assert all(live[name] == ((0, len(ops) - 1),) for name in ("m.wte.weight", "v.ln_f.weight", "optimizer.step"))


def test_the_arena_holds_moments_and_four_scalars() -> None:
    plan = plan_model(StepSpec(GAPS, 2, 8, torch.float32, CPU))
    optimizer, params = plan.arenas["optimizer"], plan.arenas["params"]
    whole = -(-params.arena_bytes // params.align) * params.align
    assert optimizer.arena_bytes == 2 * whole + 3 * params.align + 4


def test_a_report_of_one_step_ends_with_the_optimizer() -> None:
    plan = plan_model(StepSpec(CONFIG, 2, 8, torch.float32, CPU))
    report = step_report(plan, StepSpec(CONFIG, 2, 8, torch.float32, CPU), "one step")
    last = max(span.last for span in report.spans if span.role == "activations")
    assert {span.name for span in report.spans if span.last == last and span.role == "activations"} == ADAMW["cpu"]
    assert report.ops == last


def test_gaps_stay_zero() -> None:
    engine, (tokens, targets) = Engine(GAPS, 2, 5), batch(GAPS, 2, 5)
    for _ in range(3):
        engine.step(tokens, targets, learning_rate=1e-2)
    o = engine.optimizer
    for flat, x in ((o.params, engine.params.values()), (o.grads, engine.grads.values())):
        assert flat.numel() > sum(y.numel() for y in x)
        for y in x:
            y.zero_()
        assert not flat.any()
    for moment in o.moments.values():
        assert moment.any()
        moment.zero_()
    assert o.v is not None and not o.m.any() and not o.v.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_optimizer_allocates_no_more_than_scalars(dtype: torch.dtype) -> None:
    config = replace(CONFIG, vocab_size=9000)
    engine, (tokens, targets) = Engine(config, 2, 5, dtype=dtype), batch(config, 2, 5)
    engine.step(tokens, targets, learning_rate=1e-3)
    engine.gradients(tokens, targets)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.optimizer_step(1e-3)
    allocated = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]
    assert max(allocated, default=0) <= 64, sorted(allocated)[-5:]


def test_state_and_tensors_resume_to_the_same_bits() -> None:
    batches = [batch(CONFIG, 2, 8, seed=i) for i in range(4)]
    config = replace(CONFIG, dropout=0.1)
    engine, other = Engine(config, 2, 8, seed=1), Engine(config, 2, 8, seed=2)
    for tokens, targets in batches[:2]:
        engine.step(tokens, targets, learning_rate=1e-2)
    for name, x in engine.tensors().items():
        other.tensors()[name].copy_(x)
    restore_counters(other, counters(engine))
    assert counters(other) == counters(engine) and engine.steps == other.steps == 2
    for tokens, targets in batches[2:]:
        for each in (engine, other):
            each.step(tokens, targets, learning_rate=1e-2)
    assert equal(clones(engine.tensors()), other.tensors())


def test_state_of_a_plan_with_another_alignment_is_refused() -> None:
    handles = Optimizer.declare(parameters(GAPS).values())
    plan = plan_model(StepSpec(GAPS, 2, 8, torch.float32, CPU))
    arenas = Arenas(plan_memory(plan.trace, align=16))
    with pytest.raises(
        ValueError, match=r"params: got 'wpe\.weight' of 768 bytes at 1536; accepted: 768 bytes at 1488, as planned"
    ):
        bind(handles, arenas.view)


# ── Muon ──

SMALL: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    "train": {"steps": 2, "batch_size": 2, "seq_len": 16, "eval_batches": 0, "sample_tokens": 0, "log": "none"},
}


def muon_of(**optimizer: Any) -> MuonConfig | None:
    return run_from({"train": {"learning_rate": 4e-3}, "optimizer": optimizer}, "test").muon


def test_muon_has_its_own_learning_rate_on_the_schedule_of_adamw() -> None:
    assert muon_of() is None and muon_of(name="adamw") is None
    assert muon_of(name="muon") == MuonConfig(learning_rate_factor=5.0)
    assert muon_of(name="muon", scale="rms") == MuonConfig(scale="rms", learning_rate_factor=1.0)
    assert muon_of(name="muon", scale="rms", matrix_learning_rate=0.01) == MuonConfig(
        scale="rms", learning_rate_factor=2.5
    )
    given: dict[str, Any] = {"momentum": 0.5, "nesterov": False, "orthogonalization": "polar_express", "cautious": True}
    assert muon_of(name="muon", momentum_warmup=300) == MuonConfig(momentum_warmup=300, learning_rate_factor=5.0)
    assert muon_of(name="muon", **given) == MuonConfig(**given, learning_rate_factor=5.0)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"name": "sgd"}, "optimizer.name: got 'sgd'; accepted: 'adamw' or 'muon'"),
        ({"momentum": 0.5}, "optimizer.momentum: got 0.5 with optimizer.name 'adamw'; accepted: its default, or name"),
        ({"name": "muon", "momentum": 2}, "optimizer.momentum: got 2; accepted: a number from 0 to below 1.0"),
        ({"name": "muon", "matrix_learning_rate": -1}, "optimizer.matrix_learning_rate: got -1; accepted: None, or"),
        ({"name": "muon", "matrix_learning_rate": True}, "optimizer.matrix_learning_rate: got True; accepted: None"),
        ({"name": "muon", "scale": "other"}, "optimizer.scale: got 'other'; accepted: 'spectral' or 'rms'"),
    ],
)
def test_bad_keys_of_the_optimizer_are_refused_by_name(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        muon_of(**optimizer)


def test_a_run_with_muon_saves_m_without_v_and_keeps_its_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {**SMALL, "optimizer": {"name": "muon", "matrix_learning_rate": 0.01}}
    result = tilegrad.train(run, tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert path is not None
    names = set(load_checkpoint(path).tensors)
    assert {"m.blocks.0.attn.qkv.weight", "m.wte.weight", "v.wte.weight", "v.blocks.0.attn.qkv.bias"} <= names
    assert not any(name.startswith("v.blocks.0") and name.endswith(("qkv.weight", "up.weight")) for name in names)
    with pytest.raises(
        ValueError, match=r"^optimizer.name: got 'adamw'; accepted: the run's value, 'muon', when resuming"
    ):
        tilegrad.train({"train": {"steps": 3}, "optimizer": {"name": "adamw"}}, resume=tmp_path / "run")
    assert tilegrad.train({"train": {"steps": 3}}, resume=tmp_path / "run").steps == 3
    flags = [f"--{section}.{key}={value}" for section, keys in run.items() for key, value in keys.items()]
    assert main(["plan", "--json", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)["peak_bytes"]
    assert main(["plan", "--json", *(flag for flag in flags if "optimizer" not in flag)]) == 0
    assert planned <= result.planned_bytes and planned < json.loads(capsys.readouterr().out)["peak_bytes"]


def test_a_resumed_run_may_change_the_rate_of_muon() -> None:
    own = run_from({**SMALL, "optimizer": {"name": "muon", "matrix_learning_rate": 0.01}}, "test")
    changed = resumed(own, {"train": {"learning_rate": 2e-3}, "optimizer": {"matrix_learning_rate": 0.004}})
    assert (changed.muon, own.muon) == (MuonConfig(learning_rate_factor=2.0), MuonConfig(learning_rate_factor=10 / 3))
    assert resumed(own, {"train": {"learning_rate": 2e-3}}).muon == MuonConfig(learning_rate_factor=5.0)
    with pytest.raises(
        ValueError, match=r"^optimizer.momentum: got 0.5; accepted: the run's value, 0.95, when resuming"
    ):
        resumed(own, {"optimizer": {"momentum": 0.5}})
    with pytest.raises(
        ValueError, match=r"^optimizer.matrix_learning_rate: got -1; accepted: None, or a finite number"
    ):
        resumed(own, {"optimizer": {"matrix_learning_rate": -1}})


def test_adapters_have_no_muon() -> None:
    with pytest.raises(ValueError, match=r"^muon: got a MuonConfig with lora, .*; accepted: None"):
        Engine(CONFIG, 2, 8, lora=LoraConfig(2), muon=MuonConfig())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            CONFIG,
            {"attn.qkv": ((16, 16),) * 3, "attn.proj": ((16, 16),), "ffn.up": ((64, 16),), "ffn.down": ((16, 64),)},
        ),
        (replace(CONFIG, projection="per_head"), {"attn.q": ((8, 8), (8, 8)), "attn.v": ((8, 8), (8, 8))}),
        (LLAMA, {"attn.qkv": ((16, 16), (8, 16), (8, 16)), "ffn.up_gate": ((24, 16), (24, 16))}),
    ],
)
def test_muon_updates_the_matrices_of_blocks(config: ModelConfig, expected: dict[str, Any]) -> None:
    config = replace(config, n_embd=16, n_head=2, n_kv_head=1 if config.kv_heads < config.n_head else None)
    config = replace(config, ffn_dim=24 if config.activation == "swiglu" else None)
    params = parameters(config)
    for name, matrices in expected.items():
        assert params[f"blocks.0.{name}.weight"].matrices == matrices
    others = [name for name, p in params.items() if not p.matrices]
    assert {"wte.weight", "ln_f.weight"} <= set(others)
    assert all("blocks" not in name or name.endswith("bias") or ".ln" in name for name in others)


def test_muon_can_be_alone_if_the_rest_is_frozen() -> None:
    """No parameter is left for AdamW: v has no memory."""
    freeze = ("wte.*", "wpe.*", "ln_f.*", "*.ln?.*", "*.bias")
    engine, (tokens, targets) = Engine(CONFIG, 2, 8, freeze=freeze, muon=MuonConfig()), batch(CONFIG, 2, 8)
    assert engine.optimizer.v is None and all(name.endswith(".weight") for name in engine.grads)
    losses = [engine.step(tokens, targets, learning_rate=1e-2) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1
