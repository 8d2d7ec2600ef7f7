"""The attention op: its contract, its oracle and its kernels side by side."""

from .api import attention_bwd, attention_fwd, attention_workspace
from .mask import Mask

__all__ = ["Mask", "attention_bwd", "attention_fwd", "attention_workspace"]
