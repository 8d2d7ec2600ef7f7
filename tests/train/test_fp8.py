"""An engine whose blocks multiply forward in float8; on a CPU by the kernel that checks the GPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import CONFIG, LLAMA, batch, clones, equal

from tilegrad import Engine, ModelConfig
from tilegrad.engine import batch as checks
from tilegrad.engine.planning import plan_model
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels import fp8_linear
from tilegrad.kernels.table import Table
from tilegrad.model.block import Recomputed
from tilegrad.model.layer import Linear
from tilegrad.model.lora import LoraConfig
from tilegrad.model.transformer import declare

LINEAR: tuple[Linear, ...] = ("fp8", "plain")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("fp8_linear", (replace(fp8_linear.FP8_LINEAR.rows[1], by_name_only=None),))
    monkeypatch.setattr(fp8_linear, "FP8_LINEAR", table)
    monkeypatch.setattr(checks, "FP8_LINEAR", table)


def larger(config: ModelConfig) -> ModelConfig:
    return replace(config, n_embd=64, block_size=32, vocab_size=64)


def engines(config: ModelConfig) -> tuple[Engine, Engine]:
    config = larger(config)
    return Engine(config, 4, 32, dtype=torch.bfloat16, linear="fp8"), Engine(config, 4, 32, dtype=torch.bfloat16)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_fp8_trains_as_well_as_bfloat16(config: ModelConfig) -> None:
    fp8, plain = engines(config)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    losses = [[e.step(tokens[:, :-1], tokens[:, 1:], 3e-3) for _ in range(30)] for e in (fp8, plain)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-2) and losses[0] != losses[1]
    assert losses[0][-1] < 0.7 * losses[0][0] and losses[0][-1] == pytest.approx(losses[1][-1], rel=0.1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_adapters_of_layers_in_fp8_are_added_as_in_bfloat16(config: ModelConfig) -> None:
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
def test_adapters_of_layers_in_fp8_join_no_product() -> None:
    config = larger(CONFIG)
    models = [declare(config, 4, 32, torch.bfloat16, "cuda", linear=how, lora=LoraConfig(rank=8)) for how in LINEAR]
    adapters = [model.blocks[0].attention.adapter for model in models]
    assert [None if adapter is None else adapter.joined is None for adapter in adapters] == [True, False]


@pytest.mark.usefixtures("on_cpu")
def test_fp8_scales_follow_the_last_step_and_are_in_the_checkpoint() -> None:
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
def test_fp8_with_a_budget_has_the_same_bits() -> None:
    """Recomputed products are those of the forward, because their scales are."""
    config = larger(CONFIG)
    blocks = (frozenset[Recomputed]({"block"}),) * config.n_layer
    least = plan_model(StepSpec(config, 4, 32, torch.bfloat16, torch.device("cpu"), blocks, linear="fp8")).peak_bytes
    roomy = Engine(config, 4, 32, dtype=torch.bfloat16, linear="fp8", memory_budget=1 << 30)
    tight = Engine(config, 4, 32, dtype=torch.bfloat16, linear="fp8", memory_budget=least)
    assert any("block" in choice for choice in tight.recompute)
    for i in range(3):
        losses = [e.step(*batch(config, 4, 32, seed=i), 1e-2) for e in (roomy, tight)]
        assert losses[0] == losses[1]
    assert equal(roomy.tensors(), tight.tensors())


def test_fp8_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(
        ValueError, match="linear: got 'fp8', which needs a CUDA device, not cpu; accepted: 'plain' here"
    ):
        Engine(CONFIG, 2, 8, dtype=torch.bfloat16, linear="fp8")
    with pytest.raises(ValueError, match="linear: got 'fp8', which needs dtype bfloat16"):
        Engine(CONFIG, 2, 8, dtype=torch.float32, linear="fp8")
    with pytest.raises(ValueError, match="linear: got 'int4'; accepted: 'plain' or 'fp8'"):
        Engine(CONFIG, 2, 8, linear="int4")  # type: ignore[arg-type]
