"""AdamW on flat arenas, with gradients clipped by their norm.       params, grads, m, v (P,): one range of the arenas

    g = grads / max(1, (norm + 1e-6) / max_norm)                          norm: from the op `global_norm`
    m = β1 m + (1 − β1) g            v = β2 v + (1 − β2) g²
    params −= lr · weight_decay · params                                  (the first `decayed` elements only)
    params −= lr · (m / (1 − β1^t)) / (√(v / (1 − β2^t)) + eps)
    rounded = params, in rounded's dtype                                  (if there is a bfloat16 copy)

Lean states: grads, params, or m and v may be bfloat16. They are read exactly, and the update is computed in float32. New values
of m, v and params in bfloat16 are rounded stochastically (kernels/stochastic_rounding.py). The random words depend on `seed`, t
and the number of each element among all parameters (`places`). Rounding to the nearest would lose small updates: half a step of
bfloat16 is 2⁻⁹ to 2⁻⁸ of a number, and v decreases by at most 1 − β2 of itself. With β2 = 0.999 v would never decrease.

If norm is not finite, params, m, v, rounded and the step count t do not change. On a GPU the device decides this, so the host
does not wait. Whether grads is clipped in place depends on the kernel. For several ranges, params, grads, m, v, rounded,
`decayed` and `places` are lists, and a step is counted once for all of them. `ADAMW` is the table of kernels: each module
offers `workspace` and `step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_max_norm, check_range, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..stochastic_rounding import Place, Places
from ..table import Kernel, Table, Where, takes_all

T = TypeVar("T")
WHOLE: Places = (Place(0, 0),)


class Problem(NamedTuple):
    """The properties of a step that decide which kernels accept it. lean: params, grads, m or v are bfloat16."""

    params: TensorLike
    lean: bool = False


def _native_refuses(problem: Problem) -> str | None:
    return rows.refusal(problem.params) if problem.lean else "is for lean states; torch has a fused kernel for float32"


ADAMW = Table(
    "adamw",
    (
        Kernel("triton", "adamw.triton_ops", lambda problem: gpu.refusal(problem.params)),
        Kernel("native", "adamw.cpu", _native_refuses),
        Kernel("torch", "adamw.torch_ops", takes_all),
    ),
)


def adamw_workspace(params: TensorLike, *, lean: bool = False, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch. lean: params, grads, m or v are bfloat16."""
    return ADAMW.workspace(Problem(params, lean), kernel=kernel)


class Update(NamedTuple):
    """The inputs of a step that all ranges share."""

    norm: Tensor
    learning_rate: float | Tensor
    weight_decay: float
    max_norm: float
    betas: tuple[float, float]
    eps: float
    seed: Tensor | None


class Range(NamedTuple):
    """One range of the arenas. Each tensor is (P,)."""

    params: Tensor
    grads: Tensor
    m: Tensor
    v: Tensor
    rounded: Tensor | None
    decayed: int  # number of leading elements with weight decay
    places: Places = WHOLE

    @property
    def lean(self) -> bool:
        return torch.bfloat16 in (self.params.dtype, self.grads.dtype, self.m.dtype)

    @property
    def rounds(self) -> bool:
        """Whether new values are rounded stochastically."""
        return torch.bfloat16 in (self.params.dtype, self.m.dtype)

    def parts(self) -> Iterator[tuple[Range, int]]:
        """The parts of the range, each from one place to the next, and the number of each part's first element."""
        ends = [*(place.start for place in self.places[1:]), len(self.params)]
        for (start, first), stop in zip(self.places, ends, strict=True):
            i, rounded = slice(start, stop), self.rounded
            part = Range(
                self.params[i],
                self.grads[i],
                self.m[i],
                self.v[i],
                None if rounded is None else rounded[i],
                min(max(self.decayed - start, 0), stop - start),
            )
            yield part, first


@op(accumulates=("params", "grads", "m", "v", "step", "rounded"))
def adamw_step(
    norm: Tensor, learning_rate: float | Tensor, decayed: int | list[int], weight_decay: float = 0.1,
    max_norm: float = 1.0, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, seed: Tensor | None = None,
    places: Places | list[Places] = WHOLE, *,
    params: Tensor | list[Tensor], grads: Tensor | list[Tensor], m: Tensor | list[Tensor], v: Tensor | list[Tensor],
    step: Tensor, rounded: Tensor | list[Tensor] | None = None, **where: Unpack[Where],
) -> None:  # fmt: skip
    """Updates params, m, v, rounded and step (0-d float32, the number of steps that were not skipped). max_norm = inf: no
    clipping. seed (0-d int64) is needed if params, m or v are bfloat16."""
    copies = [None] * len(_listed(params)) if rounded is None else _listed(rounded)
    places_of_ranges = places if isinstance(places, list) else [places] * len(copies)
    fields = zip(*map(_listed, (params, grads, m, v)), copies, _listed(decayed), places_of_ranges, strict=True)
    ranges = [Range(*each) for each in fields]
    first = ranges[0].params
    for each in ranges:
        _check(each, ranges[0], seed)
    check_tensor("norm", norm, (), accumulation_dtype(first.dtype), first.device)
    check_tensor("step", step, (), torch.float32, first.device)
    check_max_norm(max_norm)
    update = Update(norm, learning_rate, weight_decay, max_norm, betas, eps, seed)
    largest = max((each.params for each in ranges), key=len)
    ADAMW.run("step", Problem(largest, ranges[0].lean), update, ranges=ranges, step=step, **where)


def _listed(x: T | list[T]) -> list[T]:
    return x if isinstance(x, list) else [x]


def _check(given: Range, first: Range, seed: Tensor | None) -> None:
    device, lean = first.params.device, first.lean
    if lean:
        p = given.params.numel()
        expected = {"params": first.params, "grads": first.grads, "m": first.m, "v": first.m}
        for name, like in expected.items():
            if like.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{name}: got {like.dtype}; accepted: torch.float32 or torch.bfloat16")
            check_tensor(name, getattr(given, name), (p,), like.dtype, device)
        if given.rounded is not None:
            check_tensor("rounded", given.rounded, (p,), torch.bfloat16, device)
            if first.params.dtype == torch.bfloat16:
                raise ValueError(
                    "rounded: got a copy of bfloat16 params; accepted: None, because layers read bfloat16 params directly"
                )
    else:
        p = check_range(first.params, given.rounded, params=given.params, grads=given.grads, m=given.m, v=given.v)
    if given.rounds:
        if seed is None:
            raise ValueError("seed: got None with bfloat16 params or moments; accepted: a 0-d torch.int64 tensor")
        check_tensor("seed", seed, (), torch.int64, device)
    if any(place.start % 4 or place.element % 4 for place in given.places):
        raise ValueError(f"places: got {given.places}; accepted: multiples of 4")
    if not 0 <= given.decayed <= p:
        raise ValueError(f"decayed: got {given.decayed}; accepted: 0 … {p}, the leading elements with weight decay")
