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
from tests.compatibility.data import on_disk
from tests.distributed.test_models_beside import SETTINGS, chat_tokenizer, conversations, llama, preferences
from tests.distributed.test_trainers_of_others import _tokenizer
from tests.helpers.sampling import slow_but
from tests.helpers.vision import VISION

from .test_evaluation import CUBLAS_BYTES, MEMORY_ALONE, causal, classifier, count, rows, seq2seq
from .training import on_devices


def of_rows(kind: type = Trainer, arguments: type = transformers.TrainingArguments, **data: Any) -> Callable[..., Any]:
    def make(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
        found = rows(24, **{"classes": 0, "decoder": 0, **data})
        return kind(
            model=job.model(), args=arguments(**args), train_dataset=found, eval_dataset=found, osdp=osdp,
            compute_metrics=count if job.metrics else None,
        )  # fmt: skip

    return make


def dpo(job: Job, args: dict[str, Any], osdp: OSDPConfig) -> Any:
    trl = pytest.importorskip("trl")
    args = {**SETTINGS, "max_length": 128, "per_device_eval_batch_size": 4, **args}
    reference, data = None if job.precomputes else llama(256, 1, 24, 512), preferences()
    if job.precomputes:  # ranks share what the first one computes
        data = on_disk(Path(args["output_dir"]) / f"data-{args['max_steps']}", data)
    return with_osdp(trl.DPOTrainer)(
        model=job.model(), ref_model=reference, args=trl.DPOConfig(**args), train_dataset=data,
        eval_dataset=data, processing_class=_tokenizer(), osdp=osdp,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    make: Callable[..., Any]
    model: Callable[[], torch.nn.Module]
    ranks: int = 1
    metrics: bool = False
    values: bool = False
    """Whether large tensors have values, which the loop reads."""
    precomputes: bool = False
    """The trained model computes what a reference would, before the plan."""
    shards_beside: bool = False
    """The limit is so low that the model beside is sharded."""
    osdp: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


GENERATES = {
    "kind": with_osdp(transformers.Seq2SeqTrainer), "arguments": transformers.Seq2SeqTrainingArguments,
    "vocabulary": 32128, "decoder": 32,
}  # fmt: skip
FSDP, DDP = {"strategy": "fsdp", "host_offload": False}, {"strategy": "ddp"}
JOBS = {
    "causal": Job(make=of_rows(vocabulary=50257), model=causal),
    "causal, logits kept, sharded": Job(
        make=of_rows(vocabulary=50257), model=causal, metrics=True, ranks=2, osdp=FSDP
    ),
    "causal, bf16, sharded": Job(
        make=of_rows(vocabulary=50257), model=causal, ranks=2, osdp=FSDP, arguments={"bf16": True}
    ),
    "causal, accumulation, replicas": Job(
        make=of_rows(vocabulary=50257), model=causal, values=True, ranks=2, osdp=DDP | {"micro_batch_size": 2}
    ),
    "classes": Job(make=of_rows(vocabulary=2000, classes=3), model=classifier, metrics=True),
    "classes, replicas": Job(
        make=of_rows(vocabulary=2000, classes=3), model=classifier, metrics=True, ranks=2, osdp=DDP
    ),
    "generates": Job(
        make=of_rows(**GENERATES), model=seq2seq, metrics=True, values=True,
        arguments={"predict_with_generate": True},
    ),
    "generates with beams, sharded": Job(
        make=of_rows(**GENERATES), model=seq2seq, metrics=True, values=True, ranks=2, osdp=FSDP,
        arguments={"predict_with_generate": True, "generation_num_beams": 2, "generation_max_length": 96},
    ),
    "DPO": Job(make=dpo, model=student, values=True, ranks=2, osdp=FSDP),
    "DPO, precomputed": Job(
        make=dpo, model=student, values=True, ranks=2, osdp=FSDP, precomputes=True,
        arguments={"precompute_ref_log_probs": True},
    ),
    "DPO, reference sharded": Job(make=dpo, model=student, values=True, ranks=2, osdp=FSDP, shards_beside=True),
    "GKD, teacher sharded": Job(make=gkd, model=student, values=True, ranks=2, osdp=FSDP, shards_beside=True),
    "pictures": Job(make=pictures, model=llava, values=True),
}  # fmt: skip


def run(name: str, folder: str, limit: int, resumes: bool) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Train two steps, evaluate and save after each, or resume and train a third; return for each part the estimated
    and the measured peak, the room for tensors, and a limit under which a model beside has to be sharded."""
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

    args = {
        "output_dir": folder, "max_steps": 3 if resumes else 2, "eval_strategy": "steps", "eval_steps": 1,
        "report_to": "none", "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "disable_tqdm": True,
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
    less = found.hardware.limit_for(found.plan.peak_bytes - other // 4)
    return {part: (parts[part], nbytes) for part, nbytes in measured.items()}, room, less


LIMIT = 2**32
DAILY = ("causal, logits kept, sharded", "generates", "DPO, reference sharded")


@pytest.mark.parametrize("name", slow_but(JOBS, daily=DAILY))
def test_parts_of_a_job_take_what_the_estimates_say(tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    how: dict[str, Any] = {"env": {} if job.values else MEMORY_ALONE, "joins": False, "memory": "4G"}
    limit, found = LIMIT, []
    if job.shards_beside:
        limit = on_devices(run, job.ranks, name, str(tmp_path / "whole"), limit, False, **how)[0][2]
    for resumes in (False, True):
        found += on_devices(run, job.ranks, name, str(tmp_path), limit, resumes, **how)
    for parts, room, _ in found:
        for part, (estimated, measured) in parts.items():
            print(f"{name}: {part}: {estimated / 2**20:.1f} MiB estimated, {measured / 2**20:.1f} measured")
            assert measured <= room
            assert -0.01 <= estimated / measured - 1, part
        assert {"training step", "evaluation", "save of whole tensors"} <= parts.keys()


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
