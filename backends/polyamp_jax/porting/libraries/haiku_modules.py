"""Recording of a haiku model's modules during a call, and calls in inference mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import haiku as hk
import jax

from polyamp.errors import ModelError
from polyamp_jax.models.adapters.haiku import takes_rng
from polyamp_jax.porting.jax_only.inference_flags import INFERENCE_FLAGS, set_inference_arguments
from polyamp_jax.porting.libraries.haiku_layers import HaikuCall
from polyamp_jax.porting.libraries.library import CallInputs, RecordOutput

_SIGNATURE_ERRORS: Final = ("unexpected keyword argument", "multiple values for", "required positional argument")
"""Parts of Python's error messages for an unknown argument, a repeated one, or a missing other one."""


def record_calls(model: Any, batch: CallInputs) -> dict[str, HaikuCall]:
    """Return path of a module -> its recorded call, in the order in which the calls began."""
    found: dict[str, HaikuCall] = {}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__init__":  # it has no name yet
            return call(*args, **kwargs)
        path = context.module.module_name
        if path not in found or not found[path].inputs:
            given = args if context.method_name == "__call__" else ()
            shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves((given, kwargs)) if hasattr(leaf, "shape")]
            found[path] = HaikuCall(context.module, shapes[0] if shapes else ())
        return call(*args, **kwargs)

    jax.eval_shape(lambda arrays: call_with_interceptor((model[0], *arrays), batch, intercept), model[1:])
    return found


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return the model in inference mode, until `stack` closes; unchanged if it has several functions."""
    apply = model[0].apply
    if not callable(apply):
        return model
    stateful = isinstance(model[0], hk.TransformedWithState)
    first = 1 + stateful + takes_rng(apply, stateful)

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **{**inference_flags(apply, args[:first], CallInputs(args[first:], kwargs)), **kwargs})

    stack.enter_context(hk.intercept_methods(_call_in_inference))
    return model[0]._replace(apply=call), *model[1:]


def run(model: Any, batch: CallInputs, record: RecordOutput) -> Any:
    """Return the outputs of a model on a batch in inference mode."""

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        output = _call_in_inference(call, args, kwargs, context)
        if context.method_name == "__call__":
            record(context.module.module_name, output)
        return output

    return call_with_interceptor(model, batch, intercept)


def _call_in_inference(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == "__call__":
        args, kwargs = set_inference_arguments(context.orig_method, args, kwargs, add=False)
    return call(*args, **kwargs)


def call_with_interceptor(model: Any, batch: CallInputs, intercept: Callable[..., Any]) -> Any:
    """Return the outputs of a model, with an interceptor around its modules.

    Raises:
        ModelError: it has several functions, and none of them is the model's own.
    """
    transformed, arrays = model[0], model[1:] if len(model) == 3 else model[1]
    apply = transformed.apply
    if not callable(apply):
        raise ModelError(
            "a model made by hk.multi_transform has several functions: make one of it with hk.transform to call it."
        )
    stateful = isinstance(arrays, tuple)
    first = (*(arrays if stateful else (arrays,)), *((jax.random.key(0),) if takes_rng(apply, stateful) else ()))

    flags = inference_flags(apply, first, batch)
    with hk.intercept_methods(intercept):
        outputs = apply(*first, *batch.args, **{**flags, **batch.kwargs})
    return outputs[0] if stateful else outputs


def inference_flags(apply: Callable[..., Any], arrays: Any, batch: CallInputs) -> dict[str, bool]:
    """Return the inference flags that the function accepts. haiku hides the signature, so trial calls find them."""
    taken: dict[str, bool] = {}
    for name, value in INFERENCE_FLAGS.items():
        if name not in batch.kwargs:
            kwargs = {**batch.kwargs, name: value}
            try:
                jax.eval_shape(functools.partial(apply, **kwargs), *arrays, *batch.args)
            except TypeError as error:
                if not any(words in str(error) for words in _SIGNATURE_ERRORS):
                    raise
            else:
                taken[name] = value
    return taken
