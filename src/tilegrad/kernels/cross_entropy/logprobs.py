"""Log-probabilities of given tokens, row by row.       x (N, C)   w (V, C)   targets (N,) int64, −1 = none   logprobs (N,)

    logprobs[n] = log softmax(l)[targets[n]], l = x[n] wᵀ        0 where there is no target

Logits are computed for a chunk of rows at a time, in the same dtype as in a loss: on a CPU a bfloat16 product writes bfloat16.
With a softcap c, l = c · tanh(x[n] wᵀ / c). A row has the same bits as `sample_fwd` gives for these logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_given, check_param
from ..linear import linear_fwd, linear_workspace
from ..op import op
from ..sampling import logprobs_fwd, logprobs_workspace
from ..scratch import Form, Scratch, Shapes, TensorLike, accumulation_dtype, below, blocks, of, views
from .chunks import most_rows
from .softcap import softcap_fwd
from .torch_ops import CHUNK


def _rows(x: TensorLike, w: TensorLike) -> int:
    return most_rows(x.shape[0], w.shape[0], accumulation_dtype(x.dtype).itemsize, CHUNK[x.device.type])


def token_logprobs_workspace(x: TensorLike, w: TensorLike, *, invariant: bool = False) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    rows, v, acc = _rows(x, w), w.shape[0], accumulation_dtype(x.dtype)
    shapes: Shapes = {"logits": ((rows, v), acc)}
    if x.device.type == "cpu" and x.dtype != acc:
        shapes["rounded"] = ((rows, v), x.dtype)
    chunk = Form((rows, x.shape[1]), x.dtype, x.device)
    shapes |= below("linear", linear_workspace(chunk, w, backward=False, bias=False, invariant=invariant))
    return shapes | below("logprobs", logprobs_workspace(Form((rows, v), acc, x.device)))


@op()
def token_logprobs_fwd(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    *,
    logprobs: Tensor,
    invariant: bool = False,
    softcap: float = 0.0,
    scratch: Scratch | None = None,
) -> None:
    (n, c), v, acc = x.shape, w.shape[0], accumulation_dtype(x.dtype)
    check_param("w", w, (v, c), x)
    check_given(x.device, ("targets", targets, (n,), torch.int64), ("logprobs", logprobs, (n,), acc))
    buffers = views(scratch, token_logprobs_workspace(x, w, invariant=invariant), x.device, "token_logprobs")
    for i in blocks(n, _rows(x, w)):
        m = i.stop - i.start
        logits = buffers["logits"][:m]
        y = buffers["rounded"][:m] if "rounded" in buffers else logits
        linear_fwd(x[i], w, None, y=y, invariant=invariant, scratch=of("linear", buffers))
        if y is not logits:
            logits.copy_(y)
        if softcap:
            softcap_fwd(logits, softcap, y=logits, invariant=invariant)
        logprobs_fwd(logits, targets[i], logprobs=logprobs[i], scratch=of("logprobs", buffers))
