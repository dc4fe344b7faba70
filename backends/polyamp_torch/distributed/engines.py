"""Which of torch's engines holds a model, over which processes, and what it does in a step (S9).

polyamp builds no engine. It recognises `DistributedDataParallel`, `fully_shard` (also over a mesh of two dimensions)
and tensor parallelism by what they leave in the model, and refuses what would let the replicas part. What each is told
during a step is in `replicated` and `fully_sharded`. Called by `step.replicas`, where a model looks as if one of them
held it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import flat_group_of, meshes_of
from polyamp_torch.distributed.engine import Engine
from polyamp_torch.distributed.fully_sharded import FullySharded
from polyamp_torch.distributed.replicated import Replicated
from polyamp_torch.precision.parameter_listing import tree_parameters

_CURE = "Make one mesh of all of them with init_device_mesh; its dimensions are for fully_shard and parallelize_module."


def sharded(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on, outermost first."""
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def found(model: nn.Module) -> Engine | None:
    """The engine around or inside a model; None where there is none.

    Raises:
        UnsupportedError: one that polyamp does not train with, or two of them.
    """
    parts = list(model.modules())
    if any(isinstance(part, FullyShardedDataParallel) for part in parts):
        raise UnsupportedError(
            "model: FullyShardedDataParallel keeps parameters in flat pieces that have no paths. Use "
            "torch.distributed.fsdp.fully_shard(model) in its place."
        )
    replicated = [part for part in parts if isinstance(part, DistributedDataParallel)]
    spread = [p for _, p in tree_parameters(model) if isinstance(p, DTensor)]
    if replicated:
        if spread:
            raise UnsupportedError(
                "model: DistributedDataParallel around parameters that are sharded. Use fully_shard over a mesh of two "
                "dimensions, or fully_shard and parallelize_module, in its place."
            )
        return Replicated(replicated)
    parts = sharded(model)
    meshes = [mesh for part in parts for mesh in meshes_of(part)]
    if not spread and not meshes:
        return None
    group = _group_of([*meshes, *(p.device_mesh for p in spread)])
    if not meshes:
        return Engine("tensor_parallel", group, None, 1, 0)
    of_data = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    parallel = any(not of_data.issuperset(p.device_mesh.mesh.flatten().tolist()) for p in spread)
    ranks = sorted(of_data)
    name = "fsdp2+tensor_parallel" if parallel else "fsdp2"
    return FullySharded(name, group, _group_of(meshes), len(ranks), ranks.index(dist.get_rank()), parts)


def _group_of(meshes: Iterable[Any]) -> Any:
    """One process group of all the processes of some meshes.

    Raises:
        UnsupportedError: no mesh, and not the default group either, holds exactly these.
    """
    distinct = list({id(mesh): mesh for mesh in meshes}.values())
    ranks = {rank for mesh in distinct for rank in mesh.mesh.flatten().tolist()}
    for mesh in distinct:
        if mesh.ndim == 1 and mesh.size() == len(ranks):
            return mesh.get_group()
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for mesh in distinct:
        if mesh.size() == len(ranks):
            return flat_group_of(mesh)
    raise UnsupportedError(
        f"model: its parameters are spread over {len(ranks)} processes, and none of their meshes holds all of these. "
        + _CURE
    )
