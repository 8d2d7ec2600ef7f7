"""The ops on a CUDA device: the same numbers as on the CPU in float64, no allocation, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ops import DTYPES, acc, poisoned, randn
from support.tolerance import assert_no_worse
from torch import Tensor

from tilegrad.kernels.activation import KINDS, activation_bwd, activation_fwd, swiglu_bwd, swiglu_fwd
from tilegrad.kernels.adamw import adamw_step, adamw_workspace, global_norm, global_norm_workspace
from tilegrad.kernels.cross_entropy import cross_entropy_step, cross_entropy_workspace
from tilegrad.kernels.embedding import embedding_bwd, embedding_fwd, embedding_workspace
from tilegrad.kernels.embedding_mse import embedding_mse_step, embedding_mse_workspace
from tilegrad.kernels.linear import linear_bwd, linear_fwd, linear_workspace
from tilegrad.kernels.norm import layernorm_bwd, layernorm_fwd, norm_workspace, rmsnorm_bwd, rmsnorm_fwd
from tilegrad.kernels.residual import dropout_fwd, dropout_workspace
from tilegrad.kernels.rope import rope_bwd, rope_fwd, rope_table, rope_workspace

pytestmark = pytest.mark.gpu
N, C, V = 3000, 96, 1200
Outputs = dict[str, Tensor]
Built = tuple[Outputs, Callable[[], None]]  # what a call writes, and the call


def build(op: str, device: str, dtype: torch.dtype) -> Built:
    """The op on `device` with the same inputs everywhere."""

    def given(*shape: int, seed: int = 0, like: torch.dtype = dtype) -> Tensor:
        return randn(*shape, dtype=torch.bfloat16, seed=seed).to(device, like)

    def scratch(shapes: Any) -> Outputs:
        return {name: x.to(device) for name, x in poisoned(shapes).items()}

    wide = acc(dtype)
    x, dy, w, b = given(N, C), given(N, C, seed=1), given(C, C, seed=2), given(C, seed=3)
    tokens = (torch.arange(N).view(3, N // 3) ** 2 % 97).to(device)
    targets = (torch.arange(N) * 7 % V).where(torch.arange(N) % 5 > 0, -1).to(device)
    inv = torch.tensor(1 / 64, dtype=wide, device=device)
    out = {name: torch.zeros(N, C, dtype=dtype, device=device) for name in ("y", "dx")}
    stats = {name: torch.zeros(N, dtype=wide, device=device) for name in ("mean", "rstd")}
    sums = {"dw": torch.zeros(C, dtype=wide, device=device), "db": torch.zeros(C, dtype=wide, device=device)}
    both = lambda workspace, *args: scratch(workspace(*args, backward=False) | workspace(*args, backward=True))  # noqa: E731
    if op == "linear":
        s, dw = both(linear_workspace, x, w), torch.zeros(C, C, dtype=wide, device=device)

        def call() -> None:
            linear_fwd(x, w, b, y=out["y"], scratch=s)
            linear_bwd(dy, x, w, dx=out["dx"], dw=dw, db=sums["db"], scratch=s)

        return out | {"dw": dw, "db": sums["db"]}, call
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
        dup = torch.zeros_like(x)

        def call() -> None:
            swiglu_fwd(x, dy, a=out["y"])
            swiglu_bwd(dy, x, dy, dgate=out["dx"], dup=dup)

        return out | {"dup": dup}, call
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
    table, dtable = given(V, C, seed=4), torch.zeros(V, C, dtype=wide, device=device)
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
        return out | {"loss": loss, "dw": dtable}, lambda: cross_entropy_step(
            x, table, targets, inv, loss=loss, dx=out["dx"], dw=dtable, scratch=s
        )
    if op == "embedding_mse":
        s = scratch(embedding_mse_workspace(x, table))
        return out | {"loss": loss, "dw": dtable}, lambda: embedding_mse_step(
            x, table, targets, inv, loss=loss, dx=out["dx"], dwte=dtable, scratch=s
        )
    arenas = {name: given(N, seed=i, like=wide).abs_() for i, name in enumerate(("params", "grads", "m", "v"))}
    norm, step = torch.zeros((), dtype=wide, device=device), torch.zeros((), device=device)
    s = scratch(global_norm_workspace(arenas["grads"]) | adamw_workspace(arenas["params"]))
    rate = torch.tensor(1e-2, device=device)

    def call() -> None:
        global_norm(arenas["grads"], norm=norm, scratch=s)
        adamw_step(norm, rate, N // 2, **arenas, step=step, scratch=s)

    return arenas | {"norm": norm, "step": step}, call


OPS = (
    "linear", "layernorm", "rmsnorm", *KINDS, "swiglu", "rope", "dropout", "embedding", "cross_entropy",
    "embedding_mse", "adamw",
)  # fmt: skip
# index_put_ sorts the tokens in buffers of torch's; round_keys makes 0-d tensors of a seed on the device
MAY_ALLOCATE = {"embedding": 1 << 18, "embedding_mse": 1 << 18, "dropout": 1 << 14}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_cpu_in_float64_agrees(op: str, dtype: torch.dtype) -> None:
    """By the one rule; the yardstick is the op itself on the CPU, which the other files measure."""
    (got, on_cuda), (want, exact), (yardstick, on_cpu) = (
        build(op, device, of) for device, of in (("cuda", dtype), ("cpu", torch.float64), ("cpu", dtype))
    )
    for call in (on_cuda, exact, on_cpu):
        call()
    assert_no_worse({name: x.cpu() for name, x in got.items()}, want, yardstick, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_same_bits_and_no_memory(op: str, dtype: torch.dtype) -> None:
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
def test_captured_in_a_graph(op: str) -> None:
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
