"""The functions with autograd: gradients of every input, the checks of torch.library, compile, autocast, layouts, seeds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from support.cases import Case, build
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilegrad
from tilegrad import Mask
from tilegrad.kernels import cache
from tilegrad.kernels.cpu import library as native_library

KERNELS = ("reference", "tiled")
attention = cast("Callable[..., Tensor]", tilegrad.attention)  # without return_lse
GRADCHECK = {
    "causal": Case(causal=True),
    "window, groups": Case(window=(2, 1), group=2),
    "softcap": Case(softcap=1.5, scale=0.9),
    "bias": Case(bias="bhqk"),
    "broadcast bias": Case(bias="hk"),
    "alibi": Case(alibi="bh"),
    "sinks": Case(sinks=True),
    "dropout": Case(dropout_p=0.3),
    "intervals": Case(intervals="bh4", group=2),
    "rows that see nothing": Case(causal=True, tq=7, tk=5, sinks=True),
    "all": Case(
        causal=True,
        window=(4, None),
        softcap=2.0,
        bias="hqk",
        alibi="h",
        sinks=True,
        group=2,
        dropout_p=0.2,
        intervals="h2",
    ),
    "packed": Case(lengths=((3, 4), (0, 2), (2, 0), (4, 4)), causal=True, sinks=True, group=2, dropout_p=0.2),
}


def options(mask: Mask) -> dict[str, Any]:
    names = ("causal", "window", "scale", "softcap", "alibi_slopes", "dropout_p", "seed")
    varlen = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k") if mask.varlen else ("intervals",)
    return {name: getattr(mask, name) for name in (*names, *varlen)}


def face(mask: Mask, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
    return (tilegrad.attention_varlen if mask.varlen else tilegrad.attention)(q, k, v, **options(mask), **more)


@pytest.mark.parametrize(
    ("name", "kernel"), [*((name, "reference") for name in GRADCHECK), ("all", "tiled"), ("packed", "tiled")]
)
def test_gradients_of_every_input_pass_gradcheck(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tests the oracle and the autograd function; test_tiled.py compares the tiled kernel with the oracle."""
    monkeypatch.setattr("tilegrad.kernels.attention.tiled.TILE", 4)
    small = replace(GRADCHECK[name], b=1, hkv=1, d=3, dv=2, dtype=torch.float64, bias_dtype=torch.float64)
    if (small.tq, small.tk) == (33, 33):
        small = replace(small, tq=5, tk=6)
    call = build(small)
    inputs = {"q": call.q, "k": call.k, "v": call.v}
    if call.mask.float_bias is not None:
        inputs["bias"] = call.mask.float_bias
    if call.mask.sinks is not None:
        inputs["sinks"] = call.mask.sinks.double()
    for x in inputs.values():
        x.requires_grad_()

    def f(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = face(call.mask, **dict(zip(inputs, tensors, strict=True)), return_lse=True, kernel=kernel)
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(f, tuple(inputs.values()), atol=1e-7, rtol=1e-6)


def test_canary_gradcheck_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention import reference

    right = reference._summed_to_heads_of
    monkeypatch.setattr(reference, "_summed_to_heads_of", lambda dk, like: right(dk, like) * 1.001)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_gradients_of_every_input_pass_gradcheck("causal", "reference", monkeypatch)


def qkv(*, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    call = build(Case(group=2, tq=20, tk=24, dv=24))
    return tuple(x.requires_grad_(requires_grad) for x in (call.q, call.k, call.v))  # type: ignore[return-value]


def test_a_loss_of_lse_alone_has_gradients() -> None:
    q, k, v = qkv()
    _, lse = tilegrad.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert q.grad.norm() > 0 and k.grad.norm() > 0 and v.grad.norm() == 0


def test_gradients_are_computed_only_for_inputs_that_require_them() -> None:
    q, k, v = qkv(requires_grad=False)
    k.requires_grad_()
    attention(q, k, v).sum().backward()
    assert q.grad is None and v.grad is None and k.grad is not None


def test_second_derivatives_raise_an_error() -> None:
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


def op_arguments(**mask: Any) -> tuple[Any, ...]:
    m: dict[str, Any] = {
        "bias": None,
        "alibi_slopes": None,
        "sinks": None,
        "seed": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "intervals": None,
    }
    m |= {"max_seqlen_q": 0, "max_seqlen_k": 0, "causal": True, "left": 9, "right": None, "scale": None}
    m |= {"softcap": 2.0, "dropout_p": 0.0} | mask
    return (*m.values(), False, None)


def test_the_forward_op_passes_opcheck() -> None:
    q, k, v = qkv()
    extra = {"bias": torch.randn(4, 1, 24), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    extra["bias"].requires_grad_()
    extra["sinks"].requires_grad_()
    intervals = build(Case(intervals="bh4", tq=20, tk=24)).mask.intervals
    arguments = op_arguments(**extra, dropout_p=0.1, seed=torch.tensor(3), intervals=intervals)
    torch.library.opcheck(torch.ops.tilegrad.attention_fwd.default, (q, k, v, *arguments))
    transposed = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.tilegrad.attention_fwd.default, (*transposed, *op_arguments()))


def test_the_packed_op_passes_opcheck() -> None:
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = op_arguments(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5, max_seqlen_k=5)
    torch.library.opcheck(torch.ops.tilegrad.attention_fwd.default, (q, k, v, *packed))


def test_the_backward_op_passes_opcheck() -> None:
    q, k, v = qkv(requires_grad=False)
    o, lse = tilegrad.attention(q, k, v, causal=True, softcap=2.0, window=(9, None), return_lse=True)
    arguments = (
        q,
        k,
        v,
        o,
        lse,
        torch.randn_like(o),
        torch.randn_like(lse),
        *op_arguments(),
        [True, True, False, False, False],
    )
    torch.library.opcheck(torch.ops.tilegrad.attention_bwd.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_captures_the_whole_graph(dynamic: bool) -> None:
    q, k, v = qkv()
    bias, sinks = torch.randn(4, 1, 24, requires_grad=True), torch.randn(4, requires_grad=True)
    intervals = build(Case(intervals="h4", tq=20, tk=24)).mask.intervals

    def f(*x: Tensor) -> Tensor:
        o, lse = tilegrad.attention(
            *x[:3],
            causal=True,
            window=(9, None),
            softcap=3.0,
            bias=x[3],
            sinks=x[4],
            intervals=intervals,
            dropout_p=0.1,
            seed=5,
            return_lse=True,
        )
        return o.square().sum() + lse.sum()

    inputs = (q, k, v, bias, sinks)
    eager = torch.autograd.grad(f(*inputs), inputs)
    compiled = torch.autograd.grad(
        torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=dynamic)(*inputs), inputs
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_export_keeps_intervals_as_an_input() -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, intervals: Tensor) -> Tensor:
            return attention(q, k, v, intervals=intervals)

    q, k, v = qkv(requires_grad=False)
    first, second = (build(Case(intervals="h4", tq=20, tk=24), seed).mask.intervals for seed in (0, 1))
    program = torch.export.export(Attend(), (q, k, v, first)).module()
    assert torch.equal(program(q, k, v, second), attention(q, k, v, intervals=second))
    assert not torch.equal(program(q, k, v, second), program(q, k, v, first))


def test_a_compiled_call_draws_its_own_seed_and_takes_packed_sequences() -> None:
    q, k, v = (torch.randn(9, h, 8, requires_grad=True) for h in (4, 2, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = tilegrad.attention_varlen(q, k, v, ends, ends, 5, 5, causal=True, dropout_p=0.5)
        assert isinstance(o, Tensor)
        return o

    torch.manual_seed(0)
    first, second = f(q, k, v), f(q, k, v)
    assert not torch.equal(first, second)
    first.sum().backward()


def test_fake_tensors_have_the_shapes_of_the_results() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 10, 4, 8).transpose(1, 2), torch.empty(2, 2, 12, 8)
        o, lse = tilegrad.attention(q, k, torch.empty(2, 2, 12, 5), causal=True, return_lse=True)
        assert o.shape == (2, 4, 10, 5) and lse.shape == (2, 4, 10)
        with pytest.raises(ValueError, match="kv heads"):
            tilegrad.attention(torch.empty(2, 3, 10, 8), k, k)


def test_attention_runs_in_a_functional_call() -> None:
    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, sinks=self.sinks)

    q, k, v = qkv(requires_grad=False)
    sinks = torch.randn(4, requires_grad=True)
    o = torch.func.functional_call(Attend(), {"sinks": sinks}, (q, k, v))
    assert torch.equal(o, attention(q, k, v, sinks=sinks))
    o.sum().backward()
    assert sinks.grad is not None


def test_autocast_casts_q_k_v_and_gradients_come_back_in_float32() -> None:
    q, k, v = qkv()
    masks: dict[str, Any] = {
        "bias": torch.randn(4, 20, 24),
        "intervals": build(Case(intervals="h4", tq=20, tk=24)).mask.intervals,
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = tilegrad.attention(q, k, v, **masks, return_lse=True)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32
    short = attention(*(x.detach().bfloat16() for x in (q, k, v)), **masks)
    assert torch.equal(o, short)
    o.float().sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = (x.detach().double() for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype == torch.float64


def test_the_result_has_the_memory_order_of_q() -> None:
    q, k, v = (torch.randn(2, 10, 4, 8).transpose(1, 2) for _ in range(3))
    o = attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous()
    assert attention(q.contiguous(), k, v).is_contiguous()
    assert torch.equal(o, attention(q.contiguous(), k.contiguous(), v.contiguous()))


def test_packed_sequences_equal_one_call_each() -> None:
    call = build(
        Case(
            lengths=((5, 7), (0, 3), (4, 0), (9, 9)), group=2, causal=True, sinks=True, alibi="bh", dtype=torch.float64
        )
    )
    o, lse = face(call.mask, call.q, call.k, call.v, sinks=call.mask.sinks, return_lse=True)
    ends_q, ends_k = call.mask.cu_seqlens_q.tolist(), call.mask.cu_seqlens_k.tolist()  # type: ignore[union-attr]
    for b in range(4):
        rows, cols = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        ob, lseb = tilegrad.attention(
            call.q[rows].transpose(0, 1)[None], call.k[cols].transpose(0, 1)[None], call.v[cols].transpose(0, 1)[None],
            causal=True, sinks=call.mask.sinks, alibi_slopes=call.mask.alibi_slopes[b : b + 1], return_lse=True,  # type: ignore[index]
        )  # fmt: skip
        assert torch.equal(o[rows].transpose(0, 1)[None], ob) and torch.equal(lse[None, :, rows], lseb)


def test_dropout_follows_its_seed() -> None:
    q, k, v = qkv(requires_grad=False)

    def f(**seed: Any) -> Tensor:
        return attention(q, k, v, dropout_p=0.5, **seed)

    torch.manual_seed(1)
    first, second = f(), f()
    torch.manual_seed(1)
    assert torch.equal(f(), first) and not torch.equal(first, second)
    assert torch.equal(f(seed=2**64 - 1), f(seed=-1))
    assert torch.equal(f(seed=7), f(seed=torch.tensor(7))) and not torch.equal(f(seed=7), f(seed=8))
    for kernel in KERNELS:
        assert torch.allclose(f(seed=7, kernel=kernel), f(seed=7), atol=1e-6)


def test_deterministic_follows_the_flag_of_torch() -> None:
    q, k, v = qkv()
    torch.use_deterministic_algorithms(mode=True)
    try:
        attention(q, k, v, causal=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert q.grad is not None


def test_explain_gives_the_selection_and_a_kernel_is_chosen_by_name() -> None:
    q, k, v = qkv(requires_grad=False)
    told = tilegrad.explain(q, k, v, causal=True, dropout_p=0.1)
    expected = "tiled" if isinstance(native_library.library(), str) else "native"
    assert told.kernel == expected and set(KERNELS) <= set(told.reasons)
    assert re.search(rf"→ {expected} +runs", str(told)) and "only by name" in str(told)
    by_name = tilegrad.explain(q, k, v, kernel="reference")
    assert by_name.kernel == "reference" and by_name.reasons["reference"] == "runs: asked for by name"
    assert by_name.reasons["tiled"] == "takes this call too; not asked for"
    with pytest.raises(ValueError, match=r"kernel: got 'hoper'; accepted: None or one of .*'tiled', 'reference'"):
        tilegrad.attention(q, k, v, kernel="hoper")


def test_a_kernel_that_cannot_run_says_why_and_which_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention import table
    from tilegrad.kernels.table import Kernel, Table

    q, k, v = qkv(requires_grad=False)
    other = tilegrad.explain(q, k, v, causal=True).kernel
    picky = Kernel("picky", "attention.tiled", lambda problem: "takes no causal mask" if problem.mask.causal else None)
    monkeypatch.setattr(table, "ATTENTION", Table("attention", (picky, *table.ATTENTION.rows)))
    assert tilegrad.explain(q, k, v).kernel == "picky"
    told = tilegrad.explain(q, k, v, causal=True)
    assert told.kernel == other and told.reasons["picky"] == "takes no causal mask"
    with pytest.raises(
        ValueError, match=rf"'picky', which can't run this call: takes no causal mask; accepted: '{other}'"
    ):
        tilegrad.attention(q, k, v, causal=True, kernel="picky")


def test_a_full_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_ENTRIES", 3)
    kept: dict[int, int] = {}
    for n in range(10):
        assert cache.remember(kept, n, -n) == -n and kept[n] == -n and len(kept) <= 3
