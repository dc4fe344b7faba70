"""pytest plugin: the compiled steps of JAX that tests run are lowered for CUDA and TPU too, and the programs read.

No such device is needed, and nothing runs there. Asserted is what a program says: no callback and no transfer, no
branch that depends on data (a GPU's host would wait for it), products in the policy's dtypes alone, and a state that
leaves in the dtypes in which it came. Steps of one loss function and alike in all that shapes a program are read once.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Any, Final

import numpy as np
import pytest

PLATFORMS: Final = ("cuda", "tpu")
DTYPES: Final = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
FLOAT8: Final = {"f8E4M3FN", "f8E5M2"}
TRANSFER: Final = re.compile(r"custom_call @\w*callback|stablehlo\.(?:infeed|outfeed|send|recv)\b")
VALUE: Final = re.compile(r"^ *(%\w+)(?::\d+)? = \"?stablehlo\.(constant|convert|case|if)\b\"?\(? ?(%\w+)?")
PRODUCT: Final = re.compile(r"stablehlo\.(?:dot_general|convolution).*: \(tensor<(?:[\dx]*x)?(\w+)>")


def check_program(step: Any, state: Any, batch: Any) -> None:
    """Lower a `JaxTrainStep` for these arguments, and check its program."""
    import jax

    traced = step._call.trace(state, batch, step._host_inputs(state, batch))
    text = str(traced.lower(lowering_platforms=PLATFORMS).as_text())
    assert not TRANSFER.search(text), "a callback or a transfer in the step's program"
    assert not data_branches(text), "a branch that depends on data"
    policy = state.recipe.policy
    if not policy.op_rules:
        allowed = {DTYPES[name] for name in (policy.compute, *policy.overrides.values())}
        if policy.float8 is not None:
            allowed |= {"f32"} if policy.float8.scaling == "block32" else FLOAT8  # by blocks the scales come before it
        assert set(PRODUCT.findall(text)) <= allowed, "products in other dtypes than the policy's"
    before, after = ([leaf.dtype for leaf in jax.tree.leaves(each)] for each in (state, traced.out_info[0]))
    assert before == after, "the state's dtypes before and after the step"


def data_branches(text: str) -> list[str]:
    """Return the branches whose index is neither a constant nor the platform's number, a function's first argument."""
    found = []
    for function in text.split("func.func")[1:]:
        known = set(re.findall(r"^[^(]*\((%arg0): tensor<i(?:32|64)>", function))
        for line in function.splitlines():
            if (value := VALUE.match(line)) is None:
                continue
            name, operation, operand = value.groups()
            if operation == "constant" or operand in known:
                known.add(name)
            elif operation in ("case", "if"):
                found.append(line.strip())
    return found


def kind_of_step(step: Any, state: Any, batch: Any) -> Hashable:
    """Return what the program depends on, but for numbers such as rates."""
    import jax

    recipe, leaves = state.recipe, jax.tree.leaves((state, batch))
    loss = getattr(step._loss_fn, "__code__", step._loss_fn)
    scaler = recipe.loss_scaler
    shapes = tuple((np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
    return (
        loss, recipe.policy, type(recipe.optimizer), recipe.clip_norm is None, recipe.accumulate_steps,
        scaler.scales, scaler.checks, step._donate, state.lagging, jax.tree.structure(batch), shapes,
    )  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _lower_steps() -> Iterator[None]:
    """Wrap `JaxTrainStep`: the first call of each kind of step is checked."""
    import jax

    from polyamp_jax.arrays import prepare_batch
    from polyamp_jax.step.step import JaxTrainStep

    plain, seen = JaxTrainStep.__call__, set[Hashable]()

    def call(self: Any, state: Any, batch: Any) -> Any:
        array_batch = prepare_batch(batch, state.setup.plan, compiled=True)
        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, array_batch)))
        if self._compiled and not inside:  # inside `pmap` it is lowered for this platform alone
            kind = kind_of_step(self, state, array_batch)
            if kind not in seen:
                seen.add(kind)
                check_program(self, state, array_batch)
        return plain(self, state, batch)

    JaxTrainStep.__call__ = call  # type: ignore[method-assign]
    yield
    JaxTrainStep.__call__ = plain  # type: ignore[method-assign]
