"""Import every group of rows; the order of the imports is that of the table."""

from importlib import import_module

for _name in (
    "trainer_options", "trainer_optimizers", "trainer_runs", "trainer_losses", "model_rows", "trl_rows",
    "sentence_rows", "peft_rows",
    "accelerate_rows", "plain_rows", "saving_rows", "part_rows",
):  # fmt: skip
    import_module(f"{__package__}.{_name}")
