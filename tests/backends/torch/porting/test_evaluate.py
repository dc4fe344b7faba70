"""`evaluate`: one pass in float32 whose model is afterwards as before, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import PortError
from polyamp.porting.check import Batch
from polyamp.porting.layouts.converter import Evaluation
from polyamp_torch.porting.converter import CONVERTER

Array = np.ndarray[Any, Any]


def ones(outputs: Sequence[Array]) -> list[Array]:
    return [np.ones_like(output) for output in outputs]


def evaluate(model: Any, batch: Any) -> Evaluation:
    return CONVERTER.evaluate(model, batch, ones)


class Model(nn.Module):
    """With everything that a pass could change: statistics, dropout, attributes, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, max_norm=0.5)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head.weight = self.embedding.weight
        self.table = torch.ones(4).bfloat16() * 2  # no buffer
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        hidden = self.rnn(self.embedding(tokens))[0][:, -1] * self.table
        hidden = self.act(self.norm(self.dropout(hidden)))
        return {"logits": self.head(hidden), "hidden": (hidden, None), "argmax": hidden.argmax(-1)}


TOKENS = np.array([[1, 2, 3], [4, 5, 6]], np.int32)


def test_the_model_is_as_before() -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.norm.eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    seen: list[torch.dtype] = []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = [parameter._version for parameter in model.parameters()]
    hooks = {name: len(part._forward_hooks) for name, part in model.named_modules()}
    flags = {name: part.training for name, part in model.named_modules()}
    random = torch.get_rng_state()
    evaluate(model, TOKENS)
    assert seen == [torch.float32]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [parameter._version for parameter in model.parameters()] == versions
    assert {name: len(part._forward_hooks) for name, part in model.named_modules()} == hooks
    assert {name: part.training for name, part in model.named_modules()} == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert model.calls == 0
    assert bool((model.head.weight.grad == 1).all())
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "embedding" not in name)


def test_outputs_gradients_and_modules() -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    model.embedding.weight.requires_grad_(requires_grad=False)  # frozen in training; compared all the same
    wide = Model()
    wide.load_state_dict(model.state_dict())
    wide.eval()
    wide.table = wide.table.float()
    expected = wide(torch.from_numpy(TOKENS).long())
    found = evaluate(model, (TOKENS,))
    assert [output.dtype for output in found.outputs] == [np.int64, np.float32, np.float32]  # argmax, hidden, logits
    assert np.array_equal(found.outputs[2], expected["logits"].detach().numpy())
    (expected["logits"].sum() + expected["hidden"][0].sum()).backward()
    assert set(found.gradients) == {
        *("embedding/weight", "unused", "norm/weight", "norm/bias"),
        *(f"rnn/{kind}_{way}_l0" for kind in ("weight", "bias") for way in ("ih", "hh")),
    }
    for name, gradient in found.gradients.items():
        reference = wide.get_parameter(name.replace("/", ".")).grad
        assert gradient.dtype == np.float32
        assert np.array_equal(gradient, np.zeros(2) if reference is None else reference.numpy())
    assert list(found.modules) == ["embedding", "rnn", "dropout", "norm", "act", "head"]
    assert found.modules["rnn"].shape == (2, 3, 4)
    assert found.modules["norm"].min() < 0  # before the ReLU that writes in its place


def test_inside_of_wrappers_and_of_a_policy() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    batch = np.ones((2, 3), np.float64)
    expected = evaluate(plain, batch)
    wrapped = nn.DataParallel(nn.Sequential(plain[0], nn.DataParallel(plain[1])))
    bound = polyamp.Policy("mixed_bfloat16").autocast(plain)
    for model, before in ((wrapped, "module/"), (bound, "")):
        found = evaluate(model, {"input": batch})
        assert np.array_equal(found.outputs[0], expected.outputs[0])
        assert [name.removeprefix(before).replace("1/module/", "1/") for name in found.gradients] == list(
            expected.gradients
        )
        assert list(found.modules) == list(expected.modules) == ["0", "1/0", "1/1", "1"]
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert np.array_equal(evaluate(plain, batch).outputs[0], expected.outputs[0])


def test_what_cannot_be_evaluated_is_said() -> None:
    class Held(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

    with pytest.raises(PortError, match="runs a copy of the model, and it cannot be copied: TypeError: cannot pickle"):
        evaluate(nn.Sequential(Held(2, 2)), np.ones((1, 2)))

    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return None

    with pytest.raises(PortError, match=r"the model's output has no tensor to compare\. Received: None"):
        evaluate(Silent(2, 2), np.ones((1, 2)))


class TiedModel(nn.Module):
    def __init__(self, *, tied: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.factor = factor
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Any) -> Any:
        table = self.table(tokens)
        table = table.detach() + self.factor * (table - table.detach())  # the same values, another gradient
        return self.head(torch.tanh(self.body(table)))


@pytest.mark.parametrize("tied", [(True, False), (False, True), (True, True)])
def test_s30_the_gradient_of_a_tied_array_is_the_sum_of_those_of_two(tied: tuple[bool, bool]) -> None:
    tokens = np.random.default_rng(0).integers(0, 7, (3, 5))
    source = TiedModel(tied=tied[0])
    source.head.weight.data = source.table.weight.data.clone() if not tied[0] else source.table.weight.data
    _, report = polyamp.port(source, TiedModel(tied=tied[1]), check=tokens)
    assert report.checked is not None
    assert set(report.checked.gradients) == {"table/table", "body/kernel", "body/bias"}
    assert max(report.checked.gradients.values()) < 1e-5
    with pytest.raises(PortError, match="the gradient of table/table differs"):
        polyamp.port(source, TiedModel(tied=tied[1], factor=0.5), check=tokens)


def test_a_check_takes_tensors_of_any_dtype_for_a_target_of_another_framework() -> None:
    """As NumPy arrays: JAX's embeddings refuse a tensor of integers."""
    given = Batch.of(({"ids": torch.tensor([[1, 2]])}, torch.ones(2, requires_grad=True)))
    ids, weights = given.source[0]["ids"], given.source[1]
    assert (type(ids), ids.dtype, ids.tolist()) == (np.ndarray, np.int64, [[1, 2]])
    assert (type(weights), weights.dtype) == (np.ndarray, np.float32)
    assert given.target is None
    both = Batch.of(Batch(np.ones(2), torch.ones(2, dtype=torch.bool), outputs=1e-3))
    assert (both.target.dtype, both.outputs) == (np.bool_, 1e-3)
