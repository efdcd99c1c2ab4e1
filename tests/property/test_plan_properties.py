"""Any plan survives its JSON form; any damage to that form is a PlanError; bytes survive their text."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_osdp.errors import PlanError
from hf_osdp.planner.description import Activations
from hf_osdp.planner.plan import Plan, UnitDecision
from hf_osdp.planner.search.remedies import _rounded_up
from hf_osdp.planner.search.strategies import divisors
from hf_osdp.planner.split import ModelSplit, OperatorSplit
from hf_osdp.quantities import format_bytes, parse_bytes

quick = settings(max_examples=50, deadline=None)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
counts = st.integers(1, 10**6)


operators = st.from_regex(r"[a-z]{1,5}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True)
sliced = st.lists(st.builds(OperatorSplit, fqn=operators, slices=st.integers(2, 64)), max_size=3, unique_by=lambda split: split.fqn)
splits = st.builds(ModelSplit, operators=st.booleans(), sliced=sliced.map(tuple))


@st.composite
def plans(draw) -> Plan:
    world_size = draw(st.integers(1, 1024))
    fqns = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    return Plan(
        world_size=world_size,
        strategy=draw(st.sampled_from(["osdp", "ddp", "fsdp"])),
        units=tuple(
            UnitDecision(
                fqn=fqn,
                shard_size=draw(st.sampled_from(divisors(world_size))),
                reshard_after_forward=draw(st.booleans()),
                reduce_every_micro_step=draw(st.booleans()),
                activations=draw(st.sampled_from(Activations)),
                on_host=draw(st.booleans()),
            )
            for fqn in fqns
        ),
        micro_batch_size=draw(counts),
        accumulation_steps=draw(counts),
        split=draw(splits),
        model_fingerprint=draw(names),
        model_name=draw(names),
        sequence_length=draw(counts),
        memory_limit_bytes=draw(st.none() | counts),
        peak_bytes=draw(st.none() | counts),
        step_s=draw(st.none() | st.floats(0, 1e6)),
        proven_optimal=draw(st.booleans()),
        hardware=draw(names),
    )


@quick
@given(plans())
def test_any_plan_survives_its_json_form(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    assert plan.diff(again) == ()


@quick
@given(plans(), st.data())
def test_text_with_a_few_other_characters_is_the_plan_or_a_plan_error(plan, data):
    text = list(plan.to_json())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(text) - 1))
        text[position] = data.draw(st.sampled_from(["", "0", "9", "-", '"', "{", "]", ",", "e", "\\", "\n", "\x00", "null", "1e999", "é"]))
    try:
        read = Plan.from_json("".join(text))
    except PlanError as error:
        assert str(error)
    else:
        assert read.fingerprint == plan.fingerprint or '"fingerprint"' not in "".join(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(plans(), st.data(), json_values)
def test_any_value_in_any_field_is_a_plan_or_a_plan_error(plan, data, value):
    content = json.loads(plan.to_json())
    del content["fingerprint"]
    place = data.draw(st.sampled_from([content, *content["units"]]))
    place[data.draw(st.sampled_from([*place, "other"]))] = value
    try:
        assert Plan.from_json(json.dumps(content)).world_size >= 1
    except PlanError as error:
        assert str(error)


@quick
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_arbitrary_text_is_never_a_plan(text):
    try:
        Plan.from_json(text)
    except PlanError:
        return
    raise AssertionError("read a plan out of noise")


@quick
@given(st.integers(1, 2**60 - 2**50))
def test_bytes_survive_their_text_to_the_last_digit_that_is_printed(nbytes):
    assert parse_bytes(nbytes) == nbytes
    assert nbytes > 2**53 or parse_bytes(str(nbytes)) == nbytes  # text is read as a float
    text = format_bytes(nbytes)
    unit = parse_bytes(f"1{text.split()[1]}")
    assert abs(parse_bytes(text) - nbytes) <= 0.0501 * unit + 1


@quick
@given(st.integers(1, 2**48))
@example(2**40 + 2**25)
@example(2**30 - 1)
def test_limit_that_a_remedy_prints_suffices(nbytes):
    printed = parse_bytes(format_bytes(_rounded_up(nbytes)))
    assert nbytes <= printed
    assert printed <= nbytes + 2**20 / 5 or printed <= nbytes * 1.2
