"""`benchmarks.training` and its parts, on a CPU with small models: the peer is the same function, a contender that is
wrong has no speed, every kernel has a group."""

import json
import math
import multiprocessing
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.forked import CONTEXT

from benchmarks import contenders, training
from benchmarks.breakdown import GROUPS, OTHER, Launch, Rates, break_down, floors, group_of, groups_of, our_kernels
from benchmarks.breakdown import report as breakdown_report
from benchmarks.cases import CASES, Case, Problem, cases_of
from benchmarks.contenders import Batches, Entry, Kind, Measured, Ours, disagreement, sustained
from benchmarks.loss_curves import BLOCK, Curves, distance, measure_curves
from benchmarks.loss_curves import report as curves_report
from benchmarks.peer import LIKE_FOR_LIKE, Peer, PeerForm, PeerModel, apart, initial_parameters
from benchmarks.step_cost import step_demands, step_flops
from benchmarks.training import (
    Ratio,
    Report,
    Row,
    Settings,
    bench_training,
    float8_products,
    parameter_count,
    publish,
    ratios,
    report,
    row_of,
)
from benchmarks.training_plots import Drawn
from tilegrad.data.tokens import write_tokens
from tilegrad.engine.engine import Engine
from tilegrad.model import reference
from tilegrad.model.config import ModelConfig

CPU = torch.device("cpu")
GPT = ModelConfig(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32)
LLAMA = replace(GPT, activation="swiglu", norm="rmsnorm", position="rope", bias=False, n_kv_head=2)
SMALL = Case("small", Problem(GPT, 4, 16, "float32"), device="cpu", speed=1.2, aim=1.3, memory=0.5)
QUICK = Settings(device="cpu", peers=("eager",), seconds=0.05, rounds=2, limit_s=120.0)


pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed", "ignore:Mismatch dtype"
)  # bf16 on a CPU without it


def batch(config, b=2, t=16):
    drawn = torch.randint(0, config.vocab_size, (b, t + 1), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


# ── the peer ──


@pytest.mark.parametrize("config", [GPT, LLAMA, replace(GPT, tie_embeddings=False)], ids=["gpt", "llama", "untied"])
@pytest.mark.parametrize("gqa", [True, False])
def test_the_peer_is_the_reference_model(config, gqa):
    params = initial_parameters(config, 3)
    tokens, targets = batch(config)
    targets = targets.clone()
    targets[0, :5] = -1
    model = PeerModel(config, PeerForm(gelu="tanh"), gqa=gqa)
    model.load(params)
    loss = model(tokens, targets)
    loss.backward()
    expected, grads = reference.gradients(params, tokens, targets, config)
    torch.testing.assert_close(loss.detach(), expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, apart(grads)[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_peer_begins_with_the_engines_parameters():
    engine = Engine(LLAMA, 1, 4, seed=5)
    params = initial_parameters(LLAMA, 5)
    assert params.keys() == engine.params.keys()
    assert all(torch.equal(params[name], p) for name, p in engine.params.items())


def test_the_forms_of_the_peer_are_different_functions():
    def loss(form, *, bf16):
        model = PeerModel(GPT, form)
        model.load({name: 5 * p for name, p in initial_parameters(GPT, 0).items()})
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return float(model(*batch(GPT)).detach())

    tanh = PeerForm(gelu="tanh")
    assert loss(PeerForm(), bf16=False) != loss(tanh, bf16=False)
    assert loss(tanh, bf16=True) != loss(LIKE_FOR_LIKE, bf16=True)
    assert "tanh GELU, bfloat16 residual stream" in str(LIKE_FOR_LIKE)


@pytest.mark.parametrize(
    "changes", [{"dropout": 0.1}, {"window": 4}, {"projection": "per_head"}, {"activation": "relu"}]
)
def test_the_peer_refuses_other_models(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: got .*which the peer has"):
        PeerModel(replace(GPT, **changes), PeerForm())


def test_the_peer_trains_like_the_engine():
    """Ten steps of both from the same parameters: forward, backward, clipping, AdamW and decay are the same."""
    tokens, targets = batch(GPT)
    engine = Engine(GPT, 2, 16)
    peer = Peer(GPT, 2, 16, CPU, seed=0, form=PeerForm(gelu="tanh"), compiled=False)
    ours = [engine.step(tokens, targets, learning_rate=1e-2) for _ in range(10)]
    theirs = []
    for _ in range(10):
        peer.submit(tokens, targets, 1e-2)
        theirs.append(peer.loss())
    assert theirs == pytest.approx(ours, rel=2e-2)
    assert theirs[-1] < theirs[0] - 1


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_compiled_peer_is_one_graph(config):
    model = PeerModel(config, LIKE_FOR_LIKE)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(graph(*batch(config)), model(*batch(config)))


# ── contenders ──


def test_a_process_for_each_contender_and_one_that_fails_is_named(monkeypatch):
    """The whole path, in processes: contenders that agree, one that fails while the others continue, and the table with its
    goals. One contender has a second process, in which its memory is measured."""
    halves = replace(SMALL, name="small-2x2", micro_batches=2)
    measured_alone = training._resident

    def of_one(entry, settings):
        return measured_alone(entry, settings) if entry == Entry("ours", halves) else {"allocated_bytes": 1}

    monkeypatch.setattr(training, "_resident", of_one)
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": CONTEXT}.__getitem__)  # its processes begin sooner
    *rows, failed = training.measure(SMALL.problem, [halves, replace(SMALL, name="odd", micro_batches=3)], QUICK)
    assert [(row.case, row.contender) for row in rows] == [("small-2x2", "eager"), ("small-2x2", "ours")]
    for row in rows:
        assert not row.note and len(row.tokens_per_s) == 2 and (row.speed or 0) > 0 and row.mfu is None
        assert (row.allocated_bytes or 0) > (0 if row.contender == "eager" else 1)
        assert row.reserved_bytes is None and not row.wrong
        assert row.loss == pytest.approx(rows[0].loss, rel=0.05)
    assert rows[0].sdpa == "FLASH_ATTENTION" and (rows[1].planned_bytes or 0) > 0
    text = report(rows, ratios(rows, [halves], ["eager"]))
    assert "small-2x2" in text and "eager" in text
    assert (failed.case, failed.wrong) == ("odd", True)
    assert "micro_batches: got 3; accepted: a divisor of 4" in failed.note


def test_a_process_begins_with_the_settings_of_malloc_of_its_contender(monkeypatch):
    begun = []

    class Process:
        def __init__(self, **_: object) -> None:
            pass

        def start(self) -> None:
            begun.append({name: value for name, value in os.environ.items() if "MALLOC_" in name})

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: context)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    before = dict(os.environ)
    for entry in (Entry("ours", SMALL, malloc="keep"), Entry("ours", SMALL, malloc="return")):
        contenders.Worker(entry)
    assert begun == [contenders.MALLOC["keep"], contenders.MALLOC["return"]]
    assert dict(os.environ) == before


def test_canary_a_wrong_step_has_no_speed(monkeypatch):
    right = Measured(Entry("eager", SMALL))
    ours = Measured(Entry("ours", SMALL))
    assert disagreement(ours.started["losses"], right.started["losses"]) == ""
    right_submit = Ours.submit
    monkeypatch.setattr(Ours, "submit", lambda self, x, y, rate: right_submit(self, x, y, 3 * rate))
    wrong = Measured(Entry("ours", SMALL))
    run = {"steps": 1, "seconds": 1.0, "loss": 4.0, "allocated_bytes": None, "reserved_bytes": None, "page_faults": 0.0}
    row = row_of(wrong.entry, SMALL.problem, wrong.started, [run], right.started["losses"], 1e12)
    assert row.wrong and row.speed is None and "WRONG: in 4 steps the loss falls by" in row.note
    assert "not measured" in report([row, row], ratios([row, replace(row, contender="eager")], [SMALL], ["eager"]))


def test_a_malloc_that_does_not_obey_is_named():
    """Without this check most of a speed-up could come from page faults."""
    started: dict[str, Any] = {"losses": [4.0, 3.9], "start_s": 1.0}
    run = {"steps": 1, "seconds": 1.0, "loss": 4.0, "allocated_bytes": 1, "reserved_bytes": None, "page_faults": 1e5}
    found = row_of(Entry("eager", SMALL), SMALL.problem, started, [run], None, 1e12)
    assert found.note == "100000 page faults in a step: malloc did not keep freed pages" and found.speed


def test_disagreement_names_the_loss_that_differs():
    assert disagreement([10.0, 8.1], [10.0, 8.0]) == ""
    assert "falls by 1.5" in disagreement([10.0, 8.5], [10.0, 8.0])
    assert "the first loss is 9.8" in disagreement([9.8, 7.8], [10.0, 8.0])
    assert disagreement([10.0, math.nan], [10.0, 8.0])
    assert disagreement([10.0, 9.9], [10.0, 8.0], same_optimizer=False) == ""
    assert "does not fall" in disagreement([10.0, 10.1], [10.0, 8.0], same_optimizer=False)
    assert "does not fall" in disagreement([10.0, math.nan], [10.0, 8.0], same_optimizer=False)


def test_tokens_are_fresh_and_the_same_for_all():
    entry = Entry("ours", SMALL, seed=7)
    a, b = Batches(entry), Batches(entry)
    first, second = a.next(), a.next()
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], b.next()[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    text = torch.arange(50)
    tokens, targets = Batches(entry, text).next()
    assert torch.equal(targets, tokens + 1) and tokens.shape == (4, 16)


def test_sustained_runs_long_enough():
    calls = []
    done = sustained(lambda: calls.append(1), 0.02, CPU)
    assert done.steps == len(calls) and done.seconds >= 0.02
    assert sustained(lambda: None, 0.0, CPU).steps == 1


# ── the table ──


def row(contender: Kind = "ours", **values: Any) -> Row:
    given: dict[str, Any] = {"tokens_per_s": (100.0, 120.0), "allocated_bytes": 1 << 30, "reserved_bytes": 2 << 30}
    return Row("small", contender, **{**given, **values})


def test_ratios_are_medians_and_goals_are_met_or_missed():
    rows = [
        row("compiled", tokens_per_s=(80.0, 100.0), allocated_bytes=4 << 30),
        row("eager", tokens_per_s=(50.0, 60.0)),
        row(),
    ]
    compiled, eager = ratios(rows, [replace(SMALL, device="cuda")], ["compiled", "eager"])
    assert compiled == Ratio("small", "compiled", (100 / 80 + 120 / 100) / 2, 1.2, 1.3, 0.25, 0.5)
    assert eager == Ratio("small", "eager", 2.0, None, None, 1.0, None)
    text = report(rows, [compiled, eager])
    assert "≥ 1.20 met" in text and "≤ 0.50 met" in text
    assert "≥ 1.20 missed" in report(rows, [replace(compiled, speed=1.199)])
    assert "≤ 0.50 missed" in report(rows, [replace(compiled, memory=0.501)])


def test_the_cases_have_the_sizes_in_their_names():
    assert len(CASES) == 36 and {case.device for case in CASES.values()} == {"cuda", "cpu"}
    config = CASES["124m-b64"].problem.config
    assert config.vocab_size == 50304 and parameter_count(config) == 124_475_904
    assert abs(parameter_count(CASES["llama-125m-b16"].problem.config) - 125e6) < 1e6
    assert parameter_count(CASES["1.5b-b8"].problem.config) == pytest.approx(1.557e9, rel=1e-2)
    assert CASES["124m-t32k"].problem.tokens == 32768
    for case in CASES.values():
        assert case.problem.batch_size % case.micro_batches == 0
        assert (case.speed and case.memory) or "fp8" in case.name or "qwen" in case.name
        assert "qwen" not in case.name or case.problem.tokens == 262_144
    assert [
        parameter_count(CASES[f"qwen2.5-{size}"].problem.config) // 10**6 for size in ("0.5b", "1.5b", "3b", "7b")
    ] == [494, 1543, 3085, 7614]
    assert len(cases_of(None, "cuda")) == 12 and "124m-b64-fp8-all-head" in {
        case.name for case in cases_of(None, "cuda")
    }
    assert [case.name for case in cases_of(["124m-b16", "124m-b64"], "cuda")] == ["124m-b64", "124m-b16"]
    with pytest.raises(ValueError, match="case: got 'huge'; accepted: 124m-b64, "):
        cases_of(["huge"], "cuda")


def test_mfu_counts_the_model_once():
    problem = CASES["124m-b16"].problem
    n, c = problem.tokens, 768
    linears, head = 12 * 12 * c * c, 50304 * c
    attention = 12 * 2 * 2 * 16 * 12 * (1024 * 1025 // 2) * 64
    assert problem.flops == 3 * (2 * n * (linears + head) + attention)
    assert step_flops(LLAMA, 1, 16) < step_flops(replace(LLAMA, n_kv_head=4), 1, 16)


def test_the_result_as_json_file_and_exit_code(monkeypatch, capsys, tmp_path):
    rows = [row("eager"), row(wrong=True, note="WRONG: x")]
    monkeypatch.setattr(training, "measure", lambda *_: rows)
    monkeypatch.setattr(training, "cases_of", lambda *_: [SMALL])
    assert bench_training(settings=QUICK, json=True, out=tmp_path / "r.md") == 1
    about, *lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert {"device", "torch", "commit", "date", "command"} <= about.keys()
    assert lines[0]["contender"] == "eager" and lines[2]["ratio"]["speed"] == 1.0
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "exact GELU, float32 residual stream" in text and "989.5 TFLOP/s" in text and "WRONG: x" in text


def test_the_recorded_command_leaves_out_the_names_of_files():
    given = ["--out", "/x/r.md", "--case", "124m-b16", "--plot", "/x/r.png", "--json"]
    assert training.command(given) == "python -m benchmarks.training --case 124m-b16 --json"


def test_without_matplotlib_the_text_is_printed_without_a_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(training, "find_spec", lambda _: None)
    assert publish(Report("text", (), []), QUICK, json=False, out=None, plot=tmp_path / "p.png") == 0
    said = capsys.readouterr()
    assert said.out == "text\n" and "matplotlib is not installed" in said.err


def test_bad_settings_of_bench_training_are_refused_by_name():
    for changes, message in (
        ({"rounds": 0}, "rounds: got 0"), ({"seconds": 0.0}, "seconds: got 0"), ({"peers": ("jax",)}, "peers: got 'jax'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            replace(QUICK, **changes)
    with pytest.raises(ValueError, match="one of the two"):
        bench_training(settings=QUICK, breakdown=True, losses=True)
    with pytest.raises(ValueError, match="peers: got none"):
        bench_training(settings=replace(QUICK, peers=()), losses=True)


# ── the breakdown ──


RECORDED = {  # the groups before and after the loss; GEMMs and ours as recorded on an H200, CUDA 13.0
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN": ("GEMM forward", "GEMM forward"),
    "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_bias_TNT": ("GEMM forward", "GEMM forward"),
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": ("GEMM forward", "GEMM dgrad"),
    "nvjet_sm90_tss_128x8_64x12_2x1_v_bx_splitK_NNT": ("GEMM forward", "GEMM dgrad"),
    "nvjet_sm90_tss_192x192_64x3_1x2_h_bz_coopB_splitK_NTN": ("GEMM forward", "GEMM wgrad"),
    "nvjet_sm90_tss_128x128_64x6_2x4_h_bz_NTT": ("GEMM forward", "GEMM wgrad"),
    "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_256x128_32x6_nt_align8>": (
        "GEMM forward", "GEMM wgrad",
    ),
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1>": (
        "GEMM forward", "GEMM dgrad",
    ),
    "at::native::(anonymous namespace)::fill_reverse_indices_kernel(long*, int, at::cuda::detail::IntDivider<unsigned int>)": (
        "embeddings", "embeddings",
    ),
    "void at_cuda_detail::cub::detail::radix_sort::DeviceRadixSortExclusiveSumKernel": ("embeddings", "embeddings"),
    "_add_partials_kernel": ("bias sums", "bias sums"),
    "_softmax_kernel": ("loss", "loss"),
    "_runs_kernel": ("embeddings", "embeddings"),
    "_decide_kernel": ("optimizer", "optimizer"),
    "_quantize_kernel": ("fp8 scaling", "fp8 scaling"),
    "_attention_fwd_kernel": ("attention forward", "attention forward"),
    "_hopper_bwd_kernel": ("attention backward", "attention backward"),
    "_hopper_preprocess_kernel": ("attention backward", "attention backward"),
    "_dkdv_kernel": ("attention backward", "attention backward"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0": (
        "attention backward", "attention backward",
    ),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0": (
        "attention forward", "attention forward",
    ),
    "_norm_fwd_kernel": ("norms forward", "norms forward"),
    "_norm_bwd_kernel": ("norms backward", "norms backward"),
    "_activation_fwd_kernel": ("activation forward", "activation forward"),
    "_swiglu_bwd_kernel": ("activation backward", "activation backward"),
    "_column_sum_kernel": ("bias sums", "bias sums"),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)": (
        "norms forward", "norms forward",
    ),
    "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, float>(int)": (
        "norms backward", "norms backward",
    ),
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)": ("loss", "loss"),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>(int)": (
        "optimizer", "optimizer",
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>": (
        "activation forward", "activation forward",
    ),
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>": (
        "embeddings", "embeddings",
    ),
    "Memcpy DtoD (Device -> Device)": ("copies", "copies"),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>": (OTHER, OTHER),
    "a kernel that nobody knows": (OTHER, OTHER),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_kernel_has_its_group(name):
    assert (group_of(name, backward=False), group_of(name, backward=True)) == RECORDED[name]


def test_every_kernel_of_ours_has_a_group():
    found = {name: groups_of(["a_gemm", name])[1] for name in our_kernels()}
    assert {"_norm_fwd_kernel", "_attention_fwd_kernel", "_hopper_bwd_kernel", "_add_partials_kernel"} <= found.keys()
    assert [name for name, group in found.items() if group == OTHER or group not in GROUPS] == []


TN, NN, NT = ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_" + layout for layout in ("TNT", "NNT", "NTT"))
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, float>"
STEP = [
    ("indexSelectLargeIndex", "embeddings"), ("_norm_fwd_kernel", "norms forward"), ("Memset (Device)", "GEMM forward"),
    (TN, "GEMM forward"), ("_activation_fwd_kernel", "activation forward"), ("a_gemm", "GEMM forward"),
    ("_norm_fwd_kernel", "norms forward"),
    (TN, "head forward"), (REDUCE, "head forward"), ("softmax_warp_forward", "loss"), ("nll_loss_x", "loss"),
    (NN, "head dgrad"), ("Memset (Device)", "head wgrad"), (NT, "head wgrad"), (REDUCE, "head wgrad"),
    (TN, "head forward"), ("softmax_warp_forward", "loss"), (NN, "head dgrad"), (NT, "head wgrad"),
    ("_sum_kernel", "loss"),
    ("_norm_bwd_kernel", "norms backward"), (NT, "GEMM wgrad"), (NN, "GEMM dgrad"), (TN, "GEMM forward"),
    ("_activation_bwd_kernel", "activation backward"), (NN, "GEMM dgrad"), (NT, "GEMM wgrad"), (REDUCE, "GEMM wgrad"),
    ("embedding_backward", "embeddings"), ("FusedAdam", "optimizer"), ("never seen", OTHER),
]  # fmt: skip


def test_the_kernels_of_a_step_have_their_groups():
    """The step includes the head's GEMMs in chunks and the kernels around a GEMM. A second step is grouped like the first."""
    names = [name for name, _ in STEP]
    assert groups_of(names * 2) == [group for _, group in STEP] * 2


def test_break_down_counts_every_launch():
    launches = [Launch(name, 10.0 * i, 8.0) for i, (name, _) in enumerate(STEP * 2)]
    launches.append(Launch("never seen", 10.0, 5.0))  # overlaps another kernel
    found = break_down(launches[::-1], {"GEMM forward": 0.01, "rope": 0.5}, steps=2)
    assert sum(group.ms for group in found.groups) == pytest.approx((8.0 * 2 * len(STEP) + 5.0) / 2e3)
    assert sum(group.launches for group in found.groups) == pytest.approx(len(STEP) + 0.5)
    assert found.span_ms == pytest.approx((10 * (2 * len(STEP) - 1) + 8) / 2e3)
    assert found.gaps_ms == pytest.approx(2 * (2 * len(STEP) - 1) / 2e3)
    assert found.unknown == {"never seen": pytest.approx(21.0 / 2e3)}
    assert found.floor_ms == pytest.approx(0.51)
    merged = {group.group for group in break_down(launches, {"all products": 0.1}, steps=2).groups}
    assert "all products" in merged and not any(group.startswith(("GEMM", "head")) for group in merged)
    text = breakdown_report(found, Rates())
    assert (
        "the largest kernels" in text
        and "never seen" in text
        and "690 TFLOP/s" in text
        and "4.3 TB/s" in text
        and "gaps" in text
    )


def test_floors_are_those_of_the_design():
    """GPT-2 124M, 16 × 1024 tokens, bfloat16."""
    problem = CASES["124m-b16"].problem
    demands = step_demands(problem.config, 16, 1024, 2, parameter_count(problem.config))
    ms = floors(demands, Rates())
    expected = {
        "GEMM forward": 4.03, "GEMM dgrad": 4.03, "GEMM wgrad": 4.03, "head forward": 1.84, "head dgrad": 1.84,
        "head wgrad": 1.84, "attention forward": 0.45, "attention backward": 1.12, "activation forward": 0.56,
        "activation backward": 1.12, "loss": 0.77, "norms forward": 0.57, "norms backward": 0.72,
    }  # fmt: skip
    for group, value in expected.items():
        assert ms[group] == pytest.approx(value, abs=0.02), group
    assert ms["optimizer"] == pytest.approx(0.87 + 0.12, abs=0.02)
    assert ms["rope"] == 0 and set(ms) <= set(GROUPS)
    fp8 = float8_products(CASES["124m-b64-fp8-all"])
    merged = floors(demands, Rates(), fp8)
    of_head, of_blocks = (sum(t for group, t in ms.items() if group.startswith(kind)) for kind in ("head", "GEMM"))
    assert of_head + 0.5 * of_blocks <= merged["all products"] < of_head + 0.6 * of_blocks
    assert "GEMM dgrad" not in merged and merged["rope"] == 0
    assert len(float8_products(CASES["124m-b64-fp8-all-head"])) == 6 and not float8_products(CASES["124m-b64"])
    assert floors(demands, Rates(flops=345e12))["head forward"] == pytest.approx(2 * ms["head forward"], rel=1e-3)


# ── loss curves ──


def test_curves_agree_within_the_spread_of_two_seeds():
    seeds = [[5 - 0.01 * i + shift for i in range(2 * BLOCK)] for shift in (0.0, 0.1)]
    near = [[loss + 0.05 for loss in losses] for losses in seeds]
    curves = Curves("compiled", tuple(map(tuple, near)), tuple(map(tuple, seeds)))
    assert curves.spread == pytest.approx(0.1) and curves.gaps == pytest.approx((0.05, 0.05)) and curves.agree
    assert "The curves agree" in curves_report(curves)
    far = replace(curves, ours=(curves.ours[0], tuple(loss + 0.2 for loss in seeds[1])))
    assert not far.agree and "DO NOT agree" in curves_report(far)
    assert not replace(curves, ours=(curves.ours[0], (math.nan,) * 2 * BLOCK)).agree
    assert distance([1.0] * BLOCK + [2.0] * BLOCK, [1.0] * 2 * BLOCK) == pytest.approx(math.sqrt(0.5))


@pytest.mark.slow
def test_loss_curves_depend_only_on_the_parameters_and_the_seed(monkeypatch, tmp_path):
    """Both contenders run in this process. The same parameters give the same curve, and a different seed another one."""
    bytes_ = replace(SMALL, problem=replace(SMALL.problem, config=replace(GPT, vocab_size=256)))

    class Here:
        def __init__(self, entry):
            self.entry, self.measured = entry, Measured(entry)
            self.answers = [self.measured.started]

        def ask(self, method, *arguments):
            self.answers.append(getattr(self.measured, method)(*arguments))

        def answer(self, _limit_s):
            return self.answers.pop(0)

        def close(self):
            pass

    monkeypatch.setattr("benchmarks.loss_curves.Worker", Here)
    result = training.losses_report([bytes_], QUICK, steps=BLOCK)
    assert isinstance(result.drawn, dict)
    curves = result.drawn["small"]
    assert isinstance(curves, Curves)
    assert result.code == 0 and curves.agree and curves.ours[0][0] == pytest.approx(math.log(256), abs=0.1)
    assert curves.ours[0] == pytest.approx(curves.peer[0], rel=0.02) and curves.ours[0] != curves.ours[1]
    tokens, nothing = np.arange(5000, dtype=np.uint16) % 256, "00" * 32
    write_tokens(tmp_path / "tokens.bin", [tokens], vocab_size=256, source_sha256=nothing, tokenizer_sha256=nothing)
    found = measure_curves([bytes_, replace(bytes_, name="again")], bytes_, 10.0, BLOCK, tmp_path / "tokens.bin")
    assert [*found] == ["small", "again"] and all(
        each.gaps == (0.0, 0.0) and each.spread > 0.0 for each in found.values()
    )
    assert found["small"].ours[0] != curves.ours[0]
    publish(result, QUICK, json=False, out=tmp_path / "losses.md", plot=None)
    assert '"agree": true' in (tmp_path / "losses.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("what", ["speed", "breakdown", "losses"])
def test_every_report_can_be_drawn(what, tmp_path):
    pytest.importorskip("matplotlib")
    curves = Curves("compiled", ((1.0,) * BLOCK,) * 2, ((2.0,) * BLOCK,) * 2)
    launches = [Launch(name, 10.0 * i, 8.0) for i, (name, _) in enumerate(STEP)]
    found: dict[str, Drawn] = {
        "speed": [row(), row("compiled")],
        "breakdown": {"small": break_down(launches, {"loss": 0.1})},
        "losses": {"small": curves},
    }
    publish(Report("", (), found[what]), QUICK, json=False, out=None, plot=tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_an_entry_gives_its_contender():
    assert Entry("ours", SMALL).name == "ours small" and Entry("compiled", SMALL).name == "compiled"
    assert isinstance(contenders.contender(Entry("eager", SMALL)), Peer)
