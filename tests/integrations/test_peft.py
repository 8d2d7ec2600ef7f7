"""PEFT loads our adapters, and tilegrad loads PEFT's. Merged weights agree in float64, and logits in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import CONFIG, LLAMA, QWEN3, equal
from torch import Tensor

from tilegrad import Engine, ModelConfig
from tilegrad.model.lora import LoraConfig
from tilegrad.model.reference import hidden_states, logits_of
from tilegrad.pretrained.adapters import adapter_shapes, merge, open_adapter, write_adapter
from tilegrad.pretrained.families import theirs
from tilegrad.pretrained.weights import open_weights, write_weights

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs pip install 'tilegrad[hf]'")
peft = pytest.importorskip("peft", reason="needs pip install 'tilegrad[hf]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*fan_in_fan_out.*")

KINDS = {
    "gpt2": CONFIG,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(QWEN3, qkv_bias=False),
}
EXACT = 1e-12  # float64, relative to the largest number
ROUNDED = 2e-5  # float32 through the whole model, as in test_weights.py


def base_of(kind: str, folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = KINDS[kind]
    params = Engine(config, 1, 4).params
    for p in params.values():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.2)
    write_weights(folder, params, config)
    return config, dict(params)


def drawn(config: ModelConfig, lora: LoraConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in adapter_shapes(config, lora).items()}


def logits(config: ModelConfig, params: dict[str, Tensor], tokens: Tensor) -> Tensor:
    return logits_of(params, hidden_states(params, tokens, config)[0], config)


def from_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def near(got: Tensor, want: Tensor, limit: float) -> bool:
    return float((got - want).abs().max()) <= limit * float(want.abs().max())


@pytest.mark.parametrize("layers", ["all", "attention", "ffn", ("proj", "up")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_our_adapters_give_the_same_results_in_peft(kind: str, layers: str | tuple[str, ...], tmp_path: Path) -> None:
    config, params = base_of(kind, tmp_path / "base")
    lora = LoraConfig(rank=3, alpha=5.0, layers=layers, dropout=0.1)
    adapters, tokens = drawn(config, lora), torch.arange(12)[None]
    write_adapter(tmp_path / "adapter", adapters, config, lora, kind=kind, base=str(tmp_path / "base"))
    model = peft.PeftModel.from_pretrained(from_transformers(tmp_path / "base"), tmp_path / "adapter").eval()
    found = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(found) == len(json_keys(tmp_path / "adapter")), "PEFT has an adapter that the file has not"
    merge(params, adapters, config, lora)
    with torch.no_grad():
        assert near(logits(config, params, tokens), model(tokens).logits[0], ROUNDED)
    exact = peft.PeftModel.from_pretrained(from_transformers(tmp_path / "base", torch.float64), tmp_path / "adapter")
    want = dict(exact.merge_and_unload().named_parameters())
    base = {name: x.double() for name, x in open_weights(tmp_path / "base").read().items()}
    merge(base, {name: x.double() for name, x in adapters.items()}, config, lora)
    got = dict(theirs(kind, base, config))
    assert got.keys() == want.keys() and all(near(got[name], want[name], EXACT) for name in want)


def json_keys(folder: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return {*file.keys()}


@pytest.mark.parametrize("use_rslora", [False, True], ids=["plain", "rslora"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_peft_give_the_same_results_in_tilegrad(kind: str, use_rslora: bool, tmp_path: Path) -> None:
    config, params = base_of(kind, tmp_path / "base")
    targets = "all-linear" if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, lora_dropout=0.05, use_rslora=use_rslora, task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(from_transformers(tmp_path / "base"), settings).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    model.save_pretrained(tmp_path / "adapter")
    adapter = open_adapter(tmp_path / "adapter", open_weights(tmp_path / "base"))
    assert adapter.lora.layers == ("all" if kind == "gpt2" else ("q", "v", "down"))
    assert (adapter.lora.rank, adapter.lora.dropout) == (4, 0.05)
    assert adapter.lora.scale == pytest.approx(6 / 2 if use_rslora else 6 / 4, rel=1e-15)
    adapters, tokens = adapter.read(), torch.arange(12)[None]
    merge(params, adapters, config, adapter.lora)
    with torch.no_grad():
        assert near(logits(config, params, tokens), model(tokens).logits[0], ROUNDED)
    write_adapter(tmp_path / "again", adapters, config, adapter.lora, kind=kind, base="base")
    again = open_adapter(tmp_path / "again", open_weights(tmp_path / "base"))
    assert again.lora == adapter.lora and equal(again.read(), adapters)
    assert json_keys(tmp_path / "again") == json_keys(tmp_path / "adapter")
    ours, saved = (
        json.loads((tmp_path / name / "adapter_config.json").read_text(encoding="utf-8"))
        for name in ("again", "adapter")
    )
    assert ours.keys() <= saved.keys(), "an option that PEFT does not have"
    free = {"lora_alpha", "use_rslora", "base_model_name_or_path", "target_modules"}
    assert {k: v for k, v in ours.items() if k not in free} == {k: saved[k] for k in ours if k not in free}
