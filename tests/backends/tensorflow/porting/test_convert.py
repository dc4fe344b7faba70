"""`polyamp port` with Keras's files as sources and targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from typer.testing import CliRunner

from polyamp.cli.app import app

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own save

BUILDER = """
import keras
def build(seed=1):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((3,)), layers.Dense(5), layers.LayerNormalization(), layers.Dense(2)])
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "keras_nets.py").write_text(BUILDER)
    import keras_nets  # type: ignore[import-not-found]

    model = keras_nets.build(0)
    model.save("source.keras")
    keras_nets.build(2).save_weights("other.weights.h5")
    return model


def run(*arguments: str) -> None:
    result = CliRunner().invoke(app, ["port", *arguments])
    assert result.exit_code == 0, result.output


def same(model: keras.Model, other: keras.Model) -> bool:
    return [each.tolist() for each in model.get_weights()] == [each.tolist() for each in other.get_weights()]


def test_a_keras_file_goes_through_the_canonical_layout_and_back(source: Any) -> None:
    import keras_nets

    run("source.keras", "canonical.safetensors")
    run("canonical.safetensors", "new.weights.h5", "--like", "other.weights.h5")
    model = keras_nets.build(4)
    model.load_weights("new.weights.h5")
    assert same(model, source)
    run("canonical.safetensors", "built.keras", "--into", "keras_nets:build")
    assert same(keras.saving.load_model("built.keras"), source)
    run("source.keras", "built.weights.h5", "--into", "keras_nets:build")
    model = keras_nets.build(5)
    model.load_weights("built.weights.h5")
    assert same(model, source)
