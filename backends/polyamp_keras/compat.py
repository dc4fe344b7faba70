"""Private names of Keras, and differences between its versions (from 3.9), on all of its backends.

No other module of this package but `engines/` uses a private name; `tests/core/house/test_private_names.py` checks the
syntax trees. The docstring of each name states the behaviour that polyamp relies on.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import keras

from polyamp.errors import UnsupportedError
from polyamp_keras.arrays import dtype_name

_SUPPORTED_VERSIONS: Final = "Use Keras 3.9 to 3.15"
_PREPROCESSING_MODULES: Final = ("keras.src.layers.preprocessing.", "keras.layers.preprocessing.")
_MASK: Final = "_keras_mask"


# Layers and their variables.

own_trainable_variables: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_trainable_variables")
"""Weights that a layer itself created, frozen or not. For an optimizer: the variables that it was built for, in the
order of its slots."""
own_non_trainable_variables: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_non_trainable_variables")
"""Variables of a layer that were created as non-trainable, such as a moving mean."""
seed_generators: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_seed_generators")
"""Generators whose `state` is the source of a layer's random numbers."""

tracked_layers: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_layers")
"""Layers that a layer tracks, in the order in which they were assigned."""


def child_layers(layer: Any) -> list[Any]:
    """Return the layers in a layer's attributes, lists and dicts, without their own child layers."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def flatten_layers(layer: Any) -> list[Any]:
    """Return a layer and all layers inside it, `InputLayer` included."""
    return list(layer._flatten_layers())


def lookup_layers(layers: Sequence[Any]) -> list[Any]:
    """Return the lookup layer of each TextVectorization. Keras never marks it as built."""
    return [layer._lookup_layer for layer in layers if isinstance(layer, keras.layers.TextVectorization)]


def split_names(text: str) -> frozenset[str]:
    """Split a text into a set of words."""
    return frozenset(text.split())


def layer_classes(text: str) -> tuple[Any, ...]:
    """Return the Keras layer classes of these names, without those that the installed Keras lacks."""
    return tuple(getattr(keras.layers, name) for name in text.split() if hasattr(keras.layers, name))


def constructor_arguments(layer: Any) -> Any:
    """Return the constructor arguments that Keras stored for `get_config`, by name; None if it could not store them."""
    return getattr(getattr(layer, "_auto_config", None), "config", None)


def build_shapes(layer: Any) -> Any:
    """Return a list of the shapes that a layer's `build` got; empty if it was not called."""
    return (getattr(layer, "_build_shapes_dict", None) or {}).get("input_shape", [])


def is_keras_code(function: Any) -> bool:
    """Return whether a function or class is Keras's own code, by its module's name."""
    return str(function.__module__).startswith("keras.")


def is_preprocessing_layer(layer: Any) -> bool:
    """Return whether a layer is one of Keras's preprocessing layers, by the module of its class."""
    return str(type(layer).__module__).startswith(_PREPROCESSING_MODULES)


# A layer's dtype policy, without Keras's setter, which edits a DTypePolicyMap in place and tracks its value.

get_layer_policy: Final[Callable[[Any], Any]] = operator.attrgetter("_dtype_policy")
"""Policy or policy map of a layer; `layer.dtype_policy` instead returns the map's entry for the layer."""


def set_layer_policy(layer: Any, policy: Any) -> None:
    """Set a layer's policy. Keras reads it at each call."""
    layer._dtype_policy = policy


def quantized_policy(quantized: Any, policy: Any) -> Any:
    """Return the policy with the quantization of `quantized` over `policy`: Keras names it "int8_from_<policy>"."""
    mode, _, _ = quantized.name.rpartition("_from_")
    return keras.dtype_policies.get(f"{mode}_from_{policy.name}")


# Calls.


def is_outermost(layer: Any) -> bool:
    """Return whether the current call of a layer is outermost: no call of another layer encloses it."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return context is not None and context.entry_layer is layer


# The graph of a functional model.

keras_history: Final[Callable[[Any], Any]] = operator.attrgetter("_keras_history")
"""Of a symbolic tensor: the operation that produced it, the index of the call, and the index of the result."""
inbound_nodes: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_inbound_nodes")
"""Calls of an operation or layer on symbolic tensors, each with `input_tensors` and `arguments`."""


def functional_model(layer: Any) -> Any:
    """Return a functional model, or the one inside a sequential model; None for other layers and before it is built."""
    function = getattr(layer, "_functional", None) or layer
    return function if isinstance(function, keras.Function) else None


def symbolic_inputs(layer: Any) -> list[Any]:
    """Return the symbolic inputs of a functional or sequential model, to whose dtypes it casts its inputs."""
    function = functional_model(layer)
    return [] if function is None else list(function._inputs)


CONVERT_INPUTS: Final = "_convert_inputs_to_tensors"
"""`(flat_inputs)` -> tensors in the dtypes of a functional model's inputs, in their order."""
ADJUST_RANK: Final = "_adjust_input_rank"
"""`(flat_inputs)` -> the same with an axis of length 1 added or removed where an input requires it."""


def set_symbolic_dtype(symbolic: Any, dtype: str) -> str:
    """Set the dtype of a symbolic tensor.

    Returns:
        The previous dtype.
    """
    before = str(symbolic.dtype)
    symbolic._dtype = dtype
    return before


def is_linear_algebra(operation: Any) -> bool:
    """Return whether an operation belongs to `keras.ops.linalg`, by the module of its class."""
    return str(type(operation).__module__).endswith("ops.linalg")


def set_tensor_attribute(tensor: Any, name: str, value: Any) -> None:
    """Keep a value with a tensor while the tensor lives. JAX's arrays take no attributes: Keras has a table."""
    from keras.src.backend.common import tensor_attributes

    tensor_attributes.set_tensor_attr(tensor, name, value)


def get_tensor_attribute(tensor: Any, name: str) -> Any:
    """Return the value of `set_tensor_attribute`; None without one."""
    from keras.src.backend.common import tensor_attributes

    return tensor_attributes.get_tensor_attr(tensor, name)


def get_keras_mask(tensor: Any) -> Any:
    """Return the mask that Keras's layers attach to their outputs; None without one."""
    return get_tensor_attribute(tensor, _MASK)


def copy_keras_mask(tensor: Any, result: Any) -> Any:
    """Attach the Keras mask of `tensor` to `result`, for the layers and the loss that follow, and return `result`."""
    if (mask := get_keras_mask(tensor)) is not None and result is not tensor:
        set_tensor_attribute(result, _MASK, mask)
    return result


# Methods of attention layers that a policy replaces (see `layer_method_wrappers`).

CALCULATE_SCORES: Final = "_calculate_scores"
"""`(query, key)` -> scores. `Attention(score_mode="concat")` and AdditiveAttention compute sums in it."""
APPLY_SCORES: Final = "_apply_scores"
"""`(scores, value, scores_mask, training)` -> the softmax of the scores after dropout, and its product with value."""


# Losses that a model adds.


def own_losses(layer: Any) -> list[Any]:
    """Return the losses of `add_loss` and of the activity regularizer from a layer's last call."""
    return list(layer._get_own_losses())


def losses_override(model: Any) -> list[Any]:
    """Return the losses that a model reports in place of its layers' losses; usually empty."""
    return list(model._losses_override)


def clear_losses(model: Any) -> None:
    """Clear the losses that `own_losses` returns for a model's layers."""
    model._clear_losses()


LOSS_ATTRIBUTES: Final = ("_losses", "_losses_override")
"""Lists of a layer with its losses from `add_loss` and a model's override. `clear_losses` empties them in place."""


# Optimizers.


def variable_index(optimizer: Any, variable: Any) -> int:
    """Return the index of a variable among those that an optimizer was built for."""
    return int(optimizer._get_variable_index(variable))


def check_optimizer_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise Keras's own error if an optimizer was not built for these variables."""
    optimizer._check_variables_are_known(variables)


def moving_averages(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (variable, its moving average) of an optimizer with `use_ema`."""
    for variable, average in zip(
        own_trainable_variables(optimizer), optimizer._model_variables_moving_average, strict=True
    ):
        if average is not None:
            yield variable, average


def slot_lists(optimizer: Any, words: Iterable[str]) -> dict[str, list[Any]]:
    """Map the name of each slot to its variables, one per parameter, of a built Keras optimizer."""
    attributes = vars(optimizer)
    return {word: list(attributes.get(f"_{word}") or attributes.get(word) or ()) for word in words}


NON_SLOT_ATTRIBUTES: Final = ("_trainable_variables", "_variables")
"""Lists of an optimizer that are not slots of the parameters."""
_WEIGHT_DECAY_EXCLUSIONS: Final = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""Attributes that `exclude_from_weight_decay` sets on an optimizer; its configuration does not include them."""


def reset_optimizer(optimizer: Any) -> None:
    """Reset a Keras optimizer to the unbuilt state, without variables, with its present settings.

    Keras builds an optimizer once. So its configuration creates another one, whose attributes replace its own.

    Raises:
        UnsupportedError: the configuration lacks an argument of the constructor.
    """
    rate = optimizer._learning_rate
    config = optimizer.get_config()
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = rate  # the object itself, which may have no get_config
    made = type(optimizer).from_config(config)
    for name in inspect.signature(type(optimizer)).parameters:
        value, again = vars(optimizer).get(name), vars(made).get(name)
        if isinstance(value, int | float | str) and value != again:
            raise UnsupportedError(
                f"refresh builds {type(optimizer).__qualname__} again from its get_config(), which leaves out {name}: "
                f"{value!r} became {again!r}. Let get_config() return it."
            )
    exclusions = {name: value for name, value in vars(optimizer).items() if name in _WEIGHT_DECAY_EXCLUSIONS}
    vars(optimizer).clear()
    vars(optimizer).update(vars(made) | exclusions)


def rate_variable(optimizer: Any) -> Any:
    """Return the variable of an optimizer's learning rate, or its schedule."""
    return getattr(optimizer, "_learning_rate", None)


ALL_REDUCE_GRADIENTS: Final = "_all_reduce_sum_gradients"
"""`(pairs of gradient and variable)` -> the same, summed over the replicas; `apply` calls it on several replicas."""
FILTER_GRADIENTS: Final = "_filter_empty_gradients"
"""`(gradients, variables)` -> both without the entries whose gradient is None; `apply` calls it first."""
UPDATE_AVERAGES: Final = "_update_model_variables_moving_average"
"""`(variables)`: updates the moving averages once, at the end of `apply`."""
OVERWRITE_WITH_AVERAGES: Final = "_overwrite_model_variables_with_average_value"
"""`(variables)`: copies the averages to the variables, in `apply` and when `fit` ends."""


def check_methods(optimizer: Any, parts: Sequence[Any], names: Sequence[str], *, purpose: str, instead: str) -> None:
    """Raise if an optimizer lacks a private method that polyamp replaces.

    Args:
        optimizer: the user's optimizer.
        parts: the optimizer and its members.
        names: names of the methods.
        purpose: what polyamp cannot do without them.
        instead: what the user can do instead.

    Raises:
        UnsupportedError: a method is missing in this version of Keras.
    """
    if not all(hasattr(part, name) for part in parts for name in names):
        listed = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} has no {listed}, so polyamp cannot keep it {purpose}. "
            f"{_SUPPORTED_VERSIONS}, or {instead}."
        )


# `fit`.


def is_nnx_enabled() -> bool:
    """Return whether Keras's layers are flax.nnx modules: an option of Keras on JAX, from 3.11."""
    from keras.src.backend import config

    return bool(getattr(config, "is_nnx_enabled", bool)())


def set_fit_state(model: Any, state: Any) -> None:
    """Set the state of `fit` on JAX: lists of the trainable, other, optimizer's and metrics' values. `jax_state_sync`
    writes it to the variables."""
    names = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    model._jax_state = dict(zip(names, state, strict=True))


def free_state_shapes(model: Any) -> dict[str, Callable[..., Any]]:
    """Return what lets a step of `fit` on JAX return more values than the model has variables, for `replace_methods`:
    before 3.13 Keras places each of them by the sharding of a variable."""
    name = "_enforce_jax_state_sharding"
    return {name: lambda *state, **named: (*state, *named.values())} if hasattr(model, name) else {}


def set_build_function(model: Any, build: Callable[..., None]) -> None:
    """Make `fit` call `build(model, iterator=None, data_batch=None)` before its first batch, in place of Keras's own
    `_maybe_symbolic_build`, which builds the model, its metrics and its losses if necessary."""

    def instead(iterator: Any = None, data_batch: Any = None) -> None:
        build(model, iterator, data_batch)

    model._maybe_symbolic_build = instead


def build_symbolically(model: Any, data_batch: Any) -> None:
    """Build a model, its metrics and its losses from the shapes and dtypes of a batch; nothing is computed."""
    model._symbolic_build(data_batch=data_batch)


def global_seed_variable() -> Any:
    """Return the seed variable that Keras uses where no generator is given; None before its first use."""
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


@contextlib.contextmanager
def float64_result_types() -> Iterator[None]:
    """Context manager in which operations that combine dtypes keep float64. On torch and JAX Keras makes it float32,
    by a table."""
    from keras.src.backend.common import dtypes

    table = dtypes.BIT64_TO_BIT32_DTYPE
    before = dict(table)
    try:
        table["float64"] = "float64"
        yield
    finally:
        table.update(before)


def random_module() -> Any:
    """Return the module of random functions of Keras's backend. Keras looks each of them up at every call."""
    from keras.src import backend

    return backend.random


def replace_variable(variable: Any, value: Any) -> Any:
    """Replace what a Keras variable contains, possibly by a value of another dtype.

    Returns:
        What it contained.
    """
    before = variable._value
    variable._value, variable._dtype = value, dtype_name(value)
    return before


stored_value: Final[Callable[[Any], Any]] = operator.attrgetter("_value")
"""What a Keras variable contains, where `value` is a cast of it: in a call of a layer that computes in 16 bits."""


@contextlib.contextmanager
def replace_assignments(variables: Sequence[Any], assign: Callable[[Any, Any], None]) -> Iterator[None]:
    """Context manager in which `assign(variable, value)` runs in place of the last step of a variable's `assign`, which
    on torch writes to `value`: a cast copy, in a call of a layer that computes in 16 bits."""
    before = [(vars(variable), vars(variable).get("_direct_assign")) for variable in variables]
    try:
        for variable in variables:
            vars(variable)["_direct_assign"] = functools.partial(assign, variable)
        yield
    finally:
        for attributes, own in before:
            attributes.pop("_direct_assign", None)
            if own is not None:
                attributes["_direct_assign"] = own


def layer_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer. On torch, where a layer is an nn.Module, its layers are kept apart."""
    return {**vars(layer), **vars(layer).get("_modules", {})}


# Files.


def saved_variable_paths(model: Any) -> dict[int, list[str]]:
    """Map the id of each variable to its paths in Keras's file, such as "layers/dense/vars/0"; several if it is shared.

    Keras walks a model with `_save_state` and passes each layer a store, to which the layer writes its variables.
    """
    from keras.src.saving import saving_lib

    class Places(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras is untyped
        """Store that records paths and writes nothing."""

        def __init__(self) -> None:
            self.found: dict[int, list[str]] = {}
            self.group = ""

        def __bool__(self) -> bool:
            return True

        def make(self, path: str, metadata: Any = None) -> Any:
            self.group = f"{path}/vars" if path else "vars"
            return self

        def __setitem__(self, key: str, value: Any) -> None:
            self.found.setdefault(id(value), []).append(f"{self.group}/{key}")

        def close(self) -> None:
            """Do nothing."""

    store = Places()
    saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    return store.found
