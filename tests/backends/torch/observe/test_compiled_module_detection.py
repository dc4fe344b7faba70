"""Models that `torch.compile` made: copies are compiled as they are, and show what is outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch.observe.observer import OBSERVER

RECIPE = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
X = np.random.default_rng(0).standard_normal((4, 3), "f4")


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).float().square().mean()


class Counting:
    """A backend of torch.compile that runs what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2))


def compiled(how: str, backend: Any) -> nn.Module:
    model = plain()
    if how == "whole":
        return torch.compile(model, backend=backend, fullgraph=True)
    if how == "in place":
        model.compile(backend=backend)
    elif how == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        model[0] = torch.compile(model[0], backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch, in place
@pytest.mark.parametrize("how", ["whole", "in place", "forward", "a part"])
def test_a_copy_is_compiled_and_its_hooks_stay_outside(how: str) -> None:
    torch.compiler.reset()
    backend = Counting()
    model = compiled(how, backend)
    with OBSERVER.model_copy(model) as twin, OBSERVER.disable_dropout(twin, None):
        assert type(twin) is type(model)
        assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in model.parameters())
        state = polyamp.init(twin, RECIPE)
        seen: dict[tuple[str, str], Any] = {}
        watched = OBSERVER.capture_pass(state, loss_fn, X, lambda *each: seen.update({each[:2]: each[2]}))
        graphs = backend.graphs
        _, result = polyamp.train_step(loss_fn, RECIPE)(state, X)
        if how != "in place":  # there torch compiles polyamp's own frames too, as many as it comes by
            assert (graphs, backend.graphs) == (1, 1)  # what was watched is what trains
    named = "'0'" if how == "a part" else "the model"
    assert (
        watched.hidden_reason
        == f"torch.compile made one function of {named}, whose inner modules do not run one by one"
    )
    assert watched.operations == ()
    own = {"", "0", "1", "2"} if how == "a part" else {""}
    assert {path for path, _ in seen} == own
    eager = plain()
    with OBSERVER.disable_dropout(eager, None):
        expected: dict[tuple[str, str], Any] = {}
        known = OBSERVER.capture_pass(
            polyamp.init(eager, RECIPE), loss_fn, X, lambda *each: expected.update({each[:2]: each[2]})
        )
    assert all(np.array_equal(array, expected[key]) for key, array in seen.items())
    assert (watched.loss, float(result.loss)) == (known.loss, pytest.approx(known.loss))
    for (name, ours), theirs in zip(watched.gradients.items(), known.gradients.values(), strict=True):
        assert np.array_equal(ours, theirs), name  # type: ignore[arg-type]
    with pytest.raises(polyamp.UnsupportedError, match=r"draws: what torch\.compile made"), \
         OBSERVER.disable_dropout(model, lambda shape: np.zeros(shape, "f4")):  # fmt: skip
        pass


def test_a_compiled_loss_is_run_without_hooks() -> None:
    torch.compiler.reset()
    backend = Counting()
    seen: list[Any] = []
    state = polyamp.init(plain().eval(), RECIPE)
    watched = OBSERVER.capture_pass(state, torch.compile(loss_fn, backend=backend), X, lambda *each: seen.append(each))
    assert seen == []
    assert watched.hidden_reason == "torch.compile made one function of loss_fn, in which no module runs by itself"
    assert backend.graphs == 1
