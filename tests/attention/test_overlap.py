"""Outputs that share memory with another tensor of the call are refused by name, before anything is written."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tilegrad import Mask, attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels.overlap import share_memory
from tilegrad.kernels.scratch import new_scratch

KERNELS = ("native", "tiled", "reference")
B, H, T, D = 1, 2, 8, 4
SHAPES: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v", "o", "do", "dq", "dk", "dv"), (B, H, T, D))
SHAPES |= {"lse": (B, H, T), "dlse": (B, H, T), "bias": (H, T, T), "sinks": (H,), "dbias": (H, T, T), "dsinks": (H,)}
FORWARD = ("q", "k", "v", "bias", "sinks", "o", "lse")
BACKWARD = (*FORWARD, "do", "dlse", "dq", "dk", "dv", "dbias", "dsinks")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
PAIRS = [("fwd", x, y) for x, y in itertools.combinations(FORWARD, 2) if {x, y} & {"o", "lse"}]
PAIRS += [("bwd", x, y) for x, y in itertools.combinations(BACKWARD, 2) if {x, y} & set(GRADIENTS)]


def tensors(names: tuple[str, ...]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(SHAPES[name], generator=g) for name in names}


def sharing(x: dict[str, Tensor], a: str, b: str) -> dict[str, Tensor]:
    """The tensors `x`, but the last number of `a` is the first number of `b`."""
    n, m = x[a].numel(), x[b].numel()
    memory = torch.randn(n + m - 1)
    return x | {a: memory[:n].view(SHAPES[a]), b: memory[n - 1 :].view(SHAPES[b])}


def call(direction: str, x: dict[str, Tensor], kernel: str) -> None:
    mask = Mask(causal=True, bias=x["bias"], sinks=x["sinks"])
    backward = direction == "bwd"
    needed = attention_workspace(x["q"], x["k"], x["v"], mask, backward=backward, kernel=kernel)
    how: dict[str, Any] = {"scratch": new_scratch(needed, "cpu"), "kernel": kernel}
    if not backward:
        attention_fwd(x["q"], x["k"], x["v"], mask, o=x["o"], lse=x["lse"], **how)
        return
    q, k, v, o, lse, do, dlse = (x[name] for name in ("q", "k", "v", "o", "lse", "do", "dlse"))
    gradients: dict[str, Any] = {name: x[name] for name in GRADIENTS}
    attention_bwd(q, k, v, o, lse, do, dlse, mask, **gradients, **how)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_output_that_shares_a_number_with_another_tensor_is_refused_by_name(
    kernel: str,
) -> None:
    names = {"fwd": FORWARD, "bwd": BACKWARD}
    for direction, of in names.items():
        x = tensors(of)
        call(direction, x, kernel)
        call(direction, x, kernel)  # a known call, whose addresses change
    for direction, a, b in PAIRS:
        x = sharing(tensors(names[direction]), a, b)
        before = {name: y.clone() for name, y in x.items()}
        written = b if b in (*GRADIENTS, "o", "lse") and (direction == "bwd") == (b in GRADIENTS) else a
        with pytest.raises(
            ValueError, match=rf"^({a}|{b}): got memory shared with ({a}|{b}); accepted: memory that no input"
        ) as e:
            call(direction, x, kernel)
        assert str(e.value).startswith(f"{written}:")
        assert all(torch.equal(y, before[name]) for name, y in x.items())


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_may_be_slices_of_one_buffer_and_inputs_may_be_the_same_tensor(kernel: str) -> None:
    g, mask = torch.Generator().manual_seed(0), Mask(causal=True)
    qkv, dqkv = torch.randn(B, T, 3, H, D, generator=g), torch.empty(B, T, 3, H, D)
    q, k, v = (qkv[:, :, n].transpose(1, 2) for n in range(3))
    for inputs in ((q, k, v), (q, q, q)):
        found = []
        for fused in (True, False):
            dq, dk, dv = (dqkv[:, :, n].transpose(1, 2) if fused else torch.empty(B, H, T, D) for n in range(3))
            o, lse, do = torch.empty(B, H, T, D), torch.empty(B, H, T), torch.ones(B, H, T, D)
            how: list[dict[str, Any]] = [
                {"scratch": new_scratch(attention_workspace(*inputs, mask, backward=x, kernel=kernel), "cpu"), "kernel": kernel}
                for x in (False, True)
            ]  # fmt: skip
            attention_fwd(*inputs, mask, o=o, lse=lse, **how[0])
            attention_bwd(*inputs, o, lse, do, None, mask, dq=dq, dk=dk, dv=dv, **how[1])
            found.append([o, lse, dq.clone(), dk.clone(), dv.clone()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def bytes_of(x: Tensor) -> set[int]:
    places = itertools.product(*(range(n) for n in x.shape))
    starts = {sum(i * s for i, s in zip(place, x.stride(), strict=True)) * x.element_size() for place in places}
    return {x.data_ptr() + start + byte for start in starts for byte in range(x.element_size())}


def test_tensors_share_memory_if_they_share_a_byte() -> None:
    dice, memory, shared = random.Random(0), torch.empty(4000, dtype=torch.uint8), 0

    def view() -> Tensor:
        dtype = dice.choice((torch.uint8, torch.float16, torch.float32))
        shape = [dice.randint(0 if dice.random() < 0.05 else 1, 4) for _ in range(dice.randint(0, 4))]
        strides = [dice.choice((0, 1, 2, 3, 5, 8, 12, 24)) for _ in shape]
        return memory.view(dtype).as_strided(shape, strides, dice.randint(0, 60) // dtype.itemsize)

    for _ in range(600):
        a, b = view(), view()
        want = bool(bytes_of(a) & bytes_of(b))
        assert share_memory(a, b) == want, (a.shape, a.stride(), b.shape, b.stride())
        shared += want
    assert 100 < shared < 500
