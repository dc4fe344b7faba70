"""Entry module of JAX porting: `JaxConverter`, which passes a model to the module of its library in `libraries`.

The library is detected as in `polyamp_jax.models.library_detection`. Its module is imported only if the user's program
has imported the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ModelError, PortError, describe_value
from polyamp.porting.layouts.converter import Evaluation
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax import compat
from polyamp_jax.models.library_detection import ACCEPTED_MODELS
from polyamp_jax.porting.jax_only.lazy_leaves import array_like
from polyamp_jax.porting.libraries import function
from polyamp_jax.porting.libraries.library import Library, make_call_inputs
from polyamp_jax.porting.libraries.stacked_layers import gather_slices, parse_slice_name

LIBRARIES: Final = (
    ("flax.nnx", "Module", "nnx"),
    ("flax.linen", "Module", "linen"),
    ("equinox", "Module", "equinox"),
    ("haiku", "Transformed", "haiku"),
    ("haiku", "TransformedWithState", "haiku"),
    ("haiku", "MultiTransformed", "haiku"),
    ("haiku", "MultiTransformedWithState", "haiku"),
)
"""(module of the class, name of the class, module in `libraries`). The class is that of the model or of its tuple's
first item."""


class JaxConverter:
    """`polyamp.porting.layouts.converter.Converter` for JAX."""

    in_place: Final = False

    def inventory(self, model: Any, batch: Any = None) -> Inventory:
        return find_library(model).inventory(model, None if batch is None else make_call_inputs(batch))

    def fill(self, model: Any, leaves: Mapping[str, Lazy]) -> Any:
        of = find_library(model)
        there = of.arrays(model)
        made = {}
        for name, values in gather_slices(leaves, there).items():
            if name not in there:
                raise PortError(f"the model has no array {name!r}.")
            like = there[name]
            if tuple(like.shape) != values.shape or np.dtype(like.dtype) != values.dtype:
                raise PortError(
                    f"{name!r} is {np.dtype(like.dtype)}{list(like.shape)} in the model. Received: "
                    f"{values.dtype}{list(values.shape)}."
                )
            made[name] = array_like(like, values.read())
        return of.replace_arrays(model, made)

    def open_file(self, path: Path) -> Inventory:
        from polyamp_jax.porting.files import open_file

        return open_file(path)

    def write_file(self, path: Path, leaves: Mapping[str, Lazy], like: Path) -> None:
        from polyamp_jax.porting.files import write_file

        write_file(path, leaves, like)

    def write_model(self, path: Path, model: Any) -> None:
        from polyamp_jax.porting.files import write_model

        write_model(path, model, find_library(model).arrays(model))

    def evaluate(self, model: Any, batch: Any, cotangents: Callable[[Sequence[Any]], Sequence[Any]]) -> Evaluation:
        of = find_library(model)
        inputs = make_call_inputs(batch)
        there = of.arrays(model)
        wanted = {
            leaf.name: None if leaf.name in there else parse_slice_name(leaf.name)
            for layer in of.inventory(model, inputs).layers
            for leaf in layer.leaves.values()
            if leaf.trainable and leaf.tied is None and jnp.issubdtype(leaf.array.dtype, jnp.inexact)
        }
        trainable = {name if part is None else part[0] for name, part in wanted.items()}
        arrays = {name: _to_float32(name, array) for name, array in there.items()}
        held = of.replace_arrays(model, {name: array for name, array in arrays.items() if name not in trainable})
        paths: list[str] = []

        @jax.jit
        def call(params: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
            seen: list[Any] = []
            paths.clear()
            trace = compat.trace_state()

            def record(path: str, value: Any) -> None:
                # scans and recomputations run in their own trace; the root module's output is the model's
                if path and isinstance(value, jax.Array) and compat.trace_state() == trace:
                    paths.append(path)
                    seen.append(value)

            outputs = of.run(of.replace_arrays(held, params), inputs, record)
            return jax.tree.leaves(outputs), seen

        with jax.default_matmul_precision("float32"):
            outputs, backward, seen = jax.vjp(call, {name: arrays[name] for name in trainable}, has_aux=True)
            chosen = cotangents([np.asarray(output) for output in outputs])
            (gradients,) = backward([_cotangent(*pair) for pair in zip(outputs, chosen, strict=True)])
        return Evaluation(
            [np.asarray(output) for output in outputs],
            {
                name: np.asarray(gradients[name] if part is None else gradients[part[0]][part[1]])
                for name, part in wanted.items()
            },
            {path: np.asarray(value) for path, value in zip(paths, seen, strict=True)},
        )


def find_library(model: Any) -> Library:
    """Return the module in `libraries` that supports a model.

    Raises:
        ModelError: the object is no model, or only a part of one.
    """
    first = model[0] if isinstance(model, tuple) and model else model
    for module, name, room in LIBRARIES:
        if any(compat.is_a(each, module, name) for each in (first, model)):  # hk.Transformed is a tuple
            return cast("Library", importlib.import_module(f"polyamp_jax.porting.libraries.{room}"))
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return cast("Library", function)
    raise ModelError(f"model must be {ACCEPTED_MODELS}. Received: {describe_value(model)}.")


def _to_float32(name: str, array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ModelError(f"the model's arrays have no values yet: {name!r} is a jax.ShapeDtypeStruct.")
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and np.dtype(array.dtype).itemsize < 4
    return jnp.asarray(array, jnp.float32) if narrow else array


def _cotangent(output: Any, chosen: Any) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.asarray(chosen, output.dtype)


CONVERTER: Final = JaxConverter()
