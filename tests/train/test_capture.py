"""The program of a device step, run op by op on a CPU: the inputs that it stages, its counts and its decisions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.models import CONFIG, LLAMA, SPEED_RUN, batch, clones, equal

from tilegrad import Engine, ModelConfig
from tilegrad.engine.batch import Batch
from tilegrad.engine.capture import DeviceStep, Staged
from tilegrad.engine.optimizer import MAX_SKIPPED

CPU = torch.device("cpu")
DROPOUT = replace(CONFIG, dropout=0.2)
STREAM: torch.cuda.Stream = None  # type: ignore[assignment]  # only a capture uses it


def device_step(engine: Engine, batches: list[Batch], learning_rate: float) -> DeviceStep:
    models = [engine._model(x.shape[0], x.shape[1], accumulate=i > 0) for i, (x, *_) in enumerate(batches)]
    step = DeviceStep(models, engine.optimizer, STREAM)
    seeds = [model.draw_seeds(engine.seed, engine.draws + i) for i, model in enumerate(models)]
    step.staged.load(batches, seeds, learning_rate, through=Staged.of(models, CPU))
    engine.draws += len(batches)
    return step


@pytest.mark.parametrize("config", [CONFIG, LLAMA, SPEED_RUN, DROPOUT], ids=["gpt", "llama", "speed run", "dropout"])
def test_the_program_of_a_device_step_trains_like_the_engine(config: ModelConfig) -> None:
    a, b = Engine(config, 2, 8), Engine(config, 2, 8)
    for i in range(4):
        batches = [Batch(*batch(config, 2, 8, seed=2 * i)), Batch(*batch(config, 1, 5, seed=2 * i + 1))]
        loss = a.step([x for x, *_ in batches], [y for _, y, _ in batches], (i + 1) / 128)
        step = device_step(b, batches, (i + 1) / 128)
        step.program()
        assert step.result[0].item() == pytest.approx(loss, rel=1e-6)
        assert step.result[1].item() == pytest.approx(float(a.optimizer.norm), rel=1e-6)
    assert equal(a.tensors(), b.tensors())


def test_each_window_and_each_shape_has_its_own_device_step() -> None:
    a, b = (Engine(DROPOUT, 2, 8, windows=(2, 5)) for _ in range(2))
    found = []
    for i, (window, t) in enumerate([(2, 4), (5, 8), (None, 8), (2, 4), (5, 8)]):
        given = Batch(*batch(DROPOUT, 2, t, seed=i))
        a.window = b.window = window
        loss = a.step(given.tokens, given.targets, 1 / 128)
        step = b._device_step(((2, t),), STREAM)
        seeds = [step.models[0].draw_seeds(b.seed, b.draws)]
        step.staged.load([given], seeds, 1 / 128, through=Staged.of(step.models, CPU))
        step.program()
        b.draws += 1
        assert step.result[0].item() == pytest.approx(loss, rel=1e-6)
        found.append(step)
    assert equal(a.tensors(), b.tensors())
    assert found[:2] == found[3:] and len({id(step) for step in found}) == 3


def test_only_tokens_and_the_inputs_from_the_host_are_staged() -> None:
    """Batches on a device are staged in two copies, which together write the whole buffer."""
    engine = Engine(DROPOUT, 2, 8, documents=3)
    models = [engine._model(b, t, accumulate=False) for b, t in ((2, 8), (1, 5))]
    batches = [Batch(*batch(DROPOUT, 2, 8), torch.tensor([0, 3, 8, 16]).int()), Batch(*batch(DROPOUT, 1, 5))]
    seeds = [model.draw_seeds(0, i) for i, model in enumerate(models)]
    whole, through, parts = (Staged.of(models, CPU) for _ in range(3))
    whole.load(batches, seeds, 1e-3, through=through)
    parts.buffer.fill_(-1)
    parts.write_tokens(batches)
    parts.from_host.copy_(through.from_host)
    assert torch.equal(parts.buffer, whole.buffer) and whole.learning_rate.item() == pytest.approx(1e-3)
    assert parts.tokens[1].equal(batches[1].tokens) and parts.seeds[1].tolist() == seeds[1]


def test_a_step_without_targets_has_zero_gradients() -> None:
    engine, (tokens, targets) = Engine(CONFIG, 2, 8), batch(CONFIG, 2, 8)
    step = device_step(engine, [Batch(tokens, torch.full_like(targets, -1))], 1e-2)
    step.program()
    assert step.result.tolist() == [0.0, 0.0, 0.0]  # loss, norm, jumps


def test_ten_skipped_steps_in_a_row_freeze_the_weights_until_the_host_releases_them() -> None:
    engine, given = Engine(CONFIG, 2, 8), batch(CONFIG, 2, 8)
    step = device_step(engine, [Batch(*given)], 1e-2)
    step.program()
    weight = engine.params["ln_f.weight"]
    weight[0] = math.nan
    for _ in range(MAX_SKIPPED):
        step.program()
        assert math.isnan(step.result[1].item())
    weight[0] = 1.0
    before = clones(engine.tensors())
    step.program()
    assert (
        math.isfinite(step.result[0].item()) and math.isnan(step.result[1].item()) and equal(before, engine.tensors())
    )
    engine.optimizer.in_a_row.zero_()
    step.program()
    assert math.isfinite(step.result[1].item()) and not equal(before, engine.tensors())


def test_results_arrive_once_and_in_order() -> None:
    engine, batches = Engine(CONFIG, 2, 8), [batch(CONFIG, 2, 8, seed=i) for i in range(3)]
    other = Engine(CONFIG, 2, 8)
    expected = [other.step(*given, 1e-2) for given in batches]
    for given in batches:
        engine.submit(*given, 1e-2)
    assert engine.steps == 3
    assert [result.loss for result in engine.finished(wait=True)] == expected and engine.finished() == []
