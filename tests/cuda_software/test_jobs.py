"""Whole jobs - training, evaluation, whole saves, a resume - on devices with no more memory than the limit: what each
part takes at most, as torch's allocator counts it, against its estimate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_osdp import OSDPConfig, Trainer, with_osdp
from hf_osdp.measurement.machine import _OWN_BYTES
from hf_osdp.planner.presets import preset
from tests.compatibility.data import on_disk, preference_dataset, tokenizer
from tests.distributed.test_models_beside import SETTINGS, chat_tokenizer, conversations, llama
from tests.helpers.architectures import VISION
from tests.helpers.sampling import slow_but

from .training import on_devices

MEMORY_ALONE = {"FAKE_CUDA_COMPUTE_MAX": "4096"}
TOKENS, CUBLAS_BYTES = 128, 8_519_680


def rows(count: int, vocabulary: int, classes: int, decoder: int) -> list[dict[str, Any]]:
    dice = torch.Generator().manual_seed(0)
    found = torch.randint(3, vocabulary, (count, TOKENS), generator=dice)
    labels = [number % classes for number in range(count)] if classes else found[:, : decoder or TOKENS]
    mask = torch.ones(TOKENS, dtype=torch.long)
    masked = {} if not (classes or decoder) else {"attention_mask": mask}
    return [{"input_ids": ids, "labels": label, **masked} for ids, label in zip(found, labels, strict=True)]


def causal() -> torch.nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": TOKENS}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, vocab_size=50257))


def classifier() -> torch.nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=2000, num_labels=3))


def seq2seq() -> torch.nn.Module:
    sizes = {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, vocab_size=32128))


def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def count(prediction: Any, compute_result: bool = True) -> dict[str, int]:
    return {"count": len(prediction.label_ids)}


def of_rows(kind: type = Trainer, arguments: type = transformers.TrainingArguments, **data: Any) -> Callable[..., Any]:
    def make(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
        found = rows(job.samples, **{"classes": 0, "decoder": 0, **data})
        return kind(
            model=job.model(), args=arguments(**args), train_dataset=found, eval_dataset=found, osdp=osdp,
            compute_metrics=count if job.metrics else None, preprocess_logits_for_metrics=job.reduces,
        )  # fmt: skip

    return make


def dpo(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
    trl = pytest.importorskip("trl")
    args = {**SETTINGS, "max_length": 128, "per_device_eval_batch_size": 4, **args}
    reference, data = None if job.precomputes else llama(256, 1, 24, 512), preference_dataset()
    if job.precomputes:  # ranks share what the first one computes
        data = on_disk(Path(args["output_dir"]) / f"data-{args['max_steps']}", data)
    return with_osdp(trl.DPOTrainer)(
        model=job.model(), ref_model=reference, args=trl.DPOConfig(**args), train_dataset=data,
        eval_dataset=data, processing_class=tokenizer(), osdp=osdp,
    )  # fmt: skip


def gkd(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
    experimental = pytest.importorskip("trl.experimental.gkd")
    args = {**SETTINGS, "max_length": 128, "lmbda": 0.0, "per_device_eval_batch_size": 4, **args}
    return with_osdp(experimental.GKDTrainer)(
        model=job.model(), teacher_model=llama(256, 1, 24, 512), args=experimental.GKDConfig(**args),
        train_dataset=conversations(), eval_dataset=conversations(), processing_class=chat_tokenizer(), osdp=osdp,
    )  # fmt: skip


def pictures(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (24, 80), generator=dice)
    ids[:, 4:20] = 100
    found = [{"input_ids": row, "labels": row, "pixel_values": torch.rand(3, 32, 32, generator=dice)} for row in ids]
    return Trainer(
        model=job.model(), args=transformers.TrainingArguments(**args), train_dataset=found, eval_dataset=found,
        osdp=osdp,
    )  # fmt: skip


def llava() -> torch.nn.Module:
    name, sizes = "LlavaForConditionalGeneration", VISION["LlavaForConditionalGeneration"]
    text = {**sizes["text_config"], "hidden_size": 128, "intermediate_size": 512, "vocab_size": 8192}
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**sizes, "text_config": text}))


def student() -> torch.nn.Module:
    return llama(128, 0, 4, 512)


LIMIT, LOW = 2**32, 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    make: Callable[..., Any]
    model: Callable[[], torch.nn.Module]
    ranks: int = 1
    metrics: bool = False
    reduces: Any = None
    """`preprocess_logits_for_metrics`."""
    samples: int = 24
    limit: int = LIMIT
    values: bool = False
    """Whether large tensors have values, which the loop reads."""
    precomputes: bool = False
    """The trained model computes what a reference would, before the plan."""
    shards_beside: bool = False
    """The limit is so low that the model beside is sharded."""
    parts: bool = False
    """Evaluation's batches are cut to fit."""
    moves: bool = False
    """Its outputs go to the host earlier to fit."""
    evaluates: bool = False
    """It only evaluates once, after one step."""
    osdp: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


GENERATES = {
    "kind": with_osdp(transformers.Seq2SeqTrainer), "arguments": transformers.Seq2SeqTrainingArguments,
    "vocabulary": 32128, "decoder": 32,
}  # fmt: skip
FSDP, DDP = {"strategy": "fsdp", "host_offload": False}, {"strategy": "ddp"}
GENERATED: dict[str, Any] = {"model": seq2seq, "metrics": True, "values": True}
BESIDE: dict[str, Any] = {"model": student, "values": True, "ranks": 2, "osdp": FSDP}
CAUSAL: dict[str, Any] = {"make": of_rows(vocabulary=50257), "model": causal}
CLASSES: dict[str, Any] = {"make": of_rows(vocabulary=2000, classes=3), "model": classifier, "metrics": True}
EVALUATED = {**CAUSAL, "evaluates": True}
BF16, BATCHES_OF_12 = {"bf16": True}, {"per_device_eval_batch_size": 12}
BEAMS = {"predict_with_generate": True, "generation_num_beams": 2, "generation_max_length": 96}
JOBS = {
    "causal": Job(**CAUSAL, osdp={"split_vocabulary": False}),
    "causal, logits kept, sharded": Job(**CAUSAL, metrics=True, ranks=2, osdp=FSDP),
    "causal, bf16, sharded": Job(**CAUSAL, ranks=2, osdp=FSDP, arguments=BF16),
    "causal, accumulation, replicas": Job(**CAUSAL, values=True, ranks=2, osdp=DDP | {"micro_batch_size": 2}),
    "classes": Job(**CLASSES),
    "classes, replicas": Job(**CLASSES, ranks=2, osdp=DDP),
    "generates": Job(**GENERATED, make=of_rows(**GENERATES), arguments={"predict_with_generate": True}),
    "generates with beams, sharded": Job(
        **GENERATED, make=of_rows(**GENERATES), ranks=2, osdp=FSDP, arguments=BEAMS
    ),
    "DPO": Job(**BESIDE, make=dpo),
    "DPO, precomputed": Job(**BESIDE, make=dpo, precomputes=True, arguments={"precompute_ref_log_probs": True}),
    "DPO, reference sharded": Job(**BESIDE, make=dpo, shards_beside=True),
    "GKD, teacher sharded": Job(**BESIDE, make=gkd, shards_beside=True),
    "pictures": Job(make=pictures, model=llava, values=True),
    "loss in chunks": Job(**EVALUATED, arguments={"per_device_train_batch_size": 16}, limit=LOW),
    "logits kept": Job(**EVALUATED, metrics=True),
    "in parts": Job(
        **EVALUATED, osdp={"split_vocabulary": False}, limit=LOW, arguments=BATCHES_OF_12, parts=True
    ),
    "logits kept, moved earlier": Job(**EVALUATED, metrics=True, limit=LOW, samples=60, moves=True),
    "logits kept, in parts": Job(
        **EVALUATED, metrics=True, limit=LOW, samples=36, arguments=BATCHES_OF_12, moves=True, parts=True
    ),
    "two replicas": Job(**EVALUATED, metrics=True, ranks=2, osdp=DDP),
    "two ranks, kept after forward": Job(**EVALUATED, ranks=2, osdp={"strategy": "zero2"}),
    "bf16": Job(**EVALUATED, arguments=BF16),
    "tokens of the largest logits kept": Job(**EVALUATED, metrics=True, reduces=largest),
    "metrics of each batch": Job(**EVALUATED, metrics=True, arguments={"batch_eval_metrics": True}),
    "on the host": Job(**EVALUATED, metrics=True, ranks=2, osdp={"host_offload": True, "strategy": "fsdp"}),
    "seq2seq": Job(make=of_rows(vocabulary=32128, decoder=32), model=seq2seq, metrics=True, evaluates=True),
}  # fmt: skip


def run(name: str, folder: str, limit: int, resumes: bool) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Train two steps, evaluate and save after each, or resume and train a third, or evaluate once; return for each
    part the estimated and the measured peak, the room for tensors, and a limit under which a model beside has to be
    sharded."""
    job, measured = JOBS[name], dict[str, int]()

    def note(part: str, workspaces: int = CUBLAS_BYTES) -> None:
        taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - workspaces
        if part:
            measured[part] = max(taken, measured.get(part, 0))
        torch.cuda.reset_peak_memory_stats()

    class Parts(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            note("resume" if resumes and not job.precomputes else "", 0)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            note("training step")

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            note("evaluation")

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            note("save of whole tensors")

    steps, saves = (1, "no") if job.evaluates else (3 if resumes else 2, "steps")
    args = {
        "output_dir": folder, "max_steps": steps, "eval_strategy": "steps", "eval_steps": 1, "report_to": "none",
        "save_strategy": saves, "save_steps": 1, "save_total_limit": 1, "disable_tqdm": True,
        "per_device_train_batch_size": 4, **job.arguments,
    }  # fmt: skip
    config = OSDPConfig(memory_limit=limit, hardware="a100-80", report=False, **job.osdp)
    trainer = job.make(job, args, config)
    trainer.add_callback(Parts())
    trainer.train(resume_from_checkpoint=resumes or None)
    found = trainer._run
    parts = {phase.name: phase.peak_bytes for phase in found.inputs.phases(found.plan, found.estimate)}
    outside = found.hardware.outside_bytes(found.plan.communicators)
    room = found.hardware.room_bytes(found.plan.memory_limit_bytes) - outside
    other = found.inputs.description.other_bytes
    assert found.shards_beside == (job.shards_beside and limit < LIMIT)
    line = "" if found.evaluation is None else found.evaluation.line
    assert ("parts" in line, "eval_accumulation_steps" in line) == (job.parts, job.moves)
    less = found.hardware.limit_for(found.plan.peak_bytes - other // 4)
    return {part: (parts[part], nbytes) for part, nbytes in measured.items()}, room, less


DAILY = (
    "causal, logits kept, sharded", "generates", "DPO, reference sharded", "loss in chunks", "in parts",
    "logits kept, moved earlier", "two replicas", "seq2seq",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_but(JOBS, daily=DAILY))
def test_parts_of_a_job_take_what_the_estimates_say(tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    how: dict[str, Any] = {"env": {} if job.values else MEMORY_ALONE, "joins": False, "memory": f"{job.limit >> 30}G"}
    limit, found = job.limit, []
    if job.shards_beside:
        limit = on_devices(run, job.ranks, name, str(tmp_path / "whole"), limit, False, **how)[0][2]
    for resumes in (False,) if job.evaluates else (False, True):
        found += on_devices(run, job.ranks, name, str(tmp_path), limit, resumes, **how)
    for parts, room, _ in found:
        for part, (estimated, measured) in parts.items():
            print(f"{name}: {part}: {estimated / 2**20:.1f} MiB estimated, {measured / 2**20:.1f} measured")
            assert measured <= room
            assert -0.01 <= estimated / measured - 1, part
        assert job.shards_beside or parts["evaluation"][0] <= 1.03 * parts["evaluation"][1]
        saves = set() if job.evaluates else {"save of whole tensors"}
        assert {"training step", "evaluation", *saves} <= parts.keys()


def _limits(taken: int) -> tuple[int, int, int]:
    """Plan while others have taken so many bytes of the device, and this process holds 100 MiB of tensors; return the
    plan's limit, what is left out of it, and the bytes of the tensors."""
    libraries = Path(torch.__file__).parents[1] / "nvidia"
    runtime = ctypes.CDLL(str(next(libraries.rglob("libcudart.so*"))))
    pointer = ctypes.c_void_p()
    assert taken == 0 or runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(taken)) == 0
    own = torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda")
    args = transformers.TrainingArguments("unused", max_steps=1, report_to="none", save_strategy="no")
    config = OSDPConfig(hardware="a100-40", report=False, beside=2**30)
    trainer = Trainer(model=causal(), args=args, train_dataset=rows(8, 50257, 0, 0), osdp=config)
    plan = trainer.plan
    others = trainer._run.inputs.description.other_bytes
    del own
    return plan.memory_limit_bytes, trainer._run.hardware.beside_bytes, others


def test_what_others_use_is_left_out_of_the_limit():
    whole = preset("a100-40").device.memory_bytes
    for taken, left_out in ((0, 2**30 - 100 * 2**20), (8 * 2**30, 8 * 2**30 - _OWN_BYTES)):
        (found,) = on_devices(_limits, 1, taken, memory="40G", env=MEMORY_ALONE, joins=False)
        assert found[1:] == (left_out, 100 * 2**20)
        assert found[0] == whole - left_out
