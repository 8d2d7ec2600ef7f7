"""The milliseconds of a training step by group, compared with the floor of each group: `python -m benchmarks.training
--breakdown`, and `python -m benchmarks.finetune --breakdown` for a step with adapters.

    floor of an op       max(FLOPs / FLOP rate, bytes / byte rate)          rates measured on an H200 (`Rates`)
    floor of a group     the sum over its ops (step_cost.py)
    gaps                 the span of the step − the time in which any kernel runs

The profiler lists the kernels of the device in order, with names and times. It knows no ops, because a replayed CUDA graph has
none. So the group of a kernel follows from its name:

    a kernel of tilegrad         its source file decides: a kernel in kernels/norm/ belongs to the norms
    a GEMM                       before the loss: forward. After the loss the layout decides, in cuBLAS's column-major terms: TN
                                 is x wᵀ (recomputed forward), NN or TT is dy w (dgrad), NT is dyᵀ x (wgrad). GEMMs next to a
                                 loss kernel belong to the head
    memset, split-K reduction    the group of its GEMM
    a kernel of torch            a word in its name decides

All other kernels are in the group "other", and the report lists their names.

The GEMMs of adapters have the same names as the GEMMs of the layers that they adapt. So the groups of the GEMMs of a step with
adapters follow from its ops, which a trace on handles lists in the order of the step (`products_of`). A product of joined
matrices, y = [x, u] [W, B]', counts as a product of the adapted layer, and joining them as "copies".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tilegrad import kernels
from tilegrad.bench.timing import Thunk
from tilegrad.kernels.op import Call, observe
from tilegrad.text.table import table

from .step_cost import Demand

OTHER = "other"
PRODUCTS = "all products"
GROUPS = (
    PRODUCTS, "GEMM forward", "GEMM dgrad", "GEMM wgrad", "head forward", "head dgrad", "head wgrad", "adapters forward",
    "adapters backward", "attention forward", "attention backward", "rope", "norms forward", "norms backward",
    "activation forward", "activation backward", "loss", "optimizer", "embeddings", "bias sums", "fp8 scaling", "dropout",
    "copies", OTHER,
)  # fmt: skip
_HOMES = {  # op of tilegrad → its group, or its groups forward and backward
    "activation": ("activation forward", "activation backward"), "adamw": ("optimizer",),
    "attention": ("attention forward", "attention backward"), "cache_attention": ("attention forward",),
    "column_sum": ("bias sums",), "cross_entropy": ("loss",),
    "dropout": ("dropout",), "embedding": ("embeddings",), "embedding_mse": ("loss",), "fp8_linear": ("fp8 scaling",),
    "global_norm": ("optimizer",), "low_rank": ("adapters backward",), "mix": ("attention forward", "attention backward"),
    "norm": ("norms forward", "norms backward"),
    "linear": ("GEMM forward",), "sampling": ("loss",),
    "optimizer": ("optimizer",), "residual": ("norms forward", "norms backward"),
    "scaled_sum": ("norms forward", "norms backward"), "rope": ("rope",),
}  # fmt: skip
_BACKWARD = re.compile(r"_(bwd|backward|dq|dkdv|dkv|delta|dbias|dsinks|preprocess|postprocess)")
_GEMM = re.compile(r"gemm|nvjet|cutlass|wgmma|gemv|_matmul|_mm_kernel", re.IGNORECASE)
_LAYOUT = re.compile(r"_([tn]{2})[tn]{0,2}(?=_|\W|$)", re.IGNORECASE)
_LAYOUTS = {"tn": "forward", "nn": "dgrad", "tt": "dgrad", "nt": "wgrad"}
_NEXT_TO_A_GEMM = re.compile(r"^memset|splitk.?reduce|split_k_reduce|^_add_splits_kernel$", re.IGNORECASE)
_NEXT_TO = "next to a GEMM"
_PASSED = ("loss", "copies", _NEXT_TO, OTHER)  # groups that may run between the forward of the head and the loss
_WORDS = (  # words in the names of torch's kernels; the first match counts
    (r"fmha|flash|sdpa|mha_|attention", ("attention forward", "attention backward")),
    (r"layer_?norm|rms_?norm|LayerNorm|GammaBeta", ("norms forward", "norms backward")),
    (r"softmax|nll_loss|cross_entropy|log_sum|logsumexp", ("loss",)),
    (r"adam|multi_tensor|lpnorm|linalg_vector_norm|NormTwoOps|NormOps", ("optimizer",)),
    (r"gelu|silu|tanh_kernel|relu|swiglu|sigmoid", ("activation forward", "activation backward")),
    (r"embedding|index_?select|indexSelect|index_add|indexFunc|gather|scatter|index_put|index_elementwise", ("embeddings",)),
    (r"radix_sort|reverse_indices", ("embeddings",)),  # these kernels sort tokens for the gradient
    (r"float8|fp8|e4m3|amax|abs_max", ("fp8 scaling",)),
    (r"^memcpy|copy_kernel|CatArray|direct_copy|bfloat16_copy", ("copies",)),
)  # fmt: skip
LARGEST_KERNELS, LONGEST_NAME = 15, 110  # in the report


class Rates(NamedTuple):
    """The rates of floors, measured on an H200: 690 TFLOP/s of a bfloat16 GEMM, and 4.3 TB/s."""

    flops: float = 690e12
    bytes: float = 4.3e12
    fp8: float = 1380e12


class Launch(NamedTuple):
    """One kernel on the device."""

    name: str
    start_us: float
    us: float


@dataclass(frozen=True, slots=True)
class GroupTime:
    """The time of a group in one step. floor_ms is None if a step needs no op of this group, or if the floor is unknown."""

    group: str
    ms: float
    floor_ms: float | None
    launches: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    groups: tuple[GroupTime, ...]
    span_ms: float
    gaps_ms: float
    unknown: dict[str, float]  # name → ms, for the group "other"
    kernels: dict[str, dict[str, float]]  # group → name → ms
    note: str = ""

    @property
    def floor_ms(self) -> float:
        return sum(group.floor_ms or 0.0 for group in self.groups)


@cache
def our_kernels() -> Mapping[str, str]:
    """kernel → its op, found in the sources: an op is in kernels/<op>.py or kernels/<op>/."""
    root = Path(kernels.__path__[0])
    found = {}
    for path in sorted(root.rglob("*.py")):
        op = path.relative_to(root).parts[0].removesuffix(".py")
        for name in re.findall(r"^def (_?\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = op
    return found


def group_of(name: str, *, backward: bool) -> str:
    """The group of a kernel by its name alone. `backward`: whether the kernel runs after the loss. A GEMM counts as a GEMM of
    the blocks."""
    if _NEXT_TO_A_GEMM.search(name):
        return _NEXT_TO
    op_name = our_kernels().get(name)
    if op_name == "linear":
        return _gemm(name, backward=backward)
    if op_name is not None:
        groups = _HOMES.get(op_name, (OTHER,))
        return groups[-1] if _BACKWARD.search(name) else groups[0]
    if _GEMM.search(name) and not re.search(r"fmha|flash|attention", name, re.IGNORECASE):
        return _gemm(name, backward=backward)
    for words, groups in _WORDS:
        if re.search(words, name, re.IGNORECASE):
            says = re.search(r"backward|bwd|bprop|grad|GammaBeta", name, re.IGNORECASE)
            return groups[-1] if says else groups[0]
    return OTHER


def _gemm(name: str, *, backward: bool) -> str:
    if not backward:
        return "GEMM forward"
    layouts = _LAYOUT.findall(name)
    return f"GEMM {_LAYOUTS[layouts[-1].lower()] if layouts else 'dgrad'}"


def products_of(step: Callable[[], object]) -> list[str]:
    """The groups of the GEMMs that a step of a model on handles launches, in order, without those of the head. Only products of
    one matrix for all heads are known."""
    found: list[str] = []

    def see(call: Call) -> None:
        of_adapter = any(buffer.name.endswith((".u", ".du")) for buffer in (*call.reads, *call.writes))
        terms = sum("lora_b" in buffer.name for buffer in call.reads)
        if call.name == "linear_fwd":
            found.append("adapters forward" if of_adapter else "GEMM forward")
        elif call.name == "low_rank_linear_fwd":
            found.extend(["GEMM forward", *["adapters forward"] * terms])
        elif call.name == "joined_linear_fwd":
            found.append("GEMM forward")
        elif call.name == "linear_bwd_input":
            found.append("adapters backward" if of_adapter else "GEMM dgrad")
        elif call.name == "low_rank_linear_bwd_input":
            found.extend(["GEMM dgrad", "adapters backward"])
        elif call.name == "joined_linear_bwd_input":
            found.append("GEMM dgrad")
        elif call.name == "linear_bwd_weight":
            found.append("GEMM wgrad")

    with observe(see):
        step()
    return found


def groups_of(names: Sequence[str], products: Sequence[str] = ()) -> list[str]:
    """The group of each kernel of a step, in the order of the device. products: the groups of its GEMMs in order, without those
    of the head. If there are not as many GEMMs, their groups follow from their names."""
    groups = _groups_by_name(names)
    gemms = _gemms(groups)
    if len(products) == len(gemms):
        for i, product in zip(gemms, products, strict=True):
            groups[i] = product
    return _with_their_gemm(names, groups)


def _gemms(groups: Sequence[str]) -> list[int]:
    return [i for i, group in enumerate(groups) if group.startswith("GEMM ")]


def _groups_by_name(names: Sequence[str]) -> list[str]:
    """The groups by name and order. Kernels next to a GEMM have a group of their own.

    A chunk of the head runs a forward GEMM, loss kernels, dgrad and wgrad. So the last forward GEMM before a loss kernel
    belongs to the head, and so do the first dgrad and wgrad after it. A loss kernel after a backward sums the results of the
    chunks.
    """
    groups: list[str] = []
    expected: set[str] = set()  # GEMMs of the head that must follow the last loss kernel
    seen_loss = False
    for name in names:
        group = group_of(name, backward=seen_loss)
        if group == "loss":
            seen_loss = True
            before = next((i for i in reversed(range(len(groups))) if groups[i] not in _PASSED), None)
            if before is not None and groups[before] in ("GEMM forward", "head forward"):
                groups[before], expected = "head forward", {"dgrad", "wgrad"}
        elif group.startswith("GEMM "):
            kind = group.removeprefix("GEMM ")
            if kind in expected:
                expected.remove(kind)
                group = f"head {kind}"
        elif group in ("embeddings", "optimizer"):  # these groups end a backward and a step
            seen_loss, expected = False, set()
        groups.append(group)
    return groups


def _with_their_gemm(names: Sequence[str], groups: list[str]) -> list[str]:
    """The groups, with each memset in the group of the next kernel, and each split-K reduction in the group of the previous."""
    out = list(groups)
    for i, group in enumerate(groups):
        if group != _NEXT_TO:
            continue
        is_memset = names[i].lower().startswith("memset")
        order = range(i + 1, len(groups)) if is_memset else reversed(range(i))
        out[i] = next((groups[j] for j in order if groups[j] != _NEXT_TO), OTHER)
    return out


def floors(demands: Mapping[str, Sequence[Demand]], rates: Rates, fp8: Collection[str] = ()) -> dict[str, float]:
    """group → its floor in milliseconds. fp8: the groups whose products are in float8. The kernels of these products have one
    layout, so their names do not tell the groups apart. So if any group is in `fp8`, all products are one group."""
    found: defaultdict[str, float] = defaultdict(float)
    for group, of_group in demands.items():
        flops = rates.fp8 if group in fp8 else rates.flops
        floor = 1e3 * sum(max(d.flops / flops, d.bytes / rates.bytes) for d in of_group)
        found[PRODUCTS if fp8 and _is_product(group) else group] += floor
    return dict(found)


def _is_product(group: str) -> bool:
    return group.startswith(("GEMM ", "head "))


def break_down(
    launches: Sequence[Launch], floors_ms: Mapping[str, float], steps: int = 1, products: Sequence[str] = ()
) -> Breakdown:
    """The time of each group per step, from the launches of `steps` back-to-back steps. products: `products_of` a step with
    adapters."""
    ordered = sorted(launches, key=lambda launch: launch.start_us)
    kernels = [launch.name for launch in ordered]
    groups, note = groups_of(kernels, [*products] * steps), ""
    gemms = len(_gemms(_groups_by_name(kernels)))
    if products and gemms != steps * len(products):
        note = (
            f"{gemms / steps:g} GEMMs in a step, but its ops have {len(products)} products: the GEMMs of adapters are in the "
            "groups GEMM forward and GEMM dgrad"
        )
    if PRODUCTS in floors_ms:
        groups = [PRODUCTS if _is_product(group) else group for group in groups]
    ms: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts = Counter(groups)
    for launch, group in zip(ordered, groups, strict=True):
        ms[group] += launch.us / 1e3 / steps
        names[group][launch.name] += launch.us / 1e3 / steps
    first_us = end_us = ordered[0].start_us if ordered else 0.0
    busy_us = 0.0
    for launch in ordered:
        busy_us += max(0.0, launch.start_us + launch.us - max(end_us, launch.start_us))
        end_us = max(end_us, launch.start_us + launch.us)
    span_ms = (end_us - first_us) / 1e3 / steps
    shown = [group for group in GROUPS if ms[group] or floors_ms.get(group)]
    return Breakdown(
        groups=tuple(GroupTime(group, ms[group], floors_ms.get(group), counts[group] / steps) for group in shown),
        span_ms=span_ms,
        gaps_ms=span_ms - busy_us / 1e3 / steps,
        unknown=dict(sorted(names[OTHER].items(), key=lambda item: -item[1])),
        kernels={group: dict(of_group) for group, of_group in names.items()},
        note=note,
    )


def report(breakdown: Breakdown, rates: Rates) -> str:
    def row(name: str, ms: float, floor: float | None, launches: str) -> list[str]:
        share = f"{floor / ms:.0%}" if floor and ms else "–"
        return [name, f"{ms:.3f}", "–" if floor is None else f"{floor:.3f}", share, launches]

    rows = [row(g.group, g.ms, g.floor_ms, f"{g.launches:g}") for g in breakdown.groups]
    rows.append(row("gaps", breakdown.gaps_ms, 0.0, ""))
    total = sum(group.launches for group in breakdown.groups)
    rows.append(row("step (span)", breakdown.span_ms, breakdown.floor_ms, f"{total:g}"))
    text = [
        table(("group", "ms", "floor ms", "of floor", "kernels"), rows),
        f"floor = Σ over ops of max(FLOPs / {rates.flops / 1e12:g} TFLOP/s, bytes / {rates.bytes / 1e12:g} TB/s)",
    ]
    if breakdown.note:
        text.append(breakdown.note)
    each = [(ms, group, name) for group, of_group in breakdown.kernels.items() for name, ms in of_group.items()]
    text.append("the largest kernels:")
    text += [f"  {ms:8.3f} ms  {group}: {name[:LONGEST_NAME]}" for ms, group, name in nlargest(LARGEST_KERNELS, each)]
    if breakdown.unknown:
        text.append("other, by name:")
        text += [f"  {ms:8.3f} ms  {name}" for name, ms in breakdown.unknown.items()]
    return "\n".join(text)


def launches_of(step: Thunk, steps: int) -> list[Launch]:
    """The kernels of the device in `steps` calls of `step`, by torch's profiler."""
    if not torch.cuda.is_available():
        raise ValueError(
            "breakdown: got a machine without a GPU; accepted: a GPU, because the profiler lists its kernels"
        )
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        Launch(event.name, event.time_range.start, event.time_range.end - event.time_range.start)
        for event in seen.events()
        if event.device_type == torch.profiler.DeviceType.CUDA
    ]
