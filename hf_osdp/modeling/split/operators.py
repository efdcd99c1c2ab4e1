"""Replace operators of a model by operators in slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from ...errors import OSDPError
from ...planner.split import OperatorSplit
from ..parts import canonical_name
from .deferred_logits import Change, DefersLogits, arguments_of, defer_logits
from .modules import SplitEmbedding, SplitLinear, SplitOperator, VocabularySlice, is_conv1d
from .names import keep_names


class SplitHead(DefersLogits, SplitLinear):
    """Vocabulary projection in slices that also computes the training loss, so that whole logits exist only if they
    are read.
    """

    slice_class = VocabularySlice
    _tied: tuple[SplitEmbedding, ...] = ()
    """A tuple, so that the module is not registered as a child."""

    def __init__(self, source: nn.Module, slices: int) -> None:
        super().__init__(source, slices)
        self.chunks = slices

    def tie(self, source: nn.Embedding) -> SplitEmbedding:
        """Return the embedding that uses this head's slices.

        Only the embedding registers them, so that each parameter has one owner.
        """
        embedding = SplitEmbedding(source, self.slices, self.sizes)
        del self.slices
        self._tied = (embedding,)
        return embedding

    def untie(self) -> dict[nn.Module, nn.Module]:
        """Give the head own slices of the same memory, so that a trace separates gradients of projection and
        lookup; return old by new.
        """
        if not self._tied:
            return {}
        shared, own = self._tied[0].slices, nn.ModuleList()
        for part in cast("list[VocabularySlice]", shared):
            weight = nn.Parameter(part.weight.detach(), requires_grad=part.weight.requires_grad)
            own.append(VocabularySlice(weight, None, transposed=part.transposed))
        self._tied, self.slices = (), own.train(self.training)
        return dict(zip(own, shared, strict=True))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "slices" and self.__dict__.get("_tied"):
            return self._tied[0].slices
        return super().__getattr__(name)

    def sum_of(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        changes: tuple[Change, ...],
        ignore_index: int,
        label_smoothing: float,
    ) -> torch.Tensor | None:
        """Return the sum of the tokens' losses: log Σ_j exp(lse_j) over slices j minus the target's logit.

        Smoothing needs all logits.
        """
        if label_smoothing:
            return None
        if hidden.dtype is torch.float64:  # stays float64, although transformers' losses round to float32
            changes = tuple(change for change in changes if change != ("float",))
        ignored = targets == ignore_index
        sums: list[torch.Tensor] = []
        chosen: torch.Tensor | None = None
        for part, local, inside in self.local(targets.masked_fill(ignored, 0)):
            lse, picked = part(hidden, local, changes)
            sums.append(lse)
            chosen = picked if chosen is None else torch.where(inside, picked, chosen)
        losses = torch.stack(sums).logsumexp(dim=0) - cast(torch.Tensor, chosen)
        return losses.masked_fill(ignored, 0.0).sum()


def split_operators(model: nn.Module, splits: Sequence[OperatorSplit]) -> None:
    """Split operators into slices, in place, before the model is sharded.

    An `nn.Linear` or a GPT-2 `Conv1D` becomes a `SplitLinear`; a causal language model's vocabulary projection becomes
    a `SplitHead`, together with the embedding that it is tied to. `state_dict` and `load_state_dict` of the model keep
    Hugging Face names and shapes until it is sharded; then use `hf_osdp.sharding.state`.

    Raise ValueError if a name is not in the model, OSDPError if an operator cannot be split; the model is then
    unchanged.
    """
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    planned = [_check(model, modules, split) for split in splits]
    for split, (owner, embedding) in zip(splits, planned, strict=True):
        whole = modules[split.fqn]
        if owner is None:
            _replace(model, whole, SplitLinear(whole, split.slices))
            continue
        head = SplitHead(whole, split.slices)
        _replace(model, whole, head)
        if embedding is not None:
            _replace(model, embedding, head.tie(embedding))
            owner.tie_weights = _stay_tied  # type: ignore[assignment]
        defer_logits(owner, head)
    if splits:
        keep_names(model)


def _stay_tied(*args: object, **kwargs: object) -> None:
    """Do nothing, in place of `tie_weights`: head and embedding always share their slices."""


def _check(
    model: nn.Module, modules: dict[str, nn.Module], split: OperatorSplit
) -> tuple[nn.Module | None, nn.Embedding | None]:
    """Return the language model whose head the operator is, and the embedding that is tied to it, if there are
    such.
    """
    module = modules.get(split.fqn)
    if module is None:
        leaf = split.fqn.rpartition(".")[2]
        alike = next((name for name in modules if name.rpartition(".")[2] == leaf), None)
        remedy = f"did you mean {alike!r}?" if alike is not None else "take a name from named_modules()"
        raise ValueError(f"{split.fqn!r} is not a module of {type(model).__name__}; {remedy}.")
    _check_class(split, module)
    features = cast(nn.Parameter, module.weight).shape[1 if is_conv1d(module) else 0]
    if split.slices > features:
        raise ValueError(
            f"{split.fqn!r} has {features} output features, too few for {split.slices} slices; use at most {features}."
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise OSDPError(
            f"{split.fqn!r} has hooks, which a split operator would not call; split before setting hooks, or leave it"
            " whole."
        )
    own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    sharing = {
        canonical_name(name): other
        for name, other in model.named_modules()
        if other is not module and any(id(parameter) in own for parameter in other._parameters.values())
    }
    owner = next((m for m in model.modules() if getattr(m, "get_output_embeddings", lambda: None)() is module), None)
    if owner is not None:
        if "labels" not in arguments_of(owner):
            raise OSDPError(
                f"{split.fqn!r} of {type(owner).__name__} cannot be split: its forward takes no labels; leave the head"
                " whole."
            )
        return owner, _tied_embedding(split.fqn, module, sharing, owner)
    if sharing:
        raise OSDPError(
            f"{split.fqn!r} shares its weight or bias with {next(iter(sharing))!r}, which is not split with it; leave"
            " it whole."
        )
    return None, None


def _check_class(split: OperatorSplit, module: nn.Module) -> None:
    """Refuse subclasses, because slices would not run their code, and operators that are already split or sharded."""
    if isinstance(module, SplitOperator):
        raise OSDPError(
            f"{split.fqn!r} is already in {len(module.sizes)} slices; split a model only once, after loading."
        )
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        raise OSDPError(f"{split.fqn!r} is already sharded; split operators before the model is sharded.")
    if isinstance(module, nn.Embedding):
        raise OSDPError(
            f"{split.fqn!r} is an embedding, which is split only together with a tied head; name the head."
        )
    if type(module) is not nn.Linear and not is_conv1d(module):
        raise OSDPError(
            f"{split.fqn!r} is a {type(module).__name__}, but only nn.Linear and GPT-2's Conv1D can be split; leave it"
            " whole."
        )


def _tied_embedding(fqn: str, head: nn.Module, sharing: dict[str, nn.Module], owner: nn.Module) -> nn.Embedding | None:
    if not sharing:
        return None
    embedding = next(iter(sharing.values()))
    if (
        len(sharing) == 1
        and head.bias is None
        and type(embedding) is nn.Embedding
        and embedding is owner.get_input_embeddings()
    ):
        if embedding.max_norm is None and not (embedding.scale_grad_by_freq or embedding.sparse):
            return embedding
    names = ", ".join(map(repr, sharing))
    raise OSDPError(
        f"{fqn!r} shares parameters with {names}; a tied head can be split only without bias, with one plain"
        " nn.Embedding; leave it whole."
    )


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
