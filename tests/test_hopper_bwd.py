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


def call(tq: int, tk: int, left: int | None, right: int | None, group: int = 1, **more: Any) -> hopper_walk.Call:
    form: dict[str, Any] = {"batch": 1, "kv_heads": 1, "span": 1, "splits": None} | more
    form["all_heads"] = form["batch"] * form["kv_heads"]
    return hopper_walk.Call(None, None, group=group, tq=tq, tk=tk, left=left, right=right, **form)


def tile_of(of: hopper_walk.Call, n: int, part: int = 0) -> hopper_walk.ColumnTile:
    return hopper_walk._column_tile.fn(0, 0, n, 0, 0, of.tq, of.tk, of, part, n, M, N)


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
def test_a_tile_of_rows_is_stored_first_and_then_added_to_in_turns_without_gaps(descending: bool) -> None:
    for of in random_calls(200):
        turns: dict[int, list[int]] = {}
        count = -(-of.tk // N)
        for n in range(count - 1, -1, -1) if descending else range(count):
            tile = tile_of(of, n)
            for m, _ in walked(tile):
                turns.setdefault(m, []).append(hopper_walk._before.fn(m, tile, of, M, N, descending))
        for m, order in turns.items():
            assert order == list(range(len(order))), (of, m, order)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("splits", [2, 3, 7, 40])
def test_programs_that_share_a_tile_have_all_of_its_steps(splits: int, group: int) -> None:
    of = call(700, 1300, None, 0, group=group, splits=splits)
    for n in range(11):
        parts = [tile_of(of, n, part) for part in range(splits)]
        assert parts[0].begin == 0 and parts[-1].end == group * parts[0].count
        assert all(one.end == following.begin for one, following in itertools.pairwise(parts))


@pytest.mark.parametrize("span", [1, 3, 6, 7])
def test_every_head_has_every_tile_and_long_ones_come_first(span: int) -> None:
    of = call(512, 512, None, 0, batch=3, kv_heads=2, span=span)
    places = [hopper_walk._dense_place.fn(t, of, 4) for t in range(24)]
    assert sorted(places) == [(head, n) for head in range(6) for n in range(4)]
    first = [n for _, n in places[: 4 * min(span, 6)]]
    assert first == sorted(first)


def sizes(batch: int, t: int = 1024, d: int = 128, group: int = 1, right: int | None = 0) -> Sizes:
    return Sizes(batch, 4 * group, 4, t, t, d, d, None, right)


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


def test_a_packed_sequence_ends_where_tma_stops() -> None:
    of = call(0, 0, None, None)._replace(cu_seqlens_q=torch.empty(0))
    dice = random.Random(0)
    for _ in range(200):
        total, heads, d = dice.randint(300, 10**6), dice.randint(1, 8), 8 * dice.randint(2, 32)
        x = torch.empty_strided((total, heads, d), (3 * heads * d, d, 1), device="meta", dtype=torch.bfloat16)
        start = dice.randrange(total)
        size, h, row = dice.randint(1, total - start), dice.randrange(heads), dice.randrange(2 * total)
        form = hopper_bwd.packed_descriptor(x, 64, 64)
        at = [getattr(c, "value", c) for c in hopper_walk._at.fn(of, 0, start, size, h, row, 0)]
        address = 2 * sum(c * stride for c, stride in zip(at, form.strides, strict=True)) % 2**64
        inside = all(0 <= c < n for c, n in zip(at, form.shape, strict=True))
        assert address == 2 * ((start + row) * x.stride(0) + h * x.stride(1))
        assert inside == (row < size)
        assert all(0 < stride * 2 < 2**40 and stride * 2 % 16 == 0 for stride in form.strides[:4])


def test_few_tiles_are_shared_and_many_are_not() -> None:
    def splits(of: Sizes) -> int:
        return hopper_bwd.splits_for(of, hopper_bwd._tiles(of, None), 132, 64)

    assert splits(sizes(1)) > 1
    assert splits(sizes(16)) == 1
    assert splits(sizes(1, t=128)) == 1  # too few rows
    assert splits(sizes(1, t=128, group=16)) > 1
    for batch in range(1, 9):  # every tile that is shared has a place for its sums
        of = sizes(batch)
        q = torch.empty(batch, 4, 1024, 128, device="meta")
        assert splits(of) == 1 or hopper_bwd._tiles(of, None) <= hopper_bwd.workspace(q, of, False, False)["sums"][0][0]


def test_heads_go_together_only_where_columns_differ_in_length() -> None:
    assert hopper_bwd.heads_together(sizes(8, right=None)) == 1
    assert hopper_bwd.heads_together(sizes(8)) == 24
    assert hopper_bwd.heads_together(sizes(1)) == 4
    assert hopper_bwd.heads_together(sizes(8, t=65536)) == 1


def backward(monkeypatch: pytest.MonkeyPatch, **given: Any) -> list[str]:
    """Names of the kernels of a call that launches nothing."""
    names: list[str] = []

    def prepare(kernel: Any, *form: Any, **more: Any) -> Any:
        names.append(kernel.__name__)
        return lambda: None

    monkeypatch.setattr(hopper_bwd, "prepare", prepare)
    q = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16)
    lse, mask, of = torch.zeros(2, 4, 64), Mask(causal=True), sizes(2, t=64, d=64)
    shapes = hopper_bwd.workspace(q, of, False, False)
    scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    tensors = {"o": q, "do": q, "dq": q, "dk": q, "dv": q} | given
    for _ in range(2):
        hopper_bwd.launch(
            q, q, q, tensors["o"], lse, tensors["do"], None, mask, of, dq=tensors["dq"], dk=tensors["dk"],
            dv=tensors["dv"], dsinks=None, scratch=scratch, deterministic=False,
        )  # fmt: skip
    return names


def test_launches_are_kept_and_an_output_that_is_not_wanted_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_bwd, "_prepared", {})
    every = ["_hopper_begin_kernel", "_hopper_bwd_kernel", "_hopper_finish_kernel"]
    assert backward(monkeypatch) == every
    assert backward(monkeypatch, dk=None) == every
    assert backward(monkeypatch, dq=None) == every[:2]


@pytest.mark.parametrize("name", ["o", "do", "dq", "dk", "dv"])
def test_a_tensor_that_tma_cannot_address_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    odd = torch.zeros(2, 4, 64, 65, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(ValueError, match=rf"^{name}: TMA can't step over T by 65 elements.*kernel='triton' takes it"):
        backward(monkeypatch, **{name: odd})
