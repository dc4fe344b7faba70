"""Tests of Keras models on every Keras backend: a process has the one of KERAS_BACKEND (`tests/run.py`)."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest

import polyamp_keras

collect_ignore = [  # what is about one Keras backend alone
    file
    for file, backends in (
        ("test_torch_step.py", ("torch",)),
        ("test_torch_waits.py", ("torch",)),
        ("test_torch_processes.py", ("torch",)),
        ("test_torch_compare.py", ("torch",)),
        ("test_torch_port.py", ("torch",)),
        ("test_backend_curves.py", ("torch",)),
        ("test_jax_compare.py", ("jax",)),
        ("test_jax_explain.py", ("jax",)),
        ("test_jax_loop.py", ("jax",)),
        ("test_jax_port.py", ("jax",)),
        ("test_jax_step.py", ("jax",)),
        ("test_files_of_torch.py", ("jax", "tensorflow")),
        ("test_foreign_layers.py", ("torch", "jax")),
        ("test_early_stopping.py", ("torch", "jax")),
    )
    if keras.config.backend() not in backends
]
IMPORTED_TENSORFLOW = "tensorflow" in sys.modules  # before a test: Keras's own `fit` imports it where it is installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore a warning that Keras causes where it converts a tensor of torch, or a variable, to NumPy."""
    ignored = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
    for item in items:
        if item.path.parent.name == "keras":
            item.add_marker(ignored)


@pytest.fixture
def backend() -> str:
    """The Keras backend of this process."""
    return str(keras.config.backend())


@pytest.fixture
def imported_tensorflow() -> bool:
    """Whether importing polyamp_keras imported TensorFlow."""
    assert polyamp_keras.__all__
    return IMPORTED_TENSORFLOW


@pytest.fixture
def batches() -> tuple[Any, Any]:
    """Four batches of eight rows, of which the second overflows."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    x[8] = np.inf
    return x, np.zeros((32, 3), "float32")


@pytest.fixture
def model() -> Any:
    """A small network with BatchNorm and seeded dropout."""
    seeded = keras.initializers.GlorotUniform(seed=0)  # keras.utils.set_random_seed imports TensorFlow
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "gelu", kernel_initializer=seeded, name="hidden"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(3, kernel_initializer=seeded, name="out"),
        ]
    )
