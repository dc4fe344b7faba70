"""orbax checkpoints and safetensors with flax's names, read and written as `polyamp.port` reads and writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest
from flax import nnx

from polyamp.errors import PortError
from polyamp.porting.files import safetensors_file
from polyamp.porting.layouts.inventory import Inventory
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp_jax.porting.converter import CONVERTER
from tests.porting.layers import linen_layers, nnx_layers


def _variables() -> Any:
    return linen_layers.BUILD["batch_norm"]()[1] | {"params": linen_layers.BUILD["lstm_stacked"]()[1]["params"]}


def _alone(path: Path) -> None:
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _variables())


def _managed(path: Path) -> None:
    state = {**_variables(), "opt_state": [_variables()["params"]], "step": 3}
    with orbax.CheckpointManager(path) as manager:
        for step in (1, 12):
            items = {"state": orbax.args.StandardSave(state), "extra": orbax.args.JsonSave({"step": step})}
            manager.save(step, args=orbax.args.Composite(**items))
        manager.wait_until_finished()


def _nnx(path: Path) -> None:
    model = nnx_layers.BUILD["lstm_bidirectional"]()
    orbax.PyTreeCheckpointer().save(path, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def _safetensors(path: Path) -> None:
    flat = {
        jax.tree_util.keystr(keys, simple=True, separator="."): Lazy.of(np.asarray(leaf))
        for keys, leaf in jax.tree_util.tree_leaves_with_path(_variables())
    }
    safetensors_file.write(path, flat, {"format": "flax"})


def leaves(inventory: Inventory) -> dict[str, np.ndarray[Any, Any]]:
    """Name -> values."""
    return {leaf.name: np.array(leaf.array) for layer in inventory.layers for leaf in layer.leaves.values()}


@pytest.mark.parametrize(
    ("write", "kinds"),
    [
        (_alone, ["batch_norm", "lstm", "lstm"]),
        (_managed, ["batch_norm", "lstm", "lstm"]),
        (_nnx, ["lstm", "lstm"]),
        (_safetensors, ["batch_norm", "lstm", "lstm"]),
    ],
)
def test_a_file_has_layers_and_takes_other_values_for_them(
    write: Callable[[Path], None], kinds: list[str], tmp_path: Path
) -> None:
    path = tmp_path / ("model.safetensors" if write is _safetensors else "model")
    write(path)
    inventory = CONVERTER.open_file(path)
    assert sorted(layer.forms[0].kind for layer in inventory.layers) == kinds
    before = leaves(inventory)
    assert all(values.any() for values in before.values())
    other = tmp_path / f"other{path.suffix}"
    CONVERTER.write_file(other, {name: Lazy.of(values * 2) for name, values in before.items()}, path)
    CONVERTER.write_file(path, {name: Lazy.of(values * 3) for name, values in before.items()}, path)
    for file, factor in ((other, 2), (path, 3)):
        after = leaves(CONVERTER.open_file(file))
        assert after.keys() == before.keys()
        for name, values in after.items():
            np.testing.assert_array_equal(values, before[name] * factor)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([path.name, other.name])


def test_what_is_in_a_checkpoint_beside_the_model_is_kept(tmp_path: Path) -> None:
    _managed(tmp_path / "run")
    inventory = CONVERTER.open_file(tmp_path / "run")
    assert set(inventory.left.values()) == {"it is no part of the model's parameters and statistics"}
    assert "opt_state/0/OptimizedLSTMCell_0/hf/bias" in inventory.left
    new = {name: Lazy.of(values + 1) for name, values in leaves(inventory).items()}
    CONVERTER.write_file(tmp_path / "run", new, tmp_path / "run")
    with orbax.CheckpointManager(tmp_path / "run") as manager:
        items = {"state": orbax.args.StandardRestore(), "extra": orbax.args.JsonRestore()}
        found = manager.restore(manager.latest_step(), args=orbax.args.Composite(**items))
        assert manager.all_steps() == [1, 12]
    before = _variables()["params"]["OptimizedLSTMCell_0"]["hf"]["bias"]
    np.testing.assert_array_equal(found.state["opt_state"][0]["OptimizedLSTMCell_0"]["hf"]["bias"], before)
    np.testing.assert_array_equal(found.state["params"]["OptimizedLSTMCell_0"]["hf"]["bias"], before + 1)
    assert (found.state["step"], found.extra) == (3, {"step": 12})
    assert isinstance(found.state["params"]["OptimizedLSTMCell_0"]["hf"]["bias"], jax.Array)


def test_damage_and_misfits_are_named_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model"
    _alone(path)
    before = leaves(CONVERTER.open_file(path))
    name = next(iter(before))
    with pytest.raises(PortError, match=r"'nowhere'"):
        CONVERTER.write_file(path, {"nowhere": Lazy.of(np.zeros(3))}, path)
    with pytest.raises(PortError, match=r"Received: \[77\]"):
        CONVERTER.write_file(path, {name: Lazy.of(np.zeros(77, "float32"))}, path)

    def fails() -> Any:
        raise RuntimeError("no such values")

    shape = before[name].shape
    with pytest.raises(RuntimeError, match="no such values"):
        CONVERTER.write_file(path, {name: Lazy(shape, "float32", fails)}, path)
    after = leaves(CONVERTER.open_file(path))
    for leaf, values in before.items():
        np.testing.assert_array_equal(after[leaf], values)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]

    held = CONVERTER.open_file(path).layers[0].arrays
    for file in (path / "d").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    for file in (path / "ocdbt.process_0").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(PortError, match="may be damaged"):
        next(iter(held.values())).read()
    (path / "_METADATA").write_text("{")
    with pytest.raises(PortError, match="cannot be read as an orbax checkpoint"):
        CONVERTER.open_file(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PortError, match="no orbax checkpoint"):
        CONVERTER.open_file(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        CONVERTER.open_file(tmp_path / "nothing")
