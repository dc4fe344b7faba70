"""Products in 8 bits of a Keras model in one forward pass, and the functions that a doctor's probe times (S36)."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from keras import ops

from polyamp.doctor.float8_probe import ModelProduct, ProductShape
from polyamp.errors import UnsupportedError, describe_value
from polyamp.recipe.float8 import Float8
from polyamp.recipe.policy import Policy
from polyamp.results import LossFunction
from polyamp_keras.models.layers import is_layer, layer_path_aliases, list_layers, replace_calls, require_built
from polyamp_keras.observe.model_copy import GlobalStream
from polyamp_keras.porting.evaluate import preserve_pass_state
from polyamp_keras.precision.apply_policy import resolve_policy
from polyamp_keras.precision.bound_model import BoundKerasModel, native_model
from polyamp_keras.precision.float8_products import multiply, watch_products
from polyamp_keras.precision.policy_application import PolicyApplication, without_policies


class KerasPass(NamedTuple):
    """Arguments of a report on one pass of a Keras model.

    Attributes:
        loss_fn: the loss function; None if the model is called alone.
        model: the model.
        batch: the second argument of `loss_fn`; or the arguments of the model, a tuple.
    """

    loss_fn: LossFunction | None
    model: Any
    batch: Any


def read_pass(function: str, target: Any, inputs: tuple[Any, ...]) -> KerasPass:
    """Return the pass that `polyamp.<function>(target, policy, *inputs)` asks for.

    Raises:
        UnsupportedError: other arguments, such as a function without a model.
    """
    target, inputs = native_model(target), tuple(map(native_model, inputs))
    if is_layer(target) and inputs:
        return KerasPass(None, target, inputs)
    if not is_layer(target) and len(inputs) == 2 and is_layer(inputs[0]):
        return KerasPass(target, *inputs)
    raise UnsupportedError(
        f"{function} of Keras models takes a loss function, a policy, a model and a batch: polyamp.{function}(loss_fn, "
        f"policy, model, batch), or a model or layer and its inputs: polyamp.{function}(model, policy, x). Received: "
        f"{describe_value(target)} and {len(inputs)} inputs."
    )


def layer_products(given: KerasPass, policy: Policy) -> list[ModelProduct]:
    """Run a forward pass of a Keras model under a policy, and return its products in 8 bits, each with the path of its
    layer that `Policy.overrides` takes. The model and its random streams stay as they are.

    Args:
        given: the pass; its batch has tensors.
        policy: a policy with products in 8 bits.

    Raises:
        ModelError: the model is not built.
        UnsupportedError, PolicyError: as for `apply_policy`.
    """
    model = given.model
    require_built(model, "float8_plan")
    found: Counter[tuple[str, ProductShape]] = Counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_policies(model))
        stack.enter_context(preserve_pass_state(model))
        stack.callback(GlobalStream().restore)
        application = PolicyApplication(model, plan := resolve_policy(model, policy))
        stack.callback(application.restore)
        application.put()
        stack.enter_context(replace_calls(_counted_calls(model, found)))
        bound = BoundKerasModel(model, plan)
        bound(*given.batch) if given.loss_fn is None else given.loss_fn(bound, given.batch)
    return [ModelProduct(*key, count) for key, count in found.items()]


def _counted_calls(model: Any, found: Counter[tuple[str, ProductShape]]) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield each layer and its `call`, which counts the layer's products."""

    def count(path: str, x: Any, w: Any) -> None:
        found[path, ProductShape(int(x.shape[0]), *map(int, w.shape))] += 1

    layers = list_layers(model)
    names = layer_path_aliases(layers)
    for each in layers:  # automatic names differ between processes, and a stable path does not
        path = each.stable_path if each.stable_path in names[each.path] else each.path
        yield each.layer, watch_products(each.layer.call, functools.partial(count, path))


def product_functions(float8: Float8) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Return the products of an activation (rows, inputs) in the compute dtype and a float32 parameter (inputs,
    outputs), as Keras's layers compute them: in the compute dtype, and in 8 bits."""

    def wide(x: Any, w: Any) -> Any:
        return ops.matmul(x, ops.cast(w, x.dtype))

    def narrow(x: Any, w: Any) -> Any:
        return multiply(x, ops.cast(w, x.dtype), float8)

    return wide, narrow
