"""flash-attn's functions under their short path: `from tilegrad.flash import flash_attn_func`."""

from .integrations.flash_attn import *  # noqa: F403
from .integrations.flash_attn import __all__ as __all__
