"""Attacks on a training step: a NaN in the output of each op, which must reach no weight and no other sequence; a budget that
is one byte too small."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from support.models import CONFIG, LLAMA, batch
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.kernels.op import Call, observe

GPT = replace(CONFIG, n_layer=2, dropout=0.1)
SMALL = replace(LLAMA, n_layer=1)
LATE = ("guard", "adamw")  # guard decides whether the weights change, adamw writes them


class Spoiler:
    """An observer that runs each op and puts a NaN into the outputs of the op number `at`."""

    def __init__(self, at: int | None) -> None:
        self.at, self.names = at, list[str]()

    def __call__(self, call: Call) -> None:
        call.run()
        if len(self.names) == self.at and not call.name.startswith(LATE):
            for x in call.writes:
                if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
                    x.view(-1)[x.numel() // 2] = math.nan
        self.names.append(call.name)


def step(engine: Engine, config: ModelConfig, at: int | None) -> Spoiler:
    spoiler = Spoiler(at)
    tokens, targets = batch(config, 2, 8)
    with observe(spoiler):
        engine.step(tokens, targets, learning_rate=1e-3)
    return spoiler


@pytest.mark.parametrize(
    "config", [pytest.param(GPT, marks=pytest.mark.slow, id="gpt"), pytest.param(SMALL, id="llama")]
)
def test_a_nan_from_any_op_reaches_no_weight(config: ModelConfig) -> None:
    engine = Engine(config, 2, 8)
    names = step(engine, config, None).names
    left_out = 0
    for at, name in enumerate(names):
        if name.startswith(LATE):
            continue
        params = {key: x.clone() for key, x in engine.params.items()}
        moments = {key: x.clone() for key, x in engine.optimizer.tensors().items()}
        step(engine, config, at)
        same = all(torch.equal(engine.params[key], x) for key, x in params.items())
        assert all(bool(x.isfinite().all()) for x in engine.params.values()), f"{at}: {name}"
        kept = [key for key, x in engine.optimizer.tensors().items() if not torch.equal(x, moments[key])]
        assert not same or not [key for key in kept if moments[key].numel() > 1], f"{at}: {name}"
        left_out += same
        step(engine, config, None)
    assert left_out > 0.9 * sum(not name.startswith(LATE) for name in names)


class Neighbour(Spoiler):
    """The NaN goes into the second of two sequences. `arrived` is the gradient of the first one at the embedding."""

    spoilt = False

    def __call__(self, call: Call) -> None:
        if call.name == "embedding_bwd":
            self.arrived = next(x for x in call.reads if isinstance(x, Tensor) and x.is_floating_point()).clone()[:T]
        call.run()
        if len(self.names) == self.at:
            for x in call.writes:
                if isinstance(x, Tensor) and x.is_floating_point() and x.ndim and x.shape[0] in (2, 2 * T):
                    x[x.shape[0] // 2 :].view(-1)[:1] = math.nan
                    self.spoilt = True
        self.names.append(call.name)


T = 7


@pytest.mark.parametrize("config", [GPT, SMALL], ids=["gpt", "llama"])
def test_a_nan_from_any_op_stays_in_its_sequence(config: ModelConfig) -> None:
    """In the forward and backward of two sequences no value of one changes a bit of the other."""
    engine = Engine(config, 2, T)
    tokens, targets = batch(config, 2, T)

    def run(at: int | None) -> Neighbour:
        engine.draws, neighbour = 0, Neighbour(at)
        with observe(neighbour):
            engine.gradients(tokens, targets)
        return neighbour

    clean = run(None)
    assert bool(clean.arrived.isfinite().all()) and bool((clean.arrived != 0).any())
    spoilt = 0
    for at, name in enumerate(clean.names):
        found = run(at)
        assert torch.equal(found.arrived, clean.arrived), f"{at}: {name}"
        spoilt += found.spoilt
    assert spoilt > 0.7 * len(clean.names)


def test_a_budget_one_byte_below_the_least_is_refused_and_the_least_is_kept_to() -> None:
    with pytest.raises(ValueError, match="memory_budget: got 1 bytes; accepted: at least") as error:
        Engine(GPT, 2, 8, memory_budget=1)
    found = re.search(r"at least ([\d,]+)", str(error.value))
    assert found
    least = int(found[1].replace(",", ""))
    with pytest.raises(ValueError, match=f"memory_budget: got {least - 1:,}"):
        Engine(GPT, 2, 8, memory_budget=least - 1)
    assert Engine(GPT, 2, 8, memory_budget=least).plan.peak_bytes <= least
