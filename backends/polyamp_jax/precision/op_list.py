"""Op lists: the dtype in which each JAX primitive runs under autocast (S3, S4).

The lists mirror those of `torch.autocast` on CUDA. `docs/reference/jax_op_list.md` lists the differences. A primitive
in no list and without a rule in `control_flow` is opaque: it runs in the dtypes that the program declares, and the
casting report names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import jax

from polyamp.errors import PolicyError, UnsupportedError, did_you_mean
from polyamp.recipe.policy import Policy
from polyamp.rules import operation_families as families
from polyamp.rules.operation_names import check_rules_act, translate_name
from polyamp_jax import compat
from polyamp_jax.arrays import check_float8_device

OpRule = Literal["compute", "float32", "promote", "follow", "opaque"]

COMPUTE: Final = """
    conv_general_dilated dot_general ragged_dot_general
"""
"""Run in the policy's compute dtype: the operations that take most of the time and use matrix units."""

SENSITIVE: Final[Mapping[str, str]] = {
    "exponentials": "cosh exp exp2 expm1 sinh",
    "logarithms": "log log1p log2",
    "powers": "cbrt integer_pow pow reciprocal rsqrt square",
    "sums": "reduce_prod reduce_sum reduce_window_sum scatter_add scatter_mul scatter_sub",
    "cumulative sums": "cumprod cumsum",
    "softmax": "cumlogsumexp",
    "normalisation": "",
    "losses": "",
    "linear algebra": """
        cholesky cholesky_update eig eigh eigh_jacobi geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd
        symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """,
    "FFT": "fft",
    "special functions": """
        bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma polynomial random_gamma
        regularized_incomplete_beta zeta
    """,
    "trigonometry next to a pole": "acos asin tan",
}
"""Family -> primitives that run in float32 because they overflow or lose digits in 16 bits (S4).

The families are those of `polyamp.rules.float32_op_families`, then JAX's own. In JAX a softmax, a normalisation and a
loss are programs of exponentials, powers and sums, and follow their rules. Functions of `jnp.linalg` are programs too.
They run in float32 as a whole: see `compat.linear_algebra_name`."""

PROMOTE: Final = """
    add add_any atan2 clamp concatenate div dynamic_update_slice eq eq_to ge gt le le_to lt lt_to max min mul ne
    nextafter pad ragged_all_to_all rem scatter select_and_gather_add select_and_scatter_add select_if_vmap select_n
    stack sub
"""
"""Run in the widest dtype among several operands. Python scalars and other constants do not widen."""

FOLLOW: Final = """
    abs acosh argmax argmin asinh atan atanh ceil cos cummax cummin debug_callback debug_print erf erfc floor
    is_finite logistic neg one_minus_square pgather pmax pmin psend psum psum_invariant reduce_max reduce_min
    reduce_scatter reduce_window_max reduce_window_min round sign sin sort sqrt tanh top_k unreduced_psum
    unreduced_reduce_scatter unvmap_all unvmap_any unvmap_max
"""
"""Run in the dtype of their operand."""

MOVE: Final = """
    all_gather all_gather_invariant all_gather_reduced all_to_all broadcast_in_dim broadcast_to copy device_put
    dynamic_slice gather global_array_to_host_local_array host_local_array_to_global_array layout_constraint mesh_cast
    name nonbatchable nondifferentiable_backward nontraceable optimization_barrier pbroadcast ppermute preduced pvary
    reduced_vary_cast reshape reshard rev sharding_constraint slice split squeeze stage stop_gradient tie tile
    transpose unstack vary_unreduced_cast with_memory_space_constraint xla_metadata_value
"""
"""Move data without computing. They keep the data's dtype, and the casting report omits them."""

OPAQUE: Final = """
    accum_grad_in_ref after_all and announce_jaxpr approx_top_k axis_index bcoo_dot_general bcoo_dot_general_sampled
    bcoo_extract bcoo_fromdense bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense bias_bwd bias_fwd bitcast_convert_type buffer_callback
    call_exported call_tf check clz complex composite conj coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv
    coo_todense core_map create_linear create_token csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense
    cudnn_fusion custom_dce_call custom_lin custom_linear_solve custom_partitioning custom_transpose_call
    custom_vmap_call dce_sink dim_as_value dimension_size dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper empty empty2
    ffi_call from_edtype get_variable imag inspect_sharding io_callback iota iota_2x32_shape linear_call
    lu_pivots_to_permutation maybe_set mosaic_gpu mulhi new_variable noinline not or pallas_call philox2x32 philox4x32
    pin platform_index population_count precv pure_callback random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap real reduce reduce_and reduce_or reduce_precision reduce_window reduce_xor
    rng_bit_generator rng_uniform rnn_bwd rnn_fwd run_state scaled_dot scaled_matmul scaled_matmul_wrapper scatter_max
    scatter_min select_and_scatter set_variable shape_assertion shift_left
    shift_right_arithmetic shift_right_logical spsolve threefry2x32 threefry4x32 to_edtype tpu_custom_call unpin vprim
    xor zeros_like

    addupdate empty_ref free_ref freeze get new_ref mutable_array swap
"""
"""Run in the dtypes that the program declares: their code, types or user-defined rules require these."""

STRUCTURE: Final = """
    call closed_call compute_on cond convert_element_type custom_jvp_call custom_vjp_call jit remat remat_opt scan
    shard_map while xla_pmap
"""
"""Primitives with rules in `control_flow` and `interpreter`. `op_rules` can only make them opaque."""


def _rule_table() -> dict[str, OpRule]:
    lists: dict[OpRule, str] = {
        "compute": COMPUTE,
        "float32": " ".join(SENSITIVE.values()),
        "promote": PROMOTE,
        "follow": FOLLOW + MOVE,
        "opaque": OPAQUE,
    }
    return {name: rule for rule, names in lists.items() for name in names.split()}


RULES: Final = _rule_table()
"""Primitive name -> rule."""

MOVES: Final = frozenset(MOVE.split())
SHAPE_CHANGES: Final = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Moves that change a shape. If the number of elements stays, a cast before one is the same as a cast after it."""

PRODUCTS: Final = frozenset(COMPUTE.split())
STRUCTURES: Final = frozenset(STRUCTURE.split())

LINEAR_ALGEBRA_RULE: Final = "float32 (linear algebra)"
"""Rule, in a casting report, of a function of `jnp.linalg` that runs in float32 as a whole."""
_FAMILIES: Final[Mapping[str, str]] = {
    families.MATRIX_PRODUCTS: "dot_general ragged_dot_general",
    families.CONVOLUTIONS: "conv_general_dilated",
    families.SATURATING: "logistic erf erfc",
    **SENSITIVE,
}
_FAMILY_BY_NAME: Final = {name: family for family, names in _FAMILIES.items() for name in names.split()}

SHIFTS: Final = frozenset({"exp", "exp2", "expm1"})
"""A subtraction whose result reaches one of these (through `SHIFT_INPUTS`) runs in float32. It is the shift by the
maximum in a hand-written softmax or logsumexp. Rounding it to 16 bits is not equivalent to casting the input."""

SHIFT_INPUTS: Final = frozenset({"abs", "broadcast_in_dim", "mul", "neg", "reshape", "stop_gradient", "transpose"})

LOGARITHMS: Final = frozenset({"log", "log1p", "log2"})
"""The operations that compute their operand run in float32, and so do those that compute `x` in `1 - x`.

This extends back through `ROUNDING`, `TRANSPARENT` and moves, to a product, to `SATURATING` or to float32 operations.
A 16-bit probability near 0 or 1 has no digits."""

_ROUNDING_NAMES: Final = "add add_any clamp div max min mul nextafter rem select_if_vmap select_n sqrt sub"
_TRANSPARENT_NAMES: Final = """
    abs concatenate cummax cummin cumprod cumsum dynamic_update_slice integer_pow neg pad pow reciprocal reduce_max
    reduce_min reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum rsqrt scatter scatter_add
    sort square stack
"""
_SATURATING_NAMES: Final = "acosh asinh atan atan2 atanh cos erf erfc logistic sin tanh"

ROUNDING: Final = frozenset(_ROUNDING_NAMES.split())
"""For a logarithm or `1 - x` they run in float32, and so do the operations that compute their operands. A maximum, a
clamp or a selection is included because its constants would be rounded."""

TRANSPARENT: Final = frozenset(_TRANSPARENT_NAMES.split())
"""Exact, or always float32. For a logarithm or `1 - x` the operations that compute their operands run in float32."""

SATURATING: Final = frozenset(_SATURATING_NAMES.split())
"""For a logarithm or `1 - x` they run in float32. 16 bits are enough for their own operands, as for `exp`."""

REDUCTIONS: Final = frozenset({"cumprod", "cumsum", "reduce_prod", "reduce_sum", "reduce_window_sum"})
"""Reductions that JAX itself computes in float32 for 16-bit arrays, with a cast back to 16 bits."""

SCATTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "scatter_add": jax.lax.scatter_add,
    "scatter_mul": jax.lax.scatter_mul,
    "scatter_sub": jax.lax.scatter_sub,
}
"""Scatter primitive -> the function that binds it in another dtype. Its combining function is a typed parameter."""

INDEXED_READS: Final = frozenset({"dynamic_slice", "gather"})
"""Moves that read at computed indices, which may repeat. Their gradient is a sum over the reads."""


def operation_family(name: str, rule: str) -> str:
    """Return the family of an operation in a casting report (`polyamp.rules.operation_families`).

    >>> operation_family("exp", "float32"), operation_family("inv", LINEAR_ALGEBRA_RULE)
    ('exponentials', 'linear algebra')
    """
    return "linear algebra" if rule == LINEAR_ALGEBRA_RULE else _FAMILY_BY_NAME.get(name, families.ELEMENTWISE)


_registered_names: list[str] = []


def register_rule(name: str, rule: OpRule) -> None:
    """Register a custom primitive's rule, like `torch.library.register_autocast`. A policy's `op_rules` override it.

    Args:
        name: the primitive's name.
        rule: "compute", "float32", "promote", "follow" or "opaque".

    Raises:
        PolicyError: no such rule, or the primitive already has one.

    >>> register_rule("my_rotary_embedding", "follow")
    """
    _check_rule(name, rule)
    if RULES.get(name, rule) != rule or name in STRUCTURES:
        raise PolicyError(
            f"the primitive {name!r} has the rule {RULES.get(name, 'structure')!r} already. Rename yours, or change "
            f"the entry in one policy with Policy(op_rules={{{name!r}: {rule!r}}})."
        )
    if name not in RULES:
        RULES[name] = rule
        _registered_names.append(name)


def registered_count() -> int:
    """Return the number of registered rules."""
    return len(_registered_names)


def rules_for(changes: Mapping[str, str]) -> Mapping[str, OpRule]:
    """Return the rule table with a policy's `op_rules` applied.

    Raises:
        PolicyError: no such operation, or no such rule for it.

    >>> rules_for({"exp": "compute"})["exp"]
    'compute'
    """
    table = dict(RULES)
    for given, rule in changes.items():
        name = compat.canonical_primitive_name(given)
        if name not in RULES and name not in STRUCTURES and name not in compat.known_primitives():
            raise PolicyError(
                f"op_rules: JAX has no operation {given!r}."
                + (translate_name(given, "jax") or did_you_mean(given, [*RULES, *STRUCTURES]))
                + " Names are those of JAX's primitives, as jax.make_jaxpr(fn)(...) prints them."
            )
        _check_rule(name, rule)
        if name in STRUCTURES and rule != "opaque":
            raise PolicyError(
                f"op_rules: {name!r} holds other operations, which have rules of their own; the only rule for it is "
                f"'opaque', which leaves all that is inside as it is. Received: {rule!r}."
            )
        table[name] = rule  # type: ignore[assignment]  # checked above
    return table


def check_policy(policy: Policy) -> None:
    """Reject a policy that this backend cannot compute, before the first step (S20).

    Raises:
        PolicyError: `op_rules` names an operation that does not exist.
        UnsupportedError: float64 without JAX's x64 mode; `op_rules` of a policy that has no op list; `float8` on a
            device without such products.
    """
    rules_for(policy.op_rules)
    check_rules_act(policy.op_rules, policy.mode, policy.param, policy.compute)
    check_float8_device(policy.float8)
    dtypes = (policy.param, policy.compute, policy.output, *policy.overrides.values())
    if "float64" in dtypes and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]  # set at run time
        raise UnsupportedError(
            "JAX computes in float64 only in x64 mode, which is off. "
            f"Received: {policy}. Call jax.config.update('jax_enable_x64', True) first, or use float32."
        )


def _check_rule(name: str, rule: str) -> None:
    if rule not in get_args(OpRule):
        raise PolicyError(f"op_rules[{name!r}] must be one of {get_args(OpRule)}. Received: {rule!r}.")
