"""Attention in Triton: what a call is on the host, and the launches of forward.py and backward.py.

float16, bfloat16 and float32 (tf32 only where torch.backends.cuda.matmul allows it; else multiplied and summed in float64,
or, on a device that is slow at float64, by IEEE's float32). Sizes and strides are not specialised;
features, head dimensions and whether rows begin at multiples of 16 bytes are. Nothing is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ...philox import threshold
from ...scratch import Scratch, Shapes
from ..mask import Mask, four_dims
from ..problem import ALIGNED_BYTES, FEW_ROWS, LOG2E, Sizes, output_shapes, sizes_of
from .backward import (
    _dbias_kernel,
    _dbias_rows_kernel,
    _delta_kernel,
    _dkdv_kernel,
    _dq_kernel,
    _dsinks_kernel,
)
from .forward import _attention_fwd_kernel, _combine_kernel
from .tiles import INTERPRETER, UNALIGNED, Tile, candidates, row

Arguments = dict[str, Any]

LEAST_FACTOR = 1e-30  # a scale of 0 stays positive, so that −inf · factor is −inf
ROWS = 64  # of a tile in the kernels without products
MOST_SPLITS = 64
MOST_SEQUENCES = 65535  # that the third axis of a grid counts
FAST_FLOAT64 = (INTERPRETER, 80, 90)  # half float32's rate or more; 100 too, but Triton 3.6 does not compile it there


@functools.cache
def architecture(device: torch.device) -> int:
    """90 for compute capability 9.0; the interpreter's own number on the CPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """What one program may use."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def tiles_for(kernel: str, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Tile, ...]:
    return candidates(kernel, *_row_of(sizes, dtype, device))


def _apart(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> bool:
    return row(*_row_of(sizes, dtype, device)).dk is not None


def _row_of(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, bool]:
    band = sizes.left is not None or sizes.right is not None
    return architecture(device), product_bits(dtype, device), max(sizes.block_d, sizes.block_dv), band


def product_bits(dtype: torch.dtype, device: torch.device) -> int:
    """Of the numbers that are multiplied: float32 is widened to float64 where the device is quick at it."""
    return 64 if _exact(dtype) and architecture(device) in FAST_FLOAT64 else 8 * dtype.itemsize


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _forward_kernel(sizes: Sizes) -> str:
    return "decode" if sizes.tq <= FEW_ROWS else "fwd"


def splits_for(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    """Programs that share the columns of a row tile: two for each multiprocessor, each with two tiles or more. Only where
    columns outnumber rows by far, as in decoding: scratch then never grows when a training batch gets smaller."""
    if sizes.tk < 4 * sizes.tq:
        return 1
    tile = tiles_for(_forward_kernel(sizes), sizes, dtype, device)[0]
    programs = _ceil_div(sizes.tq, tile.m) * sizes.hq * sizes.batch
    columns = sizes.tk
    if sizes.left is not None and sizes.right is not None:
        columns = min(columns, sizes.left + sizes.right + tile.m)
    return max(1, min(2 * multiprocessors(device) // max(1, programs), columns // (2 * tile.n), MOST_SPLITS))


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    sizes = sizes_of(q, k, v, mask)
    o_shape, lse_shape = output_shapes(q, v, mask)
    shapes: Shapes = {}
    if mask.dropout_p and isinstance(mask.seed, int):
        shapes["seed"] = ((), torch.int64)
    if backward:
        return shapes | {"delta": (lse_shape, torch.float32), "lse2": (lse_shape, torch.float32)}
    splits = splits_for(sizes, q.dtype, q.device)
    if splits > 1:
        dtype = torch.float64 if product_bits(q.dtype, q.device) == 64 else torch.float32
        shapes |= {"o_parts": ((splits, *o_shape), dtype), "lse_parts": ((splits, *lse_shape), dtype)}
    return shapes


def fwd(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch) -> None:
    sizes = sizes_of(q, k, v, mask)
    splits = splits_for(sizes, q.dtype, q.device)
    parts, lse_parts = (scratch["o_parts"], scratch["lse_parts"]) if splits > 1 else (o, lse)
    one, one_lse = (parts[0], lse_parts[0]) if splits > 1 and parts is not None and lse_parts is not None else (o, lse)
    arguments = (
        {"q": q, "k": k, "v": v, "o": parts, "lse": lse_parts, "sinks": mask.sinks, "splits": splits}
        | _features(sizes, mask, scratch, _exact(q.dtype))
        | _strides(mask.varlen, q=q, k=k, v=v, o=one)
        | _row_strides(mask.varlen, lse=one_lse)
        | {"o_s": 0 if parts is None else parts.stride(0), "lse_s": 0 if lse_parts is None else lse_parts.stride(0)}
        | {"sinks_h": 0 if mask.sinks is None else mask.sinks.stride(0)}
    )

    def grid(tile: Tile) -> tuple[Arguments, tuple[int, int]]:
        row_tiles = _ceil_div(sizes.tq, tile.m)
        return {"row_tiles": row_tiles}, (row_tiles * sizes.hq * sizes.batch, splits)

    with torch.cuda.device_of(q):
        _launch(
            _attention_fwd_kernel,
            _forward_kernel(sizes),
            sizes,
            q,
            grid,
            arguments,
            _constants(sizes, mask, q, k, v, one),
        )
        if splits > 1:
            row_tiles = _ceil_div(sizes.tq, FEW_ROWS)
            arguments = (
                {"parts": parts, "lse_parts": lse_parts, "cu_seqlens_q": mask.cu_seqlens_q, "o": o, "lse": lse}
                | _strides(mask.varlen, parts=one, o=o)
                | _row_strides(mask.varlen, lse_parts=one_lse, lse=lse)
                | {
                    "parts_s": arguments["o_s"],
                    "lse_parts_s": arguments["lse_s"],
                    "heads": sizes.hq,
                    "row_tiles": row_tiles,
                }
                | {"tq": sizes.tq, "splits": splits}
            )
            _combine_kernel[(row_tiles * sizes.hq * sizes.batch,)](
                **arguments, DV=sizes.dv, BLOCK_DV=sizes.block_dv, BLOCK_M=FEW_ROWS, EXACT=_exact(q.dtype)
            )


def bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    sizes = sizes_of(q, k, v, mask)
    rows = {"delta": scratch["delta"], "lse2": scratch["lse2"]}
    rows |= {name: x for name, x in _row_strides(mask.varlen, rows=rows["delta"]).items() if name != "rows_t"}
    arguments = {"q": q, "k": k, "v": v, "do": do, "scale": mask.scale_for(sizes.d)} | rows
    arguments |= _features(sizes, mask, scratch, _exact(q.dtype)) | _strides(mask.varlen, q=q, k=k, v=v, do=do)

    def row_grid(tile: Tile) -> tuple[Arguments, tuple[int]]:
        row_tiles = _ceil_div(sizes.tq, tile.m)
        return {"row_tiles": row_tiles}, (row_tiles * sizes.hq * sizes.batch,)

    with torch.cuda.device_of(q):
        _delta(o, lse, do, dlse, mask, sizes, rows)
        if _apart(sizes, q.dtype, q.device):
            _columns("dk", arguments, sizes, mask, dk=dk, dv=None)
            _columns("dv", arguments, sizes, mask, dk=None, dv=dv)
        else:
            _columns("dkdv", arguments, sizes, mask, dk=dk, dv=dv)
        if dq is not None:
            more = {"dq": dq} | _strides(mask.varlen, dq=dq)
            _launch(_dq_kernel, "dq", sizes, q, row_grid, arguments | more, _constants(sizes, mask, q, k, v, do, dq))
        if dbias is not None and dbias.numel():
            if four_dims(dbias).shape[-1] > 1:
                _dbias(arguments, sizes, dbias, _constants(sizes, mask, q, k, v, do))
            else:
                _dbias_rows(dlse, mask, sizes, rows, dbias, _exact(q.dtype))
        if dsinks is not None and mask.sinks is not None:
            strides = {"sinks_h": mask.sinks.stride(0), "dsinks_h": dsinks.stride(0)}
            _dsinks_kernel[(sizes.hq,)](
                **rows, **strides, sinks=mask.sinks, cu_seqlens_q=mask.cu_seqlens_q, dsinks=dsinks,
                batch=sizes.batch, tq=sizes.tq, BLOCK=1024, EXACT=_exact(q.dtype),
            )  # fmt: skip


def _delta(
    o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes, rows: Arguments
) -> None:  # fmt: skip
    row_tiles = _ceil_div(sizes.tq, ROWS)
    if not row_tiles * sizes.hq * sizes.batch:
        return
    arguments = {"o": o, "do": do, "lse": lse, "dlse": dlse, "cu_seqlens_q": mask.cu_seqlens_q} | rows
    arguments |= _strides(mask.varlen, o=o, do=do) | _row_strides(mask.varlen, lse=lse, dlse=dlse)
    _delta_kernel[(row_tiles * sizes.hq * sizes.batch,)](
        **arguments, heads=sizes.hq, row_tiles=row_tiles, tq=sizes.tq, DV=sizes.dv, BLOCK_DV=sizes.block_dv,
        BLOCK_M=ROWS, ALIGN=_align(mask.varlen, o, do), WIDE=_wide(mask.varlen, o, do),
        EXACT=_exact(o.dtype),
    )  # fmt: skip


def _columns(
    kernel: str, arguments: Arguments, sizes: Sizes, mask: Mask, *, dk: Tensor | None, dv: Tensor | None
) -> None:  # fmt: skip
    if dk is None and dv is None:
        return
    q, k, v, do = (arguments[name] for name in ("q", "k", "v", "do"))
    more = {"dk": dk, "dv": dv, "inv_factor": 1.0 / arguments["factor"]} | _strides(mask.varlen, dk=dk, dv=dv)
    constants = _constants(sizes, mask, q, k, v, do, dk, dv)
    constants["ALIKE"] = sizes.d == sizes.dv and _bht(q, mask.varlen)[2] == _bht(do, mask.varlen)[2]
    more |= {name: arguments[name] for name in arguments if name != "heads"}
    for first_b in range(0, sizes.batch, MOST_SEQUENCES):

        def grid(
            tile: Tile, count: int = min(MOST_SEQUENCES, sizes.batch - first_b)
        ) -> tuple[Arguments, tuple[int, ...]]:
            return {"COPIES": max(1, 32 * tile.warps // tile.m)}, (_ceil_div(sizes.tk, tile.n), sizes.hkv, count)

        _launch(_dkdv_kernel, kernel, sizes, q, grid, more | {"first_b": first_b}, constants)


def _dbias(arguments: Arguments, sizes: Sizes, dbias: Tensor, constants: Arguments) -> None:
    more, wide_i = _own_tiles(dbias, sizes)
    dropped = ("cu_seqlens_q", "cu_seqlens_k", "scale")

    def grid(tile: Tile) -> tuple[Arguments, tuple[int]]:
        row_tiles = _ceil_div(sizes.tq, tile.m) if wide_i else 1
        col_tiles = _ceil_div(sizes.tk, tile.n)
        count = row_tiles * col_tiles * more["b_step"] * more["h_step"]
        return {"row_tiles": row_tiles, "col_tiles": col_tiles}, (count,)

    _launch(
        _dbias_kernel, "dq", sizes, arguments["q"], grid,
        {name: x for name, x in (arguments | more).items() if name not in dropped}, constants | {"SUM_ROWS": not wide_i},
    )  # fmt: skip


def _dbias_rows(
    dlse: Tensor | None, mask: Mask, sizes: Sizes, rows: Arguments, dbias: Tensor, exact: bool
) -> None:  # fmt: skip
    """dbias of a bias that is broadcast over columns."""
    more, wide_i = _own_tiles(dbias, sizes)
    del more["dbias_j"]
    row_tiles = _ceil_div(sizes.tq, ROWS) if wide_i else 1
    _dbias_rows_kernel[(row_tiles * more["b_step"] * more["h_step"],)](
        **rows, **more, **_row_strides(False, dlse=dlse), dlse=dlse, sinks=mask.sinks,
        sinks_h=0 if mask.sinks is None else mask.sinks.stride(0), heads=sizes.hq, row_tiles=row_tiles, tq=sizes.tq,
        BLOCK=ROWS, SUM_ROWS=not wide_i, EXACT=exact,
    )  # fmt: skip


def _own_tiles(dbias: Tensor, sizes: Sizes) -> tuple[Arguments, bool]:
    """The grid is the bias's own tiles; a dimension it is broadcast in is walked by each program. And whether it has rows."""
    dbias = four_dims(dbias)
    wide_b, wide_h, wide_i, _ = (n > 1 for n in dbias.shape)
    strides = dict(zip(("dbias_b", "dbias_h", "dbias_i", "dbias_j"), dbias.stride(), strict=True))
    steps = {"b_step": sizes.batch if wide_b else 1, "h_step": sizes.hq if wide_h else 1, "batch": sizes.batch}
    return {"dbias": dbias} | strides | steps, wide_i


def _launch(
    kernel: Any, name: str, sizes: Sizes, q: Tensor, grid: Callable[[Tile], tuple[Arguments, tuple[int, ...]]],
    arguments: Arguments, constants: Arguments,
) -> None:  # fmt: skip
    """Run `kernel` with the first tile of the table whose shared memory the device has."""
    tiles = tiles_for(name, sizes, q.dtype, q.device)
    if constants["ALIGN"] == 1 and q.element_size() == 2 and architecture(q.device) != INTERPRETER:
        tiles = UNALIGNED
    if not all(grid(tiles[0])[1]):
        return
    absent = tuple(argument for argument, x in arguments.items() if x is None)
    bias = arguments["bias"]
    key = (kernel, name, q.device, q.dtype, absent, bias is not None and bias.dtype, tiles[0], *constants.values())
    fit = fits.get(key)
    if fit is None:
        tile, compiled = _first_that_fits(kernel, tiles, grid, arguments, constants, q.device)
        fit = fits[key] = Fit(name, tile, compiled)
    more, programs = grid(fit.tile)
    kernel[programs](**arguments, **more, **constants, **_meta(fit.tile))


class Fit(NamedTuple):
    """A specialisation that ran: the tile it was given, and Triton's compiled kernel (None in the interpreter)."""

    kernel: str
    tile: Tile
    compiled: Any


fits: dict[tuple[Any, ...], Fit] = {}


def _first_that_fits(
    kernel: Any, tiles: tuple[Tile, ...], grid: Callable[[Tile], tuple[Arguments, tuple[int, ...]]],
    arguments: Arguments, constants: Arguments, device: torch.device,
) -> tuple[Tile, Any]:  # fmt: skip
    if architecture(device) == INTERPRETER:
        return tiles[0], None
    needed = {}
    for tile in tiles:
        more, programs = grid(tile)
        compiled = kernel.warmup(**arguments, **more, **constants, **_meta(tile), grid=programs)
        needed[tile] = compiled.metadata.shared
        if needed[tile] <= shared_memory_bytes(device):
            return tile, compiled
    raise ValueError(
        f"device: got {device}, which gives a program {shared_memory_bytes(device)} bytes of shared memory; accepted: "
        f"at least {min(needed.values())} for head dimension {constants['D']}; kernel='tiled' needs none"
    )


def _meta(tile: Tile) -> Arguments:
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "num_warps": tile.warps, "num_stages": tile.stages}


def _features(sizes: Sizes, mask: Mask, scratch: Scratch, exact: bool) -> Arguments:
    """What every kernel is told about the scores, in its own names."""
    bias, slopes, seed = mask.bias, mask.alibi_slopes, mask.seed
    unit = 1.0 if exact else LOG2E
    strides = dict.fromkeys(("bias_b", "bias_h", "bias_i", "bias_j", "slopes_b", "slopes_h"), 0)
    if bias is not None:
        bias = four_dims(bias.view(torch.uint8) if bias.dtype == torch.bool else bias)
        for name, stride, n in zip(strides, bias.stride(), bias.shape, strict=False):
            strides[name] = stride if n > 1 else 0
    if slopes is not None:
        strides |= {"slopes_b": slopes.stride(0) if slopes.ndim == 2 else 0, "slopes_h": slopes.stride(-1)}
    if isinstance(seed, int) and mask.dropout_p:
        seed = scratch["seed"].fill_(seed - 2**64 if seed >= 2**63 else seed)
    return strides | {
        "cu_seqlens_q": mask.cu_seqlens_q, "cu_seqlens_k": mask.cu_seqlens_k, "bias": bias, "slopes": slopes,
        "seed": seed if mask.dropout_p else None, "threshold": threshold(mask.dropout_p),
        "inv_keep": 1.0 / (1.0 - mask.dropout_p),
        "heads": sizes.hq, "group": sizes.hq // sizes.hkv, "tq": sizes.tq, "tk": sizes.tk,
        "left": sizes.left, "right": sizes.right,
        "factor": max(abs(mask.scale_for(sizes.d)) * unit, LEAST_FACTOR),
        "softcap": mask.softcap * unit if mask.softcap else None,
    }  # fmt: skip


def _constants(sizes: Sizes, mask: Mask, q: Tensor, *others: Tensor | None) -> Arguments:
    return {
        "D": sizes.d, "DV": sizes.dv, "BLOCK_D": sizes.block_d, "BLOCK_DV": sizes.block_dv,
        "ALIGN": _align(mask.varlen, q, *others), "WIDE": _wide(mask.varlen, q, *others),
        "NEGATIVE": mask.scale_for(sizes.d) < 0.0, "EXACT": _exact(q.dtype),
        "DOUBLE": product_bits(q.dtype, q.device) == 64,
    }  # fmt: skip


def _exact(dtype: torch.dtype) -> bool:
    """float32, and torch does not allow tf32 in its stead."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision != "tf32"


def _bht(x: Tensor, varlen: bool) -> tuple[int, int, int]:
    """Strides over sequences, heads and rows; packed sequences have no stride between them."""
    return (0, x.stride(1), x.stride(0)) if varlen else (x.stride(0), x.stride(1), x.stride(2))


def _strides(varlen: bool, **tensors: Tensor | None) -> Arguments:
    out: Arguments = {}
    for name, x in tensors.items():
        out |= dict(
            zip((f"{name}_b", f"{name}_h", f"{name}_t"), (0, 0, 0) if x is None else _bht(x, varlen), strict=True)
        )
    return out


def _row_strides(varlen: bool, **tensors: Tensor | None) -> Arguments:
    """The same for lse and its like, (B, Hq, Tq) or (Hq, total)."""
    out: Arguments = {}
    for name, x in tensors.items():
        strides = (0, 0, 0) if x is None else (0, *x.stride()) if varlen else x.stride()
        out |= dict(zip((f"{name}_b", f"{name}_h", f"{name}_t"), strides, strict=True))
    return out


def _align(varlen: bool, *tensors: Tensor | None) -> int:
    """Elements that every row begins at a multiple of: ALIGNED_BYTES in q's dtype, or 1."""
    given = [x for x in tensors if x is not None]
    elements = ALIGNED_BYTES // given[0].element_size()
    steps = all(stride % elements == 0 for x in given for stride in _bht(x, varlen))
    return elements if steps and all(x.data_ptr() % ALIGNED_BYTES == 0 for x in given) else 1


def _wide(varlen: bool, *tensors: Tensor | None) -> bool:
    """True if an offset inside a tile of 256 rows leaves 32 bits."""
    return any(256 * _bht(x, varlen)[2] >= 2**31 for x in tensors if x is not None)
