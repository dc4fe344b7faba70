"""Preparation of a batch for a step: micro-batches (S8), float64 arrays on the host (S26), empty batches (S24).

This module knows no framework. Backends use it in their own pass over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from polyamp.errors import BatchError
from polyamp.rules.accumulation import Accumulation, divide_rows
from polyamp.trees import children, leaves, map_tree

Shape = tuple[int, ...]


def host_array(array: Any, parameters: str) -> Any:
    """Convert a float64 NumPy array or scalar to float32, unless the parameters are float64 (S26).

    NumPy creates float64 by default, and frameworks compute in float32. Do not pass arrays of a framework: float64
    arrays of a framework stay float64 (S2).

    Args:
        array: NumPy array or scalar.
        parameters: the policy's `param` dtype.

    >>> import numpy as np
    >>> host_array(np.zeros(2), "float32").dtype, host_array(np.zeros(2), "float64").dtype
    (dtype('float32'), dtype('float64'))
    """
    return array.astype("float32") if parameters != "float64" and array.dtype == "float64" else array


def check_has_rows(lengths: Iterable[int | None]) -> None:
    """Raise if no array of the batch has any rows: the mean over it would be NaN.

    An empty array next to non-empty ones is allowed, such as the boxes of an image without any.

    Args:
        lengths: length along axis 0 of every array that has an axis; None where it is unknown.

    Raises:
        BatchError: there are arrays and all are empty.
    """
    found = list(lengths)
    if found and found.count(0) == len(found):
        raise BatchError(
            f"batch is empty: of its {len(found)} array{'s' if len(found) > 1 else ''} none has a row along axis 0. "
            "Leave the step out for such a batch, or have the loader drop it (drop_last=True, drop_remainder=True)."
        )


def check_has_no_lists(batch: Any, rows: int, path: str = "") -> None:
    """Raise if the batch contains a list with one number or string per row.

    Such a list would be copied whole into every micro-batch, where its entries would not match the rows.

    Args:
        batch: nested dicts, lists and tuples.
        rows: number of rows to split.
        path: path of `batch`.

    Raises:
        BatchError: names the list and what to pass instead.
    """
    if isinstance(batch, list | tuple):
        kinds = {type(value) for value in batch}
        numbers = kinds <= {bool, int, float} and isinstance(batch, list)  # a tuple of numbers is a size, or settings
        if rows > 1 and len(batch) == rows and (numbers or kinds == {str}):
            raise BatchError(
                f"batch{path} is a {type(batch).__name__} of {rows} Python values, as many as the batch has rows. "
                "accumulate_steps splits arrays alone, so that every micro-batch would get all of them. Pass an array "
                "(np.array(values) does for numbers and text), or a list of micro-batches."
            )
    for own_path, value in children(batch, path) or ():
        check_has_no_lists(value, rows, own_path)


def accumulation_of_batch(leaves: Sequence[tuple[str, Shape]], count: int) -> Accumulation:
    """Return the micro-batches, at most `count`, into which a batch is split along axis 0 (S8).

    Args:
        leaves: (path, shape) of every array in the batch.

    Raises:
        BatchError: there are no arrays, their lengths differ, or a length is unknown.
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
        agree = _members_agree(lengths)
        hint = " If its members are micro-batches, pass a list of them: step(state, list(batch))." if agree else ""
        raise BatchError(f"the arrays of a batch must have one length along axis 0. Received: {listed}.{hint}")
    check_has_rows(lengths.values())
    length = next(iter(lengths.values()))
    if length is None:
        raise BatchError(
            f"accumulate_steps={count} splits every array of the batch along axis 0, whose length the compiler must "
            "know. Received: an unknown length. Have the dataset make batches of one length (drop_remainder=True)."
        )
    return divide_rows(length, count)


def _members_agree(lengths: Mapping[str, Any]) -> bool:
    """Return whether a batch is a sequence of containers, in each of which the arrays have one length."""
    members = {(path.partition("]")[0], length) for path, length in lengths.items()}
    is_nested = all(path.startswith("[") and path.partition("]")[2] for path in lengths)
    return is_nested and len(dict(members)) == len(members) > 1


def accumulation_of_list(batches: Sequence[Sequence[tuple[str, Shape]]], count: int) -> Accumulation:
    """Return the accumulation of a list of at most `count` micro-batches, whose lengths along axis 0 may differ (S8).

    Args:
        batches: (path, shape) of every array of each micro-batch.

    Raises:
        BatchError: too many or no micro-batches, or other differences than the length.
    """
    if not 1 <= len(batches) <= count:
        raise BatchError(
            f"a list of micro-batches must have accumulate_steps={count} members, or fewer at the end of an epoch. "
            f"Received: {len(batches)}. (A batch that is itself a sequence of arrays is a tuple or a dict, not a list.)"
        )
    if any(path == "" for path, _ in batches[0]):
        raise BatchError(
            f"a list of {len(batches)} arrays could be {len(batches)} micro-batches or one batch of {len(batches)} "
            "arrays. Pass the arrays of one batch as a tuple or a dict (of a DataLoader, which gives lists: "
            "step(state, tuple(batch))), and a micro-batch that is a single array as a tuple of one."
        )
    first = list(batches[0])
    for number, other in enumerate(batches[1:], start=1):
        if [(path, shape[1:], len(shape)) for path, shape in other] != [(p, s[1:], len(s)) for p, s in first]:
            raise _shape_mismatch_error(first, number, other)
    columns = [[shape[:1] for _, shape in column] for column in zip(*batches, strict=True)]
    differing = [column for column in columns if len(set(column)) > 1]
    if not differing:
        return Accumulation((1,) * len(batches))
    for number, lengths in enumerate(zip(*differing, strict=True)):
        if len(set(lengths)) > 1:
            raise _shape_mismatch_error(first, number, batches[number])
    sizes = tuple(length for (length,) in differing[0])
    if 0 in sizes:
        raise BatchError(f"micro-batch {sizes.index(0)} of the list has no rows along axis 0. Leave it out.")
    return Accumulation(sizes)


def micro_batch_runs(
    batch: Any,
    count: int,
    *,
    shapes: Callable[[Any], Sequence[tuple[str, Shape]]],
    tree_map: Callable[..., Any],
    stack: Callable[[Sequence[Any]], Any],
    reshape: Callable[[Any, Shape], Any],
) -> tuple[Accumulation, list[tuple[range, Any]]]:
    """Split a batch, or group a list of micro-batches, for frameworks that loop over equal shapes (S8).

    Args:
        batch: arrays of `count` micro-batches along axis 0, or a list of micro-batches.
        count: maximum number of micro-batches.
        shapes: returns (path, shape) of every array.
        tree_map: the framework's function that maps over the leaves of one or several trees.
        stack, reshape: the framework's functions.

    Returns:
        The accumulation, and a list of (range, batch) for every run of equal micro-batches. Each leaf has the shape
        (micro-batches, rows, ...). There is one run unless the sizes differ.

    Raises:
        BatchError: see `accumulation_of_batch` and `accumulation_of_list`.
    """
    if isinstance(batch, list):
        window = accumulation_of_list([shapes(part) for part in batch], count)
        groups = [(run, batch[run.start : run.stop]) for run in window.runs]
        return window, [(run, tree_map(lambda *parts: stack(parts), *group)) for run, group in groups]
    window, runs, start = accumulation_of_batch(shapes(batch), count), [], 0

    def folded(leaf: Any, start: int, stop: int, size: int) -> Any:
        rows = leaf if (start, stop) == (0, leaf.shape[0]) else leaf[start:stop]
        return reshape(rows, ((stop - start) // size, size, *leaf.shape[1:]))

    for run in window.runs:
        size = window.sizes[run.start]
        stop = start + size * len(run)
        runs.append((run, tree_map(partial(folded, start=start, stop=stop, size=size), batch)))
        start = stop
    return window, runs


def _shape_mismatch_error(
    first: Sequence[tuple[str, Shape]], number: int, other: Sequence[tuple[str, Shape]]
) -> BatchError:
    return BatchError(
        "micro-batches must agree in structure and shape but for one length along axis 0, so that their mean is that "
        f"of the whole batch. Received: micro-batch 0 has {dict(first)}, micro-batch {number} has {dict(other)}."
    )


def micro_batches(batch: Any, count: int) -> tuple[list[Any], Accumulation]:
    """Return at most `count` micro-batches, from a batch to split along axis 0 or from a list, and their weights (S8).

    Raises:
        BatchError: the batch cannot be split.

    >>> import numpy as np
    >>> parts, window = micro_batches({"x": np.arange(3)}, 2)
    >>> [part["x"].tolist() for part in parts], window.weights
    ([[0, 1], [2]], (1.0, 0.5))
    """
    if count == 1:
        return [batch], Accumulation((1,))
    if isinstance(batch, list):
        return batch, accumulation_of_list([_array_shapes(part) for part in batch], count)
    window = accumulation_of_batch(_array_shapes(batch), count)
    check_has_no_lists(batch, sum(window.sizes))
    ends = list(accumulate(window.sizes))
    return [
        map_tree(_row_slicer(stop - size, stop), batch) for size, stop in zip(window.sizes, ends, strict=True)
    ], window


def _row_slicer(start: int, stop: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf[start:stop] if hasattr(leaf, "shape") else leaf


def _array_shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return paths and shapes of the arrays. Numbers, strings and None go into every micro-batch unchanged."""
    return [(path, tuple(leaf.shape)) for path, leaf in leaves(batch) if hasattr(leaf, "shape")]
