"""Named barriers of Hopper's backward (pipeline.py): who signals what to whom.

Q, DO     both MMA warpgroups → producer warp        a stage of q or do is empty
DQ        an MMA warpgroup → its dQ store warp       its stage of dq is full
DS        MMA warpgroup ↔ MMA warpgroup              dsᵀ is in shared memory; beyond D 128 from one to the other
P         MMA warpgroup → MMA warpgroup              pᵀ is, beyond D 128
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl

Q = gl.constexpr(5)  # 5, 6: one for each stage
DO = gl.constexpr(7)  # 7, 8
DQ = gl.constexpr(9)  # 9, 10: one for each warpgroup
DS = gl.constexpr(11)
P = gl.constexpr(12)

MMA_THREADS = gl.constexpr(256)  # of both warpgroups
INPUT_THREADS = gl.constexpr(256 + 32)  # and of the producer warp
DQ_THREADS = gl.constexpr(128 + 32)  # of a warpgroup and of its dQ store warp
