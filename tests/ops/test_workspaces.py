"""The scratch that ops declare equals the sizes written here: a memory plan has no number more than a kernel needs.

Every test of an op shows that it is enough, because its scratch is poisoned and of the declared size. Blocks have 40 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilegrad.kernels import embedding_mse
from tilegrad.kernels.attention import Mask, tiled
from tilegrad.kernels.attention.problem import Sizes
from tilegrad.kernels.cache_attention import torch_ops as cache_attention
from tilegrad.kernels.column_sum import torch_ops as column_sum
from tilegrad.kernels.cross_entropy import torch_ops as cross_entropy_torch
from tilegrad.kernels.dropout import torch_ops as dropout
from tilegrad.kernels.embedding import torch_ops as embedding
from tilegrad.kernels.mix import torch_ops as mix
from tilegrad.kernels.norm import torch_ops as norm
from tilegrad.kernels.rope import torch_ops as rope
from tilegrad.kernels.scaled_sum import torch_ops as scaled_sum
from tilegrad.kernels.scratch import Form, Shapes


def form(*shape: int, dtype: torch.dtype = torch.float32) -> Form:
    return Form(shape, dtype, torch.device("cpu"))


X16, X32 = form(30, 7, dtype=torch.bfloat16), form(30, 7)
W16, W32 = form(9, 7, dtype=torch.bfloat16), form(9, 7)
Q = Form((3, 4, 6, 8), torch.bfloat16, torch.device("cpu"))
FULL: Any = {
    "causal": True, "softcap": 2.0, "bias": form(4, 6, 11, dtype=torch.bfloat16), "alibi_slopes": form(4), "sinks": form(4),
    "dropout_p": 0.1, "seed": 1,
}  # fmt: skip


def attention(*, backward: bool, **options: Any) -> Shapes:
    """q (3, 4, 6, 8), k (3, 2, 11, 8), v (3, 2, 11, 5), in tiles of 4 and slabs of 300 scores."""
    k, v = form(3, 2, 11, 8, dtype=torch.bfloat16), form(3, 2, 11, 5, dtype=torch.bfloat16)
    return tiled.workspace(Q, k, v, Mask(**options), backward=backward, deterministic=False)  # type: ignore[arg-type]


CALLS: dict[str, Callable[[], Shapes]] = {
    "attention": lambda: attention(backward=False),
    "attention, all features": lambda: attention(backward=False, **FULL),
    "attention backward": lambda: attention(backward=True, causal=True),
    "attention backward, all features": lambda: attention(backward=True, **FULL),
    "attention backward, bool bias": lambda: attention(backward=True, bias=form(6, 11, dtype=torch.bool)),
    "cache_attention": lambda: cache_attention.workspace(form(3, 2, 11, 8, dtype=torch.bfloat16), 4),
    "cache_attention, prefill": lambda: cache_attention.workspace(form(3, 2, 11, 8, dtype=torch.bfloat16), 4, 7),
    "column_sum": lambda: column_sum.workspace(X32),
    "column_sum, bfloat16": lambda: column_sum.workspace(X16),
    "cross_entropy": lambda: cross_entropy_torch.workspace(X32, W32, backward=False),
    "cross_entropy, bfloat16": lambda: cross_entropy_torch.workspace(X16, W16, backward=False),
    "cross_entropy backward": lambda: cross_entropy_torch.workspace(X32, W32, backward=True),
    "cross_entropy backward, bfloat16": lambda: cross_entropy_torch.workspace(X16, W32, backward=True),
    "dropout": lambda: dropout.workspace(X16),
    "embedding": lambda: embedding.workspace(X16),
    "embedding, float32": lambda: embedding.workspace(X32),
    "embedding_mse": lambda: embedding_mse.embedding_mse_workspace(X16, W16),
    "embedding_mse, float32": lambda: embedding_mse.embedding_mse_workspace(X32, W32),
    "mix": lambda: mix.workspace(Q),
    "mix, float32": lambda: mix.workspace(form(3, 4, 6, 8)),
    "norm": lambda: norm.workspace(X16, backward=False),
    "norm, float32": lambda: norm.workspace(X32, backward=False),
    "norm backward": lambda: norm.workspace(X16, backward=True),
    "norm backward, float32": lambda: norm.workspace(X32, backward=True),
    "rope": lambda: rope.workspace(form(2, 9, 3, 8, dtype=torch.bfloat16)),
    "rope, float32": lambda: rope.workspace(form(2, 9, 3, 8)),
    "scaled_sum": lambda: scaled_sum.workspace(X16, backward=False),
    "scaled_sum backward": lambda: scaled_sum.workspace(X16, backward=True),
    "scaled_sum backward, float32": lambda: scaled_sum.workspace(X32, backward=True),
}
DECLARED: dict[str, str] = {
    "attention": (
        "acc 240, alpha 48, gap 16 int64, index 11 int64, k_t 192, masked_out 32 bool, new_max 48, q 384, "
        "row_max 48, row_sum 48, s 192, v 120"
    ),
    "attention, all features": (
        "acc 240, alpha 48, bias 192, distance 16, dropped 192 bool, gap 16 int64, index 11 int64, k_t 192, "
        "masked_out 32 bool, new_max 48, philox 1152 int64, q 384, row_max 48, row_sum 48, s 192, slopes 12, "
        "v 120"
    ),
    "attention backward": (
        "delta 72, dk 192, do 240, dp 192, dq 384, dq_sum 576, dv 120, empty 72 bool, gap 16 int64, "
        "index 11 int64, k 192, k_t 192, lse 72, masked_out 32 bool, o 240, q 384, s 192, v_t 120"
    ),
    "attention backward, all features": (
        "bias 192, dbias 264, delta 72, distance 16, dk 192, do 240, dp 192, dq 384, dq_sum 576, "
        "dropped 192 bool, dsinks 4, dsinks_part 4, dv 120, empty 72 bool, gap 16 int64, index 11 int64, "
        "k 192, k_t 192, lse 72, masked_out 32 bool, o 240, philox 1152 int64, q 384, s 192, slopes 12, "
        "tanh 192, v_t 120"
    ),
    "attention backward, bool bias": (
        "bias_masked 192 bool, delta 72, dk 192, do 240, dp 192, dq 384, dq_sum 576, dv 120, empty 72 bool, "
        "gap 16 int64, index 11 int64, k 192, k_t 192, lse 72, masked_out 32 bool, o 240, q 384, s 192, "
        "v_t 120"
    ),
    "cache_attention": (
        "acc 32, alpha 4, below 1 bool, column 4 int64, distance 4, empty 4 bool, far 4 bool, gap 4 int64, "
        "inside 1 bool, k 64, masked 4 bool, new 16 bfloat16, new_max 4, place 1 int64, q 32, row_max 4, row_sum 4, s 16, "
        "slopes 4, v 64"
    ),
    "cache_attention, prefill": (
        "below 5 bool, heads 2 int64, index 10 int64, inside 5 bool, last 1 int64, new 80 bfloat16, "
        "old 80 bfloat16, row 5 int64, slot 5 int64, source 5 int64"
    ),
    "column_sum": "ones 30, part 7",
    "column_sum, bfloat16": "ones 30, part 7, tile 16·4",
    "cross_entropy": "ignored 11 bool, index 11 int64, logits 11·9, part 1, statistics 4·11",
    "cross_entropy, bfloat16": "block 4·9, ignored 22 bool, index 22 int64, logits 22·9 bfloat16, part 1, statistics 4·22",
    "cross_entropy backward": "ignored 11 bool, index 11 int64, logits 11·9, part 1, statistics 4·11, x_scaled 11·7",
    "cross_entropy backward, bfloat16": (
        "block 4·9, ignored 22 bool, index 22 int64, linear.bf16.dw16 9·7 bfloat16, linear.bf16.dw32 9·7, "
        "logits 22·9 bfloat16, part 1, statistics 4·22, w 9·7 bfloat16, x32 22·7, x_scaled 22·7 bfloat16"
    ),
    "dropout": "counter 2 int64, dropped 5·7 bool, index 30 int64, philox 6·5·7 int64",
    "embedding": "x32 5·7",
    "embedding, float32": "",
    "embedding_mse": (
        "e 5·7, ignored 5 bool, index 5 int64, part 1, statistics 2·5, target_rows 5·7 bfloat16, target_rows32 5·7"
    ),
    "embedding_mse, float32": "e 5·7, ignored 5 bool, index 5 int64, part 1, statistics 2·5, target_rows 5·7",
    "mix": "mixed 4·6·8, part 4·6·8, share 4·6",
    "mix, float32": "mixed 4·6·8, share 4·6",
    "norm": "b 7, w 7, x 5·7, y 5·7",
    "norm, float32": "",
    "norm backward": (
        "b 7, centred 5·7, column_sum.ones 30, column_sum.part 7, column_sum.tile 16·4, dy 5·7, ones 5, sum 7, "
        "sum_g 5, sum_gx 5, w 7, work 5·7"
    ),
    "norm backward, float32": "centred 5·7, column_sum.ones 30, column_sum.part 7, ones 5, sum 7, sum_g 5, sum_gx 5, work 5·7",
    "rope": "old_x1 1·3·4, rotated 1·3·8",
    "rope, float32": "old_x1 1·3·4",
    "scaled_sum": "a 1, b 1, wide 5·7, work 5·7",
    "scaled_sum backward": "a 1, b 1, dy 5·7, row_sums 5, sum 1, wide 5·7, work 5·7",
    "scaled_sum backward, float32": "a 1, b 1, row_sums 5, sum 1, work 5·7",
}


def told(shapes: Shapes) -> str:
    """The scratch as text: "name 4·5" for float32, with the name of the dtype for another one."""
    return ", ".join(
        f"{name} {'·'.join(map(str, shape)) or 1}{'' if dtype == torch.float32 else str(dtype).replace('torch.', ' ')}"
        for name, (shape, dtype) in sorted(shapes.items())
    )


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dropout, embedding, embedding_mse, norm, rope, scaled_sum):
        monkeypatch.setitem(module.BLOCK, "cpu", 40)
    monkeypatch.setitem(cross_entropy_torch.CHUNK, "cpu", 4 * 100)
    monkeypatch.setattr(cross_entropy_torch, "BLOCK", 40)
    monkeypatch.setattr(tiled, "TILE", 4)
    monkeypatch.setattr(cache_attention, "TILE", 4)
    monkeypatch.setattr(cache_attention, "ROWS", 5)
    monkeypatch.setattr(tiled, "SLAB", 300)
    monkeypatch.setattr(column_sum, "ROWS", 16)
    monkeypatch.setattr(column_sum, "COLS", 4)
    monkeypatch.setattr("tilegrad.kernels.linear._has_bf16_products", lambda: True)


@pytest.mark.parametrize("name", CALLS)
def test_scratch_has_the_sizes_written_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    assert told(CALLS[name]()) == DECLARED[name]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [  # batch, hq, hkv, tq, tk, d, dv → rows, columns, sequences, kv heads, query heads of each
        (Sizes(3, 4, 2, 6, 11, 8, 5, None, None), tiled.Cut(4, 4, 3, 2, 2)),
        (Sizes(9, 4, 2, 6, 11, 8, 5, None, None), tiled.Cut(4, 4, 4, 2, 2)),
        (Sizes(9, 4, 2, 6, 11, 8, 5, None, None, 54, 99), tiled.Cut(4, 4, 1, 2, 2)),
        (Sizes(3, 40, 20, 3, 3, 8, 5, None, None), tiled.Cut(3, 3, 1, 9, 2)),
        (Sizes(9, 4, 4, 1, 2, 8, 5, None, None), tiled.Cut(1, 2, 9, 4, 1)),
        (Sizes(2, 400, 4, 9, 9, 8, 5, None, None), tiled.Cut(4, 4, 1, 1, 100)),
        (Sizes(0, 2, 2, 0, 0, 8, 5, None, None), tiled.Cut(1, 1, 1, 2, 1)),
    ],
)
def test_a_call_is_cut_into_the_largest_slabs_that_fit(
    monkeypatch: pytest.MonkeyPatch, sizes: Sizes, cut: tiled.Cut
) -> None:
    small(monkeypatch)
    assert tiled.Cut.of(sizes) == cut
    batches, heads = sizes.batch, sizes.hkv
    slabs = list(cut.slabs(batches, heads))
    assert sorted((b, h) for bs, hs in slabs for b in bs for h in hs) == [
        (b, h) for b in range(batches) for h in range(heads)
    ]
    assert all(len(bs) <= cut.batches and len(hs) <= cut.heads for bs, hs in slabs)
