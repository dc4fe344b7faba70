"""Gradients that one side does not have, layers that it does not call, cells that nobody sees, a user's own norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polyamp.parity.precisions import FLOAT32, Phase
from polyamp.parity.trace.sketch import sketch
from polyamp.parity.trace.trace import Entry, Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.step_entries import PhaseTrace, hidden_recurrent_cells
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


@pytest.mark.parametrize(("caller", "label"), [(0, "one"), (1, "two")])
def test_layer_that_one_side_alone_calls_is_named(caller: int, label: str) -> None:
    agreed = Alignment(modules={}, layer_kinds={"fc": "dense", "norm": "layer_norm", "head": "dense"})
    fc, norm = _entry("forward", "fc", "output", [1.0, 2.0]), _entry("forward", "norm", "output", [-1.0, 1.0])
    heads = [_entry("forward", "head", "output", each) for each in ([-0.5, 0.5], [0.5, 1.0])]
    sides = [[fc, *[norm] * (number == caller), heads[number != caller]] for number in range(2)]

    first = _compared(*sides, agreed)

    assert (first.module, first.what, first.after) == ("norm", "output", "fc")
    assert first.sentence == f"{label} alone calls 'norm', behind 'fc', which agrees."
    assert first.evidence[0] == (
        "It shows in the output of 'head'; before it run layers that do not show theirs on both sides: 'norm'."
    )


def _owned(norms: tuple[float, float], inputs: tuple[float, float]) -> Any:
    """The comparison of two sides with a norm of the user's own between two layers, and a gradient that differs."""
    agreed = Alignment(
        modules={each: each for each in ("", "fc", "norm", "head")},
        containers=["norm"],
        parameter_owners=["norm"],
        layer_kinds={"fc": "dense", "norm/weight": "parameter", "head": "dense"},
    )
    sides = [
        [
            _entry("forward", "fc", "output", [1.0, 2.0]),
            _entry("forward", "norm", "output", [1.0, norms[number]]),
            _entry("forward", "head", "input", [1.0, inputs[number]]),
            _entry("backward", "head", "gradient", [1.0, 1.0 + number], "kernel"),
        ]
        for number in range(2)
    ]
    return _compared(*sides, agreed)


def test_norm_of_the_users_own_is_named_where_what_follows_differs_too() -> None:
    first = _owned((2.0, 2.5), (2.0, 2.5))
    assert (first.stage, first.module, first.what, first.after) == ("forward", "norm", "output", "fc")


def test_module_of_a_parameter_that_gives_something_else_is_no_difference_where_what_follows_agrees() -> None:
    first = _owned((2.0, 2.5), (3.0, 3.0))
    assert (first.stage, first.module, first.what) == ("backward", "head", "gradient")


def test_difference_behind_a_layer_that_agrees_is_not_the_norms() -> None:
    agreed = Alignment(
        modules={each: each for each in ("", "norm", "fc", "head")},
        containers=["norm"],
        parameter_owners=["norm"],
        layer_kinds={"norm/weight": "parameter", "fc": "dense", "head": "dense"},
    )
    sides = [
        [
            _entry("forward", "norm", "output", [1.0, number]),
            _entry("forward", "fc", "output", [1.0, 2.0]),
            _entry("forward", "head", "output", [1.0, number]),
        ]
        for number in (2.0, 2.5)
    ]
    assert _compared(*sides, agreed).module == "head"


def test_layer_that_one_side_calls_before_what_agrees_is_not_named() -> None:
    agreed = Alignment(modules={}, layer_kinds={"norm": "layer_norm", "fc": "dense", "head": "dense"})
    fc, norm = _entry("forward", "fc", "output", [1.0, 2.0]), _entry("forward", "norm", "output", [-1.0, 1.0])
    heads = [_entry("forward", "head", "output", each) for each in ([-0.5, 0.5], [0.5, 1.0])]

    assert _compared([norm, fc, heads[0]], [fc, heads[1]], agreed).module == "head"


def test_difference_behind_a_norm_that_agrees_is_not_the_norms() -> None:
    first = _owned((2.0, 2.0), (3.0, 3.5))
    assert (first.stage, first.module, first.what) == ("forward", "head", "input")
