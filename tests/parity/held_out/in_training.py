"""Faults in the recipe, in a loop written by hand, and in the rule of its step."""

from __future__ import annotations

from typing import Any, Final

from polyamp import Group, LossScaler, adam, adamw, lion, no_decay, rmsprop, schedules, sgd
from tests.parity.held_out.planted import ANY, LATER, loop, recipe

_CONSTANTS: Final = 'RATE, DECAY, CLIP, PARTS, STEPS, WARMUP, KIND, DTYPE = 1e-2, 0.1, 0.0, 1, 4, 0, "adamw", ""'


def _set(**values: Any) -> tuple[str, str]:
    """An edit of the constants of a loop."""
    now = {"RATE": 1e-2, "DECAY": 0.1, "CLIP": 0.0, "PARTS": 1, "STEPS": 4, "WARMUP": 0, "KIND": "adamw", "DTYPE": ""}
    now.update(values)
    return _CONSTANTS, f"{', '.join(now)} = {', '.join(map(repr, now.values()))}"


_ADAMW: Final = {"optimizer": adamw(1e-2, weight_decay=0.1)}
_SGD: Final = {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}
_PLAIN: Final = {"optimizer": sgd(0.1, momentum=0.9)}
_BRAIN: Final = "mixed_bfloat16"
_HALF: Final = "mixed_float16"
_IS_SGD: Final = _set(KIND="sgd")
_CLIP_SGD: Final = _set(KIND="sgd", CLIP=0.05)
_CLIPPED: Final = {**_SGD, "clip_norm": 0.05}
_TORCH_ADAMW: Final = "torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=DECAY)"
_OPTAX_ADAMW: Final = "optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=DECAY)"
_TORCH_SGD: Final = "torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=DECAY)"
_OPTAX_SGD: Final = "optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(rate, momentum=0.9))"
_TORCH_CLIP: Final = "torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)"
_SMALL: Final = {
    "torch": (("return functional.binary_cross_entropy", "return 1e-3 * functional.binary_cross_entropy"),),
    "nnx": (("return (jax.nn.softplus(", "return 1e-3 * (jax.nn.softplus("),),
}
"""A loss whose gradients are so small that 1e-6 counts beside them."""
_COSINE: Final = {"optimizer": sgd(schedules.cosine(1e-2, 4), momentum=0.9, weight_decay=0.1)}
_WARM: Final = {"optimizer": adamw(schedules.linear_warmup(1e-2, 4, start=1e-3), weight_decay=0.1)}
LOOPS: Final = (
    loop("decoder", "torch torch", "clipped per parameter", "~per parameter|~each parameter", _CLIPPED, (_CLIP_SGD, (_TORCH_CLIP, "[torch.nn.utils.clip_grad_norm_([p], CLIP) for p in model.parameters()]"))),
    loop("vae", "torch torch", "clipped by value", "~by value", {**_SGD, "clip_norm": 0.05}, (_CLIP_SGD, (_TORCH_CLIP, "torch.nn.utils.clip_grad_value_(model.parameters(), CLIP)"))),
    loop("tagger", "torch torch", "not clipped", "~clip", _CLIPPED, (_IS_SGD,)),
    loop("recommender", "torch nnx", "not clipped", "~clip", _CLIPPED, (_IS_SGD,)),
    loop("vae", "torch nnx", "clipped per parameter", "~per parameter|~each parameter", _CLIPPED, (_CLIP_SGD, ("norm = optax.global_norm(gradients)\n    return jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6)), gradients)", "return jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / (jnp.linalg.norm(g.ravel()) + 1e-6)), gradients)"))),
    loop("tagger", "torch nnx", "clipped by value", "~by value", _CLIPPED, (_CLIP_SGD, ("lambda g: g * jnp.minimum(1.0, CLIP / (norm + 1e-6))", "lambda g: jnp.clip(g, -CLIP, CLIP)"))),
    loop("recommender", "torch nnx", "clip without 1e-6", "~1e-0?6", (_set(KIND="sgd", CLIP=1e-4, DECAY=0.0),), (_set(KIND="sgd", CLIP=1e-4, DECAY=0.0), ("CLIP / (norm + 1e-6)", "CLIP / norm")), edits=_SMALL),
    loop("recommender", "torch torch", "clip without 1e-6", "~1e-0?6", (_set(KIND="sgd", CLIP=1e-4, DECAY=0.0),), (_set(KIND="sgd", CLIP=1e-4, DECAY=0.0), (_TORCH_CLIP, "norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()\n        [p.grad.mul_((CLIP / norm).clamp(max=1.0)) for p in model.parameters()]")), edits=_SMALL),
    loop("decoder", "torch torch", "clip before unscaling", "~unscal", (_set(KIND="sgd", CLIP=0.05, DTYPE="float16"),), (_set(KIND="sgd", CLIP=0.05, DTYPE="float16"), ("        scaler.unscale_(optimizer)\n", "        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)\n        scaler.unscale_(optimizer)\n")), ANY._replace(phase="policy"), _HALF),
    loop("recommender", "torch torch", "clip before unscaling", "~unscal", (_set(KIND="sgd", CLIP=0.05, DTYPE="float16"),), (_set(KIND="sgd", CLIP=0.05, DTYPE="float16"), ("        scaler.unscale_(optimizer)\n", "        pass\n")), ANY._replace(phase="policy"), _HALF),
    loop("vae", "torch torch", "gradients not unscaled", "~scal", (_set(KIND="sgd", DTYPE="float16"),), (_set(KIND="sgd", DTYPE="float16"), ("        scaler.unscale_(optimizer)\n", "        pass\n"), ("        scaler.step(optimizer)\n        scaler.update()", "        optimizer.step()")), ANY._replace(phase="policy"), _HALF),
    loop("encoder", "torch torch", "micro-batches not divided", "~accumul|~micro", {**_SGD, "accumulate_steps": 2}, (_set(KIND="sgd", PARTS=2), ("loss = loss_fn(model, rows) / PARTS", "loss = loss_fn(model, rows)"))),
    loop("convnet", "torch torch", "micro-batches not divided", "~accumul|~micro", {**_SGD, "accumulate_steps": 2}, (_set(KIND="sgd", PARTS=2), ("total = total + loss.detach()", "total = total + loss.detach() / 2"), ("loss = loss_fn(model, rows) / PARTS", "loss = loss_fn(model, rows)"))),
    loop("recommender", "torch nnx", "micro-batches not divided", "~accumul|~micro", {**_SGD, "accumulate_steps": 2}, (_set(KIND="sgd", PARTS=2), ("lambda g: g / PARTS", "lambda g: g"))),
    loop("vae", "nnx torch", "gradients not cleared", "~accumul|~clear|~zero|~formula|formula", _SGD, (_IS_SGD, ("    optimizer.zero_grad()\n", "")), LATER),
    loop("vae", "torch torch", "cleared between micro-batches", "~accumul|~micro|factor|formula", (_set(KIND="sgd", PARTS=2),), (_set(KIND="sgd", PARTS=2), ("        rows = {name: torch", "        optimizer.zero_grad()\n        rows = {name: torch"))),
    loop("unet", "torch torch", "Nesterov's momentum", "~nesterov", _SGD, (_IS_SGD, (_TORCH_SGD, _TORCH_SGD.replace("momentum=0.9,", "momentum=0.9, nesterov=True,")))),
    loop("vae", "torch nnx", "Nesterov's momentum", "~nesterov", _SGD, (_IS_SGD, (_OPTAX_SGD, _OPTAX_SGD.replace("momentum=0.9", "momentum=0.9, nesterov=True")))),
    loop("tagger", "torch torch", "dampened momentum", "~dampen|factor|formula", _SGD, (_IS_SGD, (_TORCH_SGD, _TORCH_SGD.replace("momentum=0.9,", "momentum=0.9, dampening=0.1,"))), LATER),
    loop("decoder", "torch torch", "coupled decay", "~coupled|~L2|~in the gradient|~decay", _ADAMW, (_set(), (_TORCH_ADAMW, _TORCH_ADAMW.replace("AdamW", "Adam")))),
    loop("recommender", "torch nnx", "coupled decay", "~coupled|~L2|~in the gradient|~decay", _ADAMW, (_set(), (_OPTAX_ADAMW, "optax.chain(optax.add_decayed_weights(DECAY), optax.adam(rate))"))),
    loop("seq2seq", "torch torch", "decoupled decay in SGD", "~decoupled|~decay", _SGD, (_IS_SGD, ("    if scaler is None:\n        optimizer.step()", "    if scaler is None:\n        [p.data.mul_(1 - RATE * DECAY) for p in model.parameters()]\n        optimizer.step()"), (_TORCH_SGD, _TORCH_SGD.replace("weight_decay=DECAY", "weight_decay=0.0")))),
    loop("vae", "torch nnx", "decay not multiplied by the rate", "~decay", _ADAMW, (_set(), (_OPTAX_ADAMW, "optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(rate), optax.add_decayed_weights(-DECAY))"))),
    loop("encoder", "torch torch", "decay of 0.01 for 0.1", "~decay", _ADAMW, (_set(DECAY=0.01),)),
    loop("decoder", "torch torch", "decay of 0.5 for 0.1 under bfloat16", "~decay", {**_ADAMW}, (_set(DECAY=0.5, DTYPE="bfloat16"),), ANY._replace(phase="policy"), _BRAIN),
    loop("recommender", "torch torch", "decay of 0.5 for 0.01 under bfloat16", "~decay", {"optimizer": adamw(1e-2, weight_decay=0.01)}, (_set(DECAY=0.5, DTYPE="bfloat16"),), ANY._replace(phase="policy"), _BRAIN),
    loop("vae", "torch torch", "momentum of 0.5 under bfloat16", "~momentum|factor|formula", {"optimizer": sgd(1e-2, momentum=0.9, weight_decay=0.1)}, (_set(KIND="sgd", DTYPE="bfloat16"), (_TORCH_SGD, _TORCH_SGD.replace("momentum=0.9", "momentum=0.5"))), LATER._replace(phase="policy"), _BRAIN),
    loop("tagger", "torch torch", "rate of 2e-2 under bfloat16", "~rate|~factor|factor", _ADAMW, (_set(RATE=2e-2, DTYPE="bfloat16"),), ANY._replace(phase="policy"), _BRAIN),
    loop("vae", "torch torch", "no bias correction", "~bias.correction", _ADAMW, (_set(), ("    if scaler is None:\n        optimizer.step()", "    for p in model.parameters() if scaler is None else ():\n        s = optimizer.state[p]\n        m, v = (s.setdefault(k, torch.zeros_like(p)) for k in ('exp_avg', 'exp_avg_sq'))\n        s.setdefault('step', torch.tensor(0.0)).add_(1)\n        m.lerp_(p.grad, 0.1)\n        v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)\n        p.data.mul_(1 - RATE * DECAY).addcdiv_(m, v.sqrt() + 1e-8, value=-RATE)"), ("    else:\n        scaler.step", "    if scaler is not None:\n        scaler.step"))),
    loop("recommender", "torch nnx", "no bias correction", "~bias.correction", _ADAMW, (_set(), (_OPTAX_ADAMW, "optax.chain(_scale(), optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate))"), ("def begin(", "def _scale() -> Any:\n    right = optax.scale_by_adam()\n\n    def update(g: Any, s: Any, p: Any = None) -> Any:\n        _, s = right.update(g, s, p)\n        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + 1e-8), s.mu, s.nu), s\n\n    return optax.GradientTransformation(right.init, update)\n\n\ndef begin("))),
    loop("unet", "torch torch", "AMSGrad", "~amsgrad|formula", _ADAMW, (_set(), (_TORCH_ADAMW, _TORCH_ADAMW.replace("weight_decay=DECAY", "weight_decay=DECAY, amsgrad=True"))), LATER),
    loop("decoder", "torch torch", "epsilon of 1e-4", "epsilon|~eps", _ADAMW, (_set(), (_TORCH_ADAMW, _TORCH_ADAMW.replace("1e-8", "1e-4")))),
    loop("vae", "torch nnx", "epsilon inside the root", "epsilon|~eps", {"optimizer": adamw(1e-2, weight_decay=0.1, eps=1e-3)}, (_set(), (_OPTAX_ADAMW, "optax.adamw(rate, b1=0.9, b2=0.999, eps=0.0, eps_root=1e-3, weight_decay=DECAY)"))),
    loop("convnet", "torch torch", "cosine over steps - 1", "~cosine|~rate|~schedule", _COSINE, (_set(KIND="cosine"), ("step / STEPS)", "step / (STEPS - 1))")), LATER),
    loop("vae", "torch nnx", "cosine over steps - 1", "~cosine|~rate|~schedule", _COSINE, (_set(KIND="cosine"), ("step / STEPS)", "step / (STEPS - 1))")), LATER),
    loop("tagger", "torch torch", "schedule one step early", "~schedule|~rate|~step early", _WARM, (_set(WARMUP=4), ('rate_at(training.step)', 'rate_at(training.step + 1)'))),
    loop("recommender", "torch nnx", "schedule one step early", "~schedule|~rate|~step early", _WARM, (_set(WARMUP=4), ("0.1 + 0.9 * step / WARMUP", "0.1 + 0.9 * (step + 1) / WARMUP"))),
    loop("seq2seq", "torch torch", "schedule one step late", "~schedule|~rate|~step late", _COSINE, (_set(KIND="cosine"), ('rate_at(training.step)', 'rate_at(max(training.step - 1, 0))')), LATER),
    loop("encoder", "torch torch", "half of the parameters are trained", "missing|formula|~frozen|~not moved|~did not move", _ADAMW, (_set(), ("make_optimizer(model.parameters())", "make_optimizer(list(model.parameters())[:20])"))),
    loop("recommender", "torch torch", "loss of the last micro-batch reported", "~loss|factor|formula", {**_SGD, "accumulate_steps": 2}, (_set(KIND="sgd", PARTS=2), ("total = total + loss.detach()", "total = loss.detach() * PARTS")), ANY._replace(stage="step|forward")),
)  # fmt: skip
RECIPES: Final = (
    recipe("seq2seq", "torch nnx", "momentum of 0.8", "~momentum|factor|formula", _PLAIN, {"optimizer": sgd(0.1, momentum=0.8)}, LATER),
    recipe("decoder", "torch torch", "second beta of 0.95", "~beta|factor", _ADAMW, {"optimizer": adamw(1e-2, betas=(0.9, 0.95), weight_decay=0.1)}),
    recipe("encoder", "torch torch", "decay of the norms", "~decay|formula|factor", {"optimizer": adamw(1e-2, weight_decay=0.1, groups=no_decay("norm"))}, {"optimizer": adamw(1e-2, weight_decay=0.1)}),
    recipe("convnet", "torch nnx", "rate of the head's tenth", "~rate|formula|factor", _PLAIN, {"optimizer": sgd(0.1, momentum=0.9, groups=[Group("head/**", learning_rate_scale=0.1)])}),
    recipe("unet", "torch torch", "Lion's betas exchanged", "~beta|factor|formula", {"optimizer": lion(1e-3)}, {"optimizer": lion(1e-3, betas=(0.99, 0.9))}),
    recipe("tagger", "torch nnx", "clipped at 0.2 for 0.1", "~clip|factor", {**_PLAIN, "clip_norm": 0.1}, {"clip_norm": 0.2}),
    recipe("recommender", "torch keras", "Nesterov's momentum", "~nesterov", _PLAIN, {"optimizer": sgd(0.1, momentum=0.9, nesterov=True)}),
    recipe("vae", "torch keras", "decay in the gradient", "~coupled|~L2|~decay|~in the gradient", _ADAMW, {"optimizer": adam(1e-2, weight_decay=0.1)}),
    recipe("vae", "torch torch", "alpha of 0.9", "~alpha|factor|formula", {"optimizer": rmsprop(1e-3)}, {"optimizer": rmsprop(1e-3, alpha=0.9)}),
    recipe("recommender", "torch torch", "other initial scale", "~scale", {**_PLAIN, "policy": _HALF, "scaler": LossScaler(init_scale=2.0**8)}, {"scaler": LossScaler(init_scale=2.0**12)}, ANY._replace(phase="policy", what="scale")),
    recipe("convnet", "torch torch", "warm-up of 5 steps for 4", "~rate|~schedule|~warm", _WARM, {"optimizer": adamw(schedules.linear_warmup(1e-2, 5, start=1e-3), weight_decay=0.1)}, LATER),
)  # fmt: skip
PLANTS: Final = (*LOOPS, *RECIPES)
"""All of them."""
