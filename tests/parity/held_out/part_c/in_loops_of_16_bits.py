"""Faults of part C in loops written by hand that train in bfloat16 or float16, most of them about the scale."""

from __future__ import annotations

from typing import Any, Final

from polyamp import LossScaler, adamw, no_decay, schedules, sgd
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF, loop
from tests.parity.held_out.planted import ANY, LATER

_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_SCALED: Final[dict[str, Any]] = {**_SGD, "scaler": LossScaler(init_scale=2.0**10)}
_BRAIN: Final[dict[str, Any]] = {"DTYPE": "bfloat16"}
_BRAIN_SGD: Final[dict[str, Any]] = {"DTYPE": "bfloat16", "KIND": "sgd"}
_HALF: Final[dict[str, Any]] = {"DTYPE": "float16", "KIND": "sgd"}
_CLIPPED: Final[dict[str, Any]] = {**_HALF, "CLIP": 0.05}
_UNSCALE: Final = "        scaler.unscale_(optimizer)\n"
TORCH: Final = (
    loop("decoder", "torch torch", "weights kept in bfloat16", "dtype|~bfloat16|~round|formula", _SGD, _BRAIN_SGD, (("        optimizer.step()\n    return", "        optimizer.step()\n        [p.data.copy_(p.data.bfloat16()) for p in model.parameters()]\n    return"),), policy=BRAIN),
    loop("recommender", "torch torch", "momentum of 0.5", "~momentum|factor|formula|missing", _SGD, {**_BRAIN_SGD, "MOMENTUM": 0.5}, (), LATER, policy=BRAIN),
    loop("vae", "torch torch", "decay forgotten", "~decay", {"optimizer": adamw(1e-2, weight_decay=1.0)}, {**_BRAIN, "DECAY": 0.0}, (), policy=BRAIN),
    loop("encoder", "torch torch", "coupled decay", "~coupled|~decay|~L2", {"optimizer": adamw(1e-2, weight_decay=0.5)}, {**_BRAIN, "KIND": "adam", "DECAY": 0.5}, (), policy=BRAIN),
    loop("tagger", "torch torch", "not clipped", "~clip", {**_SGD, "clip_norm": 0.05}, _BRAIN_SGD, (), policy=BRAIN),
    loop("decoder", "torch torch", "micro-batches not divided", "~accumul|~micro", {**_SGD, "accumulate_steps": 4}, {**_BRAIN_SGD, "PARTS": 4}, (("loss = loss_of(model, rows) / PARTS", "loss = loss_of(model, rows)"),), policy=BRAIN),
    loop("seq2seq", "torch torch", "rate of 1e-3", "~rate|factor", _ADAMW, {**_BRAIN, "RATE": 1e-3}, (), policy=BRAIN),
    loop("unet", "torch torch", "schedule one step early", "~schedule|~rate|~early|factor", {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1)}, {**_BRAIN_SGD, "SCHEDULE": "exponential"}, (("rate_at(training.step)", "rate_at(training.step + 1)"),), policy=BRAIN),
    loop("recommender", "torch torch", "epsilon of 1e-2 in AdamW by hand", "epsilon|~eps", _ADAMW, {**_BRAIN, "BY_HAND": True, "EPSILON": 1e-2}, (), policy=BRAIN),
    loop("vae", "torch torch", "no bias correction", "~bias.correction", _ADAMW, {**_BRAIN, "BY_HAND": True}, (("root = (square / (1 - two**step)).sqrt()", "root = square.sqrt()"), ("(mean / (1 - one**step))", "mean")), policy=BRAIN),
    loop("tagger", "torch torch", "first beta of 0.5", "~beta|factor|formula", None, {**_BRAIN, "BY_HAND": True}, (("one, two = group[\"betas\"]", "one, two = 0.5, group[\"betas\"][1]"),), policy=BRAIN),
    loop("decoder", "torch torch", "biases and norms decay too", "~decay|formula|factor", {"optimizer": adamw(1e-2, weight_decay=0.5, groups=no_decay("vector"))}, {**_BRAIN, "MODE": "cast", "DECAY": 0.5}, (), policy=CAST),
    loop("vae", "torch torch", "micro-batches averaged one after the other", "~accumul|~micro|factor|formula", {**_SGD, "accumulate_steps": 4}, {**_BRAIN_SGD, "MODE": "cast", "PARTS": 4}, (("        (loss if scaler is None else scaler.scale(loss)).backward()\n", "        for p in model.parameters() if part else ():\n            p.grad.mul_(0.5)\n        (loss * PARTS * (0.5 if part else 1.0)).backward()\n"),), policy=CAST),
    loop("recommender", "torch torch", "unscaled twice", "~scal", _SCALED, _HALF, ((_UNSCALE, f"{_UNSCALE}        [p.grad.div_(SCALE) for p in model.parameters()]\n"),), policy=HALF),
    loop("vae", "torch torch", "clip factor of the scaled gradients", "~unscal|~clip|~scal", {**_SGD, "clip_norm": 0.05, "scaler": LossScaler(init_scale=2.0**6)}, {**_CLIPPED, "SCALE": 2.0**6}, ((_UNSCALE, f"        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()\n{_UNSCALE}"), ("        clip(list(model.parameters()))", "        [p.grad.mul_((CLIP / (norm + 1e-6)).clamp(max=1.0)) for p in model.parameters()]")), policy=HALF),
    loop("encoder", "torch torch", "clipped before unscaling", "~unscal", None, _CLIPPED, ((_UNSCALE, "        pass\n"),), policy=HALF),
    loop("decoder", "torch torch", "clip bound times the scale, gradients unscaled", "~clip|~scal", {**_SCALED, "clip_norm": 0.05}, _CLIPPED, (("clip_grad_norm_(parameters, CLIP)", "clip_grad_norm_(parameters, CLIP * SCALE)"),), policy=HALF),
    loop("tagger", "torch torch", "gradients never unscaled", "~scal", _SCALED, _HALF, ((_UNSCALE, "        pass\n"), ("        scaler.step(optimizer)\n        scaler.update()\n", "        optimizer.step()\n")), policy=HALF),
    loop("recommender", "torch torch", "only the first micro-batch is scaled", "~scal|~micro|factor|formula", {**_SCALED, "accumulate_steps": 2}, {**_HALF, "PARTS": 2}, (("(loss if scaler is None else scaler.scale(loss)).backward()", "(scaler.scale(loss) if part == 0 else loss).backward()"),), policy=HALF),
    loop("unet", "torch torch", "the scale is not updated", "~scal", {**_SGD, "scaler": LossScaler(init_scale=2.0**10, growth_interval=1)}, {**_HALF, "GROWTH": 1}, (("        scaler.update()\n", "        scaler.update(SCALE)\n"),), policy=HALF),
    loop("vae", "torch torch", "the scale grows each step", "~scal|~grow", _SCALED, {**_HALF, "GROWTH": 1}, (), policy=HALF),
    loop("recommender", "torch torch", "an overflow is not skipped", "dtype|not finite|~finite|~overflow|~skip", {**_SGD, "scaler": LossScaler(init_scale=2.0**24)}, {**_HALF, "SCALE": 2.0**24}, (("        scaler.step(optimizer)\n", "        optimizer.step()\n"),), policy=HALF, steps=3),
    loop("recommender", "torch torch", "a skipped step counts in the schedule", "~schedule|~rate|~skip|~appl|~number", {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1), "scaler": LossScaler(init_scale=2.0**19)}, {**_HALF, "SCHEDULE": "exponential", "SCALE": 2.0**19}, (("applied = int(scaler.get_scale() >= before)", "applied = 1"),), ANY._replace(step=(1, 2, 3, 4)), policy=HALF, steps=4),
    loop("recommender", "torch torch", "backed off by 4 for 2", "~scal|~back", {**_SGD, "scaler": LossScaler(init_scale=2.0**24)}, {**_HALF, "SCALE": 2.0**24}, (("growth_interval=GROWTH)", "growth_interval=GROWTH, backoff_factor=0.25)"),), ANY._replace(step=(1, 2)), policy=HALF),
    loop("vae", "torch torch", "Nesterov's momentum", "~nesterov", _SCALED, _HALF, (("momentum=MOMENTUM, weight_decay=DECAY)", "momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)"),), policy=HALF),
)  # fmt: skip
NNX: Final = (
    loop("recommender", "nnx nnx", "decay of 0.5 for 0.01", "~decay", {"optimizer": adamw(1e-2, weight_decay=0.01)}, {**_BRAIN, "DECAY": 0.5}, (), policy=CAST),
    loop("vae", "nnx nnx", "momentum of 0.5", "~momentum|factor|formula", _SGD, {**_BRAIN_SGD, "MOMENTUM": 0.5}, (), LATER, policy=CAST),
    loop("tagger", "nnx nnx", "not clipped", "~clip", {**_SGD, "clip_norm": 0.05}, _BRAIN_SGD, (), policy=CAST),
    loop("decoder", "nnx nnx", "cast weights are kept", "dtype|~bfloat16|~round|formula", _SGD, _BRAIN_SGD, (("    applied = optax.apply_updates(parameters, updates)\n", "    applied = cast(cast(optax.apply_updates(parameters, updates), DTYPE), \"float32\")\n"),), policy=CAST),
    loop("encoder", "nnx nnx", "Nesterov's momentum", "~nesterov", _SGD, _BRAIN_SGD, (("optax.sgd(rate, momentum=MOMENTUM)", "optax.sgd(rate, momentum=MOMENTUM, nesterov=True)"),), policy=CAST),
    loop("recommender", "nnx nnx", "gradients not unscaled", "~scal", _SCALED, _HALF, (("    gradients = jax.tree.map(lambda g: g / scale, gradients)\n", ""),), policy=CAST_HALF),
    loop("vae", "nnx nnx", "clipped before unscaling", "~unscal|~clip", {**_SCALED, "clip_norm": 0.05}, _CLIPPED, (("    gradients = jax.tree.map(lambda g: g / scale, gradients)\n", "    gradients = jax.tree.map(lambda g: g / scale, clip(gradients))\n"), ("    if CLIP:\n        gradients = clip(gradients)\n", "")), policy=CAST_HALF),
    loop("tagger", "nnx nnx", "unscaled by the square", "~scal", None, _HALF, (("lambda g: g / scale, gradients", "lambda g: g / scale**2, gradients"),), policy=CAST_HALF),
    loop("recommender", "nnx nnx", "an overflow is not skipped", "dtype|not finite|~finite|~overflow|~skip", {**_SGD, "scaler": LossScaler(init_scale=2.0**24)}, {**_HALF, "SCALE": 2.0**24}, (("        applied = jax.tree.map(lambda new, old: jnp.where(finite, new, old), applied, parameters)\n", ""),), policy=CAST_HALF, steps=3),
    loop("vae", "nnx nnx", "the scale never backs off", "~scal|~back", None, {**_HALF, "SCALE": 2.0**24}, (("jnp.where(finite, scale, 0.5 * scale)", "scale"),), policy=CAST_HALF),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX)
"""All of them."""
