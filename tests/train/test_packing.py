"""Packed rows: one batch, with the ends of documents in cu_seqlens, has the losses and gradients of single documents."""

from __future__ import annotations

from contextlib import nullcontext
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
    batch,
    clones,
    equal,
    exact_gradients,
    one_by_one,
    random_ends,
)
from support.native import needs_library
from support.ranks import Ranks
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.engine import batch as batch_module
from tilegrad.engine import planning
from tilegrad.engine.batch import Batch
from tilegrad.engine.capture import DeviceStep, Staged
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.planning import plan_model
from tilegrad.engine.spec import StepSpec
from tilegrad.kernels.attention import table
from tilegrad.kernels.op import observe
from tilegrad.memory.planned.arena import poison_dead
from tilegrad.memory.planned.trace import Handle, bind

MODELS = {
    "gpt": replace(CONFIG, n_layer=2),
    "llama": replace(LLAMA, n_layer=2),
    "qwen": QWEN3,
    "speed run": SPEED_RUN,
    "window": replace(LLAMA, n_layer=2, window=3, window_layers=(1,)),
    "per_head": replace(CONFIG, n_layer=2, projection="per_head", window=4, loss="embedding_mse"),
    "per_head, rope": replace(CONFIG, n_layer=2, projection="per_head", position="rope", qk_norm=True),
}
ENDS = {
    "rows": [0, 13, 26, 39],
    "ragged": [0, 1, 5, 13, 26, 28, 38, 39],
    "single tokens": [*range(13), 13, 26, 39],
}


def engine_of(config: ModelConfig, b: int = 3, t: int = 13, **given: Any) -> Engine:
    """An engine moved from its initial values, at which many gradients are nearly 0."""
    defaults: dict[str, Any] = {"dtype": torch.float64, "documents": t}
    engine = Engine(config, b, t, **defaults | given)
    generator = torch.Generator().manual_seed(4)
    for p in engine.params.values():
        p.add_(torch.randn(p.shape, generator=generator).to(p), alpha=0.2)
    return engine


def assert_one_by_one(engine: Engine, loss: float, parts: list[tuple[Tensor, Tensor]], limit: float = 1e-12) -> None:
    """Within `limit` of each gradient's largest number, or of a thousandth of the model's largest: some are exactly 0."""
    want, exact = exact_gradients(engine.config, engine.params, parts)
    assert loss == pytest.approx(want, rel=limit)
    largest = max(float(g.abs().max()) for g in exact.values())
    for name, g in exact.items():
        error = float((engine.grads[name].double() - g).abs().max())
        assert error <= limit * max(float(g.abs().max()), 1e-3 * largest), (name, error)


# ── the oracle ──


@pytest.mark.parametrize(
    ("name", "kernel"),
    [*(pytest.param(name, "native", marks=needs_library) for name in MODELS), ("gpt", "tiled"), ("window", "tiled")],
)
def test_packed_rows_have_the_gradients_of_single_documents(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = tuple(row for row in table.ATTENTION.rows if row.name == kernel)
    monkeypatch.setattr(table, "ATTENTION", replace(table.ATTENTION, rows=only))
    config = MODELS[name]
    engine, (tokens, targets) = engine_of(config), batch(config, 3, 13)
    cases = [torch.tensor(ends, dtype=torch.int32) for ends in ENDS.values()]
    for ends in (*cases, *(random_ends(3, 13, 5, seed) for seed in range(2))):
        parts = one_by_one(tokens, targets, ends)
        assert_one_by_one(engine, engine.gradients(tokens, targets, cu_seqlens=ends), parts)
        assert engine.evaluate(tokens, targets, cu_seqlens=ends) == pytest.approx(engine.loss, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_no_document_attends_to_another(name: str) -> None:
    """Changed tokens in one document change no bit of the gradients from the targets of the rest."""
    config = MODELS[name]
    engine, (tokens, targets) = engine_of(config, dtype=torch.float32), batch(config, 3, 13, ignored=0.0)
    ends = torch.tensor(ENDS["ragged"], dtype=torch.int32)
    changed, inside = tokens.clone(), slice(5, 13)
    targets.view(-1)[inside] = -1
    changed.view(-1)[inside] = (changed.view(-1)[inside] + 3) % config.vocab_size
    losses, grads = [], []
    for x in (tokens, changed):
        losses.append(engine.gradients(x, targets, cu_seqlens=ends))
        grads.append(clones(engine.grads))
    assert losses[0] == losses[1] and equal(*grads)
    assert engine.gradients(changed, targets) != losses[0]


def test_without_cu_seqlens_each_row_is_one_document() -> None:
    config = MODELS["llama"]
    packed, plain = engine_of(config), engine_of(config, documents=0)
    tokens, targets = batch(config, 2, 9)
    rows = torch.tensor([0, 9, 18], dtype=torch.int32)
    assert packed.gradients(tokens, targets) == packed.gradients(tokens, targets, cu_seqlens=rows)
    assert_one_by_one(packed, packed.loss, [(tokens, targets)])
    assert plain.gradients(tokens, targets) == pytest.approx(packed.loss, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_engine_takes_batches_of_any_number_of_documents_and_of_any_size(dtype: torch.dtype) -> None:
    """The bits equal those of an engine made for that batch."""
    config = MODELS["window"]
    large = engine_of(config, dtype=dtype, memory_budget=1 << 30)
    for b, t, documents in ((3, 13, 13), (2, 7, 3), (1, 1, 1), (3, 13, 2), (3, 5, 4)):
        tokens, targets = batch(config, b, t, seed=b)
        ends = random_ends(b, t, documents, seed=t)
        small = engine_of(config, b, t, dtype=dtype, documents=documents)
        assert large.gradients(tokens, targets, cu_seqlens=ends) == small.gradients(tokens, targets, cu_seqlens=ends)
        assert equal(large.grads, small.grads)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_recomputing_changes_no_bit_and_no_dead_buffer_is_read(name: str) -> None:
    config = MODELS[name]
    plain = engine_of(config)
    recomputed = engine_of(config, memory_budget=plain.plan.peak_bytes - 1)
    assert any(recomputed.recompute)
    tokens, targets, ends = Batch(*batch(config, 3, 13), random_ends(3, 13, 4))
    for engine, poisoned in ((plain, nullcontext()), (recomputed, poison_dead(recomputed.arenas, observe))):
        with poisoned:
            engine.step(tokens, targets, 1e-2, cu_seqlens=ends)
            engine.zero_gradients()
            engine.forward(tokens, targets, cu_seqlens=ends)
            engine.backward()
    assert equal(plain.grads, recomputed.grads) and equal(plain.tensors(), recomputed.tensors())


def test_micro_batches_and_forward_then_backward_have_the_gradients_of_single_documents() -> None:
    config = MODELS["gpt"]
    given = [Batch(*batch(config, 3, 13, seed=i), random_ends(3, 13, 4, seed=i)) for i in range(2)]
    tokens, targets, ends = arguments(given)
    parts = [part for x in given for part in one_by_one(*x)]
    engine = engine_of(config)
    assert_one_by_one(engine, engine.gradients(tokens, targets, cu_seqlens=ends), parts)
    total = sum(int((y >= 0).sum()) for y in targets)
    loss = engine.loss
    engine.zero_gradients()
    for x, y, cu in given:
        engine.forward(x, y, total, cu_seqlens=cu)
        engine.backward()
    assert_one_by_one(engine, loss, parts)
    mixed = [ends[0], None]
    assert_one_by_one(
        engine, engine.gradients(tokens, targets, cu_seqlens=mixed), [*one_by_one(*given[0]), (tokens[1], targets[1])]
    )


def test_the_program_of_a_device_step_stages_the_documents() -> None:
    """As on CUDA, two packings use one set of buffers."""
    config = MODELS["llama"]
    one, other = (engine_of(config, dtype=torch.float32) for _ in range(2))
    step = DeviceStep([other._model(3, 13, accumulate=False)], other.optimizer, None)  # type: ignore[arg-type]
    for i in range(3):
        given = Batch(*batch(config, 3, 13, seed=i), random_ends(3, 13, 2 + i, seed=i))
        loss = one.step(*given[:2], 1e-2, cu_seqlens=given.cu_seqlens)
        step.staged.load([given], [[]], 1e-2, through=Staged.of(step.models, torch.device("cpu")))
        step.program()
        assert step.result[0].item() == pytest.approx(loss, rel=1e-6)
    assert equal(one.tensors(), other.tensors())
    assert step.staged.buffer.nbytes == 8 * (3 * 39 + 20 + 1)


# ── ranks ──


def parity(mesh: Mesh, shard: Any) -> float:
    config = MODELS["llama"]
    given: Any = {"dtype": torch.float64, "eps": 1e-6, "documents": 4}
    one, many = Engine(config, 3, 13, **given), Engine(config, 3, 13, **given, mesh=mesh, shard=shard)
    for i in range(3):
        all_ = [Batch(*batch(config, 3, 13, seed=5 * i + j), random_ends(3, 13, 4, seed=j)) for j in range(3)]
        for engine, mine in ((one, all_), (many, all_[mesh.rank :: mesh.world])):
            tokens, targets, ends = arguments(mine)
            engine.step(tokens, targets, 1e-2, cu_seqlens=ends)
    a, b = many.params, one.params
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_two_ranks_have_the_results_of_one(two_ranks: Ranks, shard: str) -> None:
    assert max(two_ranks.run(parity, shard)) < 1e-9


# ── the plan ──


def test_the_plan_has_the_ends_only_with_documents() -> None:
    spec = StepSpec(MODELS["llama"], 2, 9, torch.float32, torch.device("cpu"))
    plain, packed = plan_model(spec), plan_model(replace(spec, documents=5))
    inputs = {name: h.nbytes for name, h in packed.trace.handles.items() if h.role == "inputs"}
    new = {name: n for name, n in inputs.items() if name not in plain.trace.handles}
    assert new == {"inputs.cu_seqlens": 4 * 11, "inputs.positions": 8 * 18}
    engine = engine_of(MODELS["llama"], 2, 9, documents=5)
    assert engine.plan.peak_bytes == engine.arenas.nbytes


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("documents", [3, 120])
def test_every_smaller_batch_finds_its_scratch_on_hopper(documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table selects triton, which needs other buffers, for few rows and for many short sequences."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for seq_len in (150, 60):
        config, cuda = replace(MODELS["llama"], n_embd=64, block_size=150), torch.device("cuda")
        spec = StepSpec(config, 3, seq_len, torch.bfloat16, cuda, documents=min(documents, seq_len))
        plan = plan_model(spec)

        def fits(handle: Handle, handles: Any = plan.trace.handles) -> Handle:  # like Arenas.view
            planned = handles.get(handle.name)
            assert planned is None or handle.nbytes <= planned.nbytes, handle.name
            return handle

        for b in (1, 2, 3):
            for t in (1, 15, 17, 60, seq_len):
                model = bind(spec.declare(None, b, t), fits)
                calls: list[Any] = []
                with observe(calls.append):
                    model.step()
                used = {x.name for call in calls for x in (*call.reads, *call.writes)}
                assert used <= plan.trace.handles.keys()
        staged = planning.unplanned_bytes(spec)["the batch as it is staged"]
        words = 3 * 3 * seq_len + (3 * spec.documents + 2) // 2
        assert staged == 8 * words + 3 * seq_len  # plus a bool for each target


# ── refusals ──


def ends(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ends(0, 5, 18, dtype=torch.int64), r"got torch.int64 \(3,\); accepted: a torch.int32 tensor"),
        (ends(0, 18)[None], r"got torch.int32 \(1, 2\); accepted"),
        (ends(0, 9, 18).to("meta"), "got a tensor on meta; accepted: a tensor on the CPU"),
        (ends(), r"got no values; accepted: from 0 to 18, because the batch has 2 × 9 tokens"),
        (ends(1, 9, 18), "got values from 1 to 18; accepted: from 0 to 18"),
        (ends(0, 9, 17), "got values from 0 to 17; accepted: from 0 to 18"),
        (ends(0, 5, 5, 9, 18), r"got 5 at index 1, then 5; accepted: values that increase"),
        (ends(0, 6, 5, 9, 18), r"got 6 at index 1, then 5; accepted: values that increase"),
        (ends(0, 5, 10, 18), "got a document of the tokens 5 … 9, which crosses the end of a row at 9"),
        (
            ends(0, 1, 2, 3, 4, 5, 6, 9, 18),
            "got 8 documents; accepted: at most 6, because the engine has documents=3 for each of 2 rows",
        ),
    ],
)
def test_bad_ends_are_refused_before_anything_changes(given: Tensor, message: str) -> None:
    engine, (x, y) = Engine(MODELS["gpt"], 3, 13, documents=3), batch(MODELS["gpt"], 2, 9)
    before = clones(engine.tensors())
    calls: list[tuple[Any, ...]] = [(engine.forward,), (engine.gradients,), (engine.evaluate,)]
    for call, *rate in (*calls, (engine.step, 1e-2), (engine.submit, 1e-2)):
        with pytest.raises(ValueError, match=f"^cu_seqlens: {message}"):
            call(x, y, *rate, cu_seqlens=given)
    assert equal(before, engine.tensors()) and engine.steps == 0


def test_bad_arguments_of_packing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, (x, y) = MODELS["llama"], batch(MODELS["llama"], 2, 9)
    engine: Any = Engine(config, 2, 9)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got Tensor for an engine with documents 0; accepted: None"):
        engine.gradients(x, y, cu_seqlens=ends(0, 18))
    engine = Engine(config, 2, 9, documents=2)
    with pytest.raises(ValueError, match=r"^cu_seqlens: got \[\[0, 9, 18\]\]; accepted: None, a torch.int32 tensor"):
        engine.gradients([x], [y], cu_seqlens=[[0, 9, 18]])
    with pytest.raises(ValueError, match=r"^cu_seqlens: got 1 micro-batches; accepted: 2, as tokens has, or None"):
        engine.gradients([x, x], [y, y], cu_seqlens=ends(0, 9, 18))
    spec = StepSpec(config, 2, 8, torch.float32, torch.device("cpu"), documents=2)
    with pytest.raises(ValueError, match=r"^documents: got 2 with context 2; accepted: 0, or context 1"):
        batch_module.check_spec(replace(spec, context=2, world=2))
    large = replace(spec, config=replace(config, block_size=1 << 16), batch_size=1 << 15, seq_len=1 << 16)
    with pytest.raises(ValueError, match=r"^batch_size: got 32768 .* fewer than 2³¹ tokens"):
        batch_module.check_spec(large)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    on_cuda = replace(spec, device=torch.device("cuda"), dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"^documents: got 2 on cuda, .* takes float16, bfloat16 and float32, not float64"
    ):
        batch_module.check_spec(on_cuda)


# ── canaries ──


@pytest.mark.parametrize("what", ["ends", "positions"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_canary_wrong_documents_are_seen(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = batch_module.write_documents

    def wrong(cu_seqlens: Tensor | None, *, ends: Tensor, positions: Tensor) -> None:
        right(cu_seqlens, ends=ends, positions=positions)
        if what == "positions":
            positions[0, 7] += 1
        elif ends[1] == 1:  # "ragged"
            ends[1] = 2

    monkeypatch.setattr(batch_module, "write_documents", wrong)
    with pytest.raises(AssertionError):
        test_packed_rows_have_the_gradients_of_single_documents(name, "tiled", monkeypatch)
