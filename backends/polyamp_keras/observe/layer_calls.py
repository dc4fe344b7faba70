"""`watch_layer_calls`: a function around the calls of a Keras model's layers, in place of hooks on modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from polyamp_keras.models.layers import list_layers, recurrent_cells, replace_calls
from polyamp_keras.porting.inventory import read_keras_model
from polyamp_keras.precision.layer_method_wrappers import copy_signature, late_call


class LayerCallWatcher(Protocol):
    """Function around the call of a layer."""

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], path: str, is_leaf: bool, /
    ) -> Any:
        """Run the call, and return what its caller gets.

        Args:
            call: the call.
            args: positional arguments.
            kwargs: keyword arguments.
            path: path of the layer in the model's inventory.
            is_leaf: whether the layer has no layers inside.
        """


def watch_layer_calls(
    model: Any, watcher: LayerCallWatcher, *, paths: Mapping[int, str] | None = None
) -> AbstractContextManager[None]:
    """Return a context manager in which `watcher` runs every call of a layer.

    Cells of recurrent layers are not watched (`recurrent_cells`).

    Args:
        model: the model.
        watcher: what runs the calls.
        paths: `id` of a layer -> its path; None for those of the model's inventory.
    """
    return replace_calls(_watched_calls(model, watcher, read_keras_model(model).paths if paths is None else paths))


def _watched_calls(
    model: Any, watcher: LayerCallWatcher, paths: Mapping[int, str]
) -> Iterator[tuple[Any, Callable[..., Any]]]:
    found = list_layers(model)
    cells = {id(part.layer) for each in found for part in recurrent_cells(each.layer)}
    shown = [each for each in found if id(each.layer) not in cells]
    holders = {id(each.parent) for each in shown}
    for each in shown:
        path = paths.get(id(each.layer), each.stable_path)
        yield each.layer, _watched_call(late_call(each.layer), path, watcher, is_leaf=id(each.layer) not in holders)


def _watched_call(
    call: Callable[..., Any], path: str, watcher: LayerCallWatcher, *, is_leaf: bool
) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return watcher(call, args, kwargs, path, is_leaf)

    return copy_signature(call, called)
