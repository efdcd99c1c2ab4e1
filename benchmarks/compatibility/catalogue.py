"""Imports every group of rows; their order here is the order of the table."""

from . import trainer_options, trainer_optimizers, trainer_runs, trainer_losses, model_rows, trl_rows, sentence_rows, peft_rows, accelerate_rows, plain_rows, saving_rows  # noqa: F401, I001
