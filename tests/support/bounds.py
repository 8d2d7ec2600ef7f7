"""What each op may round, next to its oracle: the σ and a B of the rule in tilegrad/kernels/closeness.py.

A function here is an op's algorithm in numbers that carry their error along. A `Number` has its exact value, the variance of
what was rounded to the short dtype so far (by `rounded`, nowhere else), and B of the accumulator. To first order, for f(x, y):

    var(f) = (∂f/∂x)² var(x) + (∂f/∂y)² var(y)
    B(f)   = |∂f/∂x| B(x) + |∂f/∂y| B(y) + |f|
    B(Σ t) = ΣB(t) + √n √(4 (Σt)² + 2 Σt²)

The last line is six deviations of Σₖ ρₖ sₖ, where ρ (of variance a²/3) rounds n partial sums s. Terms in no particular order
make Σₖ sₖ² ≈ n ((Σt)²/3 + Σt²/6); any order would allow √n Σ|t|, which is √n times as much and hides errors of float32.

The last rounding of an output is the rule's own. The exact values are not used: the oracle is autograd with another formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tilegrad.kernels import linear as linear_op
from tilegrad.kernels.closeness import Bound, rounding, roundoff
from tilegrad.kernels.cross_entropy.reference import bounds as bounds_of_cross_entropy
from tilegrad.kernels.scratch import accumulation_dtype

Operand: TypeAlias = "Number | Tensor | float"
cross_entropy = bounds_of_cross_entropy
ELEMENTARY = 4.0  # the error of exp, tanh and σ in units: vector libraries promise 3.5 to 4


@dataclass(frozen=True)
class Number:
    x: Tensor
    var: Tensor
    b: Tensor

    def rounded(self, dtype: torch.dtype) -> Number:
        return Number(self.x, self.var + rounding(self.x, dtype), self.b)

    def fn(self, value: Tensor, slope: Tensor, roundings: float) -> Number:
        """value = f(x) and slope = f'(x); the function itself errs by `roundings` units."""
        return Number(value, slope**2 * self.var, slope.abs() * self.b + roundings * value.abs())

    def __add__(self, other: Operand) -> Number:
        y = of(other, self)
        x = self.x + y.x
        return Number(x, self.var + y.var, self.b + y.b + x.abs())

    def __neg__(self) -> Number:
        return Number(-self.x, self.var, self.b)

    def __sub__(self, other: Operand) -> Number:
        return self + -of(other, self)

    def __mul__(self, other: Operand) -> Number:
        y = of(other, self)
        x = self.x * y.x
        var = self.x**2 * y.var + y.x**2 * self.var
        return Number(x, var, self.x.abs() * y.b + y.x.abs() * self.b + x.abs())

    def __truediv__(self, other: Operand) -> Number:
        y = of(other, self)
        return self * y.fn(1 / y.x, -1 / y.x**2, 0.0)

    def __matmul__(self, y: Number) -> Number:
        var = self.var @ y.x**2 + self.x**2 @ y.var
        total = self.x @ y.x
        b = _of_a_sum(total, self.x**2 @ y.x**2, self.x.shape[-1])
        return Number(total, var, b + self.b @ y.x.abs() + self.x.abs() @ y.b)

    def sum(self, dim: int, *, keepdim: bool = False) -> Number:
        total, squares, var, b = (y.sum(dim, keepdim) for y in (self.x, self.x**2, self.var, self.b))
        return Number(total, var, b + _of_a_sum(total, squares, self.x.shape[dim]))

    def scattered(self, index: Tensor, size: int) -> Number:
        """Adds up rows by index, (n, C) → (size, C)."""

        def add(x: Tensor) -> Tensor:
            return x.new_zeros(size, x.shape[1]).index_add_(0, index, x)

        terms = index.bincount(minlength=size)[:, None]
        return Number(add(self.x), add(self.var), _of_a_sum(add(self.x), add(self.x**2), terms) + add(self.b))

    @property
    def mT(self) -> Number:
        return Number(self.x.mT, self.var.mT, self.b.mT)

    def flat(self) -> Number:
        return Number(*(x.flatten(1) for x in (self.x, self.var, self.b)))


def _of_a_sum(total: Tensor, squares: Tensor, terms: int | Tensor) -> Tensor:
    return (terms * (4 * total**2 + 2 * squares)).sqrt()


def of(x: Operand, like: Number | None = None) -> Number:
    """A number without an error."""
    if isinstance(x, Number):
        return x
    y = torch.as_tensor(x, dtype=torch.float64, device=None if like is None else like.x.device)
    return Number(y, torch.zeros_like(y), torch.zeros_like(y))


def sqrt(x: Number) -> Number:
    return x.fn(x.x.sqrt(), 0.5 / x.x.sqrt().clamp(min=1e-300), 2.0)


def tanh(x: Number) -> Number:
    return x.fn(x.x.tanh(), 1 - x.x.tanh() ** 2, ELEMENTARY)


def sigmoid(x: Number) -> Number:
    y = x.x.sigmoid()
    return x.fn(y, y * (-x.x).sigmoid(), ELEMENTARY)


def bounds(dtype: torch.dtype, outputs: Mapping[str, Number]) -> dict[str, Bound]:
    """`dtype` is that of the inputs. In float64 the oracle rounds as much, and B counts twice."""
    a = roundoff(accumulation_dtype(dtype)) * (2 if dtype == torch.float64 else 1)
    return {name: Bound(y.var.sqrt(), a * y.b) for name, y in outputs.items()}


def _products_rounded(x: Tensor) -> bool:
    """On a CPU with bfloat16 instructions, weights are rounded to bfloat16 before a product, and the product after it."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and linear_op._has_bf16_products()


def linear(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> dict[str, Bound]:
    """y = x wᵀ + b   dx = dy w   dw = dyᵀ x   db = Σ_n dy. If `_products_rounded`, these are rounded: dw, x wᵀ before b is
    added, and a float32 w or b."""
    short, n = _products_rounded(x), of(x)
    weights, bias = of(w), None if b is None else of(b)
    if short and w.dtype != x.dtype:
        weights, bias = weights.rounded(x.dtype), None if bias is None else bias.rounded(x.dtype)
    y, dw = n @ weights.mT, of(dy).mT @ n
    if short:
        y, dw = y if bias is None else y.rounded(x.dtype), dw.rounded(x.dtype)
    out = {"y": y if bias is None else y + bias, "dx": of(dy) @ weights, "dw": dw}
    return bounds(x.dtype, out | ({} if b is None else {"db": of(dy).sum(0)}))


def per_head_linear(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> dict[str, Bound]:
    """Each head's `linear`, side by side."""
    h, d = w.shape[:2]
    own = [slice(i * d, (i + 1) * d) for i in range(h)]
    heads = [linear(x[:, s], w[i], None if b is None else b[i], dy[:, s]) for i, s in enumerate(own)]
    columns_joined = functools.partial(torch.cat, dim=1)
    joined: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "y": columns_joined,
        "dx": columns_joined,
        "dw": torch.stack,
        "db": torch.stack,
    }
    return {
        name: Bound(join([head[name].sigma for head in heads]), join([head[name].accumulated for head in heads]))
        for name, join in joined.items()
        if name in heads[0]
    }


def norm(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, *, eps: float, rms: bool) -> dict[str, Bound]:
    """Nothing but the outputs is rounded."""
    c, n = x.shape[1], of(x)
    mean = of(torch.zeros_like(x[:, :1])) if rms else n.sum(1, keepdim=True) / c
    centred = n if rms else n - mean
    variance = (centred * centred).sum(1, keepdim=True) / c + eps
    rstd = of(1.0) / sqrt(variance)
    hat, g = centred * rstd, of(dy) * of(w)
    y = hat * of(w)
    step = g - hat * ((g * hat).sum(1, keepdim=True) / c)
    if not rms:
        step = step - g.sum(1, keepdim=True) / c
    out = {"y": y if b is None else y + of(b), "rstd": rstd, "mean": mean, "dx": step * rstd}
    out |= {"dw": (of(dy) * hat).sum(0), "db": of(dy).sum(0)}
    flat = {
        name: Bound(s[:, 0], a[:, 0]) for name, (s, a, _) in bounds(x.dtype, out).items() if name in ("mean", "rstd")
    }
    return bounds(x.dtype, out) | flat


def activation(kind: str, h: Tensor, da: Tensor) -> dict[str, Bound]:
    """tanh's backward rounds da σ(2h). The oracle's 1 − tanh² cancels, which counts if h is float64 too."""
    x, g = of(h), of(da)
    if kind == "gelu":
        k = math.sqrt(2 / math.pi)
        t = tanh((x * x * 0.044715 + 1.0) * x * k)
        slope = (t + 1.0) * 0.5 + x * 0.5 * (-(t * t) + 1.0) * (x * x * (3 * 0.044715) + 1.0) * k
        return bounds(h.dtype, {"a": x * 0.5 * (t + 1.0), "dh": g * slope})
    if kind == "tanh":
        dh = (g * sigmoid(x * 2.0)).rounded(h.dtype) * sigmoid(x * -2.0) * 4.0
        if h.dtype == torch.float64:
            dh = Number(dh.x, dh.var, dh.b + (g * (-(tanh(x) * tanh(x)) + 1.0)).b)
        of_dh = _slope_of_a_factor(g * sigmoid(x * 2.0), dh, h.dtype)
        out = bounds(h.dtype, {"a": tanh(x), "dh": dh})
        return out | {"dh": out["dh"]._replace(slope=of_dh)}
    kept = (h > 0).double()
    if kind == "relu2":
        return bounds(h.dtype, {"a": x * x * kept, "dh": g * x * (2 * kept)})
    return bounds(h.dtype, {"a": of(h * kept), "dh": of(da * kept)})


def swiglu(gate: Tensor, up: Tensor, da: Tensor) -> dict[str, Bound]:
    """silu(gate) and da ∘ up are rounded before they are used."""
    x, dtype = of(gate), gate.dtype
    s = sigmoid(x)
    silu, dsilu = (x * s).rounded(dtype), (of(da) * of(up)).rounded(dtype)
    out = {"a": silu * of(up), "dup": silu * of(da), "dgate": dsilu * (s * (x * sigmoid(-x) + 1.0))}
    return {
        name: Bound(sigma, acc, _slope_of_a_factor(dsilu if name == "dgate" else silu, out[name], dtype))
        for name, (sigma, acc, _) in bounds(dtype, out).items()
    }


def _slope_of_a_factor(t: Number, y: Number, dtype: torch.dtype) -> Tensor:
    """sd⟨e, y⟩ where each y has a rounded factor t: equal t of a coarse dtype have the same rounding."""
    values, which = t.x.flatten().unique(return_inverse=True)
    summed: Tensor = torch.zeros_like(values).index_add_(0, which, y.x.flatten() ** 2).norm()
    return summed * roundoff(dtype) / math.sqrt(3)


def rope(x: Tensor, dy: Tensor) -> dict[str, Bound]:
    """Tables, products and the sum have the accumulator's dtype; |x cos| + |x sin| ≤ √2 |(x1, x2)|."""
    out = {}
    for name, z in (("y", x.double()), ("dx", dy.double())):
        half = z.shape[-1] // 2
        length = torch.cat([(z[..., :half] ** 2 + z[..., half:] ** 2).sqrt()] * 2, -1)
        out[name] = Number(z, torch.zeros_like(z), 3 * math.sqrt(2) * length)
    return bounds(x.dtype, out)


def embedding(
    tokens: Tensor, wte: Tensor, wpe: Tensor | None, dx: Tensor, scale: float = 1.0, *, rounded: bool = False
) -> dict[str, Bound]:
    """Only the outputs are rounded, and the product with `scale` if `rounded`; gradients are sums over tokens."""
    b, t = tokens.shape
    position = torch.arange(t, device=tokens.device).repeat(b)
    x, dwte = of(torch.zeros_like(dx)), of(dx)
    if scale != 1.0:
        s = Number(of(scale, x).x, of(0.0, x).x, of(abs(scale), x).x)  # the scale is rounded to the accumulator's dtype
        x, dwte = of(wte[tokens.flatten()]) * s, dwte * s
        x = x if wpe is None else (x.rounded(dx.dtype) if rounded else x) + of(wpe[position])
    out = {"x": x, "dwte": dwte.scattered(tokens.flatten(), wte.shape[0])}
    return bounds(dx.dtype, out | ({} if wpe is None else {"dwpe": of(dx).scattered(position, wpe.shape[0])}))


def embedding_mse(x: Tensor, w: Tensor, targets: Tensor, inv_total: float) -> dict[str, Bound]:
    """Nothing but the outputs is rounded."""
    kept, index = (targets >= 0).double()[:, None], targets.clamp(min=0)
    e = (of(x) - of(w.double()[index])) * kept
    dx = e * (2 / x.shape[1]) * inv_total
    loss = ((e * e).sum(1) * (1 / x.shape[1]) * inv_total).sum(0)
    return bounds(x.dtype, {"loss": loss, "dx": dx, "dw": dx.scattered(index, w.shape[0])})


@dataclass
class AdamW:
    """AdamW on flat arenas, step by step. Only the accumulator rounds."""

    params: Number
    m: Number
    v: Number
    grads: Number | None = None  # the clipped gradients of the last step

    def step(
        self, grads: Tensor, number: int, learning_rate: float, decayed: int, weight_decay: float, max_norm: float,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
    ) -> Number:  # fmt: skip
        """Takes a step and returns the norm of the gradients. `number` counts from 1; 1 − βᵗ cancels."""
        g = self.grads = of(grads)
        norm = sqrt((g * g).sum(0))
        correction1, correction2 = (of(1.0) - (of(beta**number) * 1.0) for beta in betas)
        factor = (norm + 1e-6) * (1 / max_norm)
        if factor.x > 1:
            g = self.grads = g / factor
        self.m = self.m * betas[0] + g * (1 - betas[0])
        self.v = self.v * betas[1] + g * g * (1 - betas[1])
        decay = torch.where(torch.arange(len(grads), device=grads.device) < decayed, weight_decay, 0.0).double()
        kept = self.params * (1 - learning_rate * decay)
        root = sqrt(self.v / correction2) + eps
        self.params = kept - self.m * learning_rate / correction1 / root
        return norm
