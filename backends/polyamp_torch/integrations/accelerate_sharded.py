"""Accelerate's FSDP2 under a policy: what is accepted of its configuration, and sharding between ranks on the CPU.

Called by `accelerate`, whose `Accelerator` asks here what its state and its optimizers do differently with FSDP2.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from polyamp.errors import UnsupportedError
from polyamp.recipe.policy import Policy
from polyamp_torch.distributed.mixed_precision import mixed_precision_policy
from polyamp_torch.integrations.loop_scaler import extra

with extra("accelerate"):
    from accelerate.state import PartialState  # type: ignore[import-untyped]  # no annotations
    from accelerate.utils import (  # type: ignore[import-untyped]  # no annotations
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

_LAUNCHED: Final = "ACCELERATE_USE_FSDP"
"""What `accelerate launch --use_fsdp` sets."""
_REPLICATED: Final = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def configuration(options: dict[str, Any]) -> Any:
    """The plugin that says how to shard: the one among an `Accelerator`'s options, or what was launched; or None."""
    given = options.get("fsdp_plugin")
    if given is None and os.environ.get(_LAUNCHED, "false").lower() == "true":
        given = FullyShardedDataParallelPlugin()
    return given


def settled(state: Any, plugin: Any) -> None:
    """Refuse the engines that bring a precision of their own, and shard on the CPU where it is asked for.

    Accelerate drops an FSDP configuration without a word where ranks are on the CPU, and trains copies instead; and
    where it is not told that they are on the CPU, it trains in each by itself.

    Args:
        state: the `AcceleratorState` as Accelerate has set it up.
        plugin: from `configuration`.

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
    if not sharded and state.distributed_type not in _REPLICATED:
        raise UnsupportedError(
            "polyamp's Accelerator runs on one device, under DistributedDataParallel or with FSDP2. Received: "
            f"{state.distributed_type}. Use accelerate.Accelerator there."
        )
    if on_cpu:
        PartialState().distributed_type = DistributedType.FSDP  # every `AcceleratorState()` copies it from there
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def derive(plugin: Any, policy: Policy) -> None:
    """Have Accelerate shard with the mixed precision that follows from the policy, unless the plugin has one."""
    if plugin.mixed_precision_policy is None:
        plugin.mixed_precision_policy = mixed_precision_policy(policy)


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step now would only make the state that a checkpoint is to be loaded into.

    That is how `torch.distributed.checkpoint` has an optimizer make it: by a step at rate 0, with gradients of zeros.
    Accelerate hands it the optimizer that steps through the scaler, which must not count that.
    """
    return not optimizer.state and all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)
