"""The native kernel against the oracle on every instruction set of this CPU; threads, forks, sanitizers, no library."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from ctypes import sizeof
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import (
    AXES,
    LARGE_SCORES,
    WITH_LARGE_SCORES,
    Call,
    Case,
    Tensors,
    allowed,
    bounds,
    build,
    case_of,
    cases,
    oracle,
    run,
)
from support.forked import python
from support.native import ISAS, each_isa, needs_library, without_library
from support.pairwise import all_pairs, covering, pairs

import tilegrad
from tilegrad import attention_bwd, attention_fwd, attention_workspace
from tilegrad.cli import main
from tilegrad.kernels.attention import api as contract
from tilegrad.kernels.attention import cpu as native
from tilegrad.kernels.attention.mask import Mask
from tilegrad.kernels.closeness import Bound, assert_close
from tilegrad.kernels.cpu import abi
from tilegrad.kernels.cpu import library as native_library
from tilegrad.kernels.philox import drop_mask, round_keys, signed
from tilegrad.native import build as native_build

HERE = Path(__file__).parents[1]
needs_compiler = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=64)
def expected(case: Case, seed: int, exp_error: float) -> tuple[Call, Tensors, dict[str, Bound]]:
    """The call of a case, its exact results and their bounds. The tests of one case on each instruction set follow each
    other, so all of them share what this computes."""
    call = build(case, seed)
    exact = oracle(call)
    return call, exact, bounds(call, exact, exp_error)


def check(case: Case, isa: str, seed: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGRAD_ISA", isa)
        call, exact, allowed_errors = expected(case, seed, native.exp_error(case.dtype))
        assert_close(run(call, "native"), exact, allowed_errors)


PAIRS = 2_206  # number of pairs of options and sizes, without the instruction sets


@needs_library
def test_every_pair_of_options_of_a_call_agrees_with_the_oracle() -> None:
    axes = AXES | {"isa": ISAS}
    specs = covering(axes, allowed)
    assert set.union(*map(pairs, specs)) == all_pairs(axes, allowed)
    assert len(all_pairs(AXES, allowed)) == PAIRS
    for spec in specs:
        check(case_of(spec), spec["isa"])


@pytest.mark.slow
@needs_library
@settings(max_examples=2000)
@given(case=cases(), isa=st.sampled_from(ISAS or ("none",)), seed=st.integers(1, 9))
def test_many_random_calls_agree_with_the_oracle(case: Case, isa: str, seed: int) -> None:
    check(case, isa, seed)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WITH_LARGE_SCORES)
def test_large_scores_agree_with_the_oracle(isa: str, name: str, dtype: torch.dtype) -> None:
    for size in LARGE_SCORES:
        check(replace(WITH_LARGE_SCORES[name], dtype=dtype, scores=size), isa)


@needs_library
@pytest.mark.parametrize("d", [40, 80, 128])
@pytest.mark.parametrize("size", [1.0, *LARGE_SCORES])
def test_large_scores_err_at_most_twice_as_much_as_in_sdpa(size: float, d: int) -> None:
    call = build(Case(b=1, hkv=2, tq=130, tk=130, d=d, dv=d, causal=True, scores=size))
    exact, got = oracle(call), run(call, "native")
    q, k, v = (x.clone().requires_grad_() for x in (call.q, call.k, call.v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = {"o": o.detach(), "dv": torch.autograd.grad(o, v, call.do)[0]}
    for name, x in theirs.items():
        ours, sdpa = ((y.double() - exact[name]).norm() / exact[name].norm() for y in (got[name], x))
        assert ours <= (2 * sdpa if sdpa < 1 else 0) + 1e-7, name  # on x86 SDPA's own dv is NaN from 10⁸ on


@each_isa
@pytest.mark.parametrize("t", [1, 63, 113, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_lengths_agree_with_the_oracle(isa: str, t: int, dtype: torch.dtype) -> None:
    if t > 300 and isa != ISAS[-1]:
        t = 259  # three tiles; whole matrices of 1023 have 16 times as many numbers
    check(Case(b=1, hkv=1, group=2, tq=t, tk=t, causal=True, dtype=dtype, sinks=True, dlse=True), isa)


@each_isa
@pytest.mark.parametrize("d", [1, 2, 63, 96, 97, 128, 255, 256, 257, 512])
def test_every_head_dimension_agrees_with_the_oracle(isa: str, d: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(Case(d=d, dv=d, causal=True, dtype=dtype), isa)


def check_some(cases: Sequence[Case], isa: str, number: int = 0) -> None:
    """All cases run on the first instruction set, and every second case on each of the rest, which are compiled from the same
    code."""
    at = ISAS.index(isa)
    for case in cases if at == 0 else cases[(at + number) % 2 :: 2]:
        check(case, isa)


@each_isa
def test_bands_over_many_tiles_agree_with_the_oracle(isa: str) -> None:
    windows, lengths = ((0, 0), (100, 3), (None, 70), (250, None)), ((300, 300), (130, 400), (400, 130))
    for number, window in enumerate(windows):
        kinds = product(lengths, (torch.float32, torch.bfloat16))
        cases = [Case(b=1, hkv=1, group=2, tq=tq, tk=tk, window=window, dtype=dtype) for (tq, tk), dtype in kinds]
        # so that every second case has both dtypes
        check_some([*cases[:2], cases[3], cases[2], *cases[4:]], isa, number)


FORMS = ["".join(kept) for n in range(5) for kept in combinations("bhqk", n)]


@each_isa
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_of_every_form_and_its_gradient_agree_with_the_oracle(isa: str, form: str) -> None:
    """A form has some of the axes b, h, q, k; "" is a bias of one number."""
    case = Case(b=2, hkv=2, group=2, tq=70, tk=140, bias=form or "-")
    low = replace(case, dtype=torch.bfloat16)
    cases = [
        case,
        replace(case, group=1, tq=140, window=(40, 30), dropout_p=0.25),
        replace(low, causal=True, softcap=2.0, sinks=True, dlse=True),
        replace(low, bias_dtype=torch.bfloat16),
    ]
    check_some(cases, isa, FORMS.index(form))


@each_isa
@pytest.mark.parametrize("form", [form.upper() for form in FORMS if form])
def test_a_bool_bias_of_every_form_agrees_with_the_oracle(isa: str, form: str) -> None:
    plain, low = (
        Case(b=2, hkv=1, group=2, tq=70, tk=140, dtype=dtype, bias=form) for dtype in (torch.float32, torch.bfloat16)
    )
    more: dict[str, Any] = {"causal": True, "softcap": 2.0, "alibi": "bh"}
    check_some([plain, low, replace(low, **more), replace(plain, **more)], isa, len(form))


PADDING = [("bool", torch.bfloat16), ("float", torch.float32)]  # every second instruction set has the other two pairs


@lru_cache(maxsize=4)
def padded(kind: str, dtype: torch.dtype, exp_error: float) -> list[tuple[Call, bool, Tensors, dict[str, Bound]]]:
    """(call, whether single rows are masked out, exact results, bounds), shared by the instruction sets."""
    call = build(Case(b=4, hkv=1, group=2, tq=300, tk=300, d=32, dv=32, dtype=dtype, dlse=True))
    lengths = torch.tensor([300, 130, 0, 5])
    attends = (torch.arange(300) < lengths[:, None])[:, None, None]
    rows = attends.expand(4, 1, 300, 300).clone()
    rows[0, 0, 7] = False
    rows[0, 0, 140:, 100:] = False
    found = []
    for attended in (attends, rows, rows.expand(4, 2, 300, 300)):
        bias = attended if kind == "bool" else torch.where(attended, 0.5, -torch.inf)
        masked = replace(call, mask=replace(call.mask, bias=bias))
        exact = oracle(masked)
        found.append((masked, attended is not attends, exact, bounds(masked, exact, exp_error)))
    return found


@each_isa
@pytest.mark.parametrize(
    ("kind", "dtype"),
    PADDING if len(ISAS) > 1 else [*PADDING, ("bool", torch.float32), ("float", torch.bfloat16)],
)
def test_padding_and_rows_that_a_bias_masks_out_agree_with_the_oracle(
    isa: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked out: keys after the end of a sequence, all keys of one sequence, rows of another. Whole tiles are not read."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    if isa != ISAS[0]:
        kind = {"bool": "float", "float": "bool"}[kind]
    for masked, by_rows, exact, allowed_errors in padded(kind, dtype, native.exp_error(dtype)):
        got = run(masked, "native")
        assert_close(got, exact, allowed_errors)
        assert (got["lse"][2] == -torch.inf).all() and not got["o"][2].any() and not got["dq"][2].any()
        assert not got["dk"][2].any() and not got["dv"][1, :, 130:].any()
        if by_rows:
            assert (got["lse"][0, :, 7] == -torch.inf).all() and not got["dq"][0, :, 7].any()
        unread = replace(masked, k=masked.k.clone(), v=masked.v.clone())
        unread.k[1, :, 256:], unread.v[1, :, 256:] = torch.nan, torch.nan
        again = run(unread, "native")
        assert all(torch.equal(again[name], x) for name, x in got.items())


@each_isa
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_masked_by_the_lowest_number_is_uniform(
    isa: str, dtype: torch.dtype, bias_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """finfo.min is finite: a row of nothing else attends to all keys equally, as in softmax."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    t = 150
    if dtype == torch.float32 and bias_dtype == torch.bfloat16:
        pytest.skip("a bias is float32 or of q's dtype")
    q, k, v = (torch.randn(1, 2, t, 32, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
    bias = torch.zeros(t, t, dtype=bias_dtype)
    bias[40:73] = torch.finfo(bias_dtype).min
    bias[3, 70:] = torch.finfo(bias_dtype).min
    o, lse = tilegrad.attention(q, k, v, bias=bias, return_lse=True, kernel="native")
    want, want_lse = tilegrad.attention(
        q.double(), k.double(), v.double(), bias=bias.double(), return_lse=True, kernel="reference"
    )
    assert torch.isfinite(lse).all() and torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-3)
    assert float((o.double() - want).abs().max()) < (2e-6 if dtype == torch.float32 else 8e-3)
    assert float((want[:, :, 40:73] - v.double().mean(2, keepdim=True)).abs().max()) < 1e-12


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_may_have_any_strides(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be expanded, transposed, every other column of a larger tensor, or lack dimensions: the bits are the same."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    call = build(Case(b=2, hkv=2, tq=200, tk=200, d=32, dv=32, dtype=dtype))
    wide = torch.randn(2, 2, 200, 400, generator=torch.Generator().manual_seed(1))
    biases = [
        wide[..., :200].mT, wide[..., ::2], wide[..., 1:201], wide[:, :1, :1, :200].expand(2, 2, 200, 200),
        wide[:1, :, :, :1].expand(2, 2, 200, 200), wide[0, 0, :, :200], wide[0, 0, 0, :200], wide[0, 0, 0, 0],
    ]  # fmt: skip
    for bias in biases:
        for x in (bias, bias > -0.5, bias.to(dtype)):
            strided, copied = (
                run(replace(call, mask=replace(call.mask, bias=y)), "native") for y in (x, x.contiguous())
            )
            assert all(torch.equal(strided[name], y) for name, y in copied.items()), (x.shape, x.stride())


@needs_library
def test_the_gradient_of_a_bias_may_have_any_strides() -> None:
    for form in ("bhqk", "hqk", "hk", "bq", "h"):
        call = build(Case(b=2, hkv=2, tq=80, tk=90, bias=form))
        q, k, v, mask, want = call.q, call.k, call.v, call.mask, run(call, "native")
        shapes = attention_workspace(q, k, v, mask, backward=True, kernel="native")
        scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        dbias = torch.full((*want["dbias"].shape, 2), torch.nan)[..., 0]
        attention_bwd(
            q, k, v, want["o"], want["lse"], call.do, None, mask, dq=None, dk=None, dv=None, dbias=dbias,
            scratch=scratch, kernel="native",
        )  # fmt: skip
        assert torch.equal(dbias, want["dbias"])


SEEDS = (0, -1, 2**64 - 1, 0x1234_5678_9ABC_DEF0)


@each_isa
@pytest.mark.parametrize(
    ("dtype", "seed"),
    [*((torch.float32, seed) for seed in SEEDS), (torch.float64, SEEDS[3]), (torch.bfloat16, SEEDS[2])],
)
def test_dropout_draws_the_mask_of_philox(
    isa: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With q = 0 all p are equal. If v is the identity o shows which p are kept, and so does dv if do is."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    b, hkv, group, t = 2, 2, 3, 203
    call = build(Case(b=b, hkv=hkv, group=group, tq=t, tk=t, d=8, dv=t, dtype=dtype, dropout_p=0.25))
    eye = torch.eye(t, dtype=dtype)
    call = replace(
        call, q=torch.zeros_like(call.q), v=eye.expand(b, hkv, t, t), do=eye.expand(b, hkv * group, t, t),
        mask=replace(call.mask, seed=seed),
    )  # fmt: skip
    numbers = [torch.arange(n) for n in (b, hkv * group, t, t)]
    dropped, work = (
        torch.empty(b, hkv * group, t, t, dtype=torch.bool),
        torch.empty(6, b, hkv * group, t, t, dtype=torch.int64),
    )
    drop_mask(round_keys(seed), 0.25, *numbers, dropped=dropped, work=work)
    got = run(call, "native")
    assert torch.equal(got["o"] == 0, dropped)
    kept = (~dropped).view(b, hkv, group, t, t).sum(2).mT
    assert torch.equal((got["dv"].double() * 0.75 * t).round(), kept.double())


@each_isa
def test_dropout_over_many_tiles_agrees_with_the_oracle(isa: str) -> None:
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(b=2, hkv=2, group=2, tq=150, tk=210, d=32, dv=32, dtype=dtype, dropout_p=0.3, dlse=True)
        cases += [
            case,
            replace(case, causal=True, softcap=2.0, alibi="h", sinks=True),
            replace(case, lengths=((100, 200), (0, 30), (170, 131)), causal=True),
        ]
    check_some(cases, isa)


@each_isa
def test_a_call_may_have_no_sequences_heads_rows_or_columns(isa: str) -> None:
    for case in (
        Case(b=0), Case(tq=0), Case(tk=0, sinks=True, dlse=True), Case(lengths=((0, 0),)), Case(lengths=((3, 0), (0, 4))),
        Case(b=0, bias="h"), Case(tq=0, bias="k"), Case(tk=0, bias="q"), Case(tk=0, bias="bhqk"), Case(tq=0, bias="BK"),
    ):  # fmt: skip
        check(case, isa)


@needs_library
@pytest.mark.parametrize("wrong", ["left", "right"])  # side of the band
def test_canary_a_band_one_column_too_wide_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    right_sizes = native.size_fields

    def wider(*call: object) -> dict[str, int]:
        sizes = right_sizes(*call)  # type: ignore[arg-type]
        return sizes | {wrong: sizes[wrong] + 1}

    case = Case(tq=200, tk=200, window=(150, 0))
    check(case, ISAS[-1])
    monkeypatch.setattr(native, "size_fields", wider)
    monkeypatch.setattr(contract, "prepared_calls", {})  # the call above was prepared with the correct band
    with pytest.raises(AssertionError, match="error"):
        check(case, ISAS[-1])


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])  # number of the stride
@needs_library
def test_canary_a_bias_read_with_a_wrong_stride_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    right_pairs = native._pairs

    def other(x: torch.Tensor | None) -> tuple[int, ...]:
        view = list(right_pairs(x))
        view[1 + wrong] = 0
        return tuple(view)

    case = Case(tq=80, tk=80, bias="bhqk")
    check(case, ISAS[-1])
    monkeypatch.setattr(native, "_pairs", other)
    monkeypatch.setattr(contract, "prepared_calls", {})  # the call above was prepared with the correct strides
    with pytest.raises(AssertionError, match=r"error|NaN"):
        check(case, ISAS[-1])


@needs_library
def test_an_infinite_dlse_of_rows_that_attend_to_nothing_gives_no_nan() -> None:
    call = build(Case(causal=True, tq=6, tk=4, dlse=True))
    assert call.dlse is not None
    call.dlse[:, :, :2] = torch.inf
    assert not any(x.isnan().any() for x in run(call, "native").values())


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_an_input_reaches_the_output(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    call = build(Case(tq=70, tk=70, d=32, dv=32, dtype=dtype))
    call.q[0, 0, 66, 3] = torch.nan
    got = run(call, "native")
    assert got["o"][0, 0, 66].isnan().all() and got["dq"][0, 0, 66].isnan().all() and got["dk"][0, 0].isnan().any()
    assert not got["o"][0, 0, :66].isnan().any() and not got["o"][1].isnan().any()


@needs_library
def test_outputs_and_do_may_have_any_strides() -> None:
    call = build(Case(causal=True))
    q, k, v, mask = call.q, call.k, call.v, call.mask
    do = torch.ones(()).expand(call.do.shape)  # the gradient of o.sum()
    want = run(replace_do(call, do.contiguous()), "native")
    wide = {name: torch.full((*x.shape, 2), torch.nan)[..., 0] for name, x in want.items()}
    scratch = [
        {
            n: torch.empty(s, dtype=t)
            for n, (s, t) in attention_workspace(q, k, v, mask, backward=b, kernel="native").items()
        }
        for b in (False, True)
    ]
    attention_fwd(q, k, v, mask, o=wide["o"], lse=wide["lse"], scratch=scratch[0], kernel="native")
    grads: dict[str, Any] = {name: wide[name] for name in ("dq", "dk", "dv")}
    attention_bwd(q, k, v, wide["o"], wide["lse"], do, None, mask, **grads, scratch=scratch[1], kernel="native")
    assert all(torch.equal(wide[name], want[name]) for name in want)


def replace_do(call: Call, do: torch.Tensor) -> Call:
    return replace(call, do=do)


@needs_library
def test_an_output_given_as_none_is_not_computed() -> None:
    call = build(Case(causal=True, sinks=True, tq=80, tk=90, bias="hq"))
    want = run(call, "native")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="native")
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    for alone in names:
        outputs: dict[str, Any] = {name: torch.zeros_like(want[name]) if name == alone else None for name in names}
        attention_bwd(q, k, v, want["o"], want["lse"], call.do, None, mask, **outputs, scratch=scratch, kernel="native")
        assert torch.equal(outputs[alone], want[alone]), alone


@needs_library
def test_dsinks_accumulates_and_the_other_gradients_overwrite() -> None:
    call = build(Case(sinks=True))
    first = run(call, "native")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="native")
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    again: dict[str, Any] = {name: first[name].clone() for name in ("dq", "dk", "dv", "dsinks")}
    attention_bwd(q, k, v, first["o"], first["lse"], call.do, None, mask, **again, scratch=scratch, kernel="native")
    assert torch.equal(again["dsinks"], 2 * first["dsinks"])
    assert all(torch.equal(again[name], first[name]) for name in ("dq", "dk", "dv"))


SHAPES = {
    "few long heads": Case(b=1, hkv=1, tq=700, tk=700, d=32, dv=32, causal=True, sinks=True, dlse=True),
    "many short heads": Case(b=3, hkv=3, group=2, tq=70, tk=50, window=(30, 10)),
    "packed": Case(lengths=((100, 200), (0, 30), (260, 131)), group=3, causal=True, softcap=2.0, alibi="bh"),
    "bfloat16": Case(b=1, hkv=2, tq=500, tk=500, d=64, dv=64, causal=True, dtype=torch.bfloat16, sinks=True),
    "bias of all": Case(b=3, hkv=2, group=2, tq=300, tk=300, bias="qk"),
    "bias of columns": Case(b=3, hkv=2, tq=300, tk=300, bias="k", dtype=torch.bfloat16, causal=True),
    "bias of rows": Case(b=3, hkv=2, group=2, tq=300, tk=300, bias="q", window=(100, 100)),
    "intervals": Case(b=2, hkv=2, group=2, tq=300, tk=300, d=64, dv=64, causal=True, intervals="bh4", bias="qk"),
    "bias of heads, dropout": Case(b=3, hkv=2, group=2, tq=130, tk=130, bias="h", dropout_p=0.2, softcap=3.0),
}


@pytest.mark.usefixtures("threads")
@each_isa
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_the_same_with_1_2_4_and_9_threads(isa: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    call = build(SHAPES[name])
    results = []
    for n in (1, 2, 4, 9, 2, 4):
        torch.set_num_threads(n)
        results.append(run(call, "native", deterministic=True))
    for other in results[1:]:
        assert all(torch.equal(other[key], x) for key, x in results[0].items())


@needs_library
@pytest.mark.usefixtures("threads")
def test_several_python_threads_may_call_the_kernel_at_once() -> None:
    torch.set_num_threads(3)
    calls = [build(case, seed) for seed, case in enumerate(SHAPES.values())]
    want = [run(call, "native") for call in calls]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(5):
            got = run(calls[n], "native")
            if not all(torch.equal(got[key], x) for key, x in want[n].items()):
                wrong.append(n)

    workers = [threading.Thread(target=work, args=(n % len(calls),)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert not wrong


THREADS = """
import os, torch
from support.cases import Case, build, run
torch.set_num_threads(3)
call = build(Case(b=2, hkv=3, tq=300, tk=300, d=32, dv=32, causal=True))
torch.ones(1 << 20).exp()
before = len(os.listdir("/proc/self/task"))
run(call, "native")
print(before > 1, len(os.listdir("/proc/self/task")) - before)
"""


@needs_library
@pytest.mark.skipif(
    not Path("/proc/self/task").exists() or native_library.openmp() is None, reason="needs /proc and OpenMP"
)
def test_the_kernel_runs_on_torchs_threads() -> None:
    done = python(THREADS)
    assert done.stdout == "True 0\n", done.stderr


FORK = """
import os, torch
from support.cases import Case, build, run
from support.kernels import run_backward, run_forward
from tilegrad.kernels.attention import cpu as native
torch.set_num_threads(4)
call = build(Case(b=1, hkv=3, tq=300, tk=300, d=32, dv=32, causal=True))
want = {name: x.numpy().tobytes() for name, x in run(call, "native").items()}
q, k, v, mask = call.q, call.k, call.v, call.mask
scratch = [
    {n: torch.empty(s, dtype=t) for n, (s, t) in native.workspace(q, k, v, mask, backward=b, deterministic=True).items()}
    for b in (False, True)
]
o, lse, grads = torch.empty(q.shape), torch.empty(q.shape[:3]), {name: torch.empty(q.shape) for name in ("dq", "dk", "dv")}

def same():  # torch's own threads do not survive a fork: only ours run here
    run_forward(native, q, k, v, mask, o=o, lse=lse, scratch=scratch[0])
    run_backward(native, q, k, v, o, lse, call.do, None, mask, **grads, scratch=scratch[1], deterministic=True)
    return all(x.numpy().tobytes() == want[name] for name, x in {"o": o, "lse": lse, **grads}.items())

for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if same() and same() else 1)
    assert same()
    assert os.waitpid(child, 0)[1] == 0
print("same")
"""


@needs_library
def test_after_a_fork_parent_and_child_can_call_the_kernel() -> None:
    done = python(FORK)
    assert done.stdout == "same\n", done.stderr


FIRST_IN_A_CHILD = """
import os, torch
import tilegrad
torch.set_num_threads(2)
x = torch.randn(512, 512)
x @ x  # torch's threads are there, and gone after the fork
q = torch.randn(1, 2, 300, 64)
tilegrad.attention
for parent in ("imported", "loaded"):
    if parent == "loaded":
        tilegrad.attention_workspace(q, q, q, tilegrad.Mask(), backward=False, kernel="native")
    child = os.fork()
    if child == 0:
        tilegrad.attention(q, q, q, kernel="native")
        os._exit(0)
    print(parent, os.waitpid(child, 0)[1], flush=True)
"""


@needs_library
def test_a_forked_child_may_be_the_first_to_run_a_kernel() -> None:
    done = python(FIRST_IN_A_CHILD)
    assert done.stdout == "imported 0\nloaded 0\n", done.stderr


@needs_library
def test_a_window_wider_than_any_tensor_has_no_edge() -> None:
    call = build(Case())
    for window in ((2**63 - 1, None), (None, 2**63 - 1), (2**63 - 1, 2**63 - 1)):
        wide = run(replace(call, mask=replace(call.mask, window=window)), "native")
        assert all(torch.equal(wide[name], x) for name, x in run(call, "native").items()), window


@needs_library
def test_a_sink_that_is_nan_makes_the_output_nan() -> None:
    call = build(Case(sinks=True))
    assert call.mask.sinks is not None
    call.mask.sinks[0] = torch.nan
    assert run(call, "native")["o"][:, 0].isnan().all()


INTERRUPT = """
import signal, threading, time, os, torch
from support.cases import Case, build, run
torch.set_num_threads(2)
call = build(Case(b=1, hkv=2, tq=1500, tk=1500, d=64, dv=64))
want = run(call, "native")
interrupted = 0
for n in range(6):
    try:
        threading.Timer(0.002 + 0.01 * n, os.kill, (os.getpid(), signal.SIGINT)).start()
        run(call, "native")
        time.sleep(60)  # which the signal ends, however late it comes
    except KeyboardInterrupt:
        interrupted += 1
assert interrupted == 6
assert all(torch.equal(run(call, "native")[name], x) for name, x in want.items())
print("same")
"""


@needs_library
def test_an_interrupt_corrupts_nothing() -> None:
    done = python(INTERRUPT)
    assert done.stdout == "same\n", done.stderr


@needs_library
@pytest.mark.usefixtures("threads")
def test_scratch_grows_with_every_size_and_not_as_t_squared() -> None:
    def numbers(b: int, t: int, n: int = 2, bias: torch.Tensor | None = None) -> int:
        torch.set_num_threads(n)
        q, k = torch.empty(b, 12, t, 64), torch.empty(b, 4, t, 64)
        ((shape, _),) = attention_workspace(
            q, k, k, Mask(causal=True, bias=bias), backward=True, kernel="native"
        ).values()
        return shape[0]

    assert numbers(1, 16) <= numbers(1, 17) <= numbers(2, 17) <= numbers(2, 1024) <= numbers(2, 1024, 4)
    assert numbers(1, 8192) - numbers(1, 4096) <= 2 * 4096 * 3 * (4 * 64 + 8)
    assert numbers(1, 8192) < 8192 * 8192 / 4
    assert numbers(1, 8192) <= numbers(1, 8192, bias=torch.zeros(8192)) < 8192 * 8192 / 4


@needs_library
def test_scratch_for_sums_of_a_bias_gradient_has_its_size() -> None:
    q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16)

    def shape(*kept: int, dtype: torch.dtype = torch.bfloat16) -> object:
        mask = Mask(bias=torch.empty(kept, dtype=dtype))
        return attention_workspace(q, q, q, mask, backward=True, kernel="native").get("native.dbias")

    assert shape(64, 64) == ((64, 64), torch.float32)
    assert (
        shape(2, 4, 64, 64) is None
        and shape(64, 64, dtype=torch.float32) is None
        and shape(64, dtype=torch.bool) is None
    )


@needs_library
def test_an_instruction_set_that_the_cpu_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGRAD_ISA", "mmx")
    with pytest.raises(ValueError, match=r"TILEGRAD_ISA: got 'mmx'; accepted on this machine: 'portable'"):
        run(build(Case()), "native")


@needs_library
def test_the_native_kernel_is_the_default_on_the_cpu_with_every_feature() -> None:
    call = build(Case())
    assert tilegrad.explain(call.q, call.k, call.v).kernel == "native"
    assert tilegrad.explain(call.q, call.k, call.v, dropout_p=0.1, seed=1).kernel == "native"
    for bias in (torch.zeros(33), torch.ones(33, 33, dtype=torch.bool), torch.zeros(2, 1, 1, 33)):
        assert tilegrad.explain(call.q, call.k, call.v, bias=bias).kernel == "native"


def test_without_the_library_the_tiled_kernel_runs_and_the_reason_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with without_library(tmp_path) as none:
        call = build(Case())
        selection = tilegrad.explain(call.q, call.k, call.v)
        assert selection.kernel == "tiled" and "run: tilegrad doctor --build" in selection.reasons["native"]
        tilegrad.attention(call.q, call.k, call.v, kernel="tiled")  # asked for by name: no warning
        with pytest.warns(UserWarning, match=r"plain torch ops: the native kernel.*run: tilegrad doctor --build"):
            tilegrad.attention(call.q, call.k, call.v)
        tilegrad.attention(call.q[:, :, 1:], call.k, call.v)  # another signature: there is one warning only
        with pytest.raises(ValueError, match=r"'native', which can't run this call: was not built.*accepted: 'tiled'"):
            tilegrad.attention(call.q, call.k, call.v, kernel="native")
        assert main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert "missing: it was not built at install" in out and "apt install g++" in out and "attention: tiled" in out
        assert main(["doctor", "--build"]) == 1
        assert "no C++ compiler" in capsys.readouterr().err
        none.write_text(f"not a library of {native_build.digest()}", encoding="utf-8")
        native_library.library.cache_clear()
        assert "can't be loaded" in tilegrad.explain(call.q, call.k, call.v).reasons["native"]


@needs_library
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "digest", lambda: "other")
    native_library.library.cache_clear()
    try:
        assert "was built from other sources" in str(native_library.library())
    finally:
        native_library.library.cache_clear()


@needs_compiler
def test_a_library_built_from_the_sources_here_is_taken() -> None:
    """Without it every test of the native kernels is skipped; then this test fails."""
    found = native_library.library()
    assert not isinstance(found, str), found


def _without(structure: type[ctypes.Structure], name: str) -> type[ctypes.Structure]:
    fields = [field for field in structure._fields_ if field[0] != name]
    return type(structure.__name__, (ctypes.Structure,), {"_fields_": fields})


def _swapped(structure: type[ctypes.Structure], a: str, b: str) -> type[ctypes.Structure]:
    other = {a: b, b: a}
    fields = [(other.get(name, name), kind) for name, kind in structure._fields_]  # type: ignore[misc]
    return type(structure.__name__, (ctypes.Structure,), {"_fields_": fields})


@needs_library
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (_without(abi.Call, "hq"), "Call: field hkv at 24 in the library, at 16"),
        (
            _without(abi.Call, "dropout_p"),
            f"Call: its end at {sizeof(abi.Call)} in the library, at {sizeof(abi.Call) - 8}",
        ),
        (_swapped(abi.Call, "scale", "softcap"), r"Call: field softcap at \d+ in the library, at \d+"),
        (_without(abi.View, "t"), "View: field d at 32 in the library, at 24"),
        (_without(abi.Norm, "eps"), r"Norm: field f at \d+ in the library, at \d+"),
        (_swapped(abi.Activation, "da", "dh"), r"Activation: field dh at \d+ in the library, at \d+"),
    ],
)
def test_canary_a_library_with_another_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, other: type[ctypes.Structure], reason: str
) -> None:
    found = native_library.library()
    assert not isinstance(found, str) and abi.mismatch(found) is None
    structures = [other if other.__name__ == structure.__name__ else structure for structure in abi.STRUCTURES]
    monkeypatch.setattr(abi, "STRUCTURES", tuple(structures))
    native_library.library.cache_clear()
    try:
        assert re.search(f"was built with a different layout of {reason}", str(native_library.library()))
    finally:
        native_library.library.cache_clear()


def test_packed_fields_have_the_offsets_of_the_structure() -> None:
    views = {name: tuple(range(10 * n, 10 * n + 5)) for n, name in enumerate(("q", "dv_", "slopes"), 1)}
    call = abi.Call.from_buffer_copy(abi.pack_call(dtype=2, scratch_bytes=7, softcap=0.5, **views))
    assert (call.dtype, call.scratch_bytes, call.softcap, call.scale, call.isa) == (2, 7, 0.5, 0.0, 0)
    assert all((x.data, x.b, x.h, x.t, x.d) == views[name] for name in views for x in [getattr(call, name)])
    assert call.k.data is None
    with pytest.raises(TypeError, match="heads"):
        abi.pack_call(heads=1)


@needs_library
def test_sizes_of_a_call_and_a_side_of_the_band_that_masks_nothing_are_packed() -> None:
    q, k = torch.empty(2, 6, 3, 16), torch.empty(2, 2, 5, 8)
    want = {"b": 2, "hq": 6, "hkv": 2, "tq": 3, "tk": 5, "d": 16, "dv": 8, "dtype": 0, "bias_dtype": -1, "scale": 0.25}
    ends = torch.tensor([0, 2, 3], dtype=torch.int32)
    for left, right, got in (
        (None, None, (-1, -1)),
        (8, 8, (-1, -1)),
        (7, 0, (7, 0)),
        (0, 7, (0, 7)),
        (9, 9, (-1, -1)),
    ):
        sizes = native.size_fields(q, k, Mask(window=(left, right)))
        assert sizes | want == sizes and (sizes["left"], sizes["right"]) == got
    mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=2, max_seqlen_k=4)
    packed = native.size_fields(q[0].transpose(0, 1), k[0].transpose(0, 1), mask)
    assert packed | want | {"b": 2, "tq": 2, "tk": 4} == packed
    sizes = native.size_fields(
        q, k, Mask(sinks=torch.empty(6, dtype=torch.float64), alibi_slopes=torch.empty(6), bias=torch.empty(5) > 0)
    )
    assert (sizes["sinks_dtype"], sizes["slopes_dtype"], sizes["bias_dtype"]) == (1, 0, 4)


def test_views_are_packed_as_the_library_reads_them() -> None:
    """A view is an address and four strides, which are 0 for an absent axis and for a broadcast axis of size 1."""
    x, lse, slopes = torch.empty(2, 3, 5, 7), torch.empty(2, 3, 5), torch.empty(2, 3)
    assert native._rows(x, varlen=False) == (x.data_ptr(), 105, 35, 7, 1)
    assert native._rows(x[0], varlen=True) == (x.data_ptr(), 0, 7, 35, 1)
    assert native._statistic(lse, varlen=False) == (lse.data_ptr(), 15, 5, 1, 0)
    assert native._statistic(lse[0], varlen=True) == (lse.data_ptr(), 0, 5, 1, 0)
    assert native.by_head(slopes) == (slopes.data_ptr(), 3, 1, 0, 0)
    assert native.by_head(slopes[0]) == (slopes.data_ptr(), 0, 1, 0, 0)
    assert native._pairs(x) == (x.data_ptr(), 105, 35, 7, 1)
    assert native._pairs(x[0, :, :1]) == (x.data_ptr(), 0, 35, 0, 1)
    absent = (native._rows(None, varlen=False), native._statistic(None, varlen=True), native.by_head(None))
    assert {*absent, native._pairs(None)} == {(0, 0, 0, 0, 0)}
    assert [signed(seed) for seed in (5, -1, 2**64 - 1, 2**63, 2**63 - 1)] == [5, -1, -1, -(2**63), 2**63 - 1]


def test_a_file_that_ends_before_its_section_headers_counts_as_truncated() -> None:
    """A 64-bit ELF file has their offset, size and number: here they end at byte 100 + 10 · 3."""
    header = bytearray(64)
    header[:5], header[40:48], header[58:60], header[60:62] = (
        b"\x7fELF\x02", (100).to_bytes(8, "little"), (10).to_bytes(2, "little"), (3).to_bytes(2, "little"),
    )  # fmt: skip
    header[48] = 1  # a change of the next field
    whole = bytes(header) + bytes(66)
    assert not native_build.is_cut(whole) and native_build.is_cut(whole[:-1])
    nothing = b"\x7fELF\x02" + bytes(59)
    assert not native_build.is_cut(nothing) and native_build.is_cut(nothing[:-1])
    assert not native_build.is_cut(b"\x7fELF\x01" + whole[5:-1]), "what is no such file, the loader refuses"


def test_the_best_instruction_set_runs_unless_another_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library:
        def tilegrad_native_supported(self) -> int:
            return 0b0101

    monkeypatch.setattr(native_library, "native", Library)
    supported, isa = native_library.supported.__wrapped__, native_library._isa.__wrapped__
    assert supported() == ("portable", "avx512")
    monkeypatch.setattr(native_library, "supported", supported)
    assert (isa(None), isa(b""), isa(b"portable"), isa(b"avx512")) == (2, 2, 0, 2)
    with pytest.raises(ValueError, match="TILEGRAD_ISA: got 'amx'; accepted on this machine: 'portable', 'avx512'"):
        isa(b"amx")


@needs_compiler
def test_the_compiler_is_asked_for_its_targets() -> None:
    cxx, nothing = native_build.compiler(), shutil.which("false")
    assert cxx is not None and "portable" in native_build.targets(cxx)
    assert nothing is None or native_build.targets(nothing) == {}


def test_scratch_begins_at_a_cache_line() -> None:
    work = torch.empty(100)
    for offset in range(0, 20, 3):
        part = work[offset:]
        at, size = native.from_cache_line(part, part.nbytes)
        assert at % 64 == 0 and 0 <= at - part.data_ptr() < 64 and at + size == part.data_ptr() + part.nbytes


@needs_library
def test_doctor_names_the_library_and_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert str(native_build.LIBRARY) in out and "portable" in out and "float32 attention: native, then tiled" in out


# functions are inlined as usual, and little else is optimised, which takes two thirds of the time of -O1
INLINED = (
    "-std=c++17", "-O1", "-fPIC", "-fno-tree-loop-optimize", "-fno-ivopts", "-fno-tree-pre", "-fno-tree-fre", "-fno-gcse",
    "-fno-schedule-insns2", "-fno-if-conversion",
)  # fmt: skip


@needs_compiler
def test_no_symbol_is_shared_by_two_instruction_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker must not keep a function compiled for a newer processor for all of them, so each function that it could merge
    with another's is in the namespace of its instruction set. Only the first and the last of the newer sets are compiled."""
    cxx = native_build.compiler()
    assert cxx is not None
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    flags = native_build.targets(cxx)
    newer = [isa for isa in flags if isa != "portable"] or ["portable"]
    compiled = {isa: flags[isa] for isa in (newer[0], newer[-1])}
    monkeypatch.setattr(native_build, "targets", lambda _cxx: compiled)
    seen = set()
    for command in native_build._commands(cxx, INLINED, tmp_path):
        isa = Path(name := command[-1]).stem.rpartition("_")[2]
        if isa not in compiled:  # compiled once, for every processor
            continue
        native_build.run(command)
        lines = subprocess.run(["nm", "--defined-only", name], capture_output=True, text=True, check=True).stdout
        for _, kind, symbol in (line.split() for line in lines.splitlines()):
            if kind in "WVu" and not symbol.startswith("DW.ref."):
                assert f"8tilegrad{len(isa)}{isa}" in symbol, f"{Path(name).name}: {symbol}"
                seen.add(isa)
    assert seen == set(compiled)


def driver(folder: Path, *flags: str) -> Path:
    cxx = native_build.compiler()
    assert cxx is not None
    compiled = native_build.objects(cxx, folder, (*native_build.FLAGS, "-g", *flags))
    program, source = folder / "native_driver", HERE / "support" / "native_driver.cpp"
    subprocess.run(
        [cxx, "-std=c++17", "-g", *flags, f"-I{native_build.SOURCES}", source, *compiled, "-pthread", "-o", program],
        check=True,
    )
    return program


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_no_error(tmp_path: Path, sanitizer: str) -> None:
    program = driver(tmp_path, "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    done = subprocess.run([program], env=os.environ | {"CALLS": "150"}, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_valgrind_finds_no_error(tmp_path: Path) -> None:
    program = driver(tmp_path)
    done = subprocess.run(
        ["valgrind", "-q", "--error-exitcode=9", program, "portable", "avx2"], env=os.environ | {"CALLS": "25"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
