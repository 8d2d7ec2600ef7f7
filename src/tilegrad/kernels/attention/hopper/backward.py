"""Attention's backward on Hopper (sm_90a), in Gluon: one fused loop of five GEMMs, with dq reduced in float32 by TMA.

    preprocess   neg_lse2 = −lse·log2(e)   delta = −(rowsum(do ∘ o) − dlse)   dq_acc = 0          padding rows: p = 0
    main         a work tile is columns j of a kv head; the loop is over query heads and over rows i that attend to the columns
                   sᵀ = k qᵀ        pᵀ = exp2(scale_log2 · sᵀ + neg_lse2)        masked out: p = 0
                   dpᵀ = v doᵀ      dsᵀ = pᵀ ∘ (dpᵀ + delta)
                   dv += pᵀ do      dk += dsᵀ q          dq_acc[i] += ds k
    postprocess  dq = scale · dq_acc, in the tensor's dtype

scale_log2 = scale · log2(e), with magnitude at least 1e-30. With a softcap c: t = tanh(sᵀ · scale / c),
pᵀ = exp2(c·log2(e)·t + neg_lse2), and ds is multiplied by 1 − t². Beyond D 128 neg_lse2 is stored divided by
scale_log2, and the main loop multiplies it back; up to D 128 this would be 1 to 2 % slower.

**Warp specialisation.** A CTA of the main kernel has two MMA warpgroups (backward_mma.py; beyond D 128 with different tasks,
backward_wide.py), a producer warp (backward_load.py) and one or two dQ store warps (backward_store_dq.py). They communicate
through pipelines and named barriers (pipeline.py):

    q, do with neg_lse2, delta, row_info    producer → MMA      two stages each (do at D 256: one)
    k, v                                    producer → MMA      one stage each, loaded while the previous dv and dk drain
    ds; beyond D 128 also p                 MMA ↔ MMA           ds up to D 128: two stages
    dq (float32), later dv, dk              MMA → dQ store      one stage per warpgroup
    tile_info                               producer → all      backward_scheduler.py

**v in registers.** Shared memory bandwidth is the limit, and every row tile reads all of k and v. Up to D 128 a warpgroup keeps
the first columns of its v in registers, as many as the compiler and a softcap leave room for (launch_backward.py): 1 to 3 %
faster at D 64, 2 to 9 % at D 96, 2 to 5 % at D 128.

**Head dimensions** 96 and 192 are two pieces of columns (pieces.py): q, k, v, do, dk and dv are tuples of one piece or two.

**Persistent CTAs** take work tiles from a counter, so the loads of a tile overlap the end of the previous one. With a causal
band and no window the first columns take longest, so the first columns of all heads of an L2 section come first. A section fits
in L2 and is large enough that the CTAs finish at about the same time. If there are too few work tiles for the device, several
CTAs share the rows of each (split-K): they sum dk and dv in float32, and the last CTA stores them. Only row tiles that an edge
of the band crosses are masked.

**Packed sequences** are bounded by TMA itself (tma.varlen_descriptor): rows of the next sequence, NaN or not, are never read.

**Deterministic**: a semaphore enforces that additions to a tile of dq happen in the order of the tile scheduler; the first is a
store. At D 96 and 128 each MMA warpgroup then has its own dQ store warp, so that the two warps' waits for the semaphore and for
memory overlap: 3 to 12 % faster.

The cost is 10·Tq·Tk·D FLOPs per head, half if causal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_load import Inputs, Sources, load
from .backward_mma import Factors, SplitSums, mma_warpgroup
from .backward_scheduler import INFO_STAGES, INFO_WORDS, Params
from .backward_store_dq import Gradients, store_dq
from .backward_wide import DS_DK_REGISTERS, ds_dk_warpgroup, new_exchange, softmax_dv_warpgroup
from .pieces import new_stages, pieces_of
from .pipeline import Pipeline, mbarriers

Q_STAGES = gl.constexpr(2)
REGISTERS = gl.constexpr(24)  # per thread of the producer warp and of a dQ store warp
MMA_REGISTERS = gl.constexpr(240)  # per thread of an MMA warpgroup
DIVIDED = gl.constexpr(128)  # beyond this D neg_lse2 is stored divided by scale_log2

SIZES = ["rows_b", "rows_h", "batch", "kv_heads", "all_heads", "group", "tq", "tk", "left", "right"]
SIZES += ["heads_per_section", "splits", "row_tiles"]
SIZES += ["intervals_b", "intervals_h", "edges_b", "edges_h", "last_tiles_b", "last_tiles_h"]
POINTERS = [
    "arrivals",
    "dq_semaphores",
    "tile_counter",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "intervals",
    "edges",
    "last_tiles",
]


@gluon.jit(do_not_specialize=SIZES + POINTERS)
def _hopper_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, q_desc2, k_desc2, v_desc2, do_desc2, neg_lse2_desc, delta_desc,
    cu_seqlens_q, cu_seqlens_k, intervals, edges, last_tiles,
    dq_desc, dk_desc, dv_desc, sums, arrivals, dq_semaphores, tile_counter,
    intervals_b, intervals_h, edges_b, edges_h, last_tiles_b, last_tiles_h,
    rows_b, rows_h, batch, kv_heads, all_heads, group, tq, tk, left, right, heads_per_section, splits, row_tiles,
    scale, scale_log2, softcap_log2, scale_over_softcap,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DO_STAGES: gl.constexpr, DO_FIRST: gl.constexpr,
    V_IN_REGS: gl.constexpr, DQ_WARPS: gl.constexpr, DESCENDING: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    WORDS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    second = None
    if PAIRS == 2:
        second = 2
    params = Params(
        cu_seqlens_q, cu_seqlens_k, batch, kv_heads, all_heads, group, tq, tk, left, right, heads_per_section, splits,
        intervals, second, intervals_b, intervals_h, edges, edges_b, edges_h, last_tiles, last_tiles_b, last_tiles_h,
    )  # fmt: skip
    factors = Factors(scale, scale_log2, softcap_log2, scale_over_softcap, D > DIVIDED)

    WIDE: gl.constexpr = D > 128
    gl.static_assert(not WIDE or DQ_WARPS == 1)
    q_descs = pieces_of(q_desc, q_desc2)
    k_descs = pieces_of(k_desc, k_desc2)
    v_descs = pieces_of(v_desc, v_desc2)
    do_descs = pieces_of(do_desc, do_desc2)
    inputs = Inputs(
        Pipeline(new_stages(q_descs, Q_STAGES), mbarriers(Q_STAGES, 1), None),
        Pipeline(new_stages(do_descs, DO_STAGES), mbarriers(DO_STAGES, 1), None),
        Pipeline(new_stages(k_descs, 1), mbarriers(1, 1), mbarriers(1, 2)),
        Pipeline(new_stages(v_descs, 1), mbarriers(1, 1), mbarriers(1, 1 if WIDE else 2)),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], neg_lse2_desc.layout),
        gl.allocate_shared_memory(gl.float32, [DO_STAGES, BLOCK_M], delta_desc.layout),
        gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], WORDS_L),
    )
    dq_pipeline = Pipeline(new_stages((dq_desc,), 2)[0], None, mbarriers(2, 1))  # one stage per MMA warpgroup
    tile_words = gl.allocate_shared_memory(gl.int32, [INFO_STAGES * INFO_WORDS, 1], WORDS_L)
    tile_info = Pipeline(tile_words, mbarriers(INFO_STAGES, 1), mbarriers(INFO_STAGES, 2 + DQ_WARPS))
    sources = Sources(q_descs, k_descs, v_descs, do_descs, neg_lse2_desc, delta_desc, rows_b, rows_h)
    gradients = Gradients(dq_desc, dk_desc, dv_desc, dq_semaphores, row_tiles, rows_b, rows_h)
    split_sums = SplitSums(sums, arrivals)
    # The lists below are similar, but assigning a tuple to a variable loses its constexprs in Gluon.
    if WIDE:
        exchange = new_exchange(dtype, BLOCK_N, BLOCK_M)
        gl.warp_specialize(
            [
                (softmax_dv_warpgroup, (split_sums, params, inputs, exchange, dq_pipeline, tile_info, factors, D)),
                (ds_dk_warpgroup, (split_sums, params, inputs, exchange, dq_pipeline, tile_info, factors, D)),
                (load, (sources, params, inputs, tile_info, tile_counter, BLOCK_M, BLOCK_N, DESCENDING, DO_FIRST)),
                (store_dq, (0, 1, gradients, params, dq_pipeline, tile_info, dtype, BLOCK_M, BLOCK_N, D, DESCENDING)),
            ],
            [4, 1, 1],
            [DS_DK_REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        SCORES_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
        ds_stages = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], SCORES_L)
        if DQ_WARPS == 1:
            gl.warp_specialize([
                (mma_warpgroup, (0, split_sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D, V_IN_REGS)),
                (mma_warpgroup, (1, split_sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D, V_IN_REGS)),
                (load, (sources, params, inputs, tile_info, tile_counter, BLOCK_M, BLOCK_N, DESCENDING, DO_FIRST)),
                (store_dq, (0, 1, gradients, params, dq_pipeline, tile_info, dtype, BLOCK_M, BLOCK_N, D, DESCENDING)),
            ], [4, 1, 1], [MMA_REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
        else:
            gl.warp_specialize([
                (mma_warpgroup, (0, split_sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D, V_IN_REGS)),
                (mma_warpgroup, (1, split_sums, params, inputs, ds_stages, dq_pipeline, tile_info, factors, D, V_IN_REGS)),
                (load, (sources, params, inputs, tile_info, tile_counter, BLOCK_M, BLOCK_N, DESCENDING, DO_FIRST)),
                (store_dq, (0, 2, gradients, params, dq_pipeline, tile_info, dtype, BLOCK_M, BLOCK_N, D, DESCENDING)),
                (store_dq, (1, 2, gradients, params, dq_pipeline, tile_info, dtype, BLOCK_M, BLOCK_N, D, DESCENDING)),
            ], [4, 1, 1, 1], [MMA_REGISTERS, REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
