"""Checks of the machine: its platform, its device and its memory."""

from __future__ import annotations

import sys

import torch

from ..memory.managed import pressure
from ..memory.managed.pressure import memory_limit
from ..memory.page import human


def check_platform() -> None:
    if sys.platform not in ("linux", "darwin"):
        raise ValueError(
            f"platform: got {sys.platform}; accepted: linux or darwin (macOS); on Windows, use Linux in WSL"
        )


def device_or_default(device: torch.device | str | None) -> str:
    """The given device. If it is None: CUDA if there is a GPU, otherwise the CPU."""
    return str(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def check_device(device: str) -> None:
    """Refuse a device that no kernel is written for, or that torch does not have here."""
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: got {device!r}; accepted: cpu, cuda, or cuda:N") from error
    if parsed.type not in ("cpu", "cuda"):
        raise ValueError(f"device: got {device!r} (there are no kernels for it); accepted: cpu, cuda, or cuda:N")
    if parsed.type == "cpu" or (torch.cuda.is_available() and (parsed.index or 0) < torch.cuda.device_count()):
        return
    if torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}; accepted: cpu, or cuda:0 … cuda:{torch.cuda.device_count() - 1}")
    reason = "no GPU is found" if torch.version.cuda else "this torch is built for the CPU"
    raise ValueError(
        f"device: got {device!r} ({reason}); accepted: cpu; cuda needs a GPU and a torch that is built for CUDA"
    )


def check_threads(planned_for: int, device: torch.device) -> None:
    """On a CPU, refuse a number of threads that differs from the planned number."""
    if torch.get_num_threads() != planned_for and device.type == "cpu":
        raise RuntimeError(
            f"threads: got torch.get_num_threads() = {torch.get_num_threads()}; accepted: {planned_for}, for which "
            f"this memory was planned (call torch.set_num_threads({planned_for}), or plan again)"
        )


def too_large(planned_bytes: int, device: torch.device) -> str | None:
    """The error for a plan that is larger than the device's memory; None if the plan fits or the memory is unknown."""
    limit = memory_limit(device)
    if limit is None or planned_bytes <= limit:
        return None
    return (
        f"memory: got a plan of {human(planned_bytes)}; accepted: at most {human(limit)}, which is all that {device} has; "
        "give a smaller batch_size or seq_len, or a memory_budget below that"
    )


def what_is_largest(batch_size: int, nbytes: int | None, tokens: int) -> tuple[dict[str, int | None], str]:
    """The size of the largest batch that fits, as data and as a sentence. batch_size 0 means that no batch fits."""
    data = {"largest_batch_size": batch_size, "largest_batch_bytes": nbytes}
    if nbytes is None:
        return data, f"no batch fits, not even one of a single sequence of {tokens} tokens"
    return data, f"the largest batch that fits is {batch_size:,} × {tokens} tokens, {human(nbytes)}"


def what_fits(planned_bytes: int, device: torch.device) -> tuple[dict[str, int | bool | None], str]:
    """Whether a plan fits into the free memory of the device, as data (None: unknown) and as a sentence."""
    free, limit = pressure.memory_available(device), memory_limit(device)
    data = {"free_bytes": free, "memory_bytes": limit, "fits": None if free is None else planned_bytes <= free}
    if refusal := too_large(planned_bytes, device):
        return data | {"fits": False}, refusal
    total = "" if limit is None else f", of {human(limit)} in all"
    if free is None:
        return data, f"whether it fits is unknown: {device} does not report its free memory{total}"
    if planned_bytes <= free:
        return data, f"it fits: {device} has {human(free)} free{total}"
    return data, (
        f"it does not fit now: {device} has {human(free)} free{total}; end other programs, or give a smaller batch_size or "
        "seq_len, or a memory_budget"
    )


def check_fits(planned_bytes: int, device: torch.device) -> None:
    """Refuse a plan that is larger than the device's memory, before any of it is allocated."""
    refusal = too_large(planned_bytes, device)
    if refusal:
        raise ValueError(refusal)
