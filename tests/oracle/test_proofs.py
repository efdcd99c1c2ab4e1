"""The checker of proofs (`tests/proof.py`) confirms what searches prove, and notices what is wrong."""

import itertools
from dataclasses import replace

import pytest

from hf_osdp.errors import HardwareError
from hf_osdp.planner.search.search import least_memory, search
from hf_osdp.planner.training_job import TrainingJob
from hf_osdp.report.plan_file import PlanInputs, plan_file_content, write_json
from tests import proof
from tests.helpers.descriptions import transformer
from tests.helpers.hardware import bare_preset
from tests.helpers.problems import problem
from tests.helpers.random_problems import of_many_ranks, wide
from tests.helpers.sampling import slow_but

ASKED = problem(transformer(layers=2), bare_preset("v100-16", devices_per_node=4), TrainingJob(global_batch_size=16))


def tight(one=ASKED, factor: float = 1.1):
    return replace(one, memory_limit_bytes=int(factor * least_memory(one)))


@pytest.mark.parametrize("seed", slow_but(range(200), daily=(4, 25, 31, 104)))
def test_what_is_proven_is_confirmed_to_the_end(seed):
    problem_of = of_many_ranks if seed % 4 == 3 else wide
    for factor, simplicity in itertools.product((1.0, 1.2), (0.0, 0.01)):
        try:
            asked = replace(tight(problem_of(seed), factor), simplicity=simplicity)
        except HardwareError:
            return  # the host has too little memory for all states, which are to lie there
        found = proof.check(search(asked).plan, asked, most_nodes=20_000)
        assert found.complete or found.bound_s > 0.9 * search(asked).time.step_s


def test_plan_that_does_not_fit_or_is_not_the_fastest_is_noticed():
    asked = tight(factor=1.5)
    plan, slower = search(asked).plan, search(tight(factor=1.0)).plan
    assert proof.check(plan, asked, most_nodes=50_000).complete and slower.step_s > plan.step_s * 1.001
    with pytest.raises(proof.WrongProof, match="claimed was"):
        proof.check(replace(slower, gap=0.0), asked, most_nodes=50_000)
    proof.check(replace(slower, gap=1 - 0.999 * plan.step_s / slower.step_s), asked)
    with pytest.raises(proof.WrongProof, match=f"needs {plan.peak_bytes} of"):
        proof.check(plan, replace(asked, memory_limit_bytes=plan.peak_bytes - 1))
    with pytest.raises(proof.WrongProof, match=r"the plan says .* bytes"):
        proof.check(replace(plan, peak_bytes=plan.peak_bytes - 1), asked)
    with pytest.raises(proof.WrongProof, match=r"the plan says .* s, and takes"):
        proof.check(replace(plan, step_s=plan.step_s * 0.999), asked)
    with pytest.raises(ValueError, match="up to 12 units"):
        many = tight(replace(ASKED, description=transformer(layers=16)))
        proof.check(search(many).plan, many)


def test_plan_file_is_checked_from_the_command_line(tmp_path, capsys):
    asked, path = tight(), tmp_path / "plan.json"
    plan = search(asked).plan
    for one, code, said in ((plan, 0, "no plan is faster than claimed"), (replace(plan, step_s=1.0), 1, "takes")):
        write_json(plan_file_content(one, PlanInputs.of(asked)), path)
        assert proof.main([str(path)]) == code and said in capsys.readouterr().out
