"""Which of torch's engines holds a model, and over which processes (S9).

polyamp builds no engine. It recognises `DistributedDataParallel`, `fully_shard` (also over a mesh of two dimensions)
and tensor parallelism by what they leave in the model, and refuses what would let the replicas part. Called by
`step.replicas`, where a model looks as if one of them held it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import flat_group_of, meshes_of


@dataclass(frozen=True)
class Engine:
    """What was found.

    Attributes:
        name: "ddp", "fsdp2", "tensor_parallel", or "fsdp2+tensor_parallel".
        group: all the processes that hold the model, whole or in parts.
        data: those of them whose batches differ; None where they all have the same.
        count: how many replicas there are.
        rank: which of them this process belongs to.
        modules: what of the model the engine itself put there, outermost first.
    """

    name: str
    group: Any
    data: Any
    count: int
    rank: int
    modules: tuple[Any, ...]


def found(model: nn.Module) -> Engine | None:
    """The engine around or inside a model; None where there is none.

    Raises:
        UnsupportedError: one that polyamp does not train with, or two of them.
    """
    replicated = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    sharded = [part for part in model.modules() if meshes_of(part)]
    spread = [p for p in model.parameters() if isinstance(p, DTensor)]
    if replicated:
        if spread:
            raise UnsupportedError(
                "model: DistributedDataParallel around parameters that are sharded. Use fully_shard over a mesh of two "
                "dimensions, or fully_shard and parallelize_module, in its place."
            )
        return _of_ddp(replicated)
    if not spread and not sharded:
        return None
    meshes = [mesh for part in sharded for mesh in meshes_of(part)]
    tensor_parallel = _is_tensor_parallel(spread, meshes)
    group = _group_of([*meshes, *(p.device_mesh for p in spread)])
    if not meshes:
        return Engine("tensor_parallel", group, None, 1, 0, ())
    name = "fsdp2+tensor_parallel" if tensor_parallel else "fsdp2"
    ranks = meshes[0].mesh.flatten().tolist()
    return Engine(name, group, _group_of(meshes), len(ranks), ranks.index(dist.get_rank()), tuple(sharded))


def _of_ddp(modules: list[DistributedDataParallel]) -> Engine:
    group = modules[0].process_group
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    return Engine("ddp", group, group, count, rank, tuple(modules))


def _is_tensor_parallel(spread: Iterable[DTensor], meshes: list[Any]) -> bool:
    """Whether parameters are sharded over other processes than those that `fully_shard` was given."""
    of_data = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    return any(not of_data.issuperset(p.device_mesh.mesh.flatten().tolist()) for p in spread)


def _group_of(meshes: Iterable[Any]) -> Any:
    """One process group of all the processes of some meshes.

    Raises:
        UnsupportedError: no mesh, and not the default group either, holds exactly these.
    """
    distinct = list({id(mesh): mesh for mesh in meshes}.values())
    ranks = {rank for mesh in distinct for rank in mesh.mesh.flatten().tolist()}
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for mesh in distinct:
        if mesh.size() == len(ranks):
            return mesh.get_group() if mesh.ndim == 1 else flat_group_of(mesh)
    raise UnsupportedError(
        f"model: its parameters are spread over {len(ranks)} processes, and none of their meshes holds all of these. "
        "Make one mesh of all of them with init_device_mesh; its dimensions are for fully_shard and parallelize_module."
    )
