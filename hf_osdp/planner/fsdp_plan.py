"""A plan in the words of transformers' `DistributedConfig.fsdp_plan`, where these can say it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import PlanError
from .description import Activations

if TYPE_CHECKING:
    from .plan import Plan, UnitDecision

_LAYER = re.compile(r"\.\d+(?=\.|$)")
FREE, KEEP = "free_full_weight", "keep_full_weight"
"""Its two styles: gathered parameters are freed after forward, or kept until backward."""


def fsdp_plan_of(plan: Plan) -> dict[str, str]:
    """Module names → styles, with `*` for the number of a layer, as transformers 5.23 wants them.

    It shards all that has no entry with the root: so are weights that several modules share, which are gathered as long. A model's own
    rules, such as Llama's for its norm, stay beside these. `fsdp_size` and `dp_replicate_size` beside it are the shard size and how
    many times the world has that.

    Raises:
        PlanError: the plan says more than these words can; it names the first unit of which it does.
    """
    sizes = {unit.shard_size for unit in plan.units}
    if len(sizes) > 1:
        raise _cannot(f"units have {len(sizes)} group sizes ({', '.join(map(str, sorted(sizes)))})", "one mesh for all")
    if not plan.split.is_none:
        raise _cannot(f"the model is split into {plan.split.describe()}", "whole modules")
    if 0 < (on_host := sum(unit.on_host for unit in plan.units)) < len(plan.units):
        raise _cannot(f"{on_host} of {len(plan.units)} units live on the host", "all on the host (fsdp_cpu_offload) or none")
    for unit in plan.units:
        if reason := _beyond(unit, plan.accumulation_steps):
            raise _cannot(f"unit {unit.fqn or '(root)'!r} {reason}", "whether gathered parameters are kept")
    styles: dict[str, str] = {}
    for unit in plan.units:
        if not unit.fqn or len(unit.module_names) > 1:
            continue
        layers, style = _LAYER.sub(".*", unit.fqn), FREE if unit.reshard_after_forward else KEEP
        if styles.setdefault(layers, style) != style:
            raise _cannot(f"of {layers} some are kept gathered and some are not", "one style for all of them")
    return styles


def _beyond(unit: UnitDecision, accumulation_steps: int) -> str:
    """What of a decision has no word, or nothing."""
    if unit.activations is not Activations.SAVE:
        return "recomputes its activations" if unit.activations.recomputes else "offloads its activations"
    if unit.two_stage:
        return "has collectives in two stages"
    if accumulation_steps > 1 and not unit.reduce_every_micro_step:
        return "holds whole gradients between micro-steps"
    return ""


def _cannot(reason: str, words: str) -> PlanError:
    return PlanError(f"This plan cannot be said as an fsdp_plan: {reason}, and that says only {words}; run it with hf_osdp.")
