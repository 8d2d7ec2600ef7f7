"""Muon on matrices, with gradients clipped by their norm.       params, grads, m (P,): one range of the arenas

    g = grads / max(1, (norm + 1e-6) / max_norm)                          norm: from the op `global_norm`
    μ = 0.85 + (momentum − 0.85) · min((t − 1) / momentum_warmup, 1)      (momentum_warmup = 0: μ = momentum)
    m = μ m + (1 − μ) g              u = μ m + (1 − μ) g                  (without nesterov: u = m)
    for each matrix of the range:    o = scale · orthogonal(u)            scale: see `MuonConfig`
    params −= rate · weight_decay · params                                (cautious: only where params and o have the same sign)
    params −= rate · o                                                    rate = learning_rate_factor · learning_rate
    rounded = params, in rounded's dtype                                  (if there is a bfloat16 copy)

orthogonal(u) approximates the polar factor U Vᵀ of u, where u = U S Vᵀ is the singular value decomposition. The last two
equations below run five times. If x has more rows than columns, they are A = xᵀ x and x = a x + x (b A + c A²).

    x = u / (margin ‖u‖ + 1e-7)      A = x xᵀ      x = a x + (b A + c A²) x

Each iteration maps every singular value s to a s + b s³ + c s⁵ and keeps U and V. `COEFFICIENTS` has (a, b, c) for each of the
five iterations, and `MARGINS` has the margin:

    newton_schulz   by Keller Jordan, with one (a, b, c). A singular value s ≥ 0.01 ‖u‖ of u ends between 0.68 and 1.14.
    polar_express   by Amsel et al., arXiv:2505.16932, with one (a, b, c) for each iteration. A singular value s ≥ 0.003 ‖u‖ of
                    u ends between 0.85 and 1.15.

On CUDA, the matrix products of float32 params are in bfloat16. Otherwise they are in the dtype of params. t is the number of
updates, with this one. If norm is not finite, params, m and rounded do not change. On a GPU the device decides this, so the
host does not wait. grads is always overwritten. params, grads, m, rounded and `matrices` are lists with one element for each
range. `MUON` is the table of kernels: each module offers `workspace` and `step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from ..checks import check_max_norm, check_range, check_tensor, is_number
from ..op import op
from ..scratch import Shapes, TensorLike
from ..table import Kernel, Table, Where, takes_all

Orthogonalization = Literal["newton_schulz", "polar_express"]
Scale = Literal["spectral", "rms"]

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
FIRST_MOMENTUM = 0.85  # the momentum of the first update, with momentum_warmup
MARGINS = {"newton_schulz": 1.0, "polar_express": 1.02}


@dataclass(frozen=True, slots=True)
class MuonConfig:
    """Muon updates the matrices of the blocks. AdamW updates the embeddings, the head, norms and biases.

    momentum, nesterov     as in the equations of this module
    momentum_warmup        the number of updates in which μ rises from 0.85 to momentum; 0: μ is always momentum
    orthogonalization      "newton_schulz" or "polar_express"
    scale                  "spectral" is √max(1, rows / columns): the spectral norm of an update is about 1, or √(rows /
                           columns) if that is more. "rms" is 0.2 √max(rows, columns): the root mean square of an update is
                           about 0.2, as with AdamW
    learning_rate_factor   Muon's learning rate as a multiple of AdamW's
    cautious               weight decay changes only parameters that have the same sign as o

    >>> import tilegrad
    >>> config = tilegrad.ModelConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=16)
    >>> engine = tilegrad.Engine(config, batch_size=2, seq_len=4, muon=tilegrad.MuonConfig(scale="rms"))
    >>> "m.blocks.0.ffn.up.weight" in engine.tensors(), "v.blocks.0.ffn.up.weight" in engine.tensors()
    (True, False)
    """

    momentum: float = 0.95
    nesterov: bool = True
    orthogonalization: Orthogonalization = "newton_schulz"
    scale: Scale = "spectral"
    learning_rate_factor: float = 1.0
    cautious: bool = False
    momentum_warmup: int = 0

    def __post_init__(self) -> None:
        for name, accepted in (("orthogonalization", get_args(Orthogonalization)), ("scale", get_args(Scale))):
            if getattr(self, name) not in accepted:
                got = getattr(self, name)
                raise ValueError(f"{name}: got {got!r}; accepted: {' or '.join(map(repr, accepted))}")
        for name in ("nesterov", "cautious"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}; accepted: True or False")
        for name, most, range_ in (
            ("momentum", 1.0, "a number from 0 to below 1.0"),
            ("learning_rate_factor", math.inf, "a finite number ≥ 0"),
        ):
            value = getattr(self, name)
            if not is_number(value) or not 0.0 <= value < most:
                raise ValueError(f"{name}: got {value!r}; accepted: {range_}")
        if type(self.momentum_warmup) is not int or not 0 <= self.momentum_warmup <= 10**9:
            raise ValueError(f"momentum_warmup: got {self.momentum_warmup!r}; accepted: an int, 0 to 1,000,000,000")
        if self.momentum_warmup and self.momentum < FIRST_MOMENTUM:
            raise ValueError(
                f"momentum_warmup: got {self.momentum_warmup} with momentum {self.momentum}; accepted: 0, or a momentum of "
                f"at least {FIRST_MOMENTUM}, where the warm-up begins"
            )

    def scale_of(self, rows: int, columns: int) -> float:
        if self.scale == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))


class Matrix(NamedTuple):
    """A matrix: the elements [start, start + rows · columns) of a range."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


Matrices = tuple[Matrix, ...]


class Problem(NamedTuple):
    """The properties of a step that select a kernel: the dtype and device of params, the matrices of all ranges, and
    `cautious`."""

    params: TensorLike
    matrices: Matrices
    cautious: bool


MUON = Table("muon", (Kernel("torch", "muon.torch_ops", takes_all),))


def muon_workspace(
    params: TensorLike, muon: MuonConfig, matrices: list[Matrices], *, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return MUON.workspace(Problem(params, sum(matrices, ()), muon.cautious), kernel=kernel)


class Range(NamedTuple):
    """One range of the arenas. Each tensor is (P,)."""

    params: Tensor
    grads: Tensor
    m: Tensor
    rounded: Tensor | None
    matrices: Matrices


@op(accumulates=("params", "grads", "m", "rounded"))
def muon_step(
    norm: Tensor, learning_rate: float | Tensor, muon: MuonConfig, matrices: list[Matrices], weight_decay: float = 0.1,
    max_norm: float = 1.0, *,
    step: Tensor, params: list[Tensor], grads: list[Tensor], m: list[Tensor], rounded: list[Tensor] | None = None,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """Updates params, m and rounded, and overwrites grads. step (0-d float32) is t. max_norm = inf disables clipping."""
    copies = [None] * len(params) if rounded is None else rounded
    ranges = [Range(*each) for each in zip(params, grads, m, copies, matrices, strict=True)]
    first = params[0]
    for each in ranges:
        _check(each, first)
    check_tensor("norm", norm, (), first.dtype, first.device)
    check_tensor("step", step, (), torch.float32, first.device)
    check_max_norm(max_norm)
    problem = Problem(first, sum(matrices, ()), muon.cautious)
    MUON.run("step", problem, norm, step, learning_rate, muon, weight_decay, max_norm, ranges=ranges, **where)


def _check(given: Range, first: Tensor) -> None:
    p = check_range(first, given.rounded, params=given.params, grads=given.grads, m=given.m)
    end = 0
    for matrix in given.matrices:
        if not (matrix.start >= end and matrix.rows >= 1 and matrix.columns >= 1 and matrix.stop <= p):
            raise ValueError(
                f"matrices: got {matrix} after element {end}; accepted: matrices in order, inside {p} elements"
            )
        end = matrix.stop
