"""Plan local steps between machines: the problem of one machine, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..planner.cost.local_steps import fastest_wire
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.local_steps import LocalSteps
from ..planner.plan import Plan
from .config import OSDPConfig


def of_one_machine(hardware: Hardware, job: TrainingJob, config: OSDPConfig) -> tuple[Hardware, TrainingJob]:
    """Return one machine, with the link to others, and the job with local steps.

    Raises:
        ValueError: there is one machine, or states are to lie on the host.
    """
    if hardware.nodes == 1:
        raise ValueError(f"local_steps={config.local_steps} is for several machines, and the processes are on one; leave it out.")
    if job.host_offload or job.offload_optimizer:
        raise ValueError(f"local_steps={config.local_steps} keeps all states on the device; leave the offload to the host out.")
    local = config.outer(hardware.nodes)
    assert local is not None
    machine = replace(hardware, nodes=1, timings=tuple(timing for timing in hardware.timings if not timing.crosses_nodes))
    local = replace(local, wire=fastest_wire(machine, local, config.wire))
    return machine, replace(job, local_steps=local, host_offload=False, offload_optimizer=False)


def check_local_steps(plan: Plan, asked: LocalSteps | None) -> None:
    """Refuse a given plan of another algorithm than is asked for."""
    for name in ("steps", "outer_learning_rate", "outer_momentum"):
        has, wanted = (None if local is None else getattr(local, name) for local in (plan.local_steps, asked))
        if has != wanted:
            option = "local_steps" if name == "steps" else name
            raise PlanError(f"The plan trains with {option}={has}, but {option}={wanted} is asked for; make them agree, or plan again.")
