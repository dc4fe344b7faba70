"""Single operations of a torch pass: their order, values, inputs and lines (`observe.operation_recorder`)."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn

import polyamp
from polyamp.parity.trace.operation_log import OperationLog, OperationRecorder, PassLocation
from polyamp_torch.observe.observer import OBSERVER

X = np.random.default_rng(0).standard_normal((4, 3), "f4")


class ScaledNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden = hidden.t().contiguous().t()
        hidden *= 2.0  # in place
        return self.second(torch.tanh(hidden))


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def recorded(path: str, what: str, model: nn.Module | None = None, loss: Any = loss_fn) -> OperationLog:
    recorder = OperationRecorder(PassLocation(path, what))
    state = polyamp.init(model or ScaledNet(), polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1)))
    OBSERVER.record_operations(state, loss, X, recorder)  # type: ignore[attr-defined]
    return recorder.log()


def before(log: OperationLog) -> list[str]:
    """Names of the operations that the end comes from, the last first, by first inputs that are no parameters."""
    assert log.end is not None
    found, number = [], log.end
    while log.records[number].name:
        found.append(log.records[number].name)
        inputs = [each for each in log.records[number].inputs if log.records[each].name]
        number = inputs[0] if inputs else log.records[number].inputs[0]
    return found


def test_operations_stand_in_order_with_their_inputs_and_lines() -> None:
    log = recorded("second", "input")
    assert before(log)[:2] == ["tanh", "mul_"]
    lines, start = inspect.getsourcelines(ScaledNet.forward)
    for record in log.records:
        if record.name in ("mul_", "tanh", "addmm"):
            assert record.place is not None
            assert record.place.file == __file__
            assert record.place.code == lines[record.place.line - start].strip()
    codes = {record.name: record.place.code for record in log.records if record.place is not None}
    assert codes["mul_"] == "hidden *= 2.0  # in place"
    assert codes["tanh"] == "return self.second(torch.tanh(hidden))"
    assert {record.value.dtype for record in log.records} == {"float32"}


def test_the_record_ends_at_its_value_and_at_the_loss() -> None:
    assert before(recorded("first", "output"))[0] == "addmm"
    assert before(recorded("", "loss"))[:2] == ["mean", "pow"]


def test_a_compiled_loss_shows_nothing_and_the_training_is_unchanged() -> None:
    assert recorded("", "loss", loss=torch.compile(loss_fn, backend="eager")).records == []
    torch.manual_seed(0)
    model = ScaledNet()
    held = {name: value.clone() for name, value in model.state_dict().items()}
    recorded("", "loss", model)
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
