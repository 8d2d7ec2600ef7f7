"""Tensor cores: asynchronous MMAs of a warpgroup, which read their operands when they are waited for."""

from __future__ import annotations

from typing import Any

from support.gluon.schedule import task
from support.gluon.shared_memory import Shared
from support.gluon.values import Block, block


class Product:
    """An MMA in flight: a b + acc."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.result: Block | None = None

    @property
    def value(self) -> Block:
        assert self.result is not None, "reads a product that was not waited for"
        return self.result

    def run(self) -> None:
        a = self.a.x if isinstance(self.a, Shared) else self.a
        product = block((a.double() @ self.b.x.double()).float())  # so that k qᵀ has the bits of q kᵀ
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.result = block(product + acc) if self.use_acc else product


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    here = task()
    for operand in (a, b):
        if isinstance(operand, Shared):
            here.program.check_fenced(operand.x)
    here.products.append(Product(a, b, acc, use_acc))
    return here.products[-1]


def warpgroup_mma_wait(left: int, deps: tuple[Product, ...]) -> Any:
    here = task()
    here.schedule.pause()
    while len(here.products) > left:
        here.products.pop(0).run()
    values = tuple(product.value for product in deps)
    return values[0] if len(values) == 1 else values
