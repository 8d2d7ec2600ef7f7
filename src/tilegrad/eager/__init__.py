"""Eager calls of attention in C++, where that was built: eager.cpp says what it does, build.py builds and loads it.

Without it the same calls go through Python, to the same bits: only the time of the host differs.
"""

from .build import build, load, path

__all__ = ["build", "load", "path"]
