"""Test harness of the torch backend: the models of the conformance suite and of the digits demo."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import polyamp
from polyamp.contract.harness import DenseWeights, ObserveCallback
from polyamp.demo import digits
from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.results import LossFunction, StepResult
from polyamp_torch.arrays import dtype_name, from_numpy, to_numpy

Array = np.ndarray[Any, Any]
_DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where models and arrays of the conformance suite lie: torch's default for training."""
_TIMEOUT: Final = datetime.timedelta(minutes=4)
"""Time limit of a training with two replicas; most of the time is two interpreters that import torch."""


class TorchMLP(nn.Module):
    """MLP: dense0 -> [norm0] -> relu -> dense1 -> ..."""

    def __init__(
        self, layers: Sequence[DenseWeights], observe: ObserveCallback | None, *, normalize: bool = False
    ) -> None:
        super().__init__()
        self.depth = len(layers)
        self.observe = observe
        for number, layer in enumerate(layers):
            setattr(self, f"dense{number}", linear_layer(layer.kernel, layer.bias))
        self.norm0 = nn.BatchNorm1d(layers[0].bias.size, eps=1e-5, momentum=0.1) if normalize else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output, shape (batch, out)."""
        for number in range(self.depth):
            x = getattr(self, f"dense{number}")(x)
            if self.observe is not None:
                self.observe(dtype_name(x.dtype))
            if number < self.depth - 1:
                x = functional.relu(self.norm0(x) if self.norm0 is not None and number == 0 else x)
        return x


class TorchGatheredMLP(TorchMLP):
    """MLP whose output is gathered at some rows of the batch."""

    def __init__(self, layers: Sequence[DenseWeights], rows: Array) -> None:
        super().__init__(layers, None)
        self.register_buffer("rows", torch.from_numpy(rows), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output at the rows, shape (reads, out)."""
        return super().forward(x)[self.get_buffer("rows")]


class DropoutMLP(TorchMLP):
    """MLP with dropout: dense -> relu -> dropout with rate 0.5 -> dense."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output, shape (batch, out)."""
        hidden = functional.dropout(functional.relu(self.get_submodule("dense0")(x)))
        out: torch.Tensor = self.get_submodule("dense1")(hidden)
        return out


class TorchConstrainedMLP(TorchMLP):
    """MLP that clips its first kernel before it uses it."""

    def __init__(self, layers: Sequence[DenseWeights], limit: float) -> None:
        super().__init__(layers, None)
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output, shape (batch, out)."""
        first: Any = self.dense0
        with torch.no_grad():
            first.weight.clamp_(-self.limit, self.limit)
        return super().forward(x)


class TorchBranches(TorchMLP):
    """Dense layers in parallel."""

    def forward(self, x: torch.Tensor) -> Any:
        """Return one output per layer."""
        return [getattr(self, f"dense{number}")(x) for number in range(self.depth)]


class ComplexDense(nn.Module):
    """Layer x -> |x @ kernel|² with a complex kernel."""

    def __init__(self, kernel: Array) -> None:
        super().__init__()
        self.kernel = nn.Parameter(_owned_tensor(kernel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the squared magnitudes, shape (batch, out)."""
        return torch.view_as_real(x.to(self.kernel.dtype) @ self.kernel).square().sum(-1)


class TorchDigitsTransformer(nn.Module):
    """Transformer that `polyamp.demo.digits` describes."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        super().__init__()
        for name in digits.DENSE:
            setattr(self, name, linear_layer(weights[f"{name}/kernel"], weights[f"{name}/bias"]))
        for name in digits.NORMS:
            norm = nn.LayerNorm(digits.WIDTH, eps=digits.EPSILON)
            norm.load_state_dict(
                {"weight": _owned_tensor(weights[f"{name}/scale"]), "bias": _owned_tensor(weights[f"{name}/bias"])}
            )
            setattr(self, name, norm)

    def part(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the layer of that name."""
        result: torch.Tensor = self.get_submodule(name)(x)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, 10), of images, shape (batch, 8, 8)."""
        h = self.part("embed", x)
        h = h + self._attention(self.part("norm1", h))
        h = h + self.part("mlp2", functional.relu(self.part("mlp1", self.part("norm2", h))))
        return self.part("head", self.part("norm3", h).flatten(1))

    def _attention(self, h: torch.Tensor) -> torch.Tensor:
        heads, depth = digits.HEADS, digits.WIDTH // digits.HEADS
        split = [self.part(name, h).reshape(*h.shape[:-1], heads, depth) for name in ("query", "key", "value")]
        q, k, v = (part.transpose(1, 2) for part in split)
        weights = torch.softmax((q @ k.transpose(-1, -2)).float() / depth**0.5, dim=-1)
        return self.part("out", (weights @ v).transpose(1, 2).flatten(2))


class TorchHarness:
    """`Harness` for torch."""

    def array(self, value: Array) -> Any:
        return _owned_tensor(np.asarray(value)).to(_DEVICE)

    def float64(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def mlp(self, layers: Sequence[DenseWeights], *, observe: ObserveCallback | None = None) -> nn.Module:
        return TorchMLP(layers, observe).to(_DEVICE)

    def branches(self, layers: Sequence[DenseWeights]) -> nn.Module:
        return TorchBranches(layers, None).to(_DEVICE)

    def normalized_mlp(self, layers: Sequence[DenseWeights]) -> nn.Module:
        return TorchMLP(layers, None, normalize=True).to(_DEVICE)

    def dropout_mlp(self, layers: Sequence[DenseWeights]) -> tuple[nn.Module, dict[str, Any]]:
        return DropoutMLP(layers, None).to(_DEVICE), {}

    def constrained_mlp(self, layers: Sequence[DenseWeights], limit: float) -> nn.Module:
        return TorchConstrainedMLP(layers, limit).to(_DEVICE)

    def digits(self, weights: Mapping[str, Array]) -> nn.Module:
        return TorchDigitsTransformer(weights)

    def weights(self, state: Any) -> list[DenseWeights]:
        parts = [getattr(state.model, f"dense{number}") for number in range(state.model.depth)]
        return [DenseWeights(to_numpy(p.weight.detach().t()), to_numpy(p.bias)) for p in parts]

    def sensitive(self) -> Mapping[str, Mapping[str, Callable[[Any], Any]]]:
        return {
            "exponentials": {"exp": torch.exp, "exp2": torch.exp2},
            "logarithms": {"log": torch.log},
            "powers": {"pow": lambda x: torch.pow(x, 3.0), "rsqrt": torch.rsqrt},
            "sums": {"sum": torch.sum, "mean": torch.mean, "var": lambda x: torch.var(x, -1)},
            "cumulative sums": {"cumsum": lambda x: torch.cumsum(x, -1)},
            "softmax": {
                "softmax": lambda x: torch.softmax(x, -1),
                "log_softmax": lambda x: torch.log_softmax(x, -1),
                "logsumexp": lambda x: torch.logsumexp(x, -1),
            },
            "normalisation": {
                "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
                "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
            },
            "losses": {"mse_loss": lambda x: functional.mse_loss(x, torch.zeros_like(x))},
            "linear algebra": {
                "inv": lambda x: torch.linalg.inv(x[:, :4]),
                "det": lambda x: torch.det(x[:, :4].contiguous()),
                "svdvals": torch.linalg.svdvals,
            },
            "FFT": {"fft": torch.fft.fft, "rfft": torch.fft.rfft},
        }

    def saturating(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "log(p + eps) of sigmoid": lambda x: torch.log(torch.sigmoid(-x) + 1e-6),
            "log(1 - p) of sigmoid": lambda x: torch.log(1 - torch.sigmoid(x)),
            "log of erfc": lambda x: torch.log(torch.erfc(x)),
            "1 - p of sigmoid": lambda x: 1 - torch.sigmoid(x),
        }

    def inner_products(self) -> Mapping[str, Callable[[Any], Any]]:
        return {
            "einsum": lambda x: torch.einsum("bi,bi->b", x, x),
            "vmap of dot": lambda x: torch.vmap(torch.dot)(x, x),
        }

    def matmul(self, left: Any, right: Any) -> Any:
        return left @ right

    def selected(self, values: Any, mask: Any) -> Any:
        return values[mask]

    def outer(self, left: Any, right: Any) -> Any:
        return torch.einsum("i,j->ij", left, right)

    def gathered(self, layers: Sequence[DenseWeights], rows: Array) -> nn.Module:
        return TorchGatheredMLP(layers, rows).to(_DEVICE)

    def unusable(self, kind: str) -> nn.Module:
        if kind == "empty":
            return nn.ReLU()
        if kind == "float16":
            return nn.Linear(2, 2).half()
        module = nn.Module()
        module.register_parameter("weight", nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False))
        return module

    def complex_dense(self, kernel: Array) -> nn.Module:
        return ComplexDense(kernel).to(_DEVICE)

    def replicate(
        self, layers: Sequence[DenseWeights], recipe: Recipe, loss_fn: LossFunction, batches: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, StepResult]]:
        store = _tcp_store(0, leads=True)
        asked = [
            (rank, len(batches), store.port, layers, recipe, loss_fn, list(own)) for rank, own in enumerate(batches)
        ]
        found = []
        with multiprocessing.get_context("spawn").Pool(len(asked)) as pool:
            trained = pool.starmap_async(_train_replica, asked, chunksize=1).get(_TIMEOUT.total_seconds())
        for arrays, result in trained:
            state: Any = polyamp.init(TorchMLP(layers, None), recipe)  # on the CPU, as the replicas were
            state.load(arrays)
            found.append((state, result))
        return found

    def with_head(self, state: Any, head: DenseWeights) -> None:
        setattr(state.model, f"dense{state.model.depth - 1}", linear_layer(head.kernel, head.bias).to(state.device))

    def with_frozen(self, state: Any, numbers: Collection[int]) -> None:
        for number in range(state.model.depth):
            getattr(state.model, f"dense{number}").requires_grad_(number not in numbers)

    def native_optimizer(self, model: Any, learning_rate: float, kind: str = "sgd") -> Any:
        if kind == "halving":
            raise UnsupportedError("torch's schedulers are stepped by the user.")
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=learning_rate)


def _tcp_store(port: int, *, leads: bool) -> Any:
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, and not typed
    return kind("127.0.0.1", port, is_master=leads, wait_for_workers=False, timeout=_TIMEOUT)


def _train_replica(
    rank: int,
    count: int,
    port: int,
    layers: Sequence[DenseWeights],
    recipe: Recipe,
    loss_fn: LossFunction,
    batches: Sequence[Any],
) -> tuple[dict[str, Array], StepResult]:
    """Train one replica in its own process, and return the arrays of its state and its last result."""
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = _tcp_store(port, leads=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_TIMEOUT)
    state: Any = polyamp.init(nn.parallel.DistributedDataParallel(TorchMLP(layers, None)), recipe)
    step = polyamp.train_step(loss_fn, recipe)
    for batch in batches:
        state, result = step(state, batch)
    plain = StepResult(*(None if value is None else to_numpy(value) for value in result))
    arrays = state.export()
    dist.destroy_process_group()
    return arrays, plain


def linear_layer(kernel: Array, bias: Array) -> nn.Linear:
    """Return a linear layer from a kernel of shape (in, out), in the kernel's dtype."""
    weight = _owned_tensor(kernel.T.copy())
    inputs, outputs = kernel.shape
    layer = nn.Linear(inputs, outputs, dtype=weight.dtype)
    layer.load_state_dict({"weight": weight, "bias": _owned_tensor(bias)})
    return layer


def _owned_tensor(value: Array) -> torch.Tensor:
    return from_numpy(np.array(value))
