"""The copy that is trained, and the block without dropout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch.observe.observer import OBSERVER


class Tied(nn.Module):
    """A model with what a copy may lose: a shared parameter, a frozen one, buffers, an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.norm.weight.no_decay = True  # type: ignore[attr-defined]  # as libraries mark parameters
        self.again = nn.Parameter(self.head.weight.data)
        self.norm.eval()

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.embed(x)))


@pytest.mark.parametrize("wide", [False, True])
def test_a_copy_has_what_the_model_has(wide: bool) -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with OBSERVER.model_copy(model, wide=wide) as twin:
        assert list(twin.state_dict()) == list(before)
        dtypes = {name: value.dtype for name, value in twin.state_dict().items()}
        assert dtypes["norm.num_batches_tracked"] == torch.int64
        assert dtypes["norm.running_mean"] == (torch.float64 if wide else torch.float32)
        assert twin.head.weight is twin.embed.weight
        assert twin.again.data_ptr() == twin.head.weight.data_ptr()
        assert (twin.training, twin.norm.training, twin.norm.bias.requires_grad) == (True, False, False)
        assert twin.norm.weight.no_decay is True
        for value in twin.state_dict().values():
            value.add_(1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_dropout_passes_on_what_it_is_given_and_only_in_the_block() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.LSTM(64, 8, 2, dropout=0.5))
    x = torch.ones(3, 4)
    with OBSERVER.disable_dropout(model, None):
        inside = [model(x)[0].detach().numpy() for _ in range(2)]
    quiet = model.eval()(x)[0].detach().numpy()
    assert np.array_equal(inside[0], quiet)
    assert np.array_equal(inside[1], quiet)
    model.train()
    assert not torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_packed_sequences_drop_nothing(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(4, 8, 2, dropout=0.5)
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    with OBSERVER.disable_dropout(model, None):
        inside = model(x)[0].data
    assert torch.equal(inside, model.eval()(x)[0].data)


def test_a_step_trains_without_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 1))
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    step = polyamp.train_step(lambda model, batch: model(batch).float().sum(), recipe)
    with OBSERVER.model_copy(model) as twin, OBSERVER.disable_dropout(twin, None):
        state, _ = step(polyamp.init(twin, recipe), np.ones((2, 4), "f4"))
        moved = (twin[1].weight - model[1].weight).detach().numpy()
    assert np.allclose(moved, -0.1 * 2.0)  # every input arrived
    assert int(state.step) == 1


def test_no_model_is_refused() -> None:
    said = r"a model of torch's is an nn\.Module\. Received: a function"
    with pytest.raises(polyamp.ModelError, match=said), OBSERVER.model_copy(lambda x: x):
        pass


def test_the_device_is_the_models_own() -> None:
    assert OBSERVER.device(nn.Linear(2, 2)) == "cpu"
