"""How a training run begins: new or resumed, in one process or on all ranks. loop.py is the run itself.

Every check comes before the first write into the run's folder (`folder.py`). Under torchrun rank 0 prepares the data first. If
a rank is lost, the others end at once and save nothing, because a save would wait for the lost rank.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..data.documents import Numbers, Show, default_text, quiet
from ..data.tokenizer import Tokenizer
from ..data.tokens import TokenFile
from ..engine.dist.mesh import Mesh, RankLost
from ..engine.engine import Engine
from ..engine.machine import check_device, check_platform
from ..engine.parallel import check_accumulation, check_agreed, check_ranks, digest
from ..engine.spec import BUCKET_BYTES, Shard, StepSpec
from ..engine.state import write_param
from ..kernels.scratch import accumulation_dtype
from ..model.layer import is_adapter
from ..model.lora import LoraConfig, adapter_parts
from ..pretrained.adapters import open_adapter
from ..pretrained.weights import Weights, forms, open_weights
from .checkpoint import remove_leftovers
from .config import DTYPES, RunConfig, Sections, check_vocab_size
from .dataset import Dataset, kept_counts, needs_documents, prepare_data
from .folder import check_shared, claimed, forget, own_data
from .frozen import OWN, BaseWeights, base_of, load_own, open_base, save_own
from .loggers import check_installed, chosen_loggers
from .loop import Run, RunResult
from .ranks import Ranks
from .signals import end_on_signals
from .start import Start, StrPath, resolve
from .state import RunState


def train(
    config: RunConfig | Sections | None,
    out: StrPath | None,
    *,
    resume: StrPath | bool | None = None,
    where: str = "config",
    name: str | None = None,
    show: Show = quiet,
    shard: Shard = "optimizer",
    bucket_bytes: int = BUCKET_BYTES,
    context: int = 1,
    timeout_s: float = 600.0,
) -> RunResult:
    """Train in the folder `out`. `resolve` documents the first arguments. The last four are for several ranks; a collective
    operation waits at most `timeout_s` for a rank."""
    check_platform()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    start = resolve(config, out, resume=resume, where=where, name=name, world=world)
    t = start.config.train
    if start.config.lora is not None and t.init is None:
        raise ValueError(
            "init: got None with adapters ([lora]); accepted: the folder of the weights to adapt (--init DIR)"
        )
    check_device(t.device)
    spec = StepSpec(
        start.config.model,
        t.batch_size,
        t.seq_len,
        DTYPES[t.dtype],
        torch.device(t.device),
        world=world,
        shard=shard,
        context=context,
        **start.config.step_options,
    )
    for seq_len in dict.fromkeys((t.seq_len, *(stage.seq_len for stage in t.stages))):
        check_ranks(replace(spec, seq_len=seq_len))
    if start.saved is None:  # a resumed run may have more ranks than micro-batches, and says how many ranks are idle
        check_accumulation(t.gradient_accumulation, world, context, t.gradients)
    check_installed(chosen_loggers(t.log))
    mesh = Mesh(t.device, timeout_s)
    ranks = Ranks(mesh, {"shard": shard, "bucket_bytes": bucket_bytes, "context": context})
    with end_on_signals(), mesh.watch(), ExitStack() as until_the_end:
        try:
            _claim(start.folder, mesh, until_the_end, new=start.saved is None)
            result = _open(start, show if mesh.rank == 0 else quiet, ranks).train()
        except RankLost as error:
            print(f"tilegrad: {error}", file=sys.stderr, flush=True)
            os._exit(1)  # without cleanup, which could wait for the lost rank
    mesh.close()
    return result


def _claim(folder: Path, mesh: Mesh, until_the_end: ExitStack, *, new: bool) -> None:
    """Claim the folder on rank 0, and check that all ranks find it. If either fails, all ranks raise."""
    token, refusal = "", ""
    if mesh.rank == 0:
        try:
            token = until_the_end.enter_context(claimed(folder, new=new))
            for place in ("checkpoints", "best"):
                remove_leftovers(folder / place)
        except (ValueError, FileExistsError) as error:
            refusal = str(error)
    refusal = mesh.gather(refusal)[0]
    if refusal:
        raise ValueError(refusal)
    if mesh.world > 1:
        mesh.at("looking for the run's folder")
        check_shared(folder, token, mesh)


def _open(start: Start, show: Show, ranks: Ranks) -> Run:
    """The run with its data. A new run prepares the data, and deletes it again after an error."""
    folder, mesh = start.folder, ranks.mesh
    base = _open_base(start)
    existed = (folder / "data").exists()
    summary: Numbers = {}
    try:
        if start.saved is None:
            tokens, tokenizer = _prepare(start, show, mesh, summary)
        else:
            documents = needs_documents(start.config.data)
            tokens, tokenizer = own_data(folder, start.saved[1], documents=documents)
        dataset = Dataset.split(tokens, tokenizer, start.config, summary)
        if start.saved is None and start.config.train.patience and dataset.held_out is None:
            fraction = start.config.data.validation_fraction
            raise ValueError(
                f"patience: got {start.config.train.patience}, but validation_fraction {fraction} of this data holds out "
                "nothing; accepted: 0, a larger validation_fraction, or more data"
            )
        start = start.with_steps(dataset.batches.rows_in)
        run = Run(start, dataset, show, ranks, base)
        if start.saved is None:
            if mesh.rank == 0:
                forget(folder)
            _begin(run, base)
        else:
            _continue(run, base, start.saved[1])
        return run
    except BaseException:
        if not existed and mesh.rank == 0:
            shutil.rmtree(folder / "data", ignore_errors=True)
        raise


def _prepare(start: Start, show: Show, mesh: Mesh, summary: Numbers) -> tuple[TokenFile, Tokenizer]:
    """The tokens of a new run; rank 0 prepares them first. `summary` gets the counts of the data, which are shown only after
    the run has begun, because from then on a closed output ends the run with a save."""
    config, data = start.config, start.config.data
    mesh.at("preparing data")
    tokens, tokenizer = mesh.first(lambda: prepare_data(config, start.folder / "data", kept_counts(show, summary)))
    if not needs_documents(data) and len(tokens.tokens) <= config.train.seq_len:
        raise ValueError(
            f"{', '.join(data.files) or default_text()}: got {len(tokens.tokens)} tokens; accepted: at least seq_len + 1 = "
            f"{config.train.seq_len + 1}; give more text, or a smaller seq_len"
        )
    check_vocab_size(config, tokens.vocab_size)
    return tokens, tokenizer


def _open_base(start: Start) -> BaseWeights | None:
    """The base weights of a run with adapters. A resumed run refuses weights that differ from the first ones."""
    config, init = start.config, start.config.train.init
    if config.lora is None or init is None:
        return None
    if start.saved is None:
        return open_base(config.model, Path(init))
    state = start.saved[1]
    own = init == state["run"]["train"]["init"] and Path(state["base"]["folder"]).exists()
    return base_of(config.model, state, None if own else Path(init))


def _begin(run: Run, base: BaseWeights | None) -> None:
    """Load the weights and adapters that a new run begins with, and save a copy of frozen parameters."""
    init, lora, engine, mesh = run.config.train.init, run.config.lora, run.engine, run.mesh
    frozen = _frozen(engine, base)
    if init is not None:
        source = open_weights(Path(init)) if base is None else base.weights
        _load(source, engine, mesh)
        if lora is not None and lora.adapter is not None:
            _load_adapter(lora, lora.adapter, engine, source)
        if frozen and base is None:  # copy from the source, because the values in the engine may be rounded
            values = source.read(accumulation_dtype(engine.dtype))
            frozen = {name: values[name] for name in frozen}
        if mesh.rank == 0:
            source.keep_origin(run.folder / "origin")
    if frozen:
        run.frozen_sha256 = mesh.gather("" if mesh.rank else save_own(run.folder, frozen))[0]


def _frozen(engine: Engine, base: BaseWeights | None) -> dict[str, Tensor]:
    """The frozen parameters, without the base weights of adapters."""
    left_out = {*engine.grads, *(() if base is None else forms(base.weights.config))}
    return {name: x for name, x in engine.params.items() if name not in left_out}


def _continue(run: Run, base: BaseWeights | None, state: RunState) -> None:
    """Load the frozen parameters of a resumed run."""
    if base is not None:
        _load(base.weights, run.engine, run.mesh)
    frozen, engine = load_own(run.folder, state), run.engine
    wanted = {name: tuple(x.shape) for name, x in _frozen(engine, base).items()}
    for name in sorted({*frozen, *wanted}):
        shape = tuple(frozen[name].shape) if name in frozen else None
        if shape != wanted.get(name):
            raise ValueError(
                f"{run.folder / OWN}: got {name} of shape {shape}; accepted: {wanted.get(name)}, as in this model"
            )
    for name, value in frozen.items():
        write_param(engine, name, value)
    run.frozen_sha256 = state.get("frozen_sha256")


def _load(source: Weights, engine: Engine, mesh: Mesh) -> None:
    """Copy weights into the parameters of the engine; adapters stay unchanged."""
    if mesh.world == 1:
        source.load({name: x for name, x in engine.params.items() if not is_adapter(name)})
    else:
        values = source.read()
        check_agreed(mesh, {"init": digest(values.values())})
        for name, value in values.items():
            write_param(engine, name, value)


def _load_adapter(lora: LoraConfig, folder: str, engine: Engine, source: Weights) -> None:
    """Load the PEFT adapters in `folder`, whose rank, alpha and layers must be those of the run."""
    adapter = open_adapter(Path(folder), source)
    parts = [adapter_parts(source.config, one) for one in (adapter.lora, lora)]
    for name in ("rank", "alpha", "layers"):
        own, given = getattr(adapter.lora, name), getattr(lora, name)
        if parts[0] != parts[1] if name == "layers" else own != given:
            raise ValueError(f"lora.{name}: got {given!r}; accepted: {own!r}, as in {folder}")
    for name, value in adapter.read().items():
        write_param(engine, name, value)
