"""An optax loop of one's own goes on under polyamp, and back: optax's states, flax's `DynamicScale`, jmp's scales."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import polyamp
from polyamp import porting
from polyamp.errors import PortError
from polyamp.reference import MLP
from polyamp_jax.porting.native_training import JaxTraining

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (optax.sgd(0.02, momentum=0.9), polyamp.sgd(0.02, momentum=0.9)),
    "adam": (optax.adam(1e-2), polyamp.adam(1e-2)),
    "adamw": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)),
        polyamp.adamw(1e-2, weight_decay=0.1),
    ),
    "lion": (optax.lion(1e-3, weight_decay=0.0), polyamp.lion(1e-3)),
    "rmsprop": (optax.rmsprop(1e-3, decay=0.99, eps_in_sqrt=False), polyamp.rmsprop(1e-3)),
}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1, name="dense1")(nn.relu(nn.Dense(3, name="dense0")(x)))


def model(seed: int) -> Any:
    return Net(), Net().init(jax.random.key(seed), jnp.zeros((1, 4)))


def batch(number: int) -> Any:
    x = np.random.default_rng(number).standard_normal((8, 4)).astype(np.float32)
    return x * np.float32(1e30 if number in (3, 11) else 1.0), x.sum(1, keepdims=True)


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.mean_squared_error(model(batch[0]), batch[1])


def own_loop(training: Any, numbers: range) -> tuple[Any, list[tuple[float, float]]]:
    """A loop as flax's documentation has it, in float32: where it ended, and (loss, scale) of each step."""
    (module, variables), (tx, state), scale = training.model, training.optimizer, training.scaler
    seen = []

    @jax.jit
    def step(variables: Any, state: Any, scale: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((module.apply({"params": params}, batch[0]) - batch[1]) ** 2)

        if isinstance(scale, DynamicScale):
            scale, finite, loss, grads = scale.value_and_grad(loss_of)(variables["params"])
        else:
            loss, grads = jax.value_and_grad(lambda params: scale.scale(loss_of(params)))(variables["params"])
            loss, grads = scale.unscale((loss, grads))
            finite = jmp.all_finite(grads)
            scale = scale.adjust(finite)
        updates, new = tx.update(grads, state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        return jmp.select_tree(finite, ({"params": params}, new), (variables, state)), scale, loss

    for number in numbers:
        (variables, state), scale, loss = step(variables, state, scale, batch(number))
        seen.append((float(loss), float(getattr(scale, "scale" if isinstance(scale, DynamicScale) else "loss_scale"))))
    return porting.training((module, variables), (tx, state), scale, step=training.step), seen


def fresh(name: str, seed: int, scaler: Any, step: int | None = None) -> Any:
    made = model(seed)
    tx = OPTIMIZERS[name][0]
    return porting.training(made, (tx, tx.init(made[1]["params"])), scaler, step=step)


def flax_scale() -> Any:
    return DynamicScale(growth_interval=4, scale=jnp.float32(256.0))


def jmp_scale() -> Any:
    return jmp.DynamicLossScale(jnp.float32(256.0), period=4)


@pytest.mark.parametrize(("name", "kind"), [(name, "flax") for name in OPTIMIZERS] + [("adam", "jmp")])
def test_a_loop_of_ones_own_goes_on_and_comes_back(name: str, kind: str) -> None:
    scaler = flax_scale if kind == "flax" else jmp_scale
    source, _ = own_loop(fresh(name, 0, scaler(), 7), range(8))
    clip = 1.0 if name == "adamw" else None
    recipe = polyamp.Recipe(
        scaler=polyamp.LossScaler.like(kind, growth_interval=4), optimizer=OPTIMIZERS[name][1], clip_norm=clip
    )
    state, report = polyamp.port(source, polyamp.init(model(1), recipe))
    assert report.recipe == []
    assert int(state.step) == 7
    back, _ = polyamp.port(state, fresh(name, 2, scaler(), 0))
    assert back.step == 7
    same = jax.tree.map(np.array_equal, (back.model[1], back.optimizer[1]), (source.model[1], source.optimizer[1]))
    assert all(jax.tree.leaves(same))
    step, seen = polyamp.train_step(loss_fn, recipe), []
    for number in range(8, 16):
        state, result = step(state, batch(number))
        seen.append((float(result.loss), float(state.scale_state.scale)))
    _, straight = own_loop(source, range(8, 16))
    assert own_loop(back, range(8, 16))[1] == straight
    assert [scale for _, scale in seen] == [scale for _, scale in straight]
    losses = [loss for number, (loss, _) in enumerate(seen) if number != 3]
    assert losses == pytest.approx([loss for number, (loss, _) in enumerate(straight) if number != 3], rel=1e-4)


def test_an_optax_state_alone_says_no_hyperparameters() -> None:
    made = model(0)
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    source = porting.training(made, tx.init(made[1]["params"]), flax_scale())
    recipe = polyamp.Recipe(scaler="flax", optimizer=polyamp.adam(0.5))
    state, report = polyamp.port(source, polyamp.init(MLP.random([4, 3, 1], seed=0), recipe))
    assert [str(change) for change in report.recipe] == ["scaler.growth_interval: 4 -> 2000"]
    assert any("does not say its hyperparameters" in note for note in report.notes)
    assert float(state.scale_state.scale) == 256.0


def test_what_differs_is_reported() -> None:
    made = model(0)
    tx = optax.adamw(optax.constant_schedule(1e-2), weight_decay=0.2, b2=0.99)
    source = porting.training(made, (tx, tx.init(made[1]["params"])))
    target = polyamp.init(model(1), polyamp.Recipe(scaler="off", optimizer=polyamp.adamw(1e-2)))
    _, report = polyamp.port(source, target)
    assert [str(change) for change in report.recipe] == [
        "optimizer.betas: [0.9, 0.99] -> [0.9, 0.999]",
        "optimizer.weight_decay: 0.2 -> 0.01",
    ]
    assert any("learning rate is no number" in note for note in report.notes)


KERNELS = {"dense0": {"bias": False, "kernel": True}, "dense1": {"bias": False, "kernel": True}}


def kernels(params: Any) -> Any:
    return jax.tree.map(lambda array: array.ndim > 1, params)


@pytest.mark.parametrize("mask", [KERNELS, kernels, lambda params: {name: kernels(params[name]) for name in params}])
def test_a_mask_of_the_decay_is_read(mask: Any) -> None:
    made = model(0)
    tx = optax.adamw(1e-2, weight_decay=0.1, mask=mask)
    source = porting.training(made, (tx, tx.init(made[1]["params"])))
    masked = polyamp.adamw(1e-2, weight_decay=0.1, groups=polyamp.no_decay("bias"))
    _, report = polyamp.port(source, polyamp.init(model(1), polyamp.Recipe(scaler="off", optimizer=masked)))
    assert report.recipe == []
    plain = polyamp.adamw(1e-2, weight_decay=0.1)
    _, report = polyamp.port(source, polyamp.init(model(1), polyamp.Recipe(scaler="off", optimizer=plain)))
    assert [str(each) for each in report.recipe] == ["optimizer.weight_decay of dense0/bias and 1 more: 0.0 -> 0.1"]


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.adam(1e-2), optax.masked(optax.set_to_zero(), {"dense0": True, "dense1": False})),
        optax.multi_transform({"on": optax.adam(1e-2), "off": optax.set_to_zero()}, {"dense0": "off", "dense1": "on"}),
        optax.masked(optax.adam(1e-2), {"dense0": False, "dense1": True}),
    ],
)
def test_parameters_that_a_mask_leaves_out_are_named(tx: Any) -> None:
    made = model(0)
    params = made[1]["params"]
    _, report = polyamp.port(
        porting.training(made, (tx, tx.init(params))),
        polyamp.init(model(1), polyamp.Recipe(scaler="off", optimizer=polyamp.adam(0.1))),
    )
    assert [str(each) for each in report.recipe] == ["optimizer.learning_rate: 0.01 -> 0.1"]
    said = "optax's masks leave dense0/bias, dense0/kernel out of the optimizer, and the target's recipe does not"
    assert any(note.startswith(said) for note in report.notes), report.notes


def test_optimizers_of_several_groups_are_compared_for_each() -> None:
    made = model(0)
    labels = {"dense0": "slow", "dense1": "fast"}
    tx = optax.multi_transform({"slow": optax.adam(1e-3), "fast": optax.adam(1e-2)}, labels)
    group = polyamp.Group("dense0/**", learning_rate_scale=0.1)
    target = polyamp.init(
        model(1), polyamp.Recipe(scaler="off", optimizer=polyamp.adam(1e-2, groups=[group], eps=1e-7))
    )
    _, report = polyamp.port(porting.training(made, (tx, tx.init(made[1]["params"]))), target)
    assert [str(each) for each in report.recipe] == ["optimizer.eps: 1e-08 -> 1e-07"]


def test_a_mask_that_cannot_be_read_is_said_and_never_taken_as_none() -> None:
    made = model(0)
    is_known: list[bool] = []

    def mask(params: Any) -> Any:
        if is_known:
            raise RuntimeError("only in the loop")
        return kernels(params)

    tx = optax.adamw(1e-2, weight_decay=0.1, mask=mask)
    source = porting.training(made, (tx, tx.init(made[1]["params"])))
    is_known.append(True)
    recipe = polyamp.Recipe(scaler="off", optimizer=polyamp.adamw(1e-2, weight_decay=0.1))
    _, report = polyamp.port(source, polyamp.init(model(1), recipe))
    assert report.recipe == []
    said = "an optax mask cannot be read without the training loop, so that weight_decay is not compared"
    assert said in report.notes


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.amsgrad(1e-2), "'nu_max', an array for each parameter"),
        (optax.nadam(1e-2), "nesterov=True"),
        (optax.MultiSteps(optax.adam(1e-2), 2), r"gradients that optax\.MultiSteps has accumulated"),
        (optax.rmsprop(1e-3, momentum=0.9), r"optax\.rmsprop's momentum, which holds learning rates"),
        (optax.chain(optax.ema(0.9), optax.scale(-0.1)), "'ema', an array for each parameter"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tx: Any, message: str) -> None:
    made = model(0)
    state = polyamp.init(model(1), polyamp.Recipe(optimizer=polyamp.adam(1e-2)))
    with pytest.raises(PortError, match=message):
        polyamp.port(porting.training(made, (tx, tx.init(made[1]["params"]))), state)


class NnxNet(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.dense0 = nnx.Linear(4, 3, rngs=nnx.Rngs(seed))
        self.dense1 = nnx.Linear(3, 1, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x: Any) -> Any:
        return self.dense1(nnx.relu(self.dense0(x)))


def trained_state() -> Any:
    """A state after seven updates."""
    state = polyamp.init(model(0), polyamp.Recipe(scaler="off", optimizer=polyamp.adam(1e-2)))
    step = polyamp.train_step(loss_fn, state.recipe)
    for number in range(4, 11):
        state, _ = step(state, batch(number))
    return state


def canonical(training: Any) -> dict[str, Any]:
    """Slots and counts in the canonical layout."""
    found = porting.training_state(training)
    slots = {f"{slot}/{name}": array.read() for slot, each in found.slots.items() for name, array in each.items()}
    return {**slots, **found.counts, "step": found.step}


@pytest.mark.parametrize("holder", ["Optimizer", "ModelAndOptimizer", "pair"])
def test_an_nnx_optimizer_goes_on_and_comes_back(holder: str) -> None:
    source, net = trained_state(), NnxNet(1)
    own: Any = nnx.ModelAndOptimizer if holder == "ModelAndOptimizer" else nnx.Optimizer
    optimizer: Any = own(net, optax.adam(1e-2), wrt=nnx.Param)
    given = (optimizer.tx, optimizer.opt_state) if holder == "pair" else optimizer
    moved, report = polyamp.port(source, porting.training(net, given))
    assert report.clean
    assert not [note for note in report.notes if "begins anew" in note]
    there, here = canonical(moved), canonical(source)
    assert all(np.array_equal(there[name], here[name]) for name in here)
    assert here["step"] == 7
    assert int(optimizer.opt_state[0].count.get_value()) == 0  # the given one is as it was
    if holder == "pair":
        return
    assert int(moved.optimizer.step.get_value()) == 7
    held = getattr(moved.optimizer, "model", moved.model)
    assert held is moved.model
    arguments = () if holder == "ModelAndOptimizer" else (moved.model,)
    grads = nnx.grad(lambda net: jnp.mean(net(batch(0)[0]) ** 2))(moved.model)
    moved.optimizer.update(*arguments, grads)
    assert int(moved.optimizer.step.get_value()) == 8
    back, _ = polyamp.port(moved, polyamp.init(model(3), source.recipe))
    assert int(back.step) == 8


@pytest.mark.parametrize("tx", [optax.sgd(1e-2), optax.adam(1e-2)])
def test_the_steps_of_a_train_state_go_on(tx: Any) -> None:
    """They count skipped steps too: where the optimizer counts its updates, these are the applied ones."""
    made = model(0)
    held = TrainState.create(apply_fn=None, params=made[1]["params"], tx=tx).replace(step=9)
    counts = tx is not None and len(jax.tree.leaves(held.opt_state)) > 0
    optimizer = polyamp.adam(1e-2) if counts else polyamp.sgd(1e-2)
    state, report = polyamp.port(
        porting.training(made, held), polyamp.init(model(1), polyamp.Recipe(scaler="off", optimizer=optimizer))
    )
    assert int(state.step) == (0 if counts else 9)
    assert not [note for note in report.notes if "does not count its updates" in note]
    for step in (0, jnp.int32(0)):
        target = porting.training(model(2), held.replace(step=step))
        moved, _ = polyamp.port(state, target)
        assert int(moved.optimizer.step) == int(state.step)
        assert isinstance(moved.optimizer.step, type(step)) or isinstance(step, jax.Array)


def test_equinox_and_haiku_are_targets() -> None:
    source, tx = trained_state(), optax.adam(1e-2)

    class Equinox(eqx.Module):
        dense0: eqx.nn.Linear
        dense1: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            return jax.vmap(self.dense1)(jax.nn.relu(jax.vmap(self.dense0)(x)))

    def net(x: Any) -> Any:
        return hk.Linear(1, name="dense1")(jax.nn.relu(hk.Linear(3, name="dense0")(x)))

    key = jax.random.key(3)
    module = Equinox(eqx.nn.Linear(4, 3, key=key), eqx.nn.Linear(3, 1, key=key))
    haiku = hk.without_apply_rng(hk.transform(net))
    params = haiku.init(key, jnp.zeros((1, 4)))
    for target, arrays in ((module, eqx.filter(module, eqx.is_inexact_array)), ((haiku, params), params)):
        for made in (porting.training(target, (tx, tx.init(arrays)), step=0), polyamp.init(target, source.recipe)):
            moved, report = polyamp.port(source, made)
            assert report.clean
            there, here = canonical(moved), canonical(source)
            assert all(np.array_equal(there[name], here[name]) for name in here), report


def test_a_state_of_another_models_parameters_is_refused() -> None:
    made, tx = model(0), optax.adam(1e-2)
    source = porting.training(made, (tx, tx.init({"other": jnp.zeros(3)})))
    with pytest.raises(PortError, match="the arrays of its exp_avg have the names of none of the model's parameters"):
        polyamp.port(source, polyamp.init(model(1), polyamp.Recipe(optimizer=polyamp.adam(1e-2))))


def test_scales_that_do_not_move_and_none() -> None:
    made = model(0)
    tx = optax.adam(1e-2)
    state = polyamp.init(model(1), polyamp.Recipe(scaler=polyamp.LossScaler.static(8.0), optimizer=polyamp.adam(1e-2)))
    held = tx, tx.init(made[1]["params"])
    moved, _ = polyamp.port(porting.training(made, held, jmp.StaticLossScale(jnp.float32(8.0))), state)
    assert float(moved.scale_state.scale) == 8.0
    _, report = polyamp.port(porting.training(made, held, jmp.NoOpLossScale()), state)
    assert any("begins anew" in note for note in report.notes)
    with pytest.raises(polyamp.ArgumentError, match=r"the scaler is flax\.training\.dynamic_scale\.DynamicScale"):
        polyamp.port(porting.training(made, held, 8.0), state)
    with pytest.raises(polyamp.ArgumentError, match="the optimizer is an optax state"):
        polyamp.port(porting.training(made), state)


@pytest.mark.parametrize(
    "transformation", [optax.adamw(1e-2), optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))]
)
def test_the_state_over_an_nnx_state_is_read(transformation: Any) -> None:
    """Its leaves are variables, whose paths end in "value"."""
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    training = JaxTraining(net, (transformation, transformation.init(nnx.state(net, nnx.Param))), None)
    arrays, layout = training.arrays(), training.layout
    assert set(layout.slots) in ({"exp_avg", "exp_avg_sq"}, {"momentum"})
    for names in layout.slots.values():
        assert {leaf: arrays[name].shape for leaf, name in names.items()} == {"kernel": (3, 2), "bias": (2,)}
