"""`polyamp.parity.run` between channels first and last: a pass of both sides shows which dense layer takes what."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fixtures"))

import image_programs as programs

from polyamp import Recipe, adamw
from polyamp.parity import run


def test_flattened_channels_are_turned_and_embedded_times_are_not() -> None:
    """Both layers of the time have inputs that are multiples of the channels, behind a convolution."""
    report = run(
        {"torch": programs.in_torch, "nnx": programs.in_nnx},
        data=programs.batch(0),
        loss_fn=programs.loss_fn,
        recipe=Recipe(policy="float32", optimizer=adamw(1e-2)),
    )
    assert report.failures == []
    (found,) = report.comparisons
    assert found.first is None
    assert {row.module for row in found.rows if row.what == "output"} >= {"time1", "time2", "hidden", "head"}
    assert not [note for note in found.notes if "order of rows" in note]
