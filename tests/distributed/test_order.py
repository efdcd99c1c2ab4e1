"""The order in which units are sharded. One process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from hf_osdp.modeling.units import find_units
from hf_osdp.planner.description import GatherSpan, UnitDescription
from hf_osdp.planner.plan import UnitDecision
from hf_osdp.sharding.apply import apply_plan, bottom_up, effective
from hf_osdp.sharding.verify import verify_applied
from tests.helpers.layouts import plan_of
from tests.helpers.models import MODELS, tiny_model


def unit(*names: str, span: GatherSpan = GatherSpan.USE) -> UnitDescription:
    return UnitDescription(fqn="+".join(names), module_names=names, class_name="", span=span, parameters=())


def test_a_unit_comes_after_all_that_lie_in_it():
    units = (unit(""), unit("h.1"), unit("h.1.mlp"), unit("h.10"), unit("wte", "h.1.mlp.fc"), unit("h"), unit("h.1.attn.q"))
    order = [u.fqn for u in bottom_up(units)]
    assert order[-1] == ""
    for inner, outer in [("h.1.mlp", "h.1"), ("wte+h.1.mlp.fc", "h.1.mlp"), ("h.1.attn.q", "h.1"), ("h.1", "h"), ("h.10", "h")]:
        assert order.index(inner) < order.index(outer)
    assert sorted(order) == sorted(u.fqn for u in units)


@pytest.mark.parametrize("name", MODELS)
def test_the_root_is_last_in_real_models(name):
    assert bottom_up(find_units(tiny_model(name)))[-1].fqn == ""


def test_units_in_use_for_the_whole_step_are_kept():
    decision = UnitDecision(fqn="x", shard_size=2, reshard_after_forward=True)
    assert effective(decision, unit("x")) == decision
    assert effective(decision, unit("x", span=GatherSpan.STEP)) == UnitDecision(fqn="x", shard_size=2, reshard_after_forward=False)


def test_one_process_needs_no_sharding():
    model = tiny_model("gpt2")
    units = find_units(model)
    plan = plan_of(units, 1, "mixed")
    assert apply_plan(model, plan, units) is model
    assert not any("FSDP" in type(module).__name__ for module in model.modules())
    verify_applied(model, plan, units)


def test_one_process_without_a_group_cannot_have_a_precision_policy():
    model = tiny_model("gpt2")
    units = find_units(model)
    with pytest.raises(ValueError, match="process group"):
        apply_plan(model, plan_of(units, 1, "mixed"), units, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
