"""Tiny random models of transformers' architectures, and the distance between two attention implementations on them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

VOCABULARY = 97
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, **TOKENS,
}  # fmt: skip
ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
BERT = {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", DECODER),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128,
             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **TOKENS}),
    "mistral, window": ("mistral", {**DECODER, "sliding_window": 7}),
    "qwen2, bias": ("qwen2", DECODER),
    "qwen3, QK-norm": ("qwen3", {**DECODER, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "gemma2, softcap": ("gemma2", {**DECODER, "sliding_window": 7, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 8}),
    "gemma3, windows": ("gemma3_text", {**DECODER, **WINDOWS}),
    "gpt_oss, sinks": ("gpt_oss", {**DECODER, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": ("gpt_neox", DECODER),
    "opt": ("opt", {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32, "dropout": 0.0, **TOKENS}),
    "phi3": ("phi3", {**DECODER, "sliding_window": 9}),
    "olmo2": ("olmo2", DECODER),
    "mixtral": ("mixtral", {**DECODER, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3, Dv ≠ D": ("deepseek_v3", {**DECODER, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None,
                            "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 4,
                            "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
                            "topk_group": 1, "head_dim": 4}),
    "llama4, chunks": ("llama4_text", {**DECODER, "num_local_experts": 2, "intermediate_size_mlp": 48,
                       "attention_chunk_size": 8, "interleave_moe_layer_step": 2,
                       "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}),
    "smollm3": ("smollm3", DECODER),
    "bert": ("bert", BERT),
    "roberta": ("roberta", {**BERT, "pad_token_id": 0}),
    "modernbert, window": ("modernbert", {**ENCODER, **TOKENS, "local_attention": 8, "global_attn_every_n_layers": 3,
                           "cls_token_id": 1, "sep_token_id": 2}),
    "t5, learned bias": ("t5", {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4,
                         "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}),
    "bart, cross attention": ("bart", {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
                              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
                              "decoder_ffn_dim": 48, "max_position_embeddings": 128, "dropout": 0.0,
                              "decoder_start_token_id": 2, "forced_eos_token_id": 2, **TOKENS}),
}  # fmt: skip
ENCODERS = ("bert", "roberta", "modernbert, window")
ENCODER_DECODERS = ("t5, learned bias", "bart, cross attention")
DECODERS = tuple(name for name in MODELS if name not in ENCODERS + ENCODER_DECODERS)


def configuration(name: str, **more: Any) -> Any:
    kind, fields = MODELS[name]
    return AutoConfig.for_model(kind, **{**fields, **more})


def model_of(name: str, implementation: str, **more: Any) -> Any:
    """Weights are the same for each implementation and so large that attention is far from uniform."""
    auto = AutoModelForCausalLM
    auto = AutoModelForMaskedLM if name in ENCODERS else AutoModelForSeq2SeqLM if name in ENCODER_DECODERS else auto
    torch.manual_seed(0)
    model = auto.from_config(configuration(name, **more), attn_implementation=implementation)
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if "sinks" in parameter:
                p.normal_()
            elif p.ndim > 1:
                p.normal_(0, 0.15)
    return model.eval()


def batch_of(name: str, padding: str | None = None, b: int = 3, t: int = 23) -> dict[str, Tensor]:
    """Tokens and labels, with padding "left", "right", or between tokens ("holes")."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (b, t), generator=draw)
    keep = torch.ones_like(ids, dtype=torch.bool)
    lengths, at = torch.tensor([t, t - 9, 4])[:b, None], torch.arange(t)
    if padding == "holes":
        keep = torch.rand(b, t, generator=draw) > 0.3
        keep[:, [0, -1]] = True
    elif padding:
        keep = at < lengths if padding == "right" else at >= t - lengths
    labels = torch.where(keep, ids, -100)
    # A token after padding is predicted by a row that attends to nothing: implementations differ there.
    if name not in ENCODERS:
        labels[:, 1:][~keep[:, :-1]] = -100
    if name in ENCODER_DECODERS:
        labels = torch.randint(3, VOCABULARY, (b, 11), generator=draw)
    return {"input_ids": ids, "labels": labels} | ({"attention_mask": keep.long()} if padding else {})


def results(model: Any, batch: dict[str, Tensor], call: Any = None) -> dict[str, Tensor]:
    """Logits of tokens, and every gradient by name. `call` is the compiled model."""
    model.zero_grad()
    out = (model if call is None else call)(**batch)
    out.loss.backward()
    logits, keep = out.logits.detach(), batch.get("attention_mask")
    if keep is not None and logits.shape[:2] == keep.shape:
        logits = logits[keep.bool()]
    return {"logits": logits} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, float]:
    """The largest relative distance of logits and of gradients. A gradient counts as at least a hundredth of the largest."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    logits = float((got["logits"] - want["logits"]).abs().max() / want["logits"].abs().max())
    gradients = [n for n in want if n != "logits"]
    largest = max(float(want[n].norm()) for n in gradients)
    return logits, max(float((got[n] - want[n]).norm()) / max(float(want[n].norm()), 1e-2 * largest) for n in gradients)


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
