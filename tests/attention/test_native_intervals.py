"""Interval masks in the native kernel: compared with the oracle and with bands of the same pairs; masked tiles are not read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import Case, build, check_call, run
from support.native import ISAS, each_isa, needs_library

import tilegrad
from tilegrad.kernels.attention import api
from tilegrad.kernels.attention import cpu as native
from tilegrad.kernels.attention.mask import Mask

DTYPES = (torch.float32, torch.bfloat16)
MANY_TILES = Case(b=2, hkv=2, group=2, tq=150, tk=150, d=16, dv=24)


def check(case: Case, seed: int = 0) -> None:
    call = build(case, seed)
    got = run(call, "native")
    check_call(call, got, native.exp_error(case.dtype))
    row = case.tq // 2  # `build` masks all of this row of the first head out
    assert case.sinks or (got["lse"][0, 0, row] == -torch.inf and not got["o"][0, 0, row].any())
    assert not got["dq"][0, 0, row].any()


@each_isa
def test_intervals_over_many_tiles_with_more_options_agree_with_the_oracle(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    for dtype in DTYPES:
        case = replace(MANY_TILES, dtype=dtype)
        check(replace(case, intervals="bh4"))
        check(replace(case, intervals="h2", tq=80, causal=True, sinks=True, dlse=True))
        check(replace(case, intervals="b4", tk=110, window=(90, 40), bias="hqk", dropout_p=0.25, alibi="h"))
        check(replace(case, intervals="2", tq=100, bias="K", softcap=2.0, scale=-0.2))
    check(replace(MANY_TILES, intervals="4", dtype=torch.float64, d=300, dv=300))


def band(window: tuple[int | None, int | None], tq: int, tk: int) -> torch.Tensor:
    """A window as intervals (1, 1, Tk, 4): the rows that are too early and those that are too late for a column."""
    left, right = window
    nearest = torch.arange(tk) - (tk - tq)
    early = torch.zeros(tk) if right is None else nearest - right
    late = torch.full((tk,), tq) if left is None else nearest + left + 1
    return torch.stack((torch.zeros(tk), early, late, torch.full((tk,), tq)), -1).clamp(0, tq).int()[None, None]


@each_isa
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("window", [(None, 0), (0, 0), (100, 3), (70, None)])
def test_a_band_written_as_intervals_has_the_bits_of_the_band(
    isa: str, dtype: torch.dtype, window: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair that is masked out adds p = 0, whichever option masks it out."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    for tq, tk, group in ((333, 333, 1), (130, 200, 3), (200, 130, 1)):
        call = build(Case(b=1, hkv=2, group=group, tq=tq, tk=tk, d=40, dv=40, dtype=dtype, dlse=True))
        want = run(replace(call, mask=Mask(window=window)), "native")
        got = run(replace(call, mask=Mask(intervals=band(window, tq, tk))), "native")
        assert all(torch.equal(got[name], x) for name, x in want.items())


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_that_intervals_mask_out_are_not_read(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two documents end at a tile of every instruction set: NaN in one does not reach the other."""
    monkeypatch.setenv("TILEGRAD_ISA", isa)
    ends, first = (0, 384, 500), slice(0, 384)
    for causal in (False, True):
        call = build(Case(b=1, hkv=1, group=2, tq=500, tk=500, d=32, dv=32, dtype=dtype))
        options = tilegrad.masks.documents(ends, causal=causal)
        call = replace(call, mask=Mask(causal=causal, intervals=options["intervals"]))
        want = run(call, "native")
        call.k[:, :, 384:], call.v[:, :, 384:] = torch.nan, torch.nan
        got = run(call, "native")
        assert all(torch.equal(got[name][:, :, first], x[:, :, first]) for name, x in want.items())
        assert all(got[name][:, :, 384:].isnan().all() for name in ("o", "dq", "dk"))


@needs_library
def test_intervals_may_have_any_strides() -> None:
    """They may be expanded, or every other sequence and head of a larger tensor: the bits are those of a copy."""
    call = build(replace(MANY_TILES, intervals="bh4"))
    assert call.mask.intervals is not None
    one, wide = call.mask.intervals[:1, :1], call.mask.intervals.repeat(2, 3, 1, 1)
    for x in (one.expand(2, 2, -1, -1), one.expand(2, 1, -1, -1), wide[::2, ::3], wide[1:2, 2:4]):
        strided, copied = (run(replace(call, mask=Mask(intervals=y)), "native") for y in (x, x.clone()))
        assert all(torch.equal(strided[name], y) for name, y in copied.items()), (x.shape, x.stride())


# a word of the view and its value
WRONG = {"one sequence's": (1, 0), "one head's": (2, 0), "of half of the columns": (3, 2)}


@needs_library
@pytest.mark.parametrize("wrong", WRONG)
def test_canary_wrong_intervals_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, case = native._intervals, replace(MANY_TILES, intervals="bh4", dtype=torch.bfloat16)
    word, value = WRONG[wrong]

    def other(x: torch.Tensor | None) -> tuple[int, ...]:
        view = right(x)
        return (*view[:word], value, *view[word + 1 :])

    monkeypatch.setenv("TILEGRAD_ISA", ISAS[-1])
    check(case)
    monkeypatch.setattr(native, "_intervals", other)
    monkeypatch.setattr(api, "prepared_calls", {})  # the call above was prepared with the correct intervals
    with pytest.raises(AssertionError):
        check(case)
