"""When gradients are final and parameters are needed, and how an arena is cut, without starting ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from math import prod

import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3, batch
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine.dist.schedule import Bucket, Touch, final, follow, needed, order
from tilegrad.kernels.muon import MuonConfig, muon_workspace
from tilegrad.kernels.op import observe_names, op
from tilegrad.memory.types import BufferType
from tilegrad.model.block import Recomputed
from tilegrad.model.config import PRESETS
from tilegrad.model.layer import Declare
from tilegrad.model.transformer import Transformer, declare
from tilegrad.engine.parallel.declare import buckets_of, declare_optimizer, schedule_of
from tilegrad.engine.spec import StepSpec
from tilegrad.engine.planning import plan_model

CPU = torch.device("cpu")
MODELS = {**PRESETS, "qwen": QWEN3, "dropout": replace(CONFIG, dropout=0.1)}


def handles(config: ModelConfig, *, accumulate: bool = False) -> Transformer:
    return declare(Declare(config, 1, 8, torch.float32, CPU, accumulate=accumulate))


def padding(bucket: Bucket) -> int:
    return sum(member for member in bucket.members if isinstance(member, int))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [2, 64])
def test_buckets_of_every_preset_cover_every_parameter_once(name: str, world: int) -> None:
    """Every parameter once, in the arena's order; slices are aligned; the backward finishes the buckets from the end."""
    model = handles(MODELS[name])
    steps = schedule_of(model)
    buckets = buckets_of(model, steps, world, 8 << 20)
    assert [n for b in buckets for n in b.names] == sorted(model.params, key=lambda n: len(model.params[n].master.shape) < 2)
    ends = 0
    for b in buckets:
        assert b.start == ends and (b.stop - b.start) % (world * 16) == 0 and padding(b) <= 2 * world * 16
        assert {len(model.params[n].master.shape) >= 2 for n in b.names} == {b.decayed > 0}
        assert [b.part(r, world) for r in (0, world - 1)] == [
            (b.start, b.start + (b.stop - b.start) // world),
            (b.stop - (b.stop - b.start) // world, b.stop),
        ]
        ends = b.stop
    assert "wte.weight" in buckets[0].names and set(buckets[0].names) <= {"wte.weight", "wpe.weight"}
    moments = [final(buckets[i], steps) for i in order(buckets, steps)]
    assert moments == sorted(moments) and (len(buckets) < 9 or moments[0] < 0.7 * len(steps))
    assert final(buckets[0], steps) == len(steps) - 1 and needed(buckets[0], steps) == 0
    for b in buckets:
        last = final(b, steps)
        assert steps[last].writes & set(b.names) and not any(s.writes & set(b.names) for s in steps[last + 1 :])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", [2, 8])
def test_with_muon_a_rank_owns_whole_matrices(name: str, world: int) -> None:
    """Every matrix is inside one rank's slice, every rank has about as much, and one plan serves all ranks."""
    spec = StepSpec(MODELS[name], 1, 8, torch.float32, CPU, world=world, bucket_bytes=8 << 20, muon=MuonConfig())
    model = spec.declare()
    matrices = {n for n, p in model.params.items() if p.matrices}
    ranks = [declare_optimizer(model, spec, rank=rank)[0] for rank in range(world)]
    room = {n: prod(x.shape) for n, x in ranks[0].scratch.items()}
    for optimizer in ranks:
        assert {n: prod(x.shape) for n, x in optimizer.scratch.items()} == room
        needed_here = muon_workspace(optimizer.params, MuonConfig(), [one.matrices for one in optimizer.owned])
        assert all(prod(shape) <= room[f"muon.{n}"] for n, (shape, _) in needed_here.items())
    buckets = buckets_of(model, schedule_of(model), world, spec.bucket_bytes, spec.muon)
    assert {n for b in buckets if b.whole for n in b.names} == matrices
    assert all(padding(b) <= (b.stop - b.start) / 8 for b in buckets[1:] if b.whole)
    own = [sum(x.stop - x.start for one in optimizer.owned for x in one.matrices) for optimizer in ranks]
    assert sum(own) == sum(prod(p.master.shape) for p in model.params.values() if p.matrices)
    assert max(own) <= 1.15 * sum(own) / world or len(matrices) < 4 * world
    for optimizer in ranks:
        assert all((one.v is None) == bucket.whole for one, bucket in zip(optimizer.owned, buckets, strict=True))
        assert all(x.stop <= one.params.shape[0] for one in optimizer.owned for x in one.matrices)


@pytest.mark.parametrize("world", [2, 3])
def test_an_arena_that_ends_with_a_ragged_matrix_has_room_for_every_slice(world: int) -> None:
    config = replace(CONFIG, n_layer=2, n_embd=12, n_head=2, ffn_dim=7)
    freeze = ("wte.*", "wpe.*", "ln_f.*", "*.ln?.*", "*.bias")
    spec = StepSpec(config, 1, 8, torch.float32, CPU, world=world, freeze=freeze, muon=MuonConfig())
    optimizer, _ = declare_optimizer(spec.declare(), spec, rank=world - 1)
    *_, bucket = buckets_of(spec.declare(), schedule_of(spec.declare()), world, spec.bucket_bytes, spec.muon)
    assert bucket.whole and optimizer.grads.shape[0] == bucket.stop
    plan_model(spec)


class Early(Exception):
    """Says that a bucket was summed before it was final."""


@pytest.mark.parametrize("config", [CONFIG, LLAMA, QWEN3])
@pytest.mark.parametrize("early", [0, 1])
def test_a_gradient_is_summed_after_its_last_op(config: ModelConfig, early: int) -> None:
    """Gradients are poisoned, and copied when the schedule sums them. All copies equal the final gradients. The canary copies
    them one op early, and finds poison or another value."""
    engine, (tokens, targets) = Engine(config, 2, 8), batch(config, 2, 8)
    engine.gradients(tokens, targets)
    want = {name: g.clone() for name, g in engine.grads.items()}
    steps = schedule_of(declare(Declare(config, 2, 8, torch.float32, CPU, accumulate=False), engine.recompute))
    found: dict[str, Tensor] = {}

    def take(name: str) -> None:
        found[name] = engine.grads[name].clone()

    after: dict[int, list[object]] = {}
    for name in want:
        at = final(Bucket((name,), 0, 0, 0), steps) - early
        after.setdefault(at, []).append(lambda name=name: take(name))
    engine.arenas.poison("grads")
    with follow(steps, {}, after, observe_names):  # type: ignore[arg-type]
        engine._model(2, 8, accumulate=False).step()
    same = {name: torch.equal(found[name], want[name]) for name in want}
    assert not any(same.values()) if early else all(same.values()), same


def test_a_program_that_departs_from_its_schedule_is_refused() -> None:
    steps = [Touch("first", frozenset(), frozenset()), Touch("second", frozenset(), frozenset())]
    seen: list[str] = []

    @op()
    def first(*, y: Tensor) -> None:
        seen.append("first")

    @op()
    def second(*, y: Tensor) -> None:
        seen.append("second")

    x = torch.zeros(1)
    around = {1: [lambda: seen.append("before")]}, {1: [lambda: seen.append("after")]}
    with follow(steps, *around, observe_names):
        first(y=x)
        second(y=x)
    assert seen == ["first", "before", "second", "after"]
    with pytest.raises(RuntimeError, match=r"op number 0 is 'second', which the schedule does not"), follow(steps, {}, {}, observe_names):
        second(y=x)
    with pytest.raises(RuntimeError, match=r"op number 1 is 'first', which the schedule does not"), follow(steps[:1], {}, {}, observe_names):
        first(y=x)
        first(y=x)
    with pytest.raises(RuntimeError, match=r"ended after 1 of 2 scheduled ops"), follow(steps, {}, {}, observe_names):
        first(y=x)


def test_a_followed_op_costs_three_microseconds_at_most() -> None:
    @op()
    def nothing(*, y: Tensor) -> None:
        pass

    x, n = torch.zeros(1), 2000
    steps = [Touch("nothing", frozenset(), frozenset())] * n

    def measure() -> float:
        with follow(steps, {}, {}, observe_names):
            began = time.thread_time()  # the time of this thread, which other programs do not change
            for _ in range(n):
                nothing(y=x)
            return (time.thread_time() - began) / n

    assert min(measure() for _ in range(15)) < 3e-6  # another program slows some of them


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_rank_has_its_share_of_bytes(shard: str) -> None:
    """Moments are 1 / world of the whole, and only pads have the type COMM."""
    config = replace(PRESETS["tiny"], n_layer=3)
    plans = {
        world: plan_model(StepSpec(config, 2, 16, torch.float32, CPU, world=world, shard=shard, bucket_bytes=200_000))  # type: ignore[arg-type]
        for world in (1, 2, 8, 64)
    }
    alone = plans[1].arenas
    for world, plan in plans.items():
        pads = sum(h.nbytes for h in plan.trace.handles.values() if h.type is BufferType.COMM)
        scalars = 64 * 6
        assert plan.arenas["activations"].arena_bytes == alone["activations"].arena_bytes
        if world == 1 or shard == "none":
            assert pads == 0 and plan.peak_bytes <= plans[1].peak_bytes + scalars
            continue
        for role in ("params", "grads"):
            assert alone[role].arena_bytes <= plan.arenas[role].arena_bytes <= alone[role].arena_bytes + pads
        moments = 2 * plan.arenas["params"].arena_bytes // world
        assert moments <= plan.arenas["optimizer"].arena_bytes <= moments + scalars


def test_the_size_of_a_bucket_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"^bucket_bytes: got 0; accepted: at least 1$"):
        plan_model(StepSpec(CONFIG, 2, 8, torch.float32, CPU, world=2, bucket_bytes=0))


def test_shard_all_plans_less_memory() -> None:
    """A small twin of gpt2-xl on 8 ranks: parts are 1/8, what is whole shares addresses, and the arena is near its bound, which
    depends on the number of threads: some scratch is for each of them."""
    config = replace(PRESETS["tiny"], n_layer=6)
    alone = plan_model(StepSpec(config, 2, 64, torch.float32, CPU))
    plan = plan_model(StepSpec(config, 2, 64, torch.float32, CPU, world=8, shard="all"))
    arena = plan.arenas["activations"]
    assert arena.arena_bytes <= 1.02 * arena.lower_bound_bytes
    for role in ("params", "grads", "optimizer"):
        assert plan.arenas[role].arena_bytes <= alone.arenas[role].arena_bytes / 8 + 8 * 64 * 8 * 8
    comm = sum(h.nbytes for h in plan.trace.handles.values() if h.type is BufferType.COMM)
    assert arena.arena_bytes < alone.arenas["activations"].arena_bytes + comm / 2


@pytest.mark.slow
def test_shard_all_plans_a_large_model() -> None:
    plan = plan_model(StepSpec(PRESETS["gpt2-xl"], 4, 1024, torch.float32, CPU, world=8, shard="all"))
    arena = plan.arenas["activations"]
    assert plan.peak_bytes <= 24.4e9 and arena.arena_bytes <= 1.01 * arena.lower_bound_bytes


def test_a_large_model_fits_on_an_h200(on_hopper: None) -> None:
    """gpt2-xl in bfloat16, with recomputed norms and activations; masters are sharded too."""
    both: frozenset[Recomputed] = frozenset({"activation", "norm"})
    plan = plan_model(StepSpec(
        PRESETS["gpt2-xl"], 16, 1024, torch.bfloat16, torch.device("cuda"), (both,) * 48, world=8, shard="optimizer"
    ))  # fmt: skip
    assert plan.peak_bytes <= 37.6e9
