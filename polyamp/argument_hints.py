"""Other libraries' names for the arguments of records, mapped to polyamp's. Imported when such a name was used.

The names are those of torch, Keras, optax, Lightning, Accelerate and jmp, by kind of record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from polyamp.errors import closest_words, describe_value

_CLIP_NAMES: Final = dict.fromkeys(
    ("clip", "clipnorm", "global_clipnorm", "grad_clip", "grad_clip_norm", "gradient_clip", "gradient_clip_val",
     "gradient_clipping", "max_grad_norm", "max_norm"), "clip_norm")  # fmt: skip
_CLIP_VALUE_NAMES: Final = dict.fromkeys(
    ("clip_by_value", "clip_grad_value", "clipvalue", "grad_clip_value", "gradient_clip_value", "max_grad_value"),
    "clip_value",
)
_RATE_NAMES: Final = ("lr", "rate", "learningrate", "step_size", "schedule", "scheduler", "lr_schedule", "lr_scheduler")
_KERNEL_HINT: Final = "Drop it: polyamp chooses the framework's quickest kernels itself."
_CLIP_HINT: Final = (
    "Clipping is the recipe's: Recipe(clip_norm=...), by the norm of all gradients, or Recipe(clip_value=...)."
)
_NATIVE_HINT: Final = (
    "polyamp's specs do not have it. Give the recipe the framework's own optimizer: Recipe(optimizer=torch.optim..., "
    "keras.optimizers... or optax...)."
)
_EMA_HINT: Final = "Averages of the parameters: Recipe(ema=polyamp.Ema(decay=...))."
_OPTIMIZER_HINT: Final = "It is the optimizer's: optimizer=polyamp.adamw({}=...)."
_POLICY_HINT: Final = "It is the policy's: policy=polyamp.Policy('mixed_float16', {}=...)."
_POLICY_NAMES: Final = (
    "param", "compute", "output", "mode", "overrides", "float32_matmul", "op_list", "op_rules", "float8"
)  # fmt: skip
_PARAMETERS_HINT: Final = "Drop it: polyamp.init(model, recipe) gives the optimizer the model's parameters."

ARGUMENT_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "spec": {
        **dict.fromkeys(_RATE_NAMES, "learning_rate"),
        **dict.fromkeys(("epsilon", "epsilon_value", "adam_epsilon"), "eps"),
        **dict.fromkeys(("weight_decay_rate", "wd", "l2", "decoupled_weight_decay"), "weight_decay"),
        **dict.fromkeys(("beta_1", "beta_2"), "Both in one: betas=(beta_1, beta_2)."),
        **dict.fromkeys(("beta1", "beta2"), "Both in one: betas=(beta1, beta2)."),
        **dict.fromkeys(("b1", "b2"), "Both in one: betas=(b1, b2)."),
        **dict.fromkeys(("rho", "decay", "smoothing"), "alpha"),
        **dict.fromkeys(("initial_scale", "initial_accumulator"), "initial_accumulator_value"),
        **dict.fromkeys(("params", "parameters", "model"), _PARAMETERS_HINT),
        **dict.fromkeys(("fused", "foreach", "capturable", "differentiable", "jit_compile"), _KERNEL_HINT),
        **dict.fromkeys((*_CLIP_NAMES, *_CLIP_VALUE_NAMES), _CLIP_HINT),
        **dict.fromkeys(
            ("amsgrad", "dampening", "maximize", "mu_dtype", "mask"), _NATIVE_HINT
        ),
        **dict.fromkeys(("use_ema", "ema_momentum"), _EMA_HINT),
    },
    "recipe": {
        **_CLIP_NAMES,
        **_CLIP_VALUE_NAMES,
        **dict.fromkeys(("precision", "mixed_precision", "dtype", "dtype_policy", "amp", "opt_level"), "policy"),
        **dict.fromkeys(("optim", "opt", "tx", "optimiser"), "optimizer"),
        **dict.fromkeys(("loss_scaler", "loss_scale", "grad_scaler", "scale"), "scaler"),
        **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps",
                         "grad_accum_steps", "accumulate", "micro_batches"), "accumulate_steps"),
        **dict.fromkeys((*_RATE_NAMES, "learning_rate"), _OPTIMIZER_HINT.format("learning_rate")),
        **dict.fromkeys(("use_ema", "ema_momentum", "ema_decay", "model_ema", "averaging"), _EMA_HINT),
        "weight_decay": _OPTIMIZER_HINT.format("weight_decay"),
        **{name: _POLICY_HINT.format(name) for name in _POLICY_NAMES},
    },
    "scaler": {
        **dict.fromkeys(("initial_scale", "scale", "loss_scale", "initial_loss_scale"), "init_scale"),
        **dict.fromkeys(("dynamic_growth_steps", "period", "growth_steps", "scale_window", "loss_scale_window"),
                        "growth_interval"),
        **dict.fromkeys(("factor", "scale_factor"), "growth_factor"),
        **dict.fromkeys(("min_loss_scale", "minimum_scale"), "min_scale"),
        **dict.fromkeys(("max_loss_scale", "maximum_scale"), "max_scale"),
        "enabled": "One that does nothing is LossScaler.off(); Recipe(scaler=None) lets the policy choose.",
        "dynamic": "kind='dynamic' is the default; a scale that never moves is LossScaler.static(1024.0).",
        "device": "Drop it: the scale goes to the model's device.",
    },
    "schedule": {
        **dict.fromkeys(("T_max", "decay_steps", "num_steps", "transition_steps"), "steps"),
        **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_iters", "warmup_epochs"), "warmup_steps"),
        **dict.fromkeys(("total", "num_training_steps", "decay_steps", "total_iters", "max_steps"), "total_steps"),
        **dict.fromkeys(("lr", "learning_rate", "initial_learning_rate", "peak_value", "max_lr"), "peak"),
        **dict.fromkeys(("init_value", "warmup_lr_init", "warmup_init_lr"), "start"),
        **dict.fromkeys(("eta_min", "end_value", "min_lr", "final_lr"), "end"),
        **dict.fromkeys(("step_size", "decay_every"), "every"),
        **dict.fromkeys(("gamma", "decay_rate"), "factor"),
        "milestones": "boundaries",
    },
    "policy": {
        **dict.fromkeys(("dtype", "compute_dtype", "amp_dtype", "cast"), "compute"),
        **dict.fromkeys(("params", "param_dtype", "params_dtype", "variable_dtype", "storage_dtype"), "param"),
        **dict.fromkeys(("outputs", "output_dtype", "output_type"), "output"),
        **dict.fromkeys(("name", "policy", "precision", "spelling"), "The spelling comes first, without a name."),
        **dict.fromkeys(("keep_float32", "skip", "fp32_modules", "exclude"), "overrides"),
    },
}  # fmt: skip
"""`word` of a record class -> another library's name -> the field here, or a sentence."""


def argument_hint(word: str, fields: Sequence[str], given: Sequence[str]) -> str:
    """Return a hint for unknown arguments of a record: "" or one or two sentences with a leading space.

    Args:
        word: `word` of the record's class.
        fields: its fields.
        given: the unknown arguments.
    """
    table = ARGUMENT_NAMES.get("spec" if word == "group" else word, {})
    names: dict[str, None] = {}
    sentences: dict[str, None] = {}
    for name in given:
        known = table.get(name) or next((value for key, value in table.items() if key.lower() == name.lower()), "")
        if known in ("start", "peak") and known not in fields:
            known = next((other for other in ("peak", "value", "initial") if other in fields), "")
        if " " in known:
            sentences[known] = None
        elif known in fields:
            names[known] = None
        else:
            names.update(dict.fromkeys(closest_words(name, fields, limit=1)))
    said = [f"Did you mean {' and '.join(map(repr, names))}?"] if names else []
    return "".join(f" {sentence}" for sentence in (*said, *sentences))


def keyword_hint(word: str, values: Sequence[Any]) -> str:
    """Return how to write a positional argument of a keyword-only record: "" or a sentence with a leading space."""
    value = values[0]
    if word == "recipe":
        kind = getattr(type(value), "word", "")
        name = {"policy": "policy", "scaler": "scaler", "spec": "optimizer"}.get(kind, "policy")
        return f" Write Recipe({name}={_short_value(value)})." if kind or isinstance(value, str) else ""
    if word == "scaler" and isinstance(value, str):
        return f" Write LossScaler(kind={value!r})." if value in ("dynamic", "static", "off") else ""
    if word == "scaler" and isinstance(value, int | float):
        return f" Write LossScaler(init_scale={value!r})."
    return ""


def _short_value(value: Any) -> str:
    return describe_value(value) if isinstance(value, str) else "..."
