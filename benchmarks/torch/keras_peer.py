"""The MLP and the block of `workloads` in Keras on its torch backend, with the torch models' weights and Keras's own
mixed precision: a peer of `peers`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.common import workloads
from benchmarks.common.workloads import Workload
from benchmarks.torch import models
from benchmarks.torch.loops import Training, Variant

EPSILON = 1e-5
"""Of torch's LayerNorm; Keras's own default is 1e-3."""


def training(workload: Workload, variant: Variant, batches: Sequence[Any]) -> Training:
    """Keras's guide's custom loop for torch: `optimizer.apply(gradients, trainable_weights)`.

    Raises:
        RuntimeError: Keras was imported with another backend.
    """
    keras: Any = importlib.import_module("keras")
    if keras.config.backend() != "torch":
        raise RuntimeError(f"KERAS_BACKEND is {keras.config.backend()}, and Keras was imported before it could be set.")
    native = models.build(workload)
    policy = workloads.DTYPES[variant.dtype]
    model = _mlp(keras, native, workload, policy) if workload.name == "mlp" else _block(keras, native, workload, policy)
    optimizer = keras.optimizers.AdamW(workloads.LEARNING_RATE, weight_decay=0.01, epsilon=1e-8)  # torch's defaults
    if variant.dtype == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=workloads.INIT_SCALE)
    weights = model.trainable_weights
    optimizer.build(weights)
    ((inputs, targets),) = batches

    def step() -> torch.Tensor:
        loss = models.loss_of(model(inputs, training=True), targets)
        model.zero_grad()
        optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        return loss.detach()

    return Training(step, model)


def _array(parameter: torch.Tensor) -> np.ndarray[Any, Any]:
    return parameter.detach().cpu().numpy()


def _dense(layer: Any, linear: nn.Linear) -> None:
    layer.set_weights([_array(linear.weight).T, _array(linear.bias)])


def _mlp(keras: Any, native: Any, workload: Workload, policy: str) -> Any:
    linears = [layer for layer in native if isinstance(layer, nn.Linear)]
    dense = [keras.layers.Dense(workload.width, "tanh", dtype=policy) for _ in linears[:-1]]
    dense.append(keras.layers.Dense(workload.width, dtype=policy))
    model = keras.Sequential([keras.Input((workload.width,)), *dense])
    for layer, linear in zip(dense, linears, strict=True):
        _dense(layer, linear)
    return model


def _block(keras: Any, native: nn.Module, workload: Workload, policy: str) -> Any:
    layer: Any = native
    width, heads = workload.width, workload.heads
    norms = [keras.layers.LayerNormalization(epsilon=EPSILON, dtype=policy) for _ in range(2)]
    attention = keras.layers.MultiHeadAttention(heads, width // heads, dtype=policy)
    wide = keras.layers.Dense(4 * width, keras.activations.gelu, dtype=policy)
    narrow = keras.layers.Dense(width, dtype=policy)
    x = inputs = keras.Input((workload.length, width))
    x = keras.layers.Add(dtype=policy)([x, attention(normed := norms[0](x), normed)])
    x = keras.layers.Add(dtype=policy)([x, narrow(wide(norms[1](x)))])
    model = keras.Model(inputs, x)

    # Keras takes activation functions as they are, and its GELU is the exact one by default, as torch's is.
    queries = _array(layer.self_attn.in_proj_weight).reshape(3, heads, width // heads, width).transpose(0, 3, 1, 2)
    biases = _array(layer.self_attn.in_proj_bias).reshape(3, heads, width // heads)
    out = layer.self_attn.out_proj
    last = [_array(out.weight).T.reshape(heads, width // heads, width), _array(out.bias)]
    attention.set_weights([part for pair in zip(queries, biases, strict=True) for part in pair] + last)
    _dense(wide, layer.linear1)
    _dense(narrow, layer.linear2)
    for norm, theirs in zip(norms, (layer.norm1, layer.norm2), strict=True):
        norm.set_weights([_array(theirs.weight), _array(theirs.bias)])
    return model
