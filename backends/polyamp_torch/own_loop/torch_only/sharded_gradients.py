"""Sharded gradients: the local shards, and the joint flag by which all ranks decide (S9).

The parameters' meshes, or `process_group=`, determine which ranks decide together. The kernel of torch's own scaler
reduces only over the mesh of the first gradient, and not along its replicated axes. If that is a replicated bias, an
overflow in one shard is known to that rank only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import group_of_meshes, is_flattened_by_fsdp1
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def dtensor_class() -> Any:
    """Return `DTensor` for `isinstance`, or () if no tensor of this process can be one."""
    if not _is_distributed():
        return ()
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def local_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a gradient. Its version counter counts FSDP2's writes."""
    if not isinstance(grad, dtensor_class()):
        return grad
    with torch.no_grad():
        part: torch.Tensor = grad.to_local()
    return part


@torch.no_grad()
def reduce_partial_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Reduce partial gradients over the ranks, as the optimizer would later: the sum may overflow."""
    kind = dtensor_class()
    for p in parameters:
        grad: Any = p.grad
        if isinstance(grad, kind) and any(placement.is_partial() for placement in grad.placements):
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]  # of a DTensor


class RankAgreement:
    """Group of ranks that decide together, and their all-reduce.

    Args:
        given: the `process_group=` of the scaler, or None.

    Attributes:
        any_has_gradients: whether any rank had a gradient at the last all-reduce.
        is_postponed: True inside of `postpone`.
    """

    def __init__(self, given: Any) -> None:
        if given is not None and not isinstance(given, dist.ProcessGroup):
            raise GradScalerError(
                "process_group must be a torch.distributed.ProcessGroup that this rank is a member of, or None: the "
                f"ranks over which the parameters are sharded. Received: {given!r}."
            )
        self.given = given
        self.any_has_gradients = True
        self.is_postponed = False
        self._known: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.given is not None:
            raise GradScalerError(
                "a GradScaler with a process_group cannot be copied or pickled: the group is this process's own. Use "
                "state_dict() and load_state_dict()."
            )
        return RankAgreement, (None,)

    @contextlib.contextmanager
    def postpone(self) -> Iterator[None]:
        """Context manager that postpones the all-reduce, so that flags are joined with others first."""
        self.is_postponed = True
        try:
            yield
        finally:
            self.is_postponed = False

    def may_be_several(self) -> bool:
        """Return whether there may be several ranks, without reading parameters; False on one device."""
        return self.given is not None or _is_distributed()

    def group(self, parameters: Sequence[torch.Tensor]) -> Any:
        """Return the process group of the ranks over which parameters are sharded; None if this rank decides alone.

        Raises:
            UnsupportedError: no group with exactly these ranks is known; or parameters of FSDP1, whose ranks are
                unknown.
        """
        if self.given is not None:
            return self.given if self.given.size() > 1 else None
        kind = dtensor_class()
        meshes = {id(p.device_mesh): p.device_mesh for p in parameters if isinstance(p, kind)} if kind else {}
        if not meshes:
            if is_flattened_by_fsdp1(parameters):
                raise UnsupportedError(
                    "the parameters are sharded by FullyShardedDataParallel (FSDP1), which does not tell over which "
                    "ranks. Write GradScaler(..., process_group=torch.distributed.group.WORLD), or its own group."
                )
            return None
        key = tuple(sorted(meshes))
        if key not in self._known:
            self._known[key] = list(meshes.values()), _group_of_meshes(list(meshes.values()))
        return self._known[key][1]

    def all_reduce_flag(self, found: torch.Tensor, group: Any, *, has_gradients: bool) -> torch.Tensor:
        """Return the maximum of the ranks' flags, in one all-reduce of two numbers.

        Args:
            found: this rank's flag, float32 scalar.
            group: process group of the ranks; all of them must call this.
            has_gradients: whether this rank has any; if not, it waits for the device to learn whether another has.
        """
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else found.device
        both = torch.stack((found.reshape(()), torch.full_like(found.reshape(()), float(has_gradients)))).to(device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        self.any_has_gradients = has_gradients or bool(both[1].item() > 0.0)
        return both[0].to(found.device, non_blocking=True)


def _group_of_meshes(meshes: list[Any]) -> Any:
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    group = None if len(ranks) == 1 else group_of_meshes(meshes)
    if group is None and len(ranks) > 1:
        raise UnsupportedError(
            f"the optimizer's parameters are spread over {len(ranks)} ranks, and none of their meshes holds all of "
            "these. Say which decide together: GradScaler(..., process_group=...)."
        )
    return group


def refuse_sharded(optimizer: Any, error: NotImplementedError) -> None:
    """Raise an error with a remedy if torch has no fused kernel for sharded parameters, as for SGD in torch 2.13.

    Raises:
        UnsupportedError: from `error`, if a parameter is sharded.
    """
    kind = dtensor_class()
    if kind and any(isinstance(p, kind) for group in optimizer.param_groups for p in group["params"]):
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"torch has no fused kernel of {name} for sharded parameters: {error} Write {name}(..., foreach=True)."
        ) from error
