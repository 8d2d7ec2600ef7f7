"""`python -m benchmarks.tune`: times candidate tiles of the Triton kernels and writes kernels/attention/triton/tiles.py.

Every candidate is compiled first, in as many processes as there are cores; Triton caches compiled kernels on disk. Then all
candidates are timed interleaved, on 16,384 tokens in sequences of 4,096 (float32: 4,096 tokens in sequences of 2,048) with
2,048 channels. The time of a kernel is the time of an op that needs only this kernel: the forward; or a backward for dk and dv,
for dk, for dv or for dq, minus the time of the delta kernel with which every backward begins. dk and dv become separate passes
if that is faster. A tile that does not fit the device is left out, and a tile that spills registers is used only if all tiles
do. The chosen tiles must pass the check against the oracle.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch

from tilegrad.bench.calls import Inputs, check, thunk
from tilegrad.bench.shapes import Shape
from tilegrad.bench.timing import Thunk, interleaved
from tilegrad.kernels.attention.problem import Backward
from tilegrad.kernels.attention.triton import tiles
from tilegrad.kernels.attention.triton.tiles import Key, Tile, Tiles
from tilegrad.kernels.scratch import new_scratch
from tilegrad.text.table import table

T, TOKENS, HIDDEN = {16: 4096, 32: 2048, 64: 2048}, {16: 16384, 32: 4096, 64: 4096}, 2048
REPEATS = 10

FLOAT32 = dict.fromkeys(
    ("fwd", "dkdv", "dq"),
    ((16, 16, 4, 1), (16, 16, 8, 1), (16, 32, 4, 1), (16, 32, 8, 1), (32, 16, 4, 1), (32, 16, 8, 1), (32, 32, 8, 1),
     (64, 32, 8, 1)),
)  # fmt: skip
FLOAT64 = {
    "fwd": ((64, 32, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (128, 32, 8, 2), (32, 64, 8, 2)),
    "dkdv": ((32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (32, 32, 8, 2), (32, 16, 8, 1)),
    "dq": ((64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 2), (16, 32, 8, 2)),
}
NARROW = {  # head dimensions up to 128
    "fwd": ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (128, 32, 4, 3), (64, 128, 4, 3),
            (64, 64, 4, 3), (64, 32, 4, 3)),
    "dkdv": ((128, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3),
             (32, 128, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3)),
    "dq": ((128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 128, 4, 2), (64, 64, 4, 2),
           (64, 64, 4, 3), (64, 32, 4, 3)),
}  # fmt: skip
WIDE = {
    "fwd": ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
    "dkdv": ((64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 64, 8, 2)),
    "dk": ((64, 128, 8, 1), (32, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    "dv": ((64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2), (128, 128, 8, 1)),
    "dq": ((128, 32, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 4, 2)),
}


def candidates(bits: int, head_dim: int) -> dict[str, tuple[Tile, ...]]:
    """The tiles to try for each kernel."""
    rows = FLOAT64 if bits == 64 else FLOAT32 if bits == 32 else WIDE if head_dim > 128 else NARROW
    return {kernel: tuple(Tile(*tile) for tile in tiles) for kernel, tiles in rows.items()}


def with_tile(row: Tiles, kernel: str, tile: Tile) -> Tiles:
    """`row` with one tile changed. If the tile is for dk or dv alone, dk and dv become separate passes."""
    apart = tile if kernel in ("dk", "dv") else None
    return row._replace(dk=apart, dv=apart)._replace(**{kernel: tile})


def shape_for(key: Key) -> Shape:
    _, bits, head_dim, band = key
    return Shape(TOKENS[bits] // T[bits], max(1, HIDDEN // head_dim), T[bits], head_dim, causal=bool(band))


def _thunk(inputs: Inputs, kernel: str) -> Thunk:
    """A call that runs this kernel and no other kernel with GEMMs; for "delta" a backward without GEMMs."""
    forward, _, out = inputs.ours("triton")
    if kernel == "fwd":
        return forward
    from tilegrad.kernels.attention.triton import launch as module

    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    shapes = module.workspace(q, k, v, mask, backward=True, deterministic=True)
    scratch = new_scratch(shapes, q.device)
    dq, dk, dv = (out[name] if name in (kernel, kernel[:2], kernel[2:]) else None for name in ("dq", "dk", "dv"))
    forward()
    reads, memory = (q, k, v, out["o"], out["lse"], inputs.do, None, mask), tuple(scratch.values())
    call = Backward(*reads, dq, dk, dv, None, None, memory, deterministic=True)
    return thunk(module.prepare_bwd, call, scratch)


def compile_tile(key: Key, row: Tiles, kernel: str, dtype: torch.dtype, device: str) -> tuple[int, str]:
    """Compile a kernel with a tile, and return (words spilled, error). Runs in a process of its own; the compiled kernel stays
    in Triton's cache on disk."""
    from triton.runtime.errors import OutOfResources

    from tilegrad.kernels.attention.triton.fit import fits

    tiles.set_row(key, row)
    _, _, head_dim, band = key
    tile = getattr(row, kernel)
    try:
        _thunk(Inputs(Shape(1, 1, 256, head_dim, causal=bool(band)), dtype, torch.device(device)), kernel)()
    except (OutOfResources, ValueError) as error:
        return 0, str(error)
    fit = [fit for fit in fits.values() if fit.kernel == kernel][-1]
    return fit.compiled.n_spills, "" if fit.tile == tile else "does not fit"


def tune_tiles(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, ...] = (64, 128, 256)) -> int:
    """Times every candidate, prints the best tile of each kernel and rewrites the table of tiles.py."""
    from tilegrad.kernels.attention.triton.fit import architecture, product_bits

    if device.type != "cuda":
        raise ValueError(f"device: got {device}; accepted: a CUDA device, because tiles are tuned where they run")
    bits = product_bits(dtype, device)
    keys = [(architecture(device), bits, d, band) for d in head_dims for band in (False, True)]
    start = {key: tiles.row(key) for key in keys}
    jobs = [(key, kernel, tile) for key in keys for kernel, found in candidates(bits, key[2]).items() for tile in found]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        rows = [with_tile(start[key], kernel, tile) for key, kernel, tile in jobs]
        futures = [
            pool.submit(compile_tile, key, row, kernel, dtype, str(device))
            for (key, kernel, _), row in zip(jobs, rows, strict=True)
        ]
        compiled = [future.result() for future in futures]
    spills = {job: words for job, (words, wrong) in zip(jobs, compiled, strict=True) if not wrong}
    lines: list[list[object]] = []
    for key in keys:
        inputs = Inputs(shape_for(key), dtype, device)
        best: dict[str, tuple[float, Tile]] = {}
        delta = median(interleaved({"delta": _thunk(inputs, "delta")}, REPEATS, device)["delta"])
        for kernel in candidates(bits, key[2]):
            thunks: dict[str, Thunk] = {}
            fit = {str(tuple(job[2])): job for job in spills if job[:2] == (key, kernel)}
            for name, job in fit.items():
                thunks[name] = _run_with(key, with_tile(start[key], kernel, job[2]), _thunk(inputs, kernel))
            before = 0.0 if kernel == "fwd" else delta
            times = {name: median(ms) - before for name, ms in interleaved(thunks, REPEATS, device).items()}
            ranked = sorted(times, key=lambda name: (spills[fit[name]] > 0, times[name]))
            if ranked:
                best[kernel] = times[ranked[0]], fit[ranked[0]][2]
            lines += [[str(key), kernel, name, f"{times[name]:.3f}", spills[fit[name]]] for name in sorted(times)]
        tiles.set_row(key, _taken(start[key], best))
        wrong = check("triton", shape_for(key), dtype, device)
        if wrong:
            tiles.set_row(key, start[key])
            lines.append([str(key), "WRONG", wrong, "", ""])
    print(table(("architecture, bits, D, band", "kernel", "tile", "ms", "words spilled"), lines))
    path = Path(tiles.__file__)
    path.write_text("\n".join(_rewritten(path.read_text(encoding="utf-8").split("\n"))), encoding="utf-8")
    print(
        f"\n{len(jobs)} candidates, {len(spills)} fit, {sum(not n for n in spills.values())} without spills; wrote {path.name}"
    )
    return 0


def _taken(row: Tiles, best: dict[str, tuple[float, Tile]]) -> Tiles:
    """The row with the best tiles. dk and dv are separate passes only if both were timed and together take less time than
    dkdv."""
    for kernel, (_, tile) in best.items():
        if kernel not in ("dk", "dv"):
            row = row._replace(**{kernel: tile})
    if "dkdv" not in best:
        return row
    apart = {"dk", "dv"} <= best.keys() and best["dk"][0] + best["dv"][0] < best["dkdv"][0]
    return row._replace(dk=best["dk"][1] if apart else None, dv=best["dv"][1] if apart else None)


def _run_with(key: Key, row: Tiles, run: Thunk) -> Thunk:
    def thunk() -> None:
        tiles.set_row(key, row)
        run()

    return thunk


def _rewritten(lines: list[str]) -> Iterator[str]:
    """The lines of tiles.py, with the rows of TABLE instead of the lines between the two marks."""
    inside = False
    for line in lines:
        if line.strip() == "# table begins":
            yield line
            yield from (f"    {key}: {_row_text(row)}," for key, row in sorted(tiles.TABLE.items()))
            inside = True
        elif line.strip() == "# table ends":
            inside = False
        if not inside:
            yield line


def _row_text(row: Tiles) -> str:
    return f"Tiles({', '.join(f'Tile{tuple(tile)}' for tile in row if tile is not None)})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s"
    )
    args = parser.parse_args()
    sys.exit(tune_tiles(torch.device(args.device), getattr(torch, args.dtype)))
