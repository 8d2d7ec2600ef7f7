"""An engine over ranks against one process: losses, norms, parameters, memory, guards; and its schedule, without ranks."""

from __future__ import annotations

import errno
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.models import CONFIG, LLAMA, SPEED_RUN, equal
from support.ranks import Ranks
from torch import Tensor

import tilegrad
from tilegrad import Engine
from tilegrad.cli import main
from tilegrad.cli.progress import _message
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.optimizer import AdamW
from tilegrad.engine.parallel import ShardedOptimizer, check_accumulation, check_same, digest
from tilegrad.engine.spec import StepSpec
from tilegrad.engine.state import averaged, counters, owned_pieces, restore_counters
from tilegrad.kernels.muon import MuonConfig
from tilegrad.kernels.op import observe
from tilegrad.memory.planned.arena import poison_dead
from tilegrad.model.config import PRESETS
from tilegrad.model.lora import LoraConfig
from tilegrad.training.checkpoint import latest_checkpoint, load_checkpoint, load_into, read_state, save_checkpoint
from tilegrad.training.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from tilegrad.training.manifest import DamagedCheckpoint, file_entry, write_manifest
from tilegrad.training.pieces import load_pieces, save_pieces
from tilegrad.training.run import _load, train

CASES = {
    "tied, dropout": replace(CONFIG, vocab_size=97, n_embd=32, n_layer=2, dropout=0.1),
    "untied, GQA, window": replace(LLAMA, vocab_size=89, n_embd=32, n_layer=2, window=7),
    "speed run": replace(SPEED_RUN, vocab_size=97, n_embd=32),
    "tied, rope, biases": replace(CONFIG, vocab_size=97, n_embd=32, n_layer=2, position="rope"),
}
# AdamW makes noise below eps an update of rate · noise / eps
F64: Any = {"dtype": torch.float64, "seed": 3, "eps": 1e-6}
Batch = tuple[Tensor, Tensor]


def micro_batches(vocab: int, step: int, count: int) -> list[Batch]:
    """Micro-batches of unequal sizes, in which some positions have no target."""
    g = torch.Generator().manual_seed(step)
    out = []
    for i in range(count):
        b, t = 1 + i % 3, 16 - i % 5
        x, y = torch.randint(0, vocab, (2, b, t), generator=g)
        y[torch.rand(b, t, generator=g) < 0.2] = -1
        out.append((x, y))
    return out


def mine(mesh: Mesh, pairs: list[Batch], context: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    dealt = pairs[mesh.rank // context :: mesh.world // context]
    return [x for x, _ in dealt], [y for _, y in dealt]


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp_min(1e-30)) for n in b)


def parity(
    mesh: Mesh, case: str, shard: str, count: int, context: int = 1, **trained: Any
) -> tuple[float, int, int, int, int]:
    """The largest relative distance after three steps, bytes, and the number of collectives that this rank has entered."""
    config = CASES[case]
    ranks: Any = {"mesh": mesh, "shard": shard, "bucket_bytes": 20_000, "context": context}
    one, many = Engine(config, 3, 16, **F64, **trained), Engine(config, 3, 16, **F64, **trained, **ranks)
    assert apart(many.params, one.params) == 0.0
    worst = 0.0
    for step in range(3):
        pairs = micro_batches(config.vocab_size, step, count)
        loss = one.step([x for x, _ in pairs], [y for _, y in pairs], 1e-2)
        many.submit(*mine(mesh, pairs, context), 1e-2)
        (result,) = many.finished(wait=True)
        worst = max(worst, abs(result.loss / loss - 1), abs(result.norm / float(one.optimizer.norm) - 1))
    assert many.draws == one.draws and many.steps == one.steps == 3
    worst = max(worst, apart(many.params, one.params))
    if one.spec.ema:
        worst = max(worst, averages_apart(many, one))
    return worst, many.arenas.nbytes, many.plan.peak_bytes, one.plan.peak_bytes, mesh.entered


def averages_apart(many: Engine, one: Engine) -> float:
    """The distance of the averages, and of losses with them; afterwards the weights have the same bits."""
    x, y = micro_batches(one.config.vocab_size, 9, 1)[0]
    before, loss = {name: p.clone() for name, p in many.params.items()}, many.evaluate(x, y)
    with averaged(many), averaged(one):
        assert not equal(many.params, before)
        worst = max(apart(many.params, one.params), abs(many.evaluate(x, y) / one.evaluate(x, y) - 1))
        assert many.evaluate(x, y) != loss
    assert equal(many.params, before) and many.evaluate(x, y) == loss
    return worst


def check_parity(found: list[Any], shard: str) -> None:
    assert len({entered for *_, entered in found}) == 1, "the lowest count is who the others wait for"
    for worst, allocated, planned, alone, _ in found:
        assert worst < 1e-12
        assert allocated == planned and (planned < alone) == (shard != "none")


@pytest.mark.parametrize(
    ("case", "shard", "count"),
    [
        ("tied, dropout", "optimizer", 3),
        ("tied, dropout", "none", 4),
        ("untied, GQA, window", "optimizer", 1),
        ("untied, GQA, window", "none", 1),
        ("tied, dropout", "all", 3),
        ("untied, GQA, window", "all", 1),
        ("speed run", "optimizer", 1),
        ("speed run", "all", 3),
    ],
)
def test_ranks_have_the_results_of_one_process(two_ranks: Ranks, case: str, shard: str, count: int) -> None:
    """Ranks have unequal micro-batches, or none."""
    check_parity(two_ranks.run(parity, case, shard, count), shard)


def frozen_parity(mesh: Mesh, case: str, shard: str, count: int, context: int, trained: dict[str, Any]) -> None:
    worst, allocated, planned, alone, _ = parity(mesh, case, shard, count, context, **trained)
    assert worst < 1e-11, worst  # A's gradient begins at 0, and AdamW divides by its root
    assert allocated == planned and (planned < alone) == (shard != "none" or context > 1)


@pytest.mark.parametrize(
    ("case", "shard", "context", "trained"),
    [
        ("tied, dropout", "optimizer", 1, {"lora": LoraConfig(4, 8, dropout=0.2)}),
        ("untied, GQA, window", "none", 1, {"lora": LoraConfig(3, 8, layers=("q", "up", "down"))}),
        ("untied, GQA, window", "optimizer", 2, {"lora": LoraConfig(4, 8)}),
        ("tied, rope, biases", "optimizer", 1, {"freeze": ("wte.*", "blocks.0.*", "*.bias")}),
        ("tied, dropout", "none", 1, {"freeze": ("*.qkv.*", "wpe.*")}),
    ],
)
def test_ranks_sum_only_what_is_trained(
    two_ranks: Ranks, case: str, shard: str, context: int, trained: dict[str, Any]
) -> None:
    two_ranks.run(frozen_parity, case, shard, 3, context, trained)


def muon_parity(mesh: Mesh, case: str, shard: str, context: int, muon: MuonConfig) -> None:
    worst, allocated, planned, alone, _ = parity(mesh, case, shard, 3, context, muon=muon)
    assert worst < 1e-12, worst
    assert allocated == planned and (planned < alone) == (shard != "none" or context > 1)


@pytest.mark.parametrize(
    ("case", "shard", "context", "muon"),
    [
        ("tied, dropout", "optimizer", 1, MuonConfig(orthogonalization="polar_express", momentum_warmup=3)),
        ("untied, GQA, window", "none", 1, MuonConfig(cautious=True)),
        ("tied, rope, biases", "optimizer", 2, MuonConfig(scale="rms", nesterov=False)),
    ],
)
def test_ranks_with_muon_have_the_results_of_one_process(
    two_ranks: Ranks, case: str, shard: str, context: int, muon: MuonConfig
) -> None:
    two_ranks.run(muon_parity, case, shard, context, muon)


@pytest.mark.parametrize(
    ("case", "shard", "context", "trained"),
    [
        ("tied, dropout", "optimizer", 1, {"muon": MuonConfig()}),
        ("untied, GQA, window", "all", 1, {}),
        ("tied, dropout", "none", 1, {"freeze": ("*.qkv.*", "wpe.*")}),
        ("untied, GQA, window", "optimizer", 2, {"lora": LoraConfig(4, 8)}),
    ],
)
def test_ranks_have_the_averages_of_one_process(
    two_ranks: Ranks, case: str, shard: str, context: int, trained: dict[str, Any]
) -> None:
    two_ranks.run(frozen_parity, case, shard, 3, context, {"ema": 0.8, **trained})


def averages_saved(mesh: Mesh, folder: str, trained: dict[str, Any]) -> str:
    """Averages are saved by ranks that own slices or whole matrices, and read by ranks with other parts."""
    config: Any = {
        "model_config": CASES["tied, dropout"],
        "batch_size": 3,
        "seq_len": 16,
        "seed": 3,
        "mesh": mesh,
        **trained,
    }
    engine = go_on(Engine(**config, bucket_bytes=20_000), mesh, 2)
    path = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    go_on(engine, mesh, 4)
    same, other = Engine(**config, bucket_bytes=20_000), Engine(**config, shard="none")
    for each in (same, other):
        restore_counters(each, load_pieces(path, each, mesh)["engine"])
    go_on(same, mesh, 4)
    pieces = [{name: piece[0] for name, piece in owned_pieces(each).items()} for each in (engine, same)]
    assert equal(*pieces), "resumed to the same bits"
    again = save_pieces(Path(folder), other, mesh, {"engine": counters(other)})
    a, b = load_checkpoint(path).tensors, load_checkpoint(again).tensors
    assert equal(a, b)
    return str(path)


@pytest.mark.parametrize("trained", [{"muon": MuonConfig(), "ema": 0.8}, {"ema": 0.8}, {"muon": MuonConfig()}])
def test_checkpoints_of_ranks_have_averages_and_no_v_of_muon(
    two_ranks: Ranks, tmp_path: Path, trained: dict[str, Any]
) -> None:
    (path,) = set(two_ranks.run(averages_saved, str(tmp_path), trained))
    one = Engine(CASES["tied, dropout"], 3, 16, seed=3, **trained)
    restore_counters(one, load_into(Path(path), one.tensors()).state["engine"])
    want = go_on(Engine(CASES["tied, dropout"], 3, 16, seed=3, **trained), None, 2).tensors()
    assert {*one.tensors()} == {*want} and apart(one.tensors(), want) < 1e-3


def fails_inside_averaged(mesh: Mesh) -> int:
    """The collectives that a rank enters after its error: the others may never enter them."""
    engine = go_on(Engine(CASES["tied, dropout"], 3, 16, seed=3, ema=0.8, mesh=mesh), mesh, 2)
    inside = averaged(engine)
    inside.__enter__()
    entered, error = mesh.entered, OSError("full")
    assert inside.__exit__(OSError, error, None) is False, "it raises the same error again"
    after = mesh.entered - entered
    with pytest.raises(RuntimeError, match="inside `averaged`"):
        engine.optimizer_step(1e-2)
    return after


def test_a_rank_that_fails_inside_averaged_waits_for_no_other(two_ranks: Ranks) -> None:
    assert two_ranks.run(fails_inside_averaged) == [0, 0]


def made_older(path: Path) -> int:
    """Rewrites a checkpoint of ranks with separate up and gate. Returns how many slices had parts of both."""
    content, both = json.loads((path / "manifest.json").read_text(encoding="utf-8")), 0
    shapes = content["state"]["shapes"]
    for file in sorted(content["files"]):
        tensors, said = load_file(path / file), {}
        with safe_open(path / file, framework="pt") as opened:
            at = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        for name in [name for name in tensors if ".up_gate." in name]:
            x, start = tensors.pop(name), at[name]["saved_offsets"][0]
            size = math.prod(shapes[name]) // 2
            up, gate = x[: max(size - start, 0)], x[max(size - start, 0) :]
            both += bool(up.numel() and gate.numel())
            for part, own, begin in (("up", up, start), ("gate", gate, max(start - size, 0))):
                if own.numel():
                    of_part = name.replace("up_gate", part)
                    tensors[of_part], said[of_part] = own.clone(), {"saved_offsets": [begin]}
        at = {name: one for name, one in at.items() if name in tensors} | said
        save_file(tensors, path / file, {"DCP_SHARDING_INFO": json.dumps(at)})
        content["files"][file] = file_entry(path / file)
    for name in [name for name in shapes if ".up_gate." in name]:
        rows, *columns = shapes.pop(name)
        shapes |= {name.replace("up_gate", part): [rows // 2, *columns] for part in ("up", "gate")}
    write_manifest(path, content["step"], content["files"], content["state"])
    return both


def from_older_ranks(mesh: Mesh, folder: str) -> int:
    """A checkpoint with separate parts is read by ranks that own the same, or other, slices of the joined tensor."""
    given: Any = {"mesh": mesh, "ema": 0.8, "seed": 3}
    case = replace(CASES["untied, GQA, window"], vocab_size=97)
    engine = go_on(Engine(case, 3, 16, shard="all", **given), mesh, 2)
    path = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    whole = load_checkpoint(path).tensors
    mesh.barrier()
    (both, _) = mesh.gather(made_older(path) if mesh.rank == 0 else 0)
    assert equal(load_checkpoint(path).tensors, whole)
    for shard, bucket_bytes in (("none", 50_000), ("optimizer", 9_000), ("all", 1)):
        other = Engine(case, 3, 16, shard=shard, bucket_bytes=bucket_bytes, **{**given, "seed": 4})  # type: ignore[arg-type]
        restore_counters(other, load_pieces(path, other, mesh)["engine"])
        for name, (piece, offset, _) in owned_pieces(other).items():
            assert torch.equal(piece, whole[name].view(-1)[offset : offset + piece.numel()]), (shard, name)
        assert equal(other.params, engine.params)
    return both


def test_an_older_checkpoint_of_ranks_is_read_by_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(from_older_ranks, str(tmp_path))[0] > 0, "slices from the end of up to the beginning of gate"


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard", ["none", "optimizer", "all"])
@pytest.mark.parametrize("count", [2, 7])
def test_four_ranks_have_the_results_of_one_process(four_ranks: Ranks, case: str, shard: str, count: int) -> None:
    """Two of them have no micro-batch; then three have twice as many as the fourth."""
    check_parity(four_ranks.run(parity, case, shard, count), shard)


def printed_and_allocated(mesh: Mesh, shard: str, context: int) -> tuple[int, int]:
    """The bytes of a rank that `tilegrad plan` prints, and those that a rank has."""
    sizes = ["--train.batch_size", "2", "--train.seq_len", "24", "--bucket-mb", "0.5", "--model.position", "rope"]
    ranks = ["--world-size", str(mesh.world), "--shard", shard, "--context", str(context)]
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", "--preset", "tiny", *ranks, *sizes, "--json"]) == 0
    options: Any = {"mesh": mesh, "shard": shard, "bucket_bytes": 1 << 19, "context": context}
    engine = Engine(replace(PRESETS["tiny"], position="rope"), 2, 24, **options)
    assert engine.arenas.nbytes == sum(buffer.nbytes for buffer in engine.arenas.bytes.values())
    return json.loads(out.getvalue())["peak_bytes"], engine.arenas.nbytes


@pytest.mark.parametrize(("shard", "context"), [("none", 1), ("optimizer", 1), ("all", 1), ("optimizer", 2)])
def test_a_rank_allocates_what_the_plan_prints(two_ranks: Ranks, shard: str, context: int) -> None:
    for printed, allocated in two_ranks.run(printed_and_allocated, shard, context):
        assert printed == allocated


@pytest.mark.parametrize(
    ("case", "shard", "count"),
    [("untied, GQA, window", "optimizer", 3), ("tied, rope, biases", "none", 1), ("untied, GQA, window", "all", 2)],
)
def test_ranks_that_share_sequences_have_the_results_of_one_process(
    two_ranks: Ranks, case: str, shard: str, count: int
) -> None:
    """Sequences have unequal lengths, some of them odd."""
    for worst, allocated, planned, alone, _ in two_ranks.run(parity, case, shard, count, 2):
        assert worst < 1e-12
        assert allocated == planned < alone


@pytest.mark.slow
@pytest.mark.parametrize("case", ["untied, GQA, window", "tied, rope, biases"])
@pytest.mark.parametrize(("shard", "count"), [("optimizer", 3), ("none", 1), ("all", 3)])
def test_two_groups_of_two_ranks_have_the_results_of_one_process(
    four_ranks: Ranks, case: str, shard: str, count: int
) -> None:
    """One group has one micro-batch more, then one group has none."""
    found = four_ranks.run(parity, case, shard, count, 2)
    assert len({entered for *_, entered in found}) == 1, "the lowest count is who the others wait for"
    for worst, allocated, planned, alone, _ in found:
        assert worst < 1e-12
        assert allocated == planned < alone


def sharing(mesh: Mesh, shard: str) -> Engine:
    options: Any = {"mesh": mesh, "shard": shard, "bucket_bytes": 20_000, "context": 2}
    return Engine(CASES["untied, GQA, window"], 3, 16, **F64, **options)


def by_hand(mesh: Mesh, shard: str) -> None:
    """Forward and backward in separate calls, and evaluation: losses are those of whole sequences."""
    one, many = Engine(CASES["untied, GQA, window"], 3, 16, **F64), sharing(mesh, shard)
    for x, y in micro_batches(89, 5, 2):
        for engine in (one, many):
            engine.forward(x, y, total_targets=90)
            engine.backward()
        assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert many.optimizer_step(1e-2) == pytest.approx(one.optimizer_step(1e-2), rel=1e-12)
    assert apart(many.params, one.params) < 1e-12
    assert many.forward(x, y) == pytest.approx(one.forward(x, y), rel=1e-12)
    assert many.evaluate(x, y) == pytest.approx(one.evaluate(x, y), rel=1e-12)
    with pytest.raises(ValueError, match=r"^total_targets: got 3; accepted: at least the \d+ targets of this call"):
        many.forward(x, y, total_targets=3)


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_losses_of_shared_sequences_are_those_of_one_process(two_ranks: Ranks, shard: str) -> None:
    two_ranks.run(by_hand, shard)


def saved_by_a_group(mesh: Mesh, folder: str) -> str:
    """The checkpoint is read by ranks that share no sequences, and a group reads theirs."""
    engine = sharing(mesh, "optimizer")
    engine.step(*micro_batches(89, 0, 1)[0], 1e-2)
    apart_ = Engine(CASES["untied, GQA, window"], 3, 16, **F64, mesh=mesh)
    for source, other in ((engine, apart_), (apart_, sharing(mesh, "all"))):
        path = save_pieces(Path(folder), source, mesh, {"engine": counters(source)})
        restore_counters(other, load_pieces(path, other, mesh)["engine"])
        assert equal(other.params, engine.params) and other.steps == 1
    return str(path)


def test_a_checkpoint_does_not_depend_on_context(two_ranks: Ranks, tmp_path: Path) -> None:
    path = two_ranks.run(saved_by_a_group, str(tmp_path))[0]
    one = Engine(CASES["untied, GQA, window"], 3, 16, **F64)
    one.step(*micro_batches(89, 0, 1)[0], 1e-2)
    want = {name: p.clone() for name, p in one.params.items()}
    load_into(Path(path), one.tensors())
    assert apart(one.params, want) < 1e-12


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({}, (4, 3), "context: got 3; accepted: a divisor of 4, the number of ranks"),
        ({}, (1, 2), "context: got 2; accepted: a divisor of 1, the number of ranks"),
        ({}, (2, 0), "context: got 0; accepted: a divisor of 2, the number of ranks"),
        ({}, (16, 16), "seq_len: got 16 with context 16; accepted: a multiple of 32"),
        ({"dropout": 0.1}, (2, 2), "dropout: got 0.1 with context 2; accepted: 0.0"),
        ({"position": "learned"}, (2, 2), "position: got 'learned' with context 2; accepted: 'rope'"),
        ({"projection": "per_head", "n_kv_head": None}, (2, 2), "projection: got 'per_head' with context 2; accepted: 'dense'"),
    ],
)  # fmt: skip
def test_a_model_that_ranks_cannot_share_is_refused_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], ranks: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr("tilegrad.engine.engine.Arenas", None)
    mesh = Mesh(alone=True)
    mesh.world, context = ranks
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        Engine(replace(LLAMA, **changed), 3, 16, mesh=mesh, context=context)


@pytest.mark.parametrize("context", [1, 2])
def test_every_group_has_a_micro_batch(context: int) -> None:
    check_accumulation(4 // context, 4, context)
    with pytest.raises(ValueError, match=rf"^gradient_accumulation: got \d; accepted: at least {4 // context}, "):
        check_accumulation(4 // context - 1, 4, context)


def trained(mesh: Mesh | None, steps: int, shard: str = "optimizer", bucket_bytes: int = 20_000) -> Engine:
    config = CASES["tied, dropout"]
    engine = Engine(config, 3, 16, seed=3, mesh=mesh, shard=shard, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]
    go_on(engine, mesh, steps)
    return engine


def go_on(engine: Engine, mesh: Mesh | None, until: int) -> Engine:
    while engine.steps < until:
        pairs = micro_batches(97, engine.steps, 3)
        x, y = ([x for x, _ in pairs], [y for _, y in pairs]) if mesh is None else mine(mesh, pairs)
        engine.step(x, y, 1e-2)
    return engine


def saved_and_resumed(mesh: Mesh, folder: str) -> str:
    """Resumed with the same ranks and buckets it has the same bits, with different ones the same parameters."""
    engine = trained(mesh, 3)
    path = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    at_3 = {name: p.clone() for name, p in engine.params.items()}
    at_5 = {name: p.clone() for name, p in go_on(engine, mesh, 5).params.items()}
    again = trained(mesh, 0)
    restore_counters(again, load_pieces(path, again, mesh)["engine"])
    assert equal(again.params, at_3) and again.steps == 3
    assert equal(go_on(again, mesh, 5).params, at_5)
    for shard, bucket_bytes in (("none", 50_000), ("all", 1), ("optimizer", 9_000)):
        other = trained(mesh, 1, shard, bucket_bytes)
        restore_counters(other, load_pieces(path, other, mesh)["engine"])
        assert equal(other.params, at_3)
        again_path = save_pieces(Path(folder), other, mesh, {"engine": counters(other)})
    return str(again_path)


def loaded_from_one(mesh: Mesh, path: str, shard: str) -> dict[str, Tensor]:
    engine = trained(mesh, 0, shard)
    restore_counters(engine, load_pieces(Path(path), engine, mesh)["engine"])
    return {name: p.clone() for name, p in go_on(engine, mesh, 4).params.items()}


def test_checkpoints_of_two_ranks_are_read_by_one_and_by_two(two_ranks: Ranks, tmp_path: Path) -> None:
    paths = set(two_ranks.run(saved_and_resumed, str(tmp_path / "two")))
    assert len(paths) == 1
    one = trained(None, 0)
    state = load_into(Path(paths.pop()), one.tensors()).state
    restore_counters(one, state["engine"])
    assert one.steps == 3 and state["ranks"] == 2
    path = save_checkpoint(tmp_path / "one", 3, one.tensors(), {"engine": counters(one)})
    after = two_ranks.run(loaded_from_one, str(path), "optimizer") + two_ranks.run(loaded_from_one, str(path), "none")
    go_on(one, None, 4)
    for params in after:
        assert apart(params, one.params) < 1e-4


def saved(mesh: Mesh, folder: str, shard: str) -> tuple[str, str]:
    engine = trained(mesh, 2, shard)
    path = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    return str(path), digest(list(engine.params.values()))


def read_again(mesh: Mesh, path: str, shard: str) -> tuple[str, int]:
    """Reads a checkpoint with buckets of another size."""
    engine = trained(mesh, 0, shard, 33_000)
    restore_counters(engine, load_pieces(Path(path), engine, mesh)["engine"])
    return digest(list(engine.params.values())), engine.steps


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_is_read_by_any_number(four_ranks: Ranks, tmp_path: Path) -> None:
    """Every parameter has the same bits, whichever parts are sharded on saving and on reading."""
    checkpoints = {}
    for shard in ("none", "optimizer", "all"):
        ((path, want),) = set(four_ranks.run(saved, str(tmp_path / shard), shard))
        one = trained(None, 0)
        restore_counters(one, load_into(Path(path), one.tensors()).state["engine"])
        assert (digest(list(one.params.values())), one.steps) == (want, 2)
        checkpoints[path] = want
    for world in (2, 3, 4):
        ranks = four_ranks if world == 4 else Ranks(world)
        for path, want in checkpoints.items():
            for shard in ("none", "optimizer", "all"):
                assert ranks.run(read_again, path, shard) == [(want, 2)] * world
        if world < 4:
            ranks.close()


def no_room(mesh: Mesh, folder: str) -> tuple[str, str]:
    """The disk of rank 1 is full during a save; then there is room again."""
    engine = trained(mesh, 1)
    good = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "shard-00002")

    go_on(engine, mesh, 2)
    with pytest.MonkeyPatch.context() as patch:
        if mesh.rank == 1:
            patch.setattr("torch.distributed.checkpoint.HuggingFaceStorageWriter.write_data", full)
        with pytest.raises(OSError, match="No space left") as error:
            save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    mesh.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    mesh.barrier()
    save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    assert left == [".staged", good.name]
    return str(error.value), " ".join(sorted(path.name for path in Path(folder).iterdir()))


def test_a_full_disk_of_one_rank_is_raised_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    for error, names in two_ranks.run(no_room, str(tmp_path)):
        assert "shard-00002" in error and names == "000001-step-1 000002-step-2"


def apart_in_folders(mesh: Mesh, folder: str) -> tuple[str, str]:
    """A run whose ranks have different folders, then a save into them."""
    text = Path(folder, "text.txt")
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    settings = TrainConfig(steps=2, batch_size=1, gradient_accumulation=2, eval_interval=0, sample_tokens=2)
    model, optimizer = replace(CASES["tied, dropout"], vocab_size=256), OptimizerConfig(ema=0.5)
    run = RunConfig(model, settings, DataConfig(files=(str(text),)), optimizer=optimizer)
    home = Path(folder, f"rank-{mesh.rank}")
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilegrad.training.run.Mesh", lambda _device, _timeout: mesh)
        patch.setattr("tilegrad.training.folder.SHARED_S", 0.2)
        patch.setattr(mesh, "watch", nullcontext)
        patch.setattr(mesh, "close", lambda: None)
        with pytest.raises(ValueError, match="out: got a folder that the ranks don't share") as error:
            train(run, home)
        errors.append(str(error.value))
        assert not Path(folder, f"rank-{mesh.rank}").exists()
        mesh.barrier()
        train(run, Path(folder, "shared"))
    engine = trained(mesh, 1)
    with pytest.raises(OSError, match="shard-00002") as lost:
        save_pieces(home, engine, mesh, {"engine": counters(engine)})
    errors.append(str(lost.value))
    assert not list(home.glob("*-step-*"))
    return errors[0], errors[1]


def test_ranks_that_do_not_share_a_folder_are_refused_before_the_first_step(two_ranks: Ranks, tmp_path: Path) -> None:
    for refusal, lost in two_ranks.run(apart_in_folders, str(tmp_path)):
        assert f"don't share: rank 1 ({tmp_path}/rank-1 on " in refusal
        assert f" can't see what rank 0 wrote into {tmp_path}/rank-0 on " in refusal
        assert refusal.endswith("accepted: the same --out on every node, on a file system that all of them share")
        assert f"{tmp_path}/rank-0/.staged/shard-00002-model-00001-of-00001.safetensors" in lost
    saved = latest_checkpoint(tmp_path / "shared" / "checkpoints")
    best = latest_checkpoint(tmp_path / "shared" / "best")
    assert saved is not None and best is not None and load_checkpoint(saved).state["ranks"] == 2
    model = tilegrad.load(tmp_path / "shared")
    tensors = load_checkpoint(saved).tensors
    assert equal(model.params, {name: tensors[f"ema.{name}"] for name in model.params})
    assert tilegrad.evaluate(tmp_path / "shared").loss == pytest.approx(read_state(best)["validation_loss"], rel=1e-5)
    names = sorted(path.name for path in saved.glob("*.safetensors"))
    assert len(names) == 2 and all((saved / name).samefile(best / name) for name in names)


def damaged(mesh: Mesh, folder: str) -> tuple[str, str]:
    engine = trained(mesh, 1)
    good = save_pieces(Path(folder), engine, mesh, {"engine": counters(engine)})
    path = save_pieces(Path(folder), go_on(engine, mesh, 2), mesh, {"engine": counters(engine)})
    before = {name: p.clone() for name, p in engine.params.items()}
    if mesh.rank == 0:
        victim = sorted(path.glob("*.safetensors"))[-1]
        data = bytearray(victim.read_bytes())
        data[-5] ^= 1
        victim.write_bytes(data)
    mesh.barrier()
    with pytest.raises(DamagedCheckpoint) as error:
        load_pieces(path, engine, mesh)
    assert error.value.previous == good and equal(engine.params, before)
    with pytest.raises(ValueError, match=r"got .* of shape .*; accepted: .*, as in this model") as other:
        load_pieces(good, Engine(CASES["untied, GQA, window"], 3, 16, mesh=mesh), mesh)
    return str(error.value), str(other.value)


def test_a_damaged_shard_and_another_model_are_refused_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    for error, _ in two_ranks.run(damaged, str(tmp_path)):
        assert "shard-00002" in error and "000001-step-1" in error


def guarded(mesh: Mesh) -> None:
    """All ranks skip a step if a gradient is not finite on one rank, and all stop if one is asked to."""
    many = trained(mesh, 1)
    before = {name: p.clone() for name, p in many.params.items()}
    many.zero_gradients()
    many.forward(*micro_batches(97, 7, 2)[mesh.rank])
    many.backward()
    if mesh.rank == 1:
        many.ranks.stop = True
        many.grads["blocks.1.ffn.up.weight"][3, 3] = math.inf
    norm = many.optimizer_step(1e-2)
    assert (math.isfinite(norm), many.optimizer.skipped, many.ranks.stop) == (False, 1, True)
    assert equal(many.params, before)
    many.gradients(*mine(mesh, micro_batches(97, 8, 2)))
    many.forward(*micro_batches(97, 8, 1)[0])
    with pytest.raises(RuntimeError, match=r"^backward: got gradients that are already summed over the ranks"):
        many.backward()
    many.zero_gradients()
    many.backward()


def test_ranks_agree_on_skipped_steps_and_on_a_stop(two_ranks: Ranks) -> None:
    two_ranks.run(guarded)


def unread(mesh: Mesh) -> int:
    """The gathers in flight when a rank updates its slices, over steps in which rank 1 has no micro-batch."""
    engine, found = trained(mesh, 1), []
    ranks, update = engine.ranks, engine.optimizer.apply
    assert isinstance(ranks, ShardedOptimizer)

    def apply(_optimizer: object, learning_rate: float) -> None:
        found.append(len(ranks._gathers))
        update(learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine.optimizer), "apply", apply)
        for step in range(2):
            engine.step(*mine(mesh, micro_batches(97, step, 1)), 1e-2)
    return max(found)


def test_a_rank_updates_only_after_its_gathers_are_done(two_ranks: Ranks) -> None:
    assert two_ranks.run(unread) == [0, 0]


def poisoned(mesh: Mesh, context: int) -> None:
    """The values of units are poisoned after their last use, as every dead value, and no bit of a gradient changes."""
    engine = trained(mesh, 1, "all") if context == 1 else sharing(mesh, "all")
    x, y = micro_batches(89, 5, 2)[mesh.rank // context]

    def program() -> list[Tensor]:
        engine.draws = 7
        engine.gradients(x, y)
        found = [own.grads.clone() for own in engine.optimizer.owned]
        engine.optimizer_step(0.0)
        engine.zero_gradients()
        engine.forward(x, y, 100)
        engine.backward()
        return found + [own.grads.clone() for own in engine.optimizer.owned]

    want = program()
    engine.arenas.poison()
    with poison_dead(engine.arenas, observe):
        got = program()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("context", [1, 2])
def test_units_are_dead_when_the_plan_says_so(two_ranks: Ranks, context: int) -> None:
    two_ranks.run(poisoned, context)


def nothing(mesh: Mesh) -> list[str]:
    """No rank has a micro-batch in a step; the gradients that were summed before do not change."""
    engine, errors = trained(mesh, 1), []
    engine.gradients(*mine(mesh, micro_batches(97, 5, 2)))
    before, draws = {name: p.clone() for name, p in engine.params.items()}, engine.draws
    with pytest.raises(ValueError, match=r"tokens: got no micro-batch; accepted: one or more") as error:
        engine.submit([], [], 1e-2)
    errors.append(str(error.value).split(":")[0])
    assert equal(engine.params, before) and engine.draws == draws and engine.ranks.summed
    return errors


def test_a_step_without_a_micro_batch_is_refused_on_all_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(nothing) == [["tokens"]] * 2


def evaluated(mesh: Mesh) -> float:
    """A forward alone gathers units too, and a rank without a micro-batch takes part."""
    one, many = trained(None, 0), trained(mesh, 0, "all")
    x, y = micro_batches(97, 5, 1)[0]
    assert many.evaluate(x, y) == pytest.approx(one.evaluate(x, y), abs=1e-6)
    return many.step(*mine(mesh, [(x, y)]), 1e-2) - one.step(x, y, 1e-2)


def test_evaluation_gathers_units_also_on_ranks_without_a_micro_batch(two_ranks: Ranks) -> None:
    assert two_ranks.run(evaluated) == pytest.approx([0.0, 0.0], abs=1e-6)


BAD = {
    "gradient_accumulation": "gradient_accumulation: got 1; accepted: at least 2, a micro-batch for each rank",
    "shard": "shard: got 'moments'; accepted: 'none', 'optimizer', 'all'",
    "device": "device: got cuda with 2 ranks on this node; accepted: at most 1, one for each GPU",
    "timeout": "timeout: got 0.0 s; accepted: a finite number above 0",
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_of_ranks_are_refused_before_anything_is_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("tilegrad.training.run.check_device", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bad: dict[str, Any] = {"gradient_accumulation": 1, "device": "cuda"}
    asked: dict[str, Any] = {"gradient_accumulation": 2, **({name: bad[name]} if name in bad else {})}
    run = RunConfig(replace(CONFIG, vocab_size=256), train=TrainConfig(seq_len=8, **asked))
    with pytest.raises(ValueError, match=f"^{re.escape(BAD[name])}$"):
        train(
            run, tmp_path / "run", shard="moments" if name == "shard" else "optimizer",  # type: ignore[arg-type]
            timeout_s=0.0 if name == "timeout" else 5.0,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_idle_ranks_are_reported() -> None:
    """A run continues with more ranks than it has micro-batches."""
    start: dict[str, Any] = {
        "ranks": 4,
        "micro_batches": 3,
        "parameters": 1,
        "tokens": 1,
        "planned_bytes": 1,
        "unigram_entropy": 1.0,
    }
    start.update(trained_parameters=1, steps=4, resumed_from="here", step=2)
    errors = [_message("start", {**start, "idle_ranks": idle}) or "" for idle in (1, 0)]
    assert errors[0] == "1 of 4 ranks have no micro-batch: gradient_accumulation is 3\n" + errors[1]


def disagreeing(mesh: Mesh) -> list[str]:
    errors = []
    for options in (
        {"seed": mesh.rank},
        {"weight_decay": 0.1 * mesh.rank},
        {"bucket_bytes": 9_000 + 20_000 * mesh.rank},
        {"shard": "none" if mesh.rank else "all"},
        {"context": 1 + mesh.rank},
        {"model_config": replace(CASES["untied, GQA, window"], rope_theta=10000.0 + mesh.rank)},
    ):
        arguments: dict[str, Any] = {"model_config": CASES["untied, GQA, window"], "mesh": mesh, **options}
        with pytest.raises(ValueError, match=r" on rank 1; accepted: the value of rank 0") as error:
            Engine(**arguments, batch_size=3, seq_len=16)
        assert len(str(error.value)) < 120
        errors.append(str(error.value).split(":")[0])
    return errors


def test_names_of_recomputed_ops_are_compared_in_a_fixed_order() -> None:
    """str() of a set depends on the hash seed of the process."""
    sent: dict[str, str] = {}

    def gather(fields: dict[str, str]) -> list[dict[str, str]]:
        sent.update(fields)
        return [fields, fields]

    mesh: Any = SimpleNamespace(world=2, at=lambda _place: None, gather=gather)
    recompute: Any = (frozenset({"norm", "activation"}), frozenset())
    spec = StepSpec(CONFIG, 2, 8, torch.float32, torch.device("cpu"), recompute, world=2)
    check_same(mesh, spec, AdamW(), 0)
    assert sent["recompute"] == "[['activation', 'norm'], []]"


def test_ranks_that_disagree_are_refused_with_the_field(two_ranks: Ranks) -> None:
    assert (
        two_ranks.run(disagreeing)
        == [["seed", "weight_decay", "bucket_bytes", "shard", "context", "model.rope_theta"]] * 2
    )


def begun_elsewhere(mesh: Mesh) -> list[str]:
    """Rank 1 draws different weights from the same seed; then it reads different ones from a file with the same name."""
    errors = []
    for shard in ("optimizer", "all"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tilegrad.model.layer.torch.randn", partial(_drawn, torch.randn, mesh.rank))
            with pytest.raises(ValueError, match=r" on rank 1; accepted: the value of rank 0") as error:
                trained(mesh, 0, shard)
        errors.append(str(error.value).split(":")[0])
        engine = trained(mesh, 0, shard)
        before = {name: p.clone() for name, p in engine.params.items()}
        other: Any = SimpleNamespace(read=partial(dict, {name: p + 1e-3 * mesh.rank for name, p in before.items()}))
        with pytest.raises(ValueError, match=r" on rank 1; accepted: the value of rank 0") as error:
            _load(other, engine, mesh)
        errors.append(str(error.value).split(":")[0])
        assert equal(engine.params, before)
    return errors


def _drawn(randn: Callable[..., Tensor], rank: int, *shape: Any, **options: Any) -> Tensor:
    return randn(*shape, **options) * (1 + 1e-6 * rank)


def test_a_rank_with_different_initial_weights_is_named(two_ranks: Ranks) -> None:
    assert two_ranks.run(begun_elsewhere) == [["initial weights", "init"] * 2] * 2
