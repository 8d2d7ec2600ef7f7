"""The Gluon emulator itself: correct kernels run in every order of threads, and each kind of mistake is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")
from support.gluon.emulator import in_python
from support.gluon.language import Language
from support.gluon.shared_memory import beginning, fence_async_shared, mbarrier
from support.gluon.tensor_core import warpgroup_mma, warpgroup_mma_wait
from support.gluon.tma import tma, tma_load, tma_reduce_add, tma_store
from support.gluon.values import Number

gl = Language()
ORDERS = range(12)  # seeds
STAGES, TILES, ROWS = 2, 5, 16


class Box:
    """A descriptor of a tensor (T, D) with boxes of ROWS rows, with the attributes of Triton's that the emulator reads."""

    def __init__(self, x: Tensor) -> None:
        self.base, self.shape, self.strides, self.block_shape = x, x.shape, x.stride(), (ROWS, x.shape[1])


def launch(kernel: Callable[..., None], *arguments: Any, grid: int = 1, seed: int = 0) -> None:
    with in_python(seed=seed) as start:
        start(kernel, grid, arguments)


def barriers(n: int, count: int = 1) -> Any:
    bars = gl.allocate_shared_memory(torch.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


def copy_through_a_pipeline(
    x_desc: Any, y: Any, *, acquire: bool = True, wait: bool = True, release: bool = True
) -> None:
    """y = 2 x: one partition loads tiles of x, the other stores them twice as large."""
    stages = gl.allocate_shared_memory(torch.float32, [STAGES, ROWS, 8], None)
    full, empty = barriers(STAGES), barriers(STAGES)

    def load() -> None:
        for n in range(TILES):
            stage = n % STAGES
            if acquire:
                mbarrier.wait(empty.index(stage), n // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), x_desc.block_type.nbytes)
            tma_load(x_desc, [n * ROWS, 0], full.index(stage), stages.index(stage))

    def store() -> None:
        for n in range(TILES):
            stage = n % STAGES
            if wait:
                mbarrier.wait(full.index(stage), n // STAGES & 1)
            value = stages.index(stage).load(None) * 2
            if release:
                mbarrier.arrive(empty.index(stage))
            at = gl.arange(0, ROWS)[:, None] * 8 + gl.arange(0, 8)[None, :]
            gl.store(y + n * ROWS * 8 + at, value)

    gl.warp_specialize([(store, ()), (load, ())], [1], [24])


def doubled(seed: int, **broken: bool) -> bool:
    x, y = torch.randn(TILES * ROWS, 8), torch.zeros(TILES * ROWS, 8)
    launch(lambda x_desc, y: copy_through_a_pipeline(x_desc, y, **broken), Box(x), y, seed=seed)
    return torch.equal(y, 2 * x)


def test_a_correct_pipeline_is_correct_in_every_order() -> None:
    assert all(doubled(seed) for seed in ORDERS)


def test_a_consumer_that_does_not_wait_reads_too_early() -> None:
    for seed in ORDERS:
        with pytest.raises(AssertionError):
            assert doubled(seed, wait=False)


def test_a_producer_that_does_not_wait_overwrites_data_that_are_still_read() -> None:
    def wrong(seed: int) -> bool:
        try:
            return not doubled(seed, acquire=False)
        except AssertionError as error:
            return "more arrivals" in str(error)

    assert any(wrong(seed) for seed in ORDERS)


def test_a_stage_that_is_never_released_is_reported_as_a_deadlock_at_once() -> None:
    for seed in ORDERS:
        with pytest.raises(AssertionError, match="deadlock"):
            doubled(seed, release=False)


def test_partitions_that_wait_for_each_other_are_reported_as_a_deadlock() -> None:
    def kernel() -> None:
        bars = barriers(2)

        def wait_then_arrive(a: int, b: int) -> None:
            mbarrier.wait(bars.index(a), 0)
            mbarrier.arrive(bars.index(b))

        gl.warp_specialize([(wait_then_arrive, (0, 1)), (wait_then_arrive, (1, 0))], [1], [24])

    with pytest.raises(AssertionError, match="deadlock"):
        launch(kernel)


def test_a_phase_of_an_mbarrier_ends_with_its_last_arrival() -> None:
    order: list[str] = []

    def kernel() -> None:
        bars = barriers(1, count=2)
        mbarrier.wait(bars.index(0), 1)  # the phase before the first: returns at once
        order.append("before")

        heard = barriers(1)

        def consume() -> None:
            for phase in (0, 1):
                mbarrier.wait(bars.index(0), phase)
                order.append(f"phase {phase}")
                mbarrier.arrive(heard.index(0))

        def produce() -> None:
            for phase, names in enumerate(("ab", "cd")):
                for name in names:
                    order.append(name)
                    mbarrier.arrive(bars.index(0))
                mbarrier.wait(heard.index(0), phase)  # a phase for which nobody waited in time is missed for ever

        gl.warp_specialize([(consume, ()), (produce, ())], [1], [24])

    for seed in ORDERS:
        order.clear()
        launch(kernel, seed=seed)
        assert order == ["before", "a", "b", "phase 0", "c", "d", "phase 1"]


def test_more_arrivals_than_the_count_of_a_barrier_are_an_error() -> None:
    def kernel() -> None:
        bars = barriers(1)
        mbarrier.arrive(bars.index(0), count=2)

    with pytest.raises(AssertionError, match="more arrivals"):
        launch(kernel)


def multiply(y: Any, *, fence: bool = True, overwrite: bool = False, wait: bool = True) -> None:
    """y = a b with a = 1 and b = 2, or b = 3 if b is overwritten before the wait."""
    a = gl.allocate_shared_memory(torch.float32, [16, 16], None)
    b = gl.allocate_shared_memory(torch.float32, [16, 16], None)
    a.store(gl.full((16, 16), 1.0, torch.float32))
    b.store(gl.full((16, 16), 2.0, torch.float32))
    if fence:
        fence_async_shared()
    issued = warpgroup_mma(a, b, gl.zeros((16, 16), torch.float32), use_acc=False, is_async=True)
    if overwrite:
        b.store(gl.full((16, 16), 3.0, torch.float32))
        fence_async_shared()
    result = warpgroup_mma_wait(0, deps=(issued,)) if wait else issued.value
    gl.store(y + gl.arange(0, 16)[:, None] * 16 + gl.arange(0, 16)[None, :], result)


def test_an_mma_reads_its_operands_when_it_is_waited_for() -> None:
    y = torch.zeros(16, 16)
    launch(multiply, y)
    assert (y == 32.0).all()
    launch(lambda y: multiply(y, overwrite=True), y)
    assert (y == 48.0).all()  # overwriting too early shows


def test_a_missing_fence_and_a_missing_wait_are_errors() -> None:
    with pytest.raises(AssertionError, match="no fence"):
        launch(lambda y: multiply(y, fence=False), torch.zeros(16, 16))
    with pytest.raises(AssertionError, match="not waited for"):
        launch(lambda y: multiply(y, wait=False), torch.zeros(16, 16))


def send(y_desc: Any, at: int, *, add: bool, wait: bool = True) -> None:
    stage = gl.allocate_shared_memory(torch.float32, [ROWS, 8], None)
    stage.store(gl.full((ROWS, 8), 1.0, torch.float32))
    fence_async_shared()
    (tma_reduce_add if add else tma_store)(y_desc, [Number(at), 0], stage)
    if wait:
        tma.store_wait(0)


@pytest.mark.parametrize("add", [False, True])
def test_tma_clips_at_the_end_and_refuses_the_beginning(add: bool) -> None:
    y = torch.full((20, 8), 5.0)
    launch(lambda y_desc: send(y_desc, 10, add=add), Box(y))
    assert (y[:10] == 5.0).all() and (y[10:] == (6.0 if add else 1.0)).all()
    with pytest.raises(AssertionError, match="TMA writes from"):
        launch(lambda y_desc: send(y_desc, -1, add=add), Box(y))


def test_a_copy_in_flight_at_the_end_is_an_error() -> None:
    with pytest.raises(AssertionError, match="work on its way"):
        launch(lambda y_desc: send(y_desc, 0, add=False, wait=False), Box(torch.zeros(20, 8)))

    def forgets_a_load(x_desc: Any) -> None:
        full = barriers(1)
        mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
        stage = gl.allocate_shared_memory(torch.float32, [ROWS, 8], None)
        tma_load(x_desc, [0, 0], full.index(0), stage)

    with pytest.raises(AssertionError, match="loads on their way"):
        launch(forgets_a_load, Box(torch.zeros(20, 8)))
    with pytest.raises(AssertionError, match="within a barrier's phase"):
        launch(lambda: mbarrier.arrive(barriers(1, count=2).index(0)))


def test_a_load_beyond_the_tensor_gives_zeros() -> None:
    y = torch.full((ROWS, 8), 7.0)

    def kernel(x_desc: Any, y: Any) -> None:
        full = barriers(1)
        stage = gl.allocate_shared_memory(torch.float32, [ROWS, 8], None)
        mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
        tma_load(x_desc, [Number(-3), 0], full.index(0), stage)
        mbarrier.wait(full.index(0), 0)
        gl.store(y + gl.arange(0, ROWS)[:, None] * 8 + gl.arange(0, 8)[None, :], stage.load(None))

    launch(kernel, Box(torch.ones(5, 8)), y)
    assert (y[:3] == 0).all() and (y[3:8] == 1).all() and (y[8:] == 0).all()


def test_a_tma_store_is_in_memory_only_after_its_thread_has_waited() -> None:
    """Without the wait another program reads the old numbers, at least in some order of threads."""

    def kernel(y_desc: Any, y: Any, flag: Any, seen: Any) -> None:
        if gl.program_id(0) == 0:
            send(y_desc, 0, add=False)
            gl.atomic_add(flag, 1, sem="release")
        else:
            while gl.atomic_add(flag, 0, sem="acquire") < 1:
                pass
            gl.store(seen, gl.load(y))

    y, seen = torch.zeros(ROWS, 8), torch.zeros(1)
    launch(kernel, Box(y), y, torch.zeros(1, dtype=torch.int32), seen, grid=2)
    assert seen.item() == 0.0 and (y == 1.0).all()


def test_an_address_outside_its_tensor_is_an_error() -> None:
    with pytest.raises(AssertionError, match="address outside"):
        launch(lambda y: gl.store(y + gl.arange(0, 8), gl.zeros((8,), torch.float32)), torch.zeros(7))


def test_programs_share_a_counter_and_a_seed_fixes_the_order() -> None:
    taken: list[tuple[int, int]] = []

    def kernel(counter: Any) -> None:
        index = gl.atomic_add(counter, 1)
        while index < 30:
            taken.append((int(gl.program_id(0)), int(index)))
            index = gl.atomic_add(counter, 1)

    orders = []
    for seed in (*ORDERS, *ORDERS):
        taken.clear()
        launch(kernel, torch.zeros(1, dtype=torch.int32), grid=3, seed=seed)
        assert [index for _, index in taken] == list(range(30))
        orders.append(tuple(program for program, _ in taken))
    assert orders[: len(ORDERS)] == orders[len(ORDERS) :] and len(set(orders)) > 1


def test_integers_divide_towards_0() -> None:
    for a in range(-7, 8):
        for b in (-3, -1, 2, 5):
            assert Number(a) // b == int(a / b) and Number(a) % b == a - int(a / b) * b
            assert a // Number(b) == int(a / b) and a % Number(b) == a - int(a / b) * b


def exchange(turns: int, *, waits: bool = True, arrivals: int = 1, drained: bool = True) -> list[int]:
    """A partition of four warps passes numbers to a warp at named barrier 5, which answers at 6. Returns the numbers it saw."""
    seen: list[int] = []

    def bar(kind: str, number: int) -> None:
        gl.inline_asm_elementwise(f"bar.{kind} $1, 160; mov.b32 $0, $1;", "=r,r", [number])

    def give(slot: Any) -> None:
        for n in range(turns):
            if n:
                bar("sync", 6)
            slot.store(torch.full((1,), n, dtype=torch.int32))
            for _ in range(arrivals):
                bar("arrive", 5)
        if drained:
            bar("sync", 6)

    def take(slot: Any) -> None:
        for _ in range(turns):
            if waits:
                bar("sync", 5)
            seen.append(int(slot.load(None)))
            bar("arrive", 6)

    def kernel() -> None:
        slot = gl.allocate_shared_memory(torch.int32, [1, 1], None).index(0)
        gl.warp_specialize([(give, (slot,)), (take, (slot,))], [1], [24])

    for seed in ORDERS:
        launch(kernel, seed=seed)
    return seen


def test_named_barriers_synchronise_in_every_order() -> None:
    assert exchange(4) == list(range(4)) * len(ORDERS)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"waits": False}, "of 160 threads|deadlock"),
        ({"arrivals": 2}, "of 160 threads"),
        ({"drained": False}, "nobody waits for"),
    ],
)
def test_a_mistake_at_a_named_barrier_is_found(broken: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        exchange(4, **broken)


def test_a_linear_layout_maps_elements_to_rows_and_columns_of_tma() -> None:
    """Rows in order give TMA's own swizzle; one base of another row permutes lines."""
    rows, columns = 16, 64
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 4], [2, 8], [4, 16], [8, 0], [0, 32]]
    x = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    seen: list[Tensor] = []

    def kernel() -> None:
        stage = gl.allocate_shared_memory(torch.float32, [rows, columns], None)
        for order in ((1, 2, 4), (4, 1, 2)):
            turned = bases[:5] + [[row, column] for row, (_, column) in zip(order, bases[5:8], strict=True)] + bases[8:]
            beginning(stage, torch.float32, [rows, columns], gl.SharedLinearLayout(turned)).store(x)
            seen.append(stage.load(None))

    launch(kernel)
    assert torch.equal(seen[0], x)
    lines = [row - row % 8 + row % 4 * 2 + row // 4 % 2 for row in range(rows)]
    assert torch.equal(seen[1][lines], x)
