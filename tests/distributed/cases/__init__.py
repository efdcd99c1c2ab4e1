"""What trains equal to one process: cases by name, each file with those of one kind."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.training import Case

from . import architectures, layouts, modules, optimizers, reads, steps

KEPT_BY: dict[str, tuple[str, ...]] = {
    "gpt2, everything": ("gpt2, replicate", "gpt2, zero2", "gpt2, hsdp", "gpt2, everything on 2"),
    "gpt2, mixed, checkpointing": ("gpt2, mixed, async",),
    "gpt2, zero3, accumulates, holds": ("gpt2, zero3",),
    "wire, two_stage": ("gpt2, two_stage",),
    "bert, everything on 2": ("bert, everything",),
    "llama, everything on 2": ("llama, everything",),
    "host, every unit": ("host", "host, llama", "host, every unit, one rank", "host, llama, one rank"),
    "host, groups bound afterwards, {'foreach': True}": tuple(
        f"host, groups bound afterwards, {how}"
        for how in ("usual", "{'fused': True}", "usual, one rank", "{'foreach': True}, one rank")
    ),
    "slices, 4, zero3, holds": ("slices, 2, accumulates", "slices, llama"),
    "chunks, gpt2": ("chunks, bert",),
    "states on host, mixed, AdamW": ("states on host, zero3, AdamW", "states on host, mixed, SGD"),
    "states on host, no group, frozen": ("states on host, no group",),
    "adafactor with a first moment": ("adafactor", "torch's adafactor"),
    "global norm": ("trust ratio", "muon of replicas"),
    "muon, states on host": ("muon, zero3",),
    "muon, mixed, hooks": ("muon, mixed", "muon, zero3, hooks", "muon, replicate, hooks"),
    **{f"read, llama, {kind}, accumulates on 4": (f"read, llama, {kind}",)
       for kind in ("forward reads head", "penalties", "own parameters")},
    "read, gpt2, read first, checkpointing": (
        "read, gpt2, forward reads head, checkpointing", "read, llama, read first",
    ),
    "measures before the step": ("measures before the step, zero2",),
    "gives up micro-steps": ("gives up micro-steps, zero3",),
    "gives up micro-steps, zero3, reduces": ("gives up micro-steps, reduces",),
    **{f"{name}, mixed": (f"{name}, zero3",) for name in steps.WORK if name != "is averaged by EMA"},
    "is averaged, mixed": ("is averaged, zero3", "is averaged by EMA, mixed", "is averaged by EMA, zero3"),
    "modules, micro-steps, mixed, by unit": tuple(f"modules, micro-steps, mixed, {o}" for o in ("holds", "reduces")),
    "modules, early micro-steps, mixed": ("modules, early micro-steps, replicate",),
    "modules, dropped_layers, everything": ("modules, whisper, mixed",),
    "T5ForConditionalGeneration": ("BartForConditionalGeneration", "WhisperForConditionalGeneration"),
    "AlbertForMaskedLM": ("DistilBertForMaskedLM",),
    "MixtralForCausalLM": ("Qwen2ForCausalLM", "GemmaForCausalLM", "OPTForCausalLM"),
}  # fmt: skip
"""Cases of every day, and others, which are slow, that show nothing else."""
_SLOW = {name for names in KEPT_BY.values() for name in names}

CASES: dict[str, Case] = {
    name: replace(case, slow=case.slow or name in _SLOW)
    for kind in (layouts, optimizers, reads, steps, modules, architectures)
    for name, case in kind.CASES.items()
}
assert CASES.keys() >= _SLOW and not any(CASES[name].slow for name in KEPT_BY)
