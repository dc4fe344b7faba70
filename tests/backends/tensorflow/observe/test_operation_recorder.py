"""Single operations of a TensorFlow pass: their order, values and lines (`observe.operation_recorder`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import polyamp
from polyamp.parity.trace.operation_log import OperationLog, OperationRecorder, PassLocation
from polyamp_tensorflow.observe.observer import OBSERVER

X = np.random.default_rng(0).standard_normal((4, 3)).astype("f4")


class CentredNet(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="second")

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        hidden = hidden * keras.ops.arange(3, dtype="float32")
        return self.second(hidden - keras.ops.mean(hidden, -1, keepdims=True))


def loss_fn(model: Any, batch: Any) -> Any:
    return keras.ops.mean(keras.ops.square(model(batch)))


def recorded(path: str, what: str) -> OperationLog:
    recorder = OperationRecorder(PassLocation(path, what))
    model = CentredNet()
    model(X)
    state = polyamp.init(model, polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    OBSERVER.record_operations(state, loss_fn, X, recorder)  # type: ignore[attr-defined]
    return recorder.log()


def test_operations_stand_in_order_with_the_lines_of_the_calls_that_the_user_wrote() -> None:
    log = recorded("second", "input")
    assert log.end is not None
    names: dict[str, list[str]] = {}
    for record in log.records:
        if record.place is not None:
            assert record.place.file == __file__
            names.setdefault(record.place.code, []).append(record.name)
    assert names["hidden = self.first(x)"][0] == "MatMul"
    assert names['hidden = hidden * keras.ops.arange(3, dtype="float32")'][-1] == "Mul"
    assert log.records[log.end].name == "Sub"
    assert "hidden - keras.ops.mean" in log.records[log.end].place.code  # type: ignore[union-attr]
    product = next(record for record in log.records if record.name == "Mul")
    table = [log.records[number] for number in product.inputs if log.records[number].value.size == 3]
    assert [(each.name, each.inputs) for each in table] == [("Range", ())]


def test_the_record_ends_at_the_loss() -> None:
    log = recorded("", "loss")
    assert log.end is not None
    assert log.records[log.end].name == "Mean"
    kernel = next(record for record in log.records if not record.name and record.value.size == 9)
    assert kernel.value.dtype == "float32"
