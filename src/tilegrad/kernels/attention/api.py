"""The attention op: three functions that never allocate, whichever kernel runs.

Positional tensors are read, keyword-only tensors are written. Outputs are overwritten, except `dsinks`: a parameter's gradient
accumulates. An output that is None is not computed. `scratch` holds the buffers that `attention_workspace` declares.

No output may share memory with an input or with another output, not even in part. The error names both tensors. Inputs may
share memory (q is k), and outputs may be disjoint views of one buffer (dq, dk and dv as slices of dqkv).

    q (B, Hq, Tq, D)   k (B, Hkv, Tk, D)   v (B, Hkv, Tk, Dv)   o (B, Hq, Tq, Dv)   lse (B, Hq, Tq)
    packed sequences:  q (total_q, Hq, D) …                     o (total_q, Hq, Dv) lse (Hq, total_q)

lse is float32, or float64 for float64 inputs. dk and dv have q's dtype, or both are float32, because context.py sums them over
ranks. The equations are in mask.py (scores) and reference.py (the rest).

The table selects a kernel by q, k, v, the mask and, if they are given, o, do, dq, dk and dv. If a kernel can't read or write
the layout of one of these (hopper needs rows that start at multiples of 16 bytes), the next kernel runs. A caller with unusual
layouts passes these tensors to `attention_workspace` too. For a tensor that is not passed, `attention_workspace` assumes a
layout that every kernel supports.

For each signature a call is checked once, and its kernel is selected and prepared once. The signature has shapes, strides,
dtypes, devices, options, and the number of threads, on which the CPU kernel's scratch depends. A later call costs a dictionary
lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cache import remember
from ..checks import ALIGNED_BYTES, check_tensor
from ..cpu import library
from ..op import op
from ..overlap import check_apart
from ..scratch import Scratch, Shapes, Views, accumulation_dtype, separate, views
from ..table import Table
from . import table
from .checks import check_options, check_tensors, check_values
from .mask import MASK_TENSORS, Mask
from .problem import Backward, Forward, Problem, lse_dtype, output_shapes


def attention_workspace(
    q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, kernel: str | None = None, deterministic: bool = False,
    invariant: bool = False, o: Any = None, do: Any = None, dq: Any = None, dk: Any = None, dv: Any = None,
) -> Shapes:  # fmt: skip
    """Name → (shape, dtype) of each buffer in `scratch`. Reads shapes, dtypes, devices and, if present, strides and addresses,
    so handles of a memory trace are accepted too.

    A tensor among o, do, dq, dk and dv that is not passed counts as contiguous, with q's dtype.
    """
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    problem = Problem(q, k, v, mask, invariant=invariant and not backward, o=o, do=do, dq=dq, dk=dk, dv=dv)
    return table.ATTENTION.workspace(problem, kernel=kernel, backward=backward, deterministic=deterministic)


Signature = tuple[object, ...]
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
Run = Callable[[Any], None]  # takes a Forward, or a Backward
prepared_calls: dict[Signature, PreparedCall] = {}


def signature(call: tuple[object, ...], tensors: tuple[Any, ...], mask: Mask) -> Signature | None:
    """The cache key of a call: everything that its checks, selection and preparation depend on. The values of tensors are not
    in it.

    None if the call can't be cached, because it has a handle, a tensor subclass, a tensor with a pending negation or without
    memory, a window that is a list, or an int seed.
    """
    if mask.cache_key is None:
        return None
    key: list[object] = [mask.cache_key, *call]
    if mask.has_tensors:
        tensors += tuple(getattr(mask, name) for name in MASK_TENSORS)
        key.append(mask.alibi_slopes is not None and getattr(mask.alibi_slopes, "requires_grad", False))
    for x in tensors:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if x.is_neg() or x._is_zerotensor():
                return None
            key += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED_BYTES)
        elif x is None:
            key.append(None)
        else:
            return None
    if tensors[0].dtype is torch.float32 and tensors[0].is_cuda:
        key.append(torch.backends.cuda.matmul.fp32_precision)
    return tuple(key)


class Selection(NamedTuple):
    """The kernel that `table` selects for a call, and its scratch by the kernel's own names. If q, k, v and the mask alone
    would select another kernel, `instead` says why that kernel does not run; otherwise it is ""."""

    table: Table
    kernel: str
    module: ModuleType
    scratch: Shapes
    instead: str

    def prepare(self, call: Forward | Backward, views: Views) -> Run:
        """Returns run(call) for all calls of this signature whose scratch has the same layout.

        The kernel gets a separate object for each tensor: after attention(x, x, x) it must not assume that q is always k.
        """
        distinct = type(call)(*map(_new_tensors, call))
        prepare = self.module.prepare_fwd if isinstance(call, Forward) else self.module.prepare_bwd
        return prepare(distinct, views)  # type: ignore[no-any-return]


def _new_tensors(x: Any) -> Any:
    """x with every tensor, including those in a mask or a tuple, replaced by a new object on the same memory."""
    if isinstance(x, Mask):
        return replace(x, **{name: _new_tensors(getattr(x, name)) for name in MASK_TENSORS}) if x.has_tensors else x
    if isinstance(x, tuple):
        return tuple(map(_new_tensors, x))
    return x.detach() if isinstance(x, Tensor) else x


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A selected kernel, prepared for all calls of one signature. The other fields are for callers that allocate: the shapes,
    strides and dtypes of o and lse, whether torch.empty_like(q) is right for o, and the bytes of all scratch in one buffer."""

    selection: Selection
    run: Run
    outputs: tuple[Form, ...] = ()
    o_like_q: bool = False
    work_bytes: int = 0


def recall(key: Signature | None) -> PreparedCall | None:
    """The cached call of a signature. None if there is none, or if the table has been replaced since."""
    prepared = None if key is None else prepared_calls.get(key)
    return prepared if prepared is not None and prepared.selection.table is table.ATTENTION else None


def keep(key: Signature | None, prepared: PreparedCall) -> PreparedCall:
    return prepared if key is None else remember(prepared_calls, key, prepared)


def forget() -> None:
    prepared_calls.clear()


def select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    others: Mapping[str, Tensor | None],
    kernel: str | None,
    *,
    backward: bool,
    deterministic: bool = False,
    invariant: bool = False,
) -> Selection:
    """Checks the tensors of a call and selects its kernel. `others` has the call's other tensors, or None, by name."""
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    if others:
        _check_others(q, k, v, mask, others)
    laid_out = {name: others.get(name) for name in ("o", "do", "dq", "dk", "dv")}
    problem = Problem(q, k, v, mask, invariant=invariant, **laid_out)
    row = table.ATTENTION.select(problem, kernel)
    if kernel is None and row.name == "tiled" and q.device.type == "cpu":
        library.warn_if_missing()
    module = row.load()
    scratch = module.workspace(*problem, backward=backward, deterministic=deterministic)
    first = table.ATTENTION.select(Problem(*problem, invariant=invariant), kernel) if problem.others else row
    instead = ""
    if first is not row:
        why = f"because {first.name!r} can't run this call: {first.refuses(problem)}"
        instead = f", given {', '.join(problem.others)} too, {why}"
    return Selection(table.ATTENTION, row.name, module, scratch, instead)


def _check_others(q: Tensor, k: Tensor, v: Tensor, mask: Mask, others: Mapping[str, Tensor | None]) -> None:
    """Checks shapes, dtypes and devices. dk and dv must have q's dtype, or both the accumulation dtype."""
    o_shape, lse_shape = output_shapes(q, v, mask)
    o, lse, dtype = (o_shape, q.dtype), (lse_shape, lse_dtype(q.dtype)), q.dtype
    dkv = next((x.dtype for x in (others.get("dk"), others.get("dv")) if x is not None), dtype)
    dkv = dkv if dkv == accumulation_dtype(dtype) else dtype
    expected = {"o": o, "lse": lse, "do": o, "dlse": lse, "dq": (tuple(q.shape), dtype)}
    expected |= {"dk": (tuple(k.shape), dkv), "dv": (tuple(v.shape), dkv)}
    if mask.float_bias is not None:
        expected["dbias"] = tuple(mask.float_bias.shape), mask.float_bias.dtype
    if mask.sinks is not None:
        expected["dsinks"] = (q.shape[1],), mask.sinks.dtype
    for name, x in others.items():
        if x is not None and name not in expected:
            raise ValueError(
                f"{name}: got a tensor; accepted: None, because this call has no {name[1:]} with a gradient"
            )
        if x is not None:
            check_tensor(name, x, *expected[name], q.device)


@op()
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *,
    o: Tensor | None, lse: Tensor | None, scratch: Scratch | None = None, kernel: str | None = None, invariant: bool = False,
) -> None:  # fmt: skip
    """Computes o and lse. The backward needs both. invariant: a row of o has the same bits in any batch, and in
    `cache_attention_fwd`; on a CPU only the kernel "native" is invariant."""
    key = signature(("fwd", kernel, torch.get_num_threads(), _aligned(scratch), invariant), (q, k, v, o, lse), mask)
    prepared, writes, options = recall(key), {"o": o, "lse": lse}, {"backward": False, "invariant": invariant}
    selection = prepared.selection if prepared else select(q, k, v, mask, writes, kernel, **options)
    _run(key, prepared, selection, Forward(q, k, v, mask, o, lse, (), invariant), writes, scratch)


@op(accumulates=("dsinks",))
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None = None, dsinks: Tensor | None = None,
    scratch: Scratch | None = None, kernel: str | None = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """Gradients of L given do = ∂L/∂o and dlse = ∂L/∂lse (None = 0)."""
    writes = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **writes}
    how = ("bwd", kernel, torch.get_num_threads(), _aligned(scratch), deterministic)
    key = signature(how, (q, k, v, *others.values()), mask)
    prepared = recall(key)
    if prepared:
        selection = prepared.selection
    else:
        selection = select(q, k, v, mask, others, kernel, backward=True, deterministic=deterministic)
    call = Backward(q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, (), deterministic)
    _run(key, prepared, selection, call, writes, scratch)


_checked: dict[tuple[object, ...], bool] = {}  # addresses of calls whose outputs share no memory with other tensors


def _aligned(scratch: Scratch | None) -> bool:
    """Whether all scratch is aligned. Triton specialises on this, so it is in the signature. `views` checks everything else."""
    buffers = () if scratch is None else scratch.values()
    return not any(x.data_ptr() % ALIGNED_BYTES for x in buffers if isinstance(x, Tensor))


def _run(
    key: Signature | None,
    prepared: PreparedCall | None,
    selection: Selection,
    call: Forward | Backward,
    writes: dict[str, Tensor | None],
    scratch: Scratch | None,
) -> None:
    """Checks what the signature does not cover: addresses, lengths and scratch. Prepares a new call, and runs it."""
    addresses = (prepared, *[x.data_ptr() for x in call.tensors])
    if prepared is None or addresses not in _checked:
        reads = {name: x for name, x in call._asdict().items() if name not in writes}
        check_apart(writes, reads | {name: getattr(call.mask, name) for name in MASK_TENSORS})
        if prepared is not None:
            remember(_checked, addresses, value=True)
    check_values(call.q, call.k, call.mask)
    device = call.q.device
    needed = views(scratch, selection.scratch, device, "attention", kernel=selection.kernel, more=selection.instead)
    if not any(x is not None for x in writes.values()):
        return
    call = call._replace(memory=tuple(needed.values()))
    if prepared is None:
        prepared = keep(key, PreparedCall(selection, selection.prepare(call, separate(selection.scratch))))
    prepared.run(call)
