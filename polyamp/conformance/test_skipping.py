"""Rules S12 to S14: what a skipped step leaves alone, what counts as a step, several optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import batch, changed_arrays, flat_weights, layers, loss_fn, recipe, to_float, train
from polyamp.contract.backend import Backend
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import RecipeError

OPTIMIZERS = [
    polyamp.sgd(polyamp.schedules.cosine(0.1, steps=20), momentum=0.9, nesterov=True, weight_decay=1e-3),
    polyamp.adam(polyamp.schedules.linear_warmup(1e-2, 5), weight_decay=1e-3),
    polyamp.adamw(polyamp.schedules.warmup_cosine(1e-2, 2, 20)),
    polyamp.rmsprop(polyamp.schedules.step(1e-2, every=2), momentum=0.9, centered=True),
    polyamp.adagrad(1e-2, lr_decay=0.1),
    polyamp.lion(polyamp.schedules.piecewise((1e-3, 1e-4), (2,)), weight_decay=0.1),
    polyamp.nadam(polyamp.schedules.linear_warmup(1e-2, 5), weight_decay=1e-3),
    polyamp.adamw(1e-3, amsgrad=True),
    polyamp.lamb(polyamp.schedules.linear_warmup(1e-2, 5)),
    polyamp.adafactor(polyamp.schedules.linear_warmup(1e-2, 5), weight_decay=1e-3),
    polyamp.muon(polyamp.schedules.linear_warmup(1e-2, 5), adamw_learning_rate=1e-3),
    polyamp.schedule_free(polyamp.schedules.linear_warmup(1e-2, 5), weight_decay=1e-3),
]


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_s12_skip_leaves_everything_unchanged(backend: Backend, harness: Harness, optimizer: Any, first: bool) -> None:
    made = recipe(optimizer=optimizer, clip_norm=1.0, scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(harness.mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    for i in range(0 if first else 3):
        state, _ = step(state, batch(i))
    before = backend.export_state(state)
    state, result = step(state, batch(9, gain=np.inf))
    after = backend.export_state(state)
    assert bool(backend.to_numpy(result.skipped))
    shared = {name: value for name, value in after.items() if name in before}
    assert changed_arrays({name: before[name] for name in shared}, shared) == []
    assert set(before) <= set(after)
    assert to_float(backend, result.step) == (0 if first else 3)
    assert [int(after[f"loss_scale/{n}"]) for n in ("scale", "skipped", "good_steps")] == [8, 1, 0]


def test_s12_skip_leaves_running_statistics_unchanged(backend: Backend, harness: Harness) -> None:
    made = recipe("mixed_bfloat16", scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(harness.normalized_mlp(layers()), made)
    step = polyamp.train_step(loss_fn, made)
    start = backend.export_state(state)
    state, _ = step(state, batch(0))
    before = backend.export_state(state)
    assert any(n.startswith("running/") and not np.array_equal(start[n], before[n]) for n in start), (
        "running statistics must move on an applied step"
    )
    state, result = step(state, batch(1, gain=np.inf))
    assert bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, backend.export_state(state)) == []


LIMIT = 0.25
"""What the first kernel is clipped to: a number that 16 bits hold."""


def constrained_state(harness: Harness, made: polyamp.Recipe) -> tuple[Any, list[DenseWeights]]:
    """The state of a model whose forward pass clips its first kernel, and its weights once they are clipped."""
    weights = layers()
    model = harness.constrained_mlp(weights, LIMIT)
    if model is None:
        pytest.skip("models of this backend cannot write to their parameters")
    assert np.abs(weights[0].kernel).max() > 2.0 * LIMIT
    first = weights[0]._replace(kernel=np.clip(weights[0].kernel, -LIMIT, LIMIT))
    return polyamp.init(model, made), [first, *weights[1:]]


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s12_what_the_forward_pass_writes_to_a_parameter_takes_effect_with_the_step(
    harness: Harness, mode: Any, windows: int
) -> None:
    """The step is that of a model which begins with what was written."""
    made = recipe(polyamp.Policy("mixed_bfloat16", mode=mode), accumulate_steps=windows)
    state, clipped = constrained_state(harness, made)
    state, _ = polyamp.train_step(loss_fn, made)(state, batch())
    wanted, _ = train(harness, made, [batch()], weights=clipped)
    for got, want in zip(harness.weights(state), harness.weights(wanted), strict=True):
        np.testing.assert_allclose(got.kernel, want.kernel, rtol=0.0, atol=2e-7)
        np.testing.assert_allclose(got.bias, want.bias, rtol=0.0, atol=2e-7)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_s12_a_skipped_step_takes_back_what_the_forward_pass_wrote(
    backend: Backend, harness: Harness, policy: str
) -> None:
    made = recipe(policy, scaler=polyamp.LossScaler(init_scale=16.0))
    state, _ = constrained_state(harness, made)
    before = backend.export_state(state)
    polyamp.value_and_grad(loss_fn)(state, batch())
    assert changed_arrays(before, backend.export_state(state)) == [], "a half that applies nothing"
    step = polyamp.train_step(loss_fn, made)
    state, result = step(state, batch(gain=np.inf))
    assert bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, backend.export_state(state)) == []


def test_s12_the_two_halves_keep_running_statistics_until_applied(backend: Backend, harness: Harness) -> None:
    made = recipe(scaler=polyamp.LossScaler(init_scale=16.0))
    state = polyamp.init(harness.normalized_mlp(layers()), made)
    before = backend.export_state(state)
    run = polyamp.value_and_grad(loss_fn)
    _, gradients = run(state, batch())
    assert changed_arrays(before, backend.export_state(state)) == [], "value_and_grad must change nothing"
    state, result = polyamp.apply_gradients(state, run(state, batch(gain=np.inf))[1])
    assert bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, backend.export_state(state)) == []
    state, _ = polyamp.apply_gradients(state, gradients)
    assert any(name.startswith("running/") for name in changed_arrays(before, backend.export_state(state)))


def test_s12_two_calls_draw_two_masks(backend: Backend, harness: Harness) -> None:
    """By hand on one state, in the next attempt on it, and over the micro-batches of a window."""
    model = harness.dropout_mlp(layers((4, 64, 3)))
    if model is None:
        return  # a backend whose models have no randomness says so, and has nothing to draw
    made = recipe(optimizer=polyamp.sgd(0.0), accumulate_steps=3)

    def with_output(model: Any, batch: Any) -> Any:
        output = model(batch["x"])
        return polyamp.losses.mean_squared_error(output, batch["y"]), output

    state = polyamp.init(model[0], made, **model[1])
    run = polyamp.value_and_grad(with_output)
    outputs = []
    for _ in range(2):
        for _ in range(3):
            (_, output), gradients = run(state, batch())
            outputs.append(backend.to_numpy(output))
        state, _ = polyamp.apply_gradients(state, gradients)
    _, result = polyamp.train_step(with_output, made)(state, [batch()] * 3)
    outputs.extend(backend.to_numpy(result.aux))
    assert len({output.tobytes() for output in outputs}) == 9
    mean = np.mean(outputs, 0)
    assert all(float(np.abs(output - mean).max()) > 0.05 for output in outputs), "a mask moves more than rounding does"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_s13_only_applied_updates_count(backend: Backend, harness: Harness, optimizer: Any) -> None:
    """Overflows in between change nothing: the same weights, bit for bit, as without those batches."""
    made = recipe(optimizer=optimizer, scaler=polyamp.LossScaler.static(4.0))
    clean = [batch(i) for i in range(5)]
    bad = batch(9, gain=np.nan)
    undisturbed, _ = train(harness, made, clean)
    disturbed, results = train(harness, made, [bad, *clean[:2], bad, bad, *clean[2:]])
    assert [bool(backend.to_numpy(r.skipped)) for r in results] == [True, False, False, True, True, *[False] * 3]
    assert to_float(backend, results[-1].step) == 5
    assert np.array_equal(flat_weights(harness, undisturbed), flat_weights(harness, disturbed))


def two_losses(models: Any, batch: Any) -> Any:
    """Each model learns its own target; `gain` touches the first alone."""
    first, second = models
    return loss_fn(first, batch) + polyamp.losses.mean_squared_error(second(batch["x"]), batch["y"])


@pytest.mark.parametrize("skip", ["all", "each"])
def test_s14_several_optimizers_share_one_scaler(backend: Backend, harness: Harness, skip: Any) -> None:
    scaler = polyamp.LossScaler(init_scale=16.0)
    made = [recipe(scaler=scaler), recipe(scaler=scaler, optimizer=polyamp.adam(1e-2))]
    states = [polyamp.init(harness.mlp(layers(seed=i)), r) for i, r in enumerate(made)]
    before = [flat_weights(harness, state) for state in states]
    bad = batch(gain=np.inf)
    bad["y"] = np.zeros_like(bad["y"])
    _, gradients = polyamp.value_and_grad(two_losses)(states, bad)
    states, results = polyamp.apply_gradients(states, gradients, skip=skip)
    assert [bool(backend.to_numpy(r.skipped)) for r in results] == [True, skip == "all"]
    same = [np.array_equal(old, flat_weights(harness, state)) for old, state in zip(before, states, strict=True)]
    assert same == [True, skip == "all"]
    assert [to_float(backend, r.scale) for r in results] == [8.0, 8.0], "one adjustment, on the OR of the flags"
    _, gradients = polyamp.value_and_grad(two_losses)(states, batch())
    states, results = polyamp.apply_gradients(states, gradients, skip=skip)
    assert [bool(backend.to_numpy(r.skipped)) for r in results] == [False, False]
    assert [to_float(backend, r.scale) for r in results] == [8.0, 8.0]


def test_s14_states_whose_scales_have_drifted_apart(backend: Backend, harness: Harness) -> None:
    """One loss is multiplied by one scale, so all its gradients are unscaled with that one."""
    made = recipe(scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=1))
    states = [polyamp.init(harness.mlp(layers(seed=i)), made) for i in range(2)]
    _, want = polyamp.value_and_grad(two_losses)(states, batch())
    stepped, _ = polyamp.apply_gradients(states[1], want[1]._replace(values=_zeros(want[1].values)))
    assert to_float(backend, stepped.scale_state.scale) == 32.0
    _, got = polyamp.value_and_grad(two_losses)([states[0], stepped], batch())
    for a, b in zip(want, got, strict=True):
        for (name, x), (_, y) in zip(backend.named_gradients(a), backend.named_gradients(b), strict=True):
            assert np.array_equal(backend.to_numpy(x), backend.to_numpy(y)), name


def _zeros(tree: Any) -> Any:
    return {key: _zeros(value) for key, value in tree.items()} if isinstance(tree, dict) else tree * 0.0


def test_s14_one_state_twice_is_refused(backend: Backend, harness: Harness) -> None:
    """Its update would be applied twice, or half of it lost."""
    state, other = (polyamp.init(harness.mlp(layers(seed=i)), recipe()) for i in range(2))
    before = backend.export_state(state)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    with pytest.raises(RecipeError, match="the same state at positions 0 and 2"):
        polyamp.value_and_grad(lambda models, batch: loss_fn(models[0], batch))([state, other, state], batch())
    with pytest.raises(RecipeError, match="the same state at positions 0 and 1"):
        polyamp.apply_gradients([state, state], [gradients, gradients])
    assert changed_arrays(before, backend.export_state(state)) == []


def test_s14_states_with_different_scalers_are_refused(harness: Harness) -> None:
    made = [recipe(scaler=polyamp.LossScaler.static(scale)) for scale in (2.0, 4.0)]
    states = [polyamp.init(harness.mlp(layers()), r) for r in made]
    _, gradients = polyamp.value_and_grad(loss_fn)(states[0], batch())
    with pytest.raises(RecipeError, match="must share one scaler"):
        polyamp.apply_gradients(states, [gradients, gradients])


@pytest.mark.parametrize(
    "make", [polyamp.sgd, polyamp.adam, polyamp.adamw, polyamp.rmsprop, polyamp.adagrad, polyamp.lion, polyamp.nadam]
)
def test_s13_the_first_update_uses_the_rate_of_count_zero(harness: Harness, make: Any) -> None:
    made = recipe(optimizer=make(polyamp.schedules.piecewise((0.1, 0.0), (1,))))
    start, first, second = (flat_weights(harness, train(harness, made, [batch()] * count)[0]) for count in range(3))
    assert not np.array_equal(start, first)
    assert np.array_equal(first, second), "the second update has rate 0"


def test_s13_the_first_update_of_adam_is_the_rate(harness: Harness) -> None:
    """Not against the reference, which may be wrong itself: bias correction makes the first quotient of moments 1."""
    start = flat_weights(harness, polyamp.init(harness.mlp(layers()), recipe()))
    for count in (1, 2):
        made = recipe(optimizer=polyamp.adam(1e-3, eps=1e-30))
        moved = np.abs(start - flat_weights(harness, train(harness, made, [batch()] * count)[0]))
        np.testing.assert_allclose(moved[moved > 0], count * 1e-3, rtol=1e-2)
        assert np.mean(moved > 0) > 0.5


def test_s14_states_in_changing_company(backend: Backend, harness: Harness) -> None:
    """A backend that caches programs must not confuse [a, b] with [a, c]."""
    made = recipe(scaler=polyamp.LossScaler.static(4.0))
    states = [polyamp.init(harness.mlp(layers(seed=i)), made) for i in range(3)]
    run = polyamp.value_and_grad(loss_fn)
    first, second, third = (run(state, batch())[1] for state in states)
    (a, b), _ = polyamp.apply_gradients([states[0], states[1]], [first, second])
    (a, c), _ = polyamp.apply_gradients([a, states[2]], [first, third])
    assert [to_float(backend, state.step) for state in (a, b, c)] == [2, 1, 1]


def test_s12_several_states_keep_their_running_statistics(backend: Backend, harness: Harness) -> None:
    made = recipe(scaler=polyamp.LossScaler(init_scale=16.0))
    states = [polyamp.init(harness.normalized_mlp(layers(seed=i)), made) for i in range(2)]
    before = [backend.export_state(state) for state in states]
    polyamp.value_and_grad(two_losses)(states, batch())
    after = [backend.export_state(state) for state in states]
    assert [changed_arrays(old, new) for old, new in zip(before, after, strict=True)] == [[], []]
