""".keras and .weights.h5 as sources and targets: what is in them, and what is refused before anything is changed."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
from keras import layers

import polyamp
from polyamp.errors import PortError
from polyamp.porting.layouts.converter import FileConverter
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_keras.porting.converter import CONVERTER, KerasConverter

FILES = KerasConverter()
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, in save()


def network(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    given = keras.Input((6, 4))
    hidden = keras.Sequential(
        [layers.Dense(4, activation="gelu"), layers.LayerNormalization(epsilon=1e-5)], name="mlp"
    )(given)
    hidden = layers.Bidirectional(layers.GRU(3, return_sequences=True))(hidden)
    hidden = layers.Dropout(0.1)(layers.MultiHeadAttention(2, 3)(hidden, hidden))
    hidden = layers.BatchNormalization()(hidden)
    cells = layers.RNN([layers.LSTMCell(3), layers.LSTMCell(2)], return_sequences=True)(hidden)
    hidden = layers.Dense(3, dtype="bfloat16", name="narrow")(layers.Dense(5)(cells))
    return keras.Model(given, layers.Conv1D(2, 3, dtype="float32")(hidden))


@pytest.fixture(scope="module")
def another() -> tuple[Any, list[Any]]:
    """The network from another seed, and its weights."""
    model = network(1)
    return model, values(model)


@pytest.fixture
def target(another: tuple[Any, list[Any]]) -> Any:
    """The network from another seed, as it was made."""
    model, initial = another
    model.set_weights(initial)
    return model


def values(model: Any) -> list[Any]:
    return [np.array(weight.value.numpy()) for weight in model.weights]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model with its optimizer, and a folder with model.keras and model.weights.h5."""
    folder = tmp_path_factory.mktemp("keras")
    model = network()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(3)
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    return model, folder


def test_the_converter_reads_files() -> None:
    assert isinstance(CONVERTER, FileConverter)


def test_a_keras_file_lists_what_its_model_lists(saved: Any) -> None:
    model, folder = saved
    ours, theirs = CONVERTER.inventory(model), FILES.open_file(folder / "model.keras")
    assert [layer.path for layer in theirs.layers] == [layer.path for layer in ours.layers]
    assert theirs.left.keys() == ours.left.keys()
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert other.forms == one.forms
        for name, leaf in one.leaves.items():
            again = other.leaves[name]
            assert (again.name, again.trainable, again.tied) == (leaf.name, leaf.trainable, leaf.tied)
            np.testing.assert_array_equal(again.array.read(), leaf.array.read())


def test_a_weights_file_is_known_by_names_and_shapes(saved: Any) -> None:
    _, folder = saved
    found = {layer.path: layer for layer in FILES.open_file(folder / "model.weights.h5").layers}
    kinds = {path: [form.kind for form in layer.forms] for path, layer in found.items()}
    assert kinds == {
        "mlp/dense": ["dense"],
        "mlp/layer_normalization": ["layer_norm"],
        "bidirectional/forward": ["gru"],
        "bidirectional/backward": ["gru"],
        "multi_head_attention": ["attention"],
        "batch_normalization": ["batch_norm"],
        "rnn/layer_0": ["lstm"],
        "rnn/layer_1": ["lstm"],
        "dense": ["dense"],
        "narrow": ["dense"],
        "conv1d": ["conv"],
    }
    backward = found["bidirectional/backward"].forms[0].attributes
    assert backward == {"reset": "after", "reverse": True}
    statistics = [leaf.trainable for leaf in found["batch_normalization"].leaves.values()]
    assert statistics == [True, True, False, False]
    assert found["narrow"].leaves["0"].array.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_file_is_a_source(saved: Any, name: str, target: Any) -> None:
    model, folder = saved
    _, report = polyamp.port(str(folder / name), target)
    assert not report.missing
    for one, other in zip(values(model), values(target), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_file_is_a_target(saved: Any, name: str, target: Any, tmp_path: Path) -> None:
    model, folder = saved
    inventory = FILES.open_file(folder / name)
    leaves = {leaf.name: leaf.array for layer in inventory.layers for leaf in layer.leaves.values()}
    doubled = {key: Lazy.of(np.asarray(lazy.read() * 2, lazy.dtype)) for key, lazy in leaves.items()}
    written = tmp_path / name
    FILES.write_file(written, doubled, folder / name)
    again = keras.models.load_model(written) if name.endswith(".keras") else target
    again.load_weights(written)
    for one, other in zip(values(model), values(again), strict=True):
        np.testing.assert_array_equal(one * 2, other)
    if name.endswith(".keras"):
        assert again.optimizer.iterations.value.numpy() == 3  # what is beside the weights is kept
    FILES.write_file(written, leaves, written)  # over itself
    again.load_weights(written)
    np.testing.assert_array_equal(values(again)[0], values(model)[0])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_model_is_written(saved: Any, another: tuple[Any, list[Any]], tmp_path: Path) -> None:
    model, _ = saved
    for name in ("a.keras", "a.weights.h5"):
        FILES.write_model(tmp_path / name, model)
        again, initial = another
        again.set_weights(initial)
        again.load_weights(tmp_path / name)
        np.testing.assert_array_equal(values(again)[0], values(model)[0])
    with pytest.raises(PortError, match=r"is written to a .keras or .weights.h5 file. Received: .*, for the file a.pt"):
        FILES.write_model(tmp_path / "a.pt", model)


def test_dtypes_of_a_written_file_are_those_of_the_values(saved: Any, tmp_path: Path) -> None:
    _, folder = saved
    path = tmp_path / "other.weights.h5"
    narrow = Lazy.of(np.ones((5, 3), "float32"))
    wide = Lazy.of(np.asarray(np.ones(5), "bfloat16"))
    given = {"layers/dense_1/vars/0": narrow, "layers/dense/vars/1": wide}
    FILES.write_file(path, given, folder / "model.weights.h5")
    found = {leaf.name: leaf.array for layer in FILES.open_file(path).layers for leaf in layer.leaves.values()}
    assert [found[name].dtype.name for name in given] == ["float32", "bfloat16"]
    assert np.asarray(found["layers/dense/vars/1"].read(), "float32").tolist() == [1.0] * 5


def test_a_value_that_cannot_be_read_leaves_the_file_as_it_was(saved: Any, tmp_path: Path) -> None:
    _, folder = saved
    path = tmp_path / "model.keras"
    path.write_bytes(before := (folder / "model.keras").read_bytes())

    def broken() -> Any:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        FILES.write_file(path, {"dense/bias": Lazy((5,), "float32", broken)}, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.keras"]
    with pytest.raises(PortError, match=r"has no array 'dense/bais'. Did you mean 'dense/bias'"):
        FILES.write_file(path, {"dense/bais": Lazy.of(np.zeros(5))}, path)
    with pytest.raises(PortError, match=r"'dense/bias' of .* has shape \[5\]. Received: \[4\]"):
        FILES.write_file(path, {"dense/bias": Lazy.of(np.zeros(4))}, path)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_a_truncated_file_is_refused(saved: Any, name: str, tmp_path: Path) -> None:
    _, folder = saved
    whole = (folder / name).read_bytes()
    for share in (0.1, 0.5, 0.97):
        path = tmp_path / name
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(PortError, match=r"is damaged, or no file of Keras's"):
            FILES.open_file(path)


def test_a_tampered_archive_is_noticed_before_the_target_is_changed(saved: Any, target: Any, tmp_path: Path) -> None:
    _, folder = saved
    content = bytearray((folder / "model.keras").read_bytes())
    kernel = network_kernel(folder)
    place = bytes(content).find(kernel)
    content[place] ^= 1
    path = tmp_path / "model.keras"
    path.write_bytes(content)
    before = values(target)
    with pytest.raises(PortError, match=r"is damaged.*Bad CRC-32"):
        polyamp.port(path, target)
    for one, other in zip(before, values(target), strict=True):
        np.testing.assert_array_equal(one, other)


def network_kernel(folder: Path) -> bytes:
    with h5py.File(folder / "model.weights.h5") as file:
        return bytes(file["layers/dense/vars/0"][()].tobytes())


def changed(path: Path, pattern: str, replacement: str, to: Path) -> Path:
    """The archive with something else in its config."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename == "config.json":
                text, count = re.subn(pattern, replacement, content.decode(), count=1)
                assert count == 1
                content = text.encode()
            new.writestr(member, content)
    return to


def test_config_and_weights_that_contradict_each_other(saved: Any, tmp_path: Path) -> None:
    _, folder = saved
    path = changed(folder / "model.keras", '"filters": 2', '"filters": 3', tmp_path / "a.keras")
    with pytest.raises(PortError, match=r"'conv1d/kernel' is \[3, 3, 3\] in its config and \[3, 3, 2\] in its weights"):
        FILES.open_file(path)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "lambda.keras"
    keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x), layers.Dense(2)]).save(path)
    with pytest.raises(PortError, match=r"Keras cannot build the model of .*lambda.keras from its config.*load_model"):
        FILES.open_file(path)


def test_classes_that_are_not_registered(saved: Any, tmp_path: Path) -> None:
    _, folder = saved
    pattern = '"module": "keras.layers", "class_name": "Conv1D"'
    path = changed(
        folder / "model.keras", pattern, '"module": "their.package", "class_name": "Mine"', tmp_path / "a.keras"
    )
    with pytest.raises(PortError, match=r"Import the module that defines and registers its classes"):
        FILES.open_file(path)


def test_other_archives_and_links_are_refused(saved: Any, tmp_path: Path) -> None:
    _, folder = saved
    other = tmp_path / "other.keras"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(PortError, match=r"is a zip archive without config.json and model.weights.h5.* data.pkl"):
        FILES.open_file(other)
    packed = tmp_path / "packed.keras"
    with zipfile.ZipFile(folder / "model.keras") as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(PortError, match="compressed, which Keras does not do"):
        FILES.open_file(packed)
    linked = tmp_path / "linked.weights.h5"
    with h5py.File(linked, "w") as file:
        file["layers/dense/vars/0"] = h5py.ExternalLink(os.fspath(folder / "model.weights.h5"), "/layers/dense/vars/0")
    with pytest.raises(PortError, match="is a link elsewhere"):
        FILES.open_file(linked)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        FILES.open_file(tmp_path / "none.keras")
