"""Checks that every backend makes in the same words: parameters, losses, batches and gradients (S20).

They work on names, shapes and canonical dtype names, so they know no framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from polyamp.errors import BatchError, GradientError, LossError, ModelError, UnsupportedError, did_you_mean
from polyamp.recipe.recipe import Recipe
from polyamp.rules.batches import check_has_rows

FLOATING: Final = ("float16", "bfloat16", "float32", "float64")
Shape = tuple[int, ...]


def check_parameters(parameters: Sequence[tuple[str, str]], recipe: Recipe) -> None:
    """Refuse a model that cannot be trained under the recipe.

    Args:
        parameters: (path, canonical dtype name) of every trainable parameter.

    Raises:
        ModelError: no parameters, or one that is not stored in the policy's `param` dtype.
    """
    if not parameters:
        raise ModelError(
            "model has no trainable parameters, so there is nothing to train. Pass a built model with trainable "
            "parameters (Keras: build it or call it once; torch: requires_grad=True)."
        )
    wanted = recipe.policy.param
    for path, dtype in parameters:
        if dtype not in FLOATING:
            raise ModelError(
                f"parameter {path!r} has dtype {dtype}, which polyamp cannot train: parameters must be real floating "
                "numbers. Keep it out of the trainable parameters (torch: a buffer; JAX: outside the parameter tree)."
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


def check_loss(shape: Shape, dtype: str, *, what: str = "loss_fn") -> None:
    """Refuse a loss that is not a floating scalar; shape () and (1,) are accepted.

    Raises:
        LossError: says what came and how to reduce it.
    """
    if dtype not in FLOATING:
        raise LossError(f"{what} must return a floating loss. Received dtype: {dtype}.")
    if shape not in ((), (1,)):
        raise LossError(
            f"{what} must return a scalar loss. Received shape: {shape}. Reduce it, for instance with a mean over the "
            "batch; polyamp.losses do so by themselves."
        )


def split_result(value: Any) -> tuple[Any, Any]:
    """(loss, aux) from what `loss_fn` returned: a loss, or a pair.

    Raises:
        LossError: a tuple of another length, or None.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise LossError(f"loss_fn must return loss or (loss, aux). Received: a tuple of {len(value)} items.")
        return value[0], value[1]
    if value is None:
        raise LossError("loss_fn must return loss or (loss, aux). Received: None. Is a `return` missing?")
    return value, None


def micro_batch_size(leaves: Sequence[tuple[str, Shape]], count: int) -> int:
    """The length of each of `count` equal micro-batches of a batch with these leaves (S8).

    Args:
        leaves: (path, shape) of every array in the batch.

    Raises:
        BatchError: no arrays, leaves of different length, or a length that `count` does not divide.
    """
    if not leaves:
        raise BatchError("batch holds no arrays to split into micro-batches.")
    for path, shape in leaves:
        if not shape:
            raise BatchError(
                f"accumulate_steps={count} splits every array of the batch along axis 0, but batch{path} is a scalar. "
                "Close over it in loss_fn, or pass a list of micro-batches."
            )
    lengths = {path: shape[0] for path, shape in leaves}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"batch{path}: {length}" for path, length in lengths.items())
        raise BatchError(f"the arrays of a batch must have one length along axis 0. Received: {listed}.")
    check_has_rows(lengths.values())
    length = next(iter(lengths.values()))
    if length % count:
        raise BatchError(
            f"accumulate_steps={count} needs a batch whose length is a multiple of {count}, so that the micro-batches "
            f"are equal. Received length: {length}. Drop or pad the rest, or change accumulate_steps."
        )
    return length // count


def check_micro_batches(batches: Sequence[Sequence[tuple[str, Shape]]], count: int) -> None:
    """Refuse a list of micro-batches that is not `count` long or whose members differ in structure or size (S8).

    Raises:
        BatchError: says which.
    """
    if len(batches) != count:
        raise BatchError(
            f"a list of micro-batches must have accumulate_steps={count} members. Received: {len(batches)}. (A batch "
            "that is itself a sequence of arrays is a tuple or a dict, not a list.)"
        )
    if any(path == "" for path, _ in batches[0]):
        raise BatchError(
            f"a list of {count} arrays could be {count} micro-batches or one batch of {count} arrays. Pass the arrays "
            "of one batch as a tuple or a dict, and a micro-batch that is a single array as a tuple of one."
        )
    first = list(batches[0])
    for number, other in enumerate(batches[1:], start=1):
        if list(other) != first:
            raise BatchError(
                f"micro-batches must agree in structure and shape, so that their mean is that of the whole batch. "
                f"Received: micro-batch 0 has {dict(first)}, micro-batch {number} has {dict(other)}."
            )


def check_gradients(expected: Sequence[tuple[str, Shape]], received: Sequence[tuple[str, Shape | None]]) -> None:
    """Refuse gradients that do not fit the parameters.

    Args:
        expected: (path, shape) of every parameter.
        received: (path, shape) of every gradient; None for a gradient that is `None`, as that of a parameter is on
            which the loss does not depend (S23).

    Raises:
        GradientError: a missing, surplus or misshapen gradient, by name; or no gradient but `None`.
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


def check_options(received: Iterable[str], accepted: Sequence[str], *, function: str, backend: str) -> None:
    """Refuse keyword options that a backend does not have.

    Raises:
        UnsupportedError: names the option and what is accepted.
    """
    for name in received:
        if name not in accepted:
            listed = ", ".join(accepted) or "no options"
            raise UnsupportedError(
                f"{function}() on the {backend} backend accepts {listed}. Received: {name}=."
                + did_you_mean(name, accepted)
            )


def clip_factor(norm: Any, max_norm: float, xp: Any) -> Any:
    """The multiplier of clipping by global norm (S11): `max_norm / max(norm, max_norm)`, at most 1."""
    limit = xp.asarray(max_norm, norm)
    return limit / xp.maximum(norm, limit)
