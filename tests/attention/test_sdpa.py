"""tilegrad.sdpa against torch's scaled_dot_product_attention, in float64: its arguments, its meaning, all gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilegrad

D = torch.float64


def both(shapes: tuple[tuple[int, ...], ...], mask: Tensor | None = None, **options: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=D, generator=draw, requires_grad=True) for shape in shapes)
    inputs = [q, k, v] + ([mask.requires_grad_()] if mask is not None and mask.is_floating_point() else [])
    results = []
    for call in (scaled_dot_product_attention, tilegrad.sdpa):
        with sdpa_kernel(SDPBackend.MATH):
            o = call(q, k, v, attn_mask=mask, **options)
        results.append((o, *torch.autograd.grad((o * o.detach().sin()).sum(), inputs)))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def like(*shape: int) -> tuple[tuple[int, ...], ...]:
    return (shape,) * 3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        like(2, 4, 9, 8),
        ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 6)),
        ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 6)),
        like(4, 9, 8),
        like(9, 8),
        like(2, 3, 4, 9, 8),
        ((2, 4, 9, 8), (1, 4, 9, 8), (1, 1, 9, 8)),
        ((4, 9, 8), (2, 1, 9, 8), (9, 8)),
    ],
    ids=str,
)
def test_shapes_and_causal_from_the_top_left_are_those_of_torch(
    shapes: tuple[tuple[int, ...], ...], causal: bool
) -> None:
    both(shapes, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_have_the_results_of_torch(causal: bool) -> None:
    both(((2, 6, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)), is_causal=causal, enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("shape", [(5, 9), (4, 5, 9), (2, 1, 5, 9), (2, 4, 1, 9), (1, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, D])
def test_masks_of_every_shape_have_the_results_of_torch(shape: tuple[int, ...], kind: torch.dtype) -> None:
    drawn = torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(1))
    both(((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8)), drawn if kind == D else drawn > -0.5)


def test_a_mask_of_more_batch_dimensions_has_the_results_of_torch() -> None:
    drawn = torch.randn(3, 1, 5, 9, dtype=D, generator=torch.Generator().manual_seed(1))
    both(((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8)), drawn)


def test_rows_that_are_not_contiguous_have_the_results_of_torch() -> None:
    q, k, v = torch.randn(3, 2, 4, 8, 9, dtype=D).transpose(-1, -2)
    torch.testing.assert_close(tilegrad.sdpa(q, k, v), scaled_dot_product_attention(q, k, v), rtol=1e-12, atol=1e-12)


def test_the_signature_is_that_of_torch() -> None:
    theirs = scaled_dot_product_attention.__doc__ or ""
    names = [line.split(":")[0].split("=")[0] for line in inspect.signature(tilegrad.sdpa).parameters]
    assert ", ".join(names[:3]) in theirs and names == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


def test_dropout_drops_a_share_and_scales_the_rest() -> None:
    q, k = torch.randn(2, 1, 1, 64, 8, dtype=D)
    torch.manual_seed(0)
    o = tilegrad.sdpa(q, k, torch.eye(64, dtype=D)[None, None], None, 0.25)
    assert 0.2 < float((o == 0).double().mean()) < 0.3
    torch.testing.assert_close(
        o[o != 0] * 0.75, scaled_dot_product_attention(q, k, torch.eye(64, dtype=D)[None, None])[o != 0]
    )


def test_a_bad_argument_of_sdpa_is_named() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="attn_mask: got a mask and is_causal=True; accepted: one of the two"):
        tilegrad.sdpa(q, q, q, torch.ones(4, 4, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"query: got shape \(4, 8\); accepted: .* with enable_gqa"):
        tilegrad.sdpa(q[0, 0], q[0, 0], q[0, 0], enable_gqa=True)
    with pytest.raises(ValueError, match=r"key: got heads 2; query has 4, value 2; accepted: .* enable_gqa=True if"):
        tilegrad.sdpa(torch.randn(1, 4, 4, 8), q, q)
    with pytest.raises(ValueError, match="key: got batch dimensions 3; query has 2, value 3; accepted: shapes that"):
        tilegrad.sdpa(q.expand(2, 2, 4, 8), q.expand(3, 2, 4, 8), q.expand(3, 2, 4, 8))
    for shape in ((4, 3), (3, 2, 4, 4), (1, 1, 1, 4, 4)):
        with pytest.raises(ValueError, match=r"attn_mask: got shape .* for \(…, Hq, L, S\) = \(1, 2, 4, 4\); accepted"):
            tilegrad.sdpa(q, q, q, torch.ones(shape, dtype=torch.bool))
    many = q.expand(2, 3, 2, 4, 8)
    with pytest.raises(ValueError, match=r"attn_mask: got shape \(5, 2, 4, 4\) for .* = \(2, 3, 2, 4, 4\)"):
        tilegrad.sdpa(many, many, many, torch.ones(5, 2, 4, 4))
    arrays: list[Any] = [q.numpy()] * 3
    with pytest.raises(TypeError, match=r"query: got ndarray; accepted: a tensor \(torch.from_numpy"):
        tilegrad.sdpa(*arrays)
    with pytest.raises(TypeError, match="attn_mask: got ndarray; accepted: None or a tensor"):
        tilegrad.sdpa(q, q, q, arrays[0])


def test_torch_compile_captures_the_whole_graph() -> None:
    q, k, v = (torch.randn(2, 4, t, 8, requires_grad=True) for t in (5, 9, 9))
    call = torch.compile(lambda: tilegrad.sdpa(q, k, v, is_causal=True), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(), tilegrad.sdpa(q, k, v, is_causal=True))
