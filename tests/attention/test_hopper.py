"""The calls that the Hopper kernels take, and the random calls that test them."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from support.hopper_specs import AXES, case_of, specs
from support.pairwise import all_pairs, pairs
from torch import Tensor

import tilegrad
from tilegrad import Mask, attention_bwd, attention_fwd, attention_workspace
from tilegrad.kernels import triton_version
from tilegrad.kernels.attention.problem import Problem
from tilegrad.kernels.attention.qkv import qkv_attention_workspace, split
from tilegrad.kernels.attention.table import ATTENTION
from tilegrad.kernels.table import Explanation

pytest.importorskip("triton", reason="needs Triton")


class Handle(NamedTuple):
    """Replaces a tensor on a GPU where there is none."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda")
    strides: tuple[int, ...] = ()
    address: int = 0

    def stride(self) -> tuple[int, ...]:
        return self.strides or torch.empty(self.shape, device="meta").stride()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.address


X = Handle((2, 4, 512, 64))
WIDE = Handle((2, 4, 512, 72))
TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"causal": True, "window": (5, None), "softcap": 2.0, "scale": -1.0, "sinks": X}),
    ({"q": WIDE, "k": WIDE, "v": WIDE}, {}),
    ({}, {"intervals": Handle((2, 1, 512, 4), torch.int32), "causal": True}),
    (dict.fromkeys("qkv", Handle((2, 4, 512, 16))), {}),
    (dict.fromkeys("qkv", Handle((2, 4, 17, 64))), {}),
    ({"q": Handle((1, 65, 128, 64)), "k": Handle((1, 65, 512, 64)), "v": Handle((1, 65, 512, 64))}, {}),
    ({"q": Handle((1, 32, 129, 64)), "k": Handle((1, 32, 512, 64)), "v": Handle((1, 32, 512, 64))}, {}),
    ({"q": X._replace(strides=(512 * 768, 64, 768, 1)), "k": X, "v": X._replace(address=4096)}, {}),
    ({"q": X._replace(shape=(1, 4, 512, 64), strides=(0, 64, 768, 1)), "k": X, "v": X}, {}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"q": X._replace(device=torch.device("cpu"))}, {}, "needs a Hopper GPU, not cpu"),
    ({"q": X._replace(dtype=torch.float32)}, {}, "takes float16 and bfloat16, not float32"),
    ({"q": Handle((2, 4, 512, 36))}, {}, "16 to 256 in steps of 8, not 36 for q and 64 for v"),
    ({"q": Handle((2, 4, 512, 8)), "v": Handle((2, 4, 512, 8))}, {}, "not 8 for q"),
    ({"v": WIDE}, {}, "takes one head dimension"),
    (dict.fromkeys("qkv", Handle((2, 4, 512, 264))), {}, "16 to 256 in steps of 8, not 264 for q"),
    ({}, {"bias": X}, "takes no bias"),
    ({}, {"alibi_slopes": X}, "takes no alibi_slopes"),
    ({}, {"dropout_p": 0.1}, "takes no dropout"),
    ({"k": Handle((2, 4, 0, 64)), "v": Handle((2, 4, 0, 64))}, {}, "takes no empty tensors"),
    ({"q": Handle((2, 4, 16, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": Handle((1, 4, 100, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": Handle((1, 64, 128, 64)), "k": Handle((1, 64, 512, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": Handle((1, 32, 129, 64)), "k": Handle((1, 32, 516, 64))}, {}, "leaves few rows with many columns to triton"),
    ({"q": X._replace(strides=(512 * 770, 64, 770, 1))}, {}, "q: TMA can't step over T by 770 elements"),
    ({"k": X._replace(strides=(0, 64, 256, 1))}, {}, "k: TMA can't step over B by 0 elements"),
    ({"v": X._replace(address=8)}, {}, "v: its address is not a multiple of 16 bytes"),
]


def explained(tensors: dict[str, Any], options: dict[str, Any], kernel: str | None = None) -> Explanation:
    q, k, v = ({"q": X, "k": X, "v": X} | tensors).values()
    return ATTENTION.explain(Problem(q, k, v, Mask(**options)), kernel)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("tensors", "options"), TAKEN)
def test_hopper_takes_these_calls(tensors: dict[str, Any], options: dict[str, Any]) -> None:
    selection = explained(tensors, options)
    assert selection.kernel == "hopper" and "hopper comes first" in selection.reasons["triton"]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("tensors", "options", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_hopper_refuses_these_calls_with_a_reason(
    tensors: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    selection = explained(tensors, options)
    assert selection.kernel != "hopper" and reason in selection.reasons["hopper"]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.filterwarnings("error")
def test_fake_tensors_are_not_asked_for_their_address() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16, device="cuda")
        assert explained({"q": x, "k": x, "v": x}, {}).kernel == "hopper"


@pytest.mark.usefixtures("on_hopper")
def test_in_the_interpreter_triton_takes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    selection = explained({}, {})
    assert selection.kernel == "triton" and "no interpreter" in selection.reasons["hopper"]


def test_hopper_needs_compute_capability_9_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    selection = explained({}, {})
    assert (
        selection.kernel == "triton"
        and "needs compute capability 9.0, and cuda has 10.0" in selection.reasons["hopper"]
    )


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("3.5.1", False),
        ("3.6.0", True),
        ("3.6.1+git1", True),
        ("3.7.1", True),
        ("3.9.0", True),
        ("3.10.0", False),
        ("4.0.0", False),
        ("main", False),
    ],
)
def test_an_unknown_version_of_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(triton_version, "installed", lambda: version)
    selection = explained({}, {})
    assert selection.kernel == ("hopper" if known else "triton")
    assert (f"but {version} is installed" in selection.reasons["hopper"]) != known


@pytest.mark.parametrize(("version", "more"), [("3.6.0", False), ("3.8.1", False), ("3.9.0", True), ("3.10.0", True)])
def test_a_newer_ptxas_takes_more_registers(monkeypatch: pytest.MonkeyPatch, version: str, more: bool) -> None:
    monkeypatch.setattr(triton_version, "installed", lambda: version)
    assert triton_version.takes_more_registers() == more


@pytest.mark.usefixtures("on_hopper")
def test_packed_sequences_are_taken() -> None:
    packed = Handle((4096, 4, 64))
    ends = Handle((9,), torch.int32)
    mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=512, max_seqlen_k=512)  # type: ignore[arg-type]
    assert ATTENTION.explain(Problem(packed, packed, packed, mask)).kernel == "hopper"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("sequences", "longest", "kernel"),
    [(257, 64, "triton"), (256, 64, "hopper"), (257, 65, "hopper"), (8, 32, "hopper")],
)
def test_many_short_packed_sequences_are_left_to_triton(sequences: int, longest: int, kernel: str) -> None:
    packed, ends = Handle((65536, 4, 64)), Handle((sequences + 1,), torch.int32)
    mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)  # type: ignore[arg-type]
    selection = ATTENTION.explain(Problem(packed, packed, packed, mask))
    assert selection.kernel == kernel


ODD = X._replace(strides=(4 * 512 * 65, 512 * 65, 65, 1))
OTHERS = ("o", "do", "dq", "dk", "dv")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", OTHERS)
def test_a_buffer_that_tma_cannot_address_selects_another_kernel(name: str) -> None:
    even: dict[str, Any] = dict.fromkeys(OTHERS, X._replace(strides=(512 * 768, 64, 768, 1)))
    for others, kernel in ((even, "hopper"), (even | {name: ODD}, "triton"), (even | {name: None}, "hopper")):
        selection = tilegrad.explain(X, X, X, **others)  # type: ignore[arg-type]
        assert selection.kernel == kernel
        declared = attention_workspace(X, X, X, Mask(), backward=True, **others)
        assert declared and {buffer.split(".")[0] for buffer in declared} == {kernel}
    reason = rf"{name}: TMA can't step over T by 65 elements, only by multiples of 16 bytes"
    assert re.fullmatch(reason, tilegrad.explain(X, X, X, **{name: ODD}).reasons["hopper"])  # type: ignore[arg-type]
    x, lse = cast("Any", X), cast("Any", Handle((2, 4, 512), torch.float32))
    written = {"dq": None, "dk": None, "dv": None}
    given: dict[str, Any] = {"o": x, "do": x} | written | {name: ODD}
    o, do, *_ = given.values()
    gradients = {each: given[each] for each in written}
    calls: list[Callable[..., object]] = [
        functools.partial(tilegrad.explain, x, x, x, **given),
        functools.partial(attention_workspace, x, x, x, Mask(), backward=True, **given),
        functools.partial(attention_bwd, x, x, x, o, lse, do, None, Mask(), **gradients),
    ]
    if name == "o":
        calls.append(functools.partial(attention_fwd, x, x, x, Mask(), o=o, lse=lse))
    for call in calls:
        with pytest.raises(ValueError, match=f"kernel: got 'hopper'.*{reason}; accepted: 'triton'"):
            call(kernel="hopper")


@pytest.mark.usefixtures("on_hopper")
def test_scratch_declared_without_the_buffers_is_named_in_the_error() -> None:
    x, odd, lse = cast("Any", X), cast("Any", ODD), cast("Any", Handle((2, 4, 512), torch.float32))
    declared = {name: Handle(*need) for name, need in attention_workspace(X, X, X, Mask(), backward=True).items()}
    message = (
        r"scratch: attention got no 'triton\.delta'; accepted: .*workspace\(…\) lists all buffers, given o, do, dq too, "
        r"because 'hopper' can't run this call: dq: TMA can't step over T by 65"
    )
    with pytest.raises(ValueError, match=message):
        attention_bwd(x, x, x, x, lse, x, None, Mask(), dq=odd, dk=None, dv=None, scratch=cast("Any", declared))
    with pytest.raises(
        ValueError, match=r"got no 'triton\.delta'; .*lists all buffers$"
    ):  # a named kernel has its own list
        attention_bwd(x, x, x, x, lse, x, None, Mask(), dq=odd, dk=None, dv=None, scratch={}, kernel="triton")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("d", [16, 24, 64, 72, 128, 256])
def test_models_call_attention_with_the_layouts_that_scratch_is_declared_for(d: int) -> None:
    shape, device = (2, 512, 4, 2), torch.device("cuda")
    declared = [
        qkv_attention_workspace(*shape, d, torch.bfloat16, device, Mask(causal=True), backward=backward)
        for backward in (False, True)
    ]

    def on_gpu(x: Tensor) -> Any:
        return Handle(tuple(x.shape), x.dtype, device, x.stride(), int(x.storage_offset()) * x.element_size())

    buffers = torch.empty(2, 512, 8 * d, dtype=torch.bfloat16), torch.empty(2, 512, 4, d, dtype=torch.bfloat16)
    q, k, v = map(on_gpu, split(buffers[0], 4, 2))
    o = do = on_gpu(buffers[1].transpose(1, 2))
    for backward, others in ((False, {"o": o}), (True, {"o": o, "do": do, "dq": q, "dk": k, "dv": v})):
        own = attention_workspace(q, k, v, Mask(causal=True), backward=backward, deterministic=backward, **others)
        assert all(declared[backward][name] == form for name, form in own.items())
        assert tilegrad.explain(q, k, v, causal=True, **others).kernel == "hopper"


def test_random_shapes_cover_every_pair_of_features() -> None:
    chosen = specs()
    assert len(chosen) <= 80
    assert set.union(*map(pairs, chosen)) == all_pairs(AXES)
    for n, spec in enumerate(chosen * 3):
        drawn = case_of(spec, random.Random(n))
        assert drawn.d == drawn.dv == spec["d"] and bool(drawn.lengths) == spec["packed"]
