"""How Hopper's backward divides its work, without a GPU: the device functions that choose tiles run here as plain Python.

What the compiler makes of the kernels is in test_hopper.py, what they compute in hopper_on_gpu.py.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from tilegrad.kernels.attention import hopper_bwd, hopper_walk
from tilegrad.kernels.attention.mask import Mask
from tilegrad.kernels.attention.triton_attention import Sizes

M, N = 64, 128


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = SimpleNamespace(minimum=min, maximum=max, where=lambda condition, x, y: x if condition else y)
    monkeypatch.setattr(hopper_walk, "gl", numbers)


def call(tq: int, tk: int, left: int | None, right: int | None, group: int = 1, **more: Any) -> hopper_walk.Call:
    form = {"batch": 1, "kv_heads": 1, "span": 1} | more
    return hopper_walk.Call(None, None, group=group, tq=tq, tk=tk, left=left, right=right, **form)


def tile_of(of: hopper_walk.Call, n: int) -> hopper_walk.ColumnTile:
    return hopper_walk._column_tile.fn(0, 0, n, 0, 0, of.tq, of.tk, of, M, N)


def walked(tile: hopper_walk.ColumnTile) -> list[tuple[int, bool]]:
    """(tile of rows, whether it is masked) of one query head, in order."""
    return [(hopper_walk.row_tile.fn(tile, i), i < tile.masked) for i in range(tile.count)]


def random_calls(count: int) -> list[hopper_walk.Call]:
    dice = random.Random(0)
    sides = (None, 0, 1, 63, 64, 100, 300)
    return [
        call(dice.randint(1, 700), dice.randint(1, 700), dice.choice(sides), dice.choice(sides)) for _ in range(count)
    ]


def test_every_tile_with_a_pair_that_sees_each_other_is_walked_once_and_edges_are_masked() -> None:
    for of in random_calls(300):
        mask = Mask(window=(of.left, of.right))
        for n in range(-(-of.tk // N)):
            columns = range(n * N, min(n * N + N, of.tk))
            seen = mask.rows_of(columns, of.tq, of.tk)
            steps = walked(tile_of(of, n))
            tiles = [m for m, _ in steps]
            assert len(set(tiles)) == len(tiles)
            assert set(tiles) >= {row // M for row in seen}, (of, n)
            for m, masked in steps:
                whole = len(columns) == N and mask.whole(range(m * M, m * M + M), columns, of.tq, of.tk)
                assert masked or whole, (of, n, m)
                assert 0 <= m * M < of.tq


@pytest.mark.parametrize("descending", [False, True])
def test_additions_to_a_tile_of_rows_take_turns_without_gaps(descending: bool) -> None:
    for of in random_calls(200):
        turns: dict[int, list[int]] = {}
        count = -(-of.tk // N)
        for n in range(count - 1, -1, -1) if descending else range(count):
            tile = tile_of(of, n)
            for m, _ in walked(tile):
                turns.setdefault(m, []).append(hopper_walk._before.fn(m, tile, of, M, N, descending))
        for m, order in turns.items():
            assert order == list(range(len(order))), (of, m, order)


@pytest.mark.parametrize("span", [1, 3, 6, 7])
def test_every_head_has_every_tile_and_long_ones_come_first(span: int) -> None:
    of = call(512, 512, None, 0, batch=3, kv_heads=2, span=span)
    places = [hopper_walk._dense_place.fn(t, of, 4) for t in range(24)]
    assert sorted(places) == [(head, n) for head in range(6) for n in range(4)]
    first = [n for _, n in places[: 4 * min(span, 6)]]
    assert first == sorted(first)


def sizes(batch: int, t: int = 1024, d: int = 128, right: int | None = 0) -> Sizes:
    return Sizes(batch, 4, 4, t, t, d, d, None, right)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_smaller_batch_needs_no_more_scratch(deterministic: bool) -> None:
    def elements(batch: int) -> dict[str, int]:
        q = torch.empty(batch, 4, 1024, 128, device="meta")
        shapes = hopper_bwd.workspace(q, sizes(batch), False, deterministic)
        return {name: torch.Size(shape).numel() for name, (shape, _) in shapes.items()}

    for batch in range(1, 9):
        small, large = elements(batch), elements(batch + 1)
        assert all(small[name] <= large[name] for name in small)


def test_packed_rows_do_not_overlap_and_begin_where_tma_can_read() -> None:
    padding = hopper_bwd.PADDING
    for lengths in ((5, 300, 0, 129, 1, 200), (128,), (1, 1, 1), (127, 129, 256)):
        starts = [sum(lengths[:b]) for b in range(len(lengths))]
        begins = [hopper_walk.first_row.fn(b, start, padding, True) for b, start in enumerate(starts)]
        ends = [begin + -(-n // padding) * padding for begin, n in zip(begins, lengths, strict=True)]
        q = torch.empty(sum(lengths), 4, 64, device="meta")
        shapes = hopper_bwd.workspace(q, sizes(len(lengths), t=max(lengths)), True, False)
        assert all(begin % padding == 0 for begin in begins)
        assert all(end <= begin for end, begin in zip(ends, [*begins[1:], shapes["shift"][0][1]], strict=True))
        assert shapes["shift"][0][1] % padding == 0  # so that every head does


def test_heads_go_together_only_where_columns_differ_in_length() -> None:
    def together(of: Sizes, deterministic: bool = False) -> int:
        return hopper_bwd._heads_in_flight(of, hopper_bwd.TILES[128], deterministic)

    assert together(sizes(16, right=None)) == 1
    assert together(sizes(16)) == 40
    assert together(sizes(16), deterministic=True) == 1
    assert together(sizes(1)) == 4
    assert together(sizes(8, t=65536)) == 1


@pytest.mark.parametrize("missing", ["dq", "dk", "dv", "nothing, do is expanded"])
def test_what_it_does_not_take_goes_to_triton(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.empty(2, 4, 64, 64, dtype=torch.bfloat16)
    lse, mask, of = torch.empty(2, 4, 64), Mask(causal=True), sizes(2, t=64, d=64)
    shapes = hopper_bwd.workspace(q, of, False, False)
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    outputs = {name: None if name == missing else torch.empty_like(q) for name in ("dq", "dk", "dv")}
    do = q.new_empty(()).expand(q.shape) if "expanded" in missing else q
    calls = []
    monkeypatch.setattr(hopper_bwd.triton_attention, "bwd", lambda *reads, **writes: calls.append((reads, writes)))
    hopper_bwd.launch(q, q, q, q, lse, do, None, mask, of, **outputs, dsinks=None, scratch=scratch, deterministic=False)
    ((reads, writes),) = calls
    assert reads[5] is do and all(writes[name] is x for name, x in outputs.items())
    needed = hopper_bwd.triton_attention.workspace(q, q, q, mask, backward=True, deterministic=False)
    assert {name: (tuple(x.shape), x.dtype) for name, x in writes["scratch"].items()} == needed
    assert all(x.is_contiguous() for x in writes["scratch"].values())
