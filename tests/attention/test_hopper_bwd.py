"""Hopper's backward without a GPU: how it divides its work, and its results when all kernels run as plain Python.

test_hopper_compile.py compiles the kernels, test_hopper_gpu.py runs them on a GPU.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import Call, Case, Tensors, bounds, build, check_call, oracle
from support.hopper_specs import case_of, specs

pytest.importorskip("triton", reason="needs Triton")

import triton
from support.gluon.emulator import in_python
from support.gluon.values import Number, Pointer
from support.hopper_emulated import forward as forward_in_python
from support.hopper_emulated import run_in_python
from support.kernels import interval_edges, run_backward

from tilegrad.kernels.attention import hopper
from tilegrad.kernels.attention.hopper import backward as kernel
from tilegrad.kernels.attention.hopper import (
    backward_load,
    backward_mma,
    backward_store_dq,
    backward_wide,
    edges,
    pieces,
    pipeline,
    prepost,
    registers,
)
from tilegrad.kernels.attention.hopper import backward_scheduler as scheduler
from tilegrad.kernels.attention.hopper import launch_backward as host
from tilegrad.kernels.attention.hopper.launch import L2_BYTES
from tilegrad.kernels.attention.hopper.tma import varlen_descriptor
from tilegrad.kernels.attention.mask import Mask
from tilegrad.kernels.attention.problem import Sizes, sizes_of
from tilegrad.kernels.attention.triton import intervals, memory, numerics, scores
from tilegrad.kernels.closeness import assert_close

M, N = 64, 128


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, x, y: x if condition else y)
    for module in (scheduler, backward_store_dq):
        monkeypatch.setattr(module, "gl", numbers)


def call(tq: int, tk: int, left: int | None, right: int | None, group: int = 1, **more: Any) -> scheduler.Params:
    form: dict[str, Any] = dict.fromkeys(scheduler.Params._fields)
    form |= {"batch": 1, "kv_heads": 1, "heads_per_section": 1} | more
    form["all_heads"] = form["batch"] * form["kv_heads"]
    return scheduler.Params(**form | {"group": group, "tq": tq, "tk": tk, "left": left, "right": right})


def tile_of(of: scheduler.Params, n: int, part: int = 0) -> scheduler.WorkTile:
    work_tile = getattr(scheduler.work_tile, "fn", scheduler.work_tile)  # in_python makes it a plain function
    tile: scheduler.WorkTile = work_tile(0, 0, n, 0, 0, of.tq, of.tk, of, part, n, M, N)
    return tile


def walked(tile: scheduler.WorkTile, of: scheduler.Params) -> list[tuple[int, bool]]:
    """The tiles of rows of one query head in order, each with whether it is masked."""
    row_tile = getattr(scheduler.row_tile, "fn", scheduler.row_tile)
    return [(row_tile(tile, i, of), i < tile.masked) for i in range(tile.count)]


def random_calls(count: int) -> list[scheduler.Params]:
    dice = random.Random(0)
    sides = (None, 0, 1, 63, 64, 100, 300)
    return [
        call(dice.randint(1, 700), dice.randint(1, 700), dice.choice(sides), dice.choice(sides)) for _ in range(count)
    ]


def test_every_tile_with_an_attended_pair_is_visited_once_and_masked_at_an_edge() -> None:
    for of in random_calls(300):
        mask = Mask(window=(of.left, of.right))
        for n in range(-(-of.tk // N)):
            columns = range(n * N, min(n * N + N, of.tk))
            seen = mask.rows_of(columns, of.tq, of.tk)
            steps = walked(tile_of(of, n), of)
            tiles = [m for m, _ in steps]
            assert len(set(tiles)) == len(tiles)
            assert set(tiles) >= {row // M for row in seen}, (of, n)
            for m, masked in steps:
                whole = len(columns) == N and mask.unmasked(range(m * M, m * M + M), columns, of.tq, of.tk)
                assert masked or whole, (of, n, m)
                assert 0 <= m * M < of.tq


@pytest.mark.parametrize("descending", [False, True])
def test_each_tile_of_rows_is_stored_first_and_then_added_to_in_order(descending: bool) -> None:
    for of in random_calls(200):
        turns: dict[int, list[int]] = {}
        count = -(-of.tk // N)
        for n in range(count - 1, -1, -1) if descending else range(count):
            tile = tile_of(of, n)
            for m, _ in walked(tile, of):
                turns.setdefault(m, []).append(backward_store_dq.earlier_tiles.fn(m, tile, of, M, N, descending))
        for m, order in turns.items():
            assert order == list(range(len(order))), (of, m, order)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("splits", [2, 3, 7, 40])
def test_programs_that_share_a_tile_cover_all_its_steps(splits: int, group: int) -> None:
    of = call(700, 1300, None, 0, group=group, splits=splits)
    for n in range(11):
        parts = [tile_of(of, n, part) for part in range(splits)]
        assert parts[0].begin == 0 and parts[-1].end == group * parts[0].count
        assert all(one.end == following.begin for one, following in itertools.pairwise(parts))


@pytest.mark.parametrize("span", [1, 3, 4, 5, 6, 7])
def test_every_head_has_every_tile_and_long_tiles_come_first(span: int) -> None:
    of = call(512, 512, None, 0, batch=3, kv_heads=2, heads_per_section=span)
    places = [scheduler.head_and_column.fn(t, of, 4) for t in range(24)]
    assert sorted(places) == [(head, n) for head in range(6) for n in range(4)]
    first = [n for _, n in places[: 4 * min(span, 6)]]
    assert first == sorted(first)


def sizes(batch: int, t: int = 1024, d: int = 128, group: int = 1, right: int | None = 0) -> Sizes:
    return Sizes(batch, 4 * group, 4, t, t, d, d, None, right)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_smaller_batch_needs_no_more_scratch(deterministic: bool) -> None:
    def elements(batch: int) -> dict[str, int]:
        shapes = host.workspace(sizes(batch), deterministic=deterministic)
        return {name: torch.Size(shape).numel() for name, (shape, _) in shapes.items()}

    for batch in range(1, 9):
        small, large = elements(batch), elements(batch + 1)
        assert all(small[name] <= large[name] for name in small)


def test_packed_rows_do_not_overlap_and_begin_where_tma_can_read() -> None:
    padding = host.PADDING
    for lengths in ((5, 300, 0, 129, 1, 200), (128,), (1, 1, 1), (127, 129, 256)):
        starts = [sum(lengths[:b]) for b in range(len(lengths))]
        begins = [scheduler.first_row.fn(b, start, padding, VARLEN=True) for b, start in enumerate(starts)]
        ends = [begin + -(-n // padding) * padding for begin, n in zip(begins, lengths, strict=True)]
        shapes = host.workspace(sizes(len(lengths), t=max(lengths))._replace(total_q=sum(lengths)), deterministic=False)
        assert all(begin % padding == 0 for begin in begins)
        assert all(end <= begin for end, begin in zip(ends, [*begins[1:], shapes["neg_lse2"][0][1]], strict=True))
        assert shapes["neg_lse2"][0][1] % padding == 0  # so that every head begins there too


def test_coordinates_of_tma_are_outside_after_the_end_of_a_packed_sequence() -> None:
    of = call(0, 0, None, None)._replace(cu_seqlens_q=torch.empty(0))
    dice = random.Random(0)
    for _ in range(200):
        total, heads, d = dice.randint(300, 10**6), dice.randint(1, 8), 8 * dice.randint(2, 32)
        x = torch.empty_strided((total, heads, d), (3 * heads * d, d, 1), device="meta", dtype=torch.bfloat16)
        start = dice.randrange(total)
        size, h, row = dice.randint(1, total - start), dice.randrange(heads), dice.randrange(2 * total)
        form = varlen_descriptor(x, 64, 64)
        at = [getattr(c, "value", c) for c in (*scheduler.tma_coordinates.fn(of, 0, start, size, h, row), 0)]
        address = 2 * sum(c * stride for c, stride in zip(at, form.strides, strict=True)) % 2**64
        inside = all(0 <= c < n for c, n in zip(at, form.shape, strict=True))
        assert address == 2 * ((start + row) * x.stride(0) + h * x.stride(1))
        assert inside == (row < size)
        assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in form.strides[:4])


def test_one_packed_row_of_any_stride_has_strides_that_tma_takes() -> None:
    x = torch.empty(5, 1, 73, dtype=torch.bfloat16)[:1, :, :72]
    assert all(stride * 2 % 16 == 0 for stride in varlen_descriptor(x, 64, 128).strides[:4])


def test_only_few_tiles_are_shared_among_programs() -> None:
    def splits(of: Sizes) -> int:
        return host.splits_for(of, host.count_work_tiles(of, None), 132, 64)

    assert splits(sizes(1)) > 1
    assert splits(sizes(16)) == 1
    assert splits(sizes(1, t=128)) == 1  # too few rows
    assert splits(sizes(1, t=128, group=16)) > 1
    for batch in range(1, 9):  # the scratch has sums for every shared tile
        of = sizes(batch)
        sums = host.workspace(of, deterministic=False)["sums"][0]
        assert splits(of) == 1 or host.count_work_tiles(of, None) <= sums[0]


def test_heads_share_a_section_only_where_columns_differ_in_length() -> None:
    assert host.heads_per_section(sizes(8, right=None), 132) == 1
    many = host.heads_per_section(sizes(128), 132)  # many tiles: as many heads as fit in L2 with q, do and dq_acc
    assert many * 1024 * 128 * 8 <= L2_BYTES < (many + 1) * 1024 * 128 * 8
    assert host.heads_per_section(sizes(1), 132) == 1  # each program has one tile in any order
    assert host.heads_per_section(sizes(8, t=65536), 132) == 1  # one head fills L2


def test_deterministic_tiles_begin_in_the_order_in_which_they_may_add() -> None:
    """Tile n of a head waits for tile n − 1 at every tile of rows. In this order no CTA waits after the first round."""
    t, heads, rows = 4096, 16, 64  # tiles of rows
    section = host.heads_per_section(Sizes(1, heads, heads, t, t, 128, 128, None, None), 132, deterministic=True)
    of = call(t, t, None, None, kv_heads=heads, heads_per_section=section)
    ends, waits = [0] * 132, []
    started: dict[tuple[int, int], int] = {}
    for index in range(heads * t // N):
        head, n = scheduler.head_and_column.fn(index, of, t // N)
        idle = ends[0]
        started[head, n] = max(idle, started.get((head, n - 1), -1) + 1)  # one tile of rows later
        waits.append(started[head, n] - idle)
        heapq.heapreplace(ends, started[head, n] + rows)
    assert sum(waits[132:]) < 0.02 * rows * len(waits[132:])
    assert host.heads_per_section(sizes(8), 132, deterministic=True) == 1  # columns of a causal head differ in length


@pytest.mark.parametrize(
    ("batch", "heads", "group", "t"), [(16, 4, 8, 1024), (4, 4, 8, 4096), (1, 4, 8, 16384), (4, 16, 1, 4096)]
)
def test_programs_finish_at_nearly_the_same_time(batch: int, heads: int, group: int, t: int) -> None:
    span = host.heads_per_section(Sizes(batch, heads * group, heads, t, t, 128, 128, None, 0), 132)
    of = call(t, t, None, 0, group=group, batch=batch, kv_heads=heads, heads_per_section=span)
    ends = [0] * 132
    for index in range(batch * heads * t // N):
        _, n = scheduler.head_and_column.fn(index, of, t // N)
        heapq.heapreplace(ends, ends[0] + tile_of(of, n).end)
    assert max(ends) < 1.04 * sum(ends) / 132  # with one head after the other: 1.28, 1.28, 1.02, 1.07


def backward(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[str]:
    """The names of the kernels of a call, none of which is launched."""
    names: list[str] = []
    run_in_python(monkeypatch, host, lambda kernel, *_: names.append(kernel.__name__))
    q = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16)
    lse, mask, of = torch.zeros(2, 4, 64), Mask(causal=True), sizes(2, t=64, d=64)
    shapes = host.workspace(of, deterministic=False)
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    tensors = {"o": q, "do": q, "dq": q, "dk": q, "dv": q} | given
    o, do = tensors.pop("o"), tensors.pop("do")
    run_backward(hopper, q, q, q, o, lse, do, None, mask, **tensors, scratch=scratch, deterministic=False)
    return names


def test_an_output_given_as_none_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["_hopper_preprocess_kernel", "_hopper_bwd_kernel", "_hopper_postprocess_kernel"]
    assert backward(monkeypatch) == every
    assert backward(monkeypatch, dk=None) == every
    assert backward(monkeypatch, dq=None) == every[:2]


interpreted = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Gluon has no interpreter")
MODULES = (
    kernel, backward_load, backward_mma, backward_store_dq, backward_wide, edges, pieces, pipeline, prepost, registers,
    scheduler, intervals, memory, numerics, scores,
)  # fmt: skip


def emulated(
    of: Call, o: torch.Tensor, lse: torch.Tensor, *, programs: int, deterministic: bool = False, seed: int = 0,
    absent: tuple[str, ...] = (), broken: Callable[[pytest.MonkeyPatch], None] = lambda _patch: None,
) -> Tensors:  # fmt: skip
    """Computes the gradients of a call in plain Python. `broken` replaces device functions."""
    q, k, v, mask = of.q, of.k, of.v, of.mask
    shapes = hopper.workspace(q, k, v, mask, backward=True, deterministic=deterministic)
    scratch = {
        name: torch.full(shape, math.nan if dtype.is_floating_point else 7, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
    }
    grads = {name: torch.full_like(x, math.nan) for name, x in (("dq", q), ("dk", k), ("dv", v)) if name not in absent}
    if mask.sinks is not None:
        grads["dsinks"] = torch.zeros_like(mask.sinks)
    with in_python(*MODULES, seed=seed) as launch, pytest.MonkeyPatch.context() as outer:  # undone first
        outer.setattr(host, "multiprocessors", lambda _device: programs)
        run_in_python(outer, host, launch)
        broken(outer)
        reads = (q, k, v, o, lse, of.do, of.dlse, mask)
        run_backward(hopper, *reads, **grads, scratch=scratch, deterministic=deterministic)
    return grads


@interpreted
@pytest.mark.parametrize(
    "case",
    [
        Case(b=1, hkv=1, group=2, tq=130, tk=130, d=128, dv=128, dtype=torch.bfloat16, causal=True, scores=1e3),
        Case(b=1, hkv=1, tq=70, tk=130, d=80, dv=80, dtype=torch.bfloat16, sinks=True, scores=1e3),
        Case(b=1, hkv=1, tq=70, tk=70, d=72, dv=72, dtype=torch.bfloat16, softcap=3e3, scores=1e3),
    ],
    ids=lambda case: f"D {case.d}",
)
def test_in_plain_python_scores_of_a_thousand_are_as_exact_as_small_ones(case: Case) -> None:
    """For larger scores p errs by |s| · 2⁻²⁴, like cuDNN's; docs/kernels-gpu.md says why."""
    of = build(case)
    got = forward_in_python(of, 2)
    got |= emulated(of, got["o"], got["lse"], programs=2)
    check_call(of, got)


class Known:
    """A call with its results from the oracle."""

    def __init__(self, case: Case, seed: int = 0, mask: Mask | None = None) -> None:
        self.case, self.call = case, build(case, seed)
        if mask is not None:
            self.call = replace(self.call, mask=mask)
        self.exact = oracle(self.call)
        self.bounds = bounds(self.call, self.exact)
        self.o, self.lse = self.exact["o"].to(case.dtype), self.exact["lse"].float()

    def check(self, **how: Any) -> Tensors:
        got = emulated(self.call, self.o, self.lse, **how)
        assert_close(got, {name: self.exact[name] for name in got}, self.bounds)
        return got


RAGGED = Case(b=1, hkv=2, tq=150, tk=190, d=128, dv=128, dtype=torch.bfloat16)
LENGTHS = ((70, 200), (0, 50), (77, 140), (40, 0), (150, 1))
EMULATED: dict[str, Case] = {
    "full": RAGGED,
    "causal, 128 rows": replace(RAGGED, d=64, dv=64, causal=True, tq=200, tk=150, scale=-0.1, layout="fused"),
    "wide, window": replace(RAGGED, d=256, dv=256, hkv=1, group=2, window=(70, 9)),
    "softcap, negative scale": replace(
        RAGGED, hkv=1, d=40, dv=40, causal=True, softcap=2.0, scale=-0.2, sinks=True, dlse=True, dtype=torch.float16
    ),
    "groups, open window": replace(RAGGED, hkv=1, group=3, d=96, dv=96, tk=130, window=(90, None), layout="bthd"),
    "columns that no row sees": replace(RAGGED, hkv=1, tq=70, tk=300, window=(3, 0)),
    "rows that see no column": replace(RAGGED, hkv=1, tq=260, tk=100, causal=True, sinks=True),
    "scores far below 0": replace(RAGGED, hkv=1, tk=2, scale=9.0, dlse=True),
    "packed": replace(RAGGED, hkv=1, group=2, d=64, dv=64, causal=True, sinks=True, lengths=LENGTHS),
    "packed, wide": replace(RAGGED, hkv=1, d=192, dv=192, window=(40, 20), dlse=True, lengths=LENGTHS),
    "wide, shared": replace(RAGGED, hkv=1, group=4, tq=200, tk=100, d=136, dv=136, dlse=True),
    "two pieces, packed": replace(RAGGED, d=72, dv=72, hkv=1, causal=True, sinks=True, lengths=LENGTHS),
    "two pieces, softcap": replace(RAGGED, d=88, dv=88, hkv=1, tq=100, tk=130, softcap=2.0, layout="fused"),
    "two wide pieces": replace(RAGGED, d=192, dv=192, hkv=1, causal=True, tq=130, tk=150, dtype=torch.float16),
    "wide, softcap": replace(
        RAGGED, hkv=1, tq=100, tk=130, d=136, dv=136, causal=True, softcap=2.0, scale=-0.2, dlse=True
    ),
}
EMULATED |= {
    "intervals": replace(RAGGED, hkv=1, group=2, tq=300, tk=300, causal=True, sinks=True, intervals="4"),
    "intervals, 128 rows": replace(RAGGED, b=2, d=64, dv=64, tq=200, tk=300, intervals="bh4"),
    "intervals, two wide pieces": replace(
        RAGGED, d=136, dv=136, window=(100, 9), softcap=2.0, scale=-0.2, intervals="2"
    ),
}
SHARED = ("groups, open window", "wide, shared")  # with 132 programs


@interpreted
@pytest.mark.parametrize(("number", "name"), [*enumerate(EMULATED)])
def test_in_plain_python_gradients_agree_with_the_oracle_in_any_order(number: int, name: str) -> None:
    """Deterministic gradients have the same bits with few and with many programs. The rest run with few programs in every other
    case, and with many where programs share tiles."""
    known = Known(EMULATED[name])
    if name in SHARED:
        of = sizes_of(known.call.q, known.call.k, known.call.v, known.call.mask)
        assert host.splits_for(of, host.count_work_tiles(of, None), 132, 64) > 1
    known.check(programs=132 if name in SHARED or number % 2 else 3, seed=number)
    few = known.check(programs=3, deterministic=True)
    many = known.check(programs=132, deterministic=True, seed=1)
    assert all(torch.equal(few[x], many[x]) for x in few)


@interpreted
def test_in_plain_python_two_store_warps_add_in_order() -> None:
    """They do so in every order of the threads: five work tiles add to a tile of dq, and each warp adds half of D."""
    assert all(host.SOFTCAP_CONFIGS[d].dq_warps == tile.dq_warps for d, tile in host.TILE_CONFIGS.items())
    assert host.TILE_CONFIGS[128].dq_warps == 2
    known = Known(replace(RAGGED, hkv=1, tq=100, tk=600))
    grads = [known.check(programs=4, deterministic=True, seed=seed) for seed in range(8)]
    assert all(torch.equal(grads[0]["dq"], each["dq"]) for each in grads)


@interpreted
@pytest.mark.slow
def test_in_plain_python_all_specifications_agree_with_the_oracle() -> None:
    absences: list[tuple[str, ...]] = [(), (), ("dq",), ("dk",), ("dv",), ("dk", "dv")]
    every = specs()
    for n, spec in enumerate(every * 2):
        turn = n + n // len(every)  # the second pass has another number of programs
        drawn = case_of(spec, random.Random(n))
        Known(replace(drawn, b=min(drawn.b, 2), device="cpu"), n).check(
            programs=(3, 132, 5, 1)[turn % 4],
            deterministic=bool(spec["deterministic"]),
            seed=n,
            absent=absences[turn % 6],
        )


@pytest.fixture(scope="module")
def few_columns() -> Known:
    return Known(replace(RAGGED, hkv=1, tq=200, tk=300, d=128, dv=128, causal=True))


def nothing(*of: Any, **more: Any) -> None:
    pass


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a consumer does not wait": (backward_mma, "consumer_wait", nothing),
    "the producer does not wait": (backward_load, "named_acquire", nothing),
    "dq is read before it is there": (backward_store_dq, "named_wait", nothing),
    "dsᵀ of the other warpgroup is not waited for": (backward_mma, "named_wait", nothing),
    "no stage of q and do is released": (backward_mma, "named_release", nothing),
    "no stage of k and v is released": (backward_mma, "consumer_release", nothing),
    "dq is not signalled": (backward_store_dq, "named_arrive", nothing),
    "releases are not waited for at the end": (backward_load, "named_drain", nothing),
    "no fence": (backward_mma, "fence_async_shared", nothing),
    "no fence of dq": (backward_store_dq, "fence_async_shared", nothing),
    "rows of dq in another order": (prepost, "dq_line", lambda row: row),
    "the semaphore is released before dq is in memory": (backward_store_dq, "wait_until_in_memory", nothing),
    "nobody waits for the semaphore": (backward_store_dq, "wait_for_semaphore", nothing),
    "another stage": (backward_mma, "read_word", lambda words, i: pipeline.read_word(words, i ^ 1)),
}


@interpreted
@pytest.mark.parametrize("name", BROKEN)
def test_in_plain_python_a_broken_kernel_is_found(name: str, few_columns: Known) -> None:
    def check_orders() -> None:
        for seed in range(8):  # almost any seed shows it
            few_columns.check(
                programs=2, deterministic=True, seed=seed, broken=lambda patch: patch.setattr(*BROKEN[name])
            )

    with pytest.raises(AssertionError):
        check_orders()


WIDE_BROKEN: dict[str, tuple[Any, str, Any]] = {
    "a consumer does not wait": (backward_wide, "consumer_wait", nothing),
    "no stage is released": (backward_wide, "named_release", nothing),
    "pᵀ and dsᵀ are not waited for": (backward_wide, "named_wait", nothing),
    "pᵀ and dsᵀ are not signalled": (backward_wide, "named_arrive", nothing),
    "no fence": (backward_wide, "fence_async_shared", nothing),
}


@pytest.fixture(scope="module")
def wide() -> Known:
    known = Known(replace(RAGGED, hkv=1, group=2, d=136, dv=136, causal=True, tk=200))
    known.check(programs=2)
    return known


@interpreted
@pytest.mark.parametrize("name", WIDE_BROKEN)
def test_in_plain_python_a_broken_kernel_of_wide_heads_is_found(name: str, wide: Known) -> None:
    with pytest.raises(AssertionError):
        wide.check(programs=2, broken=lambda patch: patch.setattr(*WIDE_BROKEN[name]))


INTERVALS_BROKEN: dict[str, tuple[Any, str, Any]] = {
    "no interval is tested": (backward_mma, "_mask_out_intervals", lambda x, *_of: x),
    "the gaps are forgotten": (backward_store_dq, "row_tile", lambda tile, i, _params: tile.first + i),
    "a tile is not masked": (backward_load, "masked_flags", lambda *_of: 0),
    "skipped tiles are not counted": (backward_store_dq, "skipped_tiles", lambda m, *_of: m * 0),
}


@pytest.fixture(scope="module")
def with_gaps() -> Known:
    known = Known(replace(RAGGED, hkv=1, tq=300, tk=300, d=64, dv=64))
    columns = torch.arange(300)
    begin, end = (
        torch.where(columns < 128, 128, 0),
        torch.where(columns < 128, 200, torch.where(columns < 256, 128, 64)),
    )
    mask = replace(known.call.mask, intervals=torch.stack([begin, end], 1).int()[None, None])
    known = Known(known.case, mask=mask)
    known.check(programs=3, deterministic=True)
    return known


@interpreted
@pytest.mark.parametrize("name", INTERVALS_BROKEN)
def test_in_plain_python_broken_intervals_of_the_backward_are_found(name: str, with_gaps: Known) -> None:
    with pytest.raises(AssertionError):
        with_gaps.check(programs=3, deterministic=True, broken=lambda patch: patch.setattr(*INTERVALS_BROKEN[name]))


def intervals_of(dice: random.Random, tq: int, tk: int) -> torch.Tensor:
    """One or two intervals of each column, the same in runs of columns; some are empty, some have every row."""
    number, rows = dice.randint(1, 2), (0, 0, tq, tq, 64, 128, tq // 2, tq // 3)
    x = torch.empty(1, 1, tk, 2 * number, dtype=torch.int32)
    for begin in range(0, tk, dice.choice((100, 128, 256))):
        drawn = [sorted(min(tq, dice.choice(rows)) for _ in range(2)) for _ in range(number)]
        x[:, :, begin:] = torch.tensor(drawn).flatten()
    return x


@interpreted
def test_with_intervals_each_tile_of_rows_is_stored_first_and_then_added_to_in_order() -> None:
    dice, reached = random.Random(0), 0
    with in_python(scheduler, backward_store_dq, edges):
        for _ in range(60):
            band = dice.choice(((None, None), (None, 0), (300, 0)))
            tq, tk = dice.randint(1, 700), dice.randint(1, 1500)
            drawn = intervals_of(dice, tq, tk)
            of_tiles = interval_edges(drawn, N)[0, 0]
            row_tiles, col_tiles = range(0, -(-tq // M)), range(-(-tk // N))
            gone = [
                [any(s <= m * M and min(m * M + M, tq) <= e for _, s, e, _ in of_tiles[n].tolist()) for n in col_tiles]
                for m in row_tiles
            ]
            of = call(tq, tk, *band)
            plain = [[m for m, _ in walked(tile_of(of, n), of)] for n in col_tiles]
            want = [{m for m in plain[n] if not gone[m][n]} for n in col_tiles]
            last = [max((n for n in col_tiles if m in want[n]), default=-1) for m in row_tiles]
            of = of._replace(
                edges=Pointer.of(of_tiles.flatten()), edges_b=0, edges_h=0, last_tiles_b=0, last_tiles_h=0,
                last_tiles=Pointer.of(torch.tensor(last)), second=None if len(of_tiles[0]) == 1 else 2,
            )  # fmt: skip
            done = dict.fromkeys(row_tiles, 0)
            for n in reversed(col_tiles):
                tile = tile_of(of, Number(n))
                rows = [int(m) for m, _ in walked(tile, of)]
                assert rows == sorted(want[n])
                for m in rows:
                    before = backward_store_dq.earlier_tiles(Number(m), tile, of, M, N, DESCENDING=True)
                    skipped = backward_store_dq._skipped_before(Number(m), before, tile, of, M, N)
                    assert done[m] == before - skipped and (done[m] == 0) == (last[m] == n)
                    done[m] += 1 + skipped
                    reached += 0 < skipped < before
    assert reached > 100


@interpreted
@pytest.mark.parametrize(("d", "module"), [(96, backward_mma), (160, backward_wide)])
def test_in_plain_python_a_missing_piece_is_found(d: int, module: Any) -> None:
    def first_only(p: Any, x: Any, acc: Any) -> Any:
        return pieces._add_dot(p, x[0], acc[0]), pieces._add_dot(p * 0, x[1], acc[1])

    known = Known(replace(RAGGED, hkv=1, d=d, dv=d, tq=70, tk=100))
    with pytest.raises(AssertionError):
        known.check(programs=2, broken=lambda patch: patch.setattr(module, "add_dot", first_only))


@interpreted
def test_nan_stays_in_its_packed_sequence_and_absent_gradients_change_no_other() -> None:
    known = Known(replace(RAGGED, hkv=1, d=64, dv=64, lengths=((70, 100), (77, 60), (90, 33))))
    of = known.call
    clean = emulated(of, known.o, known.lse, programs=3, deterministic=True)
    for absent in ("dq", "dk", "dv"):
        some = emulated(of, known.o, known.lse, programs=3, deterministic=True, absent=(absent,))
        assert len(some) == 2 and all(torch.equal(x, clean[name]) for name, x in some.items())
    for x in (of.q, of.do, known.o):
        x[70:147] = math.nan
    for x in (of.k, of.v):
        x[100:160] = math.nan
    known.lse[:, 70:147] = math.nan
    spoilt = emulated(of, known.o, known.lse, programs=3, deterministic=True)
    for name, (begin, end) in {"dq": (70, 147), "dk": (100, 160), "dv": (100, 160)}.items():
        assert torch.equal(spoilt[name][:begin], clean[name][:begin]), name
        assert torch.equal(spoilt[name][end:], clean[name][end:]), name
        assert spoilt[name][begin:end].isnan().all()


@interpreted
def test_a_softcap_is_the_same_function_in_every_kernel() -> None:
    from tilegrad.kernels.attention.hopper import registers

    used = [module.tanh.fn for module in (registers, backward_mma, scores)]
    assert used == [numerics.tanh.fn] * 3
    assert registers.tanh_near_zero.fn is numerics.tanh_near_zero.fn
    assert registers.NEAR_ZERO is numerics.NEAR_ZERO
