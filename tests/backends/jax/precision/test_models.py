"""Autocast on one transformer in four libraries: the same dtypes, the same casting report, the same numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp.contract.casting_report import CastingReport
from tests.backends.jax.precision.transformers import BLOCKS, LIBRARIES, build_linen, tokens, weights

MIXED = polyamp.Policy("mixed_float16")
FLOAT32 = polyamp.Policy("float32")
NORMS = {"norm", *(f"blocks/{n}/norm{m}" for n in range(BLOCKS) for m in (1, 2))}
KINDS = ["linen", "nnx", "equinox", "equinox by hand", "haiku"]
"""equinox twice: mapped over the batch by `init(..., axis_name=...)`, and by jax.vmap in the loss."""

SENSITIVE = {"exp", "log", "integer_pow", "pow", "square", "rsqrt", "reduce_sum"}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """XLA optimises little: what is compiled here runs a few times, on a few numbers."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def forward(name: str, policy: polyamp.Policy, *, own_norm: bool = False) -> Any:
    library = LIBRARIES[name]
    run = policy.autocast(library.build(own_norm=own_norm))
    return jax.vmap(run) if library.single else run


@functools.cache
def native_report(name: str, own_norm: bool) -> CastingReport:
    """The casting report, under the library's own paths."""
    library = LIBRARIES[name]
    return polyamp.explain(library.build(own_norm=own_norm), MIXED, tokens()[0] if library.single else tokens())


def report(name: str, *, own_norm: bool = False) -> CastingReport:
    """The casting report, under the common paths."""
    found = native_report(name, own_norm)
    return found.renamed({row.module: LIBRARIES[name].path(row.module) for row in found.operations})


def named(tree: Any) -> dict[str, Any]:
    """Path -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def common(name: str, gradients: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients under the common paths, in the shapes of `weights()`."""
    names = {"kernel": "w", "weight": "w", "bias": "b"}
    made = {}
    for path, leaf in named(gradients).items():
        owner, _, own = path.rpartition("/")
        key = "table" if owner == "embed" else names.get(own, own)
        made[f"{LIBRARIES[name].path(owner)}/{key}"] = np.asarray(leaf.T if own == "weight" and key == "w" else leaf)
    return made


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def loss_by_hand(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(jax.vmap(model)(batch[:, :-1]), batch[:, 1:])


def training(kind: str, policy: polyamp.Policy, **recipe: Any) -> tuple[Any, Any, polyamp.Recipe]:
    """State, loss function and recipe."""
    recipe.setdefault("optimizer", polyamp.sgd(0.2))
    chosen = polyamp.Recipe(policy=policy, **recipe)
    name = kind.split()[0]
    options = {"axis_name": "batch"} if kind == "equinox" else {}
    state = polyamp.init(LIBRARIES[name].build(), chosen, **options)
    return state, loss_by_hand if kind == "equinox by hand" else loss_fn, chosen


@pytest.mark.parametrize("own_norm", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_products_are_float16_and_sensitive_operations_float32(name: str, own_norm: bool, equations: Any) -> None:
    found = equations(forward(name, MIXED, own_norm=own_norm), tokens())
    dots = [tuple(str(v.aval.dtype) for v in e.invars) for e in found if e.primitive.name == "dot_general"]
    assert dots == [("float16", "float16")] * (8 * BLOCKS + 1)
    inner = [e for e in found if e.primitive.name in SENSITIVE]
    assert {str(e.invars[0].aval.dtype) for e in inner} == {"float32"}
    counts = {key: sum(e.primitive.name == key for e in inner) for key in ("exp", "integer_pow", "rsqrt")}
    assert counts == {"exp": BLOCKS, "integer_pow": BLOCKS, "rsqrt": 2 * BLOCKS + 1}, "softmax, gelu, normalisation"


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_casting_reports_of_the_libraries_are_equal(name: str) -> None:
    """With the normalisation written by hand in all four, since the libraries' own differ in operations."""
    assert report(name) == report("linen")
    assert report(name).casts == report("linen").casts
    assert len(report(name).operations) == 42 * BLOCKS + 7 - 2 * BLOCKS + 2


def test_linen_and_nnx_normalise_by_the_same_operations() -> None:
    assert report("nnx", own_norm=True) == report("linen", own_norm=True)


@pytest.mark.parametrize("name", LIBRARIES)
def test_with_the_libraries_own_norms_the_reports_agree_outside_them(name: str) -> None:
    """The weaker comparison. equinox and haiku take the variance by jnp.var, which takes the mean a second time, and
    equinox clips it; linen and nnx (use_fast_variance=False) do neither. Inside the norms only dtypes can agree."""
    mine, linens = report(name, own_norm=True), report("linen", own_norm=True)
    assert sorted(r for r in mine.operations if r.module not in NORMS) == sorted(
        r for r in linens.operations if r.module not in NORMS
    )
    assert mine.casts == linens.casts
    inside = [row for row in mine.operations if row.module in NORMS]
    assert {row.dtype for row in inside} == {"float32"}
    for norm in NORMS:
        rules = {(row.name, row.rule) for row in inside if row.module == norm}
        assert rules >= {("reduce_sum", "float32"), ("square", "float32"), ("rsqrt", "float32"), ("sub", "promote")}


@pytest.mark.parametrize("own_norm", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_module_paths_are_the_models_own(name: str, own_norm: bool) -> None:
    library = LIBRARIES[name]
    native = {row.module for row in native_report(name, own_norm).operations}
    state = polyamp.init(library.build(own_norm=own_norm), polyamp.Recipe(policy=MIXED, optimizer=polyamp.sgd(0.1)))
    owners = {name.rpartition("/")[0] for name in named(state.params)}
    parents = {"/".join(owner.split("/")[:n]) for owner in owners for n in range(1, owner.count("/") + 2)}
    assert native <= parents
    assert native >= owners - {"embed"}, "an embedding moves data, and has no row"
    between = {f"blocks/{n}/{part}".rstrip("/") for n in range(BLOCKS) for part in ("", "attention", "mlp")}
    assert {library.path(path) for path in native} == (set(weights()) - {"embed"}) | between


def test_outputs_agree_with_each_other_and_with_float32() -> None:
    wide = np.asarray(jax.jit(forward("linen", FLOAT32))(tokens()))
    mixed = {name: np.asarray(jax.jit(forward(name, MIXED))(tokens())) for name in LIBRARIES}
    for name in LIBRARIES:
        assert mixed[name].dtype == np.float32
        np.testing.assert_allclose(mixed[name], mixed["linen"], rtol=0, atol=4e-3)
        np.testing.assert_allclose(mixed[name], wide, rtol=0, atol=1e-2)
        assert np.abs(mixed[name] - wide).max() > 1e-5, "float16 was used"


@functools.cache
def float32_gradients() -> tuple[float, dict[str, Any]]:
    state, loss, _ = training("linen", FLOAT32)
    value, gradients = polyamp.value_and_grad(loss)(state, tokens())
    return float(value), common("linen", gradients.values)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_float32_and_near_those_of_float32_and_three_updates_lower_the_loss(kind: str) -> None:
    state, loss, _ = training(kind, MIXED)
    run = polyamp.value_and_grad(loss)
    value, gradients = run(state, tokens())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradients.values)} == {"float32"}
    narrow, (wide_value, wide) = common(kind.split()[0], gradients.values), float32_gradients()
    assert float(value) == pytest.approx(wide_value, abs=2e-3)
    assert narrow.keys() == wide.keys()
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in wide.values()))
    for path, leaf in wide.items():
        np.testing.assert_allclose(narrow[path], leaf, rtol=0, atol=5e-3 * norm, err_msg=path)
    assert max(np.abs(narrow[path] - leaf).max() for path, leaf in wide.items()) > 1e-6, "float16 was used"
    losses = [float(value)]
    for _ in range(3):
        state, result = polyamp.apply_gradients(state, gradients)
        assert not bool(result.skipped)
        value, gradients = run(state, tokens())
        losses.append(float(value))
    assert all(after < before for before, after in itertools.pairwise(losses))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_products_are_float16(kind: str, backend: Any, products: Any) -> None:
    state, loss, _ = training(kind, MIXED)
    run = backend.value_and_grad(loss, compile=False)
    found = products(lambda s, b: run([s], b), state, tokens())
    assert len(found) >= 3 * (8 * BLOCKS + 1) - 1
    assert set(found) == {("float16", "float16")}


def test_a_model_with_dropout_trains_and_keeps_its_dtypes(backend: Any, products: Any) -> None:
    recipe = polyamp.Recipe(policy=MIXED, optimizer=polyamp.sgd(0.2))
    state = polyamp.init(build_linen(dropout=0.2), recipe, rngs={"dropout": 0})
    run = backend.value_and_grad(loss_fn, compile=False)
    found = products(lambda s, b: run([s], b), state, tokens())
    assert set(found) == {("float16", "float16")}
    step = polyamp.train_step(loss_fn, recipe)
    losses = []
    for _ in range(3):
        state, result = step(state, tokens())
        losses.append(float(result.loss))
    assert int(result.step) == 3
    assert losses[2] < losses[0]


class TokenLinear(nnx.Module):
    """A layer whose name sorts before that of the table whose rows it takes."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.dense = nnx.Embed(5, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        return self.dense(self.embed(tokens))


def test_a_bias_belongs_to_the_layer_of_its_kernel_and_not_to_that_of_the_table_before() -> None:
    report = polyamp.explain(TokenLinear(), "mixed_float16", np.zeros((2, 3), np.int32))
    rows = [(row.name, row.dtype, row.rule) for row in report.operations if row.module == "dense"]
    assert rows == [("dot_general", "float16", "compute"), ("add", "float16", "compute (bias)")]
