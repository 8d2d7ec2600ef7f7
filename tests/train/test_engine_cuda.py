"""The engine on a GPU: the same gradients, the memory of the plan, the same bits twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import CONFIG, LLAMA, assert_equal_gradients, batch

from tilegrad import Engine, ModelConfig
from tilegrad.model import reference as plain

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "config", [CONFIG, LLAMA, replace(CONFIG, projection="per_head", window=4, loss="embedding_mse")]
)
def test_gradients_equal_autograd_in_float64(config: ModelConfig) -> None:
    tokens, targets = batch(config, 3, 13)
    engine = Engine(config, 3, 13, device="cuda", dtype=torch.float64)
    loss = engine.gradients(tokens.cuda(), targets.cuda())
    params = {name: p.cpu() for name, p in engine.params.items()}
    expected, exact = plain.gradients(params, tokens, targets, config)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert_equal_gradients({name: g.cpu() for name, g in engine.grads.items()}, exact, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, LLAMA, replace(CONFIG, dropout=0.1)])
def test_it_trains_as_on_the_cpu(config: ModelConfig, dtype: torch.dtype) -> None:
    config = replace(config, n_embd=64, block_size=150)
    tokens, targets = batch(config, 4, 150, ignored=0.0)
    here, there = (Engine(config, 4, 150, device=device, dtype=dtype) for device in ("cpu", "cuda"))
    for b, t in ((4, 150), (2, 7), (3, 41), (4, 150)):
        x, y = tokens[:b, :t], targets[:b, :t]
        a = here.step(x, y, learning_rate=1e-3)
        assert there.step(x.cuda(), y.cuda(), learning_rate=1e-3) == pytest.approx(
            a, rel=2e-2 if dtype == torch.bfloat16 else 1e-4
        )


def test_allocated_bytes_are_the_plan_and_a_step_allocates_little() -> None:
    config = replace(CONFIG, n_embd=128, block_size=128, vocab_size=1000)
    tokens, targets = batch(config, 4, 128)
    tokens, targets = tokens.cuda(), targets.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    engine = Engine(config, 4, 128, device="cuda", dtype=torch.bfloat16)
    grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert grown == engine.plan.peak_bytes == engine.arenas.nbytes
    engine.step(tokens, targets, learning_rate=1e-3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.step(tokens, targets, learning_rate=1e-3)
    # the embedding's backward sorts its tokens: about 50 bytes for each
    assert torch.cuda.max_memory_allocated() - before <= 256 * tokens.numel()


@pytest.mark.parametrize("t", [16, 200])  # few rows go to triton
def test_the_same_bits_twice(t: int) -> None:
    config = replace(CONFIG, n_embd=64, block_size=200)
    tokens, targets = batch(config, 4, t)
    grads = []
    for _ in range(2):
        engine = Engine(config, 4, 200, device="cuda", dtype=torch.bfloat16)
        engine.gradients(tokens.cuda(), targets.cuda())
        grads.append({name: g.clone() for name, g in engine.grads.items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
