"""The attention benchmark: its formulas, the check before it measures, and its output."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegrad
from tilegrad.bench import attention, calls, comparison, cost, host, timing
from tilegrad.bench.attention import bench_attention
from tilegrad.bench.comparison import Row
from tilegrad.bench.shapes import PRESETS, Shape
from tilegrad.kernels.attention import tiled


@pytest.fixture(autouse=True)
def one_small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "laptop", (Shape(1, 2, 64, 16, causal=True),))


def test_visible_pairs_are_those_that_the_band_leaves() -> None:
    for tq, tk in itertools.product((0, 1, 5, 8, 13), repeat=2):
        for left, right in itertools.product((None, 0, 1, 4, 20), repeat=2):
            gaps = [i + tk - tq - j for i in range(tq) for j in range(tk)]
            seen = sum((left is None or gap <= left) and (right is None or gap >= -right) for gap in gaps)
            assert cost.visible_pairs(tq, tk, left, right) == seen


def test_flops_and_bytes_of_a_known_call() -> None:
    full: dict[str, Any] = {"batch": 2, "heads": 3, "tq": 100, "tk": 100, "d": 64, "dv": 64}
    assert cost.attention_flops(**full) == 4 * 2 * 3 * 100 * 100 * 64
    assert cost.attention_flops(**full, backward=True) == 10 * 2 * 3 * 100 * 100 * 64
    assert cost.attention_flops(**full, right=0) == 4 * 2 * 3 * (100 * 101 // 2) * 64
    tensor = 2 * 3 * 100 * 64 * 2
    assert cost.attention_bytes(2, 3, 3, 100, 100, 64, 64, 2) == 4 * tensor + 4 * 2 * 3 * 100
    assert cost.attention_bytes(2, 3, 3, 100, 100, 64, 64, 2, backward=True) == 8 * tensor + 4 * 2 * 3 * 100


def test_the_table_on_a_cpu_has_kernels_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_attention(device="cpu", dtype="float32", repeats=2, profile=True) == 0
    out = capsys.readouterr().out
    assert "B1 H2 T64 D16 causal" in out and "tiled" in out and "sdpa" in out
    assert "geometric mean" in out and "of its limit" in out
    assert "calls public functions through autograd on (B T H D) memory: wall time" in out
    assert "tiled on buffers" in out and "tiled on buffers /" not in out and "/ tiled on buffers" not in out


def test_json_lines_carry_device_versions_and_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    assert bench_attention(device="cpu", dtype="float32", repeats=2, json=True, out=str(file)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    ours = calls.kernels_on(torch.device("cpu"), torch.float32)
    assert "tiled" in ours
    assert {(line["kernel"], line["direction"]) for line in lines} == {
        (kernel, direction)
        for kernel in (*ours, *(f"{name} on buffers" for name in ours), "sdpa")
        for direction in ("forward", "backward")
    }
    assert all({"device", "torch", "triton", "commit", "date", "tflops", "p20_ms"} <= line.keys() for line in lines)


def test_a_wrong_kernel_has_no_time_and_no_speed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.kernels.attention import tiled

    right = tiled._run_forward

    def wrong(call: Any, *rest: Any) -> None:
        right(call, *rest)
        call.o[..., 0] += 0.01

    monkeypatch.setattr(tiled, "_run_forward", wrong)
    assert bench_attention(device="cpu", dtype="float32", repeats=2, kernels=["tiled"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "geometric mean" not in out
    assert not [line for line in out.splitlines() if "tiled" in line and "WRONG" not in line]


def test_speed_ups_pair_equal_shapes() -> None:
    a, b = Shape(1, 1, 8, 8), Shape(1, 1, 16, 8)
    rows = [
        Row(a, "forward", "x", 2.0, rounds_ms=(1.0, 2.0, 4.0)),
        Row(a, "forward", "y", 6.0, rounds_ms=(3.0, 8.0, 4.0)),
        Row(b, "forward", "x", 1.0, rounds_ms=(1.0, 1.0, 1.0)),
    ]
    found = comparison.speedups(rows, "x", "y", "forward")
    assert found.keys() == {a} and tuple(found[a]) == pytest.approx((3.0, 3**0.5, 12**0.5))  # ratios 3, 4, 1


def test_the_inverse_of_a_speed_up_is_the_speed_up_of_the_other_kernel() -> None:
    shape = Shape(1, 1, 8, 8)
    rows = [
        Row(shape, "backward", "x", 2.0, rounds_ms=(1.0, 2.0)),
        Row(shape, "backward", "y", 6.0, rounds_ms=(1.2, 400.0)),
    ]
    one, other = (comparison.speedups(rows, a, b, "backward")[shape].median for a, b in ("xy", "yx"))
    assert one * other == pytest.approx(1.0) and one == pytest.approx(240**0.5)


@pytest.mark.parametrize(
    "shape", ["1,1,512,16,causal", "1,1,640,16,window=100", "1,1,640,16,window=300", "1,1,500,16,causal,tq=130"]
)
def test_a_block_mask_of_flex_attention_is_what_its_own_search_finds(shape: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mine = calls.block_mask_of(Shape.parse(shape), torch.device("cpu"))
    theirs = create_block_mask(mine.mask_mod, None, None, *mine.seq_lengths, device="cpu")
    assert mine.seq_lengths == theirs.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (getattr(mine, f"{name}_{x}") for x in ("num_blocks", "indices"))
        assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks")), name
        assert torch.equal(indices, getattr(theirs, f"{name}_indices")), name


def test_only_the_shapes_of_the_command_line_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from tilegrad.cli import main

    assert Shape.parse("4,32,4096,64") == Shape(4, 32, 4096, 64)
    assert Shape.parse("1,32,8192,128,causal,hkv=8,tq=1") == Shape(1, 32, 8192, 128, causal=True, hkv=8, tq=1)
    shapes = ["1,2,32,16,window=7", "2,1,32,16"]
    common = ["bench", "attention", "--device", "cpu", "--dtype", "float32", "--repeats", "2", "--kernels", "tiled"]
    assert main([*common, "--peers", "--shape", *shapes]) == 0
    out = capsys.readouterr().out
    assert all(str(Shape.parse(shape)) in out for shape in shapes) and "T64" not in out


def test_every_packed_shape_is_followed_by_a_dense_one_of_equal_work() -> None:
    shapes = PRESETS["varlen"]
    for packed, dense in zip(shapes[::2], shapes[1::2], strict=True):
        assert sum(packed.lengths) == 32768 and (packed.d, packed.causal) == (dense.d, dense.causal)
        assert packed.flops(backward=True) == pytest.approx(dense.flops(backward=True), rel=0.1)
    rows = [Row(shapes[0], "forward", "x", 2.0), Row(shapes[1], "forward", "x", 1.0)]
    (rate,) = comparison.packed_rates(rows, "x", "forward")
    assert rate == pytest.approx(0.5, rel=0.1)


def test_packed_sequences_are_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, dense = Shape(0, 2, 0, 16, causal=True, lengths=(40, 0, 24)), Shape(2, 2, 32, 16, causal=True)
    monkeypatch.setitem(PRESETS, "laptop", (packed, dense))
    assert bench_attention(device="cpu", dtype="float32", repeats=2) == 0
    out = capsys.readouterr().out
    assert "3 packed H2 T≤40 D16 causal" in out and "tiled, backward: packed at" in out


def test_a_kernel_that_refuses_a_shape_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilegrad.kernels.attention.table import ATTENTION
    from tilegrad.kernels.table import Kernel, Table

    picky = Kernel("picky", "attention.tiled", lambda problem: "takes no causal mask" if problem.mask.causal else None)
    table = Table("attention", (picky, *ATTENTION.rows))
    for module in (attention, calls):
        monkeypatch.setattr(module, "ATTENTION", table)
    assert bench_attention(device="cpu", dtype="float32", repeats=2, kernels=["picky", "tiled"], peers=()) == 0
    out = capsys.readouterr().out
    assert "picky: takes no causal mask" in out and "tiled" in out


def test_a_window_of_sdpa_is_a_matrix() -> None:
    inputs = calls.Inputs(Shape(1, 2, 40, 16, window=7), torch.float64, torch.device("cpu"))
    (forward, backward, ours), (_, their_backward, theirs) = inputs.ours("tiled"), inputs.peer("sdpa")
    for run in (forward, backward, their_backward):
        run()
    for name in ("o", "dq", "dk", "dv"):
        torch.testing.assert_close(ours[name], theirs[name])


def test_the_benchmark_has_thirty_cells() -> None:
    cells = PRESETS["training"]
    assert len(cells) == 30 and {shape.b * shape.t for shape in cells} == {16384}
    assert {shape.h * shape.d for shape in cells} == {2048} and {shape.d for shape in cells} == {64, 128, 256}


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    picture = tmp_path / "bars.png"
    assert bench_attention(device="cpu", dtype="float32", repeats=2, json=True, plot=str(picture)) == 0
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int32"}, "dtype: got 'int32'"),
        ({"preset": "none"}, "preset: got 'none'"),
        ({"repeats": 1}, "repeats: got 1"),
        ({"shapes": ["1,2,64"]}, "shapes: got '1,2,64' \\(3 numbers instead of 4\\); accepted: B,H,T,D, then"),
        ({"shapes": ["1,2,x,16"]}, "\\('x' is not a positive number\\)"),
        ({"shapes": ["1,2,64,16,window="]}, "\\('' is not a positive number\\)"),
        ({"shapes": ["1,2,64,16,window=4,window=5"]}, "\\(window is given twice\\)"),
        ({"shapes": ["1,3,64,16,hkv=2"]}, "\\(hkv=2 does not divide H=3\\)"),
        ({"shapes": ["1,2,64,16,hkv=4"]}, "\\(hkv=4 does not divide H=2\\)"),
        ({"shapes": ["1,2,64,600"]}, "\\(D=600 is more than 512\\)"),
        ({"shapes": ["1,2,64,16,casual"]}, "shapes: got '1,2,64,16,casual' \\(unknown 'casual'\\)"),
        ({"shapes": ["1,0,64,16"]}, "shapes: got '1,0,64,16' \\(a number is 0\\)"),
        ({"shapes": ["1,2,64,16"], "preset": "laptop"}, "shapes: got .* and the preset 'laptop'; accepted: one of"),
        ({"kernels": ["x"]}, "kernels: got"),
        ({"peers": ["x"]}, "peers: got \\['x'\\]; accepted: names among sdpa"),
    ],
)
def test_bad_arguments_say_what_is_accepted(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_attention(device="cpu", **arguments)  # type: ignore[arg-type]


def test_tuning_rewrites_only_the_rows_of_the_table() -> None:
    from benchmarks.tune import _rewritten
    from tilegrad.kernels.attention.triton import tiles

    before = Path(tiles.__file__).read_text(encoding="utf-8")
    after = "\n".join(_rewritten(before.split("\n")))
    names: dict[str, object] = {}
    exec(compile(after, "tiles.py", "exec"), names)
    assert names["TABLE"] == tiles.TABLE
    assert after.split("# table begins")[0] == before.split("# table begins")[0]


def test_tuning_takes_dk_and_dv_apart_only_where_both_were_timed_and_are_faster() -> None:
    from benchmarks.tune import _taken
    from tilegrad.kernels.attention.triton.tiles import Tile, Tiles

    a, b, c, d = (Tile(n, 32, 4, 1) for n in (16, 32, 64, 128))
    together, apart = Tiles(a, a, a, a), Tiles(a, a, a, a, a, a)
    for row in (together, apart):
        assert _taken(row, {"dkdv": (3.0, b), "dk": (1.5, c), "dv": (1.0, d)}) == Tiles(a, a, b, a, c, d)
        assert _taken(row, {"dkdv": (2.0, b), "dk": (1.5, c), "dv": (1.0, d)}) == Tiles(a, a, b, a)
        assert _taken(row, {"dkdv": (2.0, b)}) == Tiles(a, a, b, a)
        assert _taken(row, {"dq": (2.0, b)}) == row._replace(dq=b)


def test_the_roofline_of_dk_and_dv_walked_apart_has_a_product_more() -> None:
    from tilegrad.bench.roofline import PROFILED, _by_part, demand

    once = [("_dkdv_kernel", 3.0), ("_dq_kernel", 2.0), ("another", 9.0)]
    assert _by_part(once * PROFILED) == pytest.approx({"dkdv": 3.0, "dq": 2.0})
    assert _by_part([*once, ("_dkdv_kernel", 1.0)] * PROFILED) == pytest.approx({"dk, dv": 4.0, "dq": 2.0})
    shape = Shape(2, 4, 128, 64, hkv=2)
    product, tensor = 2 * 2 * 4 * 128 * 128 * 64, 2 * 4 * 128 * 64 * 2
    together, apart = (demand(part, shape, 2) for part in ("dkdv", "dk, dv"))
    assert (together[0], apart[0]) == (4 * product, 5 * product)
    assert apart[1] - together[1] == 2 * tensor + tensor / 2  # q, do and k once more


def test_kernels_and_counters_are_read_from_a_report_of_ncu() -> None:
    from tilegrad.bench.roofline import COUNTERS, _counted

    kernel, counter = "  _dq_kernel (64, 1, 1)x(128, 1, 1), CC 9.0", f"    {COUNTERS[1]}    %   61.1"
    noise = [
        '==PROF== Profiling "_dq_kernel": 0%....100% - 10 passes',
        "    Section: Command line profiler metrics",
        "",
    ]
    assert _counted("\n".join([*noise, kernel + "  ", noise[1], counter, *noise])) == f"{kernel}\n{counter}"


CHECKED = (
    Shape(2, 4, 100, 32, causal=True),
    Shape(1, 4, 90, 16, window=20, hkv=2),
    Shape(2, 2, 90, 16, tq=3),
    Shape(0, 2, 0, 16, causal=True, lengths=(30, 80, 50)),
)


@pytest.mark.parametrize("scores", [1 << 22, 1000])
@pytest.mark.parametrize("shape", CHECKED, ids=str)
def test_the_check_takes_right_kernels_and_sees_a_wrong_scale(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, scores: int
) -> None:
    monkeypatch.setitem(calls.CHECKED_SCORES, "cpu", scores)
    contenders: tuple[calls.Contender, ...] = ("public", "buffers")
    for kernel, contender in itertools.product(("tiled", "reference"), contenders):
        for dtype in (torch.float32, torch.bfloat16):
            assert calls.check(kernel, shape, dtype, torch.device("cpu"), contender) == ""
    scores_of = tiled.Slab.scores
    monkeypatch.setattr(tiled.Slab, "scores", lambda slab, q, *given, **kept: scores_of(slab, 1.01 * q, *given, **kept))
    assert "lse" in calls.check("tiled", shape, torch.bfloat16, torch.device("cpu"))
    assert "dq" in calls.check("tiled", shape, torch.bfloat16, torch.device("cpu"), "public")


def test_the_order_of_a_round_changes_from_round_to_round() -> None:
    ran: list[str] = []
    thunks: dict[str, timing.Thunk] = {name: functools.partial(ran.append, name) for name in "abc"}
    ms = timing.interleaved(thunks, 3, torch.device("cpu"))
    rounds = ["".join(ran[i : i + 3]) for i in range(6, 15, 3)]  # after two to warm up
    assert rounds == ["abc", "bca", "cab"] and all(len(each) == 3 for each in ms.values())


def test_tensors_have_the_memory_order_of_a_model() -> None:
    inputs = calls.Inputs(Shape(2, 4, 40, 16, hkv=2), torch.float32, torch.device("cpu"))
    _, _, out = inputs.ours("tiled")
    for x in (inputs.q, inputs.k, inputs.v, inputs.do, *(out[name] for name in ("o", "dq", "dk", "dv"))):
        assert x.transpose(1, 2).is_contiguous() and x.stride(1) == 16


def test_on_a_gpu_the_device_flushes_its_cache_and_sleeps_while_the_host_enqueues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's events and its sleep are fakes that record their order. A cycle of the sleep is a nanosecond."""
    done: list[Any] = []
    late: list[bool] = []  # whether the device has ended its sleep before the host has enqueued the call; then False

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, _end: Event) -> float:
            return timing.CALIBRATION_CYCLES / 1e6

        def query(self) -> bool:
            return late.pop() if late else False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(cycles))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 64)
    device_time = timing.DeviceTime(torch.device("cpu"))
    monkeypatch.setattr(device_time, "_flush", types.SimpleNamespace(zero_=lambda: done.append("flush")))
    done.clear()

    def run() -> None:
        time.sleep(0.01)
        done.append("run")

    ms, host_ms = device_time.ms(run, 0.0)
    assert done == ["flush", 1e6 * timing.SLEEP_MS, "event", "run", "event", "wait"]
    assert ms == timing.CALIBRATION_CYCLES / 1e6 and host_ms >= 10
    done.clear()
    device_time.ms(lambda: None, host_ms)
    assert done[1] == int(1e6 * 2 * host_ms)
    done.clear()
    device_time.ms(lambda: None, 1e9)
    assert done[1] == 1e6 * timing.LONGEST_SLEEP_MS
    done.clear()
    late.append(True)
    _, host_ms = device_time.ms(run, 0.0)
    assert done.count("run") == 2 and done[7] > 1e6 * 2 * 10  # nanoseconds of the second sleep
    done.clear()
    late += [True] * 10
    device_time.ms(run, 0.0)
    assert done.count("run") == timing.MOST_TRIES


def test_a_wrong_peer_has_no_time_and_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = calls._peer_function

    def wrong(*args: Any, **kwargs: Any) -> Any:
        attend = right(*args, **kwargs)
        return lambda q, k, v: attend(q, k, v) * 1.01

    monkeypatch.setattr(calls, "_peer_function", wrong)
    assert bench_attention(device="cpu", dtype="float32", repeats=2, kernels=["tiled"]) == 0
    out = capsys.readouterr().out
    assert "sdpa: WRONG" in out and "geometric mean" not in out


@pytest.mark.parametrize(
    "shape", [Shape(2, 4, 40, 16, causal=True, hkv=2), Shape(0, 2, 0, 16, lengths=(40, 24))], ids=str
)
def test_flash_attention_4_is_a_peer_where_it_imports(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    assert "fa4" not in calls.peers_on(torch.device("cuda"))
    asked: list[dict[str, Any]] = []

    def dense(q: Any, k: Any, v: Any, *, causal: bool, **rest: Any) -> Any:
        asked.append(rest)
        o = tilegrad.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, kernel="tiled")
        return o.transpose(1, 2), None

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool, **rest: Any) -> Any:
        asked.append(rest)
        return tilegrad.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 40, 40, causal=causal, kernel="tiled")

    cute = types.SimpleNamespace(flash_attn_func=dense, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(cute=cute, __spec__=object()))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    assert "fa4" in calls.peers_on(torch.device("cuda"))
    assert calls.check("fa4", shape, torch.float32, torch.device("cpu"), "peer", deterministic=True) == ""
    assert asked[0] == {"window_size": (None, None), "deterministic": True}


def test_host_costs_are_measured_for_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lines.jsonl"
    assert host.bench_host(device="cpu", dtype="float32", repeats=3, out=str(file)) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    every = set(itertools.product(host.DIRECTIONS, ("tilegrad", "sdpa", "empty")))
    assert {(x["direction"], x["contender"]) for x in lines} == every and len(lines) == len(every)
    assert all(0 < x["us_20"] <= x["us"] <= x["us_80"] and x["torch"] == torch.__version__ for x in lines)
    assert all(x["ours_over_it"] == 1.0 for x in lines if x["contender"] == "tilegrad")
    assert "ours / it" in printed and "3 rounds of 20 calls" in printed
    for change, message in (
        ({"dtype": "int8"}, "dtype: got"),
        ({"repeats": 1}, "repeats: got"),
        ({"device": "meta"}, "device"),
    ):
        with pytest.raises(ValueError, match=message):
            host.bench_host(**{"device": "cpu", "repeats": 2} | change)  # type: ignore[arg-type]


def test_a_slow_call_shows_in_its_host_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*call: Any) -> Any:
        time.sleep(0.001)
        return tilegrad.attention(*call)

    monkeypatch.setattr(host, "attention", slow)
    times, left_out = host.measure(torch.device("cpu"), torch.float32, 2)
    assert min(times["tilegrad"]["forward"]) > 1000 > min(times["empty"]["forward"]) and not left_out
