"""`train_step(compile=True)`: a step runs `loss_fn` once, also where Python state changes in it.

The graph is compiled anew at each step then, and tried before that; the trial does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.step.torch_only.eager_dry_run import run_trial

TOTAL = 0
RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))


class Tally:
    """An object of the user's."""

    n = 0


class Counting(nn.Module):
    """Has a counter, a cache, and a list in the modules inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.n = 0
        self.meter: dict[str, int] = {"n": 0}
        self.cache: torch.Tensor | None = None
        self.size = 0
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        if way == "attribute":
            self.n += 1
        if way == "dict":
            self.meter["n"] += 1
        if self.cache is None or self.size < x.shape[0]:
            self.cache, self.size = torch.full((2,), 2.0), x.shape[0]
        out: torch.Tensor = self.layer(x) * self.cache
        return out


def losses(model: Counting, way: str) -> tuple[Callable[[Any, Any], Any], Callable[[], int]]:
    """A loss function, and how often it ran."""
    held, several, number = Tally(), [0], 0
    drawn: list[int] = []

    def loss_fn(bound: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal number
        global TOTAL
        if way == "closure":
            number += 1
        if way == "global":
            TOTAL += 1
        if way == "object":
            held.n += 1
        if way == "element":
            several[0] += 1
        if way == "list":
            drawn.append(1)
        loss: torch.Tensor = bound(x, way).square().mean()
        return loss

    counts = {
        "attribute": lambda: model.n, "dict": lambda: model.meter["n"], "closure": lambda: number,
        "global": lambda: TOTAL, "object": lambda: held.n, "element": lambda: several[0], "list": lambda: len(drawn),
    }  # fmt: skip
    return loss_fn, counts[way]


@pytest.mark.parametrize("way", ["attribute", "closure", "list"])
def test_a_compiled_step_runs_a_loss_function_that_counts_once(way: str) -> None:
    global TOTAL
    TOTAL = 0
    torch._dynamo.reset()
    model = Counting()
    loss_fn, count = losses(model, way)
    state = polyamp.init(model, RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE, compile={"backend": "eager"})
    seen = []
    for _ in range(2):
        step(state, torch.ones(3, 2))
        seen.append(count())
    assert seen == [1, 2]
    assert model.size == 3, "what the first pass alone sets is a cache, and stays"


def test_a_graph_that_is_compiled_too_often_names_what_changes() -> None:
    torch._dynamo.reset()
    model = Counting()
    loss_fn, count = losses(model, "attribute")
    state = polyamp.init(model, RECIPE)
    step = polyamp.train_step(loss_fn, RECIPE, compile={"backend": "eager"})
    with torch._dynamo.config.patch(recompile_limit=1):
        step(state, torch.ones(3, 2))
        with pytest.raises(UnsupportedError, match=r"every pass of loss_fn changes model\.n\. .*register_buffer"):
            step(state, torch.ones(3, 2))
    assert count() == 1
    assert int(state.step) == 1


def test_the_trial_draws_none_of_the_programs_random_numbers() -> None:
    torch._dynamo.reset()
    model = Counting()
    state = polyamp.init(model, RECIPE)

    def loss_fn(bound: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            model.drawn.append(random.random())
        loss: torch.Tensor = bound(x, "").square().mean()
        return loss

    random.seed(7)
    before = random.getstate()
    polyamp.train_step(loss_fn, RECIPE, compile={"backend": "eager"})(state, torch.ones(3, 2))
    assert random.getstate() == before
    assert model.drawn == []


@pytest.mark.parametrize("way", ["attribute", "dict", "closure", "global", "object", "element", "list"])
def test_the_trial_leaves_python_state_as_it_was(way: str) -> None:
    global TOTAL
    TOTAL = 0
    model = Counting()
    loss_fn, count = losses(model, way)
    state: Any = polyamp.init(model, RECIPE)
    found = run_trial(loss_fn, state, torch.ones(3, 2))
    assert count() == 0
    assert len(found.changing) == 1
    assert model.size == 3, "what the first pass alone sets is a cache, and stays"
    assert found.used == ["layer/weight", "layer/bias"]
