"""A thread compiles the kernels of a backward while the forward compiles. Nothing is compiled here: forms are recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import Case, build
from support.kernels import run_backward, run_forward

import tilegrad
from tilegrad.functional import call as functional_call
from tilegrad.functional import compile_ahead
from tilegrad.kernels.scratch import new_scratch

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret or torch.cuda.is_available(), reason="compiles for a GPU that is not there"
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The (kernel, thread) of each form, in the order in which Triton would compile it for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tilegrad.kernels.attention.hopper import launch as hopper_launch
    from tilegrad.kernels.attention.hopper import launch_backward, launch_forward
    from tilegrad.kernels.attention.triton import fit, launch

    found: list[tuple[str, str]] = []
    number = id(found)  # of the device, so that forms of other tests count as new
    done = SimpleNamespace(
        metadata=SimpleNamespace(shared=0), run=lambda *_: None, launch_metadata=lambda *_: None, function=None,
        packed_metadata=None,
    )  # fmt: skip
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: number,
            get_current_stream=lambda _device: 0,
        )
    )

    def compile(self: Any, key: str, *_rest: Any) -> Any:
        found.append((self.__name__, threading.current_thread().name))
        self.device_caches[number][0][key] = done
        return done

    monkeypatch.setattr(JITFunction, "_do_compile", compile)
    monkeypatch.setattr(fit, "architecture", lambda _device: 90)
    monkeypatch.setattr(fit, "shared_memory_bytes", lambda _device: 2**18)
    monkeypatch.setattr(fit, "fits", {})
    monkeypatch.setattr(hopper_launch, "compiled_kernels", {})
    monkeypatch.setattr(hopper_launch, "Launch", lambda *_: SimpleNamespace(device=0))
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "Plan", lambda *_: lambda _call: None)
    for module in (launch, launch_forward, launch_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda _device: 132)
    monkeypatch.setattr(compile_ahead, "_started", set())
    monkeypatch.setattr(compile_ahead, "PARSES_IN_THREADS", True)  # only keys are parsed here, one at a time
    yield found
    driver._active = None


BASE = Case(b=2, hkv=2, group=2, tq=300, tk=300, d=64, dv=64, dtype=torch.bfloat16)
CASES = {
    "causal": replace(BASE, causal=True),
    "a window, fused, sinks": replace(BASE, window=(40, None), layout="fused", sinks=True, group=1),
    "dlse, a padded head": replace(BASE, d=40, dv=40, dlse=True, layout="bthd"),
    "packed": replace(BASE, lengths=((30, 40), (300, 290)), causal=True),
    "a bias": replace(BASE, bias="hqk", alibi="h", d=136, dv=136),
    "dropout, a softcap": replace(BASE, dropout_p=0.2, softcap=2.0),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize("name", CASES)
def test_the_backward_finds_all_its_kernels(
    compiled: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, name: str, kernel: str, deterministic: bool
) -> None:
    from tilegrad.kernels.attention import hopper
    from tilegrad.kernels.attention.triton import launch

    if kernel == "hopper" and ("bias" in name or "dropout" in name):
        pytest.skip("hopper refuses the call")
    module: Any = launch if kernel == "triton" else hopper
    call = build(CASES[name])
    q, k, v = (x.requires_grad_() for x in (call.q, call.k, call.v))
    mask = call.mask
    for x in (mask.float_bias, mask.sinks):
        if x is not None:
            x.requires_grad_()
    o, lse = functional_call.new_outputs(q.detach(), v, mask)
    shapes = module.workspace(q, k, v, mask, backward=True, deterministic=deterministic)
    selection = SimpleNamespace(kernel=kernel, module=module, scratch=shapes)
    monkeypatch.setattr(compile_ahead, "select", lambda *_args, **_options: selection)
    for _ in range(2):
        compile_ahead.start(q, k, v, mask, o, lse, None, deterministic=deterministic)
    compile_ahead.wait()
    ahead = list(compiled)
    assert ahead and all(thread.startswith("tilegrad-compile") for _, thread in ahead)
    with torch.no_grad():
        run_forward(module, q, k, v, mask, o=o, lse=lse, scratch=scratch_of(module, call, deterministic=deterministic))
    forwards = {kernel for kernel, _ in compiled[len(ahead) :]}
    before = len(compiled)
    dbias = None if mask.float_bias is None else torch.empty_like(mask.float_bias)
    dsinks = None if mask.sinks is None else torch.empty_like(mask.sinks)
    run_backward(
        module, q, k, v, o, lse, torch.empty_like(o), call.dlse, mask, dq=torch.empty_like(q), dk=torch.empty_like(k),
        dv=torch.empty_like(v), dbias=dbias, dsinks=dsinks, scratch=new_scratch(shapes, "cpu"), deterministic=deterministic,
    )  # fmt: skip
    assert compiled[before:] == [] and forwards


def scratch_of(module: Any, call: Any, *, deterministic: bool) -> dict[str, torch.Tensor]:
    shapes = module.workspace(call.q, call.k, call.v, call.mask, backward=False, deterministic=deterministic)
    return new_scratch(shapes, "cpu")


def started(monkeypatch: pytest.MonkeyPatch, job: Callable[[], None]) -> None:
    """Starts `job` as the compilation of a backward."""
    call = build(Case(dtype=torch.bfloat16))
    module = SimpleNamespace(compile_bwd=lambda *_: (job,))
    selection = SimpleNamespace(kernel="triton", module=module, scratch={})
    monkeypatch.setattr(compile_ahead, "_started", set())
    monkeypatch.setattr(compile_ahead, "select", lambda *_args, **_options: selection)
    compile_ahead.start(call.q, call.k, call.v, call.mask, call.q, call.q, None, deterministic=False)


@pytest.mark.usefixtures("compiled")
def test_start_does_not_wait_and_wait_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = threading.Event(), threading.Event()

    def job() -> None:
        begin.set()
        end.wait(60)

    started(monkeypatch, job)
    assert begin.wait(60)  # the job runs, and start has returned
    threading.Timer(0.1, end.set).start()
    compile_ahead.wait()
    assert end.is_set()
    assert not [x for x in threading.enumerate() if x.name.startswith("tilegrad-compile")]


@pytest.mark.usefixtures("compiled")
def test_no_thread_compiles_where_the_parser_of_python_allows_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(compile_ahead, "PARSES_IN_THREADS", False)
    started(monkeypatch, lambda: ran.append(True))
    compile_ahead.wait()
    assert not ran


@pytest.mark.usefixtures("compiled")
def test_a_fork_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def job() -> None:
        end.wait(60)

    started(monkeypatch, job)
    threading.Timer(0.1, end.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if end.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("compiled")
def test_an_error_of_the_thread_is_left_to_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def job() -> None:
        threads.append(threading.current_thread().name)
        raise ValueError("from the thread")

    started(monkeypatch, job)
    compile_ahead.wait()
    assert len(threads) == 1 and threads[0].startswith("tilegrad-compile"), "it ran, and wait raises nothing"


def test_a_forward_with_a_gradient_starts_it_and_the_backward_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    monkeypatch.setattr(compile_ahead, "start", lambda *_args, deterministic: log.append(deterministic))
    monkeypatch.setattr(compile_ahead, "wait", lambda: log.append("wait"))
    monkeypatch.setattr(functional_call, "compiles", lambda _q: True)
    q = torch.randn(1, 2, 37, 16)
    tilegrad.attention(q, q, q)
    assert log == []
    x = q.clone().requires_grad_()
    y = tilegrad.attention(x, q, q, softcap=1.5, deterministic=True)
    assert log == [True]
    y.sum().backward()
    assert log == [True, "wait"]
