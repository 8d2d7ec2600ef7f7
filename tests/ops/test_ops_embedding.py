"""Token and position embeddings against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import bounds
from support.ops import DTYPES, acc, allocated_bytes, assert_factors_are_seen, assert_true, poisoned, randn
from torch import Tensor

from tilegrad.kernels import gpu
from tilegrad.kernels.embedding import embedding_bwd, embedding_fwd, embedding_workspace, torch_ops


def build(b: int, t: int, c: int, v: int, dtype: torch.dtype, *, positions: bool, scale: float = 1.0):
    tokens = torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(b * t))
    inputs = {"wte": randn(v, c, dtype=dtype), "wpe": randn(t + 5, c, dtype=dtype) if positions else None}

    def formula(wte: Tensor, wpe: Tensor | None) -> dict[str, Tensor]:
        x = scale * wte[tokens] if wpe is None else scale * wte[tokens] + wpe[:t]
        return {"x": x.view(b * t, c)}

    return tokens, inputs, formula, randn(b * t, c, dtype=dtype, seed=1)


def run(tokens: Tensor, inputs: dict[str, Any], dx: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    out, shapes = {"x": torch.full_like(dx, torch.nan)}, embedding_workspace(dx, scaled=scale != 1.0)
    embedding_fwd(tokens, inputs["wte"], inputs["wpe"], None, scale, x=out["x"], scratch=poisoned(shapes))
    for name, w in inputs.items():
        if w is not None:
            out[f"d{name}"] = torch.zeros_like(w, dtype=acc(w.dtype))
    embedding_bwd(dx, tokens, None, scale, dwte=out["dwte"], dwpe=out.get("dwpe"), scratch=poisoned(shapes))
    return out


def set_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Sets how many elements torch's kernel converts at once."""
    if gpu.interpreting() and block > 100:
        pytest.skip("Triton's kernel has no such blocks")
    monkeypatch.setitem(torch_ops.BLOCK, "cpu", block)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(("block", "scale"), [(100, 1.0), (1 << 16, 1.0), (100, -2.7)])
def test_embeddings_agree_with_autograd(
    monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: torch.dtype, positions: bool, block: int, scale: float
) -> None:
    set_block(monkeypatch, block)
    for b, t, c, v in ((1, 1, 1, 1), (3, 23, 17, 20), (2, 63, 64, 300), (1, 5, 1025, 3)):
        tokens, inputs, formula, dx = build(b, t, c, v, dtype, positions=positions, scale=scale)
        rules = bounds.embedding(tokens, **inputs, dx=dx, scale=scale, rounded=kernels == "torch")
        assert_true(run(tokens, inputs, dx, scale), formula, inputs, {"x": dx}, rules)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_positions_of_packed_rows_index_wpe_as_tokens_index_wte(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wide: bool
) -> None:
    """wide: weights have the accumulation dtype, and the op rounds them on a CPU."""
    set_block(monkeypatch, 100)
    b, t, c, scale = 3, 23, 17, 4.0 if wide else 1.0
    tokens, inputs, _, dx = build(b, t, c, 20, dtype, positions=True)
    positions = torch.cat([torch.arange(n) for n in (1, 22, 5, 5, 13, 23)]).view(b, t)
    wte, wpe = (w.to(acc(dtype)) if wide else w for w in (inputs["wte"], inputs["wpe"]))
    x, scratch = torch.full_like(dx, torch.nan), poisoned(embedding_workspace(dx, packed=True, scaled=wide))
    embedding_fwd(tokens, wte, wpe, positions, scale, x=x, scratch=scratch)
    sums = scale * wte[tokens].to(acc(dtype)) + wpe[positions]
    assert torch.equal(x, sums.view_as(x).to(dtype))
    for accumulate in (False, True):
        dwpe, dwte = (torch.ones(t + 5, c, dtype=acc(dtype)) for _ in range(2))
        embedding_bwd(dx, tokens, positions, dwpe=dwpe, accumulate=accumulate, scratch=scratch)
        embedding_bwd(dx, positions, dwte=dwte, accumulate=accumulate, scratch=scratch)
        assert torch.equal(dwpe, dwte)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_accumulate_to_the_same_bits_and_none_is_not_computed(dtype: torch.dtype) -> None:
    tokens, inputs, _, dx = build(3, 63, 17, 20, dtype, positions=True)
    once = run(tokens, inputs, dx)
    again = run(tokens, inputs, dx)
    assert all(torch.equal(once[name], again[name]) for name in once)
    scratch = poisoned(embedding_workspace(dx))
    embedding_bwd(dx, tokens, dwte=again["dwte"], scratch=scratch)
    assert torch.allclose(again["dwte"], 2 * once["dwte"]) and torch.equal(again["dwpe"], once["dwpe"])
    embedding_bwd(dx, tokens, dwte=None, dwpe=again["dwpe"], scratch=scratch)
    assert torch.allclose(again["dwpe"], 2 * once["dwpe"]) and torch.allclose(again["dwte"], 2 * once["dwte"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_do_not_accumulate_overwrite(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setitem(torch_ops.BLOCK, "cpu", 100)
    tokens, inputs, _, dx = build(3, 63, 17, 200, dtype, positions=True)
    want = run(tokens, inputs, dx)
    got = {name: torch.full_like(want[name], torch.nan) for name in ("dwte", "dwpe")}
    embedding_bwd(
        dx, tokens, dwte=got["dwte"], dwpe=got["dwpe"], accumulate=False, scratch=poisoned(embedding_workspace(dx))
    )
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("block", [100, 1 << 16])
@pytest.mark.parametrize("positions", [False, True])
def test_float32_weights_of_bfloat16_are_summed_and_then_rounded(
    monkeypatch: pytest.MonkeyPatch, positions: bool, block: int
) -> None:
    set_block(monkeypatch, block)
    tokens, inputs, formula, dx = build(3, 63, 17, 20, torch.float32, positions=positions)
    x = torch.full_like(dx, torch.nan, dtype=torch.bfloat16)
    embedding_fwd(tokens, inputs["wte"], inputs["wpe"], x=x, scratch=poisoned(embedding_workspace(x)))
    assert torch.equal(x, formula(**inputs)["x"].bfloat16())


def test_bfloat16_rows_are_summed_in_float32() -> None:
    dx = torch.full((4096, 8), 1.0, dtype=torch.bfloat16)
    dwte, dwpe = torch.zeros(3, 8), torch.zeros(1, 8)
    embedding_bwd(
        dx, torch.ones(4096, 1, dtype=torch.int64), dwte=dwte, dwpe=dwpe, scratch=poisoned(embedding_workspace(dx))
    )
    assert torch.equal(dwte[1], torch.full((8,), 4096.0)) and torch.equal(dwpe[0], dwte[1]) and not dwte[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_allocate_no_memory(dtype: torch.dtype) -> None:
    tokens, inputs, _, dx = build(4, 50, 64, 30, dtype, positions=True)
    x, dwte, dwpe = dx.clone(), inputs["wte"].to(acc(dtype)), inputs["wpe"].to(acc(dtype))
    scratch = poisoned(embedding_workspace(dx))
    assert allocated_bytes(lambda: embedding_fwd(tokens, inputs["wte"], inputs["wpe"], x=x)) <= 1024
    wide = {name: w.to(acc(dtype)) for name, w in inputs.items()}
    assert allocated_bytes(lambda: embedding_fwd(tokens, wide["wte"], wide["wpe"], x=x, scratch=scratch)) <= 1024
    assert allocated_bytes(lambda: embedding_bwd(dx, tokens, dwte=dwte, dwpe=dwpe, scratch=scratch)) <= 1024


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["dwte", "dwpe"])
def test_canary_one_forgotten_row_is_seen(dtype: torch.dtype, name: str) -> None:
    tokens, inputs, formula, dx = build(3, 63, 17, 20, dtype, positions=True)
    broken = dx.clone()
    broken[100] = 0.0
    got = run(tokens, inputs, broken)
    with pytest.raises(AssertionError, match=f"{name}: "):
        assert_true({name: got[name]}, formula, inputs, {"x": dx}, bounds.embedding(tokens, **inputs, dx=dx))


@pytest.mark.usefixtures("kernels")
def test_canary_a_factor_in_bfloat16_is_seen() -> None:
    tokens, inputs, formula, dx = build(3, 63, 17, 20, torch.bfloat16, positions=True)
    allowed = bounds.embedding(tokens, **inputs, dx=dx)
    got = run(tokens, inputs, dx)
    assert_factors_are_seen(got, lambda y: assert_true(y, formula, inputs, {"x": dx}, allowed), 1.005, 1.00001)


def test_errors_of_embeddings_say_what_is_accepted() -> None:
    tokens, wte, x = torch.zeros(2, 3, dtype=torch.int64), randn(5, 4), randn(6, 4)
    for fn, match in (
        (
            lambda: embedding_fwd(tokens.int(), wte, None, x=x),
            "tokens: got torch.int32.*accepted: a contiguous torch.int64",
        ),
        (lambda: embedding_fwd(tokens.t(), wte, None, x=x), "tokens: got .*strides"),
        (lambda: embedding_fwd(tokens, wte, None, x=randn(5, 4)), r"x: got .*\(5, 4\).*accepted: .*\(6, 4\)"),
        (lambda: embedding_fwd(tokens, wte.float(), None, x=x), "wte: got .*float32"),
        (lambda: embedding_fwd(tokens, wte, randn(2, 4), x=x), r"wpe: got .*accepted: .*\(3, 4\)"),
        (lambda: embedding_bwd(x, tokens, dwte=wte.float()), "dwte: got .*float32.*accepted: .*float64"),
    ):
        with pytest.raises(ValueError, match=match):
            fn()
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        embedding_fwd(tokens + 5, wte, None, x=x)
