"""A whole parameter, or state of it, for checkpoints, that is held in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .names import WholeParameter


class WholeTensor(torch.Tensor):
    """A wrapper without data of its own, whose parts (at their offsets in `whole`) are DTensors or plain
    tensors.

    It can only be saved and loaded, by DTensor's protocol (`__create_write_items__`, `__create_chunk_list__`,
    `__get_tensor_shard__`), without communication.
    """

    parts: tuple[torch.Tensor, ...]
    whole: WholeParameter

    @staticmethod
    def __new__(cls: type[WholeTensor], parts: Sequence[torch.Tensor], whole: WholeParameter) -> WholeTensor:
        first = parts[0]
        tensor: WholeTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(whole.shape), dtype=first.dtype, device=first.device
        )
        tensor.parts, tensor.whole = tuple(part.detach() for part in parts), whole
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a {cls.__name__}, which can only be saved and loaded; use its parts.")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
        """Yield this rank's chunks of the whole tensor, each with the part that holds it."""
        for part, start in zip(self.parts, self.whole.starts, strict=True):
            if isinstance(part, DTensor):
                chunks = part.__create_chunk_list__() if _local(part).numel() else []
            else:
                chunks = [ChunkStorageMetadata(offsets=torch.Size([0] * part.ndim), sizes=part.size())]
            for chunk in chunks:
                offsets = list(chunk.offsets)
                offsets[self.whole.dim] += start
                yield ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=chunk.sizes), part

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(_local(part) for chunk, part in self._chunks() if chunk.offsets == index.offset)


def _local(part: torch.Tensor) -> torch.Tensor:
    return part._local_tensor if isinstance(part, DTensor) else part
