"""Launches through CUDA's driver: the arguments, when they are packed again, and what a launch plan keeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuda_driver import FakeDriver
from torch import Tensor

import tilegrad
from tilegrad.functional import call, fast_path
from tilegrad.kernels import cache, cuda_launch, triton_version
from tilegrad.kernels.attention import api, table
from tilegrad.kernels.attention.problem import Backward, Forward
from tilegrad.kernels.cuda_launch import Launch, Plan, Zero
from tilegrad.kernels.scratch import Views
from tilegrad.kernels.table import Kernel, Table, takes_all

KINDS = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr", "far": "i64", "scale": "fp32", "flag": "i1", "y": "*i32"}
PARAMETERS = [kind for kind in KINDS.values() if kind != "constexpr"] + ["*i8", "*i8"]  # two are scratch


def compiled(**metadata: Any) -> Any:
    """A kernel with the attributes that Triton's compiler gives it."""
    of = {"num_warps": 4, "shared": 1024, "num_ctas": 1, "name": "kernel"} | metadata
    return SimpleNamespace(metadata=SimpleNamespace(**of), src=SimpleNamespace(signature=KINDS), run=None, function=99)


def arguments(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, -5, 64, 2**40, 0.5, True, y


def call_of(*tensors: Tensor) -> Any:
    return SimpleNamespace(tensors=tensors)


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with pytest.MonkeyPatch.context() as patch:
        yield FakeDriver(patch)


def test_parameters_are_packed_as_the_driver_reads_them(driver: FakeDriver) -> None:
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    plan, given = Plan((Launch(compiled(), (3, 2), arguments(x, y), 0),), call_of(x, y), (), 0), call_of(x, y)
    plan(given)
    plan(given)
    first, second = driver.calls
    assert first == second
    assert (first.grid, first.threads, first.shared_bytes, first.stream, first.function) == (
        (3, 2, 1),
        128,
        1024,
        7,
        99,
    )
    assert driver.parameters(first, PARAMETERS) == [x.data_ptr(), -5, 2**40, 0.5, 1, y.data_ptr(), 0, 0]
    driver.stream = 8
    plan(given)
    assert driver.calls[-1].stream == 8


def test_a_launch_plan_passes_the_addresses_and_the_stream_of_each_call(driver: FakeDriver) -> None:
    work = torch.zeros(1024, dtype=torch.uint8)
    x, part = torch.zeros(4), work[512:].view(torch.int32)
    plan = Plan((Zero(part[:2]), Launch(compiled(), (1,), arguments(x, part), 0)), call_of(x, work), (work,), 0)
    for stream in (7, 8):
        driver.stream = stream
        for other in (x, torch.ones(4)):
            for buffer in (work, torch.zeros(1024, dtype=torch.uint8)):
                for _ in range(2):
                    driver.calls.clear()
                    plan(call_of(other, buffer))
                    zeroed, started = driver.calls
                    assert zeroed == ("zero", buffer.data_ptr() + 512, 0, 2)
                    assert started.stream == stream
                    values = driver.parameters(started, PARAMETERS)
                    assert (values[0], values[5]) == (other.data_ptr(), buffer.data_ptr() + 512)


@pytest.mark.usefixtures("driver")
def test_a_launch_plan_keeps_no_tensor_and_its_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    plan = Plan((Launch(compiled(), (1,), arguments(x, y), 0),), call_of(x, y), (), 0)
    plan(call_of(x, y))
    gone = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    monkeypatch.setattr(cache, "MOST_ENTRIES", 3)
    held = [torch.zeros(4) for _ in range(8)]
    for x in held:
        plan(call_of(x, torch.zeros(4, dtype=torch.int32)))
    assert 0 < len(cuda_launch._kept) <= 3


def test_an_error_of_the_driver_is_raised_by_name(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    plan = Plan((Launch(compiled(), (1,), arguments(x, y), 0),), call_of(x, y), (), 0)
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    driver.answers = [1, 1]
    with pytest.raises(RuntimeError, match=r"a launch returned CUDA_ERROR_OF_A_TEST \(1\)"):
        plan(call_of(x, y))
    driver.answers = [cuda_launch.NO_CONTEXT] * 2
    asked.clear()
    plan(call_of(x, y))  # a thread without a context gets one
    assert asked == [0]


def test_a_tensor_map_made_in_a_thread_without_a_context(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward whose kernels are already loaded begins with its tensor maps, in a thread of autograd."""
    x = torch.zeros(64, 32, dtype=torch.float16)
    kernel = compiled(tensordesc_meta=[{"block_size": [16, 32], "swizzle": 2}])
    kernel.src = SimpleNamespace(signature={"x": "tensordesc<fp16[16, 32]>"})
    descriptor = SimpleNamespace(base=x, shape=[64, 32], strides=[32, 1])
    plan = Plan((Launch(kernel, (1,), (descriptor,), 0),), call_of(x), (), 0)
    asked: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    driver.answers = [1]
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled returned CUDA_ERROR_OF_A_TEST \(1\)"):
        plan(call_of(x))
    assert not asked
    driver.answers = [cuda_launch.NO_CONTEXT]
    plan(call_of(x))
    assert asked == [None]  # the device of x, a CPU
    (started,) = driver.calls
    found = driver.parameters(started, ["map", "i32", "i32", "i64", "i64", "*i8", "*i8"])[0]
    assert (found.address, found.sizes, found.strides_bytes, found.box) == (x.data_ptr(), (32, 64), (64,), (32, 16))


@pytest.mark.parametrize("what", [{"num_ctas": 2}, {"launch_pdl": True}, {"global_scratch_size": 8}])
def test_a_kernel_that_needs_tritons_launcher_is_refused(what: dict[str, Any]) -> None:
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"^kernel: got kernel, which .*{next(iter(what))}"):
        Launch(compiled(**what), (1,), arguments(x, y), 0)


def test_kernels_of_an_unknown_triton_are_launched_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_launch.refusal(compiled()) is None
    monkeypatch.setattr(triton_version, "installed", lambda: "3.10.0")
    assert "supports Triton 3.6 to 3.9, but 3.10.0 is installed" in str(cuda_launch.refusal(compiled()))


class Recorder:
    """A kernel of attention whose forward and backward each launch one kernel with all tensors of the call."""

    def __init__(self) -> None:
        self.prepared = 0

    def workspace(self, *_problem: Any, backward: bool, **_options: Any) -> dict[str, Any]:
        return {"a": ((3,), torch.int32), "b": ((5 if backward else 2,), torch.float32)}

    def prepare_fwd(self, given: Forward | Backward, _views: Views) -> Plan:
        self.prepared += 1
        kernel = compiled()
        kernel.src = SimpleNamespace(signature={str(i): "*i8" for i, _ in enumerate(given.tensors)})
        return Plan((Launch(kernel, (1,), given.tensors, 0),), given, (), 0)

    prepare_bwd = prepare_fwd


@pytest.fixture
def recorder(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder, driver.stream = Recorder(), 7
    monkeypatch.setattr(Kernel, "load", lambda _self: recorder)
    monkeypatch.setattr(table, "ATTENTION", Table("attention", (Kernel("recorder", "", takes_all),)))
    monkeypatch.setattr(api, "prepared_calls", {})
    yield recorder
    if call.fast_path is not None:
        call.fast_path.drop_programs()


def test_attention_passes_the_address_of_every_tensor_to_the_kernel(driver: FakeDriver, recorder: Recorder) -> None:
    x = torch.zeros(1, 2, 8, 16, requires_grad=True)
    q, k, v = (torch.zeros(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    do = torch.ones(1, 2, 8, 16)
    for a, b, c in ((x, x, x), (q, k, v), (v, q, q)):  # first q is k: later calls must not assume it
        driver.calls.clear()
        o, lse = tilegrad.attention(a, b, c, return_lse=True)
        grads = torch.autograd.grad(o, tuple({id(t): t for t in (a, b, c)}.values()), do)
        forward, backward = driver.calls
        reads = [t.data_ptr() for t in (a, b, c, o, lse)]
        assert driver.parameters(forward, ["*"] * 8)[:5] == reads
        assert driver.parameters(backward, ["*"] * 12)[:6] == [*reads, do.data_ptr()]
        assert driver.parameters(backward, ["*"] * 12)[6] == grads[0].data_ptr() or a is b
    assert recorder.prepared == 2


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(1, 8, 2, 16).transpose(1, 2)},
        {"q": torch.zeros(1, 4, 8, 16)},
        {"dtype": torch.float64},
        {"q": torch.zeros(2 * 8 * 16 + 1)[1:].view(1, 2, 8, 16)},  # not at a multiple of 16 bytes
        {"causal": True},
        {"scale": 0.5},
        {"deterministic": True},
        {"sinks": torch.zeros(2)},
        {"bias": torch.zeros(8, 8)},
    ],
)
def test_a_call_of_another_form_is_prepared_again(recorder: Recorder, change: dict[str, Any]) -> None:
    def step(dtype: torch.dtype = torch.float32, q: Tensor | None = None, **options: Any) -> None:
        rows = torch.zeros(1, 2, 8, 16, dtype=dtype) if q is None else q.detach()
        k, v = torch.zeros(2, 1, 2, 8, 16, dtype=dtype)
        o = tilegrad.attention(rows.requires_grad_(), k, v, **options)
        torch.autograd.grad(o, rows, torch.ones_like(o))

    step()
    step()
    assert recorder.prepared == 2
    step(**change)
    assert recorder.prepared == (3 if "deterministic" in change else 4)
    step(**change)
    assert recorder.prepared == (3 if "deterministic" in change else 4)


def test_a_known_call_is_started_by_cpp(
    driver: FakeDriver, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if call.fast_path is None:
        pytest.skip(f"C++ for eager calls {fast_path.load()}")
    do = torch.ones(1, 2, 8, 16)
    for known in (False, True, True):
        q, k, v = (torch.zeros(1, 2, 8, 16, requires_grad=True) for _ in range(3))
        driver.calls.clear()
        o, lse = tilegrad.attention(q, k, v, return_lse=True)
        assert (type(o.grad_fn).__name__ == "CppFunction") == known
        grads = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        forward, backward = driver.calls
        reads = [x.data_ptr() for x in (q, k, v, o, lse)]
        assert driver.parameters(forward, ["*"] * 8)[:5] == reads
        assert driver.parameters(backward, ["*"] * 12)[:9] == [*reads, *(x.data_ptr() for x in (do, *grads))]
    assert recorder.prepared == 2
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", asked.append)
    for run in (lambda: tilegrad.attention(q, k, v), lambda: torch.autograd.grad(o, q, do, retain_graph=True)):
        run()
        driver.answers = [cuda_launch.NO_CONTEXT]
        asked.clear()
        run()
        assert asked == [0]
        driver.answers = [1]
        with pytest.raises(RuntimeError, match=r"a launch returned CUDA_ERROR_OF_A_TEST \(1\)"):
            run()
        driver.answers = [cuda_launch.NO_CONTEXT] * 2
        with pytest.raises(RuntimeError, match="a launch returned 201 again"):
            run()
