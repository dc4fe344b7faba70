"""Float32 evaluation of a model in inference mode: outputs, gradients and the output of each layer.

`polyamp.port(check=)` compares it with the evaluation in the other framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from polyamp.float_formats import HALF_DTYPES
from polyamp.porting.layouts.converter import Evaluation
from polyamp.recipe.policy import Policy
from polyamp_keras.arrays import dtype_name, is_floating
from polyamp_keras.compat import clear_losses, get_layer_policy, replace_variable, set_layer_policy
from polyamp_keras.engine import ENGINE
from polyamp_keras.engines.differentiation import HostArray
from polyamp_keras.models.layers import is_layer, list_layers, recurrent_cells, replace_calls
from polyamp_keras.models.variables import model_variables
from polyamp_keras.porting.fill import assign
from polyamp_keras.porting.inventory import KerasInventory, read_keras_model
from polyamp_keras.precision.bound_model import native_model
from polyamp_keras.precision.keras_policies import is_quantized
from polyamp_keras.precision.policy_application import PolicyApplication


def evaluate(
    model: Any,
    batch: Any,
    cotangents: Callable[[Sequence[HostArray]], Sequence[HostArray]],
    inputs: Container[str] = (),
) -> Evaluation:
    """Return outputs, gradients and the outputs of layers (see `Converter.evaluate`).

    Raises:
        UnsupportedError: the process cannot compute the gradients of some layers.
    """
    model = native_model(model)
    found = read_keras_model(model)
    check_gradients(found, "check", "port without check=")
    args, kwargs = _arguments(batch)
    if is_layer(model):
        kwargs["training"] = False
    weights = {name: found.variables[name] for name in _trainable_names(found)}

    def call() -> tuple[list[Any], Mapping[_Place, Any]]:
        calls = _RecordedCalls(inputs)
        with calls.recorded(model, found.paths):
            given = model(*args, **kwargs)
        outputs = [keras.ops.cast(leaf, "float32") if is_floating(leaf) else leaf for leaf in keras.tree.flatten(given)]
        return outputs, calls.values

    with preserve_pass_state(model), _force_float32(model), ENGINE.matmul_precision("highest"):
        result = ENGINE.differentiate(call, list(weights.values()), cotangents)
    of_inputs, of_outputs = (
        {path: values for (is_input, path), values in result.observed.items() if is_input is kind}
        for kind in (True, False)
    )
    return Evaluation(
        result.outputs, dict(zip(weights, result.gradients, strict=True)), modules=of_outputs, inputs=of_inputs
    )


def check_gradients(found: KerasInventory, call: str, instead: str) -> None:
    """Raise if this process cannot compute the gradients of a model; see `KerasEngine.check_gradients`."""
    ENGINE.check_gradients({layer.forms[0].kind for layer in found.inventory.layers}, call, instead)


def _trainable_names(found: KerasInventory) -> list[str]:
    leaves = [leaf for layer in found.inventory.layers for leaf in layer.leaves.values()]
    return [leaf.name for leaf in leaves if leaf.trainable and leaf.tied is None]


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = keras.tree.map_structure(_to_tensor, batch)
    if isinstance(tensors, Mapping):
        return (), dict(tensors)
    return (tuple(tensors), {}) if isinstance(tensors, tuple) else ((tensors,), {})


def _to_tensor(leaf: Any) -> Any:
    """Return an argument as a tensor, in float32 if it is floating; other objects are unchanged."""
    if not isinstance(leaf, np.ndarray | np.generic) and not keras.ops.is_tensor(leaf):
        return leaf
    tensor = keras.ops.convert_to_tensor(leaf)
    return keras.ops.cast(tensor, "float32") if is_floating(tensor) else tensor


@contextlib.contextmanager
def preserve_pass_state(model: Any) -> Iterator[None]:
    """Context manager that restores what a forward pass writes: statistics, seeds, states of stateful layers."""
    found = model_variables(model)
    written = [*found.running.values(), *found.rng.values(), *found.rewritten.values()]
    before = [np.array(ENGINE.host_values(variable)) for variable in written]
    try:
        yield
    finally:
        for variable, values in zip(written, before, strict=True):
            assign(variable, values)
        if isinstance(model, keras.Layer):
            clear_losses(model)


@contextlib.contextmanager
def _force_float32(model: Any) -> Iterator[None]:
    """Context manager in which every layer computes in float32, whatever its policy.

    Variables in 16 bits are replaced by float32 copies, because some Keras layers do not cast them. Policies and
    variables are restored on exit.
    """
    if not is_layer(model):
        yield
        return
    application = PolicyApplication(model, Policy("float32").plan())
    held: list[tuple[Any, Any]] = []
    values: list[tuple[Any, Any]] = []
    try:
        application.put()
        for module in list_layers(model):
            if not is_quantized(module.layer):
                held.append((module.layer, get_layer_policy(module.layer)))
                set_layer_policy(module.layer, keras.DTypePolicy("float32"))
        for variable in model.variables:
            if dtype_name(variable) in HALF_DTYPES:
                wide = ENGINE.cast_variable(variable, "float32")
                values.append((variable, replace_variable(variable, wide)))
        yield
    finally:
        for variable, value in values:
            replace_variable(variable, value)
        for layer, policy in held:
            set_layer_policy(layer, policy)
        application.restore()


_Place = tuple[bool, str]
"""Whether a value is an input, and the path of its layer."""


class _RecordedCalls:
    """Values of the calls of layers in one pass.

    Args:
        inputs: paths of the layers of which the first array that the first call takes is recorded too.

    Attributes:
        values: place -> tensor, in the order in which calls ended. For a layer called several times, the last output.
    """

    def __init__(self, inputs: Container[str]) -> None:
        self.values: dict[_Place, Any] = {}
        self._inputs = inputs
        self._trace = ENGINE.trace_state()

    def recorded(self, model: Any, paths: Mapping[int, str]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records the calls of a model's layers. `paths` are by the layer's id."""
        found = list_layers(model)
        cells = {id(part.layer) for each in found for part in recurrent_cells(each.layer)}
        named = (
            (each.layer, paths.get(id(each.layer), each.stable_path)) for each in found if id(each.layer) not in cells
        )
        return replace_calls((layer, self._wrap(layer.call, path)) for layer, path in named if path)

    def _wrap(self, call: Callable[..., Any], path: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if path in self._inputs and (True, path) not in self.values:
                given = next((each for each in (*args, *kwargs.values()) if self._belongs(each)), None)
                if given is not None:
                    self.values[True, path] = given
            output = call(*args, **kwargs)
            if self._belongs(output):
                self.values.pop((False, path), None)
                self.values[False, path] = output
            return output

        return watched

    def _belongs(self, value: Any) -> bool:
        """Return whether a value is one array of this pass, and not of a trace inside of it."""
        return ENGINE.is_tensor(value) and ENGINE.trace_state() == self._trace
