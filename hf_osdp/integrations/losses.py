"""Which models of transformers leave the division of their loss to the training loop."""

from __future__ import annotations

import inspect

from torch import nn

from ..modeling.batch import without_adapters

_MEANS = frozenset({"CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "L1Loss", "NLLLoss", "cross_entropy", "mse_loss"})


def ignores_item_count(model: nn.Module) -> bool:
    """Whether a model's forward takes `num_items_in_batch` among any keywords, and yet gives the mean of its micro-batch as the loss.

    So do BERT's heads and T5. transformers' Trainer takes such a loss to be divided already, and adds up the means of micro-steps:
    the gradient then grows with their number, which is the planner's to choose.

    Args:
        model: not sharded, perhaps with adapters of peft around it.
    """
    model = without_adapters(model)
    cls = type(model)
    if hasattr(model, "accepts_loss_kwargs") or not cls.__module__.startswith("transformers."):
        return False
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    names = {*code.co_names, *code.co_varnames, *(text for text in code.co_consts if isinstance(text, str))}
    return bool(_MEANS & names) and not {"loss_function", "num_items_in_batch"} & names
