"""A call that nothing stands between: without the dispatcher, the same bits; and everything that must still see the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from support.cases import Case, build, by_face, cases, run
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilegrad
from tilegrad.kernels.attention import api

attention = cast("Callable[..., Tensor]", tilegrad.attention)


@settings(max_examples=60)
@given(case=cases())
def test_the_same_bits_as_the_kernels_own_functions(case: Case) -> None:
    call = build(case)
    want = run(call, None)
    for _ in range(2):  # the second time from what was remembered, at other addresses
        got = by_face(call)
        for name, x in got.items():
            assert torch.equal(x.nan_to_num(-1.0), want[name].nan_to_num(-1.0)), name


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    call = build(Case())
    return tuple(x.requires_grad_() for x in (call.q, call.k, call.v))  # type: ignore[return-value]


def grads_of(o: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o.square().sum(), (q, k, v))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_op_in_both_directions() -> None:
    q, k, v = leaves()
    want = grads_of(tilegrad.attention(q, k, v), q, k, v)
    with Seen() as seen:
        got = grads_of(tilegrad.attention(q, k, v), q, k, v)
    assert "tilegrad.attention_fwd.default" in seen.ops and "tilegrad.attention_bwd.default" in seen.ops
    assert all(map(torch.equal, got, want))
    o = tilegrad.attention(q, k, v)
    with Seen() as seen:
        grads_of(o, q, k, v)
    assert "tilegrad.attention_bwd.default" in seen.ops


def test_a_function_mode_sees_the_op_and_a_default_device_costs_nothing() -> None:
    class Names(TorchFunctionMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = leaves()
    with Names() as mode:
        tilegrad.attention(q, k, v)
    assert any("attention_fwd" in name for name in mode.seen)
    with torch.device("cpu"):
        assert "Eager" in type(tilegrad.attention(q, k, v).grad_fn).__name__


def test_a_subclass_reaches_the_op() -> None:
    class Mine(Tensor):
        pass

    q, k, v = (x.detach() for x in leaves())
    o = tilegrad.attention(q.as_subclass(Mine), k, v)
    assert type(o) is Mine and torch.equal(o.as_subclass(Tensor), tilegrad.attention(q, k, v))


def test_a_negation_to_come_is_carried_out_first() -> None:
    q, k, v = (x.detach() for x in leaves())
    negative = torch.complex(torch.zeros_like(q), q).conj().imag
    assert negative.is_neg()
    assert torch.equal(tilegrad.attention(negative.contiguous(), k, v), tilegrad.attention(-q, k, v))
    rows = torch.complex(torch.zeros(2, 2, 33, 1), torch.ones(2, 2, 33, 1)).conj().imag
    assert rows.is_neg()
    assert torch.equal(
        tilegrad.attention(rows, rows, v), tilegrad.attention(-torch.ones_like(rows), -torch.ones_like(rows), v)
    )


def test_a_traced_call_is_a_node_of_the_graph() -> None:
    q, k, v = (x.detach() for x in leaves())
    graph = make_fx(lambda q, k, v: tilegrad.attention(q, k, v, causal=True))(q, k, v)
    assert "tilegrad.attention_fwd.default" in graph.code


def test_what_was_saved_may_not_change_and_may_move() -> None:
    q, k, v = leaves()
    want = grads_of(tilegrad.attention(q, k, v), q, k, v)
    with save_on_cpu():
        o = tilegrad.attention(q, k, v)
    assert all(map(torch.equal, grads_of(o, q, k, v), want))
    again = checkpoint(lambda q: tilegrad.attention(q, k, v), q, use_reentrant=False)
    assert all(map(torch.equal, grads_of(again, q, k, v), want))
    o = tilegrad.attention(q, k, v)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads_of(o, q, k, v)


def test_memory_is_freed_with_the_result() -> None:
    import weakref

    q, k, v = leaves()
    o = tilegrad.attention(q, k, v, bias=torch.randn(33, 33, requires_grad=True))
    gone = weakref.ref(o)
    del o
    assert gone() is None  # without the garbage collector: no cycle


def test_inference_mode_and_no_grad_record_nothing() -> None:
    q, k, v = leaves()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not tilegrad.attention(q, k, v).requires_grad


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(api, "check_tensors", lambda *call: checked.append(call))
    monkeypatch.setattr(api, "_selected", {})
    q, k, v = leaves()
    for _ in range(3):
        grads_of(tilegrad.attention(q, k, v, causal=True, window=(5, 0)), q, k, v)
    assert len(checked) == 2  # one for each direction
    bad: list[dict[str, Any]] = [
        {"causal": 1},
        {"window": (True, 0)},
        {"softcap": False},
        {"window": (5,)},
        {"scale": "1"},
    ]
    for change in bad:
        with pytest.raises((TypeError, ValueError), match=next(iter(change))):
            attention(q, k, v, **({"causal": True, "window": (5, 0)} | change))
