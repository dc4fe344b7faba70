"""The only door to private names of TensorFlow and Keras, and to what differs between their versions (TensorFlow from
2.19 and Keras from 3.9 are supported).

Every other module of this package imports from here, under a name that says what it is good for;
`tests/core/house/test_private_names.py` walks the syntax trees. Beside each name stands what is relied on.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from polyamp.errors import UnsupportedError

_SUPPORTED: Final = "Use Keras 3.9 to 3.15"
_PREPARING: Final = ("keras.src.layers.preprocessing.", "keras.layers.preprocessing.")
_MASK: Final = "_keras_mask"

# TensorFlow.

EagerTensor: Final[Any] = tf.__internal__.EagerTensor
"""The class of tensors that have a value; `tf.Tensor` is also that of a graph's."""
FunctionGraph: Final[Any] = tf.__internal__.FuncGraph
"""The graph of a `tf.function`. That of a condition's branch or a loop's body is a subclass, and `outer_graph` is the
one around it."""


def replicas_cannot_merge() -> bool:
    """True where replicas run without ever meeting, as on one device: `merge_call` is refused there, or useless."""
    return bool(tf.__internal__.distribute.strategy_supports_no_merge_call())


# A layer and what it holds.

own_trainable: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_trainable_variables")
"""The weights that a layer created itself, whether they are frozen or not. Of an optimizer: the variables that it was
built for, in the order of its slots."""
own_state: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_non_trainable_variables")
"""The variables of a layer that were never to be trained, such as a moving mean."""
seed_generators: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_seed_generators")
"""The generators whose `state` a layer draws its random numbers from."""


layers_held: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_layers")
"""The layers that a layer tracks as its own, in the order in which it got them."""


def layers_inside(layer: Any) -> list[Any]:
    """The layers that a layer holds in its attributes, lists and dicts, without those inside of them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def every_layer(layer: Any) -> list[Any]:
    """A layer and all the layers inside, an input's stand-in (`InputLayer`) among them."""
    return list(layer._flatten_layers())


def lookups(layers: Sequence[Any]) -> list[Any]:
    """The layers inside each TextVectorization that look words up: Keras never marks them as built."""
    return [layer._lookup_layer for layer in layers if isinstance(layer, keras.layers.TextVectorization)]


def layers_named(text: str) -> tuple[Any, ...]:
    """The Keras layers of these names; those newer than the installed Keras are left out."""
    return tuple(getattr(keras.layers, name) for name in text.split() if hasattr(keras.layers, name))


def given_arguments(layer: Any) -> Any:
    """What a layer's constructor was called with, by name, as Keras keeps it for `get_config`; None if it could not."""
    return getattr(getattr(layer, "_auto_config", None), "config", None)


def built_with(layer: Any) -> Any:
    """The shapes that a layer's `build` was called with, in a list; empty if it was not."""
    return (getattr(layer, "_build_shapes_dict", None) or {}).get("input_shape", [])


def is_kerass(function: Any) -> bool:
    """True for a function or class of Keras's own code, by its module's name."""
    return str(function.__module__).startswith("keras.")


def prepares_data(layer: Any) -> bool:
    """True for Keras's preprocessing layers, by the folder that their class stands in."""
    return str(type(layer).__module__).startswith(_PREPARING)


# A layer's dtype policy, without Keras's setter: that edits a DTypePolicyMap in place, and tracks what it is given.

held_policy: Final[Callable[[Any], Any]] = operator.attrgetter("_dtype_policy")
"""The policy or the map of policies that a layer holds; `layer.dtype_policy` looks its own up in a map."""


def hold_policy(layer: Any, policy: Any) -> None:
    """Have a layer hold a policy. Keras reads it at each call."""
    layer._dtype_policy = policy


def quantized_like(quantized: Any, policy: Any) -> Any:
    """The policy that quantizes in the same way as another, over `policy`: Keras names it "int8_from_<policy>"."""
    mode, _, _ = quantized.name.rpartition("_from_")
    return keras.dtype_policies.get(f"{mode}_from_{policy.name}")


def hold_value(variable: Any, value: Any) -> Any:
    """Have a Keras variable be another `tf.Variable`, also of another dtype.

    Returns:
        The one that it was.
    """
    before = variable._value
    variable._value, variable._dtype = value, value.dtype.name
    return before


@contextlib.contextmanager
def operations_told(told: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """A block in which each operation that this thread runs is told: `told(name, inputs, outputs)`."""
    from tensorflow.python.framework import op_callbacks

    def callback(name: str, inputs: Any, attributes: Any, outputs: Any, *more: Any, **options: Any) -> None:
        told(name, inputs, outputs)

    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


# What a graph writes.


def written_resources(operation: Any) -> list[Any]:
    """The handles of variables that an operation writes to, or hands to a function that does: functions say which of
    their resources they only read."""
    from tensorflow.python.framework import auto_control_deps_utils

    return list(auto_control_deps_utils.get_read_write_resource_inputs(operation)[1])


def called_graph(operation: Any, name: str) -> Any:
    """The graph of a function that an operation calls; None if it is not known."""
    return getattr(operation.graph._get_function(name), "graph", None)


def fresh_function(function: Any) -> Any:
    """A `tf.function` as another one that has not been traced; None where `function` is none."""
    clone = getattr(function, "_clone", None)
    return None if clone is None or not hasattr(function, "python_function") else clone(None)


# Random numbers.


def global_seed() -> Any:
    """The variable from which Keras draws where a layer or a call names no generator; None before the first time."""
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


def operation_seeds() -> random.Random | None:
    """What gives seeds to TensorFlow's random operations that have none; None before `tf.random.set_seed`."""
    from tensorflow.python.eager import context

    return getattr(context.context(), "_rng", None)


def random_functions() -> dict[str, list[tuple[Any, str]]]:
    """What all of TensorFlow's and Keras's random numbers come from, by what it gives: the module and the name that
    the callers look it up by, each time.

    "dropout" has the arguments `(x, rate, noise_shape, ...)`; "uniform", "normal" and "truncated" `(shape, ...)` and a
    `dtype`; "integers" `(shape, ..., minval, maxval)`; "others" give numbers of other distributions.
    """
    from tensorflow.python.ops import (
        gen_random_ops,
        gen_stateless_random_ops,
        gen_stateless_random_ops_v2,
        nn_ops,
    )

    stateful, old, new = gen_random_ops, gen_stateless_random_ops, gen_stateless_random_ops_v2
    return {
        "dropout": [(nn_ops, "_dropout")],
        "uniform": [(stateful, "random_uniform"), (new, "stateless_random_uniform_v2")],
        "normal": [(stateful, "random_standard_normal"), (new, "stateless_random_normal_v2")],
        "truncated": [(stateful, "truncated_normal"), (new, "stateless_truncated_normal_v2")],
        "integers": [(stateful, "random_uniform_int"), (new, "stateless_random_uniform_int_v2")],
        "others": [
            *((stateful, name) for name in ("multinomial", "random_gamma", "random_poisson_v2", "random_shuffle")),
            *((old, name) for name in ("stateless_multinomial", "stateless_random_binomial")),
            *((old, name) for name in ("stateless_random_poisson", "stateless_parameterized_truncated_normal")),
            *((new, name) for name in ("stateless_random_gamma_v3", "stateless_shuffle")),
        ],
    }


# Calls.


def is_outermost(layer: Any) -> bool:
    """True in a call of a layer that the program made itself: no call of another layer is around it."""
    from keras.src.backend.common import global_state

    context = global_state.get_global_attribute("current_call_ctx")
    return context is not None and context.entry_layer is layer


# The graph of a functional model.

came_from: Final[Callable[[Any], Any]] = operator.attrgetter("_keras_history")
"""Of a symbolic tensor: the operation that gave it, which of its calls, and which of that call's results."""
calls_of: Final[Callable[[Any], list[Any]]] = operator.attrgetter("_inbound_nodes")
"""The calls of an operation or layer on symbolic tensors, each with `input_tensors` and `arguments`."""


def functional_of(layer: Any) -> Any:
    """A functional model, or the one inside a sequential model; None for other layers, and before it is built."""
    function = getattr(layer, "_functional", None) or layer
    return function if isinstance(function, keras.Function) else None


def symbolic_inputs(layer: Any) -> list[Any]:
    """The symbolic inputs of a functional or sequential model, to whose dtypes it casts what it is given."""
    function = functional_of(layer)
    return [] if function is None else list(function._inputs)


CONVERT_INPUTS: Final = "_convert_inputs_to_tensors"
"""`(flat_inputs)` -> tensors in the dtypes of a functional model's inputs, in their order."""
ADJUST_RANK: Final = "_adjust_input_rank"
"""`(flat_inputs)` -> the same with an axis of length 1 added or taken out where an input asks for it."""


def hold_dtype(symbolic: Any, dtype: str) -> str:
    """Have a symbolic tensor say another dtype.

    Returns:
        The one that it said.
    """
    before = str(symbolic.dtype)
    symbolic._dtype = dtype
    return before


def is_linear_algebra(operation: Any) -> bool:
    """True for an operation of `keras.ops.linalg`, by the module that its class stands in."""
    return str(type(operation).__module__).endswith("ops.linalg")


def mask_of(tensor: Any) -> Any:
    """The mask that Keras's layers put on what they give; None without one."""
    return getattr(tensor, _MASK, None)


def keep_mask(tensor: Any, result: Any) -> Any:
    """`result` with the mask that Keras keeps on a tensor, for the layers and the loss that follow."""
    if (mask := mask_of(tensor)) is not None and result is not tensor:
        setattr(result, _MASK, mask)
    return result


# Methods of attention layers that a policy stands in for (see `precision.stand_ins`).

SCORES: Final = "_calculate_scores"
"""`(query, key)` -> scores. `Attention(score_mode="concat")` and AdditiveAttention sum up in it."""
WEIGHTED: Final = "_apply_scores"
"""`(scores, value, scores_mask, training)` -> the softmax of the scores, dropped out, and its product with value."""


# Losses that a model adds by itself.


def own_losses(layer: Any) -> list[Any]:
    """What `add_loss` and the activity regularizer gave at a layer's last call."""
    return list(layer._get_own_losses())


def losses_instead(model: Any) -> list[Any]:
    """What a model reports as its losses in the place of those of its layers; empty as a rule."""
    return list(model._losses_override)


def forget_losses(model: Any) -> None:
    """Drop what `own_losses` of a model's layers would give."""
    model._clear_losses()


LOSSES: Final = ("_losses", "_losses_override")
"""The lists of a layer in which `add_loss` and a model's own losses stand. `forget_losses` empties them in place."""


# Optimizers.


def index_in(optimizer: Any, variable: Any) -> int:
    """Which of the variables that an optimizer was built for this is."""
    return int(optimizer._get_variable_index(variable))


def check_known(optimizer: Any, variables: Sequence[Any]) -> None:
    """Keras's own refusal of variables that an optimizer was not built for."""
    optimizer._check_variables_are_known(variables)


def moving_averages(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """(variable, moving average of it) of an optimizer with `use_ema`."""
    for variable, average in zip(own_trainable(optimizer), optimizer._model_variables_moving_average, strict=True):
        if average is not None:
            yield variable, average


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """Word -> variables of a slot, one for each parameter, of Keras's own optimizers that are built."""
    words = ("momentums", "velocities", "average_gradients", "accumulators")
    held = vars(optimizer)
    return {word: list(held.get(f"_{word}") or held.get(word) or ()) for word in words}


NO_SLOTS: Final = ("_trainable_variables", "_variables")
"""Lists of an optimizer that hold something else than a slot of each parameter."""


_NOT_DECAYED: Final = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
"""What `exclude_from_weight_decay` leaves in an optimizer, of which its configuration says nothing."""


def begin_again(optimizer: Any) -> None:
    """A Keras optimizer as its constructor left it, with the settings that it has now: not built, without variables.

    Keras builds an optimizer once. Its configuration makes another one, whose attributes take the place of its own.

    Raises:
        UnsupportedError: the configuration leaves out an argument of the constructor.
    """
    rate = optimizer._learning_rate
    config = optimizer.get_config()
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = rate  # the object itself, which need not be able to describe itself
    made = type(optimizer).from_config(config)
    for name in inspect.signature(type(optimizer)).parameters:
        value, again = vars(optimizer).get(name), vars(made).get(name)
        if isinstance(value, int | float | str) and value != again:
            raise UnsupportedError(
                f"refresh builds {type(optimizer).__qualname__} again from its get_config(), which leaves out {name}: "
                f"{value!r} became {again!r}. Let get_config() return it."
            )
    spared = {name: value for name, value in vars(optimizer).items() if name in _NOT_DECAYED}
    vars(optimizer).clear()
    vars(optimizer).update(vars(made) | spared)


def rate_variable(optimizer: Any) -> Any:
    """The variable that holds an optimizer's learning rate, or its schedule."""
    return getattr(optimizer, "_learning_rate", None)


REDUCE: Final = "_all_reduce_sum_gradients"
"""`(pairs of gradient and variable)` -> the same, summed over the replicas; `apply` calls it on several replicas."""
WITHOUT_EMPTY: Final = "_filter_empty_gradients"
"""`(gradients, variables)` -> both without the places of a None; `apply` calls it first."""
MOVE_AVERAGES: Final = "_update_model_variables_moving_average"
"""`(variables)`: one move of the averages, at the end of `apply`."""
TAKE_AVERAGES: Final = "_overwrite_model_variables_with_average_value"
"""`(variables)`: the averages into the variables, in `apply` and when `fit` ends."""


def check_methods(optimizer: Any, parts: Sequence[Any], names: Sequence[str], *, purpose: str, instead: str) -> None:
    """Refuse an optimizer without the private methods that are to be stood in for.

    Args:
        optimizer: the user's.
        parts: it and its members.
        names: of the methods.
        purpose: what polyamp cannot do without them.
        instead: what else the user can do.

    Raises:
        UnsupportedError: this version of Keras does the same somewhere else.
    """
    if not all(hasattr(part, name) for part in parts for name in names):
        listed = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} has no {listed}, so polyamp cannot keep it {purpose}. {_SUPPORTED}, or "
            f"{instead}."
        )


# `fit`.


def build_by(model: Any, build: Callable[..., None]) -> None:
    """Have `fit` call `build(model, iterator=None, data_batch=None)` before its first batch, in the place of Keras's
    own `_maybe_symbolic_build`, which builds the model, its metrics and its losses if they are not."""

    def instead(iterator: Any = None, data_batch: Any = None) -> None:
        build(model, iterator, data_batch)

    model._maybe_symbolic_build = instead


def build_symbolically(model: Any, data_batch: Any) -> None:
    """Build a model, its metrics and its losses by shapes and dtypes of a batch; nothing is computed."""
    model._symbolic_build(data_batch=data_batch)


# Files.


def saved_places(model: Any) -> dict[int, list[str]]:
    """id of each variable of a model -> where Keras saves it: "layers/dense/vars/0"; in several places if several
    layers hold it.

    Keras walks a model with `_save_state` and gives each layer a store, which the layer writes its variables to.
    """
    from keras.src.saving import saving_lib

    class Places(saving_lib.H5IOStore):  # type: ignore[misc]  # Keras is untyped
        """A store that writes nothing."""

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
            """Nothing is open."""

    store = Places()
    saving_lib._save_state(model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set())
    return store.found
