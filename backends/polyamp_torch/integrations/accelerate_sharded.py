"""Accelerate's FSDP2 under a policy: configuration checks, and sharding between ranks on the CPU."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_torch.distributed.fsdp_mixed_precision import mixed_precision_policy
from polyamp_torch.integrations.loop_scaler import require_extra

with require_extra("accelerate"):
    from accelerate.state import PartialState  # type: ignore[import-untyped]  # no annotations
    from accelerate.utils import (  # type: ignore[import-untyped]  # no annotations
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

_FSDP_VARIABLE: Final = "ACCELERATE_USE_FSDP"
"""Environment variable set by `accelerate launch --use_fsdp`."""
_REPLICATED_TYPES: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def fsdp_plugin_from_options(options: dict[str, Any]) -> Any:
    """Return the FSDP plugin: from an `Accelerator`'s options or from the launch environment; or None."""
    given = options.get("fsdp_plugin")
    if given is None and os.environ.get(_FSDP_VARIABLE, "false").lower() == "true":
        given = FullyShardedDataParallelPlugin()
    return given


def configure_sharding(state: Any, plugin: Any) -> None:
    """Raise for engines with their own precision, and enable sharding on the CPU if it is requested.

    With ranks on the CPU, Accelerate silently drops an FSDP configuration and trains replicas. Without `cpu=True` it
    does not connect the ranks at all, and each trains alone.

    Args:
        state: the `AcceleratorState`, set up by Accelerate.
        plugin: from `fsdp_plugin_from_options`.

    Raises:
        UnsupportedError: FSDP1, DeepSpeed, Megatron-LM or a TPU; or ranks that Accelerate does not connect.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1
    if state.distributed_type is DistributedType.NO and launched > 1:
        raise UnsupportedError(
            f"{launched} processes were launched, but Accelerate found no accelerators for them, and would train a "
            "model of its own in each. Pass cpu=True (in TrainingArguments use_cpu=True), or launch them by "
            "`accelerate launch --cpu`."
        )
    on_cpu = state.distributed_type is DistributedType.MULTI_CPU and plugin is not None
    sharded = on_cpu or state.distributed_type is DistributedType.FSDP
    config = plugin if on_cpu else getattr(state, "fsdp_plugin", None)
    if sharded and getattr(config, "fsdp_version", None) != 2:
        raise UnsupportedError(
            "polyamp's Accelerator shards with FSDP2: FSDP1 keeps a precision of its own in flat parameters. Received: "
            "an FSDP configuration of version 1. Pass FullyShardedDataParallelPlugin(fsdp_version=2), or launch with "
            "--fsdp_version 2."
        )
    if not sharded and state.distributed_type not in _REPLICATED_TYPES:
        raise UnsupportedError(
            "polyamp's Accelerator runs on one device, under DistributedDataParallel or with FSDP2. Received: "
            f"{state.distributed_type}. Use accelerate.Accelerator there."
        )
    if on_cpu:
        PartialState().distributed_type = DistributedType.FSDP  # every `AcceleratorState()` copies it from there
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def set_mixed_precision_policy(plugin: Any, policy: Policy) -> None:
    """Set the plugin's mixed precision from the policy, unless the plugin has one."""
    if plugin.mixed_precision_policy is None:
        plugin.mixed_precision_policy = mixed_precision_policy(policy)


def is_state_initialization(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would only initialise the optimizer state for loading a checkpoint.

    `torch.distributed.checkpoint` initialises the state by a step at learning rate 0 with zero gradients. Accelerate
    passes it the optimizer that steps through the scaler, which must not count that step.
    """
    return not optimizer.state and all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)
