"""Observer of Keras models on JAX: the calls of their layers, dropout, and the model itself in place of a copy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_jax.observe.jax_only.library_observer import LibraryObserver
from polyamp_jax.observe.jax_only.output_tags import call_with_tags
from polyamp_jax.precision.interpreter.float8_products import PRODUCT_TAG, measures_products
from polyamp_jax.precision.interpreter.tag_primitive import tag
from polyamp_keras.models.layers import list_layers
from polyamp_keras.observe import dropout
from polyamp_keras.observe.layer_calls import watch_layer_calls
from polyamp_keras.observe.model_copy import list_variables, train_in_place
from polyamp_keras.precision.float8_products import watch_products
from polyamp_keras.precision.policy_application import without_policies


class KerasObserver(LibraryObserver):
    """Observer of Keras models. Their layers cast by themselves, and their calls are replaced while a pass is traced.

    Calls of layers in a `jax.checkpoint` or a loop of the user's own are tagged there.
    """

    def arrays(self, model: Any) -> Mapping[str, Any]:
        return {str(number): variable.value for number, variable in enumerate(list_variables(model))}

    @contextlib.contextmanager
    def tag_layers(self, model: Any) -> Iterator[None]:
        with watch_layer_calls(model, _tagged_call):
            yield

    @contextlib.contextmanager
    def tag_figures(self, model: Any, *, outputs: bool) -> Iterator[None]:
        paths = {id(each.layer): each.stable_path for each in list_layers(model)}
        with watch_layer_calls(model, functools.partial(_measured_call, outputs), paths=paths):
            yield

    @contextlib.contextmanager
    def disable_model_dropout(
        self, model: Any, draws: UniformSource | None, others: contextlib.AbstractContextManager[DropoutCount]
    ) -> Iterator[DropoutCount]:
        with others, dropout.disable_dropout(model, draws) as count:
            yield count

    def open_copy(self, model: Any, stack: contextlib.ExitStack, *, wide: bool, inference: bool) -> Any:
        return stack.enter_context(train_in_place(model, wide=wide, inference=inference))

    def without_policies(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return without_policies(model)


OBSERVER: Final = KerasObserver()


def _tagged_call(call: Callable[..., Any], args: Any, kwargs: Any, path: str, is_leaf: bool) -> Any:
    return call_with_tags(call, args, kwargs, path)


def _measured_call(outputs: bool, call: Callable[..., Any], args: Any, kwargs: Any, path: str, is_leaf: bool) -> Any:
    """Run a layer's call, whose products in 8 bits tag their figures where a monitor measures them."""
    sink = functools.partial(_tag_product, path) if measures_products.get() else None
    watched = watch_products(call, lambda x, w: sink)
    return call_with_tags(watched, args, kwargs, path) if outputs else watched(*args, **kwargs)


def _tag_product(path: str, figures: Any) -> Any:
    return tag(figures, path, 0, PRODUCT_TAG)
