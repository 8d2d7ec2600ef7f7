"""The number of kernels that Triton compiles for random calls. Sizes and strides do not add to it.

Triton compiles each form once. A form is a kernel, its constexprs and options, dtypes, whether pointers are aligned, which
arguments are None, and whether the numbers that it specialises on are 1 or multiples of 16. Nothing is compiled here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import hopper_specs
from support.cases import AXES, Case, allowed, build, case_of
from support.kernels import run_backward, run_forward
from torch import Tensor

from tilegrad.kernels.attention.problem import Backward, Forward, output_shapes
from tilegrad.kernels.scratch import new_scratch

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

CALLS = 60
FORMS = {
    "_attention_fwd_kernel": 48, "_delta_kernel": 16, "_dkdv_kernel": 55, "_dq_kernel": 46, "_dbias_kernel": 24,
    "_dbias_rows_kernel": 11, "_dsinks_kernel": 2, "_edges_kernel": 8, "_list_kernel": 16,
}  # fmt: skip
HOPPER_FORMS = {
    "_attention_fwd_kernel": 58, "_hopper_preprocess_kernel": 12, "_hopper_bwd_kernel": 52, "_hopper_postprocess_kernel": 21,
    "_hopper_dsinks_kernel": 2,
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
    if hasattr(x, "block_shape"):  # a tensor descriptor
        return x.base.dtype, *x.block_shape
    if isinstance(x, float):
        return float
    if parameter.annotation_type:
        return parameter.annotation_type
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


@pytest.fixture
def hopper_forms_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], set[Form]]:
    """hopper_forms_of(case): the forms of a forward and a backward on a GPU of 132 multiprocessors."""
    from tilegrad.kernels.attention import hopper
    from tilegrad.kernels.attention.hopper import launch_backward, launch_forward

    found: set[Form] = set()

    def prepare(kernel: Any, _key: object, _grid: int, arguments: tuple[Any, ...], num_warps: int) -> Any:
        values = (specialised(kernel, name, x) for name, x in zip(kernel.arg_names, arguments, strict=True))
        found.add((kernel.fn.__name__, *values, num_warps))
        return SimpleNamespace(device=0)

    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "prepare", prepare)
        monkeypatch.setattr(module, "Plan", lambda *_: lambda _call: None)
        monkeypatch.setattr(module, "multiprocessors", lambda _device: 132)

    def forms_of(case: Case, *, deterministic: bool = False) -> set[Form]:
        found.clear()
        call = build(case)
        q, k, v, mask = call.q, call.k, call.v, call.mask
        o_shape, lse_shape = output_shapes(q, v, mask)
        o, lse = q.new_empty(o_shape), torch.empty(lse_shape)
        grads = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        dsinks = None if mask.sinks is None else torch.empty_like(mask.sinks)
        scratch = [
            new_scratch(hopper.workspace(q, k, v, mask, backward=backward, deterministic=deterministic), "cpu")
            for backward in (False, True)
        ]
        run_forward(hopper, q, k, v, mask, o=o, lse=lse, scratch=scratch[0])
        run_backward(
            hopper, q, k, v, o, lse, call.do, call.dlse, mask, **grads, dsinks=dsinks, scratch=scratch[1],
            deterministic=deterministic,
        )  # fmt: skip
        return set(found)

    return forms_of


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


def test_random_calls_compile_no_more_forms_on_hopper_than_before(hopper_forms_of: Any) -> None:
    dice = random.Random(0)
    found = set()
    for _ in range(CALLS):
        spec = {axis: dice.choice(values) for axis, values in hopper_specs.AXES.items()}
        case = replace(hopper_specs.case_for_hopper(spec, dice), device="cpu")
        found |= hopper_forms_of(case, deterministic=bool(spec["deterministic"]))
    got = Counter(str(form[0]) for form in found)
    assert all(got[name] <= most for name, most in HOPPER_FORMS.items()), got
    assert got.keys() == HOPPER_FORMS.keys()


def test_what_is_not_part_of_a_form(launches: Any) -> None:
    """With rare features it is less than in plain calls."""
    plain = Case(tq=40, tk=70, d=136, dv=136, causal=True, dtype=torch.bfloat16, group=2)
    rare = replace(plain, bias="hqk", alibi="h", sinks=True)
    changes: dict[str, dict[str, Any]] = {
        "batch": {"b": 3}, "heads": {"hkv": 5}, "rows": {"tq": 41}, "columns": {"tk": 113}, "order": {"layout": "bthd"},
        "scale": {"scale": 0.3}, "head dimension": {"d": 200, "dv": 200}, "dlse": {"dlse": True}, "group": {"group": 3},
        "no band": {"causal": False}, "no sinks": {"sinks": False}, "sign": {"scale": -0.3},
        "window": {"window": (40, 0)}, "a whole head dimension": {"d": 256},
    }  # fmt: skip
    other = {
        plain: {"no band", "sign", "window", "a whole head dimension"},
        rare: {"no sinks", "a whole head dimension"},
    }
    for case, differ in other.items():
        want = set(forms_of(launches, case))
        got = {name for name, change in changes.items() if set(forms_of(launches, replace(case, **change))) != want}
        assert got == differ


def test_windows_have_the_same_code(launches: Any) -> None:
    case = Case(tq=300, tk=300, window=(40, 7), dtype=torch.bfloat16)
    for other in (replace(case, window=(40, None)), replace(case, causal=True)):
        assert set(forms_of(launches, other)) == set(forms_of(launches, case))


def test_what_is_not_part_of_a_form_on_hopper(hopper_forms_of: Any) -> None:
    case = Case(tq=300, tk=300, d=40, dv=40, window=(40, 7), dtype=torch.bfloat16, group=2)
    changes: dict[str, dict[str, Any]] = {
        "batch": {"b": 3}, "rows": {"tq": 301}, "head dimension": {"d": 56, "dv": 56}, "dlse": {"dlse": True},
        "open window": {"window": (90, None)}, "group": {"group": 1},
    }  # fmt: skip
    want = hopper_forms_of(case)
    for name, change in changes.items():
        assert hopper_forms_of(replace(case, **change)) == want, name
    softcap = replace(case, window=None, softcap=2.0)
    assert hopper_forms_of(softcap) == hopper_forms_of(replace(softcap, causal=True, tk=320)) != want
