"""Complex parameters as kernels and formulas take them: as real tensors with an axis of two numbers (`view_as_real`).

torch's fused kernels and `sign`, which Lion takes, know no complex numbers; multiplied by a real scalar, an infinite
part of one makes the other NaN. torch's own optimizers take such views too. The parameters, slots and gradients that
users see stay complex, and so do paths, shapes and checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp_torch.distributed import shards

_REFUSED: Final = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)
"""Optimizers of torch's that refuse complex parameters, some of them in their first update."""


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor's numbers as a real tensor in the same memory, with a last axis of (real, imaginary); a real one
    as it is. Of an unresolved conjugate it is a copy."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def real_views(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`real_view` of each."""
    return list(map(real_view, tensors))


def resolve_conjugates(parameters: Iterable[torch.Tensor]) -> None:
    """After a backward pass: write out gradients that are marked as conjugates, which have no real view."""
    for p in parameters:
        if p.grad is not None and p.grad.is_conj():
            p.grad = p.grad.resolve_conj()


def check(path: str, optimizer: Any, engine: str | None) -> None:
    """Refuse what does not train complex parameters.

    Args:
        path: of a complex parameter.
        optimizer: the recipe's, a spec or native.
        engine: which holds the model; see `Replicas.engine`.

    Raises:
        UnsupportedError: names the parameter, and the optimizer or the engine.
    """
    if engine not in (None, "ddp"):
        raise UnsupportedError(
            f"parameter {path!r} is complex, and the model is held by {engine}: polyamp trains complex parameters on "
            "one device and under DistributedDataParallel. Store it as a real parameter with a last axis of two, and "
            "use torch.view_as_complex(parameter) in forward()."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused or isinstance(optimizer, _REFUSED):
        said = "Use fused=False" if fused else "Use another optimizer"
        raise UnsupportedError(
            f"{type(optimizer).__name__}{'(fused=True)' if fused else ''} does not train complex parameters. Received: "
            f"parameter {path!r}. {said}, or one of polyamp's specs."
        )


class RealViews(shards.Shards):
    """The real views of what an optimizer made from a spec holds, for the time of an update."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, torch.Tensor] = {}
        self._pointers: list[int] = []

    def plain(self, tensor: Any) -> Any:
        return self._views.get(id(tensor), tensor)

    def _changed(self, optimizer: torch.optim.Optimizer) -> bool:
        return super()._changed(optimizer) or _pointers(optimizer) != self._pointers

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        self._views = {id(tensor): real_view(tensor.detach()) for tensor in _complex_of(optimizer)}
        self._pointers = _pointers(optimizer)
        super()._look(optimizer)


def _complex_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The complex tensors that an optimizer holds: parameters and slots."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    slots = itertools.chain.from_iterable(map(dict.values, optimizer.state.values()))
    return (each for each in itertools.chain(parameters, slots) if isinstance(each, torch.Tensor) and each.is_complex())


def _pointers(optimizer: torch.optim.Optimizer) -> list[int]:
    """Where they lie: `p.data = ...` puts one elsewhere."""
    return [tensor.data_ptr() for tensor in _complex_of(optimizer)]


def plain_tensors_of(
    optimizer: torch.optim.Optimizer, spec: Any, *, sharded: bool, complex_numbers: bool
) -> shards.Shards | None:
    """What lets a spec's optimizer run over plain real tensors where parameters are sharded or complex; None where it
    need not, and for a native one, which runs as torch runs it.

    Raises:
        UnsupportedError: a native one of torch's that fails over sharded parameters.
    """
    if not is_spec(spec):
        if sharded:
            shards.check_native(optimizer)
        return None
    return shards.Shards() if sharded else RealViews() if complex_numbers else None
