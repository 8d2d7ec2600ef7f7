"""Trainer, accelerate, PEFT and TRL train with attn_implementation="tilegrad" and have the losses of eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of four libraries

for _name in ("transformers", "accelerate", "peft", "trl", "datasets"):
    pytest.importorskip(_name, reason="needs pip install 'tilegrad[hf]'")

import datasets  # noqa: E402
import transformers  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from support.architectures import VOCABULARY, model_of  # noqa: E402
from transformers import DataCollatorWithFlattening, PreTrainedTokenizerFast, Trainer, TrainingArguments  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from tilegrad.data.tokenizer import train_bpe  # noqa: E402
from tilegrad.integrations.transformers import register  # noqa: E402

register()
TEXTS = [("the whale and the sea " * n).strip() for n in (3, 5, 2, 7, 4, 6, 3, 5)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(train_bpe(" ".join(TEXTS) + "".join(map(chr, range(32, 127))) * 2, 270).json())
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="!", pad_token="#")


class Losses(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if "loss" in logs:
            self.found.append(float(logs["loss"]))


def losses(kind: str, implementation: str, out: Path) -> list[float]:
    heard, words = Losses(), tokenizer()
    model = model_of("llama", implementation, vocab_size=max(VOCABULARY, len(words))).train()
    settings: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "seed": 1, "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    if "lora" in kind:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if kind.startswith("sft"):
        text = datasets.Dataset.from_dict({"text": TEXTS})
        more = {"packing": True, "max_length": 32} if "packing" in kind else {"max_length": 32}
        trainer: Any = SFTTrainer(
            model, args=SFTConfig(**settings, **more), train_dataset=text, processing_class=words, callbacks=[heard]
        )
    else:
        ids = [words(text)["input_ids"] for text in TEXTS]
        data = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
        collate: Any = (
            DataCollatorWithFlattening()
            if "packed" in kind
            else transformers.DataCollatorForSeq2Seq(words, padding=True, label_pad_token_id=-100)
        )
        if "checkpointing" in kind:
            settings["gradient_checkpointing"] = True
        trainer = Trainer(
            model, TrainingArguments(**settings), train_dataset=data, data_collator=collate, callbacks=[heard]
        )
    trainer.train()
    return heard.found


@pytest.mark.parametrize(
    "kind", ["trainer", "trainer, checkpointing", "trainer, packed", "trainer, lora", "sft", "sft, packing"]
)
def test_losses_are_those_of_eager(kind: str, tmp_path: Path) -> None:
    want, got = (losses(kind, implementation, tmp_path) for implementation in ("eager", "tilegrad"))
    assert len(got) == 4 and got == pytest.approx(want, rel=2e-4)
    assert got[-1] < got[0]
