"""What a description says in polyamp's words and in NumPy: the recipe, the initial weights, the batches, the loss.

The same in every framework's process; called by the workers.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import numpy as np

import polyamp
from polyamp import Recipe, losses
from tests.fuzz.grammar import BATCH, CLASSES, LENGTH, SIZE, VOCABULARY, Description, walk

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

WIDTH: Final = {"mlp": 6, "vector": 6, "sequence": 6, "image": 2}
"""Features or channels of the input; tokens have none."""


def recipe(description: Description, policy: str | None = None) -> Recipe:
    """The recipe; with another policy's name instead of its own (then without mode and overrides), the same scaler."""
    said = description["policy"] if policy is None else {"name": policy}
    optimizer = dict(description["optimizer"])
    groups = [polyamp.Group(**group) for group in optimizer.pop("groups", ())]
    scaler = dict(description["scaler"])
    rate = optimizer["learning_rate"]
    if isinstance(rate, dict):
        optimizer["learning_rate"] = getattr(polyamp.schedules, rate["type"])(**_plain(rate))
    if scaler["kind"] == "like":
        made = polyamp.LossScaler.like(scaler["name"], **_plain(scaler, "kind", "name"))
    else:
        made = polyamp.LossScaler(**scaler)
    return Recipe(
        policy=polyamp.Policy(said["name"], **_plain(said, "name")),
        scaler=made,
        optimizer=getattr(polyamp, optimizer["type"])(**_tuples(_plain(optimizer)), groups=groups),
        clip_norm=description["clip_norm"],
        accumulate_steps=description["accumulate_steps"],
        ema=polyamp.Ema(**description["ema"]) if "ema" in description else None,
    )


def _plain(table: dict[str, Any], *without: str) -> dict[str, Any]:
    left = set(without or ("type",))
    return {name: tuple(v) if isinstance(v, list) else v for name, v in table.items() if name not in left}


def _tuples(table: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}


def width_of_input(description: Description) -> int:
    """Size of the last axis before the first layer; 0 for tokens."""
    return WIDTH.get(description["kind"], 0)


def widths(description: Description) -> dict[str, int]:
    """Name of each layer with parameters -> size of the last axis that it gets."""
    found: dict[str, int] = {}

    def through(layers: list[Any], width: int) -> int:
        for layer in layers:
            if "name" in layer:
                found[layer["name"]] = width
            if layer["op"] == "residual":
                through(layer["layers"], width)
            elif layer["op"] == "region":
                width = through(layer["layers"], width)
            elif layer["op"] not in ("unused", "detached", "zeroed"):
                width = layer.get("width", width)
        return width

    last = through(description["layers"], width_of_input(description))
    places = {"vector": 1, "mlp": 1, "image": SIZE * SIZE}.get(description["kind"], LENGTH)
    for head in description["heads"]:
        found[head["name"]] = last * (places if head["pool"] == "flatten" else 1)
    return found


def weights(description: Description) -> Weights:
    """ "layer/array" -> float32, or float64 under such a policy, in the layout of Keras and flax: the last axis of a
    kernel is the output's."""
    found: Weights = {}
    given = widths(description)
    for layer in [*walk(description["layers"]), *({"op": "dense", **head} for head in description["heads"])]:
        if "name" not in layer or "tied" in layer:
            continue
        name, n = layer["name"], given[layer["name"]]
        for array, shape in _shapes(layer, n).items():
            rng = np.random.default_rng([description["seed"], zlib.crc32(f"{name}/{array}".encode())])
            if array == "scale":
                value = rng.uniform(0.7, 1.3, shape)
            elif array == "bias":
                value = rng.uniform(-0.2, 0.2, shape)
            elif array in ("mean", "variance"):
                value = np.full(shape, float(array == "variance"))
            else:
                inputs = np.prod(shape[:-1]) if array == "kernel" else shape[0]
                value = rng.uniform(-1.0, 1.0, shape) * (3.0 / (1.0 if array == "table" else inputs)) ** 0.5
            found[f"{name}/{array}"] = value.astype(np.float32)
    jiggle = description.get("jiggle", 0.0)
    if jiggle:
        rng = np.random.default_rng([description["seed"], 2, description.get("jiggled", 0)])
        found = {name: (v * (1.0 + jiggle * rng.choice((-1.0, 1.0), v.shape))).astype(np.float32)
                 for name, v in found.items()}  # fmt: skip
    return {name: v.astype(np.float64) for name, v in found.items()} if wide(description) else found


def wide(description: Description) -> bool:
    """Whether everything is float64."""
    return bool(description["policy"]["name"] == "float64")


def _shapes(layer: dict[str, Any], n: int) -> dict[str, tuple[int, ...]]:
    op, width = layer["op"], layer.get("width", n)
    bias = {"bias": (width,)} if layer.get("bias", True) else {}
    if op in ("dense", "unused", "detached", "zeroed"):
        return {"kernel": (n, width), **bias}
    if op == "conv":
        return {"kernel": (3, 3, n, width), **bias}
    if op == "embedding":
        return {"table": (VOCABULARY, width)}
    if op == "positions":
        return {"table": (LENGTH, n)}
    if op in ("scale", "rms_norm"):
        return {"scale": (n,)}
    if op in ("layer_norm", "group_norm"):
        return {"scale": (n,), "bias": (n,)}
    if op == "batch_norm":
        return {"scale": (n,), "bias": (n,), "mean": (n,), "variance": (n,)}
    if op == "attention":
        return dict.fromkeys(("query", "key", "value", "out"), (n, n))
    if op == "rnn":
        return {"input": (n, width), "recurrent": (width, width), "bias": (width,)}
    if op == "gru":
        return {"input": (n, 3 * width), "recurrent": (width, 3 * width)}
    raise ValueError(op)


def batches(description: Description) -> list[Any]:
    """One batch per step, NumPy: "x", a "boost" per example that the loss is multiplied by, and targets per head."""
    rng = np.random.default_rng([description["seed"], 1])
    kind = description["kind"]
    shape = {"vector": (), "mlp": (), "image": (SIZE, SIZE)}.get(kind, (LENGTH,))
    found = []
    for step in range(description["steps"]):
        if kind == "tokens":
            x: Array = rng.integers(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
        else:
            x = rng.normal(size=(BATCH, *shape, width_of_input(description))).astype(np.float32)
        boost = np.full(BATCH, 2.0 ** description.get("powers", {}).get(str(step), 0), np.float32)
        if step in description["overflows"]:
            boost[int(rng.integers(BATCH))] = np.inf
            if description.get("counts"):  # in every micro-batch: one that counts for nothing overflows nothing (S8)
                boost[:] = np.inf
        batch: dict[str, Any] = {"x": x, "boost": boost}
        for head in description["heads"]:
            places = shape if head["pool"] == "none" else ()
            batch[head["name"]] = _targets(rng, head, (BATCH, *places))
            if description.get("counts"):
                _ignore(rng, batch[head["name"]], head["options"]["ignore_index"], description["windows"])
            if head.get("weighted"):
                batch[f"{head['name']} weights"] = rng.uniform(0.5, 1.5, batch[head["name"]].shape).astype(np.float32)
        if description["float64"]:  # as NumPy makes them; they are float32 before they reach a model (S26)
            batch = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in batch.items()}
        found.append(batch)
    count = description["accumulate_steps"]
    if description.get("reversed"):  # what `judge` asks for: sums over the rows in another order
        found = [{k: np.concatenate([v[::-1] for v in np.array_split(v, count)]) for k, v in b.items()} for b in found]
    if not description.get("listed"):
        return found
    size = BATCH // count
    return [[{k: v[n * size : (n + 1) * size] for k, v in batch.items()} for n in range(count)] for batch in found]


def _ignore(rng: Any, labels: Array, ignored: int, count: int) -> None:
    """Ignore labels, in place: few in one micro-batch, nearly all or all in another; never all of a window."""
    for part in np.array_split(labels, count):
        part[rng.random(part.shape) < rng.choice((0.0, 0.2, 0.8, 1.0))] = ignored
    labels[(int(rng.integers(len(labels))), *(0,) * (labels.ndim - 1))] = 1


def _targets(rng: Any, head: dict[str, Any], places: tuple[int, ...]) -> Array:
    classes = VOCABULARY if "tied" in head else CLASSES
    if head.get("soft"):
        given = rng.uniform(0.1, 1.0, (*places, classes))
        return (given / given.sum(-1, keepdims=True)).astype(np.float32)  # type: ignore[no-any-return]  # rng is Any
    if head["loss"] == "softmax_cross_entropy":
        labels: Array = rng.integers(0, classes, places).astype(np.int32)
        ignored = head["options"].get("ignore_index")
        if ignored is not None:  # every second example keeps its labels, so that every micro-batch has some
            labels[1::2] = np.where(labels[1::2] == ignored, 1, labels[1::2])
            labels[::2] = np.where(rng.random(labels[::2].shape) < 0.5, ignored, labels[::2])
        return labels
    if head["loss"] == "sigmoid_cross_entropy":
        return rng.integers(0, 2, (*places, classes)).astype(np.float32)  # type: ignore[no-any-return]
    return rng.normal(size=(*places, classes)).astype(np.float32)  # type: ignore[no-any-return]


def loss_function(description: Description, mean: Any, factor: float = 1.0) -> Any:
    """`loss_fn(model, batch) -> (loss, aux)`.

    Args:
        description: what to train.
        mean: the framework's own, for the boost: of an array, in the dtype of another.
        factor: 1 but for a planted fault.
    """
    heads = description["heads"]

    def loss_fn(model: Any, batch: Any) -> Any:
        outputs = model(batch["x"])
        if not isinstance(outputs, list | tuple):  # a functional Keras model of one output
            outputs = [outputs]
        total: Any = 0.0
        for head, output in zip(heads, outputs, strict=True):
            if head["loss"] != "unused":
                options = dict(head["options"])
                if head.get("weighted"):
                    options["weights"] = batch[f"{head['name']} weights"]
                if head.get("class_weights"):
                    options["class_weights"] = np.linspace(0.5, 1.5, output.shape[-1], dtype=np.float32)
                function = getattr(losses, head["loss"])
                if description.get("counts") == "returned":
                    plain = function(output, batch[head["name"]], **options)
                    return plain, {"plain": plain}
                total = total + function(output, batch[head["name"]], **options) * head["weight"]
        return total * mean(batch["boost"], total) * factor, {"plain": total}

    return loss_fn


def weight_function(description: Description, total: Any) -> Any:
    """`weight(batch)`: the labels that count, of the only head.

    Args:
        description: what to train.
        total: the framework's own, for an array of truth values.
    """
    (head,) = description["heads"]
    return lambda batch: total(batch[head["name"]] != head["options"]["ignore_index"])
