"""The softcap of logits for sampling and log-probabilities, as in the loss: y = c · tanh(x / c).

The op `activation` computes the tanh. With `invariant`, the bits of an element do not depend on its position in the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation import activation_fwd
from ..checks import check_tensor
from ..op import op


@op()
def softcap_fwd(x: Tensor, softcap: float, *, y: Tensor, invariant: bool = False) -> None:
    """y = softcap · tanh(x / softcap); y may be x."""
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    if not softcap > 0.0:
        raise ValueError(f"softcap: got {softcap}; accepted: a number > 0")
    torch.div(x, softcap, out=y)
    activation_fwd(y, "tanh", a=y, invariant=invariant)
    y.mul_(softcap)
