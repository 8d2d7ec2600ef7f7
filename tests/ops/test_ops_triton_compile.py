"""Compiles the Triton kernels of the ops with the real compiler, without a GPU: registers, spills and copies are checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiler import SHARED_MEMORY_BYTES, Compiled, compiling, slowly
from support.ops import poisoned
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(
    triton.knobs.runtime.interpret or torch.cuda.is_available(), reason="compiles for GPUs that are not there"
)
# on the stack, at C 8192; the rest use none: kernels/triton_version.py
SPILLED_BYTES = {("3.9", "_norm_bwd_kernel"): 24}

# sampling: tokens do not depend on the order of candidates; float8: a count
ATOMICS = {"_gather_kernel", "_scale_kernel"}


def check(found: dict[str, Compiled], architecture: int, names: set[str]) -> None:
    assert found.keys() == names
    for name, kernel in found.items():
        assert f".sm_{architecture}" in kernel.sass
        most = SPILLED_BYTES.get((triton.__version__[:3], name), 0)
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[architecture], name
        atomics = "ATOM" in kernel.sass or "RED." in kernel.sass
        assert not atomics or name.removesuffix(" again") in ATOMICS, f"{name} has atomics"


def norm(x: Tensor, *, rms: bool, architecture: int, folder: Path) -> dict[str, Compiled]:
    from tilegrad.kernels.norm import Gradients, Outputs, Statistics, triton_ops

    (n, c), w = x.shape, torch.empty(x.shape[1], dtype=x.dtype)
    rstd, mean, scratch = (
        torch.empty(n),
        None if rms else torch.empty(n),
        poisoned(triton_ops.workspace(x, backward=True)),
    )
    dw, db, b = torch.empty(c), None if rms else torch.empty(c), None if rms else w
    with compiling(architecture, folder) as found:
        for f in (x, None):
            triton_ops.fwd(x, f, w, b, 1e-5, out=Outputs(f, x, mean, rstd), scratch={})
        for again, dx_sum in ((x, dw), (None, None)):
            out = Gradients(x, dw, db, dx_sum, again, accumulate=True)
            triton_ops.bwd(x, x, w, b, Statistics(mean, rstd), out=out, scratch=scratch)
    return found


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize(
    ("c", "dtype", "rms"),
    [
        slowly((768, torch.bfloat16, False)),
        slowly((768, torch.float32, False)),
        (2048, torch.bfloat16, True),
        slowly((63, torch.float16, False)),
        (8192, torch.bfloat16, False),
        slowly((4096, torch.float32, True)),
    ],
)
def test_norms_compile(architecture: int, c: int, dtype: torch.dtype, rms: bool, tmp_path: Path) -> None:
    found = norm(torch.empty(4096, c, dtype=dtype), rms=rms, architecture=architecture, folder=tmp_path)
    names = {"_norm_fwd_kernel", "_norm_bwd_kernel", "_add_partials_kernel"}
    check(found, architecture, names | {f"{name} again" for name in names})
    fwd, bwd = found["_norm_fwd_kernel"].sass, found["_norm_bwd_kernel"].sass
    if c % 8 == 0:
        assert ".128" in fwd, "loads are not of 16 bytes"
    if c in (768, 2048):
        assert "LDGSTS" in bwd, "loads do not go ahead of the arithmetic"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_column_sums_compile(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.column_sum import triton_ops

    x = torch.empty(4096, 3072, dtype=dtype)
    scratch = poisoned(triton_ops.workspace(x))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, sums=torch.empty(3072), accumulate=True, scratch=scratch)
    check(found, architecture, {"_column_sum_kernel", "_add_partials_kernel"})
    assert ".128" in found["_column_sum_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
@pytest.mark.parametrize("kind", ["gelu", slowly("tanh"), slowly("relu"), slowly("relu2"), "swiglu"])
def test_activations_compile(architecture: int, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.activation import Sums, triton_ops

    up_gate, sums = torch.empty(64, 6144, dtype=dtype), torch.empty(3072)
    up, gate, h = up_gate[:, :3072], up_gate[:, 3072:], torch.empty(64, 3072, dtype=dtype)
    with compiling(architecture, tmp_path) as found:
        for again, summed in ((None, None), (h, sums)):
            scratch = poisoned(triton_ops.workspace(h, kind))
            totals = () if summed is None else (summed, summed) if kind == "swiglu" else (summed,)
            options: Any = {"a": again, "sums": Sums(totals, accumulate=True), "scratch": scratch}
            if kind == "swiglu":
                triton_ops.swiglu_bwd(h, gate, up, dgate=gate, dup=up, **options)
            else:
                triton_ops.bwd(h, h, kind, dh=h, **options)
        if kind == "swiglu":
            triton_ops.swiglu_fwd(gate, up, a=h, scratch={})
        else:
            triton_ops.fwd(h, kind, a=h, scratch={})
    plain = ("_activation_fwd_kernel", "_activation_bwd_kernel")
    forward, backward = ("_swiglu_fwd_kernel", "_swiglu_bwd_kernel") if kind == "swiglu" else plain
    check(found, architecture, {forward, backward, f"{backward} again", "_add_partials_kernel"})
    wide = (kernel for name, kernel in found.items() if name != "_add_partials_kernel")
    assert all(".128" in kernel.sass for kernel in wide), "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_scaled_sums(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """All gradients, and those of frozen scalars under a frozen embedding."""
    from tilegrad.kernels.scaled_sum import Gradients, triton_ops

    x, scalar, total = torch.empty(4096, 768, dtype=dtype), torch.empty(1, dtype=dtype), torch.empty(1)
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, x, scalar, scalar, y=x, scratch={})
        for dx0, sums in ((x, total), (None, None)):
            out, scratch = (
                Gradients(x, dx0, sums, sums, accumulate=True),
                poisoned(triton_ops.workspace(x, backward=True)),
            )
            triton_ops.bwd(x, x, x, scalar, scalar, out=out, scratch=scratch)
    backward = "_scaled_sum_bwd_kernel"
    check(found, architecture, {"_scaled_sum_fwd_kernel", backward, f"{backward} again", "_add_partials_kernel"})
    wide = (kernel for name, kernel in found.items() if name != "_add_partials_kernel")
    assert all(".128" in kernel.sass for kernel in wide), "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_scaled_sums_of_columns(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Those of value embeddings, in columns of wider rows."""
    from tilegrad.kernels.scaled_sum import Gradients, triton_ops

    x, scalar = torch.empty(4096, 768, dtype=dtype), torch.empty(1, dtype=dtype)
    columns = torch.empty(4096, 2304, dtype=dtype)[:, 1536:]
    out = Gradients(x, None, torch.empty(1), None, accumulate=True)
    scratch = poisoned(triton_ops.workspace(x, backward=True))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, columns, scalar, None, y=columns, scratch={})
        triton_ops.bwd(columns, x, None, scalar, None, out=out, scratch=scratch)
    names = {"_scaled_sum_fwd_kernel", "_scaled_sum_bwd_kernel"}
    check(found, architecture, {*names, "_add_partials_kernel"})
    assert all(".128" in found[name].sass for name in names), "loads are not of 16 bytes"


@pytest.mark.parametrize("kind", ["", slowly("gelu"), "swiglu"])
def test_float8_rounding_compiles_to_vector_loads_and_stores(kind: str, tmp_path: Path) -> None:
    """Loads and both stores are of whole vectors: the transpose uses shared memory."""
    from tilegrad.kernels.fp8_linear import scaled_mm
    from tilegrad.kernels.fp8_linear.state import STATE

    n, c = 64, 3072
    x, state = torch.empty(n, 2 * c if kind == "swiglu" else c, dtype=torch.bfloat16), torch.empty(STATE)
    x8, x8t = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in ((n, c), (c, n)))
    with compiling(90, tmp_path) as found:
        if kind:
            scaled_mm.activation(x, kind, a8=x8, a8t=x8t, state=state, scratch={})
        else:
            scaled_mm.quantize(x, x8=x8, x8t=x8t, state=state, scratch={})
        scaled_mm.scale_step(states=[state], jumps=torch.empty(()), scratch={})
    check(found, 90, {"_quantize_kernel", "_scale_kernel"})
    sass = found["_quantize_kernel"].sass
    assert "LDG.E.128" in sass and "STG.E.128" in sass and "F2FP" in sass


@pytest.mark.parametrize("kind", ["gelu", slowly("swiglu"), "softmax"])
def test_float8_rounding_of_gradients_compiles_to_vector_loads_and_stores(kind: str, tmp_path: Path) -> None:
    from tilegrad.kernels.fp8_linear import scaled_mm
    from tilegrad.kernels.fp8_linear.state import STATE

    n, c = 64, 3072
    width = 2 * c if kind == "swiglu" else c
    x, h, state = (
        torch.empty(n, c, dtype=torch.bfloat16),
        torch.empty(n, width, dtype=torch.bfloat16),
        torch.empty(STATE),
    )
    x8, x8t = (torch.empty(shape, dtype=torch.float8_e5m2) for shape in ((n, width), (width, n)))
    with compiling(90, tmp_path) as found:
        if kind == "softmax":
            row, targets, scalar = torch.empty(n), torch.empty(n, dtype=torch.int64), torch.empty(())
            scaled_mm.softmax_bwd(x, targets, row, row, scalar, 0.0, dl8=x8, dl8t=x8t, state=state, scratch={})
        else:
            sums = tuple(torch.empty(2 * c).chunk(2))[: width // c]
            scratch = poisoned(scaled_mm.workspace(x, None, None, len(sums)))
            scaled_mm.activation_bwd(
                x, h, kind, dh8=x8, dh8t=x8t, a=None, sums=sums, accumulate=True, state=state, scratch=scratch
            )
    name = "_quantize_softmax_bwd_kernel" if kind == "softmax" else "_quantize_activation_bwd_kernel"
    check(found, 90, {name} if kind == "softmax" else {name, "_add_partials_kernel"})
    assert "LDG.E.128" in found[name].sass and "STG.E.128" in found[name].sass and "F2FP" in found[name].sass


ONES = [(1, 1), slowly((1, 768)), slowly((1023, 1))]


@pytest.mark.parametrize(("n", "c"), ONES)
def test_kernels_compile_for_sizes_and_strides_of_1(n: int, c: int, tmp_path: Path) -> None:
    """Triton makes a constant of an argument that is 1."""
    from tilegrad.kernels.activation import Sums
    from tilegrad.kernels.activation import triton_ops as activation
    from tilegrad.kernels.column_sum import triton_ops as column_sum

    x, y = torch.empty(n, c), torch.empty(n, c + 1)[:, :c]
    for rms in (False, True):
        norm(x, rms=rms, architecture=90, folder=tmp_path)
    with compiling(90, tmp_path) as found:
        column_sum.fwd(x, sums=torch.empty(c), accumulate=False, scratch=poisoned(column_sum.workspace(x)))
        activation.fwd(x, "gelu", a=y, scratch={})
        activation.bwd(x, x, "tanh", dh=y, a=y, sums=Sums((), accumulate=False), scratch={})
        activation.swiglu_fwd(x, x, a=y, scratch={})
        sums, scratch = Sums((torch.empty(c),) * 2, accumulate=False), poisoned(activation.workspace(x, "swiglu"))
        activation.swiglu_bwd(x, x, x, dgate=y, dup=y, a=y, sums=sums, scratch=scratch)
    assert len(found) == 7


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize(
    ("dtype", "v"),
    [(torch.bfloat16, 50257), slowly((torch.bfloat16, 50304)), slowly((torch.float32, 50257)), (torch.float32, 50304)],
)
def test_cross_entropy_compiles(architecture: int, dtype: torch.dtype, v: int, tmp_path: Path) -> None:
    from tilegrad.kernels.cross_entropy import Inputs, Outputs, triton_ops

    x, w, one = torch.empty(2, 8, dtype=dtype), torch.empty(v, 8, dtype=dtype), torch.ones(())
    scratch = poisoned(triton_ops.workspace(x, w, backward=True))
    targets, dx, dw = torch.zeros(2, dtype=torch.int64), torch.empty_like(x), torch.empty(v, 8)
    with compiling(architecture, tmp_path) as found:
        triton_ops.run(Inputs(x, w, targets, one), out=Outputs(one, dx, dw), scratch=scratch)
    check(found, architecture, {"_softmax_kernel", "_sum_kernel"})
    assert ".128" in found["_softmax_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_cross_entropy_with_every_term_compiles(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.cross_entropy import Inputs, Outputs, triton_ops
    from tilegrad.kernels.cross_entropy.terms import Terms

    v, terms = 50304, Terms(30.0, 0.1, 1e-4)
    x, w, bias = (torch.empty(*shape, dtype=dtype) for shape in ((2, 8), (v, 8), (v,)))
    scratch = poisoned(triton_ops.workspace(x, w, bias=bias, backward=True))
    targets, by_row, losses = torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.empty(2)
    out = Outputs(None, torch.empty_like(x), torch.empty(v, 8), losses=losses, dbias=torch.empty(v))
    with compiling(architecture, tmp_path) as found:
        triton_ops.run(Inputs(x, w, targets, by_row, bias, terms=terms), out=out, scratch=scratch)
    check(found, architecture, {"_softmax_kernel"})
    assert ".128" in found["_softmax_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize(
    ("on_device", "lean"), [(False, ()), (True, ()), slowly((True, ("m", "v"))), (True, ("params", "grads", "m", "v"))]
)
def test_adamw_compiles(architecture: int, on_device: bool, lean: tuple[str, ...], tmp_path: Path) -> None:
    from tilegrad.kernels.adamw import Range, Update, triton_ops
    from tilegrad.kernels.global_norm import triton_ops as norm_ops

    p, one = torch.empty(1 << 20), torch.ones(())
    copy, rate = (p.bfloat16(), one) if on_device and "params" not in lean else (None, 1e-3)
    params, grads, m, v = (p.bfloat16() if name in lean else p for name in ("params", "grads", "m", "v"))
    with compiling(architecture, tmp_path) as found:
        norm_ops.fwd([grads], norm=one, scratch=poisoned(norm_ops.workspace(p)))
        update = Update(one, rate, 0.1, 1.0, (0.9, 0.95), 1e-8, one.long())
        ranges, scratch = [Range(params, grads, m, v, copy, 1 << 19)], poisoned(triton_ops.workspace(p))
        triton_ops.step(update, ranges=ranges, step=one, scratch=scratch)
    check(found, architecture, {"_squares_kernel", "_root_kernel", "_decide_kernel", "_adamw_kernel"})
    assert all(".128" in found[name].sass for name in ("_squares_kernel", "_adamw_kernel")), "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_embeddings_compile(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.embedding import Gradients, Inputs, triton_ops

    x, w, dw = torch.empty(2048, 768, dtype=dtype), torch.empty(100, 768, dtype=dtype), torch.empty(1024, 768)
    tokens, scratch = torch.zeros(2, 1024, dtype=torch.int64), poisoned(triton_ops.workspace(x))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(Inputs(tokens, w, w, None, 50.0), x=x, scratch={})
        triton_ops.bwd(x, tokens, None, 50.0, out=Gradients(dw, dw, accumulate=True), scratch=scratch)
    backward = {"_dwpe_kernel", "_runs_kernel", "_join_kernel"}
    check(found, architecture, {"_embedding_kernel"} | backward)


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_the_mix_compiles(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.mix import triton_ops

    x, lse = torch.empty(1, 64, 36, 64, dtype=dtype), torch.empty(1, 64, 36)
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, lse, o=x[:, :, :], lse=lse, scratch={})
    check(found, architecture, {"_mix_kernel"})
    assert ".128" in found["_mix_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_rope_and_dropout_compile(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.dropout import triton_ops as dropout_ops
    from tilegrad.kernels.rope import triton_ops as rope_ops

    x, table, seed = torch.empty(64, 36 * 64, dtype=dtype), torch.empty(64, 32), torch.zeros((), dtype=torch.int64)
    heads = x.view(1, 64, 36, 64)[:, :, :24]
    with compiling(architecture, tmp_path) as found:
        rope_ops.rotate(heads, table, table, None, 1.0, y=heads, scratch={})
        dropout_ops.fwd(x, seed, 0.1, 3, y=x, scratch={})
    check(found, architecture, {"_rotate_kernel", "_dropout_kernel"})


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize(
    ("v", "without"),
    [slowly((1, True)), slowly((50257, True)), (50257, False)],
)
def test_sampling_compiles(architecture: int, v: int, without: bool, tmp_path: Path) -> None:
    """The kernel without penalties is the kernel with penalties less some instructions."""
    from tilegrad.kernels.sampling import Draws, triton_ops

    logits, settings, numbers = torch.empty(4, v), torch.empty(4, 5), torch.zeros(4, dtype=torch.int64)
    seen, scratch = torch.zeros(4, v, dtype=torch.uint8), poisoned(triton_ops.workspace(logits, draw=True))
    with compiling(architecture, tmp_path) as found:
        for given in (None, seen) if without else (seen,):
            draws = Draws(settings, numbers, numbers, numbers)
            triton_ops.fwd(logits, draws, tokens=numbers, logprobs=torch.empty(4), seen=given, scratch=scratch)
        triton_ops.logprobs(logits, numbers, logprobs=torch.empty(4), scratch={})
    names = {"_maxima_kernel", "_gather_kernel", "_choose_kernel"}
    again = {f"{name} again" for name in names} if without else set()
    check(found, architecture, names | {"_logprobs_kernel"} | again)


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize(
    ("dtype", "group", "d", "options"),
    [
        slowly((torch.bfloat16, 1, 64, {})),
        slowly((torch.bfloat16, 6, 128, {"softcap": 30.0, "scale": -0.1})),
        (torch.bfloat16, 8, 256, {"window": (99, None), "sinks": torch.zeros(8), "alibi_slopes": torch.zeros(8)}),
        slowly((torch.float32, 4, 80, {})),
    ],
)
def test_attention_over_a_cache_compiles(
    architecture: int, dtype: torch.dtype, group: int, d: int, options: dict[str, Any], tmp_path: Path
) -> None:
    from tilegrad.kernels.attention import Mask
    from tilegrad.kernels.cache_attention import Caches, triton_ops

    cache, qkv, o = (torch.empty(2, h, *n, d, dtype=dtype) for h, n in ((1, (1024,)), (group + 2, ()), (group, ())))
    numbers, scratch = torch.zeros(2, dtype=torch.int64), poisoned(triton_ops.workspace(cache, group))
    rows = qkv[:, :group], qkv[:, group : group + 1], qkv[:, group + 1 :]
    with compiling(architecture, tmp_path) as found:
        mask = Mask(causal=True, **options)
        triton_ops.fwd(*rows, numbers, mask, o=o, caches=Caches(cache, cache), scratch=scratch)
        triton_ops.write(*rows[1:], numbers, k_cache=cache, v_cache=cache, scratch={})
    check(found, architecture, {"_attend_kernel", "_merge_kernel", "_write_kernel"})
    assert ".128" in found["_attend_kernel"].sass, "loads are not of 16 bytes"


def test_positions_of_packed_rows_compile(tmp_path: Path) -> None:
    from tilegrad.kernels.embedding import Gradients, Inputs
    from tilegrad.kernels.embedding import triton_ops as embedding
    from tilegrad.kernels.rope import triton_ops as rope

    x, w, dw = (
        torch.empty(n, 768, dtype=dtype) for n, dtype in ((64, torch.bfloat16), (32, torch.bfloat16), (32, None))
    )
    tokens, table = torch.zeros(2, 32, dtype=torch.int64), torch.empty(32, 32)
    heads, scratch = x.view(2, 32, 12, 64), poisoned(embedding.workspace(x))
    with compiling(90, tmp_path) as found:
        embedding.fwd(Inputs(tokens, w, w, tokens, 1.0), x=x, scratch={})
        embedding.bwd(x, tokens, tokens, 1.0, out=Gradients(None, dw, accumulate=False), scratch=scratch)
        rope.rotate(heads, table, table, tokens, 1.0, y=heads, scratch={})
    check(found, 90, {"_embedding_kernel", "_runs_kernel", "_join_kernel", "_rotate_kernel"})


def test_the_kernels_of_a_step_compile_for_sizes_of_1(tmp_path: Path) -> None:
    from tilegrad.kernels.cross_entropy import Inputs, Outputs
    from tilegrad.kernels.cross_entropy import triton_ops as cross_entropy
    from tilegrad.kernels.dropout import triton_ops as dropout
    from tilegrad.kernels.embedding import Gradients
    from tilegrad.kernels.embedding import Inputs as EmbeddingInputs
    from tilegrad.kernels.embedding import triton_ops as embedding
    from tilegrad.kernels.global_norm import triton_ops as global_norm
    from tilegrad.kernels.rope import triton_ops as rope

    x, one, token, table = torch.empty(1, 1), torch.ones(()), torch.zeros(1, 1, dtype=torch.int64), torch.empty(1, 1)
    heads = torch.empty(1, 1, 1, 2)
    with compiling(90, tmp_path) as found:
        scratch = poisoned(cross_entropy.workspace(x, table, backward=True))
        cross_entropy.run(Inputs(x, table, token[0], one), out=Outputs(one, x, table), scratch=scratch)
        embedding.fwd(EmbeddingInputs(token, table, table, None, 1.0), x=x, scratch={})
        scratch = poisoned(embedding.workspace(x))
        embedding.bwd(x, token, None, 1.0, out=Gradients(table, table, accumulate=True), scratch=scratch)
        global_norm.fwd([x[0]], norm=one, scratch=poisoned(global_norm.workspace(x[0])))
        rope.rotate(heads, table, table, None, -1.0, y=heads, scratch={})
        dropout.fwd(x, token[0, 0], 2.0**-32, 1, y=x, scratch={})
    assert len(found) == 10


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize(("n", "k"), [(1, 768), (64, 1536), (4096, 768)])
def test_products_in_a_fixed_order_use_one_kind_of_instruction(
    architecture: int, n: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of rows is multiplied by one kind of instruction. On Hopper each adds 16 products to the registers that the
    previous one added to. So the order of additions is the same."""
    from tilegrad.kernels.linear import triton_ops

    monkeypatch.setattr(triton_ops, "takes_tma", lambda *_: architecture >= 90)
    monkeypatch.setattr(triton_ops, "takes_deep_tile", lambda _: architecture >= 90)
    x, w, b, y = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((n, k), (2304, k), (2304,), (n, 2304)))
    scratch = poisoned(triton_ops.workspace(x, w, bias=True))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, w, b, y=y, scale=1.0, scratch=scratch)
    check(found, architecture, {"_product_kernel"} | ({"_add_splits_kernel"} if k > triton_ops.SPLIT else set()))
    sass = found["_product_kernel"].sass
    if architecture < 90:
        assert len(set(re.findall(r"HMMA\.\w+", sass))) == 1
    else:
        tile = triton_ops.TILE_TMA if n > triton_ops.FEW else triton_ops.TILE_FEW_DEEP
        products = re.findall(r"HGMMA\.64x\d+x(\d+)\.F32\.BF16 (R\d+), \S+ (R\d+)[,; ]", sass)
        assert products == [("16", "R24", "R24")] * (tile.k // 16) and sass.count("HGMMA") == len(products)
    assert ("UTMALDG" in sass) == (architecture >= 90 and n > triton_ops.FEW)


@pytest.mark.parametrize("n", [1, slowly(4)])
@pytest.mark.parametrize(("m", "k"), [(2304, 768), slowly((768, 3072)), slowly((1536, 8960))])
def test_products_of_few_rows_load_w_before_they_wait(
    n: int, m: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program reads its first tile of w before it waits for the previous kernel."""
    from tilegrad.kernels.linear import few_rows

    monkeypatch.setattr(few_rows, "dependent", lambda _x, _rows: {"DEPENDENT": True, "launch_pdl": True})
    monkeypatch.setattr(few_rows, "multiprocessors", lambda _device: 132)
    x, w, b, y = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((n, k), (m, k), (m,), (n, m)))
    with compiling(90, tmp_path) as found:
        few_rows.fwd(x, w, b, y=y, scale=1.0, scratch={})
    check(found, 90, {"_few_rows_kernel"})
    before, after = found["_few_rows_kernel"].sass.split("ACQBULK")
    assert "LDG.E.128" in before and "LDG" in after and "STG" not in before


def test_kernels_of_a_step_wait_for_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel waits before it reads or writes memory that the previous one may write or read."""
    from tilegrad.kernels.activation import triton_ops as activation
    from tilegrad.kernels.norm import Outputs
    from tilegrad.kernels.norm import triton_ops as norm_ops
    from tilegrad.kernels.rope import triton_ops as rope

    for module in (activation, norm_ops, rope):
        monkeypatch.setattr(module, "dependent", lambda _x, _rows: {"DEPENDENT": True, "launch_pdl": True})
    x, table, heads = torch.empty(1, 64), torch.empty(1, 32), torch.empty(1, 1, 1, 64)
    with compiling(90, tmp_path) as found:
        norm_ops.fwd(x, x, x[0], x[0], 1e-5, out=Outputs(x, x, x[0], x[0]), scratch={})
        activation.fwd(x, "gelu", a=x, scratch={})
        activation.swiglu_fwd(x, x, a=x, scratch={})
        rope.rotate(heads, table, table, None, -1.0, y=heads, scratch={})
    check(found, 90, {"_norm_fwd_kernel", "_activation_fwd_kernel", "_swiglu_fwd_kernel", "_rotate_kernel"})
    for name, kernel in found.items():
        before, _ = kernel.sass.split("ACQBULK")
        assert "LDG" not in before and "STG" not in before and "PREEXIT" in before, name


def test_norms_and_rope_have_the_same_arithmetic_for_any_number_of_rows(tmp_path: Path) -> None:
    """Triton compiles another program if a size is 1 or a multiple of 16."""
    from tilegrad.kernels.norm import Outputs
    from tilegrad.kernels.norm import triton_ops as norm
    from tilegrad.kernels.rope import triton_ops as rope

    # MUFU.RCP is left out because it also divides ints
    arithmetic = re.compile(r"\b(?:FFMA|FMUL|FADD|SHFL|MUFU\.RSQ)[.\w]*")
    table, w = torch.empty(64, 32), torch.empty(256, dtype=torch.bfloat16)
    found: dict[str, set[tuple[str, ...]]] = {"_norm_fwd_kernel": set(), "_rotate_kernel": set()}
    for b, t, packed in ((1, 1, True), (7, 1, True), (4, 16, False)):
        x, rows = torch.empty(b, t, 4, 64, dtype=torch.bfloat16), torch.empty(b * t)
        positions = torch.zeros(b, t, dtype=torch.int64) if packed else None
        with compiling(90, tmp_path) as compiled:
            y = x.view(b * t, 256)
            norm.fwd(y, y, w, w, 1e-5, out=Outputs(y, y, rows, rows), scratch={})
            rope.rotate(x, table, table, positions, 1.0, y=x, scratch={})
        for name, kernel in compiled.items():
            found[name].add(tuple(sorted(arithmetic.findall(kernel.sass))))
    assert all(len(programs) == 1 and programs != {()} for programs in found.values())


ELSEWHERE = {"_low_rank_kernel", "_sum_parts_kernel"}  # kernels in test_ops_low_rank.py


def test_ci_compiles_every_kernel() -> None:
    """A test here names every kernel, and every test has a case that is not slow."""
    from tilegrad import kernels

    folder = Path(kernels.__file__).parent
    paths = [path for name in ("triton_ops", "few_rows") for path in folder.glob(f"*/{name}.py")]
    sources = [path.read_text(encoding="utf-8") for path in paths]
    every = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)}
    named = set(re.findall(r'"(_\w+_kernel)"', Path(__file__).read_text(encoding="utf-8")))
    assert len(every) > 20 and every <= named
    for name, test in list(globals().items()):
        marks = getattr(test, "pytestmark", ()) if name.startswith("test_") else ()
        assert not any(mark.name == "slow" for mark in marks), name
        for mark in marks:
            if mark.name == "parametrize":
                cases = [getattr(case, "marks", ()) for case in mark.args[1]]
                assert any(all(each.name != "slow" for each in marked) for marked in cases), name
