"""Device meshes of a plan, and the device that collectives of the whole world run on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"


class Meshes:
    """The meshes of one process group, one for each shard size, each made when first asked for.

    Making a mesh forms process groups, which is collective: every rank must ask for the same sizes in the same order
    (`prepare` does). Shard groups are neighbouring ranks, so that they stay inside a node where the size allows it.
    """

    def __init__(self, device_type: str) -> None:
        """
        Args:
            device_type: `"cuda"` or `"cpu"`, as `init_device_mesh` takes it.

        Raises:
            ValueError: there is no process group.
        """
        if not dist.is_initialized():
            raise ValueError("Meshes need a process group; start the program with torchrun, or call torch.distributed.init_process_group.")
        self.device_type = device_type
        self.world_size = dist.get_world_size()
        self._by_shard_size: dict[int, DeviceMesh] = {}

    def mesh(self, shard_size: int) -> DeviceMesh:
        """The mesh whose shard axis has `shard_size` ranks.

        Returns:
            A 1-D mesh (W,) where the whole world shards; else the 2-D mesh (W / shard_size, shard_size) of HSDP, which
            for `shard_size=1` replicates.

        Raises:
            ValueError: `shard_size` does not divide the world size.
        """
        if shard_size < 1 or self.world_size % shard_size:
            raise ValueError(f"shard_size={shard_size} does not divide the world size {self.world_size}; use {self._divisors()}.")
        if shard_size not in self._by_shard_size:
            whole = shard_size == self.world_size
            shape = (self.world_size,) if whole else (self.world_size // shard_size, shard_size)
            names = (SHARD_AXIS,) if whole else (REPLICATE_AXIS, SHARD_AXIS)
            self._by_shard_size[shard_size] = self.form(shape, names)
        return self._by_shard_size[shard_size]

    def form(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """Make one mesh. Collective."""
        return init_device_mesh(self.device_type, shape, mesh_dim_names=names)

    def prepare(self, shard_sizes: Iterable[int]) -> None:
        """Make the meshes of these sizes, in ascending order whatever the order given. Collective."""
        for shard_size in sorted(set(shard_sizes)):
            self.mesh(shard_size)

    def keep(self, shard_sizes: Iterable[int]) -> None:
        """Give back the process groups of all other sizes: each holds memory on the device. Collective."""
        for shard_size in sorted(set(self._by_shard_size) - set(shard_sizes)):
            destroy_mesh(self._by_shard_size.pop(shard_size))

    def _divisors(self) -> str:
        return ", ".join(str(size) for size in range(1, self.world_size + 1) if self.world_size % size == 0)


def destroy_mesh(mesh: DeviceMesh) -> None:
    """Give a mesh's process groups back, but for the world's own. Collective."""
    for group in mesh.get_all_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def world_size() -> int:
    """Ranks of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def collective_device() -> torch.device:
    """The device on which tensors must lie for a collective of the default process group."""
    if dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
