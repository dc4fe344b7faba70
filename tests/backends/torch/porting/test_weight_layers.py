"""Every layer of torch's in the canonical layout: by its textbook formula, and back bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polyamp.porting.layouts.canonical_model import to_canonical
from polyamp.porting.layouts.layer_kinds import KINDS
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_torch.porting.converter import CONVERTER
from tests.porting.layers import formulas, torch_layers
from tests.porting.layers.cases import CASES, inputs


def refilled(source: nn.Module, target: nn.Module) -> None:
    """Move a model to another one of the same classes by way of the canonical arrays."""
    there = {layer.path: layer for layer in CONVERTER.inventory(source).layers}
    leaves: dict[str, Lazy] = {}
    for layer in CONVERTER.inventory(target).layers:
        form, other = layer.forms[0], there[layer.path]
        arrays = other.forms[0].arrays(other.arrays)
        leaves |= {layer.leaves[name].name: array for name, array in form.leaves(arrays, layer.arrays).items()}
    assert CONVERTER.fill(target, leaves) is target


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(
        torch.equal(mine[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        for name in mine
        if not name.endswith("num_batches_tracked")
    )


def test_every_case_is_built_or_missing_with_a_reason() -> None:
    assert set(torch_layers.BUILD) | set(torch_layers.MISSING) == set(CASES)
    assert not set(torch_layers.BUILD) & set(torch_layers.MISSING)


@pytest.mark.parametrize("case", torch_layers.BUILD)
def test_a_layer_computes_its_formula(case: str) -> None:
    model = torch_layers.BUILD[case]()
    layers = to_canonical(CONVERTER.inventory(model))
    for layer in layers.values():
        row = KINDS[layer.kind]
        assert set(layer.arrays) <= set(row.arrays)
        assert set(row.arrays) - set(layer.arrays) <= set(row.optional)
        assert set(layer.attributes) <= set(row.attributes)
        for name, array in layer.arrays.items():
            assert "..." in row.arrays[name] or array.ndim == len(row.arrays[name])
    expected = formulas.output(case, layers)
    found = torch_layers.run(model, inputs(case))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("case", torch_layers.BUILD)
def test_there_and_back_is_the_same_bits(case: str) -> None:
    source, target = torch_layers.BUILD[case](), torch_layers.BUILD[case]()
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.zero_()
    refilled(source, target)
    assert same_bits(source, target)


EXTRA: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv2d same, even kernel": (lambda: nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(1, 2)), (2, 8, 9, 3)),
    "conv2d reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 6, 6, 3)),
    "conv2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="circular", stride=2), (2, 6, 6, 3)),
    "conv1d replicate, same": (lambda: nn.Conv1d(3, 4, 4, padding="same", padding_mode="replicate"), (2, 9, 3)),
    "conv1d causal": (lambda: nn.Sequential(nn.ZeroPad1d((4, 0)), nn.Conv1d(3, 4, 3, dilation=2)), (2, 9, 3)),
    "transposed, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 3, (2, 3), padding=(1, 2), output_padding=(1, 0), groups=2, dilation=(1, 2)),
        (2, 5, 4, 4),
    ),
    "transposed, more than whole": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=3, output_padding=2), (2, 4, 2)),
    "embedding with padding": (lambda: nn.Embedding(11, 6, padding_idx=3), (2, 4)),
    "layer norm over two axes": (lambda: nn.LayerNorm((3, 6), eps=1e-3), (2, 3, 6)),
    "layer norm without arrays": (lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 3, 6)),
    "rms norm, no epsilon": (lambda: nn.RMSNorm(6), (2, 3, 6)),
    "instance norm with statistics": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        (2, 4, 5, 6),
    ),
    "batch norm, statistics alone": (lambda: nn.BatchNorm2d(6, affine=False, eps=1e-3), (2, 4, 5, 6)),
    "lstm, projected": (lambda: nn.LSTM(3, 5, proj_size=2, batch_first=True), (2, 7, 3)),
    "gru, no bias": (lambda: nn.GRU(3, 5, bias=False, batch_first=True), (2, 7, 3)),
    "rnn, relu": (lambda: nn.RNN(3, 5, nonlinearity="relu", batch_first=True), (2, 4, 3)),
    "prelu, one slope": (lambda: nn.PReLU(), (2, 4, 6)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", EXTRA)
def test_other_options_compute_their_formula(name: str) -> None:
    make, shape = EXTRA[name]
    model = torch_layers._with_random_weights(make, 7)()
    rng = np.random.default_rng(3)
    x = rng.integers(0, 11, shape).astype(np.int32) if len(shape) == 2 else rng.standard_normal(shape, np.float32)
    (layer,) = to_canonical(CONVERTER.inventory(model)).values()
    expected = formulas.one(layer, x)
    found = torch_layers.run(model, x)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
