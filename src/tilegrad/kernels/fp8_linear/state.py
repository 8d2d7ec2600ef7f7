"""The state of a tensor that is rounded to float8: its scale, then the largest magnitude that each program saw."""

from __future__ import annotations

PARTS = 1056  # programs that each keep the largest magnitude they saw
FIRST_PART = 4  # so that a scale begins at a multiple of 16 bytes, as cuBLAS asks
STATE = (FIRST_PART + PARTS,)
LARGEST = 448.0  # of e4m3
FIRST = {"x": 16.0, "w": 1.0}  # what is taken to be the largest before anything was seen
