"""Attacks on kernels: memory next to their buffers, NaN and infinities, extreme sizes and strides, other threads."""

from __future__ import annotations

import functools
import os
import platform
import random
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import Case, build, cases, check_call, run
from support.guard import Apart, Guard
from support.models import batch, kinds
from support.ops import acc, calls_outside_models, poisoned, randn
from torch import Tensor

from tilegrad import Engine
from tilegrad.kernels.activation import activation_bwd, activation_fwd
from tilegrad.kernels.attention import cpu as native
from tilegrad.kernels.cpu import library as native_library
from tilegrad.kernels.cpu import rows
from tilegrad.kernels.norm import layernorm_bwd, layernorm_fwd, norm_workspace
from tilegrad.kernels.op import Call, observe, op

KERNELS = ("tiled",) if isinstance(native_library.library(), str) else ("native", "tiled")
CONFIGS = kinds(48)


def guarded_step(config: object, dtype: torch.dtype, guard: Guard | Apart | None, steps: int = 2) -> dict[str, Tensor]:
    engine = Engine(config, 3, 13, dtype=dtype)  # type: ignore[arg-type]
    tokens, targets = batch(engine.config, 3, 13)
    for _ in range(steps):
        if guard is None:
            engine.step(tokens, targets, learning_rate=1e-3)
        else:
            with observe(guard):
                engine.step(tokens, targets, learning_rate=1e-3)
    return {name: x.clone() for name, x in engine.params.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_op_writes_outside_its_buffers(dtype: torch.dtype) -> None:
    """Runs every op of four models' steps, and those that no model calls. The steps have the same bits as without a guard."""
    guard = Guard()
    for config in CONFIGS:
        want = guarded_step(config, dtype, None)
        got = guarded_step(config, dtype, guard)
        assert all(torch.equal(got[name], x) for name, x in want.items())
    with observe(guard):
        calls_outside_models(dtype)
    assert guard.calls > 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_gaps_change_nothing_or_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every op of a step of four models, with the native kernels and with torch's."""
    apart = Apart()
    for config in CONFIGS:
        guarded_step(config, dtype, apart, steps=1)
    with observe(apart):
        calls_outside_models(dtype)
    native_ops = set(apart.taken)
    monkeypatch.setattr(rows, "refusal", lambda _x: "is switched off")
    guarded_step(CONFIGS[0], dtype, apart, steps=1)
    assert {"activation_fwd", "layernorm_bwd", "linear_fwd", "attention_bwd"} <= native_ops
    assert sum(apart.taken.values()) > 3 * sum(apart.refused.values()), (apart.taken, apart.refused)


def check_guarded(case: Case, seed: int, kernel: str) -> None:
    call = build(case, seed)
    with observe(Guard()):
        got = run(call, kernel)
    check_call(call, got, native.exp_error(case.dtype) if kernel == "native" else 0.0)


@settings(max_examples=30)
@given(case=cases(), kernel=st.sampled_from(KERNELS))
def test_attention_writes_nothing_outside_its_buffers(case: Case, kernel: str) -> None:
    check_guarded(case, 0, kernel)


@pytest.mark.slow
@settings(max_examples=2500)
@given(case=cases(), kernel=st.sampled_from(KERNELS), seed=st.integers(1, 9))
def test_attention_writes_nothing_outside_its_buffers_in_many_calls(case: Case, kernel: str, seed: int) -> None:
    check_guarded(case, seed, kernel)


@pytest.mark.parametrize("where", [-1, 1])
def test_canary_a_write_outside_is_seen(where: int) -> None:
    @op()
    def copy_fwd(x: Tensor, *, y: Tensor) -> None:
        y.copy_(x)
        y.as_strided((1,), (1,), y.storage_offset() + (-1 if where < 0 else y.numel())).fill_(0)

    x = torch.ones(4, 5)
    with observe(Guard()), pytest.raises(AssertionError, match="copy_fwd writes outside y"):
        copy_fwd(x, y=torch.empty(4, 5))


BAD = (float("nan"), float("inf"), float("-inf"))


def same_elsewhere(got: Tensor, want: Tensor, touched: Tensor) -> bool:
    """Whether the bits outside `touched`, a mask of got's leading dimensions, are equal."""
    keep = ~touched
    return torch.equal(got[keep], want[keep])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [1, 16, 512])
def test_a_bad_number_in_attention_stays_in_its_row_head_and_sequence(kernel: str, dtype: torch.dtype, d: int) -> None:
    case = Case(b=2, hkv=3, tq=37, tk=37, d=d, dv=d, dtype=dtype, causal=True)
    clean = build(case)
    want = run(clean, kernel)
    for bad in BAD:
        for name in ("q", "k", "v", "do"):
            call = build(case)
            getattr(call, name)[1, 2, 20, 0] = bad
            got = run(call, kernel)
            head = torch.zeros(2, 3, dtype=torch.bool)
            head[1, 2] = True
            assert all(same_elsewhere(got[key], want[key], head) for key in want), (name, bad)
            rows = torch.zeros(2, 3, 37, dtype=torch.bool)
            if name in ("q", "do"):  # one row of queries
                rows[1, 2, 20] = True
                assert same_elsewhere(got["dq"], want["dq"], rows), (name, bad)
            if name == "q":
                assert same_elsewhere(got["o"], want["o"], rows) and same_elsewhere(got["lse"], want["lse"], rows)
            if name == "k":  # later queries; a bad v reaches all queries that share its tile, because 0 · NaN = NaN
                rows[1, 2, 20:] = True
                assert same_elsewhere(got["o"], want["o"], rows), (name, bad)
            if name == "do":
                assert torch.equal(got["o"], want["o"]) and torch.equal(got["lse"], want["lse"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bad_number_stays_in_its_packed_sequence(kernel: str) -> None:
    case = Case(hkv=2, d=16, dv=16, lengths=((9, 9), (17, 30), (0, 5), (40, 40)))
    want = run(build(case), kernel)
    call = build(case)
    call.q[12, 1, 3] = call.k[20, 0, 1] = call.v[30, 1, 2] = float("nan")
    got = run(call, kernel)
    for name in ("o", "dq"):
        assert torch.equal(got[name][:9], want[name][:9]) and torch.equal(got[name][26:], want[name][26:])
    for name in ("dk", "dv"):
        assert torch.equal(got[name][:9], want[name][:9]) and torch.equal(got[name][39:], want[name][39:])
    assert not torch.equal(got["o"], want["o"])


def rows_of_norm_and_activation(x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    (n, c), dtype = x.shape, x.dtype
    w, b = randn(c, dtype=dtype, seed=3), randn(c, dtype=dtype, seed=4)
    y, dx, a, da = (torch.zeros(n, c, dtype=dtype) for _ in range(4))
    mean, rstd = (torch.zeros(n, dtype=acc(dtype)) for _ in range(2))
    dw, db = (torch.zeros(c, dtype=acc(dtype)) for _ in range(2))
    layernorm_fwd(x, w, b, 1e-5, y=y, mean=mean, rstd=rstd, scratch=poisoned(norm_workspace(x, backward=False)))
    layernorm_bwd(dy, x, w, mean, rstd, dx=dx, dw=dw, db=db, scratch=poisoned(norm_workspace(x, backward=True)))
    activation_fwd(x, "gelu", a=a)
    activation_bwd(dy, x, "gelu", dh=da)
    return {"y": y, "dx": dx, "a": a, "da": da}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_number_in_a_norm_or_an_activation_stays_in_its_row(dtype: torch.dtype, bad: float) -> None:
    n, c = 19, 40
    x, dy = randn(n, c, dtype=dtype), randn(n, c, dtype=dtype, seed=1)
    want = rows_of_norm_and_activation(x, dy)
    touched = torch.zeros(n, dtype=torch.bool)
    touched[7] = True
    for which in (0, 1):
        given_x, given_dy = x.clone(), dy.clone()
        (given_x, given_dy)[which][7, 5] = bad
        got = rows_of_norm_and_activation(given_x, given_dy)
        assert all(same_elsewhere(got[name], want[name], touched) for name in want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_at_and_below_the_smallest_normal_number_give_their_mean(kernel: str) -> None:
    """All values are the smallest normal number, or all are below it: the output is their mean. Where subnormal results are
    slow, the native kernel flushes them, and only them, to 0 (csrc/simd/vector.h)."""
    case = Case(b=1, hkv=1, tq=5, tk=64, d=8, dv=8)
    call = build(case)
    call.q.zero_()
    for least in (2.0**-126, 2.0**-133):
        call.v.fill_(least)
        flushed = least < 2.0**-126 and kernel == "native" and platform.machine() == "x86_64"
        got = run(call, kernel)["o"]
        assert torch.equal(got, torch.full_like(got, 0.0 if flushed else least)), least


APART = 2**30


def far(x: Tensor, dim: int, apart: int = APART) -> Tensor:
    """A copy of x whose dimension `dim`, of size 3, has a stride of 2³⁰ elements. The memory between them is never touched."""
    strides = list(torch.empty(*x.shape[:dim], 1, *x.shape[dim + 1 :]).stride())
    strides[dim] = apart
    assert x.shape[dim] == 3
    view = torch.empty(2 * apart + x.numel(), dtype=x.dtype).as_strided(x.shape, strides)
    assert apart < APART or view.untyped_storage().nbytes() // x.itemsize > 2**31
    return view.copy_(x)


class Far:
    """An observer that runs each op on copies by `far` of the outputs with these names, and copies the results back."""

    def __init__(self, dim: int, *names: str, apart: int = APART) -> None:
        self.dim, self.names, self.apart, self.seen = dim, names, apart, set[str]()

    def __call__(self, call: Call) -> None:
        run = call.run
        assert isinstance(run, functools.partial)
        moved = {
            name: far(x, self.dim, self.apart)
            for name, x in run.keywords.items()
            if name in self.names and x is not None
        }
        run.func(*run.args, **(run.keywords | moved))
        for name, x in moved.items():
            run.keywords[name].copy_(x)
        self.seen |= set(moved)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_strides_beyond_two_to_the_31_do_not_change_the_bits(kernel: str, dim: int) -> None:
    """Batches, heads or rows have a stride of 2³⁰ elements, in inputs and in outputs."""
    case = Case(b=3, hkv=3, tq=3, tk=3, d=8, dv=8, dtype=torch.bfloat16, causal=True)
    call = build(case)
    want = run(call, kernel)
    q, k, v, do = (far(x, dim) for x in (call.q, call.k, call.v, call.do))
    observer = Far(dim, "o", "dq", "dk", "dv")
    with observe(observer):
        got = run(replace(call, q=q, k=k, v=v, do=do), kernel)
    assert observer.seen == {"o", "dq", "dk", "dv"}
    assert all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_norms_and_activations_may_be_beyond_two_to_the_31(dtype: torch.dtype) -> None:
    n, c = 3, 40
    x, dy = randn(n, c, dtype=dtype), randn(n, c, dtype=dtype, seed=1)
    results = []
    for apart in (64, APART):
        observer = Far(0, "y", "dx", "a", "dh", apart=apart)
        with observe(observer):
            results.append(rows_of_norm_and_activation(far(x, 0, apart), far(dy, 0, apart)))
    want, got = results
    assert observer.seen == {"y", "dx", "a", "dh"}
    assert all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.skipif("native" not in KERNELS, reason="needs the native library")
def test_eight_threads_may_change_the_number_of_threads_between_calls() -> None:
    shapes = [Case(tq=t, tk=t, d=d, dv=d, causal=True, dropout_p=p) for t, d, p in ((65, 16, 0.0), (130, 8, 0.2))]
    calls = [build(case, seed) for seed, case in enumerate(shapes)]
    want = [run(call, "native") for call in calls]
    wrong: list[int] = []
    before = torch.get_num_threads()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(6):
            torch.set_num_threads(dice.randint(1, 5))
            n = dice.randrange(len(calls))
            got = run(calls[n], "native")
            if not all(torch.equal(got[name], x) for name, x in want[n].items()):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            assert not worker.is_alive()
    finally:
        torch.set_num_threads(before)
    assert not wrong


def attend(n: int) -> bytes:
    """The bytes of attention of n rows, by the kernel that the process selects."""
    import tilegrad

    q, k, v = (randn(1, 2, n, 16, dtype=torch.float32, seed=seed) for seed in range(3))
    return bytes(tilegrad.attention(q, k, v, causal=True).numpy().tobytes())


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_compute_the_same(method: str) -> None:
    sizes = [7, 65, 130]
    want = [attend(n) for n in sizes]
    paths = os.pathsep.join(("tests", "tests/attacks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((paths, os.environ.get("PYTHONPATH", ""))))
        context = torch.multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map_async(attend, sizes).get(120) == want


@pytest.mark.slow
def test_fifty_repeats_of_the_native_tests_pass() -> None:
    """The tests are those of ragged lengths, threads, forks and interrupts of the native kernel, each time in a new process."""
    names = "ragged or threads or fork or interrupt or nan or bits_are_the_same"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-k", names]
    for n in range(50):
        done = subprocess.run([*command, "tests/attention/test_native.py"], capture_output=True, text=True)
        assert done.returncode == 0, f"run {n}: {done.stdout[-3000:]}"


@pytest.mark.slow
def test_fresh_seeds_are_printed_and_change_the_drawn_values(tmp_path: Path) -> None:
    file = tmp_path / "test_drawn.py"
    file.write_text(
        "import pytest\nfrom hypothesis import given, settings, strategies as st\n"
        "@pytest.mark.slow\n@settings(max_examples=5)\n@given(st.integers(0, 2**60))\n"
        "def test_it(n): print('drawn', n)\n"
        "@pytest.mark.slow\ndef test_seed(fresh_seed): print('seed', fresh_seed)\n",
        encoding="utf-8",
    )
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(__file__).parents[1]}\nmarkers =\n    slow: slow\n    gpu: gpu\n",
        encoding="utf-8",
    )
    said = []
    for seed in ([], ["--seed", "7"], ["--seed", "7"]):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "--slow",
            *seed,
            str(file),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append([line for line in done.stdout.splitlines() if "drawn" in line or "seed" in line])
    assert said[1] == said[2] != said[0]
    assert "again: --slow --seed 7" in said[1][-1] and said[0][-1].split()[-1].isdigit()
