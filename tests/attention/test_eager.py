"""Eager calls bypass the dispatcher with the same bits, and modes, subclasses and transforms still see the op."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from support.cases import Case, build, by_face, cases, run
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilegrad
from tilegrad.functional import call, dispatch, fast_path
from tilegrad.kernels import cache
from tilegrad.kernels.attention import api
from tilegrad.kernels.cpu import library

attention = cast("Callable[..., Tensor]", tilegrad.attention)


@pytest.fixture(params=["C++", "Python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Known calls run in C++, or all calls run in Python."""
    if request.param == "Python":
        monkeypatch.setattr(call, "fast_path", None)
    elif call.fast_path is None:
        pytest.skip(f"C++ for eager calls {fast_path.load()}")
    else:
        call.fast_path.drop_programs()
        monkeypatch.setattr(api, "prepared_calls", {})
        q, k, v = leaves()
        grads_of(tilegrad.attention(q, k, v), q, k, v)
        assert is_known(tilegrad.attention(q, k, v))
    return str(request.param)


def is_known(o: Tensor) -> bool:
    return type(o.grad_fn).__name__ == "CppFunction"


@settings(max_examples=60)
@given(case=cases())
def test_eager_calls_have_the_bits_of_the_kernels_functions(case: Case) -> None:
    call = build(case)
    want = run(call, None)
    for _ in range(3):  # from the second time on it is a known call, at other addresses
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


def test_a_function_mode_sees_the_op_and_a_default_device_keeps_the_fast_path() -> None:
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
        o = tilegrad.attention(q, k, v)
    assert "Eager" in type(o.grad_fn).__name__


def test_a_subclass_reaches_the_op() -> None:
    class Mine(Tensor):
        pass

    q, k, v = (x.detach() for x in leaves())
    o = tilegrad.attention(q.as_subclass(Mine), k, v)
    assert type(o) is Mine and torch.equal(o.as_subclass(Tensor), tilegrad.attention(q, k, v))


def test_a_lazy_negation_is_resolved_before_the_call() -> None:
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


def test_saved_tensors_may_move_and_may_not_change() -> None:
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
    assert gone() is None  # freed without the garbage collector, so there is no cycle


def test_inference_mode_and_no_grad_record_nothing() -> None:
    q, k, v = leaves()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not tilegrad.attention(q, k, v).requires_grad


def test_a_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(api, "check_tensors", lambda *call: checked.append(call))
    monkeypatch.setattr(api, "prepared_calls", {})
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


def test_every_call_of_a_known_signature_has_the_bits_of_the_kernel(way: str) -> None:
    for case in (
        Case(dtype=torch.bfloat16),
        Case(layout="bthd"),
        Case(causal=True, window=(7, None), softcap=2.0),
        Case(tk=1),
    ):
        call = build(case)
        want = run(call, None)
        for known in (False, way == "C++"):
            q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
            options: dict[str, Any] = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
            o, lse = tilegrad.attention(q, k, v, return_lse=True, **options)
            assert is_known(o) == known
            grads = torch.autograd.grad(o, (q, k, v), call.do)
            for name, x in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True):
                assert torch.equal(x, want[name]), name
            assert o.stride() == torch.empty_like(q).stride()
            with torch.no_grad():
                assert torch.equal(tilegrad.attention(q, k, v, **options), o)


def test_more_masks_than_the_cache_holds_empty_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "Python":
        pytest.skip("of C++")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "MOST_ENTRIES", 20)
        dispatch.load_fast_path()
        q, k, v = leaves()
        want = grads_of(tilegrad.attention(q, k, v, scale=0.3), q, k, v)
        before = tilegrad.attention(q, k, v, scale=0.3)
        assert is_known(before)
        for i in range(20):
            tilegrad.attention(q, k, v, scale=1.0 + i)
        assert all(map(torch.equal, grads_of(before, q, k, v), want))  # a node keeps its own mask
        for known in (False, True):
            o = tilegrad.attention(q, k, v, scale=0.7)
            assert is_known(o) == known
            grads_of(o, q, k, v)
        assert all(map(torch.equal, grads_of(tilegrad.attention(q, k, v, scale=0.3), q, k, v), want))
    dispatch.load_fast_path()


def test_any_of_the_gradients_may_be_requested_or_given() -> None:
    q, k, v = leaves()
    o, lse = tilegrad.attention(q, k, v, return_lse=True)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    whole = torch.autograd.grad((o, lse), (q, k, v), (do, dlse), retain_graph=True)
    for _ in range(2):
        o, lse = tilegrad.attention(q, k, v, return_lse=True)
        again = torch.autograd.grad((o, lse), (q, k, v), (do, dlse), retain_graph=True)
        assert all(map(torch.equal, again, whole))
        (dk,) = torch.autograd.grad((o, lse), (k,), (do, dlse), retain_graph=True)
        assert torch.equal(dk, whole[1])
        parts = [torch.autograd.grad(x, (q, k, v), g, retain_graph=True) for x, g in ((o, do), (lse, dlse))]
        for a, b, both in zip(*parts, whole, strict=True):
            torch.testing.assert_close(a + b, both)
        detached = tilegrad.attention(q.detach(), k, v.detach())
        assert torch.equal(*(torch.autograd.grad(x, k, do, retain_graph=True)[0] for x in (detached, o)))
        torch.autograd.grad(detached, k, do)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(detached, k, do)


def test_a_gradient_that_no_kernel_can_read_is_copied() -> None:
    q, k, v = leaves()
    for _ in range(3):
        o = tilegrad.attention(q, k, v)
        want = torch.autograd.grad(o, (q, k, v), torch.ones_like(o), retain_graph=True)
        for do in (torch.ones(()).expand(o.shape), torch.ones(o.shape[::-1]).permute(3, 2, 1, 0)):
            assert all(map(torch.equal, torch.autograd.grad(o, (q, k, v), do, retain_graph=True), want))


def test_second_derivatives_raise_an_error_when_they_are_requested() -> None:
    q, k, v = leaves()
    o = tilegrad.attention(q, k, v)
    dq, _, _ = torch.autograd.grad(o.square().sum(), (q, k, v), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_hooks_are_called_gradients_accumulate_and_many_threads_may_run_backward() -> None:
    q, k, v = leaves()
    seen: list[Tensor] = []
    o = tilegrad.attention(q, k, v)
    o.register_hook(seen.append)
    o.sum().backward()
    assert len(seen) == 1 and q.grad is not None
    first = q.grad.clone()
    tilegrad.attention(q, k, v).sum().backward()
    assert torch.equal(q.grad, 2 * first)

    def step(_: int) -> tuple[Tensor, ...]:
        own = [x.detach().requires_grad_() for x in (q, k, v)]
        return grads_of(tilegrad.attention(*own), *own)

    with ThreadPoolExecutor(4) as pool:
        every = list(pool.map(step, range(32)))
    assert all(all(map(torch.equal, each, every[0])) for each in every)


def test_the_checks_name_a_bad_option_of_a_known_call() -> None:
    q, k, v = (x.detach() for x in leaves())
    for change in ({"kernel": "none"}, {"kernel": ["native"]}, {"kernel": 3}):
        with pytest.raises((TypeError, ValueError), match=r"kernel|unhashable"):
            attention(q, k, v, **change)
    for i, name in enumerate("qkv"):
        for tensors in ((q, k, v), leaves()):
            with pytest.raises(TypeError, match=f"{name}: got NoneType; accepted: a tensor"):
                attention(*tensors[:i], None, *tensors[i + 1 : 3])
    with pytest.raises(TypeError, match="q: got int"):
        attention(3, k, v)
    with pytest.raises(ValueError, match="v: got shape"):
        attention(q, k, v[:, :, 1:])


def test_a_later_choice_of_the_instruction_set_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in leaves())
    monkeypatch.setenv("TILEGRAD_ISA", "none")
    if tilegrad.explain(q, k, v).kernel != "native":
        pytest.skip("needs the native library")
    with pytest.raises(ValueError, match="TILEGRAD_ISA: got 'none'"):
        attention(q, k, v)


def test_autocast_casts_a_call_that_is_known_in_float32() -> None:
    q, k, v = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert tilegrad.attention(q, k, v).dtype == torch.bfloat16
    assert tilegrad.attention(q, k, v).dtype == q.dtype


def test_the_gradient_of_the_output_may_have_no_memory_or_be_a_batch() -> None:
    """It may be zeros for which torch allocates no memory, or several gradients at once (is_grads_batched)."""
    for _ in range(3):
        q, k, v = leaves()
        o = attention(q, k, v)
        nothing = torch._efficientzerotensor(o.shape)
        assert not torch.autograd.grad(o, q, nothing, retain_graph=True)[0].any()
        several = torch.randn(3, *o.shape)
        got = torch.autograd.grad(o, (q, k, v), several, is_grads_batched=True, retain_graph=True)
        want = [torch.autograd.grad(o, (q, k, v), do, retain_graph=True) for do in several]
        for i, x in enumerate(got):
            assert torch.equal(x, torch.stack([each[i] for each in want]))
    with pytest.raises(ValueError, match=r"q: got strides \(0, 0, 0, 0\)"):
        attention(torch._efficientzerotensor(q.shape), k, v)


def test_an_output_is_not_a_view() -> None:
    _, k, v = leaves()
    q = torch.randn(k.shape[0], k.shape[2], k.shape[1], k.shape[3]).transpose(1, 2).requires_grad_()
    for _ in range(3):
        o = attention(q, k, v)
        assert o.stride() == q.stride() and not o._is_view()


def test_a_kernel_is_chosen_by_a_name() -> None:
    class Another:
        def __hash__(self) -> int:
            return hash("native")

    q, k, v = leaves()
    if not isinstance(library.library(), str):
        for _ in range(2):
            attention(q, k, v, kernel="native")
    with pytest.raises(ValueError, match="kernel: got"):
        attention(q, k, v, kernel=Another())


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo warns of functions that it does not know
def test_compiled_autograd_runs_known_calls(way: str) -> None:
    torch.compiler.reset()

    @dynamo_config.patch(compiled_autograd=True)
    @torch.compile(backend="eager")
    def backward(loss: Tensor) -> None:
        loss.backward()

    grads = []
    for turn in range(3):
        q, k, v = leaves()
        o = attention(q, k, v)
        assert is_known(o) == (way == "C++"), turn
        backward(o.square().sum())
        assert q.grad is not None
        grads.append(q.grad)
    assert all(torch.equal(x, grads[0]) for x in grads)
