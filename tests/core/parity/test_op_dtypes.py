"""Sensitive operations in 16 bits on one side."""

from __future__ import annotations

from polyamp.contract.casting_report import OperationCount
from polyamp.parity.trace.trace import Trace
from polyamp.parity.verdict.alignment import Alignment
from polyamp.parity.verdict.op_dtypes import find_dtype_mismatches


def _trace(*rows: tuple[str, str, str]) -> Trace:
    operations = [OperationCount(module, name, dtype, "", 1) for module, name, dtype in rows]
    return Trace(side="", phase="policy", operations=operations)


def test_softmax_in_16_bits_is_named_at_the_nearest_module_that_both_have() -> None:
    agreed = Alignment(modules={"mha": "block/attn", "fc": "block/fc", "": ""})
    ours = _trace(("block/attn/inner", "exp", "float32"), ("block/fc", "sum", "bfloat16"))
    theirs = _trace(("block/attn", "log_softmax", "bfloat16"), ("block/fc", "reduce_sum", "bfloat16"))

    found = find_dtype_mismatches(agreed, ("torch", "jax"), (ours, theirs))

    assert found == {"block/attn": "exp in float32 in torch; log_softmax in bfloat16 in jax"}


def test_operation_of_a_family_on_one_side_alone_says_nothing() -> None:
    agreed = Alignment(modules={"mha": "attn"})

    assert (
        find_dtype_mismatches(
            agreed, ("a", "b"), (_trace(("attn", "exp", "bfloat16")), _trace(("attn", "sdpa", "bfloat16")))
        )
        == {}
    )
