"""torch.func through attention: grad, vmap and jacrev work; forward mode and second derivatives raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import tilegrad

N = 3
D = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape)))


Q, K, V = draw(N, 2, 4, 5, 8), draw(N, 2, 2, 7, 8), draw(N, 2, 2, 7, 6)


def loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    o, lse = tilegrad.attention(q, k, v, causal=True, return_lse=True, **options)
    total: Tensor = o.sin().sum() + lse.cos().sum()
    return total


def test_grad_gives_the_gradients_of_backward() -> None:
    q, k, v = (x[0].clone().requires_grad_() for x in (Q, K, V))
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.func.grad(loss, (0, 1, 2))(Q[0], K[0], V[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 1, 4), (0, None, None), (None, 0, 0), (0, 0, None)], ids=str)
def test_gradients_of_each_sample_equal_those_of_single_calls(in_dims: tuple[int | None, ...]) -> None:
    given = [x[0] if d is None else x.movedim(0, d) for x, d in zip((Q, K, V), in_dims, strict=True)]
    got = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims)(*given)
    for i in range(N):
        one = [x if d is None else x.select(d, i) for x, d in zip(given, in_dims, strict=True)]
        want = torch.func.grad(loss, (0, 1, 2))(*one)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize("shape", [(4, 5, 7), (2, 1, 5, 7)], ids=str)
def test_each_sample_has_its_gradients_of_bias_and_sinks(shape: tuple[int, ...], dim: int | None) -> None:
    bias, sinks = draw(N, *shape), draw(N, 4)
    if dim is None:
        bias, sinks = bias[0], sinks[0]

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        return loss(q, k, v, bias=bias, sinks=sinks)

    got = torch.func.vmap(torch.func.grad(f, (3, 4)), (0, 0, 0, dim, dim))(Q, K, V, bias, sinks)
    for i in range(N):
        own = (bias, sinks) if dim is None else (bias[i], sinks[i])
        want = torch.func.grad(f, (3, 4))(Q[i], K[i], V[i], *own)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-12)


def test_a_bias_with_a_batch_dimension_is_not_folded_into_samples() -> None:
    bias = draw(2, 1, 5, 7)
    got = torch.func.vmap(lambda q, k, v: tilegrad.attention(q, k, v, bias=bias))(Q, K, V)
    for i in range(N):
        torch.testing.assert_close(got[i], tilegrad.attention(Q[i], K[i], V[i], bias=bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(N, 1, 2, 7, 4), (2, 2, 7, 2), (1, 1, 7, 2)], ids=str)
def test_intervals_may_differ_per_sample_or_be_shared(shape: tuple[int, ...]) -> None:
    intervals = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(1)).int()
    intervals = intervals.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)
    own = len(shape) == 5

    def f(q: Tensor, k: Tensor, v: Tensor, intervals: Tensor) -> Tensor:
        return tilegrad.attention(q, k, v, intervals=intervals)

    got = torch.func.vmap(f, (0, 0, 0, 0 if own else None))(Q, K, V, intervals)
    for i in range(N):
        want = f(Q[i], K[i], V[i], intervals[i] if own else intervals)
        torch.testing.assert_close(got[i], want, rtol=1e-12, atol=1e-12)


def test_samples_become_one_call_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention import tiled

    ran: list[tuple[int, ...]] = []
    run_forward = tiled._run_forward

    def spy(call: Any, *rest: Any) -> None:
        ran.append(tuple(call.q.shape))
        run_forward(call, *rest)

    monkeypatch.setattr(tiled, "_run_forward", spy)
    torch.func.vmap(lambda q, k, v: tilegrad.attention(q, k, v, kernel="tiled"))(Q, K, V)
    assert ran == [(N * 2, 4, 5, 8)]


def test_jacrev_equals_the_jacobian_computed_row_by_row() -> None:
    def f(q: Tensor) -> Tensor:
        return tilegrad.attention(q, K[0], V[0], causal=True).sum((0, 1))

    got = torch.func.jacrev(f)(Q[0])
    want = torch.autograd.functional.jacobian(f, Q[0])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.jacrev]
)
def test_a_transform_can_be_compiled(transform: Any) -> None:
    def f(q: Tensor) -> Tensor:
        total: Tensor = tilegrad.attention(q, K[0], V[0], causal=True).sin().sum()
        return total

    x = Q if "lambda" in str(transform) else Q[0]
    got = torch.compile(transform(f), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, transform(f)(x), rtol=1e-12, atol=1e-12)


def test_vmap_draws_a_seed_for_each_sample() -> None:
    def f(q: Tensor) -> Tensor:
        return tilegrad.attention(q, K[0], V[0], dropout_p=0.5)

    same = torch.func.vmap(f, randomness="same")(Q[:1].expand(N, *Q.shape[1:]))
    assert torch.equal(same[0], same[1])
    each = torch.func.vmap(f, randomness="different")(Q[:1].expand(N, *Q.shape[1:]))
    assert not torch.equal(each[0], each[1])


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated:DeprecationWarning"
)  # torch loads its jvp decompositions
def test_forward_mode_raises_an_error() -> None:
    for call in (tilegrad.attention, tilegrad.sdpa):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(lambda q, call=call: call(q, Q[0], Q[0]), (Q[0],), (Q[0],))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jacfwd(lambda k: tilegrad.attention(Q[0], k, V[0]))(K[0])
    with forward_ad.dual_level():
        tilegrad.attention(Q[0], K[0], V[0])
        dual = forward_ad.make_dual(draw(4), draw(4))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            tilegrad.attention(Q[0], K[0], V[0], sinks=dual)


def test_second_derivatives_raise_an_error_also_under_transforms() -> None:
    def gradient(q: Tensor) -> Tensor:
        dq: Tensor = torch.func.grad(loss)(q, K[0], V[0])
        return dq.sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(gradient)(Q[0])
