"""Keras models on torch in a comparison: their copies, dropout and calls. Imported only for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyamp.parity.trace.observer import DropoutCount, UniformSource
from polyamp_keras.observe import dropout
from polyamp_keras.observe.layer_calls import watch_layer_calls
from polyamp_keras.observe.model_copy import train_in_place
from polyamp_keras.porting.evaluate import preserve_pass_state
from polyamp_keras.precision.policy_application import without_policies as without_policies
from polyamp_torch.observe.dropout import disable_dropout


@contextlib.contextmanager
def keras_model_copy(model: Any, *, wide: bool, inference: bool) -> Iterator[Any]:
    """Context manager that yields the model itself (`train_in_place`); with `wide` torch's default dtype inside is
    float64."""
    before = torch.get_default_dtype()
    with train_in_place(model, wide=wide, inference=inference) as trained:
        try:
            if wide:
                torch.set_default_dtype(torch.float64)
            yield trained
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def disable_keras_dropout(model: Any, draws: UniformSource | None) -> Iterator[DropoutCount]:
    """Context manager that turns off dropout of Keras, and of torch's functions that the model calls; or takes their
    numbers from `draws`."""
    with disable_dropout(model, draws), dropout.disable_dropout(model, draws) as count:
        yield count


@contextlib.contextmanager
def watch_keras_model(model: Any, capture: Any) -> Iterator[None]:
    """Context manager in which the calls of layers are recorded, and statistics restored on exit.

    Args:
        model: the model.
        capture: a `PassCapture`.
    """

    def watch(call: Callable[..., Any], args: Any, kwargs: Any, path: str, is_leaf: bool) -> Any:
        capture.enter(path)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            capture.leave(path, args if is_leaf else None, output)
        return output

    try:
        with preserve_pass_state(model), watch_layer_calls(model, watch):
            yield
    finally:
        for handle in capture.handles:
            handle.remove()
