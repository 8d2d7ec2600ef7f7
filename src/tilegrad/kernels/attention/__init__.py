"""The attention op: its API, its oracle and its kernels side by side.

    api.py        the op on buffers of the caller's         mask.py       which rows attend to which columns; the scores
    problem.py    sizes and alignment of a call             reference.py  the equations, forward and backward: the oracle
    checks.py     what a call accepts                       qkv.py        the op on the rows of a transformer
    table.py      which kernel runs                         context.py    the op on a sequence split over ranks
    tiled.py, cpu.py, triton/, hopper/: the kernels

A kernel is a module with the functions `workspace`, `prepare_fwd` and `prepare_bwd` of reference.py's signatures: a kernel is
prepared once for all calls of a signature, and what `prepare_…` returns runs each of them.
"""

from .api import attention_bwd, attention_fwd, attention_workspace
from .mask import Mask

__all__ = ["Mask", "attention_bwd", "attention_fwd", "attention_workspace"]
