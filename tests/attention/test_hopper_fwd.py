"""Hopper's forward without a GPU: its tile scheduler as plain Python, and the whole kernel in the Gluon emulator.

test_hopper_compile.py compiles it, test_hopper_gpu.py runs it on a GPU.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.cases import Case, build, check_call
from support.hopper_specs import case_of, specs

from tilegrad import Mask, masks
from tilegrad.kernels.attention.problem import Sizes

triton = pytest.importorskip("triton", reason="needs Triton")
from support.hopper_emulated import forward as emulated  # noqa: E402

interpreted = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Gluon has no interpreter")


class Lengths(NamedTuple):
    """Replaces a pointer to cumulative lengths, or one of the lengths."""

    ends: tuple[int, ...]
    at: int = 0

    def __add__(self, n: int) -> Lengths:  # type: ignore[override]
        return self._replace(at=self.at + n)


class Program(NamedTuple):
    """Replaces Gluon where a device function runs as plain Python: the number of the program and how many there are."""

    here: int
    programs: int

    def program_id(self, _axis: int) -> int:
        return self.here

    def num_programs(self, _axis: int) -> int:
        return self.programs

    def where(self, condition: bool, x: int, y: int) -> int:
        return x if condition else y

    def load(self, pointer: Lengths) -> int:
        return pointer.ends[pointer.at]

    def minimum(self, x: int, y: int) -> int:
        return min(x, y)

    def maximum(self, x: int, y: int) -> int:
        return max(x, y)


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Program], Any]:
    """in_python(program) is the forward's tile scheduler as that program runs it."""
    from tilegrad.kernels.attention.hopper import forward_scheduler
    from tilegrad.kernels.attention.triton import scores

    monkeypatch.setattr(scores, "tl", Program(0, 1))
    monkeypatch.setattr(forward_scheduler, "band_tiles", scores.band_tiles.fn)
    monkeypatch.setattr(forward_scheduler, "ROWS", 64)

    def sequence_of(slot: int, params: Any, tile: int) -> int:
        return max(b for b in range(params.batch) if params.cu_seqlens_q.ends[b] // tile + b <= slot)

    monkeypatch.setattr(forward_scheduler, "sequence_of", sequence_of)

    def module(program: Program) -> Any:
        monkeypatch.setattr(forward_scheduler, "gl", program)
        return forward_scheduler

    return module


def params_of(scheduler: Any, **more: Any) -> Any:
    nothing = dict.fromkeys(scheduler.Params._fields)
    one = dict.fromkeys(("batch", "heads", "group", "row_tiles", "heads_per_section"), 1)
    return scheduler.Params(**nothing | one | more)


@interpreted
def test_every_tile_of_rows_is_taken_once(in_python: Callable[[Program], Any]) -> None:
    dice = random.Random(0)
    for _ in range(60):
        batch, heads, tq = dice.randint(1, 3), dice.randint(1, 5), dice.randint(1, 900)
        row_tiles, section = -(-tq // 128), dice.randint(1, batch * heads)
        tiles = row_tiles * heads * batch
        programs = min(tiles, dice.randint(1, 9))
        seen = []
        for here in range(programs):
            scheduler = in_python(Program(here, programs))
            params = params_of(
                scheduler, batch=batch, heads=heads, row_tiles=row_tiles, heads_per_section=section, tq=tq, tk=tq
            )
            taken = [scheduler.next_index.fn(n, params) for n in range(-(-tiles // programs))]
            seen += [
                scheduler.work_tile.fn(index, params, 128, 128)[:3]
                for index in taken
                if index < scheduler.work_tiles.fn(params)
            ]
        everything = itertools.product(range(batch), range(heads), range(tq - 128 * row_tiles, tq, 128))
        assert sorted(seen) == sorted(everything)


@interpreted
def test_every_row_of_packed_sequences_is_taken_once(in_python: Callable[[Program], Any]) -> None:
    dice, scheduler = random.Random(0), in_python(Program(0, 1))
    for _ in range(60):
        lengths = [dice.choice((0, 1, dice.randint(0, 700))) for _ in range(dice.randint(1, 9))]
        ends = Lengths((0, *itertools.accumulate(lengths)))
        row_tiles = sum(lengths) // 192 + len(lengths)
        params = params_of(scheduler, batch=len(lengths), row_tiles=row_tiles, cu_seqlens_q=ends, cu_seqlens_k=ends)
        rows = []
        for slot in range(row_tiles):
            tile = scheduler.work_tile.fn(slot, params, 192, 128)
            rows += [(tile.b, i) for i in range(max(tile.start, 0), tile.start + 192)]
        assert sorted(rows) == [(b, i) for b, n in enumerate(lengths) for i in range(n)]


@interpreted
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("right", [None, 0, 7])
@pytest.mark.parametrize("left", [None, 0, 90])
def test_a_warpgroup_computes_the_tiles_of_its_rows_and_releases_every_tile(
    in_python: Callable[[Program], Any], left: int | None, right: int | None, warpgroups: int
) -> None:
    dice, scheduler = random.Random(0), in_python(Program(0, 1))
    rows = 64 * warpgroups
    for _ in range(25):
        tq, tk, columns = dice.randint(1, 400), dice.randint(1, 400), dice.choice((64, 128))
        params = params_of(scheduler, row_tiles=-(-tq // rows), tq=tq, tk=tk, left=left, right=right)
        for index, warpgroup in itertools.product(range(params.row_tiles), range(warpgroups)):
            tile = scheduler.work_tile.fn(index, params, rows, columns)
            span = scheduler.span_of.fn(warpgroup, tile, params, rows, columns)
            behind = span.first - tile.first
            assert min(span.before, behind) >= 0 < span.last - span.first
            assert span.before + (span.last - span.first) + behind == tile.last - tile.first
            start = tile.start + 64 * warpgroup
            own = np.arange(max(start, 0), max(start + 64, 0))
            seen = sees(own[:, None] + tk - tq - np.arange(tk), left, right)
            tiles = np.flatnonzero(seen.any(axis=0)) // columns
            assert ((span.first <= tiles) & (tiles < span.last)).all()
            unmasked = range(max(span.unmasked, span.first), min(span.unmasked_end, span.last))
            whole = np.arange(columns * unmasked.start, columns * unmasked.stop)
            assert not own.size or (((whole >= 0) & (whole < tk)).all() and seen[:, whole].all())


def sees(gap: NDArray[Any], left: int | None, right: int | None) -> NDArray[Any]:
    seen = np.ones(gap.shape, dtype=bool)
    if left is not None:
        seen &= gap <= left
    if right is not None:
        seen &= gap >= -right
    return seen


HOPPER = "tilegrad.kernels.attention.hopper"


def check_emulated(case: Case, programs: int) -> None:
    call = build(case)
    check_call(call, emulated(call, programs))


RAGGED = Case(b=1, hkv=1, tq=300, tk=333, d=128, dv=128, dtype=torch.bfloat16)
EMULATED: dict[str, Case] = {
    "full": RAGGED,
    "causal, three warpgroups": replace(RAGGED, d=64, dv=64, causal=True),
    "one slot of q": replace(RAGGED, d=256, dv=256),
    "two pieces": replace(RAGGED, d=96, dv=96),
    "two pieces, part of the second": replace(RAGGED, d=72, dv=72, causal=True, group=2, layout="fused", sinks=True),
    "two pieces, window": replace(RAGGED, d=80, dv=80, window=(100, 9), dtype=torch.float16),
    "two pieces, packed": replace(RAGGED, d=88, dv=88, causal=True, lengths=((130, 300), (77, 128), (40, 0), (5, 1))),
    "two wide pieces": replace(RAGGED, d=192, dv=192),
    "two wide pieces, softcap": replace(RAGGED, d=136, dv=136, causal=True, softcap=2.0, scale=-0.2),
    "two wide pieces, packed": replace(RAGGED, d=160, dv=160, window=(90, 20), lengths=((130, 200), (7, 128))),
    "a warpgroup without rows": replace(RAGGED, causal=True, tq=130, tk=900),
    "no column seen": replace(RAGGED, causal=True, tq=400, tk=100, sinks=True),
    "open window": replace(RAGGED, window=(100, None), group=2, layout="fused"),
    "two edges, aligned": replace(RAGGED, causal=True, window=(255, None), tq=512, tk=512, sinks=True),
    "softcap, negative scale": replace(RAGGED, window=(40, 7), softcap=2.0, scale=-0.2, dtype=torch.float16),
    "softcap": replace(RAGGED, softcap=4.0, scale=-0.2),
    "softcap, blocks near 0 and not": replace(RAGGED, causal=True, softcap=15.0, scale=-0.2, group=2),
    "causal, aligned": replace(RAGGED, causal=True, tq=320, tk=448),
    "causal, aligned, wide": replace(RAGGED, d=256, dv=256, causal=True, tq=192, tk=192),
    "packed, full": replace(RAGGED, d=64, dv=64, lengths=((130, 300), (77, 128), (5, 1))),
    "intervals": replace(RAGGED, causal=True, group=2, sinks=True, intervals="4"),
    "intervals, three warpgroups": replace(RAGGED, b=2, tq=400, d=64, dv=64, intervals="b2", softcap=2.0, scale=-0.2),
    "intervals, two wide pieces": replace(RAGGED, hkv=2, d=192, dv=192, window=(100, 9), intervals="h4"),
    "packed": replace(RAGGED, d=40, dv=40, causal=True, lengths=((300, 300), (0, 50), (77, 200), (40, 0), (1, 1))),
}


ONE_OR_THREE = [  # numbers of programs: in CI every other case has one, in the slow set all have both
    pytest.param(name, programs, marks=[pytest.mark.slow] * ((number + programs // 2) % 2))
    for number, name in enumerate(EMULATED)
    for programs in (1, 3)
]


@interpreted
@pytest.mark.parametrize(("name", "programs"), ONE_OR_THREE)
def test_in_plain_python_the_forward_agrees_with_the_oracle(name: str, programs: int) -> None:
    check_emulated(EMULATED[name], programs)


@interpreted
def test_in_plain_python_a_forward_of_few_tiles_agrees_with_the_oracle() -> None:
    check_emulated(replace(RAGGED, causal=True, sinks=True), 132)


@interpreted
@pytest.mark.parametrize("d", [128, 256])
def test_in_plain_python_long_rows_take_their_tiles_from_a_counter(d: int) -> None:
    call = build(replace(RAGGED, d=d, dv=d, hkv=3, causal=True, tq=300, tk=300))

    def count(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(f"{HOPPER}.launch_forward.LONG_ROWS", 256)

    def do_not_count(patch: pytest.MonkeyPatch) -> None:
        count(patch)
        patch.setattr(torch.Tensor, "zero_", lambda x: x)

    check_call(call, emulated(call, 2, count))
    with pytest.raises(AssertionError):
        check_call(call, emulated(call, 2, do_not_count))


@interpreted
@pytest.mark.slow
def test_in_plain_python_all_specifications_agree_with_the_oracle() -> None:
    every = specs()
    for n, spec in enumerate(every * 2):
        drawn = case_of(spec, random.Random(n))
        programs = (1, 2, 3, 132)[(n + n // len(every)) % 4]
        check_emulated(replace(drawn, b=min(drawn.b, 2), device="cpu"), programs)


@interpreted
def test_nan_stays_in_its_packed_sequence() -> None:
    call = build(replace(RAGGED, lengths=((200, 190), (77, 77), (150, 333))))
    clean = emulated(call, 2)
    for x, start in ((call.q, 200), (call.k, 190), (call.v, 190)):
        x[start : start + 77] = math.nan
    spoilt = emulated(call, 2)
    others = [*range(200), *range(277, 427)]
    assert torch.equal(spoilt["o"][others], clean["o"][others])
    assert torch.equal(spoilt["lse"][:, others], clean["lse"][:, others])
    assert spoilt["o"][200:277].isnan().all()


def test_where_the_loop_has_no_mask_only_the_first_block_of_a_warpgroup_is_masked(
    in_python: Callable[[Program], Any],
) -> None:
    from tilegrad.kernels.attention.hopper import launch_forward as host

    dice, scheduler, without = random.Random(0), in_python(Program(0, 1)), 0
    for _ in range(400):
        right = dice.choice((None, 0, 0, 7, 64, 1000))
        tq, tk = dice.randint(1, 900), dice.choice((64, 128, 192, 448, 960, dice.randint(1, 900)))
        if host.edges_in_the_loop(Sizes(1, 1, 1, tq, tk, 128, 128, None, right)):
            continue
        without += 1
        for columns, warpgroups in ((128, 2), (64, 2), (128, 3)):
            rows = 64 * warpgroups
            params = params_of(scheduler, row_tiles=-(-tq // rows), tq=tq, tk=tk, left=None, right=right)
            for index in range(-(-tq // rows)):
                tile = scheduler.work_tile.fn(index, params, rows, columns)
                for w in range(warpgroups):
                    span = scheduler.span_of.fn(w, tile, params, rows, columns)
                    inner = range(span.first, span.last - 1)
                    assert tile.start + 64 * w + 64 <= 0 or all(span.unmasked <= at < span.unmasked_end for at in inner)
    assert without > 100


def nothing(*_of: Any) -> None:
    pass


FORWARD_BROKEN: dict[str, tuple[str, str, Any]] = {
    "the producer does not wait": ("forward_load", "named_acquire", nothing),
    "no stage of k and v is released": ("forward", "named_release", nothing),
    "releases are not waited for at the end": ("forward_load", "named_drain", nothing),
    "no turn is passed": ("forward", "named_arrive", nothing),
}


@interpreted
@pytest.mark.parametrize("name", FORWARD_BROKEN)
def test_in_plain_python_a_broken_forward_is_found(name: str) -> None:
    module, function, broken = FORWARD_BROKEN[name]
    call = build(replace(RAGGED, tq=200, tk=512))
    with pytest.raises(AssertionError):
        check_call(call, emulated(call, 1, lambda patch: patch.setattr(f"{HOPPER}.{module}.{function}", broken)))


INTERVALS_BROKEN: dict[str, tuple[str, str, Any]] = {
    "no interval is tested": ("forward", "_mask_out_intervals", lambda x, *_of: x),
    "a run of the list is forgotten": ("forward_load", "nth_block", lambda n, _blocks: n),
    "the word of another stage": ("forward", "_block_of", lambda state, of: block_of(state + 1, of)),
}


def block_of(state: Any, pipelines: Any) -> tuple[int, bool]:
    word = pipelines.block_info.x[state % len(pipelines.block_info.x), 0]
    return int(word) >> 1, bool(word & 1)


@interpreted
@pytest.mark.parametrize("name", INTERVALS_BROKEN)
def test_in_plain_python_broken_intervals_of_the_forward_are_found(name: str) -> None:
    module, function, broken = INTERVALS_BROKEN[name]
    mask = masks.documents([0, 128, 150, 300], causal=False)["intervals"]
    call = build(replace(RAGGED, tk=300, d=32, dv=32))
    call = replace(call, mask=replace(call.mask, intervals=mask))
    check_call(call, emulated(call, 1))
    with pytest.raises(AssertionError):
        check_call(call, emulated(call, 1, lambda patch: patch.setattr(f"{HOPPER}.{module}.{function}", broken)))


def first_only(of: Any, x: Any, acc: Any, _held: Any) -> Any:
    """dot_rows without the second piece."""
    from support.gluon.tensor_core import warpgroup_mma

    return warpgroup_mma(of[0], x[0].permute((1, 0)), acc, use_acc=False, is_async=True)


@interpreted
def test_in_plain_python_a_missing_piece_of_the_forward_is_found() -> None:
    call = build(replace(RAGGED, tq=100, tk=130, d=72, dv=72))
    check_call(call, emulated(call, 1))
    with pytest.raises(AssertionError):
        check_call(call, emulated(call, 1, lambda patch: patch.setattr(f"{HOPPER}.forward.dot_rows", first_only)))


@interpreted
@pytest.mark.parametrize("right", [None, 0])
def test_work_is_balanced_and_a_section_of_heads_fits_in_l2(right: int | None) -> None:
    """The CTA with the most work has at most 6 % more than the average."""
    from tilegrad.kernels.attention.hopper import launch_forward as host
    from tilegrad.kernels.attention.hopper.launch import L2_BYTES

    for d, t in itertools.product((64, 128, 256), (1024, 2048, 4096, 8192, 16384)):
        sizes = Sizes(16384 // t, 2048 // d, 2048 // d, t, t, d, d, None, right)
        config = host.tile_config(sizes, 132)
        row_tiles, heads = -(-t // (64 * config.warpgroups)), sizes.batch * sizes.hq
        section = host.heads_per_section(sizes, row_tiles, 132, config)
        assert 1 <= section <= heads
        counted = host.counts_tiles(sizes)
        assert section in (1, heads) or section * 4 * t * d <= L2_BYTES or (counted and section == host.TOGETHER)
        steps = host.tile_steps(t, t, right, row_tiles, config).tolist()
        busy = [0.0] * 132
        order = [m for begin in range(0, heads, section) for m in steps for _ in range(min(section, heads - begin))]
        for index, m in enumerate(order):
            turn, place = divmod(index, 132)
            place = place if turn % 2 == 0 else 131 - place
            if counted:
                place = busy.index(min(busy))
            busy[place] += m
        assert max(busy) <= 1.06 * sum(busy) / 132, (d, t, section)


@interpreted
@pytest.mark.parametrize("left", [None, 3000, 6000, 20000])
def test_the_scratch_of_a_long_sequence_serves_shorter_ones(left: int | None) -> None:
    from tilegrad.kernels.attention import hopper

    def needed(t: int) -> set[str]:
        x = torch.empty(1, 2, t, 128, device="meta")
        mask = Mask(causal=True, window=None if left is None else (left, 0))
        return set(hopper.workspace(x, x, x, mask, backward=False, deterministic=False))

    lengths = (1024, 5119, 5120, 5632, 6001, 6002, 8192, 16384)
    for shorter, longer in itertools.pairwise(lengths):
        assert needed(shorter) <= needed(longer), (shorter, longer)
    assert needed(16384) == {"tile_counter"}


def blocks_of_columns(scheduler: Any, sizes: Sizes, config: Any) -> list[int]:
    """The blocks that the producer loads for each tile of rows of a head, last rows first."""
    rows = 64 * config.warpgroups
    row_tiles = -(-sizes.tq // rows)
    of = {"row_tiles": row_tiles, "tq": sizes.tq, "tk": sizes.tk, "left": sizes.left, "right": sizes.right}
    params = params_of(scheduler, **of)
    tiles = [scheduler.work_tile.fn(index, params, rows, config.columns) for index in range(row_tiles)]
    return [tile.last - tile.first for tile in tiles]


@interpreted
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_the_cost_of_a_tile_is_one_more_than_its_blocks_of_columns(
    in_python: Callable[[Program], Any], d: int, right: int | None
) -> None:
    from tilegrad.kernels.attention.hopper import launch_forward as host

    scheduler = in_python(Program(0, 1))
    for t in (576, 1536, 2304):  # multiples of the rows of every tile, so that no warpgroup is idle
        sizes = Sizes(64, 16, 16, t, t, d, d, None, right)
        config = host.tile_config(sizes, 132)
        blocks = blocks_of_columns(scheduler, sizes, config)
        if t % (64 * config.warpgroups) == 0:
            assert host.tile_steps(t, t, right, len(blocks), config).tolist() == [1 + n for n in blocks]


@interpreted
def test_few_rows_are_spread_over_programs_and_a_window_loads_few_extra_blocks(
    in_python: Callable[[Program], Any],
) -> None:
    from tilegrad.kernels.attention.hopper import launch_forward as host

    scheduler = in_python(Program(0, 1))
    for d, t in itertools.product((64, 96, 128, 192, 256), (64, 300, 512)):
        sizes = Sizes(1, 16, 16, t, t, d, d, None, 0)
        warpgroup_tiles, config = -(-t // 64) * 16, host.tile_config(sizes, 132)
        assert -(-t // (64 * config.warpgroups)) * 16 == warpgroup_tiles <= 132
    for left, t in itertools.product((127, 255, 1023), (4096, 5000)):
        full, window = (Sizes(1, 16, 16, t, t, 128, 128, x, 0) for x in (None, left))
        usual, chosen = (host.tile_config(x, 132) for x in (full, window))
        loaded = [sum(blocks_of_columns(scheduler, window, x)) * x.columns for x in (usual, chosen)]
        assert loaded[1] < loaded[0]
