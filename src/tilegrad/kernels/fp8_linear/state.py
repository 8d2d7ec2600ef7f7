"""The state of a tensor that is rounded to float8: its scale, then the largest magnitude found by each program."""

from __future__ import annotations

PARTS = 1056  # programs, each with its largest magnitude
FIRST_PART = 4  # keeps scales aligned to 16 bytes, which cuBLAS requires
STATE = (FIRST_PART + PARTS,)
LARGEST = 448.0  # largest number of e4m3
FIRST = {"x": 16.0, "w": 1.0}  # magnitude assumed before the first step
