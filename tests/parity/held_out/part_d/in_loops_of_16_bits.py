"""Faults of part D in loops written by hand that train in bfloat16 or float16.

The first side is a recipe where its operations have the dtypes that the loop's have, and else the loop without the fault.
"""

from __future__ import annotations

from typing import Any, Final

from polyamp import LossScaler, adamw, schedules, sgd
from tests.parity.held_out.part_c.variants import BRAIN, CAST, CAST_HALF, HALF
from tests.parity.held_out.part_d.variants import loop
from tests.parity.held_out.planted import ANY

_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_SCALED: Final[dict[str, Any]] = {**_SGD, "scaler": LossScaler(init_scale=2.0**10)}
_GROWS: Final[dict[str, Any]] = {**_SGD, "scaler": LossScaler(init_scale=2.0**10, growth_interval=1)}
_BRAIN: Final[dict[str, Any]] = {"DTYPE": "bfloat16", "KIND": "sgd"}
_HALF: Final[dict[str, Any]] = {"DTYPE": "float16", "KIND": "sgd"}
_REPORT: Final = ANY._replace(stage="step|forward")
_SCALE_LOSS: Final = "(loss if scaler is None else scaler.scale(loss))"
TORCH: Final = (
    loop("recommender", "torch torch", "scaler updated before the step", "~scal", _SCALED, _HALF, (("        scaler.step(optimizer)\n        scaler.update()\n", "        scaler.update()\n        scaler.step(optimizer)\n"),), policy=HALF),
    loop("vae", "torch torch", "scaled loss reported", "~loss|~scal|factor", None, _HALF, (("total = total + loss.detach()", f"total = total + {_SCALE_LOSS}.detach()"),), _REPORT, policy=HALF),
    loop("tagger", "torch torch", "scaled loss thrown away", "~scal|factor", None, _HALF, ((f"{_SCALE_LOSS}.backward()", f"{_SCALE_LOSS}\n        loss.backward()"),), policy=HALF),
    loop("encoder", "torch torch", "clip bound divided by the scale", "~clip|~scal", {**_SCALED, "clip_norm": 0.05}, {**_HALF, "CLIP": 0.05}, (("clip_grad_norm_(parameters, CLIP)", "clip_grad_norm_(parameters, CLIP / SCALE)"),), policy=HALF),
    loop("recommender", "torch torch", "grows by 4 for 2", "~scal|~grow", _GROWS, {**_HALF, "GROWTH": 1}, (("growth_interval=GROWTH)", "growth_interval=GROWTH, growth_factor=4.0)"),), policy=HALF),
    loop("vae", "torch torch", "scale of 2**8 for 2**10", "~scal", None, _HALF, (("init_scale=SCALE", "init_scale=SCALE / 4"),), policy=HALF),
    loop("encoder", "torch torch", "clipped per parameter", "~per parameter|~each parameter", {**_SGD, "clip_norm": 0.05}, {**_BRAIN, "CLIP": 0.05}, (("torch.nn.utils.clip_grad_norm_(parameters, CLIP)", "[torch.nn.utils.clip_grad_norm_([p], CLIP) for p in parameters]"),), policy=BRAIN),
    loop("recommender", "torch torch", "cleared between micro-batches", "~accumul|~micro|factor|formula", {**_SGD, "accumulate_steps": 2}, {**_BRAIN, "PARTS": 2}, (("        loss = loss_of(", "        optimizer.zero_grad()\n        loss = loss_of("),), policy=BRAIN),
    loop("seq2seq", "torch torch", "rate of 3e-2", "~rate|factor", _SGD, {**_BRAIN, "RATE": 3e-2}, (), policy=BRAIN),
    loop("convnet", "torch torch", "sum over the rows", "~rows|factor|formula", None, _BRAIN, (("    if CLIP:\n", '    [p.grad.mul_(len(batch["labels"])) for p in model.parameters()]\n    if CLIP:\n'),), policy=BRAIN),
)  # fmt: skip
NNX: Final = (
    loop("vae", "nnx nnx", "coupled decay", "~coupled|~decay|~L2", {"optimizer": adamw(1e-2, weight_decay=0.5)}, {"DTYPE": "bfloat16", "KIND": "adam", "DECAY": 0.5}, (), policy=CAST),
    loop("recommender", "nnx nnx", "clipped by value", "~by value|~clip", {**_SGD, "clip_norm": 0.05}, {**_BRAIN, "CLIP": 0.05}, (("g * jnp.minimum(1.0, CLIP / (norm + 1e-6))", "jnp.clip(g, -CLIP, CLIP)"),), policy=CAST),
    loop("vae", "nnx nnx", "schedule one step early", "~schedule|~rate|~early|factor", {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1)}, {**_BRAIN, "SCHEDULE": "exponential"}, (("RATE * 0.5**step", "RATE * 0.5 ** (step + 1)"),), policy=CAST),
    loop("recommender", "nnx nnx", "scale doubled after each step", "~scal|~grow", _SCALED, _HALF, (("jnp.where(finite, scale, 0.5 * scale)", "jnp.where(finite, 2.0 * scale, 0.5 * scale)"),), policy=CAST_HALF),
    loop("tagger", "nnx nnx", "moments of an overflow kept", "not finite|~finite|~overflow|~skip|~moment", None, {**_HALF, "SCALE": 2.0**17}, (("        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)\n", ""),), ANY._replace(step=(1, 2, 3, 4)), policy=CAST_HALF, steps=4),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX)
"""All of them."""
