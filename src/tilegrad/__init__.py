"""Exact, hand-derived backward passes for transformers, in memory planned to the byte.

Public names are imported on first use, so that `import tilegrad` and `tilegrad --help` are fast. torch is imported with the
first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .native import openmp as openmp  # before torch is imported, because this sets a variable for the OpenMP runtime

if TYPE_CHECKING:
    from . import flash as flash
    from . import integrations as integrations
    from . import masks as masks
    from . import memory as memory
    from . import nn as nn
    from .engine.dist.mesh import Mesh
    from .engine.engine import Engine
    from .functional import attention, attention_varlen, explain, sdpa
    from .functional.dilated.functional import dilated_attention
    from .functional.linear_cross_entropy import linear_cross_entropy
    from .kernels.attention.api import attention_bwd, attention_fwd, attention_workspace
    from .kernels.attention.mask import Mask
    from .kernels.muon import MuonConfig
    from .kernels.table import Explanation
    from .model.config import ModelConfig
    from .model.lora import LoraConfig
    from .specification.shared_attention import free_attention, init_attention
    from .training.api import TrainedModel, evaluate, generate, load, logprobs, presets, stream, train
    from .training.config import RunConfig, RunEnded
    from .training.evaluation import Evaluation
    from .training.generated import Generated, Piece

__version__ = "0.1.0.dev0"

_NAMES = {  # module → its public names
    "engine.dist.mesh": ("Mesh",),
    "engine.engine": ("Engine",),
    "functional": ("attention", "attention_varlen", "explain", "sdpa"),
    "functional.dilated.functional": ("dilated_attention",),
    "functional.linear_cross_entropy": ("linear_cross_entropy",),
    "kernels.attention.api": ("attention_bwd", "attention_fwd", "attention_workspace"),
    "kernels.attention.mask": ("Mask",),
    "kernels.muon": ("MuonConfig",),
    "kernels.table": ("Explanation",),
    "model.config": ("ModelConfig",),
    "model.lora": ("LoraConfig",),
    "specification.shared_attention": ("free_attention", "init_attention"),
    "training.api": ("TrainedModel", "evaluate", "generate", "load", "logprobs", "presets", "stream", "train"),
    "training.config": ("RunConfig", "RunEnded"),
    "training.evaluation": ("Evaluation",),
    "training.generated": ("Generated", "Piece"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = [
    "Engine",
    "Evaluation",
    "Explanation",
    "Generated",
    "LoraConfig",
    "Mask",
    "Mesh",
    "ModelConfig",
    "MuonConfig",
    "Piece",
    "RunConfig",
    "RunEnded",
    "TrainedModel",
    "attention",
    "attention_bwd",
    "attention_fwd",
    "attention_varlen",
    "attention_workspace",
    "dilated_attention",
    "evaluate",
    "explain",
    "free_attention",
    "generate",
    "init_attention",
    "linear_cross_entropy",
    "load",
    "logprobs",
    "presets",
    "sdpa",
    "stream",
    "train",
]


_MODULES = ("flash", "integrations", "masks", "memory", "nn")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
