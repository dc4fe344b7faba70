"""S8: how a batch is split into micro-batches, and what cannot be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from polyamp.errors import BatchError
from polyamp.rules import batches
from polyamp.rules.accumulation import divide_rows, is_concatenated
from polyamp.rules.batches import micro_batches


def test_s08_an_empty_batch_cannot_be_split() -> None:
    with pytest.raises(BatchError, match="batch is empty"):
        batches.accumulation_of_batch([("['x']", (0, 4))], 2)


def test_s08_a_length_that_a_compiler_does_not_know_is_refused() -> None:
    shapes: list[tuple[str, Any]] = [("['x']", (None, 4)), ("['y']", (None,))]
    with pytest.raises(BatchError, match=r"must know\. Received: an unknown length\..*drop_remainder=True"):
        batches.accumulation_of_batch(shapes, 2)


@pytest.mark.parametrize("length", range(1, 23))
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_s08_micro_batches_are_as_even_as_can_be(length: int, count: int) -> None:
    window = divide_rows(length, count)
    assert sum(window.sizes) == length
    assert len(window.sizes) == min(length, count)
    assert max(window.sizes) - min(window.sizes) <= 1
    assert list(window.sizes) == sorted(window.sizes, reverse=True)
    assert window.is_even == (length % len(window.sizes) == 0)
    assert [n for run in window.runs for n in run] == list(range(len(window.sizes)))
    weights = [share / window.total for share in window.weights]
    np.testing.assert_allclose(weights, [size / length for size in window.sizes])


def test_s08_aux_that_differs_in_more_than_its_rows_is_refused() -> None:
    with pytest.raises(BatchError, match=r"differ along axis 0 alone\. Received: \(2, 3\), \(2, 4\)"):
        is_concatenated([(2, 3), (2, 4), (2, 3)])


def test_s08_numbers_and_text_go_into_every_micro_batch() -> None:
    (first, second), _ = micro_batches({"x": np.arange(4), "note": "text", "factor": 2.0, "none": None}, 2)
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [2, 3])
    assert (second["note"], second["factor"], second["none"]) == ("text", 2.0, None)


def test_s08_a_list_of_bare_arrays_is_ambiguous() -> None:
    with pytest.raises(BatchError, match="could be 2 micro-batches or one batch of 2 arrays"):
        micro_batches([np.ones(2), np.ones(2)], 2)


@dataclasses.dataclass
class Sentences:
    ids: Any
    texts: Any


@pytest.mark.parametrize(
    ("path", "batch"),
    [
        (r"batch\['lengths'\]", {"x": np.zeros((3, 2)), "lengths": [1, 2.5, True]}),
        (r"batch\[1\]\['texts'\]", (np.zeros(3), {"texts": ["a", "b", "c"]})),
        (r"batch\.texts is a tuple of 3", Sentences(np.zeros(3), ("a", "b", "c"))),
    ],
)
def test_s08_a_list_of_one_python_value_for_each_row_is_refused(path: str, batch: Any) -> None:
    with pytest.raises(BatchError, match=f"{path}.*np.array"):
        micro_batches(batch, 2)


def test_s08_settings_and_arrays_of_text_are_no_lists_of_rows() -> None:
    """A tuple of numbers is a size, a list of another length something else, and what is mixed is the program's own."""
    whole = {"size": (32, 64), "names": ["a", "b", "c"], "mixed": [1, "a"], "one": 1, "none": None}
    parts, _ = micro_batches({**whole, "text": np.array(["p", "q"])}, 2)
    assert [part.pop("text").tolist() for part in parts] == [["p"], ["q"]]
    assert parts == [whole, whole]
