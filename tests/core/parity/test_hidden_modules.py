"""Gradients that one side does not have, and cells of stacks that nobody sees."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.hidden_modules import hidden_recurrent_cells
from polyamp.parity.verdict.step_entries import PhaseTrace
from polyamp.parity.verdict.verdict import compare_traces


def _entry(stage: Any, module: str, what: str, values: Any, name: str = "") -> Entry:
    array = np.asarray(values, np.float32)
    return Entry(step=1, stage=stage, module=module, what=what, name=name, sketch=sketch(array, "float32"))


def _compared(ours: list[Entry], theirs: list[Entry], agreed: Alignment) -> Any:
    trace = Trace(side="", phase=FLOAT32)
    runs = [(Phase(name=FLOAT32), PhaseTrace(trace, lambda: ours), PhaseTrace(trace, lambda: theirs))]
    return compare_traces(("one", "two"), runs, agreed, (None, None)).first


def test_gradient_that_one_side_lacks_is_named_at_its_layer() -> None:
    agreed = Alignment(modules={"fc": "fc"}, layer_kinds={"fc": "dense"})
    output = _entry("forward", "fc", "output", [1.0, 2.0])

    first = _compared([output, _entry("backward", "fc", "gradient", [0.5, 1.0], "kernel")], [output], agreed)

    assert (first.stage, first.module, first.what, first.name, first.kind) == (
        "backward",
        "fc",
        "gradient",
        "kernel",
        "missing",
    )
    assert first.sentence == "Of 'kernel' of 'fc' the loss of two does not know; that of one does."
    assert _compared([output], [output, _entry("backward", "fc", "gradient", [0.5, 1.0])], agreed).kind == "missing"


def test_gradient_of_zeros_is_as_none() -> None:
    agreed = Alignment(modules={"fc": "fc"}, layer_kinds={"fc": "dense"})
    output = _entry("forward", "fc", "output", [1.0, 2.0])

    assert _compared([output, _entry("backward", "fc", "gradient", [0.0, 0.0])], [output], agreed) is None


def test_difference_behind_cells_that_show_nothing_is_named_at_the_first_of_them() -> None:
    kinds = {"words": "embedding", "stack/0": "lstm", "stack/1": "lstm", "head": "dense"}
    agreed = Alignment(modules=dict.fromkeys(kinds, ""), layer_kinds=kinds)
    words = _entry("forward", "words", "output", [1.0, 2.0])

    first = _compared(
        [words, _entry("forward", "head", "output", [1.0, 2.0])],
        [words, _entry("forward", "head", "output", [1.0, 2.5])],
        agreed,
    )

    assert (first.module, first.after) == ("stack/0", "words")
    assert first.evidence[0] == (
        "It shows in the output of 'head'; before it run layers that do not show theirs on both sides: 'stack/0', "
        "'stack/1'."
    )


def test_hidden_cells_are_those_between() -> None:
    kinds = {"a": "embedding", "b/0": "lstm", "c": "dense", "d/0": "lstm", "d/10": "lstm", "d/9": "lstm", "e": "dense"}
    agreed = Alignment(modules={}, layer_kinds=kinds)

    assert hidden_recurrent_cells(agreed, ["a", "c", "e"], "a", "c") == ["b/0"]
    assert hidden_recurrent_cells(agreed, ["a", "e"], "c", "e") == ["d/0", "d/10", "d/9"]
    assert hidden_recurrent_cells(agreed, ["e", "a"], "a", "e") == ["b/0", "d/0", "d/9", "d/10"]
    assert hidden_recurrent_cells(agreed, ["a", "e"], "", "a") == []
