"""S23: a parameter that the loss does not depend on keeps its value and the optimizer's state of it, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp
from polyamp.errors import GradientError, LossError
from polyamp_jax.step.unused_parameters import gradient_mask

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = {"x": X, "y": X.sum(-1, keepdims=True)}
WARM = polyamp.schedules.piecewise((0.1, 0.05), (3,))

OPTIMIZERS: dict[str, Any] = {
    "adam": polyamp.adam(WARM, weight_decay=0.1),
    "adamw": polyamp.adamw(WARM, weight_decay=0.1),
    "adagrad": polyamp.adagrad(WARM, lr_decay=0.1, weight_decay=0.1),
    "nadam": polyamp.nadam(WARM, weight_decay=0.1),
    "optax": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)),
    "labels": optax.multi_transform(
        {"one": optax.adamw(1e-2, weight_decay=0.1), "other": optax.sgd(0.1, momentum=0.9)},
        {"body": "one", "head": "one", "spare": {"kernel": "other", "bias": "one"}},
    ),
    "steps": optax.MultiSteps(optax.adamw(1e-2, weight_decay=0.1), every_k_schedule=2),
}


def params() -> dict[str, Any]:
    return {
        "body": {"kernel": jnp.full((3, 2), 0.5)},
        "head": {"kernel": jnp.full((2, 1), 0.5)},
        "spare": {"kernel": jnp.full((2, 1), 0.25), "bias": jnp.ones(1)},
    }


def apply_fn(params: Any, x: Any, head: str) -> Any:
    hidden = x @ params["body"]["kernel"]
    return hidden @ params[head]["kernel"] + (params["spare"]["bias"] if head == "spare" else 0.0)


def loss_by(head: str) -> Callable[[Any, Any], Any]:
    return lambda model, batch: polyamp.losses.mean_squared_error(model(batch["x"], head), batch["y"])


def parts(backend: Any, state: Any, word: str) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in backend.export_state(state).items() if word in name.split("/")}


WAYS = [("step", name) for name in ("adagrad", "nadam", "optax", "labels", "steps")]
"""Every spec on its way through a whole step is asked by the conformance suite."""
WAYS += [
    ("accumulated", "adamw"),
    ("accumulated", "optax"),
    ("halves", "adamw"),
    ("halves", "optax"),
    ("eager", "adamw"),
]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_s23_an_unused_parameter_stays_as_it_is(backend: Any, name: str, way: str) -> None:
    recipe = polyamp.Recipe(
        policy="mixed_bfloat16", optimizer=OPTIMIZERS[name], accumulate_steps=2 if way == "accumulated" else 1,
        clip_norm=1.0, scaler=polyamp.LossScaler(init_scale=8.0),
    )  # fmt: skip
    state = polyamp.init((apply_fn, params()), recipe)
    full = polyamp.train_step(loss_by("spare"), recipe, compile=way != "eager")
    step = polyamp.train_step(loss_by("head"), recipe, compile=way != "eager")
    half = polyamp.value_and_grad(loss_by("head"))
    for _ in range(2):  # moments that would go on moving it
        state, _ = full(state, BATCH)
    spare = parts(backend, state, "spare")
    body = {n: v for n, v in parts(backend, state, "body").items() if n.startswith("model")}
    assert len(spare) >= 2
    for number in range(3):
        batch = {**BATCH, "x": BATCH["x"] * (np.inf if number == 1 else 1.0)}
        if way == "halves":
            _, gradients = half(state, batch)
            assert gradients.values["spare"] == {"kernel": None, "bias": None}
            state, result = polyamp.apply_gradients(state, jax.jit(lambda g: jax.tree.map(jnp.copy, g))(gradients))
        else:
            state, result = step(state, batch)
        assert bool(result.skipped) == (number == 1)
        assert parts(backend, state, "spare") == spare
    now = parts(backend, state, "body")
    assert all(now[n] != body[n] for n in body), "what is used moves"


@pytest.mark.parametrize(("way", "name"), [("step", "adam"), ("jit", "adamw"), ("step", "adagrad"), ("jit", "adagrad")])
def test_s23_what_is_counted_for_a_parameter_counts_its_own_updates(backend: Any, name: str, way: str) -> None:
    """Losses that take turns: a parameter's own count is that of its updates, the schedule's that of the state."""
    spec = OPTIMIZERS[name]
    recipe = polyamp.Recipe(policy="float32", optimizer=spec, scaler=polyamp.LossScaler.off())
    state = polyamp.init((apply_fn, params()), recipe)
    expected = {n: np.asarray(v) for n, v in _named(state.params).items()}
    slots = {n: {s: np.full_like(v, spec.initial(s)) for s in spec.slots} for n, v in expected.items()}
    counts = dict.fromkeys(expected, 0)
    run: dict[str, Any] = {}
    for head in ("head", "spare"):
        step = polyamp.train_step(loss_by(head), recipe)
        run[head] = jax.jit(step) if way == "jit" else step
    for number, head in enumerate(["head", "head", "spare", "head", "spare", "spare"]):
        _, gradients = polyamp.value_and_grad(loss_by(head))(state, BATCH)
        values = _named(gradients.values)
        assert set(expected) - set(values) == ({"spare/bias", "spare/kernel"} if head == "head" else {"head/kernel"})
        for n, g in values.items():
            counts[n] += 1
            rate = np.float32(spec.rate(jnp.int32(number), backend.xp))
            new, own = spec.update(backend.xp, expected[n], g, slots[n], rate, np.float32(counts[n]))
            expected[n], slots[n] = np.asarray(new), {s: np.asarray(v) for s, v in own.items()}
        state, _ = run[head](state, BATCH)
        for n, v in _named(state.params).items():
            np.testing.assert_allclose(v, expected[n], rtol=2e-6, err_msg=f"{n} after {head}")
    order = list(expected)
    assert np.asarray(state.opt_state.missed).tolist() == [6 - counts[n] for n in order]


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_s23_a_saved_state_remembers_which_parameters_missed_updates(backend: Any, tmp_path: Any) -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1))

    def run(state: Any, heads: list[str]) -> Any:
        for head in heads:
            state, _ = polyamp.train_step(loss_by(head), recipe)(state, BATCH)
        return state

    heads = ["head", "head", "spare", "spare"]
    straight = backend.export_state(run(polyamp.init((apply_fn, params()), recipe), heads))
    state = run(polyamp.init((apply_fn, params()), recipe), heads[:2])
    polyamp.save(state, tmp_path / "half")
    restored = polyamp.restore(polyamp.init((apply_fn, params()), recipe), tmp_path / "half")
    assert (restored.lagging, state.lagging) == (frozenset({2, 3}), frozenset({2, 3}))
    resumed = backend.export_state(run(restored, heads[2:]))
    assert {k: v.tobytes() for k, v in straight.items()} == {k: v.tobytes() for k, v in resumed.items()}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["constant", "stopped", "integer", "rounded"])
def test_s23_a_loss_without_parameters_is_refused(policy: str, steps: int, kind: str) -> None:
    losses: dict[str, Any] = {
        "constant": lambda m, b: jnp.mean(b["x"]),
        "stopped": lambda m, b: jax.lax.stop_gradient(jnp.mean(m(b["x"], "head"))),
        "integer": lambda m, b: jnp.sum(m(b["x"], "head") > 0).astype(jnp.float32),
        "rounded": lambda m, b: jnp.mean(jnp.floor(m(b["x"], "head"))),
    }
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.adamw(0.1), accumulate_steps=steps)
    state = polyamp.init((apply_fn, params()), recipe)
    for run in (polyamp.train_step(losses[kind], recipe), polyamp.value_and_grad(losses[kind])):
        with pytest.raises(LossError, match="depends on none of the model's trainable parameters"):
            run(state, BATCH)


def _identity_with(backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
    return made


def _forgetting() -> Callable[[Any], Any]:
    """Its backward pass multiplies zeros by what the forward pass kept."""
    made = jax.custom_vjp(lambda x: x)
    made.defvjp(lambda x: (x, x), lambda kept, g: (jnp.zeros_like(g) * kept,))
    return made


def _relu() -> Callable[[Any], Any]:
    made = jax.custom_jvp(lambda x: jnp.maximum(x, 0))
    made.defjvp(lambda p, t: (jnp.maximum(p[0], 0), jnp.where(p[0] > 0, t[0], 0)))
    return made


def _scan(p: Any, out: int, *, remat: bool = False) -> Any:
    def body(carry: Any, x: Any) -> Any:
        a, b = carry
        return (a * p["a"] + x, b + a * p["b"]), b * p["c"]

    body = jax.checkpoint(body) if remat else body
    (a, b), ys = jax.lax.scan(body, (p["a"], jnp.float32(1)), jnp.arange(3.0))
    return [a, b, ys.sum()][out]


def _sharded(p: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    spec = jax.sharding.PartitionSpec
    run = jax.shard_map(
        lambda a, b, c: (jax.lax.psum(a * b, "d"), c), mesh=mesh, in_specs=(spec(),) * 3, out_specs=(spec(), spec())
    )
    return run(p["a"], p["b"], p["c"])[0]


PROGRAMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "product": (lambda p: p["a"] * p["b"], "ab"),
    "zero times": (lambda p: 0.0 * p["a"] + p["b"], "ab"),
    "minus itself": (lambda p: p["a"] - p["a"] + p["b"], "ab"),
    "masked out": (lambda p: jnp.where(p["a"] > 100, p["b"], p["c"]), "bc"),
    "stopped": (lambda p: jax.lax.stop_gradient(p["a"]) * p["b"], "b"),
    "shape alone": (lambda p: p["a"].size * p["b"], "b"),
    "zeros like": (lambda p: jnp.zeros_like(p["a"]) + p["b"], "b"),
    "argmax": (lambda p: jnp.argmax(jnp.stack([p["a"], p["c"]])) * p["b"], "b"),
    "rounded": (lambda p: jnp.round(p["a"]) + p["b"], "b"),
    "jit": (lambda p: jax.jit(lambda a, b, c: (a * b, c))(p["a"], p["b"], p["c"])[0], "ab"),
    "scan carry": (lambda p: _scan(p, 0), "a"),
    "scan second carry": (lambda p: _scan(p, 1), "ab"),
    "scan outputs": (lambda p: _scan(p, 2), "abc"),
    "scan remat": (lambda p: _scan(p, 1, remat=True), "ab"),
    "fori": (lambda p: jax.lax.fori_loop(0, 3, lambda i, s: (s[0] * p["a"], s[1] * p["b"]), (p["c"], p["c"]))[0], "ac"),
    "cond": (lambda p: jax.lax.cond(p["c"] > 0, lambda: p["a"], lambda: p["b"] * 2), "ab"),
    "switch": (lambda p: jax.lax.switch(1, [lambda: (p["a"], p["c"]), lambda: (p["b"], p["c"])])[0], "ab"),
    "remat": (lambda p: jax.checkpoint(lambda a, c: (jnp.sin(a), c))(p["a"], p["c"])[0], "a"),
    "custom vjp": (lambda p: _identity_with(lambda g: g)(p["a"]), "a"),
    "custom zeros": (lambda p: _identity_with(jnp.zeros_like)(p["a"]) + p["b"], "b"),
    "custom zeros times kept": (lambda p: _forgetting()(p["a"]) + p["b"], "b"),
    "custom scaled by zero": (lambda p: _identity_with(lambda g: 0.0 * g)(p["a"]) + p["b"], "ab"),
    "custom constant": (lambda p: _identity_with(lambda g: jnp.ones_like(g))(p["a"]) + p["b"], "ab"),
    "custom jvp": (lambda p: _relu()(p["a"]) + p["b"], "ab"),
    "vmap": (lambda p: jax.vmap(lambda x: x * p["a"])(jnp.arange(3.0)).sum(), "a"),
    "shard_map": (_sharded, "ab"),
    "gather": (lambda p: jnp.stack([p["a"], p["b"]])[0], "ab"),
    "gradient penalty": (lambda p: jax.grad(lambda a: a**3 * p["b"])(p["a"]) + 0 * p["b"], "ab"),
    "while": (
        lambda p: p["b"] * jax.lax.while_loop(lambda v: v < 9, lambda v: v * 2 + 1, jax.lax.stop_gradient(p["a"])), "b"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_s23_dependence_is_a_property_of_the_program(name: str, jit: bool) -> None:
    function, expected = PROGRAMS[name]
    function = jax.jit(function) if jit else function
    _, backward = jax.vjp(lambda p: jnp.float32(function(p)), {n: jnp.float32(1.5) for n in "abcd"})
    made = gradient_mask(jax.make_jaxpr(backward)(jnp.float32(1)))
    assert "".join(n for n, used in zip("abcd", made, strict=True) if used) == expected


def test_s23_none_survives_a_users_own_arithmetic() -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1, weight_decay=0.1))
    state = polyamp.init((apply_fn, params()), recipe)
    _, first = polyamp.value_and_grad(loss_by("head"))(state, BATCH)
    _, second = polyamp.value_and_grad(loss_by("head"))(state, BATCH)
    mean = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x + y) / 2, a, b))(first.values, second.values)
    assert [leaf.shape for leaf in jax.tree.leaves(mean)] == [(3, 2), (2, 1)]
    new, _ = polyamp.apply_gradients(state, first._replace(values=mean))
    assert new.params["spare"]["bias"].tolist() == [1.0]
    assert new.params["head"]["kernel"].tolist() != state.params["head"]["kernel"].tolist()
    nothing = jax.tree.map(lambda _: None, state.params)
    with pytest.raises(GradientError, match="every gradient is None"):
        polyamp.apply_gradients(state, first._replace(values=nothing))


def test_s23_several_states_each_with_what_it_has() -> None:
    """A state that the loss leaves out has no gradient; the loss that reaches some state is a loss."""
    scaler = polyamp.LossScaler(init_scale=4.0)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1), scaler=scaler)
    states = [polyamp.init((apply_fn, params()), recipe) for _ in range(2)]
    heads = itertools.cycle(["head", "spare"])

    def loss(models: Any, batch: Any) -> Any:
        return sum(jnp.mean(model(batch["x"], next(heads))) for model in models)

    _, gradients = polyamp.value_and_grad(loss)(states, BATCH)
    new, _ = polyamp.apply_gradients(states, gradients)
    assert new[0].params["spare"]["bias"].tolist() == [1.0]
    assert new[1].params["spare"]["bias"].tolist() != [1.0]
    assert new[1].params["head"]["kernel"].tolist() == states[1].params["head"]["kernel"].tolist()
    assert [s.lagging for s in new] == [frozenset({2, 3}), frozenset({1})]


def test_s23_the_step_runs_in_a_scan_of_ones_own() -> None:
    """The state keeps its structure whatever is unused."""
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.1))
    state = polyamp.init((apply_fn, params()), recipe)
    step = polyamp.train_step(loss_by("head"), recipe, donate=False)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), BATCH)
    scanned, _ = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    for _ in range(3):
        state, _ = step(state, BATCH)
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
