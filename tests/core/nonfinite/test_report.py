"""`find_nonfinite` and its report, where no framework matters."""

from __future__ import annotations

import numpy as np
import pytest

import polyamp
from polyamp import ArgumentError, ModelError, PolicyError
from polyamp.nonfinite.report import NonfiniteReport, ValueRange
from polyamp.reference import MLP


@pytest.mark.parametrize("tool", ["find_nonfinite", "diagnose"])
def test_a_state_in_place_of_its_model_is_refused(tool: str) -> None:
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(MLP.random([2, 1], seed=0), recipe)

    def loss_fn(model: object, x: object) -> object:
        return polyamp.losses.mean_squared_error(model(x), x[:, :1])

    x = np.ones((1, 2), np.float32)
    calls = {
        "find_nonfinite": lambda: polyamp.find_nonfinite(loss_fn, "mixed_float16", state, x),
        "diagnose": lambda: polyamp.diagnose(state, loss_fn, [x], recipe),
    }
    with pytest.raises(ModelError, match=r"Received: a ReferenceState\. Pass its model: state\.model"):
        calls[tool]()


def test_arguments_in_another_order_are_refused_with_the_call_to_write() -> None:
    model, x = MLP.random([2, 1], seed=0), np.ones((1, 2), np.float32)
    recipe = polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1))

    def loss_fn(model: object, x: object) -> object:
        return polyamp.losses.mean_squared_error(model(x), x[:, :1])

    message = r"policy must be .* Received: a MLP\. Write {}\(loss_fn, policy, model, batch\)"
    for call in (polyamp.explain, polyamp.find_nonfinite):
        with pytest.raises(PolicyError, match=message.format(call.__name__)):
            call(loss_fn, model, polyamp.Policy("mixed_float16"), x)
    with pytest.raises(ArgumentError, match=r"a list of 1\. Write diagnose\(model, loss_fn, batches, recipe\)"):
        polyamp.diagnose(model, loss_fn, recipe, [x])
    with pytest.raises(PolicyError, match=r"Received: a Recipe\. Pass recipe\.policy\."):
        polyamp.explain(loss_fn, recipe, model, x)


def test_a_list_of_micro_batches_gets_a_hint() -> None:
    model, x = MLP.random([2, 1], seed=0), np.ones((1, 2), np.float32)

    def loss_fn(model: object, x: object) -> object:
        return polyamp.losses.mean_squared_error(model(x["x"]), x["x"][:, :1])

    with pytest.raises(TypeError) as error:
        polyamp.find_nonfinite(loss_fn, "mixed_float16", model, [{"x": x}, {"x": x}])
    assert "Received: batch, a list of 2." in error.value.__notes__[-1]
    assert "find_nonfinite(loss_fn, policy, model, batch[0])" in error.value.__notes__[-1]


def test_a_range_says_where_nothing_is_finite() -> None:
    values = {"dtype": "float16", "least": 0.0, "greatest": 2.0, "elements": 4}
    assert str(ValueRange(**values, nonfinite=0)) == "float16 from 0 to 2"
    assert str(ValueRange(**values, nonfinite=1)) == "float16 from 0 to 2, 1 of 4 not finite"
    assert str(ValueRange(**values, nonfinite=4)) == "float16, none of 4 finite"


def test_a_gradient_under_a_loss_scale_asks_for_the_scale_of_the_run() -> None:
    report = NonfiniteReport(origin="backward", module="head", by_precision=True, loss_scale=32768.0)
    assert "The loss scale was 32768." in str(report)
    assert "loss_scale=float(result.scale)" in str(report)
    assert "overrides" not in str(report)
    alone = NonfiniteReport(origin="forward", module="head", by_precision=True, loss_scale=32768.0)
    assert 'Keep it in float32: Policy(overrides={"head": "float32"})' in str(alone)
