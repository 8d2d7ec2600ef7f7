"""The Triton kernels of the ops through the real compiler, without a GPU: registers, spills and copies of what would run."""

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
SPILLED_BYTES = {("3.9", "_norm_bwd_kernel"): 24}  # of the stack, at C 8192; none by others: kernels/triton_version.py


def check(found: dict[str, Compiled], architecture: int, names: set[str]) -> None:
    assert found.keys() == names
    for name, kernel in found.items():
        assert f".sm_{architecture}" in kernel.sass
        most = SPILLED_BYTES.get((triton.__version__[:3], name), 0)
        assert kernel.spilled_bytes <= most, f"{name} spills {kernel.spilled_bytes} bytes"
        assert kernel.shared_bytes <= SHARED_MEMORY_BYTES[architecture], name
        assert "ATOM" not in kernel.sass and "RED." not in kernel.sass, f"{name} has atomics"


def norm(x: Tensor, *, rms: bool, architecture: int, folder: Path) -> dict[str, Compiled]:
    from tilegrad.kernels.norm import Gradients, triton_ops

    (n, c), w = x.shape, torch.empty(x.shape[1], dtype=x.dtype)
    rstd, mean, scratch = (
        torch.empty(n),
        None if rms else torch.empty(n),
        poisoned(triton_ops.workspace(x, backward=True)),
    )
    dw, db, b = torch.empty(c), None if rms else torch.empty(c), None if rms else w
    with compiling(architecture, folder) as found:
        for f in (x, None):
            triton_ops.fwd(x, f, w, b, 1e-5, x1=f, y=x, mean=mean, rstd=rstd, scratch={})
        for again, dx_sum in ((x, dw), (None, None)):
            out = Gradients(x, dw, db, dx_sum, again, accumulate=True)
            triton_ops.bwd(x, x, w, mean, rstd, b, out=out, scratch=scratch)
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
def test_norms(architecture: int, c: int, dtype: torch.dtype, rms: bool, tmp_path: Path) -> None:
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
def test_column_sums(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.column_sum import triton_ops

    x = torch.empty(4096, 3072, dtype=dtype)
    scratch = poisoned(triton_ops.workspace(x))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, sums=torch.empty(3072), accumulate=True, scratch=scratch)
    check(found, architecture, {"_column_sum_kernel", "_add_partials_kernel"})
    assert ".128" in found["_column_sum_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90, slowly(100)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
@pytest.mark.parametrize("kind", ["gelu", slowly("tanh"), slowly("relu"), "swiglu"])
def test_activations(architecture: int, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.activation import triton_ops

    gate_up, sums = torch.empty(64, 6144, dtype=dtype), torch.empty(3072)
    gate, up, h = gate_up[:, :3072], gate_up[:, 3072:], torch.empty(64, 3072, dtype=dtype)
    with compiling(architecture, tmp_path) as found:
        for again, summed in ((None, None), (h, sums)):
            scratch = poisoned(triton_ops.workspace(h, kind))
            options: Any = {"a": again, "accumulate": True, "scratch": scratch}
            if kind == "swiglu":
                triton_ops.swiglu_bwd(h, gate, up, dgate=h, dup=h, dgate_sum=summed, dup_sum=summed, **options)
            else:
                triton_ops.bwd(h, h, kind, dh=h, dh_sum=summed, **options)
        if kind == "swiglu":
            triton_ops.swiglu_fwd(gate, up, a=h, scratch={})
        else:
            triton_ops.fwd(h, kind, a=h, scratch={})
    plain = ("_activation_fwd_kernel", "_activation_bwd_kernel")
    forward, backward = ("_swiglu_fwd_kernel", "_swiglu_bwd_kernel") if kind == "swiglu" else plain
    check(found, architecture, {forward, backward, f"{backward} again", "_add_partials_kernel"})
    wide = (kernel for name, kernel in found.items() if name != "_add_partials_kernel")
    assert all(".128" in kernel.sass for kernel in wide), "loads are not of 16 bytes"


ONES = [(1, 1), slowly((1, 768)), slowly((1023, 1))]


@pytest.mark.parametrize(("n", "c"), ONES)
def test_sizes_and_strides_of_1(n: int, c: int, tmp_path: Path) -> None:
    """Triton makes a constant of an argument that is 1."""
    from tilegrad.kernels.activation import triton_ops as activation
    from tilegrad.kernels.column_sum import triton_ops as column_sum

    x, y = torch.empty(n, c), torch.empty(n, c + 1)[:, :c]
    for rms in (False, True):
        norm(x, rms=rms, architecture=90, folder=tmp_path)
    with compiling(90, tmp_path) as found:
        column_sum.fwd(x, sums=torch.empty(c), accumulate=False, scratch=poisoned(column_sum.workspace(x)))
        activation.fwd(x, "gelu", a=y, scratch={})
        activation.bwd(x, x, "tanh", dh=y, a=y, dh_sum=None, accumulate=False, scratch={})
        activation.swiglu_fwd(x, x, a=y, scratch={})
        sums, scratch = torch.empty(c), poisoned(activation.workspace(x, "swiglu"))
        activation.swiglu_bwd(
            x, x, x, dgate=y, dup=y, a=y, dgate_sum=sums, dup_sum=sums, accumulate=False, scratch=scratch
        )
    assert len(found) == 7


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize(
    ("dtype", "v"),
    [(torch.bfloat16, 50257), slowly((torch.bfloat16, 50304)), slowly((torch.float32, 50257)), (torch.float32, 50304)],
)
def test_cross_entropy(architecture: int, dtype: torch.dtype, v: int, tmp_path: Path) -> None:
    from tilegrad.kernels.cross_entropy import Outputs, triton_ops

    x, w, one = torch.empty(2, 8, dtype=dtype), torch.empty(v, 8, dtype=dtype), torch.ones(())
    scratch = poisoned(triton_ops.workspace(x, w, backward=True))
    targets, dx, dw = torch.zeros(2, dtype=torch.int64), torch.empty_like(x), torch.empty(v, 8)
    with compiling(architecture, tmp_path) as found:
        triton_ops.run(x, w, targets, one, out=Outputs(one, dx, dw), scratch=scratch)
    check(found, architecture, {"_softmax_kernel", "_sum_kernel"})
    assert ".128" in found["_softmax_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("on_device", [False, True])
def test_adamw(architecture: int, on_device: bool, tmp_path: Path) -> None:
    from tilegrad.kernels.adamw import Range, triton_ops
    from tilegrad.kernels.global_norm import triton_ops as norm_ops

    p, one = torch.empty(1 << 20), torch.ones(())
    copy, rate = (p.bfloat16(), one) if on_device else (None, 1e-3)
    with compiling(architecture, tmp_path) as found:
        norm_ops.fwd([p], norm=one, scratch=poisoned(norm_ops.workspace(p)))
        triton_ops.step(
            one, rate, 0.1, 1.0, (0.9, 0.95), 1e-8, ranges=[Range(p, p, p, p, copy, 1 << 19)], step=one,
            scratch=poisoned(triton_ops.workspace(p)),
        )  # fmt: skip
    check(found, architecture, {"_squares_kernel", "_root_kernel", "_decide_kernel", "_adamw_kernel"})
    assert all(".128" in found[name].sass for name in ("_squares_kernel", "_adamw_kernel")), "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_embeddings(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.embedding import triton_ops

    x, w, dw = torch.empty(2048, 768, dtype=dtype), torch.empty(100, 768, dtype=dtype), torch.empty(1024, 768)
    tokens, scratch = torch.zeros(2, 1024, dtype=torch.int64), poisoned(triton_ops.workspace(x))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(tokens, w, w, None, x=x, scratch={})
        triton_ops.bwd(x, tokens, None, dwte=dw, dwpe=dw, accumulate=True, scratch=scratch)
    backward = {"_dwpe_kernel", "_runs_kernel", "_join_kernel"}
    check(found, architecture, {"_embedding_kernel"} | backward)


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_mix(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
    from tilegrad.kernels.mix import triton_ops

    x, lse = torch.empty(1, 64, 36, 64, dtype=dtype), torch.empty(1, 64, 36)
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, lse, o=x[:, :, :], lse=lse, scratch={})
    check(found, architecture, {"_mix_kernel"})
    assert ".128" in found["_mix_kernel"].sass, "loads are not of 16 bytes"


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, slowly(torch.float32)])
def test_rope_and_dropout(architecture: int, dtype: torch.dtype, tmp_path: Path) -> None:
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
def test_sampling(architecture: int, v: int, without: bool, tmp_path: Path) -> None:
    """The kernel without penalties is that with them less some instructions."""
    from tilegrad.kernels.sampling import triton_ops

    logits, settings, numbers = torch.empty(4, v), torch.empty(4, 5), torch.zeros(4, dtype=torch.int64)
    seen, scratch = torch.zeros(4, v, dtype=torch.uint8), poisoned(triton_ops.workspace(logits, draw=True))
    with compiling(architecture, tmp_path) as found:
        for given in (None, seen) if without else (seen,):
            triton_ops.fwd(
                logits, settings, numbers, numbers, numbers,
                tokens=numbers, logprobs=torch.empty(4), seen=given, scratch=scratch,
            )  # fmt: skip
        triton_ops.logprobs(logits, numbers, logprobs=torch.empty(4), scratch={})
    again = {"_sample_kernel again"} if without else set()
    check(found, architecture, {"_sample_kernel", "_logprobs_kernel"} | again)


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
def test_attention_over_a_cache(
    architecture: int, dtype: torch.dtype, group: int, d: int, options: dict[str, Any], tmp_path: Path
) -> None:
    from tilegrad.kernels.attention import Mask
    from tilegrad.kernels.cache_attention import triton_ops

    cache, qkv, o = (torch.empty(2, h, *n, d, dtype=dtype) for h, n in ((1, (1024,)), (group + 2, ()), (group, ())))
    numbers, scratch = torch.zeros(2, dtype=torch.int64), poisoned(triton_ops.workspace(cache, group))
    rows = qkv[:, :group], qkv[:, group : group + 1], qkv[:, group + 1 :]
    with compiling(architecture, tmp_path) as found:
        mask = Mask(causal=True, **options)
        triton_ops.fwd(*rows, numbers, mask, o=o, k_cache=cache, v_cache=cache, scratch=scratch)
        triton_ops.write(*rows[1:], numbers, k_cache=cache, v_cache=cache, scratch={})
    check(found, architecture, {"_attend_kernel", "_merge_kernel", "_write_kernel"})
    assert ".128" in found["_attend_kernel"].sass, "loads are not of 16 bytes"


def test_positions_of_packed_rows(tmp_path: Path) -> None:
    from tilegrad.kernels.embedding import triton_ops as embedding
    from tilegrad.kernels.rope import triton_ops as rope

    x, w, dw = (
        torch.empty(n, 768, dtype=dtype) for n, dtype in ((64, torch.bfloat16), (32, torch.bfloat16), (32, None))
    )
    tokens, table = torch.zeros(2, 32, dtype=torch.int64), torch.empty(32, 32)
    heads, scratch = x.view(2, 32, 12, 64), poisoned(embedding.workspace(x))
    with compiling(90, tmp_path) as found:
        embedding.fwd(tokens, w, w, tokens, x=x, scratch={})
        embedding.bwd(x, tokens, tokens, dwte=None, dwpe=dw, accumulate=False, scratch=scratch)
        rope.rotate(heads, table, table, tokens, 1.0, y=heads, scratch={})
    check(found, 90, {"_embedding_kernel", "_runs_kernel", "_join_kernel", "_rotate_kernel"})


def test_sizes_of_1_of_the_step(tmp_path: Path) -> None:
    from tilegrad.kernels.cross_entropy import Outputs
    from tilegrad.kernels.cross_entropy import triton_ops as cross_entropy
    from tilegrad.kernels.dropout import triton_ops as dropout
    from tilegrad.kernels.embedding import triton_ops as embedding
    from tilegrad.kernels.global_norm import triton_ops as global_norm
    from tilegrad.kernels.rope import triton_ops as rope

    x, one, token, table = torch.empty(1, 1), torch.ones(()), torch.zeros(1, 1, dtype=torch.int64), torch.empty(1, 1)
    heads = torch.empty(1, 1, 1, 2)
    with compiling(90, tmp_path) as found:
        scratch = poisoned(cross_entropy.workspace(x, table, backward=True))
        cross_entropy.run(x, table, token[0], one, out=Outputs(one, x, table), scratch=scratch)
        embedding.fwd(token, table, table, None, x=x, scratch={})
        scratch = poisoned(embedding.workspace(x))
        embedding.bwd(x, token, None, dwte=table, dwpe=table, accumulate=True, scratch=scratch)
        global_norm.fwd([x[0]], norm=one, scratch=poisoned(global_norm.workspace(x[0])))
        rope.rotate(heads, table, table, None, -1.0, y=heads, scratch={})
        dropout.fwd(x, token[0, 0], 2.0**-32, 1, y=x, scratch={})
    assert len(found) == 10


@pytest.mark.parametrize("architecture", [slowly(80), 90])
@pytest.mark.parametrize("n", [1, 4096])
def test_products_in_a_fixed_order(architecture: int, n: int, tmp_path: Path) -> None:
    """Every number of rows is multiplied by one kind of instruction, so that the order of its additions is the same."""
    from tilegrad.kernels.linear import triton_ops

    x, w, b, y = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((n, 768), (2304, 768), (2304,), (n, 2304)))
    scratch = poisoned(triton_ops.workspace(x, w, bias=True))
    with compiling(architecture, tmp_path) as found:
        triton_ops.fwd(x, w, b, y=y, scale=1.0, scratch=scratch)
    check(found, architecture, {"_product_kernel"} | ({"_add_splits_kernel"} if n == 1 else set()))
    products = set(re.findall(r"HGMMA\.64x\d+x16\.F32\.BF16|HMMA\.\w+", found["_product_kernel"].sass))
    assert len(products) == 1 and (architecture < 90 or "HGMMA" in products.pop())


ELSEWHERE = {"_low_rank_kernel", "_sum_parts_kernel"}  # test_ops_low_rank.py


def test_ci_compiles_every_kernel() -> None:
    """Every kernel is named by a test here, and every test has a case that is not slow."""
    from tilegrad import kernels

    sources = [path.read_text(encoding="utf-8") for path in Path(kernels.__file__).parent.glob("*/triton_ops.py")]
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
