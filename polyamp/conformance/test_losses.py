"""Rules S24 and S25: the losses' formulas, labels outside of the classes, and what a model adds by itself."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

import polyamp
from polyamp.conformance.loss_problems import logits_gradient, logits_state, numeric_gradient
from polyamp.conformance.problems import Array, changed_arrays, is_on_cpu, recipe, to_float
from polyamp.contract.harness import DenseWeights, Harness
from polyamp.errors import LossError

if TYPE_CHECKING:
    from polyamp.contract.backend import Backend

LABELS: Final = np.array([2, 0, 1, 1, 3, 2], np.int64)
WEIGHTS: Final = np.array([0.5, 2.0, 1.5, 0.25], np.float32)
LOGITS: Final = np.random.default_rng(3).normal(0.0, 2.0, (6, 4)).astype(np.float32)
IGNORED_LABELS: Final = np.where(np.arange(6) % 3 == 1, -100, LABELS)
PROBABILITIES: Final = np.random.default_rng(4).dirichlet(np.ones(4), 6).astype(np.float32)
SETTINGS: Final = [
    (labels, {**ignored, **smoothing, **weights})
    for (labels, ignored), smoothing, weights in itertools.product(
        [(LABELS, {}), (LABELS, {"ignore_index": 1}), (IGNORED_LABELS, {"ignore_index": -100}), (PROBABILITIES, {})],
        [{}, {"label_smoothing": 0.1}],
        [{}, {"class_weights": WEIGHTS}],
    )
]
GRID: Final = [
    *((labels, {**options, "reduction": "mean"}) for labels, options in SETTINGS),
    *((labels, {**options, "reduction": "sum"}) for labels, options in SETTINGS[3::8]),
    *((labels, {**options, "reduction": "none"}) for labels, options in SETTINGS[3::4]),
]


def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    class_weights: Any = None,
    reduction: str = "mean",
) -> Any:
    """torch's formulas, in float64 and one row after the other."""
    logits = logits.astype(np.float64)
    weights = np.ones(logits.shape[-1]) if class_weights is None else class_weights.astype(np.float64)
    rows, counts = [], []
    for row, label in zip(logits, labels, strict=True):
        costs = -weights * (row - row.max() - np.log(np.exp(row - row.max()).sum()))
        if np.ndim(label):
            rows.append((1 - label_smoothing) * (label * costs).sum() + label_smoothing * costs.mean())
            counts.append(1.0)
        elif label == ignore_index:
            rows.append(0.0)
            counts.append(0.0)
        else:
            rows.append((1 - label_smoothing) * costs[label] + label_smoothing * costs.mean())
            counts.append(weights[label])
    if reduction == "none":
        return np.array(rows)
    return sum(rows) / sum(counts) if reduction == "mean" else sum(rows)


@pytest.mark.parametrize(("policy", "digits"), [("float32", 2e-6), ("bfloat16", 8e-3)])
def test_s24_cross_entropy_has_torchs_values_and_gradients(
    backend: Backend, harness: Harness, policy: str, digits: float
) -> None:
    """All of ignore_index, smoothing, class weights, reductions and kinds of labels, inside a step."""
    narrow = polyamp.Policy(compute=policy, output=policy)
    made = recipe(narrow, scaler=polyamp.LossScaler.off())
    factors = np.random.default_rng(5).uniform(0.5, 2.0, len(GRID))

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        found = [
            polyamp.losses.softmax_cross_entropy(logits, labels, **options)
            for labels, (_, options) in zip(batch["labels"], GRID, strict=True)
        ]
        total = 0.0
        for value, factor in zip(found, factors, strict=True):
            total = total + float(factor) * (value if value.shape == () else value[0] + 2.0 * value[1])
        return total, found

    state = logits_state(harness, LOGITS, made)
    given = {"x": np.eye(6, dtype=np.float32), "labels": tuple(labels for labels, _ in GRID)}
    (_, found), gradients = polyamp.value_and_grad(loss_fn)(state, given)
    seen = backend.to_numpy(backend.cast(harness.array(LOGITS), policy)).astype(np.float64)
    for value, (labels, options) in zip(found, GRID, strict=True):
        got = backend.to_numpy(value)
        assert got.dtype == np.float32
        np.testing.assert_allclose(
            got, cross_entropy(seen, labels, **options), rtol=2e-6, atol=1e-6, err_msg=f"{labels} {options}"
        )

    def whole(logits: Array) -> float:
        values = [np.asarray(cross_entropy(logits, labels, **options)) for labels, options in GRID]
        pairs = zip(factors, values, strict=True)
        return float(sum(f * (v if v.shape == () else v[0] + 2.0 * v[1]) for f, v in pairs))

    want = numeric_gradient(whole, seen)
    np.testing.assert_allclose(
        logits_gradient(backend, gradients, LOGITS.shape), want, rtol=0, atol=digits * np.abs(want).max()
    )


def test_s24_values_outside_of_a_step_and_labels_of_every_kind(backend: Backend, harness: Harness) -> None:
    """There the labels' values are on the host, where a step may be traced."""
    logits = harness.array(LOGITS)
    for labels, options in GRID[::4]:
        for given in (labels, harness.array(labels)):
            got = backend.to_numpy(polyamp.losses.softmax_cross_entropy(logits, given, **options))
            want = cross_entropy(LOGITS, labels, **options)
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6, err_msg=f"{options}")
    for dtype in ("uint8", "int8", "int16", "int32"):
        got = polyamp.losses.softmax_cross_entropy(logits, harness.array(LABELS.astype(dtype)))
        np.testing.assert_allclose(to_float(backend, got), cross_entropy(LOGITS, LABELS), rtol=2e-6)


@pytest.mark.parametrize("kind", ["traced", "host"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "class_weights": WEIGHTS, "ignore_index": -100}])
@pytest.mark.parametrize("label", [-1, 4, 1000])
def test_s24_a_label_outside_of_the_classes_is_never_another_class(
    backend: Backend, harness: Harness, label: int, options: Any, kind: str
) -> None:
    """On the host it is refused; a traced step gives NaN, in the gradient too, so that nothing is applied."""
    labels = LABELS.copy()
    labels[3] = label
    said = rf"labels from 0 to 3, .* of 4 classes\. Received: {label} at index \(3,\); of 6 labels 1 are outside"
    if kind == "host":
        with pytest.raises(LossError, match=said):
            polyamp.losses.softmax_cross_entropy(harness.array(LOGITS), labels, **options)
        if is_on_cpu(backend):
            with pytest.raises(LossError, match=said):
                polyamp.losses.softmax_cross_entropy(harness.array(LOGITS), harness.array(labels), **options)
        else:  # the host doesn't read a GPU's values
            on_device = polyamp.losses.softmax_cross_entropy(harness.array(LOGITS), harness.array(labels), **options)
            assert np.isnan(to_float(backend, on_device))
        return

    def loss_fn(model: Any, batch: Any) -> Any:
        rows = polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"], reduction="none", **options)
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"], **options), rows

    made = recipe(scaler=polyamp.LossScaler(init_scale=8.0))
    state = logits_state(harness, LOGITS, made)
    before = backend.export_state(state)
    given = {"x": np.eye(6, dtype=np.float32), "y": labels}
    try:
        (loss, rows), gradients = polyamp.value_and_grad(loss_fn)(state, given)
    except LossError:  # a step that is not compiled sees the values
        with pytest.raises(LossError, match=said):
            polyamp.train_step(loss_fn, made)(state, given)
        assert changed_arrays(before, backend.export_state(state)) == []
        return
    assert np.isnan(to_float(backend, loss))
    assert np.isnan(backend.to_numpy(rows)).tolist() == [False] * 3 + [True] + [False] * 2
    assert np.isnan(logits_gradient(backend, gradients, LOGITS.shape)[3]).all()
    state, result = polyamp.train_step(loss_fn, made)(state, given)
    assert bool(backend.to_numpy(result.skipped))
    assert changed_arrays(before, backend.export_state(state)) == []


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "class_weights": WEIGHTS}])
def test_s24_ignored_rows_have_no_gradient_whatever_they_hold(backend: Backend, harness: Harness, options: Any) -> None:
    """NaN and infinities behind a mask: the derivative of a masked NaN would be NaN."""
    gains = np.ones((6, 4), np.float32)
    gains[1], gains[4] = np.nan, np.inf

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        return polyamp.losses.softmax_cross_entropy(logits + batch["added"], batch["y"], ignore_index=-100, **options)

    state = logits_state(harness, LOGITS, recipe())
    given = {"x": np.eye(6, dtype=np.float32), "y": IGNORED_LABELS, "added": gains}
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, given)
    want = cross_entropy(LOGITS, IGNORED_LABELS, ignore_index=-100, **options)
    np.testing.assert_allclose(to_float(backend, loss), want, rtol=2e-6)
    found = logits_gradient(backend, gradients, LOGITS.shape)
    assert found[[1, 4]].tolist() == [[0.0] * 4] * 2
    assert np.isfinite(found).all()
    assert (found[[0, 2, 3, 5]] != 0.0).all()


def test_s24_the_mean_of_no_row_is_nan_and_moves_nothing(backend: Backend, harness: Harness) -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"], ignore_index=3)

    state = logits_state(harness, LOGITS, recipe())
    given = {"x": np.eye(6, dtype=np.float32), "y": np.full(6, 3)}
    loss, gradients = polyamp.value_and_grad(loss_fn)(state, given)
    assert to_float(backend, loss) == to_float(backend, gradients.weight) == 0.0  # a step says so (S8)
    assert not logits_gradient(backend, gradients, LOGITS.shape).any()
    alone = polyamp.losses.softmax_cross_entropy(harness.array(LOGITS), given["y"], ignore_index=3)
    assert np.isnan(to_float(backend, alone))


@pytest.mark.parametrize("name", ["mean_squared_error", "sigmoid_cross_entropy", "huber"])
def test_s24_weights_and_reductions_of_the_other_losses(backend: Backend, harness: Harness, name: str) -> None:
    """What `mean` divides by is torch's: the weights in mse_loss, the elements in the other two."""
    function = getattr(polyamp.losses, name)
    x, z = LOGITS.astype(np.float64), PROBABILITIES.astype(np.float64)
    plain = {
        "mean_squared_error": (x - z) ** 2,
        "sigmoid_cross_entropy": np.logaddexp(0.0, x) - x * z,
        "huber": np.where(np.abs(x - z) < 1.0, 0.5 * (x - z) ** 2, np.abs(x - z) - 0.5),
    }[name]
    for weights in (None, WEIGHTS, WEIGHTS[:1], np.arange(24, dtype=np.float32).reshape(6, 4)):
        values = plain if weights is None else plain * weights
        by = 24.0
        if weights is not None and name == "mean_squared_error":
            by = float(np.broadcast_to(weights, (6, 4)).sum())
        for reduction, want in (("none", values), ("sum", values.sum()), ("mean", values.sum() / by)):
            got = function(harness.array(LOGITS), harness.array(PROBABILITIES), weights=weights, reduction=reduction)
            assert backend.to_numpy(got).dtype == np.float32
            np.testing.assert_allclose(backend.to_numpy(got), want, rtol=3e-6, atol=1e-6)


LOSSES: Final[Any] = polyamp.losses  # called with what its types forbid


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: LOSSES.huber(x, x, reduction="average"), "must be 'mean', 'sum' or 'none'. Received: .*'average'"),
        (lambda x: LOSSES.mean_squared_error(x, x[:, :1]), r"one shape. Received: \(6, 4\) and \(6, 1\)"),
        (lambda x: LOSSES.sigmoid_cross_entropy(x, x[:, :1]), r"^sigmoid_cross_entropy needs .* and \(6, 1\)"),
        (lambda x: LOSSES.huber(x, x[:1]), r"^huber needs .* Received: \(6, 4\) and \(1, 4\)"),
        (lambda x: LOSSES.huber(x, x, weights=np.ones(6, "f4")), r"broadcast to .*\(6, 4\). Received shape: \(6,\)"),
        (lambda x: LOSSES.huber(x, x, weights=np.ones((2, 6, 4), "f4")), r"broadcast to .*Received shape: \(2, 6, 4\)"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS[:3]), r"shape \(6,\), .*Received: int64 of shape \(3,\)"),
        (lambda x: LOSSES.softmax_cross_entropy(x, np.eye(4, dtype=int)[LABELS]), "One-hot labels: .*cast them to flo"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS.astype("f4")), r"float32 of shape \(6,\). Labels: cast them"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS > 1), "Received: .* Make it an array of numbers"),
        (lambda x: LOSSES.softmax_cross_entropy(x, [2, 0, 1, 1, 3, 2]), "Received: list. Make it an array"),
        (lambda x: LOSSES.softmax_cross_entropy(x, PROBABILITIES, ignore_index=-100), "the labels are probabilities"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS, ignore_index=1.5), "ignore_index must be an integer"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS, label_smoothing=1.5), r"in \[0, 1\]. Received: .*1.5"),
        (lambda x: LOSSES.softmax_cross_entropy(x, LABELS, class_weights=WEIGHTS[:3]), r"shape \(4,\)"),
    ],
)  # fmt: skip
def test_s24_what_does_not_fit_is_refused(harness: Harness, call: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        call(harness.array(LOGITS))


def test_s25_a_model_without_losses_of_its_own_adds_nothing(backend: Backend, harness: Harness) -> None:
    """A float32 zero, inside a step for the model that loss_fn sees, and outside for the framework's own."""
    seen = []

    def loss_fn(model: Any, batch: Any) -> Any:
        plain = polyamp.losses.mean_squared_error(model(batch), batch)
        added = polyamp.losses.regularization(model)
        seen.append((str(added.dtype), tuple(added.shape)))
        return plain + added, {"plain": plain, "added": added}

    made = recipe("mixed_bfloat16")
    model = harness.mlp([DenseWeights(LOGITS[:4], np.zeros(4, np.float32))])
    outside = backend.to_numpy(polyamp.losses.regularization(model))
    assert (outside.dtype, outside.shape, float(outside)) == (np.float32, (), 0.0)
    state = polyamp.init(model, made)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _, result = polyamp.train_step(loss_fn, made)(state, PROBABILITIES)
    assert to_float(backend, result.aux["added"]) == 0.0
    assert to_float(backend, result.loss) == to_float(backend, result.aux["plain"])
    assert all("float32" in dtype and shape == () for dtype, shape in seen)
