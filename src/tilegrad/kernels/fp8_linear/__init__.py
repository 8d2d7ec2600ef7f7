"""y = x wᵀ + b with both factors rounded to float8.       x (N, Cin)   w (Cout, Cin)   b (Cout,)   y (N, Cout), bfloat16

    q(a) = e4m3(clamp(a / s, ±448))        s = max|a| / 448, of the step before: delayed scaling
    y = (q(x) q(w)ᵀ) · s_x · s_w + b       products in float8, sums in float32

`state` (2, 4 + PARTS) float32 holds s and, from place 4 on, the largest magnitudes seen since, of x and of w. A forward reads s and adds to
what was seen; `fp8_scale_step`, once at the beginning of a step, makes the next s of it, and a step's forwards agree to the
bit however often they run. Magnitudes that are not finite, or all zero, leave s as it is. e4m3 has 4 significant bits, and
what is smaller than 2⁻⁹ s is rounded to a multiple of that.

The backward is linear's, on x and w as they are. `FP8_LINEAR` is the table of kernels: each module offers `workspace`, `fwd`
and `scale_step`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_param, check_tensor
from ..op import op
from ..scratch import Form, Scratch, Shapes, views
from ..table import Kernel, Table

PARTS = 512  # programs that each keep the largest magnitude they saw
LARGEST = 448.0  # of e4m3
FIRST = (16.0, 1.0)  # what x and w are taken to reach before anything was seen
FIRST_PART = 4  # a row begins at a multiple of 16 bytes, as cuBLAS asks of a scale
STATE = (2, FIRST_PART + PARTS)


class Problem(NamedTuple):
    """A product as the table sees it: shapes, dtypes, and the device of x."""

    x: Any
    w: Any


def _scaled_mm_refuses(problem: Problem) -> str | None:
    x, w = problem
    if x.device.type != "cuda":
        return f"needs a CUDA device, not {x.device.type}"
    found = gpu.capability(torch.device(x.device))
    if found < (8, 9):
        return f"needs compute capability 8.9 or newer, for float8 products, and {x.device} has {found[0]}.{found[1]}"
    if any(size % 16 for size in w.shape):
        return f"takes w with sides that are multiples of 16, not {tuple(w.shape)}"
    return gpu.refusal(x)


FP8_LINEAR = Table(
    "fp8_linear",
    (
        Kernel("scaled_mm", "fp8_linear.scaled_mm", _scaled_mm_refuses),
        Kernel(
            "torch", "fp8_linear.torch_ops", lambda _: None,
            by_name_only="is only asked for by name: it forms the same product in float32, to check the other by",
        ),
    ),
)  # fmt: skip


def fp8_linear_workspace(x: Any, w: Any, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold."""
    return FP8_LINEAR.workspace(Problem(x, w), kernel=kernel)


@op(accumulates=("state",))
def fp8_linear_fwd(
    x: Tensor, w: Tensor, b: Tensor | None, *,
    y: Tensor, state: Tensor, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """y overwritten; state's magnitudes grow by x's and w's."""
    (n, cin), cout = x.shape, w.shape[0]
    check_param("w", w, (cout, cin), x)
    if b is not None:
        check_param("b", b, (cout,), x)
    check_tensor("y", y, (n, cout), x.dtype, x.device)
    check_tensor("state", state, STATE, torch.float32, x.device)
    row = FP8_LINEAR.select(Problem(x, w), kernel)
    module = row.load()
    buffers = views(scratch, module.workspace(x, w), x.device, "fp8_linear", kernel=row.name)
    module.fwd(x, w, b, y=y, state=state, scratch=buffers)


@op(accumulates=("state",))
def fp8_scale_step(*, state: Tensor) -> None:
    """s = largest magnitude seen / 448, and nothing is seen any more."""
    check_tensor("state", state, STATE, torch.float32, state.device)
    form = Form((16, 16), torch.bfloat16, state.device)
    FP8_LINEAR.select(Problem(form, form), None if state.device.type == "cuda" else "torch").load().scale_step(
        state=state
    )


def fill_state(state: Tensor) -> None:
    """Before the first step."""
    state.zero_()
    state[:, 0].copy_(torch.tensor(FIRST) / LARGEST)
