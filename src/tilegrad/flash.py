"""The functions of `integrations.flash_attn` under a short path: `from tilegrad.flash import flash_attn_func`."""

from .integrations.flash_attn import *  # noqa: F403
from .integrations.flash_attn import __all__ as __all__
