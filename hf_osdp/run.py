"""Train a script that does not know hf_osdp under a plan: its `Trainer` and its `Accelerator` are ours.

    accelerate launch --config_file accelerate_configs/osdp.yaml -m hf_osdp.run train.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m hf_osdp.run train.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m hf_osdp.run -m package.module ARGUMENTS...

A plan for all the memory that there is, unless the file given to `accelerate launch`, or the script, says more.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from .errors import OSDPError

_USER_ERROR = 2
_OTHERS = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM", "ACCELERATE_USE_FSDP": "FSDP without OSDP"}
"""What a launcher's file may ask for instead: variable → name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Put our classes in the place of the stock ones, then run `SCRIPT ARGUMENTS...` or `-m MODULE ARGUMENTS...` as Python itself would."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    try:
        target, is_module = _target(given)
        _prepare()
    except (ValueError, OSDPError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_USER_ERROR)
    sys.argv = given[is_module:]
    from .distributed.process_group import check_ranks

    check_ranks()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    runpy.run_path(target, run_name="__main__")


def _target(given: Sequence[str]) -> tuple[str, bool]:
    """Return the script or the module to run, and whether it is a module; raise ValueError where there is none."""
    is_module = given[:1] == ["-m"]
    if len(given) <= is_module:
        raise ValueError("hf_osdp.run needs a script or -m MODULE; write -m hf_osdp.run train.py ARGUMENTS...")
    if not is_module and not os.path.exists(given[0]):
        raise ValueError(f"There is no file {given[0]}; hf_osdp.run takes the path of a script, or -m MODULE.")
    return given[is_module], is_module


def _prepare() -> None:
    """Put our classes in the place of the stock ones, unless the launcher's file has `osdp: false`; or raise ValueError."""
    from .distributed.launcher import is_on, launched_rank, set_variable
    from .integrations.launch import launch_request

    request = launch_request()
    if request.osdp is False:
        if launched_rank() == 0:
            print("hf_osdp: the launcher's file has osdp: false; the script runs as it stands.", file=sys.stderr)
        return
    for variable, name in _OTHERS.items():
        if request.osdp is None and is_on(variable):
            raise ValueError(
                f"The launcher's file asks for {name}; start with torchrun, or with accelerate_configs/osdp.yaml, whose fsdp_config has"
                " `fsdp_sharding_strategy: {osdp: true}`."
            )
    import accelerate
    import torch
    import transformers

    from .integrations.accelerator import OSDPAccelerator
    from .integrations.trainer import Trainer

    if request.use_cpu or not torch.accelerator.is_available():
        set_variable("ACCELERATE_USE_CPU", "true")  # for TrainingArguments; accelerate does not hand it to FSDP processes
    _replace(accelerate.Accelerator, OSDPAccelerator)
    _replace(transformers.Trainer, Trainer)
    Trainer.on_by_default = True


def _replace(stock: type, ours: type) -> None:
    """Have every module that holds a stock class hold ours; raise ValueError where a class was made from the stock one already."""
    subclasses: list[type] = stock.__subclasses__()
    for early in subclasses:
        if not early.__module__.startswith("hf_osdp."):
            raise ValueError(
                f"{early.__module__}.{early.__qualname__} was made from {stock.__name__} before hf_osdp.run could replace it; have"
                f" {early.__module__} imported by the script, or use hf_osdp.{ours.__name__} in it."
            )
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("hf_osdp."):
            continue
        for name in [name for name, value in vars(module).items() if value is stock]:
            if (module.__name__, name) != ("transformers.trainer", "Accelerator"):  # the stock Trainer's, with osdp=False
                setattr(module, name, ours)


if __name__ == "__main__":
    main()
