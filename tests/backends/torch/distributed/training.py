"""Models, engines and loops of the tests of several replicas; what runs in the ranks of `tests.ranks` imports it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import polyamp

Batch = tuple[torch.Tensor, ...]
ROWS = 8
"""Of an effective batch, over all replicas."""


def mlp() -> nn.Module:
    """Layers of 5, 7 and 3 rows, which no number of ranks divides."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def normalized() -> nn.Module:
    """With running statistics."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def batches(number: int) -> list[Batch]:
    """Effective batches of inputs, targets and a gain of 1 for every row."""
    torch.manual_seed(2)
    return [(torch.randn(ROWS, 6), torch.randn(ROWS, 3), torch.ones(ROWS, 1)) for _ in range(number)]


def mean_loss(model: Any, batch: Batch) -> torch.Tensor:
    """A mean over rows, in float32."""
    x, y, gain = batch
    return ((model(x).float() * gain - y) ** 2).mean()


def part(batch: Batch, rank: int, count: int) -> Batch:
    """A rank's rows."""
    rows = ROWS // count
    return tuple(leaf[rank * rows : (rank + 1) * rows] for leaf in batch)


def ddp(**options: Any) -> Callable[[nn.Module, int], nn.Module]:
    """Wraps a model for some processes."""
    return lambda model, world: DistributedDataParallel(model, **options)


def sharded(model: nn.Module, world: int) -> nn.Module:
    """One layer by itself, the rest with the root."""
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]  # a Sequential
    fully_shard(model, mesh=mesh)
    return model


def hybrid(model: nn.Module, world: int) -> nn.Module:
    """Replicated over two groups of processes, sharded within each."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]  # a Sequential
    fully_shard(model, mesh=mesh)
    return model


ENGINES: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "ddp": ddp(),
    "ddp static": ddp(static_graph=True),
    "ddp views": ddp(gradient_as_bucket_view=True),
    "ddp unused": ddp(find_unused_parameters=True),
    "fsdp2": sharded,
    "hsdp": hybrid,
}


def whole(tensor: Any) -> torch.Tensor:
    """A copy of a tensor, gathered where it is sharded."""
    found: torch.Tensor = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def arrays(state: Any) -> dict[str, torch.Tensor]:
    """All that has to be alike on every rank: parameters, optimizer state, running statistics, scale and counters."""
    found = {f"model/{name}": whole(p) for name, p in state.parameters.items()}
    for name, p in state.parameters.items():
        slots = state.optimizer.state[p]
        found |= {f"{slot}/{name}": whole(value) for slot, value in slots.items() if isinstance(value, torch.Tensor)}
    found |= {f"running/{name}": whole(b) for name, b in state.model.named_buffers()}
    found |= {f"scale/{name}": value.clone() for name, value in state.scale_state._asdict().items()}
    return found | {"step": state.step.clone()}


def digest(state: Any, *more: torch.Tensor) -> str:
    """A checksum of their bits."""
    sum_ = hashlib.sha256()
    for tensor in (*arrays(state).values(), *more):
        sum_.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()


def distance(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative distance (L2) of two lists of tensors."""
    pairs = zip(found, expected, strict=True)
    return max(float((one - other).norm() / other.norm().clamp(min=1e-12)) for one, other in pairs)


def collectives(function: Callable[[], Any]) -> Counter[str]:
    """What gloo is asked for by a call, by name."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        function()
    return Counter(event.name for event in watched.events() if event.name.startswith("gloo:"))


def trained(model: nn.Module, recipe: polyamp.Recipe, steps: Sequence[Any], loss_fn: Any = mean_loss) -> Any:
    """The state and the results of a training."""
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    results = []
    for batch in steps:
        state, result = step(state, batch)
        results.append(result)
    return state, results
