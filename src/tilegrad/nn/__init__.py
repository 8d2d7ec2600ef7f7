"""Modules: `Attention`, which replaces MultiheadAttention, and dilated attention with and without projections."""

from .attention import Attention, Cache
from .dilated import DilatedAttention, ImprovedDilatedAttentionV2, MultiheadDilatedAttention

__all__ = ["Attention", "Cache", "DilatedAttention", "ImprovedDilatedAttentionV2", "MultiheadDilatedAttention"]
