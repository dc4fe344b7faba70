"""The door to the private names of torch's engines, beside the package's `compat`: what one device does not need."""

from __future__ import annotations

from typing import Any

import torch

from polyamp_torch.compat import sharded_groups_of


def gathered_by(module: Any) -> list[torch.Tensor]:
    """The whole parameters that `fully_shard` puts in the place of a module's sharded ones while it computes: they are
    the leaves of its graph. Made by the first forward pass, and kept without their memory."""
    known = (vars(held).get("_unsharded_param") for group in sharded_groups_of(module) for held in group.fsdp_params)
    return [p for p in known if p is not None]


def forget_gathered(module: Any) -> None:
    """Drop the gradients that `fully_shard` has not reduced yet, as after a window that was broken off."""
    for group in sharded_groups_of(module):
        for held in group.fsdp_params:
            held.unsharded_accumulated_grad = None
    for p in gathered_by(module):
        p.grad = None


def parameters_reduced(wrapped: Any) -> tuple[list[Any], int]:
    """The parameters that a `DistributedDataParallel` was made with, and how many of them it reduces."""
    return wrapped._module_parameters, wrapped._get_ddp_logging_data()["num_parameter_tensors"]


def has_delayed(wrapped: Any) -> bool:
    """Whether a `DistributedDataParallel` reduces some gradients by a hook of their own."""
    return bool(wrapped._delay_all_reduce_params)


def is_joined(wrapped: Any) -> bool:
    """Whether `with wrapped.join():` is open."""
    return bool(wrapped._join_config.enable)


def check_reduced(wrapped: Any) -> None:
    """Raise a RuntimeError where a `DistributedDataParallel` waits for gradients that did not come."""
    wrapped._check_reducer_finalized()


def forget_reduction(wrapped: Any) -> None:
    """Have a `DistributedDataParallel` begin anew after a backward pass that did not come, or not to its end."""
    wrapped.reducer._reset_state()


def sends_buffers(wrapped: Any, *, now: bool) -> bool:
    """Whether a `DistributedDataParallel` sends the buffers before a forward pass, and from now on. The public
    `broadcast_buffers` says the same, through `nn.Module.__setattr__`, which is slow for what is done twice a step."""
    own = vars(wrapped)
    name = "forward_sync_buffers" if "forward_sync_buffers" in own else "broadcast_buffers"  # older torch
    before: bool = own[name]
    own[name] = now
    return before


def ran_forward(wrapped: Any, *, before: bool | None = None) -> bool:
    """Whether a forward pass whose gradients are reduced came since this was set to False, as its end sets it."""
    own = vars(wrapped)
    if before is not None:
        own["require_forward_param_sync"] = before
    return bool(own["require_forward_param_sync"])


def send_buffers(wrapped: Any) -> None:
    """What a `DistributedDataParallel` does with the buffers before each forward pass: rank 0's to all."""
    wrapped._sync_buffers()


def send(group: Any, tensors: list[torch.Tensor]) -> None:
    """The first process's tensors to all others of a group, together, as torch's engines send buffers."""
    coalesced: Any = vars(torch.distributed)["_broadcast_coalesced"]
    coalesced(group, tensors, 250 * 2**20, 0)
