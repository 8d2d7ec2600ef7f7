"""A planned step: exact bytes, aligned views, the same bits shared or not, and poison that shows a wrong lifetime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tanh_stack
from support.tanh_stack import Stack, declare, fill, gradients

from tilegrad.kernels.attention.api import attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.attention.mask import Mask
from tilegrad.kernels.op import observe, op
from tilegrad.memory.planned.arena import Arenas, MemoryPlan, flat, plan_memory, poison_dead
from tilegrad.memory.planned.trace import Handle, Trace, bind, start, trace, wait
from tilegrad.memory.types import BufferType

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


def traced(stack: Stack) -> Trace:
    return trace(stack.step, observe, stack)


def run(stack: Stack, memory: MemoryPlan, *, poison: bool = False) -> list[torch.Tensor]:
    arenas = Arenas(memory)
    bound = bind(stack, arenas.view)
    fill(bound)
    if poison:
        arenas.poison()
        with poison_dead(arenas, observe):
            bound.step()
    else:
        bound.step()
    return gradients(bound)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_sharing_memory_and_poison_do_not_change_the_bits_of_gradients() -> None:
    stack = declare()
    shared, apart = plan_memory(traced(stack)), plan_memory(traced(stack), share=False)
    assert shared.peak_bytes < apart.peak_bytes
    assert shared.arenas["activations"].arena_bytes <= 1.05 * shared.arenas["activations"].lower_bound_bytes
    expected = run(stack, apart)
    assert all(grad.abs().sum() > 0 for grad in expected)
    assert same(run(stack, shared), expected)
    assert same(run(stack, shared, poison=True), expected)


def test_gradients_equal_those_of_autograd() -> None:
    stack = declare(dtype=torch.float64)
    arenas = Arenas(plan_memory(traced(stack)))
    bound = bind(stack, arenas.view)
    fill(bound)
    weights = [w.value.clone().requires_grad_() for layer in bound.layers for w in (layer.w1, layer.w2)]
    x = bound.x[0].clone()
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.tanh(x @ w1.t()) @ w2.t()
    (x.square().sum() / (2 * x.numel())).backward()
    bound.step()
    for ours, weight in zip(gradients(bound), weights, strict=True):
        torch.testing.assert_close(ours, weight.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["2.h", "x3", "dx2"])
def test_poison_shows_a_lifetime_that_ends_too_early(name: str) -> None:
    stack = declare()
    right = traced(stack)
    (first, last) = right.live[name][0]
    wrong = replace(right, live=dict(right.live) | {name: ((first, last - 1),)})
    assert any(grad.isnan().any() for grad in run(stack, plan_memory(wrong), poison=True))


def test_an_arena_has_exactly_the_bytes_of_the_plan() -> None:
    memory = plan_memory(traced(declare(rows=7, width=5)))
    arenas = Arenas(memory)
    assert set(arenas.bytes) == {"params", "grads", "inputs", "activations"}
    for role, allocation in arenas.bytes.items():
        assert allocation.untyped_storage().nbytes() == memory.arenas[role].arena_bytes
    assert arenas.nbytes == memory.peak_bytes


def test_views_are_aligned_and_inside_their_arena() -> None:
    stack = declare(rows=7, width=5)
    memory = plan_memory(traced(stack))
    arenas = Arenas(memory)
    for handle in memory.trace.handles.values():
        view = arenas.view(handle)
        assert isinstance(view, torch.Tensor)
        assert (tuple(view.shape), view.dtype) == (handle.shape, handle.dtype)
        assert view.data_ptr() % 64 == 0
        assert view.untyped_storage().data_ptr() == arenas.bytes[handle.role].data_ptr()


def test_params_and_grads_have_the_same_layout() -> None:
    memory = plan_memory(traced(declare()))
    offsets = memory.arenas["params"].offsets
    assert list(offsets.values()) == list(memory.arenas["grads"].offsets.values())
    assert list(offsets) == [f"{n}.{w}" for n in range(6) for w in ("w1", "w2")]
    assert list(offsets.values()) == sorted(offsets.values())
    small, large = (Handle(f"w{n}", (n,), torch.float32, BufferType.CACHE, "params") for n in (3, 300))
    growing = Trace(("op",), {"w3": small, "w300": large}, {"w3": ((0, 0),), "w300": ((0, 0),)})
    assert plan_memory(growing).arenas["params"].offsets == {"w3": 0, "w300": 64}


def test_attention_runs_in_planned_memory() -> None:
    """Two attention calls and their backwards on the kernels' own ops; they share one buffer of scratch."""
    shape, mask = (2, 17, 2, 8), Mask(causal=True)

    def buffer(name: str, shape: tuple[int, ...] = shape, dtype: torch.dtype = torch.float32) -> Handle:
        kept = name in ("q", "k", "v", "dq", "dk", "dv")
        return Handle(name, shape, dtype, BufferType.OUTPUT, "inputs" if kept else "activations")

    tree = {name: buffer(name) for name in ("q", "k", "v", "o", "o2", "do", "do2", "dq", "dk", "dv")}
    tree |= {name: buffer(name, shape[:3]) for name in ("lse", "lse2")}
    q, k, v = tree["q"], tree["k"], tree["v"]
    scratch = {
        backward: {
            name: buffer(f"scratch{backward}.{name}", *need)
            for name, need in attention_workspace(q, k, v, mask, backward=backward).items()
        }
        for backward in (False, True)
    }

    def program(t: dict[str, Any], scratch: dict[bool, dict[str, Any]]) -> None:
        attention_fwd(t["q"], t["k"], t["v"], mask, o=t["o"], lse=t["lse"], scratch=scratch[False])
        attention_fwd(t["o"], t["k"], t["v"], mask, o=t["o2"], lse=t["lse2"], scratch=scratch[False])
        tanh_stack.half_mean_square_bwd(t["o2"], dy=t["do2"])
        for q, o, lse, do, dq in (("o", "o2", "lse2", "do2", "do"), ("q", "o", "lse", "do", "dq")):
            attention_bwd(
                t[q], t["k"], t["v"], t[o], t[lse], t[do], None, mask,
                dq=t[dq], dk=t["dk"], dv=t["dv"], scratch=scratch[True],
            )  # fmt: skip

    found = trace(lambda: program(tree, scratch), observe)
    assert found.live["lse"] == ((0, 4),)
    assert {len(found.live[f"scratchTrue.{name}"]) for name in scratch[True]} == {2}

    def gradient(memory: MemoryPlan, *, poison: bool) -> list[torch.Tensor]:
        arenas = Arenas(memory)
        bound, bound_scratch = bind((tree, scratch), arenas.view)
        for index, name in enumerate("qkv"):
            bound[name].copy_(torch.randn(shape, generator=torch.Generator().manual_seed(index)))  # type: ignore[attr-defined]
        if poison:
            arenas.poison()
            with poison_dead(arenas, observe):
                program(bound, bound_scratch)
        else:
            program(bound, bound_scratch)
        return [bound[name].clone() for name in ("dq", "dk", "dv")]  # type: ignore[attr-defined]

    expected = gradient(plan_memory(found, share=False), poison=False)
    assert all(grad.isfinite().all() and grad.any() for grad in expected)
    assert same(gradient(plan_memory(found), poison=False), expected)
    assert same(gradient(plan_memory(found), poison=True), expected)


def test_a_handle_without_memory_stays_a_handle() -> None:
    stack = declare()
    bound = bind(stack, Arenas(plan_memory(traced(stack))).view)
    assert bound.unused is stack.unused
    with pytest.raises(TypeError, match="Handle"):
        torch.add(bound.unused, 1)


@pytest.mark.parametrize("shape", [(), (0, 3), (3,)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_every_dtype_and_shape_has_a_view_and_a_poison(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    handle = Handle("x", shape, dtype, BufferType.MASK)
    before = Handle("before", (1,), torch.uint8, BufferType.MASK)
    memory = plan_memory(Trace(("op",), {"before": before, "x": handle}, {"before": ((0, 0),), "x": ((0, 0),)}))
    arenas = Arenas(memory)
    view = arenas.view(handle)
    assert isinstance(view, torch.Tensor)
    assert tuple(view.shape) == shape
    assert not view.to(torch.float64).any()
    arenas.poison()
    if dtype in DTYPES:
        assert view.to(torch.float64).isnan().all()
    arenas.poison_value(handle)
    if dtype in DTYPES:
        assert view.to(torch.float64).isnan().all()
    else:
        assert (view.reshape(-1).view(torch.uint8) == 0xCB).all()


def test_a_program_that_departs_from_its_trace_is_refused() -> None:
    stack = declare(n_layer=2)
    arenas = Arenas(plan_memory(traced(stack)))
    bound = bind(stack, arenas.view)
    fill(bound)

    def refused(program: Callable[[], object], message: str) -> None:
        with pytest.raises(RuntimeError, match=message), poison_dead(arenas, observe):
            program()

    refused(
        lambda: tanh_stack.tanh_fwd(bound.layers[0].h, a=bound.layers[0].a), "'tanh_fwd', but 'linear_fwd' in the trace"
    )
    refused(lambda: bound.layers[0].forward(bound.x[0], bound.x[1]), "ended after 4 of")
    refused(lambda: (bound.step(), bound.step()), "but 'the end' in the trace")  # type: ignore[func-returns-value]


def test_poison_is_written_after_side_streams_have_finished() -> None:
    a, b, c = (Handle(name, (2,), torch.float32, BufferType.COMM) for name in "abc")
    seen: list[bool] = []

    @op()
    def write(*, out: torch.Tensor) -> None:
        out.fill_(1)

    @op()
    def copy(x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(x)

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        write(out=a)
        with start("copy"):
            copy(a, out=b)
        write(out=c)
        if isinstance(a, torch.Tensor):
            seen.append(bool(a.isnan().any()))
        wait("copy")
        if isinstance(a, torch.Tensor):
            seen.append(bool(a.isnan().any()))
        copy(c, out=c)

    memory = plan_memory(trace(lambda: program(a, b, c), observe))  # type: ignore[arg-type]
    arenas = Arenas(memory)
    with poison_dead(arenas, observe):
        program(*bind((a, b, c), arenas.view))  # type: ignore[arg-type]
    assert seen == [False, True]


def test_cuda_plans_are_aligned_and_an_arena_is_on_one_device() -> None:
    cuda = torch.device("cuda")
    x = Handle("x", (3,), torch.float32, BufferType.TEMP, device=cuda)
    y = Handle("y", (3,), torch.float32, BufferType.TEMP, device=cuda)
    both = Trace(("op",), {"x": x, "y": y}, {"x": ((0, 0),), "y": ((0, 0),)})
    assert plan_memory(both).arenas["activations"].offsets == {"x": 0, "y": 256}
    assert plan_memory(both, align=512).peak_bytes == 512 + 12
    mixed = replace(both, handles={"x": x, "y": replace(y, device=torch.device("cpu"))})
    with pytest.raises(ValueError, match="buffers on cpu, cuda"):
        plan_memory(mixed)


def test_an_empty_program_has_no_arenas() -> None:
    memory = plan_memory(trace(lambda: None, observe))
    assert memory.peak_bytes == Arenas(memory).nbytes == 0


@pytest.mark.gpu
def test_a_planned_step_on_cuda_allocates_the_plan_and_no_more() -> None:
    def on_cuda(handle: Handle) -> Handle:
        return replace(handle, device=torch.device("cuda"))

    stack = bind(declare(rows=64, width=64), on_cuda)
    memory = plan_memory(traced(stack))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    arenas = Arenas(memory)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] - before == memory.peak_bytes
    assert all(arenas.view(handle).data_ptr() % 256 == 0 for handle in memory.trace.handles.values())  # type: ignore[union-attr]
    expected = run(stack, plan_memory(traced(stack), share=False))
    assert same(run(stack, memory), expected)
    assert same(run(stack, memory, poison=True), expected)


def test_a_flat_handle_views_its_buffers_and_the_gaps_between() -> None:
    a, b, c = (
        Handle(name, shape, torch.float32, BufferType.TEMP, "grads")
        for name, shape in (("a", (3,)), ("b", (5, 4)), ("c", ()))
    )
    both = flat("both", [a, b])
    assert both.shape == (16 + 20,) and both.starts == (0, 16)
    arenas = Arenas(plan_memory(trace(lambda: None, observe, [both, c])))
    bound: Any = bind((both, a, b, c), arenas.view)  # handles have become tensors
    whole, first, second, third = bound
    whole.copy_(torch.arange(36.0))
    assert first.tolist() == [0.0, 1.0, 2.0] and second[4, 3] == 35.0 and third == 0.0
    cuda = [replace(x, device=torch.device("cuda")) for x in (a, b)]
    assert flat("both", cuda).shape == (128 + 128,)  # whole runs of 128 elements
    assert (
        bind(flat("elsewhere", [replace(a, name="z")]), arenas.view).name == "elsewhere"
    )  # never planned: stays a handle


def test_an_error_names_the_buffers_that_a_flat_handle_cannot_span() -> None:
    a = Handle("a", (3,), torch.float32, BufferType.TEMP, "grads")
    b = replace(a, name="b")
    arenas = Arenas(plan_memory(trace(lambda: None, observe, [b, a])))
    refused: tuple[tuple[Callable[[], object], str], ...] = (
        (
            lambda: flat("x", [a, replace(b, dtype=torch.float64)]),
            "x: got 'b', torch.float64 in grads on cpu; accepted",
        ),
        (lambda: flat("x", [a, replace(b, role="params")]), "x: got 'b', torch.float32 in params"),
        (
            lambda: flat("x", [a, replace(b, role="activations")]),
            "accepted: buffers with the dtype, role and device of 'a'",
        ),
        (lambda: bind(flat("x", [a, b]), arenas.view), "x: got 'b' of 12 bytes at 64; accepted: 12 bytes at -64"),
    )
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
