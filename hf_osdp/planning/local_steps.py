"""Plan local steps between machines: the problem of one machine, and whether a plan is for the run."""

from __future__ import annotations

from dataclasses import replace

from ..errors import PlanError
from ..planner.cost.local_steps import fastest_wire
from ..planner.hardware import Hardware
from ..planner.job import TrainingJob
from ..planner.local_steps import LocalSteps
from ..planner.plan import Plan
from ..planner.wire import formats_up_to
from .config import OSDPConfig


def of_one_machine(hardware: Hardware, job: TrainingJob, config: OSDPConfig) -> tuple[Hardware, TrainingJob]:
    """Return one machine, with the link to others, and the job with local steps.

    Raises:
        ValueError: there is one machine, states are to lie on the host, or the global batch does not divide.
    """
    assert config.local_steps is not None
    if hardware.nodes == 1:
        raise ValueError(f"local_steps={config.local_steps} is for several machines, and the processes are on one; leave it out.")
    if job.host_offload or job.offload_optimizer:
        raise ValueError(f"local_steps={config.local_steps} keeps all states on the device; leave the offload to the host out.")
    local = LocalSteps(
        steps=config.local_steps, machines=hardware.nodes,
        learning_rate=float(config.outer_learning_rate), momentum=float(config.outer_momentum),
    )  # fmt: skip
    machine = replace(hardware, nodes=1, timings=tuple(timing for timing in hardware.timings if not timing.crosses_nodes))
    local = replace(local, wire=fastest_wire(machine, local, config.wire))
    job = replace(job, local_steps=local, host_offload=False, offload_optimizer=False)
    job.micro_batch_sizes(machine.world_size)
    return machine, job


def check_local_steps(plan: Plan, config: OSDPConfig | None = None) -> None:
    """Refuse a given plan of another algorithm than is asked for; without a configuration one of local steps."""
    local, asked = plan.local_steps, config or OSDPConfig()
    planned = OSDPConfig() if local is None else OSDPConfig(
        local_steps=local.steps, outer_learning_rate=local.learning_rate, outer_momentum=local.momentum
    )  # fmt: skip
    for name in ("local_steps", "outer_learning_rate", "outer_momentum"):
        if (has := getattr(planned, name)) != (wanted := getattr(asked, name)):
            raise PlanError(
                f"The plan has {name}={has}, which trains otherwise than the {name}={wanted} that is asked for; set {name}={has} where that"
                " is meant, or plan again."
            )
    if local is not None and local.wire is not None and local.wire not in formats_up_to(asked.wire):
        raise PlanError(
            f"The plan's machines synchronise in {local.wire.value}; set communication to that where it is meant, or plan again."
        )


def refuse_local_steps(config: OSDPConfig, loop: str) -> None:
    """Refuse local steps in a loop that does not synchronise machines."""
    if config.local_steps is not None:
        raise ValueError(f"local_steps={config.local_steps} is for the Trainer, which knows when to synchronise; {loop} trains without.")
