"""Dilated attention: segments of a sequence, in each of which every r-th position attends to the others.

pattern.py      a branch as strided views of q, k and v
run.py          both directions on plain tensors: a plan and its jobs
functional.py   dilated_attention for autograd
ops.py          the same as ops of torch.library, loaded on first need
reference.py    the oracle, whole masks in float64, and its bounds
"""

from .functional import dilated_attention

__all__ = ["dilated_attention"]
