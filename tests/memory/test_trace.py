"""Live ranges of programs follow the rules in `tilegrad.memory.planned.trace`."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import torch
from support import tanh_stack

from tilegrad.kernels.linear import linear_bwd_weight
from tilegrad.kernels.op import observe, op
from tilegrad.memory.planned.arena import flat
from tilegrad.memory.planned.trace import FlatHandle, Handle, Trace, bind, handles, start, trace, wait
from tilegrad.memory.types import BufferType, Role


def buffer(name: str, *shape: int, role: Role = "activations", dtype: torch.dtype = torch.float32) -> Handle:
    return Handle(name, shape or (4,), dtype, BufferType.TEMP, role)


@op()
def write(*, out: Any) -> None: ...


@op()
def copy(x: Any, *, out: Any) -> None: ...


@op(accumulates=("into",), adds=("stream",))
def add_to(x: Any, *, into: Any, stream: Any = None, accumulate: bool = True) -> None: ...


@op()
def use(*tensors: Any) -> None: ...


def traced(program: Callable[[], object], tree: object = ()) -> Trace:
    return trace(program, observe, tree)


def live(program: Callable[[], object]) -> dict[str, tuple[tuple[int, int], ...]]:
    return dict(traced(program).live)


a, b, c = buffer("a"), buffer("b"), buffer("c")


def test_a_read_extends_the_range() -> None:
    def program() -> None:
        write(out=a)
        copy(a, out=b)
        write(out=c)
        use(a, b)

    assert live(program) == {"a": ((0, 3),), "b": ((1, 3),), "c": ((2, 2),)}


def test_an_overwrite_starts_a_new_range() -> None:
    def program() -> None:
        write(out=a)
        copy(a, out=b)
        use(b)
        write(out=a)
        use(a)

    assert live(program) == {"a": ((0, 1), (3, 4)), "b": ((1, 2),)}


def test_accumulation_and_in_place_ops_extend_the_range() -> None:
    def program() -> None:
        write(out=a)
        write(out=b)
        use(b)
        add_to(b, into=a)
        copy(a, out=a)
        copy(a, out=b)

    assert live(program) == {"a": ((0, 5),), "b": ((1, 3), (5, 5))}


def test_only_a_gradient_that_does_not_accumulate_starts_a_new_range() -> None:
    def program(*, accumulate: bool) -> None:
        write(out=a)
        write(out=b)
        write(out=c)
        use(b)
        add_to(a, into=b, stream=c, accumulate=accumulate)
        use(b)

    assert live(lambda: program(accumulate=True)) == {"a": ((0, 4),), "b": ((1, 5),), "c": ((2, 4),)}
    assert live(lambda: program(accumulate=False)) == {"a": ((0, 4),), "b": ((1, 3), (4, 5)), "c": ((2, 4),)}


def test_the_first_micro_batch_does_not_read_the_gradient_of_a_weight() -> None:
    """The gradient is not a persistent buffer here, so that the trace shows where its value begins."""
    x, w, dy, dw = (cast(Any, buffer(name, 4, 4)) for name in ("x", "w", "dy", "dw"))

    def program() -> None:
        for tensor in (x, w, dy):
            write(out=tensor)
        linear_bwd_weight(dy, x, w, dw=dw, accumulate=False)
        linear_bwd_weight(dy, x, w, dw=dw, accumulate=True)
        linear_bwd_weight(dy, x, w, dw=dw, accumulate=False)

    assert traced(program).live["dw"] == ((3, 4), (5, 5))


def test_reading_what_was_never_written_names_buffer_and_op() -> None:
    with pytest.raises(ValueError, match=r"'use' \(number 1\) reads 'b', which nothing has written"):
        traced(lambda: (write(out=a), use(a, b)))
    with pytest.raises(ValueError, match=r"'add_to' .* reads 'b'"):
        traced(lambda: (write(out=a), add_to(a, into=b)))


def test_persistent_roles_live_for_the_whole_program() -> None:
    w, dw = buffer("w", role="params"), buffer("dw", role="grads")

    def program() -> None:
        write(out=a)
        add_to(w, into=dw)
        use(a)

    assert live(program) == {"a": ((0, 2),), "w": ((0, 2),), "dw": ((0, 2),)}


def test_persistent_handles_come_first_and_in_the_order_of_the_tree() -> None:
    w1, w2, moment = buffer("w1", role="params"), buffer("w2", role="params"), buffer("m", role="optimizer")
    unused = buffer("unused")
    result = traced(lambda: (write(out=a), use(w2, w1, a)), {"params": [w1, w2], "state": (moment, unused)})
    assert list(result.handles) == ["w1", "w2", "m", "a"]
    assert result.live["m"] == ((0, 1),)
    assert [request.name for request in result.requests("params")] == ["w1", "w2"]
    assert result.requests("activations")[0].nbytes == 16


def copy_aside() -> None:
    write(out=a)
    with start("copy"):
        copy(a, out=b)
    write(out=c)


def test_a_buffer_used_on_a_side_stream_lives_until_the_wait() -> None:
    def program() -> None:
        copy_aside()
        wait("copy")
        use(c)

    result = traced(program)
    assert dict(result.live) == {"a": ((0, 3),), "b": ((1, 3),), "c": ((2, 4),)}
    assert result.ops == ("write", "copy", "write", "wait copy", "use")


def test_a_buffer_overwritten_on_a_side_stream_has_one_live_range() -> None:
    def program() -> None:
        copy_aside()
        with start("copy"):
            write(out=b)
        wait("copy")

    assert live(program)["b"] == ((1, 4),)


def race(access: Callable[[], None], on_stream: Callable[[], None]) -> Callable[[], None]:
    def program() -> None:
        write(out=a)
        with start("copy"):
            on_stream()
        access()
        wait("copy")

    return program


def test_races_with_a_side_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'write' .* writes 'a' while side stream 'copy' still reads it: call wait"):
        traced(race(lambda: write(out=a), lambda: copy(a, out=b)))
    with pytest.raises(ValueError, match="reads 'b' while side stream 'copy' still writes it"):
        traced(race(lambda: use(b), lambda: copy(a, out=b)))
    traced(race(lambda: use(a), lambda: copy(a, out=b)))


def test_side_streams_must_be_waited_for() -> None:
    def program() -> None:
        with start("copy"):
            write(out=a)

    with pytest.raises(ValueError, match="side streams \\['copy'\\] in flight"):
        traced(program)
    with pytest.raises(ValueError, match="nothing to wait for"):
        traced(lambda: wait("copy"))

    def nested() -> None:
        with start("one"), start("two"):
            write(out=a)

    with pytest.raises(ValueError, match="start\\('two'\\) inside start\\('one'\\)"):
        traced(nested)


def test_marks_do_nothing_outside_a_trace() -> None:
    with start("copy"):
        pass
    wait("copy")


def test_an_access_to_a_view_counts_for_its_buffer() -> None:
    wide = buffer("x", 6, 4)
    heads = wide.view(2, 3, -1)
    assert (heads.shape, heads.nbytes) == ((2, 3, 4), wide.nbytes)
    assert live(lambda: (write(out=wide), write(out=a), use(heads)))["x"] == ((0, 2),)
    with pytest.raises(ValueError, match=r"'x' of shape \(6, 4\) has no view as \(5, 5\)"):
        wide.view(5, 5)


def test_an_access_to_a_flat_handle_counts_for_all_its_buffers() -> None:
    g, h = buffer("g", role="grads"), buffer("h", role="grads")
    both = FlatHandle("both", (8,), torch.float32, BufferType.TEMP, "grads", buffers=(g, h), starts=(0, 4))
    assert list(handles({"flat": both, "a": a})) == [g, h, a]

    def program() -> None:
        write(out=a)
        add_to(a, into=both)

    found = traced(program)
    assert list(found.handles) == ["a", "g", "h"] and found.live["h"] == ((0, 1),)

    def race() -> None:
        with start("side"):
            add_to(c, into=both)
        write(out=h)

    with pytest.raises(ValueError, match="writes 'h' while side stream 'side' still writes it"):
        traced(lambda: (write(out=c), race()))  # type: ignore[func-returns-value]


def test_two_buffers_of_one_name_are_refused() -> None:
    def write_both(other: Handle) -> None:
        write(out=a)
        write(out=other)

    for other in (buffer("a", 5), buffer("a", role="params"), buffer("a", dtype=torch.int32)):
        with pytest.raises(ValueError, match="two buffers are named 'a'"):
            traced(partial(write_both, other))


def test_a_flat_range_of_activations_gives_its_buffers_their_places_and_is_the_only_one() -> None:
    def use_flat(*buffers: Handle) -> None:
        for each in buffers:
            write(out=each)
        use(flat("both", buffers))

    assert traced(partial(use_flat, b, a)).places == {"b": 0, "a": 64}

    def two_ranges() -> None:
        use_flat(b, a)
        use_flat(a, b)

    with pytest.raises(ValueError, match="flat range 'both' of activations differs from an earlier one; accepted: one"):
        traced(two_ranges)


def test_a_tensor_in_a_traced_program_is_refused() -> None:
    with pytest.raises(TypeError, match="'use' was traced with a Tensor"):
        traced(lambda: use(torch.zeros(1)))


def test_functions_of_shapes_take_handles_like_tensors() -> None:
    handle = Handle("q", (2, 3), torch.bfloat16, BufferType.QUERY, device=torch.device("cuda", 1))
    assert (handle.shape, handle.dtype, handle.device, handle.nbytes) == (
        (2, 3),
        torch.bfloat16,
        torch.device("cuda:1"),
        12,
    )
    assert buffer("flag", 3, dtype=torch.bool).nbytes == 3
    assert Handle("scalar", (), torch.float64, BufferType.TEMP).nbytes == 8
    with pytest.raises(ValueError, match="'x' has role='weights'"):
        buffer("x", role="weights")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'x' has shape=\\(-1,\\)"):
        buffer("x", -1)


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True, slots=True)
class Config:
    width: int


@dataclass(frozen=True, slots=True)
class Node:
    config: Config
    inside: Any
    optional: Any = None


def test_bind_keeps_the_tree_and_replaces_handles() -> None:
    tree = Node(Config(3), {"pair": Pair(a, 7), "list": [b, (c, "text")]})
    bound = bind(tree, lambda handle: f"<{handle.name}>")
    assert bound == Node(Config(3), {"pair": Pair("<a>", 7), "list": ["<b>", ("<c>", "text")]})
    assert type(bound.inside["pair"]) is Pair
    assert bound.config is tree.config
    assert [handle.name for handle in handles(tree)] == ["a", "b", "c"]
    twice = bind([tree, {"again": tree}], lambda handle: f"<{handle.name}>")
    assert twice == [bound, {"again": bound}]
    assert twice[0] is twice[1]["again"]  # type: ignore[index]


def test_live_ranges_of_a_stack_of_layers() -> None:
    stack = tanh_stack.declare(n_layer=3)
    result = traced(stack.step, stack)
    assert len(result.ops) == 3 * 4 + 1 + 3 * 5
    assert result.live["1.h"] == ((4, 20),)  # saved: written in forward, read twice by its own backward
    assert result.live["1.a"] == ((5, 6), (18, 19))  # recomputed: two values, dead between them
    assert result.live["x1"] == ((3, 21),)  # the input that dW1 needs
    assert "unused" not in result.handles
