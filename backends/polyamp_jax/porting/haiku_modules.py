"""haiku's modules as a call shows them, and a call as in inference. Called by `haiku`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import haiku as hk
import jax

from polyamp.errors import ModelError
from polyamp_jax.porting.haiku_forms import Seen
from polyamp_jax.porting.inference import FLAGS, quiet
from polyamp_jax.porting.library import Batch, Record

_REFUSALS: Final = ("unexpected keyword argument", "multiple values for", "required positional argument")
"""What Python says of an argument that a function does not take, has already, or has beside one that is missing."""


def seen(model: Any, batch: Batch) -> dict[str, Seen]:
    """Path of a module -> what a call of the model showed of it, in the order in which the calls began."""
    found: dict[str, Seen] = {}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__init__":  # it has no name yet
            return call(*args, **kwargs)
        path = context.module.module_name
        if path not in found or not found[path].inputs:
            given = args if context.method_name == "__call__" else ()
            shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves((given, kwargs)) if hasattr(leaf, "shape")]
            found[path] = Seen(context.module, shapes[0] if shapes else ())
        return call(*args, **kwargs)

    jax.eval_shape(lambda held: called((model[0], *held), batch, intercept), model[1:])
    return found


def run(model: Any, batch: Batch, record: Record) -> Any:
    """The outputs of a model on a batch, as in inference."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        args, kwargs = quiet(context.orig_method, args, kwargs, add=False)
        output = call(*args, **kwargs)
        record(context.module.module_name, output)
        return output

    return called(model, batch, intercept)


def called(model: Any, batch: Batch, intercept: Callable[..., Any]) -> Any:
    """The outputs of a model, with an interceptor around its modules.

    Raises:
        ModelError: it has several functions, none of which is the model's own.
    """
    transformed, held = model[0], model[1:] if len(model) == 3 else model[1]
    apply = transformed.apply
    if not callable(apply):
        raise ModelError(
            "a model made by hk.multi_transform has several functions: make one of it with hk.transform to call it."
        )
    stateful = isinstance(held, tuple)
    drawn = list(inspect.signature(apply).parameters)[1 + stateful :][:1] == ["rng"]
    first = (*(held if stateful else (held,)), *((jax.random.key(0),) if drawn else ()))

    def call(flags: Mapping[str, bool], held: Any) -> Any:
        with hk.intercept_methods(intercept):
            outputs = apply(*held, *batch.args, **{**flags, **batch.kwargs})
        return outputs[0] if stateful else outputs

    return call(flags_of(apply, first, batch), first)


def flags_of(apply: Callable[..., Any], held: Any, batch: Batch) -> dict[str, bool]:
    """The flags of inference that the function takes: haiku hides its signature, so it is asked."""
    taken: dict[str, bool] = {}
    for name, value in FLAGS.items():
        if name not in batch.kwargs:
            kwargs = {**batch.kwargs, name: value}
            try:
                jax.eval_shape(functools.partial(apply, **kwargs), *held, *batch.args)
            except TypeError as error:
                if not any(words in str(error) for words in _REFUSALS):
                    raise
            else:
                taken[name] = value
    return taken
