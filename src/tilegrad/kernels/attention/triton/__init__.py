"""Attention in Triton."""

from .launch import bwd, fwd, prepare_bwd, prepare_fwd, workspace

__all__ = ["bwd", "fwd", "prepare_bwd", "prepare_fwd", "workspace"]
