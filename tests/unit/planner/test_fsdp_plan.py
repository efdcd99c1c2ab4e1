"""Plans in the words of transformers' DistributedConfig, or the reason why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_osdp.errors import PlanError
from hf_osdp.planner.description import Activations
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.split import ModelSplit

UNITS = (
    UnitDecision(fqn="", shard_size=2, reshard_after_forward=False),
    UnitDecision(fqn="model.embed_tokens+lm_head", shard_size=2, reshard_after_forward=False),
    UnitDecision(fqn="model.layers.0", shard_size=2, reshard_after_forward=True),
    UnitDecision(fqn="model.layers.1", shard_size=2, reshard_after_forward=True),
    UnitDecision(fqn="score", shard_size=2, reshard_after_forward=False),
)
PLAN = Plan(world_size=4, strategy="osdp", units=UNITS, micro_batch_size=1, accumulation_steps=2, model_fingerprint="f")


def test_units_are_freed_or_kept_and_the_rest_is_the_roots():
    assert PLAN.to_fsdp_plan() == {"model.layers.*": "free_full_weight", "score": "keep_full_weight"}


def test_all_on_the_host_is_for_its_own_switch_to_say():
    everywhere = replace(PLAN, units=tuple(replace(unit, on_host=True) for unit in UNITS))
    assert everywhere.to_fsdp_plan() == PLAN.to_fsdp_plan()


def changed(**values: object) -> Plan:
    return replace(PLAN, units=(*UNITS[:2], replace(UNITS[2], **values), *UNITS[3:]))


BEYOND = {
    "2 group sizes (2, 4)": changed(shard_size=4),
    "1 of 5 units live on the host": changed(on_host=True),
    "'model.layers.0' recomputes its activations": changed(activations=Activations.RECOMPUTE),
    "'model.layers.0' offloads its activations": changed(activations=Activations.OFFLOAD),
    "'model.layers.0' holds whole gradients between micro-steps": changed(reduce_every_micro_step=False),
    "of model.layers.* some are kept gathered and some are not": changed(reshard_after_forward=False),
    "the model is split into operators": replace(PLAN, split=ModelSplit(operators=True)),
    "unit (root)": replace(PLAN, world_size=4, units=tuple(replace(unit, shard_size=4, stage_size=2) for unit in UNITS)),
}


@pytest.mark.parametrize(("reason", "plan"), BEYOND.items(), ids=BEYOND)
def test_what_it_cannot_say_is_refused_with_the_reason(reason, plan):
    with pytest.raises(PlanError, match="cannot be said as an fsdp_plan") as caught:
        plan.to_fsdp_plan()
    assert reason.replace("unit (root)", "unit '(root)' has collectives in two stages") in str(caught.value)
    assert "\n" not in str(caught.value)
