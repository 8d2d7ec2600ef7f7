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
from dataclasses import replace
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
from ..scratch import Scratch, Shapes, accumulation_dtype, views
from ..table import Table
from . import table
from .checks import check_lengths, check_options, check_tensors
from .mask import Mask
from .problem import ALIGNED_BYTES, Problem, lse_dtype, output_shapes


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


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class Selected(NamedTuple):
    """The kernel that `table` selected for a signature, its functions, and the scratch it needs under its own names. `instead`:
    why it is not the one that q, k, v and the mask alone select, if so.

    Of a caller that allocates: the forms of o and lse, whether o is as torch.empty_like(q), the bytes of one buffer for all
    scratch, and the kernel prepared for the signature, where it can be. run(tensors, mask) takes the tensors that are there, in
    the order q, k, v, o, lse, do, dlse, the mask's, dq, dk, dv, dbias, dsinks, and that buffer.
    """

    table: Table
    kernel: str
    module: ModuleType
    scratch: Shapes
    apart: set[tuple[int, ...]]  # addresses of calls whose outputs share memory with nothing
    instead: str = ""
    forms: tuple[Form, ...] = ()
    o_like_q: bool = False
    work_bytes: int = 0
    run: Callable[..., None] | None = None

    def check_apart(self, tensors: tuple[Tensor | None, ...], mask: Mask) -> None:
        """No output shares memory with another tensor of the call, given as q, k, v, o, lse and, of a backward, do, dlse, dq,
        dk, dv, dbias, dsinks. What holds for addresses of a signature is remembered."""
        addresses = [x.data_ptr() for x in tensors if x is not None]
        if not mask.bare:
            addresses += [x.data_ptr() for x in mask.tensors]
        at = tuple(addresses)
        if at in self.apart:
            return
        named = dict(zip(_NAMES, tensors, strict=False))
        written = ("o", "lse") if len(tensors) == 5 else _GRADIENTS
        held = ("bias", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k")
        reads = {name: x for name, x in named.items() if name not in written} | {
            name: getattr(mask, name) for name in held
        }
        check_apart({name: named[name] for name in written}, reads)
        if len(self.apart) >= MOST_ADDRESSES:
            self.apart.clear()
        self.apart.add(at)

    def views(self, scratch: Scratch | None, device: torch.device) -> Scratch:
        return views(scratch, self.scratch, device, "attention", kernel=self.kernel, more=self.instead)

    def prepared(
        self, key: Signature | None, direction: str, new: tuple[Tensor, ...], work: Tensor, *reads: Any, **writes: Any
    ) -> Selected:
        """Of a caller that allocates `new` and `work`, remembered so; direction "fwd" or "bwd".

        A kernel's `prepare_…` gets each tensor as an object of its own: of attention(x, x, x) it must not learn that q is k.
        """
        prepare = None if key is None else getattr(self.module, f"prepare_{direction}", None)
        own_reads = [_own(x) for x in reads]
        own_writes = {name: _own(x) for name, x in writes.items()}
        selected = self._replace(
            forms=tuple((tuple(x.shape), x.stride(), x.dtype) for x in new),
            o_like_q=bool(new)
            and new[0].shape == reads[0].shape
            and new[0].stride() == torch.empty_like(reads[0]).stride(),
            work_bytes=work.numel(),
            run=None if prepare is None else prepare(*own_reads, **own_writes, work=work),
        )
        return selected if key is None else remember(_selected, key, selected)


def _own(x: Any) -> Any:
    """A tensor, or a mask with its tensors, as another object at the same address."""
    if isinstance(x, Mask):
        held = ("bias", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k")
        return x if x.bare else replace(x, **{name: _own(getattr(x, name)) for name in held})
    return x.detach() if isinstance(x, Tensor) else x


MOST_ADDRESSES = 256  # of one signature
_GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
_NAMES = ("q", "k", "v", "o", "lse", "do", "dlse", *_GRADIENTS)
Signature = tuple[object, ...]
_selected: dict[Signature, Selected] = {}


def signature(call: tuple[object, ...], tensors: tuple[Any, ...], mask: Mask) -> Signature | None:
    """All that the checks, the selection and the preparation of a kernel depend on; None where a call has none (handles,
    subclasses, tensors with a negation to come or without memory, lists, an int seed).

    Values of tensors are no part of it.
    """
    if mask.numbers is None:
        return None
    key: list[object] = [mask.numbers, *call]
    if not mask.bare:
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


def recall(key: Signature | None) -> Selected | None:
    """What was selected for a signature from the table of now."""
    found = None if key is None else _selected.get(key)
    return found if found is not None and found.table is table.ATTENTION else None


def forget() -> None:
    """Forgets what was selected; programs of eager.cpp stay."""
    _selected.clear()


def _select(
    key: Signature | None, problem: Problem, kernel: str | None, *, backward: bool, deterministic: bool
) -> Selected:
    row = table.ATTENTION.select(problem, kernel)
    if kernel is None and row.name == "tiled" and problem.q.device.type == "cpu":
        library.warn_if_missing()
    module = row.load()
    scratch = module.workspace(*problem, backward=backward, deterministic=deterministic)
    first = table.ATTENTION.select(Problem(*problem), kernel) if problem.others else row
    instead = ""
    if first is not row:
        instead = (
            f", given {', '.join(problem.others)} too, for {first.name!r} can't run this call: {first.refuses(problem)}"
        )
    selected = Selected(table.ATTENTION, row.name, module, scratch, set(), instead)
    return selected if key is None else remember(_selected, key, selected)


def _checked_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse of a call whose inputs pass the checks."""
    check_options(q, k, v, mask)
    check_tensors(q, k, v, mask)
    return output_shapes(q, v, mask)


def select_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, kernel: str | None
) -> Selected:
    """Checks a forward's tensors and selects its kernel, once for each signature."""
    key = signature(("fwd", kernel, torch.get_num_threads()), (q, k, v, o, lse), mask)
    selected = recall(key)
    if selected is not None:
        return selected
    o_shape, lse_shape = _checked_shapes(q, k, v, mask)
    check_given(q.device, ("o", o, o_shape, q.dtype), ("lse", lse, lse_shape, lse_dtype(q.dtype)))
    return _select(key, Problem(q, k, v, mask, o=o), kernel, backward=False, deterministic=False)


@op()
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *,
    o: Tensor | None, lse: Tensor | None, scratch: Scratch | None = None, kernel: str | None = None,
) -> None:  # fmt: skip
    """o and lse of the call. lse is what the backward needs next to o."""
    selected = select_fwd(q, k, v, mask, o=o, lse=lse, kernel=kernel)
    selected.check_apart((q, k, v, o, lse), mask)
    check_lengths(q, k, mask)
    selected.module.fwd(q, k, v, mask, o=o, lse=lse, scratch=selected.views(scratch, q.device))


def select_bwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, others: dict[str, Tensor | None], *,
    kernel: str | None, deterministic: bool,
) -> Selected:  # fmt: skip
    """The same for a backward; `others` are o, lse, do, dlse and the gradients by name."""
    key = signature(("bwd", kernel, deterministic, torch.get_num_threads()), (q, k, v, *others.values()), mask)
    selected = recall(key)
    if selected is not None:
        return selected
    o_shape, lse_shape = _checked_shapes(q, k, v, mask)
    bias, sinks = mask.float_bias, mask.sinks
    for name, like in (("dbias", bias), ("dsinks", sinks)):
        if others[name] is not None and like is None:
            raise ValueError(f"{name}: got a tensor; accepted: None, for this call has no {name[1:]} with a gradient")
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
        (
            "dbias",
            others["dbias"],
            tuple(bias.shape) if bias is not None else (),
            bias.dtype if bias is not None else q.dtype,
        ),
        ("dsinks", others["dsinks"], (q.shape[1],), sinks.dtype if sinks is not None else q.dtype),
    )
    problem = Problem(q, k, v, mask, **{name: others[name] for name in ("o", "do", "dq", "dk", "dv")})
    return _select(key, problem, kernel, backward=True, deterministic=deterministic)


@op(accumulates=("dsinks",))
def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None = None, dsinks: Tensor | None = None,
    scratch: Scratch | None = None, kernel: str | None = None, deterministic: bool = False,
) -> None:  # fmt: skip
    """Gradients of L given do = ∂L/∂o and dlse = ∂L/∂lse (None = 0)."""
    grads = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    others = {"o": o, "lse": lse, "do": do, "dlse": dlse, **grads}
    selected = select_bwd(q, k, v, mask, others, kernel=kernel, deterministic=deterministic)
    selected.check_apart((q, k, v, o, lse, do, dlse, dq, dk, dv, dbias, dsinks), mask)
    check_lengths(q, k, mask)
    selected.module.bwd(
        q, k, v, o, lse, do, dlse, mask, **grads,
        scratch=selected.views(scratch, q.device), deterministic=deterministic,
    )  # fmt: skip
