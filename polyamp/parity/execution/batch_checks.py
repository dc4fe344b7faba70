"""Checks of what a comparison is given: batches that cannot be given twice or may mean two things, counts, modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.errors import ArgumentError, RecipeError, describe_value
from polyamp.parity.execution.memory_mapped_arrays import batch_digest
from polyamp.porting.check import Batch


def check_count(argument: str, value: Any) -> None:
    """Check a whole number of at least 1.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{argument} must be a whole number of at least 1. Received: {argument}={value!r}.")


def check_randomness(value: Any) -> None:
    """Check the mode of dropout.

    Raises:
        ArgumentError: there is no such mode.
    """
    if value not in ("off", "shared"):
        raise ArgumentError(f"randomness must be 'off' or 'shared'. Received: randomness={value!r}.")


def check_batches(batches: Any, argument: str) -> None:
    """Check that batches can be given to every run of every side.

    Args:
        batches: a batch, a list of batches or a function of the step.
        argument: its name in messages.

    Raises:
        ArgumentError: they are a data loader, a generator, a data set, an empty list, or a list of arrays that may be
            one batch or several.
    """
    if _gives_batches_by_itself(batches):
        raise ArgumentError(
            f"{argument} must be a batch, a list of batches, or a function of the step's number. Received: "
            f"{describe_value(batches)}, which every run would have to begin anew, in the same order. Take the first "
            f"batches as NumPy arrays, {argument}=[(x.numpy(), y.numpy()) for x, y in itertools.islice(loader, steps)] "
            "from torch, list(dataset.take(steps).as_numpy_iterator()) from TensorFlow; or give a function that makes "
            "the batch of a step."
        )
    if not isinstance(batches, list):
        return
    if not batches:
        raise ArgumentError(f"{argument} must hold at least one batch. Received: an empty list.")
    kinds = [_array_kind(each) for each in batches]
    if None not in kinds and len(set(kinds)) > 1:
        shown = ", ".join(f"{kind[0]} {list(each.shape)}" for kind, each in zip(kinds, batches, strict=True) if kind)
        raise ArgumentError(
            f"{argument} is a list, which holds several batches, one for each step, and its arrays are not alike: "
            f"{shown}. For one batch of several arrays give a tuple, {argument}=(x, y); for batches of several shapes "
            "a function of the step's number."
        )


def _gives_batches_by_itself(batches: Any) -> bool:
    """Return whether an object is iterated for batches: a generator, a loader, a data set."""
    if isinstance(batches, Mapping | Batch | list | tuple | str) or hasattr(batches, "__array__"):
        return False
    is_structure = hasattr(batches, "keys") or hasattr(batches, "shape") or hasattr(batches, "__dataclass_fields__")
    return hasattr(batches, "__next__") or (hasattr(batches, "__iter__") and not is_structure)


def _array_kind(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return an array's dtype and its shape but for the rows; None for anything else."""
    if not hasattr(value, "__array__") or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return None
    return str(value.dtype), tuple(int(length) for length in value.shape[1:])


class RepeatCheck:
    """Check that a function of the step's number returns the same batch for the same step, in every run.

    Args:
        argument: name of the function in messages.
    """

    def __init__(self, argument: str) -> None:
        self._argument = argument
        self._digests: dict[int, str] = {}

    def check(self, step: int, batch: Any) -> str:
        """Return the digest of a step's batch.

        Raises:
            RecipeError: an earlier call returned another one.
        """
        found = batch_digest(batch, any_width=True)
        if self._digests.setdefault(step, found) != found:
            raise RecipeError(
                f"{self._argument}({step}) gave other arrays at a later call. It must give the same ones for the same "
                "step, so that every side is trained on them: seed it with the step, numpy.random.default_rng(step). "
                "A framework's own random numbers need a dtype too: in the float64 run it makes float64 ones where "
                "none is named."
            )
        return found
