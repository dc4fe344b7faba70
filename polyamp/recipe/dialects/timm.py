"""timm's training arguments (`train.py`) as fields of a recipe.

Sources: `train.py`, `optim/_optim_factory.py`, `scheduler/`, `utils/model_ema.py` and `utils/clip_grad.py`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any, Final

from polyamp import schedules
from polyamp.array_namespace import PYTHON
from polyamp.errors import RecipeError
from polyamp.recipe import optimizers
from polyamp.recipe.dialects.block import ON_LOSS, DialectBlock, DialectReport, DialectTable, Unmapped, key_set
from polyamp.recipe.ema import Ema
from polyamp.recipe.groups import no_decay
from polyamp.recipe.policy import Policy
from polyamp.schedules.schedule_base import half_cosine

TABLE: Final = DialectTable(
    "timm's arguments",
    defaults={
        "opt": "sgd",
        "opt_eps": None,
        "opt_betas": None,
        "momentum": 0.9,
        "weight_decay": 2e-5,
        "clip_grad": None,
        "clip_mode": "norm",
        "sched": "cosine",
        "sched_on_updates": False,
        "lr": None,
        "warmup_lr": 1e-5,
        "min_lr": 0.0,
        "epochs": 300,
        "decay_milestones": (90, 180, 270),
        "decay_epochs": 90,
        "warmup_epochs": 5,
        "warmup_prefix": False,
        "decay_rate": 0.1,
        "grad_accum_steps": 1,
        "amp": False,
        "amp_dtype": "float16",
        "model_ema": False,
        "model_ema_decay": 0.9998,
        "model_ema_warmup": False,
    },
    unmapped={
        "opt_kwargs": Unmapped(({}, None), "arguments of the optimizer's class; write them into the recipe."),
        "layer_decay": Unmapped(
            (None,), "depends on the model's layers: polyamp.Group(glob, learning_rate_scale=...)."
        ),
        "layer_decay_no_opt_scale": Unmapped((None,), "goes with layer_decay."),
        "lr_noise": Unmapped((None,), "a rate of polyamp's is a pure function of the update."),
        "lr_cycle_mul": Unmapped((1.0, 1), "one cycle is read; write schedules.restarts."),
        "lr_cycle_limit": Unmapped((1,), "one cycle is read; write schedules.restarts."),
        "lr_k_decay": Unmapped((1.0, 1), "a cosine of polyamp's has no exponent."),
        "model_dtype": Unmapped((None, "float32"), "write the policy: polyamp.Policy('bfloat16')."),
        "smoothing": Unmapped((0.0, 0), f"{ON_LOSS}: polyamp.losses.softmax_cross_entropy(..., label_smoothing=...)."),
        "bce_loss": Unmapped((False,), f"{ON_LOSS}: polyamp.losses.sigmoid_cross_entropy."),
        "jsd_loss": Unmapped((False,), f"{ON_LOSS}."),
        "variable_batch_loss_scale": Unmapped(("none",), f"{ON_LOSS}."),
        "kd_model_name": Unmapped((None,), f"{ON_LOSS}: polyamp.losses.kl_divergence(..., temperature=...)."),
    },
    outside=key_set(
        "config data data_dir dataset train_split val_split train_num_samples val_num_samples dataset_download "
        "class_map input_img_mode input_key target_key dataset_trust_remote_code model pretrained pretrained_path "
        "initial_checkpoint resume no_resume_opt num_classes gp img_size in_chans input_size crop_pct mean std "
        "interpolation batch_size validation_batch_size channels_last fuser grad_checkpointing fast_norm "
        "model_kwargs head_init_scale head_init_bias torchcompile_mode torchscript torchcompile device no_ddp_bb "
        "synchronize_step local_rank device_modules layer_decay_min_scale lr_base lr_base_size lr_base_scale "
        "lr_noise_pct lr_noise_std lr_cycle_decay epoch_repeats start_epoch cooldown_epochs patience_epochs no_aug "
        "train_crop_mode scale ratio hflip vflip color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob "
        "aa aug_repeats aug_splits bce_sum bce_target_thresh bce_pos_weight reprob remode recount resplit mixup "
        "cutmix cutmix_minmax mixup_prob mixup_switch_prob mixup_mode mixup_off_epoch train_interpolation drop "
        "drop_connect drop_path drop_block bn_momentum bn_eps sync_bn dist_bn split_bn model_ema_force_cpu seed "
        "worker_seeding log_interval val_interval recovery_interval checkpoint_hist workers save_images pin_mem "
        "no_prefetcher output experiment eval_metric tta use_multi_epochs_loader log_wandb wandb_project "
        "wandb_tags wandb_resume_id train_img_sizes train_batch_sizes train_size_probs train_size_schedule "
        "train_size_schedule_spread train_size_random_mix train_batches_per_epoch naflex_loader "
        "naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs naflex_loss_scale "
        "naflex_patchify_channels_first kd_distill_type kd_loss_type distill_loss_weight task_loss_weight "
        "kd_temperature kd_student_feature_dim kd_teacher_feature_dim kd_token_distill_type"
    ),
)


def read_block(block: Any, *, total_steps: int | None, updates_per_epoch: int | None) -> DialectReport:
    """Return the report of arguments: a namespace, or a dictionary with the options' names, dashes or not."""
    if isinstance(block, Mapping):
        block = {str(name).removeprefix("--").replace("-", "_"): value for name, value in block.items()}
    opened = DialectBlock(TABLE, block)
    if not opened.has("smoothing"):
        opened.note("smoothing", f"timm smooths labels by 0.1 unless told otherwise; {ON_LOSS}.")
    half = opened.read("amp", "policy")
    dtype = opened.read("amp_dtype", "policy.compute") if half else "float32"
    return opened.report(
        policy=Policy(compute=dtype),
        scaler="torch" if dtype == "float16" else None,
        optimizer=_optimizer(opened, total_steps, updates_per_epoch),
        accumulate_steps=opened.read("grad_accum_steps", "accumulate_steps"),
        ema=_ema(opened, half and dtype == "float16"),
        **_clip(opened),
    )


def _clip(block: DialectBlock) -> dict[str, Any]:
    limit = block.read("clip_grad", "the clip's limit")
    if limit is None:
        return {}
    mode = block.read("clip_mode", "clip_norm or clip_value")
    if mode == "norm":
        return {"clip_norm": float(limit), "clip_eps": 1e-6}
    if mode == "value":
        return {"clip_value": float(limit)}
    block.refuse("clip_mode", f"{mode!r}, a clip by the size of each parameter, is no clip of polyamp's.")
    return {}


def _ema(block: DialectBlock, scales: bool) -> Ema | None:
    if not block.read("model_ema", "ema"):
        return None
    if scales:
        block.note("model_ema", "timm moves the averages at skipped updates too, polyamp at applied ones (S34).")
    if block.read("model_ema_warmup", "ema.warmup"):
        block.refuse("model_ema_warmup", "timm's early averages keep 1 - (1 + n) ** (-2 / 3), polyamp's otherwise.")
    return Ema(decay=block.read("model_ema_decay", "ema.decay"), statistics="average")


def _optimizer(block: DialectBlock, total_steps: int | None, updates_per_epoch: int | None) -> Any:
    name = str(block.read("opt", "optimizer")).lower()
    rate = block.read("lr", "learning_rate, the peak")
    if rate is None:
        raise RecipeError(
            f"{TABLE.library}: without lr timm computes the rate from lr_base and the batch of all devices, "
            "lr_base * batch / lr_base_size (or its root). Write lr."
        )
    decay = block.read("weight_decay", "weight_decay, none of biases and vectors")
    if decay:
        block.note("weight_decay", "parameters of the model's own no_weight_decay() need a polyamp.Group.")
    common: dict[str, Any] = {
        "learning_rate": _schedule(block, rate, total_steps, updates_per_epoch),
        "weight_decay": float(decay),
        "groups": tuple(no_decay("bias", "vector")) if decay else (),
    }
    if name in ("sgd", "momentum"):
        momentum = block.read("momentum", "momentum")
        return optimizers.sgd(momentum=momentum, nesterov=name == "sgd" and momentum > 0.0, **common)
    betas, eps = (block.read(key, part) for key, part in (("opt_betas", "betas"), ("opt_eps", "eps")))
    if name == "adagrad":
        return optimizers.adagrad(eps=1e-8 if eps is None else eps, **common)
    common |= {"eps": eps} if eps is not None and name != "lion" else {}
    if name == "rmsprop":
        return optimizers.rmsprop(alpha=0.9, momentum=block.read("momentum", "momentum"), **common)
    common |= {"betas": tuple(betas)} if betas is not None else {}
    spec = {"adam": optimizers.adam, "adamw": optimizers.adamw, "nadam": optimizers.nadam, "lion": optimizers.lion}
    if name not in spec:
        block.refuse("opt", f"{name!r} is not among the optimizers of this dialect; it would be AdamW.")
    return spec.get(name, optimizers.adamw)(**common)


def _schedule(block: DialectBlock, rate: float, total_steps: int | None, updates_per_epoch: int | None) -> Any:
    kind = block.read("sched", "the schedule")
    if kind not in ("cosine", "poly", "step", "multistep"):
        block.refuse("sched", f"{kind!r} is no schedule of polyamp's; the rate would be constant.")
        return rate
    by_update = block.read("sched_on_updates", "the schedule: by update, or by epoch")
    if by_update and kind != "cosine":
        block.refuse("sched_on_updates", f"{kind!r} is read by epoch only; the rate would be constant.")
        return rate
    epochs, warmup = block.read("epochs", "the schedule"), block.read("warmup_epochs", "the schedule's warmup")
    if updates_per_epoch is None and total_steps is not None and total_steps % epochs == 0:
        updates_per_epoch = total_steps // epochs
    if updates_per_epoch is None:
        raise RecipeError(f"{TABLE.library} count epochs. Pass updates_per_epoch=...")
    start, end = block.read("warmup_lr", "the warmup's first rate"), block.read("min_lr", "the schedule's end")
    prefix = block.read("warmup_prefix", "the schedule")
    curve = _curve(block, kind, rate, end, epochs)
    if by_update:
        warmup, total = warmup * updates_per_epoch, epochs * updates_per_epoch
        if not warmup:
            return schedules.cosine(rate, total, end)
        if prefix:
            falling = schedules.cosine(rate, total, end)
        else:
            falling = schedules.cosine(rate, total - warmup, end, origin=-warmup)
        return schedules.join([schedules.linear_warmup(rate, warmup, start), falling], (warmup,))
    rates: list[float] = []
    for epoch in range(epochs + (warmup if prefix else 0) + 1):
        if epoch < warmup:
            rates.append(start + epoch * (rate - start) / warmup)
        else:
            rates.append(curve(epoch - (warmup if prefix else 0)))
    turns = [epoch for epoch in range(1, len(rates)) if rates[epoch] != rates[epoch - 1]]
    if not turns:
        return rates[0]
    values = (rates[0], *(rates[epoch] for epoch in turns))
    return schedules.piecewise(values, tuple(epoch * updates_per_epoch for epoch in turns))


def _curve(block: DialectBlock, kind: str, rate: float, end: float, epochs: int) -> Callable[[int], float]:
    """Return timm's rate at an epoch, after the warmup."""
    if kind == "cosine":
        return lambda epoch: float(half_cosine(rate, end, min(epoch / epochs, 1.0), PYTHON))
    factor = block.read("decay_rate", "the power" if kind == "poly" else "the schedule's factor")
    if kind == "poly":
        return lambda epoch: end + (rate - end) * (1.0 - min(epoch / epochs, 1.0)) ** factor
    if kind == "step":
        every = block.read("decay_epochs", "the schedule's boundaries")
        return lambda epoch: rate * factor ** (epoch // every)
    stones = sorted(block.read("decay_milestones", "the schedule's boundaries, one epoch earlier"))
    return lambda epoch: rate * factor ** bisect.bisect_right(stones, epoch + 1)
