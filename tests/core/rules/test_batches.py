"""S8: how a batch is split into micro-batches, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from polyamp.errors import BatchError
from polyamp.rules import batches
from polyamp.rules.batches import micro_batches


def test_s08_an_empty_batch_cannot_be_split() -> None:
    with pytest.raises(BatchError, match="batch is empty"):
        batches.micro_batch_size([("['x']", (0, 4))], 2)


def test_s08_numbers_and_text_go_into_every_micro_batch() -> None:
    first, second = micro_batches({"x": np.arange(4), "note": "text", "factor": 2.0, "none": None}, 2)
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [2, 3])
    assert (second["note"], second["factor"], second["none"]) == ("text", 2.0, None)


def test_s08_a_list_of_bare_arrays_is_ambiguous() -> None:
    with pytest.raises(BatchError, match="could be 2 micro-batches or one batch of 2 arrays"):
        micro_batches([np.ones(2), np.ones(2)], 2)
