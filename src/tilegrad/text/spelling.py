"""Names as people type them: other spellings of a dtype, and the name that a misspelt one is nearest to. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16", "f16": "float16", "half": "float16",
    "fp32": "float32", "f32": "float32", "float": "float32", "single": "float32",
    "fp64": "float64", "f64": "float64", "double": "float64",
}  # fmt: skip


def dtype_name(given: object) -> str:
    """torch's name of a dtype: "bfloat16" of "bf16", "BF16", "torch.bfloat16" and torch.bfloat16. What is no dtype's spelling
    stays as it is."""
    name = str(given).removeprefix("torch.").lower()
    return _DTYPES.get(name, name if name in _DTYPES.values() else str(given))


def did_you_mean(word: str, names: Iterable[str] | Mapping[str, str]) -> str:
    """What to add to a refusal of "step": " (did you mean 'steps'?)"; nothing where no name is near. A mapping says how each
    name is shown."""
    shown = names if isinstance(names, Mapping) else {name: repr(name) for name in names}
    plain = {_plain(name): text for name, text in shown.items()}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[found[0]]}?)" if found else ""


def _plain(name: str) -> str:
    """Without what people mix up: case, dashes and underscores."""
    return name.lstrip("-").replace("-", "_").lower()
