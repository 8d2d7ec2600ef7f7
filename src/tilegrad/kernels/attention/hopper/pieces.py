"""Head dimensions that are not a power of two, as two pieces of columns.

Shapes in Gluon are powers of two. A head dimension is padded to 32, 64, 128 or 256 (one piece), or to 96 = 64 + 32 or
192 = 128 + 64 (two pieces). Everything with D columns is a tuple of pieces: TMA descriptors, stages in shared memory, tiles,
accumulators. Scores sum over D and have no pieces:

    s = a₁ b₁ᵀ + a₂ b₂ᵀ        o₁ += p v₁        o₂ += p v₂

s takes one MMA per piece, and so does o. Waits count these MMAs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .gluon_names import tma_load, tma_store
from .pipeline import only_stage, stage_of

WIDTHS = (32, 64, 96, 128, 192, 256)


def width_of(d: int) -> int:
    """The padded head dimension."""
    return next(width for width in WIDTHS if width >= d)


def columns_of(width: int) -> tuple[int, int]:
    """Columns of the first and the second piece; 0 if there is no second."""
    first = 1 << width.bit_length() - 1
    return first, width - first


@gluon.jit
def pieces_of(first, second):
    """(first, second), or (first,) if second is None."""
    if second is None:
        return (first,)
    else:
        return first, second


@gluon.jit
def new_stages(descs, STAGES: gl.constexpr):
    """Stages for the TMA boxes of a tensor."""
    return [gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_type.shape, x.layout) for x in descs]  # noqa: RUF005 (device code)


@gluon.jit
def load_tile(descs, coordinates, pipeline, stage, MORE_BYTES: gl.constexpr = 0):
    """Loads all columns of a box of rows into a stage of a pipeline, by TMA. `coordinates`: of the box, without the column.
    The same mbarrier also counts MORE_BYTES of other loads."""
    full = pipeline.full.index(stage)
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes + MORE_BYTES)
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes + MORE_BYTES)
    for i in gl.static_range(len(descs)):
        column = i * descs[0].block_type.shape[-1]
        tma_load(descs[i], coordinates + (column,), full, pipeline.stages[i].index(stage))  # noqa: RUF005


@gluon.jit
def store_tile(descs, coordinates, stages, stage):
    """Stores a stage, by TMA; `coordinates` as in load_tile."""
    for i in gl.static_range(len(descs)):
        column = i * descs[0].block_type.shape[-1]
        tma_store(descs[i], coordinates + (column,), stages[i].index(stage))  # noqa: RUF005


@gluon.jit
def tile_of(stages, n):
    """Stage n as pieces of (rows, columns)."""
    return [x.index(n).reshape([x.shape[-2], x.shape[-1]]) for x in stages]


@gluon.jit
def cut(tile, N: gl.constexpr):
    """The pieces of a tile, one with N columns first. Two pieces are exchanged if needed. A single piece is cut into N + N or
    N + N + 2N columns."""
    x = tile[0]
    if len(tile) == 2:
        gl.static_assert(x.shape[1] == N or tile[1].shape[1] == N)
        return (x, tile[1]) if x.shape[1] == N else (tile[1], x)
    elif x.shape[1] == 2 * N:
        return x.slice(0, N, dim=1), x.slice(N, N, dim=1)
    else:
        gl.static_assert(x.shape[1] == 4 * N)
        return x.slice(0, N, dim=1), x.slice(N, N, dim=1), x.slice(2 * N, 2 * N, dim=1)


@gluon.jit
def load_first_piece(tile, N: gl.constexpr, L: gl.constexpr):
    """The first piece of `cut` in registers, as the left operand of MMAs with accumulator layout L."""
    return cut(tile, N)[0].load(gl.DotOperandLayout(operand_index=0, parent=L, k_width=2))


@gluon.jit
def load_pieces(tile, L: gl.constexpr):
    """Loads a tile into registers."""
    return [x.load(L) for x in tile]


@gluon.jit
def store_pieces(x, tile):
    """Stores x in the tile's dtype."""
    for i in gl.static_range(len(tile)):
        tile[i].store(x[i].to(tile[i].dtype))


@gluon.jit
def stage_tile(pipeline, state):
    """The tile in the stage that `state` selects."""
    return tile_of(pipeline.stages, stage_of(state, pipeline.full.shape[0]))


@gluon.jit
def only_tile(pipeline, state):
    """The tile of a pipeline with one stage."""
    return tile_of(pipeline.stages, only_stage(state))


@gluon.jit
def zeros(ROWS: gl.constexpr, stages):
    """Accumulators of ROWS rows with the columns of `stages`."""
    return [_zeros(ROWS, x.shape[-1]) for x in stages]


@gluon.jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros((ROWS, COLUMNS), gl.float32, layout=L)


@gluon.jit
def dot_rows(a, b, zero, a_in_regs=None):
    """Issues a bᵀ. `zero`: zeros in the shape of a bᵀ. `a_in_regs`: None, or the result of load_first_piece(a)."""
    first = a[0]
    if a_in_regs is not None:
        a = cut(a, a_in_regs.shape[1])
        b = cut(b, a_in_regs.shape[1])
        first = a_in_regs
    products = warpgroup_mma(first, b[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    for i in gl.static_range(1, len(a)):
        products = warpgroup_mma(a[i], b[i].permute((1, 0)), products, is_async=True)
    return products


@gluon.jit
def add_dot(p, x, acc):
    """Issues acc + p x with p in registers."""
    if len(x) == 1:
        return (_add_dot(p, x[0], acc[0]),)
    else:
        return _add_dot(p, x[0], acc[0]), _add_dot(p, x[1], acc[1])


@gluon.jit
def _add_dot(p, x, acc):
    A_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return warpgroup_mma(gl.convert_layout(p, A_L), x, acc, is_async=True)


@gluon.jit
def wait_pieces(MMAS: gl.constexpr, acc):
    """Waits until at most the last MMAS MMAs are in flight, and returns the accumulators."""
    if len(acc) == 1:
        return (warpgroup_mma_wait(MMAS, deps=(acc[0],)),)
    else:
        return warpgroup_mma_wait(MMAS, deps=(acc[0], acc[1]))


@gluon.jit
def scale_rows(acc, factor):
    """acc ∘ factor, one factor per row, in any layout."""
    return [x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None] for x in acc]
