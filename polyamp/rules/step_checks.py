"""S20: checks of parameters, losses, gradients and options, with the same messages in every backend.

They work on names, shapes and canonical dtype names, and know no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from polyamp.errors import GradientError, LossError, ModelError, UnsupportedError, describe_value, did_you_mean
from polyamp.float_formats import COMPLEX_DTYPES, FLOAT_DTYPES
from polyamp.recipe.recipe import Recipe

Shape = tuple[int, ...]


def check_parameters(parameters: Sequence[tuple[str, str]], recipe: Recipe, *, complex_numbers: bool = False) -> None:
    """Raise if a model cannot be trained under the recipe.

    Args:
        parameters: (path, canonical dtype name) of every trainable parameter.
        complex_numbers: whether the backend trains complex parameters (S1).

    Raises:
        ModelError: there are no parameters, or one is not stored in the policy's `param` dtype.
    """
    if not parameters:
        raise ModelError(
            "model has no trainable parameters, so there is nothing to train. Pass a built model with trainable "
            "parameters (Keras: build it or call it once; torch: requires_grad=True)."
        )
    wanted = recipe.policy.param
    for path, dtype in parameters:
        if complex_numbers and dtype in COMPLEX_DTYPES.values():
            _check_complex(path, dtype, wanted)
            continue
        if dtype not in FLOAT_DTYPES:
            kind = "floating numbers or complex64 or complex128" if complex_numbers else "real floating numbers"
            raise ModelError(
                f"parameter {path!r} has dtype {dtype}, which polyamp cannot train: parameters must be {kind}. "
                "Keep it out of the trainable parameters (torch: a buffer; JAX: outside the parameter tree)."
            )
        if dtype != wanted:
            why = (
                " A loss scaler needs float32 master weights: in 16 bits the unscaled gradients underflow."
                if recipe.loss_scaler.scales
                else ""
            )
            raise ModelError(
                f"parameter {path!r} is stored as {dtype}, but the policy stores parameters as {wanted}.{why} Convert "
                f"the model to {wanted} first, or use a policy with param={dtype!r}."
            )


def _check_complex(path: str, dtype: str, wanted: str) -> None:
    """Raise if the parts of a complex parameter do not have the policy's `param` dtype."""
    if COMPLEX_DTYPES.get(wanted) == dtype:
        return
    own = next(real for real, name in COMPLEX_DTYPES.items() if name == dtype)
    convert = f"Convert it to {COMPLEX_DTYPES[wanted]} first, or use" if wanted in COMPLEX_DTYPES else "Use"
    raise ModelError(
        f"parameter {path!r} is stored as {dtype}, whose parts are {own}, but the policy stores parameters as "
        f"{wanted}. {convert} a policy with param={own!r}."
    )


def check_loss(shape: Shape, dtype: str, *, what: str = "loss_fn") -> None:
    """Raise if a loss is not a floating scalar of shape () or (1,).

    Raises:
        LossError: shows the received value and how to reduce it.
    """
    if dtype not in FLOAT_DTYPES:
        raise LossError(f"{what} must return a floating loss. Received dtype: {dtype}.")
    if shape not in ((), (1,)):
        raise LossError(
            f"{what} must return a scalar loss. Received shape: {shape}. Reduce it, for instance with a mean over the "
            "batch; polyamp.losses do so by themselves."
        )


_RETURN_HINT: Final = "loss_fn must return loss or (loss, aux)."


def split_loss_and_aux(value: Any) -> tuple[Any, Any]:
    """Split the result of `loss_fn`, a loss or a pair, into (loss, aux).

    Raises:
        LossError: a tuple of another length, or a loss that is no array.
    """
    if not isinstance(value, tuple):
        if not _is_array(value):
            raise _no_array_error(value, "")
        return value, None
    if len(value) != 2:
        rest = " Put what is not the loss into one aux: (loss, (a, b)), or (loss, {'a': a})." if len(value) > 2 else ""
        raise LossError(f"{_RETURN_HINT} Received: a tuple of {len(value)} items.{rest}")
    loss, aux = value
    if not _is_array(loss) and _is_array(aux):
        raise LossError(
            f"{_RETURN_HINT} Received: a tuple of {describe_value(loss)} and an array. The loss first: (loss, aux)."
        )
    if not _is_array(loss):
        raise _no_array_error(loss, " as the loss")
    return loss, aux


def _is_array(value: Any) -> bool:
    """Whether a value is an array of some framework, or a NumPy scalar."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def _no_array_error(value: Any, where: str) -> LossError:
    """Return the error for a loss that is not an array."""
    said, advice = describe_value(value), ""
    if value is None:
        advice = " Is a `return` missing?"
    elif isinstance(value, int | float):
        said = f"{value!r}, {'an' if isinstance(value, int) else 'a'} {type(value).__name__}"
        advice = " A number of Python's carries no gradient: return the array itself, without .item() or float()."
    elif isinstance(value, Mapping):
        keys = ", ".join(map(repr, value))
        advice = (
            " Return output['loss'], or (output['loss'], output)." if "loss" in value else f" It has the keys {keys}."
        )
    elif _is_array(getattr(value, "loss", None)):
        advice = " Return output.loss, or (output.loss, aux)."
    elif isinstance(value, list):
        advice = " With a tuple, not a list: return loss, aux."
    elif callable(value):
        advice = " Did you mean to call it?"
    return LossError(f"{_RETURN_HINT} Received: {said}{where}.{advice}")


def check_gradients(expected: Sequence[tuple[str, Shape]], received: Sequence[tuple[str, Shape | None]]) -> None:
    """Raise if gradients do not match the parameters.

    Args:
        expected: (path, shape) of every parameter.
        received: (path, shape) of every gradient. The shape is None if the gradient is `None`, because the loss does
            not depend on the parameter (S23).

    Raises:
        GradientError: a missing, surplus or misshapen gradient, by name; or all gradients are `None`.
    """
    shapes = dict(expected)
    got = dict(received)
    missing = [path for path in shapes if path not in got]
    surplus = [path for path in got if path not in shapes]
    if missing or surplus:
        raise GradientError(
            "gradients must match the parameters one to one. "
            f"Missing: {missing or 'none'}; not a parameter: {surplus or 'none'}."
        )
    for path, shape in got.items():
        if shape is not None and shape != shapes[path]:
            raise GradientError(f"the gradient of {path!r} has shape {shape}; the parameter has {shapes[path]}.")
    if all(shape is None for shape in got.values()):
        raise GradientError(
            "every gradient is None: loss_fn depends on none of the model's trainable parameters, so there is nothing "
            "to update. Is the loss detached from the model, or made of the batch alone?"
        )


def check_loss_dependence(depends: bool) -> None:
    """Raise if the loss depends on no trainable parameter (S23).

    Raises:
        LossError: it depends on none.
    """
    if not depends:
        raise LossError("loss_fn depends on none of the model's trainable parameters, so there is nothing to update.")


def check_any_gradient(gradients: Iterable[Any], *, who: str, then: str = "") -> None:
    """Raise if there are no gradients, or all are None.

    Args:
        gradients: the gradients.
        who: the call that received them, such as "unscale()".
        then: a sentence with the fix.

    Raises:
        GradientError: there is no gradient.
    """
    if all(gradient is None for gradient in gradients):
        raise GradientError(f"{who} got no gradients. {then}".rstrip())


def check_options(received: Iterable[str], accepted: Sequence[str], *, function: str, backend: str) -> None:
    """Raise if a keyword option is unknown to a backend.

    Raises:
        UnsupportedError: names the option and the accepted ones.
    """
    for name in received:
        if name not in accepted:
            listed = ", ".join(accepted) or "no options"
            raise UnsupportedError(
                f"{function}() on the {backend} backend accepts {listed}. Received: {name}=."
                + (_OPTION_HINTS.get(name) or did_you_mean(name, accepted))
            )


_OPTION_HINTS: Final = {
    "donate": " A state is updated in place here: the one that you give stays usable, and there is nothing to donate. "
    "Drop donate=.",
    "optimizer": " It is the recipe's: polyamp.Recipe(optimizer=...).",
    "lr": " It is the optimizer's: polyamp.Recipe(optimizer=polyamp.adamw(learning_rate=...)).",
    "learning_rate": " It is the optimizer's: polyamp.Recipe(optimizer=polyamp.adamw(learning_rate=...)).",
    "policy": " It is the recipe's: polyamp.Recipe(policy=...).",
    "device": " The state lies where the model lies: move the model before polyamp.init.",
    "jit": " Did you mean compile=?",
    "compiled": " Did you mean 'compile'?",
    "rngs": " Random streams are the framework's own here: set its seed.",
    "axis_name": " It is for models of equinox, in JAX.",
}
"""Options that a backend may not have -> hint, with a leading space."""
