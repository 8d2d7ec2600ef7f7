"""Attention in Triton: the launches of forward.py and backward.py, on the host.

Supports float16, bfloat16 and float32. GEMMs of float32 use tf32 only if torch.backends.cuda.matmul allows it; otherwise
float64, or IEEE float32 on devices with slow float64. Kernels are specialised on features, head dimensions and 16-byte
alignment of rows, not on sizes and strides. Nothing is allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...cuda_launch import Plan
from ...gpu import ceil_div, multiprocessors
from ...scratch import Scratch, Shapes, Views
from ..mask import Mask, four_dims
from ..problem import FEW_ROWS, Backward, Forward, Sizes, output_shapes, row_strides, sizes_of
from .arguments import (
    Arguments,
    addressing,
    column_arguments,
    exponent_arguments,
    forward_sink_arguments,
    ieee_fp32,
    is_plain,
    list_arguments,
    lse_stride_arguments,
    pairs_of,
    score_arguments,
    sequence_arguments,
    sink_arguments,
    stride_arguments,
)
from .backward import _dbias_kernel, _dbias_rows_kernel, _delta_kernel, _dkdv_kernel, _dq_kernel, _dsinks_kernel
from .fit import KernelCall, architecture, fitted, product_bits, separate_dk_dv, tiles_for
from .forward import _attention_fwd_kernel, _combine_kernel
from .lists import list_calls, list_shapes
from .tiles import INTERPRETER, LEAST, SPLIT, Tile

ROWS = 64  # rows per program of the kernels without GEMMs
MOST_SPLITS = 64
MOST_SEQUENCES = 65535  # limit of the third axis of a grid


def _forward_kernel(sizes: Sizes) -> str:
    return "decode" if sizes.tq <= FEW_ROWS else "fwd"


def splits_for(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> int:
    """How many programs share the columns of a row tile: enough for two programs per multiprocessor, each with at least two
    tiles. If Tk < 4 Tq, as in training, it is always 1, because otherwise a smaller batch would need more scratch."""
    if sizes.tk < 4 * sizes.tq:
        return 1
    tile = tiles_for(_forward_kernel(sizes), sizes, dtype, device)[0]
    programs = ceil_div(sizes.tq, tile.m) * sizes.hq * sizes.batch
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
    shapes |= list_shapes(sizes, mask, LEAST)  # fit.py may replace a tile by a smaller one
    if backward:
        return shapes | {"delta": (lse_shape, torch.float32), "row_lse": (lse_shape, torch.float32)}
    splits = splits_for(sizes, q.dtype, q.device)
    if splits > 1:
        dtype = torch.float64 if product_bits(q.dtype, q.device) == 64 else torch.float32
        shapes |= {"o_parts": ((splits, *o_shape), dtype), "lse_parts": ((splits, *lse_shape), dtype)}
    return shapes


def _with_lists(
    calls: list[KernelCall], scratch: Scratch, sizes: Sizes, mask: Mask, *, columns: bool
) -> list[KernelCall]:
    """The calls that list which tiles each tile of a kernel visits (none without intervals), then `calls` of the kernel."""
    if mask.intervals is None or not calls:
        return calls
    m, n = (calls[0].arguments[name] for name in ("BLOCK_M", "BLOCK_N"))
    return [*list_calls(scratch, sizes, mask, m, n, columns=columns), *calls]


def _constants(sizes: Sizes, mask: Mask, q: Tensor, *others: Tensor | None) -> Arguments:
    """The constexprs that all kernels with scores share."""
    place = addressing(q, *others, varlen=mask.varlen)
    columns = column_arguments(place["ALIGN"], d=(sizes.d, sizes.block_d), dv=(sizes.dv, sizes.block_dv))
    return (
        place
        | columns
        | {
            "BLOCK_D": sizes.block_d,
            "BLOCK_DV": sizes.block_dv,
            "IEEE_FP32": ieee_fp32(q.dtype),
            "FP64": product_bits(q.dtype, q.device) == 64,
            "PAIRS": pairs_of(mask),
        }
    )


Call = TypeVar("Call", Forward, Backward)


def _prepared(
    call: Call, views: Views, kernel_calls: Callable[[Call, Scratch], list[KernelCall]]
) -> Callable[[Call], None]:
    """A plan of launches. In the interpreter, or if only Triton can launch a kernel, a function that calls Triton."""

    def run(call: Call) -> None:
        with torch.cuda.device_of(call.q):
            for each in kernel_calls(call, views(*call.memory)):
                each.run()

    if architecture(call.q.device) == INTERPRETER:
        return run
    with torch.cuda.device_of(call.q):
        device = torch.cuda.current_device()
        launches = [each.launch(device) for each in kernel_calls(call, views(*call.memory))]
    biases: tuple[Tensor | None, ...] = (call.mask.bias, getattr(call, "dbias", None))
    viewed = [*call.memory, *(x for x in biases if x is not None)]
    ready = [launch for launch in launches if launch is not None]
    return Plan(ready, call, viewed, device) if len(ready) == len(launches) else run


def prepare_fwd(call: Forward, views: Views) -> Callable[[Forward], None]:
    return _prepared(call, views, _forward)


def prepare_bwd(call: Backward, views: Views) -> Callable[[Backward], None]:
    return _prepared(call, views, _backward)


def compile_bwd(call: Backward, scratch: Scratch) -> tuple[Callable[[], None], ...]:
    """Functions that together compile the kernels of a backward. Each may run in its own thread."""

    def compile(part: Backward) -> None:
        with torch.cuda.device_of(call.q):
            for each in _backward(part, scratch):
                each.compile()

    parts = call._replace(dq=None), call._replace(dk=None, dv=None, dbias=None, dsinks=None)
    return tuple(functools.partial(compile, part) for part in parts)


def _forward(call: Forward, scratch: Scratch) -> list[KernelCall]:
    q, k, v, mask, o, lse, _, invariant = call
    sizes = sizes_of(q, k, v, mask)
    splits = 1 if invariant else splits_for(sizes, q.dtype, q.device)
    scores = score_arguments(sizes, mask, scratch)
    if is_plain(mask):  # the kernel negates q for a negative factor
        scores["factor"] = abs(scores["factor"])
    scores |= exponent_arguments(abs(scores["factor"]), q.dtype)
    if splits == 1:
        out = Output(o, lse, o, lse, 0, 0)
        return _attend(q, k, v, mask, sizes, scores, out, splits, scratch, invariant=invariant)
    o_parts, lse_parts = scratch["o_parts"], scratch["lse_parts"]
    parts = Output(o_parts, lse_parts, o_parts[0], lse_parts[0], o_parts.stride(0), lse_parts.stride(0))
    calls = _attend(q, k, v, mask, sizes, scores, parts, splits, scratch)
    return [*calls, _combine(parts, mask, sizes, splits, o, lse, ieee=ieee_fp32(q.dtype))]


class Output(NamedTuple):
    """o and lse of all splits, o and lse of the first split, and the strides between splits."""

    o: Tensor | None
    lse: Tensor | None
    one_o: Tensor | None
    one_lse: Tensor | None
    o_s: int
    lse_s: int


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    sizes: Sizes,
    scores: Arguments,
    out: Output,
    splits: int,
    scratch: Scratch,
    *,
    invariant: bool = False,
) -> list[KernelCall]:
    runs = None if invariant else scratch.get("runs")  # rows of an invariant problem visit every tile of the band
    arguments = (
        {"q": q, "k": k, "v": v, "o": out.o, "lse": out.lse, "heads": sizes.hq, "splits": splits}
        | scores
        | sequence_arguments(mask)
        | forward_sink_arguments(mask, sizes.hq, out.lse)
        | stride_arguments(varlen=mask.varlen, q=q, k=k, v=v, o=out.one_o)
        | lse_stride_arguments(varlen=mask.varlen, lse=out.one_lse)
        | {"o_s": out.o_s, "lse_s": out.lse_s}
    )

    def grid(tile: Tile) -> tuple[Arguments, tuple[int, int]]:
        row_tiles = ceil_div(sizes.tq, tile.m)
        more = {"row_tiles": row_tiles} | list_arguments(mask, runs, row_tiles)
        return more, (row_tiles * sizes.hq * sizes.batch, splits)

    constants = _constants(sizes, mask, q, k, v, out.one_o) | {
        "NEGATIVE": is_plain(mask) and mask.scale_for(sizes.d) < 0.0,
        "SPLIT": SPLIT if invariant else 0,
    }
    name = "ordered" if invariant else _forward_kernel(sizes)
    calls = fitted(_attention_fwd_kernel, name, sizes, q, grid, arguments, constants)
    return calls if runs is None else _with_lists(calls, scratch, sizes, mask, columns=False)


def _combine(
    parts: Output, mask: Mask, sizes: Sizes, splits: int, o: Tensor | None, lse: Tensor | None, *, ieee: bool
) -> KernelCall:
    row_tiles = ceil_div(sizes.tq, FEW_ROWS)
    arguments = dict(
        parts=parts.o,
        lse_parts=parts.lse,
        cu_seqlens_q=mask.cu_seqlens_q,
        o=o,
        lse=lse,
        **stride_arguments(varlen=mask.varlen, parts=parts.one_o, o=o),
        parts_s=parts.o_s,
        **lse_stride_arguments(varlen=mask.varlen, lse_parts=parts.one_lse, lse=lse),
        lse_parts_s=parts.lse_s,
        heads=sizes.hq,
        row_tiles=row_tiles,
        tq=sizes.tq,
        splits=splits,
        **column_arguments(1, dv=(sizes.dv, sizes.block_dv)),
        BLOCK_DV=sizes.block_dv,
        BLOCK_M=FEW_ROWS,
        IEEE_FP32=ieee,
    )
    return KernelCall(_combine_kernel, (row_tiles * sizes.hq * sizes.batch,), arguments, {})


def _backward(call: Backward, scratch: Scratch) -> list[KernelCall]:
    q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, _, _ = call
    sizes, ieee = sizes_of(q, k, v, mask), ieee_fp32(q.dtype)
    delta, row_lse = scratch["delta"], scratch["row_lse"]
    rows_b, rows_h = (0, delta.stride(0)) if mask.varlen else delta.stride()[:2]
    rows: Arguments = {"delta": delta, "row_lse": row_lse, "rows_b": rows_b, "rows_h": rows_h}
    scores = (
        {"q": q, "k": k, "v": v, "do": do}
        | rows
        | score_arguments(sizes, mask, scratch)
        | stride_arguments(varlen=mask.varlen, q=q, k=k, v=v, do=do)
    )
    calls = _delta(o, lse, do, dlse, mask, sizes, rows)
    if separate_dk_dv(sizes, q.dtype, q.device):
        calls += _columns("dk", scores, sizes, mask, scratch, dk=dk, dv=None)
        calls += _columns("dv", scores, sizes, mask, scratch, dk=None, dv=dv)
    else:
        calls += _columns("dkdv", scores, sizes, mask, scratch, dk=dk, dv=dv)
    if dq is not None:
        calls += _dq(scores, sizes, mask, scratch, dq)
    if dbias is not None and dbias.numel():
        tiles = tiles_of_bias(dbias, sizes)
        if tiles.dbias.shape[-1] > 1:
            calls += _dbias(scores, sizes, mask, tiles)
        else:
            calls.append(_dbias_rows(rows, sizes, mask, dlse, tiles, ieee=ieee))
    if dsinks is not None and mask.sinks is not None:
        arguments = dict(
            **rows,
            **sink_arguments(mask),
            cu_seqlens_q=mask.cu_seqlens_q,
            dsinks=dsinks,
            dsinks_h=dsinks.stride(0),
            batch=sizes.batch,
            tq=sizes.tq,
            BLOCK=1024,
            IEEE_FP32=ieee,
        )
        calls.append(KernelCall(_dsinks_kernel, (sizes.hq,), arguments, {}))
    return calls


def _delta(
    o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, sizes: Sizes, rows: Arguments
) -> list[KernelCall]:
    rows_of_program = ROWS if sizes.block_dv <= 256 else ROWS // 4  # so that no register spills
    row_tiles = ceil_div(sizes.tq, rows_of_program)
    if not row_tiles * sizes.hq * sizes.batch:
        return []
    place = addressing(o, do, varlen=mask.varlen)
    arguments = dict(
        o=o,
        do=do,
        lse=lse,
        dlse=lse if dlse is None else dlse,  # any tensor: without dlse it is not read
        has_dlse=int(dlse is not None),
        cu_seqlens_q=mask.cu_seqlens_q,
        **rows,
        **stride_arguments(varlen=mask.varlen, o=o, do=do),
        **lse_stride_arguments(varlen=mask.varlen, lse=lse, dlse=dlse),
        heads=sizes.hq,
        row_tiles=row_tiles,
        tq=sizes.tq,
        **column_arguments(place["ALIGN"], dv=(sizes.dv, sizes.block_dv)),
        BLOCK_DV=sizes.block_dv,
        BLOCK_M=rows_of_program,
        **place,
        IEEE_FP32=ieee_fp32(o.dtype),
    )
    return [KernelCall(_delta_kernel, (row_tiles * sizes.hq * sizes.batch,), arguments, {})]


def _columns(
    kernel: str, scores: Arguments, sizes: Sizes, mask: Mask, scratch: Scratch, *, dk: Tensor | None, dv: Tensor | None
) -> list[KernelCall]:
    """dk, dv or both. More than MOST_SEQUENCES sequences take several launches."""
    calls: list[KernelCall] = []
    if dk is None and dv is None:
        return calls
    q, k, v, do = (scores[name] for name in ("q", "k", "v", "do"))
    arguments = (
        {"dk": dk, "dv": dv, "scale": mask.scale_for(sizes.d)}
        | scores
        | sequence_arguments(mask)
        | stride_arguments(varlen=mask.varlen, dk=dk, dv=dv)
        | {"group": None if sizes.group == 1 else sizes.group}
    )
    constants = _constants(sizes, mask, q, k, v, do, dk, dv)
    same_step = row_strides(q, varlen=mask.varlen)[2] == row_strides(do, varlen=mask.varlen)[2]
    constants["SAME_OFFSETS"] = sizes.block_d == sizes.block_dv and same_step
    for first_b in range(0, sizes.batch, MOST_SEQUENCES):

        def grid(
            tile: Tile, count: int = min(MOST_SEQUENCES, sizes.batch - first_b)
        ) -> tuple[Arguments, tuple[int, ...]]:
            col_tiles = ceil_div(sizes.tk, tile.n)
            more = {"DUPLICATES": max(1, 32 * tile.warps // tile.m)}
            return more | list_arguments(mask, scratch.get("runs"), col_tiles), (col_tiles, sizes.hkv, count)

        calls += fitted(_dkdv_kernel, kernel, sizes, q, grid, arguments | {"first_b": first_b}, constants)
    return _with_lists(calls, scratch, sizes, mask, columns=True)


def _dq(scores: Arguments, sizes: Sizes, mask: Mask, scratch: Scratch, dq: Tensor) -> list[KernelCall]:
    q, k, v, do = (scores[name] for name in ("q", "k", "v", "do"))
    arguments = (
        {"dq": dq, "scale": mask.scale_for(sizes.d), "heads": sizes.hq}
        | scores
        | sequence_arguments(mask)
        | stride_arguments(varlen=mask.varlen, dq=dq)
    )

    def grid(tile: Tile) -> tuple[Arguments, tuple[int]]:
        row_tiles = ceil_div(sizes.tq, tile.m)
        more = {"row_tiles": row_tiles} | list_arguments(mask, scratch.get("runs"), row_tiles)
        return more, (row_tiles * sizes.hq * sizes.batch,)

    calls = fitted(_dq_kernel, "dq", sizes, q, grid, arguments, _constants(sizes, mask, q, k, v, do, dq))
    return _with_lists(calls, scratch, sizes, mask, columns=False)


class BiasTiles(NamedTuple):
    """The grid of dbias: tiles of the bias. A program loops over the axes that the bias is broadcast over, in steps of b_step
    sequences and h_step heads."""

    dbias: Tensor  # 4-D
    b_step: int
    h_step: int
    has_rows: bool  # whether the bias is not broadcast over rows


def tiles_of_bias(dbias: Tensor, sizes: Sizes) -> BiasTiles:
    dbias = four_dims(dbias)
    has_b, has_h, has_rows, _ = (n > 1 for n in dbias.shape)
    return BiasTiles(dbias, sizes.batch if has_b else 1, sizes.hq if has_h else 1, has_rows)


def _dbias(scores: Arguments, sizes: Sizes, mask: Mask, tiles: BiasTiles) -> list[KernelCall]:
    q, k, v, do = (scores[name] for name in ("q", "k", "v", "do"))
    dbias_b, dbias_h, dbias_i, dbias_j = tiles.dbias.stride()
    arguments = scores | {
        "dbias": tiles.dbias,
        "dbias_b": dbias_b,
        "dbias_h": dbias_h,
        "dbias_i": dbias_i,
        "dbias_j": dbias_j,
        "batch": sizes.batch,
        "heads": sizes.hq,
        "b_step": tiles.b_step,
        "h_step": tiles.h_step,
    }

    def grid(tile: Tile) -> tuple[Arguments, tuple[int]]:
        row_tiles = ceil_div(sizes.tq, tile.m) if tiles.has_rows else 1
        col_tiles = ceil_div(sizes.tk, tile.n)
        return {"row_tiles": row_tiles, "col_tiles": col_tiles}, (row_tiles * col_tiles * tiles.b_step * tiles.h_step,)

    constants = _constants(sizes, mask, q, k, v, do) | {"SUM_ROWS": not tiles.has_rows}
    return fitted(_dbias_kernel, "dq", sizes, q, grid, arguments, constants)


def _dbias_rows(
    rows: Arguments, sizes: Sizes, mask: Mask, dlse: Tensor | None, tiles: BiasTiles, *, ieee: bool
) -> KernelCall:
    """dbias of a bias that is broadcast over columns."""
    row_tiles = ceil_div(sizes.tq, ROWS) if tiles.has_rows else 1
    dbias_b, dbias_h, dbias_i, _ = tiles.dbias.stride()
    arguments = dict(
        **rows,
        **sink_arguments(mask),
        dlse=dlse,
        **lse_stride_arguments(varlen=False, dlse=dlse),
        dbias=tiles.dbias,
        dbias_b=dbias_b,
        dbias_h=dbias_h,
        dbias_i=dbias_i,
        batch=sizes.batch,
        heads=sizes.hq,
        row_tiles=row_tiles,
        b_step=tiles.b_step,
        h_step=tiles.h_step,
        tq=sizes.tq,
        BLOCK=ROWS,
        SUM_ROWS=not tiles.has_rows,
        IEEE_FP32=ieee,
    )
    return KernelCall(_dbias_rows_kernel, (row_tiles * tiles.b_step * tiles.h_step,), arguments, {})
