"""The number of kernels that Triton compiles for random calls. Sizes and strides do not add to it.

Triton compiles each form once. A form is a kernel, its constexprs and options, dtypes, whether pointers are aligned, which
arguments are None, and whether the numbers that it specialises on are 1 or multiples of 16. Nothing is compiled here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import AXES, Case, allowed, build, case_of
from torch import Tensor

from tilegrad.kernels.attention.problem import Backward, Forward, output_shapes

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

CALLS = 60
FORMS = {
    "_attention_fwd_kernel": 48, "_delta_kernel": 31, "_dkdv_kernel": 55, "_dq_kernel": 48, "_dbias_kernel": 25,
    "_dbias_rows_kernel": 11, "_dsinks_kernel": 2, "_edges_kernel": 8, "_list_kernel": 38,
}  # fmt: skip
Form = tuple[object, ...]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The launcher on a GPU of 132 multiprocessors and compute capability 9.0, where every tile fits."""
    from tilegrad.kernels.attention.triton import fit, launch

    for module in (fit, launch):
        monkeypatch.setattr(module, "architecture", lambda _device: 90)
    monkeypatch.setattr(launch, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(fit, "fits", {})
    monkeypatch.setattr(fit, "_first_that_fits", lambda _kernel, tiles, *_: (tiles[0], None))
    return launch


def specialised(kernel: Any, name: str, x: Any) -> object:
    parameter = kernel.params[kernel.arg_names.index(name)]
    if parameter.is_constexpr or x is None:
        return x
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, float):
        return float
    width = 32 if -(2**31) <= x < 2**31 else 64
    return width if parameter.do_not_specialize else (width, x == 1, x % 16 == 0)


def forms_of(launch: Any, case: Case) -> Iterator[Form]:
    call = build(case)
    q, k, v, mask = call.q, call.k, call.v, call.mask
    o_shape, lse_shape = output_shapes(q, v, mask)
    o, lse = q.new_empty(o_shape), torch.empty(lse_shape)
    dq, dk, dv, db, ds = (None if x is None else torch.empty_like(x) for x in (q, k, v, mask.float_bias, mask.sinks))
    forward = Forward(q, k, v, mask, o, lse, ())
    backward = Backward(q, k, v, o, lse, call.do, call.dlse, mask, dq, dk, dv, db, ds, (), deterministic=True)
    for of, which, arguments in ((launch._forward, False, forward), (launch._backward, True, backward)):
        shapes = launch.workspace(q, k, v, mask, backward=which, deterministic=True)
        scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for each in of(arguments, scratch):
            kernel = each.kernel
            values = (specialised(kernel, name, each.arguments[name]) for name in kernel.arg_names)
            yield kernel.fn.__name__, *values, *each.options.values()


def drawn(calls: int) -> Iterator[Case]:
    """A specification whose options and sizes are drawn independently."""
    dice = random.Random(0)
    while calls:
        spec = {axis: dice.choice(values) for axis, values in AXES.items()}
        if allowed(spec) and spec["dtype"] != torch.float64:  # Triton has no kernel for it
            calls -= 1
            yield case_of(spec)


def test_random_calls_compile_no_more_forms_than_before(launches: Any) -> None:
    found = {form for case in drawn(CALLS) for form in forms_of(launches, case)}
    got = Counter(str(form[0]) for form in found)
    assert all(got[name] <= most for name, most in FORMS.items()), got
    assert got.keys() == FORMS.keys()


def test_sizes_strides_and_scale_are_not_part_of_a_form(launches: Any) -> None:
    case = Case(tq=40, tk=70, causal=True, bias="hqk", alibi="h", sinks=True, dtype=torch.bfloat16)
    want = set(forms_of(launches, case))
    changes: dict[str, dict[str, Any]] = {
        "batch": {"b": 3}, "heads": {"hkv": 5}, "rows": {"tq": 41}, "columns": {"tk": 113}, "order": {"layout": "bthd"},
        "scale": {"scale": 0.3}, "a window": {"window": (40, 0)},
    }  # fmt: skip
    for name, change in changes.items():
        assert (set(forms_of(launches, replace(case, **change))) == want) == (name != "a window"), name
