"""Faults of part C in loops written by hand, in float32."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Group, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.faults.planted import Expected
from tests.parity.held_out.part_c.variants import loop
from tests.parity.held_out.planted import ANY, LATER

_ADAMW: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final[dict[str, Any]] = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_TINY: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, eps=1e-5, weight_decay=0.1)}
_STRONG: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.5)}
_HAND: Final[dict[str, Any]] = {"BY_HAND": True}
_HAND_SGD: Final[dict[str, Any]] = {"BY_HAND": True, "KIND": "sgd"}
_NO_VECTORS: Final[dict[str, Any]] = {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("vector"))}
_HEAD: Final[dict[str, Any]] = {
    "optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1, groups=[Group("head/**", learning_rate_scale=0.1)])
}
_LINEAR: Final[dict[str, Any]] = {"optimizer": adamw(schedules.linear(1e-2, 1, 4), weight_decay=0.1)}
_COSINE: Final[dict[str, Any]] = {"optimizer": sgd(schedules.cosine(1e-2, 4, end=5e-3), momentum=0.9, weight_decay=0.1)}
_FALLING: Final[dict[str, Any]] = {"optimizer": sgd(schedules.exponential(1e-2, 0.5), momentum=0.9, weight_decay=0.1)}
_TWICE: Final[dict[str, Any]] = {**_SGD, "accumulate_steps": 2}
_CLIPPED: Final[dict[str, Any]] = {**_SGD, "clip_norm": 0.05}
_CLIP: Final = "torch.nn.utils.clip_grad_norm_(parameters, CLIP)"
_BOTH: Final = ANY._replace(step=(1, 2))
_MOVED: Final = "missing|formula|factor|~not move|~stand|~stood"
TORCH: Final = (
    loop("decoder", "torch torch", "epsilon before the bias correction", "epsilon|~eps", _TINY, {**_HAND, "EPSILON": 1e-5}, (("root = (square / (1 - two**step)).sqrt() + group[\"eps\"]", "root = (square.sqrt() + group[\"eps\"]) / (1 - two**step) ** 0.5"),)),
    loop("vae", "torch torch", "epsilon inside the root", "epsilon|~eps", {"optimizer": adamw(1e-2, eps=1e-4, weight_decay=0.1)}, {**_HAND, "EPSILON": 1e-4}, (("(square / (1 - two**step)).sqrt() + group[\"eps\"]", "(square / (1 - two**step) + group[\"eps\"]).sqrt()"),)),
    loop("encoder", "torch torch", "bias correction one step ahead", "~bias.correction", _ADAMW, _HAND, (("step, mean, square = float(state[\"step\"]),", "step, mean, square = float(state[\"step\"]) + 1.0,"),)),
    loop("tagger", "torch torch", "bias correction of the first moment alone", "~bias.correction", _ADAMW, _HAND, (("(square / (1 - two**step)).sqrt()", "square.sqrt()"),)),
    loop("recommender", "torch torch", "decay behind the update", "~decay", _STRONG, {**_HAND, "DECAY": 0.5}, (("            p.mul_(1 - group[\"lr\"] * group[\"weight_decay\"])\n", ""), ("            p.sub_(group[\"lr\"] * (mean / (1 - one**step)) / root)", "            p.sub_(group[\"lr\"] * (mean / (1 - one**step)) / root)\n            p.mul_(1 - group[\"lr\"] * group[\"weight_decay\"])"))),
    loop("unet", "torch torch", "betas exchanged", "~beta|formula|factor", _ADAMW, _HAND, (("one, two = group[\"betas\"]", "two, one = group[\"betas\"]"),)),
    loop("seq2seq", "torch torch", "momentum as an average", "~dampen|~momentum|factor|formula", _SGD, _HAND_SGD, ((".add_(gradient)", ".add_(gradient, alpha=1 - group[\"momentum\"])"),)),
    loop("convnet", "torch torch", "rate in the momentum's buffer", "~rate|~momentum|factor", _FALLING, {**_HAND_SGD, "SCHEDULE": "exponential"}, ((".add_(gradient)", ".add_(gradient, alpha=group[\"lr\"])"), ("p.sub_(group[\"lr\"] * state[\"momentum_buffer\"])", "p.sub_(state[\"momentum_buffer\"])")), _BOTH),
    loop("vae", "torch torch", "decoupled decay of SGD", "~decoupled|~decay", _SGD, _HAND_SGD, (("gradient = p.grad + group[\"weight_decay\"] * p", "gradient = p.grad"), ("            p.sub_(group[\"lr\"] * state[\"momentum_buffer\"])", "            p.sub_(group[\"lr\"] * (state[\"momentum_buffer\"] + group[\"weight_decay\"] * p))"))),
    loop("decoder", "torch torch", "biases and norms decay too", "~decay|formula|factor", _NO_VECTORS, {}, ()),
    loop("convnet", "torch torch", "the head's rate not reduced", "~rate|factor|formula", _HEAD, {"KIND": "sgd"}, ()),
    loop("unet", "torch torch", "clipped by the square of the norm", "~clip|factor", _CLIPPED, {"KIND": "sgd", "CLIP": 0.05}, ((_CLIP, "norm = torch.cat([p.grad.flatten() for p in parameters]).square().sum()\n    for p in parameters:\n        p.grad.mul_((CLIP / (norm + 1e-6)).clamp(max=1.0))"),)),
    loop("tagger", "torch torch", "clipped by the largest element", "~clip|factor", _CLIPPED, {"KIND": "sgd", "CLIP": 0.05}, ((_CLIP, "torch.nn.utils.clip_grad_norm_(parameters, CLIP, norm_type=float(\"inf\"))"),)),
    loop("seq2seq", "torch torch", "always brought to the norm", "~clip|factor|~norm", {**_SGD, "clip_norm": 50.0}, {"KIND": "sgd", "CLIP": 50.0}, ((_CLIP, "norm = torch.cat([p.grad.flatten() for p in parameters]).norm()\n    for p in parameters:\n        p.grad.mul_(CLIP / (norm + 1e-6))"),)),
    loop("vae", "torch torch", "clipped after each micro-batch", "~clip|factor|formula", {**_TWICE, "clip_norm": 0.05}, {"KIND": "sgd", "CLIP": 0.05, "PARTS": 2}, (("        total = total + loss.detach()\n", "        total = total + loss.detach()\n        clip(list(model.parameters()))\n"),)),
    loop("encoder", "torch torch", "last micro-batch left out", "~micro|~accumul|formula|factor", _TWICE, {"KIND": "sgd", "PARTS": 2}, (("for part in range(PARTS):", "for part in range(PARTS - 1):"),), ANY._replace(stage="update|step|backward|forward")),
    loop("recommender", "torch torch", "divided twice by the micro-batches", "~micro|~accumul|factor", _TWICE, {"KIND": "sgd", "PARTS": 2}, (("(loss if scaler is None else scaler.scale(loss)).backward()", "(loss / PARTS).backward()"),)),
    loop("decoder", "torch torch", "linear decay from the first step", "~schedule|~rate|factor", _LINEAR, {"SCHEDULE": "linear", "WARMUP": 1}, (("(TOTAL - step) / (TOTAL - WARMUP)", "(TOTAL - step) / TOTAL"),), LATER),
    loop("recommender", "torch torch", "warm-up from its second step", "~schedule|~rate|~step early|factor|formula", {"optimizer": adamw(schedules.linear_warmup(1e-2, 4), weight_decay=0.1)}, {"WARMUP": 4}, (("return RATE * step / WARMUP", "return RATE * (step + 1) / WARMUP"),), _BOTH),
    loop("unet", "torch torch", "cosine down to 0", "~cosine|~rate|~schedule|factor", _COSINE, {"KIND": "sgd", "SCHEDULE": "cosine", "END": 0.0}, (), LATER),
    loop("recommender", "torch torch", "schedule counts micro-batches", "~schedule|~rate|factor", {**_FALLING, "accumulate_steps": 2}, {"KIND": "sgd", "SCHEDULE": "exponential", "PARTS": 2}, (("rate_at(training.step)", "rate_at(training.step * PARTS)"),), LATER),
    loop("encoder", "torch torch", "optimizer made anew each step", "~momentum|~moment|factor|formula|missing", _ADAMW, {}, (("    optimizer.zero_grad()\n", "    optimizer = make_optimizer(model)\n    optimizer.zero_grad()\n"), ("    for group in optimizer.param_groups:\n        group[\"lr\"] = group[\"share\"] * rate_at(training.step)\n", "")), LATER),
    loop("decoder", "torch torch", "cleared between backward and the update", _MOVED, _SGD, {"KIND": "sgd"}, (("    applied = 1\n", "    applied = 1\n    optimizer.zero_grad()\n"),)),
    loop("vae", "torch torch", "weights averaged behind the update", "factor|formula|~average", _SGD, {"KIND": "sgd"}, (("        optimizer.step()\n    return", "        old = [p.detach().clone() for p in model.parameters()]\n        optimizer.step()\n        [p.data.lerp_(q, 0.5) for p, q in zip(model.parameters(), old, strict=True)]\n    return"),)),
    loop("recommender", "torch torch", "plain momentum for Nesterov's", "~nesterov", {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1, nesterov=True)}, {"KIND": "sgd"}, ()),
    loop("convnet", "torch torch", "RMSprop's alpha of 0.9", "~alpha|factor|formula", {"optimizer": rmsprop(1e-2, weight_decay=0.1)}, {"KIND": "rmsprop"}, (("alpha=0.99", "alpha=0.9"),)),
    loop("seq2seq", "torch torch", "decoupled decay for a coupled one", "~coupled|~decay|~L2", {"optimizer": adam(1e-2, weight_decay=0.1)}, {"KIND": "adamw"}, ()),
    loop("tagger", "torch torch", "a group whose rate stays 0", "missing|formula|factor|~rate|~frozen|~not move|~stand|~stood", _ADAMW, {}, (("    if plain:\n", "    still = [p for name, p in model.named_parameters() if \"gates\" in name]\n    groups[0][\"params\"] = [p for p in groups[0][\"params\"] if all(p is not q for q in still)]\n    groups.append({\"params\": still, \"share\": 0.0})\n    if plain:\n"),)),
)  # fmt: skip
NNX: Final = (
    loop("vae", "torch nnx", "the update clipped, not the gradient", "~clip|factor|formula", _CLIPPED, {"KIND": "sgd", "CLIP": 0.05}, (("    if CLIP:\n        gradients = clip(gradients)\n", ""), ("    applied = optax", "    updates = clip(updates)\n    applied = optax"))),
    loop("decoder", "torch nnx", "decay behind the momentum", "~decoupled|~decay", _SGD, {"KIND": "sgd"}, (("optax.chain(optax.add_decayed_weights(DECAY, is_decayed), optax.sgd(rate, momentum=MOMENTUM))", "optax.chain(optax.trace(MOMENTUM), optax.add_decayed_weights(DECAY, is_decayed), optax.scale_by_learning_rate(rate))"),)),
    loop("recommender", "nnx nnx", "optax's epsilon inside the root", "epsilon|~eps", {"optimizer": adamw(1e-2, eps=1e-4, weight_decay=0.1)}, {}, (("optax.adamw(rate, *BETAS, EPSILON,", "optax.adamw(rate, *BETAS, 0.0, eps_root=1e-4,"),)),
    loop("encoder", "torch nnx", "mask of the decay the other way round", "~decay|formula|factor", _NO_VECTORS, {"GROUPS": "vectors"}, (("p.ndim >= 2 or GROUPS", "p.ndim < 2 or GROUPS"),)),
    loop("tagger", "torch nnx", "schedule one step late", "~schedule|~rate|~step late|factor", _FALLING, {"KIND": "sgd", "SCHEDULE": "exponential"}, (("RATE * 0.5**step", "RATE * 0.5 ** jnp.maximum(step - 1, 0)"),), LATER),
    loop("vae", "nnx nnx", "last micro-batch counted twice", "~micro|~accumul|formula|factor", _TWICE, {"KIND": "sgd", "PARTS": 2}, (("a[part::PARTS]", "a[1::PARTS]"),), ANY._replace(stage="update|step|backward|forward")),
    loop("seq2seq", "nnx nnx", "momentum kept in bfloat16", "dtype|~dtype|~bfloat16", _SGD, {"KIND": "sgd"}, (("optax.sgd(rate, momentum=MOMENTUM)", 'optax.sgd(rate, momentum=MOMENTUM, accumulator_dtype="bfloat16")'),), _BOTH),
    loop("recommender", "torch nnx", "first moment kept in bfloat16", "dtype|~dtype|~bfloat16", _ADAMW, {}, (("weight_decay=DECAY, mask=is_decayed if GROUPS else None", 'weight_decay=DECAY, mu_dtype="bfloat16"'),), _BOTH),
    loop("convnet", "torch nnx", "running statistics thrown away", "missing|formula|~running|~statistic", _SGD, {"KIND": "sgd"}, (("    model = nnx.merge(graph, applied, rest)\n    counted", "    model = nnx.merge(graph, applied, nnx.split(training.model, nnx.Param, ...)[2])\n    counted"),), Expected("update", "mbconv/norm[12]")),
    loop("decoder", "nnx nnx", "Lion's second beta of 0.999", "~beta|factor|formula", {"optimizer": lion(1e-3, betas=(0.9, 0.99), weight_decay=0.1)}, {"KIND": "lion", "RATE": 1e-3, "BETAS": (0.9, 0.999)}, ()),
    loop("unet", "torch nnx", "AdaMax for Adam", "formula", _ADAMW, {}, (("return optax.adamw(rate, *BETAS, EPSILON, weight_decay=DECAY, mask=is_decayed if GROUPS else None)", "return optax.chain(optax.scale_by_adamax(*BETAS, EPSILON), optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate))"),)),
    loop("tagger", "nnx nnx", "gradients of the weights before the last update", "formula|factor|~stale|~step", _SGD, {"KIND": "sgd"}, (("gradients_of(graph, parameters, rest", "gradients_of(graph, _late(training.step, parameters), rest"), ("def step(", "_EARLIER: list[Any] = [None]\n\n\ndef _late(count: int, parameters: Any) -> Any:\n    before, _EARLIER[0] = _EARLIER[0], parameters\n    return parameters if count == 0 else before\n\n\ndef step(")), LATER._replace(stage="update|step|backward|forward")),
)  # fmt: skip
PLANTS: Final = (*TORCH, *NNX)
"""All of them."""
