"""What one emulation measures: the values that `run.py` hands its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hf_osdp.planning.config import EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A GPT-2 in float32, the memory limits that it is planned for, and how much is measured."""

    rate: str
    limits: tuple[int, ...]
    """Bytes a rank, each of them a cell of the results."""
    rounds: int
    """In each, one step of every strategy."""
    links_s: float
    """Seconds for the links, once; plans are made from it. A slow link takes long, for only messages of some megabytes tell
    how fast it passes fifty."""
    profile_s: float
    """Seconds for all else, before plans are made and again in the rounds: cores drift, links do not."""
    layers: int = 8
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    sequence_length: int = 128
    micro_batch_size: int = 4
    communication: str = EXACT
    """The coarsest form in which the planner may send, as `OSDPConfig` has it."""
    local_steps: int | None = None
    """A plan with so many local steps between the machines takes part, too."""

    def config(self) -> Any:
        """The model's configuration."""
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, vocab_size=self.vocabulary, n_positions=self.sequence_length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Experiment:
        data = json.loads(text)
        return cls(**{**data, "limits": tuple(data["limits"])})
