"""context=n: n neighbouring ranks share each sequence. All of them get the whole micro-batch, and each computes its rows.

kernels/attention/context.py gathers K and V, and defines the rows of each rank. Everything else in the model works row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.attention.context import Ranks, positions_of
from ...kernels.checks import is_count
from ...model.config import ModelConfig
from ..batch import Batch


def check_context(config: ModelConfig, seq_len: int, world: int, context: int) -> None:
    if not is_count(context) or world % context:
        raise ValueError(f"context: got {context!r}; accepted: a divisor of {world}, the number of ranks")
    if context == 1:
        return
    if seq_len % (2 * context):
        raise ValueError(f"seq_len: got {seq_len} with context {context}; accepted: a multiple of {2 * context}")
    for name, accepted in (("dropout", 0.0), ("position", "rope"), ("projection", "dense")):
        got = getattr(config, name)
        if got != accepted:
            raise ValueError(f"{name}: got {got!r} with context {context}; accepted: {accepted!r}")


def own_rows(ranks: Ranks, tokens: Tensor, targets: Tensor) -> Batch:
    """The two ranges of positions of each sequence that this rank computes. Sequences are padded at the end to a multiple of
    2 · ranks.world. The padding has no targets, and because attention is causal, no token attends to the padding."""
    n, t = ranks.world, tokens.shape[1]
    padding = -t % (2 * n)
    first, last = positions_of(ranks.rank, n, (t + padding) // n)

    def rows(x: Tensor, value: int) -> Tensor:
        x_padded = pad(x.long(), (0, padding), value=value)
        return torch.cat([x_padded[:, first], x_padded[:, last]], 1)

    return Batch(rows(tokens, 0), rows(targets, -1))
