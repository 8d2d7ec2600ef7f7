"""The memory table of the document "Weight Gradient Accumulation Implementation Plan", with corrected numbers.

The example model has 6 layers, 512 channels, 8 heads of dimension 64 and a feed-forward of 2048. Each head has its own q, k and
v (64, 64). A layer has one norm and no output projection. The feed-forward count in the document is too small by 3,072 floats.
The document omits the embeddings, which are a separate row here.
"""

from __future__ import annotations

from ..memory.page import human
from ..text.table import table

LAYERS, CHANNELS, HEADS, HIDDEN = 6, 512, 8, 2048
VOCABULARY = 50257  # the vocabulary size of GPT-2, because the document gives none


def document_rows() -> dict[str, tuple[int, int | None]]:
    """part → (number of floats, number in the document or None)"""
    d = CHANNELS // HEADS
    return {
        "attention q, k, v": (LAYERS * 3 * HEADS * d * d, 589_824),
        "feed-forward": (LAYERS * (CHANNELS * HIDDEN + HIDDEN * CHANNELS + HIDDEN + CHANNELS), 12_595_200),
        "layer norm": (LAYERS * 2 * CHANNELS, 6_144),
        "embeddings": (VOCABULARY * CHANNELS, None),
    }


def document_table() -> str:
    def row(name: str, floats: int, said: object) -> tuple[object, ...]:
        sizes = (human(4 * floats * times) for times in (1, 2, 3))
        return name, f"{floats:,}", said, *sizes

    parts = document_rows()
    rows = [row(name, floats, "–" if said is None else f"{said:,}") for name, (floats, said) in parts.items()]
    without = sum(floats for name, (floats, _) in parts.items() if name != "embeddings")
    rows.insert(3, row("total without embeddings", without, "≈ 13.2 M"))
    rows.append(row("total", sum(floats for floats, _ in parts.values()), "–"))
    header = ("weights in float32", "floats", "the document", "gradients", "Adam state", "gradients and Adam")
    title = f"The specification's example model: {LAYERS} layers, {CHANNELS} channels, vocabulary {VOCABULARY:,}"
    return f"{title}\n{table(header, rows)}"
