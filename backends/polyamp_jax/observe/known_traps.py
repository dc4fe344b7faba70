"""Known defects and surprises of JAX in mixed precision, for the doctor. The tests reproduce those of the CPU."""

from __future__ import annotations

from typing import Final

from polyamp.doctor.measurements import KnownTrap

TRAPS: Final = (
    KnownTrap(
        summary="XLA may leave out the rounding of a 16-bit intermediate result, so that compiled code is more exact "
        "than the same code op by op, and equality checks between the two fail.",
        advice="Compare compiled with compiled; jax.lax.reduce_precision forces a rounding.",
        source="https://github.com/jax-ml/jax/issues/23007",
        first="0.7",
        last="0.10",
    ),
    KnownTrap(
        summary="jax.nn.dot_product_attention in float16 does not compile on a CPU (F16_F16_F32).",
        advice="Use bfloat16 or float32 there, or write the attention out as two products.",
        source="https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html",
        first="0.10",
        last="0.10",
        devices=("cpu",),
    ),
    KnownTrap(
        summary="Products of float32 arrays run in TF32 on GPUs that have it, and in bfloat16 on TPUs.",
        advice='For float32 baselines: jax.config.update("jax_default_matmul_precision", "float32").',
        source="https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision",
        first="0.7",
        last="0.10",
        devices=("gpu", "tpu"),
    ),
)
