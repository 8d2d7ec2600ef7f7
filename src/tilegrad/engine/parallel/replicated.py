"""With shard="none", every rank has all parameters, gradients and moments, and gradients are summed over the ranks by bucket.

shard="optimizer" (sharded.py) overrides the sum and adds gathers of parameters after each update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from ...kernels.fp8_linear.largest import largest_of, set_largest
from ...kernels.op import observe_names
from ..dist.mesh import Mesh, Pending
from ..dist.schedule import Bucket, Touch, Work, final, follow, needed, order
from ..optimizer import AdamW
from ..spec import StepSpec
from .alone import Alone, Program, View
from .declare import buckets_of, schedule_of


class Replicated(Alone):
    def __init__(self, spec: StepSpec, mesh: Mesh, adamw: AdamW, view: View) -> None:
        super().__init__(spec, mesh, adamw, view)
        self._schedules: dict[tuple[Program, bool, bool], tuple[Touch, ...]] = {}
        self._sums: list[Pending] = []
        self._gathers: dict[int, Pending] = {}
        self.buckets, self.order = self._cut()

    def _cut(self) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
        """The buckets of gradients, and the order in which every rank sums the buckets."""
        schedule = self._schedule("step", accumulate=False)
        model = self.spec.declare(self.context, accumulate=False)
        world = self.mesh.world if self.sharded else 1
        buckets = buckets_of(model, schedule, world, self.spec.bucket_bytes, self.spec.muon)
        return buckets, order(buckets, schedule)

    def _schedule(self, program: Program, *, training: bool = True, accumulate: bool) -> tuple[Touch, ...]:
        key = program, training, accumulate
        if key not in self._schedules:
            model = self.spec.declare(self.context, training=training, accumulate=accumulate)
            self._schedules[key] = schedule_of(model, getattr(model, program))
        return self._schedules[key]

    @contextmanager
    def around(
        self, program: Program, *, training: bool = True, accumulate: bool = True, last: bool = False
    ) -> Iterator[None]:
        """Run a program of the model in this context. An op of a step waits until the parameters that it reads are gathered. In
        the last micro-batch, the sum of a bucket starts once its gradients are complete and the sum of the previous bucket has
        started."""
        if program == "step":
            self.mesh.at(f"step {self.step}: forward and backward")
        if program != "step" or not (self._gathers or last):
            yield
            return
        schedule = self._schedule(program, training=training, accumulate=accumulate)
        before: dict[int, list[Work]] = {}
        after: dict[int, list[Work]] = {}
        for i in self._gathers:
            before.setdefault(needed(self.buckets[i], schedule), []).append(partial(self._wait_for, i))
        at = 0
        for i in self.order if last else ():
            at = max(at, final(self.buckets[i], schedule))  # all ranks start the sums in the same order
            after.setdefault(at, []).append(partial(self._sum, i))
        with follow(schedule, before, after, observe_names):
            yield

    def sum_gradients(self) -> None:
        for i in self.order:
            self._sum(i)

    def _sum(self, i: int) -> None:
        self.summed = True
        self.mesh.at(f"step {self.step}: summing bucket {i} of {len(self.buckets)}")
        bucket = self.buckets[i]
        self._sums.append(self._start_sum(self.optimizer.grads[bucket.start : bucket.stop]))

    def _start_sum(self, grads: Tensor) -> Pending:
        return self.mesh.all_reduce(grads, wait=False)

    def forget_sums(self) -> None:
        while self._sums:
            self.mesh.wait(self._sums.pop(0))
        self.summed = False

    def _wait_for(self, i: int) -> None:
        self.mesh.wait(self._gathers.pop(i))

    def count(self, targets: int, micro_batches: int) -> tuple[int, int]:
        largest = self.optimizer.largest
        if largest is not None:
            largest.zero_()  # the value on a rank without a micro-batch
        return super().count(targets, micro_batches)

    def keep_largest(self) -> None:
        largest = self.optimizer.largest
        if largest is not None:
            largest_of([*self.scales.values()], largest=largest)

    def agree_on_largest(self) -> None:
        largest = self.optimizer.largest
        if largest is not None:
            self.mesh.at(f"step {self.step}: agreeing on the scales")
            self.mesh.maximum(largest)
            set_largest(largest, states=[*self.scales.values()])

    def update(self, learning_rate: float, loss: float) -> float:
        if not self.summed:
            self.sum_gradients()
        self.forget_sums()
        self.settle()  # a rank without a micro-batch has not waited for the gathers of parameters yet
        optimizer, agreed = self.optimizer, self.optimizer.agreed
        assert agreed is not None
        optimizer.measure()
        agreed[0].copy_(optimizer.norm).square_().mul_(self.sharded)
        agreed[1].copy_(optimizer.loss)
        agreed[2].fill_(self.stop)
        self.mesh.at(f"step {self.step}: agreeing on the norm")
        self.mesh.all_reduce(agreed)
        if self.sharded:
            optimizer.norm.copy_(agreed[0].sqrt_())
        optimizer.loss.copy_(agreed[1])
        _, loss, stop = agreed.tolist()
        self.stop = stop > 0
        optimizer.apply(learning_rate)
        self.step += 1
        return loss
