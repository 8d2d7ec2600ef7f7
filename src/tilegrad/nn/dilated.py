"""Modules for dilated attention, with buffers from a manager. The docstring of `dilated_attention` has the equations.

`ImprovedDilatedAttentionV2` is the name of `DilatedAttention` in the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.dilated.functional import check_pattern, dilated_attention
from ..functional.dilated.pattern import Mode
from ..memory.managed.manager import AttentionBufferManager, create_attention_buffer_manager
from .attention import Attention


class DilatedAttention(nn.Module):
    """Dilated attention over query, key and value (B, T, H, D).

    segment_lengths, dilation_rates   as in `tilegrad.dilated_attention`
    mode, scale                       as in `tilegrad.dilated_attention`
    dropout                           the dropout of probabilities, in training only
    enable_buffer_manager             False: buffers come from torch's allocator
    enable_buffer_reuse               False: the manager caches no buffers
    enable_preallocation              True: one buffer of each type, in its typical size, is cached from the start
    manager                           a manager to share with other modules; None: the module creates a manager

    A copy of the module creates a manager of its own.

    >>> import torch, tilegrad.nn
    >>> attention = tilegrad.nn.DilatedAttention([256, 512, 1024], [1, 2, 4])
    >>> query, key, value = torch.randn(3, 2, 1024, 8, 64)
    >>> attention(query, key, value).shape
    torch.Size([2, 1024, 8, 64])
    >>> attention.get_buffer_stats()["bytes_in_use"]
    0
    """

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float = 0.0,
        mode: Mode = "head_groups", enable_buffer_manager: bool = True, enable_buffer_reuse: bool = True,
        enable_preallocation: bool = False, manager: AttentionBufferManager | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.segment_lengths, self.dilation_rates = check_pattern(segment_lengths, dilation_rates, mode)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: got {dropout!r}; accepted: a number p, 0 ≤ p < 1")
        if manager is not None and not enable_buffer_manager:
            raise ValueError("manager: got a manager with enable_buffer_manager=False; accepted: None")
        self.mode, self.dropout, self.scale = mode, dropout, scale
        self.enable_buffer_manager, self.enable_buffer_reuse = enable_buffer_manager, enable_buffer_reuse
        self.enable_preallocation = enable_preallocation
        self.manager = self._new_manager() if manager is None else manager

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: None = None
    ) -> Tensor:
        """The output (B, T, H, D). attention_mask must be None."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        y = dilated_attention(
            q,
            k,
            v,
            self.segment_lengths,
            self.dilation_rates,
            mode=self.mode,
            causal=is_causal,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            attn_mask=attention_mask,
            manager=self.manager,
        )
        return y.transpose(1, 2)

    @property
    def buffer_manager(self) -> AttentionBufferManager | None:
        """`manager`, by its name in the specification."""
        return self.manager

    def get_buffer_stats(self) -> dict[str, Any]:
        """The manager's counts and bytes; {} without a manager."""
        return {} if self.manager is None else self.manager.get_stats()

    def cleanup_buffers(self) -> None:
        """Frees every cached buffer of the manager."""
        if self.manager is not None:
            self.manager.clear_cache()

    def extra_repr(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale}"
        return f"{self.segment_lengths}, {self.dilation_rates}, mode={self.mode!r}, dropout={self.dropout}{scale}"

    def _new_manager(self) -> AttentionBufferManager | None:
        if not self.enable_buffer_manager:
            return None
        return create_attention_buffer_manager(self.enable_buffer_reuse, self.enable_preallocation)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "manager": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.manager = self._new_manager()


ImprovedDilatedAttentionV2 = DilatedAttention


class MultiheadDilatedAttention(Attention):
    """Dilated attention over (B, T, C), or (T, B, C) with batch_first=False, for the common uses of MultiheadAttention.

    Parameters have the names and shapes of MultiheadAttention's, so its state_dict loads.
    `DilatedAttention` documents the other arguments.

    >>> import torch, tilegrad.nn
    >>> attention = tilegrad.nn.MultiheadDilatedAttention(64, 4, [16, 64], [1, 4], batch_first=True)
    >>> x = torch.randn(2, 100, 64)
    >>> y, _ = attention(x, x, x, is_causal=True)
    >>> y.shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int],
        dropout: float = 0.0, bias: bool = True, *, batch_first: bool = False, mode: Mode = "head_groups",
        enable_buffer_manager: bool = True, enable_buffer_reuse: bool = True, enable_preallocation: bool = False,
        manager: AttentionBufferManager | None = None, scale: float | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype)
        if mode == "head_groups" and num_heads < len(segment_lengths):
            got = f"{num_heads} for {len(segment_lengths)} branches"
            raise ValueError(f"num_heads: got {got}; accepted: at least as many as branches")
        self.dilated = DilatedAttention(
            segment_lengths,
            dilation_rates,
            dropout,
            mode,
            enable_buffer_manager,
            enable_buffer_reuse,
            enable_preallocation,
            manager,
            scale,
        )

    def forward(  # type: ignore[override]  # without a cache
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: None = None,
        need_weights: bool = False,
        attn_mask: None = None,
        *,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(y, None). key=None: self-attention. Masks must be None, need_weights False."""
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None:
                raise ValueError(f"{name}: got a mask; accepted: None; the only mask of dilated attention is is_causal")
        inputs = self._inputs(query, key, value, need_weights=need_weights)
        q, k, v = (x.transpose(1, 2) for x in self._project(*inputs))
        return self._output(self.dilated(q, k, v, is_causal).flatten(2), query), None

    def get_buffer_stats(self) -> dict[str, Any]:
        """The manager's counts and bytes; {} without a manager."""
        return self.dilated.get_buffer_stats()

    def cleanup_buffers(self) -> None:
        """Frees every cached buffer of the manager."""
        self.dilated.cleanup_buffers()
