"""Attention on Hopper, in Gluon."""

from .launch import bwd, fwd, workspace

__all__ = ["bwd", "fwd", "workspace"]
