"""How Hopper's backward divides its work, without a GPU: the device functions that choose tiles run here as plain Python.

What the compiler makes of the kernels is in test_hopper.py, what they compute in hopper_on_gpu.py.
"""

from __future__ import annotations

import itertools
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
    monkeypatch.setattr(hopper_bwd, "multiprocessors", lambda device: 132)


def call(tq: int, tk: int, left: int | None, right: int | None, group: int = 1, **more: Any) -> hopper_walk.Call:
    form = {"batch": 1, "kv_heads": 1, "span": 1, "splits": None} | more
    return hopper_walk.Call(None, None, group=group, tq=tq, tk=tk, left=left, right=right, **form)


def tile_of(of: hopper_walk.Call, n: int, part: int = 0) -> hopper_walk.ColumnTile:
    return hopper_walk._column_tile.fn(0, 0, n, 0, 0, of.tq, of.tk, of, part, M, N)


def walked(tile: hopper_walk.ColumnTile) -> list[tuple[int, bool]]:
    """(tile of rows, whether it is masked) of one query head, in order."""
    return [(hopper_walk._row_tile.fn(tile, i), i < tile.masked) for i in range(tile.count)]


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


def test_programs_that_share_a_tile_have_all_of_its_steps() -> None:
    for splits, group in itertools.product((2, 3, 7, 40), (1, 3)):
        of = call(700, 300, None, 0, group=group, splits=splits)
        for n in range(3):
            parts = [tile_of(of, n, part) for part in range(splits)]
            assert parts[0].begin == 0 and parts[-1].end == group * parts[0].count
            assert all(one.end == next_.begin for one, next_ in itertools.pairwise(parts))


@pytest.mark.parametrize("span", [1, 3, 6, 7])
def test_every_head_has_every_tile_and_long_ones_come_first(span: int) -> None:
    of = call(512, 512, None, 0, batch=3, kv_heads=2, span=span)
    places = [hopper_walk._dense_place.fn(t, of, 4) for t in range(24)]
    assert sorted(places) == [(head, n) for head in range(6) for n in range(4)]
    first = [n for _, n in places[: 4 * min(span, 6)]]
    assert first == sorted(first)


def sizes(batch: int, t: int = 1024, d: int = 128, group: int = 1, right: int | None = 0) -> Sizes:
    return Sizes(batch, 4 * group, 4, t, t, d, d, None, right)


def test_a_smaller_batch_needs_no_more_scratch() -> None:
    def elements(batch: int, deterministic: bool) -> dict[str, int]:
        q = torch.empty(batch, 4, 1024, 128, device="meta")
        shapes = hopper_bwd.workspace(q, q, sizes(batch), False, deterministic)
        return {name: torch.Size(shape).numel() for name, (shape, _) in shapes.items()}

    for deterministic in (False, True):
        for batch in range(1, 9):
            small, large = elements(batch, deterministic), elements(batch + 1, deterministic)
            assert all(small[name] <= large[name] for name in small)


def test_few_tiles_are_shared_and_many_are_not() -> None:
    device = torch.device("cpu")
    few, many = sizes(1), sizes(8)
    assert hopper_bwd.splits_for(few, hopper_bwd._tiles(few, None), device) == 4
    assert hopper_bwd.splits_for(many, hopper_bwd._tiles(many, None), device) == 1
    assert hopper_bwd.splits_for(sizes(1, t=128), 4, device) == 1  # too few rows to share
    assert hopper_bwd.splits_for(sizes(1, t=128, group=16), 4, device) == 8


def test_heads_go_together_only_where_columns_differ_in_length() -> None:
    assert hopper_bwd.heads_together(sizes(8, right=None)) == 1
    assert hopper_bwd.heads_together(sizes(8)) == 24
    assert hopper_bwd.heads_together(sizes(1)) == 4
    assert hopper_bwd.heads_together(sizes(8, t=16384)) == 1
