"""One small classifier, in PyTorch and in flax nnx: what `test_parity.py` proves to be the same.

Each function imports its framework itself, because each is called in a process of its own.
"""

from typing import Any

WIDTH, HIDDEN, CLASSES = 32, 64, 10


def torch_net() -> Any:
    """The classifier in PyTorch."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-6)
            self.hidden = torch.nn.Linear(WIDTH, HIDDEN)
            self.head = torch.nn.Linear(HIDDEN, CLASSES)

        def forward(self, x: Any) -> Any:
            return self.head(torch.nn.functional.gelu(self.hidden(self.norm(x)), approximate="tanh"))

    torch.manual_seed(0)
    return Net()


def jax_net() -> Any:
    """The classifier in flax nnx."""
    import jax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
            self.hidden = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.head(jax.nn.gelu(self.hidden(self.norm(x)), approximate=True))

    return Net(nnx.Rngs(0))
