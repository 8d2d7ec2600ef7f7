"""Every pair of an engine's arguments: gradients equal autograd, updates equal torch, and some arguments change no bit."""

from __future__ import annotations

import functools
import inspect
import math
import re
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
    exact_gradients,
    one_by_one,
    random_ends,
)
from support.muon import muon_reference
from support.native import needs_library
from support.pairwise import Spec, all_pairs, covering, pairs
from torch import Tensor

from tilegrad import Engine
from tilegrad.engine.batch import Batch
from tilegrad.engine.dist.mesh import Mesh
from tilegrad.engine.state import counters
from tilegrad.kernels.muon import MuonConfig
from tilegrad.model.layer import FULL
from tilegrad.model.lora import LoraConfig

MODELS = {
    "gpt": replace(CONFIG, n_layer=2),
    "llama": replace(LLAMA, n_layer=1),
    "qwen": QWEN3,
    "embedding": replace(CONFIG, n_layer=1, loss="embedding_mse"),
    "heads": replace(CONFIG, n_layer=2, projection="per_head", tie_embeddings=False, window=4, window_layers=(1,)),
    "dropout": replace(CONFIG, n_layer=1, dropout=0.3),
    "speed run": SPEED_RUN,
}
BATCHES = {  # micro-batches (b, t) of one step
    "whole": ((3, 9),),
    "smaller": ((2, 5),),
    "two": ((3, 9), (1, 4)),
    "three": ((1, 9), (3, 2), (2, 7)),
}
NUMBERS: dict[str, tuple[object, ...]] = {  # arguments that change numbers
    "model_config": tuple(MODELS),
    "batches": tuple(BATCHES),
    "dtype": (None, torch.float32, torch.float64, torch.bfloat16),
    "seed": (0, 2**40),
    "betas": ((0.9, 0.95), (0.5, 0.999)),
    "eps": (1e-8, 1e-4),
    "weight_decay": (0.1, 0.0),
    "max_norm": (1.0, math.inf, 1e-3),
    "learning_rate": (1e-2, 1e-3),
    "documents": (0, 1, 2),
    "lora": (None, LoraConfig(3, 6), LoraConfig(2, 8, "attention", dropout=0.2)),
    "freeze": ((), ("wte.*", "*.ln1.*")),
    "invariant": (False, True),
    "muon": (
        None,
        MuonConfig(momentum_warmup=2),
        MuonConfig(0.6, nesterov=False, scale="rms", learning_rate_factor=0.5),
    ),
    "windows": ((), (2, 6), (None,)),  # steps have the first window
    "ema": (0.0, 0.15, 0.999),
}
NO_BIT: dict[str, tuple[object, ...]] = {  # arguments that change no bit; the first value is the default
    "states": (FULL,),  # lean states round: tests/train/test_lean.py
    "batch_size": (3, 4),
    "seq_len": (9, 16),
    "device": ("cpu", torch.device("cpu")),
    "memory_budget": (None, 1 << 34, "least"),
    "linear": ("plain",),
    "head": ("plain",),
    "deterministic": (True, False),
    "capture": (True, False),
    "mesh": (None, "alone"),
    "shard": ("optimizer", "none"),
    "bucket_bytes": (4 << 20, 4096),
    "context": (1,),
    "accumulate": (True, False),
    "way": ("gradients", "step", "submit", "forward"),
}
AXES = NUMBERS | NO_BIT
PAIRS, ROWS = 2_763, 36
ROWS_IN_CI, PAIRS_IN_CI = 11, 2_300


def allowed(spec: Spec) -> bool:
    """forward and backward of several micro-batches round differently from `gradients`, and accumulate=False refuses several.
    Invariant forwards have no float64 and no adapters, and Muon has no adapters."""
    if spec.get("invariant") and (spec.get("lora") is not None or spec.get("dtype") == torch.float64):
        return False
    if spec.get("muon") is not None and spec.get("lora") is not None:
        return False
    several = "batches" in spec and len(BATCHES[spec["batches"]]) > 1
    return not (several and (spec.get("way") == "forward" or spec.get("accumulate") is False))


@functools.cache
def least(
    name: str, dtype: torch.dtype | None, batch_size: int, seq_len: int, documents: int, lora: LoraConfig | None,
    freeze: tuple[str, ...], invariant: bool, muon: MuonConfig | None, windows: tuple[int | None, ...], ema: float,
    accumulate: bool,
) -> int:  # fmt: skip
    how: Any = {"documents": documents, "lora": lora, "freeze": freeze, "invariant": invariant, "muon": muon}
    how |= {"windows": windows, "ema": ema, "accumulate": accumulate}
    with pytest.raises(ValueError, match="memory_budget: got 1 bytes") as error:
        Engine(MODELS[name], batch_size, seq_len, dtype=dtype, memory_budget=1, **how)
    found = re.search(r"at least ([\d,]+)", str(error.value))
    assert found
    return int(found[1].replace(",", ""))


def engine_of(spec: Spec) -> Engine:
    given = {name: spec[name] for name in inspect.signature(Engine).parameters}
    if given["memory_budget"] == "least":
        names = inspect.signature(least).parameters
        given["memory_budget"] = least(*(spec[{"name": "model_config"}.get(name, name)] for name in names))
    given["mesh"] = Mesh("cpu", alone=True) if given["mesh"] else None
    engine = Engine(**given | {"model_config": MODELS[spec["model_config"]]})
    engine.window = (*spec["windows"], engine.config.window)[0]
    return engine


def step_of(spec: Spec, number: int) -> list[Batch]:
    config, documents, found = MODELS[spec["model_config"]], spec["documents"], []
    for n, (b, t) in enumerate(BATCHES[spec["batches"]]):
        seed = 7 * number + n
        ends = random_ends(b, t, documents, seed) if documents > 1 else None
        found.append(Batch(*batch(config, b, t, seed), ends))
    return found


def gradients_of(engine: Engine, batches: list[Batch]) -> float:
    tokens, targets, ends = arguments(batches)
    return engine.gradients(tokens, targets, cu_seqlens=ends)


def check_gradients(engine: Engine, loss: float, spec: Spec, params: dict[str, Tensor], number: int) -> None:
    documents = [x for each in step_of(spec, number) for x in one_by_one(*each)]
    want, exact = exact_gradients(replace(engine.config, window=engine.window), params, documents, spec["lora"])
    exact = {name: exact[name] for name in engine.grads}
    if engine.dtype == torch.bfloat16:
        assert loss == pytest.approx(want, rel=2e-2)
        largest = max(float(g.norm()) for g in exact.values())
        for name, g in exact.items():
            assert torch.dist(engine.grads[name].double(), g) <= 0.1 * g.norm() + 0.01 * largest, name
        return
    tight = engine.dtype == torch.float64
    assert loss == pytest.approx(want, rel=1e-12 if tight else 1e-5)
    assert_equal_gradients(engine.grads, exact, 1e-10 if tight else 1e-3)


class Expected:
    """torch's clipping and AdamW in float64, and Muon by decompositions, with the gradients that an engine has."""

    def __init__(self, engine: Engine, spec: Spec) -> None:
        self.params = {n: torch.nn.Parameter(engine.params[n].to(torch.float64, copy=True)) for n in engine.grads}
        self.max_norm, self.rate = spec["max_norm"], spec["learning_rate"]
        self.muon, self.decay = spec["muon"], spec["weight_decay"]
        declared = engine.spec.declare().params if self.muon is not None else {}
        self.matrices = {n: declared[n].matrices for n in self.params if n in declared and declared[n].matrices}
        self.momentum = {name: torch.zeros_like(self.params[name].detach()) for name in self.matrices}
        decays = {True: spec["weight_decay"], False: 0.0}
        by_adamw = [p for name, p in self.params.items() if name not in self.matrices]
        groups = [
            {"params": [p for p in by_adamw if (p.ndim >= 2) is matrix], "weight_decay": decay}
            for matrix, decay in decays.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=spec["betas"], eps=spec["eps"])
        self.ema, self.average, self.steps = spec["ema"], {n: p.detach().clone() for n, p in self.params.items()}, 0

    def update(self, engine: Engine) -> float:
        for name, p in self.params.items():
            p.grad = engine.grads[name].to(torch.float64, copy=True)
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), self.max_norm)
        self.optimizer.step()
        self.steps += 1
        for name, shapes in self.matrices.items():
            self.update_matrices(name, shapes)
        w = 1.0 if self.steps == 1 else 1.0 - min(self.ema, (1 + self.steps) / (10 + self.steps))
        for name, p in self.params.items():
            self.average[name] += w * (p.detach() - self.average[name])
        return float(norm)

    @torch.no_grad()
    def update_matrices(self, name: str, shapes: tuple[tuple[int, int], ...]) -> None:
        grad, at = self.params[name].grad, 0
        assert grad is not None
        p, g, m = (x.view(-1) for x in (self.params[name], grad, self.momentum[name]))
        for shape in shapes:
            i = slice(at, at := at + math.prod(shape))
            old_p, old_g, old_m = (x[i].view(shape) for x in (p, g, m))
            rates = {"learning_rate": self.rate, "weight_decay": self.decay}
            new = muon_reference(old_p, old_g, old_m, self.muon, **rates, t=self.steps)
            p[i], m[i] = (x.view(-1) for x in new)

    def check(self, engine: Engine) -> None:
        """Checks updates. An update is at most about the learning rate, so errors are in units of it."""
        unit = 2e-5 * self.rate + (1e-15 if engine.dtype == torch.float64 else 2e-7)
        averages = engine.tensors()
        for name, p in self.params.items():
            pairs = [(engine.params[name], p.detach())]
            pairs += [(averages[f"ema.{name}"], self.average[name])] if self.ema else []
            for found, want in pairs:
                error = float((found.double() - want).abs().max())
                if (
                    name in self.matrices
                ):  # the five steps multiply a small singular value, and its rounding, by up to 485
                    error /= 1e3
                assert error <= unit * (1 + float(want.abs().max())), (name, error)


def by(way: str, engine: Engine, spec: Spec, number: int) -> float:
    """Takes one step and returns its loss."""
    batches = step_of(spec, number)
    tokens, targets, ends = arguments(batches)
    if way == "step":
        return engine.step(tokens, targets, spec["learning_rate"], cu_seqlens=ends)
    if way == "submit":
        engine.submit(tokens, targets, spec["learning_rate"], cu_seqlens=ends)
        (result,) = engine.finished(wait=True)
        return result.loss
    if way == "forward":
        if spec["accumulate"]:
            engine.zero_gradients()
        loss = engine.forward(tokens[0], targets[0], cu_seqlens=ends[0])
        engine.backward()
    else:
        loss = gradients_of(engine, batches)
    engine.optimizer_step(spec["learning_rate"])
    return loss


def check(spec: Spec) -> bool:
    """Whether the weights moved."""
    base = engine_of(spec | {name: values[0] for name, values in NO_BIT.items()})
    began = clones(base.params)
    expected, losses = Expected(base, spec), []
    for number in range(2):
        params = clones(base.params)
        losses.append(gradients_of(base, step_of(spec, number)))
        if base.config.dropout == 0 and (spec["lora"] is None or spec["lora"].dropout == 0):
            check_gradients(base, losses[-1], spec, params, number)
        norm = expected.update(base)
        assert base.optimizer_step(spec["learning_rate"]) == pytest.approx(norm, rel=1e-5)
        expected.check(base)
    other = engine_of(spec)
    assert [by(spec["way"], other, spec, number) for number in range(2)] == losses
    assert equal(other.tensors(), base.tensors()) and counters(other) == counters(base)
    x, y, cu = step_of(spec, 2)[0]
    evaluated = [engine.evaluate(x, y, cu_seqlens=cu) for engine in (other, base)]
    assert evaluated[0] == evaluated[1]
    return not equal(began, base.params)


def check_rows(rows: list[Spec]) -> None:
    for spec in rows:
        try:
            assert check(spec), "the weights have not moved"
        except BaseException as error:
            error.add_note(str(spec))
            raise


def test_every_argument_of_an_engine_has_values_here() -> None:
    assert set(inspect.signature(Engine).parameters) | {"batches", "learning_rate", "way"} == set(AXES)


@needs_library  # the argument invariant needs it
def test_pairs_of_arguments_have_autograds_numbers_and_the_bits_of_the_defaults() -> None:
    rows, every = covering(AXES, allowed), all_pairs(AXES, allowed)
    assert set.union(*map(pairs, rows)) == every and (len(every), len(rows)) == (PAIRS, ROWS)
    assert len(set.union(*map(pairs, rows[:ROWS_IN_CI]))) >= PAIRS_IN_CI
    check_rows(rows[:ROWS_IN_CI])


@pytest.mark.slow
def test_every_pair_of_arguments_has_autograds_numbers_and_the_bits_of_the_defaults(fresh_seed: int) -> None:
    for seed in (0, fresh_seed, fresh_seed + 1):
        check_rows(covering(AXES, allowed, seed))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("linear", "fp8"), ("linear", "other"), ("dtype", torch.float16), ("batch_size", 0), ("batch_size", True),
        ("seq_len", 17), ("memory_budget", 0), ("memory_budget", 1.5), ("context", 2), ("shard", "some"),
        ("documents", -1), ("documents", 9), ("documents", True), ("invariant", 1), ("muon", "muon"),
        ("accumulate", 0), ("accumulate", "no"),
        ("ema", 1.0), ("ema", -0.1), ("ema", True), ("ema", "0.9"), ("ema", math.nan),
    ],
)  # fmt: skip
def test_an_unknown_argument_is_refused_by_name(argument: str, value: object) -> None:
    given: Any = {"batch_size": 2, "seq_len": 8, argument: value}
    with pytest.raises(ValueError, match=rf"^{argument}: got .*; accepted: "):
        Engine(MODELS["gpt"], **given)
