"""Slices that lie on several ranks, shown to `torch.distributed.checkpoint` as chunks of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..modeling.split.names import SlicedName


class SlicedTensor(torch.Tensor):
    """A tensor without data of its own, whose slices (`parts`, at their places in `whole`) are DTensors or plain tensors.

    For saving and loading only: saving writes each rank's shards of every slice, loading reads into them, without communication. It
    answers the protocol by which DTensor itself does so (`__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__`).
    """

    parts: tuple[torch.Tensor, ...]
    whole: SlicedName

    @staticmethod
    def __new__(cls: type[SlicedTensor], parts: Sequence[torch.Tensor], whole: SlicedName) -> SlicedTensor:
        first = parts[0]
        tensor: SlicedTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(whole.shape), dtype=first.dtype, device=first.device)
        tensor.parts, tensor.whole = tuple(part.detach() for part in parts), whole
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SlicedTensor(shape={tuple(self.shape)}, slices={len(self.parts)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a tensor in slices, which can only be saved and loaded; take its parts.")

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=self.size()),
            )
            for chunk, local in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(local for chunk, local in self._chunks() if chunk.offsets == index.offset)

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Yield what this rank holds, with its place in the whole."""
        for part, start in zip(self.parts, self.whole.starts, strict=True):
            chunks, local = [ChunkStorageMetadata(offsets=torch.Size([0] * part.ndim), sizes=part.size())], part
            if isinstance(part, DTensor):
                chunks, local = part.__create_chunk_list__(), part.to_local()
            for chunk in chunks if local.numel() else ():
                offsets = list(chunk.offsets)
                offsets[self.whole.dim] += start
                yield ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.sizes), local
