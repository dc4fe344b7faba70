"""Faults of part E in loops written by hand in float32, and in recipes."""

from __future__ import annotations

from typing import Any, Final

from polyamp import adamw, lion, schedules, sgd
from tests.parity.held_out.part_e.variants import loop, recipe
from tests.parity.held_out.planted import ANY, LATER

_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_FALLING: Final[dict[str, Any]] = {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1)}
_COSINE: Final[dict[str, Any]] = {"optimizer": sgd(schedules.cosine(1e-2, 4, end=5e-3), momentum=0.9, weight_decay=0.1)}
_CLIPPED: Final[dict[str, Any]] = {**_SGD, "clip_norm": 0.05}
_IS_SGD: Final[dict[str, Any]] = {"KIND": "sgd"}
_IS_FALLING: Final[dict[str, Any]] = {"KIND": "sgd", "SCHEDULE": "exponential"}
_IS_CLIPPED: Final[dict[str, Any]] = {"KIND": "sgd", "CLIP": 0.05}
_BOTH: Final = ANY._replace(step=(1, 2))
_MOVED: Final = "missing|formula|factor|~frozen|~not move|~stand|~stood"
TORCH: Final = (
    loop("decoder", "torch torch", "clipped behind the update", "~clip", _CLIPPED, _IS_CLIPPED, (("    if CLIP:\n        clip(list(model.parameters()))\n", ""), ("        optimizer.step()\n    return", "        optimizer.step()\n        clip(list(model.parameters()))\n    return"))),
    loop("encoder", "torch torch", "second beta of 0.99", "~beta|factor|formula", _ADAMW, {"BETAS": (0.9, 0.99)}, (), _BOTH),
    loop("recommender", "torch torch", "rate times the micro-batches", "~rate|~micro|~accumul|factor", {**_SGD, "accumulate_steps": 2}, {**_IS_SGD, "PARTS": 2}, (('group["share"] * rate_at(training.step)', 'group["share"] * rate_at(training.step) * PARTS'),)),
    loop("convnet", "torch torch", "rate falls by 0.7 for 0.5", "~rate|~schedule|factor", _FALLING, _IS_FALLING, (("RATE * 0.5**step", "RATE * 0.7**step"),), LATER),
    loop("seq2seq", "torch torch", "first gradient twice in the momentum", "~momentum|factor|formula", _SGD, {**_IS_SGD, "BY_HAND": True}, (('state["momentum_buffer"] = torch.zeros_like(p)', 'state["momentum_buffer"] = gradient.clone()'),)),
    loop("vae", "torch torch", "clipped by the norm of each weight", "~clip|formula|factor", _CLIPPED, _IS_CLIPPED, (("torch.nn.utils.clip_grad_norm_(parameters, CLIP)", "[torch.nn.utils.clip_grad_norm_([p], CLIP * float(p.norm())) for p in parameters]"),)),
    loop("tagger", "torch torch", "first batch again in each step", "~batch|~row|formula|factor|layout", _SGD, _IS_SGD, (("for name, a in batch.items()}\n        loss", "for name, a in _SEEN.setdefault(0, batch).items()}\n        loss"), ("def step(", "_SEEN: dict[int, Any] = {}\n\n\ndef step(")), LATER._replace(stage="update|step|backward|forward")),
    loop("decoder", "torch torch", "a tenth of the rate for the embeddings", "~rate|factor|formula", _SGD, {**_IS_SGD, "GROUPS": "embed"}, ()),
    loop("unet", "torch torch", "schedule stands at its first step", "~schedule|~rate|~step|~count|factor", _FALLING, _IS_FALLING, (("rate_at(training.step)", "rate_at(0)"),), LATER),
)  # fmt: skip
NNX: Final = (
    loop("vae", "torch nnx", "clipped by the root mean square", "~clip|factor", _CLIPPED, _IS_CLIPPED, (("    norm = optax.global_norm(gradients)\n", "    norm = optax.global_norm(gradients) / sum(g.size for g in jax.tree.leaves(gradients)) ** 0.5\n"),)),
    loop("decoder", "torch nnx", "update with the wrong sign", "factor|formula|~sign", _SGD, _IS_SGD, (("optax.apply_updates(parameters, updates)", "optax.apply_updates(parameters, jax.tree.map(jnp.negative, updates))"),)),
    loop("tagger", "torch nnx", "a quarter of the cosine for a half", "~cosine|~rate|~schedule|factor", _COSINE, {**_IS_SGD, "SCHEDULE": "cosine", "END": 5e-3}, (("jnp.cos(jnp.pi * jnp.minimum", "jnp.cos(0.5 * jnp.pi * jnp.minimum"),), LATER),
    loop("recommender", "torch nnx", "tables never updated", _MOVED, _ADAMW, {}, (("    applied = optax", '    updates = jax.tree_util.tree_map_with_path(lambda path, u: 0.0 * u if "tables" in str(path) else u, updates)\n    applied = optax'),)),
    loop("encoder", "nnx nnx", "epsilon of 1e-6", "epsilon|~eps", _ADAMW, {"EPSILON": 1e-6}, ()),
)  # fmt: skip
RECIPES: Final = (
    recipe("recommender", "torch keras", "decay of 0.01 for 0.1", "~decay", {"optimizer": lion(1e-3, weight_decay=0.1)}, {"optimizer": lion(1e-3, weight_decay=0.01)}),
    recipe("convnet", "torch keras", "linear decay over 8 steps for 4", "~rate|~schedule|~linear|factor", {"optimizer": sgd(schedules.linear(0.1, 0, 4), momentum=0.9)}, {"optimizer": sgd(schedules.linear(0.1, 0, 8), momentum=0.9)}, LATER),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX, *RECIPES)
"""All of them."""
