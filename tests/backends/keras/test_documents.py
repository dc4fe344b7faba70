"""The blocks of docs/guides/keras_backends.md run in order, and the step of this Keras backend that it shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

import polyamp
import polyamp_keras

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "keras_backends.md"


def test_the_blocks_run(model: Any, batches: Any, backend: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    optimizer = polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=64.0))
    optimizer.build(model.trainable_variables)
    parts = [batches[0][:8], batches[0][8:16]]  # the second overflows
    if backend == "torch":
        for x in parts:
            names["torch_step"](model, optimizer, keras.ops.array(x), keras.ops.zeros((8, 3)))
        before = keras.ops.convert_to_numpy(model.get_layer("out").bias.value).copy()
        assert np.isfinite(float(names["train_on_torch"](model, [(parts[0], np.zeros((8, 3), "float32"))])))
        assert (before != keras.ops.convert_to_numpy(model.get_layer("out").bias.value)).any()
    if backend == "jax":
        state = [
            [variable.value for variable in each]
            for each in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
        ]
        for x in parts:
            state = names["jax_step"](model, optimizer, *state, x, np.zeros((8, 3)))
        variables = (*model.trainable_variables, *model.non_trainable_variables, *optimizer.variables)
        for variable, value in zip(variables, [value for each in state for value in each], strict=True):
            variable.assign(value)
    if backend != "tensorflow":
        assert (float(optimizer.dynamic_scale), optimizer.skipped_steps, int(optimizer.iterations)) == (32.0, 1, 1)
        assert all(np.isfinite(keras.ops.convert_to_numpy(variable.value)).all() for variable in model.variables)
