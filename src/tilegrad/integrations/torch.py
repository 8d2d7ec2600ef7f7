"""tilegrad as a backend of torch's scaled_dot_product_attention: `register()`, then activate_flash_attention_impl("tilegrad").

    import torch, tilegrad.integrations.torch
    tilegrad.integrations.torch.register()
    torch.nn.attention.activate_flash_attention_impl("tilegrad")      # the flash backend of SDPA is tilegrad
    torch.nn.attention.restore_flash_attention_impl()                 # the flash backend is torch's kernel again

torch first selects the backend of SDPA by its own rules. Calls that torch gives to the math backend (such as dropout on a CPU,
or an attn_mask with a gradient) or to cuDNN never reach tilegrad. is_causal is aligned at the top left, as in SDPA.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.functional import pad

from ..functional.library import numbers_of, tensors_of  # this import defines the ops
from ..kernels.attention.mask import Mask


def register() -> None:
    """Registers "tilegrad" with torch.nn.attention. Nothing changes until "tilegrad" is activated."""
    torch.nn.attention.register_flash_attention_impl("tilegrad", register_fn=_InstalledOps)


class _InstalledOps:
    """Replaces torch's ops in the dispatcher by tilegrad's ops, until `remove` is called."""

    def __init__(self) -> None:
        self.library: Library | None = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is overridden
            self.library.impl("_scaled_dot_product_flash_attention_for_cpu", _cpu_forward, "CPU")
            self.library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, "CPU")
            if torch.version.cuda:
                self.library.impl("_scaled_dot_product_flash_attention", _cuda_forward, "CUDA")
                self.library.impl("_scaled_dot_product_flash_attention_backward", _cuda_backward, "CUDA")

    def remove(self) -> None:
        self.library = None


def _fields(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, *, causal: bool
) -> tuple[int, tuple[Any, ...]]:
    """(number of leading keys to which any row attends, mask and options of the op). If causal, row i attends to columns
    j ≤ i."""
    rows, columns = q.shape[2], k.shape[2]
    keys = min(rows, columns) if causal else columns
    right, used_bias = rows - keys if causal else None, None if bias is None else bias[..., :keys]
    deterministic = torch.are_deterministic_algorithms_enabled()
    mask = Mask(window=(None, right), scale=scale, bias=used_bias)
    return keys, (*tensors_of(mask, None), *numbers_of(mask), deterministic, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None, p: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    if p:
        raise NotImplementedError(f"dropout_p: got {p} under SDPA; accepted: 0 (tilegrad.sdpa has dropout)")
    keys, fields = _fields(q, k, bias, scale, causal=causal)
    o, lse = torch.ops.tilegrad.attention_fwd(q, k[:, :, :keys], v[:, :, :keys], *fields)
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, bias: Tensor | None, scale: float | None, *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    keys, fields = _fields(q, k, bias, scale, causal=causal)
    wanted = [True, True, True, False, False]
    dq, dk, dv, _, _ = torch.ops.tilegrad.attention_bwd(
        q, k[:, :, :keys], v[:, :, :keys], o, lse.contiguous(), do, None, *fields, wanted
    )
    padding = (0, 0, 0, k.shape[2] - keys)
    return dq, pad(dk, padding), pad(dv, padding)


def _in_rows_first_memory(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o, lse = _forward(query, key, value, attn_mask, scale, dropout_p, causal=is_causal)
    like = torch.empty_like(query)  # a compiler relies on the strides of torch's meta kernels
    return (o if o.stride() == like.stride() else like.copy_(o)), _in_rows_first_memory(lse)


def _cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,  # noqa: ARG001
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = _backward(grad_out, query, key, value, out, logsumexp, attn_mask, scale, causal=is_causal)
    return tuple(map(_in_rows_first_memory, grads))


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, causal: bool = False, *_: bool, scale: float | None = None
) -> tuple[Any, ...]:
    o, lse = _forward(q, k, v, None, scale, dropout_p, causal=causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return o, lse, None, None, q.shape[2], k.shape[2], seed, seed.new_zeros(()), q.new_empty(0)


def _cuda_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    is_causal = rest[5]  # cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset
    return _backward(do, q, k, v, o, lse, None, scale, causal=is_causal)
