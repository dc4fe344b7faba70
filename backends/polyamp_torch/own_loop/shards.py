"""Gradients that lie on several ranks: the part that is here, and the flag on which all of them decide (S9).

Called by `GradScaler` and `scaler_gradients`. Which ranks decide together follows from the parameters' meshes, or is
said by `process_group=`. The kernel of torch's own scaler asks the ranks of the first gradient's mesh alone, and not
along its replicated axes, so that behind a replicated bias an overflow in one shard is that rank's own secret.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from polyamp.errors import UnsupportedError
from polyamp_torch.compat import flat_group_of, is_flattened_by_fsdp1
from polyamp_torch.own_loop.scaler_state import GradScalerError


def _are_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def spread() -> Any:
    """`DTensor`, or () where no tensor of this process can be one: for `isinstance`."""
    if not _are_ranks():
        return ()
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def here(grad: torch.Tensor) -> torch.Tensor:
    """The part of a gradient that this rank holds: its memory, and its count of writes, which FSDP2 makes there."""
    if not isinstance(grad, spread()):
        return grad
    with torch.no_grad():
        part: torch.Tensor = grad.to_local()
    return part


@torch.no_grad()
def summed(parameters: Sequence[torch.Tensor]) -> None:
    """Make gradients whose sum over ranks is still to be formed whole, as the optimizer would: the sum may overflow."""
    kind = spread()
    for p in parameters:
        grad: Any = p.grad
        if isinstance(grad, kind) and any(placement.is_partial() for placement in grad.placements):
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]  # of a DTensor


class Shards:
    """Which ranks decide together, and how they agree.

    Args:
        given: the `process_group=` of the scaler, or None.

    Attributes:
        anyone: whether a rank had a gradient when the ranks agreed last, as far as this one had none.
        put_off: True inside of `later`.
    """

    def __init__(self, given: Any) -> None:
        if given is not None and not isinstance(given, dist.ProcessGroup):
            raise GradScalerError(
                "process_group must be a torch.distributed.ProcessGroup that this rank is a member of, or None: the "
                f"ranks over which the parameters are sharded. Received: {given!r}."
            )
        self.given = given
        self.anyone = True
        self.put_off = False
        self._known: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.given is not None:
            raise GradScalerError(
                "a GradScaler with a process_group cannot be copied or pickled: the group is this process's own. Use "
                "state_dict() and load_state_dict()."
            )
        return Shards, (None,)

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """A block whose flags are to be joined with others before the ranks agree."""
        self.put_off = True
        try:
            yield
        finally:
            self.put_off = False

    def several(self) -> bool:
        """Whether there may be other ranks to decide with; False on one device, without looking at a parameter."""
        return self.given is not None or _are_ranks()

    def group(self, parameters: Sequence[torch.Tensor]) -> Any:
        """The process group of the ranks over which some parameters are spread; None where this rank decides alone.

        Raises:
            UnsupportedError: no group is known that holds exactly these ranks; or parameters of FSDP1, which do not
                tell.
        """
        if self.given is not None:
            return self.given if self.given.size() > 1 else None
        kind = spread()
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
            self._known[key] = list(meshes.values()), _group_of(list(meshes.values()))
        return self._known[key][1]

    def agreed(self, found: torch.Tensor, group: Any, *, has_gradients: bool) -> torch.Tensor:
        """The largest of the ranks' flags, in one all-reduce of two numbers.

        Args:
            found: this rank's, float32 scalar.
            group: of the ranks, which all come here.
            has_gradients: whether this rank has any; one that has none waits to hear whether another has.
        """
        device = torch.device("cuda") if dist.get_backend(group) == "nccl" else found.device
        both = torch.stack((found.reshape(()), torch.full_like(found.reshape(()), float(has_gradients)))).to(device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        self.anyone = has_gradients or bool(both[1].item() > 0.0)
        return both[0].to(found.device, non_blocking=True)


def _group_of(meshes: list[Any]) -> Any:
    ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    for mesh in meshes:
        if mesh.size() == len(ranks):
            return mesh.get_group() if mesh.ndim == 1 else flat_group_of(mesh)
    raise UnsupportedError(
        f"the optimizer's parameters are spread over {len(ranks)} ranks, and none of their meshes holds all of these. "
        "Say which decide together: GradScaler(..., process_group=...)."
    )


def refuse_sharded(optimizer: Any, error: NotImplementedError) -> None:
    """Say what to write where torch has no fused kernel for sharded parameters, as for SGD in torch 2.13.

    Raises:
        UnsupportedError: from `error`, if a parameter is sharded.
    """
    kind = spread()
    if kind and any(isinstance(p, kind) for group in optimizer.param_groups for p in group["params"]):
        name = type(optimizer).__name__
        raise UnsupportedError(
            f"torch has no fused kernel of {name} for sharded parameters: {error} Write {name}(..., foreach=True)."
        ) from error
