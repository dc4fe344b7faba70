"""What autocast refuses, with which words, and what looks unusual but is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
import polyamp_jax
from polyamp.errors import PolicyError, PolyampError, TraceError, UnsupportedError

MIXED = polyamp.Policy("mixed_float16")
X = jnp.ones((2, 2))


class Odd:
    def __repr__(self) -> str:
        return "<odd>"


@pytest.mark.parametrize(
    ("returned", "received"),
    [
        (lambda x: "text", "str at the top: 'text'"),
        (lambda x: {"y": [x, Odd()]}, "Odd at ['y'][1]: <odd>"),
        (lambda x: (x, b"bytes"), "bytes at [1]: b'bytes'"),
        (lambda x: jnp.sum, "function at the top: <function sum"),
    ],
    ids=["string", "object in a pytree", "bytes", "function"],
)
@pytest.mark.parametrize("use", ["call", "jit", "explain"])
def test_a_function_that_returns_no_array_is_refused(returned: Callable[..., Any], received: str, use: str) -> None:
    message = "may return arrays, numbers, and pytrees of them. Received: " + received
    run = MIXED.autocast(returned)
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        {"call": run, "jit": jax.jit(run), "explain": lambda x: polyamp.explain(returned, MIXED, x)}[use](X)
    assert "Return it from outside the function, or make it a static field of the pytree." in str(caught.value)
    assert isinstance(caught.value, PolyampError)
    assert isinstance(caught.value, TypeError)


def test_none_arrays_and_numbers_may_be_returned(products: Any) -> None:
    run = MIXED.autocast(lambda x: {"none": None, "y": x @ x, "arrays": np.ones(2, "f4"), "flag": x.sum() > 0})
    found = run(X)
    assert found["none"] is None
    assert found["y"].dtype == found["arrays"].dtype == jnp.float32
    assert found["flag"].dtype == bool
    assert products(run, X) == [("float16", "float16")]


@pytest.mark.parametrize("number", [2, 2.5, True])
def test_numbers_come_back_as_arrays_as_they_do_from_jit(number: Any) -> None:
    found, wanted = MIXED.autocast(lambda x: number)(X), jax.jit(lambda x: number)(X)
    assert isinstance(found, jax.Array)
    assert found == wanted


def adds_a_key(box: dict[str, Any], x: Any) -> Any:
    box["y"] = x
    return x


def replaces_an_item(box: list[Any], x: Any) -> Any:
    box[0] = x * 2
    return x


def appends(box: list[Any], x: Any) -> Any:
    box.append(x)
    return x


@pytest.mark.parametrize(
    ("function", "box"),
    [(adds_a_key, {"x": X}), (replaces_an_item, [X]), (appends, [X])],
    ids=["dict", "list item", "list"],
)
def test_a_function_that_changes_its_argument_is_refused(function: Callable[..., Any], box: Any) -> None:
    before = len(box)
    message = "the function changes one of its arguments, and a traced function works on copies"
    with pytest.raises(TraceError, match=message) as caught:
        MIXED.autocast(function)(box, X)
    assert "Return the new value instead" in str(caught.value)
    assert len(box) == before
    with pytest.raises(TraceError, match=message):
        MIXED.autocast(lambda *, box, x: function(box, x))(box=box, x=X)


def test_an_nnx_module_that_is_closed_over_and_changes_is_refused() -> None:
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    before = np.array(model.mean[...])
    with pytest.raises(TraceError, match="changes an nnx module that it closes over") as caught:
        MIXED.autocast(lambda x: model(x))(X * 3)
    assert "Pass the module itself to policy.autocast(model)" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == "TraceContextError"
    np.testing.assert_array_equal(model.mean[...], before)
    MIXED.autocast(model)(X * 3)
    assert not np.array_equal(model.mean[...], before), "given itself, it changes as a call would change it"
    model.eval()
    assert MIXED.autocast(lambda x: model(x))(X).dtype == jnp.float32, "one that does not change may be closed over"


def loops(x: Any) -> Any:
    while x.sum() > 0:
        x = x - 1
    return x


DECISIONS: dict[str, Callable[[Any], Any]] = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "while": loops,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.any()),
    "numpy": lambda x: np.asarray(x),
    "range": lambda x: [x for _ in range(x.sum().astype(int))],
    "inside jit": lambda x: jax.jit(lambda x: x if x.sum() > 0 else -x)(x),
}


@pytest.mark.parametrize("how", DECISIONS)
def test_python_that_needs_an_arrays_value_is_refused(how: str) -> None:
    with pytest.raises(TraceError, match=r"traces the function, as jax\.jit does, and the function needs") as caught:
        MIXED.autocast(DECISIONS[how])(X)
    assert "Use jax.lax.cond, jnp.where or jax.lax.while_loop" in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError), "JAX's own error, with the line, is the cause"


def test_a_boolean_index_is_refused() -> None:
    with pytest.raises(TraceError, match=r"traces the function, as jax\.jit does, and the function needs"):
        MIXED.autocast(lambda x: x[x > 0])(X)


def test_arguments_that_are_no_arrays_are_passed_as_they_are(products: Any) -> None:
    seen: list[Any] = []

    def run(x: Any, options: dict[str, Any], names: list[Any], function: Any, *, flag: bool) -> Any:
        seen.append((options["mode"], options["count"], names, function, flag))
        y = function(x @ x)
        return y * len(names) if flag else y

    options, names = {"mode": "fast", "count": 3}, ["a", None, Odd()]
    wanted = jnp.exp(X @ X) * 2
    found = MIXED.autocast(run)(X, options, names[:2], jnp.exp, flag=True)
    np.testing.assert_array_equal(found, wanted)
    assert seen == [("fast", 3, ["a", None], jnp.exp, True)]
    assert type(seen[0][1]) is int, "numbers stay Python numbers, on which the function may decide"
    assert products(lambda x: MIXED.autocast(run)(x, options, names, jnp.exp, flag=False), X) == [
        ("float16", "float16")
    ]


def test_a_leaked_tracer_gives_jaxs_own_error() -> None:
    leaked: list[Any] = []

    def run(x: Any) -> Any:
        leaked.append(x * 2)
        return x

    MIXED.autocast(run)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError, match="side effect"):
        leaked[0] + 1


def test_the_users_own_errors_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError):
        MIXED.autocast(lambda x: 1 / 0)(X)
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        MIXED.autocast(lambda x: x @ jnp.ones((3, 2)))(X)


@pytest.mark.parametrize("glob", ["hed", "head/kernel/x", "**/tail"])
def test_a_glob_that_matches_no_module_is_refused_when_the_callable_is_made(glob: str) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.head(x)

    wrong = polyamp.Policy("mixed_float16", overrides={glob: "float32"})
    message = re.escape(f"the glob {glob!r} matches no module path. Nearest: 'head'.")
    with pytest.raises(PolicyError, match=message):
        wrong.autocast(Net())
    with pytest.raises(PolicyError, match=message):
        polyamp.explain(Net(), wrong, X)


def test_explain_needs_a_policy_that_autocasts() -> None:
    for other in (polyamp.Policy("mixed_float16", mode="cast"), polyamp.Policy("float32"), polyamp.Policy("float16")):
        with pytest.raises(UnsupportedError, match="explain reports what autocast does, and this policy does not") as e:
            polyamp.explain(lambda x: x, other, X)
        assert f"Received: {other}" in str(e.value)


def test_overrides_of_a_plain_function_need_mode_autocast() -> None:
    cast = polyamp.Policy("mixed_float16", mode="cast", overrides={"head": "float32"})
    with pytest.raises(PolicyError, match=r"in mode='cast' overrides name modules.*Received: overrides=\{'head'"):
        polyamp_jax.autocast(lambda x: x, cast)(X)
