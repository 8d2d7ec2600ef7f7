"""An engine whose blocks multiply in float8; on a CPU with the kernel that checks those of the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.float8 import float8_on_cpu
from support.models import CONFIG, LLAMA, SPEED_RUN, batch, clones, equal
from support.ranks import Ranks
from torch import Tensor

import tilegrad
from tilegrad import Engine, ModelConfig
from tilegrad.cli.progress import _message
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.parallel import digest
from tilegrad.engine.planning import plan_model
from tilegrad.engine.spec import Shard, StepSpec
from tilegrad.engine.state import counters, restore_counters, write_param
from tilegrad.kernels.fp8_linear import torch_ops
from tilegrad.model.block import Recomputed
from tilegrad.model.layer import Declare, HeadProducts, Linear
from tilegrad.model.lora import LoraConfig
from tilegrad.model.transformer import declare
from tilegrad.training.checkpoint import load_into
from tilegrad.training.pieces import load_pieces, save_pieces
from tilegrad.training.sections import resumed as resumed_with
from tilegrad.training.sections import run_from

QWEN3 = replace(LLAMA, qk_norm=True)
LINEAR: tuple[Linear, ...] = ("fp8", "plain")
LEVELS: tuple[tuple[Linear, HeadProducts], ...] = (
    ("fp8", "plain"),
    ("fp8-all", "plain"),
    ("plain", "fp8"),
    ("fp8-all", "fp8"),
)


def _pairs() -> list[Any]:
    """Every level and every model in CI, each level with each model in the slow tests."""
    every = list(product({"gpt": CONFIG, "llama": LLAMA, "qwen3": QWEN3, "speed run": SPEED_RUN}.items(), LEVELS))
    quick = {
        ("gpt", *LEVELS[0]),
        ("llama", *LEVELS[1]),
        ("gpt", *LEVELS[2]),
        ("qwen3", *LEVELS[3]),
        ("speed run", *LEVELS[3]),
    }
    names = [(name, *level) for (name, _), level in every]
    slow = [() if name in quick else pytest.mark.slow for name in names]
    rows = zip(every, names, slow, strict=True)
    return [pytest.param(config, *level, id="-".join(n), marks=m) for ((_, config), level), n, m in rows]


PAIRS = _pairs()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with float8_on_cpu():
        yield


def larger(config: ModelConfig) -> ModelConfig:
    return replace(config, n_embd=64, ffn_dim=256, block_size=32, vocab_size=64)


def engines(config: ModelConfig, linear: Linear = "fp8", head: HeadProducts = "plain") -> tuple[Engine, Engine]:
    config = larger(config)
    fp8 = Engine(config, 4, 32, dtype=torch.bfloat16, linear=linear, head=head)
    return fp8, Engine(config, 4, 32, dtype=torch.bfloat16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("config", "linear", "head"), PAIRS)
def test_fp8_trains_as_well_as_bfloat16(config: ModelConfig, linear: Linear, head: HeadProducts) -> None:
    fp8, plain = engines(config, linear, head)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    losses = [[e.step(tokens[:, :-1], tokens[:, 1:], 5e-3) for _ in range(15)] for e in (fp8, plain)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-2) and losses[0] != losses[1]
    assert losses[0][-1] < 0.7 * losses[0][0] and losses[0][-1] == pytest.approx(losses[1][-1], rel=0.1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_adapters_of_fp8_layers_add_the_same_as_in_bfloat16(config: ModelConfig) -> None:
    config, lora = larger(config), LoraConfig(rank=8, alpha=16)
    x, y = batch(config, 4, 32)
    losses = []
    for how, size in zip((*LINEAR, LINEAR[1]), (0.3, 0.3, 0.0), strict=True):
        engine = Engine(config, 4, 32, dtype=torch.bfloat16, linear=how, lora=lora)
        draw = torch.Generator().manual_seed(0)
        for name, b in engine.params.items():
            if name.endswith("lora_b"):
                b.copy_(size * torch.randn(b.shape, generator=draw))
        engine.step(x, y, 1e-9)  # rounds the masters
        losses.append(engine.step(x, y, 1e-9))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[1] != pytest.approx(losses[2], rel=2e-3), losses


@pytest.mark.usefixtures("on_hopper")
def test_products_of_adapters_of_fp8_layers_are_not_joined() -> None:
    config = larger(CONFIG)
    sizes = config, 4, 32, torch.bfloat16, torch.device("cuda")
    models = [declare(Declare(*sizes, linear=how, lora=LoraConfig(rank=8))) for how in LINEAR]
    adapters = [model.blocks[0].attention.adapter for model in models]
    assert [None if adapter is None else adapter.joined is None for adapter in adapters] == [True, False]


@pytest.mark.usefixtures("on_cpu")
def test_fp8_scales_come_from_the_previous_step_and_are_in_the_checkpoint() -> None:
    fp8, _ = engines(CONFIG)
    x, y = batch(fp8.config, 4, 32)
    fp8.step(x, y, 1e-3)
    name = "scale.blocks.0.attn.qkv."
    first = {part: fp8.tensors()[name + part].clone() for part in ("input", "weight")}
    assert first["input"][0] == 16.0 / 448 and first["input"][4:].max() > 0.0
    fp8.step([x, x], [y, y], 1e-3)  # the scale of a step serves all of its micro-batches
    for part, state in first.items():
        assert fp8.tensors()[name + part][0] == state[4:].max() / 448


@pytest.mark.usefixtures("on_cpu")
def test_fp8_evaluation_is_in_bfloat16_and_changes_no_scale() -> None:
    fp8, plain = engines(CONFIG)
    x, y = batch(fp8.config, 4, 32)
    before = clones(fp8.tensors())
    assert fp8.evaluate(x, y) == plain.evaluate(x, y) and equal(before, fp8.tensors())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("config", "linear", "head"), PAIRS)
def test_fp8_with_a_budget_or_micro_batches_has_the_same_bits(
    config: ModelConfig, linear: Linear, head: HeadProducts
) -> None:
    """Recomputed products equal those of the forward, because they have the same scales. x8t is kept, or rounded again."""
    config = larger(config)
    every: tuple[tuple[Recomputed, ...], ...] = ((), ("norm",), ("activation",), ("block",))
    choices = [frozenset(each) for each in every]
    engines = [Engine(config, 4, 32, dtype=torch.bfloat16, linear=linear, head=head)]
    spec, layers = engines[0].spec, config.n_layer
    peaks = [plan_model(replace(spec, recompute=(choice,) * layers)).peak_bytes for choice in choices]
    tight = Engine(config, 4, 32, dtype=torch.bfloat16, linear=linear, head=head, memory_budget=min(peaks))
    assert any(tight.recompute) and tight.plan.peak_bytes <= min(peaks)
    for i in range(3):
        x, y = batch(config, 4, 32, seed=i)
        losses = [e.step([x, x[:2]], [y, y[:2]], 1e-2) for e in (engines[0], tight)]
        assert losses[0] == losses[1]
    assert equal(engines[0].tensors(), tight.tensors())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("config", "linear", "head"), PAIRS)
def test_gradients_are_those_of_bfloat16_up_to_the_rounding_of_factors(
    config: ModelConfig, linear: Linear, head: HeadProducts
) -> None:
    """A factor of e4m3 errs by up to 2⁻⁴, of e5m2 by up to 2⁻³, at random, and errors of layers add up: so the angle between
    the gradients is small. A product that reads a wrong factor is far outside."""
    x, y = batch(larger(config), 4, 32)
    fp8, plain = engines(config, linear, head)
    for engine in (fp8, plain):
        engine.step(x, y, 1e-9)  # sets the scales
        engine.gradients(x, y)
    found = {n: _cosine(g, plain.grads[n]) for n, g in fp8.grads.items() if plain.grads[n].norm() > 1e-4}
    worst = min(found, key=lambda name: found[name])
    assert found[worst] > 0.9, (worst, found[worst])
    assert len(found) > 8 and found[worst] < 0.9999


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


@pytest.mark.usefixtures("on_cpu")
def test_fp8_all_saves_fewer_bytes_than_fp8() -> None:
    """Inputs of weight gradients are saved in float8."""
    config = replace(larger(LLAMA), n_layer=4)
    spec = StepSpec(config, 8, 32, torch.bfloat16, torch.device("cpu"))
    sizes = {how: plan_model(replace(spec, linear=how)).arenas["activations"].arena_bytes for how in ("fp8", "fp8-all")}
    kept = 8 * 32 * config.n_layer * (2 * config.n_embd + config.ffn)  # x of qkv and of up, a: one byte less of each
    assert sizes["fp8"] - sizes["fp8-all"] > 0.8 * kept
    both: frozenset[Recomputed] = frozenset({"norm", "activation"})
    again = replace(spec, recompute=(both,) * config.n_layer)
    recomputed = [
        plan_model(replace(again, linear=how)).arenas["activations"].arena_bytes for how in ("fp8", "fp8-all")
    ]
    assert recomputed[1] < recomputed[0] + 0.2 * kept, "what is recomputed is not kept in float8 either"


@pytest.mark.usefixtures("on_cpu")
def test_a_jump_is_counted_for_its_tensor() -> None:
    fp8, _ = engines(CONFIG)
    x, y = batch(fp8.config, 4, 32)
    for _ in range(2):
        fp8.submit(x, y, 1e-3)
    assert [result.jumps for result in fp8.finished(wait=True)] == [0, 0] and fp8.jumps == {}
    fp8.params["blocks.1.ffn.up.weight"].mul_(1000.0)
    for _ in range(3):
        fp8.submit(x, y, 1e-9)
    found = [result.jumps for result in fp8.finished(wait=True)]
    assert found[0] == 0 and found[1] >= 1 and "blocks.1.ffn.up.weight" in fp8.jumps
    assert sum(found) == sum(fp8.jumps.values())


@pytest.mark.parametrize(
    ("change", "engine", "error"),
    [
        (
            {"ffn_dim": 72},
            {"linear": "fp8"},
            "which takes sizes that are multiples of 16, not ffn_dim 72",
        ),
        (
            {"n_head": 4, "n_embd": 40},
            {"linear": "fp8-all"},
            "which takes sizes that are multiples of 16, not n_embd 40",
        ),
        (
            {"vocab_size": 50257},
            {"head": "fp8"},
            "head: got 'fp8', which takes .* not vocab_size 50257; accepted: 'plain'",
        ),
        ({"loss": "embedding_mse"}, {"head": "fp8"}, "head: got 'fp8', which is for the loss 'cross_entropy'"),
        (
            {},
            {"linear": "fp8-all", "lora": LoraConfig(rank=8)},
            "got 'fp8-all' with lora, .*; accepted: 'fp8' or 'plain'",
        ),
        ({}, {"head": "fp8", "invariant": True}, "invariant: got True with head 'fp8'"),
        ({}, {"head": "fp8", "dtype": torch.float64}, "head: got 'fp8', which needs dtype bfloat16"),
        (
            {"qk_norm": True},
            {"linear": "fp8-all", "freeze": ("*.q.weight",)},
            "freeze: got some of q, k and v with linear",
        ),
        ({}, {"head": "int4"}, "head: got 'int4'; accepted: 'plain' or 'fp8'"),
    ],
)
@pytest.mark.usefixtures("on_cpu")
def test_options_that_float8_does_not_support_are_refused_by_name(
    change: dict[str, Any], engine: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Engine(replace(larger(CONFIG), **change), 2, 8, **{"dtype": torch.bfloat16} | engine)


def test_fp8_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(
        ValueError, match="linear: got 'fp8', which needs a CUDA device, not cpu; accepted: 'plain' here"
    ):
        Engine(CONFIG, 2, 8, dtype=torch.bfloat16, linear="fp8")
    with pytest.raises(ValueError, match="linear: got 'fp8', which needs dtype bfloat16"):
        Engine(CONFIG, 2, 8, dtype=torch.float32, linear="fp8")
    with pytest.raises(ValueError, match="linear: got 'int4'; accepted: 'plain', 'fp8', 'fp8-all'"):
        Engine(CONFIG, 2, 8, linear="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["linear", "head"])
def test_a_resumed_run_keeps_its_level_and_is_told_how_to_begin_another(key: str) -> None:
    run = run_from({"train": {"dtype": "bfloat16", key: "fp8"}}, "test")
    with pytest.raises(
        ValueError, match=rf"{key}: got 'plain'; accepted: the run's value, 'fp8', when .*export.*--init"
    ):
        resumed_with(run, {"train": {key: "plain"}})


@pytest.mark.usefixtures("on_cpu")
def test_jumps_are_in_the_log_and_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test half the magnitude of the previous step already counts as a jump, so every step has some."""
    monkeypatch.setattr(torch_ops, "JUMP", 0.5)
    (tmp_path / "text.txt").write_text("a line of text\n" * 200, encoding="utf-8")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16}
    short = {"steps": 5, "batch_size": 2, "seq_len": 16, "warmup_steps": 0, "log": "none", "checkpoint_interval": 0}
    run: dict[str, dict[str, Any]] = {
        "model": sizes,
        "train": {**short, "dtype": "bfloat16", "linear": "fp8-all", "head": "fp8"},
    }
    shown: list[str] = []

    def show(event: str, numbers: Any) -> None:
        if event == "float8":
            shown.append(str(_message(event, numbers)))

    tilegrad.train(run | {"data": {"files": [str(tmp_path / "text.txt")]}}, tmp_path / "run", show=show)
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [record for record in records if record["kind"] == "float8"]
    assert [record["step"] for record in found] == [3, 4, 5] and found[-1]["jumps"] > 10
    assert "blocks.0.ffn.up.gradient" in found[0]["tensors"] and "head.input" in found[0]["tensors"]
    assert len(shown) == 1 and shown[0].startswith("step      3  float8: the largest magnitude of ")


# ── several ranks ──

SMALL = replace(
    LLAMA, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, block_size=8, vocab_size=32
)  # heads of 16 columns


class Case(NamedTuple):
    shard: Shard
    linear: Linear
    head: HeadProducts
    micro_batches: int
    context: int = 1

    def engine(self, mesh: Mesh | None = None, **given: Any) -> Engine:
        how: dict[str, Any] = {
            "dtype": torch.bfloat16,
            "linear": self.linear,
            "head": self.head,
            "seed": 3,
            "eps": 1e-6,
        }
        if mesh is not None:
            how |= {"mesh": mesh, "shard": self.shard, "bucket_bytes": 5_000, "context": self.context}
        engine = Engine(SMALL, 2, 8, **{**how, **given})
        large = engine.params["wte.weight"].clone()
        large[0], large[0, 7] = 0.0, 9.0  # x is largest for token 0, which only empty micro-batches have
        write_param(engine, "wte.weight", large)
        return engine

    def step(self, engine: Engine) -> float:
        shorter = self.context == 1  # the padding of shorter sequences that ranks share counts too
        given = [batch(SMALL, 2, 8 - i * shorter, seed=10 * engine.steps + i) for i in range(self.micro_batches)]
        mesh = engine.ranks.mesh
        own = given[mesh.rank // self.context :: mesh.world // self.context] if mesh.world > 1 else given
        engine.arenas.poison()
        return engine.step([x.clamp(min=1) for x, _ in own], [y for _, y in own], 1e-2)


def distances(one: Engine, many: Engine, case: Case, steps: int) -> list[tuple[float, float, float]]:
    """(distance of loss and norm, of parameters, of scales) of ranks from one process that begins each step with the parameters
    of the ranks."""
    found = []
    for _ in range(steps):
        loss = case.step(one)
        params, worst = clones(one.params), abs(case.step(many) / loss - 1)
        now = many.params
        worst = max(worst, abs(float(many.optimizer.norm) / float(one.optimizer.norm) - 1))
        far = max(float((now[name] - p).norm() / p.norm()) for name, p in params.items())
        for name, p in one.params.items():
            p.copy_(now[name])
        states = one.ranks.scales
        scales = max(float(_apart(state, states[name])) for name, state in many.ranks.scales.items())
        found.append((worst, far, scales))
    return found


def _apart(state: Tensor, other: Tensor) -> Tensor:
    """The distance of the largest magnitudes, and of the scales that follow from those of the step before."""
    return ((state - other).abs() / other.clamp(min=1e-30)).max()


def parity(mesh: Mesh, case: Case) -> tuple[list[tuple[float, float, float]], int]:
    """In these runs half the magnitude of the previous step already counts as a jump, so every step has some."""
    with float8_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "JUMP", 0.5)
        one, many = case.engine(), case.engine(mesh)
        found = distances(one, many, case, 3)
        assert many.jumps == one.jumps != {} and many.arenas.nbytes == many.plan.peak_bytes
        assert (many.plan.peak_bytes < one.plan.peak_bytes) == (case.shard != "none")
        assert many.evaluate(*batch(SMALL, 2, 8)) == pytest.approx(one.evaluate(*batch(SMALL, 2, 8)), rel=2**-8)
        return found, mesh.entered


@pytest.mark.parametrize(
    "case",
    [
        Case("none", "fp8", "plain", 3),
        Case("optimizer", "fp8-all", "fp8", 1),
        Case("all", "fp8", "fp8", 3),
        Case("all", "fp8-all", "plain", 1),
        Case("optimizer", "plain", "fp8", 2, context=2),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_ranks_have_the_float8_scales_of_one_process(two_ranks: Ranks, case: Case) -> None:
    """With one micro-batch, one of the ranks has none. Ranks that share a sequence round other sums to bfloat16, and AdamW
    turns the sign of a gradient near 0 into a step."""
    (found, entered), (_, other) = two_ranks.run(parity, case)
    assert entered == other, "the lowest count is who the others wait for"
    limits = (1e-5, 1e-5, 0.0) if case.context == 1 else (2**-8, 2**-4, 2**-8)
    assert all(x <= limit for distances in found for x, limit in zip(distances, limits, strict=True)), found


def skipping(mesh: Mesh) -> list[float]:
    with float8_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "maximum", lambda _largest: None)
        case = Case("optimizer", "fp8-all", "fp8", 2)
        return [scales for *_, scales in distances(case.engine(), case.engine(mesh), case, 2)]


def test_canary_ranks_that_do_not_agree_on_the_scales_are_seen(two_ranks: Ranks) -> None:
    assert min(min(found) for found in two_ranks.run(skipping)) > 0.0


def resumed(mesh: Mesh, folder: str) -> None:
    """The same bits on ranks with the same shards; the same scales on ranks with others, and in one process."""
    case = Case("optimizer", "fp8-all", "fp8", 3)
    with float8_on_cpu():
        many = case.engine(mesh)
        case.step(many)
        path = save_pieces(Path(folder), many, mesh, {"engine": counters(many)})
        scales = clones(many.ranks.scales)
        case.step(many)
        for shard in ("optimizer", "all"):
            again = case._replace(shard=shard).engine(mesh, seed=4)
            restore_counters(again, load_pieces(path, again, mesh)["engine"])
            assert equal(again.ranks.scales, scales)
            case.step(again)
            assert (equal(again.params, many.params), shard) in ((True, "optimizer"), (False, "all"))
            assert shard == "all" or equal(again.ranks.scales, many.ranks.scales)
        one = case.engine()
        restore_counters(one, load_into(path, one.tensors()).state["engine"])
        assert equal(one.ranks.scales, scales)
        assert len(set(mesh.gather(digest(many.ranks.scales.values())))) == 1


def test_ranks_resume_in_float8_to_the_same_bits(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(resumed, str(tmp_path))


def refused(mesh: Mesh) -> list[str]:
    errors, case = [], Case("optimizer", "fp8", "plain", 1)
    with float8_on_cpu():
        with pytest.raises(RuntimeError) as error:
            case.engine(mesh).forward(*batch(SMALL, 2, 8))
        errors.append(str(error.value))
        for own in (
            case._replace(linear=("fp8", "fp8-all")[mesh.rank]),
            case._replace(head=("plain", "fp8")[mesh.rank]),
        ):
            with pytest.raises(ValueError) as disagreeing:
                own.engine(mesh)
            errors.append(str(disagreeing.value))
    return errors


def test_ranks_with_other_levels_or_a_forward_by_hand_are_refused(two_ranks: Ranks) -> None:
    errors = [
        "forward: got float8 with 2 ranks, which agree on the scales once a step; call gradients(tokens, targets)",
        "linear: got fp8-all on rank 1; accepted: the value of rank 0, fp8",
        "head: got fp8 on rank 1; accepted: the value of rank 0, plain",
    ]
    assert two_ranks.run(refused) == [errors] * 2
