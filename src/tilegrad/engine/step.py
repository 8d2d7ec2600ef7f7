"""The loop over the micro-batches of a step, on a CPU and on CUDA, captured or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from ..model.transformer import Transformer


def accumulate_gradients(
    models: Iterable[Transformer],
    *,
    loss: Tensor,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Sum the losses and the gradients of the micro-batches. `models` loads the inputs of each micro-batch and yields its
    model. The first model overwrites the gradients (declare(accumulate=False)), the others add to them. Forward and backward
    of micro-batch i run in the context `around(i)`."""
    for i, model in enumerate(models):
        with around(i):
            model.step()
        loss.add_(model.head.loss) if i else loss.copy_(model.head.loss)
