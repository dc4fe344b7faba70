"""One of the processes of `test_torch_processes.py`: `python torch_process.py RANK FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

import polyamp
import polyamp_keras
from polyamp.errors import UnsupportedError

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))


def network() -> Any:
    seeds = [keras.initializers.GlorotUniform(seed) for seed in range(2)]
    layers = [
        keras.layers.Dense(8, "gelu", kernel_initializer=seeds[0]),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3, kernel_initializer=seeds[1]),
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def batch(step: int, rank: int) -> Any:
    """Rows of a process; those of the second process overflow in the second step."""
    x = np.random.default_rng((step, rank)).normal(size=(8, 4)).astype("float32")
    if (step, rank) == (1, 1):
        x[0] = np.inf
    return torch.from_numpy(x)


def main(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = network()
    refusals = []
    for call in (
        lambda: polyamp_keras.compile(model, RECIPE, loss="mse"),
        lambda: model.compile(polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse"),
    ):
        try:
            call()
            polyamp_keras.guard(model)
        except UnsupportedError as error:
            refusals.append(str(error))

    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(0.1), polyamp.LossScaler(init_scale=64.0))
    for step in range(3):
        with optimizer.keep_statistics(model):
            loss = keras.ops.mean(keras.ops.square(parallel(batch(step, rank), training=True)))
            model.zero_grad()
            optimizer.scale_loss(loss).backward()
            variables = model.trainable_variables
            optimizer.apply([variable.value.grad for variable in variables], variables)
    found = {f"variable_{n}": keras.ops.convert_to_numpy(each.value) for n, each in enumerate(model.variables)}
    numbers = [float(optimizer.dynamic_scale), optimizer.skipped_steps, int(optimizer.iterations)]
    trained = [variable.trainable for variable in model.variables]
    np.savez(folder / f"{rank}.npz", refusals=np.array(refusals), numbers=np.array(numbers), trained=trained, **found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
