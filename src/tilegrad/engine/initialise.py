"""The initial values of an engine's parameters, which are the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..model.transformer import Transformer
from .parallel import check_agreed, digest
from .parallel.alone import Alone
from .spec import StepSpec


def initialise(model: Transformer, ranks: Alone, spec: StepSpec, seed: int, *, masters: bool) -> None:
    """Set `ranks.params` and `ranks.trained`, and draw the initial values. masters: whether this rank has all master weights;
    otherwise it has slices of them."""
    ranks.params = {name: p.master if masters else p.value for name, p in model.params.items()}
    ranks.trained = {p.name: ranks.params[p.name] for p in model.trained}
    ranks.optimizer.set_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    if masters:
        model.initialise(spec.config, generator)
    else:
        model.fill_tables(spec.config)
    if spec.world > 1:
        drawn = ranks.params.values() if masters else _draw(model, ranks, generator)
        check_agreed(ranks.mesh, {"initial weights": digest(drawn)})


def _draw(model: Transformer, ranks: Alone, generator: torch.Generator) -> Iterator[Tensor]:
    """Draw each whole parameter, write the part that this rank keeps, and yield the whole parameter."""
    for p in model.in_draw_order:
        value = torch.empty(p.value.shape)
        p.init.fill(value, generator)
        ranks.write_param(p.name, value)
        yield value
