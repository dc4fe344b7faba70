"""Hints for errors in user code during a step: in `loss_fn`, the model, or the framework.

Such an error propagates unchanged, with a note that shows the arguments of `loss_fn` and what is unusual about them.
Only if the mistake is certain, a polyamp error is raised from it. An ordinary step runs none of this code.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.contract.backend import ExplainsFailures
from polyamp.errors import BatchError, PolyampError, RecipeError, describe_value
from polyamp.float_formats import HALF_DTYPES, framework_dtype_name
from polyamp.results import LossFunction
from polyamp.train.argument_checks import LOSS_FN_EXAMPLE, is_state
from polyamp.trees import children

_MAX_LISTED: Final = 8
"""Maximum number of listed container members and unusual leaves."""


def add_error_hints(error: Exception, loss_fn: LossFunction, states: Sequence[Any], batch: Any) -> None:
    """Raise a clearer error from this one, or add a note to it.

    Raises:
        BatchError: the batch is a loader, an iterator or a state.
        RecipeError: `loss_fn` does not take a model and a batch, or is a model.
        PolyampError: the backend's explanation of its framework's error.
    """
    try:
        _add_error_hints(error, loss_fn, states, batch)
    except PolyampError:
        raise
    except Exception:  # noqa: BLE001  # the arguments could not be inspected; the original error propagates
        return


def _add_error_hints(error: Exception, loss_fn: LossFunction, states: Sequence[Any], batch: Any) -> None:
    ours = isinstance(error, PolyampError)
    if not ours or isinstance(error, BatchError):
        _check_batch(batch, error)
    if ours or isinstance(error, Warning):
        return
    if isinstance(error, AttributeError | TypeError | ValueError):
        _check_loss_fn(loss_fn, error)
    backend = states[0].backend
    if isinstance(backend, ExplainsFailures):
        clearer = backend.explain_error(error, states, batch)
        if clearer is not None:
            try:
                raise clearer from error
            finally:
                del clearer  # or its traceback keeps the step's tensors in a reference cycle until garbage collection
    error.add_note("\n".join(_note_lines(error, states, batch)))


def _check_batch(batch: Any, error: Exception) -> None:
    if is_state(batch) and not isinstance(batch, Mapping):  # a dict may return any attribute
        raise BatchError(
            f"batch must be the arrays of one batch. Received: {describe_value(batch)}. Write step(state, batch)."
        ) from error
    if _is_iterable(batch) and (hasattr(batch, "__next__") or _has_class_name(batch, "Loader", "Dataset")):
        raise BatchError(
            f"batch must be the arrays of one batch. Received: {describe_value(batch)}, which yields batches. "
            "Write: for batch "
            "in ...: state, result = step(state, batch)."
        ) from error


def _is_iterable(batch: Any) -> bool:
    """Whether a batch is neither an array nor a container, but iterable: one that yields batches, or a user's class
    that is unpacked into its arrays."""
    if isinstance(batch, list | tuple | str | bytes) or dataclasses.is_dataclass(batch):
        return False
    return hasattr(batch, "__iter__") and not hasattr(batch, "keys") and not hasattr(batch, "shape")


def _has_class_name(value: Any, *words: str) -> bool:
    return any(word in kind.__name__ for kind in type(value).__mro__ for word in words)


def _check_loss_fn(loss_fn: LossFunction, error: Exception) -> None:
    """Raise if `loss_fn` does not take two arguments, or is itself a model."""
    import inspect

    if _has_parameters(loss_fn) and not _has_two_arguments(loss_fn):
        raise RecipeError(
            f"loss_fn must be a function of (model, batch). Received: {describe_value(loss_fn)}, a model. "
            f"{LOSS_FN_EXAMPLE}"
        ) from error
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # the callable has no signature
        return
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        batch = " Several arrays come as one batch, which loss_fn takes apart." if len(signature.parameters) > 2 else ""
        raise RecipeError(
            f"loss_fn must be a function of (model, batch). Received: {name}{signature}.{batch}"
        ) from error


def _has_parameters(value: Any) -> bool:
    """Whether a value is a model: a torch one with parameters, or a Keras one with trainable variables."""
    if isinstance(value, types.FunctionType | types.MethodType):
        return False
    own = getattr(value, "trainable_variables", None)
    listed = getattr(value, "parameters", None)
    if own is None and callable(listed):
        own = list(listed())
    return isinstance(own, list | tuple) and len(own) > 0


def _has_two_arguments(module: Any) -> bool:
    """Whether a module's own forward pass requires two arguments, as that of a loss module does."""
    import inspect

    forward = getattr(module, "forward", None) or getattr(module, "call", None)
    try:
        parameters = inspect.signature(forward).parameters.values() if callable(forward) else ()
    except (TypeError, ValueError):  # the callable has no signature
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position and each.default is each.empty for each in parameters) == 2


def _note_lines(error: Exception, states: Sequence[Any], batch: Any) -> Iterator[str]:
    """Iterate over the lines of the note."""
    models = "the model" if len(states) == 1 else "the tuple of models"
    yield (
        f"polyamp: loss_fn was called with (model, batch), in this order. The first is {models} under the "
        "policy, to be "
        f"called as model(batch['x']), not its parameters; the second, batch, is {format_tree(batch)}"
    )
    cast = next((s.recipe.policy.compute for s in states if s.recipe.policy.mode == "cast"), None)
    if cast in HALF_DTYPES and "dtype" in str(error):
        yield (
            f"mode='cast' holds the model's weights in {cast}, and casts what the whole model and its methods are "
            "given, not what a part of it is: call the model, cast the part's input in loss_fn, or use mode='autocast'."
        )
    if type(batch) in (tuple, list) and batch:
        kind = type(batch).__name__
        if kind == "list" and all(isinstance(each, Mapping | tuple) for each in batch):
            yield (
                f"batch is a list of {len(batch)} batches: micro-batches of one update are for "
                f"Recipe(accumulate_steps={len(batch)}); otherwise give the step one after the other."
            )
        elif _may_be_micro_batches(batch, states):
            yield (
                f"batch is a tuple of {len(batch)}: one batch, whose arrays are split for accumulate_steps. If it has "
                "micro-batches, pass a list of them: step(state, list(batch))."
            )
        elif isinstance(error, TypeError):
            yield f"batch is a {kind}, without names: take it apart in loss_fn, as in x, y = batch."
    elif _is_iterable(batch):
        yield "batch can be iterated over: if it yields batches, give the step one after the other."
    if batch is None:
        yield "batch is None. Does what makes it lack a `return`?"
    if isinstance(batch, Mapping) and not batch:
        yield "batch is empty."
    for number, line in enumerate(unusual_leaf_hints(batch, "batch")):
        if number == _MAX_LISTED:
            break
        yield line


def _may_be_micro_batches(batch: Any, states: Sequence[Any]) -> bool:
    """Return whether a batch is a tuple of as many containers as the recipe accumulates, or fewer."""
    steps = states[0].recipe.accumulate_steps
    return type(batch) is tuple and 1 < len(batch) <= steps and all(isinstance(e, Mapping | tuple) for e in batch)


def format_tree(value: Any, depth: int = 0) -> str:
    """Format a tree of arrays as one line: `{'x': float32[4, 3], 'y': int64[4]}`."""
    array = _format_array_leaf(value)
    if array is not None:
        return array
    inner = depth + 1
    if isinstance(value, Mapping) and depth < 4:
        some = [f"{key!r}: {format_tree(each, inner)}" for key, each in list(value.items())[:_MAX_LISTED]]
        return "{" + ", ".join([*some, *(["..."] if len(value) > _MAX_LISTED else [])]) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 4:
        fields = [
            f"{f.name}={format_tree(getattr(value, f.name, None), inner)}"
            for f in dataclasses.fields(value)[:_MAX_LISTED]
        ]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list | tuple) and depth < 4 and not _is_numbers(value):
        if len(value) > _MAX_LISTED:
            return f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list) and depth == 0 and value and all(isinstance(e, Mapping | tuple) for e in value):
            return f"a list of {len(value)}: {format_tree(value[0], inner)}, ..."
        some = [format_tree(each, inner) for each in value]
        comma = "," if isinstance(value, tuple) and len(some) == 1 else ""
        return f"({', '.join(some)}{comma})" if isinstance(value, tuple) else f"[{', '.join(some)}]"
    return _describe_leaf(value)


def unusual_leaf_hints(value: Any, path: str) -> Iterator[str]:
    """Iterate over hints, one sentence for each leaf that most models cannot take.

    Args:
        value: a batch or a part of one.
        path: source text of the value, such as `batch['x']`.
    """
    if getattr(value, "is_nested", False) is True:
        yield f"{path} is a nested tensor: most layers take torch.nested.to_padded_tensor({path}, 0.0)."
    elif type(value).__name__ == "RaggedTensor":
        yield f"{path} is a RaggedTensor: most layers take {path}.to_tensor()."
    elif str(getattr(value, "dtype", "")) == "object":
        yield (
            f"{path} is a NumPy array of Python objects, as it is made of rows of different length or of None. Pad the "
            "rows to one length, and give the lengths or a mask beside them."
        )
    elif _format_array_leaf(value) is not None:
        return
    elif (
        isinstance(value, list)
        and value
        and path != "batch"
        and (_is_numbers(value) or _format_array_leaf(value[0]) is not None)
    ):
        call = "np.asarray" if _is_numbers(value) else "np.stack"
        yield f"{path} is {_describe_leaf(value)}. For an array of them: {call}({path})."
    elif (parts := children(value, path)) is not None:
        for own_path, part in parts[:_MAX_LISTED] if isinstance(value, list | tuple) else parts:
            yield from unusual_leaf_hints(part, own_path)
    elif value is None and path != "batch":
        yield f"{path} is None."
    elif isinstance(value, str):
        yield f"{path} is a str: {_describe_leaf(value)}."


def _describe_leaf(value: Any) -> str:
    if isinstance(value, list) and value:
        if _is_numbers(value):
            return f"a list of {'lists of numbers' if isinstance(value[0], list) else f'{len(value)} numbers'}"
        if _format_array_leaf(value[0]) is not None:
            return f"a list of {len(value)} arrays"
    return describe_value(value)


def _is_numbers(value: Any) -> bool:
    """Whether a list contains numbers, or lists of numbers."""
    if not isinstance(value, list | tuple) or not value:
        return False
    first = value[0]
    return (isinstance(first, int | float) and not hasattr(first, "dtype")) or _is_numbers(first)


def _format_array_leaf(value: Any) -> str | None:
    """Return `float32[4, 3]` for an array of any framework; None for another value."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, type):
        return None
    if getattr(value, "is_nested", False) is True:
        return f"a nested {framework_dtype_name(dtype)} tensor"
    try:
        shape = list(value.shape)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # no array, or one of unknown rank
        return f"{framework_dtype_name(dtype)}[...]"
    return f"{framework_dtype_name(dtype)}{shape}"
