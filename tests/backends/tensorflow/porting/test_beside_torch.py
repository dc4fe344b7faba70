"""A check of Keras convolutions in a process that torch runs in: refused where it would end the process."""

from __future__ import annotations

import sys
import types

import keras
import numpy as np
import pytest

import polyamp
from polyamp.errors import UnsupportedError


def made(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((5, 5, 2)), keras.layers.Conv2D(3, 3)])


def test_the_check_is_refused_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    images = np.ones((2, 5, 5, 2), np.float32)
    source, target = made(0), made(1)
    before = [weight.numpy().copy() for weight in target.weights]
    with pytest.raises(UnsupportedError, match="Set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before"):
        polyamp.port(source, target, check=images)
    for weight, value in zip(target.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert polyamp.port(source, target, check=images)[1].checked is not None


def test_a_comparison_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    with pytest.raises(UnsupportedError, match=r"a process each: polyamp.parity.run\(build="):
        polyamp.compare(made(0), made(1), np.ones((2, 5, 5, 2), np.float32))
