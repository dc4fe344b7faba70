"""Float32 evaluation of a model on one batch: outputs, gradients and the output of each module."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ModelError
from polyamp.porting.layouts.converter import Evaluation
from polyamp_jax import compat
from polyamp_jax.porting.libraries.porting_library import find_library, make_call_inputs
from polyamp_jax.porting.libraries.stacked_layers import parse_slice_name


def evaluate(
    model: Any, batch: Any, cotangents: Callable[[Sequence[Any]], Sequence[Any]], inputs: Container[str] = ()
) -> Evaluation:
    """Return outputs, gradients and the outputs of modules; see `Converter.evaluate`.

    Raises:
        ModelError: the model's arrays have no values yet.
    """
    of = find_library(model)
    given = make_call_inputs(batch)
    there = of.arrays(model)
    wanted = {
        leaf.name: None if leaf.name in there else parse_slice_name(leaf.name)
        for layer in of.inventory(model, given).layers
        for leaf in layer.leaves.values()
        if leaf.trainable and leaf.tied is None and jnp.issubdtype(leaf.array.dtype, jnp.inexact)
    }
    trainable = {name if part is None else part[0] for name, part in wanted.items()}
    arrays = {name: _to_float32(name, array) for name, array in there.items()}
    held = of.replace_arrays(model, {name: array for name, array in arrays.items() if name not in trainable})
    paths: list[tuple[str, bool]] = []

    @jax.jit
    def call(params: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        seen: list[Any] = []
        paths.clear()
        trace = compat.trace_state()

        def record(path: str, value: Any, is_input: bool = False) -> None:
            # scans and recomputations run in their own trace; the root module's output is the model's
            wanted = path in inputs and (path, True) not in paths if is_input else path
            if wanted and isinstance(value, jax.Array) and compat.trace_state() == trace:
                paths.append((path, is_input))
                seen.append(value)

        outputs = of.run(of.replace_arrays(held, params), given, record)
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
        *(
            {path: np.asarray(value) for (path, is_input), value in zip(paths, seen, strict=True) if is_input is kind}
            for kind in (False, True)
        ),
    )


def _to_float32(name: str, array: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        raise ModelError(f"the model's arrays have no values yet: {name!r} is a jax.ShapeDtypeStruct.")
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and np.dtype(array.dtype).itemsize < 4
    return jnp.asarray(array, jnp.float32) if narrow else array


def _cotangent(output: Any, chosen: Any) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.asarray(chosen, output.dtype)
