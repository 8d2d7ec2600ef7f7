"""y = x wᵀ + b with x and w in float8.       x (N, Cin)   w (Cout, Cin)   b (Cout,)   y (N, Cout), bfloat16

    q(a) = e4m3(clamp(a / s, ±448))        s = max|a| / 448 of the previous step: delayed scaling
    y = (q(x) q(w)ᵀ) · s_x · s_w + b       products in float8, sums in float32

The `state` (4 + PARTS,) float32 of a tensor has s and, from element 4 on, the largest magnitudes since s was set. Rounding
reads s and updates the magnitudes. `fp8_scale_step`, called once at the beginning of a step, computes the next s from them. So
all forwards of a step use the same s and have the same bits. If the largest magnitude is 0 or not finite, s does not change.
e4m3 has 4 significant bits; a magnitude below 2⁻⁶ s is rounded to a multiple of 2⁻⁹ s.

x is rounded by `fp8_quantize_fwd`, or by `fp8_activation_fwd` together with the activation; w by the product. The backward is
that of `linear`, on the unrounded x and w. `FP8_LINEAR` is the table of kernels: each module offers `workspace`, `fwd`,
`quantize`, `activation` and `scale_step`.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_param, check_tensor
from ..op import op
from ..scratch import Form, Shapes, TensorLike
from ..table import Kernel, Table, Where, takes_all
from .state import FIRST, LARGEST, STATE

FP8 = torch.float8_e4m3fn


class Problem(NamedTuple):
    """A product as the table sees it: the shape of w and the device of x. w=None: only a rounding, which takes any size."""

    x: TensorLike
    w: TensorLike | None


def _scaled_mm_refuses(problem: Problem) -> str | None:
    x, w = problem
    if x.device.type != "cuda":
        return f"needs a CUDA device, not {x.device.type}"
    found = gpu.capability(x.device)
    if found < (8, 9):
        return f"needs compute capability 8.9 or newer for float8 products; {x.device} has {found[0]}.{found[1]}"
    if w is not None and any(size % 16 for size in w.shape):
        return f"takes w with both sizes multiples of 16, not {tuple(w.shape)}"
    return gpu.refusal(Form((1, 1), torch.bfloat16, x.device))


CHECK = "runs only if requested by name: it computes the same product in float32, to check the other kernel"
FP8_LINEAR = Table(
    "fp8_linear",
    (
        Kernel("scaled_mm", "fp8_linear.scaled_mm", _scaled_mm_refuses),
        Kernel("torch", "fp8_linear.torch_ops", takes_all, by_name_only=CHECK),
    ),
)


def fp8_linear_workspace(x: TensorLike, w: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of the product."""
    return FP8_LINEAR.workspace(Problem(x, w), kernel=kernel)


@op(accumulates=("state",))
def fp8_quantize_fwd(x: Tensor, *, x8: Tensor, state: Tensor, kernel: str | None = None) -> None:
    """x8 = q(x), contiguous; updates the magnitudes in state."""
    check_columns("x", x)
    _check_rounded(x, x8, state)
    FP8_LINEAR.run("quantize", Problem(x, None), x, x8=x8, state=state, kernel=kernel)


@op(accumulates=("state",))
def fp8_activation_fwd(h: Tensor, kind: str, *, a8: Tensor, state: Tensor, kernel: str | None = None) -> None:
    """a8 = q(act(h)), h (N, C) contiguous; updates the magnitudes of act(h) in state."""
    if not h.is_contiguous():
        raise ValueError(f"h: got strides {h.stride()}; accepted: a contiguous tensor")
    _check_rounded(h, a8, state)
    FP8_LINEAR.run("activation", Problem(h, None), h, kind, a8=a8, state=state, kernel=kernel)


@op(accumulates=("state",))
def fp8_linear_fwd(
    x8: Tensor, x_state: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, state: Tensor, **where: Unpack[Where]
) -> None:
    """Overwrites y; updates the magnitudes of w in `state`, the state of w."""
    (n, cin), cout = x8.shape, w.shape[0]
    check_tensor("x8", x8, (n, cin), FP8, y.device)
    check_tensor("x_state", x_state, STATE, torch.float32, y.device)
    check_param("w", w, (cout, cin), y)
    if b is not None:
        check_param("b", b, (cout,), y)
    check_tensor("y", y, (n, cout), y.dtype, y.device)
    check_tensor("state", state, STATE, torch.float32, y.device)
    FP8_LINEAR.run("fwd", Problem(x8, w), x8, x_state, w, b, y=y, state=state, **where)


@op(accumulates=("state",))
def fp8_scale_step(*, state: Tensor, kernel: str | None = None) -> None:
    """s = largest magnitude / 448; the magnitudes are reset to 0."""
    check_tensor("state", state, STATE, torch.float32, state.device)
    FP8_LINEAR.run("scale_step", Problem(state, None), state=state, kernel=kernel)


def fill_state(state: Tensor, *, weight: bool) -> None:
    """The state before the first step, with an assumed magnitude."""
    state.zero_()
    state[0] = FIRST["w" if weight else "x"] / LARGEST


def _check_rounded(x: Tensor, x8: Tensor, state: Tensor) -> None:
    check_tensor("x8", x8, tuple(x.shape), FP8, x.device)
    check_tensor("state", state, STATE, torch.float32, x.device)
    if not x8.is_contiguous():
        raise ValueError(f"x8: got strides {x8.stride()}; accepted: a contiguous tensor")
