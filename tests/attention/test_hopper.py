"""The Hopper kernels without a GPU: through the real compiler, and which calls they take.

A driver that only names the architecture takes the place of CUDA's, and a launch compiles instead: argument specialisation,
tile configs, Gluon and ptxas are the real ones. On a Hopper GPU they run in test_hopper_gpu.py.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.cases import Call, Case, build, check_call
from support.hopper_specs import AXES, case_of, specs
from support.pairwise import all_pairs, pairs

from tilegrad import Mask
from tilegrad.kernels.attention.problem import Problem, Sizes, output_shapes
from tilegrad.kernels.attention.table import ATTENTION
from tilegrad.kernels.table import Explanation

triton = pytest.importorskip("triton", reason="needs Triton")
from support.gluon.emulator import in_python as emulation  # noqa: E402

interpreted = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Gluon has no interpreter")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there")

SHARED_MEMORY_BYTES = 232_448
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEADS = ("_attention_fwd_kernel", "_hopper_bwd_kernel")  # with MMAs


class Compiled(NamedTuple):
    spilled_bytes: int
    warnings: list[str]  # ptxas's C75xx: wgmma serialised
    shared_bytes: int
    ptx: str


Compile = Callable[..., dict[str, Compiled]]
prepared: list[tuple[Any, ...]] = []  # what launches would have been made of


def through_ptxas(compiled: Any, folder: Path) -> Compiled:
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    command = [BIN / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Compiled(spilled, re.findall(r"C75\d\d", said), compiled.metadata.shared, compiled.asm["ptx"])


@pytest.fixture
def compile_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compile]:
    """compile_call(case): every kernel of a forward and, unless told, a backward; Triton itself stops before ptxas."""
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
            return 90  # a device of its own: Triton remembers the target of each

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def utils(self) -> Any:
            return Utils()

    class Utils:
        def fill_tma_descriptor(self, *of: Any) -> tuple[Any, ...]:
            return "map", *of

    found: dict[str, Compiled] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[self.__name__] = compiled
        return compiled

    def call_of(
        case: Case, *, backward: bool = True, ptxas: bool = True, deterministic: bool = False, programs: int = 1
    ) -> dict[str, Compiled]:
        monkeypatch.setattr(launch_forward, "multiprocessors", lambda device: programs)
        call = build(case)
        q, k, v, mask = call.q, call.k, call.v, call.mask
        o_shape, lse_shape = output_shapes(q, v, mask)
        o, lse = q.new_empty(o_shape), q.new_empty(lse_shape, dtype=torch.float32)
        found.clear()
        monkeypatch.setattr(launch, "compiled_kernels", {})
        monkeypatch.setattr(launch_forward, "launches", launch.LaunchCache())
        monkeypatch.setattr(launch_backward, "launches", launch.LaunchCache())
        shapes = hopper.workspace(q, k, v, mask, backward=False, deterministic=False)
        scratch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        hopper.fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch)
        if backward:
            shapes = hopper.workspace(q, k, v, mask, backward=True, deterministic=deterministic)
            hopper.bwd(
                q, k, v, o, lse, call.do, call.dlse, mask, dq=torch.empty_like(q), dk=torch.empty_like(k),
                dv=torch.empty_like(v), dbias=None, dsinks=None if mask.sinks is None else torch.empty_like(mask.sinks),
                scratch={name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()},
                deterministic=deterministic,
            )  # fmt: skip
        if not ptxas:
            return dict(found)
        return {name: through_ptxas(compiled, tmp_path) for name, compiled in found.items() if name in HEADS}

    driver.set_active(Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *args: b"")
    monkeypatch.setattr(launch, "Launch", lambda *call: prepared.append(call) or (lambda: None))
    monkeypatch.setattr(launch_backward, "multiprocessors", lambda device: 132)
    yield call_of
    driver._active = None


def case(d: int, causal: bool, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Case:
    return Case(b=1, hkv=2, tq=256, tk=256, d=d, dv=d, dtype=dtype, causal=causal, **more)


def check(found: dict[str, Compiled]) -> None:
    for name, kernel in found.items():
        assert not kernel.warnings, f"{name}: {kernel.warnings}"
        assert not kernel.spilled_bytes, f"{name} spills {kernel.spilled_bytes} bytes"
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES
        assert all(word in kernel.ptx for word in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg"))


@interpreted
@without_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_no_spills_and_no_serialised_mmas(compile_call: Compile, d: int, causal: bool) -> None:
    found = compile_call(case(d, causal))
    assert found.keys() == set(HEADS)
    check(found)


@interpreted
@without_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_few_tiles_are_of_one_warpgroup(compile_call: Compile, d: int, causal: bool) -> None:
    prepared.clear()
    check(compile_call(case(d, causal), backward=False, programs=8))
    ((_, grid, _, _),) = prepared
    assert grid == 256 // 64 * 2


FEATURES: dict[str, Case] = {
    "window, groups, fused": case(128, False, window=(40, 7), group=3, layout="fused"),
    "softcap, negative scale": case(64, True, softcap=2.0, scale=-0.2, dlse=True),
    "sinks, odd head dimension": case(40, True, torch.float16, sinks=True, layout="bthd"),
    "few tiles, shared": Case(b=1, hkv=1, group=4, tq=1024, tk=130, d=64, dv=64, dtype=torch.bfloat16),
    "packed, window": case(256, True, window=(100, None), lengths=((100, 200), (0, 7), (300, 33)), sinks=True),
    "wide, softcap": case(256, True, softcap=2.0),
}


@interpreted
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_features_compile(compile_call: Compile, name: str) -> None:
    found = compile_call(FEATURES[name], ptxas=False, deterministic="packed" in name)
    assert set(HEADS) <= found.keys()


@interpreted
@without_gpu
def test_the_dq_semaphore_is_released_after_a_warp_barrier(compile_call: Compile) -> None:
    """One thread sends dq by TMA and waits for it, another may release the semaphore. The emulator has no threads of a warp."""
    found = compile_call(case(64, True), ptxas=False, deterministic=True)
    ptx = found["_hopper_bwd_kernel"].asm["ptx"]  # type: ignore[attr-defined]
    waited = ptx.index("cp.async.bulk.wait_group 0;")
    assert "bar.warp.sync" in ptx[waited : ptx.index("atom.global.gpu.release", waited)]
    assert ptx.count("fence.proxy.async.global") == 2  # before the release, and after the acquire


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
        if d in (64, 128, 256) and not (band or packed or deterministic):
            check(found)


@interpreted
@without_gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_prepared_launch_passes_what_tritons_own_passes(
    compile_call: Compile, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    from tilegrad.kernels.attention.hopper import launch

    lengths: dict[str, Any] = {"lengths": ((100, 200), (300, 33)), "sinks": True} if packed else {}
    prepared.clear()
    compile_call(case(64, causal=True, **lengths), backward=False, ptxas=False)
    ((compiled, grid, arguments, _),) = prepared
    passed: list[tuple[Any, ...]] = []
    maps = compiled.metadata.tensordesc_meta
    assert len(maps) == 4
    triton_s = wrap_handle_tensordesc(lambda *all_of_it: passed.append(all_of_it), dict(compiled.src.signature), maps)
    triton_s(grid, 1, 1, 0, 7, False, False, None, None, (4, 1, 0), None, None, None, *arguments)

    launcher = SimpleNamespace(launch=triton_s, launch_cooperative_grid=False, launch_pdl=False)
    ready = SimpleNamespace(run=launcher, metadata=compiled.metadata, function=7, packed_metadata=(4, 1, 0))
    monkeypatch.undo()
    launch.Launch(ready, grid, arguments, 90)()
    theirs, ours = passed
    assert ours == tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in theirs)
    assert sum(isinstance(x, tuple) and x[:1] == ("map",) for x in ours) == 4


class Lengths(NamedTuple):
    """Stands for a pointer to cumulative lengths, and for one of them."""

    ends: tuple[int, ...]
    at: int = 0

    def __add__(self, n: int) -> Lengths:  # type: ignore[override]
        return self._replace(at=self.at + n)


class Program(NamedTuple):
    """Stands for Gluon where a device function runs as plain Python: which program of how many."""

    here: int
    programs: int

    def program_id(self, axis: int) -> int:
        return self.here

    def num_programs(self, axis: int) -> int:
        return self.programs

    def where(self, condition: bool, x: int, y: int) -> int:
        return x if condition else y

    def load(self, pointer: Lengths) -> int:
        return pointer.ends[pointer.at]

    minimum, maximum = staticmethod(min), staticmethod(max)


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Program], Any]:
    """in_python(program): the forward's tile scheduler, as that program runs it."""
    from tilegrad.kernels.attention.hopper import forward_scheduler
    from tilegrad.kernels.attention.triton import scores

    monkeypatch.setattr(scores, "tl", Program(0, 1))
    monkeypatch.setattr(forward_scheduler, "band_tiles", scores.band_tiles.fn)
    monkeypatch.setattr(forward_scheduler, "ROWS", 64)

    def sequence_of(slot: int, params: Any, tile: int) -> int:
        return max(b for b in range(params.batch) if params.cu_seqlens_q.ends[b] // tile + b <= slot)

    monkeypatch.setattr(forward_scheduler, "sequence_of", sequence_of)

    def module(program: Program) -> Any:
        monkeypatch.setattr(forward_scheduler, "gl", program)
        return forward_scheduler

    return module


def params_of(scheduler: Any, **more: Any) -> Any:
    nothing = dict.fromkeys(scheduler.Params._fields)
    one = dict.fromkeys(("batch", "heads", "group", "row_tiles", "heads_per_section"), 1)
    return scheduler.Params(**nothing | one | more)


@interpreted
def test_every_tile_of_rows_is_taken_once(in_python: Callable[[Program], Any]) -> None:
    dice = random.Random(0)
    for _ in range(60):
        batch, heads, tq = dice.randint(1, 3), dice.randint(1, 5), dice.randint(1, 900)
        row_tiles, section = -(-tq // 128), dice.randint(1, batch * heads)
        tiles = row_tiles * heads * batch
        programs = min(tiles, dice.randint(1, 9))
        seen = []
        for here in range(programs):
            scheduler = in_python(Program(here, programs))
            params = params_of(
                scheduler, batch=batch, heads=heads, row_tiles=row_tiles, heads_per_section=section, tq=tq, tk=tq
            )
            taken = [scheduler.next_index.fn(n, params) for n in range(-(-tiles // programs))]
            seen += [
                scheduler.work_tile.fn(index, params, 128, 128)[:3]
                for index in taken
                if index < scheduler.work_tiles.fn(params)
            ]
        everything = itertools.product(range(batch), range(heads), range(tq - 128 * row_tiles, tq, 128))
        assert sorted(seen) == sorted(everything)


@interpreted
def test_every_row_of_packed_sequences_is_taken_once(in_python: Callable[[Program], Any]) -> None:
    dice, scheduler = random.Random(0), in_python(Program(0, 1))
    for _ in range(60):
        lengths = [dice.choice((0, 1, dice.randint(0, 700))) for _ in range(dice.randint(1, 9))]
        ends = Lengths((0, *itertools.accumulate(lengths)))
        row_tiles = sum(lengths) // 192 + len(lengths)
        params = params_of(scheduler, batch=len(lengths), row_tiles=row_tiles, cu_seqlens_q=ends, cu_seqlens_k=ends)
        rows = []
        for slot in range(row_tiles):
            tile = scheduler.work_tile.fn(slot, params, 192, 128)
            rows += [(tile.b, i) for i in range(max(tile.start, 0), tile.start + 192)]
        assert sorted(rows) == [(b, i) for b, n in enumerate(lengths) for i in range(n)]


@interpreted
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("right", [None, 0, 7])
@pytest.mark.parametrize("left", [None, 0, 90])
def test_a_warpgroup_sees_what_its_rows_see_and_hands_back_every_tile(
    in_python: Callable[[Program], Any], left: int | None, right: int | None, warpgroups: int
) -> None:
    dice, scheduler = random.Random(0), in_python(Program(0, 1))
    rows = 64 * warpgroups
    for _ in range(25):
        tq, tk, columns = dice.randint(1, 400), dice.randint(1, 400), dice.choice((64, 128))
        params = params_of(scheduler, row_tiles=-(-tq // rows), tq=tq, tk=tk, left=left, right=right)
        for index, warpgroup in itertools.product(range(params.row_tiles), range(warpgroups)):
            tile = scheduler.work_tile.fn(index, params, rows, columns)
            span = scheduler.span_of.fn(warpgroup, tile, params, rows, columns)
            behind = span.first - tile.first
            assert min(span.before, behind) >= 0 < span.last - span.first
            assert span.before + (span.last - span.first) + behind == tile.last - tile.first
            start = tile.start + 64 * warpgroup
            own = range(max(start, 0), max(start + 64, 0))
            seen = {(i, j) for i in own for j in range(tk) if sees(i + tk - tq - j, left, right)}
            assert all(span.first <= j // columns < span.last for _, j in seen)
            unmasked = range(max(span.unmasked, span.first), min(span.unmasked_end, span.last))
            assert seen >= {(i, j) for i in own for n in unmasked for j in range(columns * n, columns * (n + 1))}


def sees(gap: int, left: int | None, right: int | None) -> bool:
    return (left is None or gap <= left) and (right is None or gap >= -right)


def emulated(call: Call, programs: int) -> dict[str, torch.Tensor]:
    """o and lse of the forward, in plain Python."""
    from tilegrad.kernels.attention import hopper
    from tilegrad.kernels.attention.hopper import forward, forward_load, forward_scheduler, launch_forward, pipeline
    from tilegrad.kernels.attention.hopper.launch import LaunchCache
    from tilegrad.kernels.attention.triton import numerics, scores

    q, k, v, mask = call.q, call.k, call.v, call.mask
    o_shape, lse_shape = output_shapes(q, v, mask)
    out = {"o": q.new_full(o_shape, math.nan), "lse": q.new_full(lse_shape, math.nan, dtype=torch.float32)}
    modules = (forward, forward_load, forward_scheduler, pipeline, numerics, scores)
    with pytest.MonkeyPatch.context() as patch, emulation(*modules) as launch:
        patch.setattr(launch_forward, "multiprocessors", lambda device: programs)
        patch.setattr(launch_forward, "launches", LaunchCache())
        patch.setattr(
            launch_forward, "prepare",
            lambda kernel, key, grid, arguments, num_warps: lambda: launch(kernel, grid, arguments),
        )  # fmt: skip
        needed = hopper.workspace(q, k, v, mask, backward=False, deterministic=False)
        scratch = {name: torch.full(shape, 7, dtype=dtype) for name, (shape, dtype) in needed.items()}
        hopper.fwd(q, k, v, mask, **out, scratch=scratch)
    return out


def check_emulated(case: Case, programs: int) -> None:
    call = build(case)
    check_call(call, emulated(call, programs))


RAGGED = replace(case(128, causal=False), tq=300, tk=333, hkv=1)
EMULATED: dict[str, Case] = {
    "full": RAGGED,
    "causal, three warpgroups": replace(RAGGED, d=64, dv=64, causal=True),
    "one slot of q": replace(RAGGED, d=256, dv=256),
    "a warpgroup without rows": replace(RAGGED, causal=True, tq=130, tk=900),
    "no column seen": replace(RAGGED, causal=True, tq=400, tk=100, sinks=True),
    "open window": replace(RAGGED, window=(100, None), group=2, layout="fused"),
    "two edges, aligned": replace(RAGGED, causal=True, window=(255, None), tq=512, tk=512, sinks=True),
    "softcap, negative scale": replace(RAGGED, window=(40, 7), softcap=2.0, scale=-0.2, dtype=torch.float16),
    "packed": replace(RAGGED, d=40, dv=40, causal=True, lengths=((300, 300), (0, 50), (77, 200), (40, 0), (1, 1))),
}


@interpreted
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("name", EMULATED)
def test_in_plain_python_the_forward_agrees_with_the_oracle(name: str, programs: int) -> None:
    check_emulated(EMULATED[name], programs)


@interpreted
def test_in_plain_python_few_tiles_agree_with_the_oracle() -> None:
    check_emulated(replace(RAGGED, causal=True, sinks=True), 132)


@interpreted
@pytest.mark.slow
def test_in_plain_python_all_specifications_agree_with_the_oracle() -> None:
    every = specs()
    for n, spec in enumerate(every * 2):
        drawn = case_of(spec, random.Random(n))
        programs = (1, 2, 3, 132)[(n + n // len(every)) % 4]
        check_emulated(replace(drawn, b=min(drawn.b, 2), device="cpu"), programs)


@interpreted
def test_nan_of_a_packed_sequence_stays_there() -> None:
    call = build(replace(RAGGED, lengths=((200, 190), (77, 77), (150, 333))))
    clean = emulated(call, 2)
    for x, start in ((call.q, 200), (call.k, 190), (call.v, 190)):
        x[start : start + 77] = math.nan
    spoilt = emulated(call, 2)
    others = [*range(200), *range(277, 427)]
    assert torch.equal(spoilt["o"][others], clean["o"][others])
    assert torch.equal(spoilt["lse"][:, others], clean["lse"][:, others])
    assert spoilt["o"][200:277].isnan().all()


@interpreted
@pytest.mark.parametrize("right", [None, 0])
def test_work_is_balanced_and_a_section_of_heads_fits_l2(right: int | None) -> None:
    """The CTA with the most work has at most 6 % more than the average."""
    from tilegrad.kernels.attention.hopper import launch_forward as host

    for d, t in itertools.product((64, 128, 256), (1024, 2048, 4096, 8192, 16384)):
        sizes = Sizes(16384 // t, 2048 // d, 2048 // d, t, t, d, d, None, right)
        config = host.tile_config(sizes, False, 132)
        row_tiles, heads = -(-t // (64 * config.warpgroups)), sizes.batch * sizes.hq
        section = host.heads_per_section(sizes, row_tiles, 132, config)
        assert 1 <= section <= heads
        assert section in (1, heads) or section * 4 * t * d <= host.L2_BYTES
        steps = host.tile_steps(t, t, right, row_tiles, config).tolist()
        busy = [0.0] * 132
        order = [m for begin in range(0, heads, section) for m in steps for _ in range(min(section, heads - begin))]
        for index, m in enumerate(order):
            turn, place = divmod(index, 132)
            busy[place if turn % 2 == 0 else 131 - place] += m
        assert max(busy) <= 1.06 * sum(busy) / 132, (d, t, section)


def blocks_of_columns(scheduler: Any, sizes: Sizes, config: Any) -> list[int]:
    """That the producer loads for each tile of rows of a head, last rows first."""
    rows = 64 * config.warpgroups
    row_tiles = -(-sizes.tq // rows)
    of = {"row_tiles": row_tiles, "tq": sizes.tq, "tk": sizes.tk, "left": sizes.left, "right": sizes.right}
    params = params_of(scheduler, **of)
    tiles = [scheduler.work_tile.fn(index, params, rows, config.columns) for index in range(row_tiles)]
    return [tile.last - tile.first for tile in tiles]


@interpreted
@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_cost_of_a_tile_is_its_blocks_of_columns_and_one_more(
    in_python: Callable[[Program], Any], d: int, right: int | None
) -> None:
    from tilegrad.kernels.attention.hopper import launch_forward as host

    scheduler = in_python(Program(0, 1))
    for t in (576, 1536, 2304):  # multiples of the rows of every tile: no warpgroup is idle
        sizes = Sizes(64, 16, 16, t, t, d, d, None, right)
        config = host.tile_config(sizes, False, 132)
        blocks = blocks_of_columns(scheduler, sizes, config)
        if t % (64 * config.warpgroups) == 0:
            assert host.tile_steps(t, t, right, len(blocks), config).tolist() == [1 + n for n in blocks]


@interpreted
def test_few_rows_are_spread_over_the_programs_and_a_window_loads_little_beyond_its_edges(
    in_python: Callable[[Program], Any],
) -> None:
    from tilegrad.kernels.attention.hopper import launch_forward as host

    scheduler = in_python(Program(0, 1))
    for d, t in itertools.product((64, 128, 256), (64, 300, 512)):
        sizes = Sizes(1, 16, 16, t, t, d, d, None, 0)
        warpgroup_tiles, config = -(-t // 64) * 16, host.tile_config(sizes, False, 132)
        assert -(-t // (64 * config.warpgroups)) * 16 == warpgroup_tiles <= 132
    for left, t in itertools.product((127, 255, 1023), (4096, 5000)):
        full, window = (Sizes(1, 16, 16, t, t, 128, 128, x, 0) for x in (None, left))
        usual, chosen = (host.tile_config(x, False, 132) for x in (full, window))
        loaded = [sum(blocks_of_columns(scheduler, window, x)) * x.columns for x in (usual, chosen)]
        assert loaded[1] < loaded[0]


class Handle(NamedTuple):
    """Stands for a tensor on a GPU that is not there."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda")
    strides: tuple[int, ...] = ()
    address: int = 0

    def stride(self) -> tuple[int, ...]:
        return self.strides or torch.empty(self.shape, device="meta").stride()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.address


X = Handle((2, 4, 512, 64))
WIDE = Handle((2, 4, 512, 72))
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"causal": True, "window": (5, None), "softcap": 2.0, "scale": -1.0, "sinks": X}),
    ({"q": WIDE, "k": WIDE, "v": WIDE}, {}),
    ({"q": X._replace(strides=(512 * 768, 64, 768, 1)), "k": X, "v": X._replace(address=4096)}, {}),
    ({"q": X._replace(shape=(1, 4, 512, 64), strides=(0, 64, 768, 1)), "k": X, "v": X}, {}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"q": X._replace(device=torch.device("cpu"))}, {}, "needs a Hopper GPU, not cpu"),
    ({"q": X._replace(dtype=torch.float32)}, {}, "takes float16 and bfloat16, not float32"),
    ({"q": Handle((2, 4, 512, 36))}, {}, "16 to 256 in steps of 8, not 36 for q and 64 for v"),
    ({"q": Handle((2, 4, 512, 8)), "v": Handle((2, 4, 512, 8))}, {}, "not 8 for q"),
    ({"v": WIDE}, {}, "takes one head dimension"),
    ({}, {"bias": X}, "takes no bias"),
    ({}, {"alibi_slopes": X}, "takes no alibi_slopes"),
    ({}, {"dropout_p": 0.1}, "takes no dropout"),
    ({"k": Handle((2, 4, 0, 64)), "v": Handle((2, 4, 0, 64))}, {}, "takes no empty tensors"),
    ({"q": Handle((2, 4, 16, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": Handle((1, 4, 100, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": X._replace(strides=(512 * 770, 64, 770, 1))}, {}, "q: TMA can't step over T by 770 elements"),
    ({"k": X._replace(strides=(0, 64, 256, 1))}, {}, "k: TMA can't step over B by 0 elements"),
    ({"v": X._replace(address=8)}, {}, "v: begins at no multiple of 16 bytes"),
]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def explained(tensors: dict[str, Any], options: dict[str, Any], kernel: str | None = None) -> Explanation:
    q, k, v = ({"q": X, "k": X, "v": X} | tensors).values()
    return ATTENTION.explain(Problem(q, k, v, Mask(**options)), kernel)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("tensors", "options"), TAKEN)
def test_takes(tensors: dict[str, Any], options: dict[str, Any]) -> None:
    told = explained(tensors, options)
    assert told.kernel == "hopper" and "hopper goes before it" in told.reasons["triton"]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("tensors", "options", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_refuses_with_a_reason(tensors: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    told = explained(tensors, options)
    assert told.kernel != "hopper" and reason in told.reasons["hopper"]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.filterwarnings("error")
def test_fake_tensors_are_not_asked_for_their_address() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16, device="cuda")
        assert explained({"q": x, "k": x, "v": x}, {}).kernel == "hopper"


@pytest.mark.usefixtures("on_hopper")
def test_under_the_interpreter_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    told = explained({}, {})
    assert told.kernel == "triton" and "no interpreter" in told.reasons["hopper"]


def test_needs_compute_capability_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    told = explained({}, {})
    assert told.kernel == "triton" and "needs compute capability 9.0, and cuda has 10.0" in told.reasons["hopper"]


@pytest.mark.usefixtures("on_hopper")
def test_packed_sequences_are_taken() -> None:
    packed = Handle((4096, 4, 64))
    ends = Handle((9,), torch.int32)
    mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=512, max_seqlen_k=512)  # type: ignore[arg-type]
    assert ATTENTION.explain(Problem(packed, packed, packed, mask)).kernel == "hopper"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("sequences", "longest", "kernel"),
    [(257, 64, "triton"), (256, 64, "hopper"), (257, 65, "hopper"), (8, 32, "hopper")],
)
def test_many_short_packed_sequences_are_left_to_triton(sequences: int, longest: int, kernel: str) -> None:
    packed, ends = Handle((65536, 4, 64)), Handle((sequences + 1,), torch.int32)
    mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)  # type: ignore[arg-type]
    told = ATTENTION.explain(Problem(packed, packed, packed, mask))
    assert told.kernel == kernel


@interpreted
def test_an_output_that_tma_cannot_address_is_named() -> None:
    from tilegrad.kernels.attention import hopper

    call = build(case(64, True))
    odd = torch.empty(1, 2, 256, 65, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(ValueError, match=r"o: TMA can't step over T by 65 elements.*kernel='triton' writes it"):
        hopper.fwd(call.q, call.k, call.v, call.mask, o=odd, lse=None, scratch={})


def test_random_shapes_cover_every_pair_of_features() -> None:
    chosen = specs()
    assert len(chosen) <= 80
    assert set.union(*map(pairs, chosen)) == all_pairs(AXES)
    for n, spec in enumerate(chosen * 3):
        drawn = case_of(spec, random.Random(n))
        assert drawn.d == drawn.dv == spec["d"] and bool(drawn.lengths) == spec["packed"]
