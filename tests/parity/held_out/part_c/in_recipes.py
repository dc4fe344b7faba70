"""Faults of part C in the recipe."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Group, LossScaler, adagrad, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.part_c.variants import BRAIN, HALF, recipe
from tests.parity.held_out.planted import ANY, LATER

_PLAIN: Final[dict[str, Any]] = {"optimizer": sgd(0.1, momentum=0.9)}
_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
PLANTS: Final = (
    recipe("decoder", "torch nnx", "rate of 3e-3", "~rate|factor", _ADAMW, {"optimizer": adamw(3e-3, weight_decay=0.1)}),
    recipe("encoder", "torch torch", "first beta of 0.8", "~beta|factor|formula", {**_ADAMW, "policy": BRAIN}, {"optimizer": adamw(1e-2, betas=(0.8, 0.999), weight_decay=0.1)}),
    recipe("seq2seq", "nnx nnx", "epsilon of 1e-3", "epsilon|~eps", _ADAMW, {"optimizer": adamw(1e-2, eps=1e-3, weight_decay=0.1)}),
    recipe("convnet", "torch keras", "momentum of 0.5", "~momentum|factor|formula", _PLAIN, {"optimizer": sgd(0.1, momentum=0.5)}, LATER),
    recipe("vae", "torch nnx", "embeddings' and vectors' decay", "~decay|formula|factor", {"optimizer": adamw(1e-2, weight_decay=0.5, groups=no_decay("bias", "norm"))}, {"optimizer": adamw(1e-2, weight_decay=0.5)}),
    recipe("recommender", "torch keras", "clipped at 0.01 for 0.1", "~clip|factor", {**_PLAIN, "clip_norm": 0.1}, {"clip_norm": 0.01}),
    recipe("tagger", "torch torch", "clipped by value for the norm", "~clip|~by value|~norm|formula", {**_PLAIN, "clip_norm": 0.05}, {"clip_norm": None, "clip_value": 0.05}),
    recipe("unet", "torch nnx", "warm-up of 2 steps for 4", "~rate|~schedule|~warm|factor", {"optimizer": sgd(schedules.linear_warmup(1e-2, 4, start=1e-3), momentum=0.9)}, {"optimizer": sgd(schedules.linear_warmup(1e-2, 2, start=1e-3), momentum=0.9)}, LATER),
    recipe("decoder", "torch torch", "centered RMSprop", "~center|formula|factor", {"optimizer": rmsprop(1e-3)}, {"optimizer": rmsprop(1e-3, centered=True)}, ANY._replace(step=(1, 2))),
    recipe("recommender", "torch nnx", "Adagrad's first sum of 0.1", "~initial|~accumulator|formula|factor", {"optimizer": adagrad(1e-2)}, {"optimizer": adagrad(1e-2, initial_accumulator_value=0.1)}, ANY._replace(step=(0, 1))),
    recipe("encoder", "torch torch", "Lion for AdamW with its rate", "formula|~lion|factor|missing", {"optimizer": lion(1e-3, weight_decay=0.1)}, {"optimizer": adamw(1e-3, weight_decay=0.1)}),
    recipe("vae", "torch torch", "the last layer's rate", "~rate|factor|formula", {**_PLAIN, "policy": HALF, "scaler": LossScaler(init_scale=2.0**6)}, {"optimizer": sgd(0.1, momentum=0.9, groups=[Group("decoder2/**", learning_rate=0.05)])}),
    recipe("tagger", "torch nnx", "no Nesterov", "~nesterov", {"optimizer": sgd(0.1, momentum=0.9, nesterov=True)}, {"optimizer": sgd(0.1, momentum=0.9)}),
    recipe("seq2seq", "torch torch", "scale grows after each step", "~scal|~grow", {**_PLAIN, "policy": HALF, "scaler": LossScaler(init_scale=2.0**8, growth_interval=100)}, {"scaler": LossScaler(init_scale=2.0**8, growth_interval=1)}, ANY._replace(phase="policy", what="scale")),
    recipe("unet", "torch torch", "coupled decay", "~coupled|~decay|~L2", _ADAMW, {"optimizer": adam(1e-2, weight_decay=0.1)}),
)  # fmt: skip
"""All of them."""
