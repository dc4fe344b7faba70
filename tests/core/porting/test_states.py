"""Training states move (`polyamp.port`): on the reference backend, whose model is its own counterpart. What two
frameworks make of it is in tests/porting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import Inventory, InventoryLeaf, NativeLayer
from polyamp.porting.layouts.layer_layout import Form, Rule
from polyamp.porting.layouts.lazy_array import Lazy
from polyamp.porting.layouts.operations import Blocks, Merge, Split, Transpose
from polyamp.porting.states import checkpoint_metadata
from polyamp.reference import MLP
from polyamp.train import checkpoint, checkpoint_tensors

SCALER = polyamp.LossScaler(growth_interval=2, init_scale=1024.0, hysteresis=2)


def recipe(optimizer: Any = None, **changes: Any) -> polyamp.Recipe:
    given = {"policy": "mixed_float16", "optimizer": optimizer or polyamp.adam(0.1), "scaler": SCALER}
    return polyamp.Recipe(**{**given, **changes})


def fresh(seed: int, made: polyamp.Recipe, sizes: tuple[int, ...] = (4, 3, 1)) -> Any:
    return polyamp.init(MLP.random(sizes, seed=seed), made)


def trained(made: polyamp.Recipe, steps: int = 4) -> Any:
    """A state after some steps, the second of which overflows."""
    state, step = fresh(0, made), polyamp.train_step(loss_fn, made)
    for number in range(steps):
        state, _ = step(state, batch(number))
    return state


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def batch(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((8, 4)).astype(np.float32)
    return x * np.float32(1e30 if number == 1 else 1.0), np.ones((8, 1), np.float32)


def arrays(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = state.backend.export_state(state)
    return found


def equal(one: Any, other: Any) -> bool:
    a, b = arrays(one), arrays(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


OPTIMIZERS = {
    "sgd": polyamp.sgd(0.1),
    "momentum": polyamp.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": polyamp.adam(polyamp.schedules.cosine(0.1, 20)),
    "adamw": polyamp.adamw(0.1, groups=polyamp.no_decay("bias")),
    "rmsprop": polyamp.rmsprop(0.01, momentum=0.5, centered=True),
    "adagrad": polyamp.adagrad(0.1, initial_accumulator_value=0.5),
    "lion": polyamp.lion(1e-3),
    "nadam": polyamp.nadam(0.01),
    "amsgrad": polyamp.adam(0.01, amsgrad=True),
    "adafactor": polyamp.adafactor(0.01),
    "muon": polyamp.muon(0.01),
    "schedule_free": polyamp.schedule_free(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_of_a_state_moves(name: str, tmp_path: Path) -> None:
    made = recipe(OPTIMIZERS[name])
    source = trained(made)
    moved, report = polyamp.port(source, fresh(1, made))
    assert equal(source, moved)
    assert arrays(moved)["step"] == 3
    assert arrays(moved)["loss_scale/skipped"] == 1
    assert [each.target for each in report.moved] == ["dense0", "dense1"]
    assert report.clean
    path = tmp_path / "state"
    polyamp.save(source, path)
    again, _ = polyamp.port(path, fresh(2, made))
    assert equal(source, again)


def test_s34_averages_move_and_begin_at_what_was_moved(tmp_path: Path) -> None:
    ema = polyamp.Ema(0.5, exclude="dense1/bias")
    source = trained(recipe(ema=ema))
    assert len([name for name in arrays(source) if name.startswith("average/")]) == 3
    moved, report = polyamp.port(source, fresh(1, recipe(ema=ema)))
    assert equal(source, moved)
    assert report.clean
    polyamp.save(source, tmp_path / "state")
    again, _ = polyamp.port(tmp_path / "state", fresh(2, recipe(ema=ema.replace(exclude="dense1/*"))))
    assert sorted(name for name in arrays(again) if name.startswith("average/")) == [
        "average/model/dense0/bias",
        "average/model/dense0/kernel",
    ]
    with pytest.raises(PortError, match=r"ema\.decay: 0\.5 -> 0\.9"):
        polyamp.port(source, fresh(1, recipe(ema=polyamp.Ema(0.9))))

    begun, report = polyamp.port(trained(recipe()), fresh(1, recipe(ema=ema)))
    assert "without an average in the source, so that its average begins at what was moved: dense0/kernel" in str(
        report
    )
    for name in ("dense0/kernel", "dense0/bias", "dense1/kernel"):
        assert np.array_equal(arrays(begun)[f"average/model/{name}"], arrays(begun)[f"model/{name}"])
    _, report = polyamp.port(source, fresh(1, recipe()))
    assert "the source's averages of parameters are not moved: the target's recipe has no ema" in str(report)


def test_a_state_goes_on_with_the_targets_recipe_where_told() -> None:
    source = trained(recipe())
    target = fresh(1, recipe(polyamp.adam(0.2), clip_norm=1.0))
    before = arrays(target)
    with pytest.raises(PortError) as raised:
        polyamp.port(source, target)
    assert "  clip_norm: None -> 1.0\n  optimizer.learning_rate: 0.1 -> 0.2\n" in str(raised.value)
    assert "strict=False) goes on with it" in str(raised.value)
    assert all(np.array_equal(array, before[name]) for name, array in arrays(target).items())
    moved, report = polyamp.port(source, target, strict=False)
    assert [str(change) for change in report.recipe] == [
        "clip_norm: None -> 1.0",
        "optimizer.learning_rate: 0.1 -> 0.2",
    ]
    assert "optimizer.learning_rate: 0.1 -> 0.2" in str(report)
    assert not report.clean
    assert np.array_equal(
        arrays(moved)["optimizer/dense0/kernel/exp_avg"], arrays(source)["optimizer/dense0/kernel/exp_avg"]
    )


def test_groups_are_compared_by_what_became_of_each_parameter() -> None:
    one = recipe(polyamp.adamw(0.1, groups=[polyamp.Group("**/bias", weight_decay=0.0)]))
    same = recipe(polyamp.adamw(0.1, groups=polyamp.no_decay("bias")))
    assert polyamp.port(trained(one), fresh(1, same))[1].recipe == []
    other = recipe(polyamp.adamw(0.1, groups=[polyamp.Group("dense0/bias", weight_decay=0.0)]))
    _, report = polyamp.port(trained(one), fresh(1, other), strict=False)
    assert [str(change) for change in report.recipe] == ["optimizer.weight_decay of dense1/bias: 0.0 -> 0.01"]


def test_another_optimizer_is_refused_by_name() -> None:
    with pytest.raises(PortError, match="state with adam, which keeps exp_avg, exp_avg_sq, and the reference "):
        polyamp.port(trained(recipe()), fresh(1, recipe(polyamp.sgd(0.1, momentum=0.9))))
    with pytest.raises(PortError, match=r"state with rmsprop, which keeps square_avg, and .* square_avg, grad_avg"):
        polyamp.port(
            trained(recipe(polyamp.rmsprop(0.1))), fresh(1, recipe(polyamp.rmsprop(0.1, centered=True))), strict=False
        )


def test_a_scale_outside_of_the_targets_bounds_is_brought_inside() -> None:
    source = trained(recipe())
    bounded = recipe(scaler=SCALER.replace(max_scale=1024.0))
    moved, report = polyamp.port(source, fresh(1, bounded), strict=False)
    assert arrays(source)["loss_scale/scale"] == 2048.0
    assert arrays(moved)["loss_scale/scale"] == 1024.0
    assert "loss_scale/scale is 1024, within the target's scaler; it was 2048" in report.notes
    anew, report = polyamp.port(source, fresh(1, recipe(scaler=polyamp.LossScaler.static(8.0))), strict=False)
    assert arrays(anew)["loss_scale/scale"] == 8.0
    assert any("begins anew" in note for note in report.notes)


def test_counts_of_an_unused_parameter_move_along() -> None:
    made = recipe(scaler="off", policy="float32")
    state = trained(made)
    held = {**arrays(state), "optimizer/dense1/bias/step": np.asarray(1, np.int32)}
    state = state.backend.import_state(state, held)
    assert porting.training_state(state).counts == {
        "dense0/kernel": 4, "dense0/bias": 4, "dense1/kernel": 4, "dense1/bias": 1
    }  # fmt: skip
    moved, _ = polyamp.port(state, fresh(1, made))
    assert arrays(moved)["optimizer/dense1/bias/step"] == 1


def test_what_is_no_state_is_refused() -> None:
    state = trained(recipe())
    with pytest.raises(polyamp.ArgumentError, match=r"target must be a polyamp state or polyamp\.porting\.training"):
        polyamp.port(state, state.model)
    with pytest.raises(polyamp.ArgumentError, match="source must be a polyamp state, the path of a checkpoint"):
        polyamp.port(state.model, state)
    with pytest.raises(polyamp.UnsupportedError, match="NumPy has no optimizers and loss scalers of its own"):
        polyamp.port(porting.training(state.model, object()), state)
    with pytest.raises(PortError, match="check= compares models"):
        polyamp.port(state, state, check=np.zeros((1, 4)))
    with pytest.raises(PortError, match="have no partner"):
        polyamp.port(state, fresh(0, recipe(), (4, 5, 1)))


def test_a_checkpoint_of_another_backend_says_what_port_does(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = trained(recipe())
    polyamp.save(state, path)
    meta, found = checkpoint.read(path)
    from safetensors.numpy import save as to_bytes

    other = {
        **meta,
        "backend": "torch",
        "digest": checkpoint_tensors.BLANK_DIGEST,
    }  # as another backend would have written it
    path.write_bytes(checkpoint_tensors.seal_content(to_bytes(found, metadata=other)))
    with pytest.raises(polyamp.CheckpointError) as raised:
        polyamp.restore(state, path)
    assert f"    state, report = polyamp.port({str(path)!r}, state)" in str(raised.value)
    assert equal(polyamp.port(path, fresh(3, recipe()))[0], state)


def test_a_checkpoint_that_says_nothing_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    state = trained(recipe())

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such layer")

    from polyamp.reference.converter import ReferenceConverter

    monkeypatch.setattr(ReferenceConverter, "inventory", fails)
    polyamp.save(state, path)  # a training is not lost because its model cannot be described
    monkeypatch.undo()
    assert json.loads(checkpoint.read(path)[0]["porting"])["error"] == "RuntimeError: no such layer"
    with pytest.raises(PortError, match=r"could not be described \(RuntimeError: no such layer\)"):
        polyamp.port(path, state)
    assert equal(polyamp.restore(fresh(1, recipe()), path), state)


def test_a_truncated_checkpoint_leaves_the_target_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state"
    polyamp.save(trained(recipe()), path)
    path.write_bytes(path.read_bytes()[:-3])
    target = fresh(1, recipe())
    before = arrays(target)
    with pytest.raises(polyamp.CheckpointError, match="truncated"):
        polyamp.port(path, target)
    assert all(np.array_equal(array, before[name]) for name, array in arrays(target).items())


def test_a_description_is_read_as_it_was_written() -> None:
    given = {"a": np.arange(12.0).reshape(3, 4), "b": np.arange(4.0)}
    rules = (
        Rule(("weight",), ("query", "key"), (Transpose((1, 0)), Split((1, 3), 0))),
        Rule(("bias",), ("bias", "recurrent_bias"), (Blocks((1, 0)), Merge())),
    )
    leaves = {
        "weight": InventoryLeaf("a", Lazy.of(given["a"])),
        "bias": InventoryLeaf("b", Lazy.of(given["b"]), False, None),
    }
    layer = NativeLayer("cell", leaves, (Form("odd", rules, {"strides": [2, 2]}),), "Cell")
    from polyamp.porting.states.optimizer_layout import OptimizerLayout, UpdateCount

    layout = OptimizerLayout({"momentum": {"a": "m"}}, {"a": UpdateCount("c", "d", 1)}, [{"type": "sgd"}], {"a": 0})

    class Fixed:
        def inventory(self, model: Any, batch: Any = None) -> Inventory:
            return Inventory([layer], "test", False, {"seed": "random"})

        def layout(self, state: Any, arrays: Any) -> OptimizerLayout:
            return layout

    class State:
        model = None

    held = {f"model/{name}": array for name, array in given.items()}
    said: Any = Fixed()
    text = checkpoint_metadata.state_metadata_json(State(), held, said, said)
    inventory, names, optimizer = checkpoint_metadata.read_state_metadata(json.loads(text), held)
    (found,) = inventory.layers
    assert (inventory.framework, inventory.ordered, inventory.left) == ("test", False, {"seed": "random"})
    assert (found.path, found.module, found.forms) == ("cell", "Cell", layer.forms)
    assert not found.leaves["bias"].trainable
    assert names == {"a": "model/a", "b": "model/b"}
    assert optimizer.plain() == json.loads(json.dumps(layout.plain()))
    with pytest.raises(ValueError, match="operation 'Lists'"):
        checkpoint_metadata.read_state_metadata(json.loads(text.replace('"Transpose"', '"Lists"')), held)
