"""torchtitan's configuration as fields of a recipe: its TOML files, and the newer dataclasses with `param_groups`.

Sources: `config/job_config.py` and `config/configs.py`, `components/optimizer/`, `components/lr_scheduler.py`.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp import schedules
from polyamp.recipe import optimizers
from polyamp.recipe.dialects.block import DialectBlock, DialectReport, DialectTable, Unmapped, key_set
from polyamp.recipe.policy import Policy

_SHAPES: Final = {"linear": "linear", "sqrt": "1-sqrt", "cosine": "cosine"}
_ONE_DEVICE: Final = "the micro-batches of an update follow from it and the number of devices; pass accumulate_steps."

TABLE: Final = DialectTable(
    "torchtitan's configuration",
    defaults={
        "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.param_groups": None,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.total_steps": None,
        "lr_scheduler.decay_ratio": None,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.lr_min": 0.0,
        "training.max_norm": 1.0,
        "training.steps": 10000,
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
    },
    unmapped={
        "optimizer.implementation": Unmapped(
            ("fused", "foreach", "for-loop"), "optimizer states of polyamp's have the parameters' dtype."
        ),
        "optimizer.early_step_in_backward": Unmapped(
            (False,), "an update inside of the backward pass cannot be skipped."
        ),
        "training.global_batch_size": Unmapped((-1,), _ONE_DEVICE),
        "training.num_tokens_per_train_step": Unmapped((-1,), _ONE_DEVICE),
        "training.mixed_precision_reduce": Unmapped(("float32",), "gradients are reduced in float32 (S9)."),
        "model.converters": Unmapped(([], ()), "float8 and other converters are of the model."),
        "quantize": Unmapped(({},), "float8 and other converters are of the model."),
    },
    outside=key_set(
        "job profiling profiler metrics model parallelism checkpoint activation_checkpoint compile float8 mx comm "
        "memory_estimation fault_tolerance experimental validation debug dataloader tokenizer loss "
        "training.dataset training.dataset_path training.local_batch_size training.seq_len training.seed "
        "training.enable_cpu_offload training.compile training.gc_freq training.gc_debug training.deterministic "
        "training.disable_cuda_graphs training.num_tokens_per_microbatch_per_dp_rank training.max_context_length "
        "training.debug_moe_force_load_balance"
    ),
    sections=True,
)


def read_block(block: Any, *, total_steps: int | None, updates_per_epoch: int | None) -> DialectReport:
    """Return the report of a configuration: what `tomllib.load` gives, or the dataclass."""
    opened = DialectBlock(TABLE, block)
    clip = opened.read("training.max_norm", "clip_norm, with torch's clip_eps=1e-6")
    return opened.report(
        policy=_policy(opened),
        optimizer=_optimizer(opened, total_steps),
        clip_norm=float(clip) if clip else None,
        clip_eps=1e-6 if clip else None,
    )


def _policy(block: DialectBlock) -> Policy:
    if block.read("training.dtype", "policy.param") == "bfloat16":
        return Policy("bfloat16")
    return Policy(compute=block.read("training.mixed_precision_param", "policy.compute"))


def _optimizer(block: DialectBlock, total_steps: int | None) -> Any:
    groups = block.read("optimizer.param_groups", "optimizer") if block.has("optimizer.param_groups") else None
    if groups:
        name, settings = _only_group(block, groups)
        rate, betas = settings.pop("lr", 1e-3), tuple(settings.pop("betas", (0.9, 0.999)))
        eps, decay = settings.pop("eps", 1e-8), settings.pop("weight_decay", 0.01 if name == "AdamW" else 0.0)
        if settings:
            block.refuse("optimizer.param_groups", f"arguments that are not read: {', '.join(settings)}.")
    else:
        name, rate = block.read("optimizer.name", "optimizer"), block.read("optimizer.lr", "learning_rate, the peak")
        betas = (block.read("optimizer.beta1", "betas[0]"), block.read("optimizer.beta2", "betas[1]"))
        eps, decay = block.read("optimizer.eps", "eps"), block.read("optimizer.weight_decay", "weight_decay")
    if name not in ("AdamW", "Adam"):
        key = "optimizer.param_groups" if groups else "optimizer.name"
        block.refuse(key, f"{name!r} is not among the optimizers of this dialect; it would be AdamW.")
    spec = optimizers.adam if name == "Adam" else optimizers.adamw
    return spec(_schedule(block, rate, total_steps), betas=betas, eps=eps, weight_decay=float(decay))


def _only_group(block: DialectBlock, groups: Any) -> tuple[str, dict[str, Any]]:
    """Return the optimizer of the last group, which torchtitan's patterns end with, and its arguments."""
    plain = [group if isinstance(group, dict) else {name: getattr(group, name) for name in _GROUP} for group in groups]
    if len(plain) > 1 or plain[0]["pattern"] not in (".*", "^.*$"):
        block.refuse(
            "optimizer.param_groups",
            "patterns over torch's parameter names have no counterpart; write polyamp.Group(glob, ...). The last "
            "group's optimizer would be everyone's.",
        )
    return plain[-1]["optimizer_name"], dict(plain[-1].get("optimizer_kwargs", {}))


_GROUP: Final = ("pattern", "optimizer_name", "optimizer_kwargs")


def _schedule(block: DialectBlock, rate: float, total_steps: int | None) -> Any:
    """Return torchtitan's schedule: warmup to the rate at update `warmup_steps`, counted from 1, plateau, decay."""
    total = total_steps or block.read("lr_scheduler.total_steps", "the schedule's total_steps")
    total = int(total or block.read("training.steps", "the schedule's total_steps"))
    warmup = min(int(block.read("lr_scheduler.warmup_steps", "the schedule's warmup_steps, less one")), total)
    share = block.read("lr_scheduler.decay_ratio", "the schedule's decay_steps, times total_steps")
    decay = total - warmup if share is None else min(round(total * share), total - warmup)
    key = "lr_scheduler.lr_min" if block.has("lr_scheduler.lr_min") else "lr_scheduler.min_lr_factor"
    end = rate * block.read(key, "the schedule's end, times the rate")
    shape = _SHAPES[block.read("lr_scheduler.decay_type", "the schedule's shape")]
    rising = max(warmup - 1, 0)
    if decay:
        return schedules.wsd(rate, rising, total, decay, end, shape, origin=-1)  # type: ignore[arg-type]  # checked there
    return schedules.linear_warmup(rate, rising, origin=-1) if rising else rate
