"""The operands of float8 products: factors as rows, transposed or both, and the scales that round them (kernels/fp8_linear).

    a8 (N, C)   a8t (C, N')   N' = N rounded up to a multiple of 16

In a layer, y = x W' reads x8 and w8, dx = dy W reads dy8 and w8t and, with "fp8-all", dW = dy' x reads dy8t and x8t. Weights
are rounded once a step. If x is not recomputed, x8t is kept from the forward, so x itself is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.fp8_linear import Factor, even, format_of, fp8_activation_bwd, fp8_activation_fwd, fp8_quantize_fwd
from ..kernels.scratch import Scratch
from ..memory.types import Role

if TYPE_CHECKING:
    from .layer import Buffer, Declare


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor in float8."""

    rows: Buffer | None
    columns: Buffer | None  # the transposed tensor
    state: Buffer

    @classmethod
    def declare(
        cls,
        at: Declare,
        scale: str,
        factor: Factor,
        shape: tuple[int, int],
        rows: str | None,
        columns: str | None,
        *,
        role: Role = "activations",
    ) -> Rounded:
        """scale: the name of the scale; rows, columns: the names of the buffers, or None."""
        (n, c), dtype = shape, format_of(factor)
        return cls(
            None if rows is None else at.buffer(rows, (n, c), dtype, role=role),
            None if columns is None else at.buffer(columns, (c, even(n)), dtype, role=role),
            at.scale(scale, factor),
        )

    def of(self, x: Buffer, *, rows: bool = True, columns: bool = True) -> None:
        """Rounds x: as rows, transposed or both."""
        x8, x8t = self.rows if rows else None, self.columns if columns else None
        fp8_quantize_fwd(x, x8=x8, x8t=x8t, state=self.state)

    def of_activation(self, h: Buffer, kind: str, *, rows: bool = True, columns: bool = True) -> None:
        """Rounds act(h), which is not kept."""
        a8, a8t = self.rows if rows else None, self.columns if columns else None
        fp8_activation_fwd(h, kind, a8=a8, a8t=a8t, state=self.state)

    def of_activation_backward(
        self, da: Buffer, h: Buffer, kind: str, *, a: Buffer | None, dh_sum: Buffer | None, accumulate: bool, scratch: Scratch
    ) -> None:  # fmt: skip
        """Rounds dh = da ∘ act'(h), which is not kept."""
        dh8, dh8t, state = self.rows, self.columns, self.state
        fp8_activation_bwd(
            da, h, kind, dh8=dh8, dh8t=dh8t, a=a, dh_sum=dh_sum, accumulate=accumulate, state=state, scratch=scratch
        )


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A weight in float8 in both orders, rounded once a step."""

    value: Buffer
    rounded: Rounded

    @classmethod
    def declare(cls, at: Declare, name: str, value: Buffer) -> RoundedWeight:
        shape = (value.shape[0], value.shape[1])
        place = (f"{name} (float8)", f"{name} (float8, transposed)")
        at.rounded[name] = weight = cls(value, Rounded.declare(at, name, "w", shape, *place, role="optimizer"))
        return weight


@dataclass(frozen=True, slots=True)
class Fp8:
    """The float8 factors of the products of one layer."""

    x: Rounded
    dy: Rounded
    w: RoundedWeight
    shares: bool  # whether another layer that reads the same x rounds it
    keeps: bool  # whether x8t is kept from the forward
    weight_gradient: bool  # whether dW is computed in float8

    @classmethod
    def declare(cls, at: Declare, name: str, value: Buffer, shared: Fp8 | None, *, trained: bool, keeps_x: bool) -> Fp8:
        """shared: the factors of another layer that reads the same x."""
        outputs, inputs = value.shape
        site = name.rsplit(".", 1)[-1]  # layers of one kind run one after another and share their buffers
        weight_gradient = trained and at.linear == "fp8-all"
        keeps = weight_gradient and keeps_x
        if shared is not None and shared.weight_gradient != weight_gradient:
            raise ValueError(
                f"freeze: got some of q, k and v with linear {at.linear!r}, which rounds one x for all three; accepted: all of "
                "them, or none"
            )

        def columns(of: str) -> str | None:
            return f"scratch.{site}.{of}" if weight_gradient else None

        if shared is None:
            kept = f"{name}.x8t" if keeps else columns("x8t")
            x = Rounded.declare(at, f"{name}.input", "x", (at.n, inputs), f"scratch.{site}.x8", kept)
        else:
            x = shared.x
        dy = Rounded.declare(at, f"{name}.gradient", "dy", (at.n, outputs), f"scratch.{site}.dy8", columns("dy8t"))
        w = RoundedWeight.declare(at, f"{name}.weight", value)
        return cls(x, dy, w, shared is not None, keeps, weight_gradient)
