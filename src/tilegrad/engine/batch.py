"""Checks of batches and step specs. An error says what was given and what is accepted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ..kernels import gpu
from ..kernels.checks import is_count, is_number
from ..kernels.cpu.library import library
from ..kernels.cpu.rows import DTYPES
from ..kernels.fp8_linear import EVEN, FP8_LINEAR, Problem
from ..kernels.muon import MuonConfig
from ..kernels.norm import NORM
from ..kernels.scratch import Form
from ..kernels.table import Problem as NormProblem
from ..model.config import LIMITS as MODEL_LIMITS
from ..model.config import ModelConfig
from ..model.layer import HeadProducts, Linear, States
from ..model.lora import LoraConfig
from ..model.transformer import Transformer
from ..text.spelling import dtype_name
from ..text.untrusted import check_choice, refuse, shown
from .spec import StepSpec


class Batch(NamedTuple):
    """tokens, targets (b, t)       cu_seqlens (n + 1,) int32, on the CPU

    cu_seqlens is given for packed rows: 0, then the end of each of the n documents in the b·t tokens. If it is
    None, each row is one document.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None


LIMITS = {"batch_size": 1 << 16, "seq_len": MODEL_LIMITS["block_size"]}  # docs/training.md gives the reasons

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_INTS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check_sizes(config: ModelConfig, dtype: torch.dtype, *, batch_size: int, **length_by_name: int) -> None:
    """Refuse sizes or a dtype that training and generation do not support. `length_by_name` is one keyword argument, seq_len
    or capacity, whose value is the length of a sequence. Errors name this argument."""
    ((name, length),) = length_by_name.items()
    for size, value, limit in (("batch_size", batch_size, LIMITS["batch_size"]), (name, length, LIMITS["seq_len"])):
        if not is_count(value, limit):
            raise ValueError(f"{size}: got {shown(value)}; accepted: an int ≥ 1, at most {limit:,}")
    if length > config.block_size:
        raise ValueError(f"{name}: got {length}; accepted: at most block_size, {config.block_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype}; accepted: {', '.join(map(str, _DTYPES))}")


def check_spec(spec: StepSpec) -> None:
    """Refuse a spec that no engine supports. parallel/check.py has the checks for several ranks."""
    check_sizes(spec.config, spec.dtype, batch_size=spec.batch_size, seq_len=spec.seq_len)
    _check_documents(spec)
    check_choice(spec, "linear", get_args(Linear))
    check_invariant(spec)
    patterns: object = spec.freeze
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        refuse(spec, "freeze", "a sequence of patterns, such as ('wte.*', '*.bias')")
    windows: object = spec.windows
    if not isinstance(windows, tuple) or not all(
        window is None or is_count(window, MODEL_LIMITS["window"]) for window in windows
    ):
        refuse(spec, "windows", "a sequence of ints ≥ 1, or None for no window")
    for name, config, kind in (("lora", spec.lora, LoraConfig), ("muon", spec.muon, MuonConfig)):
        if config is not None and not isinstance(config, kind):
            refuse(spec, name, f"None or a {kind.__name__}")
    if spec.muon is not None and spec.lora is not None:
        raise ValueError(
            "muon: got a MuonConfig with lora, but Muon does not update adapters; accepted: None with lora"
        )
    if not isinstance(spec.accumulate, bool):
        refuse(spec, "accumulate", "True or False")
    check_decay("ema", spec.ema)
    check_states(spec.states, spec.dtype, muon=spec.muon, lora=spec.lora, ema=spec.ema)
    _check_float8(spec)


def _check_float8(spec: StepSpec) -> None:
    """Refuse float8 on devices, models and sizes that cannot use it."""
    check_choice(spec, "head", get_args(HeadProducts), " or ")
    c, form = spec.config, Form((16, 16), spec.dtype, spec.device)
    sizes = {"n_embd": c.n_embd}
    linear_sizes = {
        "ffn_dim": c.ffn,
        "n_head · head_size": c.n_head * c.head_dim,
        "n_kv_head · head_size": c.kv_heads * c.head_dim,
    }
    for name, level, more in (("linear", spec.linear, linear_sizes), ("head", spec.head, {"vocab_size": c.vocab_size})):
        if level == "plain":
            continue
        bfloat16 = spec.dtype == torch.bfloat16
        reason = FP8_LINEAR.rows[0].refuses(Problem(form, form)) if bfloat16 else "needs dtype bfloat16"
        for size, value in (sizes | more).items():
            if reason is None and value % EVEN:
                reason = f"takes sizes that are multiples of {EVEN}, not {size} {value}"
        if reason is None and level == "fp8-all" and spec.lora is not None:
            raise ValueError(
                f"{name}: got {level!r} with lora, which trains no weight of these layers; accepted: 'fp8' or 'plain' here"
            )
        if reason is None and name == "head" and c.loss != "cross_entropy":
            reason = f"is for the loss 'cross_entropy', not {c.loss!r}"
        if reason is not None:
            raise ValueError(f"{name}: got {level!r}, which {reason}; accepted: 'plain' here")


def check_states(
    states: States, dtype: torch.dtype, *, muon: MuonConfig | None, lora: LoraConfig | None, ema: float
) -> None:
    """Refuse dtypes of moments, masters and gradients that the kernels do not support."""
    if not isinstance(states, States):
        raise ValueError(f"states: got {shown(states)}; accepted: a States")
    supported = {"moments": (torch.float32, torch.bfloat16)}
    for name in ("moments", "masters", "gradients"):
        got, dtypes = getattr(states, name), supported.get(name, (torch.bfloat16,))
        if got == "float32":
            continue
        reason = None
        if dtype not in dtypes:
            reason = (
                f"with dtype {dtype_name(dtype)}; accepted: 'float32', or dtype {' or '.join(map(dtype_name, dtypes))}"
            )
        elif muon is not None:
            reason = "with Muon, which needs float32 states; accepted: 'float32', or AdamW"
        elif lora is not None and name != "moments":
            reason = "with lora, whose adapters have float32 masters and gradients; accepted: 'float32'"
        elif ema and name == "masters":
            reason = f"with ema {ema}, whose average is kept in float32; accepted: 'float32', or ema 0"
        if reason is not None:
            raise ValueError(f"{name}: got {got!r} {reason}")


def check_decay(name: str, decay: float) -> None:
    if not is_number(decay) or not 0.0 <= decay < 1.0:
        raise ValueError(
            f"{name}: got {shown(decay)}; accepted: 0 (no average of the weights), or a decay below 1, such as 0.999"
        )


def check_seed(seed: object) -> None:
    if not is_count(seed, 2**64 - 1, -(2**63)):
        raise ValueError(f"seed: got {shown(seed)}; accepted: an int, −2⁶³ … 2⁶⁴ − 1, as torch.Generator takes it")


def check_invariant(spec: StepSpec) -> None:
    """Refuse invariant=True if a kernel of the forward cannot guarantee that a row of activations has the same bits in any
    batch, in training and in generation."""
    if not isinstance(spec.invariant, bool):
        refuse(spec, "invariant", "True or False")
    if not spec.invariant:
        return
    reason = None
    if spec.dtype not in DTYPES:
        reason = (
            f"with dtype {spec.dtype}, whose kernels add in no fixed order (the kernels of float32 and bfloat16 do)"
        )
    elif spec.linear != "plain" or spec.head != "plain":
        name, level = ("linear", spec.linear) if spec.linear != "plain" else ("head", spec.head)
        reason = f"with {name} {level!r}, whose scales depend on the whole batch"
    elif spec.lora is not None:
        reason = "with lora, whose products of rank r have no fixed order of additions (merge the adapter first)"
    elif spec.context != 1:
        reason = f"with context {spec.context}, where ranks share a sequence"
    elif spec.device.type == "cpu":
        reason = f"without the native library, which {library()}" if isinstance(library(), str) else None
    else:
        (norm,) = (row for row in NORM.rows if row.name == "triton")
        refusal = norm.refuses(NormProblem(Form((1, spec.config.n_embd), spec.dtype, spec.device)))
        reason = f"on {spec.device}, where the Triton kernel of norms {refusal}" if refusal else None
    if reason is not None:
        raise ValueError(f"invariant: got True {reason}; accepted: False here")


def _check_documents(spec: StepSpec) -> None:
    """Refuse more `documents` in a row than the row has tokens, and packed rows that the attention kernels do not support."""
    if not is_count(spec.documents, spec.seq_len, least=0):
        refuse(spec, "documents", f"0 (a row is one sequence), or an int from 1 to seq_len, {spec.seq_len}")
    if not spec.documents:
        return
    if spec.context != 1:
        raise ValueError(f"documents: got {spec.documents} with context {spec.context}; accepted: 0, or context 1")
    if spec.batch_size * spec.seq_len >= 2**31:
        raise ValueError(
            f"batch_size: got {spec.batch_size} with seq_len {spec.seq_len} and documents {spec.documents}; accepted: "
            "fewer than 2³¹ tokens in all"
        )
    reason = None if spec.device.type == "cpu" else gpu.refusal(Form((1,), spec.dtype, spec.device))
    if reason is not None:
        raise ValueError(
            f"documents: got {spec.documents} on {spec.device}, where packed rows need the Triton attention kernel, which "
            f"{reason}; accepted: 0 here"
        )


def micro_batches(
    tokens: Tensor | Sequence[Tensor],
    targets: Tensor | Sequence[Tensor],
    cu_seqlens: Tensor | Sequence[Tensor | None] | None = None,
) -> list[Batch]:
    """The micro-batches of a step. Tensors are one micro-batch; lists have one tensor for each micro-batch."""
    given: dict[str, object] = {"tokens": tokens, "targets": targets}
    for name, value in given.items():
        if not isinstance(value, Tensor | Iterable):
            got = None if value is None else type(value).__name__
            raise ValueError(f"{name}: got {got}; accepted: a tensor of ints, (b, t), or a list of such tensors")
    all_tokens, all_targets = ([arg] if isinstance(arg, Tensor) else list(arg) for arg in (tokens, targets))
    n = len(all_tokens)
    if n != len(all_targets):
        raise ValueError(f"targets: got {len(all_targets)} micro-batches; accepted: {n}, as tokens has")
    if cu_seqlens is None:
        cu_seqlens = [None] * n
    ends = [cu_seqlens] if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if not isinstance(ends, list | tuple) or not all(isinstance(x, Tensor | None) for x in ends):
        raise ValueError(
            f"cu_seqlens: got {shown(cu_seqlens)}; accepted: None, a torch.int32 tensor, or a list with a tensor "
            "or None for each micro-batch"
        )
    if n != len(ends):
        raise ValueError(f"cu_seqlens: got {len(ends)} micro-batches; accepted: {n}, as tokens has, or None")
    return list(map(Batch, all_tokens, all_targets, ends))


def check_some(micro_batches: int) -> None:
    """Refuse a step in which no rank has a micro-batch, because weight decay and moments would still change the weights."""
    if not micro_batches:
        raise ValueError(
            "tokens: got no micro-batch; accepted: one or more (with several ranks, on at least one of them)"
        )


def count_targets(targets: Tensor) -> int:
    return int((targets >= 0).sum())


def check_batch(batch: Batch, spec: StepSpec) -> None:
    """Refuse a wrong shape, dtype or value. On CUDA, a check of the values of tokens and targets would wait for the device, so
    these values are checked only with TILEGRAD_CHECK=1."""
    tokens, targets, cu_seqlens = batch
    for name, x in (("tokens", tokens), ("targets", targets)):
        if not isinstance(x, Tensor) or x.ndim != 2 or x.dtype not in _INTS:
            raise ValueError(f"{name}: got {_dtype_and_shape(x)}; accepted: a tensor of ints, (b, t)")
    b, t = tokens.shape
    if not (1 <= b <= spec.batch_size and 1 <= t <= spec.seq_len):
        limit = f"(1 … {spec.batch_size}, 1 … {spec.seq_len})"
        raise ValueError(f"tokens: got shape {(b, t)}; accepted: (b, t) in {limit}, for which memory was planned")
    if targets.shape != tokens.shape:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}; accepted: the shape of tokens, {(b, t)}")
    if cu_seqlens is not None:
        _check_ends(cu_seqlens, b, t, spec.documents)
    if tokens.device.type == "cpu" or os.environ.get("TILEGRAD_CHECK") == "1":
        _check_range("tokens", tokens, 0, spec.config.vocab_size)
        _check_range("targets", targets, -1, spec.config.vocab_size)


def _dtype_and_shape(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _check_ends(cu_seqlens: Tensor, b: int, t: int, documents: int) -> None:
    name, n = "cu_seqlens", b * t
    if not documents:
        raise ValueError(
            f"{name}: got {type(cu_seqlens).__name__} for an engine with documents 0; accepted: None, or an engine with "
            "documents ≥ 1"
        )
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        got = _dtype_and_shape(cu_seqlens)
        raise ValueError(f"{name}: got {got}; accepted: a torch.int32 tensor (n + 1,) for n documents")
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"{name}: got a tensor on {cu_seqlens.device}; accepted: a tensor on the CPU, even for a CUDA engine"
        )
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != n:
        got = f"values from {ends[0]} to {ends[-1]}" if ends else "no values"
        raise ValueError(f"{name}: got {got}; accepted: from 0 to {n}, because the batch has {b} × {t} tokens")
    for i, (start, end) in enumerate(pairwise(ends)):
        if end <= start:
            raise ValueError(
                f"{name}: got {start} at index {i}, then {end}; accepted: values that increase (no document is empty)"
            )
        if start // t != (end - 1) // t:
            raise ValueError(
                f"{name}: got a document of the tokens {start} … {end - 1}, which crosses the end of a row at "
                f"{(start // t + 1) * t}; accepted: documents inside a row of {t} tokens"
            )
    if len(ends) - 1 > b * documents:
        raise ValueError(
            f"{name}: got {len(ends) - 1} documents; accepted: at most {b * documents}, because the engine has "
            f"documents={documents} for each of {b} rows"
        )


def write_documents(cu_seqlens: Tensor | None, *, ends: Tensor, positions: Tensor) -> None:
    """Write cu_seqlens to `ends`, padded with b·t, and the position of each token in its document to `positions`. Tokens after
    the last document get the position 0. If cu_seqlens is None, each row is one document."""
    b, t = positions.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, b * t + 1, t, dtype=torch.int32)
    count = len(cu_seqlens)
    ends[:count].copy_(cu_seqlens)
    ends[count:].fill_(b * t)
    bounds = cu_seqlens.numpy()
    in_documents = np.zeros(b * t, dtype=np.int64)
    in_documents[: bounds[-1]] = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
    positions.view(-1).copy_(torch.from_numpy(in_documents))


def load_batch(model: Transformer, batch: Batch, total: int) -> None:
    """Write a batch, and the number of targets that its loss is a mean over, to the inputs of a model."""
    model.tokens.copy_(batch.tokens)
    model.head.targets.view(batch.tokens.shape).copy_(batch.targets)
    model.head.inv_total.fill_(1.0 / total if total else 0.0)
    if model.packed is not None:
        write_documents(batch.cu_seqlens, ends=model.packed.cu_seqlens, positions=model.packed.positions)


def _check_range(name: str, x: Tensor, low: int, vocab_size: int) -> None:
    smallest, largest = (int(end) for end in x.aminmax())
    if smallest >= low and largest < vocab_size:
        return
    wrong = ((x < low) | (x >= vocab_size)).nonzero()[0].tolist()
    value = int(x[tuple(wrong)])
    ignored = "; −1 marks a position without a target" if name == "targets" else ""
    torch_like = " (torch's ignore_index −100 is not used here)" if value == -100 else ""
    raise ValueError(f"{name}: got {value} at {wrong}{torch_like}; accepted: 0 … {vocab_size - 1}{ignored}")
