"""S12: random streams. Two calls draw two masks, those of a window's micro-batches; streams of flax nnx move on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import polyamp
from polyamp.errors import TraceError, UnsupportedError
from polyamp_jax import continue_streams

RATE = 0.5
SIZE = 64
ONES = np.ones((4, SIZE), np.float32)


class LinenMask(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dropout(RATE, deterministic=False)(x * self.param("w", linen.initializers.ones, (SIZE,)))


class NnxMask(nnx.Module):
    """`own`: the module holds its streams; else the caller passes them, as flax's own examples do."""

    def __init__(self, *, own: bool) -> None:
        self.w = nnx.Param(jnp.ones(SIZE))
        self.dropout = nnx.Dropout(RATE, rngs=nnx.Rngs(0) if own else None)

    def __call__(self, x: Any, rngs: Any = None) -> Any:
        return self.dropout(x * self.w[...], rngs=rngs)


class NnxOwn(nnx.Module):
    def __init__(self) -> None:
        self.inner = NnxMask(own=True)

    def __call__(self, x: Any) -> Any:
        return self.inner(x)


def apply_fn(params: Any, x: Any, rng: Any) -> Any:
    return x * params["w"] * jax.random.bernoulli(rng, 1 - RATE, x.shape) / (1 - RATE)


KINDS: dict[str, Any] = {
    "linen": lambda: ((LinenMask(), {"params": {"w": jnp.ones(SIZE)}}), {"rngs": {"dropout": 0}}),
    "nnx": lambda: (NnxOwn(), {}),
    "nnx given": lambda: (NnxMask(own=False), {"rngs": nnx.Rngs(dropout=0)}),
    "function": lambda: ((apply_fn, {"w": jnp.ones(SIZE)}), {"rngs": 0}),
}


def loss_fn(model: Any, batch: Any) -> Any:
    """aux is what the dropout left, ones and zeros."""
    out = model(batch["x"])
    return jnp.mean(out), jnp.sign(out.astype(jnp.float32))


def recipe(policy: str = "float32", **settings: Any) -> polyamp.Recipe:
    settings.setdefault("scaler", polyamp.LossScaler.off())
    return polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(1e-3), **settings)


def fresh(kind: str, made: polyamp.Recipe) -> Any:
    model, options = KINDS[kind]()
    return polyamp.init(model, made, **options)


@pytest.mark.parametrize(("kind", "policy"), [*((kind, "float32") for kind in KINDS), ("nnx given", "mixed_bfloat16")])
def test_s12_accumulating_by_hand_draws_the_masks_of_a_window(kind: str, policy: str) -> None:
    """Bit for bit, in the first window and in the next; and another run from the same start draws them again."""
    window = recipe(policy, accumulate_steps=3)
    state, step = fresh(kind, window), polyamp.train_step(loss_fn, window)
    expected = []
    for _ in range(2):
        state, result = step(state, {"x": np.concatenate([ONES] * 3)})
        expected.append(np.asarray(result.aux))
    assert len({mask.tobytes() for part in expected for mask in part}) == 6, "six masks"
    for compiled in (True, False):
        by_hand, run = fresh(kind, recipe(policy)), polyamp.value_and_grad(loss_fn, compile=compiled)
        for masks in expected:
            calls = [run(by_hand, {"x": ONES}) for _ in range(3)]
            for ((_, aux), _), mask in zip(calls, masks, strict=True):
                assert np.array_equal(aux, mask)
            mean = jax.tree.map(lambda *g: sum(g) / 3, *(gradients.values for _, gradients in calls))
            # whichever Gradients is handed on, the streams go on from the furthest call
            by_hand, _ = polyamp.apply_gradients(by_hand, calls[0][1]._replace(values=mean))
        np.testing.assert_allclose(jax.tree.leaves(by_hand.params)[0], jax.tree.leaves(state.params)[0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_s12_inside_a_jit_of_ones_own(kind: str) -> None:
    """Two calls in one trace draw two masks; a compiled function is pure, and its streams go in and come out."""
    made = recipe()
    run = polyamp.value_and_grad(loss_fn)
    state = fresh(kind, made)
    expected = [np.asarray(run(state, {"x": ONES})[0][1]) for _ in range(3)]

    @jax.jit
    def two(state: Any) -> Any:
        return [run(state, {"x": ONES})[0][1] for _ in range(2)]

    @jax.jit
    def one(state: Any) -> Any:
        (_, aux), gradients = run(state, {"x": ONES})
        return aux, gradients

    def body(state: Any, _: Any) -> Any:
        (_, aux), gradients = run(state, {"x": ONES})
        return continue_streams(state, gradients), aux

    for _ in range(2):  # pure: the second call is the first again
        for got, want in zip(two(fresh(kind, made)), expected, strict=False):
            assert np.array_equal(got, want)
    state = fresh(kind, made)
    for want in expected:
        aux, gradients = one(state)
        assert np.array_equal(aux, want)
        state = continue_streams(state, gradients)
    _, masks = jax.jit(lambda state: jax.lax.scan(body, state, length=3))(fresh(kind, made))
    assert np.array_equal(masks, expected)


def test_s12_a_state_closed_over_by_a_jit_keeps_no_tracer() -> None:
    state = fresh("nnx", recipe())
    run = polyamp.value_and_grad(loss_fn)
    first, second = jax.jit(lambda x: [run(state, {"x": x})[0][1] for _ in range(2)])(ONES)
    assert not np.array_equal(first, second)
    eager = [np.asarray(run(state, {"x": ONES})[0][1]) for _ in range(2)]
    assert np.array_equal(eager, [first, second])


def test_s12_a_skipped_update_by_hand_draws_anew() -> None:
    made = recipe(scaler=polyamp.LossScaler(init_scale=8.0))
    run = polyamp.value_and_grad(loss_fn)
    for kind in ("linen", "nnx"):
        state = fresh(kind, made)
        masks = []
        for gain in (np.inf, 1.0, 1.0):
            (_, aux), gradients = run(state, {"x": ONES * gain})
            masks.append(np.asarray(run(fresh(kind, made), {"x": ONES})[0][1]) if gain > 1 else np.asarray(aux))
            state, result = polyamp.apply_gradients(state, gradients)
            assert bool(result.skipped) == (gain > 1)
        assert len({mask.tobytes() for mask in masks}) == 3


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("way", ["step", "step uncompiled", "halves", "halves uncompiled"])
@pytest.mark.parametrize("what", ["argument", "keyword", "batch", "direct", "metric", "statistics"])
def test_s12_nnx_objects_that_a_step_would_lose_are_refused(policy: str, way: str, what: str) -> None:
    """Whatever the policy: the mask of a stream that is copied would come back for ever."""
    rngs = nnx.Rngs(dropout=0)
    metric = nnx.metrics.Average()
    norm = nnx.BatchNorm(SIZE, rngs=nnx.Rngs(0))
    batch: dict[str, Any] = {"x": ONES, **({"rngs": rngs} if what == "batch" else {})}

    def loss(model: Any, batch: Any) -> Any:
        x = batch["x"]
        if what in ("metric", "statistics", "direct"):
            out = model(x, nnx.Rngs(dropout=1))
            if what == "metric":
                metric.update(values=out)
            return jnp.mean(
                norm(out)
                if what == "statistics"
                else out * rngs.dropout.uniform(out.shape)
                if what == "direct"
                else out
            )
        given = batch["rngs"] if what == "batch" else rngs
        return jnp.mean(model(x, rngs=given) if what == "keyword" else model(x, given))

    made = recipe(policy)
    state = polyamp.init(NnxMask(own=False), made)
    compiled = "uncompiled" not in way
    run: Any = (
        polyamp.train_step(loss, made, compile=compiled)
        if way.startswith("step")
        else polyamp.value_and_grad(loss, compile=compiled)
    )
    with pytest.raises(TraceError, match=r"rngs=nnx\.Rngs\(\.\.\.\)\).*Metrics: return.*Cannot mutate"):
        run(state, batch)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_s12_nnx_objects_made_inside_the_loss_move_on(policy: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        rngs = nnx.Rngs(dropout=batch["key"])
        first, second = model(batch["x"], rngs), model(batch["x"], rngs=rngs)
        return jnp.mean(first + second), jnp.stack([first, second])

    made = recipe(policy)
    state = polyamp.init(NnxMask(own=False), made)
    _, result = polyamp.train_step(loss, made)(state, {"x": ONES, "key": jax.random.key(3)})
    rngs = nnx.Rngs(dropout=jax.random.key(3))
    plain = NnxMask(own=False)
    assert np.array_equal(result.aux != 0, [plain(ONES, rngs) != 0 for _ in range(2)])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_s12_autocast_moves_the_callers_own_streams_as_flax_does(policy: str) -> None:
    plain, cast = NnxMask(own=False), polyamp.Policy(policy).autocast(NnxMask(own=False))
    theirs, mine = nnx.Rngs(dropout=0), nnx.Rngs(dropout=0)
    for _ in range(2):
        assert np.array_equal(cast(ONES, mine) != 0, plain(ONES, theirs) != 0)
    assert int(mine.dropout.count[...]) == int(theirs.dropout.count[...]) == 2


def test_s12_streams_for_an_nnx_module() -> None:
    made = recipe()
    with pytest.raises(UnsupportedError, match=r"__call__ takes none.*Drop rngs="):
        polyamp.init(NnxOwn(), made, rngs=0)
    rngs = nnx.Rngs(dropout=7)
    state = polyamp.init(NnxMask(own=False), made, rngs=rngs)
    assert int(rngs.dropout.count[...]) == 0, "the user's own object stays"
    step = polyamp.train_step(loss_fn, made)
    masks = []
    for _ in range(3):
        state, result = step(state, {"x": ONES})
        masks.append(np.asarray(result.aux).tobytes())
    assert len(set(masks)) == 3
    seeded = polyamp.init(NnxMask(own=False), made, rngs={"dropout": 7})
    assert sorted(seeded.rngs) == sorted(state.rngs) == ["dropout"]
