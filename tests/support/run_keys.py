"""Values of every key of a run, as in a TOML file, and which of them are refused together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from support.pairwise import Spec

ABSENT = ""  # the key is not given
YES_NO = ("true", "false")
MAYBE = ("none", *YES_NO)

KEYS: dict[str, tuple[str, ...]] = {
    "model.preset": ('"tiny"', '"gpt2"', '"gpt2-medium"', '"gpt2-xl"', '"llama-135m"'),
    "model.vocab_size": ("256", "300", "311"),
    "model.block_size": ("16", "24"),
    "model.n_layer": ("1", "2"),
    "model.n_head": ("1", "2", "4"),
    "model.n_embd": ("16", "24"),
    "model.n_kv_head": ("none", "1", "2"),
    "model.ffn_dim": ("none", "20"),
    "model.activation": ('"gelu"', '"tanh"', '"relu"', '"relu2"', '"swiglu"'),
    "model.norm": ('"layernorm"', '"rmsnorm"'),
    "model.position": ('"learned"', '"rope"'),
    "model.bias": YES_NO,
    "model.tie_embeddings": YES_NO,
    "model.projection": ('"dense"', '"per_head"'),
    "model.loss": ('"cross_entropy"', '"embedding_mse"'),
    "model.window": ("none", "1", "5", "100"),
    "model.dropout": ("0.0", "0.2"),
    "model.norm_eps": ("1e-5", "0.01"),
    "model.rope_theta": ("10000.0", "1.0", "1000000"),
    "model.head_size": ("none", "6", "5"),
    "model.qk_norm": YES_NO,
    "model.qkv_bias": MAYBE,
    "model.proj_bias": MAYBE,
    "model.ffn_bias": MAYBE,
    "model.window_layers": ("none", "[0]", "[1]", "[]"),
    "model.logit_softcap": ("none", "0.5", "30"),
    "model.residual_scalars": YES_NO,
    "model.value_embeddings": ("0", "1"),
    "model.embedding_scale": ("1.0", "30"),
    "model.rope_scaling": (
        "none", '{kind = "linear", factor = 2}', '{kind = "llama3", factor = 8.0, original = 8}',
        '{kind = "yarn", factor = 4.0, original = 8}',
    ),
    "train.steps": ("4", "5"),
    "train.batch_size": ("1", "3"),
    "train.seq_len": (ABSENT, "0", "9"),
    "train.gradient_accumulation": (ABSENT, "1", "3"),
    "train.learning_rate": ("3e-3", "0", "0.5"),
    "train.min_learning_rate": ("0.0", "1e-4", "1"),
    "train.warmup_steps": (ABSENT, "-1", "0", "2"),
    "train.weight_decay": ("0.0", "0.1"),
    "train.max_norm": ("0", "1.0", "1e-3"),
    "train.eval_interval": ("0", "1", "2"),
    "train.eval_batches": ("0", "1", "2"),
    "train.checkpoint_interval": ("0", "1", "2"),
    "train.keep_checkpoints": ("1", "2"),
    "train.log_interval": ("1", "3"),
    "train.sample_tokens": ("0", "3", "100"),
    "train.memory_budget": ("none", '"1.5GB"', "least"),  # the smallest budget that the plan fits
    "train.device": ('"cpu"', ABSENT),
    "train.dtype": ('"auto"', '"float32"', '"float64"', '"bfloat16"'),
    "train.linear": ('"plain"', ABSENT),
    "train.head": ('"plain"', ABSENT),
    "train.deterministic": YES_NO,
    "train.invariant": ("false", "true"),
    "train.seed": ("0", "12345678901"),
    "train.log": ('"auto"', '"none"', '["tensorboard"]', "[]"),
    "train.epochs": (ABSENT, "none"),  # tests/train/test_schedule.py has other values
    "train.patience": ("0", "7"),  # 7 is more evaluations than a run has, so that none ends early
    "train.init": ("none", '"weights"'),  # a folder of weights of the same model
    "train.freeze": ("[]", '"wte.*"', '["blocks.*.ln?.*", "ln_f.*"]'),
    "train.schedule": ('"cosine"', '"linear"', '"wsd"', '"trapezoid"'),
    "train.decay_steps": (ABSENT, "-1", "0", "2"),
    "train.stages": ("[]", "[{steps = 1, batch_size = 1, window = 3}, {}]", '[{steps = 2, seq_len = 8}, {window = "none"}]'),
    "train.masters": ('"float32"', '"none"'),
    "train.gradients": ('"float32"', '"bfloat16"'),
    "optimizer.name": ('"adamw"', '"muon"'),
    "optimizer.momentum": (ABSENT, "0.9"),
    "optimizer.nesterov": (ABSENT, "false"),
    "optimizer.orthogonalization": (ABSENT, '"polar_express"'),
    "optimizer.scale": (ABSENT, '"rms"'),
    "optimizer.matrix_learning_rate": ("none", "0.01"),
    "optimizer.momentum_warmup": (ABSENT, "3"),
    "optimizer.cautious": (ABSENT, "true"),
    "optimizer.ema": ("0.0", "0.9"),
    "optimizer.moments": ('"float32"', '"bfloat16"'),
    "data.files": ('["text.txt"]', '["lines.jsonl", "text.txt"]', '"folder"', '["text.txt.gz"]', "[]"),
    "data.text_field": ('"text"', '"body"'),
    "data.format": ('"auto"', '"text"'),  # tests/train/test_finetune.py has conversations
    "data.train_on": ('"assistant"', '"all"'),
    "data.packing": ("none", "true", "false"),
    "data.documents": ("2", "5", "16"),
    "data.too_long": ('"auto"', '"cut"', '"split"'),
    "data.tokenizer": ('"bytes"', '"bpe"', '"tokenizer.json"'),
    "data.bpe_vocab_size": ("256", "290"),
    "data.validation_fraction": ("0", "0.1", "0.5"),
    "data.validation": ('"windows"', '"end"'),
    "lora.rank": (ABSENT, "1", "3"),
    "lora.alpha": (ABSENT, "4", "0.5"),
    "lora.layers": (ABSENT, '"attention"', '["down", "up"]'),
    "lora.dropout": (ABSENT, "0.0", "0.2"),
    "lora.adapter": ("none", '"adapter"'),  # a folder of adapters that fit the other keys
}  # fmt: skip
TOKENIZER_FILE = 270  # tokens of tokenizer.json

BIASES = ("model.qkv_bias", "model.proj_bias", "model.ffn_bias")
DENSE = {
    "model.projection": ('"dense"',), "model.loss": ('"cross_entropy"',), "model.logit_softcap": ("none",),
    "model.residual_scalars": ("false",), "model.value_embeddings": ("0",),
    "model.embedding_scale": ("1.0",),
}  # fmt: skip
ROTARY = {
    **DENSE, "model.activation": ('"swiglu"',), "model.norm": ('"rmsnorm"',), "model.position": ('"rope"',),
    "model.dropout": ("0.0",), "model.head_size": ("none", "6"),
}  # fmt: skip
WITHOUT_ADAPTERS = {f"lora.{key}": (ABSENT,) for key in ("rank", "alpha", "layers", "dropout")} | {
    "lora.adapter": ("none",)
}
FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {  # the values that an export to transformers has; "": any model
    "": {"train.init": ("none",), **WITHOUT_ADAPTERS},
    "gpt2": {
        **DENSE, "model.activation": ('"gelu"',), "model.norm": ('"layernorm"',), "model.position": ('"learned"',),
        "model.bias": ("true",), **dict.fromkeys(BIASES, ("none", "true")), "model.n_kv_head": ("none",),
        "model.head_size": ("none",), "model.window": ("none",), "model.qk_norm": ("false",),
        "model.rope_scaling": ("none",),
    },
    "llama": {
        **ROTARY, "model.qkv_bias": ("none",), "model.proj_bias": ("none",), "model.window": ("none",),
        "model.window_layers": ("none",), "model.qk_norm": ("false",),
    },
    "mistral": {
        **ROTARY, "model.bias": ("false",), **dict.fromkeys(BIASES, ("none", "false")), "model.window": ("1", "5", "100"),
        "model.window_layers": ("none",), "model.qk_norm": ("false",),
    },
    "qwen2": {
        **ROTARY, "model.bias": ("false",), "model.qkv_bias": ("true",), "model.proj_bias": ("none", "false"),
        "model.ffn_bias": ("none", "false"), "model.qk_norm": ("false",),
    },
    "qwen3": {
        **ROTARY, "model.qkv_bias": ("none",), "model.proj_bias": ("none",), "model.ffn_bias": ("false",),
        "model.qk_norm": ("true",),
    },
}  # fmt: skip
AXES: dict[str, tuple[object, ...]] = {"family": tuple(FAMILIES), "stop": (0, 1, 2), **KEYS}


Rule = Callable[..., bool]
OF_MUON = (
    "name", "momentum", "nesterov", "orthogonalization", "scale", "matrix_learning_rate", "momentum_warmup", "cautious",
)  # fmt: skip
REFUSED: Mapping[tuple[str, ...], Rule] = {  # which values of these keys are refused together
    ("model.n_head", "model.n_kv_head"): lambda heads, kv: kv != "none" and int(heads) % int(kv) != 0,
    ("model.projection", "model.n_kv_head", "model.n_head"): lambda projection, kv, heads: (
        projection == '"per_head"' and kv not in ("none", heads)
    ),
    ("model.projection", "model.head_size"): lambda projection, d: projection == '"per_head"' and d != "none",
    ("model.position", "model.head_size"): lambda position, d: position == '"rope"' and d == "5",
    ("model.position", "model.rope_scaling"): lambda position, scaling: position != '"rope"' and scaling != "none",
    ("model.rope_scaling", "model.head_size"): lambda scaling, d: scaling != "none" and d == "5",
    ("model.rope_theta", "model.rope_scaling"): lambda theta, scaling: theta == "1.0" and "yarn" in scaling,
    ("model.loss", "model.tie_embeddings"): lambda loss, tied: loss == '"embedding_mse"' and tied == "false",
    ("model.loss", "model.logit_softcap"): lambda loss, cap: loss == '"embedding_mse"' and cap != "none",
    ("model.n_layer", "model.window_layers"): lambda layers, windowed: layers == "1" and windowed == "[1]",
    ("train.patience", "train.eval_interval"): lambda patience, interval: patience != "0" and interval == "0",
    ("train.patience", "train.eval_batches"): lambda patience, batches: patience != "0" and batches == "0",
    ("train.patience", "data.validation_fraction"): lambda patience, fraction: patience != "0" and fraction == "0",
    ("train.patience", "data.packing", "data.too_long", "data.files"): lambda patience, packing, too_long, files: (
        patience != "0" and packing == "true" and too_long == '"cut"' and "lines.jsonl" not in files  # one document
    ),
    ("model.vocab_size", "data.tokenizer"): lambda size, tokenizer: tokenizer == '"tokenizer.json"' and size == "256",
    ("model.vocab_size", "data.tokenizer", "data.bpe_vocab_size"): lambda size, tokenizer, bpe: (
        tokenizer == '"bpe"' and int(size) < int(bpe)
    ),
    ("train.decay_steps", "train.schedule"): lambda decay, schedule: (
        decay in ("0", "2") and schedule in ('"cosine"', '"linear"')
    ),
    ("train.stages", "train.seq_len"): lambda stages, seq_len: "seq_len" in stages and seq_len == "9",
    ("train.stages", "data.packing"): lambda stages, packing: "seq_len" in stages and packing == "true",
    ("train.stages", "model.window_layers"): lambda stages, layers: "= 3" in stages and layers == "[]",
    ("train.stages", "model.window_layers", "model.window"): lambda stages, layers, window: (
        "none" in stages and layers == "[]" and window != "none"
    ),
    ("train.invariant", "train.dtype"): lambda invariant, dtype: invariant == "true" and dtype == '"float64"',
    **{
        ("train.invariant", f"lora.{key}"): lambda invariant, value: (
            invariant == "true" and value not in (ABSENT, "none")
        )
        for key in ("rank", "alpha", "layers", "dropout", "adapter")
    },
    ("train.learning_rate", "optimizer.matrix_learning_rate"): lambda adamw, muon: float(adamw) == 0 and muon != "none",
    **{
        ("optimizer.name", f"optimizer.{key}"): lambda name, value: name == '"adamw"' and value not in (ABSENT, "none")
        for key in OF_MUON[1:]
    },
    ("optimizer.moments", "train.dtype"): lambda moments, dtype: moments == '"bfloat16"' and dtype == '"float64"',
    ("train.masters", "optimizer.ema"): lambda masters, ema: masters == '"none"' and ema != "0.0",
    **{
        (f"train.{key}", "train.dtype"): lambda kept, dtype: kept != '"float32"' and dtype != '"bfloat16"'
        for key in ("masters", "gradients")
    },
    **{
        (f"train.{kept}", f"lora.{key}"): lambda kept, value: kept != '"float32"' and value not in (ABSENT, "none")
        for kept in ("masters", "gradients")
        for key in ("rank", "alpha", "layers", "dropout", "adapter")
    },
    **{
        (kept, f"optimizer.{of_muon}"): lambda kept, muon: (
            kept != '"float32"' and muon not in (ABSENT, "none", '"adamw"')
        )
        for kept in ("optimizer.moments", "train.masters", "train.gradients")
        for of_muon in OF_MUON
    },
    **{
        (f"optimizer.{of_muon}", f"lora.{key}"): lambda muon, value: (
            muon not in (ABSENT, "none", '"adamw"') and value not in (ABSENT, "none")
        )
        for of_muon in OF_MUON
        for key in ("rank", "alpha", "layers", "dropout", "adapter")
    },
    **{
        (f"lora.{key}", "train.init"): lambda value, init: value not in (ABSENT, "none") and init == "none"
        for key in ("rank", "alpha", "layers", "dropout", "adapter")  # any of them
    },
}

RULES = [(frozenset(keys), keys, rule) for keys, rule in REFUSED.items()]


def refused_together(spec: Spec) -> tuple[str, ...] | None:
    """The keys whose values are refused together; None if there are none. A specification need not have all keys."""
    given = spec.keys()
    for names, keys, rule in RULES:
        if names <= given and rule(*(spec[key] for key in keys)):
            return keys
    return None


def allowed(spec: Spec) -> bool:
    """A specification of some keys is allowed if some family has all its values."""
    if refused_together(spec) is not None:
        return False
    families = [spec["family"]] if "family" in spec else FAMILIES
    return any(
        all(key not in spec or spec[key] in values for key, values in FAMILIES[family].items()) for family in families
    )
