"""`describe(seed)`: a random small network with a random recipe, as plain data that every framework's builder reads.

A description holds numbers, strings, lists and dicts only, so that it can be printed and given back as JSON. Called by
the command, the tests and the minimiser. What keeps the comparison meaningful is decided here:

- Overflows are scripted: one example of a batch multiplies the loss by infinity. Scales of float16 policies stay at
  2^9 and below, so that no gradient of these networks overflows by itself in one framework and not in another. Losses
  of 2^70 and 2^-70, whose gradients' squares leave float32, are for the other policies, with a clip.
- Nothing has a gradient that is zero in exact arithmetic and noise in floats (a bias or a factor per channel before a
  batch normalisation, the attention's key bias): Adam and its like divide by the gradient's size and would make whole
  steps of the noise.
- A batch normalisation sees at least four examples, or one hidden unit is +-1 whatever the weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any, Final

Description = dict[str, Any]

BATCH: Final = 8
LENGTH: Final = 4
SIZE: Final = 4
VOCABULARY: Final = 11
CLASSES: Final = 3
ACTIVATIONS: Final = ("relu", "tanh", "gelu", "silu", "sigmoid")
SENSITIVE: Final = ("softmax", "hand_softmax", "log_gate", "inner", "cumsum", "logsumexp", "hand_rms", "square")
"""What S4 keeps in float32, written as operations and not as layers."""
PRODUCTS: Final = ("dense", "conv", "attention", "rnn", "gru")
"""Layers with matrix products; heads are dense layers."""
NORMS: Final = ("layer_norm", "rms_norm", "batch_norm", "group_norm")
FEATURES: Final = ("writes", "counts", "regions", "float64", "python", "recipes")
"""What networks may have beyond the rest of the grammar. Each is drawn by itself and can be left out:

- writes: a dense layer clamps its kernel in the forward pass (S12: running state). JAX's model is nnx's then.
- counts: labels of one head are ignored in unequal numbers in the micro-batches of a window (S8). The result is
  compared with that of one batch too. `"weight"`: the step is told what counts; `"returned"`: the loss is returned as
  it is, so that the step knows.
- regions: layers run in a nested region of float32 (S3): torch's `autocast(enabled=False)`, a second policy in JAX, an
  explicit dtype of Keras's layers.
- float64: the policy is float64, and so must be everything that acts on the parameters (S1).
- recipes: moving averages, a head that is clipped or starts by itself, and optimizers that need a parameter as a whole
  or have averages themselves. The former are left out where frameworks store a layer as other arrays (attention,
  recurrent layers).
- python: torch's `forward` counts its calls in a Python attribute, and one of ten such steps is compiled.
"""
READY: Final[tuple[str, ...]] = ("writes", "counts", "regions", "python", "recipes")
"""Those that are drawn where nothing else is said. Not "float64": `polyamp.losses` are float32 (S6), so that gradients
of two frameworks are as far apart as its last digit."""
_STORED_DIFFERENTLY: Final = frozenset({"attention", "rnn", "gru", "positions"})
CLAMP: Final = 0.25
"""A layer with "clamp" keeps its kernel within this."""
_IN_REGIONS: Final = frozenset({"dense", "scale", "layer_norm", "rms_norm", *ACTIVATIONS})
MODELS: Final = {"tensorflow": ("functional", "subclass"), "jax": ("nnx", "linen", "function")}


class _Names:
    """ "dense0", "dense1", "attention0", ...: names of layers, unique within a description."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, op: str) -> str:
        number = self.counts.get(op, 0)
        self.counts[op] = number + 1
        return f"{op}{number}"


def describe(seed: int, features: Collection[str] = READY) -> Description:
    """The description of a seed: the same on every machine and in every framework.

    Args:
        seed: any integer.
        features: which of `FEATURES` may be added; the rest of the description does not depend on them.
    """
    rng = random.Random(seed)
    kind = rng.choice(("mlp", "vector", "vector", "sequence", "sequence", "tokens", "tokens", "image"))
    accumulate = rng.choice((1, 1, 1, 2, 4))
    names = _Names()
    if kind == "mlp":
        layers, heads = _mlp(rng, names, accumulate)
    else:
        layers = _body(rng, names, kind, accumulate)
        heads = _heads(rng, names, kind, layers)
    found: Description = {
        "seed": seed,
        "kind": kind,
        "steps": rng.randint(4, 8),
        "layers": layers,
        "heads": heads,
        "accumulate_steps": accumulate,
        "listed": accumulate > 1 and rng.random() < 0.3,
        "clip_norm": rng.choice((None, None, 0.1, 1.0, 100.0)),
        "models": {framework: rng.choice(kinds) for framework, kinds in MODELS.items()},
    }
    if any(layer["op"] in SENSITIVE for layer in walk(layers)):
        found["models"]["tensorflow"] = "functional"  # Keras's grain is the layer, and operations of such models
    found["policy"] = _policy(rng, found)
    found["optimizer"] = _optimizer(rng, found["steps"])
    found["scaler"] = _scaler(rng, found["policy"])
    checks = found["scaler"]["kind"] != "off" or found["scaler"].get("check_finite", False)
    found["float64"] = rng.random() < 0.1
    found["halves"] = accumulate == 1 and rng.random() < 0.12  # value_and_grad and apply_gradients, not train_step
    found["resume"] = rng.randrange(1, found["steps"]) if rng.random() < 0.12 else None  # goes on in a fresh state
    often = rng.choice((0.0, 0.3, 0.6)) if checks else 0.0
    overflows = [step for step in range(found["steps"]) if rng.random() < often]
    found["overflows"] = overflows[: found["steps"] - 1]
    wide = found["clip_norm"] is not None and found["policy"]["name"] != "mixed_float16"
    found["powers"] = {str(step): rng.choice((70, -70)) for step in range(found["steps"])
                       if wide and step not in found["overflows"] and rng.random() < 0.1}  # fmt: skip
    for feature in FEATURES:
        if feature in features:
            _ADDED[feature](random.Random(f"{seed} {feature}"), found)
    return found


def _mlp(rng: random.Random, names: _Names, accumulate: int) -> tuple[list[Any], list[Any]]:
    """What the NumPy reference can train as well: dense -> [batch norm] -> relu -> ... -> one dense head."""
    layers: list[Any] = []
    for _ in range(rng.randint(1, 3)):
        normal = BATCH // accumulate >= 4 and rng.random() < 0.3
        layers.append({"op": "dense", "name": names("dense"), "width": rng.choice((4, 8)), "bias": not normal})
        if normal:
            layers.append({"op": "batch_norm", "name": names("batch_norm")})
        layers.append({"op": "relu"})
    head = {"name": names("dense"), "width": CLASSES, "bias": True, "pool": "none", **_loss(rng)}
    return layers, [head]


def _body(rng: random.Random, names: _Names, kind: str, accumulate: int) -> list[Any]:
    layers: list[Any] = []
    if kind == "tokens":
        layers.append({"op": "embedding", "name": names("embedding"), "width": 8})
        if rng.random() < 0.3:
            layers.append({"op": "positions", "name": names("positions")})
    elif kind == "image":
        layers.append({"op": "conv", "name": names("conv"), "width": 4, "bias": False})
    else:
        layers.append({"op": "dense", "name": names("dense"), "width": 8, "bias": False})
    for _ in range(rng.randint(1, 4)):
        layers += _block(rng, names, kind, accumulate, depth=0)
    shareable = [layer for layer in layers if layer["op"] == "dense" and layer["width"] == 8 and layer is not layers[0]]
    if shareable and rng.random() < 0.3:
        layers.append({"op": "tied", "of": rng.choice(shareable)["name"]})
        layers.append({"op": rng.choice(ACTIVATIONS)})
    if rng.random() < 0.15:
        where = rng.randrange(1, len(layers) + 1)
        layers.insert(where, {"op": "unused", "name": names("unused"), "width": 8})
    if rng.random() < 0.1 and kind != "image":
        layers.append({"op": "detached", "name": names("unused"), "width": 8})
    if rng.random() < 0.15 and kind != "image":
        layers.append({"op": "zeroed", "name": names("zeroed"), "width": 8})
    return layers


def _block(rng: random.Random, names: _Names, kind: str, accumulate: int, depth: int) -> list[Any]:
    """Layers that keep the shape."""
    width = 4 if kind == "image" else 8
    choices = ["dense", "norm", "activation", "scale", "sensitive"]
    if kind == "image":
        choices += ["conv", "conv"]
    if kind in ("sequence", "tokens"):
        choices += ["attention", "attention", "rnn", "gru"]
    if depth == 0:
        choices += ["residual", "residual"]
    chosen = rng.choice(choices)
    if chosen == "activation":
        return [{"op": rng.choice(ACTIVATIONS)}]
    if chosen == "sensitive":
        return [{"op": rng.choice(SENSITIVE)}]
    if chosen == "scale":
        return [{"op": "scale", "name": names("scale")}]
    if chosen == "norm":
        return [{"op": rng.choice(ACTIVATIONS)}, *_norm(rng, names, kind, accumulate)]
    if chosen == "residual":
        inner: list[Any] = []
        for _ in range(rng.randint(1, 2)):
            inner += _block(rng, names, kind, accumulate, depth + 1)
        return [{"op": "residual", "layers": inner}]
    if chosen in ("dense", "conv"):
        normal = rng.random() < 0.3
        made: list[Any] = [{"op": chosen, "name": names(chosen), "width": width, "bias": not normal}]
        made += _norm(rng, names, kind, accumulate) if normal else []
        return [*made, {"op": rng.choice(ACTIVATIONS)}]
    if chosen == "attention":
        native, causal = rng.random() < 0.5, rng.random() < 0.5
        return [{"op": "attention", "name": names("attention"), "heads": 2, "native": native, "causal": causal}]
    return [{"op": chosen, "name": names(chosen), "width": width}]


def _norm(rng: random.Random, names: _Names, kind: str, accumulate: int) -> list[Any]:
    """A normalisation that fits the shape; what stands before it is a product without bias, or an activation."""
    op = rng.choice(NORMS)
    if op == "batch_norm" and (kind == "vector" and BATCH // accumulate < 4):
        op = "layer_norm"
    if op == "group_norm" and kind != "image":
        op = "rms_norm"
    if op == "layer_norm" and kind == "image":
        op = "group_norm"
    return [{"op": op, "name": names(op)}]


def _heads(rng: random.Random, names: _Names, kind: str, layers: list[Any]) -> list[Any]:
    heads: list[Any] = []
    for number in range(rng.choice((1, 1, 1, 2, 3))):
        pools = {"vector": ("none",), "image": ("mean", "flatten")}.get(kind, ("none", "mean", "flatten", "last"))
        head = {"name": names("head"), "width": CLASSES, "bias": rng.random() < 0.8, "pool": rng.choice(pools)}
        head.update(_loss(rng))
        if number and rng.random() < 0.2:
            head["loss"] = "unused"
        heads.append(head)
    if kind == "tokens" and rng.random() < 0.3:
        heads[0].update(tied=layers[_first(layers, "embedding")]["name"], width=VOCABULARY, bias=False)
        heads[0]["pool"] = "none" if heads[0]["pool"] == "flatten" else heads[0]["pool"]
    return heads


def _first(layers: list[Any], op: str) -> int:
    return next(number for number, layer in enumerate(layers) if layer["op"] == op)


def _loss(rng: random.Random) -> dict[str, Any]:
    loss = rng.choice(("softmax_cross_entropy", "softmax_cross_entropy", "mean_squared_error", "sigmoid_cross_entropy",
                       "huber"))  # fmt: skip
    found: dict[str, Any] = {"loss": loss, "weight": rng.choice((1.0, 1.0, 0.25, 2.0)), "options": {}}
    if loss == "softmax_cross_entropy":
        found["soft"] = rng.random() < 0.15
        if not found["soft"] and rng.random() < 0.3:
            found["options"]["ignore_index"] = rng.choice((-100, -1, 0))
        if rng.random() < 0.3:
            found["options"]["label_smoothing"] = rng.choice((0.1, 0.5))
        found["class_weights"] = rng.random() < 0.25
    if loss == "huber" and rng.random() < 0.5:
        found["options"]["delta"] = 0.3
    if loss != "softmax_cross_entropy":
        found["weighted"] = rng.random() < 0.25
    if rng.random() < 0.15:
        found.update(weight=0.05)
        found["options"]["reduction"] = "sum"
    return found


def _policy(rng: random.Random, found: Description) -> dict[str, Any]:
    words = ["float32", "float32", "mixed_bfloat16", "mixed_float16"]
    word = rng.choice(words)
    policy: dict[str, Any] = {"name": word}
    if word == "float32":
        return policy
    by_hand = any(layer["op"] in SENSITIVE for layer in walk(found["layers"]))
    if rng.random() < 0.25 and not by_hand:  # cast mode leaves them in 16 bits, where float16 may overflow
        policy["mode"] = "cast"
    named = sorted({layer["name"] for layer in walk(found["layers"]) if "name" in layer and layer["op"] != "unused"})
    if found["kind"] != "mlp" and rng.random() < 0.35:
        chosen = rng.sample([*named, *(head["name"] for head in found["heads"] if "tied" not in head)], 1)
        policy["overrides"] = {rng.choice((name, f"{name}*")): "float32" for name in chosen}
        if found["models"]["jax"] == "function":
            found["models"]["jax"] = "nnx"
    return policy


def _scaler(rng: random.Random, policy: dict[str, Any]) -> dict[str, Any]:
    narrow = policy["name"] == "mixed_float16"
    kind = rng.choice(("dynamic", "dynamic", "dynamic", "static", "like", "off"))
    if kind == "off":
        return {"kind": "off", "check_finite": rng.random() < 0.5}
    if kind == "static":
        return {"kind": "static", "init_scale": 2.0 ** rng.choice((0, 3, 6) if narrow else (0, 10, 30))}
    top = 2.0 ** (9 if narrow else rng.choice((12, 24, 40)))
    init = 2.0 ** rng.choice((2, 5, 8) if narrow else (2, 8, 12))
    moving: dict[str, Any] = {
        "kind": kind,
        "init_scale": init,
        "growth_interval": rng.randint(1, 4),
        "hysteresis": rng.choice((1, 1, 2, 3)),
        "min_scale": 2.0 ** rng.choice((-14, -14, 0)),
        "max_scale": top,
    }
    if kind == "like":
        moving.pop("hysteresis")
        return {**moving, "name": rng.choice(("torch", "keras", "apex", "deepspeed", "megatron", "jmp"))}
    return {
        **moving,
        "growth_factor": rng.choice((2.0, 2.0, 1.5, 4.0)),
        "backoff_factor": rng.choice((0.5, 0.5, 0.25)),
        "consecutive_hysteresis": rng.random() < 0.3,
    }


def _optimizer(rng: random.Random, steps: int) -> dict[str, Any]:
    kind = rng.choice(("sgd", "sgd", "adam", "adamw", "rmsprop", "adagrad", "lion"))
    rate = {"sgd": 0.05, "lion": 0.002}.get(kind, 0.005)
    spec: dict[str, Any] = {"type": kind, "learning_rate": _rate(rng, rate, steps)}
    options: dict[str, tuple[Any, ...]] = {
        "sgd": (("momentum", (0.0, 0.9, 0.5)), ("weight_decay", (0.0, 0.01)), ("nesterov", (False, True))),
        "adam": (("betas", ((0.9, 0.999), (0.8, 0.95))), ("eps", (1e-8, 1e-3)), ("weight_decay", (0.0, 0.01))),
        "rmsprop": (("alpha", (0.99, 0.9)), ("eps", (1e-8, 1e-3)), ("weight_decay", (0.0, 0.01)),
                    ("momentum", (0.0, 0.5))),
        "adagrad": (("lr_decay", (0.0, 0.1)), ("weight_decay", (0.0, 0.01)), ("initial_accumulator_value", (0.0, 0.1)),
                    ("eps", (1e-10, 1e-3))),
        "lion": (("betas", ((0.9, 0.99), (0.8, 0.95))), ("weight_decay", (0.0, 0.1))),
    }  # fmt: skip
    for name, values in options.get(kind, options["adam"]):
        if rng.random() < 0.5:
            spec[name] = rng.choice(values)
    if kind == "rmsprop" and rng.random() < 0.3:
        spec.update(centered=True, eps=1e-3)  # a small epsilon under a difference of nearly equal numbers is noise
    if spec.get("nesterov") and not spec.get("momentum"):
        spec["nesterov"] = False
    return spec


def _rate(rng: random.Random, rate: float, steps: int) -> Any:
    kind = rng.choice(("number", "number", "constant", "linear_warmup", "cosine", "warmup_cosine", "step", "piecewise"))
    origin = -(steps % 2)  # not drawn, so that what follows stays as it was
    made: dict[str, dict[str, Any]] = {
        "constant": {"value": rate},
        "linear_warmup": {
            "peak": rate,
            "steps": rng.randint(1, 4),
            "start": rng.choice((0.0, rate / 10)),
            "origin": origin,
        },
        "cosine": {"peak": rate, "steps": rng.randint(2, steps)},
        "warmup_cosine": {
            "peak": rate,
            "warmup_steps": 2,
            "total_steps": rng.randint(3, 6),
            "end": rate / 100,
            "origin": origin,
        },
        "step": {"initial": rate, "every": rng.randint(1, 3), "factor": 0.5},
        "piecewise": {"values": [rate, rate / 2, rate / 10], "boundaries": [1, 3]},
    }
    if kind == "number":
        return rate
    own = random.Random(repr(made[kind]))  # a stream of its own, so that what follows stays as it was
    other = own.choice(_RELATIVES.get(kind, (kind,)))
    return {"type": other, **(made | _more_rates(own, rate, origin))[other]}


_RELATIVES = {
    "cosine": ("cosine", "polynomial", "exponential", "restarts"),
    "warmup_cosine": ("warmup_cosine", "linear", "wsd", "one_cycle", "inverse_sqrt"),
}
"""A schedule that was drawn -> what may take its place."""


def _more_rates(rng: random.Random, rate: float, origin: int) -> dict[str, dict[str, Any]]:
    low, warmup = rate / 100, {"warmup_steps": rng.randint(1, 3), "origin": origin}
    return {
        "polynomial": {"peak": rate, "steps": rng.randint(2, 6), "power": rng.choice((0.5, 1.0, 2.0)), "end": low},
        "exponential": {"initial": rate, "factor": 0.5, "every": rng.randint(1, 3)},
        "restarts": {"peak": rate, "steps": rng.randint(2, 3), "factor": rng.choice((1, 2)), "end": low},
        "linear": {"peak": rate, "total_steps": rng.randint(4, 6), "end": low, **warmup},
        "wsd": {
            "peak": rate,
            "total_steps": 6,
            "decay_steps": rng.randint(1, 3),
            "end": low,
            "shape": rng.choice(("1-sqrt", "linear", "cosine")),
            **warmup,
        },
        "one_cycle": {"peak": rate, "warmup_steps": rng.choice((1.5, 2)), "total_steps": rng.randint(4, 6)},
        "inverse_sqrt": {"peak": rate, **warmup},
    }


def walk(layers: list[Any]) -> list[Any]:
    """Every layer of a list, residual branches included, in the order of the forward pass."""
    found: list[Any] = []
    for layer in layers:
        found.append(layer)
        found += walk(layer.get("layers", []))
    return found


def _writes(rng: random.Random, found: Description) -> None:
    every = walk(found["layers"])
    used_again = {layer.get("of") for layer in every}  # torch refuses a write between two uses, with a loop by hand too
    dense = [layer for layer in every if layer["op"] == "dense" and layer["name"] not in used_again]
    if dense and found["kind"] != "mlp" and rng.random() < 0.3:
        rng.choice(dense)["clamp"] = True
        found["models"]["jax"] = "nnx"


def _counts(rng: random.Random, found: Description) -> None:
    normal = any(layer["op"] == "batch_norm" for layer in walk(found["layers"]))  # whose micro-batches are its own
    if found["accumulate_steps"] == 1 or normal or rng.random() < 0.3:
        return
    first, *gone = found["heads"]
    found["heads"] = [first]
    overrides = found["policy"].get("overrides", {})
    for glob in [glob for glob in overrides if glob.rstrip("*") in {head["name"] for head in gone}]:
        del overrides[glob]
    first.update(loss="softmax_cross_entropy", soft=False, class_weights=False, weighted=False, weight=1.0)
    first["options"] = {"ignore_index": -100}
    found.update(counts=rng.choice(("weight", "returned")), windows=found["accumulate_steps"])
    if found["counts"] == "returned":  # what an overflow is made of would be a sum of one's own
        found.update(overflows=[], powers={})


def _regions(rng: random.Random, found: Description) -> None:
    layers = found["layers"]
    places = [n for n, layer in enumerate(layers) if layer["op"] in _IN_REGIONS and "clamp" not in layer and n]
    mixed = found["policy"]["name"].startswith("mixed") and "mode" not in found["policy"]
    if not places or not mixed or found["kind"] == "mlp" or rng.random() < 0.4:
        return
    start = rng.choice(places)
    end = start + 1
    while end in places and rng.random() < 0.7:
        end += 1
    layers[start:end] = [{"op": "region", "layers": layers[start:end]}]
    found["models"]["tensorflow"] = "functional"  # TensorFlow's operators mix no dtypes inside a model's own call


def _float64(rng: random.Random, found: Description) -> None:
    if found["policy"]["name"] == "float32" and found["kind"] != "mlp" and rng.random() < 0.4:
        found.update(policy={"name": "float64"}, float64=True)


def _python(rng: random.Random, found: Description) -> None:
    found["python"] = rng.random() < 0.3


def _recipes(rng: random.Random, found: Description) -> None:
    wholes = (
        () if {layer["op"] for layer in walk(found["layers"])} & _STORED_DIFFERENTLY else ("lamb", "adafactor", "muon")
    )
    kind = rng.choice((*wholes, *wholes, "schedule_free", "nadam", "nadamw", "amsgrad")) if rng.random() < 0.3 else ""
    if kind:
        rate = rng.choice((0.005, {"type": "linear_warmup", "peak": 0.005, "steps": 2, "start": 0.0005}))
        spec: dict[str, Any] = {
            "type": kind,
            "learning_rate": rate,
            "eps": 1e-3,
            "weight_decay": rng.choice((0.0, 0.1)),
        }
        if kind == "adafactor":
            spec["eps"] = [1e-3, 1e-3]
        if kind == "amsgrad":
            spec.update(type="adamw", amsgrad=True)
        if kind == "muon":
            spec.update(scale=rng.choice(("original", "moonlight")), nesterov=rng.random() < 0.5)
        found["optimizer"] = spec
    if kind != "schedule_free" and rng.random() < 0.3:
        found["ema"] = {"decay": rng.choice((0.5, 0.9)), "warmup": rng.random() < 0.5, "every": rng.choice((1, 1, 2))}
    own = [head["name"] for head in found["heads"] if "tied" not in head]
    if own and rng.random() < 0.25:
        group = {"paths": f"**/{rng.choice(own)}", **rng.choice(({"clip_norm": 0.05}, {"clip_value": 0.01}))}
        if rng.random() < 0.3:
            group["trainable_after"] = rng.choice((1, 2))
        if rng.random() < 0.3:
            group["learning_rate_scale"] = 0.5
        found["optimizer"] = {**found["optimizer"], "groups": [group]}


_ADDED: Final[dict[str, Callable[[random.Random, Description], None]]] = {
    "writes": _writes,
    "counts": _counts,
    "regions": _regions,
    "float64": _float64,
    "python": _python,
    "recipes": _recipes,
}
