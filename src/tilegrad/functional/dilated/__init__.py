"""Dilated attention: in each segment of a sequence, only every r-th position takes part, and these attend to each other.

pattern.py      a branch as strided views of q, k and v
run.py          forward and backward on plain tensors: a plan and its jobs
functional.py   dilated_attention, differentiable by autograd
ops.py          the same as torch.library ops, loaded on first use
reference.py    the oracle, whole masks in float64, and its bounds
"""

from .functional import dilated_attention

__all__ = ["dilated_attention"]
