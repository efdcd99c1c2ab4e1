"""Run a training script under a plan without changing it: replace its `Trainer` and its `Accelerator` by those of
hf_osdp.

    accelerate launch --config_file accelerate_configs/osdp.yaml -m hf_osdp.run train.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m hf_osdp.run train.py ARGUMENTS...
    torchrun --nproc-per-node 8 -m hf_osdp.run -m package.module ARGUMENTS...

The plan may use all device memory, unless the file given to `accelerate launch`, or the script, sets a limit or other
options.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

from .errors import OSDPError

_USER_ERROR = 2
_OTHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_FSDP": "FSDP without OSDP",
}
"""Other plugins that a launcher's file may select: variable → name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace the stock classes by ours, then run `SCRIPT ARGUMENTS...` or `-m MODULE ARGUMENTS...` as Python
    itself would.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    try:
        target, is_module = _target(given)
        _replace_stock_classes()
    except (ValueError, OSDPError) as error:
        from .distributed.said_once import say_once

        say_once(error)
        sys.exit(_USER_ERROR)
    sys.argv = given[is_module:]
    from .distributed.process_group import prepare_group

    prepare_group()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    runpy.run_path(target, run_name="__main__")


def _target(given: Sequence[str]) -> tuple[str, bool]:
    """Return the script or the module to run, and whether it is a module; raise ValueError if there is none."""
    is_module = given[:1] == ["-m"]
    if len(given) <= is_module:
        raise ValueError("hf_osdp.run needs a script or -m MODULE; write -m hf_osdp.run train.py ARGUMENTS...")
    if not is_module and not os.path.exists(given[0]):
        raise ValueError(f"There is no file {given[0]}; hf_osdp.run takes the path of a script, or -m MODULE.")
    return given[is_module], is_module


def _replace_stock_classes() -> None:
    """Replace the stock classes by ours, unless the launcher's file has `osdp: false`; raise ValueError if it
    selects another plugin.
    """
    from .distributed.launcher import is_on, launched_rank, set_variable
    from .integrations.launch import launch_request

    request = launch_request()
    if request.osdp is False:
        if launched_rank() == 0:
            print("hf_osdp: the launcher's file has osdp: false; the script runs unchanged.", file=sys.stderr)
        return
    for variable, name in _OTHERS.items():
        if request.osdp is None and is_on(variable):
            raise ValueError(
                f"The launcher's file asks for {name}; start with torchrun, or with accelerate_configs/osdp.yaml,"
                " whose fsdp_config has"
                " `fsdp_sharding_strategy: {osdp: true}`."
            )
    import accelerate
    import torch
    import transformers

    from .integrations.accelerator import OSDPAccelerator
    from .integrations.trainer import Trainer

    if request.use_cpu or not torch.accelerator.is_available():
        set_variable(
            "ACCELERATE_USE_CPU", "true"
        )  # for TrainingArguments; accelerate does not set it for FSDP processes
    _replace(accelerate.Accelerator, OSDPAccelerator)
    _replace(transformers.Trainer, Trainer)
    Trainer.on_by_default = True


def _replace(stock: type, ours: type) -> None:
    """Replace a stock class by ours in every loaded module; raise ValueError if the stock class already has a
    subclass.
    """
    subclasses: list[type] = stock.__subclasses__()
    for early in subclasses:
        if not early.__module__.startswith("hf_osdp."):
            raise ValueError(
                f"{early.__module__}.{early.__qualname__} was derived from {stock.__name__} before hf_osdp.run could"
                " replace it;"
                f" import {early.__module__} in the script, or use hf_osdp.{ours.__name__} there."
            )
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith("hf_osdp."):
            continue
        for name in [name for name, value in vars(module).items() if value is stock]:
            if (module.__name__, name) != (
                "transformers.trainer",
                "Accelerator",
            ):  # the stock Trainer's, with osdp=False
                setattr(module, name, ours)


if __name__ == "__main__":
    main()
