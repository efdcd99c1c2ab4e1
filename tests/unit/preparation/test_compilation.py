"""Whether compiled blocks pay within a run, and what `compile="auto"` makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from hf_osdp.errors import InfeasibleError
from hf_osdp.planner.affine import Affine
from hf_osdp.planner.description import ModelDescription
from hf_osdp.preparation.block_forms import FormGain
from hf_osdp.preparation.config import OSDPConfig
from hf_osdp.preparation.find_plan import Describer, ProblemBuilder
from hf_osdp.preparation.plan_run import PlannedRun, plan_run
from tests.helpers.problems import run_job

NO_TIME = Affine(constant=1e-9)
GAIN = "By the estimate, compiled blocks make a step 1.50 times as fast as eager blocks"
SHORT = ", which saves 10.00 s in 10 steps; compiling takes about 12.00 s"
LOSS = "By the estimate, compiled blocks make a step 0.75 times as fast as eager blocks"
EAGER: dict[str, ModelDescription] = {}  # of the one model of these tests, by split and sizes
ALL_THE_SAME = "Blocks run eager; compile=True compiles them anyway."


@pytest.mark.parametrize(
    ("eager_step_s", "steps", "pays", "compiled", "eager"),
    [
        (3.0, None, True, f"{GAIN}.", None),
        (3.0, 13, True, f"{GAIN}.", None),
        (3.0, 10, False, f"{GAIN}{SHORT}. Leave compilation out.", f"{GAIN}{SHORT}. {ALL_THE_SAME}"),
        (1.5, None, False, f"{LOSS}. Leave compilation out.", f"{LOSS}. {ALL_THE_SAME}"),
    ],
)
def test_compilation_pays_where_faster_steps_win_it_back(eager_step_s, steps, pays, compiled, eager):
    weighed = FormGain(eager_step_s=eager_step_s, step_s=2.0, compile_s=12.0, steps=steps)
    assert weighed.pays is pays
    assert weighed.line == compiled
    assert eager is None or replace(weighed, taken=False).line == eager


@pytest.fixture
def model(monkeypatch) -> GPT2LMHeadModel:
    """A model whose compiled blocks are described as the eager ones, in no time at all."""
    describe = Describer._traced

    def described(self: Describer, *args: object, **sizes: object) -> ModelDescription:
        if (key := repr((args, sizes))) not in EAGER:
            EAGER[key] = describe(Describer(self._model, self._job.asking(compile=False)), *args, **sizes)
        if not self._job.config.compile:
            return EAGER[key]
        passes = [
            {name: replace(getattr(s, name), seconds=NO_TIME) for name in ("forward", "backward")}
            for s in EAGER[key].segments
        ]
        quick = tuple(replace(s, **changes) for s, changes in zip(EAGER[key].segments, passes, strict=True))
        return replace(EAGER[key], segments=quick, compiled_classes=("GPT2Block",))

    monkeypatch.setattr(Describer, "_traced", described)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=61, n_positions=16))


def planned(model: GPT2LMHeadModel, *, steps: int | None = None, **options: object) -> PlannedRun:
    sizes = {"sequence_length": 16, "global_batch_size": 8}
    config = OSDPConfig(hardware="cpu", operator_splitting=False, compare=False, **sizes, **options)
    return plan_run(model, run_job(config, steps=steps))


@pytest.mark.parametrize(("compile", "steps", "compiles"), [("auto", None, True), ("auto", 1, False), (True, 1, True)])
def test_auto_compiles_where_that_pays_and_true_in_any_case(model, compile, steps, compiles):
    run = planned(model, compile=compile, steps=steps)
    assert bool(run.plan.compiled_classes) is bool(run.problem.description.compiled_classes) is compiles
    assert (run.gain is None) is (compile is True), "nothing was compared"
    assert compile is True or run.gain.pays is run.gain.taken is compiles


def test_auto_leaves_blocks_as_they_are_where_none_fits_compiled(model, monkeypatch):
    find = ProblemBuilder.find

    def fits_eager_alone(self):
        found = find(self)
        if not found.whole.compiled_classes:
            return found
        return replace(found, outcome=InfeasibleError("Nothing fits.", memory_limit_bytes=1, least_peak_bytes=2))

    monkeypatch.setattr(ProblemBuilder, "find", fits_eager_alone)
    assert not planned(model, compile="auto").plan.compiled_classes
    with pytest.raises(InfeasibleError):
        planned(model, compile=True)
