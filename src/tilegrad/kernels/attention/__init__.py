"""The attention op: its API, its oracle and its kernels.

    api.py        the op on the caller's buffers            mask.py       which rows attend to which columns; the scores
    problem.py    sizes and alignment of a call             reference.py  the equations, forward and backward: the oracle
    checks.py     what a call accepts                       qkv.py        the op on (B, T, H·D) tensors of a transformer
    table.py      which kernel runs                         context.py    the op on a sequence split over ranks
    tiled.py, cpu.py, triton/, hopper/: the kernels

A kernel is a module with the functions `workspace`, `prepare_fwd` and `prepare_bwd`; those of reference.py are the shortest.
`prepare_…` runs once for each signature of a call (api.py) and returns the function that runs all calls of that signature.
"""

from .api import attention_bwd, attention_fwd, attention_workspace
from .mask import Mask

__all__ = ["Mask", "attention_bwd", "attention_fwd", "attention_workspace"]
