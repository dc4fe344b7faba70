"""Faults of part E in loops written by hand that train in bfloat16 or float16.

The first side is a recipe where its operations have the dtypes that the loop's have, and else the loop without the fault.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp import LossScaler, adamw, sgd
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF
from tests.parity.held_out.part_e.variants import loop
from tests.parity.held_out.planted import ANY, LATER

_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_SCALED: Final[dict[str, Any]] = {**_SGD, "scaler": LossScaler(init_scale=2.0**10)}
_HIGH: Final[dict[str, Any]] = {**_SGD, "scaler": LossScaler(init_scale=2.0**24)}
_BRAIN: Final[dict[str, Any]] = {"DTYPE": "bfloat16", "KIND": "sgd"}
_HALF: Final[dict[str, Any]] = {"DTYPE": "float16", "KIND": "sgd"}
_BACKWARD: Final = "(loss if scaler is None else scaler.scale(loss)).backward()\n"
_UNSCALE: Final = "        scaler.unscale_(optimizer)\n"
_APPLY: Final = "        scaler.step(optimizer)\n        scaler.update()\n"
TORCH: Final = (
    loop("vae", "torch torch", "dampened momentum", "~dampen|~momentum|factor|formula", None, _BRAIN, (("momentum=MOMENTUM, weight_decay=DECAY)", "momentum=MOMENTUM, weight_decay=DECAY, dampening=0.5)"),), LATER, policy=BRAIN),
    loop("seq2seq", "torch torch", "clipped by the largest element", "~clip|factor", {**_SGD, "clip_norm": 0.05}, {**_BRAIN, "CLIP": 0.05}, (("clip_grad_norm_(parameters, CLIP)", 'clip_grad_norm_(parameters, CLIP, norm_type=float("inf"))'),), policy=BRAIN),
    loop("decoder", "torch torch", "last micro-batch left out", "~micro|~accumul|~row|factor|formula", None, {**_BRAIN, "PARTS": 2}, (("for part in range(PARTS):", "for part in range(PARTS - 1):"),), ANY._replace(stage="update|step|backward|forward"), policy=BRAIN),
    loop("encoder", "torch torch", "vectors do not decay", "~decay|factor|formula", _SGD, {**_BRAIN, "GROUPS": "vectors"}, (), policy=BRAIN),
    loop("convnet", "torch torch", "schedule one step late", "~schedule|~rate|~late|factor", None, {**_BRAIN, "SCHEDULE": "exponential"}, (("rate_at(training.step)", "rate_at(max(training.step - 1, 0))"),), LATER, policy=BRAIN),
    loop("vae", "torch torch", "unscaled by the next step's scale", "~scal|factor", None, {**_HALF, "GROWTH": 1}, ((_UNSCALE, f"{_UNSCALE}        [p.grad.mul_(0.5) for p in model.parameters()]\n"),), policy=HALF),
    loop("recommender", "torch torch", "scale halved after each step", "~scal|~back", _SCALED, _HALF, (("        scaler.update()\n", "        scaler.update(scaler.get_scale() / 2.0)\n"),), policy=HALF),
    loop("recommender", "torch torch", "infinities set to 0 and applied", "dtype|not finite|~finite|~overflow|~skip", _HIGH, {**_HALF, "SCALE": 2.0**24}, (("        scaler.step(optimizer)\n", "        [p.grad.nan_to_num_(0.0, 0.0, 0.0) for p in model.parameters()]\n        optimizer.step()\n"),), policy=HALF, steps=3),
    loop("encoder", "torch torch", "unscaled behind each micro-batch", "~scal|~micro|~accumul|factor|formula", None, {**_HALF, "PARTS": 2}, ((_BACKWARD, "scaler.scale(loss).backward()\n        [p.grad.div_(SCALE) for p in model.parameters()]\n"), (_UNSCALE, "        pass\n"), (_APPLY, "        optimizer.step()\n")), policy=HALF),
)  # fmt: skip
NNX: Final = (
    loop("recommender", "nnx nnx", "no bias correction", "~bias.correction", _ADAMW, {"DTYPE": "bfloat16"}, (("optax.adamw(rate, *BETAS, EPSILON, weight_decay=DECAY, mask=is_decayed if GROUPS else None)", "optax.chain(_scale(), optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate))"), ("def begin(", "def _scale() -> Any:\n    right = optax.scale_by_adam(*BETAS, EPSILON)\n\n    def update(g: Any, s: Any, p: Any = None) -> Any:\n        _, s = right.update(g, s, p)\n        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + EPSILON), s.mu, s.nu), s\n\n    return optax.GradientTransformation(right.init, update)\n\n\ndef begin(")), policy=CAST),
    loop("encoder", "nnx nnx", "plain momentum for Nesterov's", "~nesterov", {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1, nesterov=True)}, _BRAIN, (), policy=CAST),
    loop("decoder", "nnx nnx", "unscaled by half of the scale", "~scal|factor", None, _HALF, (("lambda g: g / scale, gradients", "lambda g: g / 2.0**9, gradients"),), policy=CAST_HALF),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX)
"""All of them."""
