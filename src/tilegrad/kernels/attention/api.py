"""The attention op: three functions that never allocate, whichever kernel runs.

Positional tensors are read, keyword-only tensors are written. Outputs overwrite; `dsinks` accumulates, for it is a
parameter's gradient. An output given as None is not computed. `scratch` holds what `attention_workspace` declares.

No output may share memory with an input or with another output, in whole or in part: every such call is refused by name. Inputs
may share memory (q is k), and outputs may be views of one buffer among which no number belongs to two (dq, dk and dv as slices
of dqkv).

    q (B, Hq, Tq, D)   k (B, Hkv, Tk, D)   v (B, Hkv, Tk, Dv)   o (B, Hq, Tq, Dv)   lse (B, Hq, Tq)
    packed sequences:  q (total_q, Hq, D) …                     o (total_q, Hq, Dv) lse (Hq, total_q)

lse is float32, float64 for float64 inputs. dk and dv have q's dtype; as parts of a sum (context.py) both may be float32.
The equations are in mask.py (scores) and reference.py (the rest).

The table selects by q, k, v and the mask, and by o, do, dq, dk and dv where they are given: where a kernel can't read or write
one as it lies (hopper: rows off multiples of 16 bytes), the next one runs. Whoever declares scratch for such buffers gives them
to `attention_workspace` too; without them it takes for granted that every kernel can.

A call is checked and a kernel selected once for each signature (shapes, strides, dtypes, devices, options, and the number of
threads, with which scratch on the CPU grows). A training step or a decoding loop then pays for a dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..cache import remember
from ..checks import check_given
from ..cpu import library
from ..op import op
from ..overlap import check_apart
from ..scratch import Scratch, Shapes, Views, accumulation_dtype, separate, views
from ..table import Table
from . import table
from .checks import check_lengths, check_options, check_tensors
from .mask import Mask
from .problem import ALIGNED_BYTES, Backward, Forward, Problem, lse_dtype, output_shapes


def attention_workspace(
    q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, kernel: str | None = None, deterministic: bool = False,
    o: Any = None, do: Any = None, dq: Any = None, dk: Any = None, dv: Any = None,
) -> Shapes:  # fmt: skip
    """Name → (shape, dtype) of what `scratch` must hold. Reads only shapes, dtypes, devices, and strides and addresses where
    there are any: handles will do.

    o, do, dq, dk and dv are the call's, where they are known and may lie as not every kernel can read or write them. Those
    left out count as contiguous, of q's dtype.
    """
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    problem = Problem(q, k, v, mask, o=o, do=do, dq=dq, dk=dk, dv=dv)
    return table.ATTENTION.workspace(problem, kernel=kernel, backward=backward, deterministic=deterministic)


Signature = tuple[object, ...]
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
Run = Callable[[Any], None]  # of a Forward, or of a Backward
_prepared: dict[Signature, PreparedCall] = {}
_MASK_TENSORS = ("bias", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k")


def signature(call: tuple[object, ...], tensors: tuple[Any, ...], mask: Mask) -> Signature | None:
    """All that the checks, the selection and the preparation of a kernel depend on; None where a call has none (handles,
    subclasses, tensors with a pending negation or without memory, lists, an int seed).

    Values of tensors are no part of it.
    """
    if mask.cache_key is None:
        return None
    key: list[object] = [mask.cache_key, *call]
    if mask.has_tensors:
        tensors += (mask.bias, mask.alibi_slopes, mask.sinks, mask.seed, mask.cu_seqlens_q, mask.cu_seqlens_k)
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
    """The kernel that `table` selects for a call, and the scratch that it needs, under its own names. `instead`: why it is not
    the kernel that q, k, v and the mask alone select, if so."""

    table: Table
    kernel: str
    module: ModuleType
    scratch: Shapes
    instead: str

    def prepare(self, call: Forward | Backward, views: Views) -> Run:
        """run(call) for all calls of this signature, with scratch in memory of the same layout.

        A kernel gets each tensor as an object of its own: from attention(x, x, x) it must not learn that q is k.
        """
        own = type(call)(*map(_own, call))
        prepare = self.module.prepare_fwd if isinstance(call, Forward) else self.module.prepare_bwd
        return prepare(own, views)  # type: ignore[no-any-return]


def _own(x: Any) -> Any:
    """Tensors, also those of a mask, as other objects at the same address."""
    if isinstance(x, Mask):
        return replace(x, **{name: _own(getattr(x, name)) for name in _MASK_TENSORS}) if x.has_tensors else x
    if isinstance(x, tuple):
        return tuple(map(_own, x))
    return x.detach() if isinstance(x, Tensor) else x


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A selected kernel that is ready for all calls of one signature, and what a caller that allocates allocates for it: the
    forms of o and lse, whether o is as torch.empty_like(q), and the bytes of one buffer for all scratch."""

    selection: Selection
    run: Run
    outputs: tuple[Form, ...] = ()
    o_like_q: bool = False
    work_bytes: int = 0


def recall(key: Signature | None) -> PreparedCall | None:
    """The prepared call of a signature, if the table is still the one that it was selected from."""
    found = None if key is None else _prepared.get(key)
    return found if found is not None and found.selection.table is table.ATTENTION else None


def keep(key: Signature | None, prepared: PreparedCall) -> PreparedCall:
    return prepared if key is None else remember(_prepared, key, prepared)


def forget() -> None:
    """Forgets all prepared calls."""
    _prepared.clear()


def _select(problem: Problem, kernel: str | None, *, backward: bool, deterministic: bool) -> Selection:
    row = table.ATTENTION.select(problem, kernel)
    if kernel is None and row.name == "tiled" and problem.q.device.type == "cpu":
        library.warn_if_missing()
    module = row.load()
    scratch = module.workspace(*problem, backward=backward, deterministic=deterministic)
    first = table.ATTENTION.select(Problem(*problem), kernel) if problem.others else row
    instead = ""
    if first is not row:
        given = ", ".join(problem.others)
        instead = f", given {given} too, because {first.name!r} can't run this call: {first.refuses(problem)}"
    return Selection(table.ATTENTION, row.name, module, scratch, instead)


def _checked_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse of a call whose inputs pass the checks."""
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    return output_shapes(q, v, mask)


def select_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, kernel: str | None
) -> Selection:
    """Checks a forward's tensors and selects its kernel."""
    o_shape, lse_shape = _checked_shapes(q, k, v, mask)
    check_given(q.device, ("o", o, o_shape, q.dtype), ("lse", lse, lse_shape, lse_dtype(q.dtype)))
    return _select(Problem(q, k, v, mask, o=o), kernel, backward=False, deterministic=False)


@op()
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *,
    o: Tensor | None, lse: Tensor | None, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """o and lse of the call. lse is what the backward needs next to o."""
    key = signature(("fwd", kernel, torch.get_num_threads(), _aligned(scratch)), (q, k, v, o, lse), mask)
    prepared = recall(key)
    selection = prepared.selection if prepared else select_fwd(q, k, v, mask, o=o, lse=lse, kernel=kernel)
    call = Forward(q, k, v, mask, o, lse, ())
    _run(key, prepared, selection, call, {"o": o, "lse": lse}, scratch)


def select_bwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, others: dict[str, Tensor | None], *,
    kernel: str | None, deterministic: bool,
) -> Selection:  # fmt: skip
    """The same for a backward; `others` are o, lse, do, dlse and the gradients by name."""
    o_shape, lse_shape = _checked_shapes(q, k, v, mask)
    bias, sinks = mask.float_bias, mask.sinks
    for name, like in (("dbias", bias), ("dsinks", sinks)):
        if others[name] is not None and like is None:
            raise ValueError(
                f"{name}: got a tensor; accepted: None, because this call has no {name[1:]} with a gradient"
            )
    dkv_dtype = next((x.dtype for x in (others["dk"], others["dv"]) if x is not None), q.dtype)
    if dkv_dtype != accumulation_dtype(q.dtype):
        dkv_dtype = q.dtype
    check_given(
        q.device,
        ("o", others["o"], o_shape, q.dtype),
        ("lse", others["lse"], lse_shape, lse_dtype(q.dtype)),
        ("do", others["do"], o_shape, q.dtype),
        ("dlse", others["dlse"], lse_shape, lse_dtype(q.dtype)),
        ("dq", others["dq"], tuple(q.shape), q.dtype),
        ("dk", others["dk"], tuple(k.shape), dkv_dtype),
        ("dv", others["dv"], tuple(v.shape), dkv_dtype),
    )
    if bias is not None:
        check_given(q.device, ("dbias", others["dbias"], tuple(bias.shape), bias.dtype))
    if sinks is not None:
        check_given(q.device, ("dsinks", others["dsinks"], (q.shape[1],), sinks.dtype))
    problem = Problem(q, k, v, mask, **{name: others[name] for name in ("o", "do", "dq", "dk", "dv")})
    return _select(problem, kernel, backward=True, deterministic=deterministic)


@op(accumulates=("dsinks",))
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None = None, dsinks: Tensor | None = None,
    scratch: Scratch | None = None, kernel: str | None = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """Gradients of L given do = ∂L/∂o and dlse = ∂L/∂lse (None = 0)."""
    grads = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **grads}
    how = ("bwd", kernel, torch.get_num_threads(), _aligned(scratch), deterministic)
    key = signature(how, (q, k, v, *others.values()), mask)
    prepared = recall(key)
    if prepared:
        selection = prepared.selection
    else:
        selection = select_bwd(q, k, v, mask, others, kernel=kernel, deterministic=deterministic)
    call = Backward(q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, (), deterministic)
    _run(key, prepared, selection, call, grads, scratch)


_checked: dict[
    tuple[object, ...], bool
] = {}  # calls whose outputs share no memory with other tensors, by their addresses


def _aligned(scratch: Scratch | None) -> bool:
    """A part of the signature: Triton compiles for it. `views` checks the rest of scratch at each call."""
    buffers = () if scratch is None else scratch.values()
    return not any(x.data_ptr() % ALIGNED_BYTES for x in buffers if isinstance(x, Tensor))


def _run(
    key: Signature | None, prepared: PreparedCall | None, selection: Selection, call: Forward | Backward,
    writes: dict[str, Tensor | None], scratch: Scratch | None,
) -> None:  # fmt: skip
    """Checks what a signature does not say (addresses, lengths, scratch), and runs the prepared call."""
    addresses = (prepared, *[x.data_ptr() for x in call.tensors])
    if prepared is None or addresses not in _checked:
        reads = {name: x for name, x in call._asdict().items() if name not in writes}
        check_apart(writes, reads | {name: getattr(call.mask, name) for name in _MASK_TENSORS})
        if prepared is not None:
            remember(_checked, addresses, value=True)
    check_lengths(call.q, call.k, call.mask)
    device = call.q.device
    needed = views(scratch, selection.scratch, device, "attention", kernel=selection.kernel, more=selection.instead)
    if not any(x is not None for x in writes.values()):
        return
    call = call._replace(memory=tuple(needed.values()))
    if prepared is None:
        prepared = keep(key, PreparedCall(selection, selection.prepare(call, separate(selection.scratch))))
    prepared.run(call)
