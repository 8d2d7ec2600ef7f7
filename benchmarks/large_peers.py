"""Peers of a step with several micro-batches: a model of transformers with Liger's kernels, or with torchao's float8 and each
decoder layer under torch.compile, as in torchtitan.

Weights, gradients and moments are bfloat16. In both, Liger fuses the loss with the head. AdamW is fused. The initial
parameters are those of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tilegrad.model.config import ModelConfig
from tilegrad.model.layer import Declare
from tilegrad.model.transformer import declare
from tilegrad.pretrained.families import theirs


def initial(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the initial parameters of the engine, one after the other, with their names in transformers."""
    generator = torch.Generator().manual_seed(seed)
    for p in declare(Declare(config, 1, 1, torch.float32, torch.device("cpu"))).in_draw_order:
        x = torch.empty(p.master.shape)
        p.init.fill(x, generator)
        yield from theirs("qwen2", {p.name: x}, config)


class LargePeer:
    """A peer whose step has `micro_batches` backwards, then clipping and AdamW."""

    def __init__(self, config: ModelConfig, micro_batches: int, *, seed: int, torchao: bool, device: str) -> None:
        transformers = import_module("transformers")
        given = transformers.Qwen2Config(
            vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.ffn,
            num_attention_heads=config.n_head, num_key_value_heads=config.kv_heads, num_hidden_layers=config.n_layer,
            max_position_embeddings=config.block_size, tie_word_embeddings=config.tie_embeddings,
            rope_theta=config.rope_theta, rms_norm_eps=config.norm_eps,
        )  # fmt: skip
        with torch.device(device):
            model = transformers.Qwen2ForCausalLM._from_config(given, attn_implementation="sdpa", dtype=torch.bfloat16)
        model.config.use_cache = False
        there = model.state_dict()
        for name, x in initial(config, seed):
            there[name].copy_(x)
        self.run: Any = model
        apply_liger = import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen2
        if torchao:
            import_module("torchao.float8").convert_to_float8_training(
                model, module_filter_fn=lambda _module, name: "lm_head" not in name
            )
            apply_liger(rope=False, rms_norm=False, swiglu=False, model=model)
            for layer in model.model.layers:
                layer.compile()
        else:
            apply_liger(model=model)
        model.train()
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.params, betas=(0.9, 0.95), weight_decay=0.1, fused=device != "cpu")
        self.micro_batches, self.device = micro_batches, device
        self._loss = torch.zeros((), device=device)
        self.backend = "torchao float8, layers compiled" if torchao else "transformers + Liger"

    def submit(self, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self._loss.zero_()
        for x, y in zip(tokens.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True):
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            loss = self.run(input_ids=x, shift_labels=y, labels=y).loss / self.micro_batches
            loss.backward()
            self._loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss(self) -> float:
        return float(self._loss)
