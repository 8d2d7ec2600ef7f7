"""An exact test of whether two tensors share memory, for any strides.

Parts of one buffer may interleave without sharing a byte, like q, k and v of a fused (B, T, 3, H, D). Two tensors share a byte
if Σ strideₐ · iₐ − Σ strideᵦ · jᵦ equals the distance of their addresses for some indices i and j in range. A stride of both
tensors is one term, with index i − j. The search starts with the largest stride. The smaller strides reach only a short
distance, so few indices of the largest stride are possible.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Terms = list[tuple[int, int, int]]  # stride in bytes, least and largest index


def share_memory(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    distance = b.data_ptr() - a.data_ptr()
    ranges: dict[int, list[int]] = {}
    for x, sign in ((a, 1), (b, -1)):
        size = x.element_size()
        for stride, n in ((1, size), *((stride * size, n) for stride, n in zip(x.stride(), x.shape, strict=True))):
            if stride and n > 1:
                reach = ranges.setdefault(stride, [0, 0])
                reach[sign > 0] += sign * (n - 1)
    return _reachable(distance, [(stride, low, high) for stride, (low, high) in sorted(ranges.items(), reverse=True)])


def _reachable(distance: int, terms: Terms) -> bool:
    """Whether Σ stride · index = distance for some indices."""
    if not terms:
        return distance == 0
    (stride, low, high), others = terms[0], terms[1:]
    least = sum(other * first for other, first, _ in others)
    most = sum(other * last for other, _, last in others)
    first, last = max(low, -((most - distance) // stride)), min(high, (distance - least) // stride)
    return any(_reachable(distance - stride * index, others) for index in range(first, last + 1))


def check_apart(writes: Mapping[str, Tensor | None], reads: Mapping[str, object]) -> None:
    """Raises if a tensor that a call writes shares memory with another tensor of the call."""
    written = [(name, x) for name, x in writes.items() if x is not None]
    read = [(name, x) for name, x in reads.items() if isinstance(x, Tensor)]
    for n, (name, x) in enumerate(written):
        for other_name, y in (*read, *written[:n]):
            if share_memory(x, y):
                raise ValueError(
                    f"{name}: got memory shared with {other_name}; accepted: memory that no input and no other output "
                    "uses (views of one buffer are accepted if they have no element in common)"
                )
