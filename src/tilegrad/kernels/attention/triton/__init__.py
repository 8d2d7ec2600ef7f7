"""Attention in Triton."""

from .launch import bwd, fwd, workspace

__all__ = ["bwd", "fwd", "workspace"]
