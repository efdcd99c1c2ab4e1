"""One rank of one contestant: train, and write the seconds of each step, or until the first step."""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers.trainer
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed import TCPStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, default_data_collator

TOKENS, SAMPLES, VOCABULARY = 128, 4, 2048
CONFIG = {
    "n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": TOKENS, "vocab_size": VOCABULARY, "bos_token_id": 0,
    "eos_token_id": 0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
RANKS = 2


class Turns(TrainerCallback):
    """Take a step when it is this contestant's turn, then signal the next one."""

    def __init__(self, store: TCPStore | None, index: int, contestants: int):
        self.seconds: list[float] = []
        self._store, self._turn, self._contestants = store, index, contestants
        self._began: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the previous step, which includes the Trainer's work around it, and wait for the next turn."""
        if self._store is None:
            self.seconds.append(time.time() - psutil.Process().create_time())
            return
        self._leave()
        self._store.wait([f"go/{self._turn}"], timedelta(minutes=10))
        self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the last step."""
        self._leave()

    def _leave(self) -> None:
        if self._store is None or self._began is None:
            return
        self.seconds.append(time.perf_counter() - self._began)
        if self._store.add(f"done/{self._turn}", 1) == RANKS:
            self._store.set(f"go/{self._turn + 1}", "")
        self._turn, self._began = self._turn + self._contestants, None


class TorchsCollectives(TrainerCallback):
    """Restore FSDP2's own collectives after the plan has been applied and checked."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Restore the collectives; the model is sharded at this point."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(DefaultAllGather())
                module.set_custom_reduce_scatter(DefaultReduceScatter())


class StockOnCpu(Accelerator):
    """Accelerate's `Accelerator`, made to use FSDP on several CPU processes; by default it replicates the model
    there.
    """

    def __init__(self, *args: Any, fsdp_plugin: Any = None, **kwargs: Any):
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def main() -> None:
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--name", "--output", "--folder"):
        parser.add_argument(name, required=True)
    for name in ("--steps", "--index", "--contestants", "--turns-port"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    store = TCPStore("127.0.0.1", options.turns_port, is_master=False) if options.turns_port else None
    turns = Turns(store, options.index, options.contestants)
    trainer = make_trainer(options.name, options.folder, options.steps, turns)
    trainer.train()
    Path(options.output).write_text("\n".join(map(str, turns.seconds)))
    torch.distributed.destroy_process_group()  # otherwise one of its threads may end the process by a signal


def make_trainer(name: str, folder: str, steps: int, turns: Turns) -> transformers.Trainer:
    """Return the contestant's Trainer."""
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (SAMPLES * RANKS * steps, TOKENS)).tolist()
    common = {
        "model": GPT2LMHeadModel(GPT2Config(**CONFIG)), "train_dataset": Dataset.from_dict({"input_ids": ids,
                                                                                            "labels": ids}),
        "data_collator": default_data_collator, "callbacks": [turns],
    }  # fmt: skip
    arguments = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": SAMPLES, "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 10,
    }  # fmt: skip
    if name == "stock":
        transformers.trainer.Accelerator = StockOnCpu
        plan = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["GPT2Block"],
                "reshard_after_forward": True,
            },
        }
        return transformers.Trainer(args=TrainingArguments(**arguments, **plan), **common)
    from hf_osdp import OSDPConfig, Trainer

    if name != "osdp":
        common["callbacks"].append(TorchsCollectives())
    return Trainer(
        args=TrainingArguments(**arguments), osdp=OSDPConfig(strategy="fsdp", micro_batch_size=SAMPLES), **common
    )


if __name__ == "__main__":
    main()
