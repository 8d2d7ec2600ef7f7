"""Parsing of user input: other spellings of a dtype, sizes with units, suggestions for misspelt names. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_SPELLINGS = {
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
    "float32": ("fp32", "f32", "float", "single"),
    "float64": ("fp64", "f64", "double"),
}
_DTYPES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in (name, *spellings)}


def dtype_name(given: object) -> str:
    """torch's name of a dtype: "bfloat16" for "bf16", "BF16", "torch.bfloat16" and torch.bfloat16. Other values are returned
    unchanged."""
    return _DTYPES.get(str(given).removeprefix("torch.").lower(), str(given))


def byte_count(text: str, name: str = "memory_budget") -> int:
    """The number of bytes that a text such as 1500000000, 1.5GB or 1400MiB means."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "B": 1, "": 1}
    number = text.strip().rstrip("KMGTIBkmgtib")
    unit = text.strip()[len(number) :].upper()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{name}: got {text!r}; accepted: bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        ) from None


def did_you_mean(word: str, names: Iterable[str] | Mapping[str, str]) -> str:
    """The suffix of an error about a word: " (did you mean 'steps'?)" for "step", or "" if no name is similar. If `names` is a
    mapping, the error shows its values."""
    shown = names if isinstance(names, Mapping) else {name: repr(name) for name in names}
    plain = {_plain(name): text for name, text in shown.items()}
    closest = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[closest[0]]}?)" if closest else ""


def _plain(name: str) -> str:
    """A name in lower case, with underscores instead of dashes, because people mix them up."""
    return name.lstrip("-").replace("-", "_").lower()
