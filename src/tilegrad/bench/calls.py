"""Calls of attention by tilegrad's kernels and by the peers, and the check that precedes their timing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import attention, attention_varlen
from ..kernels.attention import Mask, cpu, reference
from ..kernels.attention.bounds import bounds
from ..kernels.attention.mask import packed
from ..kernels.attention.problem import Backward, Forward, Problem, lse_dtype, output_shapes
from ..kernels.attention.table import ATTENTION
from ..kernels.closeness import complaints
from ..kernels.scratch import Scratch, new_scratch, separate
from .shapes import Shape
from .timing import Thunk

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLEX_LENGTHS = (4096, 16384, 65536)  # compiling FlexAttention takes longer than timing it
CHECKED_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}  # elements of each float64 matrix in a check
ERRORS_OF_A_PEER = (RuntimeError, NotImplementedError, ValueError)
Contender = Literal["public", "buffers", "peer"]  # tilegrad's public function; its kernel on prepared buffers; a peer


def thunk(prepare: Callable[..., Callable[..., None]], call: Forward | Backward, scratch: Scratch) -> Thunk:
    """A function without arguments that calls a kernel. The call is prepared at the first run."""

    @functools.cache
    def run() -> Callable[..., None]:
        return prepare(call, separate(scratch))

    return lambda: run()(call)


class Inputs:
    """q, k, v and do of a shape in (B, T, H, D) memory, as the projections of a model write them, and calls of attention on
    these tensors."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)

        def new(h: int, t: int) -> Tensor:
            form = (sum(shape.lengths), h, shape.d) if shape.lengths else (shape.b, t, h, shape.d)
            x = torch.randn(form, generator=g, device=device, dtype=torch.float32).to(dtype)
            return x if shape.lengths else x.transpose(1, 2)

        kv = shape.hkv or shape.h
        self.shape, self.mask = shape, shape.mask(device)
        self.q, self.k, self.v, self.do = (
            new(h, t) for h, t in ((shape.h, shape.rows), (kv, shape.t), (kv, shape.t), (shape.h, shape.rows))
        )

    def ours(self, kernel: str, *, deterministic: bool = False) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        """(forward, backward, tensors that they write) of a kernel of the table. The two functions allocate nothing."""
        q, k, v, mask = self.q, self.k, self.v, self.mask
        module = ATTENTION.select(Problem(q, k, v, mask), kernel).load()
        _, lse_shape = output_shapes(q, v, mask)
        scratch = [
            new_scratch(module.workspace(q, k, v, mask, backward=backward, deterministic=deterministic), q.device)
            for backward in (False, True)
        ]
        out = {"o": torch.empty_like(q), "lse": q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))}
        out |= {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}

        memory = [tuple(buffers.values()) for buffers in scratch]
        fwd = Forward(q, k, v, mask, out["o"], out["lse"], memory[0])
        grads = (out["dq"], out["dk"], out["dv"], None, None)
        bwd = Backward(q, k, v, out["o"], out["lse"], self.do, None, mask, *grads, memory[1], deterministic)
        return thunk(module.prepare_fwd, fwd, scratch[0]), thunk(module.prepare_bwd, bwd, scratch[1]), out

    def public(self, kernel: str, *, deterministic: bool = False) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        """(forward, backward, results) by `attention` or `attention_varlen`, through autograd."""
        mask = self.mask
        options: dict[str, Any] = {"causal": mask.causal, "window": mask.window, "deterministic": deterministic}
        options["kernel"] = kernel

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
                o: Tensor = attention(q, k, v, **options)
            else:
                ends = (mask.cu_seqlens_q, mask.cu_seqlens_k, mask.max_seqlen_q, mask.max_seqlen_k)
                o = attention_varlen(q, k, v, *ends, **options)
            return o

        return self._through_autograd(attend)

    def peer(self, name: str, *, deterministic: bool = False) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        """(forward, backward, results) by a backend of SDPA, FlexAttention or FlashAttention-4."""
        return self._through_autograd(_peer_function(name, self.shape, self.q.device, deterministic=deterministic))

    def _through_autograd(self, attend: Callable[..., Tensor]) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out: dict[str, Tensor] = {}
        o = attend(*leaves)
        out["o"] = o.detach()

        def forward() -> None:
            with torch.no_grad():
                attend(self.q, self.k, self.v)

        def backward() -> None:
            grads = torch.autograd.grad(o, leaves, self.do, retain_graph=True)
            out.update(zip(("dq", "dk", "dv"), grads, strict=True))

        return forward, backward, out

    def calls(self, name: str, contender: Contender, *, deterministic: bool) -> tuple[Thunk, Thunk, dict[str, Tensor]]:
        by = {"public": self.public, "buffers": self.ours, "peer": self.peer}[contender]
        return by(name, deterministic=deterministic)


def _peer_function(name: str, shape: Shape, device: torch.device, *, deterministic: bool) -> Callable[..., Tensor]:
    """The function of a peer. Raises one of ERRORS_OF_A_PEER if the peer cannot run the shape. Only FlashAttention-4 has
    `deterministic`."""
    gqa = bool(shape.hkv)
    if name == "fa4":
        return _flash_attention_4(shape, device, deterministic=deterministic)
    if shape.lengths:
        raise NotImplementedError("packed sequences are not measured")
    if name == "flex":
        if shape.t not in FLEX_LENGTHS or device.type != "cuda":
            raise NotImplementedError(f"compiled on CUDA only, at T in {FLEX_LENGTHS}")
        return _flex(shape, device)
    if name == "sdpa" and shape.window is not None and not shape.tq:
        attends = torch.ones(shape.t, shape.t, dtype=torch.bool, device=device).tril_().triu_(1 - shape.window)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=attends, enable_gqa=gqa)
    if shape.window is not None or (shape.tq and shape.causal):
        raise NotImplementedError("needs a mask matrix for this band")
    if name == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    }[name]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa)

    return attend


def _flex(shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # because torch limits the number of recompilations, and each shape needs one
    torch._functorch.config.donated_buffer = False  # because the backward runs more than once
    block_mask = None if shape.band == (None, None) else block_mask_of(shape, device)
    compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask, enable_gqa=bool(shape.hkv))


def _flash_attention_4(shape: Shape, device: torch.device, *, deterministic: bool) -> Callable[..., Tensor]:
    """FlashAttention-4 (package flash-attn-4), which takes (B, T, H, D) and aligns causal at the bottom right."""
    cute = importlib.import_module("flash_attn.cute")
    band = {"causal": shape.causal, "window_size": (None, None) if shape.window is None else shape.band}
    options = band | {"deterministic": deterministic}
    mask = shape.mask(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if shape.lengths:
            ends = {"cu_seqlens_q": mask.cu_seqlens_q, "cu_seqlens_k": mask.cu_seqlens_k}
            found = cute.flash_attn_varlen_func(q, k, v, **ends, **options)
        else:
            found = cute.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        o: Tensor = found[0] if isinstance(found, tuple) else found
        return o if shape.lengths else o.transpose(1, 2)

    return attend


def block_mask_of(shape: Shape, device: torch.device) -> BlockMask:
    """The mask of a band for FlexAttention, computed from the edges of the band in blocks of 128 × 128. FlexAttention's
    create_block_mask evaluates T × T pairs, and takes longer to compile than the kernel."""
    from torch.nn.attention.flex_attention import BlockMask

    size, shift = 128, shape.t - shape.rows
    left = shape.band[0]

    def attends(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        gap = i + shift - j
        return gap >= 0 if left is None else (gap >= 0) & (gap <= left)

    rows = torch.arange(0, shape.rows, size, device=device)[:, None]
    columns = torch.arange(0, shape.t, size, device=device)
    least = rows + shift - (columns + size).clamp(max=shape.t) + 1  # the smallest gap in a block
    most = (rows + size).clamp(max=shape.rows) - 1 + shift - columns
    inside = (rows + size <= shape.rows) & (columns + size <= shape.t)
    reach = shape.t if left is None else left
    unmasked = (least >= 0) & (most <= reach) & inside
    masked = (most >= 0) & (least <= reach) & ~unmasked

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        indices = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]

    lengths = (shape.rows, shape.t)
    return BlockMask.from_kv_blocks(*ordered(masked), *ordered(unmasked), size, mask_mod=attends, seq_lengths=lengths)


def peers_on(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ("sdpa",)
    return ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", *(("fa4",) if _has_flash_attention_4() else ()))


def _has_flash_attention_4() -> bool:
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError:  # the package is FlashAttention-2, or the compiler of FlashAttention-4 is missing
        return False
    return True


def kernels_on(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """The kernels of the table that accept a call without options on this device, except kernels that run only by name. On
    CUDA "tiled" is left out too, if another kernel accepts the call."""
    q = torch.empty(1, 1, 1024, 64, device=device, dtype=dtype)
    problem = Problem(q, q, q, Mask())
    names = tuple(row.name for row in ATTENTION.rows if row.by_name_only is None and row.refuses(problem) is None)
    return tuple(name for name in names if name != "tiled") or names if device.type == "cuda" else names


def refusal(kernel: str, inputs: Inputs) -> str | None:
    """Why a kernel of the table refuses this problem, or None."""
    problem = Problem(inputs.q, inputs.k, inputs.v, inputs.mask)
    return next(row for row in ATTENTION.rows if row.name == kernel).refuses(problem)


def check(
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    contender: Contender = "buffers",
    *,
    deterministic: bool = False,
) -> str:
    """The complaints of the closeness rule about a kernel of tilegrad or a peer at this shape; "" if the rule holds.

    One kv head of the last sequence (or of the longest packed sequence) is checked, with the query heads that share it. If
    their float64 matrices would be large, only the last rows are checked: do is 0 in all other rows, so dk and dv sum over
    these rows.
    """
    inputs = Inputs(shape, dtype, device)
    group = shape.h // (shape.hkv or shape.h)
    longest = max(shape.lengths, default=0)
    start = sum(shape.lengths[: shape.lengths.index(longest)]) if longest else 0

    def of(x: Tensor, heads: int) -> Tensor:
        """The last heads of the sequence, (1, heads, T, D)."""
        sequence = packed(x, slice(start, start + longest)) if longest else x[-1:]
        return sequence[:, -heads:]

    tq, tk = of(inputs.q, 1).shape[2], of(inputs.k, 1).shape[2]
    rows = min(tq, max(1, CHECKED_SCORES[device.type] // (group * tk)))
    of(inputs.do, group)[:, :, : tq - rows] = 0.0
    forward, backward, out = inputs.calls(name, contender, deterministic=deterministic)
    if contender == "buffers":
        for x in out.values():
            x.fill_(float("nan"))
    forward()
    backward()

    lse = out.pop("lse", None)
    got = {name: of(x, 1 if name in ("dk", "dv") else group) for name, x in out.items()}
    got = {name: x if name in ("dk", "dv") else x[:, :, -rows:] for name, x in got.items()}
    if lse is not None:
        got["lse"] = (lse[None, :, start : start + longest] if longest else lse[-1:])[:, -group:, -rows:]
    q, do = (of(x, group)[:, :, -rows:] for x in (inputs.q, inputs.do))
    k, v = of(inputs.k, 1), of(inputs.v, 1)
    mask = Mask(inputs.mask.causal, inputs.mask.window)
    o64, lse64 = reference.forward(q.double(), k.double(), v.double(), mask)
    g = reference.backward(q.double(), k.double(), v.double(), do.double(), None, mask)
    exact = {"o": o64, "lse": lse64, "dq": g.dq, "dk": g.dk, "dv": g.dv}
    exp_error = cpu.exp_error(dtype) if name == "native" else 0.0
    bound = bounds(q, k, v, do, None, mask, exact, exp_error)
    return "; ".join(complaints(got, {what: exact[what] for what in got}, bound))
