"""Interval masks in the Triton kernels against the oracle, in Triton's interpreter: test_triton.py starts its process.

test_triton_compile.py compiles the kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import Call, Case, build, check_call, run
from support.interpreter import INTERPRETED, in_the_interpreter, interpreted
from torch import Tensor

import tilegrad
from tilegrad import masks
from tilegrad.kernels.attention import Mask
from tilegrad.kernels.attention.mask import attends, distance, masked_by
from tilegrad.kernels.attention.problem import sizes_of
from tilegrad.kernels.attention.triton import tiles

pytest.importorskip("triton", reason="needs Triton")
BASE = Case(b=1, hkv=1, tq=40, tk=83, d=16, dv=16)
SQUARE = replace(BASE, tq=96, tk=96)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_more_of_these_tests_pass_in_the_interpreter() -> None:
    in_the_interpreter(__file__, "-k", "more_cases", "--slow")


def rows(tq: int, tk: int, n: int, *runs: tuple[int, int, int, int]) -> Tensor:
    """Empty intervals except (first column, end, first row, end) for each of `runs`, in turn a first and a second interval."""
    x = torch.zeros(1, 1, tk, 2 * n, dtype=torch.int32)
    for i, (begin, end, first, last) in enumerate(runs):
        pair = 2 * (i % n)
        x[..., begin:end, pair : pair + 2] = torch.tensor((min(first, tq), min(last, tq)), dtype=torch.int32)
    return x


def holes(tq: int, tk: int) -> Tensor:
    """Masks out every second tile of columns, so that unmasked tiles have gaps. One row attends to nothing."""
    x = rows(tq, tk, 2, *((c, c + 16, 0, tq) for c in range(16, tk, 32) for _ in "ab"))
    x[..., 2:] = torch.tensor((tq // 2, tq // 2 + 1), dtype=torch.int32)
    return x


MASKS: dict[str, tuple[Case, dict[str, Any]]] = {
    "documents, both ways": (SQUARE, {**masks.documents([0, 16, 96], causal=False)}),
    "holes, groups, half": (
        replace(BASE, group=2, tk=96, dtype=torch.float16, sinks=True, dlse=True), {"intervals": holes(40, 96)},
    ),
    "few rows, split": (
        replace(BASE, tq=3, tk=113, group=2), {"intervals": holes(3, 113), "window": (90, None)},
    ),
    "nothing left": (replace(BASE, tq=20, tk=20, sinks=False, dlse=True), {"intervals": rows(20, 20, 1, (0, 20, 0, 20))}),
}  # fmt: skip
MORE: dict[str, tuple[Case, dict[str, Any]]] = {
    "documents": (SQUARE, {**masks.documents([0, 30, 33, 96])}),
    "documents of each sequence": (replace(SQUARE, b=2), {**masks.documents([[0, 30, 96], [0, 64, 96]])}),
    "prefix": (replace(SQUARE, hkv=2), {**masks.prefix([50], 96)}),
    "shared question": (replace(SQUARE, softcap=3.0), {**masks.shared_question([33, 20, 43])}),
    "holes in float32": (replace(BASE, tk=96, bias="hqk", alibi="h"), {"intervals": holes(40, 96), "causal": True}),
}


def call_of(case: Case, options: dict[str, Any], seed: int = 0) -> Call:
    call = build(case, seed)
    return replace(call, mask=replace(call.mask, **options))


def kinds(call: Call, m: int, n: int, b: int, h: int, *, columns: bool) -> Tensor:
    """(row tiles, column tiles): 0 if the band or one interval masks the tile out, 1 if every pair attends, else 2.

    A tile that is cut off on the axis of the listed tiles is masked."""
    sizes = sizes_of(call.q, call.k, call.v, call.mask)
    i, j = torch.arange(sizes.tq), torch.arange(sizes.tk)
    band = attends(call.mask, distance(i, j, sizes.tq, sizes.tk))
    assert call.mask.intervals is not None
    of_head = call.mask.intervals[b : b + 1, h : h + 1]
    each = [masked_by(of_head[..., at : at + 2], i)[0, 0] for at in range(0, of_head.shape[3], 2)]
    out = torch.empty(-(-sizes.tq // m), -(-sizes.tk // n), dtype=torch.int32)
    for r, c in itertools.product(range(out.shape[0]), range(out.shape[1])):
        tile = slice(r * m, r * m + m), slice(c * n, c * n + n)
        any_masked = torch.stack([x[tile] for x in each]).any(0)
        gone = not band[tile].any() or any(bool(x[tile].all()) for x in each)
        full = band[tile].shape[0] == m if columns else band[tile].shape[1] == n
        whole = full and band[tile].all() and not any_masked.any()
        out[r, c] = 0 if gone else 1 if whole else 2
    return out


def listed(record: Tensor, most: int) -> tuple[list[int], list[int]]:
    """The unmasked and the masked tiles of a list, as the kernels read it."""
    found = []
    for masked in (0, 1):
        before, shift = record[2 * most * masked :][: 2 * most].view(2, most).tolist()
        count = int(record[4 * most + masked])
        found.append([n + max(s if b <= n else 0 for b, s in zip(before, shift, strict=True)) for n in range(count)])
    return found[0], found[1]


def check_lists(
    monkeypatch: pytest.MonkeyPatch, most: int, calls: list[Call], tiles_: Sequence[tuple[int, int]]
) -> None:
    """Checks both axes, with a band, and lists with too few runs, which may only add masked tiles."""
    import triton.language as tl

    from tilegrad.kernels.attention.triton import intervals, launch, lists, scores
    from tilegrad.kernels.attention.triton.fit import KernelCall

    for module in (intervals, lists, scores):
        monkeypatch.setattr(module, "MOST_RUNS", tl.constexpr(most))
    monkeypatch.setattr(lists, "CHUNK", 4)  # a tile has several chunks
    reached = {"gone": 0, "unmasked": 0, "masked": 0, "too few runs": 0}
    for call, (m, n) in itertools.product(calls, tiles_):
        sizes = sizes_of(call.q, call.k, call.v, call.mask)
        assert call.mask.intervals is not None
        own_b, own_h = call.mask.intervals.shape[:2]
        for columns in (False, True):
            shapes = lists.list_shapes(sizes, call.mask, tiles.LEAST)
            scratch = {name: torch.full(shape, -7, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            blank = KernelCall(None, (1,), {"BLOCK_M": m, "BLOCK_N": n}, {})
            *made, _ = launch._with_lists([blank], scratch, sizes, call.mask, columns=columns)
            for each in made:
                each.run()
            step = 4 * most + 2
            for b, h in itertools.product(range(own_b), range(own_h)):
                want = kinds(call, m, n, b, h, columns=columns)
                want = want.T if columns else want
                for own, kind in enumerate(want):
                    at = ((b * own_h + h) * len(want) + own) * step
                    unmasked, masked = listed(scratch["runs"][at : at + step], most)
                    assert len({*unmasked, *masked}) == len(unmasked) + len(masked)
                    right = (kind == 1).nonzero().flatten().tolist(), (kind == 2).nonzero().flatten().tolist()
                    runs_of = [sum(x - 1 not in each for x in each) for each in right]
                    if runs_of[0] <= most and runs_of[1] < most:
                        assert (unmasked, masked) == right
                    else:
                        reached["too few runs"] += 1
                        assert {*unmasked} <= {*right[0]} and {*unmasked, *masked} >= {*right[0], *right[1]}
                    for name, value in (("gone", 0), ("unmasked", 1), ("masked", 2)):
                        reached[name] += int((kind == value).sum())
    assert min(reached[name] for name in ("gone", "unmasked", "masked")) > 10
    assert (reached["too few runs"] > 0) == (most == 2)


def holed_and_causal() -> Call:
    """Intervals with unmasked tiles and gaps, under a causal mask."""
    return call_of(replace(BASE, tq=130, tk=130), {"intervals": holes(130, 130), "causal": True})


@interpreted
@pytest.mark.parametrize("most", [2, 32])
def test_interpreted_lists_have_every_tile_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    check_lists(monkeypatch, most, [holed_and_causal()], ((16, 16),))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 32])
def test_more_cases_of_lists_have_every_tile_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    drawn = [build(replace(BASE, b=2, hkv=2, tk=130, intervals="bh4", causal=seed == 1), seed) for seed in range(2)]
    calls = [holed_and_causal(), *(call_of(*x) for x in (*MASKS.values(), *MORE.values())), *drawn]
    check_lists(monkeypatch, most, calls, ((32, 16), (16, 32)))


def check(case: Case, options: dict[str, Any]) -> None:
    call = call_of(case, options)
    check_call(call, run(call, "triton"))


@interpreted
@pytest.mark.parametrize("name", MASKS)
def test_interpreted_mask_agrees_with_the_oracle(name: str) -> None:
    check(*MASKS[name])


@interpreted
def test_interpreted_intervals_with_every_option_agree_with_the_oracle() -> None:
    check(
        replace(
            BASE, tq=50, tk=45, d=5, dv=19, window=(40, 13), softcap=3.0, bias="hk", alibi="bh", sinks=True, dropout_p=0.2,
            dlse=True, scale=-0.3, layout="fused", intervals="h4",
        ),
        {},
    )  # fmt: skip


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_cases_agree_with_the_oracle(name: str) -> None:
    check(*MORE[name])


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_more_cases_of_random_intervals_agree_with_the_oracle(seed: int) -> None:
    kinds_of = ("2", "h2", "b4", "bh4")
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    case = replace(BASE, b=2, hkv=2, group=2, tq=70, dtype=dtype, causal=seed > 1, intervals=kinds_of[seed])
    call = build(case, seed)
    check_call(call, run(call, "triton"))


@interpreted
def test_interpreted_wide_heads_with_intervals_agree_with_the_oracle() -> None:
    """Head dimensions up to 512 compute dk and dv in separate passes."""
    from tilegrad.kernels.attention.triton import fit

    case = replace(BASE, tq=20, tk=36, d=300, dv=512, dtype=torch.bfloat16, causal=True, group=2)
    key = (tiles.INTERPRETER, 32, 64, False)
    together = tiles.TABLE[key]
    tiles.set_row(key, together._replace(dk=together.dkdv, dv=together.dkdv))
    try:
        check(case, {"intervals": rows(20, 36, 1, (16, 32, 0, 20))})
    finally:
        tiles.set_row(key, together)
    assert {"dk", "dv"} <= {found.kernel for found in fit.fits.values()}


@interpreted
@pytest.mark.parametrize("what", ["a tile left out", "an interval not tested", "the gap forgotten"])
def test_interpreted_canary_wrong_intervals_are_seen(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    from tilegrad.kernels.attention.triton import backward, forward, scores

    if what == "a tile left out":
        right = scores.count_tiles
        monkeypatch.setattr(backward, "count_tiles", lambda visits, runs, MASKED: right(visits, runs, MASKED) - MASKED)
    elif what == "an interval not tested":
        monkeypatch.setattr(scores, "outside", lambda _interval, i, inside: (i >= 0) & inside)
    else:
        monkeypatch.setattr(forward, "nth_tile", lambda n, _visits, _runs, MASKED: n + MASKED * 0)
    with pytest.raises(AssertionError, match="error"):
        check(replace(BASE, tq=64, tk=64), {**masks.documents([0, 16, 64], causal=False)})


@pytest.mark.skipif(INTERPRETED, reason="is about the table")
def test_triton_takes_intervals_with_wide_heads() -> None:
    q = torch.randn(1, 1, 4, 264)
    assert "intervals" not in tilegrad.explain(q, q, q, **masks.documents([0, 2, 4])).reasons["triton"]
    assert tiles.row((90, 16, 128, tiles.INTERVALS)) == tiles.TABLE[90, 16, 128, 2]
    assert tiles.row((90, 16, 64, tiles.INTERVALS)) == tiles.TABLE[90, 16, 64, True]
    assert tiles.row((80, 16, 64, tiles.INTERVALS)) == tiles.TABLE[80, 16, 64, False]
    assert Mask(causal=True).intervals is None
