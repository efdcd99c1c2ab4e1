"""Put operators in slices into a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ...errors import OSDPError
from ...planner.split import OperatorSplit
from .modules import SplitEmbedding, SplitLinear, SplitOperator, VocabularySlice, is_conv1d
from .names import canonical_name, keep_names

_SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping", "output_multiplier", "lm_head_multiplier")
"""Names that transformers' models (Cohere, Granite, Gemma 2 and later) give a factor or cap between logits and loss. Other such changes
are found out when the model runs."""


class SplitHead(SplitLinear):
    """A vocabulary projection in slices, which also computes the loss of training, so that whole logits never exist there.

    In training with labels, the model's forward gets a placeholder without elements for the logits and hands it to `loss`;
    `outputs.logits` is None then. Without labels, or in evaluation, logits are whole as ever.
    """

    slice_class = VocabularySlice
    _tied: tuple[SplitEmbedding, ...] = ()
    """In a tuple, which registers nothing."""
    _has_labels = False
    _hidden: torch.Tensor | None = None
    _placeholder: torch.Tensor | None = None

    def tie(self, source: nn.Embedding) -> SplitEmbedding:
        """Return the embedding in this head's slices. It alone registers them, so that each parameter has one name and one owner."""
        embedding = SplitEmbedding(source, self.slices, self.sizes)
        del self.slices
        self._tied = (embedding,)
        return embedding

    def untie(self) -> dict[nn.Module, nn.Module]:
        """Take slices of its own, of the same memory, so that a trace tells gradients of projection and lookup apart; return old by new."""
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

    def attach(self, model: nn.Module) -> None:
        """Take over the loss of the model whose head this is; it has been checked."""
        self._labels_at = list(inspect.signature(type(model).forward).parameters).index("labels") - 1  # without self
        self._whole_loss = cast("Callable[..., torch.Tensor]", model.loss_function)
        model.loss_function = self.loss  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[..., in_features]` → logits, or in training with labels `[..., 0]` in their place."""
        if not self._has_labels:
            return super().forward(hidden)
        self._hidden, self._placeholder = hidden, hidden.new_empty((*hidden.shape[:-1], 0))
        return self._placeholder

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the loss in place of `transformers.loss.loss_utils.ForCausalLMLoss`, with its arguments.

        It is the mean cross-entropy of token n + 1 at n, or its sum over `num_items_in_batch`; of float64 logits in float64.
        """
        if not self._has_labels:
            return self._whole_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        hidden = self._hidden
        if logits is not self._placeholder or hidden is None:
            raise OSDPError("The model changes its logits between head and loss, which slices cannot follow; leave the head whole.")
        if vocab_size != self.out_features:
            raise OSDPError(f"The loss is over {vocab_size} tokens, but the head has {self.out_features}; leave the head whole.")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(hidden.device)
        ignored = targets == ignore_index
        losses = self._token_losses(hidden.reshape(-1, self.in_features), targets.masked_fill(ignored, 0))
        total = losses.masked_fill(ignored, 0.0).sum()
        if num_items_in_batch is None:
            return total / (~ignored).sum()
        return total / (num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)

    def _token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each token, `[N]`: log Σ_j exp(lse_j) less the target's logit."""
        sums: list[torch.Tensor] = []
        chosen: torch.Tensor | None = None
        for part, local, inside in self.local(targets):
            lse, picked = part(hidden, local)
            sums.append(lse)
            chosen = picked if chosen is None else torch.where(inside, picked, chosen)
        return torch.stack(sums).logsumexp(dim=0) - cast(torch.Tensor, chosen)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = args[self._labels_at] if len(args) > self._labels_at else kwargs.get("labels")
        self._has_labels = labels is not None and model.training

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> object:  # noqa: ANN401
        placeholder, self._has_labels, self._hidden, self._placeholder = self._placeholder, False, None, None
        if placeholder is None or output is None:
            return None
        if isinstance(output, tuple):
            return tuple(None if value is placeholder else value for value in output)
        return replace(output, logits=None)  # setting it would leave it under its key


def _check_model(model: nn.Module, fqn: str) -> None:
    """Raise OSDPError for a language model whose loss a head in slices cannot compute."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    loss = getattr(model, "loss_function", None)
    if code is None or "loss_function" not in code.co_names or "labels" not in code.co_varnames:
        reason = "its forward does not compute the loss by loss_function(logits, labels)"
    elif scale := next((name for name in _SCALES if name in code.co_names), None):
        reason = f"its forward puts {scale} between head and loss"
    elif loss is not ForCausalLMLoss:
        reason = f"its loss is {getattr(loss, '__name__', repr(loss))}, not transformers' ForCausalLMLoss"
    else:
        return
    raise OSDPError(f"{fqn!r} of {type(model).__name__} cannot be split: {reason}; leave the head whole.")


def split_operators(model: nn.Module, splits: Sequence[OperatorSplit]) -> None:
    """Replace operators by the same in slices, in place; before the model is sharded.

    An `nn.Linear` or a GPT-2 `Conv1D` becomes a `SplitLinear`; a causal language model's vocabulary projection becomes a
    `SplitHead`, together with the embedding that it is tied to. `state_dict` and `load_state_dict` of the model keep
    Hugging Face names and shapes as long as it is not sharded; `hf_osdp.sharding.state` does so after.

    Nothing is changed where a name is not in the model (ValueError), or an operator cannot be split (OSDPError).
    """
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    planned = [_check(model, modules, split) for split in splits]
    for split, (owner, embedding) in zip(splits, planned, strict=True):
        whole = modules[split.fqn]
        if owner is None:
            _replace(model, whole, SplitLinear(whole, split.slices))
            continue
        head = SplitHead(whole, split.slices)
        head.attach(owner)
        _replace(model, whole, head)
        if embedding is not None:
            _replace(model, embedding, head.tie(embedding))
            owner.tie_weights = _stay_tied  # type: ignore[assignment]
    if splits:
        keep_names(model)


def _stay_tied(*args: object, **kwargs: object) -> None:
    """Do nothing, in place of `tie_weights`: head and embedding hold the same slices, and nothing can untie them."""


def _check(model: nn.Module, modules: dict[str, nn.Module], split: OperatorSplit) -> tuple[nn.Module | None, nn.Embedding | None]:
    """Return the language model whose head it is, and the embedding that is tied to it, where there are such."""
    module = modules.get(split.fqn)
    if module is None:
        leaf = split.fqn.rpartition(".")[2]
        alike = next((name for name in modules if name.rpartition(".")[2] == leaf), None)
        remedy = f"did you mean {alike!r}?" if alike is not None else "take a name from named_modules()"
        raise ValueError(f"{split.fqn!r} is no module of {type(model).__name__}; {remedy}.")
    _check_class(split, module)
    features = cast(nn.Parameter, module.weight).shape[1 if is_conv1d(module) else 0]
    if split.slices > features:
        raise ValueError(f"{split.fqn!r} has {features} output features, but is to have {split.slices} slices; use {features} at most.")
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise OSDPError(f"{split.fqn!r} has hooks, which a split operator would not call; split before hooks are set, or leave it whole.")
    own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    sharing = {
        canonical_name(name): other
        for name, other in model.named_modules()
        if other is not module and any(id(parameter) in own for parameter in other._parameters.values())
    }
    owner = next((m for m in model.modules() if getattr(m, "get_output_embeddings", lambda: None)() is module), None)
    if owner is not None:
        _check_model(owner, split.fqn)
        return owner, _tied_embedding(split.fqn, module, sharing, owner)
    if sharing:
        raise OSDPError(
            f"{split.fqn!r} shares its weight or bias with {next(iter(sharing))!r}, which is not split with it; leave it whole."
        )
    return None, None


def _check_class(split: OperatorSplit, module: nn.Module) -> None:
    """Refuse all but exact classes: what a subclass does with its weight, slices would not."""
    if isinstance(module, SplitOperator):
        raise OSDPError(f"{split.fqn!r} is in {len(module.sizes)} slices already; split a model once, as it was loaded.")
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        raise OSDPError(f"{split.fqn!r} is sharded already; split operators before the model is sharded.")
    if isinstance(module, nn.Embedding):
        raise OSDPError(f"{split.fqn!r} is an embedding; one that is tied to a head is split with it: name the head.")
    if type(module) is not nn.Linear and not is_conv1d(module):
        raise OSDPError(f"{split.fqn!r} is a {type(module).__name__}, but only nn.Linear and GPT-2's Conv1D can be split; leave it whole.")


def _tied_embedding(fqn: str, head: nn.Module, sharing: dict[str, nn.Module], owner: nn.Module) -> nn.Embedding | None:
    if not sharing:
        return None
    embedding = next(iter(sharing.values()))
    if len(sharing) == 1 and head.bias is None and type(embedding) is nn.Embedding and embedding is owner.get_input_embeddings():
        if embedding.max_norm is None and not (embedding.scale_grad_by_freq or embedding.sparse):
            return embedding
    names = ", ".join(map(repr, sharing))
    raise OSDPError(
        f"{fqn!r} shares parameters with {names}; a head is split with one plain nn.Embedding, and has no bias then; leave it whole."
    )


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
