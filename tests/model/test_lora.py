"""Adapters and frozen parameters: gradients against autograd, their bytes in a plan, and that frozen bits never change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from support.models import (
    CONFIG,
    LLAMA,
    QWEN3,
    SPEED_RUN,
    assert_equal_gradients,
    batch,
    clones,
    equal,
    run_as_traced,
    set_batch,
)
from support.pairwise import covering
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine import engine as engine_module
from tilegrad.engine.optimizer import Optimizer
from tilegrad.engine.planning import plan_model, step_report
from tilegrad.engine.spec import Recompute, StepSpec
from tilegrad.kernels.dropout import dropout_fwd, dropout_workspace
from tilegrad.kernels.op import observe
from tilegrad.kernels.scratch import new_scratch
from tilegrad.memory.planned.arena import Arenas, MemoryPlan, poison_dead
from tilegrad.memory.planned.trace import bind, handles
from tilegrad.model import reference
from tilegrad.model.block import Recomputed
from tilegrad.model.lora import LoraConfig, adapter_parts
from tilegrad.training.generation import draw

CPU = torch.device("cpu")
ORDER = ("attn.in", "attn.proj", "ffn.in", "ffn.down")
AXES: dict[str, tuple[object, ...]] = {
    "attention": ("qkv", "rope", "rope, qk_norm", "per_head", "rope, per_head", "qk_norm"),
    "activation": ("gelu", "swiglu"),
    "ffn_dim": (10, 64),
    "norm": ("layernorm", "rmsnorm"),
    "bias": (False, True),
    "head": ("tied", "untied", "embedding_mse"),
    "layers": ("all", "attention", "ffn", ("proj", "down"), ("v", "gate"), ("qkv", "up")),
    "rank": (1, 3),
    "dropout": (0.0, 0.3),
    "freeze": ((), ("blocks.0.*",), ("*.lora_a",), ("*.lora_b",)),
    "recompute": ((), ("norm",), ("activation",), ("norm", "activation"), ("block",)),
}


def allowed(spec: dict[str, Any]) -> bool:
    names, attention = spec.get("layers", "all"), spec.get("attention")
    fused = ("v" in names and attention == "qkv") or ("qkv" in names and attention not in ("qkv", None))
    return isinstance(names, str) or not (fused or ("gate" in names and spec.get("activation") == "gelu"))


def config_of(spec: dict[str, Any]) -> ModelConfig:
    attention, head = spec["attention"], spec["head"]
    return replace(
        CONFIG, n_layer=2, n_kv_head=None if "per_head" in attention else 2,
        position="rope" if "rope" in attention else "learned", qk_norm="qk_norm" in attention,
        projection="per_head" if "per_head" in attention else "dense", tie_embeddings=head != "untied",
        loss="embedding_mse" if head == "embedding_mse" else "cross_entropy",
        **{name: spec[name] for name in ("activation", "ffn_dim", "norm", "bias")},
    )  # fmt: skip


def moved(engine: Engine, seed: int = 0) -> Engine:
    """Moves all parameters away from their initial values, because A's gradient is 0 where B = 0."""
    generator = torch.Generator().manual_seed(seed)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.dtype), alpha=0.2)
    return engine


def always(choice: Recompute) -> Callable[[StepSpec, int | None], tuple[Recompute, MemoryPlan]]:
    """`choose_recompute` with one choice."""
    return lambda spec, _budget: (choice, plan_model(replace(spec, recompute=choice)))


def autograd(engine: Engine, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss, exact = reference.gradients(engine.params, tokens, targets, engine.config, engine.spec.lora)
    return loss, {name: g for name, g in exact.items() if name in engine.grads}


SPECS = covering(AXES, allowed)


@pytest.mark.parametrize("spec", SPECS, ids=map(str, range(len(SPECS))))
def test_gradients_equal_autograd(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks of adapters' dropout are drawn outside the engine. After that a step changes no frozen bit."""
    config, p = config_of(spec), spec["dropout"]
    lora = LoraConfig(spec["rank"], 2.5, spec["layers"], p)
    choice = (frozenset(spec["recompute"]),) * config.n_layer
    monkeypatch.setattr(engine_module, "choose_recompute", always(choice))
    engine = moved(Engine(config, 3, 16, dtype=torch.float64, seed=3, lora=lora, freeze=list(spec["freeze"])))
    tokens, targets = batch(config, 3, 16)
    frozen = clones({name: x for name, x in engine.params.items() if name not in engine.grads})
    seeds, low_rank = engine._model(3, 16).draw_seeds(engine.seed, 0), reference.low_rank

    def dropped(q: Any, i: int, name: str, x: Tensor, c: ModelConfig, of: LoraConfig | None) -> dict[str, Tensor]:
        counter = 2 * c.n_layer + 1 + 4 * i + ORDER.index(name)
        return low_rank(q, i, name, masked(x, seeds[i], p, counter) if p else x, c, of)

    loss = engine.gradients(tokens, targets)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "low_rank", dropped)
        expected, exact = autograd(engine, tokens, targets)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert_equal_gradients(engine.grads, exact, 1e-12)
    engine.optimizer_step(1e-2)
    assert equal(frozen, {name: engine.params[name] for name in frozen})
    assert {name.rsplit(".", 1)[1] for name in engine.grads} <= {"lora_a", "lora_b"}
    expected = reference.loss(engine.params, tokens, targets, config, lora)
    assert engine.evaluate(tokens, targets) == pytest.approx(expected.item(), rel=1e-12)


def masked(x: Tensor, seed: int, p: float, counter: int) -> Tensor:
    rows = torch.ones_like(x.detach()).flatten(0, -2)
    dropout_fwd(rows, seed, p, counter, y=rows, scratch=new_scratch(dropout_workspace(rows), rows.device))
    return x * rows.view_as(x)


FREEZES: tuple[tuple[str, ...], ...] = (
    ("wte.*",),
    ("blocks.0.*", "wte.*", "wpe.*"),
    ("*.bias",),
    ("*.weight",),
    ("*.up_gate.bias", "*.proj.weight", "*.ln1.*"),
    ("blocks.*",),
    ("blocks.*", "wte.*", "wpe.*", "ln_f.*"),
    ("*.up*", "*.q.weight", "*.q_norm.*"),
    ("*.scalars.x", "*.ln?.*", "*.value_embedding.weight"),
    ("wte.*", "wpe.*", "blocks.0.*", "*.scalars.x0", "*.value_embedding.scalar"),
)


FREEZE_CONFIGS = {
    "gated": replace(CONFIG, n_layer=2, activation="swiglu", tie_embeddings=False),
    "dropout": replace(CONFIG, n_layer=2, dropout=0.2),
    "qwen3": replace(QWEN3, bias=True),
    "speed run": SPEED_RUN,
}
RECOMPUTE: tuple[tuple[Any, ...], ...] = ((), ("norm", "activation"), ("block",))


@functools.cache
def gradients_of_all(name: str) -> tuple[float, dict[str, Tensor]]:
    config = FREEZE_CONFIGS[name]
    engine = moved(Engine(config, 3, 16, dtype=torch.float64, seed=3))
    return engine.gradients(*batch(config, 3, 16)), engine.grads


@pytest.mark.parametrize(("freeze", "number"), [(freeze, n) for n, freeze in enumerate(FREEZES)], ids=str)
def test_freezing_does_not_change_the_other_gradients(
    freeze: tuple[str, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0
    for i, (name, config) in enumerate(FREEZE_CONFIGS.items()):
        choice = (frozenset(RECOMPUTE[(number + i) % 3]),) * config.n_layer
        loss, exact = gradients_of_all(name)
        wanted = [pattern for pattern in freeze if any(fnmatchcase(each, pattern) for each in exact)]
        if all(any(fnmatchcase(each, pattern) for pattern in wanted) for each in exact):
            continue
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "choose_recompute", always(choice))
            frozen = moved(Engine(config, 3, 16, dtype=torch.float64, seed=3, freeze=wanted))
        before = clones({each: x for each, x in frozen.params.items() if each not in frozen.grads})
        assert set(before) == {each for each in exact if any(fnmatchcase(each, pattern) for pattern in wanted)}
        assert frozen.gradients(*batch(config, 3, 16)) == loss
        assert_equal_gradients(frozen.grads, {each: exact[each] for each in frozen.grads}, 1e-12)
        frozen.optimizer_step(1e-2)
        assert equal(before, {each: frozen.params[each] for each in before})
        tried += 1
    assert tried


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_frozen_parameter_needs_memory_only_for_its_value(dtype: torch.dtype, device: str) -> None:
    """It compares the bytes of each role. Planning for a GPU needs no GPU."""
    lora, config = LoraConfig(4, 8), replace(LLAMA, n_embd=64, vocab_size=128)
    spec = StepSpec(config, 2, 16, dtype, torch.device(device), lora=lora)
    model = spec.declare()
    adapters = [name for name in model.params if name.endswith(("lora_a", "lora_b"))]
    base = {name: p.value for name, p in model.params.items() if name not in adapters}
    size = 2 if dtype == torch.bfloat16 and device == "cuda" else 4
    rounded = dtype == torch.bfloat16 and device == "cuda"
    room = 128 if device == "cuda" else 16  # lengths of buffers are rounded up to a multiple of this

    def elements(shapes: list[tuple[int, ...]]) -> int:
        return sum(-(-math.prod(shape) // room) * room for shape in shapes)

    arenas, trained = plan_model(spec).arenas, elements([model.params[name].value.shape for name in adapters])
    assert arenas["frozen"].arena_bytes == elements([x.shape for x in base.values()]) * size
    assert arenas["grads"].arena_bytes == 4 * trained
    assert arenas["params"].arena_bytes == (6 if rounded else 4) * trained
    assert 8 * trained <= arenas["optimizer"].arena_bytes <= 8 * trained + 2048
    report = step_report(plan_model(spec), spec, "adapters")
    assert [row.name for row in report.roles] == ["params", "frozen", "grads", "optimizer", "inputs", "activations"]
    assert "frozen" in report.table() and "frozen" in report.html()


def test_activations_that_only_the_gradient_of_a_frozen_weight_needs_are_not_saved() -> None:
    """Only the weight gradients of the next layers read the output of a norm. The peaks are at other ops, so one of the twelve
    may be missing from the difference."""
    spec = StepSpec(replace(LLAMA, n_layer=6), 8, 16, torch.float32, CPU)
    arenas = [
        plan_model(replace(spec, freeze=freeze)).arenas["activations"].arena_bytes
        for freeze in ((), ("*.qkv.weight", "*.up*.weight"), ("blocks.*", "wte.*"))
    ]
    assert arenas[0] - arenas[1] >= (2 * 6 - 1) * 8 * 16 * 16 * 4 and arenas[1] > 2 * arenas[2]


def test_merged_weights_give_the_same_model() -> None:
    for config in (LLAMA, replace(CONFIG, activation="swiglu"), QWEN3):
        lora = LoraConfig(3, 7.5)
        engine = moved(Engine(config, 2, 9, dtype=torch.float64, lora=lora))
        tokens, targets = batch(config, 2, 9)
        merged = {name: x.clone() for name, x in engine.params.items() if not name.endswith(("lora_a", "lora_b"))}
        for i in range(config.n_layer):
            for adapter in adapter_parts(config, lora):
                rows = engine.params[adapter.a_name(i)].split(lora.rank)
                for (part, width), a in zip(adapter.widths.items(), rows, strict=True):
                    name = f"blocks.{i}.{adapter.name.split('.')[0]}.{part}.weight"
                    start = 0
                    if name not in merged:
                        order = ["up", "gate"] if part in ("up", "gate") else ["q", "k", "v"]
                        name = name.replace(f".{part}.", ".up_gate." if "up" in order else ".qkv.")
                        start = sum(adapter.widths[before] for before in order[: order.index(part)])
                    merged[name][start : start + width] += lora.scale * engine.params[adapter.b_name(i, part)] @ a
        plain = Engine(config, 2, 9, dtype=torch.float64)
        for name, p in plain.params.items():
            p.copy_(merged[name])
        assert engine.evaluate(tokens, targets) == pytest.approx(plain.evaluate(tokens, targets), rel=1e-12)
        prompt, text = [1, 2, 3], 6
        assert list(draw(config, engine.params, prompt, text, temperature=0.0, lora=lora)) == list(
            draw(config, merged, prompt, text, temperature=0.0)
        )
        for wrong in (None, LoraConfig(3, 7.5, "attention"), LoraConfig(2, 7.5)):
            with pytest.raises(
                ValueError,
                match=r"^params: got .*lora_[ab](, an adapter that `lora` does not name)?; accepted: ",
            ):
                list(draw(config, engine.params, prompt, 1, lora=wrong))
        with pytest.raises(ValueError, match=r"^params: got none for blocks\.0\..*lora_[ab]; accepted: \("):
            list(draw(config, merged, prompt, 1, lora=lora))


@pytest.mark.parametrize(
    ("dropout", "recompute"), [(0.3, ()), (0.0, ("norm", "activation")), (0.3, ("block",))], ids=str
)
def test_sharing_memory_and_poison_change_no_bit(dropout: float, recompute: tuple[Any, ...]) -> None:
    config, lora = replace(LLAMA, n_layer=2), LoraConfig(3, 8, dropout=dropout)
    tokens, targets = batch(config, 3, 16)
    results = []
    spec = StepSpec(config, 3, 16, torch.float32, CPU, (frozenset(recompute),) * 2, lora=lora)
    for share, poisoned in ((True, False), (False, False), (True, True)):
        arenas, declared = Arenas(plan_model(spec, share=share)), spec.declare()
        model, optimizer = bind((declared, Optimizer.declare(declared.trained)), arenas.view)
        model.initialise(config, torch.Generator().manual_seed(0))
        for p in model.trained:
            p.master.add_(0.01)
        set_batch(model, tokens, targets)
        if poisoned:
            arenas.poison()
        with poison_dead(arenas, observe) if poisoned else nullcontext():
            run_as_traced(model, optimizer)
        results.append(
            clones({f"d {p.name}": p.grad for p in model.trained if p.grad is not None} | optimizer.tensors())
        )
        assert optimizer.norm > 0
    assert equal(results[0], results[1]) and equal(results[0], results[2])
    assert all(g.isfinite().all() for g in results[2].values())


def test_micro_batches_and_budgets_give_the_same_gradients() -> None:
    lora, config = LoraConfig(4, 8), replace(LLAMA, n_embd=32, vocab_size=64)
    tokens, targets = batch(config, 4, 16)
    whole = moved(Engine(config, 4, 16, dtype=torch.float64, lora=lora))
    whole.gradients(tokens, targets)
    split = moved(Engine(config, 2, 16, dtype=torch.float64, lora=lora))
    split.gradients([tokens[:1], tokens[1:2], tokens[2:]], [targets[:1], targets[1:2], targets[2:]])
    assert_equal_gradients(split.grads, whole.grads, 1e-12)
    block: frozenset[Recomputed] = frozenset({"block"})
    spec = StepSpec(config, 4, 16, torch.float64, CPU, (block,) * 3, lora=lora)
    tight = moved(
        Engine(config, 4, 16, dtype=torch.float64, lora=lora, memory_budget=plan_model(spec).peak_bytes + 4096)
    )
    assert tight.plan.peak_bytes < whole.plan.peak_bytes and any("block" in each for each in tight.recompute)
    tight.gradients(tokens, targets)
    assert equal(tight.grads, whole.grads)


def test_adapters_start_as_in_peft_and_do_not_change_the_base_model() -> None:
    lora = LoraConfig(4, 8)
    plain, engine = Engine(LLAMA, 1, 4, seed=5), Engine(LLAMA, 1, 4, seed=5, lora=lora)
    assert all(torch.equal(x, engine.params[name]) for name, x in plain.params.items())
    for name, x in engine.params.items():
        if name.endswith("lora_b"):
            assert not x.any()
        elif name.endswith("lora_a"):
            bound = 1 / math.sqrt(x.shape[1])
            assert 0.9 * bound < float(x.abs().max()) <= bound and abs(float(x.mean())) < 0.2 * bound
    assert set(engine.tensors()) == {kind + name for name in engine.grads for kind in ("", "m.", "v.")} | {"adam_step"}
    assert set(engine.grads) < set(engine.params)


def test_a_run_of_steps_learns_with_every_dtype() -> None:
    tokens, targets = batch(LLAMA, 2, 16, ignored=0.0)
    losses = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        engine = Engine(LLAMA, 2, 16, dtype=dtype, seed=1, lora=LoraConfig(8, 16))
        losses[dtype] = [engine.step(tokens, targets, 2e-2) for _ in range(20)]
        assert losses[dtype][-1] < losses[dtype][0] - 0.15
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):  # later, AdamW amplifies roundings
        assert losses[dtype][:5] == pytest.approx(losses[torch.float64][:5], rel=limit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 0}, "lora.rank: got 0; accepted: an int ≥ 1"),
        ({"rank": True}, "lora.rank: got True; accepted: an int ≥ 1"),
        ({"alpha": 0}, "lora.alpha: got 0; accepted: a number > 0"),
        ({"alpha": math.inf}, "lora.alpha: got inf; accepted: a finite number"),
        ({"dropout": 1.0}, "lora.dropout: got 1.0; accepted: a number, 0 ≤ dropout < 1"),
        ({"layers": "atention"}, "lora.layers: got 'atention' .did you mean 'attention'"),
        ({"layers": ()}, "lora.layers: got .*accepted: 'all', 'attention', 'ffn', or names out of q, k, v"),
        ({"layers": ("q", "q")}, "lora.layers: got .*accepted: each name once"),
        ({"layers": ("q", "o_proj")}, "lora.layers: got 'o_proj'"),
        ({"layers": 3}, "lora.layers: got 3"),
    ],
)
def test_a_bad_lora_config_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**given)


def test_parameters_that_cannot_be_adapted_or_frozen_are_refused() -> None:
    def refused(message: str, config: ModelConfig = LLAMA, **how: Any) -> None:
        with pytest.raises(ValueError, match=message):
            Engine(config, 1, 4, **how)

    refused(
        "lora.layers: got 'qkv', which this model does not have; accepted: q, k, v, proj",
        lora=LoraConfig(layers=("qkv",)),
    )
    refused("lora.layers: got 'gate'", CONFIG, lora=LoraConfig(layers=("gate",)))
    refused("lora: got 16; accepted: None or a LoraConfig", lora=16)
    refused("freeze: got 'wpe.weight', which no parameter matches.*accepted: names or patterns", freeze=["wpe.weight"])
    refused("freeze: got 'wte', which no parameter matches", freeze=("wte",))
    refused("freeze: got '[*]', which freeze every parameter", freeze=("*",))
    refused("freeze: got .*which freeze every parameter", lora=LoraConfig(), freeze=("*.lora_a", "*.lora_b"))
    refused("freeze: got 'wte.[*]'; accepted: a sequence of patterns", freeze="wte.*")
    with pytest.raises(ValueError, match="shard: got 'all' with frozen parameters"):
        plan_model(StepSpec(LLAMA, 1, 4, torch.float32, CPU, world=2, shard="all", lora=LoraConfig()))
    with pytest.raises(ValueError, match=r"lora.dropout: got 0.1 with context 2"):
        plan_model(StepSpec(LLAMA, 1, 16, torch.float32, CPU, world=2, context=2, lora=LoraConfig(dropout=0.1)))


@pytest.mark.usefixtures("on_hopper")
def test_every_smaller_batch_has_its_buffers_on_a_gpu() -> None:
    """A smaller batch also runs the same ops, as several ranks need. Some products are joined and some are not."""
    config, cuda = replace(LLAMA, n_embd=64, block_size=150), torch.device("cuda")
    spec = StepSpec(config, 3, 150, torch.bfloat16, cuda, lora=LoraConfig(8, 16, dropout=0.1))
    planned, seen = plan_model(spec).trace.handles, set[tuple[bool, tuple[str, ...]]]()
    for t in (1, 15, 48, 150):
        for training in (True, False):
            calls: list[Any] = []
            model = spec.declare(None, 3, t, training=training)
            with observe(calls.append):
                model.step() if training else model.forward()
            used = {x.name: x.nbytes for call in calls for x in handles((call.reads, call.writes))}
            assert all(nbytes <= planned[name].nbytes for name, nbytes in used.items())
            seen.add((training, tuple(call.name for call in calls)))
    assert len(seen) == 2 and all({"joined_linear_fwd", "low_rank_linear_fwd"} <= set(names) for _, names in seen)
