"""Attention in Triton."""

from .launch import compile_bwd, prepare_bwd, prepare_fwd, workspace

__all__ = ["compile_bwd", "prepare_bwd", "prepare_fwd", "workspace"]
