"""The losses of 500 steps with Muon, next to autograd with torch.optim.Muon and torch.optim.AdamW."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.loss_curves import distance
from tilegrad import Engine, ModelConfig, MuonConfig
from tilegrad.data.documents import default_text
from tilegrad.model import reference
from tilegrad.training.schedule import learning_rate

STEPS, BATCH, LENGTH = 500, 8, 64
RATE, MATRIX_RATE = 3e-3, 0.02
CONFIG = ModelConfig(vocab_size=256, block_size=LENGTH, n_layer=2, n_head=2, n_embd=64)


def windows(seed: int) -> Iterator[Tensor]:
    """The same windows of the bundled text for both contenders, (BATCH, LENGTH + 1) bytes."""
    text = torch.tensor([*default_text().read_bytes()[:-20_000]])
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(STEPS):
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH + 1)]


def rate(step: int, peak: float) -> float:
    return learning_rate(step, peak=peak, floor=peak / 10, warmup_steps=25, total_steps=STEPS)


def losses_of_ours(seed: int) -> tuple[dict[str, Tensor], list[float]]:
    """The initial parameters, and the loss of each step."""
    engine = Engine(CONFIG, BATCH, LENGTH, seed=seed, muon=MuonConfig(learning_rate_factor=MATRIX_RATE / RATE))
    params = {name: x.clone() for name, x in engine.params.items()}
    losses = [engine.step(x[:, :-1], x[:, 1:], rate(i, RATE)) for i, x in enumerate(windows(seed))]
    return params, losses


def losses_of_torch(params: dict[str, Tensor], seed: int) -> list[float]:
    """q, k and v are matrices of their own, because torch's Muon updates a parameter as one matrix."""
    leaves: dict[str, nn.Parameter] = {}
    for name, x in params.items():
        parts = x.chunk(3) if name.endswith("qkv.weight") else [x]
        leaves |= {f"{name}.{i}": nn.Parameter(part.clone()) for i, part in enumerate(parts)}
    matrices = [x for name, x in leaves.items() if name.startswith("blocks.") and x.ndim == 2]
    rest = [x for name, x in leaves.items() if not (name.startswith("blocks.") and x.ndim == 2)]
    muon = torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original")
    groups = [
        {"params": [x for x in rest if x.ndim > 1], "weight_decay": 0.1},
        {"params": [x for x in rest if x.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    losses = []
    for i, x in enumerate(windows(seed)):
        joined = {
            name: torch.cat([p for leaf, p in leaves.items() if leaf.rpartition(".")[0] == name]) for name in params
        }
        loss = reference.loss(joined, x[:, :-1], x[:, 1:], CONFIG)
        loss.backward()
        nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        for optimizer, peak in ((muon, MATRIX_RATE), (adamw, RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate(i, peak)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_500_steps_have_the_losses_of_torchs_muon() -> None:
    """The two differ by less than two seeds: torch multiplies in bfloat16."""
    curves = []
    for seed in (0, 1):
        params, ours = losses_of_ours(seed)
        curves.append((ours, losses_of_torch(params, seed)))
    spread = distance(curves[0][1], curves[1][1])
    gaps = [distance(ours, theirs) for ours, theirs in curves]
    assert max(gaps) < spread / 4, (gaps, spread)
