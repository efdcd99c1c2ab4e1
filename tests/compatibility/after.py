"""What a row does with a trainer after training, on every process: `after(side, trainer)` returns figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist

from .data import masked, sentences, tokens
from .models import gpt2, llama
from .side import Side, mean_over_ranks, read_back, sums


def _inner(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def _pretrained(side: Side, model: Any, like: Any) -> dict[str, float]:
    model.save_pretrained(side.folder / "out", is_main_process=dist.get_rank() == 0)
    return read_back(side.folder / "out", like)


def evaluated(side: Side, trainer: Any) -> dict[str, float]:
    return {"eval_loss": trainer.evaluate(tokens(8))["eval_loss"]}


def evaluated_masked(side: Side, trainer: Any) -> dict[str, float]:
    return {"eval": mean_over_ranks(trainer.evaluate(masked(7))["eval_loss"])}


def predicted(side: Side, trainer: Any) -> dict[str, float]:
    return {"sum": float(np.abs(trainer.predict(tokens(8)).predictions).sum())}


def predicted_tokens(side: Side, trainer: Any) -> dict[str, float]:
    return {"sum": float(trainer.predict(tokens(4)).predictions.sum())}


def generated(side: Side, trainer: Any) -> dict[str, float]:
    ids = _inner(trainer).generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {f"token {place}": float(token) for place, token in enumerate(ids[0])}


def best(side: Side, trainer: Any) -> dict[str, float]:
    return {"loss of the best": trainer.evaluate()["eval_loss"], "best": trainer.state.best_metric}


def reloaded(side: Side, trainer: Any) -> dict[str, float]:
    return read_back(side.folder / "checkpoint-4", gpt2())


def model_saved(side: Side, trainer: Any) -> dict[str, float]:
    trainer.save_model(str(side.folder / "final"))
    return read_back(side.folder / "final", gpt2())


def pretrained(side: Side, trainer: Any) -> dict[str, float]:
    return _pretrained(side, _inner(trainer), llama())


def part_saved(side: Side, trainer: Any) -> dict[str, float]:
    part = _inner(trainer).model
    return _pretrained(side, part, part)


def merged(side: Side, trainer: Any) -> dict[str, float]:
    return _pretrained(side, _inner(trainer).merge_and_unload(), llama())


def state_saved(side: Side, trainer: Any) -> dict[str, float]:
    path, state = side.folder / "state.pt", trainer.accelerator.get_state_dict(trainer.model)
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    return sums(torch.load(path, weights_only=True))


def copies_saved(side: Side, trainer: Any) -> dict[str, float]:
    path = side.folder / f"copies{dist.get_rank()}.pt"
    torch.save({name: value.detach().cpu() for name, value in _inner(trainer).state_dict().items()}, path)
    return sums(torch.load(path, weights_only=True))


def module_saved(side: Side, trainer: Any) -> dict[str, float]:
    path = side.folder / f"module{dist.get_rank()}.pt"
    torch.save(_inner(trainer), path)
    return sums(torch.load(path, weights_only=False).state_dict())


def called(side: Side, trainer: Any) -> dict[str, float]:
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[5, 6, 7]])).logits
    return {"sum": float(logits.abs().sum())}


def weight_read(side: Side, trainer: Any) -> dict[str, float]:
    return {"sum": float(_inner(trainer).get_input_embeddings().weight.detach().abs().sum())}


def adapter_saved(side: Side, trainer: Any) -> dict[str, float]:
    trainer.save_model(str(side.folder / "adapter"))
    dist.barrier()
    again = peft.PeftModel.from_pretrained(llama(), side.folder / "adapter").state_dict()
    return sums({name: value for name, value in again.items() if "lora" in name})


def encoder_saved(side: Side, trainer: Any) -> dict[str, float]:
    from sentence_transformers import SentenceTransformer

    trainer.save_model(str(side.folder / "final"))
    dist.barrier()
    again = SentenceTransformer(str(side.folder / "final"), device="cpu")
    return {"sum": float(abs(again.encode(sentences(4))).sum())}


def evaluated_by_task(side: Side, trainer: Any) -> dict[str, float]:
    data = trainer.train_dataset[:16]
    evaluated, predicted = trainer.evaluate(data), trainer.predict(data).metrics
    return {"eval_loss": evaluated["eval_loss"], "predicted_loss": predicted["test_loss"]}
