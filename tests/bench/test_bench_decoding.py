"""`benchmarks.decoding`: the groups of a decoding step, its times, and its report, from recorded kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import decoding
from benchmarks.breakdown import Launch
from benchmarks.decoding import STEPS, fold, main, one_after_another, profile_of
from tilegrad.bench.timing import Thunk
from tilegrad.model.config import PRESETS

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<long>, std::array<char*, 2ul>>"
)
CLAMP = "void at::native::vectorized_elementwise_kernel<4, at::native::clamp_kernel_cuda>"
READ = "Memcpy DtoH (Device -> Pinned)"
CUBLAS = "nvjet_sm90_tst_192x8_64x12_4x1_v_bz_splitK_TNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, float>"
ORDERED = ["_product_kernel", "_add_splits_kernel"]


def step_of(product: Sequence[str], head: Sequence[str], layers: int = 2) -> list[str]:
    """The kernels of a step of a GPT-2 on CUDA."""
    block = ["_norm_fwd_kernel", *product, "_attend_kernel", "_merge_kernel", *product]
    block += ["_norm_fwd_kernel", *product, "_activation_fwd_kernel", *product]
    drawn = ["_maxima_kernel", "_gather_kernel", "_choose_kernel"]
    return ["_embedding_kernel", *block * layers, "_norm_fwd_kernel", *head, *drawn, CLAMP, ADD, ADD, READ, READ]


def launches_of_steps(names: Sequence[str], us: float = 2.0) -> list[Launch]:
    """A kernel of `us` microseconds begins every 3 microseconds."""
    return [Launch(name, 3.0 * i, us) for i, name in enumerate([*names] * STEPS)]


@pytest.mark.parametrize(
    ("product", "head"),
    [
        (["_few_rows_kernel"], ["_few_rows_kernel"]),
        (ORDERED, ORDERED),
        ([CUBLAS], ["Memset (Device)", CUBLAS, REDUCE]),
    ],
    ids=["few_rows", "invariant", "cublas"],
)
def test_every_kernel_of_a_step_has_its_group(product: list[str], head: list[str]) -> None:
    names = step_of(product, head)
    profile = profile_of(launches_of_steps(names), n_layer=2)
    found = {decoding.NAMES.get(group.group, group.group): group.launches for group in profile.breakdown.groups}
    expected = {"embeddings": 1, "norms": 5, "products": 8 * len(product), "head": len(head), "sampling": 3}
    assert found == expected | {"attention over the cache": 4, "activation": 2, "other": 3, "copies": 2}
    assert {*profile.breakdown.unknown} == {CLAMP, ADD}


@pytest.mark.parametrize("us", [2.0, 4.0], ids=["gaps", "overlap"])
def test_groups_and_gaps_add_up_to_the_span(us: float) -> None:
    names = step_of(ORDERED, ORDERED)
    found = profile_of(launches_of_steps(names, us), n_layer=2).breakdown
    assert found.span_ms == pytest.approx((3 * (STEPS * len(names) - 1) + us) / 1e3 / STEPS)
    assert found.gaps_ms == pytest.approx((STEPS * len(names) - 1) / 1e3 / STEPS if us == 2.0 else 0.0)
    assert sum(group.ms for group in found.groups) + found.gaps_ms == pytest.approx(found.span_ms)


def test_rope_and_swiglu_have_groups() -> None:
    names = ["_embedding_kernel", "_norm_fwd_kernel", "_few_rows_kernel", "_rotate_kernel", "_swiglu_fwd_kernel"]
    groups = profile_of(launches_of_steps(names), n_layer=1).breakdown.groups
    assert {group.group for group in groups} >= {"rope", "activation forward"}


def test_a_kernel_that_starts_early_counts_from_the_end_of_those_before_it() -> None:
    launches = [Launch("b", 4.0, 11.0), Launch("a", 0.0, 10.0), Launch("inside", 5.0, 3.0), Launch("c", 20.0, 1.0)]
    ordered = one_after_another(launches)
    assert ordered == [Launch("a", 0, 10), Launch("b", 10, 5), Launch("inside", 15, 0), Launch("c", 20, 1)]


def test_the_kernels_of_a_block_are_means_over_blocks() -> None:
    step = [("first", 1.0), ("n", 2.0), ("p", 3.0), ("n", 4.0), ("p", 6.0), ("n", 9.0)]
    assert fold(step, 2) == ([("n", 3.0), ("p", 4.5)], [("first", 1.0), ("n", 9.0)])
    assert fold(step, 4) == ([], step)


def test_steps_with_different_kernels_have_no_list_of_kernels() -> None:
    names = step_of(["_few_rows_kernel"], ["_few_rows_kernel"])
    launches = launches_of_steps(names)
    whole, cut = profile_of(launches, n_layer=2), profile_of(launches[:-1], n_layer=2)
    assert [name for name, _ in whole.block] == names[1:10] and len(whole.others) == len(names) - 18
    assert cut.block == cut.others == ()
    assert profile_of([*launches[:3], Launch("x", 9.0, 2.0), *launches[4:]], n_layer=2).block == ()


class Timer:
    """Stands in for DeviceTime: the device takes 64 µs for a step, the host 96, in every round but the first."""

    def __init__(self, _device: torch.device) -> None:
        pass

    def ms(self, run: Thunk, host_ms: float) -> tuple[float, float]:
        run()
        if not host_ms:
            return 9.0, 9.0
        return 0.064 * STEPS, 0.096 * STEPS


def fake_launches(step: Thunk, _steps: int) -> list[Launch]:
    step()
    return [Launch(decoding.SLEEP, -9.0, 5.0), *launches_of_steps(step_of(ORDERED, ORDERED))]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "DeviceTime", Timer)
    monkeypatch.setattr(decoding, "launches_of", fake_launches)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)


@pytest.mark.usefixtures("on_a_cpu")
def test_both_forms_are_measured_and_profiled() -> None:
    times, profiles = decoding.measure_all(PRESETS["tiny"], 2, 5, 3, device=torch.device("cpu"), dtype=torch.float32)
    assert [*times] == [*profiles] == ["tilegrad", "tilegrad, invariant"]
    for name, each in times.items():
        assert each.device == pytest.approx([64.0] * 3) and each.submit == pytest.approx([96.0] * 3)
        assert len(each.read) == 3 and min(each.read) > 0
        line = decoding.record(each, profiles[name])
        assert line["device_us"] == pytest.approx(64.0) and line["submit_us"] == pytest.approx(96.0)
        assert line["profiled_us"] == pytest.approx(3 * len(step_of(ORDERED, ORDERED)), rel=1e-3)
        assert json.loads(json.dumps(line))["groups"]["head"] == {"us": pytest.approx(4.0), "kernels": 2.0}
    text = decoding.report(times, profiles)
    for words in ("products", "head", "sampling", "gaps", "profiled step", "device", "host, submit", "host, read"):
        assert words in text
    row = next(line.split() for line in text.splitlines() if line.startswith("products"))
    assert row == ["products", "32.0", "16", "32.0", "16"]
    assert decoding.SLEEP not in text and "_merge_kernel" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "device: got 'cpu'; accepted: a GPU"),
        (["--preset", "none"], "preset: got 'none'; accepted: tiny, gpt2"),
        (["--prompt-tokens", "929"], "prompt_tokens: got 929; accepted: 1 … 928, because block_size is 1024"),
        (["--prompt-tokens", "0"], "prompt_tokens: got 0; accepted: 1 … 928"),
        (["--rounds", "0"], "rounds: got 0; accepted: at least 1"),
    ],
)
def test_a_bad_argument_is_refused(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "check_device", lambda _device: None)
    with pytest.raises(ValueError, match=re.escape(said)):
        main(["--device", "cuda", *words])


@pytest.mark.usefixtures("on_a_cpu")
def test_the_command_prints_a_table_or_appends_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_all = decoding.measure_all
    monkeypatch.setattr(decoding, "check_device", lambda _device: None)
    monkeypatch.setattr(decoding, "environment", lambda _device, _dtype: {"commit": "abc"})
    monkeypatch.setattr(
        decoding,
        "measure_all",
        lambda *sizes, dtype, **_device: measure_all(*sizes, device=torch.device("cpu"), dtype=dtype),
    )
    arguments = [
        "--device",
        "cuda",
        "--preset",
        "tiny",
        "--dtype",
        "float32",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "x"),
    ]
    assert main(arguments) == 0
    assert "tiny, batch of 1, 32 steps after 32 tokens, 1 rounds" in capsys.readouterr().out
    plain, other = map(json.loads, (tmp_path / "x").read_text(encoding="utf-8").splitlines())
    assert (plain["form"], other["form"], other["batch_size"]) == ("tilegrad", "tilegrad, invariant", 1)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["commit"] == "abc"
