"""The layers that every framework builds alike, and what they are given: one row a case, framework-free.

A framework's file beside this one (`torch_layers.py`, `keras_layers.py`, `linen_layers.py`, ...) has `BUILD`, a mapping
from a case's name to a function that makes the layer with random weights (biases, scales and running statistics are
random too: a zero hides a mistake), and `run(model, inputs)`, which returns the output. Inputs and outputs are NumPy
arrays with the channels last, whatever the framework has. A case that a framework has no layer for stands in its
`MISSING` with a reason.

`says` is exact, so that all compute the same function: an epsilon of 1e-5 and no dropout unless it says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """One layer.

    Attributes:
        inputs: the shape of what it is given, the batch of 2 first.
        says: what to build.
        tokens: if not 0, the input is int32 below this number.
    """

    inputs: tuple[int, ...]
    says: str
    tokens: int = 0


CASES: Mapping[str, Case] = {
    "dense": Case((2, 5), "5 to 7 features, with bias"),
    "dense_no_bias": Case((2, 5), "5 to 7 features, no bias"),
    "dense_square": Case((2, 6), "6 to 6 features, with bias"),
    "einsum_dense": Case((2, 3, 6), "features 6 to (2, 4) with a bias of (2, 4), flattened to 8 at the output"),
    "einsum_dense_joins": Case((2, 3, 2, 4), "features (2, 4) to 6 with bias: two axes are summed over"),
    "mlp": Case((2, 5), "dense 5 to 8, exact GELU, dense 8 to 3"),
    "conv1d": Case((2, 9, 3), "3 to 4 channels, kernel 3, same"),
    "conv1d_dilated": Case((2, 9, 3), "3 to 4 channels, kernel 3, dilation 2, valid"),
    "conv2d": Case((2, 8, 9, 3), "3 to 4 channels, kernel (3, 2), valid, no bias"),
    "conv2d_square": Case((2, 8, 8, 3), "3 to 3 channels, kernel 3: every axis is as long as the others; same"),
    "conv2d_explicit": Case((2, 8, 8, 3), "3 to 4 channels, kernel 3, stride 2, one zero around the image"),
    "conv2d_same_strided": Case((2, 8, 8, 3), "3 to 4 channels, kernel 3, stride 2, same: the zeros are behind"),
    "conv2d_grouped": Case((2, 8, 8, 4), "4 to 6 channels in 2 groups, kernel 3, valid"),
    "conv2d_depthwise": Case((2, 8, 8, 3), "3 channels, each of which gives 2, kernel 3, valid"),
    "conv2d_separable": Case((2, 8, 8, 3), "depthwise (1 each, no bias) then 1x1 to 5 channels with bias; kernel 3"),
    "conv3d": Case((2, 5, 6, 7, 2), "2 to 3 channels, kernel (2, 3, 2), valid"),
    "conv_transpose1d": Case((2, 5, 3), "3 to 4 channels, kernel 3, stride 2, the whole output: length 11"),
    "conv_transpose2d": Case((2, 5, 4, 3), "3 to 4 channels, kernel 3, stride 2, the whole output: (11, 9)"),
    "conv_transpose2d_square": Case((2, 5, 5, 3), "3 to 3 channels, kernel 3, stride 1, the whole output: (7, 7)"),
    "conv_transpose3d": Case((2, 3, 4, 3, 2), "2 to 3 channels, kernel 2, stride 2, the whole output: (6, 8, 6)"),
    "embedding": Case((2, 4), "11 tokens, 6 features", tokens=11),
    "position": Case((2, 4, 6), "a learned table of (4, 6) is added: a parameter of no layer, (1, 4, 6) if you like"),
    "tied_head": Case((2, 4), "an embedding, 11 tokens, 6 features; logits are its product with itself", tokens=11),
    "layer_norm": Case((2, 3, 6), "over the last axis, scale and bias"),
    "layer_norm_no_bias": Case((2, 3, 6), "over the last axis, scale alone"),
    "rms_norm": Case((2, 3, 6), "over the last axis, scale"),
    "group_norm": Case((2, 4, 5, 6), "6 channels in 2 groups"),
    "instance_norm": Case((2, 4, 5, 6), "6 channels, scale and bias"),
    "batch_norm": Case((2, 4, 5, 6), "6 channels, running statistics used, momentum 0.9 (torch: 0.1)"),
    "lstm": Case((2, 7, 3), "3 features, 5 units, the whole sequence out"),
    "lstm_stacked": Case((2, 7, 3), "two layers of 5 units"),
    "lstm_bidirectional": Case((2, 7, 3), "5 units each way, concatenated, forward first"),
    "gru": Case((2, 7, 3), "3 features, 5 units, reset after the product, as torch"),
    "gru_before": Case((2, 7, 3), "3 features, 5 units, reset before the product"),
    "simple_rnn": Case((2, 7, 3), "3 features, 5 units, tanh"),
    "attention": Case((2, 4, 6), "self-attention, 2 heads of 3, biases everywhere"),
    "attention_no_bias": Case((2, 4, 6), "the same without biases"),
    "attention_packed": Case((2, 4, 6), "by hand, 2 heads: one dense 6 to 18 (queries, keys, values), one 6 to 6"),
    "attention_separate": Case((2, 4, 6), "by hand: three dense 6 to 6 named for queries, keys, values; one 6 to 6"),
    "attention_grouped": Case((2, 4, 8), "self-attention, 4 heads of 2 for queries, 2 for keys and values, no biases"),
    "prelu": Case((2, 4, 6), "one slope for each of 6 channels"),
    "scalar": Case((2, 6), "times one learned number: a parameter of no layer, shape () or (1,)"),
    "class_token": Case((2, 4, 6), "a learned row of (1, 1, 6) is put before the sequence"),
    "flatten": Case((2, 6, 5, 3), "conv 3 to 4 channels, kernel 3, valid; relu; flatten; dense 48 to 7"),
}


def inputs(name: str) -> Array:
    """What the layer of a case is given."""
    case = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    if case.tokens:
        return rng.integers(0, case.tokens, case.inputs).astype(np.int32)
    return rng.standard_normal(case.inputs).astype(np.float32)
