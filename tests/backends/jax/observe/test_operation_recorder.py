"""Single operations of a JAX pass: their order, values, inputs and lines (`observe.operation_recorder`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import polyamp
from polyamp.parity.trace.operation_log import OperationLog, OperationRecorder, PassLocation
from polyamp_jax.observe.observer import OBSERVER

X = np.random.default_rng(0).standard_normal((4, 3)).astype("f4")


@jax.jit
def squash(x: Any) -> Any:
    doubled = x * 2.0
    return jnp.tanh(doubled)


class SquashedNet(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = squash(self.first(x))
        hidden = hidden - jnp.var(hidden)
        centred = jax.nn.silu(hidden) - jnp.var(hidden, -1, keepdims=True)
        return self.second(centred)


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean(jnp.square(model(batch)))


def recorded(path: str, what: str) -> OperationLog:
    recorder = OperationRecorder(PassLocation(path, what))
    state = polyamp.init(SquashedNet(), polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    OBSERVER.record_operations(state, loss_fn, X, recorder)
    return recorder.log()


def test_operations_stand_in_order_with_the_lines_of_the_calls_that_the_user_wrote() -> None:
    log = recorded("second", "input")
    assert log.end is not None
    found = {}
    for record in log.records:
        if record.place is not None:
            assert record.place.file == __file__
            found.setdefault(record.place.code, []).append(record.name)
    assert list(found) == [
        "hidden = squash(self.first(x))",
        "doubled = x * 2.0",
        "return jnp.tanh(doubled)",
        "hidden = hidden - jnp.var(hidden)",
        "centred = jax.nn.silu(hidden) - jnp.var(hidden, -1, keepdims=True)",
    ]
    assert found["doubled = x * 2.0"] == ["mul"]
    assert "dot_general" in found["hidden = squash(self.first(x))"]
    assert "logistic" in found["centred = jax.nn.silu(hidden) - jnp.var(hidden, -1, keepdims=True)"]
    assert log.records[log.end].name == "sub"
    assert log.end == len(log.records) - 1


def test_the_values_are_those_of_the_pass() -> None:
    log = recorded("", "loss")
    model = SquashedNet()
    assert log.end is not None
    assert log.records[log.end].value.total == np.float32(loss_fn(model, X))
    given = [record.value.absolute for record in log.records if not record.name]
    expected = float(np.abs(np.asarray(model.first.kernel[...], np.float64)).sum())
    assert any(abs(each - expected) < 1e-6 for each in given)
