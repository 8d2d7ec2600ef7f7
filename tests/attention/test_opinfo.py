"""tilegrad.attention as an OpInfo of torch's own tests: oracle, gradcheck, batched gradients, vmap, fake tensors, compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

pytest.importorskip("expecttest", reason="torch.testing._internal needs pip install 'tilegrad[test]'")

from support.pairwise import Spec, all_pairs, covering, pairs

with mock.patch.object(
    torch.backends, "disable_global_flags"
):  # otherwise no later test of this process could set a flag
    from torch.testing._internal.common_dtype import _dispatch_dtypes
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput
    from torch.testing._internal.optests.aot_autograd import aot_autograd_check
    from torch.testing._internal.optests.fake_tensor import fake_check

import tilegrad
from tilegrad.kernels.attention import reference

D = torch.float64
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
B, DIM = 2, 4
AXES: dict[str, tuple[object, ...]] = {
    "heads": ((2, 1), (2, 2), (1, 3)),  # kv heads, and the query heads of each
    "t": ((5, 5), (4, 7), (7, 4)),
    "band": ((False, None), (True, None), (False, (2, 1)), (True, (3, 0))),
    "softcap": (0.0, 2.0),
    "bias": (None, "bhqk", "qk", "BHQK"),
    "alibi": (False, True),
    "sinks": (False, True),
    "intervals": ("", "2", "bh4"),  # which axes of "bh" they have, then how many numbers a column has
    "dropout_p": (0.0, 0.25),
    "return_lse": (False, True),
    "kernel": (None, "tiled"),
}
SPECS = covering(AXES)
COMPILED_IN_CI = 2  # number of samples; the slow set compiles all


def sample_of(spec: Spec, dtype: torch.dtype, device: str, *, requires_grad: bool) -> SampleInput:
    draw = torch.Generator(device).manual_seed(SPECS.index(spec))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=draw).requires_grad_(requires_grad)

    (hkv, group), (tq, tk), (causal, window) = spec["heads"], spec["t"], spec["band"]
    hq, options = hkv * group, {"causal": causal, "window": window, "softcap": spec["softcap"]}
    sizes = dict(zip("bhqk", (B, hq, tq, tk), strict=True))
    if spec["bias"]:
        bias = randn(*(sizes[x] for x in spec["bias"].lower()))
        options["bias"] = (bias > -0.5).detach() if spec["bias"].isupper() else bias
    if spec["alibi"]:
        options["alibi_slopes"] = torch.rand(hq, dtype=dtype, device=device, generator=draw)
    if spec["sinks"]:
        options["sinks"] = randn(hq)
    if spec["intervals"]:
        form = (B, hkv) if "bh" in spec["intervals"] else (1, 1)
        ends = torch.randint(0, tq + 1, (*form, tk, int(spec["intervals"][-1]) // 2, 2), generator=draw, device=device)
        options["intervals"] = ends.sort(-1).values.flatten(3).int()
    if spec["dropout_p"]:
        options |= {"dropout_p": spec["dropout_p"], "seed": torch.tensor(3, device=device)}
    options |= {"return_lse": spec["return_lse"], "kernel": spec["kernel"]}
    qkv = randn(B, hq, tq, DIM), randn(B, hkv, tk, DIM), randn(B, hkv, tk, DIM)
    return SampleInput(qkv[0], args=qkv[1:], kwargs=options)


def samples(
    _: OpInfo, device: str, dtype: torch.dtype, requires_grad: bool, **__: Any
) -> Iterator[SampleInput]:  # fmt: skip
    for spec in SPECS:
        yield sample_of(spec, dtype, device, requires_grad=requires_grad)


def by_matrices(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, kernel: str | None, **options: Any
) -> tuple[Tensor, ...] | Tensor:
    del kernel
    o, lse = reference.forward(q, k, v, tilegrad.Mask(**options))
    return (o, lse) if return_lse else o


ATTENTION = OpInfo(
    "tilegrad.attention", op=tilegrad.attention, ref=by_matrices, dtypes=_dispatch_dtypes((torch.float32, D)),
    sample_inputs_func=samples, supports_out=False, supports_gradgrad=False, supports_forward_ad=False,
    check_batched_grad=True, gradcheck_fast_mode=True,
)  # fmt: skip


def drawn(*, requires_grad: bool = True) -> list[SampleInput]:
    return list(ATTENTION.sample_inputs("cpu", D, requires_grad=requires_grad))


def flat(sample: SampleInput) -> tuple[list[Any], Callable[[list[Any]], SampleInput]]:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

    def whole(given: list[Any]) -> SampleInput:
        x, args, kwargs = tree_unflatten(given, spec)
        return SampleInput(x, args=args, kwargs=kwargs)

    return leaves, whole


def called(sample: SampleInput) -> Any:
    return ATTENTION.op(sample.input, *sample.args, **sample.kwargs)


def test_the_samples_have_every_pair_of_options() -> None:
    assert set.union(*(pairs(spec) for spec in SPECS)) == all_pairs(AXES)


def test_every_sample_agrees_with_the_oracle() -> None:
    for sample in drawn(requires_grad=False):
        want = by_matrices(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(called(sample), want, **CLOSE, msg=sample.summary())


def gradcheck(sample: SampleInput, *, fast_mode: bool) -> None:
    leaves, whole = flat(sample)
    learned = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]

    def f(*tensors: Tensor) -> Any:
        given = list(leaves)
        for n, x in zip(learned, tensors, strict=True):
            given[n] = x
        result = called(whole(given))
        if isinstance(result, Tensor):
            return result
        o, lse = result
        return o, lse.masked_fill(lse == -torch.inf, 0.0)  # a row that attends to nothing

    checks: dict[str, Any] = {"check_batched_grad": ATTENTION.check_batched_grad, "atol": 1e-7, "rtol": 1e-6}
    torch.autograd.gradcheck(f, tuple(leaves[n] for n in learned), fast_mode=fast_mode, **checks)


def test_samples_pass_gradcheck_with_batched_gradients() -> None:
    for sample in drawn():
        gradcheck(sample, fast_mode=ATTENTION.gradcheck_fast_mode)


@pytest.mark.slow
def test_samples_pass_gradcheck_in_every_number() -> None:
    for sample in drawn():
        gradcheck(sample, fast_mode=False)


def test_vmap_may_map_any_of_the_tensors() -> None:
    """A mapped tensor has two samples, at its first or its last dimension. The rest of the tensors are not mapped."""
    for number, sample in enumerate(drawn(requires_grad=False)):
        leaves, whole = flat(sample)
        tensors = [n for n, x in enumerate(leaves) if isinstance(x, Tensor) and x.dtype is not torch.int64]
        for mapped in (tensors[:3], tensors[number % len(tensors) :][:1], tensors):
            kinds = {n: torch.stack((leaves[n], leaves[n].flip(0))) for n in mapped}
            dims = {n: 0 if n % 2 else kinds[n].ndim - 2 for n in mapped}

            def f(*given: Tensor, leaves: list[Any] = leaves, mapped: list[int] = mapped, whole: Any = whole) -> Any:
                return called(whole([given[mapped.index(n)] if n in mapped else x for n, x in enumerate(leaves)]))

            inputs = [kinds[n].movedim(0, dims[n]) for n in mapped]
            got = torch.func.vmap(f, tuple(dims[n] for n in mapped))(*inputs)
            each = [f(*(kinds[n][i] for n in mapped)) for i in range(2)]
            want = (
                torch.stack(each) if isinstance(each[0], Tensor) else tuple(map(torch.stack, zip(*each, strict=True)))
            )
            torch.testing.assert_close(got, want, **CLOSE, msg=sample.summary())


def test_fake_tensors_have_the_forms_of_the_results() -> None:
    for sample in drawn():
        fake_check(ATTENTION.op, (sample.input, *sample.args), sample.kwargs)


def compiled(chosen: list[SampleInput]) -> None:
    for sample, dynamic in zip(chosen, itertools.cycle((True, False)), strict=False):
        aot_autograd_check(ATTENTION.op, (sample.input, *sample.args), sample.kwargs, dynamic)


def test_compiled_forward_and_backward_equal_eager_ones() -> None:
    compiled(drawn()[:COMPILED_IN_CI])


@pytest.mark.slow
def test_all_compiled_samples_equal_eager_ones() -> None:
    compiled(drawn())


def test_an_output_whose_last_dimension_has_gaps_is_refused_by_name() -> None:
    sample = drawn()[0].noncontiguous()
    with pytest.raises(ValueError, match=r"q: got strides .* accepted: any strides whose last one is 1"):
        called(sample)


def test_canary_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.functional import call

    run = call.backward

    def wrong(*arguments: Any, **options: Any) -> tuple[Tensor | None, ...]:
        dq, *others = run(*arguments, **options)
        assert dq is not None
        return dq * 1.001, *others

    monkeypatch.setattr(call, "backward", wrong)
    with pytest.raises(RuntimeError, match="Jacobian"):
        gradcheck(drawn()[0], fast_mode=False)
