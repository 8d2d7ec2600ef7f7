"""Muon in plain torch, one matrix at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tilegrad.kernels.muon import COEFFICIENTS, MARGINS, MuonConfig


def singular_values(s: Tensor, name: str) -> Tensor:
    """The singular values of x after the five steps."""
    for a, b, c in COEFFICIENTS[name]:
        s = a * s + b * s**3 + c * s**5
    return s


def orthogonal(u: Tensor, name: str) -> Tensor:
    """U f(S) V' by the singular value decomposition."""
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    found: Tensor = left @ torch.diag(singular_values(s / (MARGINS[name] * s.norm() + 1e-7), name)) @ right
    return found


def muon_reference(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    muon: MuonConfig,
    *,
    learning_rate: float,
    weight_decay: float,
    clip: float = 1.0,
    t: int = 1,
) -> tuple[Tensor, Tensor]:
    """The new p and m of one matrix after update t."""
    g, momentum = g * clip, muon.momentum
    if muon.momentum_warmup:
        momentum = 0.85 + (momentum - 0.85) * min((t - 1) / muon.momentum_warmup, 1.0)
    m = momentum * m + (1 - momentum) * g
    u = momentum * m + (1 - momentum) * g if muon.nesterov else m
    rows, columns = p.shape
    factor = 0.2 * max(rows, columns) ** 0.5 if muon.scale == "rms" else max(1.0, rows / columns) ** 0.5
    o = factor * orthogonal(u, muon.orthogonalization)
    rate = learning_rate * muon.learning_rate_factor
    decayed = p * (p * o > 0) if muon.cautious else p
    return p - rate * weight_decay * decayed - rate * o, m
