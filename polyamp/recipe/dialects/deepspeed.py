"""DeepSpeed's JSON configuration as fields of a recipe.

Sources: `runtime/config.py`, `precision_config.py`, `lr_schedules.py` and `engine.py`. Its schedules move after each
applied update, so their second update has the schedule's first rate again; that is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp import schedules
from polyamp.errors import RecipeError
from polyamp.recipe import optimizers
from polyamp.recipe.dialects.block import DialectBlock, DialectReport, DialectTable, Unmapped, key_set, need_total_steps
from polyamp.recipe.policy import Policy
from polyamp.recipe.scaler import LossScaler

_PARAMS: Final = "optimizer.params."
_WARMUP: Final = "scheduler.params."
_NO_LOG: Final = (
    "a warmup by a logarithm, DeepSpeed's default, is no schedule of polyamp's; warmup_type='linear' is. The rate "
    "would be constant."
)

TABLE: Final = DialectTable(
    "DeepSpeed's configuration",
    defaults={
        "optimizer.type": None,
        "optimizer.params.lr": 1e-3,
        "optimizer.params.betas": None,
        "optimizer.params.eps": 1e-8,
        "optimizer.params.weight_decay": 0.0,
        "optimizer.params.momentum": 0.0,
        "optimizer.params.nesterov": False,
        "optimizer.params.adam_w_mode": True,
        "optimizer.params.torch_adam": False,
        "scheduler.type": None,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": None,
        "scheduler.params.warmup_num_steps": 1000,
        "scheduler.params.warmup_type": "log",
        "scheduler.params.total_num_steps": None,
        "scheduler.params.warmup_min_ratio": 0.0,
        "scheduler.params.cos_min_ratio": 0.0001,
        "fp16.enabled": False,
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": 16,
        "fp16.loss_scale_window": 1000,
        "fp16.hysteresis": 2,
        "fp16.consecutive_hysteresis": False,
        "fp16.min_loss_scale": 1,
        "bf16.enabled": False,
        "bf16.check_grad_overflow": True,
        "torch_autocast.enabled": False,
        "torch_autocast.dtype": "bfloat16",
        "zero_optimization.stage": 0,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 1,
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": None,
    },
    unmapped={
        "optimizer.params.amsgrad": Unmapped((False,), "amsgrad is not read in this dialect."),
        "optimizer.params.bias_correction": Unmapped((True,), "polyamp's Adam corrects its bias."),
        "optimizer.params.dampening": Unmapped((0, 0.0), "polyamp's SGD has no dampening."),
        "optimizer.params.max_grad_norm": Unmapped((None,), "DeepSpeed refuses it; write gradient_clipping."),
        "fp16.fp16_master_weights_and_grads": Unmapped((False,), "write the policy: polyamp.Policy('float16')."),
        "bf16.bf16_master_weights_and_grads": Unmapped((False,), "write the policy: polyamp.Policy('bfloat16')."),
        "bf16.bf16_optimizer_states": Unmapped((False,), "optimizer states of polyamp's have the parameters' dtype."),
        "torch_autocast.lower_precision_safe_modules": Unmapped((None,), "write Policy(overrides={glob: dtype})."),
        "amp": Unmapped(({"enabled": False},), "apex's levels are spellings of a policy: Policy('O2')."),
        "data_types": Unmapped(
            ({}, {"grad_accum_dtype": "fp32"}), "gradients accumulate in float32 (S8), whatever DeepSpeed says."
        ),
        "progressive_layer_drop": Unmapped(({"enabled": False},), "dropped layers are of the model."),
        "curriculum_learning": Unmapped(({"enabled": False},), "a curriculum is of the data."),
        "compression_training": Unmapped(({},), "quantization and pruning are of the model."),
        "quantize_training": Unmapped(({"enabled": False},), "quantization is of the model."),
        "gradient_allreduce_op": Unmapped(("mean",), "replicas of polyamp's take the mean (S9)."),
        "managed_gradient_accumulation": Unmapped((True,), "accumulate_steps of a recipe is managed by the step."),
    },
    outside=key_set(
        "optimizer.legacy_fusion optimizer.params.set_grad_none optimizer.params.fused optimizer.params.foreach "
        "optimizer.params.fp32_optimizer_states optimizer.params.capturable fp16.auto_cast "
        "bf16.immediate_grad_update zero_optimization zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer communication_data_type seq_parallel_communication_data_type "
        "prescale_gradients gradient_predivide_factor sparse_gradients steps_per_print wall_clock_breakdown "
        "dump_state memory_breakdown disable_allgather dataloader_drop_last log_level checkpoint aio "
        "activation_checkpointing flops_profiler tensorboard wandb csv_monitor comet monitor_config comms_logger "
        "elasticity autotuning sparse_attention eigenvalue pipeline hybrid_engine nebula tensor_parallel "
        "sequence_parallel_size use_data_before_expert_parallelism data_efficiency graph_harvesting compile "
        "timers expert_parallel load_universal_checkpoint use_node_local_storage check_overflow"
    ),
    sections=True,
)


def read_block(block: Any, *, total_steps: int | None, updates_per_epoch: int | None) -> DialectReport:
    """Return the report of a configuration as a dictionary."""
    if isinstance(block, Mapping) and "bfloat16" in block:  # the older name
        block = {"bf16" if name == "bfloat16" else name: value for name, value in block.items()}
    opened = DialectBlock(TABLE, block)
    clip = opened.read("gradient_clipping", "clip_norm, with DeepSpeed's clip_eps=1e-6")
    return opened.report(
        **_precision(opened),
        optimizer=_optimizer(opened, total_steps),
        clip_norm=float(clip) if clip else None,
        clip_eps=1e-6 if clip else None,
        accumulate_steps=_accumulation(opened),
    )


def _accumulation(block: DialectBlock) -> int:
    if block.has("gradient_accumulation_steps") or not block.has("train_batch_size"):
        return int(block.read("gradient_accumulation_steps", "accumulate_steps"))
    if block.has("train_micro_batch_size_per_gpu"):
        block.refuse(
            "train_batch_size",
            "the micro-batches of an update follow from it and the number of devices; write "
            "gradient_accumulation_steps.",
        )
    return 1


def _precision(block: DialectBlock) -> dict[str, Any]:
    half = {name: block.read(f"{name}.enabled", "policy") for name in ("fp16", "bf16", "torch_autocast")}
    if sum(map(bool, half.values())) > 1:
        raise RecipeError(f"{TABLE.library}: fp16, bf16 and torch_autocast exclude each other. Received: {half}.")
    if half["fp16"]:
        return {"policy": Policy(compute="float16", output="float16", mode="cast"), "scaler": _scaler(block)}
    if half["bf16"]:
        check = block.read("bf16.check_grad_overflow", "scaler.check_finite")
        return {
            "policy": Policy(compute="bfloat16", output="bfloat16", mode="cast"),
            "scaler": LossScaler.off(check_finite=check),
        }
    if half["torch_autocast"]:
        dtype = str(block.read("torch_autocast.dtype", "policy.compute")).removeprefix("torch.")
        return {"policy": Policy(compute=dtype)}
    return {"policy": Policy("float32")}


def _scaler(block: DialectBlock) -> LossScaler:
    static = block.read("fp16.loss_scale", "scaler")
    if static:
        return LossScaler.static(float(static))
    hysteresis = block.read("fp16.hysteresis", "scaler.hysteresis")
    if not block.read("zero_optimization.stage", "scaler.hysteresis: 1 without ZeRO"):
        block.note("fp16.hysteresis", "DeepSpeed's optimizer without ZeRO ignores it: the scaler has 1.")
        hysteresis = 1
    return LossScaler.like(
        "deepspeed",
        init_scale=2.0 ** block.read("fp16.initial_scale_power", "scaler.init_scale, a power of 2"),
        growth_interval=block.read("fp16.loss_scale_window", "scaler.growth_interval"),
        hysteresis=hysteresis,
        consecutive_hysteresis=block.read("fp16.consecutive_hysteresis", "scaler.consecutive_hysteresis"),
        min_scale=float(block.read("fp16.min_loss_scale", "scaler.min_scale")),
    )


def _optimizer(block: DialectBlock, total_steps: int | None) -> Any:
    name = block.read("optimizer.type", "optimizer")
    if name is None:
        block.refuse("optimizer.type", "the block has no optimizer; the program's own goes into Recipe.replace.")
        return None
    word = str(name).lower()
    has_rate = block.has(_PARAMS + "lr")
    default = 1e-2 if word == "adagrad" else 1e-3
    rate = _schedule(block, block.read(_PARAMS + "lr", "learning_rate") if has_rate else default, total_steps)
    torch_adam = word in ("adam", "adamw") and block.read(_PARAMS + "torch_adam", "torch's defaults")
    decouples = word == "adamw" or (word == "adam" and block.read(_PARAMS + "adam_w_mode", "optimizer"))
    decay = block.read(_PARAMS + "weight_decay", "weight_decay")
    if torch_adam and decouples and not block.has(_PARAMS + "weight_decay"):
        decay = 0.01  # torch.optim.AdamW's own default
    common: dict[str, Any] = {"learning_rate": rate, "weight_decay": float(decay)}
    if word == "sgd":
        momentum = float(block.read(_PARAMS + "momentum", "momentum"))
        return optimizers.sgd(momentum=momentum, nesterov=block.read(_PARAMS + "nesterov", "nesterov"), **common)
    if word == "adagrad":
        return optimizers.adagrad(
            eps=block.read(_PARAMS + "eps", "eps") if block.has(_PARAMS + "eps") else 1e-10, **common
        )
    betas = tuple(block.read(_PARAMS + "betas", "betas") or (0.9, 0.999))
    if word == "lion":
        return optimizers.lion(betas=betas, **common)
    if word not in ("adam", "adamw"):
        block.refuse("optimizer.type", f"{name!r} is not among the optimizers of this dialect; it would be AdamW.")
        decouples = True
    spec = optimizers.adamw if decouples else optimizers.adam
    return spec(betas=betas, eps=block.read(_PARAMS + "eps", "eps"), **common)


def _schedule(block: DialectBlock, rate: float, total_steps: int | None) -> Any:
    kind = block.read("scheduler.type", "the schedule")
    if kind is None:
        return rate
    if kind not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        block.refuse("scheduler.type", f"{kind!r} is no schedule of polyamp's; the rate would be constant.")
        return rate
    if block.read(_WARMUP + "warmup_type", "the warmup") != "linear":
        block.refuse(_WARMUP + "warmup_type", _NO_LOG)
        return rate
    warmup = max(2, block.read(_WARMUP + "warmup_num_steps", "the schedule's warmup_steps"))
    total = None
    if kind != "WarmupLR":
        total = total_steps or block.read(_WARMUP + "total_num_steps", "the schedule's total_steps")
        if total is None:
            raise need_total_steps(block, f"scheduler.type={kind!r}")
    if kind == "WarmupCosineLR":
        return _cosine(block, rate, warmup, int(total or 0))
    start = block.read(_WARMUP + "warmup_min_lr", "the schedule's start")
    peak = block.read(_WARMUP + "warmup_max_lr", "the schedule's peak")
    if peak is None:
        peak = rate if kind == "WarmupLR" else 0.001  # WarmupDecayLR has a default of its own
    first = schedules.constant(start)
    if total is None:
        return schedules.join([first, schedules.linear_warmup(peak, warmup, start)], (1,))
    return schedules.join([first, schedules.linear(peak, warmup, int(total), end=start, start=start)], (1,))


def _cosine(block: DialectBlock, rate: float, warmup: int, total: int) -> Any:
    """Return WarmupCosineLR: its first update has the rate 0, and its cosine begins one update after its peak's."""
    start = rate * block.read(_WARMUP + "warmup_min_ratio", "the schedule's start, times the rate")
    end = rate * block.read(_WARMUP + "cos_min_ratio", "the schedule's end, times the rate")
    length = total - warmup
    falling = schedules.cosine(rate, length - 1, end, origin=-1) if length > 1 else schedules.constant(end)
    rising = schedules.linear_warmup(rate, warmup, start)
    return schedules.join([schedules.constant(0.0), rising, falling], (1, warmup + 1))
