"""S4: a loss that a module computes by itself, in a method or in its `forward`, is float32 inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp

X = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32))
SENSITIVE = ("aten.sum", "aten.mean", "aten.exp", "aten.pow", "aten.mse_loss", "aten.binary_cross_entropy_with_logits")


class Operations(TorchDispatchMode):
    """Notes the dtypes that the sensitive operations of a block read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).rpartition(".")[0]
        self.seen.setdefault(name, set()).update(str(a.dtype)[6:] for a in args if isinstance(a, torch.Tensor))
        return function(*args, **(kwargs or {}))


class VAE(nn.Module):
    """The loss of a variational autoencoder, with functions, methods of tensors and operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)
        self.parts: list[Any] = []

    def total(self, x: Any) -> Any:
        mean, log_var = self.encoder(x).chunk(2, -1)
        out = self.decoder(mean)
        square = (out - x).pow(2).sum(-1).mean() + nn.functional.mse_loss(out, x)
        cross = nn.functional.binary_cross_entropy_with_logits(out, x.sigmoid())
        kl = torch.mean(torch.sum(-0.5 * (1 + log_var - mean**2 - log_var.exp()), dim=1))
        self.parts = [part.detach() for part in (mean, log_var, out, square, cross, kl)]
        return square + cross + kl

    def forward(self, x: Any) -> Any:
        return self.total(x)


def by_hand(mean: Any, log_var: Any, out: Any) -> float:
    """The loss in float64 of what the layers gave, but for the addition of two 16-bit numbers, which S4 leaves."""
    one = (1 + log_var).double().numpy()
    mean, log_var, out, x = (part.double().numpy() for part in (mean, log_var, out, X))
    target = 1.0 / (1.0 + np.exp(-x))
    cross = (np.logaddexp(0.0, out) - out * target).mean()
    kl = -0.5 * (one - mean**2 - np.exp(log_var)).sum(-1).mean()
    return float(((out - x) ** 2).sum(-1).mean() + ((out - x) ** 2).mean() + cross + kl)


@pytest.mark.parametrize(("way", "policy"), [("method", "mixed_float16"), ("call", "mixed_bfloat16")])
@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}])
def test_s04_a_loss_of_the_models_own_is_float32(policy: str, way: str, compiled: Any) -> None:
    model, operations = VAE(), Operations()

    def loss_fn(bound: Any, x: Any) -> Any:
        return bound.total(x) if way == "method" else bound(x)

    def watched(bound: Any, x: Any) -> Any:
        with operations:
            return loss_fn(bound, x)

    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1), scaler=polyamp.LossScaler.static(8.0))
    state = polyamp.init(model, recipe)
    _, result = polyamp.train_step(loss_fn if compiled else watched, recipe, compile=compiled)(state, X)
    *given, square, cross, kl = model.parts
    assert [str(part.dtype)[6:] for part in given] == [policy[6:]] * 3, "what the layers gave"
    assert {part.dtype for part in (square, cross, kl)} == {torch.float32}
    assert float(result.loss) == pytest.approx(by_hand(*given), rel=1e-6)
    if not compiled:
        read = {name: dtypes for name, dtypes in operations.seen.items() if name in SENSITIVE}
        assert read == {name: {"float32"} for name in SENSITIVE}
        assert operations.seen["aten.addmm"] == {policy[6:]}
