"""The attention op's contract: three functions that never allocate, whichever kernel runs.

Positional tensors are read, keyword-only tensors are written. Outputs overwrite; `dsinks` accumulates, for it is a
parameter's gradient. An output given as None is not computed. `scratch` holds what `attention_workspace` declares.

    q (B, Hq, Tq, D)   k (B, Hkv, Tk, D)   v (B, Hkv, Tk, Dv)   o (B, Hq, Tq, Dv)   lse (B, Hq, Tq)
    packed sequences:  q (total_q, Hq, D) …                     o (total_q, Hq, Dv) lse (Hq, total_q)

lse is float32, float64 for float64 inputs. The table chooses by what is read, as a workspace is declared; where the chosen
kernel can't write an output as it lies (hopper: rows off multiples of 16 bytes), it says so and names one that can.
The equations are in mask.py (scores) and reference.py (the rest).

A call is checked and a kernel chosen for it once for each form (shapes, strides, dtypes, devices, options, and the number
of threads, with which scratch on the CPU grows): `Plan` is what is remembered, and a training step or a decoding loop
pays for a look into a dictionary.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_tensor
from ..op import op
from ..scratch import Scratch, Shapes
from . import table
from .checks import check_lengths, check_options, check_tensors, form_of
from .mask import Mask
from .problem import Problem, lse_dtype, output_shapes


def attention_workspace(
    q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, kernel: str | None = None, deterministic: bool = False
) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold. Reads only shapes, dtypes and devices: handles will do."""
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    chosen = table.ATTENTION.select(Problem(q, k, v, mask), kernel)
    return chosen.load().workspace(q, k, v, mask, backward=backward, deterministic=deterministic)  # type: ignore[no-any-return]


class Plan(NamedTuple):
    """The kernel of a form of call, out of which table, and the scratch it needs."""

    module: ModuleType
    table: object
    scratch: Shapes


Form = tuple[object, ...] | None
MOST_PLANS = 4096
_plans: dict[Form, Plan] = {}


def _remembered(form: Form) -> Plan | None:
    plan = None if form is None else _plans.get(form)
    return plan if plan is not None and plan.table is table.ATTENTION else None


def _remember(form: Form, module: ModuleType, scratch: Shapes) -> Plan:
    plan = Plan(module, table.ATTENTION, scratch)
    if form is not None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[form] = plan
    return plan


def fwd_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, o: Tensor | None, lse: Tensor | None, kernel: str | None
) -> Plan:
    """Checks a forward's tensors and chooses its kernel, once for each form."""
    form = form_of(("fwd", kernel, torch.get_num_threads()), (q, k, v, o, lse), mask)
    plan = _remembered(form)
    if plan is not None:
        return plan
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    o_shape, lse_shape = output_shapes(q, v, mask)
    for name, x, shape, dtype in (("o", o, o_shape, q.dtype), ("lse", lse, lse_shape, lse_dtype(q.dtype))):
        if x is not None:
            check_tensor(name, x, shape, dtype, q.device)
    module = table.ATTENTION.select(Problem(q, k, v, mask), kernel).load()
    return _remember(form, module, module.workspace(q, k, v, mask, backward=False, deterministic=False))


@op()
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *,
    o: Tensor | None, lse: Tensor | None, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """o and lse of the call. lse is what the backward needs beside o."""
    plan = fwd_plan(q, k, v, mask, o, lse, kernel)
    check_lengths(q, k, mask)
    plan.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=_checked_scratch(scratch, plan.scratch, q.device))


def bwd_plan(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, others: dict[str, Tensor | None], kernel: str | None, deterministic: bool
) -> Plan:  # fmt: skip
    """The same for a backward; `others` are o, lse, do, dlse and the gradients by name."""
    form = form_of(("bwd", kernel, deterministic, torch.get_num_threads()), (q, k, v, *others.values()), mask)
    plan = _remembered(form)
    if plan is not None:
        return plan
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    o_shape, lse_shape = output_shapes(q, v, mask)
    bias, sinks = mask.float_bias, mask.sinks
    for name, like in (("dbias", bias), ("dsinks", sinks)):
        if others[name] is not None and like is None:
            raise ValueError(f"{name}: got a tensor; accepted: None, for this call has no {name[1:]} with a gradient")
    for name, shape, dtype in (
        ("o", o_shape, q.dtype),
        ("lse", lse_shape, lse_dtype(q.dtype)),
        ("do", o_shape, q.dtype),
        ("dlse", lse_shape, lse_dtype(q.dtype)),
        ("dq", tuple(q.shape), q.dtype),
        ("dk", tuple(k.shape), q.dtype),
        ("dv", tuple(v.shape), q.dtype),
        ("dbias", tuple(bias.shape) if bias is not None else (), bias.dtype if bias is not None else q.dtype),
        ("dsinks", (q.shape[1],), sinks.dtype if sinks is not None else q.dtype),
    ):
        x = others[name]
        if x is not None:
            check_tensor(name, x, shape, dtype, q.device)
    module = table.ATTENTION.select(Problem(q, k, v, mask), kernel).load()
    return _remember(form, module, module.workspace(q, k, v, mask, backward=True, deterministic=deterministic))


@op(accumulates=("dsinks",))
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None = None, dsinks: Tensor | None = None,
    scratch: Scratch | None = None, kernel: str | None = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """Gradients of L given do = ∂L/∂o and dlse = ∂L/∂lse (None = 0)."""
    grads = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **grads}
    plan = bwd_plan(q, k, v, mask, others, kernel, deterministic)
    check_lengths(q, k, mask)
    plan.module.bwd(
        q, k, v, o, lse, do, dlse, mask, **grads,
        scratch=_checked_scratch(scratch, plan.scratch, q.device), deterministic=deterministic,
    )  # fmt: skip


def _checked_scratch(scratch: Scratch | None, needed: Shapes, device: torch.device) -> Scratch:
    """The declared buffers out of `scratch`, checked; others in it are left alone."""
    scratch = scratch or {}
    for name, (shape, dtype) in needed.items():
        if name not in scratch:
            raise ValueError(f"scratch: got no {name!r}; accepted: every buffer that attention_workspace(…) names")
        check_tensor(f"scratch[{name!r}]", scratch[name], shape, dtype, device)
        if not scratch[name].is_contiguous():
            raise ValueError(f"scratch[{name!r}]: got strides {scratch[name].stride()}; accepted: contiguous")
    return {name: scratch[name] for name in needed}
