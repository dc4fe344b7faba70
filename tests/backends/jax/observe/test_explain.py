"""`polyamp.explain` of a loss in JAX: the model's modules, the loss around it, the backward pass, recomputation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyamp
from polyamp.contract.casting_comparison import compare_families
from polyamp.errors import UnsupportedError
from polyamp_jax.observe.jax_only.optimized_program import optimized_operations

GUIDE: Final = (Path(__file__).parents[4] / "docs" / "guides" / "explain.md").read_text(encoding="utf-8")
POLICY: Final = polyamp.Policy("mixed_bfloat16")
BATCH: Final = {"x": np.ones((5, 4), np.float32), "y": np.zeros(5, np.int64)}


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.body = nnx.LayerNorm(4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.remat(lambda body, x: jnp.sin(body(x)))(self.body, self.norm(x)))


def loss_fn(model: Any, batch: Any) -> Any:
    return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])


def rows(report: polyamp.CastingReport, direction: str) -> dict[tuple[str, str], tuple[str, str, int]]:
    return {
        (row.module, row.name): (row.dtype, row.rule, row.count)
        for row in report.operations
        if row.direction == direction
    }


def test_forward_backward_and_recomputed_operations_by_module() -> None:
    report = polyamp.explain(loss_fn, POLICY.replace(overrides={"head": "float32"}), Net(), BATCH)
    forward, backward, again = (rows(report, each) for each in ("forward", "backward", "recompute"))
    assert forward["body", "dot_general"] == ("bfloat16", "compute", 1)
    assert forward["head", "dot_general"] == ("float32", "override", 1)
    assert forward["norm", "rsqrt"] == ("float32", "float32", 1)
    assert forward["", "exp"] == ("float32", "off", 1), "the loss around the model, which a step leaves as it is"
    assert backward["body", "dot_general"] == ("bfloat16", "follow", 2)
    assert backward["head", "dot_general"] == ("float32", "override", 2)
    assert backward["", "scatter_add"] == ("float32", "off", 1)
    assert backward["norm", "reduce_sum"] == ("float32", "follow", 2)
    assert again == {
        ("body", "dot_general"): ("bfloat16", "compute", 1),
        ("body", "add"): ("bfloat16", "compute (bias)", 1),
        ("", "cos"): ("bfloat16", "follow", 1),
    }
    assert {row.module for row in report.kept} == {"norm", "head", ""}
    assert report.families["dot_general"] == "matrix products"
    assert report.families["exp"] == "exponentials"


@pytest.mark.parametrize("library", ["linen", "equinox", "function"])
def test_models_of_other_libraries(library: str) -> None:
    if library == "linen":
        linen = nn.Sequential([nn.Dense(3)])
        model: Any = linen, linen.init(jax.random.key(0), BATCH["x"])
    elif library == "equinox":
        model = eqx.nn.MLP(4, 3, 8, 0, key=jax.random.key(0))
    else:
        model = lambda params, x: x @ params["w"], {"w": jnp.ones((4, 3))}

    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((jax.vmap(model) if library == "equinox" else model)(batch["x"]))

    report = polyamp.explain(loss, POLICY, model, BATCH)
    module = {"linen": "layers_0", "equinox": "layers/0", "function": ""}[library]
    assert rows(report, "forward")[module, "dot_general"] == ("bfloat16", "compute", 1)
    assert rows(report, "backward")[module, "dot_general"][:2] == ("bfloat16", "follow")


def test_what_is_no_scalar_has_no_backward_pass_and_the_model_stays() -> None:
    model = Net()
    before = nnx.state(model)
    report = polyamp.explain(lambda model, batch: model(batch["x"]), POLICY, model, BATCH)
    assert {row.direction for row in report.operations} == {"forward"}
    assert jax.tree.all(jax.tree.map(np.array_equal, before, nnx.state(model)))


def test_a_policy_without_autocast_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="this policy does not use it"):
        polyamp.explain(loss_fn, "float32", Net(), BATCH)


def test_the_program_that_xla_optimized_by_module_and_direction() -> None:
    policy = POLICY.replace(overrides={"head": "float32"})
    both = [polyamp.explain(loss_fn, policy, Net(), BATCH, compiled=compiled) for compiled in (False, True)]
    forward, backward = (rows(both[1], each) for each in ("forward", "backward"))
    assert forward["head", "dot_general"] == ("float32", "override", 1)
    dtype, rule, count = forward["body", "dot_general"]
    assert (rule, count) == ("compute", 1)
    assert dtype in ("bfloat16", "float32"), "as the device has kernels"
    assert backward["head", "dot_general"][:2] == ("float32", "override")
    assert both[1].notes[0].startswith("Read from the program that XLA optimized for cpu. ")
    found = compare_families(both[0], both[1])
    assert found.compared >= 12
    assert all(row.module != "head" for row in found.differences)
    with pytest.raises(UnsupportedError, match="takes a loss function and its model"):
        polyamp.explain(lambda x: x, POLICY, jnp.ones(2), compiled=True)


def test_instructions_of_reducers_and_moves_are_left_out() -> None:
    text = """
      %add.1 = f32[] add(%x, %y), metadata={op_name="jit(f)/jvp(head)/reduce_sum" stack_frame_id=3}
      ROOT %r = bf16[4]{0} reduce(%a, %b), to_apply=%add, metadata={op_name="jit(f)/jvp(head)/reduce_sum"}
      %c = bf16[4]{0} convert(%r), metadata={op_name="jit(f)/jvp(head)/convert_element_type"}
      %g = (bf16[5,8]{1,0}, s8[64]{0}) custom-call(%a, %b), metadata={op_name="jit(f)/head/jit(inner)/dot_general"}
      %p = pred[4]{0} compare(%a, %b), metadata={op_name="jit(f)/gt"}
      %m = f32[4]{0} multiply(%a, %b)
    """
    assert [tuple(each) for each in optimized_operations(text)] == [
        (("head",), "reduce_sum", "bfloat16", False),
        (("head",), "dot_general", "bfloat16", False),
    ]


def test_the_block_of_the_guide_runs() -> None:
    (code,) = re.findall(r"```python jax\n(.*?)```", GUIDE, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/guides/explain.md", "exec"), scope)
    found = [(row.module, row.name, row.dtype) for row in scope["report"].operations if row.direction == "forward"]
    assert [row for row in found if row[1] == "dot_general"] == [
        ("layers/0", "dot_general", "float16"),
        ("layers/2", "dot_general", "float16"),
    ]


def test_options_of_init_are_those_of_a_training() -> None:
    model = eqx.nn.Sequential([eqx.nn.Linear(8, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    batch = {"x": np.ones((4, 8), np.float32), "y": np.zeros(4, np.int32)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return polyamp.losses.softmax_cross_entropy(model(batch["x"]), batch["y"])

    report = polyamp.explain(loss_fn, "mixed_float16", model, batch, axis_name="batch", rngs=0)
    (row,) = (row for row in report.operations if row.name == "dot_general" and row.direction == "forward")
    assert (row.module, row.dtype) == ("layers/0", "float16")
    with pytest.raises(UnsupportedError, match=r"explain of a function or a model alone.*accepts no options"):
        polyamp.explain(lambda x: x + 1.0, "mixed_float16", jnp.ones(3), axis_name="batch")
