"""What becomes of a batch on its way into a step: micro-batches (S8), float64 on the host (S26), no rows (S24).

Each backend calls these from the walk over the batch that it makes anyway. They know no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from polyamp.errors import BatchError
from polyamp.trees import leaves, map_tree

Shape = tuple[int, ...]


def host_array(array: Any, parameters: str) -> Any:
    """A NumPy array or scalar as it goes into a step: float64 as float32, unless the parameters are float64 (S26).

    NumPy makes float64 of whatever is not told otherwise, and frameworks compute in float32. Arrays of a framework are
    not for this function: what was made float64 there stays (S2).

    Args:
        array: NumPy array or scalar.
        parameters: the policy's `param` dtype.

    >>> import numpy as np
    >>> host_array(np.zeros(2), "float32").dtype, host_array(np.zeros(2), "float64").dtype
    (dtype('float32'), dtype('float64'))
    """
    return array.astype("float32") if parameters != "float64" and array.dtype == "float64" else array


def check_has_rows(lengths: Iterable[int | None]) -> None:
    """Refuse a batch none of whose arrays has a row: the mean over it would be NaN, or nothing.

    An array of length 0 beside others is the program's own business, such as the boxes of an image without any.

    Args:
        lengths: of every array of the batch that has an axis, that along axis 0; None where it is not known.

    Raises:
        BatchError: there are arrays, and all are empty.
    """
    found = list(lengths)
    if found and not any(length != 0 for length in found):
        raise BatchError(
            f"batch is empty: of its {len(found)} array{'s' if len(found) > 1 else ''} none has a row along axis 0. "
            "Leave the step out for such a batch, or have the loader drop it (drop_last=True, drop_remainder=True)."
        )


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


def micro_batches(batch: Any, count: int) -> list[Any]:
    """A batch as a list of `count` equal micro-batches, from a batch to split along axis 0 or from such a list (S8).

    Raises:
        BatchError: it cannot be split equally.
    """
    if count == 1:
        return [batch]
    if isinstance(batch, list):
        check_micro_batches([_shapes(part) for part in batch], count)
        return batch
    size = micro_batch_size(_shapes(batch), count)
    return [map_tree(_rows(i * size, (i + 1) * size), batch) for i in range(count)]


def _rows(start: int, stop: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf[start:stop] if hasattr(leaf, "shape") else leaf


def _shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Paths and shapes of the arrays; numbers, strings and None go into every micro-batch as they are."""
    return [(path, tuple(leaf.shape)) for path, leaf in leaves(batch) if hasattr(leaf, "shape")]
