"""`train_step(compile=True)` with attention that has dropout, in 16 bits, on which torch's own transform fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import polyamp


class Attends(nn.Module):
    """`scaled_dot_product_attention` of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, 8)."""
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class MultiHead(nn.Module):
    """torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, 8)."""
        out: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean square of the output."""
    out: torch.Tensor = model(x)
    return out.square().mean()


NATIVE = polyamp.Policy("mixed_float16", op_list="native")


@pytest.mark.parametrize(
    ("kind", "policy"),
    [(Attends, "mixed_bfloat16"), (Attends, "mixed_float16"), (Attends, NATIVE), (MultiHead, "mixed_bfloat16")],
    ids=["bfloat16", "float16", "native", "module"],
)
def test_attention_with_dropout_compiles_and_equals_the_eager_step(kind: Any, policy: Any) -> None:
    """The two draw the same masks under this compiler, so that losses and gradients can be compared."""
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    found = []
    for how in (False, {"backend": "aot_eager"}):
        torch.manual_seed(0)
        model = kind()
        state = polyamp.init(model, recipe)
        step = polyamp.train_step(loss_fn, recipe, compile=how)
        torch.manual_seed(1)
        x = torch.randn(2, 5, 8)
        results = [step(state, x)[1] for _ in range(2)]
        assert not any(bool(result.skipped) for result in results)
        found.append([(float(result.loss), float(result.grad_norm)) for result in results])
    assert found[1] == [pytest.approx(pair, rel=1e-4) for pair in found[0]]
    assert found[0][0][0] != found[0][1][0]
