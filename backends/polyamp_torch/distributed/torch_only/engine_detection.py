"""Detection of the parallel engine of a model, and of its processes (S9).

polyamp builds no engine. It recognises `DistributedDataParallel`, `fully_shard` (also over a mesh of two dimensions)
and tensor parallelism by the modules and tensors that they leave in the model. It raises where replicas would diverge.
The adapters that a step uses are in `ddp_engine` and `fully_shard_engine`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import fsdp_meshes, group_of_meshes
from polyamp_torch.distributed.torch_only.ddp_engine import DDPEngine
from polyamp_torch.distributed.torch_only.engine import ParallelEngine
from polyamp_torch.distributed.torch_only.fully_shard_engine import FullyShardEngine
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters

_MESH_HINT = (
    "Make one mesh of all of them with init_device_mesh; its dimensions are for fully_shard and parallelize_module."
)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on, outermost first."""
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def detect_engine(model: nn.Module) -> ParallelEngine:
    """Return the engine around or inside a model.

    Raises:
        UnsupportedError: polyamp does not support the engine, or the combination of two.
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
        return DDPEngine(replicated)
    parts = fsdp_modules(model)
    meshes = [mesh for part in parts for mesh in fsdp_meshes(part)]
    if not spread and not meshes:
        return ParallelEngine()
    group = _group_of_meshes([*meshes, *(p.device_mesh for p in spread)])
    if not meshes:
        return ParallelEngine("tensor_parallel", group, None, 1, 0)
    of_data = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    parallel = any(not of_data.issuperset(p.device_mesh.mesh.flatten().tolist()) for p in spread)
    ranks = sorted(of_data)
    name = "fsdp2+tensor_parallel" if parallel else "fsdp2"
    return FullyShardEngine(name, group, _group_of_meshes(meshes), len(ranks), ranks.index(dist.get_rank()), parts)


def _group_of_meshes(meshes: list[Any]) -> Any:
    """Return one process group of all the processes of the meshes.

    Raises:
        UnsupportedError: neither a mesh nor the default group consists of exactly these processes.
    """
    group = group_of_meshes(meshes)
    if group is None:
        ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
        raise UnsupportedError(
            f"model: its parameters are spread over {len(ranks)} processes, and none of their meshes holds all of "
            "these. " + _MESH_HINT
        )
    return group
