"""Every op of the package is run, and none allocates: the first law. This file finds new ops by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import batch, kinds
from support.native import needs_library
from support.ops import allocated_bytes, allowed_bytes, calls_outside_models

import tilegrad
from tilegrad import Engine
from tilegrad.kernels import residual
from tilegrad.kernels.muon import MuonConfig
from tilegrad.kernels.op import Call, observe, op
from tilegrad.model.config import ModelConfig
from tilegrad.model.layer import States
from tilegrad.model.lora import LoraConfig

CONFIGS = kinds(64)
# float8 ops: a CPU has only the kernel that checks those of the GPU, and it allocates
ON_A_GPU = {
    "fp8_activation_bwd", "fp8_activation_fwd", "fp8_cross_entropy_step", "fp8_product_fwd", "fp8_quantize_fwd",
    "fp8_scale_step", "fp8_softmax_bwd",
}  # fmt: skip

# not on a CPU if weights and x have different dtypes
JOINED = {"join_fwd", "joined_linear_bwd_input", "joined_linear_fwd"}


def names_of_ops() -> Iterator[str]:
    """The functions that the sources mark with @op."""
    for path in Path(tilegrad.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
                if any(isinstance(d, ast.Name) and d.id == "op" for d in decorators):
                    yield node.name


def form_of(call: Call) -> object:
    """What a call allocates may depend on its op, on the layout of its tensors, on which are absent, and on its options."""
    run: Any = call.run
    given = (*enumerate(run.args), *run.keywords.items())
    options = tuple((name, x) for name, x in given if isinstance(x, str | float | int | None))
    return call.name, options, tuple((x.shape, x.stride(), x.dtype) for x in (*call.reads, *call.writes))


def largest_allocations(dtype: torch.dtype) -> dict[str, int]:
    """Op → bytes of the largest allocation in its calls: steps of models, and calls of ops that no model has."""
    largest: dict[str, int] = {}
    measured: set[object] = set()  # forms of calls, of this model

    def measure(call: Call) -> None:
        form = form_of(call)
        if form in measured:  # the layers of a model, and the ways to compute a step, repeat calls of one form
            call.run()
            return
        measured.add(form)
        largest[call.name] = max(largest.get(call.name, 0), allocated_bytes(call.run))

    lean = States("bfloat16", "none", "bfloat16") if dtype == torch.bfloat16 else States("bfloat16")
    hows: list[tuple[ModelConfig, dict[str, Any]]] = [
        *((config, {"ema": 0.9}) for config in CONFIGS),
        *((config, {"ema": 0.9, "lora": LoraConfig(4, 8)}) for config in CONFIGS[1:2]),
        *((config, {"ema": 0.9, "muon": MuonConfig(cautious=True)}) for config in CONFIGS[1:2]),
        *((config, {"states": lean}) for config in CONFIGS),
    ]
    for config, how in hows:
        measured.clear()
        engine = Engine(config, 8, 16, dtype=dtype, **how)
        tokens, targets = batch(config, 8, 16)
        with observe(measure):
            engine.step(tokens, targets, learning_rate=1e-3)
            engine.forward(tokens, targets)
            engine.backward()
    measured.clear()
    with observe(measure):
        calls_outside_models(dtype)
    return largest


@needs_library  # torch's products allocate a little
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op_is_run_and_none_allocates(dtype: torch.dtype) -> None:
    largest = largest_allocations(dtype)
    elsewhere = ON_A_GPU | (JOINED if dtype == torch.bfloat16 else set())
    assert sorted(set(names_of_ops()) - elsewhere - largest.keys()) == [], "not run: call it in tests/support/ops.py"
    allowed = allowed_bytes(dtype, (128, 64, 192), (128, 64, 64), (128, 64, 256), (128, 256, 64), (128, 64, 31))
    assert {name: nbytes for name, nbytes in largest.items() if nbytes > allowed} == {}


def test_canary_an_op_that_allocates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @op()
    def copy_fwd(x: torch.Tensor, *, y: torch.Tensor) -> None:
        y.copy_(x * 1.0)

    monkeypatch.setattr("support.ops.copy_fwd", copy_fwd)
    monkeypatch.setitem(globals(), "CONFIGS", ())
    assert largest_allocations(torch.float32)["copy_fwd"] == 4 * 32 * 2 * 16 * 4
    assert residual.copy_fwd is not copy_fwd
