"""The norm that clips a step.       grads (P,): a flat range of float32 (float64), norm 0-d of its dtype

    norm = ‖grads‖₂        inf or NaN where an element is

A norm of the norms of parts: sums stay short, so float32 stays exact enough. `GLOBAL_NORM` is the table of kernels: each
module offers `workspace` and `fwd`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..op import op
from ..scratch import Scratch, Shapes, accumulation_dtype, views
from ..table import Kernel, Table, takes_all


class Problem(NamedTuple):
    """A norm as the table sees it: the dtype and device of the gradients."""

    grads: Any


GLOBAL_NORM = Table(
    "global_norm",
    (
        Kernel("triton", "global_norm.triton_ops", lambda problem: gpu.refusal(problem.grads)),
        Kernel("torch", "global_norm.torch_ops", takes_all),
    ),
)


def global_norm_workspace(grads: Any, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return GLOBAL_NORM.workspace(Problem(grads), kernel=kernel)


@op()
def global_norm(grads: Tensor, *, norm: Tensor, scratch: Scratch | None = None, kernel: str | None = None) -> None:
    """norm (0-d) = ‖grads‖₂; inf or NaN where an element is."""
    check_tensor("grads", grads, (grads.numel(),), accumulation_dtype(grads.dtype), grads.device)
    check_tensor("norm", norm, (), grads.dtype, grads.device)
    row = GLOBAL_NORM.select(Problem(grads), kernel)
    module = row.load()
    buffers = views(scratch, module.workspace(grads), grads.device, "global_norm", kernel=row.name)
    module.fwd(grads, norm=norm, scratch=buffers)
