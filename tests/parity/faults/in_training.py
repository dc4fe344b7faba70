"""Faults in the loss, in the recipe and in the rule of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from polyamp import Group, LossScaler, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.faults.planted import LOSS, Expected, Fault, update

HALF: Final = "mixed_float16"
_SGD: Final = {"optimizer": sgd(0.1, momentum=0.9)}
_ADAMW: Final = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_HALF: Final = {"optimizer": sgd(0.1, momentum=0.9), "policy": HALF, "clip_norm": 0.5}


def _loss(what: str, model: str, first: str, second: str, right: str, wrong: str) -> Fault:
    return Fault("loss", what, model, first, second, LOSS, losses=(right, wrong))


def _recipe(
    what: str,
    model: str,
    first: str,
    second: str,
    recipe: Mapping[str, Any],
    changes: Mapping[str, Any],
    *places: str,
    step: int = 1,
) -> Fault:
    at = update(model, *(places or ("any",)), step=step)
    return Fault("optimizer", what, model, first, second, at, recipe=recipe, changes=changes)


def _rule(
    what: str, model: str, first: str, second: str, rule: str, at: Expected, recipe: Mapping[str, Any], **others: Any
) -> Fault:
    return Fault("step", what, model, first, second, at, recipe=recipe, rule=rule, **others)


LOSSES: Final = (
    _loss("sum for the mean", "gpt", "torch", "nnx", "plain", "sum"),
    _loss("sum for the mean", "autoencoder", "keras", "torch", "plain", "sum"),
    _loss("mean over examples, sum inside of one", "gpt", "torch", "keras", "plain", "mean over rows"),
    _loss("mean over padded positions too", "gpt", "keras", "linen", "padded", "mean over padded"),
    _loss("mean over padded positions too", "tagger", "torch", "equinox", "padded", "mean over padded"),
    _loss("padding not ignored", "tagger", "nnx", "keras", "padded", "plain"),
    _loss("labels not shifted", "gpt", "torch", "torch", "next", "not shifted"),
    _loss("smoothed labels", "vit", "torch", "keras", "plain", "smoothed"),
    _loss("half of the squared error", "autoencoder", "torch", "haiku", "plain", "half"),
    _loss("a penalty of the weights", "resnet", "keras", "torch", "plain", "penalised"),
    _loss("micro-batches' means added up", "vit", "nnx", "torch", "plain", "doubled"),
)  # fmt: skip
OPTIMIZERS: Final = (
    _recipe("momentum of 0.8", "gpt", "torch", "nnx", _SGD, {"optimizer": sgd(0.1, momentum=0.8)}, step=2),
    _recipe("Nesterov's momentum", "vit", "torch", "keras", _SGD, {"optimizer": sgd(0.1, momentum=0.9, nesterov=True)}),
    _recipe("second beta of 0.99", "gpt", "keras", "torch", _ADAMW, {"optimizer": adamw(1e-2, betas=(0.9, 0.99), weight_decay=0.1)}),
    _recipe("first beta of 0.95", "vit", "torch", "linen", _ADAMW, {"optimizer": adamw(1e-2, betas=(0.95, 0.999), weight_decay=0.1)}),
    _recipe("epsilon of 1e-3", "gpt", "torch", "nnx", _ADAMW, {"optimizer": adamw(1e-2, eps=1e-3, weight_decay=0.1)}),
    _recipe("decay in the gradient", "autoencoder", "torch", "keras", _ADAMW, {"optimizer": adam(1e-2, weight_decay=0.1)}),
    _recipe("decay of the biases", "gpt", "torch", "nnx", {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("bias"))}, _ADAMW),
    _recipe("decay of the norms", "resnet", "keras", "torch", {"optimizer": sgd(0.1, momentum=0.9, weight_decay=1e-2, groups=no_decay("norm"))}, {"optimizer": sgd(0.1, momentum=0.9, weight_decay=1e-2)}, "norm", "norm 1@0", "norm 2@0", "project norm@1"),
    _recipe("no decay of the embeddings", "gpt", "torch", "keras", _ADAMW, {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("embedding"))}, "tokens", "positions"),
    _recipe("other rate of the head", "vit", "torch", "nnx", _ADAMW, {"optimizer": adamw(1e-2, weight_decay=0.1, groups=[Group("classifier/**", learning_rate_scale=0.5)])}, "head"),
    _recipe("embedding frozen", "tagger", "keras", "torch", _SGD, {"optimizer": sgd(0.1, momentum=0.9, groups=[Group("word_embeddings/**", learning_rate_scale=0.0)])}, "words"),
    _recipe("rate halved one step early", "vit", "torch", "nnx", {"optimizer": sgd(schedules.step(0.1, every=2, factor=0.5), momentum=0.9)}, {"optimizer": sgd(schedules.step(0.1, every=1, factor=0.5), momentum=0.9)}, step=2),
    _recipe("warm-up one step ahead", "gpt", "keras", "torch", {"optimizer": adamw(schedules.linear_warmup(1e-2, 4, start=1e-3))}, {"optimizer": adamw(schedules.linear_warmup(1e-2, 4, start=3.25e-3))}),
    _recipe("cosine over 12 steps for 10", "autoencoder", "torch", "linen", {"optimizer": sgd(schedules.cosine(0.1, 10), momentum=0.9)}, {"optimizer": sgd(schedules.cosine(0.1, 12), momentum=0.9)}, step=2),
    _recipe("clipped at 0.2 for 0.1", "vit", "torch", "equinox", {**_SGD, "clip_norm": 0.1}, {"clip_norm": 0.2}),
    _recipe("not clipped", "gpt", "keras", "nnx", {**_SGD, "clip_norm": 0.1}, {"clip_norm": None}),
    _recipe("RMSprop's alpha of 0.9", "autoencoder", "keras", "torch", {"optimizer": rmsprop(1e-3)}, {"optimizer": rmsprop(1e-3, alpha=0.9)}),
    _recipe("Lion's second beta of 0.95", "vit", "torch", "haiku", {"optimizer": lion(1e-3)}, {"optimizer": lion(1e-3, betas=(0.9, 0.95))}),
    _recipe("rate of 0.09 for 0.1", "resnet", "torch", "nnx", _SGD, {"optimizer": sgd(0.09, momentum=0.9)}),
)  # fmt: skip
_NORM: Final = Expected("step", "", what="grad_norm|loss")


def _half(stage: str, what: str = ".*") -> Expected:
    return Expected(stage, ".*", phase="policy", what=what)


STEPS: Final = (
    _rule("accumulation without division", "gpt", "keras", "torch", "sum of micro-batches", _NORM, {**_SGD, "accumulate_steps": 2}),
    _rule("accumulation without division", "vit", "torch", "nnx", "sum of micro-batches", _NORM, {**_SGD, "accumulate_steps": 2}),
    _rule("accumulation without division", "vit", "torch", "keras", "sum of micro-batches", _NORM, {**_SGD, "accumulate_steps": 4}),
    Fault("step", "micro-batches' means of unequal numbers of labels", "gpt", "torch", "nnx", _NORM, losses=("padded", "padded"), recipe=_SGD, changes={"accumulate_steps": 2}),
    _rule("clipped before unscaling", "gpt", "keras", "torch", "clipped before unscaling", _half("update"), _HALF),
    _rule("clipped before unscaling", "vit", "torch", "nnx", "clipped before unscaling", _half("update"), _HALF),
    _rule("clipped before unscaling", "autoencoder", "torch", "keras", "clipped before unscaling", _half("update"), _HALF),
    _rule("loss scale not divided out", "gpt", "keras", "torch", "not unscaled", _half("backward"), _HALF),
    _rule("loss scale not divided out", "vit", "torch", "nnx", "not unscaled", _half("backward"), _HALF),
    Fault("step", "other initial scale", "vit", "torch", "keras", _half("step", "scale"), recipe=_HALF, changes={"scaler": LossScaler(init_scale=2.0**10)}),
    Fault("step", "scale grows at once", "autoencoder", "keras", "nnx", _half("step", "scale"), recipe=_HALF, changes={"scaler": LossScaler(growth_interval=1)}),
    _rule("overflow not skipped", "gpt", "torch", "nnx", "never skipped", _half("step", "finite|applied|scale"), {**_HALF, "scaler": LossScaler(init_scale=2.0**24)}),
    _rule("no bias correction", "gpt", "keras", "torch", "no bias correction", update("gpt", "any", what="parameter"), _ADAMW),
    _rule("no bias correction", "vit", "torch", "nnx", "no bias correction", update("vit", "any", what="parameter"), _ADAMW),
    _rule("no bias correction", "autoencoder", "torch", "keras", "no bias correction", update("autoencoder", "any", what="parameter"), _ADAMW),
)  # fmt: skip
FAULTS: Final = (*LOSSES, *OPTIMIZERS, *STEPS)
"""All of them."""
