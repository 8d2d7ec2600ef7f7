"""Attention of Hugging Face transformers: `register()`, then `attn_implementation="tilegrad"`.

transformers needs two functions under one name. The mask function is called once per forward, with closures that say which rows
attend to which columns (causal, window, packed, padding). Each layer calls the attention function with the result of the mask
function. In tilegrad this result is an `Attends`, which has a T×T matrix only for an unknown closure:

    band   (left, right): the distance to the farthest column on each side to which a row attends
    runs   the sequences of a padded or packed batch, as cumulative lengths over the B·T rows, for `attention_varlen`, without
           copies. Padded rows are a sequence without columns, and padded columns are a sequence without rows
    bias   for all other masks: (B, 1, 1, Tk) for padding that runs can't express, (B, 1, Tq, Tk) for an unknown closure

The first layer that gets a bool bias (B, 1, Tq, Tk) in CPU memory, even one from the caller, converts it to intervals if each
column has at most two (masks.py). All layers then skip the pairs that are masked out, and later layers do not read the bias.

An `Attends` is not a tensor and never None, so a model that computes attention itself raises instead of ignoring the mask.
`Attends` is a pytree, so `torch.export` takes it as an input: its tensors are inputs, its numbers constants. If the length of a
static cache is a tensor on the device, the mask is a bool tensor (B, 1, Tq, Tk), as for sdpa.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from .. import functional
from ..functional.autograd import is_plain_tensor, is_traced_or_transformed
from ..kernels.attention.mask import Window
from ..kernels.attention.problem import FEW_ROWS
from ..masks import IntervalMask, intervals_of_bool
from .flash_attn import ends_of
from .transformers_loss import use_linear_cross_entropy

# (cumulative lengths of rows, cumulative lengths of columns, most rows of a run, most columns of a run), as cu_seqlens and
# max_seqlen of `attention_varlen`. None instead of a number: Tq or Tk.
Runs = tuple[Tensor, Tensor, int | None, int | None]
_OUTSIDE = (
    "attn_implementation: got 'tilegrad' for a model that computes attention itself, without transformers' "
    "AttentionInterface; accepted: 'eager', or 'sdpa' if the model has it"
)


def register(name: str = "tilegrad", *, kernel: str | None = None, linear_cross_entropy: bool | None = None) -> None:
    """Registers `attn_implementation=name` with transformers; `kernel` selects a kernel of `tilegrad.attention` by name.

    linear_cross_entropy=True: causal language models train without logits, by `tilegrad.linear_cross_entropy`. This applies to
    all models of the process, with any attention, until `register` is called with linear_cross_entropy=False. A model in
    training mode that gets labels then returns a loss, but no logits.

    >>> import tilegrad.integrations.transformers as integration
    >>> integration.register()  # doctest: +SKIP
    >>> AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tilegrad")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(
        name, functools.partial(attention_forward, kernel=kernel) if kernel else attention_forward
    )
    AttentionMaskInterface.register(name, mask)
    if linear_cross_entropy is not None:
        use_linear_cross_entropy(enabled=linear_cross_entropy)


@dataclass(frozen=True, slots=True, eq=False)
class Attends:
    """The columns to which the rows of a layer attend."""

    band: Window = (None, None)
    runs: Runs | None = None
    bias: Tensor | None = None
    before: int | None = None  # number of columns before the column of the first row; None if all columns are in use
    columns: int | None = None  # number of keys of the layer, including unused keys of a static cache
    shape = (1, 1, 1, 1)  # with four dimensions, so that transformers knows that the mask is complete
    ndim = 4

    def contiguous(self) -> Attends:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_OUTSIDE} (it read .{name} of the mask)")

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(_OUTSIDE)


def _flatten(attends: Attends) -> tuple[list[Tensor | None], list[int | None]]:
    ends_q, ends_k, *longest = attends.runs or (None,) * 4
    return [ends_q, ends_k, attends.bias], [*attends.band, *longest, attends.before, attends.columns]


def _unflatten(tensors: Any, numbers: Any) -> Attends:
    ends_q, ends_k, bias = tensors
    left, right, longest_q, longest_k, before, columns = numbers
    runs = None if ends_q is None else (ends_q, ends_k, longest_q, longest_k)
    return Attends((left, right), runs, bias, before, columns)


def _flatten_with_keys(attends: Attends) -> tuple[list[tuple[KeyEntry, Tensor | None]], list[int | None]]:
    tensors, numbers = _flatten(attends)
    names = ("ends_q", "ends_k", "bias")
    return [(GetAttrKey(name), x) for name, x in zip(names, tensors, strict=True)], numbers


register_pytree_node(
    Attends,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name="tilegrad.integrations.transformers.Attends",
)


def _columns(attention_mask: Tensor, offset: int, length: int, used: int) -> Tensor:
    """The columns in use of a padding mask, which may be shorter than the cache."""
    missing = max(0, length + offset - attention_mask.shape[1])
    return pad(attention_mask, (0, missing))[:, offset : offset + used].bool()


def _is_split(padding: Tensor, *, tracing: bool) -> bool:
    """Whether a sequence has padding between its tokens. When tracing, the compiled code raises instead."""
    split = ((padding[:, 1:] & ~padding[:, :-1]).sum(1) + padding[:, 0] > 1).any()
    if not tracing:
        return bool(split)
    accepted = (
        "attention_mask: got padding between tokens; accepted in torch.compile: padding before or after all tokens"
    )
    torch._assert_async(~split, accepted)
    return False


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> Attends | Tensor:
    """The mask function for transformers."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if isinstance(attention_mask, Attends):  # `generate` called this function before the model
        return attention_mask
    function = mask_function or causal_mask_function

    def dense_mask() -> Attends | Tensor:
        bias = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            use_vmap=use_vmap,
            device=device,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
        )
        return bias if static_cache else Attends(bias=bias, columns=kv_length)

    tracing = torch.compiler.is_compiling()
    band_and_ids = _band_when_compiling(function, **kwargs) if tracing else _band_and_ids(function)
    static_cache = isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor)
    if band_and_ids is None or static_cache and (tracing or q_length == 1):
        return dense_mask()
    (band, ids), used, before = band_and_ids, kv_length, 0
    if band != (None, None):  # the last row and the last column in use are the same token
        before = (int(q_offset) if isinstance(q_offset, Tensor) else q_offset) - int(kv_offset)
        used = before + q_length
        if used > kv_length:
            return dense_mask()
    padding = None if attention_mask is None else _columns(attention_mask, kv_offset, kv_length, used)
    if padding is not None and not tracing and bool(padding.all()):
        padding = None
    options: dict[str, Any] = {"band": band, "before": before if used < kv_length else None, "columns": kv_length}
    if ids is not None:
        return dense_mask() if padding is not None else Attends(**options, runs=_packed(ids))
    if padding is None:
        return Attends(**options)
    every_row, square = band == (None, None), q_length == used and q_offset == kv_offset == 0
    if not (every_row or square):
        return Attends(**options, bias=padding[:, None, None])
    if _is_split(padding, tracing=tracing):
        return Attends(**options, bias=padding[:, None, None])
    return Attends(**options, runs=_padded(padding, q_length if every_row else None), bias=padding[:, None, None])


def _warn_of_probabilities() -> None:
    """Warn once that the layer returns None for attention probabilities, as sdpa does."""
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        "output_attentions: got True; accepted: False, because probabilities are never stored; use 'eager'"
    )


def _with_position_bias(bias: Tensor | None, own: Tensor) -> Tensor:
    if bias is None:
        return own
    return own.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else own + bias


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    cache: Any = None,
    output_attentions: bool | None = None,
    kernel: str | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers: q (B, Hq, Tq, D), k and v (B, Hkv, Tk, D) → o (B, Tq, Hq, Dv), None."""
    # Longer than 60 lines because transformers passes 20 options.
    if output_attentions:
        _warn_of_probabilities()
    if cache is not None:
        raise ValueError("cache: got a paged cache; accepted: None (no continuous batching); use 'sdpa'")
    attends = _attends(module, attention_mask, is_causal, sliding_window)
    if attends.columns not in (None, key.shape[2]):
        raise ValueError(
            f"attention_mask: got a mask for {attends.columns} columns; accepted: {key.shape[2]}, as this layer has"
        )
    if attends.before is not None:
        used = attends.before + query.shape[2]
        key, value = key[:, :, :used], value[:, :, :used]
    runs, bias = attends.runs, attends.bias
    if runs is None and bias is None and attends.band[1] == 0 and query.shape[2] == key.shape[2]:
        runs = _restarts(position_ids, query)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and bias is None:
        runs = cu_seq_lens_q.int(), cu_seq_lens_k.int(), int(max_length_q), int(max_length_k)
    if s_aux is not None and s_aux.dtype not in (torch.float32, query.dtype):
        s_aux = s_aux.float()
    options: dict[str, Any] = {"window": attends.band, "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    options |= {"dropout_p": dropout, "kernel": kernel}
    if runs is not None and position_bias is None:  # B·T rows, as views if a projection wrote (B, T, H, D)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        ends_q, ends_k = (ends.to(query.device) for ends in runs[:2])
        longest_q = query.shape[2] if runs[2] is None else runs[2]
        longest_k = key.shape[2] if runs[3] is None else runs[3]
        o = functional.attention_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, **options)
        return o.unflatten(0, (query.shape[0], query.shape[2])), None
    if runs is not None and bias is None:
        raise ValueError("position_bias: got a tensor with packed sequences; accepted: None, or use 'eager'")
    converted = None if bias is None or position_bias is not None else _intervals(bias, query, key)
    if converted is not None:
        options |= {"intervals": converted["intervals"].to(query.device), "causal": converted["causal"]}
    elif bias is not None:
        bias = bias.to(query.device)[..., : key.shape[2]]
    if position_bias is not None:
        bias = _with_position_bias(bias, position_bias[..., : key.shape[2]])
    if bias is not None and bias.dtype not in (torch.bool, torch.float32):
        bias = bias.to(query.dtype)
    if converted is None:
        options["bias"] = bias
    return functional.attention(query, key, value, **options).transpose(1, 2).contiguous(), None


def _attends(module: Any, given: Any, is_causal: bool | None, sliding_window: int | None) -> Attends:
    if isinstance(given, Attends):
        return given
    if given is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        side = None if sliding_window is None else sliding_window - 1
        return Attends((side, 0 if causal else side))
    if isinstance(given, Tensor) and given.ndim == 4:  # a mask from the caller, which is complete
        return Attends(bias=given)
    raise ValueError(f"attention_mask: got {type(given).__name__}; accepted: None, or a tensor (B, H, Tq, Tk)")


def _band_and_ids(function: Callable[..., Any]) -> tuple[Window, Tensor | None] | None:
    """(band, sequence ids (B, T) of packed tokens or None) from closures of transformers; None if a closure is unknown."""
    name = getattr(function, "__qualname__", "").removesuffix(".<locals>.inner_mask")
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    if name in ("causal_mask_function", "bidirectional_mask_function"):
        return (None, 0 if name.startswith("causal") else None), None
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    captured = dict(zip(function.__code__.co_freevars, cells, strict=True))
    if name == "sliding_window_overlay":
        return (captured["sliding_window"] - 1, None), None
    if name == "sliding_window_bidirectional_overlay":
        return (captured["sliding_window"],) * 2, None
    if name == "packed_sequence_mask_function":
        return (None, None), captured["packed_sequence_mask"]
    if name != "and_masks.<locals>.and_mask":
        return None
    parts = [_band_and_ids(part) for part in captured["mask_functions"]]
    bands, ids = [p[0] for p in parts if p], [p[1] for p in parts if p and p[1] is not None]
    if None in parts or len(ids) > 1:
        return None
    left, right = (min((x for x in side if x is not None), default=None) for side in zip(*bands, strict=True))
    return (left, right), ids[0] if ids else None


def _band_when_compiling(
    function: Callable[..., Any],
    config: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    **_: Any,
) -> tuple[Window, None] | None:
    """`_band_and_ids` for torch.compile, which can't look into a closure: reads the function's identity and other arguments."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if function is causal_mask_function or function is bidirectional_mask_function:
        return (None, 0 if function is causal_mask_function else None), None
    sliding = local_size is not None and getattr(config, "attention_chunk_size", None) is None
    return ((local_size - 1, 0), None) if sliding and allow_is_causal_skip and local_size else None


def _packed(ids: Tensor) -> Runs:
    """The runs of packed sequences: a run of equal numbers in `ids` (B, T) is a sequence."""
    edge = torch.ones_like(ids, dtype=torch.bool)
    edge[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = pad(edge.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).int()
    longest = int(ends.diff().max())
    return ends, ends, longest, longest


def _padded(padding: Tensor, rows: int | None) -> Runs:
    """The runs of tokens between padding, where `padding` (B, Tk) is True for tokens, as in transformers.

    rows: the number of rows of a sequence, if all of them attend to its tokens (an encoder, or cross attention). None: rows
    and columns are the same tokens, and padding rows attend to nothing.
    """
    tokens, before = padding.sum(1), padding.int().argmax(1)
    none, after = torch.zeros_like(tokens), padding.shape[1] - before - tokens
    if rows is None:
        q, k = ends_of(before, none, tokens, after, none), ends_of(none, before, tokens, none, after)
    else:
        q, k = ends_of(none, torch.full_like(none, rows), none), ends_of(before, tokens, after)
    return q, k, None, None


_read_bias: tuple[Callable[[], Tensor | None], int, IntervalMask | None] = (lambda: None, -1, None)


def _intervals(bias: Tensor, q: Tensor, k: Tensor) -> IntervalMask | None:
    """The intervals of a bool bias (B, 1 or H, Tq, Tk), which replace the bias; None if a column has more than two intervals.

    Intervals are computed once per forward, because all layers get the same tensor. The result is also None if a change of the
    tensor would go unnoticed (inference tensors have no version); if its values can't be read (compilation, tracing, fake
    tensors), or only by waiting for a GPU; if heads share k but not the bias; or if the call has few rows.
    """
    global _read_bias
    # This comes first, because comparing a length while tracing would limit the graph to lengths with the same result.
    if is_traced_or_transformed() or not is_plain_tensor(bias) or bias.is_inference():
        return None
    fits = (bias.dtype, bias.shape[2:]) == (torch.bool, (q.shape[2], k.shape[2])) and bias.ndim == 4
    if not fits or q.shape[2] <= FEW_ROWS or bias.shape[1] != 1 and not bias.shape[1] == q.shape[1] == k.shape[1]:
        return None
    if bias.device.type != "cpu":
        return None
    read, version, intervals = _read_bias  # one read, because another thread may replace the tuple
    if read() is not bias or version != bias._version:
        computed = intervals_of_bool(bias)
        intervals = None if isinstance(computed, str) else computed
        _read_bias = weakref.ref(bias), bias._version, intervals
    return intervals


_last_restarts: tuple[Callable[[], Tensor | None], int, Runs | None] = (lambda: None, -1, None)


def _restarts(positions: Tensor | None, q: Tensor) -> Runs | None:
    """The runs of packed sequences from positions that restart, for models that do not pass positions to the mask function
    (GPT-OSS, OPT and more).

    The runs are computed once per forward, because all layers get the same tensor.
    """
    global _last_restarts
    if torch.compiler.is_compiling() or positions is None or positions.ndim != 2 or positions.shape[1] != q.shape[2]:
        return None
    version = -1 if positions.is_inference() else positions._version
    read, read_version, runs = _last_restarts  # one read, because another thread may replace the tuple
    if read() is not positions or read_version != version or version < 0:
        restarts = positions.diff(dim=1) != 1
        ids = pad(restarts.cumsum(1), (1, 0)).expand(q.shape[0], -1)
        runs = _packed(ids) if bool(restarts.any()) else None
        _last_restarts = weakref.ref(positions), version, runs
    return runs
