"""LoRA adapters of `peft`: they are trained, the model that they are put into is not."""

from __future__ import annotations

from collections.abc import Iterable

from recipe_arguments import ModelArguments
from torch import nn


def with_adapters(model: nn.Module, model_args: ModelArguments, task_type: str | None, new: Iterable[str]) -> nn.Module:
    """The model with adapters, where `lora_rank` asks for them.

    Args:
        model: loaded; it is changed.
        model_args: rank, alpha and targets.
        task_type: peft's name of the task.
        new: parameters that no weights were loaded for, such as a classifier's head: their modules are trained and saved, too.

    Raises:
        ValueError: peft is not installed, or no projection has one of the names.
    """
    if model_args.lora_rank is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError('lora_rank needs peft; install it with: pip install "hf_osdp[peft]".') from None
    rank, targets = model_args.lora_rank, model_args.lora_targets
    options = LoraConfig(
        r=rank,
        lora_alpha=model_args.lora_alpha or 2 * rank,
        target_modules=[name.strip() for name in targets.split(",") if name.strip()] if targets else "all-linear",
        task_type=task_type,
        modules_to_save=_outermost(new, {"classifier", "score"} if task_type == "SEQ_CLS" else set()) or None,  # peft has those itself
    )
    try:
        return get_peft_model(model, options)
    except ValueError as error:
        raise ValueError(f"lora_targets={targets} cannot be used: {str(error).splitlines()[0].rstrip('.')}.") from None


def _outermost(parameters: Iterable[str], known: set[str]) -> list[str]:
    """The modules of parameters, without those that lie in another of them, or in one that is known: peft copies each with all in it."""
    modules = {name.rpartition(".")[0] for name in parameters if "." in name}
    return sorted(name for name in modules if not any(name == other or name.startswith(f"{other}.") for other in known | modules - {name}))
