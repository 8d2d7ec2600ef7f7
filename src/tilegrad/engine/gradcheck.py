"""Compares hand-derived gradients `a` with float64 central differences `n`.

    n = (loss(w + ε) − loss(w − ε)) / 2ε    for up to 64 entries of a tensor w, one at a time, and for one random direction

The relative error of a tensor is max|a − n| / max(max|a|, max|n|, 1e-6 · the largest gradient of all tensors). A tensor fails
if this error, or the relative error along the direction, is above 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels.attention import reference
from ..kernels.attention.api import attention_bwd, attention_fwd, attention_workspace
from ..kernels.attention.mask import Mask
from ..kernels.scratch import new_scratch
from ..model import reference as reference_model
from ..model.config import ModelConfig
from ..text.table import table
from .engine import Engine

EPSILON = 1e-6
LIMIT = 1e-5
SAMPLES = 64


@dataclass(frozen=True, slots=True)
class GradientError:
    """The errors of one tensor's gradient, in `checked` entries and along a direction. `worst` has the largest error."""

    tensor: str
    shape: tuple[int, ...]
    checked: int
    relative_error: float
    direction_error: float
    worst: tuple[int, ...]

    @property
    def passed(self) -> bool:
        return self.relative_error <= LIMIT and self.direction_error <= LIMIT


def check_gradients(
    loss: Callable[[], float], tensors: Mapping[str, Tensor], gradients: Mapping[str, Tensor], seed: int = 0
) -> list[GradientError]:
    """Compare central differences of `loss` with `gradients`. The float64 `tensors` are changed in place and restored."""
    generator = torch.Generator().manual_seed(seed)
    largest = max(float(g.abs().max()) for g in gradients.values())
    results = []
    for name, x in tensors.items():
        if x.dtype != torch.float64:
            raise ValueError(f"tensors[{name!r}]: got {x.dtype}; accepted: float64, for central differences")
        gradient = gradients[name]
        picked = torch.randperm(x.numel(), generator=generator)[:SAMPLES].tolist()
        where = [tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)) for flat in picked]
        slopes = []
        for index in where:
            one = torch.zeros_like(x)
            one[index] = 1.0
            slopes.append(_slope_along(loss, x, one))
        explicit = [gradient[index].item() for index in where]
        errors = [abs(a - n) for a, n in zip(explicit, slopes, strict=True)]
        scale = max(*map(abs, explicit), *map(abs, slopes), 1e-6 * largest)
        worst = max(range(len(errors)), key=lambda i: errors[i] if math.isfinite(errors[i]) else math.inf)
        direction = torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
        along, expected = _slope_along(loss, x, direction), float((gradient * direction).sum())
        results.append(
            GradientError(
                tensor=name,
                shape=tuple(x.shape),
                checked=len(where),
                relative_error=errors[worst] / scale,
                direction_error=abs(along - expected) / max(abs(along), abs(expected), 1e-6 * largest),
                worst=where[worst],
            )
        )
    return results


def _slope_along(loss: Callable[[], float], x: Tensor, direction: Tensor) -> float:
    """(loss(x + ε · direction) − loss(x − ε · direction)) / 2ε"""
    original = x.clone()
    x.add_(direction, alpha=EPSILON)
    up = loss()
    x.copy_(original).sub_(direction, alpha=EPSILON)
    down = loss()
    x.copy_(original)
    return (up - down) / (2 * EPSILON)


def gradient_table(results: list[GradientError]) -> str:
    rows = [
        (
            r.tensor,
            "×".join(map(str, r.shape)),
            r.checked,
            f"{r.relative_error:.1e}",
            f"{r.direction_error:.1e}",
            str(list(r.worst)),
            "pass" if r.passed else "FAIL",
        )
        for r in results
    ]
    return table(("tensor", "shape", "entries", "relative error", "along a direction", "worst at", ""), rows)


def check_attention(kernel: str | None = None) -> list[GradientError]:
    """Check the gradients of q, k, v, bias and sinks through o and lse. Rows and columns span at least two tiles each."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = randn(1, 2, 270, 4), randn(1, 1, 300, 4), randn(1, 1, 300, 3)
    bias, sinks = randn(2, 1, 300), randn(2)
    do, dlse = randn(1, 2, 270, 3), randn(1, 2, 270)
    mask = Mask(causal=True, window=(280, None), softcap=5.0, bias=bias, sinks=sinks)

    def loss() -> float:
        o, lse = reference.forward(q, k, v, mask)
        return float((o * do).sum() + (lse * dlse).sum())

    def scratch(*, backward: bool) -> dict[str, Tensor]:
        shapes = attention_workspace(q, k, v, mask, backward=backward, kernel=kernel)
        return new_scratch(shapes, q.device)

    o, lse = torch.empty_like(do), torch.empty_like(dlse)
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch(backward=False), kernel=kernel)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    grads = {name: torch.zeros_like(x) for name, x in tensors.items()}
    dq, dk, dv, dbias, dsinks = grads.values()
    reads = q, k, v, o, lse, do, dlse, mask
    space = scratch(backward=True)
    attention_bwd(*reads, dq=dq, dk=dk, dv=dv, dbias=dbias, dsinks=dsinks, scratch=space, kernel=kernel)
    return check_gradients(loss, tensors, grads)


def small(config: ModelConfig) -> ModelConfig:
    """A model with the same kinds of layers and few channels, so that every tensor can be checked in seconds."""
    return replace(
        config,
        vocab_size=29,
        block_size=12,
        n_layer=2,
        n_embd=4 * config.n_head,
        ffn_dim=24,
        window=None if config.window is None else min(config.window, 5),
        dropout=0.0,
        head_size=None if config.head_size is None else 6,
        window_layers=None if config.window_layers is None else tuple(i for i in config.window_layers if i < 2),
    )


def check_model(config: ModelConfig, *, against: str = "differences", seed: int = 0) -> list[GradientError]:
    """Check every parameter of a small model of this kind in float64: up to 64 entries against central differences, or all
    entries against autograd."""
    config = small(config)
    engine = Engine(config, 2, 9, dtype=torch.float64, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for p in engine.params.values():  # many gradients nearly vanish at the initial values
        p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=0.2)
    tokens, targets = (torch.randint(0, config.vocab_size, (2, 9), generator=generator) for _ in range(2))
    targets[0, 3] = -1
    engine.gradients(tokens, targets)
    gradients = {name: g.clone() for name, g in engine.grads.items()}
    if against == "differences":
        return check_gradients(lambda: engine.forward(tokens, targets), engine.params, gradients, seed)
    _, exact = reference_model.gradients(engine.params, tokens, targets, config)
    largest = max(float(g.abs().max()) for g in exact.values())
    results = []
    for name, n in exact.items():
        a, error = gradients[name], (gradients[name] - n).abs()
        scale = max(float(a.abs().max()), float(n.abs().max()), 1e-6 * largest)
        worst = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        results.append(GradientError(name, tuple(n.shape), n.numel(), float(error.max()) / scale, 0.0, worst))
    return results
