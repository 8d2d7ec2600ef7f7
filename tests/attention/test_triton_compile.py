"""Compiles the Triton kernels with the real compiler, without a GPU: registers, spills and shared memory are checked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import Case, build
from support.compiler import SHARED_MEMORY_BYTES, Compiled, compiling, slowly
from support.cuda_driver import FakeDriver
from support.kernels import run_backward, run_forward

from tilegrad.kernels.attention.problem import output_shapes

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret or torch.cuda.is_available(), reason="compiles for GPUs that are not there"
)

Compile = Callable[..., dict[str, Compiled]]
ATOMIC = re.compile(r"\b(ATOMG?\.|REDG?\.|ATOMS\.ADD)")  # in SASS; REDUX stays in a warp and is not an atomic


def test_canary_atomics_are_found() -> None:
    for line in (
        "ATOMG.E.ADD.F32.FTZ.RN PT, R2, [R4.64], R6 ;",
        "RED.E.ADD.F32 [R2.64], R5 ;",
        "ATOMS.ADD RZ, [R3], R2 ;",
    ):
        assert ATOMIC.search(f"        /*0120*/                   {line}")
    assert not ATOMIC.search("        /*0120*/                   REDUX.SUM.S32 UR4, R2 ;")


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compile:
    """compile_for(architecture, case) compiles every kernel of a forward and a backward, unless backward=False."""
    from tilegrad.kernels.attention.triton import fit, launch

    def compile_call(architecture: int, case: Case, *, backward: bool = True) -> dict[str, Compiled]:
        monkeypatch.setattr(launch, "multiprocessors", lambda _device: 100)
        monkeypatch.setattr(fit, "architecture", lambda _device: architecture)
        monkeypatch.setattr(fit, "shared_memory_bytes", lambda _device: SHARED_MEMORY_BYTES[architecture])
        monkeypatch.setattr(fit, "fits", {})
        call = build(case)
        q, k, v, mask = call.q, call.k, call.v, call.mask
        o, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        grads = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        dbias = None if mask.float_bias is None else torch.empty_like(mask.float_bias)
        dsinks = None if mask.sinks is None else torch.empty_like(mask.sinks)
        shapes = [launch.workspace(q, k, v, mask, backward=x, deterministic=True) for x in (False, True)]
        scratch = [{name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in each.items()} for each in shapes]
        with compiling(architecture, tmp_path) as found:
            run_forward(launch, q, k, v, mask, o=o, lse=lse, scratch=scratch[0])
            if backward:
                run_backward(
                    launch, q, k, v, o, lse, call.do, call.dlse, mask, **grads, dbias=dbias, dsinks=dsinks, scratch=scratch[1],
                    deterministic=True,
                )  # fmt: skip
        return found

    return compile_call


def case(d: int, causal: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Case:
    return Case(b=1, hkv=2, tq=256, tk=256, d=d, dv=d, dtype=dtype, causal=causal, **more)


def check(found: dict[str, Compiled], architecture: int) -> None:
    for kernel in found.values():
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[architecture]
        assert not ATOMIC.search(kernel.sass), f"{kernel.kernel} has atomics"


# on the stack; the rest use none: kernels/triton_version.py
SPILLED_BYTES = {
    ("3.6", 64, "_dkdv_kernel"): 16,
    ("3.9", 64, "_dkdv_kernel"): 16,
    ("3.9", 128, "_dkdv_kernel"): 48,
    ("3.9", 256, "_attention_fwd_kernel"): 56,
}


def check_tuned(found: dict[str, Compiled], d: int) -> None:
    for name, kernel in found.items():
        most = SPILLED_BYTES.get((triton.__version__[:3], d, name), 0)
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        if name != "_delta_kernel":
            assert "HGMMA" in kernel.sass, f"{name} does not use Hopper's products of warpgroups"
            assert "LDGSTS" in kernel.sass, f"{name} does not copy ahead"
            products, waits = kernel.sass.count("HGMMA"), len(re.findall(r"HGMMA.*gsb0", kernel.sass))
            assert waits < products / 2, f"{name} waits after {waits} of {products} products: ptxas has serialised them"


@pytest.mark.parametrize("d", [slowly(64), 128, slowly(256)])
def test_kernels_compile_for_hopper(compile_for: Compile, d: int) -> None:
    found = compile_for(90, case(d, causal=True))
    apart = {"_dkdv_kernel again"} if d == 256 else set()
    assert found.keys() == {"_attention_fwd_kernel", "_delta_kernel", "_dkdv_kernel", "_dq_kernel"} | apart
    check(found, 90)
    check_tuned(found, d)


@pytest.mark.parametrize("architecture", [80, slowly(89), 100, 120])
def test_kernels_compile_for_other_architectures(compile_for: Compile, architecture: int) -> None:
    found = compile_for(architecture, case(64, causal=True), backward=False)
    check(found, architecture)
    assert f".sm_{architecture}" in found["_attention_fwd_kernel"].sass


@pytest.mark.parametrize(("architecture", "wide"), [(90, True), slowly((80, True)), (89, False), slowly((100, False))])
def test_float32_is_computed_in_float64_where_that_is_fast(compile_for: Compile, architecture: int, wide: bool) -> None:
    found = compile_for(architecture, case(64, causal=True, dtype=torch.float32, bias="BHQK"), backward=wide)
    check(found, architecture)
    for name, kernel in found.items():
        if name != "_delta_kernel":
            assert ("DMMA" in kernel.sass) == wide, name
            assert kernel.spilled_bytes <= 64, name


def test_dk_and_dv_of_a_wide_head_share_a_pass_if_sums_are_not_in_registers() -> None:
    from tilegrad.kernels.attention.triton import tiles

    for band in (False, True):
        assert tiles.row((100, 16, 256, band)).dk is None and tiles.row((120, 16, 256, band)).dk is None
        assert tiles.row((90, 16, 256, band)).dk is not None


def test_if_a_tile_does_not_fit_the_next_one_is_taken(compile_for: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegrad.kernels.attention.triton import fit, tiles

    own = tiles.row((90, 16, 64, True)).fwd
    monkeypatch.setitem(SHARED_MEMORY_BYTES, 90, 45_000)
    check(compile_for(90, case(64, causal=True), backward=False), 90)
    (found,) = fit.fits.values()
    assert found.tile in tiles.SMALLER and found.tile != own
    monkeypatch.setitem(SHARED_MEMORY_BYTES, 90, 1000)
    monkeypatch.setattr(fit, "tiles_for", lambda *_args: (own,))
    with pytest.raises(ValueError, match=r"device: got cpu, which has 1000 bytes.*'tiled' needs none"):
        compile_for(90, case(64, causal=True), backward=False)
    assert fit.fits == {}


@pytest.mark.slow
@pytest.mark.parametrize(("d", "causal"), list(itertools.product((16, 64, 96, 128, 256), (False, True))))
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_whole_matrix(compile_for: Compile, architecture: int, d: int, causal: bool, dtype: torch.dtype) -> None:
    found = compile_for(architecture, case(d, causal, dtype))
    check(found, architecture)
    if architecture == 90 and dtype != torch.float32 and d in (64, 128, 256):
        check_tuned(found, d)


WIDE = {  # spilled bytes of heads of 512 on Hopper: descriptors of shared memory; the forward's loop reads six of them again
    "_attention_fwd_kernel": 56,
    "_dq_kernel": 48,
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_the_widest_head_spills_only_descriptors(compile_for: Compile, architecture: int) -> None:
    found = compile_for(architecture, case(512, causal=True))
    check(found, architecture)
    for name, kernel in found.items():
        most = WIDE.get(name, 0) if architecture == 90 else 0
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        if architecture == 90 and name != "_delta_kernel":
            assert "HGMMA" in kernel.sass, f"{name} does not use Hopper's products of warpgroups"


SPILLED_WITH_INTERVALS = {(64, "_dkdv_kernel"): 64, (128, "_attention_fwd_kernel"): 16, (128, "_dkdv_kernel"): 16}


@pytest.mark.parametrize(("d", "backward"), [(64, False), slowly((64, True)), slowly((128, True))])
def test_kernels_with_intervals_compile_for_hopper(compile_for: Compile, d: int, backward: bool) -> None:
    """Two kernels precede each kernel with MMAs. Its loops hold the runs of a list in registers, and still prefetch."""
    found = compile_for(90, case(d, causal=True, intervals="h4"), backward=backward)
    check(found, 90)
    lists = {"_edges_kernel", "_list_kernel"}
    again = {f"{name} again" for name in lists} if backward else set()
    products = {"_attention_fwd_kernel", *(("_dkdv_kernel", "_dq_kernel") if backward else ())}
    assert found.keys() == lists | again | products | ({"_delta_kernel"} if backward else set())
    for name, kernel in found.items():
        most = SPILLED_WITH_INTERVALS.get((d, name), 0)
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        if name in products:
            assert "HGMMA" in kernel.sass and "LDGSTS" in kernel.sass


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 89, 100, 120])
def test_kernels_with_intervals_compile_for_other_architectures(compile_for: Compile, architecture: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(compile_for(architecture, case(64, causal=True, intervals="2", dtype=dtype)), architecture)


@pytest.mark.slow
def test_kernels_with_all_features_compile(compile_for: Compile) -> None:
    found = compile_for(
        90,
        case(
            64, causal=True, window=(90, 2), softcap=3.0, bias="hk", alibi="bh", sinks=True, dropout_p=0.2, dlse=True,
            intervals="bh4",
        ),
    )  # fmt: skip
    check(found, 90)
    assert found.keys() >= {"_dbias_kernel", "_dsinks_kernel"}


PLAIN = Case(b=2, hkv=2, group=2, tq=40, tk=48, d=32, dv=64, dtype=torch.bfloat16)
PREPARED = {
    "a bias, slopes, sinks, dropout": replace(
        PLAIN, causal=True, bias="bhqk", alibi="bh", sinks=True, dropout_p=0.1, dlse=True
    ),
    "a mask, a window, a softcap": replace(PLAIN, bias="HQK", window=(7, 3), softcap=2.0, layout="fused"),
    "a bias of rows in float32": replace(PLAIN, dtype=torch.float32, bias="hq", dlse=True, layout="bthd", scale=-0.3),
    "intervals": replace(PLAIN, intervals="bh4", causal=True),
    "packed": replace(PLAIN, lengths=((3, 40), (30, 1)), dv=32, sinks=True),
    "few rows": replace(PLAIN, tq=2, tk=4096),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARED)
def test_a_call_passes_the_arguments_of_tritons_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    from tilegrad.kernels.attention.problem import Backward, Forward
    from tilegrad.kernels.attention.triton import fit, launch
    from tilegrad.kernels.cuda_launch import Plan
    from tilegrad.kernels.scratch import Layout, new_scratch

    theirs: list[tuple[Any, ...]] = []

    class Driver:
        get_current_device = staticmethod(lambda: 90)
        get_current_stream = staticmethod(lambda _device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    def run(self: Any) -> Any:
        def started(x: int, y: int, z: int, *rest: Any) -> None:
            kinds = [kind for kind in self.src.signature.values() if kind != "constexpr"]
            given = [a for a, kind in zip(rest[6:], self.src.signature.values(), strict=True) if kind != "constexpr"]
            theirs.append((self.metadata.name, (x, y, z), kinds, given))

        return started

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_args: b"")
    monkeypatch.setattr(CompiledKernel, "run", property(run))
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda _self: None)
    for module in (fit, launch):
        monkeypatch.setattr(module, "architecture", lambda _device: 90)
    monkeypatch.setattr(launch, "multiprocessors", lambda _device: 100)
    monkeypatch.setattr(fit, "shared_memory_bytes", lambda _device: SHARED_MEMORY_BYTES[90])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fake = FakeDriver(monkeypatch)
    call = build(PREPARED[name])
    mask = replace(call.mask, seed=torch.tensor(5) if call.mask.dropout_p else None)
    q, k, v = call.q, call.k, call.v
    o_shape, lse_shape = output_shapes(q, v, mask)
    o, lse = q.new_empty(o_shape), torch.empty(lse_shape)
    grads: dict[str, Any] = {
        "dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v),
        "dbias": None if mask.float_bias is None else torch.empty_like(mask.float_bias),
        "dsinks": None if mask.sinks is None else torch.empty_like(mask.sinks),
    }  # fmt: skip
    reads = (q, k, v, o, lse, call.do, call.dlse)
    driver.set_active(Driver())
    try:
        for backward in (False, True):
            shapes = launch.workspace(q, k, v, mask, backward=backward, deterministic=True)
            made, work = (
                new_scratch({"work": ((Layout(shapes).nbytes or 1,), torch.uint8)}, "cpu")["work"] for _ in "ab"
            )
            theirs.clear()
            fake.calls.clear()
            views = Layout(shapes).of
            of: Any = launch._backward if backward else launch._forward
            prepare: Any = launch.prepare_bwd if backward else launch.prepare_fwd
            first, second = (
                Backward(*reads, mask, **grads, memory=(x,), deterministic=True)
                if backward
                else Forward(q, k, v, mask, o, lse, (x,))
                for x in (made, work)
            )
            for each in of(second, views(work)):
                each.run()
            plan = prepare(first, views)
            assert isinstance(plan, Plan)
            plan(second)
            assert len(theirs) == len(fake.calls) >= (3 if backward else 1)
            for (kernel, grid, kinds, want), started in zip(theirs, fake.calls, strict=True):
                assert started.grid == grid, kernel
                got = fake.parameters(started, [*kinds, "*", "*"])
                flat = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in want]
                assert got == pytest.approx([*flat, 0, 0], rel=1e-7), kernel
    finally:
        driver._active = None
