"""The terms of a loss besides the cross-entropy of its logits."""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """The options of a loss; 0 leaves a term out. `kernels.cross_entropy` has the equations."""

    softcap: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Terms()
