"""Faults of part D in loops written by hand in float32, and in recipes."""

from __future__ import annotations

from typing import Any, Final

from polyamp import adam, adamw, schedules, sgd
from tests.parity.held_out.part_d.variants import loop, recipe
from tests.parity.held_out.planted import ANY, LATER

_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_STRONG: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.5)}
_FALLING: Final[dict[str, Any]] = {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1)}
_COSINE: Final[dict[str, Any]] = {"optimizer": sgd(schedules.cosine(1e-2, 4, end=5e-3), momentum=0.9, weight_decay=0.1)}
_CLIPPED: Final[dict[str, Any]] = {**_SGD, "clip_norm": 0.05}
_IS_SGD: Final[dict[str, Any]] = {"KIND": "sgd"}
_IS_CLIPPED: Final[dict[str, Any]] = {"KIND": "sgd", "CLIP": 0.05}
TORCH: Final = (
    loop("decoder", "torch torch", "two steps of the schedule for each update", "~schedule|~rate|factor", _FALLING, {**_IS_SGD, "SCHEDULE": "exponential"}, (("rate_at(training.step)", "rate_at(2 * training.step)"),), LATER),
    loop("vae", "torch torch", "clipped by the sum of absolute values", "~clip|factor", _CLIPPED, _IS_CLIPPED, (("clip_grad_norm_(parameters, CLIP)", "clip_grad_norm_(parameters, CLIP, norm_type=1.0)"),)),
    loop("tagger", "torch torch", "clipped with the decay in it", "~clip|~decay|factor|formula", _CLIPPED, _IS_CLIPPED, (("    torch.nn.utils.clip_grad_norm_(", "    [p.grad.add_(p.detach(), alpha=DECAY) for p in parameters]\n    torch.nn.utils.clip_grad_norm_("), ("momentum=MOMENTUM, weight_decay=DECAY", "momentum=MOMENTUM"))),
    loop("unet", "torch torch", "biases not clipped", "~clip|factor|formula", _CLIPPED, _IS_CLIPPED, (("clip(list(model.parameters()))", "clip([p for p in model.parameters() if p.ndim > 1])"),)),
    loop("recommender", "torch torch", "gradients cleared each second step", "~accumul|~clear|~zero|formula", _SGD, _IS_SGD, (("    optimizer.zero_grad()\n", "    if training.step % 2 == 0:\n        optimizer.zero_grad()\n"),), LATER),
    loop("seq2seq", "torch torch", "momentum forgotten between steps", "~momentum|missing|factor|formula", _SGD, {**_IS_SGD, "BY_HAND": True}, (('.mul_(group["momentum"])', ".mul_(0.0)"),), LATER),
    loop("convnet", "torch torch", "decay times the square of the rate", "~decay|factor|formula", _STRONG, {"BY_HAND": True, "DECAY": 0.5}, (('1 - group["lr"] * group["weight_decay"]', '1 - group["lr"] ** 2 * group["weight_decay"]'),)),
    loop("decoder", "torch torch", "decay with the wrong sign", "~decay|factor|formula", _STRONG, {"BY_HAND": True, "DECAY": 0.5}, (("p.mul_(1 - group", "p.mul_(1 + group"),)),
    loop("vae", "torch torch", "losses of the micro-batches added up in the report", "~loss|~micro|~accumul|factor|formula", {**_SGD, "accumulate_steps": 2}, {**_IS_SGD, "PARTS": 2}, (("total = total + loss.detach()", "total = total + loss.detach() * PARTS"),), ANY._replace(stage="step|forward")),
    loop("tagger", "torch torch", "gradients divided by the rows", "~rows|factor|formula", _SGD, _IS_SGD, (("    if CLIP:\n", '    [p.grad.div_(len(batch["tokens"])) for p in model.parameters()]\n    if CLIP:\n'),)),
)  # fmt: skip
NNX: Final = (
    loop("encoder", "torch nnx", "cosine one step early", "~schedule|~rate|~early|~cosine|factor", _COSINE, {**_IS_SGD, "SCHEDULE": "cosine", "END": 5e-3}, (("jnp.minimum(step / TOTAL, 1.0)", "jnp.minimum((step + 1) / TOTAL, 1.0)"),)),
    loop("vae", "torch nnx", "decay as a term of the loss", "~coupled|~decay|~L2", _STRONG, {"DECAY": 0.0}, (("        return loss * scale, (loss, after)", "        penalty = 0.25 * sum(jnp.square(p).sum() for p in jax.tree.leaves(given))\n        return (loss + penalty) * scale, (loss, after)"),)),
    loop("recommender", "nnx nnx", "moments made anew each step", "~moment|missing|factor|formula", _ADAMW, {}, (("    optimizer, state = training.optimizer\n", "    optimizer, _ = training.optimizer\n    state = optimizer.init(parameters)\n"),), LATER),
    loop("decoder", "nnx nnx", "Nesterov's moments", "~nesterov|factor|formula", _ADAMW, {}, (("return optax.adamw(", "return optax.nadamw("),)),
    loop("seq2seq", "torch nnx", "update applied twice", "factor|formula", _SGD, _IS_SGD, (("optax.apply_updates(parameters, updates)", "optax.apply_updates(optax.apply_updates(parameters, updates), updates)"),)),
)  # fmt: skip
RECIPES: Final = (
    recipe("convnet", "torch keras", "epsilon of 1e-4", "epsilon|~eps", {"optimizer": adam(1e-2, eps=1e-8)}, {"optimizer": adam(1e-2, eps=1e-4)}),
    recipe("recommender", "torch keras", "cosine over 8 steps for 4", "~cosine|~rate|~schedule|factor", {"optimizer": sgd(schedules.cosine(0.1, 4), momentum=0.9)}, {"optimizer": sgd(schedules.cosine(0.1, 8), momentum=0.9)}, LATER),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX, *RECIPES)
"""All of them."""
