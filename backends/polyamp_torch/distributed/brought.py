"""What a torch rank brings to `init`: its engine, recipe, parameters and buffers, and checksums of what must be alike.

Called by `step.replicas`; the comparison is `polyamp.rules.replicas`'s (S32).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from polyamp_torch.arrays import dtype_name
from polyamp_torch.precision.parameter_listing import tree_parameters
from polyamp_torch.precision.paths import path_of

_PIECE: Final = 1 << 20
"""Elements that are added up at a time."""
_BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OPTIONS: Final = (
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_bytes_cap",
)
"""What of DistributedDataParallel decides which collectives a rank takes part in."""


def described(model: nn.Module, engine: str, modules: Iterable[nn.Module]) -> tuple[dict[str, list[str]], str]:
    """The sections of `polyamp.rules.replicas.compare` that a model tells, and which part of its shards lies here.

    Args:
        model: the user's module.
        engine: the engine's name.
        modules: the engine's own modules.
    """
    replicated = [module for module in modules if isinstance(module, DistributedDataParallel)]
    how = [f"{name}={getattr(ddp, name, None)}" for ddp in replicated[:1] for name in _OPTIONS]
    own = _each_ranks_own(replicated)
    path = path_of(model)
    parameters = {path(name): p for name, p in tree_parameters(model)}
    buffers = {path(name): buffer for name, buffer in nn.Module.named_buffers(model)}
    whole, shards, part = _sorted({**parameters, **buffers}, own)
    return {
        "engines": [engine, *how],
        "parameters": [f"{_line(n, p)}{'' if p.requires_grad else ', not trained'}" for n, p in parameters.items()],
        "buffers": [_line(name, buffer) for name, buffer in buffers.items()],
        "values": sums(whole),
        "shards": sums(shards),
    }, part


def sums(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each tensor: its name and a checksum of its bits, the same on all ranks with one kind of device.

    >>> sums({"w": torch.tensor([1.0, 2.0])}) == sums({"w": torch.tensor([2.0, 1.0])})
    False
    """
    numbers = {name: _on_host(tensor) for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    found = {name: _on_device(tensor) for name, tensor in tensors.items() if name not in numbers}
    for device in dict.fromkeys(value.device for value in found.values()):
        here = {name: value for name, value in found.items() if value.device == device}
        numbers |= dict(zip(here, torch.stack(list(here.values())).tolist(), strict=True))  # waits once a device
    return [f"{name}: values with the checksum {numbers[name] & (2**64 - 1):08x}" for name in tensors]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements end to end, as integers of their width."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_BITS[flat.element_size()])


def _on_host(tensor: torch.Tensor) -> int:
    """About 1 s for a gigabyte."""
    values: Any = _bits(tensor).numpy()
    return zlib.crc32(values)


@torch.no_grad()
def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Nothing is brought to the host but one number."""
    bits = _bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(1, min(bits.numel(), _PIECE) + 1, device=tensor.device) * 0x9E3779B1
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE]
        total = total * 1_000_003 + (piece * weights[: piece.numel()]).sum()
    return total


def _sorted(tensors: Mapping[str, Any], own: set[int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """What every rank has whole, what several ranks have the same shard of, and which shards lie here."""
    whole, shards, places = {}, {}, dict[str, None]()
    for name, tensor in tensors.items():
        if id(tensor) in own or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            continue
        if not isinstance(tensor, DTensor):
            whole[name] = tensor
            continue
        mesh, kinds = tensor.device_mesh, tensor.placements
        if all(kind.is_replicate() for kind in kinds):
            whole[name] = tensor.to_local()
        elif any(kind.is_replicate() and size > 1 for kind, size in zip(kinds, mesh.shape, strict=True)):
            shards[name] = tensor.to_local()
        coordinate = mesh.get_coordinate() or ()
        split = [at for at, kind in zip(coordinate, kinds, strict=True) if not kind.is_replicate()]
        places[f"{tuple(mesh.shape)} {kinds} {split}"] = None
    return whole, shards, "; ".join(sorted(places))


def _each_ranks_own(modules: Iterable[DistributedDataParallel]) -> set[int]:
    """What DistributedDataParallel was told to leave to each rank."""
    found = set[int]()
    for ddp in modules:
        named: Iterator[tuple[str, torch.Tensor]]
        for named in (ddp.module.named_parameters(), ddp.module.named_buffers()):
            found.update(id(tensor) for name, tensor in named if name in ddp.parameters_to_ignore)
        if not ddp.broadcast_buffers:
            found.update(id(tensor) for tensor in ddp.module.buffers())
    return found


def _line(name: str, tensor: Any) -> str:
    spread = f", {' '.join(map(str, tensor.placements))}" if isinstance(tensor, DTensor) else ""
    return f"{name}: {dtype_name(tensor.dtype)} {list(tensor.shape)}{spread}"
