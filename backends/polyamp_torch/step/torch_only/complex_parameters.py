"""Real views of complex parameters for kernels and formulas, with a last axis of two numbers (`view_as_real`).

torch's fused kernels, and `sign`, which Lion uses, do not support complex numbers. Also, multiplying a complex number
that has one infinite part by a real scalar makes the other part NaN. torch's own optimizers use such views too.
The user's parameters, slots and gradients remain complex; paths, shapes and checkpoints do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp_torch.distributed.torch_only import optimizer_shards

_UNSUPPORTED_OPTIMIZERS: Final = tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
)
"""torch optimizers that do not support complex parameters; some raise only in their first update."""


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real view with a last axis of (real, imaginary); a real tensor unchanged.

    For an unresolved conjugate it is a copy."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def real_views(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return `real_view` of each tensor."""
    return list(map(real_view, tensors))


def resolve_conjugates(parameters: Iterable[torch.Tensor]) -> None:
    """Resolve gradients that a backward pass marked as conjugates, which have no real view."""
    for p in parameters:
        if p.grad is not None and p.grad.is_conj():
            p.grad = p.grad.resolve_conj()


def check_complex_training(path: str, optimizer: Any, engine: str | None) -> None:
    """Raise if an optimizer or engine does not support complex parameters.

    Args:
        path: the path of a complex parameter.
        optimizer: the recipe's optimizer, a spec or native.
        engine: the model's parallel engine; see `ParallelEngine.name`.

    Raises:
        UnsupportedError: not supported; the message names the parameter, and the optimizer or the engine.
    """
    if engine not in (None, "ddp"):
        raise UnsupportedError(
            f"parameter {path!r} is complex, and the model is held by {engine}: polyamp trains complex parameters on "
            "one device and under DistributedDataParallel. Store it as a real parameter with a last axis of two, and "
            "use torch.view_as_complex(parameter) in forward()."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        if is_spec(optimizer) and not optimizer.is_elementwise:
            raise UnsupportedError(
                f"{optimizer.tag} does not train complex parameters: its formula is one of real matrices and norms. "
                f"Received: parameter {path!r}. Use an elementwise optimizer, such as polyamp.adamw."
            )
        return
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused or isinstance(optimizer, _UNSUPPORTED_OPTIMIZERS):
        said = "Use fused=False" if fused else "Use another optimizer"
        raise UnsupportedError(
            f"{type(optimizer).__name__}{'(fused=True)' if fused else ''} does not train complex parameters. Received: "
            f"parameter {path!r}. {said}, or one of polyamp's specs."
        )


class RealViews(optimizer_shards.OptimizerShards):
    """Real views of the parameters and slots of an optimizer made from a spec, during an update."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, torch.Tensor] = {}
        self._pointers: list[int] = []

    def plain(self, tensor: Any) -> Any:
        return self._views.get(id(tensor), tensor)

    def _changed(self, optimizer: torch.optim.Optimizer) -> bool:
        return super()._changed(optimizer) or _data_pointers(optimizer) != self._pointers

    def _update_lists(self, optimizer: torch.optim.Optimizer) -> None:
        self._views = {id(tensor): real_view(tensor.detach()) for tensor in _complex_tensors(optimizer)}
        self._pointers = _data_pointers(optimizer)
        super()._update_lists(optimizer)


def _complex_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield an optimizer's complex tensors: parameters and slots."""
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    slots = itertools.chain.from_iterable(map(dict.values, optimizer.state.values()))
    return (each for each in itertools.chain(parameters, slots) if isinstance(each, torch.Tensor) and each.is_complex())


def _data_pointers(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the memory addresses of the complex tensors, which `p.data = ...` changes."""
    return [tensor.data_ptr() for tensor in _complex_tensors(optimizer)]


def local_tensor_views(
    optimizer: torch.optim.Optimizer, spec: Any, *, sharded: bool, complex_numbers: bool
) -> optimizer_shards.OptimizerShards | None:
    """Return the local real views for a spec's optimizer over sharded or complex parameters.

    None if they are not needed, and for a native optimizer, which runs as in torch.

    Raises:
        UnsupportedError: a native torch optimizer does not support sharded parameters.
    """
    if not is_spec(spec):
        if sharded:
            optimizer_shards.check_native_optimizer(optimizer)
        return None
    if sharded:
        return optimizer_shards.OptimizerShards() if spec.is_elementwise else optimizer_shards.WholeTensors()
    return RealViews() if complex_numbers else None
