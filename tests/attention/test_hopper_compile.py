"""Compiles the Hopper kernels with the real compiler, without a GPU.

A driver that only names the architecture replaces CUDA's, and a launch compiles instead of running. Argument specialisation,
tile configs, Gluon and ptxas are the real ones. test_hopper_gpu.py runs the kernels on a Hopper GPU.
"""

from __future__ import annotations

import io
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.cases import Case, build
from support.compiler import without_line_numbers
from support.cuda_driver import FakeDriver
from support.kernels import run_backward, run_forward

from tilegrad.kernels.attention.problem import output_shapes
from tilegrad.kernels.triton_version import launch_options, takes_more_registers

triton = pytest.importorskip("triton", reason="needs Triton")

interpreted = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Gluon has no interpreter")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there")

SHARED_MEMORY_BYTES = 232_448
HEADS = ("_attention_fwd_kernel", "_hopper_bwd_kernel")  # the kernels with MMAs


class Compiled(NamedTuple):
    spilled_bytes: int
    warnings: list[str]  # C75xx of ptxas: wgmma is serialised
    shared_bytes: int
    ptx: str
    cubin: bytes


Compile = Callable[..., dict[str, Compiled]]
prepared: list[tuple[Any, ...]] = []  # the arguments of the launches


def through_ptxas(compiled: Any, backend: Any, make_cubin: Callable[..., bytes]) -> Compiled:
    """Runs the ptxas of the installed Triton with its options."""
    with redirect_stdout(io.StringIO()) as said:
        cubin = make_cubin(backend, compiled.asm["ptx"], {}, backend.parse_options(dict(launch_options())), 90)
    log = said.getvalue()
    spills = re.findall(r"(\d+) bytes spill", log)
    assert spills
    serialised = re.findall(r"C75\d\d", log)
    return Compiled(sum(map(int, spills)), serialised, compiled.metadata.shared, compiled.asm["ptx"], cubin)


@pytest.fixture
def compile_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compile]:
    """compile_call(case) compiles every kernel of a forward and a backward, unless one is False. Triton stops before ptxas."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tilegrad.kernels.attention import hopper
    from tilegrad.kernels.attention.hopper import launch, launch_backward, launch_forward

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 90  # its own number for a device: Triton remembers the target of each

        def get_current_stream(self, _device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def utils(self) -> Any:
            return Utils()

    class Utils:
        def fill_tma_descriptor(self, *of: Any) -> tuple[Any, ...]:
            return "map", *of

        fill_tma_descriptor_tiled = fill_tma_descriptor  # from Triton 3.7 on

    found: dict[str, Any] = {}
    run, make_cubin = JITFunction.run, CUDABackend.make_cubin
    backend = CUDABackend(GPUTarget("cuda", 90, 32))

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = run(self, *args, **kwargs | {"warmup": True})
        found[self.__name__] = compiled
        return compiled

    def launch_of(*call: Any) -> Any:
        prepared.append(call)
        return SimpleNamespace(device=0)

    def call_of(
        case: Case, *, forward: bool = True, backward: bool = True, ptxas: bool = True, deterministic: bool = False,
        programs: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        monkeypatch.setattr(launch_forward, "multiprocessors", lambda _device: programs)
        call = build(case)
        q, k, v, mask = call.q, call.k, call.v, call.mask
        o_shape, lse_shape = output_shapes(q, v, mask)
        o, lse = q.new_empty(o_shape), q.new_empty(lse_shape, dtype=torch.float32)
        found.clear()
        monkeypatch.setattr(launch, "compiled_kernels", {})
        if forward:
            shapes = hopper.workspace(q, k, v, mask, backward=False, deterministic=False)
            scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            run_forward(hopper, q, k, v, mask, o=o, lse=lse, scratch=scratch)
        if backward:
            shapes = hopper.workspace(q, k, v, mask, backward=True, deterministic=deterministic)
            run_backward(
                hopper, q, k, v, o, lse, call.do, call.dlse, mask, dq=torch.empty_like(q), dk=torch.empty_like(k),
                dv=torch.empty_like(v), dsinks=None if mask.sinks is None else torch.empty_like(mask.sinks),
                scratch={name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()},
                deterministic=deterministic,
            )  # fmt: skip
        if not ptxas:
            return dict(found)
        return {name: through_ptxas(compiled, backend, make_cubin) for name, compiled in found.items() if name in HEADS}

    driver.set_active(Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_args: b"")
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    monkeypatch.setattr(launch, "Launch", launch_of)
    for module in (launch_forward, launch_backward):
        monkeypatch.setattr(module, "Plan", lambda *_: lambda _call: None)
    monkeypatch.setattr(launch_backward, "multiprocessors", lambda _device: 132)
    with without_line_numbers():
        yield call_of
    driver._active = None


def case(d: int, causal: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Case:
    return Case(b=1, hkv=2, tq=256, tk=256, d=d, dv=d, dtype=dtype, causal=causal, **more)


# bytes stored and loaded; other kernels spill none: kernels/triton_version.py
SPILLED_BYTES = {
    ("3.6", 64, "_hopper_bwd_kernel"): 8,
    ("3.7", 64, "_hopper_bwd_kernel"): 8,
    ("3.8", 64, "_hopper_bwd_kernel"): 8,
    ("3.8", 256, "_attention_fwd_kernel"): 12,
    ("3.9", 96, "_hopper_bwd_kernel"): 116,
    ("3.9", 128, "_attention_fwd_kernel"): 148,
    ("3.9", 256, "_attention_fwd_kernel"): 280,
    ("3.9", 256, "_hopper_bwd_kernel"): 108,
}


# by head dimension, kernel, causal and softcap. No spill is in a loop of unmasked blocks. Without intervals the backward with a
# softcap spills 188 bytes at D 128, and at D 64 without one 8 bytes.
SPILLED_WITH_INTERVALS = {
    (64, "_hopper_bwd_kernel", False, False): 8,
    (64, "_hopper_bwd_kernel", True, False): 8,
    (128, "_hopper_bwd_kernel", True, True): 256,
    (256, "_attention_fwd_kernel", True, False): 84,
}


def check(found: dict[str, Compiled], d: int) -> None:
    for name, kernel in found.items():
        most = SPILLED_BYTES.get((triton.__version__[:3], d, name), 0)
        assert not kernel.warnings, f"{name}: {kernel.warnings}"
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
        assert all(word in kernel.ptx for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"))


def some(*quick: tuple[int, bool]) -> list[Any]:
    """Every head dimension, with and without causal; only the quick ones are outside the slow set."""
    every = itertools.product((64, 128, 256), (False, True))
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each not in quick)) for each in every]


def pairs_of_exponentials(ptx: str) -> float:
    """The share of exponentials that are first added to another exponential: nearly all if sums are trees."""
    exponentials = re.findall(r"ex2\.approx\S*\s+(%\w+),", ptx)
    known = set(exponentials)
    pairs = [x for x in re.findall(r"add\.f32\s+%\w+, (%\w+), (%\w+);", ptx) if known.issuperset(x)]
    return 2 * len(pairs) / len(exponentials)


def left_in_registers(ptx: str, columns: int) -> int:
    """The number of MMAs of so many columns whose left operand is in registers."""
    return len(re.findall(rf"m64n{columns}k16\S+\s*\{{[^}}]*\}},\s*\{{", ptx))


LETTERS = {"HGMMA": "m", "WARPGROUP.DEPBAR": "w", "FMNMX": "x"}


def maxima_between_waits(cubin: bytes, folder: Path) -> list[int]:
    """The maxima that ptxas puts between the wait for s and the wait for acc in the forward loop of each warpgroup."""
    (folder / "kernel.cubin").write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(folder / "kernel.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = "".join(LETTERS[name] for name in re.findall(r"(HGMMA|WARPGROUP\.DEPBAR|FMNMX)", code))
    return [len(found) for found in re.findall(r"m{12,}w(x*)w", words)]


@interpreted
@without_gpu
@pytest.mark.parametrize(("d", "causal"), some((128, False), (256, True)))
def test_kernels_have_no_spills_and_no_serialised_mmas_and_overlap_maxima_with_mmas(
    compile_call: Compile, tmp_path: Path, d: int, causal: bool
) -> None:
    from tilegrad.kernels.attention.hopper.launch_backward import TILE_CONFIGS

    found = compile_call(case(d, causal))
    assert found.keys() == set(HEADS)
    check(found, d)
    maxima = maxima_between_waits(found["_attention_fwd_kernel"].cubin, tmp_path)
    assert len(maxima) == (3 if d == 64 else 2)
    assert min(maxima) >= 16, maxima
    assert pairs_of_exponentials(found["_attention_fwd_kernel"].ptx) < 0.5
    if d <= 128:  # dpᵀ = v doᵀ of each warpgroup, with the first columns of v; dv and dk have other numbers of columns
        held = TILE_CONFIGS[d].v_in_regs // 16
        assert left_in_registers(found["_hopper_bwd_kernel"].ptx, TILE_CONFIGS[d].m) == 2 * held
        assert bool(held) != takes_more_registers()


def with_intervals(d: int, causal: bool, **more: Any) -> Any:
    quick = (d, causal) == (128, True) and not more
    return pytest.param(case(d, causal, intervals="4", **more), marks=[pytest.mark.slow] * (not quick))


@interpreted
@without_gpu
@pytest.mark.parametrize(
    "of",
    [
        *(with_intervals(d, causal) for d in (64, 96, 128, 192, 256) for causal in (False, True)),
        *(with_intervals(d, causal=True, sinks=True, window=(90, None)) for d in (64, 96, 128)),
        *(with_intervals(d, causal=True, softcap=2.0) for d in (64, 128)),
    ],
    ids=lambda of: f"D {of.d}",
)
def test_kernels_with_intervals_have_a_loop_of_unmasked_blocks_without_spills(
    compile_call: Compile, tmp_path: Path, of: Case
) -> None:
    """Each warpgroup of the forward has a loop of masked blocks, then one of unmasked blocks, with the maxima of full attention
    between the waits."""
    found = compile_call(of)
    for name, kernel in found.items():
        most = SPILLED_WITH_INTERVALS.get((of.d, name, of.causal, bool(of.softcap)), 0)
        assert not kernel.warnings, f"{name}: {kernel.warnings}"
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
    maxima = maxima_between_waits(found["_attention_fwd_kernel"].cubin, tmp_path)
    assert len(maxima) % 2 == 0 and min(maxima[1::2]) >= 16, maxima


def mma_columns(ptx: str) -> int:
    """The columns of all MMAs. Each has 64 rows and depth 16."""
    return sum(map(int, re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)))


@interpreted
@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("d", [96, 192])
def test_head_dimensions_of_two_pieces_are_not_padded_to_one(compile_call: Compile, d: int) -> None:
    """Nothing spills, and the MMAs are in proportion to D."""
    padded = {96: 128, 192: 256}[d]
    whole, found = compile_call(case(padded, causal=True)), compile_call(case(d, causal=True))
    check(found, d)
    for name, kernel in found.items():
        assert mma_columns(kernel.ptx) * padded == mma_columns(whole[name].ptx) * d, name


@interpreted
@without_gpu
@pytest.mark.parametrize(("d", "causal"), some((64, True)))
def test_few_tiles_have_one_warpgroup_each(compile_call: Compile, d: int, causal: bool) -> None:
    prepared.clear()
    check(compile_call(case(d, causal), backward=False, programs=8), d)
    ((_, grid, _, _),) = prepared
    assert grid == (256 // 64 * 2,)


PACKED = case(  # CI compiles it with every kernel
    72, causal=True, dtype=torch.float16, window=(100, None), lengths=((100, 200), (0, 7), (300, 33)), sinks=True
)
FEATURES: dict[str, Case] = {
    "window, groups, fused": case(128, causal=False, window=(40, 7), group=3, layout="fused"),
    "softcap, negative scale": case(64, causal=True, softcap=2.0, scale=-0.2, dlse=True),
    "sinks, odd head dimension": case(40, causal=True, dtype=torch.float16, sinks=True, layout="bthd"),
    "few tiles, shared": Case(b=1, hkv=1, group=4, tq=1024, tk=130, d=64, dv=64, dtype=torch.bfloat16),
    "packed, window": case(256, causal=True, window=(100, None), lengths=((100, 200), (0, 7), (300, 33)), sinks=True),
    "wide, softcap": case(256, causal=True, softcap=2.0),
    "two pieces, packed": case(72, causal=True, lengths=((100, 200), (300, 33)), dlse=True),
    "two wide pieces": case(160, causal=True),
}


@interpreted
@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_compiles(compile_call: Compile, name: str) -> None:
    found = compile_call(FEATURES[name], ptxas=False, deterministic="packed" in name)
    assert set(HEADS) <= found.keys()


def names_of_kernels() -> set[str]:
    from tilegrad.kernels.attention import hopper

    files = Path(hopper.__file__).parent.glob("*.py")
    return {
        name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text("utf-8"), re.MULTILINE)
    }


MEMORY_WAIT = re.compile(r"cp\.async\.bulk\.wait_group 0;")


@interpreted
@without_gpu
def test_every_kernel_compiles_and_the_dq_semaphore_is_released_after_a_warp_barrier(compile_call: Compile) -> None:
    """One thread stores dq by TMA and waits for it; another may release the semaphore. The emulator lacks threads of a warp."""
    found = compile_call(PACKED, ptxas=False, deterministic=True)
    assert found.keys() == names_of_kernels()
    ptx = found["_hopper_bwd_kernel"].asm["ptx"]  # type: ignore[attr-defined]
    releases = [ptx[place.end() : ptx.index(".global.gpu.release", place.end())] for place in MEMORY_WAIT.finditer(ptx)]
    assert len(releases) == 2  # one for each dQ store warp
    assert all("bar.warp.sync" in between for between in releases)
    assert ptx.count("fence.proxy.async.global") == 4  # before each release, and after each acquire
    tritons = {int(number) for number in re.findall(r"bar(?:rier)?\.sync(?:\.aligned)?\s+(\d+)", ptx)}
    assert tritons <= {0, 1, 2}  # our barriers begin at 5 (pipeline.py)


@interpreted
@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [16, 32, 40, 64, 96, 128, 160, 192, 256])
def test_the_whole_matrix(compile_call: Compile, d: int, dtype: torch.dtype) -> None:
    bands: list[dict[str, Any]] = [{}, {"window": (40, 7)}, {"window": (90, None)}]
    more: list[dict[str, Any]] = [{}, {"lengths": ((100, 200), (300, 33))}]
    for causal, band, packed, deterministic in itertools.product((False, True), bands, more, (False, True)):
        found = compile_call(case(d, causal, dtype, **band, **packed), deterministic=deterministic)
        for name, kernel in found.items():
            assert not kernel.warnings, f"{name}: {kernel.warnings}"
            assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
        if d in (64, 96, 128, 192, 256) and not (band or packed or deterministic):
            check(found, d)


BEFORE = 13  # number of arguments of Triton's launcher before those of the kernel


def expanded(kind: str, x: Any) -> list[str]:
    """The types of the parameters that an argument becomes."""
    return ["map", *["i32"] * len(x.shape), *["i64"] * len(x.shape)] if kind.startswith("tensordesc") else [kind]


@interpreted
@without_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_prepared_launch_passes_the_arguments_of_tritons_launcher(
    compile_call: Compile, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    from tilegrad.kernels.cuda_launch import MAP_DTYPES, Launch, Plan

    prepared.clear()
    given_case = PACKED if packed else case(128, causal=False)
    compile_call(given_case, backward=False, ptxas=False)
    ((compiled, grid, arguments, _),) = prepared
    signature, maps = dict(compiled.src.signature), compiled.metadata.tensordesc_meta
    assert len(maps) == (8 if packed else 4)  # a head dimension of two pieces has two maps for each tensor
    passed: list[Any] = []
    launch_all = wrap_handle_tensordesc(lambda *whole: passed.extend(whole), signature, maps)
    if triton.__version__.startswith("3.6"):
        launch_all(*[None] * BEFORE, *arguments)
    else:  # the arguments of the kernel are one tuple
        launch_all(*[None] * BEFORE, arguments)
        passed[BEFORE:] = passed[BEFORE]
    kinds = [each for kind, x in zip(signature.values(), arguments, strict=True) for each in expanded(kind, x)]
    theirs = [x for x, kind in zip(passed[BEFORE:], kinds, strict=True) if kind != "constexpr"]

    monkeypatch.undo()
    fake = FakeDriver(monkeypatch)
    ready = SimpleNamespace(run=None, metadata=compiled.metadata, src=compiled.src, function=7)
    launch = Launch(ready, grid, arguments, 0)
    given = SimpleNamespace(tensors=list({id(x): x for x in launch._tensors}.values()))
    Plan((launch,), given, (), 0)(given)
    (started,) = fake.calls
    taken = [kind for kind in kinds if kind != "constexpr"]
    ours = fake.parameters(started, [*taken, "*", "*"])
    assert ours[-2:] == [0, 0]
    for got, want, kind in zip(ours, theirs, taken, strict=False):
        if kind == "map":
            _, address, swizzle, itemsize, _, box, shape, strides, _ = want
            apart = tuple(itemsize * n for n in strides[:-1])
            dtype = MAP_DTYPES[given_case.dtype]
            assert got == (address, dtype, tuple(shape[::-1]), apart[::-1], tuple(box[::-1]), swizzle)
        else:
            assert got == pytest.approx(want.data_ptr() if isinstance(want, torch.Tensor) else want, rel=1e-7)
