"""The step under jit: finite flag, scale, accumulation, precision, the two halves, and the shape of the program."""

from __future__ import annotations

import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyamp
from polyamp.errors import GradientError, LossError, PolicyError, UnsupportedError
from polyamp_jax import compat
from polyamp_jax.step.grad_stats import global_norm_and_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 5, 100_000])
def test_the_flag_finds_every_kind_under_jit(bad: float, size: int) -> None:
    """isfinite(max(abs(g))) misses NaN under jit."""
    measure = jax.jit(global_norm_and_finite)
    good = [jnp.ones(size), jnp.ones((2, 3))]
    norm, finite = measure(good)
    assert bool(finite)
    np.testing.assert_allclose(norm, np.sqrt(size + 6), rtol=1e-6)
    _, finite = measure([good[0].at[size // 2].set(bad), good[1]])
    assert (finite.shape, finite.dtype, bool(finite)) == ((), np.bool_, False)


@pytest.mark.parametrize("exponent", [-125, -100, -64, -62, -30, 0, 30, 63, 64, 100, 126])
def test_the_norm_is_right_over_the_whole_range(exponent: int) -> None:
    values = np.random.default_rng(0).uniform(0.5, 1.0, 1000)
    norm, finite = jax.jit(global_norm_and_finite)(
        [jnp.asarray(np.ldexp(values, exponent - 5).astype(np.float32) * 2.0**5)]
    )
    if np.linalg.norm(np.ldexp(values, exponent)) < np.finfo(np.float32).max:
        np.testing.assert_allclose(float(norm), np.linalg.norm(np.ldexp(values, exponent)), rtol=1e-5)
    assert bool(finite)


def test_the_norm_of_mixed_magnitudes() -> None:
    for values in ([1e-30, 1.0], [1e-30, 1e30], [0.0, 0.0], [1e19, 1e19, 1e-25], [3e38], [0.0], [1e-37]):
        norm, finite = jax.jit(global_norm_and_finite)([jnp.asarray(values, jnp.float32)])
        np.testing.assert_allclose(float(norm), np.linalg.norm(values), rtol=1e-5)
        assert bool(finite)


def test_the_norm_of_gradients_that_are_constants() -> None:
    """A loss that ignores its parameters: with constant factors XLA would fold the norm to 0 * inf."""
    for value in (0.0, 1.0):
        norm, finite = jax.jit(
            lambda value=value: global_norm_and_finite([jnp.full((2, 2), value), jnp.full(1, value)])
        )()
        np.testing.assert_allclose(float(norm), value * 5.0**0.5, rtol=1e-6)
        assert bool(finite)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_scale_of_2_to_the_20_is_fine(make_kind: Any, recipe: Any, batch: Any, policy: str) -> None:
    """A scale kept in float16 would be inf."""
    chosen = recipe(policy, scaler=polyamp.LossScaler.static(2.0**20))
    state = polyamp.init(make_kind("linen").model, chosen)
    state, result = polyamp.train_step(lambda m, b: 1e-4 * jnp.mean(m(b["x"])), chosen)(state, batch())
    assert (float(result.scale), bool(result.skipped)) == (2.0**20, False)


def test_a_16_bit_loss_is_upcast_before_it_is_scaled(recipe: Any, backend: Any) -> None:
    """60000 times 2^15 is inf in float16."""
    scaler = polyamp.LossScaler()
    scale_state = scaler.init("jax")
    for loss in (jnp.float16(60000.0), jnp.full((1,), 60000.0, jnp.float16)):
        scaled = scaler.scale(loss, scale_state)
        assert (scaled.dtype, scaled.shape, float(scaled)) == (jnp.float32, (), 60000.0 * 2.0**15)
    policy = polyamp.Policy(compute="float16", output="float16")
    chosen = recipe(policy, scaler=polyamp.LossScaler.static(2.0**10))
    state = polyamp.init((lambda p, x: x * p["w"], {"w": jnp.ones(1)}), chosen)
    value, gradients = polyamp.value_and_grad(lambda m, b: jnp.mean(m(b)))(state, jnp.full((4, 1), 6.0, jnp.float32))
    assert (value.dtype, float(value)) == (jnp.float32, 6.0)
    np.testing.assert_allclose(gradients.values["w"], [6.0], rtol=1e-3)


def test_gradients_are_unscaled_with_the_scale_that_made_them(make_kind: Any, recipe: Any, batch: Any) -> None:
    """mpx unscales with the new scale: off by 2 on a growth step; after a backoff the reported loss is."""

    def loss_fn(model: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(model(batch["x"])) * batch["gain"])

    moving = recipe(scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=2), optimizer=polyamp.sgd(0.0))
    state = polyamp.init(make_kind("linen").model, moving)
    step = polyamp.train_step(loss_fn, moving)
    norms, losses, scales = [], [], []
    for gain in (1.0, 1.0, 1.0, np.inf, 1.0, 1.0):
        state, result = step(state, batch(gain=gain))
        scales.append(float(result.scale))
        if np.isfinite(gain):
            norms.append(float(result.grad_norm))
            losses.append(float(result.loss))
    assert scales == [16.0, 32.0, 32.0, 16.0, 16.0, 32.0]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-3)
    assert len(set(losses)) == 1


def after_three(made: Any, recipe: Any, loss_fn: Any, steps: int, item: Any) -> tuple[float, list[Any]]:
    """The last loss and the parameters after three steps of `steps` micro-batches each."""
    chosen = recipe("float32", accumulate_steps=steps, optimizer=polyamp.sgd(0.1, momentum=0.9), clip_norm=0.1)
    state = polyamp.init(made.model, chosen, **made.options)
    step = polyamp.train_step(loss_fn, chosen)
    for _ in range(3):
        state, result = step(state, item)
    return float(result.loss), [np.array(leaf) for leaf in jax.tree.leaves(state.params)]


def test_accumulating_equals_one_big_batch(make: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    made, big = make(), batch(size=8)
    (whole_loss, whole), (loss, params) = (after_three(made, recipe, loss_fn, steps, big) for steps in (1, 4))
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
    for a, b in zip(params, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_list_of_micro_batches_is_the_batch_cut(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    made, big = make_kind("linen"), batch(size=8)
    pieces = [{name: value[i : i + 2] for name, value in big.items()} for i in range(0, 8, 2)]
    (cut_loss, cut), (loss, params) = (after_three(made, recipe, loss_fn, 4, item) for item in (big, pieces))
    assert loss == cut_loss
    assert all(np.array_equal(a, b) for a, b in zip(params, cut, strict=True))


def test_statistics_flow_from_micro_batch_to_micro_batch(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    made = make_kind("linen", norm=True)
    module, variables = made.model
    halves = [batch(0), batch(1)]
    running = variables["batch_stats"]
    for half in halves:
        _, changed = module.apply({**variables, "batch_stats": running}, half["x"], mutable=["batch_stats"])
        running = changed["batch_stats"]
    chosen = recipe("float32", accumulate_steps=2)
    state, _ = polyamp.train_step(loss_fn, chosen)(polyamp.init(made.model, chosen), halves)
    np.testing.assert_allclose(
        state.running.statistics["batch_stats"]["norm"]["mean"], running["norm"]["mean"], rtol=1e-6
    )


def test_parameters_are_cast_once_for_all_micro_batches(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any
) -> None:
    # in autocast mode the casts stand where the layers are, and XLA takes them out of the loop
    chosen = recipe(polyamp.Policy("mixed_float16", mode="cast"), accumulate_steps=4)
    state = polyamp.init(make_kind("linen").model, chosen)
    step = backend.train_step(loss_fn, chosen, compile=False)
    jaxpr = jax.make_jaxpr(step)(state, batch()).jaxpr
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    casts = [
        e for e in jaxpr.eqns
        if e.primitive.name == "convert_element_type" and e.params["new_dtype"] == np.float16
    ]  # fmt: skip
    assert len(casts) == 6, "three kernels and three biases"
    first, count = compat.scan_counts(scan)
    carried = scan.invars[first : first + count]
    sums = [v for v in carried if v.aval.shape]
    assert {v.aval.dtype.name for v in sums} == {"float32"}


def test_the_compiled_step_waits_for_nothing(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any
) -> None:
    """Skipping is an elementwise select inside the update: no transfer, masters updated in place.

    The one conditional is a CPU's own, which has no host to wait for: a norm out of range is summed again.
    """
    chosen = recipe(optimizer=polyamp.adamw(1e-3), clip_norm=1.0)
    state = polyamp.init(make_kind("linen", norm=True).model, chosen)
    compiled = backend.train_step(loss_fn, chosen).lower(state, batch()).compile()
    text = compiled.as_text()
    assert re.findall(r"= (.*) conditional\(", text) == ["(f32[], pred[])"]
    assert "callback" not in text
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= 3 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)), (
        "masters and both moments in place"
    )


def test_a_switched_off_scaler_leaves_no_trace(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any, equations: Any
) -> None:
    chosen = recipe("float32", scaler=polyamp.LossScaler.off(), optimizer=polyamp.sgd(0.1))
    state = polyamp.init(make_kind("linen").model, chosen)
    text = backend.train_step(loss_fn, chosen).lower(state, batch()).compile().as_text()
    assert not re.search(r"pred\[\d[^ ]* is-finite", text), "no array is looked at for its flag"
    found = equations(backend.train_step(loss_fn, chosen, compile=False), state, batch())
    assert "div" not in {e.primitive.name for e in found if e.outvars[0].aval.shape == (8, 8)}
    new, result = polyamp.train_step(loss_fn, chosen)(state, batch(gain=np.nan))
    assert not bool(result.skipped)
    assert np.isnan(jax.tree.leaves(new.params)[0]).any(), "as plain code would"


@pytest.mark.parametrize(
    ("word", "precision"), [("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT"), (None, None)]
)
def test_float32_matmul_sets_the_precision_of_every_product(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any, equations: Any, word: Any, precision: Any
) -> None:
    chosen = recipe(polyamp.Policy("float32", float32_matmul=word))
    state = polyamp.init(make_kind("linen").model, chosen)
    found = equations(backend.train_step(loss_fn, chosen, compile=False), state, batch())
    names = {
        e.params["precision"] and e.params["precision"][0].name for e in found if e.primitive.name == "dot_general"
    }
    assert names == {precision}


def test_both_halves_and_the_whole_step_work_inside_a_users_jit(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any
) -> None:
    chosen = recipe(optimizer=polyamp.adam(1e-2), scaler=polyamp.LossScaler(init_scale=2.0**8), clip_norm=1.0)
    made = make_kind("linen", norm=True, dropout=True)

    def fresh() -> Any:
        return polyamp.init(made.model, chosen, **made.options)

    step = backend.train_step(loss_fn, chosen, compile=False)

    @jax.jit
    def halves(state: Any, batch: Any) -> Any:
        value, gradients = polyamp.value_and_grad(loss_fn)(state, batch)
        state, result = polyamp.apply_gradients(state, gradients)
        return state, result._replace(loss=value)

    ends = []
    for run in (polyamp.train_step(loss_fn, chosen), jax.jit(step), halves):
        state = fresh()
        for i in range(3):
            state, result = run(state, batch(i, gain=np.inf if i == 1 else 1.0))
        ends.append(backend.export_state(state))
        assert (int(result.step), float(result.scale)) == (2, 2.0**7)
    for other in ends[1:]:
        for name, value in ends[0].items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_uncompiled_steps_agree(make: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    made = make(dropout=True)
    ends = []
    for compiled in (True, False):
        state = polyamp.init(made.model, recipe("float32"), **made.options)
        step = polyamp.train_step(loss_fn, recipe("float32"), compile=compiled)
        for i in range(2):
            state, result = step(state, batch(i))
        ends.append(float(result.loss))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5)


def test_value_and_grad_changes_nothing_and_commits_on_apply(
    make_kind: Any, recipe: Any, batch: Any, loss_fn: Any, backend: Any
) -> None:
    chosen = recipe(scaler=polyamp.LossScaler(init_scale=2.0**8))
    made = make_kind("nnx", norm=True, dropout=True)
    state = polyamp.init(made.model, chosen)
    before = backend.export_state(state)
    value, gradients = polyamp.value_and_grad(loss_fn)(state, batch(gain=np.inf))
    assert {k: v.tobytes() for k, v in before.items()} == {
        k: v.tobytes() for k, v in backend.export_state(state).items()
    }
    assert not np.isfinite(float(value))
    state, result = polyamp.apply_gradients(state, gradients)
    assert bool(result.skipped)
    after = backend.export_state(state)
    changed = {name.partition("/")[0] for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {"loss_scale", "rng"}, "a mask that overflows must not come back"


def test_several_states_share_one_scale(make_kind: Any, recipe: Any, batch: Any) -> None:
    def loss(models: Any, batch: Any) -> Any:
        first, second = models
        return jnp.mean(first(batch["x"])) + jnp.mean(second(batch["x"]) * batch["gain"])

    scaler = polyamp.LossScaler(init_scale=16.0)
    chosen = [recipe("mixed_float16", scaler=scaler), recipe("mixed_bfloat16", scaler=scaler)]
    cases: list[tuple[Any, list[int]]] = [("all", [0, 0]), ("each", [1, 0])]
    for skip, steps in cases:
        states = [polyamp.init(make_kind(kind).model, r) for kind, r in zip(("linen", "nnx"), chosen, strict=True)]
        _, gradients = polyamp.value_and_grad(loss)(states, batch(gain=np.inf))
        states, results = polyamp.apply_gradients(states, gradients, skip=skip)
        assert [int(r.step) for r in results] == steps
        assert [float(s.scale_state.scale) for s in states] == [8.0, 8.0]
        first = {leaf.unsafe_buffer_pointer() for leaf in states[0].scale_state}
        assert first.isdisjoint(leaf.unsafe_buffer_pointer() for leaf in states[1].scale_state)


def test_gradients_that_do_not_fit_are_named(make_kind: Any, recipe: Any, batch: Any, loss_fn: Any) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    missing = {name: value for name, value in gradients.values.items() if name != "first"}
    whole = jax.tree.map(lambda g: g.astype(jnp.int32), gradients.values)
    for values, message in (
        (missing, "Missing: .*'first/kernel'"),
        (whole, "must be a floating array. Received: int32"),
    ):
        with pytest.raises(GradientError, match=message):
            polyamp.apply_gradients(state, gradients._replace(values=values))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda m, x: m(x), "scalar loss. Received shape"),
        (lambda m, x: 1.0, r"Received: 1\.0, a float\. A number of Python.s carries no gradient"),
        (lambda m, x: jnp.sum(x > 0), "floating loss. Received dtype: int32"),
    ],
)
def test_losses_that_are_none_are_refused(make_kind: Any, recipe: Any, batch: Any, result: Any, message: str) -> None:
    state = polyamp.init(make_kind("linen").model, recipe())
    with pytest.raises(LossError, match=message):
        polyamp.train_step(lambda m, b: result(m, b["x"]), recipe())(state, batch())


def test_what_the_backend_lacks_is_refused_at_init(make_kind: Any, recipe: Any, loss_fn: Any, batch: Any) -> None:
    model = make_kind("linen").model
    unknown = polyamp.Policy("mixed_float16", op_rules={"expp": "compute"})
    with pytest.raises(PolicyError, match=r"no operation 'expp'\. Did you mean 'exp'"):
        polyamp.init(model, recipe(unknown))
    with pytest.raises(PolicyError, match="no operation 'expp'"):
        unknown.autocast(model)
    with pytest.raises(PolicyError, match="no operation 'expp'"):
        unknown.native("jax")
    with pytest.raises(UnsupportedError, match="float64 only in x64 mode"):
        polyamp.init(model, recipe(polyamp.Policy(param="float64")))
    with pytest.raises(UnsupportedError, match=r"Received: compiled=.*Did you mean 'compile'"):
        polyamp.train_step(loss_fn, recipe(), compiled=True)(polyamp.init(model, recipe()), batch())
    with pytest.raises(PolicyError, match="a plain function has none"):
        polyamp.Policy("mixed_float16", mode="cast", overrides={"a": "float32"}).autocast(jnp.sin, backend="jax")


def test_autocast_of_a_function_casts_its_boundary() -> None:
    seen = []

    def function(x: Any, *, scale: Any, label: Any) -> Any:
        seen.extend([x.dtype.name, scale.dtype.name, label.dtype.name])
        return {"y": x * scale, "label": label, "name": "n", "none": None}

    policy = polyamp.Policy(compute="bfloat16", output="float32", mode="cast")
    for cast in (policy.autocast(function), policy.native("jax")(function)):
        result = cast(jnp.ones(2), scale=np.ones(2), label=jnp.arange(2))
        assert result["y"].dtype == jnp.float32
        assert (result["name"], result["none"]) == ("n", None)
    assert seen == ["bfloat16", "bfloat16", "int32"] * 2


def test_only_floating_leaves_are_cast(backend: Any) -> None:
    leaves: dict[str, Any] = {
        "typed": jax.random.key(0),
        "raw": jax.random.PRNGKey(0),
        "int": jnp.arange(2),
        "double": np.ones(2, np.float64),
        "numpy": np.ones(2, np.float32),
        "complex": jnp.ones(2, jnp.complex64),
        "text": "text",
        "none": None,
    }
    cast = backend.cast(leaves, "float16")
    assert cast["numpy"].dtype == np.float16
    assert leaves["numpy"].dtype == np.float32
    for name in set(leaves) - {"numpy"}:
        assert cast[name] is leaves[name], name
    assert backend.cast(leaves, "float16", float64=True)["double"].dtype == np.float16


def test_float32_matmul_of_two_threads_at_once() -> None:
    """JAX's precision is thread-local: neither thread sees the other's, whatever they ask for."""
    before = jax.config.jax_default_matmul_precision
    entered, leave, seen = threading.Event(), threading.Event(), []

    def watched(name: str) -> Any:
        def function(x: Any) -> Any:
            if name == "medium":
                entered.set()
                assert leave.wait(20)
            else:
                thread.start()
                assert entered.wait(20)
            seen.append((name, jax.config.jax_default_matmul_precision))
            return x

        return polyamp.Policy("float32", float32_matmul=name).autocast(function, backend="jax")

    thread = threading.Thread(target=lambda: watched("medium")(jnp.ones(2)))
    watched("highest")(jnp.ones(2))
    leave.set()
    thread.join(20)
    assert seen[0][1] != seen[1][1]
    assert {name for name, _ in seen} == {"highest", "medium"}
    assert jax.config.jax_default_matmul_precision == before
