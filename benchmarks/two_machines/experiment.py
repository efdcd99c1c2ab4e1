"""Parameters of one emulation, which `run.py` passes to its ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hf_osdp.planner.training_job import EXACT


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A GPT-2 in float32, its memory limits, and the amount of measurement."""

    rate: str
    limits: tuple[int, ...]
    """Limits in bytes per rank; each is a cell of the results."""
    rounds: int
    """Number of rounds; each has one step of every strategy."""
    links_s: float
    """Seconds to measure the links, once, before planning. A slow link takes long, because only messages of some
    megabytes show how fast it sends fifty."""
    profile_s: float
    """Seconds to measure everything else, before planning and again in the rounds, because the speed of cores
    drifts.
    """
    layers: int = 8
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    sequence_length: int = 128
    micro_batch_size: int = 4
    communication: str = EXACT
    """Coarsest format that the planner may send, as in `OSDPConfig.communication`."""

    def config(self) -> Any:
        """Return the model's configuration."""
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers, n_embd=self.width, n_head=self.heads, vocab_size=self.vocabulary,
            n_positions=self.sequence_length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Experiment:
        data = json.loads(text)
        return cls(**{**data, "limits": tuple(data["limits"])})
