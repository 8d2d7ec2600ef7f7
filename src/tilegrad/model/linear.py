"""y = x W' + b as a layer.        x, dx (N, Cin)   y, dy (N, Cout)   W (Cout, Cin), or (H, D, D) for one matrix per head"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.column_sum import column_sum_fwd
from ..kernels.fp8_linear import fp8_product_fwd, fp8_product_workspace
from ..kernels.linear import (
    linear_bwd_input,
    linear_bwd_weight,
    linear_fwd,
    linear_workspace,
    per_head_linear_bwd_input,
    per_head_linear_bwd_weight,
    per_head_linear_fwd,
)
from ..kernels.low_rank import (
    joined_linear_bwd_input,
    joined_linear_fwd,
    low_rank_add_fwd,
    low_rank_linear_bwd_input,
    low_rank_linear_fwd,
)
from ..kernels.scratch import Scratch, TensorLike, of
from .fp8 import Fp8
from .layer import WEIGHT, Buffer, Constant, Declare, Init, Param
from .lora import Adapter


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """dx = dy W   dW += dy' x   db += Σ dy         with an adapter (model/lora.py): y += u B'   dx += du A"""

    w: Param
    b: Param | None
    per_head: bool
    invariant: bool
    fp8: Fp8 | None
    forward_scratch: Scratch
    backward_scratch: Scratch
    added_scratch: dict[str, Scratch]  # scratch of float8 products that are added to dx and to dW

    @classmethod
    def declare(
        cls,
        at: Declare,
        name: str,
        inputs: int,
        outputs: int,
        init: Init = WEIGHT,
        *,
        bias: bool | None = None,
        shared: LinearLayer | None = None,
        keeps_x: bool = False,
        per_head: bool = False,
        parts: tuple[int, ...] = (),
    ) -> LinearLayer:
        """bias=None: as in the config. shared: another layer that reads the same x. keeps_x: x is not recomputed in the
        backward. per_head: the D outputs of a head read only its own D inputs, weight (H, D, D) = (head, out, in), bias (H, D).
        parts: if this layer computes several layers as one, the number of outputs of each."""
        shape = (at.config.n_head, at.config.head_dim, at.config.head_dim) if per_head else (outputs, inputs)
        has_bias = at.config.bias if bias is None else bias
        rows = shape[1:2] * shape[0] if per_head else parts or (outputs,)
        w = at.param(f"{name}.weight", *shape, init=init, matrices=tuple((n, shape[-1]) for n in rows))
        b = at.param(f"{name}.bias", *shape[:-1], init=Constant(0.0)) if has_bias else None
        site = name.rsplit(".", 1)[-1]  # layers of one kind run one after another and share their scratch
        x = at.form(inputs)
        shared_fp8, fp8 = None if shared is None else shared.fp8, None
        if at.linear != "plain" and not per_head:
            fp8 = Fp8.declare(at, name, w.value, shared_fp8, trained=w.grad is not None, keeps_x=keeps_x)
        forward = linear_workspace(x, w.value, backward=False, invariant=at.invariant)
        return cls(
            w=w,
            b=b,
            per_head=per_head,
            invariant=at.invariant,
            fp8=fp8,
            forward_scratch=at.scratch(site, forward if fp8 is None else {}),
            backward_scratch=at.scratch(f"{site}_bwd", linear_workspace(x, w.value, backward=True)),
            added_scratch=_added(at, site, x, w, fp8, shared=shared_fp8 is not None),
        )

    def forward(self, x: Buffer, *, y: Buffer, adapter: Adapter | None = None, output: int = 0) -> None:
        """y = x W' + b, plus what the adapter of x adds to its output number `output`."""
        added = None if adapter is None else adapter.of(output)
        if self.fp8 is not None:
            if not self.fp8.shares:
                self.fp8.x.of(x, columns=self.fp8.keeps)
            self._multiply_fp8(self.fp8, y=y)
            if added is not None:
                low_rank_add_fwd(added.u, added.bs, added.parts, ys=[y], scratch=added.scratch)
        elif added is not None:
            w, b, base = self.w.value, self.b.value if self.b else None, self.forward_scratch
            u, bs, parts, joined, wb, scratch = added
            if joined is not None and wb is not None:
                joined_linear_fwd(joined, w, b, bs, parts, y=y, wb=wb)
            else:
                low_rank_linear_fwd(x, w, b, u, bs, parts, y=y, base_scratch=base, scratch=scratch)
        else:
            run = per_head_linear_fwd if self.per_head else linear_fwd
            w, b, scratch = self.w.value, self.b.value if self.b else None, self.forward_scratch
            run(x, w, b, y=y, invariant=self.invariant, scratch=scratch)

    def forward_activation(self, h: Buffer, kind: str, *, y: Buffer) -> None:
        """y = act(h) W' + b in float8; act(h) is not kept."""
        if self.fp8 is None:
            raise ValueError("forward_activation: got a layer that does not multiply in float8; call forward")
        self.fp8.x.of_activation(h, kind, columns=self.fp8.keeps)
        self._multiply_fp8(self.fp8, y=y)

    def _multiply_fp8(self, fp8: Fp8, *, y: Buffer) -> None:
        x, w, b = fp8.x, fp8.w.rounded, self.b.value if self.b else None
        assert x.rows is not None and w.rows is not None
        fp8_product_fwd(x.rows, x.state, w.rows, w.state, b, out=y, accumulate=False)

    def backward_input(
        self, dy: Buffer | None, *, dx: Buffer, accumulate: bool = False, adapter: Adapter | None = None
    ) -> None:
        """dx = dy W, or dx += dy W if accumulate. With an adapter of this input, du A is added too. A float8 layer rounds dy
        here, and `backward_weight` uses the rounded dy too. dy=None: the op that computed dy has rounded it (`rounds_dy`)."""
        if self.fp8 is not None:
            dy8, w8 = self.fp8.dy, self.fp8.w.rounded
            if dy is not None:
                dy8.of(dy)
            assert dy8.rows is not None and w8.columns is not None
            scratch = self.added_scratch["dx"] if accumulate else {}
            fp8_product_fwd(dy8.rows, dy8.state, w8.columns, w8.state, out=dx, accumulate=accumulate, scratch=scratch)
            if adapter is not None:
                adapter.add_backward(dx=dx)
            return
        assert dy is not None
        if adapter is not None and adapter.dy_du is not None and adapter.wa is not None and not accumulate:
            w, du, a = self.w.value, adapter.du, adapter.a.value
            joined_linear_bwd_input(dy, w, du, a, dx=dx, joined=adapter.dy_du, wa=adapter.wa)
            return
        if adapter is not None and adapter.drop is None:
            low_rank_linear_bwd_input(
                dy,
                self.w.value,
                adapter.du,
                adapter.a.value,
                dx=dx,
                accumulate=accumulate,
                base_scratch=self.backward_scratch,
                scratch=adapter.backward_scratch,
            )
            return
        run = per_head_linear_bwd_input if self.per_head else linear_bwd_input
        run(dy, self.w.value, dx=dx, accumulate=accumulate, scratch=self.backward_scratch)
        if adapter is not None:
            adapter.add_backward(dx=dx)

    def backward_weight(self, dy: Buffer, x: Buffer | None, *, bias_grad: bool = True) -> None:
        """dW += dy' x   db += Σ dy if `bias_grad`, otherwise another op computes db. Frozen parameters get no gradient. x=None:
        xᵀ is rounded to float8 already."""
        run = per_head_linear_bwd_weight if self.per_head else linear_bwd_weight
        db = self.bias_grad if bias_grad else None
        accumulate, scratch = self.w.accumulate, self.backward_scratch
        in_fp8 = self.fp8 is not None and self.fp8.weight_gradient
        if in_fp8 or (self.w.grad is None and not (self.per_head and db is not None)):  # x or dy is not read
            if db is not None:
                sums = db.view(dy.shape[1])
                column_sum_fwd(dy, sums=sums, accumulate=accumulate, scratch=of("column_sum", scratch))
            if in_fp8:
                self._backward_weight_fp8(x)
            return
        assert x is not None
        run(dy, x, self.w.value, dw=self.w.grad, db=db, accumulate=accumulate, scratch=scratch)
        self.w.keep()

    def _backward_weight_fp8(self, x: Buffer | None) -> None:
        fp8, dw, accumulate = self.fp8, self.w.grad, self.w.accumulate
        assert fp8 is not None and dw is not None
        if x is not None and not fp8.keeps and not fp8.shares:
            fp8.x.of(x, rows=False)
        dy8t, x8t, scratch = fp8.dy.columns, fp8.x.columns, self.added_scratch["dw"] if accumulate else {}
        assert dy8t is not None and x8t is not None
        fp8_product_fwd(
            dy8t, fp8.dy.state, x8t, fp8.x.state, out=dw, accumulate=accumulate, precise=True, scratch=scratch
        )
        self.w.keep()

    @property
    def reads_x(self) -> bool:
        """Whether `backward_weight` reads x."""
        return self.w.grad is not None and not (self.fp8 is not None and self.fp8.keeps)

    @property
    def rounds_dy(self) -> bool:
        """Whether only float8 products read dy, so that the op that computes dy may round it."""
        return self.fp8 is not None and (self.fp8.weight_gradient or self.w.grad is None)

    @property
    def bias_grad(self) -> Buffer | None:
        return self.b.grad if self.b else None


def _added(at: Declare, site: str, x: TensorLike, w: Param, fp8: Fp8 | None, *, shared: bool) -> dict[str, Scratch]:
    """The scratch of the float8 products of a layer that are added to dx (if another layer reads the same x) and to dW (after
    the first micro-batch)."""
    added: dict[str, Scratch] = {"dx": {}, "dw": {}}
    if fp8 is None or fp8.w.rounded.columns is None:
        return added
    if shared:
        added["dx"] = at.scratch(f"{site}_dx", fp8_product_workspace(fp8.w.rounded.columns, x))
    if fp8.x.columns is not None and w.grad is not None and w.accumulate:
        added["dw"] = at.scratch(f"{site}_dw", fp8_product_workspace(fp8.x.columns, w.grad))
    return added
