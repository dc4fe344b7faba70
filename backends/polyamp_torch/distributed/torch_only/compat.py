"""Access to the private names of torch's parallel engines; the package's `compat` has those of a single device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyamp_torch.compat import fsdp_parameter_groups


def unsharded_parameters(module: Any) -> list[torch.Tensor]:
    """Return the unsharded parameters that `fully_shard` computes with: the leaves of the module's autograd graph.

    The first forward pass creates them; between passes they exist without memory."""
    known = (
        vars(held).get("_unsharded_param") for group in fsdp_parameter_groups(module) for held in group.fsdp_params
    )
    return [p for p in known if p is not None]


def drop_unsharded_gradients(module: Any) -> None:
    """Drop the gradients that `fully_shard` has not reduced yet, for example after an interrupted accumulation."""
    for group in fsdp_parameter_groups(module):
        for held in group.fsdp_params:
            held.unsharded_accumulated_grad = None
    for p in unsharded_parameters(module):
        p.grad = None


def reducer_parameters(wrapped: Any) -> tuple[list[Any], int]:
    """Return the parameters that a `DistributedDataParallel` was constructed with, and how many of them it reduces."""
    return wrapped._module_parameters, wrapped._get_ddp_logging_data()["num_parameter_tensors"]


def has_delayed_reduction(wrapped: Any) -> bool:
    """Return whether a `DistributedDataParallel` reduces some gradients by separate hooks."""
    return bool(wrapped._delay_all_reduce_params)


def is_join_enabled(wrapped: Any) -> bool:
    """Return whether `with wrapped.join():` is open."""
    return bool(wrapped._join_config.enable)


def check_reduced(wrapped: Any) -> None:
    """Raise a RuntimeError if a `DistributedDataParallel` still waits for gradients."""
    wrapped._check_reducer_finalized()


def reset_reducer(wrapped: Any) -> None:
    """Reset a `DistributedDataParallel` after a missing or unfinished backward pass."""
    wrapped.reducer._reset_state()


def set_buffer_broadcast(wrapped: Any, *, now: bool) -> bool:
    """Set whether a `DistributedDataParallel` broadcasts buffers before a forward pass; return the previous setting.

    The public `broadcast_buffers` goes through `nn.Module.__setattr__`, too slow for twice a step."""
    own = vars(wrapped)
    name = "forward_sync_buffers" if "forward_sync_buffers" in own else "broadcast_buffers"  # older torch
    before: bool = own[name]
    own[name] = now
    return before


def has_run_forward(wrapped: Any, *, before: bool | None = None) -> bool:
    """Return whether a forward pass whose gradients are reduced has run; its end sets the flag. `before` resets it."""
    own = vars(wrapped)
    if before is not None:
        own["require_forward_param_sync"] = before
    return bool(own["require_forward_param_sync"])


def broadcast_module_buffers(wrapped: Any) -> None:
    """Broadcast rank 0's buffers, as a `DistributedDataParallel` does before each forward pass."""
    wrapped._sync_buffers()


def broadcast_coalesced(group: Any, tensors: list[torch.Tensor]) -> None:
    """Broadcast the first process's tensors to a group in coalesced messages, as torch's engines send buffers."""
    coalesced: Any = vars(torch.distributed)["_broadcast_coalesced"]
    coalesced(group, tensors, 250 * 2**20, 0)


def make_module_tracker(paths: dict[nn.Module, str]) -> Any:
    """Return a context manager whose `parents` are the paths of the modules that run, in both passes, and "Global". It
    survives checkpointing, unlike `torch.utils.module_tracker`; two private attributes hold its names."""
    from torch.distributed._tools.mod_tracker import ModTracker

    tracker: Any = ModTracker()  # type: ignore[no-untyped-call]  # torch does not annotate it
    tracker._known_modules.update(paths)
    tracker._seen_modules.update(paths)
    return tracker
