"""transformers' `TrainingArguments` as fields of a recipe (transformers 4 and 5).

Sources: `training_args.py`, `trainer.py`, `trainer_optimizer.py` and `optimization.py`.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from polyamp import schedules
from polyamp.errors import PolyampError, RecipeError
from polyamp.recipe import optimizers
from polyamp.recipe.dialects.block import (
    ON_LOSS,
    DialectBlock,
    DialectReport,
    DialectTable,
    Unmapped,
    key_set,
    need_total_steps,
)
from polyamp.recipe.groups import Group, no_decay
from polyamp.recipe.policy import Policy

_ADAMW: Final = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
_SCHEDULES: Final = {
    "linear": "get_linear_schedule_with_warmup",
    "cosine": "get_cosine_schedule_with_warmup",
    "cosine_with_min_lr": "get_cosine_with_min_lr_schedule_with_warmup",
    "polynomial": "get_polynomial_decay_schedule_with_warmup",
    "inverse_sqrt": "get_inverse_sqrt_schedule",
    "warmup_stable_decay": "get_wsd_schedule",
}
"""`lr_scheduler_type` -> name in `schedules.like`."""

TABLE: Final = DialectTable(
    "transformers' TrainingArguments",
    defaults={
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "lr_scheduler_kwargs": None,
        "warmup_steps": 0,
        "warmup_ratio": 0.0,
        "max_steps": -1,
        "num_train_epochs": 3.0,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "fp16": False,
        "tf32": None,
    },
    unmapped={
        "optim_args": Unmapped((None, ""), "arguments of optimizers that polyamp does not have."),
        "optim_target_modules": Unmapped((None,), "GaLore and APOLLO are not among polyamp's optimizers."),
        "adafactor": Unmapped((False,), "Adafactor is not among the optimizers of this dialect."),
        "label_smoothing_factor": Unmapped(
            (0.0, 0), f"{ON_LOSS}: polyamp.losses.softmax_cross_entropy(..., label_smoothing=...)."
        ),
        "neftune_noise_alpha": Unmapped((None,), "noise on embeddings is of the model."),
        "deepspeed": Unmapped((None,), "a configuration of its own: Recipe.from_dialect('deepspeed', ...)."),
        "fp16_opt_level": Unmapped(("O1",), "apex's levels are spellings of a policy: Policy('O2')."),
    },
    outside=key_set(
        "output_dir overwrite_output_dir per_device_train_batch_size per_device_eval_batch_size "
        "per_gpu_train_batch_size per_gpu_eval_batch_size average_tokens_across_devices bf16_full_eval "
        "fp16_full_eval half_precision_backend fp16_backend activation_checkpointing "
        "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
        "torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval use_ipex use_liger_kernel "
        "liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps "
        "logging_dir logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen "
        "include_tokens_per_second log_level log_level_replica disable_tqdm report_to run_name project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy evaluation_strategy eval_steps "
        "eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics save_only_model "
        "save_strategy save_steps save_safetensors save_on_each_node save_total_limit enable_jit_checkpoint "
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token load_best_model_at_end "
        "metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint "
        "full_determinism seed data_seed use_cpu no_cuda use_mps_device accelerator_config parallelism_config "
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
        "label_names train_sampling_strategy group_by_length length_column_name ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config "
        "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap sharded_ddp debug skip_memory_metrics do_train "
        "do_eval do_predict resume_from_checkpoint local_rank past_index tpu_num_cores tpu_metrics_debug "
        "mp_parameters dispatch_batches split_batches ray_scope"
    ),
)


def read_block(block: Any, *, total_steps: int | None, updates_per_epoch: int | None) -> DialectReport:
    """Return the report of a `TrainingArguments`, as an object or a dictionary."""
    opened = DialectBlock(TABLE, block)
    rate = opened.read("learning_rate", "learning_rate, the schedule's peak")
    total = _updates(opened, total_steps, updates_per_epoch)
    clip = opened.read("max_grad_norm", "clip_norm, with torch's clip_eps=1e-6")
    precision = _precision(opened)
    return opened.report(
        **precision,
        optimizer=_optimizer(opened, _schedule(opened, rate, total)),
        clip_norm=float(clip) if clip else None,
        clip_eps=1e-6 if clip else None,
        accumulate_steps=opened.read("gradient_accumulation_steps", "accumulate_steps"),
    )


def _precision(block: DialectBlock) -> dict[str, Any]:
    half = {word: block.read(word, "policy") for word in ("bf16", "fp16")}
    if all(half.values()):
        raise RecipeError(f"{TABLE.library}: bf16 and fp16 are two precisions. Received: both.")
    matmul = {None: None, True: "high", False: "highest"}[block.read("tf32", "policy.float32_matmul")]
    name = "mixed_bfloat16" if half["bf16"] else "mixed_float16" if half["fp16"] else "float32"
    policy = Policy(name) if matmul is None else Policy(name).replace(float32_matmul=matmul)
    return {"policy": policy, "scaler": "torch" if half["fp16"] else None}


def _updates(block: DialectBlock, total_steps: int | None, updates_per_epoch: int | None) -> int | None:
    """Return the number of updates that the schedule is for, if anything says it."""
    if total_steps is not None:
        return total_steps
    steps: int = block.read("max_steps", "the schedule's total_steps")
    if steps > 0:
        return int(steps)
    if updates_per_epoch is None:
        return None
    epochs: float = block.read("num_train_epochs", "the schedule's total_steps")
    return math.ceil(epochs * updates_per_epoch)


def _warmup(block: DialectBlock, total: int | None) -> int:
    steps: float = block.read("warmup_steps", "the schedule's warmup_steps")
    if steps >= 1:
        return int(steps)
    ratio: float = steps or block.read("warmup_ratio", "the schedule's warmup_steps, a share of total_steps")
    if ratio and total is None:
        raise need_total_steps(block, "a warmup that is a share")
    return math.ceil((total or 0) * ratio)


def _schedule(block: DialectBlock, rate: float, total: int | None) -> Any:
    kind = block.read("lr_scheduler_type", "the schedule")
    kind = getattr(kind, "value", kind)
    if kind == "constant":
        return rate
    arguments = block.read("lr_scheduler_kwargs", "arguments of the schedule") or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    warmup = _warmup(block, total)
    if kind == "constant_with_warmup":
        return schedules.linear_warmup(rate, warmup) if warmup else rate
    if kind == "inverse_sqrt":
        return _library_schedule(block, kind, lr=rate, num_warmup_steps=warmup, **arguments)
    if kind in _SCHEDULES or kind == "cosine_with_restarts":
        if total is None:
            raise need_total_steps(block, f"lr_scheduler_type={kind!r}")
        if kind == "cosine_with_restarts":
            return _restarts(block, rate, warmup, total, int(arguments.get("num_cycles", 1)))
        return _library_schedule(block, kind, lr=rate, num_warmup_steps=warmup, num_training_steps=total, **arguments)
    block.refuse("lr_scheduler_type", f"{kind!r} is no schedule of polyamp's; the rate would be constant.")
    return rate


def _library_schedule(block: DialectBlock, kind: str, **arguments: Any) -> Any:
    try:
        return schedules.like(f"transformers.{_SCHEDULES[kind]}", **arguments)
    except PolyampError as error:
        key = "lr_scheduler_kwargs" if block.has("lr_scheduler_kwargs") else "lr_scheduler_type"
        block.refuse(key, f"{error} The rate would be constant.")
        return arguments["lr"]


def _restarts(block: DialectBlock, rate: float, warmup: int, total: int, cycles: int) -> Any:
    """Return `cycles` cosines after each other, and 0 from `total` on, as in transformers."""
    length, rest = divmod(total - warmup, cycles)
    if cycles == 1:
        return schedules.warmup_cosine(rate, warmup, total)
    if rest or length < 1:
        block.refuse(
            "lr_scheduler_kwargs",
            f"{cycles} cycles do not divide the {total - warmup} updates after the warmup, and cycles of polyamp's end "
            "at an update. The rate would be constant.",
        )
        return rate
    waves, after = schedules.restarts(rate, length), schedules.constant(0.0)
    if not warmup:
        return schedules.join([waves, after], (total,))
    return schedules.join([schedules.linear_warmup(rate, warmup), waves, after], (warmup, total))


def _optimizer(block: DialectBlock, rate: Any) -> Any:
    name = block.read("optim", "optimizer")
    name = getattr(name, "value", name)
    decay = block.read("weight_decay", "weight_decay, none of biases and normalizations")
    groups: tuple[Group, ...] = ()
    if decay:
        groups = tuple(no_decay("bias", "norm"))
        block.note(
            "weight_decay",
            "transformers leaves out biases and norms by their names and LayerNorm by its class, polyamp by kind, so "
            "also a BatchNorm that transformers decays.",
        )
    common = {"learning_rate": rate, "weight_decay": float(decay), "groups": groups}
    if name == "sgd":
        return optimizers.sgd(**common)
    if name == "adagrad":
        return optimizers.adagrad(**common)
    if name == "rmsprop":
        return optimizers.rmsprop(**common)
    betas = (block.read("adam_beta1", "betas[0]"), block.read("adam_beta2", "betas[1]"))
    if name == "lion_32bit":
        return optimizers.lion(betas=betas, **common)
    eps = block.read("adam_epsilon", "eps")
    if name not in _ADAMW:
        block.refuse("optim", f"{name!r} is not among the optimizers of this dialect; it would be AdamW.")
    return optimizers.adamw(betas=betas, eps=eps, **common)
