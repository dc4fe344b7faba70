"""Keras models on torch in `polyamp.init` and `train_step`: what differs from an `nn.Module`."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

import polyamp
from polyamp.errors import LossError, ModelError, StateError, UnsupportedError

SCALER = polyamp.LossScaler(init_scale=64.0, growth_interval=100)
RECIPE = polyamp.Recipe(policy="mixed_float16", scaler=SCALER, optimizer=polyamp.adamw(1e-2), clip_norm=1.0)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def rows(number: int, gain: float = 1.0) -> tuple[Any, Any]:
    x = np.random.default_rng(number).normal(size=(8, 4)).astype("float32")
    x[0] *= gain
    return x, np.zeros((8, 3), "float32")


def train(state: Any, *numbers: int) -> list[float]:
    step = polyamp.train_step(loss_fn, state.recipe)
    return [float(step(state, rows(number))[1].loss) for number in numbers]


def arrays(state: Any) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.backend.export_state(state).items()}


def changed(before: dict[str, bytes], state: Any) -> set[str]:
    return {name for name, value in arrays(state).items() if value != before[name]}


def test_s12_a_skipped_step_moves_the_scale_and_the_seeds_alone(model: Any) -> None:
    state = polyamp.init(model, RECIPE)
    train(state, 0)
    before = arrays(state)
    _, result = polyamp.train_step(loss_fn, RECIPE)(state, rows(1, gain=np.inf))
    assert bool(result.skipped)
    assert float(result.scale) == 32.0
    scale = {"loss_scale/scale", "loss_scale/good_steps", "loss_scale/hysteresis", "loss_scale/skipped"}
    assert changed(before, state) == {"rng/dropout/seed_0", *scale}
    train(state, 2)
    assert {"running/norm/moving_mean", "model/norm/gamma", "rng/dropout/seed_0"} <= changed(before, state)


class Counting(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
    """Adds one to each element of a variable that is below 1, in the dtype of the layer, in each call."""

    def build(self, shape: Any) -> None:
        start = keras.initializers.Constant(np.array([0.0, 1.0 + 2.0**-20], "float32"))
        self.count = self.add_weight(shape=(2,), initializer=start, trainable=False, name="count")

    def call(self, x: Any) -> Any:
        count = keras.ops.convert_to_tensor(self.count)
        self.dtypes = {count.dtype}
        self.count.assign(keras.ops.where(count < 1.0, count + 1.0, count))
        return x


def test_s12_what_a_layer_in_16_bits_writes_is_kept_with_the_digits_of_what_it_left() -> None:
    """Also after a call under a policy of its own, whose end leaves the step's own block in place."""
    counting = Counting(name="counting")
    model = keras.Sequential([keras.Input((4,)), counting, keras.layers.Dense(3, name="out")])

    def twice(model: Any, batch: Any) -> Any:
        polyamp.Policy("mixed_float16").autocast(model)(batch[0])
        return loss_fn(model, batch)

    state = polyamp.init(model, RECIPE)
    state, _ = polyamp.train_step(twice, RECIPE)(state, rows(0))
    assert counting.dtypes == {torch.float16}
    kept = [1.0, 1.0 + 2.0**-20]
    assert keras.ops.convert_to_numpy(counting.count).tolist() == kept
    _, result = polyamp.train_step(loss_fn, RECIPE)(state, rows(1, gain=np.inf))
    assert bool(result.skipped)
    assert keras.ops.convert_to_numpy(counting.count).tolist() == kept
    assert "_direct_assign" not in vars(counting.count)


def test_the_paths_are_those_of_keras_on_tensorflow(model: Any) -> None:
    """Running statistics are parameters without a gradient there, and no optimizer has them."""
    state = polyamp.init(model, RECIPE)
    own = {f"{layer}/{name}" for layer in ("hidden", "out") for name in ("kernel", "bias")}
    own |= {"norm/gamma", "norm/beta"}
    assert set(polyamp.parameters(model)) == set(state.parameters) == own
    assert {id(p) for group in state.optimizer.param_groups for p in group["params"]} == {
        id(variable.value) for variable in model.trainable_variables
    }
    names = {name for name in arrays(state) if name.startswith(("running/", "rng/dropout"))}
    assert names == {"running/norm/moving_mean", "running/norm/moving_variance", "rng/dropout/seed_0"}


def test_s05_s27_overrides_and_groups_use_these_paths(model: Any) -> None:
    decay = [polyamp.Group(kind=("bias", "norm"), weight_decay=0.0), polyamp.Group("out/**", learning_rate=0.0)]
    recipe = polyamp.Recipe(
        policy=polyamp.Policy("mixed_bfloat16", overrides={"out": "float32"}),
        optimizer=polyamp.adamw(1e-2, weight_decay=0.5, groups=decay),
    )
    state = polyamp.init(model, recipe)
    assert {name for name in state.parameters if state.groups.of(name).spec.weight_decay == 0.5} == {
        "hidden/kernel",
        "out/kernel",
    }
    seen = {}

    def watched(model: Any, batch: Any) -> Any:
        seen.update({layer.name.partition("_")[0]: layer.compute_dtype for layer in model.layers})
        output = model(batch[0])
        seen["result"] = str(output.dtype)
        return polyamp.losses.mean_squared_error(output, batch[1])

    before = arrays(state)
    polyamp.train_step(watched, recipe)(state, rows(0))
    assert seen == {
        "hidden": "bfloat16",
        "norm": "float32",
        "dropout": "bfloat16",
        "out": "float32",
        "result": "torch.float32",
    }
    assert [layer.compute_dtype for layer in model.layers] == ["float32"] * 4  # only while the step runs
    assert {"model/hidden/kernel"} <= changed(before, state)
    assert not {"model/out/kernel", "model/out/bias"} & changed(before, state)


def test_s03_the_innermost_policy_decides_and_training_is_an_argument(model: Any) -> None:
    """A function under a second policy in `loss_fn`; and the mode of a call, in a step and outside of one."""
    seen = []

    class Watched(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, x: Any, training: Any = None) -> Any:
            seen.append((str(x.dtype), training))
            return x

    whole = keras.Sequential([keras.Input((4,)), model, Watched(), keras.layers.Dense(3)])
    state = polyamp.init(whole, RECIPE)
    seen.clear()  # of the call that builds the model
    second = polyamp.Policy("mixed_bfloat16")

    def twice(model: Any, batch: Any) -> Any:
        found = polyamp.losses.mean_squared_error(model(batch[0]), batch[1])
        model(batch[0], training=False)
        return found + 0.0 * second.autocast(lambda x: model(x))(batch[0]).sum()

    with torch.autocast("cpu", torch.bfloat16):  # around the step it changes nothing
        polyamp.train_step(twice, RECIPE)(state, rows(0))
    second.autocast(whole)(torch.ones(2, 4))
    assert seen == [
        ("torch.float16", True),
        ("torch.float16", False),
        ("torch.bfloat16", True),
        ("torch.bfloat16", False),
    ]

    def region(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return loss_fn(model, batch)

    with pytest.raises(UnsupportedError, match=r"Write policy\.autocast\(function\)"):
        polyamp.value_and_grad(region)(state, rows(0))


def test_s25_the_losses_that_layers_add(model: Any) -> None:
    dense = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5), name="out")
    whole = keras.Sequential([keras.Input((4,)), dense])
    state = polyamp.init(whole, polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.0)))
    with pytest.warns(UserWarning, match="leaves out what the model adds to its loss: regularizers or add_loss of out"):
        alone, _ = polyamp.value_and_grad(loss_fn)(state, rows(0))

    def with_losses(model: Any, batch: Any) -> Any:
        return loss_fn(model, batch) + polyamp.losses.regularization(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both, gradients = polyamp.value_and_grad(with_losses)(state, rows(0))
    kernel = keras.ops.convert_to_numpy(dense.kernel.value)
    assert float(both - alone) == pytest.approx(0.5 * np.square(kernel).sum(), rel=1e-5)
    assert gradients.values["out/kernel"].dtype == torch.float32


def test_s22_a_training_resumes_bit_for_bit(model: Any, tmp_path: Path) -> None:
    """Seeded dropout and running statistics too."""
    recipe = RECIPE.replace(accumulate_steps=2, ema=polyamp.Ema(0.9))
    twin = polyamp.init(keras.models.clone_model(model), recipe)
    state = polyamp.init(model, recipe)
    train(state, 0, 1)
    polyamp.save(state, tmp_path / "saved")
    polyamp.restore(twin, tmp_path / "saved")
    assert train(state, 2, 3) == train(twin, 2, 3)
    assert arrays(state) == arrays(twin)
    with polyamp.averaged(state) as averaged:
        values = [np.array(keras.ops.convert_to_numpy(each.value)) for each in averaged.trainable_variables]
    copied = polyamp.averaged_model(state)
    assert copied is not model
    for value, variable in zip(values, copied.trainable_variables, strict=True):
        assert (value == keras.ops.convert_to_numpy(variable.value)).all()


def test_s28_a_changed_model_is_refused_until_it_is_refreshed(model: Any) -> None:
    state = polyamp.init(model, RECIPE)
    train(state, 0)
    moment = state.optimizer.state[state.parameters["out/kernel"]]["exp_avg"].clone()
    model.get_layer("hidden").trainable = False
    with pytest.raises(ModelError, match="'hidden/kernel' was frozen after init"):
        train(state, 1)
    after = polyamp.refresh(state)
    assert "hidden/kernel" not in after.parameters
    assert torch.equal(after.optimizer.state[after.parameters["out/kernel"]]["exp_avg"], moment)
    before = arrays(after)
    train(after, 1)
    assert not {"model/hidden/kernel", "model/hidden/bias"} & changed(before, after)


def test_s35_a_monitor_names_layers(model: Any) -> None:
    monitor = polyamp.Monitor(every=1, activations=True)
    state = polyamp.init(model, RECIPE)
    polyamp.train_step(loss_fn, RECIPE, monitor=monitor)(state, rows(0))
    (record,) = monitor.records
    found = {each.module: each for each in record.modules}
    assert {name for name, each in found.items() if each.gradients is not None} == {"hidden", "norm", "out"}
    assert {name for name, each in found.items() if each.activations is not None} >= {"hidden", "norm", "dropout"}


def test_no_step_waits_for_the_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU is asked for, on which reading a scalar waits. Keras's seeded Dropout reads its seed itself."""
    from torch.utils._python_dispatch import TorchDispatchMode

    reads = []

    class Waits(TorchDispatchMode):
        """Mode that counts reads of a scalar on the host."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                reads.append(function)
            return function(*args, **(kwargs or {}))

    whole = keras.Sequential([keras.Input((4,)), *(model.get_layer(name) for name in ("hidden", "norm", "out"))])
    state, step = polyamp.init(whole, RECIPE), polyamp.train_step(loss_fn, RECIPE)
    step(state, rows(0))
    for module in ("grad_stats", "update", "optimizers", "parameter_writes", "step", "torch_only.buffers"):
        monkeypatch.setattr(f"polyamp_torch.step.{module}.can_read_without_sync", lambda device: False)
    with Waits():
        step(state, rows(1))
    assert reads == []


def narrow(model: Any, batch: Any) -> Any:
    return model(batch[0]).half().mean()


HALF, COMPILED = polyamp.value_and_grad(narrow), polyamp.train_step(loss_fn, RECIPE, compile=True)
WIDE = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="float64")])
KERAS = RECIPE.replace(optimizer=keras.optimizers.Adam())
REFUSED: list[tuple[type[Exception], str, Callable[[Any], Any]]] = [
    (LossError, "a loss in float16", lambda model: HALF(polyamp.init(model, RECIPE), rows(0))),
    (UnsupportedError, "keras.optimizers.Adam. Write polyamp.adamw", lambda model: polyamp.init(model, KERAS)),
    (UnsupportedError, "does not trace the layers", lambda model: COMPILED(polyamp.init(model, RECIPE), rows(0))),
    (StateError, "cannot be pickled or copied", lambda model: copy.deepcopy(polyamp.init(model, RECIPE))),
    (ModelError, "takes a built model", lambda model: polyamp.init(keras.layers.Dense(2), RECIPE)),
    (
        UnsupportedError,
        "with 64-bit numbers in 32 bits",
        lambda model: polyamp.init(WIDE, polyamp.Recipe(policy="float64")),
    ),
    (UnsupportedError, "the op list of torch", lambda model: polyamp.explain(model, RECIPE.policy, rows(0)[0])),
]


@pytest.mark.parametrize(
    ("error", "message", "run"), REFUSED, ids=["loss", "optimizer", "compile", "copy", "unbuilt", "float64", "explain"]
)
def test_s20_what_is_not_supported_says_what_to_write(
    error: type[Exception], message: str, run: Callable[[Any], Any], model: Any
) -> None:
    with pytest.raises(error, match=message):
        run(model)


SCRIPT = """
import sys, keras, numpy as np, torch, torch.distributed as dist, polyamp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
try:
    polyamp.init(torch.nn.parallel.DistributedDataParallel(model), recipe)
except polyamp.UnsupportedError as error:
    assert "Keras layers under ddp" in str(error), error
else:
    raise AssertionError("DistributedDataParallel was taken")
state = polyamp.init(model, recipe)
step = polyamp.train_step(lambda model, x: model(x).square().mean(), recipe)
assert np.isfinite(float(step(state, np.ones((2, 4), "float32"))[1].loss))
assert "tensorflow" not in sys.modules
"""


def test_ddp_is_refused_and_tensorflow_is_not_imported() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=300)
