"""A monitor on two replicas has the figures of one, and its switch traces nothing again (S35)."""

from __future__ import annotations

from typing import Any

import pytest

import polyamp
from tests.backends.tensorflow.distributed.test_as_one import ROWS, loss_fn, made, model, on


def test_s35_replicas_have_the_figures_of_one(two_cpus: Any) -> None:
    recipe = made(clip_norm=0.1)
    found = []
    for several in (False, True):
        monitor = polyamp.Monitor(every=2, weights=True, activations=True)
        state = on(two_cpus, recipe) if several else polyamp.init(model(), recipe)
        step = polyamp.train_step(loss_fn, recipe, monitor=monitor)
        for rows in ROWS[:4]:
            step(state, rows)
        found.append(monitor.records)
    one, two = found
    assert [each.call for each in two] == [2, 4]
    for single, several in zip(one, two, strict=True):
        assert several.grad_norm == pytest.approx(single.grad_norm, rel=1e-5)
        assert [each.module for each in several.modules] == [each.module for each in single.modules]
        for own, wanted in zip(several.modules, single.modules, strict=True):
            assert own.activations is not None
            assert wanted.activations is not None
            assert own.activations.elements == wanted.activations.elements
            assert own.activations.rms == pytest.approx(wanted.activations.rms, rel=1e-5)
            assert own.activations.largest == pytest.approx(wanted.activations.largest, rel=1e-5)
            if own.module == "":
                continue
            assert own.gradients is not None
            assert wanted.gradients is not None
            assert own.gradients.elements == wanted.gradients.elements
            assert own.gradients.norm == pytest.approx(wanted.gradients.norm, rel=1e-5)
            assert own.update_ratio == pytest.approx(wanted.update_ratio, rel=1e-3)


def test_s35_a_switch_traces_nothing_again() -> None:
    traces = []

    def counted(model: Any, batch: Any) -> Any:
        traces.append(1)
        return loss_fn(model, batch)

    recipe, monitor = made(), polyamp.Monitor(every=2)
    state, step = polyamp.init(model(), recipe), polyamp.train_step(counted, recipe, monitor=monitor)
    compiled = []
    for number, rows in enumerate(ROWS[:12]):
        monitor.enabled, monitor.every = number % 5 != 0, 2 + number % 3
        step(state, rows)
        compiled.append(len(traces))
    assert compiled[-1] == compiled[5]
    assert monitor.records
