"""Attention on Hopper, in Gluon.

Supports float16 and bfloat16, and head dimensions of 16 to 256 in steps of 8, equal for q, k and v, in any layout that TMA can
address. ../table.py says which calls it refuses.

    host      launch_forward.py, launch_backward.py: tile configs, launches     launch.py, tma.py: compilation, TMA descriptors
    device    forward.py, backward.py: the kernels, with their equations        forward_*.py, backward_*.py: their warps
              pipeline.py: pipelines and named barriers                         registers.py: mask, row maxima and row sums
              pieces.py: head dimensions that are no power of two               gluon_names.py: names that differ by version
              prepost.py: the backward's pre- and postprocess                   edges.py: which tiles intervals mask out
"""

from torch import Tensor

from ...scratch import Shapes
from ..mask import Mask
from ..problem import sizes_of
from ..triton.lists import edge_shapes, last_shapes, list_shapes
from . import launch_backward, launch_forward
from .launch_backward import compile_bwd, prepare_bwd
from .launch_forward import prepare_fwd

__all__ = ["compile_bwd", "prepare_bwd", "prepare_fwd", "workspace"]

LEAST = 64  # rows, and columns, of any tile


def workspace(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    sizes = sizes_of(q, k, v, mask)
    if not backward:
        return launch_forward.workspace(sizes) | list_shapes(sizes, mask, LEAST)
    shapes = launch_backward.workspace(sizes, deterministic=deterministic)
    shapes |= edge_shapes(sizes, mask, LEAST)
    return shapes | last_shapes(sizes, mask, LEAST) if deterministic else shapes
