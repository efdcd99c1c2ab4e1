"""Many architectures: every layout in turn, and blocks that are recomputed or wait on the host."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.helpers.architectures import TINY, batches_of, loss_of, no_float32, tiny_architecture, units_of
from tests.helpers.training import Case

KINDS = (
    "T5ForConditionalGeneration", "MixtralForCausalLM", "ViTForImageClassification", "AlbertForMaskedLM",
    "ResNetForImageClassification",
)  # fmt: skip
"""What GPT-2, BERT and Llama, which other cases train, do not show; more of the same kinds are slow."""
_COMMON: dict[str, Any] = {"units": units_of, "batches": batches_of, "loss": loss_of, "within": no_float32, "steps": 2}
# Blocks with batch norm cannot be recomputed, and train as one process with the ranks' parts in turn.
_NORMS = {"layout": "mixed", "parts_alone": 2}
CASES = {
    name: Case(
        model=partial(tiny_architecture, name), slow=name not in KINDS, max_norm=0.05,
        **{**_COMMON, "layout": "everything", **(_NORMS if name.startswith("ResNet") else {})},
    )
    for name in TINY
}  # fmt: skip


EXPERTS = Case(
    model=partial(tiny_architecture, "MixtralForCausalLM", num_local_experts=2, num_hidden_layers=5), world=4,
    layout="everything", max_norm=0.05, slow=True, **_COMMON,
)  # fmt: skip
"""Two experts on four ranks, sharded along another dimension than 0."""
CASES |= {"few experts": EXPERTS}
