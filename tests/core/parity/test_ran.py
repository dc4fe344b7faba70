"""Sensitive operations in 16 bits on one side."""

from __future__ import annotations

from polyamp.contract.report import Operation
from polyamp.parity.aligned import Agreed
from polyamp.parity.ran import narrower
from polyamp.parity.trace import Trace


def _trace(*rows: tuple[str, str, str]) -> Trace:
    operations = [Operation(module, name, dtype, "", 1) for module, name, dtype in rows]
    return Trace(side="", phase="policy", operations=operations)


def test_softmax_in_16_bits_is_named_at_the_nearest_module_that_both_have() -> None:
    agreed = Agreed(modules={"mha": "block/attn", "fc": "block/fc", "": ""})
    ours = _trace(("block/attn/inner", "exp", "float32"), ("block/fc", "sum", "bfloat16"))
    theirs = _trace(("block/attn", "log_softmax", "bfloat16"), ("block/fc", "reduce_sum", "bfloat16"))

    found = narrower(agreed, ("torch", "jax"), (ours, theirs))

    assert found == {"block/attn": "exp in float32 in torch; log_softmax in bfloat16 in jax"}


def test_operation_of_a_family_on_one_side_alone_says_nothing() -> None:
    agreed = Agreed(modules={"mha": "attn"})

    assert (
        narrower(agreed, ("a", "b"), (_trace(("attn", "exp", "bfloat16")), _trace(("attn", "sdpa", "bfloat16")))) == {}
    )
