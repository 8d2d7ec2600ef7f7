"""The state of a tensor that is rounded to float8:

[0] s, its scale     [1] steps in which its largest magnitude jumped     [2] 1 once a step has set s
[3] the largest number of its format     [4 …] the largest magnitude found by each program
"""

from __future__ import annotations

PARTS = 1056  # programs; each stores the largest magnitude that it found
JUMPS, FOLLOWED, FORMAT = 1, 2, 3
FIRST_PART = 4  # keeps scales aligned to 16 bytes, which cuBLAS requires
STATE = (FIRST_PART + PARTS,)
LARGEST = {"x": 448.0, "w": 448.0, "dy": 57344.0}  # the largest number of e4m3, and of e5m2
FIRST = {"x": 16.0, "w": 1.0, "dy": 1.0}  # magnitude assumed before the first step
JUMP = 100.0  # a magnitude that grows by more than this factor in one step is counted
