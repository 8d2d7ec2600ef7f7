"""`python -m benchmarks.masks`: interval masks and head dimension 512, compared with other calls for the same masks.

    problem                 call of tilegrad                  compared with
    documents               8 documents as intervals          the same documents as packed sequences
    ragged documents        8 documents of several lengths    the same documents as packed sequences
    documents, not causal   the same 8 documents              the same documents as packed sequences
    causal                  causal as intervals               causal=True
    prefix                  a prefix of a quarter             CUDA: FlexAttention, compiled, with its own block mask
    shared question         a quarter, and 4 answers          CUDA: FlexAttention, compiled, with its own block mask
    wide                    head dimension 512, causal        the backends of SDPA that run it, on T / 8 and T / 2 tokens

On a CPU all but `wide` are also compared with SDPA, with the same mask as a bool matrix.

All contenders are called through their public functions: forward, backward, and both, interleaved in one process; q, k and v
are (B, H, T, D) views of (B, T, H, D), as in models. On CUDA causal=True is also timed with the kernel "triton", because by
default the Hopper kernel runs. A ratio is the median over rounds of (time of the other call) / (time of tilegrad), with
quartiles. `goal` is the least ratio that the project accepts, where there is a goal. The results of tilegrad are first checked
against the float64 oracle, on as many tokens as whole matrices allow; if the check fails, nothing is timed.
"""

from __future__ import annotations

import argparse
import json as json_format
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilegrad
from tilegrad import masks
from tilegrad.bench.timing import Thunk, freed_memory_kept, interleaved
from tilegrad.engine.machine import device_or_default
from tilegrad.functional import AttentionOptions
from tilegrad.kernels.attention import Mask, cpu, reference
from tilegrad.kernels.attention.bounds import bounds
from tilegrad.kernels.attention.mask import masked_by
from tilegrad.kernels.closeness import complaints
from tilegrad.text.environment import environment
from tilegrad.text.table import table

SIZES = {"cuda": (32768, 16, 128), "cpu": (4096, 8, 64)}  # tokens, heads, head dimension
WIDE = 512
NAMES = ("documents", "ragged documents", "documents, not causal", "causal", "prefix", "shared question", "wide")
CHECKED_TOKENS, REPEATS = 512, 10
BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa-math": SDPBackend.MATH,
}  # fmt: skip
GOALS = {"packed": 0.95, "causal": 0.9, "causal triton": 0.9, "flex": 1.3}
WIDE_GOALS = {"cuda": 1.5, "cpu": 1.0}
ERRORS_OF_A_PEER = (RuntimeError, NotImplementedError, ValueError)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """The mask and the sizes of a problem: B sequences of T tokens."""

    name: str
    b: int
    h: int
    t: int
    d: int

    def tensors(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """q, k, v and do."""
        g = torch.Generator(device).manual_seed(0)
        form = (self.b, self.t, self.h, self.d)
        new = [torch.randn(form, generator=g, device=device, dtype=torch.float32).to(dtype) for _ in range(4)]
        return [x.transpose(1, 2) for x in new]

    def ends(self) -> list[int]:
        """0, then the end of each document, or of the question and each answer."""
        t, question = self.t, self.t // 4
        if self.name == "documents":
            return [t * n // 8 for n in range(9)]
        if self.name == "shared question":
            return [0, *(question + (t - question) * n // 4 for n in range(5))]
        return [0, *(round(t * x) for x in (0.04, 0.17, 0.23, 0.45, 0.58, 0.66, 0.91)), t]

    def options(self, device: torch.device) -> AttentionOptions:
        """The options of tilegrad's call."""
        if self.name == "wide":
            return {"causal": True}
        if self.name in ("causal", "prefix"):
            made = masks.prefix([self.t // 4 if self.name == "prefix" else 0], self.t, device=device)
        elif self.name == "shared question":
            made = masks.shared_question([b - a for a, b in pairwise(self.ends())], device=device)
        else:
            made = masks.documents(self.ends(), causal=self.is_causal, device=device)
        return {"causal": made["causal"], "intervals": made["intervals"]}

    @property
    def is_causal(self) -> bool:
        return self.name != "documents, not causal"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the result. `note` says why there is no result. kernel: for tilegrad, the kernel that ran."""

    problem: str
    t: int
    d: int
    call: str
    direction: str
    ms: float | None = None
    ratio: float | None = None  # (time of this call) / (time of tilegrad)
    quartiles: tuple[float, float] | None = None
    goal: float | None = None
    kernel: str = ""
    note: str = ""


def problems(t: int, heads: int, d: int) -> Iterator[Problem]:
    for name in NAMES[:-1]:
        yield Problem(name, 1, heads, t, d)
    for length in (t // 8, t // 2):
        yield Problem("wide", max(1, t // 2 // length), max(1, heads // 4), length, WIDE)


def goal_of(problem: str, call: str, device: str) -> float | None:
    """The least ratio that the project accepts, or None. With a bool matrix SDPA computes every pair. Only the eight documents
    mask out so many tiles that the project has a goal there."""
    if problem == "wide":
        return WIDE_GOALS[device]
    if call == "sdpa-bool":
        return 3.0 if problem == "documents" else None
    return GOALS[call]


def ours(problem: Problem, device: torch.device) -> Attend:
    options = problem.options(device)
    return lambda q, k, v: tilegrad.attention(q, k, v, **options)


def check(problem: Problem, dtype: torch.dtype, device: torch.device) -> str:
    """The complaints of the closeness rule about tilegrad on few tokens; "" if it holds."""
    small = Problem(problem.name, 1, 2, min(problem.t, CHECKED_TOKENS), problem.d)
    *leaves, do = small.tensors(dtype, device)
    for x in leaves:
        x.requires_grad_()
    options = small.options(device)
    o, lse = tilegrad.attention(*leaves, return_lse=True, **options)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True)) | {
        "o": o.detach(),
        "lse": lse.detach(),
    }
    q, k, v = (x.detach() for x in leaves)
    mask = Mask(causal=options.get("causal", False), intervals=options.get("intervals"))
    o64, lse64 = reference.forward(q.double(), k.double(), v.double(), mask)
    g = reference.backward(q.double(), k.double(), v.double(), do.double(), None, mask)
    exact = {"dq": g.dq, "dk": g.dk, "dv": g.dv, "o": o64, "lse": lse64}
    exp_error = cpu.exp_error(dtype) if device.type == "cpu" else 0.0
    return "; ".join(complaints(got, exact, bounds(q, k, v, do, None, mask, exact, exp_error)))


def _packed(problem: Problem, device: torch.device) -> Attend:
    """The documents as packed sequences."""
    ends = torch.tensor(problem.ends(), dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(problem.ends()))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        o = tilegrad.attention_varlen(rows, keys, values, ends, ends, longest, longest, causal=problem.is_causal)
        return o.transpose(0, 1)[None]

    return attend


def _sdpa_bool(problem: Problem, device: torch.device) -> Attend:
    """SDPA with the same mask as a bool matrix."""
    options, row = problem.options(device), torch.arange(problem.t, device=device)
    intervals = options["intervals"]
    assert intervals is not None
    attends = ~masked_by(intervals, row)
    if options["causal"]:
        attends &= row[:, None] >= row
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=attends)


def _flex(problem: Problem, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # because the backward runs more than once
    t, ends = problem.t, problem.ends()
    part = torch.bucketize(torch.arange(t, device=device), torch.tensor(ends[1:], device=device), right=True)

    def prefix(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) | (j < t // 4)

    def question(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((part[j] == 0) | (part[i] == part[j]))

    block_mask = create_block_mask(
        prefix if problem.name == "prefix" else question, None, None, t, t, device=str(device), _compile=True
    )
    compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def _sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def theirs(problem: Problem, device: torch.device) -> dict[str, Attend]:
    """name → call with which tilegrad's is compared. "causal triton" is tilegrad's Triton kernel, where the table would choose
    the Hopper kernel."""
    on_cuda = device.type == "cuda"
    if problem.name == "wide":
        return {name: _sdpa(backend) for name, backend in BACKENDS.items()}
    peers: dict[str, Attend] = {}
    if "documents" in problem.name:
        peers["packed"] = _packed(problem, device)
    if problem.name == "causal":
        peers["causal"] = lambda q, k, v: tilegrad.attention(q, k, v, causal=True)
    if problem.name == "causal" and on_cuda:
        peers["causal triton"] = lambda q, k, v: tilegrad.attention(q, k, v, causal=True, kernel="triton")
    if problem.name in ("prefix", "shared question") and on_cuda:
        peers["flex"] = _flex(problem, device)
    return peers if on_cuda else peers | {"sdpa-bool": _sdpa_bool(problem, device)}


def measure(problem: Problem, dtype: torch.dtype, device: torch.device, repeats: int) -> list[Row]:
    *leaves, do = problem.tensors(dtype, device)
    for x in leaves:
        x.requires_grad_()
    about = (problem.name, problem.t, problem.d)
    kernel = tilegrad.explain(*leaves, **problem.options(device)).kernel
    rows: list[Row] = []
    attends = {"ours": ours(problem, device)} | theirs(problem, device)
    for name in list(attends)[1:]:
        try:
            torch.autograd.grad(attends[name](*leaves), leaves, do)
        except ERRORS_OF_A_PEER as error:  # there is no backend for this head dimension, or not enough memory
            rows.append(Row(*about, name, "", note=str(error).splitlines()[0][:80]))
            del attends[name]

    def forward(attend: Attend) -> Thunk:
        def run() -> None:
            with torch.no_grad():
                attend(*leaves)

        return run

    def backward(attend: Attend) -> Thunk:
        o = attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    def both(attend: Attend) -> Thunk:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, do)

    for direction, timed in (("forward", forward), ("backward", backward), ("forward + backward", both)):
        with freed_memory_kept() if device.type == "cpu" else nullcontext():
            ms = interleaved({name: timed(attend) for name, attend in attends.items()}, repeats, device)
        rows.append(Row(*about, "ours", direction, median(ms["ours"]), kernel=kernel))
        for name in list(attends)[1:]:
            ratios = [a / b for a, b in zip(ms[name], ms["ours"], strict=True)]
            low, middle, high = quantiles(ratios, n=4, method="inclusive")
            goal = goal_of(problem.name, name, device.type)
            rows.append(Row(*about, name, direction, median(ms[name]), middle, (low, high), goal))
    return rows


def report(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        ms = row.note if row.ms is None else f"{row.ms:.3f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        ratio += "" if row.quartiles is None else f" [{row.quartiles[0]:.2f} {row.quartiles[1]:.2f}]"
        goal = (
            ""
            if row.goal is None or row.ratio is None
            else f"{row.goal} {'met' if row.ratio >= row.goal else 'missed'}"
        )
        name = f"{row.call} ({row.kernel})" if row.kernel else row.call
        lines.append((row.problem, row.t, row.d, name, row.direction, ms, ratio, goal))
    return table(("", "T", "D", "", "", "ms", "× time of ours", "goal"), lines)


def bench_masks(
    *, device: str | None = None, dtype: str | None = None, tokens: int | None = None, heads: int | None = None,
    head_dim: int | None = None, names: Sequence[str] | None = None, repeats: int = REPEATS, out: str | None = None,
) -> int:  # fmt: skip
    """Prints the table, and appends it as JSON lines to the file `out`. Returns the exit code, 1 if the results of tilegrad are
    wrong."""
    if repeats < 2:
        raise ValueError(f"repeats: got {repeats}; accepted: at least 2, because the report has quartiles")
    for name, size, least in (("tokens", tokens, 8), ("heads", heads, 1), ("head_dim", head_dim, 1)):
        if size is not None and size < least:
            raise ValueError(f"{name}: got {size}; accepted: at least {least}")
    where = torch.device(device_or_default(device))
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    chosen = kind[dtype or ("bfloat16" if where.type == "cuda" else "float32")]
    about, rows = environment(where, chosen), []
    sizes = (given or usual for given, usual in zip((tokens, heads, head_dim), SIZES[where.type], strict=True))
    for problem in problems(*sizes):
        if names is not None and problem.name not in names:
            continue
        complaint = check(problem, chosen, where)
        wrong = Row(problem.name, problem.t, problem.d, "ours", "", note=f"WRONG: {complaint}")
        rows += [wrong] if complaint else measure(problem, chosen, where, repeats)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.writelines(json_format.dumps(asdict(row) | about) + "\n" for row in rows)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value is not None) + "\n")
    print(report(rows))
    return int(any(row.note.startswith("WRONG") for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--device", help="default: cuda if there is a GPU, else cpu")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on CUDA, else float32")
    for n, (name, metavar) in enumerate((("tokens", "T"), ("heads", "H"), ("head-dim", "D"))):
        add(f"--{name}", type=int, metavar=metavar, help=f"default: {SIZES['cuda'][n]} on CUDA, else {SIZES['cpu'][n]}")
    add("--names", nargs="+", choices=NAMES, help="default: all")
    add("--repeats", type=int, default=REPEATS, help="default: %(default)s")
    add("--out", metavar="FILE", help="append JSON lines to this file")
    return bench_masks(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
