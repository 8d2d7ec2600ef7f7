"""Helpers of the tests of ops: results of autograd, poisoned scratch, the allocator's events."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import pytest
import torch
from torch import Tensor

from support.threads import Alone
from tilegrad.kernels import linear
from tilegrad.kernels.attention import Mask, attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.attention.context import gather_attention_bwd, gather_attention_fwd, gather_attention_workspace
from tilegrad.kernels.cache_attention import (
    cache_attention_fwd,
    cache_attention_workspace,
    cache_write_fwd,
    cache_write_workspace,
)
from tilegrad.kernels.closeness import Bound, assert_close
from tilegrad.kernels.column_sum import column_sum_fwd, column_sum_workspace
from tilegrad.kernels.cross_entropy.logprobs import token_logprobs_fwd, token_logprobs_workspace
from tilegrad.kernels.cross_entropy.softcap import softcap_fwd
from tilegrad.kernels.embedding_mse import embedding_mse_scores_fwd, embedding_mse_scores_workspace
from tilegrad.kernels.low_rank import Part, low_rank_add_fwd, low_rank_workspace
from tilegrad.kernels.mix import mix_fwd, mix_workspace
from tilegrad.kernels.residual import add_fwd, copy_fwd, keep_gradient, keep_gradient_workspace, zero_gaps
from tilegrad.kernels.rope import rope_bwd, rope_fwd, rope_table, rope_workspace
from tilegrad.kernels.sampling import logprobs_fwd, logprobs_workspace, sample_fwd, sample_workspace
from tilegrad.kernels.table import Where

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
RAGGED = (1, 63, 113)
Formula = Callable[..., Mapping[str, Tensor]]


def acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000003 + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def poisoned(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Scratch that is full of NaN, or of a very large integer."""

    def poison(dtype: torch.dtype) -> float:
        if dtype.is_floating_point:
            return torch.nan
        return 1 if dtype == torch.bool else 2 ** (8 * dtype.itemsize - 2)

    return {name: torch.full(shape, poison(dtype), dtype=dtype) for name, (shape, dtype) in shapes.items()}


def linear_bwd(
    dy: Tensor, x: Tensor, w: Tensor, *, dx: Tensor | None = None, dw: Tensor | None = None, db: Tensor | None = None,
    accumulate: bool = True, heads: bool = False, **where: Unpack[Where],
) -> None:  # fmt: skip
    """All gradients of a linear layer with one matrix, or with one for each head."""
    of_input = linear.per_head_linear_bwd_input if heads else linear.linear_bwd_input
    of_weight = linear.per_head_linear_bwd_weight if heads else linear.linear_bwd_weight
    of_weight(dy, x, w, dw=dw, db=db, accumulate=accumulate, **where)
    if dx is not None:
        of_input(dy, w, dx=dx, accumulate=False, **where)


def truth(
    formula: Formula, inputs: Mapping[str, Tensor | None], douts: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The outputs of the formula, and the gradients of Σ out · dout under the names d‹input›, all in `dtype`."""
    leaves = {name: None if x is None else x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    outputs = formula(**leaves)
    given = [leaf for leaf in leaves.values() if leaf is not None]
    loss = sum((outputs[name] * dout.to(dtype)).sum() for name, dout in douts.items())
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, given)
    names = [f"d{name}" for name, leaf in leaves.items() if leaf is not None]
    return {name: x.detach() for name, x in (*outputs.items(), *zip(names, grads, strict=True))}


def assert_true(
    got: Mapping[str, Tensor],
    formula: Formula,
    inputs: Mapping[str, Tensor | None],
    douts: Mapping[str, Tensor],
    bounds: Mapping[str, Bound],
) -> None:
    """Holds `got` (some of the outputs and gradients) to the closeness rule."""
    exact = truth(formula, inputs, douts, torch.float64)
    assert_close(got, {name: exact[name] for name in got}, bounds)


def assert_factors_are_seen(
    got: Mapping[str, Tensor],
    assert_right: Callable[[dict[str, Tensor]], None],
    rounded: float = 1.01,
    wide: float = 1.001,
) -> None:
    """`got` is right, and each of its tensors is wrong when multiplied: by `wide` if it is float32, else by `rounded`."""
    assert_right(dict(got))
    for name, x in got.items():
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_right({name: x * (wide if x.dtype == torch.float32 else rounded)})


def allocated_bytes(fn: Callable[[], Any]) -> int:
    """The largest single allocation of a call."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fn()
    events = seen.profiler.kineto_results.events()
    return max((e.nbytes() for e in events if e.name() == "[memory]"), default=0)


def allowed_bytes(dtype: torch.dtype, *products: tuple[int, int, int]) -> int:
    """1 KiB for small numbers. With bf16 instructions, twice what torch's products (n, cin) · (cin, cout) and those of their
    gradients allocate, because oneDNN has a workspace of its own, whose size depends a little on n."""
    largest = 1024
    if dtype == torch.bfloat16 and linear._has_bf16_products():
        for n, cin, cout in products:
            x, w, y = (torch.ones(shape, dtype=dtype) for shape in ((n, cin), (cout, cin), (n, cout)))
            for a, b, out in ((x, w.t(), y), (y, w, x), (y.t(), x, w)):
                largest = max(largest, 2 * allocated_bytes(functools.partial(torch.mm, a, b, out=out)))
    return largest


def assert_rounded(x: Tensor, wide: Tensor) -> None:
    """x is `wide` rounded to the nearest, except for a rare number where another last bit of `wide` decides. The closeness
    rule cannot distinguish this from truncation, which pulls every step of a training run the same way."""
    assert torch.equal(x.isnan(), wide.isnan())
    same = (x == wide.to(x.dtype)) | x.isnan()
    assert float(same.double().mean()) >= 0.99, (
        f"{float(same.double().mean()):.3f} of the numbers are rounded to the nearest"
    )


def calls_outside_models(dtype: torch.dtype) -> None:
    """One call of each op that no model runs: `test_every_op_is_run_and_none_allocates` has every op from here or a model."""
    n, t, h, d = 4, 32, 2, 16
    x, y, sums = (
        randn(n * t, h * d, dtype=dtype),
        torch.empty(n * t, h * d, dtype=dtype),
        torch.zeros(h * d).to(acc(dtype)),
    )
    column_sum_fwd(x, sums=sums, scratch=poisoned(column_sum_workspace(x)))
    copy_fwd(x, y=y)
    grad = torch.zeros(x.shape)
    zero_gaps(((0, 1),), x=grad.view(-1))
    for accumulate in (False, True):
        scratch = poisoned(keep_gradient_workspace(grad))
        keep_gradient(grad, total=grad.bfloat16(), accumulate=accumulate, scratch=scratch)
    add_fwd(x, x, y=y)
    w = randn(h * d, h * d, dtype=dtype)
    scratch = poisoned(linear.linear_workspace(x, w, backward=True))
    linear_bwd(x, x, w, dx=y, dw=torch.zeros(w.shape, dtype=acc(dtype)), scratch=scratch)
    u, thin = randn(n * t, 4, dtype=dtype), [randn(h * d, 4, dtype=dtype)]
    scratch = poisoned(low_rank_workspace(x, w[:4], thin, backward=False))
    low_rank_add_fwd(u, thin, (Part(0, 0, 0),), ys=[y], scratch=scratch)
    cos, sin = torch.empty(2, t, d // 2, dtype=acc(dtype))
    rope_table(10000.0, d, t, cos=cos, sin=sin)
    rows, turned = x.view(n, t, h, d), y.view(n, t, h, d)
    scratch = poisoned(rope_workspace(rows))
    rope_fwd(rows, cos, sin, y=turned, scratch=scratch)
    rope_bwd(rows, cos, sin, dx=turned, scratch=scratch)
    q, k, v, do, o, dq, dk, dv = (randn(n, h, t, d, dtype=dtype, seed=seed) for seed in range(8))
    mask, lse = Mask(causal=True), torch.empty(n, h, t, dtype=acc(dtype))
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=poisoned(attention_workspace(q, k, v, mask, backward=False)))
    scratch = poisoned(attention_workspace(q, k, v, mask, backward=True))
    attention_bwd(q, k, v, o, lse, do, None, mask, dq=dq, dk=dk, dv=dv, scratch=scratch)
    k_cache, v_cache, slots, cpu = q.clone(), q.clone(), torch.arange(n), torch.device("cpu")
    scratch = poisoned(cache_write_workspace(n, n, h, d, t, dtype, cpu))
    cache_write_fwd(x[:n], x[:n], slots, k_cache=k_cache, v_cache=v_cache, scratch=scratch)
    scratch = poisoned(cache_attention_workspace(n, h, h, d, t, mask, dtype, cpu))
    new = x[:n]
    cache_attention_fwd(new, new, new, slots, mask, h, h, o=y[:n], k_cache=k_cache, v_cache=v_cache, scratch=scratch)
    mix_fwd(q, lse.clone(), o=dq, lse=lse, scratch=poisoned(mix_workspace(q)))
    scratch = poisoned(gather_attention_workspace(q, k, v, mask, 1, backward=False))
    gather_attention_fwd(q, k, v, mask, Alone(), o=o, lse=lse, scratch=scratch)
    scratch = poisoned(gather_attention_workspace(q, k, v, mask, 1, backward=True))
    gather_attention_bwd(q, k, v, o, lse, do, None, mask, Alone(), dq=dq, dk=dk, dv=dv, scratch=scratch)
    logits, settings = randn(n, 64, dtype=acc(dtype)), torch.tensor([[1.0, 9.0, 0.9, 0.01, 1.2]]).repeat(n, 1)
    tokens, logprobs, seen = torch.arange(n), torch.empty(n, dtype=acc(dtype)), torch.ones(n, 64, dtype=torch.uint8)
    numbers, scratch = (settings, *(tokens.clone() for _ in range(3))), poisoned(sample_workspace(logits))
    sample_fwd(logits, *numbers, tokens=tokens, logprobs=logprobs, seen=seen, scratch=scratch)
    rows, head = randn(n, 16, dtype=dtype), randn(64, 16, dtype=dtype, seed=1)
    scratch = poisoned(token_logprobs_workspace(rows, head))
    token_logprobs_fwd(rows, head, tokens, logprobs=logprobs, scratch=scratch)
    scratch = poisoned(embedding_mse_scores_workspace(rows, head))
    embedding_mse_scores_fwd(rows, head, scores=logits, scratch=scratch)
    logprobs_fwd(logits, tokens, logprobs=logprobs, scratch=poisoned(logprobs_workspace(logits)))
    softcap_fwd(logits, 2.0, y=logits)
