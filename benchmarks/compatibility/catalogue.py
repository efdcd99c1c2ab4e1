"""Imports every group of rows; their order here is the order of the table."""

from . import trainer_options  # noqa: F401  # isort: skip
