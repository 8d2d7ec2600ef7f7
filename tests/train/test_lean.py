"""Engines with lean states: bytes per parameter, one layout, exact resume, ranks and shards, errors."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, SPEED_RUN, batch, clones, equal
from support.ranks import Ranks

import tilegrad
from tilegrad import Engine, LoraConfig, MuonConfig
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.planning import plan_model
from tilegrad.engine.spec import StepSpec
from tilegrad.engine.state import counters, owned_pieces, restore_counters
from tilegrad.model.layer import Kept, Masters, States
from tilegrad.model.transformer import parameters
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, load_into
from tilegrad.training.pieces import load_pieces, save_pieces
from tilegrad.training.sections import run_from

BF16 = torch.bfloat16
GAPS = replace(CONFIG, n_embd=12, n_layer=2)  # arenas have gaps
KEPT: tuple[Kept, ...] = ("float32", "bfloat16")
MASTERS: tuple[Masters, ...] = ("float32", "none")
EVERY = [States(*each) for each in product(KEPT, MASTERS, KEPT)]
LEAN = EVERY[1:]
ALL = States("bfloat16", "none", "bfloat16")
PAIRS = (
    States("float32", "none", "bfloat16"),
    States("bfloat16", "float32", "bfloat16"),
    States("bfloat16", "none"),
    ALL,
)


def in_ci(*some: States) -> list[Any]:
    return [each if each in some else pytest.param(each, marks=pytest.mark.slow) for each in LEAN]


NAMES = {each: ",".join(asdict(each).values()) for each in EVERY}


def named(states: States) -> str:
    return NAMES[states]


@pytest.mark.parametrize(
    ("states", "bytes_"),
    [
        (States(), 18), (States("bfloat16"), 14), (States(gradients="bfloat16"), 16), (States(masters="none"), 14),
        (States("bfloat16", "none"), 10), (ALL, 8),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("on_hopper")
def test_a_parameter_on_cuda_has_the_documented_bytes(states: States, bytes_: int) -> None:
    pytest.importorskip("triton")
    model = replace(tilegrad.presets()["gpt2"].model, n_layer=2)
    plan = plan_model(StepSpec(model, 1, 64, BF16, torch.device("cuda", 0), states=states))
    n = sum(torch.Size(p.master.shape).numel() for p in parameters(model).values())
    kept = sum(plan.arenas[role].arena_bytes for role in ("params", "grads", "optimizer"))
    assert kept / n == pytest.approx(bytes_, rel=1e-3)


@pytest.mark.parametrize("states", in_ci(*PAIRS), ids=named)
def test_all_states_have_one_layout_and_gaps_stay_zero(states: States) -> None:
    config = GAPS
    engine, (tokens, targets) = Engine(config, 2, 8, dtype=BF16, states=states), batch(config, 2, 8)
    engine.step(tokens, targets, 1e-2)
    o, tensors = engine.optimizer, engine.tensors()
    ranges = {"": (o.params, engine.params), "d": (o.grads, engine.grads)}
    for kind in ("m", "v"):
        ranges[kind] = (getattr(o, kind), {name: tensors[f"{kind}.{name}"] for name in engine.params})
    dtypes = {"": states.masters, "d": states.gradients, "m": states.moments, "v": states.moments}
    for kind, (flat, own) in ranges.items():
        assert flat.dtype == (torch.float32 if dtypes[kind] == "float32" else BF16)
        assert all(x.dtype == flat.dtype for x in own.values())
    for name in engine.params:
        found = {(x[name].data_ptr() - flat.data_ptr()) // flat.element_size() for flat, x in ranges.values()}
        assert len(found) == 1, name
    for flat, own in ranges.values():
        for x in own.values():
            x.zero_()
        assert not flat.any(), "the gaps"


@pytest.mark.parametrize("states", [States("bfloat16"), ALL], ids=named)
def test_dead_memory_is_not_read(states: States) -> None:
    for config in (
        replace(LLAMA, tie_embeddings=False),
        replace(CONFIG, projection="per_head", dropout=0.2),
        SPEED_RUN,
    ):
        tokens, targets = batch(config, 2, 8)
        plain, poisoned = (Engine(config, 2, 8, dtype=BF16, states=states) for _ in range(2))
        for _ in range(2):
            plain.step(tokens, targets, 1e-2)
            poisoned.arenas.poison()
            poisoned.step(tokens, targets, 1e-2)
        assert equal(plain.tensors(), poisoned.tensors()) and plain.plan.peak_bytes == plain.arenas.nbytes


@pytest.mark.parametrize("states", in_ci(States("bfloat16"), ALL), ids=named)
def test_a_resumed_engine_has_the_bits_of_one_that_never_stopped(states: States) -> None:
    config = replace(GAPS, dropout=0.1, n_layer=1)
    given = [batch(config, 2, 8, seed=i) for i in range(2)]
    xs, ys = [x for x, _ in given], [y for _, y in given]
    whole = Engine(config, 2, 8, dtype=BF16, states=states, seed=3)
    for _ in range(2):
        whole.step(xs, ys, 1e-2)
    saved, state = clones(whole.tensors()), counters(whole)
    resumed = Engine(config, 2, 8, dtype=BF16, states=states, seed=77)
    for name, x in resumed.tensors().items():
        x.copy_(saved[name])
    restore_counters(resumed, state)
    other = Engine(config, 2, 8, dtype=BF16, states=states, seed=3)
    for name, x in other.tensors().items():
        x.copy_(saved[name])
    restore_counters(other, state | {"seed": 4})
    for engine in (whole, resumed, other):
        engine.step(xs, ys, 1e-2)
    assert equal(whole.tensors(), resumed.tensors())
    assert not equal(whole.tensors(), other.tensors()), "the seed decides"


def test_micro_batches_add_up_in_bfloat16_gradients() -> None:
    config = replace(CONFIG, n_layer=1)
    tokens, targets = batch(config, 8, 8)
    full, kept = (
        Engine(config, 8, 8, dtype=BF16, states=states) for states in (States(), States(gradients="bfloat16"))
    )
    for parts in (1, 8):
        for engine in (full, kept):
            engine.gradients([*tokens.split(8 // parts)], [*targets.split(8 // parts)])
        for name, g in full.grads.items():
            assert kept.grads[name].dtype == BF16
            assert float((kept.grads[name] - g).norm() / g.norm()) < 0.003 * parts**0.5, name
    with pytest.raises(
        ValueError, match="gradient_accumulation: got 129 with gradients 'bfloat16'; accepted: at most 128"
    ):
        kept.gradients([tokens] * 129, [targets] * 129)


# ── ranks ──


def stepped(config: Any, mesh: Mesh | None, steps: int, count: int, **how: Any) -> Engine:
    """An engine without clipping, because the norm of slices differs in its last bits from the norm of the whole."""
    how = {"dtype": BF16, "max_norm": float("inf"), "seed": 3, **how}
    how |= {} if mesh is None else {"mesh": mesh, "bucket_bytes": 5_000}
    engine = Engine(config, 2, 8, **how)
    return go_on(engine, mesh, steps, count)


def go_on(engine: Engine, mesh: Mesh | None, steps: int, count: int) -> Engine:
    for _ in range(steps):
        given = [batch(engine.config, 2, 8, seed=10 * engine.steps + i) for i in range(count)]
        own = given if mesh is None else given[mesh.rank :: mesh.world]
        engine.submit([x for x, _ in own], [y for _, y in own], 1e-2)
        engine.finished(wait=True)
    return engine


def lean_ranks(mesh: Mesh, shard: str, states: States, folder: str) -> None:
    # with tied embeddings one process would round twice
    config = replace(GAPS, n_embd=32, tie_embeddings=states.gradients == "float32")
    count = 1  # one micro-batch: one process adds a second inside its products, in another order than ranks
    one = stepped(config, None, 2, count, states=states)
    many = stepped(config, mesh, 2, count, states=states, shard=shard)
    assert equal(many.params, one.params), "ranks are one process, to the bit"
    assert many.arenas.nbytes == many.plan.peak_bytes
    tensors = one.tensors()
    for name, (piece, at, _) in owned_pieces(many).items():
        assert torch.equal(piece, tensors[name].view(-1)[at : at + piece.numel()]), name
    path = save_pieces(Path(folder), many, mesh, {"engine": counters(many)})
    go_on(many, mesh, 1, count)
    go_on(one, None, 1, count)
    again = stepped(config, mesh, 0, count, states=states, shard="optimizer" if shard == "none" else "none")
    restore_counters(again, load_pieces(path, again, mesh)["engine"])
    go_on(again, mesh, 1, count)
    assert equal(again.params, one.params) and equal(many.params, one.params), "resumed with other shards"
    alone = stepped(config, None, 0, count, states=states)
    restore_counters(alone, load_into(path, alone.tensors()).state["engine"])
    assert equal(go_on(alone, None, 1, count).tensors(), one.tensors()), "resumed by one process"


@pytest.mark.parametrize(
    ("shard", "states"),
    [
        ("optimizer", States("bfloat16")), ("all", ALL), ("optimizer", ALL),
        pytest.param("none", ALL, marks=pytest.mark.slow),  # the other cases resume without shards
        *(pytest.param(shard, States("bfloat16", "none"), marks=pytest.mark.slow) for shard in ("none", "optimizer", "all")),
        *(pytest.param(shard, States("bfloat16"), marks=pytest.mark.slow) for shard in ("none", "all")),
    ],
)  # fmt: skip
def test_ranks_have_the_bits_of_one_process(two_ranks: Ranks, shard: str, states: States, tmp_path: Path) -> None:
    two_ranks.run(lean_ranks, shard, states, str(tmp_path))


# ── runs ──

RUN: dict[str, dict[str, Any]] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16},
    "train": {
        "steps": 2, "batch_size": 2, "dtype": "bfloat16", "masters": "none", "gradients": "bfloat16", "eval_batches": 1,
        "sample_tokens": 0,
    },
    "optimizer": {"moments": "bfloat16"},
}  # fmt: skip


def test_a_checkpoint_records_its_states_and_resumes_only_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tilegrad.train(RUN, "run")
    path = latest_checkpoint(Path("run/checkpoints"))
    assert path is not None
    checkpoint = load_checkpoint(path)
    run = checkpoint.state["run"]
    assert (run["train"]["masters"], run["train"]["gradients"]) == ("none", "bfloat16")
    assert run["optimizer"]["moments"] == "bfloat16"
    assert all(x.dtype == (torch.float32 if name == "adam_step" else BF16) for name, x in checkpoint.tensors.items())
    model = tilegrad.load("run")
    assert all(torch.equal(x, checkpoint.tensors[name].float()) for name, x in model.params.items())
    for section, key, value in (
        ("train", "masters", "float32"), ("train", "gradients", "float32"), ("optimizer", "moments", "float32"),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=rf"{key}: got 'float32'; accepted: the run's value, .* when resuming \(.*--init"
        ):
            tilegrad.train({"train": {"steps": 3}, section: {key: value}}, resume="run")
    assert tilegrad.train({"train": {"steps": 3}}, resume="run").steps == 3


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"states": "bfloat16"}, "states: got 'bfloat16'; accepted: a States"),
        (
            {"states": ALL, "dtype": torch.float32},
            "masters: got 'none' with dtype float32; accepted: 'float32', or dtype bf",
        ),
        (
            {"states": States("bfloat16"), "dtype": torch.float64},
            "moments: got 'bfloat16' with dtype float64; accepted: ",
        ),
        (
            {"states": States(gradients="bfloat16"), "dtype": torch.float32},
            "gradients: got 'bfloat16' with dtype float32",
        ),
        (
            {"states": States("bfloat16"), "muon": MuonConfig()},
            "moments: got 'bfloat16' with Muon, .*; accepted: 'float32', or AdamW",
        ),
        ({"states": States(masters="none"), "muon": MuonConfig()}, "masters: got 'none' with Muon"),
        ({"states": States(masters="none"), "lora": LoraConfig(2)}, "masters: got 'none' with lora"),
        ({"states": States(gradients="bfloat16"), "lora": LoraConfig(2)}, "gradients: got 'bfloat16' with lora"),
        ({"states": States(masters="none"), "ema": 0.9}, "masters: got 'none' with ema 0.9, .*; accepted: "),
    ],
)
def test_states_that_the_kernels_do_not_support_are_refused(how: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Engine(CONFIG, 1, 8, **{"dtype": BF16, **how})


@pytest.mark.parametrize(
    ("section", "key", "accepted"),
    [
        ("optimizer", "moments", "'float32' or 'bfloat16'"),
        ("train", "masters", "'float32' or 'none'"),
        ("train", "gradients", "'float32' or 'bfloat16'"),
    ],
)
def test_bad_values_of_the_keys_of_states_are_refused(section: str, key: str, accepted: str) -> None:
    for bad in ("float16", 1, True, ["bfloat16"]):
        with pytest.raises(ValueError, match=rf"{key}: got .*; accepted: {accepted}"):
            run_from({section: {key: bad}}, "test")
    many: dict[str, Any] = {**RUN["train"], "gradient_accumulation": 129}
    with pytest.raises(
        ValueError, match="gradient_accumulation: got 129 with gradients 'bfloat16'; accepted: at most 128"
    ):
        tilegrad.train({**RUN, "train": many}, "never")
    assert not Path("never").exists()


def test_adapters_and_averages_work_with_bfloat16_moments() -> None:
    tokens, targets = batch(CONFIG, 2, 8)
    hows: list[dict[str, Any]] = [{"lora": LoraConfig(2, 4)}, {"ema": 0.9}, {"freeze": ("wte.*", "*.bias")}]
    for how in hows:
        engine = Engine(CONFIG, 2, 8, states=States("bfloat16"), **how)
        losses = [engine.step(tokens, targets, 1e-2) for _ in range(4)]
        assert losses[-1] < losses[0]
        assert engine.tensors()[next(name for name in engine.tensors() if name.startswith("m."))].dtype == BF16


@pytest.mark.parametrize("freeze", ["wte.*", "wpe.*", "blocks.?.ln1.weight", "*.bias"])
def test_parameters_without_masters_train_next_to_frozen_ones(freeze: str) -> None:
    tokens, targets = batch(CONFIG, 2, 8)
    engine = Engine(CONFIG, 2, 8, dtype=BF16, states=States(masters="none"), freeze=(freeze,))
    losses = [engine.step(tokens, targets, 1e-2) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert {x.dtype for x in engine.params.values()} == {BF16}
