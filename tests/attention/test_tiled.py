"""The tiled kernel against the oracle: random calls with every feature, ragged tiles, memory, determinism."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import (
    AXES,
    LARGE_SCORES,
    WITH_LARGE_SCORES,
    Case,
    allowed,
    build,
    case_of,
    cases,
    check_call,
    run,
)
from support.pairwise import all_pairs, covering, pairs
from torch.utils._python_dispatch import TorchDispatchMode

import tilegrad
from tilegrad.kernels.attention import api, bounds, tiled
from tilegrad.kernels.attention.mask import Mask
from tilegrad.kernels.scratch import new_scratch


def check(case: Case, tile: int, slab: int, seed: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE", tile)
        patch.setattr(tiled, "SLAB", slab)
        patch.setattr(api, "prepared_calls", {})  # prepared for other tiles
        call = build(case, seed)
        check_call(call, run(call, "tiled"))


PAIRS = 2_635  # number of pairs of options, sizes and tiles


def test_every_pair_of_options_of_a_call_agrees_with_the_oracle() -> None:
    axes = AXES | {"tile": (16, 64, 256), "slab": (1, 2000, 1 << 21)}
    specs = covering(axes, allowed)
    every = all_pairs(axes, allowed)
    assert set.union(*map(pairs, specs)) == every and len(every) == PAIRS
    for spec in specs:
        check(case_of(spec), spec["tile"], spec["slab"])


def test_every_option_of_a_call_is_in_the_pairs() -> None:
    """A new field of Mask needs values in AXES."""
    of_axes = {"band": {"causal", "window"}, "alibi": {"alibi_slopes"}, "dropout_p": {"dropout_p", "seed"}}
    lengths = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    drawn = set.union(*({axis} | of_axes.get(axis, set()) for axis in AXES), lengths)
    assert {one.name for one in fields(Mask) if one.init} <= drawn


@pytest.mark.slow
@settings(max_examples=2000)
@given(
    case=cases(), tile=st.sampled_from((16, 32, 64, 256)), slab=st.sampled_from((1, 500, 9000)), seed=st.integers(1, 9)
)
def test_many_random_calls_agree_with_the_oracle(case: Case, tile: int, slab: int, seed: int) -> None:
    check(case, tile, slab, seed)


@pytest.mark.parametrize("name", WITH_LARGE_SCORES)
def test_large_scores_agree_with_the_oracle(name: str) -> None:
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), LARGE_SCORES):
        check(replace(WITH_LARGE_SCORES[name], dtype=dtype, scores=size), 64, tiled.SLAB)


@pytest.mark.parametrize("t", [1, 63, 113, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_lengths_with_tiles_of_full_size_agree_with_the_oracle(t: int, dtype: torch.dtype) -> None:
    t = 259 if t == 1023 and dtype == torch.bfloat16 else t  # more than two tiles; the longest only once
    check(Case(b=1, group=2, tq=t, tk=t, causal=True, dtype=dtype, sinks=True, dlse=True), tiled.TILE, tiled.SLAB)


@pytest.mark.parametrize("d", [1, 2, 63, 96, 97, 128, 255, 256, 257, 512])
def test_every_head_dimension_agrees_with_the_oracle(d: int) -> None:
    check(Case(d=d, dv=d, causal=True), 16, tiled.SLAB)


def test_a_call_may_have_no_sequences_heads_rows_or_columns() -> None:
    for case in (
        Case(b=0),
        Case(tq=0),
        Case(tk=0, sinks=True, dlse=True),
        Case(lengths=((0, 0),)),
        Case(lengths=((3, 0), (0, 4))),
    ):
        check(case, tiled.TILE, tiled.SLAB)


def test_an_infinite_dlse_of_rows_that_attend_to_nothing_gives_no_nan() -> None:
    call = build(Case(causal=True, tq=6, tk=4, dlse=True))
    assert call.dlse is not None
    call.dlse[:, :, :2] = torch.inf
    assert not any(x.isnan().any() for x in run(call, "tiled").values())


def test_an_output_given_as_none_is_not_computed() -> None:
    from tilegrad import attention_bwd, attention_workspace

    call = build(Case(causal=True, bias="hqk", sinks=True))
    want = run(call, "tiled")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="tiled")
    scratch = new_scratch(shapes, "cpu")
    for alone in ("dq", "dk", "dv", "dbias", "dsinks"):
        outputs: dict[str, Any] = {
            name: torch.zeros_like(want[name]) if name == alone else None
            for name in ("dq", "dk", "dv", "dbias", "dsinks")
        }
        attention_bwd(q, k, v, want["o"], want["lse"], call.do, None, mask, **outputs, scratch=scratch, kernel="tiled")
        assert torch.equal(outputs[alone], want[alone]), alone


def test_dsinks_accumulates_and_the_other_gradients_overwrite() -> None:
    from tilegrad import attention_bwd, attention_workspace

    call = build(Case(sinks=True))
    first = run(call, "tiled")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    shapes = attention_workspace(q, k, v, mask, backward=True, kernel="tiled")
    scratch = new_scratch(shapes, "cpu")
    again: dict[str, Any] = {name: first[name].clone() for name in ("dq", "dk", "dv", "dsinks")}
    attention_bwd(q, k, v, first["o"], first["lse"], call.do, None, mask, **again, scratch=scratch, kernel="tiled")
    assert torch.equal(again["dsinks"], 2 * first["dsinks"])
    assert all(torch.equal(again[name], first[name]) for name in ("dq", "dk", "dv"))


def test_scratch_of_a_call_is_large_enough_for_every_shorter_call() -> None:
    from tilegrad import attention_workspace

    def numbers(b: int, t: int, backward: bool) -> dict[str, int]:
        q, k = torch.empty(b, 12, t, 64, device="meta"), torch.empty(b, 4, t, 64, device="meta")
        shapes = attention_workspace(q, k, k, Mask(causal=True), backward=backward)
        return {name: shape[0] for name, (shape, _) in shapes.items()}

    for backward in (False, True):
        for b, t in ((64, 1024), (7, 300), (3, 65)):
            whole = numbers(b, t, backward)
            for shorter in ((b, t - 1), (b, t // 3), (b, 16), (b, 1), (1, t), (max(1, b // 2), 128)):
                if shorter[1] <= t:
                    part = numbers(*shorter, backward)
                    assert all(part[name] <= whole[name] for name in part), shorter


def test_repeated_calls_have_the_same_bits() -> None:
    call = build(Case(tq=70, tk=90, causal=True, bias="hk", sinks=True, dropout_p=0.2, dlse=True))
    first = run(call, "tiled", deterministic=True)
    for _ in range(5):
        again = run(call, "tiled", deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest storage that an op inside uses."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_matrix_of_t_by_t_exists_at_8192() -> None:
    t = 8192
    call = build(Case(b=1, hkv=1, tq=t, tk=t, d=8, dv=8, causal=True))
    with LargestTensor() as seen:
        run(call, "tiled")
    assert 0 < seen.elements <= t * tiled.TILE < t * t // 16


FEATURES = {
    "causal": Case(causal=True),
    "half": Case(causal=True, dtype=torch.bfloat16),
    "all": Case(causal=True, window=(40, 2), softcap=3.0, bias="hk", alibi="bh", sinks=True, dropout_p=0.2, dlse=True),
    "groups, bool bias": Case(group=2, bias="BQK", dtype=torch.float16),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_call_allocates_no_memory(name: str) -> None:
    """The allocator's events for memory larger than the scalars that torch wraps."""
    from torch.profiler import ProfilerActivity, profile

    from tilegrad import attention_bwd, attention_fwd, attention_workspace

    call = build(replace(FEATURES[name], tq=300, tk=280))
    want = run(call, "tiled")
    q, k, v, mask = call.q, call.k, call.v, call.mask
    scratch = {}
    for backward in (False, True):
        shapes = attention_workspace(q, k, v, mask, backward=backward, kernel="tiled")
        scratch[backward] = new_scratch(shapes, "cpu")
    outputs: dict[str, Any] = {name: torch.empty_like(x) for name, x in want.items()}
    o, lse = outputs.pop("o"), outputs.pop("lse")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch[False], kernel="tiled")
        attention_bwd(q, k, v, o, lse, call.do, call.dlse, mask, **outputs, scratch=scratch[True], kernel="tiled")
    allocated = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]
    assert max(allocated, default=0) <= 1024, sorted(allocated)[-5:]


def wrong_scores(slab: tiled.Slab, *args: object, **kwargs: object) -> torch.Tensor:
    s = right_scores(slab, *args, **kwargs)  # type: ignore[arg-type]
    if args[2].start > 0 and args[3].start > 0:  # type: ignore[attr-defined]
        s[0, 0, 0] += 0.05
    return s


right_scores = tiled.Slab.scores


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_canary_one_wrong_score_in_one_tile_is_seen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    case = Case(tq=40, tk=40, dtype=dtype)
    check(case, 16, tiled.SLAB)
    monkeypatch.setattr(tiled.Slab, "scores", wrong_scores)
    with pytest.raises(AssertionError, match="error"):
        check(case, 16, tiled.SLAB)


def test_canary_a_skipped_tile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mask, "rows_of", lambda _self, columns, tq, _tk: range(columns.start // 2, tq - 16))
    with pytest.raises(AssertionError, match="error"):
        check(Case(tq=64, tk=64), 16, tiled.SLAB)


WRONG = {"o": 1.005, "lse": 1.005, "dq": 1.01, "dk": 1.01, "dv": 1.01}
BF16 = Case(tq=113, tk=113, d=64, dv=64, causal=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", WRONG)
def test_canary_a_factor_in_bfloat16_is_seen(name: str) -> None:
    call = build(BF16)
    got = run(call, "tiled")
    check_call(call, got)
    with pytest.raises(AssertionError, match=f"{name}: factor"):
        check_call(call, got | {name: got[name] * WRONG[name]})


def test_canary_a_scale_that_is_wrong_by_a_thousandth_is_seen_in_bfloat16() -> None:
    call = build(BF16)
    mask = replace(call.mask, scale=1.001 * call.mask.scale_for(BF16.d))
    with pytest.raises(AssertionError, match="lse"):
        check_call(call, run(replace(call, mask=mask), "tiled"))


def test_numbers_that_a_gpu_flushes_to_zero_are_allowed_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi makes p of a far column smaller than float32's smallest normal number."""
    call = build(Case(b=1, hkv=1, tq=1, tk=120, d=16, dv=16, dtype=torch.bfloat16))
    call = replace(call, mask=replace(call.mask, alibi_slopes=torch.ones(1)))
    tiny = torch.finfo(torch.float32).tiny
    got = run(call, "tiled")
    flushed = {name: x.masked_fill(x.abs() < tiny, 0.0) for name, x in got.items()}
    assert any(not torch.equal(flushed[name], x) for name, x in got.items())
    check_call(call, got)
    with pytest.raises(AssertionError, match="largest error"):
        check_call(call, flushed)
    monkeypatch.setattr(bounds, "_flushes", lambda _q: True)
    check_call(call, flushed)
    with pytest.raises(AssertionError, match="dv"):
        check_call(call, flushed | {"dv": flushed["dv"] + 2 * tiny})


def test_tiles_that_intervals_mask_out_are_skipped_and_only_tiles_on_an_edge_are_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Documents of 0 … 31, 32 … 47 and 48 … 79 in tiles of 16, causal: 3 + 1 + 3 of 15 tiles. Then they end in tiles."""
    monkeypatch.setattr(tiled, "TILE", 16)
    monkeypatch.setattr(api, "prepared_calls", {})
    scores, buffer, computed, masked = tiled.Slab.scores, tiled.Slab.buffer, [0], [0]

    def counted(slab: tiled.Slab, *arguments: Any, **options: Any) -> torch.Tensor:
        computed[0] += 1
        return scores(slab, *arguments, **options)

    def spied(slab: tiled.Slab, name: str, *shape: int) -> torch.Tensor:
        masked[0] += name == "interval_masked"
        return buffer(slab, name, *shape)

    monkeypatch.setattr(tiled.Slab, "scores", counted)
    monkeypatch.setattr(tiled.Slab, "buffer", spied)
    call = build(Case(tq=80, tk=80, causal=True))
    for ends, tiles, on_an_edge in (((0, 32, 48, 80), 7, 0), ((0, 30, 80), 12, 5)):
        computed[0] = masked[0] = 0
        of = replace(call, mask=replace(call.mask, intervals=tilegrad.masks.documents(ends)["intervals"]))
        check_call(of, run(of, "tiled"))
        assert computed[0] == 2 * tiles and masked[0] == 2 * on_an_edge  # in forward and backward


WRONG_INTERVALS: dict[str, Callable[[torch.Tensor], object]] = {
    "starts one later": lambda columns: columns[..., 0].add_(1),
    "ends one earlier": lambda columns: columns[..., 1].sub_(1),
    "no second interval": lambda columns: columns[..., 1, :].zero_(),
    "the first head's in every head": lambda columns: columns.copy_(columns[:, :1].clone()),
    "the first sequence's in every one": lambda columns: columns.copy_(columns[:1].clone()),
}


@pytest.mark.parametrize("wrong", WRONG_INTERVALS)
def test_canary_wrong_intervals_are_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, columns_of = Case(intervals="bh4", dtype=torch.bfloat16), tiled.Slab.columns

    def broken(slab: tiled.Slab, intervals: torch.Tensor, j: range) -> torch.Tensor:
        columns = columns_of(slab, intervals, j)
        WRONG_INTERVALS[wrong](columns)
        return columns

    check(case, 16, tiled.SLAB)
    monkeypatch.setattr(tiled.Slab, "columns", broken)
    with pytest.raises(AssertionError):
        check(case, 16, tiled.SLAB)


@pytest.mark.parametrize("interval", [(1, 16), (0, 15), (15, 17)], ids=str)
def test_canary_a_tile_with_one_row_left_or_masked_out(
    interval: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interval leaves the first or the last of the 16 rows of a tile, or masks out one. Then that tile is skipped."""
    monkeypatch.setattr(tiled, "TILE", 16)
    monkeypatch.setattr(api, "prepared_calls", {})
    call = build(Case(tq=32, tk=32))
    call = replace(call, mask=Mask(intervals=torch.tensor(interval).int().repeat(1, 1, 32, 1)))
    check_call(call, run(call, "tiled"))
    computed = tiled.Slab.computed
    monkeypatch.setattr(tiled.Slab, "computed", lambda slab, i, j: i.start != 0 and computed(slab, i, j))
    with pytest.raises(AssertionError):
        check_call(call, run(call, "tiled"))
