"""The four workloads that every framework trains, as sizes and data: no framework is imported here.

    mlp      100 Linear(32) layers with biases, tanh between them: 200 small tensors, so overhead is what is seen
    block    one pre-norm transformer encoder layer of width 512 without dropout
    gpt      a small GPT: token and position embeddings, causal blocks, a head of its own
    resnet   a ResNet for small images: 3x3 convolutions with BatchNorm and residual sums in three stages

Each framework's `*_workloads.py` builds the models in its own idiom (channels last in JAX and Keras, first in torch),
from these sizes, trains them by hand and with polyamp, and compares.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Workload(NamedTuple):
    """Sizes of a workload; what does not apply is 0.

    Attributes:
        name: as above.
        batch: examples in a batch.
        width: features of a layer; of the first stage of a ResNet.
        layers: Linear layers, transformer blocks, or residual blocks in each stage.
        heads: attention heads.
        length: tokens in a sequence; height and width of an image.
        vocabulary: tokens, or classes of images.
    """

    name: str
    batch: int
    width: int
    layers: int
    heads: int = 0
    length: int = 0
    vocabulary: int = 0


MLP: Final = Workload("mlp", batch=32, width=32, layers=100)
BLOCK: Final = Workload("block", batch=4, width=512, layers=1, heads=8, length=128)
GPT: Final = Workload("gpt", batch=4, width=128, layers=4, heads=4, length=64, vocabulary=512)
RESNET: Final = Workload("resnet", batch=8, width=16, layers=2, length=32, vocabulary=10)
ALL: Final = (MLP, BLOCK, GPT, RESNET)

DTYPES: Final = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
"""Compute dtype -> polyamp's (and Keras's) name of the policy."""
CLIP_NORM: Final = 1.0
ACCUMULATE: Final = (1, 4, 16)
INIT_SCALE: Final = 2.0**10
LEARNING_RATE: Final = 1e-3
CHECKED_STEPS: Final = 5
"""Steps over which both sides' losses are compared before they are timed."""
TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest relative distance of those losses that still counts as the same numerics."""


def data(workload: Workload, *, seed: int = 0) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """One batch.

    Returns:
        mlp: float32 (batch, width) and targets alike. block: float32 (batch, length, width) and targets alike.
        gpt: int32 tokens (batch, length), and the same moved on by one. resnet: float32 images
        (batch, length, length, 3) and int32 classes (batch,).
    """
    rng = np.random.default_rng(seed)
    if workload.name == "gpt":
        tokens = rng.integers(workload.vocabulary, size=(workload.batch, workload.length + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    if workload.name == "resnet":
        images = rng.standard_normal((workload.batch, workload.length, workload.length, 3), np.float32)
        return images, rng.integers(workload.vocabulary, size=workload.batch, dtype=np.int32)
    shape = (workload.batch, *([workload.length] if workload.length else []), workload.width)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
