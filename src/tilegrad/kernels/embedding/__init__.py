"""Token and position embeddings.       tokens (B, T) int64   wte (V, C)   wpe (T_max, C)   x (N, C), N = B·T

    x[b·T + t] = s · wte[tokens[b, t]] + wpe[t]        dwte[tokens[b, t]] += s · dx[b·T + t]        dwpe[t] += Σ_b dx[b·T + t]
                                               (accumulate=False: dwte and dwpe are overwritten; rows without a token become 0)
    packed rows   positions (B, T) int64 replace t: x[n] = s · wte[tokens[n]] + wpe[positions[n]]  dwpe[positions[n]] += dx[n]

s is `scale`. Sums are in the gradients' dtype (float32; float64 for float64) and in a fixed order, so the bits are the same
each time. `EMBEDDING` is the table of kernels: each module offers `workspace`, `fwd` and `bwd`.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_param, check_positions, check_tensor
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Problem, Where

EMBEDDING = gpu.triton_else_torch("embedding")


class Inputs(NamedTuple):
    """The inputs of a forward. positions: those of packed rows; None: t."""

    tokens: Tensor
    wte: Tensor
    wpe: Tensor | None
    positions: Tensor | None
    scale: float


class Gradients(NamedTuple):
    """Outputs of a backward: (V, C) and (T or more, C); None: not computed."""

    dwte: Tensor | None
    dwpe: Tensor | None
    accumulate: bool


def embedding_workspace(
    x: TensorLike, *, packed: bool = False, scaled: bool = False, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch, forward and backward. packed: calls have wpe and `positions`. scaled: `scale` is
    not 1."""
    return EMBEDDING.workspace(Problem(x), kernel=kernel, packed=packed, scaled=scaled)


@op(one_kernel=True)
def embedding_fwd(
    tokens: Tensor,
    wte: Tensor,
    wpe: Tensor | None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    *,
    x: Tensor,
    **where: Unpack[Where],
) -> None:
    """x = scale · wte[tokens] + wpe[position]. On a CPU a token out of range raises. There wte and wpe may be float32 for a
    bfloat16 x: the sum is then rounded, which needs scratch. If wte is bfloat16, torch's kernel rounds scale · wte too."""
    _check(tokens, x, "x")
    t, c = tokens.shape[1], x.shape[1]
    check_param("wte", wte, (wte.shape[0], c), x)
    if wpe is not None:
        least = 0 if positions is not None else t
        check_tensor("wpe", wpe, (max(least, wpe.shape[0]), c), wte.dtype, x.device)
        check_columns("wpe", wpe)
    check_columns("wte", wte)
    if positions is not None:
        check_positions(positions, tokens.shape, x)
    options = {"converts": wte.dtype != x.dtype, "packed": wpe is not None and positions is not None}
    inputs = Inputs(tokens, wte, wpe, positions, scale)
    EMBEDDING.run("fwd", Problem(x), inputs, options=options, x=x, **where)


@op(accumulates=("dwte", "dwpe"))
def embedding_bwd(
    dx: Tensor, tokens: Tensor, positions: Tensor | None = None, scale: float = 1.0, *,
    dwte: Tensor | None = None, dwpe: Tensor | None = None, accumulate: bool = True, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dwte[tokens] += scale · dx   dwpe[:T] += Σ_b dx; accumulate=False: both are zeroed first."""
    _check(tokens, dx, "dx")
    t, c, acc = tokens.shape[1], dx.shape[1], accumulation_dtype(dx.dtype)
    if dwte is not None:
        check_tensor("dwte", dwte, (dwte.shape[0], c), acc, dx.device)
        check_columns("dwte", dwte)
    if dwpe is not None:
        check_tensor("dwpe", dwpe, (max(t, dwpe.shape[0]), c), acc, dx.device)
        check_columns("dwpe", dwpe)
    if positions is not None:
        check_positions(positions, tokens.shape, dx)
    options, out = {"scaled": scale != 1.0}, Gradients(dwte, dwpe, accumulate)
    EMBEDDING.run("bwd", Problem(dx), dx, tokens, positions, scale, options=options, out=out, **where)


def _check(tokens: Tensor, x: Tensor, name: str) -> None:
    """Checks tokens (B, T), and x with B·T rows."""
    if tokens.dtype != torch.int64 or len(tokens.shape) != 2 or not tokens.is_contiguous():
        got = f"{tokens.dtype} {tuple(tokens.shape)}, strides {tokens.stride()}"
        raise ValueError(f"tokens: got {got}; accepted: a contiguous torch.int64 (B, T)")
    check_tensor("tokens", tokens, tuple(tokens.shape), torch.int64, x.device)
    check_tensor(name, x, (tokens.numel(), x.shape[-1]), x.dtype, tokens.device)
    check_columns(name, x)
