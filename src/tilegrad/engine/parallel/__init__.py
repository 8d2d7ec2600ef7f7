"""A step over ranks, by one of four strategies. One rank alone sends nothing.

    Alone              one rank; an engine calls the methods of this class
    Replicated         shard="none": every rank has all parameters, gradients and moments
    ShardedOptimizer   shard="optimizer": a rank has 1/world of the moments, and updates 1/world of the parameters
    FullySharded       shard="all": a rank has 1/world of everything; a block's parameters are gathered around its ops

    micro-batches      micro-batch g of a step runs on rank g mod world, with the dropout seeds of the step's draw g: so N
                       ranks compute the same as one
    targets            are counted over all ranks: gradients are summed, never averaged, so unequal batches are exact
    bucket complete →  reduce-scatter (Replicated: all-reduce) in place, during the rest of the last micro-batch's backward
    units              FullySharded instead gathers each unit, and sums its gradients, in every micro-batch (dist/units.py)
    one all-reduce     takes the maximum over ranks of each float8 tensor's largest magnitude, so that its scale is the same
    one all-reduce     sums ‖own slices of the gradients‖², the loss, and whether any rank must stop
    own slices         clip and update
    slices          →  ShardedOptimizer: all-gather in place, during the next forward; an op waits for the buckets that it reads
    context=n          n neighbouring ranks share each micro-batch (context.py); group g mod (world / n) runs micro-batch g

Collectives run on slices of the arenas and allocate nothing. All ranks launch them in the order of one schedule, even a rank
without a micro-batch, because ranks with different orders would wait for each other forever.
"""

from __future__ import annotations

from ..dist.mesh import Mesh
from ..optimizer import AdamW
from ..spec import StepSpec
from .alone import Alone, View
from .check import check_accumulation, check_agreed, check_micro_batches, check_ranks, check_same, digest
from .replicated import Replicated
from .sharded import FullySharded, ShardedOptimizer

__all__ = [
    "Alone",
    "FullySharded",
    "Replicated",
    "ShardedOptimizer",
    "check_accumulation",
    "check_agreed",
    "check_micro_batches",
    "check_ranks",
    "check_same",
    "digest",
    "make_strategy",
]


def make_strategy(spec: StepSpec, mesh: Mesh, adamw: AdamW, view: View) -> Alone:
    """The strategy of a step on this mesh. `view` turns handles into tensors."""
    strategies = {"none": Replicated, "optimizer": ShardedOptimizer, "all": FullySharded}
    strategy = Alone if mesh.world == 1 else strategies[spec.shard]
    return strategy(spec, mesh, adamw, view)
