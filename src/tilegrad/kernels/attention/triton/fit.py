"""Kernel calls with the first tile of tiles.py that fits in the device's shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...cache import remember
from ...checks import ALIGNED_BYTES
from ...cuda_launch import Launch, refusal
from ...triton_key import set_key
from ...triton_version import launch_options
from ..problem import Sizes
from .arguments import Arguments, ieee_fp32
from .tiles import INTERPRETER, INTERVALS, UNALIGNED, Key, Tile, candidates, ordered, row

FAST_FLOAT64 = (
    INTERPRETER,
    80,
    90,
)  # float64 at ≥ half of float32's rate; without 100: Triton 3.6 can't compile float64 there

Grid = Callable[[Tile], tuple[Arguments, tuple[int, ...]]]  # more arguments, and the grid, for a tile


@functools.cache
def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; INTERPRETER on the CPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that one program may use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def product_bits(dtype: torch.dtype, device: torch.device) -> int:
    """The bits of an element of a GEMM operand. IEEE float32 is converted to float64 on devices with fast float64."""
    return 64 if ieee_fp32(dtype) and architecture(device) in FAST_FLOAT64 else 8 * dtype.itemsize


def tiles_for(kernel: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    """The tiles to try, in order. The kernel "ordered" is the forward of an invariant problem and has one tile."""
    if kernel == "ordered":
        return (ordered(product_bits(dtype, device), sizes.d, sizes.dv),)
    return candidates(kernel, _key(sizes, dtype, device))


def separate_dk_dv(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether dk and dv have separate passes."""
    return row(_key(sizes, dtype, device)).dk is not None


def _key(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Key:
    band = sizes.left is not None or sizes.right is not None
    bits, widest = product_bits(dtype, device), max(sizes.block_d, sizes.block_dv)
    return architecture(device), bits, widest, INTERVALS if sizes.intervals else band


class Fit(NamedTuple):
    """A compiled specialisation: its tile, and Triton's compiled kernel (None in the interpreter)."""

    kernel: str
    tile: Tile
    compiled: Any


fits: dict[tuple[Any, ...], Fit] = {}


class KernelCall(NamedTuple):
    """A kernel, its grid, its arguments and constexprs by name, and Triton's options (num_warps, num_stages)."""

    kernel: Any
    programs: tuple[int, ...]
    arguments: Arguments
    options: Arguments

    def run(self) -> None:
        set_key(self.kernel)
        self.kernel[self.programs](**self.arguments, **self.options, **launch_options())

    def compile(self) -> Any:
        set_key(self.kernel)
        return self.kernel.warmup(**self.arguments, **self.options, **launch_options(), grid=self.programs)

    def launch(self, device: int) -> Launch | None:
        """A launch through the CUDA driver; None if only Triton can launch this kernel."""
        compiled = self.compile()
        ordered = [self.arguments[name] for name in self.kernel.arg_names]
        return None if refusal(compiled) else Launch(compiled, self.programs, ordered, device)


def fitted(
    kernel: Any, name: str, sizes: Sizes, q: Tensor, grid: Grid, arguments: Arguments, constants: Arguments
) -> list[KernelCall]:
    """The call of `kernel` with the first tile for `name` that fits; no call if the grid is empty."""
    set_key(kernel)
    tiles = tiles_for(name, sizes, q.dtype, q.device)
    if constants["ALIGN"] == 1 and q.element_size() == 2 and architecture(q.device) != INTERPRETER:
        if name == "ordered" and tiles[0] not in UNALIGNED:
            raise ValueError(
                f"q: got rows of q, k, v or o that do not start at multiples of {ALIGNED_BYTES} bytes, with invariant=True; "
                "accepted: rows that do (call .contiguous())"
            )
        tiles = UNALIGNED
    if not all(grid(tiles[0])[1]):
        return []
    absent = tuple(argument for argument, x in arguments.items() if x is None)
    bias = arguments["bias"]
    key = (kernel, name, q.device, q.dtype, absent, bias is not None and bias.dtype, tiles[0], *constants.values())
    fit = fits.get(key)
    if fit is None:
        tile, compiled = _first_that_fits(kernel, tiles, grid, arguments, constants, sizes, q.device)
        fit = remember(fits, key, Fit(name, tile, compiled))
    more, programs = grid(fit.tile)
    return [KernelCall(kernel, programs, arguments | more | constants | _blocks(fit.tile), _options(fit.tile))]


def _first_that_fits(
    kernel: Any,
    tiles: tuple[Tile, ...],
    grid: Grid,
    arguments: Arguments,
    constants: Arguments,
    sizes: Sizes,
    device: torch.device,
) -> tuple[Tile, Any]:
    if architecture(device) == INTERPRETER:
        return tiles[0], None
    needed = {}
    for tile in tiles:
        more, programs = grid(tile)
        options = _options(tile) | launch_options()
        compiled = kernel.warmup(**arguments, **more, **constants, **_blocks(tile), **options, grid=programs)
        needed[tile] = compiled.metadata.shared
        if needed[tile] <= shared_memory_bytes(device):
            return tile, compiled
    raise ValueError(
        f"device: got {device}, which has {shared_memory_bytes(device)} bytes of shared memory per program; accepted: "
        f"at least {min(needed.values())} bytes for head dimension {sizes.d} (kernel='tiled' needs none)"
    )


def _blocks(tile: Tile) -> Arguments:
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n}


def _options(tile: Tile) -> Arguments:
    return {"num_warps": tile.warps, "num_stages": tile.stages}
