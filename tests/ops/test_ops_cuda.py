"""The ops on a CUDA device: they agree with float64 on the CPU, allocate nothing, and have the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import bounds
from support.ops import DTYPES, acc, linear_bwd, poisoned, randn
from torch import Tensor

from tilegrad.kernels.activation import (
    KINDS,
    activation_bwd,
    activation_fwd,
    activation_workspace,
    swiglu_bwd,
    swiglu_fwd,
)
from tilegrad.kernels.adamw import adamw_step, adamw_workspace
from tilegrad.kernels.closeness import Bound, assert_close
from tilegrad.kernels.column_sum import column_sum_fwd, column_sum_workspace
from tilegrad.kernels.cross_entropy import cross_entropy_bwd, cross_entropy_workspace
from tilegrad.kernels.dropout import dropout_fwd, dropout_workspace
from tilegrad.kernels.embedding import embedding_bwd, embedding_fwd, embedding_workspace
from tilegrad.kernels.embedding_mse import embedding_mse_bwd, embedding_mse_workspace
from tilegrad.kernels.global_norm import global_norm, global_norm_workspace
from tilegrad.kernels.linear import linear_fwd, linear_workspace
from tilegrad.kernels.norm import layernorm_bwd, layernorm_fwd, norm_workspace, rmsnorm_bwd, rmsnorm_fwd
from tilegrad.kernels.rope import rope_bwd, rope_fwd, rope_table, rope_workspace

pytestmark = pytest.mark.gpu
N, C, V = 3000, 96, 1200
Outputs = dict[str, Tensor]
Built = tuple[Outputs, Callable[[], None]]  # the outputs of a call, and the call


TOKENS = torch.arange(N).view(3, N // 3) ** 2 % 97
TARGETS = (torch.arange(N) * 7 % V).where(torch.arange(N) % 5 > 0, -1)


def inputs(device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, dy, w, b and a table, with the same numbers in every dtype."""
    shapes = ((N, C), (N, C), (C, C), (C,), (V, C))
    return [randn(*shape, dtype=torch.bfloat16, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]


def arenas_on(device: str, dtype: torch.dtype) -> Outputs:
    names = ("params", "grads", "m", "v")
    return {name: randn(N, dtype=torch.bfloat16, seed=i).to(device, dtype).abs_() for i, name in enumerate(names)}


def allowed(op: str, device: str, dtype: torch.dtype) -> dict[str, Bound]:
    """The bounds of the outputs of `build`'s call."""
    x, dy, w, b, table = inputs(device, dtype)
    rows = (1, N, 3, 32)
    none = bounds.bounds(dtype, {"": bounds.of(torch.zeros_like(x))})[""]
    if op in KINDS:
        named = {"a": "y", "dh": "dx"}
        of = bounds.activation(op, x, dy)
    elif op == "swiglu":
        named = {"a": "y", "dgate": "dx", "dup": "dup"}
        of = bounds.swiglu(x, dy, dy)
    elif op == "embedding":
        named = {"x": "y", "dwte": "dwte", "dwpe": "dwpe"}
        of = bounds.embedding(TOKENS.to(device), table, x, dy)
    else:
        named = {}
        of = {
            "linear": lambda: bounds.linear(x, w, b, dy),
            "layernorm": lambda: bounds.norm(x, b, b, dy, eps=1e-5, rms=False),
            "column_sum": lambda: bounds.bounds(dtype, {"db": bounds.of(dy).sum(0)}),
            "rmsnorm": lambda: bounds.norm(x, b, None, dy, eps=1e-5, rms=True),
            "rope": lambda: {
                name: Bound(*(z.view(N, C) for z in (s, a)))
                for name, (s, a, _) in bounds.rope(x.view(rows), dy.view(rows)).items()
            },
            "dropout": lambda: bounds.bounds(dtype, {"y": bounds.of(x) * (1 / (1 - 0.2))}),
            "cross_entropy": lambda: bounds.cross_entropy(x, table, TARGETS.to(device), 1 / 64),
            "embedding_mse": lambda: bounds.embedding_mse(x, table, TARGETS.to(device), 1 / 64),
            "adamw": lambda: _allowed_adamw(device, dtype),
        }[op]()
    return {"y": none, "dx": none} | {named.get(name, name): bound for name, bound in of.items()}


def _allowed_adamw(device: str, dtype: torch.dtype) -> dict[str, Bound]:
    arenas = arenas_on(device, acc(dtype))
    of = bounds.AdamW(*(bounds.of(arenas[name]) for name in ("params", "m", "v")))
    norm = of.step(arenas["grads"], 1, 1e-2, N // 2, 0.1, 1.0)
    assert of.grads is not None
    numbers = {"params": of.params, "grads": of.grads, "m": of.m, "v": of.v, "norm": norm, "step": bounds.of(1.0, norm)}
    return bounds.bounds(dtype, numbers)


def build(op: str, device: str, dtype: torch.dtype) -> Built:
    """A call of the op on `device`, with the same inputs on every device."""

    def scratch(shapes: Any) -> Outputs:
        return {name: x.to(device) for name, x in poisoned(shapes).items()}

    wide = acc(dtype)
    x, dy, w, b, table = inputs(device, dtype)
    tokens, targets = TOKENS.to(device), TARGETS.to(device)
    inv = torch.tensor(1 / 64, dtype=wide, device=device)
    out = {name: torch.zeros(N, C, dtype=dtype, device=device) for name in ("y", "dx")}
    stats: dict[str, Any] = {name: torch.zeros(N, dtype=wide, device=device) for name in ("mean", "rstd")}
    sums: dict[str, Any] = {
        "dw": torch.zeros(C, dtype=wide, device=device),
        "db": torch.zeros(C, dtype=wide, device=device),
    }
    both = lambda workspace, *args: scratch(workspace(*args, backward=False) | workspace(*args, backward=True))  # noqa: E731
    if op == "linear":
        s, dw = both(linear_workspace, x, w), torch.zeros(C, C, dtype=wide, device=device)

        def call() -> None:
            linear_fwd(x, w, b, y=out["y"], scratch=s)
            linear_bwd(dy, x, w, dx=out["dx"], dw=dw, db=sums["db"], scratch=s)

        return out | {"dw": dw, "db": sums["db"]}, call
    if op == "column_sum":
        s = scratch(column_sum_workspace(dy))
        return {"db": sums["db"]}, lambda: column_sum_fwd(dy, sums=sums["db"], scratch=s)
    if op in ("layernorm", "rmsnorm"):
        s = both(norm_workspace, x)

        def call() -> None:
            if op == "layernorm":
                layernorm_fwd(x, b, b, 1e-5, y=out["y"], **stats, scratch=s)
                layernorm_bwd(dy, x, b, stats["mean"], stats["rstd"], dx=out["dx"], **sums, scratch=s)
            else:
                rmsnorm_fwd(x, b, 1e-5, y=out["y"], rstd=stats["rstd"], scratch=s)
                rmsnorm_bwd(dy, x, b, stats["rstd"], dx=out["dx"], dw=sums["dw"], scratch=s)

        return out | stats | sums, call
    if op in KINDS:

        def call() -> None:
            activation_fwd(x, op, a=out["y"])
            activation_bwd(dy, x, op, dh=out["dx"])

        return out, call
    if op == "swiglu":
        up_gate, dup_gate = torch.cat([dy, x], 1), torch.zeros(N, 2 * x.shape[1], dtype=x.dtype, device=x.device)
        s = scratch(activation_workspace(x, "swiglu", sums=False))

        def call() -> None:
            swiglu_fwd(up_gate, a=out["y"])
            swiglu_bwd(dy, up_gate, dup_gate=dup_gate, scratch=s)
            out["dx"].copy_(dup_gate[:, x.shape[1] :])

        return out | {"dup": dup_gate[:, : x.shape[1]]}, call
    if op == "rope":
        cos, sin = torch.empty(N, 16, dtype=wide, device=device), torch.empty(N, 16, dtype=wide, device=device)
        rope_table(1e4, 32, N, cos=cos, sin=sin)
        s, shape = scratch(rope_workspace(x.view(1, N, 3, 32))), (1, N, 3, 32)

        def call() -> None:
            rope_fwd(x.view(shape), cos, sin, y=out["y"].view(shape), scratch=s)
            rope_bwd(dy.view(shape), cos, sin, dx=out["dx"].view(shape), scratch=s)

        return out, call
    if op == "dropout":
        s, seed = scratch(dropout_workspace(x)), torch.tensor(5, device=device)
        return out, lambda: dropout_fwd(x, seed, 0.2, 3, y=out["y"], scratch=s)
    dtable = torch.zeros(V, C, dtype=wide, device=device)
    if op == "embedding":
        s = scratch(embedding_workspace(dy))
        dwpe = torch.zeros(N, C, dtype=wide, device=device)

        def call() -> None:
            embedding_fwd(tokens, table, table, x=out["y"])
            embedding_bwd(dy, tokens, dwte=dtable, dwpe=dwpe, scratch=s)

        return out | {"dwte": dtable, "dwpe": dwpe}, call
    loss = torch.zeros((), dtype=wide, device=device)
    if op == "cross_entropy":
        s = scratch(cross_entropy_workspace(x, table, backward=True))
        return out | {"loss": loss, "dw": dtable}, lambda: cross_entropy_bwd(
            x, table, targets, inv, loss=loss, dx=out["dx"], dw=dtable, scratch=s
        )
    if op == "embedding_mse":
        s = scratch(embedding_mse_workspace(x, table))
        return out | {"loss": loss, "dw": dtable}, lambda: embedding_mse_bwd(
            x, table, targets, inv, loss=loss, dx=out["dx"], dwte=dtable, scratch=s
        )
    arenas: dict[str, Any] = arenas_on(device, wide)
    norm, step = torch.zeros((), dtype=wide, device=device), torch.zeros((), device=device)
    s = scratch(global_norm_workspace(arenas["grads"]) | adamw_workspace(arenas["params"]))
    rate = torch.tensor(1e-2, device=device)

    def step_once() -> None:
        global_norm(arenas["grads"], norm=norm, scratch=s)
        adamw_step(norm, rate, N // 2, **arenas, step=step, scratch=s)

    return {name: arenas[name] for name in ("params", "m", "v")} | {"norm": norm, "step": step}, step_once


OPS = (
    "linear", "column_sum", "layernorm", "rmsnorm", *KINDS, "swiglu", "rope", "dropout", "embedding", "cross_entropy",
    "embedding_mse", "adamw",
)  # fmt: skip
# torch sorts tokens in its own buffers, and its chain of ops allocates the keys of dropout
MAY_ALLOCATE = {"embedding_mse": 1 << 18, "embedding": 1 << 18, "dropout": 1 << 16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_ops_on_a_gpu_agree_with_the_cpu_in_float64(op: str, dtype: torch.dtype) -> None:
    """They agree by the closeness rule."""
    (got, on_cuda), (want, exact) = build(op, "cuda", dtype), build(op, "cpu", torch.float64)
    on_cuda()
    exact()
    of = {
        name: Bound(sigma.cpu(), b.cpu(), None if slope is None else slope.cpu())
        for name, (sigma, b, slope) in allowed(op, "cuda", dtype).items()
    }
    assert_close({name: x.cpu() for name, x in got.items()}, want, of)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_repeated_calls_have_the_same_bits_and_allocate_no_memory(op: str, dtype: torch.dtype) -> None:
    first, call = build(op, "cuda", dtype)
    call()
    second, again = build(op, "cuda", dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= MAY_ALLOCATE.get(op, 1024), f"{peak} bytes"
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("op", OPS)
def test_ops_captured_in_a_graph_have_the_same_bits(op: str) -> None:
    want, call = build(op, "cuda", torch.bfloat16)
    call()
    call()
    got, call = build(op, "cuda", torch.bfloat16)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(got[name], want[name]) for name in want)
