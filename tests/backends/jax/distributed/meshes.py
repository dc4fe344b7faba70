"""Networks on meshes of four devices, and what of a compiled program goes from device to device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import polyamp
from polyamp.contract import registry

ROWS: Final = 16
COLLECTIVES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES: Final = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "pred": 1}

Spec = Callable[[tuple[int, ...]], Any]


def mesh(shape: Sequence[int] = (4,), axes: Sequence[str] = ("data",), kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh(tuple(shape), tuple(axes), axis_types=(kind,) * len(axes))


def replicated(shape: tuple[int, ...]) -> Any:
    return P()


def rows_sharded(shape: tuple[int, ...]) -> Any:
    """Fully sharded data parallel: every array whose first axis can be divided by four is."""
    return P("data") if shape and shape[0] % 4 == 0 else P()


def columns_sharded(shape: tuple[int, ...]) -> Any:
    """Tensor parallel, on a mesh of data and model."""
    return P(*(None,) * (len(shape) - 1), "model") if shape and shape[-1] % 2 == 0 else P()


def both_sharded(shape: tuple[int, ...]) -> Any:
    return P("data", "model") if len(shape) == 2 and shape[1] % 2 == 0 else P()


def put(tree: Any, on: Any, spec: Spec = replicated) -> Any:
    """Every array of a tree on the mesh; what is none, such as a module's functions, as it is."""

    def one(leaf: Any) -> Any:
        return jax.device_put(leaf, NamedSharding(on, spec(leaf.shape))) if hasattr(leaf, "shape") else leaf

    return jax.tree.map(one, tree)


def whole_batch(step: int, *, poisoned: int | None = None, size: int = ROWS, width: int = 4, out: int = 3) -> Any:
    """A batch on the host; a `poisoned` row makes gradients overflow."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(size, width)).astype(np.float32)
    gain = np.ones((size, out), np.float32)
    if poisoned is not None:
        gain[poisoned] = np.inf
    return {"x": x, "y": np.tanh(x[:, :out]), "gain": gain}


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch["x"]) * batch["gain"], batch["y"])


def flat(tree: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def apart(one: Any, other: Any) -> float:
    """How far two trees are from each other, relative to the second."""
    return float(np.linalg.norm(flat(one) - flat(other)) / np.linalg.norm(flat(other)))


def bits(tree: Any, device: int | None = None) -> list[bytes]:
    """What a device holds of each array bit for bit; of the whole arrays without one."""
    found = []
    for leaf in jax.tree.leaves(tree):
        leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        held = leaf if device is None else leaf.addressable_shards[device].data
        found.append(np.asarray(held).tobytes())
    return found


def compiled(loss: Any, recipe: polyamp.Recipe, state: Any, batch: Any) -> Any:
    """The step's program."""
    run: Any = registry.get("jax").train_step(loss, recipe)
    return run.lower(state, batch).compile()


def sent(text: str) -> tuple[Counter[str], Counter[str], list[str]]:
    """Arrays and bytes by the kind of collective of a compiled program, and its all-reduces.

    XLA puts some of its reductions together and not others, so what counts is arrays.
    """
    arrays: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    reductions = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if match is None:
            continue
        for dtype, shape in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1]):
            arrays[match[2]] += 1
            sizes[match[2]] += BYTES[dtype] * math.prod(int(size) for size in shape.split(",") if size)
        if match[2] == "all-reduce":
            reductions.append(line.strip())
    return arrays, sizes, reductions
