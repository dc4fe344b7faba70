"""Rules S1 to S5: dtypes, casting, the two modes, sensitive operations, overrides."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import polyamp
from polyamp.conformance.problems import (
    advance,
    batch,
    is_on_cpu,
    layers,
    loss_fn,
    recipe,
    relative_difference,
    to_float,
    train,
)
from polyamp.contract.backend import Backend
from polyamp.contract.harness import Harness
from polyamp.errors import PolicyError
from polyamp.rules.float32_op_families import OP_FAMILIES

MIXED = ["mixed_float16", "mixed_bfloat16"]
ACCELERATOR_ROUNDING = 1e-5
"""Largest difference of two kernels of one float32 operation off the CPU, relative; 16 bits differ by 5e-4 or more."""


def policy_compute_dtype(policy: str) -> str:
    return polyamp.Policy(policy).compute


@pytest.mark.parametrize("policy", MIXED)
def test_s01_masters_stay_float32_and_output_is_float32(backend: Backend, harness: Harness, policy: str) -> None:
    made = recipe(policy)
    state, _ = train(harness, made, [batch(i) for i in range(2)])
    assert {part.dtype.name for layer in harness.weights(state) for part in layer} == {"float32"}
    output = made.policy.autocast(state.model)(harness.array(batch()["x"]))
    assert backend.to_numpy(output).dtype == np.float32


@pytest.mark.parametrize("policy", MIXED)
def test_s01_output_dtype_is_the_policys(backend: Backend, harness: Harness, policy: str) -> None:
    dtype = policy_compute_dtype(policy)
    wanted = polyamp.Policy(compute=dtype, output=dtype)
    output = wanted.autocast(harness.mlp(layers()))(harness.array(batch()["x"]))
    assert backend.to_numpy(output).dtype.name == dtype


def test_s02_only_floating_leaves_are_cast(backend: Backend, harness: Harness) -> None:
    leaves: dict[str, Any] = {
        "float": harness.array(np.ones(2, np.float32)),
        "nested": [harness.array(np.ones(2, np.float32)), (harness.array(np.ones(1, np.int32)),)],
        "bool": harness.array(np.ones(2, np.bool_)),
        "complex": harness.array(np.ones(2, np.complex64)),
        "double": harness.array(np.ones(2, np.float64)),
        "text": "text",
        "none": None,
        "int": 3,
    }
    double = backend.to_numpy(leaves["double"]).dtype
    cast = backend.cast(leaves, "bfloat16")
    assert backend.to_numpy(cast["float"]).dtype.name == "bfloat16"
    assert backend.to_numpy(cast["nested"][0]).dtype.name == "bfloat16"
    assert backend.to_numpy(cast["nested"][1][0]).dtype == np.int32
    assert backend.to_numpy(cast["bool"]).dtype == np.bool_
    assert backend.to_numpy(cast["complex"]).dtype == np.complex64
    assert backend.to_numpy(cast["double"]).dtype.name == ("float64" if double == np.float64 else "bfloat16")
    assert (cast["text"], cast["none"], cast["int"]) == ("text", None, 3)
    assert backend.to_numpy(leaves["float"]).dtype == np.float32, "cast in place"


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s03_inner_dtype_and_gradient_dtype(backend: Backend, harness: Harness, mode: Any, policy: str) -> None:
    seen: list[str] = []
    made = recipe(polyamp.Policy(policy, mode=mode))
    state = polyamp.init(harness.mlp(layers(), observe=seen.append), made)
    _, gradients = polyamp.value_and_grad(loss_fn)(state, batch())
    assert seen, "the model never reported an inner dtype"
    assert set(seen) == {policy_compute_dtype(policy)}
    named = backend.named_gradients(gradients)
    assert {backend.to_numpy(value).dtype.name for _, value in named} == {"float32"}
    sizes = sorted(part.size for layer in harness.weights(state) for part in layer)
    assert sorted(backend.to_numpy(value).size for _, value in named) == sizes


def test_s03_running_statistics_are_not_rounded_to_16_bits(backend: Backend, harness: Harness) -> None:
    """In mode "cast" neither: an average that moves by less than a last digit of 16 bits would stand still."""
    found = {}
    for policy in (polyamp.Policy("mixed_bfloat16", mode="cast"), polyamp.Policy("float32")):
        made = recipe(policy, optimizer=polyamp.sgd(1e-9))
        state, _ = advance(polyamp.init(harness.normalized_mlp(layers()), made), [batch()] * 30)
        arrays = {name: value for name, value in backend.export_state(state).items() if name.startswith("running/")}
        found[policy.compute] = {name: value for name, value in arrays.items() if value.dtype.kind == "f"}
    assert found["float32"]
    for name, wide in found["float32"].items():
        narrow = found["bfloat16"][name]
        assert narrow.dtype == np.float32
        np.testing.assert_allclose(narrow, wide, rtol=0.02, atol=0.01)
        assert np.any(narrow.view(np.uint32) & 0xFFFF), "each is a number of bfloat16"


@pytest.mark.parametrize(("outer", "inner"), [("mixed_bfloat16", "float32"), ("float32", "mixed_bfloat16")])
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s03_the_policy_that_loss_fn_puts_around_something_decides_for_it(
    backend: Backend, harness: Harness, outer: str, inner: str, mode: Any
) -> None:
    """Around a function, and around the model, whose inner results say it."""
    seen: list[str] = []
    made = recipe(polyamp.Policy(outer, mode=mode))
    second = polyamp.Policy(inner)

    def nested(model: Any, batch: Any) -> Any:
        output = second.autocast(model)(batch["x"])
        product = second.autocast(harness.matmul)(batch["x"], batch["y"])
        return polyamp.losses.mean_squared_error(output, batch["y"]), {"product": product}

    whole = {"x": np.full((3, 3), 1.001, np.float32), "y": np.ones((3, 3), np.float32)}
    state = polyamp.init(harness.mlp(layers((3, 8, 3)), observe=seen.append), made)
    (_, aux), _ = polyamp.value_and_grad(nested)(state, whole)
    assert set(seen) == {policy_compute_dtype(inner)}
    product = float(backend.to_numpy(aux["product"])[0, 0])
    assert product == pytest.approx(3.0 if inner == "mixed_bfloat16" else 3.003, abs=1e-5), "1.001 rounds to 1"


def test_s03_float32_policy_computes_in_float32(harness: Harness) -> None:
    seen: list[str] = []
    state = polyamp.init(harness.mlp(layers(), observe=seen.append), recipe())
    polyamp.train_step(loss_fn, recipe())(state, batch())
    assert set(seen) == {"float32"}


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("family", OP_FAMILIES)
def test_s04_sensitive_families_run_in_float32(backend: Backend, harness: Harness, family: str, policy: str) -> None:
    operations = harness.sensitive().get(family, {})
    assert operations, f"the harness names no operation of {family}"
    chosen = polyamp.Policy(policy, mode="autocast")
    values = np.linspace(0.1, 8.0, 4 * 600, dtype=np.float32).reshape(4, 600)
    values[:, :4] += 8.0 * np.eye(4, dtype=np.float32)  # a matrix that has an inverse
    narrow = backend.cast(harness.array(values), chosen.compute)
    wide = backend.cast(narrow, "float32")
    wrong = {}
    for name, operation in operations.items():
        got = backend.to_numpy(chosen.autocast(operation)(narrow))
        want = backend.to_numpy(operation(wide))
        rounding = 0.0 if is_on_cpu(backend) else ACCELERATOR_ROUNDING
        is_equal = np.allclose(got, want, rounding, rounding * np.abs(want).max())
        if got.dtype not in (np.float32, np.complex64) or not is_equal:
            wrong[name] = got.dtype.name
    assert not wrong, f"not computed in float32: {wrong}"


def test_s04_matrix_products_still_run_in_compute(backend: Backend, harness: Harness) -> None:
    policy = polyamp.Policy(compute="bfloat16", output="bfloat16")
    ones = harness.array(np.full((2, 2), 1.001, np.float32))
    product = backend.to_numpy(policy.autocast(harness.matmul)(ones, ones))
    assert product.dtype.name == "bfloat16"
    assert float(product[0, 0]) == 2.0, "1.001 rounds to 1 in bfloat16"


def test_s05_overrides_choose_a_modules_dtype(harness: Harness) -> None:
    seen: list[str] = []
    policy = polyamp.Policy("mixed_bfloat16", overrides={"**/dense1": "float32"})
    made = recipe(policy)
    state = polyamp.init(harness.mlp(layers((4, 8, 8, 3)), observe=seen.append), made)
    polyamp.train_step(loss_fn, made)(state, batch())
    assert seen[:3] == ["bfloat16", "float32", "bfloat16"]


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s05_one_module_in_16_bits_under_a_float32_policy(
    backend: Backend, harness: Harness, mode: Literal["autocast", "cast"]
) -> None:
    """Its numbers are rounded, and what follows it computes in float32 again."""
    losses: list[float] = []
    seen: list[str] = []
    for overrides in ({}, {"**/dense1": "bfloat16"}):
        made = recipe(polyamp.Policy("float32", mode=mode, overrides=overrides))
        state = polyamp.init(harness.mlp(layers((4, 8, 8, 3)), observe=seen.append), made)
        losses.append(to_float(backend, polyamp.train_step(loss_fn, made)(state, batch())[1].loss))
    assert seen[2] == seen[-1] == "float32"
    assert 1e-6 < relative_difference(losses[1], losses[0]) < 3e-2


def test_s05_longest_glob_wins(harness: Harness) -> None:
    seen: list[str] = []
    policy = polyamp.Policy("mixed_bfloat16", overrides={"**/dense*": "float32", "**/dense1": "bfloat16"})
    made = recipe(policy)
    state = polyamp.init(harness.mlp(layers(), observe=seen.append), made)
    polyamp.train_step(loss_fn, made)(state, batch())
    assert seen[:2] == ["float32", "bfloat16"]


def test_s05_glob_without_a_match_is_an_error(harness: Harness) -> None:
    made = recipe(polyamp.Policy("mixed_bfloat16", overrides={"**/dence1": "float32"}))
    with pytest.raises(PolicyError, match=r"'\*\*/dence1' matches no module path. Nearest: .*dense1"):
        polyamp.init(harness.mlp(layers()), made)
