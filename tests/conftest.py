"""Options and defaults of the whole suite."""

from __future__ import annotations

import gc
import os
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, core, settings
from support.interpreter import interpreting, prepare_the_language, round_bfloat16, run_by
from support.ranks import Ranks
from support.signals import hear_interrupts

from tilegrad.functional import dispatch, fast_path
from tilegrad.kernels import gpu
from tilegrad.kernels.cpu import library as native_library
from tilegrad.memory.managed import hit, manager
from tilegrad.native import build as native_build

COMMON = settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck), database=None)
settings.register_profile("tilegrad", COMMON, derandomize=True)
settings.register_profile("fresh", COMMON)
settings.load_profile("tilegrad")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch describes an H100, whether there is one or not: kernels are chosen and memory is planned for it. Nothing runs."""
    kept = (gpu.capability, gpu.multiprocessors, gpu._refusal)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(multi_processor_count=132))
    for answers in kept:
        answers.cache_clear()
    yield
    for answers in kept:
        answers.cache_clear()


@pytest.fixture(params=["C++", "Python"])
def hits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The buffer manager answers hits in C++, or all calls in Python."""
    if request.param == "Python":
        for name in ("allocate", "deallocate"):
            monkeypatch.setattr(manager.AttentionBufferManager, name, hit.python_methods[name])
    elif isinstance(hit.load(), str):
        pytest.skip(f"C++ for the manager's hits {hit.load()}")
    return str(request.param)


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton's kernels are interpreted."""
    with interpreting():
        yield


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the kernels that tables choose on a CPU, and with Triton's."""
    with run_by(request.param, request):
        yield request.param


@pytest.fixture
def two_ranks_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a rank of two under torchrun, whose store is in memory; the test sets RANK."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr("tilegrad.engine.dist.mesh._store", lambda *_: store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes for all tests that need ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow set instead of what CI runs")
    parser.addoption("--shapes", type=int, default=200, help="random shapes of each GPU kernel (-m gpu)")
    parser.addoption("--seed", type=int, help="of the random tests of the slow set; else a new one, which is printed")
    parser.addoption(
        "--triton", action="append", default=[], metavar="VERSION=FOLDER", help="a Triton to compile with (--slow)"
    )
    parser.addoption("--report", type=Path, help="a folder for what GPU tests found, as JSON")


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A seed that differs in each run of the slow set, which prints it at the end."""
    return int(request.config.option.seed)


@pytest.fixture(params=range(10))
def four_hundred_seeds(request: pytest.FixtureRequest, fresh_seed: int) -> range:
    first = fresh_seed + 400 * int(request.param)
    return range(first, first + 400)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--slow"):
        terminalreporter.write_line(
            f"random tests drew from seed {config.option.seed}; again: --slow --seed {config.option.seed}"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


def pytest_configure(config: pytest.Config) -> None:
    # By default Python collects garbage after 700 new objects. That takes a tenth of the time in which pytest collects tests.
    gc.set_threshold(20_000)
    hear_interrupts()
    if config.getoption("--slow"):
        if config.option.seed is None:
            # xdist's workers draw from the seed that is printed at the end of the run
            given = getattr(config, "workerinput", {})
            config.option.seed = given.get("seed", random.SystemRandom().randrange(1 << 30))
        settings.load_profile("fresh")
        core.global_force_seed = config.option.seed
    if gpu.interpreting() and gpu.has_triton():
        prepare_the_language(setattr)
        round_bfloat16(setattr)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    elif native_build.compiler() and isinstance(native_library.library(), str):
        print("compiling the native CPU kernel, once for each change of its sources …", flush=True)
        began = time.perf_counter()
        try:
            native_build.build()  # sources change between installs
            print(f"… {time.perf_counter() - began:.0f} s", flush=True)
        except RuntimeError as error:
            warnings.warn(f"tests run without the native library: {error}", stacklevel=1)
        native_library.library.cache_clear()
    for what, home, take in (
        ("eager calls", fast_path, dispatch.load_fast_path),
        ("the manager's hits", hit, manager.use_fast_path),
    ):
        if native_build.compiler() and isinstance(home.load(), str) and "PYTEST_XDIST_WORKER" not in os.environ:
            print(f"compiling {what} against this torch, once, up to half a minute …", flush=True)
            try:
                home.MODULE.build()
            except RuntimeError as error:
                warnings.warn(f"tests run without {what} in C++: {error}", stacklevel=1)
            home.load.cache_clear()
            take()
    if isinstance(native_library.library(), str):
        config.addinivalue_line("filterwarnings", f"ignore:{native_library.SLOW}:UserWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = bool(config.getoption("--slow"))
    picked = [item for item in items if (item.get_closest_marker("slow") is not None) == slow]
    config.hook.pytest_deselected(items=list(set(items).difference(picked)))
    items[:] = picked
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Freezes the objects that exist now, a million that live to the end: a test that collects garbage would otherwise
    visit each of them."""
    gc.collect()
    gc.freeze()
