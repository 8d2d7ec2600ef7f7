"""The memory of a program without gradients. The caller's parameters are used in place if all of them are contiguous and have
the program's dtype and device. Otherwise all parameters are copied into an arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torch import Tensor

from ..memory.planned.arena import Arenas, MemoryPlan
from ..memory.planned.trace import Handle
from ..model.layer import Param


def without_given(plan: MemoryPlan, declared: Mapping[str, Param], params: Mapping[str, Tensor]) -> MemoryPlan:
    """The plan without an arena of parameters if `params` can be used in place, otherwise the whole plan. Refuses parameters of
    another model."""
    for name, p in declared.items():
        if name not in params or params[name].shape != p.value.shape:
            got = "none" if name not in params else str(tuple(params[name].shape))
            raise ValueError(f"params: got {got} for {name}; accepted: {tuple(p.value.shape)}, as the config says")
    adapter = next((name for name in params if name not in declared and ".lora_" in name), None)
    if adapter is not None:
        raise ValueError(
            f"params: got {adapter}, an adapter that `lora` does not name; accepted: adapters of lora (give their LoraConfig)"
        )
    usable = all(
        (params[name].dtype, params[name].device) == (p.value.dtype, p.value.device) and params[name].is_contiguous()
        for name, p in declared.items()
    )
    arenas = {role: arena for role, arena in plan.arenas.items() if not usable or role != "frozen"}
    return replace(plan, arenas=MappingProxyType(arenas))


class InferenceMemory:
    """The arenas of a plan from `without_given`, and the parameters: the caller's tensors, or copies in an arena."""

    def __init__(self, plan: MemoryPlan, params: Mapping[str, Tensor]) -> None:
        self.arenas = Arenas(plan)
        self._given = params if "frozen" not in plan.arenas else {}
        for handle in plan.trace.handles.values():
            if handle.role == "frozen" and not self._given:
                self.view(handle).copy_(params[handle.name])

    def view(self, handle: Handle) -> Tensor:
        """The tensor by which `bind` replaces a handle. A handle that no program uses is returned unchanged."""
        if handle.role == "frozen" and self._given:
            return self._given[handle.name]
        return self.arenas.view(handle)  # type: ignore[return-value]
