"""A family's model in a framework, its text changed where a fault is; two of them compared.

Called by the lists of faults, `clean_pairs` and `__main__`. A file of `families`, or a loop, is read as text, a few of
its words are replaced, and it runs as a module of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

import polyamp
from polyamp.parity.report.report import Report
from tests.porting.faults.planting import Carried, DoesNotFitError, Edit, carrying

FAMILIES: Final = ("decoder", "seq2seq", "encoder", "unet", "convnet", "tagger", "vae", "recommender")
ROWS: Final = 8
BASE: Final[dict[str, Any]] = {"policy": "float32", "optimizer": polyamp.sgd(0.1, momentum=0.9)}
"""What both sides train with where nothing else is said."""
_HOME: Final = Path(__file__).parent
_FOLDERS: Final = {"loops": _HOME, "trainer": _HOME / "part_c"}
_number = itertools.count()


class Side(NamedTuple):
    """One side of a comparison.

    Attributes:
        framework: "torch", "nnx" or "keras".
        edits: of the family's text.
        loop: edits of the hand-written loop's text, which then trains this side; None: a recipe does.
        recipe: keyword arguments of `polyamp.Recipe`, over `BASE`; of a loop only its policy.
        loops: which text the loop is: "loops" or "trainer".
    """

    framework: str
    edits: tuple[Edit, ...] = ()
    loop: tuple[Edit, ...] | None = None
    recipe: Mapping[str, Any] = {}
    loops: str = "loops"


def text(family: str, framework: str, edits: tuple[Edit, ...]) -> str:
    """The text of a family's file, or of a loop's, with other words in it.

    Raises:
        DoesNotFitError: what an edit replaces is not there exactly once.
    """
    name = f"{family}_{framework}.py"
    found = (_FOLDERS.get(family, _HOME / "families") / name).read_text(encoding="utf-8")
    for before, after in edits:
        if found.count(before) != 1:
            raise DoesNotFitError(f"{name} has {found.count(before)} places like {before!r}")
        found = found.replace(before, after)
    return found


@functools.cache
def module(family: str, framework: str, edits: tuple[Edit, ...] = ()) -> ModuleType:
    """The changed text, run."""
    made = ModuleType(f"held_out_{family}_{framework}_{next(_number)}")
    sys.modules[made.__name__] = made
    exec(compile(text(family, framework, edits), f"<{made.__name__}>", "exec"), vars(made))
    return made


def build(family: str, framework: str, edits: tuple[Edit, ...], seed: int) -> Any:
    """A model with random weights."""
    code, rng = module(family, framework, edits), np.random.default_rng(seed)
    if framework == "torch":
        import torch

        torch.manual_seed(seed)
        model = code.Model()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.from_numpy(_values(name, tuple(tensor.shape), rng)))
        return model
    if framework == "nnx":
        import jax.numpy as jnp
        from flax import nnx

        model = code.Model(nnx.Rngs(seed))
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        filled = nnx.map_state(
            lambda path, leaf: leaf.replace(jnp.asarray(_values(str(path[-1]), leaf.get_value().shape, rng))), params
        )
        return nnx.merge(graph, filled, rest)
    model = code.make()
    for variable in model.weights:
        if variable.dtype == "float32":
            variable.assign(_values(variable.path, tuple(variable.shape), rng))
    return model


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Kernels keep about the size of what they multiply; biases are small, scales about 1."""
    drawn = rng.standard_normal(shape)
    if "var" in name:
        drawn = 1.0 + 0.5 * np.tanh(drawn)
    elif "bias" in name or "mean" in name or "beta" in name:
        drawn = 0.2 * drawn if len(shape) < 2 else drawn / math.sqrt(shape[0])
    elif len(shape) < 2:
        drawn = 1.0 + 0.2 * drawn
    else:
        drawn = drawn / math.sqrt(math.prod(shape) / max(shape))
    return drawn.astype(np.float32)


def batch(family: str, seed: int, rows: int = ROWS) -> dict[str, np.ndarray[Any, Any]]:
    """A family's batch; images have their channels last."""
    rng = np.random.default_rng(1000 + seed)

    def whole(low: int, high: int, *shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(low, high, (rows, *shape)).astype(np.int32)

    def real(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal((rows, *shape)).astype(np.float32)

    if family == "decoder":
        return {"tokens": whole(0, 23, 6)}
    if family == "seq2seq":
        labels = whole(1, 19, 5)
        labels[:, 3:] *= rng.integers(0, 2, (rows, 2)).astype(np.int32)
        return {"source": whole(1, 19, 7), "target": whole(0, 19, 5), "labels": labels}
    if family == "encoder":
        mask = (np.arange(6) < rng.integers(3, 7, (rows, 1))).astype(np.float32)
        return {"tokens": whole(0, 29, 6), "kinds": whole(0, 2, 6), "mask": mask, "labels": whole(0, 5)}
    if family == "unet":
        return {"images": real(8, 8, 3), "noise": real(8, 8, 3), "times": rng.uniform(0, 100, rows).astype(np.float32)}
    if family == "convnet":
        return {"images": 0.5 + 2 * real(8, 8, 3), "labels": whole(0, 5)}
    if family == "tagger":
        return {"tokens": whole(0, 31, 5), "tags": whole(0, 7, 5)}
    if family == "vae":
        return {"x": (real(20) > 0).astype(np.float32), "noise": real(4)}
    categories = np.concatenate([whole(0, size, 1) for size in (11, 17, 5)], 1)
    return {"dense": np.abs(real(6)), "categories": categories, "clicked": (real() > 0).astype(np.float32)}


def _native(framework: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    if framework != "torch":
        return dict(arrays)
    return {
        name: np.ascontiguousarray(np.moveaxis(array, -1, 1)) if array.ndim == 4 else array
        for name, array in arrays.items()
    }


def _trains(side: Side, code: ModuleType) -> Any:
    if side.loop is None:
        return polyamp.Recipe(**{**BASE, **side.recipe})
    loop = module(side.loops, side.framework, side.loop)
    loop.loss_fn = code.loss_fn  # type: ignore[attr-defined]
    return polyamp.parity.OwnLoop(loop.begin, loop.step, policy=side.recipe.get("policy", "float32"))


def compared(
    family: str,
    first: Side,
    second: Side,
    seed: int,
    *,
    carried: tuple[Carried, ...] = (),
    steps: int = 2,
    randomness: str = "off",
    eager: bool = True,
    rows: int = ROWS,
) -> Report:
    """Two sides' comparison.

    Args:
        family: of `FAMILIES`.
        first: the side that names the modules.
        second: the other one.
        seed: of the weights and the batches.
        carried: arrays that come wrongly to the second side.
        steps: how many.
        randomness: as of `polyamp.compare`.
        eager: whether Keras steps op by op, and not in a graph.
        rows: of a batch.
    """
    sides = (first, second)
    codes = [module(family, side.framework, side.edits) for side in sides]
    models = [build(family, side.framework, side.edits, seed + number) for number, side in enumerate(sides)]

    def batches(step: int) -> Any:
        arrays = batch(family, 10 * seed + step, rows)
        return polyamp.porting.Batch(*(_native(side.framework, arrays) for side in sides))

    options = [
        {"init": {}, "step": {"compile": False} if side.framework == "keras" and eager else {}} for side in sides
    ]
    with carrying(models[1], carried):
        return polyamp.compare(
            models[0],
            models[1],
            batches,
            loss_fn=tuple(code.loss_fn for code in codes),
            recipe=tuple(_trains(side, code) for side, code in zip(sides, codes, strict=True)),
            steps=steps,
            labels=("first", "second"),
            options=tuple(options),
            randomness=randomness,
        )
