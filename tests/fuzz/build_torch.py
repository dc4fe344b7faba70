"""A description as a torch module. Called by the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import polyamp
from tests.fuzz.grammar import CLAMP, LENGTH, PRODUCTS, Description, walk
from tests.fuzz.problem import Weights, wide, widths

ACTIVATIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
    "hand_softmax": lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    "log_gate": lambda x: torch.log(1.0 - torch.sigmoid(x * 3.0) + 1e-3),
    "inner": lambda x: x * torch.einsum("...d,...d->...", x, x).unsqueeze(-1) * 0.1,
    "cumsum": lambda x: torch.cumsum(x, -1) * 0.3,
    "logsumexp": lambda x: x - torch.logsumexp(x, -1, keepdim=True),
    "hand_rms": lambda x: x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-3),
    "square": lambda x: torch.pow(x, 2.0) * 0.3,
}


def build(description: Description, weights: Weights) -> nn.Module:
    """The module with these weights."""
    with _default_dtype(torch.float64 if wide(description) else torch.float32):
        return Net(description, weights)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def running(state: Any, description: Description, updates: int) -> dict[str, Any]:
    """Running statistics by name. torch's running variance is of the unbiased variance; the others' is not.

    With r = 0.9^k + (what was added in k passes), what was added differs by the factor n / (n - 1).
    """
    found = {}
    for layer in walk(description["layers"]):
        if layer["op"] == "batch_norm":
            norm = state.model.get_submodule(layer["name"])
            found[f"{layer['name']}/mean"] = norm.running_mean.numpy().copy()
            start, n = 0.9**updates, norm.rows
            found[f"{layer['name']}/variance"] = (norm.running_var.numpy() - start) * (n - 1) / n + start
    return found


def parameters(state: Any, description: Description) -> Weights:
    """The parameters by the description's names, in its layout."""
    found: Weights = {}
    for name, value in state.model.named_parameters():
        layer, _, array = name.rpartition(".")
        canonical, back = _CANONICAL[type(state.model.get_submodule(layer))]
        for key, part in back(canonical.get(array, array), value.detach().numpy()).items():
            path = layer.replace(".", "/")
            found[path if "/" in path else f"{path}/{key}"] = part
    return found


def averages(state: Any, description: Description) -> Weights:
    """The averages of the parameters, likewise."""
    with polyamp.averaged(state):
        return {name: np.array(value) for name, value in parameters(state, description).items()}


class Net(nn.Module):
    """Layers by name; `forward` follows the description."""

    def __init__(self, description: Description, weights: Weights) -> None:
        super().__init__()
        self.description = description
        self.calls = 0
        self.generator = torch.Generator().manual_seed(description.get("jiggled", 0))
        given = widths(description)
        for layer in walk(description["layers"]):
            if "name" in layer:
                own = {k.partition("/")[2]: torch.from_numpy(v.copy()) for k, v in weights.items()
                       if k.startswith(f"{layer['name']}/")}  # fmt: skip
                self.add_module(layer["name"], _made(layer, given[layer["name"]], own, description["kind"]))
                if layer.get("clamp"):
                    self.get_submodule(layer["name"]).clamp = CLAMP
        for head in description["heads"]:
            if "tied" not in head:
                own = {k.partition("/")[2]: torch.from_numpy(v.copy()) for k, v in weights.items()
                       if k.startswith(f"{head['name']}/")}  # fmt: skip
                self.add_module(head["name"], _dense(own))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One output per head."""
        if self.description.get("python"):
            self.calls += 1
        h = self._through(self.description["layers"], x)
        return tuple(self._head(head, h) for head in self.description["heads"])

    def _through(self, layers: list[Any], h: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            op = layer["op"]
            if op in ACTIVATIONS:
                h = ACTIVATIONS[op](h)
            elif op == "residual":
                h = h + self._through(layer["layers"], h)
            elif op == "region":
                with torch.autocast("cpu", enabled=False):
                    h = self._through(layer["layers"], h.float())
            elif op == "tied":
                h = self.get_submodule(layer["of"])(h)
            elif op == "detached":
                h = h + self.get_submodule(layer["name"])(h).detach()
            elif op == "zeroed":
                h = h + self.get_submodule(layer["name"])(h) * 0.0
            elif op != "unused":
                h = self.get_submodule(layer["name"])(h)
            h = self._cut(self._rounded(h), op)
        return h

    def _rounded(self, h: torch.Tensor) -> torch.Tensor:
        """What `judge` asks for: every value moved up or down by one digit, as if it had been rounded."""
        digit = self.description.get("rounding", 0.0)
        if not digit or not h.is_floating_point():
            return h
        return h + h.detach() * digit * (torch.randint(0, 2, h.shape, generator=self.generator) * 2 - 1)

    def _cut(self, h: torch.Tensor, op: str) -> torch.Tensor:
        """Likewise: a layer's result where every product is cut off, of which attention has three in a row."""
        cut = self.description.get("toward_zero", 0.0)
        if not cut or op not in PRODUCTS or op == "conv":  # which TensorFlow rounds
            return h
        return h * (1.0 - cut) ** (3 if op == "attention" else 1)

    def _head(self, head: dict[str, Any], h: torch.Tensor) -> torch.Tensor:
        if head["pool"] == "mean":
            h = h.mean(tuple(range(1, h.ndim - 1)))
        elif head["pool"] == "flatten":
            h = h.flatten(1)
        elif head["pool"] == "last":
            h = h[:, -1]
        if "tied" in head:
            table: Any = self.get_submodule(head["tied"])
            if self.description["policy"].get("mode") == "cast":  # where an override may keep the table in float32
                h = h.to(torch.promote_types(h.dtype, table.weight.dtype))
            return functional.linear(h, table.weight)
        result: torch.Tensor = self.get_submodule(head["name"])(h)
        return self._cut(result, "dense")


class Dense(nn.Linear):
    """`nn.Linear`, so that its parameters are found by its class; it may keep its kernel within bounds."""

    clamp: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the kernel that was written."""
        if self.clamp is not None:
            with torch.no_grad():
                self.weight.clamp_(-self.clamp, self.clamp)
        return super().forward(x)


class Conv(nn.Conv2d):
    """A convolution of (batch, height, width, channels)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same layout again."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class GroupNorm(nn.GroupNorm):
    """The normalisation of (batch, height, width, channels)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same layout again."""
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class BatchNorm(nn.BatchNorm1d):
    """The normalisation over all axes but the last."""

    rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape again."""
        self.rows = x.numel() // x.shape[-1]
        return super().forward(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class Positions(nn.Module):
    """Adds a learned table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + table."""
        return x + self.table


class Scale(nn.Module):
    """Multiplies by a learned vector."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x * scale."""
        return x * self.scale


class Attention(nn.Module):
    """Self-attention without biases, by torch's function or by hand."""

    def __init__(self, layer: dict[str, Any], own: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        for part in ("query", "key", "value", "out"):
            self.add_module(part, _dense({"kernel": own[part]}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) in and out."""
        heads = self.layer["heads"]
        q, k, v = (
            self.get_submodule(part)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in ("query", "key", "value")
        )
        if self.layer["native"]:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.layer["causal"])
        else:
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if self.layer["causal"]:
                hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -1e4)
            mixed = torch.softmax(scores, -1) @ v
        result: torch.Tensor = self.get_submodule("out")(mixed.transpose(1, 2).flatten(2))
        return result


class Rnn(nn.Module):
    """h <- tanh(x @ input + h @ recurrent + bias), written out."""

    def __init__(self, own: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.input = nn.Parameter(own["input"])
        self.recurrent = nn.Parameter(own["recurrent"])
        self.bias = nn.Parameter(own["bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) in and out."""
        h = x.new_zeros(x.shape[0], self.bias.shape[0])
        found = []
        for step in range(x.shape[1]):
            h = torch.tanh(x[:, step] @ self.input + h @ self.recurrent + self.bias)
            found.append(h)
        return torch.stack(found, 1)


class Gru(nn.GRU):
    """torch's GRU without biases; gates in the order r, z, n."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # one input, one output
        """(batch, length, width) in and out."""
        result: torch.Tensor = super().forward(x)[0]
        return result


def _dense(own: dict[str, torch.Tensor]) -> Dense:
    made = Dense(*own["kernel"].shape, bias="bias" in own)
    return _loaded(made, weight=own["kernel"].T, bias=own.get("bias"))


def _loaded(module: Any, **values: torch.Tensor | None) -> Any:
    present = {name: value.contiguous() for name, value in values.items() if value is not None}
    module.load_state_dict({**module.state_dict(), **present})
    return module


def _made(layer: dict[str, Any], n: int, own: dict[str, torch.Tensor], kind: str) -> nn.Module:
    op = layer["op"]
    if op in ("dense", "unused", "detached", "zeroed"):
        return _dense(own)
    if op == "conv":
        made: Any = Conv(n, layer["width"], 3, padding=1, bias="bias" in own)
        return _loaded(made, weight=own["kernel"].permute(3, 2, 0, 1), bias=own.get("bias"))
    if op == "embedding":
        return _loaded(nn.Embedding(*own["table"].shape), weight=own["table"])
    if op == "layer_norm":
        return _loaded(nn.LayerNorm(n, eps=1e-5), weight=own["scale"], bias=own["bias"])
    if op == "rms_norm":
        return _loaded(nn.RMSNorm(n, eps=1e-5), weight=own["scale"])
    if op == "group_norm":
        return _loaded(GroupNorm(2, n, eps=1e-5), weight=own["scale"], bias=own["bias"])
    if op == "batch_norm":
        return _loaded(BatchNorm(n, eps=1e-5, momentum=0.1), weight=own["scale"], bias=own["bias"])
    if op == "gru":
        made = Gru(n, layer["width"], bias=False, batch_first=True)
        return _loaded(made, weight_ih_l0=own["input"].T, weight_hh_l0=own["recurrent"].T)
    if op == "attention":
        return Attention(layer, own)
    return {"positions": Positions, "scale": lambda t: Scale(t), "rnn": lambda t: Rnn(t)}[op](
        own if op == "rnn" else own["table" if op == "positions" else "scale"]
    )


def _as_is(name: str, value: Any) -> Weights:
    return {name: value}


def _kernel(name: str, value: Any) -> Weights:
    return {name: value.T if name == "kernel" else value}


_NORM = ({"weight": "scale"}, _as_is)
_CANONICAL: dict[type, tuple[dict[str, str], Any]] = {
    Dense: ({"weight": "kernel"}, _kernel),
    Conv: ({"weight": "kernel"}, lambda n, v: {n: np.transpose(v, (2, 3, 1, 0)) if n == "kernel" else v}),
    nn.Embedding: ({"weight": "table"}, _as_is),
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    GroupNorm: _NORM,
    BatchNorm: _NORM,
    Positions: ({}, _as_is),
    Scale: ({}, _as_is),
    Rnn: ({}, _as_is),
    Gru: ({"weight_ih_l0": "input", "weight_hh_l0": "recurrent"}, lambda n, v: {n: v.T}),
}
