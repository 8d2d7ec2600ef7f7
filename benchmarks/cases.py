"""The training steps that `python -m benchmarks.training` measures, with their goals against PyTorch, which is compiled on a
GPU and eager on a CPU.

A case is one way in which tilegrad runs a problem; the peers run the problem as one batch. Cases of one problem are measured
together, against the same peers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilegrad.engine.optimizer import AdamW
from tilegrad.kernels.muon import MuonConfig
from tilegrad.model.config import PRESETS, ModelConfig
from tilegrad.model.layer import FULL, HeadProducts, Linear, States

from .step_cost import step_flops

_GIB = 1 << 30
ADAMW = AdamW()
VOCAB_SIZE = 50304  # 50257, the size of GPT-2's vocabulary, rounded up to a multiple of 128 as in nanoGPT and llm.c


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, and the batch of a step: B sequences of T tokens."""

    config: ModelConfig
    batch_size: int
    seq_len: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def flops(self) -> int:
        return step_flops(self.config, self.batch_size, self.seq_len)


@dataclass(frozen=True, slots=True)
class Case:
    """speed    the goal: at least this many times the tokens/s of the peer
    aim      a higher speed, which is shown next to the goal but not required
    memory   the goal: at most this many times the peak bytes of the peer

    The peer is eager on a CPU and compiled on a GPU."""

    name: str
    problem: Problem
    micro_batches: int = 1
    budget_bytes: int | None = None
    linear: Linear = "plain"
    head: HeadProducts = "plain"
    states: States = FULL
    muon: MuonConfig | None = None
    adamw: AdamW = ADAMW
    device: str = "cuda"
    speed: float | None = None
    aim: float | None = None
    memory: float | None = None


def _gpt2(preset: str, batch_size: int, seq_len: int = 1024, dtype: str = "bfloat16") -> Problem:
    config = replace(PRESETS[preset], vocab_size=VOCAB_SIZE, block_size=max(1024, seq_len))
    return Problem(config, batch_size, seq_len, dtype)


def _on_cpu(dtype: str, batch_size: int, seq_len: int) -> Case:
    return Case(
        f"cpu-{dtype}-t{seq_len}", _gpt2("gpt2", batch_size, seq_len, dtype), device="cpu", speed=1.05, memory=0.6
    )


def _qwen_form(
    n_layer: int, n_embd: int, n_head: int, n_kv_head: int, ffn_dim: int, *, tied: bool = True
) -> ModelConfig:
    return ModelConfig(
        vocab_size=151936, block_size=1024, n_layer=n_layer, n_head=n_head, n_kv_head=n_kv_head, n_embd=n_embd,
        ffn_dim=ffn_dim, activation="swiglu", norm="rmsnorm", position="rope", bias=False, qkv_bias=True,
        tie_embeddings=tied, rope_theta=1e6, norm_eps=1e-6,
    )  # fmt: skip


def _qwen(
    size: str, config: ModelConfig, micro_batches: int, states: States = FULL, budget: int | None = None
) -> list[Case]:
    """Cases with a shape of Qwen2.5 and 262,144 tokens a step in micro-batches, within a budget of bytes. Their peers are in
    large_peers.py. The states of 3B are lean, so that two cases fit next to each other in 139 GiB."""
    problem = Problem(config, 256, 1024)
    levels: dict[str, tuple[Linear, HeadProducts]] = {
        "": ("plain", "plain"), "-fp8": ("fp8", "plain"), "-fp8-all": ("fp8-all", "plain"),
        "-fp8-all-head": ("fp8-all", "fp8"),
    }  # fmt: skip
    return [
        Case(f"qwen2.5-{size}{name}", problem, micro_batches, budget, linear, head, states)
        for name, (linear, head) in levels.items()
    ]


LEAN = States("bfloat16", "none", "bfloat16")
_B64, _B16 = _gpt2("gpt2", 64), _gpt2("gpt2", 16)
_XL = _gpt2("gpt2-xl", 8)
_LLAMA = Problem(replace(PRESETS["llama-135m"], vocab_size=32000, block_size=1024), 16, 1024)  # as MobileLLM 125M
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("124m-b64", _B64, speed=1.20, aim=1.32, memory=0.38),
        Case("124m-b64-4x16", _B64, micro_batches=4, speed=1.14, memory=0.15),
        Case("124m-b64-fp8", _B64, linear="fp8", speed=1.27, aim=1.45, memory=0.40),
        Case("124m-b64-fp8-all", _B64, linear="fp8-all", memory=0.40),
        Case("124m-b64-fp8-all-head", _B64, linear="fp8-all", head="fp8", speed=1.55, memory=0.40),
        Case("124m-b64-muon", _B64, muon=MuonConfig(), speed=1.14, memory=0.38),
        Case("124m-b16", _B16, speed=1.25, aim=1.38, memory=0.45),
        Case("124m-b16-fp8", _B16, linear="fp8"),
        Case("124m-b16-fp8-all", _B16, linear="fp8-all"),
        Case("124m-b16-fp8-all-head", _B16, linear="fp8-all", head="fp8"),
        Case("350m-b16", _gpt2("gpt2-medium", 16), speed=1.14, aim=1.25, memory=0.60),
        Case("1.5b-b8", _XL, speed=1.12, memory=0.85),
        Case("1.5b-b8-muon", _XL, muon=MuonConfig(), speed=1.05, memory=0.85),
        Case("1.5b-b8-budget", _XL, budget_bytes=int(28.2 * _GIB), speed=0.95, memory=0.66),
        Case("llama-125m-b16", _LLAMA, speed=1.15, memory=0.50),
        Case("124m-t32k", _gpt2("gpt2", 1, 32768), speed=1.10, memory=0.50),
        *_qwen("0.5b", _qwen_form(24, 896, 14, 2, 4864), 16),
        *_qwen("1.5b", _qwen_form(28, 1536, 12, 2, 8960), 16),
        *_qwen("3b", _qwen_form(36, 2048, 16, 2, 11008), 32, LEAN),
        *_qwen("7b", _qwen_form(28, 3584, 28, 4, 18944, tied=False), 64, LEAN, 79 * _GIB),
        _on_cpu("float32", 1, 1024),
        _on_cpu("float32", 4, 64),
        _on_cpu("bfloat16", 1, 1024),
        _on_cpu("bfloat16", 4, 64),
    )
}


def cases_of(names: list[str] | None, device: str) -> list[Case]:
    """The cases with these names, in the order of the table. None: all cases of this device that have a goal."""
    unknown = sorted(set(names or ()) - CASES.keys())
    if unknown:
        raise ValueError(f"case: got {unknown[0]!r}; accepted: {', '.join(CASES)}")
    if names is not None:
        return [case for name, case in CASES.items() if name in names]
    return [case for case in CASES.values() if case.device == device and case.speed is not None]
