"""Fingerprint of a torch rank for `init`: engine, recipe, parameters, buffers, and checksums of replicated values.

`polyamp.rules.rank_comparison` compares the fingerprints (S32).
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
from polyamp_torch.precision.torch_only.named_parameters import tree_parameters
from polyamp_torch.precision.torch_only.unwrapped_paths import path_function

_CHECKSUM_CHUNK: Final = 1 << 20
"""Number of elements in each partial sum."""
_INTEGER_DTYPES: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DDP_OPTIONS: Final = (
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_bytes_cap",
)
"""Options of DistributedDataParallel that decide which collectives a rank takes part in."""


def rank_fingerprint(model: nn.Module, engine: str, modules: Iterable[nn.Module]) -> tuple[dict[str, list[str]], str]:
    """Return a model's sections for `polyamp.rules.rank_comparison.compare_ranks`, and where its local shards are.

    Args:
        model: the user's module.
        engine: the engine's name.
        modules: the engine's own modules.
    """
    replicated = [module for module in modules if isinstance(module, DistributedDataParallel)]
    how = [f"{name}={getattr(ddp, name, None)}" for ddp in replicated[:1] for name in _DDP_OPTIONS]
    own = _rank_local_tensors(replicated)
    path = path_function(model)
    parameters = {path(name): p for name, p in tree_parameters(model)}
    buffers = {path(name): buffer for name, buffer in nn.Module.named_buffers(model)}
    whole, shards, part = _split_by_sharding({**parameters, **buffers}, own)
    return {
        "engines": [engine, *how],
        "parameters": [
            f"{_tensor_line(n, p)}{'' if p.requires_grad else ', not trained'}" for n, p in parameters.items()
        ],
        "buffers": [_tensor_line(name, buffer) for name, buffer in buffers.items()],
        "values": checksums(whole),
        "shards": checksums(shards),
    }, part


def checksums(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return a line for each tensor: its name and a checksum of its bits, equal on all ranks with one kind of device.

    >>> checksums({"w": torch.tensor([1.0, 2.0])}) == checksums({"w": torch.tensor([2.0, 1.0])})
    False
    """
    numbers = {name: _host_checksum(tensor) for name, tensor in tensors.items() if tensor.device.type == "cpu"}
    found = {name: _device_checksum(tensor) for name, tensor in tensors.items() if name not in numbers}
    for device in dict.fromkeys(value.device for value in found.values()):
        here = {name: value for name, value in found.items() if value.device == device}
        numbers |= dict(zip(here, torch.stack(list(here.values())).tolist(), strict=True))  # waits once per device
    return [f"{name}: values with the checksum {numbers[name] & (2**64 - 1):08x}" for name in tensors]


def _bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flattened elements as integers of the same width."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return flat.view(_INTEGER_DTYPES[flat.element_size()])


def _host_checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a CPU tensor; takes about 1 s per gigabyte."""
    values: Any = _bit_view(tensor).numpy()
    return zlib.crc32(values)


@torch.no_grad()
def _device_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum computed on the device; only this scalar is copied to the host."""
    bits = _bit_view(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(1, min(bits.numel(), _CHECKSUM_CHUNK) + 1, device=tensor.device) * 0x9E3779B1
    for start in range(0, bits.numel(), _CHECKSUM_CHUNK):
        piece = bits[start : start + _CHECKSUM_CHUNK]
        total = total * 1_000_003 + (piece * weights[: piece.numel()]).sum()
    return total


def _split_by_sharding(
    tensors: Mapping[str, Any], own: set[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return the replicated tensors, the shards that several ranks share, and the location of the local shards."""
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


def _rank_local_tensors(modules: Iterable[DistributedDataParallel]) -> set[int]:
    """Return the ids of the tensors that DistributedDataParallel does not synchronise."""
    found = set[int]()
    for ddp in modules:
        named: Iterator[tuple[str, torch.Tensor]]
        for named in (ddp.module.named_parameters(), ddp.module.named_buffers()):
            found.update(id(tensor) for name, tensor in named if name in ddp.parameters_to_ignore)
        if not ddp.broadcast_buffers:
            found.update(id(tensor) for tensor in ddp.module.buffers())
    return found


def _tensor_line(name: str, tensor: Any) -> str:
    spread = f", {' '.join(map(str, tensor.placements))}" if isinstance(tensor, DTensor) else ""
    return f"{name}: {dtype_name(tensor.dtype)} {list(tensor.shape)}{spread}"
