"""Attention in Triton."""

from .launch import prepare_bwd, prepare_fwd, workspace

__all__ = ["prepare_bwd", "prepare_fwd", "workspace"]
