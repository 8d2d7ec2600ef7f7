"""The engine on a GPU: the same gradients, the memory of the plan, the same bits twice."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import (
    CONFIG,
    LLAMA,
    QWEN3,
    SPEED_RUN,
    arguments,
    assert_equal_gradients,
    batch,
    clones,
    equal,
    random_ends,
)
from torch import Tensor

from tilegrad import Engine, LoraConfig, ModelConfig, MuonConfig
from tilegrad.engine.batch import Batch
from tilegrad.engine.decoder import Decoder, Drawn, Prompt
from tilegrad.engine.optimizer import NonFiniteError
from tilegrad.engine.planning import unplanned_bytes
from tilegrad.engine.sampling import Sampling
from tilegrad.engine.state import averaged, counters, restore_counters
from tilegrad.kernels.op import Call, observe
from tilegrad.model import reference as plain
from tilegrad.model.layer import States

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "config", [CONFIG, LLAMA, SPEED_RUN, replace(CONFIG, projection="per_head", window=4, loss="embedding_mse")]
)
def test_gradients_equal_autograd_in_float64(config: ModelConfig) -> None:
    tokens, targets = batch(config, 3, 13)
    engine = Engine(config, 3, 13, device="cuda", dtype=torch.float64)
    loss = engine.gradients(tokens.cuda(), targets.cuda())
    params = {name: p.cpu() for name, p in engine.params.items()}
    expected, exact = plain.gradients(params, tokens, targets, config)
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert_equal_gradients({name: g.cpu() for name, g in engine.grads.items()}, exact, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [CONFIG, LLAMA, SPEED_RUN, replace(CONFIG, dropout=0.1)])
def test_training_on_a_gpu_follows_training_on_the_cpu(config: ModelConfig, dtype: torch.dtype) -> None:
    config = replace(config, n_embd=64, block_size=150)
    tokens, targets = batch(config, 4, 150, ignored=0.0)
    here, there = (Engine(config, 4, 150, device=device, dtype=dtype) for device in ("cpu", "cuda"))
    for b, t in ((4, 150), (2, 7), (3, 41), (4, 150)):
        x, y = tokens[:b, :t], targets[:b, :t]
        a = here.step(x, y, learning_rate=1e-3)
        assert there.step(x.cuda(), y.cuda(), learning_rate=1e-3) == pytest.approx(
            a, rel=2e-2 if dtype == torch.bfloat16 else 1e-4
        )


def test_allocated_bytes_equal_the_plan_and_a_step_allocates_little() -> None:
    config = replace(CONFIG, n_embd=128, block_size=128, vocab_size=1000)
    tokens, targets = batch(config, 4, 128)
    tokens, targets = tokens.cuda(), targets.cuda()
    gc.collect()  # frees engines of earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    engine = Engine(config, 4, 128, device="cuda", dtype=torch.bfloat16)
    grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert grown == engine.plan.peak_bytes == engine.arenas.nbytes
    engine.step(tokens, targets, learning_rate=1e-3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine.step(tokens, targets, learning_rate=1e-3)
    # the embedding's backward sorts its tokens: about 50 bytes for each
    assert torch.cuda.max_memory_allocated() - before <= 256 * tokens.numel()


@pytest.mark.parametrize("muon", [None, MuonConfig()])
def test_the_average_of_a_captured_step_has_the_bits_of_an_uncaptured_one(muon: MuonConfig | None) -> None:
    """bfloat16 copies of the weights follow both swaps."""
    config = replace(CONFIG, n_embd=64, block_size=64)
    x, y = (z.cuda() for z in batch(config, 4, 64))
    engines = [Engine(config, 4, 64, device="cuda", ema=0.9, muon=muon, capture=capture) for capture in (True, False)]
    losses = []
    for engine in engines:
        for _ in range(4):
            engine.step(x, y, learning_rate=1e-2)
        before, loss = clones(engine.tensors()), engine.evaluate(x, y)
        with averaged(engine):
            losses.append(engine.evaluate(x, y))
        assert equal(engine.tensors(), before) and engine.evaluate(x, y) == loss != losses[-1]
        engine.step(x, y, learning_rate=1e-2)
    assert losses[0] == losses[1] and equal(engines[0].tensors(), engines[1].tensors())


@pytest.mark.parametrize("t", [16, 200])  # triton takes few rows
def test_repeated_steps_have_the_same_bits(t: int) -> None:
    config = replace(CONFIG, n_embd=64, block_size=200)
    tokens, targets = batch(config, 4, t)
    grads = []
    for _ in range(2):
        engine = Engine(config, 4, 200, device="cuda", dtype=torch.bfloat16)
        engine.gradients(tokens.cuda(), targets.cuda())
        grads.append({name: g.clone() for name, g in engine.grads.items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


# ── the captured step ──


@pytest.mark.parametrize(
    "config",
    [CONFIG, LLAMA, SPEED_RUN, replace(CONFIG, dropout=0.1)],
    ids=["gpt", "llama", "speed run", "dropout"],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_the_captured_step_has_the_bits_of_the_uncaptured_one(config: ModelConfig, parts: int) -> None:
    """The captured step of one part also shares memory between gradients and activations."""
    config = replace(config, n_embd=64, block_size=64)
    captured, plain_ = (
        Engine(config, 4, 64, device="cuda", capture=capture, accumulate=not capture or parts > 1)
        for capture in (True, False)
    )
    for i in range(200):
        batches = [batch(config, 4, 64, seed=parts * i + j) for j in range(parts)]
        rate = 1e-3 * (1 + i % 7)
        losses = [e.step([x for x, _ in batches], [y for _, y in batches], rate) for e in (captured, plain_)]
        assert losses[0] == losses[1], i
    assert equal(captured.tensors(), plain_.tensors())
    assert captured._device_steps[((4, 64),) * parts, None].captured.graph is not None
    assert plain_._device_steps[((4, 64),) * parts, None].captured.graph is None


def test_a_nan_after_any_op_inside_the_graph_changes_nothing() -> None:
    """One graph, in which a number on the device says after which op a NaN is written."""
    config = replace(CONFIG, n_layer=2, n_embd=64, block_size=64, dropout=0.1)
    engine, given = Engine(config, 4, 64, device="cuda"), batch(config, 4, 64, ignored=0.0)
    engine.step(*given, 1e-3)
    at = torch.full((), -1, dtype=torch.int64, device="cuda")
    names: list[str] = []
    optimizer_ops = ("guard", "adamw_step")

    def spoil(call: Call) -> None:
        call.run()
        here = at == len(names)
        names.append(call.name)
        first = call.writes[0]
        if first.dtype.is_floating_point and call.name not in optimizer_ops:
            first.masked_fill_(here, math.nan)

    with observe(spoil):
        engine.step(*given, 1e-3)  # captures
    before, skipped = clones(engine.tensors()), 0
    for k, name in enumerate(names):
        if name in optimizer_ops:
            continue
        at.fill_(k)
        result = engine.step(*given, 1e-3)
        left_out = engine.optimizer.skipped - skipped
        skipped = engine.optimizer.skipped
        assert left_out == 1 and equal(before, engine.tensors()), (k, name, result)
        at.fill_(-1)
        engine.step(*given, 0.0)
        before = clones(engine.tensors())
    assert len(names) > 30 and engine.optimizer.skipped_in_a_row == 0


def test_ten_skipped_steps_in_a_row_stop_training_and_later_steps_do_nothing() -> None:
    config = replace(CONFIG, n_embd=64, block_size=64)
    engine, given = Engine(config, 4, 64, device="cuda"), batch(config, 4, 64)
    for _ in range(3):
        engine.step(*given, 1e-3)
    weight = engine.params["ln_f.weight"]
    kept = weight[0].clone()
    weight[0] = math.nan
    for _ in range(9):
        engine.submit(*given, 1e-3)
    engine.finished(wait=True)
    for _ in range(3):  # two more steps are queued when the host sees the tenth
        engine.submit(*given, 1e-3)
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        engine.finished(wait=True)
    weight[0] = kept
    before = clones(engine.tensors())
    assert engine.optimizer.skipped == 10
    engine.step(*given, 1e-3)
    assert engine.optimizer.skipped_in_a_row == 0 and not equal(before, engine.tensors())


def test_after_the_capture_a_step_allocates_no_memory_and_other_work_may_run_between_steps() -> None:
    config = replace(CONFIG, n_embd=128, block_size=128, vocab_size=1000)
    engine = Engine(config, 4, 128, device="cuda")
    batches = [batch(config, 4, 128, seed=i) for i in range(8)]
    for given in batches[:4]:
        engine.step(*given, 1e-3)
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    for given in batches:
        engine.submit(*given, 1e-3)
    results = engine.finished(wait=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == count and len(results) == 8
    other = Engine(config, 4, 128, device="cuda", capture=False)
    for given in batches[:4]:
        other.step(*given, 1e-3)
    other.evaluate(*batches[0])
    losses = []
    for given in batches:
        losses.append(other.step(*given, 1e-3))
        other.evaluate(batches[0][0][:2, :50], batches[0][1][:2, :50])
    assert losses == [result.loss for result in results] and equal(engine.tensors(), other.tensors())


def test_a_short_batch_and_changed_weights_may_come_between_captured_steps() -> None:
    config = replace(CONFIG, n_embd=64, block_size=64)
    engines = [Engine(config, 4, 64, device="cuda", capture=capture) for capture in (True, False)]
    for i in range(12):
        b, t = ((4, 64), (4, 64), (3, 17))[i % 3]
        losses = [engine.step(*batch(config, b, t, seed=i), 1e-3) for engine in engines]
        assert losses[0] == losses[1]
        for engine in engines:
            engine.params["wte.weight"].mul_(1.0 + i / 100)
    assert equal(*(engine.tensors() for engine in engines))


def test_the_compute_copies_are_the_rounded_params() -> None:
    config = replace(CONFIG, n_embd=60, n_head=3, block_size=64)  # sizes of parameters are not multiples of 128
    engine = Engine(config, 4, 64, device="cuda")
    for i in range(3):
        engine.step(*batch(config, 4, 64, seed=i), 1e-2)
    torch.cuda.synchronize()
    for name, p in engine._model(4, 64).params.items():
        assert p.value.dtype == torch.bfloat16 and torch.equal(p.value, p.master.bfloat16()), name


STAGES = [(2, 64, 9), (4, 32, None), (1, 64, 40), (4, 64, 40)]  # batch_size, seq_len and window of each


@pytest.mark.parametrize("head", [16, 64])  # heads of 64: hopper on Hopper GPUs
def test_each_stage_has_its_own_graph_and_all_share_one_plan(head: int) -> None:
    config = replace(LLAMA, n_embd=4 * head, block_size=64, window=40)
    captured, plain_ = (
        Engine(config, 4, 64, device="cuda", capture=capture, windows=(9, None)) for capture in (True, False)
    )
    for i in range(16):
        b, t, window = STAGES[i // 4]
        captured.window = plain_.window = window
        given = batch(config, b, t, seed=i)
        assert captured.step(*given, 1e-3) == plain_.step(*given, 1e-3), i
        assert captured.evaluate(*given) == plain_.evaluate(*given), i
    assert equal(captured.tensors(), plain_.tensors())
    assert [*captured._device_steps] == [(((b, t),), window) for b, t, window in STAGES]
    assert all(step.captured.graph is not None for step in captured._device_steps.values())
    assert captured.arenas.nbytes == captured.plan.peak_bytes


# ── packed rows ──

PACKED = {
    "gpt": replace(CONFIG, n_embd=64, block_size=200),
    "llama": replace(LLAMA, n_embd=128, block_size=200, n_head=2, n_kv_head=1),  # heads of 64: hopper on Hopper GPUs
    "qwen": replace(QWEN3, n_embd=64, block_size=200, head_size=32, window=20),
    "dropout": replace(LLAMA, n_embd=64, block_size=200, dropout=0.1),
}


def packed(config: ModelConfig, b: int, t: int, documents: int, seed: int) -> Batch:
    return Batch(*batch(config, b, t, seed=seed), random_ends(b, t, documents, seed=seed))


@pytest.mark.parametrize("name", PACKED)
def test_one_graph_serves_every_packing_with_the_bits_of_uncaptured_steps(name: str) -> None:
    config = PACKED[name]
    captured, plain_ = (
        Engine(config, 4, 200, device="cuda", capture=capture, documents=9) for capture in (True, False)
    )
    for i in range(24):
        batches = [packed(config, 4, 200, 1 + (i + j) % 9, seed=2 * i + j) for j in range(2)]
        tokens, targets, ends = arguments(batches)
        losses = [engine.step(tokens, targets, 1e-3, cu_seqlens=ends) for engine in (captured, plain_)]
        assert losses[0] == losses[1], i
    assert equal(captured.tensors(), plain_.tensors())
    assert len(captured._device_steps) == 1
    assert all(step.captured.graph is not None for step in captured._device_steps.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PACKED)
def test_training_on_packed_rows_follows_the_cpu(name: str, dtype: torch.dtype) -> None:
    config = PACKED[name]
    here, there = (Engine(config, 4, 200, device=device, dtype=dtype, documents=50) for device in ("cpu", "cuda"))
    for i, (b, t, documents) in enumerate(((4, 200, 50), (2, 7, 3), (4, 64, 50), (3, 41, 5), (4, 200, 1))):
        x, y, ends = packed(config, b, t, documents, seed=i)
        a = here.step(x, y, learning_rate=1e-3, cu_seqlens=ends)
        got = there.step(x.cuda(), y.cuda(), learning_rate=1e-3, cu_seqlens=ends)
        assert got == pytest.approx(a, rel=2e-2 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_of_packed_rows_equal_those_of_the_cpu(name: str) -> None:
    config, given = PACKED[name], packed(PACKED[name], 4, 200, 20, seed=3)
    there, exact = (
        Engine(config, 4, 200, device="cuda", documents=20),
        Engine(config, 4, 200, dtype=torch.float64, documents=20),
    )
    for engine in (there, exact):
        engine.gradients(given.tokens, given.targets, cu_seqlens=given.cu_seqlens)
    largest = max(float(g.norm()) for g in exact.grads.values())
    for parameter, g in exact.grads.items():
        assert torch.dist(there.grads[parameter].cpu().double(), g) <= 0.05 * g.norm() + 0.005 * largest, parameter
    whole = clones(there.grads)
    there.gradients(given.tokens, given.targets)
    assert not equal(whole, there.grads)


def test_a_new_packing_allocates_no_memory_and_its_bytes_are_planned() -> None:
    config = replace(PACKED["llama"], vocab_size=1000)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    engine = Engine(config, 4, 200, device="cuda", documents=30)
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] - before == engine.plan.peak_bytes
    batches = [packed(config, 4, 200, 3 * i + 1, seed=i) for i in range(8)]
    for x, y, ends in batches[:4]:
        engine.step(x, y, 1e-3, cu_seqlens=ends)
    count = torch.cuda.memory_stats()["allocation.all.allocated"]
    for x, y, ends in batches:
        engine.submit(x, y, 1e-3, cu_seqlens=ends)
    assert len(engine.finished(wait=True)) == 8 and torch.cuda.memory_stats()["allocation.all.allocated"] == count
    staged = engine._device_steps[((4, 200),), None].staged.buffer.nbytes + 4 * 200  # plus a bool for each target
    assert unplanned_bytes(engine.spec)["the batch as it is staged"] == staged - 8  # without the learning rate


# ── what is trained, and how ──

TRAINED: dict[str, dict[str, Any]] = {
    "adapters": {"lora": LoraConfig(8, 16)},
    "adapters, dropout": {"lora": LoraConfig(4, 8, layers=("q", "up", "down"), dropout=0.2)},
    "frozen": {"freeze": ("wte.*", "blocks.0.*")},
    "muon": {"muon": MuonConfig(learning_rate_factor=5.0)},
    "muon, cautious": {"muon": MuonConfig(0.8, orthogonalization="polar_express", scale="rms", cautious=True)},
}
TRAINED_MODEL = replace(LLAMA, n_embd=128, block_size=96, n_head=2, n_kv_head=1)


LEAN = {
    "moments": States("bfloat16"),
    "no masters": States("bfloat16", "none"),
    "all": States("bfloat16", "none", "bfloat16"),
}


@pytest.mark.parametrize("name", LEAN)
def test_captured_steps_with_lean_states_have_the_bits_of_uncaptured_ones_and_resume(name: str) -> None:
    captured, plain_ = (
        Engine(TRAINED_MODEL, 4, 96, device="cuda", capture=capture, states=LEAN[name], seed=5)
        for capture in (True, False)
    )
    saved, state = clones(captured.tensors()), counters(captured)
    for i in range(8):
        if i == 4:
            saved, state = clones(captured.tensors()), counters(captured)
        pairs = [batch(TRAINED_MODEL, 4, 96, seed=2 * i + j) for j in range(2)]
        tokens, targets = ([pair[n] for pair in pairs] for n in (0, 1))
        losses = [engine.step(tokens, targets, 1e-3) for engine in (captured, plain_)]
        assert losses[0] == losses[1], i
    end = clones(captured.tensors())
    assert equal(end, plain_.tensors()) and captured._device_steps[((4, 96),) * 2, None].captured.graph is not None
    for tensor, x in saved.items():
        captured.tensors()[tensor].copy_(x)
    restore_counters(captured, state)
    for i in range(4, 8):
        pairs = [batch(TRAINED_MODEL, 4, 96, seed=2 * i + j) for j in range(2)]
        captured.step([x for x, _ in pairs], [y for _, y in pairs], 1e-3)
    assert equal(end, captured.tensors()), "resumed in the same graph"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_captured_steps_of_every_kind_have_the_bits_of_uncaptured_ones(name: str, dtype: torch.dtype) -> None:
    captured, plain_ = (
        Engine(TRAINED_MODEL, 4, 96, device="cuda", dtype=dtype, capture=capture, **TRAINED[name])
        for capture in (True, False)
    )
    began = clones(captured.tensors())
    for i in range(6):
        pairs = [batch(TRAINED_MODEL, 4, 96, seed=2 * i + j) for j in range(2)]
        tokens, targets = ([pair[n] for pair in pairs] for n in (0, 1))
        losses = [engine.step(tokens, targets, 1e-3) for engine in (captured, plain_)]
        assert losses[0] == losses[1], i
    assert equal(captured.tensors(), plain_.tensors()) and not equal(captured.tensors(), began)
    assert captured._device_steps[((4, 96),) * 2, None].captured.graph is not None


@pytest.mark.parametrize("name", TRAINED)
def test_updates_of_every_kind_follow_the_cpu(name: str) -> None:
    """Muon multiplies in bfloat16 on a GPU. It makes every singular value about 1, so differences grow where they are small."""
    if "dropout" in name:
        pytest.skip("another dropout on every device")
    here, there = (
        Engine(TRAINED_MODEL, 4, 96, device=device, dtype=torch.float32, **TRAINED[name]) for device in ("cpu", "cuda")
    )
    began, most = clones(here.params), 0.25 if "muon" in name else 0.05
    for i in range(3):
        x, y = batch(TRAINED_MODEL, 4, 96, seed=i)
        a = here.step(x, y, 1e-3)
        assert there.step(x, y, 1e-3) == pytest.approx(a, rel=2e-3)
    for parameter in here.grads:
        change = here.params[parameter] - began[parameter]
        assert torch.dist(there.params[parameter].cpu(), here.params[parameter]) <= most * change.norm(), parameter


# ── generation ──

DECODED = {
    "gpt": replace(CONFIG, n_embd=64, block_size=96, vocab_size=300),
    "llama": replace(LLAMA, n_embd=128, block_size=96, n_head=2, n_kv_head=1, vocab_size=300),
    "qwen": replace(QWEN3, n_embd=64, block_size=96, head_size=32, window=20, vocab_size=300),
}


def draws_of(config: ModelConfig, params: dict[str, Tensor], device: str, **options: Any) -> list[Drawn]:
    """The tokens of prompts of different lengths over 24 steps, with a slot that ends and begins again."""
    decoder = Decoder(config, params, batch_size=5, capacity=64, device=device, **options)
    sampling = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)
    lengths = {0: 3, 1: 30, 2: 1, 4: 17}
    decoder.prefill({s: Prompt([1 + s] * n, sequence=s, sampling=sampling) for s, n in lengths.items()})
    for step in range(24):
        if step == 8:
            decoder.stop([1])
            decoder.prefill({3: Prompt([9, 8, 7], sequence=9, sampling=sampling)})
        decoder.submit()
    return decoder.finished(wait=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECODED)
def test_captured_decoding_draws_the_tokens_of_uncaptured_decoding(name: str, dtype: torch.dtype) -> None:
    config = DECODED[name]
    params = Engine(config, 1, 8, seed=5).params
    found = [draws_of(config, params, "cuda", dtype=dtype, capture=capture) for capture in (True, False)]
    assert found[0] == found[1] and len(found[0]) == 26


@pytest.mark.parametrize("name", DECODED)
def test_tokens_in_float64_equal_those_of_the_cpu(name: str) -> None:
    config = DECODED[name]
    params = {n: p.double() * 4 for n, p in Engine(config, 1, 8, seed=5).params.items()}
    here, there = (draws_of(config, params, device, dtype=torch.float64) for device in ("cpu", "cuda"))
    assert [drawn.tokens for drawn in here] == [drawn.tokens for drawn in there]
    for a, b in zip(here, there, strict=True):
        assert list(a.logprobs) == pytest.approx(list(b.logprobs), abs=1e-9)


def test_a_decoder_allocates_the_planned_bytes_and_a_step_allocates_none() -> None:
    config = DECODED["llama"]
    params = {n: p.to("cuda", torch.bfloat16) for n, p in Engine(config, 1, 8).params.items()}
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    decoder = Decoder(config, params, batch_size=4, capacity=64, device="cuda", dtype=torch.bfloat16)
    weights = sum(p.nbytes for p in params.values())
    grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
    assert grown in (decoder.plan.peak_bytes, decoder.plan.peak_bytes - weights)
    decoder.prefill({0: Prompt([1, 2, 3])})
    for _ in range(4):
        decoder.submit()
    decoder.finished(wait=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        decoder.submit()
    decoder.finished(wait=True)
    assert torch.cuda.max_memory_allocated() - before < 1 << 16


def test_a_graph_keeps_its_cublas_workspace_when_torch_frees_all() -> None:
    """torch.compile frees every workspace before it captures a graph. Afterwards other tensors own that memory."""
    config = replace(CONFIG, n_embd=64, block_size=128, vocab_size=1000)
    params = {n: p.to("cuda", torch.bfloat16) for n, p in Engine(config, 1, 8).params.items()}
    engines = [Engine(config, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    decoders = [Decoder(config, params, 4, 64, device="cuda", capture=capture) for capture in (True, False)]

    def run(engine: Engine, decoder: Decoder) -> tuple[list[float], list[Drawn]]:
        x, y = batch(config, 4, 128)
        losses = [engine.step(x, y, 1e-3) for _ in range(3)]
        for _ in range(2):
            decoder.prefill({i: Prompt([1 + i] * 9, sequence=i) for i in range(4)})
            for _ in range(3):
                decoder.submit()
        return losses, decoder.finished(wait=True)

    want = [run(engines[1], decoders[1]) for _ in range(2)]
    assert run(engines[0], decoders[0]) == want[0]
    torch._C._cuda_clearCublasWorkspaces()
    others = [torch.full((size << 20,), torch.nan, device="cuda") for size in (1, 2, 4, 8, 8, 16, 16)]
    assert run(engines[0], decoders[0]) == want[1]
    assert all(bool(other.isnan().all()) for other in others)


def test_a_dead_graph_is_not_freed_during_a_capture() -> None:
    """An engine has reference cycles, so its graph is freed by a garbage collection, which could run at any time."""
    config = replace(CONFIG, n_embd=64, block_size=64)
    x, y = batch(config, 2, 64)
    for _ in range(2):
        engine = Engine(config, 2, 64, device="cuda")
        cycle: list[Any] = [engine]
        cycle.append(cycle)
        thresholds = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            assert all(math.isfinite(engine.step(x, y, 1e-3)) for _ in range(3))
        finally:
            gc.set_threshold(*thresholds)
        del engine, cycle
