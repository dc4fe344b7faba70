"""What is said when a step fails in a program that is not polyamp's: in `loss_fn`, the model, or the framework.

Such an error stays the program's own, with a note that shows what `loss_fn` was called with and what of it is unusual.
Only where it is certain what was mistaken it becomes one of polyamp's, raised from it. Called when something was
raised; an ordinary step looks at nothing.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from polyamp.contract.backend import ExplainsFailures
from polyamp.dtypes import name_of
from polyamp.errors import BatchError, PolyampError, RecipeError, described
from polyamp.results import LossFunction
from polyamp.rules.plan import NARROW
from polyamp.train.arguments import WRITE, is_state

_MOST: Final = 8
"""Members of a container, and unusual leaves, that are shown."""


def explain(error: Exception, loss_fn: LossFunction, states: Sequence[Any], batch: Any) -> None:
    """Raise a clearer error from this one, or add a note to it.

    Raises:
        BatchError: the batch is a loader or an iterator, or a state.
        RecipeError: `loss_fn` does not take a model and a batch, or is a model.
        PolyampError: what the backend makes of its framework's error.
    """
    try:
        _explain(error, loss_fn, states, batch)
    except PolyampError:
        raise
    except Exception:  # noqa: BLE001  # what came could not be looked at; the program's own error is on its way
        return


def _explain(error: Exception, loss_fn: LossFunction, states: Sequence[Any], batch: Any) -> None:
    ours = isinstance(error, PolyampError)
    if not ours or isinstance(error, BatchError):
        _check_batch(batch, error)
    if ours or isinstance(error, Warning):
        return
    if isinstance(error, AttributeError | TypeError | ValueError):
        _check_loss_fn(loss_fn, error)
    backend = states[0].backend
    if isinstance(backend, ExplainsFailures):
        clearer = backend.explained(error, states, batch)
        if clearer is not None:
            try:
                raise clearer from error
            finally:
                del clearer  # or its traceback holds the step's tensors in a cycle, until somebody collects garbage
    error.add_note("\n".join(_note(error, states, batch)))


def _check_batch(batch: Any, error: Exception) -> None:
    if is_state(batch) and not isinstance(batch, Mapping):  # a dict may give whatever attribute it is asked for
        raise BatchError(
            f"batch must be the arrays of one batch. Received: {described(batch)}. Write step(state, batch)."
        ) from error
    if _is_iterable(batch) and (hasattr(batch, "__next__") or _is_called(batch, "Loader", "Dataset")):
        raise BatchError(
            f"batch must be the arrays of one batch. Received: {described(batch)}, which yields batches. "
            "Write: for batch "
            "in ...: state, result = step(state, batch)."
        ) from error


def _is_iterable(batch: Any) -> bool:
    """Whether a batch is neither an array nor a container, but can be iterated over: one that yields batches, or a
    class of the user's that is unpacked into its arrays."""
    if isinstance(batch, list | tuple | str | bytes) or dataclasses.is_dataclass(batch):
        return False
    return hasattr(batch, "__iter__") and not hasattr(batch, "keys") and not hasattr(batch, "shape")


def _is_called(value: Any, *words: str) -> bool:
    return any(word in kind.__name__ for kind in type(value).__mro__ for word in words)


def _check_loss_fn(loss_fn: LossFunction, error: Exception) -> None:
    """Refuse a `loss_fn` that does not take two arguments, or that is a model itself."""
    import inspect

    if _has_parameters(loss_fn) and not _takes_two(loss_fn):
        raise RecipeError(
            f"loss_fn must be a function of (model, batch). Received: {described(loss_fn)}, a model. {WRITE}"
        ) from error
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # of a callable that does not say
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
    """Whether a value is a model: torch's with parameters, or Keras's with trainable variables."""
    if isinstance(value, types.FunctionType | types.MethodType):
        return False
    own = getattr(value, "trainable_variables", None)
    listed = getattr(value, "parameters", None)
    if own is None and callable(listed):
        own = list(listed())
    return isinstance(own, list | tuple) and len(own) > 0


def _takes_two(module: Any) -> bool:
    """Whether a module's own forward pass asks for two arguments, as that of a loss which is a module does."""
    import inspect

    forward = getattr(module, "forward", None) or getattr(module, "call", None)
    try:
        parameters = inspect.signature(forward).parameters.values() if callable(forward) else ()
    except (TypeError, ValueError):  # of a callable that does not say
        return False
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position and each.default is each.empty for each in parameters) == 2


def _note(error: Exception, states: Sequence[Any], batch: Any) -> Iterator[str]:
    """The lines of the note."""
    models = "the model" if len(states) == 1 else "the tuple of models"
    yield (
        f"polyamp: loss_fn was called with (model, batch), in this order. The first is {models} under the "
        "policy, to be "
        f"called as model(batch['x']), not its parameters; the second, batch, is {shown(batch)}"
    )
    cast = next((s.recipe.policy.compute for s in states if s.recipe.policy.mode == "cast"), None)
    if cast in NARROW and "dtype" in str(error):
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
        elif isinstance(error, TypeError):
            yield f"batch is a {kind}, without names: take it apart in loss_fn, as in x, y = batch."
    elif _is_iterable(batch):
        yield "batch can be iterated over: if it yields batches, give the step one after the other."
    if batch is None:
        yield "batch is None. Does what makes it lack a `return`?"
    if isinstance(batch, Mapping) and not batch:
        yield "batch is empty."
    for number, line in enumerate(unusual(batch, "batch")):
        if number == _MOST:
            break
        yield line


def shown(value: Any, depth: int = 0) -> str:
    """A tree of arrays as a line: `{'x': float32[4, 3], 'y': int64[4]}`."""
    array = _array(value)
    if array is not None:
        return array
    inner = depth + 1
    if isinstance(value, Mapping) and depth < 4:
        some = [f"{key!r}: {shown(each, inner)}" for key, each in list(value.items())[:_MOST]]
        return "{" + ", ".join([*some, *(["..."] if len(value) > _MOST else [])]) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < 4:
        fields = [f"{f.name}={shown(getattr(value, f.name, None), inner)}" for f in dataclasses.fields(value)[:_MOST]]
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, list | tuple) and depth < 4 and not _is_numbers(value):
        if len(value) > _MOST:
            return f"a {type(value).__name__} of {len(value)}"
        if isinstance(value, list) and depth == 0 and value and all(isinstance(e, Mapping | tuple) for e in value):
            return f"a list of {len(value)}: {shown(value[0], inner)}, ..."
        some = [shown(each, inner) for each in value]
        comma = "," if isinstance(value, tuple) and len(some) == 1 else ""
        return f"({', '.join(some)}{comma})" if isinstance(value, tuple) else f"[{', '.join(some)}]"
    return _described(value)


def unusual(value: Any, path: str) -> Iterator[str]:
    """A sentence for each leaf that most models cannot take, with what to make of it.

    Args:
        value: a batch or a part of one.
        path: how it is written.
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
    elif _array(value) is not None:
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from unusual(each, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from unusual(getattr(value, field.name, None), f"{path}.{field.name}")
    elif isinstance(value, list) and value and path != "batch" and (_is_numbers(value) or _array(value[0]) is not None):
        call = "np.asarray" if _is_numbers(value) else "np.stack"
        yield f"{path} is {_described(value)}. For an array of them: {call}({path})."
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value[:_MOST]):
            yield from unusual(each, f"{path}[{index}]")
    elif value is None and path != "batch":
        yield f"{path} is None."
    elif isinstance(value, str):
        yield f"{path} is a str: {_described(value)}."


def _described(value: Any) -> str:
    if isinstance(value, list) and value:
        if _is_numbers(value):
            return f"a list of {'lists of numbers' if isinstance(value[0], list) else f'{len(value)} numbers'}"
        if _array(value[0]) is not None:
            return f"a list of {len(value)} arrays"
    return described(value)


def _is_numbers(value: Any) -> bool:
    """Whether a list holds numbers, or lists of them."""
    if not isinstance(value, list | tuple) or not value:
        return False
    first = value[0]
    return (isinstance(first, int | float) and not hasattr(first, "dtype")) or _is_numbers(first)


def _array(value: Any) -> str | None:
    """`float32[4, 3]` for an array of any framework; None for what is none."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(value, type):
        return None
    if getattr(value, "is_nested", False) is True:
        return f"a nested {name_of(dtype)} tensor"
    try:
        shape = list(value.shape)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # none, or of unknown rank
        return f"{name_of(dtype)}[...]"
    return f"{name_of(dtype)}{shape}"
