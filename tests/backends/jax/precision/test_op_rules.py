"""The op lists: consistent in themselves, complete for JAX's primitives, equal to the documentation's, and torch's.

`LISTS` holds torch.autocast's CUDA lists, read from `ATen/autocast_mode.h` of torch 2.13.0, and those that only its
documentation names. `CASES` maps every entry to what a JAX user writes for it, and to what must happen.
"""

from __future__ import annotations

import gc
import importlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.extend.core.primitives as public
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax, nn
from jax.extend.core import Primitive

import polyamp
from polyamp.rules.float32_op_families import OP_FAMILIES
from polyamp_jax import compat
from polyamp_jax.precision import op_list
from polyamp_jax.precision.interpreter import control_flow

DOCUMENT: Final = (Path(__file__).parents[4] / "docs" / "reference" / "jax_op_list.md").read_text(encoding="utf-8")
NAMES: Final = ("COMPUTE", "FLOAT32", "PROMOTE", "FOLLOW", "MOVE", "OPAQUE", "STRUCTURE")
TEXTS: Final = {**vars(op_list), "FLOAT32": " ".join(op_list.SENSITIVE.values())}
LISTED: Final = {name: TEXTS[name].split() for name in NAMES}

ALL: Final = [name for names in LISTED.values() for name in names]

ELSEWHERE: Final = {
    "not in jax 0.10": """bias_bwd bias_fwd custom_dce_call custom_transpose_call eigh_jacobi mesh_cast mutable_array
        pgather xla_pmap""",
    "not in jax 0.11": "closed_call core_map",
    "not yet in jax 0.10": "log2 one_minus_square polynomial",
    "not yet in jax 0.7": """accum_grad_in_ref all_gather_reduced compute_on create_linear empty2 empty_ref free_ref
        mulhi new_ref ormqr philox2x32 philox4x32 pin preduced reduced_vary_cast scaled_dot stack stage threefry4x32
        tile unpin unreduced_psum unreduced_reduce_scatter unstack vary_unreduced_cast""",
    "nnx's, not yet in flax 0.11": "get_variable new_variable set_variable",
    "defined by jax2tf, which imports TensorFlow": "call_tf",
    "defined by Pallas for one kind of device": "mosaic_gpu tpu_custom_call",
}
"""Reason -> names in the lists that the installed JAX may lack. Both supported ends are tested, so each is checked."""

DEFINING: Final = """jax.scipy.linalg jax.scipy.special jax.export jax.ffi jax.custom_batching jax.experimental.pallas
    jax.experimental.buffer_callback jax.experimental.compute_on jax.experimental.custom_partitioning
    jax.experimental.multihost_utils jax.experimental.rnn jax.experimental.sparse jax.experimental.xla_metadata
    equinox.internal flax.nnx"""
"""Modules that define primitives when they are imported."""


def test_no_operation_is_in_two_lists() -> None:
    assert [name for name, count in Counter(ALL).items() if count > 1] == []


def test_every_name_is_a_primitive() -> None:
    for module in DEFINING.split():
        importlib.import_module(module)
    kinds = ((type(thing), thing) for thing in gc.get_objects())
    present = {compat.canonical_primitive_name(p.name) for kind, p in kinds if issubclass(kind, Primitive)}
    excused = set(" ".join(ELSEWHERE.values()).split())
    assert set(ALL) - present <= excused
    assert excused <= set(ALL), "an excuse for a name that no list has"


def test_every_public_primitive_has_a_rule() -> None:
    names = {compat.canonical_primitive_name(p.name) for p in vars(public).values() if isinstance(p, Primitive)}
    assert names - set(op_list.RULES) - op_list.STRUCTURES == set()


def test_every_structure_has_a_rule_of_its_own() -> None:
    assert set(control_flow.STRUCTURE_RULES) | {"convert_element_type"} == op_list.STRUCTURES
    assert op_list.STRUCTURES.isdisjoint(op_list.RULES)


def test_s04_the_list_is_keyed_by_the_families_of_sensitive_operations() -> None:
    assert OP_FAMILIES.keys() - op_list.SENSITIVE.keys() == set()
    empty = {family for family, names in op_list.SENSITIVE.items() if not names.split()}
    assert empty == {"normalisation", "losses"}, "programs of other families' operations"


def test_sensitive_and_shifting_operations_are_listed_as_such() -> None:
    sensitive = (
        "exp log log1p expm1 pow integer_pow square rsqrt reduce_sum cumsum cumlogsumexp reduce_prod fft cholesky"
    )
    assert {op_list.RULES[name] for name in sensitive.split()} == {"float32"}
    assert {op_list.RULES[name] for name in op_list.SHIFTS} == {"float32"}
    assert {op_list.RULES[name] for name in op_list.MOVES} == {"follow"}
    assert {op_list.RULES[name] for name in op_list.SHIFT_INPUTS} == {"follow", "promote"}


@pytest.mark.parametrize("name", NAMES)
def test_the_document_has_the_same_lists(name: str) -> None:
    rows = dict(re.findall(r"^\| \*\*(\w+)\*\*[^|]*\| (.*) \|$", DOCUMENT, re.MULTILINE))
    assert sorted(re.findall(r"`([^`]+)`", rows[name.lower()])) == sorted(LISTED[name])


def test_operations_of_jaxs_own_functions_are_known() -> None:
    """No function of the table below holds an operation without a rule."""
    for name, case in CASES.items():
        assert report(case.function).unknown == (), name


# torch

LISTS: Final = {
    "lower precision": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr
        matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell
        rnn_tanh_cell scaled_dot_product_attention""",
    "float32": """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
        rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss nll_loss hinge_embedding_loss
        kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
        binary_cross_entropy_with_logits cdist logsumexp upsample_nearest2d upsample_bilinear2d prod softmax log_softmax
        cumprod cumsum linalg_vector_norm linalg_matrix_norm sum norm""",
    "promote": "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    "documented": "__rpow__ __rtruediv__ cross_entropy normalize cat stack",
    "not listed: follow": """add mul sub where gt maximum clamp relu leaky_relu gelu gelu_tanh silu sigmoid tanh elu
        mish logsigmoid hardtanh erf erfc sqrt sin mean var max sort cummax topk avg_pool2d max_pool2d embedding dropout
        batch_norm lgamma logcumsumexp fft cholesky inverse""",
}
"""torch 2.13.0. Left out are internal names, names that differ from one here in rank only, and functions that JAX has
no counterpart of: conv_tbc, renorm, pdist, cosine_embedding_loss, multi_margin_loss, multilabel_margin_loss."""


class Case(NamedTuple):
    """What a JAX user writes for one of torch's operations.

    Attributes:
        function: of (a float32 parameter w, a float32 input f, a 16-bit activation h).
        dtypes: name of an operation -> dtype it must run in; "low" is the compute dtype.
        differs: why JAX's operations do something else than torch's; None where they do the same.
        exact: the result must be what it is with the activation cast to float32 first (S4).
    """

    function: Callable[[Any, Any, Any], Any]
    dtypes: dict[str, str]
    differs: str | None = None
    exact: bool = False


LOW, HIGH = "low", "float32"
SHIFT = "the difference of two 16-bit values is 16-bit, as torch's `a - b`; torch's function casts its inputs first"
DOT = "JAX has one operation for every product, and cannot tell this one from a matrix product"
INNER = "an inner product is a sum (S4): float32 also of two 16-bit vectors, where torch promotes"
SMOOTH = "the formula has an exp or power in it, which is float32; torch has one operation for the whole"
SUMS = "S4: sums run in float32, and so their results are; torch takes them in float32 inside and returns 16 bits"
NARROW = "S4 goes further than torch's list, whose operation fails or loses digits in 16 bits"


def image(x: Any) -> Any:
    return x.reshape(1, 4, 4, 1)


def convolution(dims: int, *, transpose: bool = False) -> Callable[[Any, Any, Any], Any]:
    layout = ("NHWDC"[: dims + 1] + "C", "HWD"[:dims] + "IO", "NHWDC"[: dims + 1] + "C")

    def run(w: Any, f: Any, h: Any) -> Any:
        x, kernel = f.reshape(1, *{1: (16,), 2: (4, 4), 3: (4, 2, 2)}[dims], 1), w[:1, :2].reshape(*[1] * dims, 1, 2)
        if transpose:
            return lax.conv_transpose(x, kernel, (1,) * dims, "SAME", dimension_numbers=layout)
        return lax.conv_general_dilated(x, kernel, (1,) * dims, "SAME", dimension_numbers=layout)

    return run


def lstm(w: Any, f: Any, h: Any) -> Any:
    i, g, o, carry = f @ w, h @ w, h @ w.T, f
    carry = nn.sigmoid(i) * carry + nn.sigmoid(o) * jnp.tanh(g)
    return nn.sigmoid(o) * jnp.tanh(carry)


PRODUCT, LINEAR = {"dot_general": LOW}, {"dot_general": LOW, "add": LOW}
BILINEAR = {"dot_general": "low, float32"}  # of the two products one is an outer product of float32 vectors
CONV = {"conv_general_dilated": LOW}
NORM, HUBER, LOG_EXP = (
    {"reduce_sum": HIGH, "rsqrt": HIGH},
    {"sub": HIGH, "integer_pow": HIGH},
    {"exp": HIGH, "log": HIGH},
)
POWERS = {"integer_pow": HIGH, "pow": HIGH, "mul": HIGH}
CARRY = "the carried state is a float32 input and promotes the gates; the products are 16-bit as in torch"
CASES: Final[dict[str, Case]] = {
    **{f"conv{n}d": Case(convolution(n), CONV) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": Case(convolution(n, transpose=True), CONV) for n in (1, 2, 3)},
    "prelu": Case(lambda w, f, h: jnp.where(h >= 0, h, w[0, 0] * h), {"mul": HIGH}, "a plain product with a parameter"),
    "addmm": Case(lambda w, f, h: f @ w + w[0], LINEAR),
    "addmv": Case(lambda w, f, h: w @ f[0] + w[0], {"dot_general": LOW, "add": HIGH}, "as large as the product"),
    "addr": Case(lambda w, f, h: jnp.outer(w[0], f[0]), {"mul": HIGH}, "jnp.outer multiplies, without a product"),
    "matmul": Case(lambda w, f, h: jnp.matmul(f, w), PRODUCT),
    "einsum": Case(lambda w, f, h: jnp.einsum("ij,kj->ik", f, w), PRODUCT),
    "mm": Case(lambda w, f, h: f @ w, PRODUCT),
    "mv": Case(lambda w, f, h: w @ f[0], PRODUCT),
    "linalg_vecdot": Case(lambda w, f, h: jnp.linalg.vecdot(f, w), {"dot_general": HIGH}, INNER),
    "linear": Case(lambda w, f, h: f @ w.T + w[0], LINEAR),
    "addbmm": Case(lambda w, f, h: jnp.einsum("bij,bjk->ik", f[None], w[None]) + w[0], LINEAR),
    "baddbmm": Case(lambda w, f, h: f[None] @ w[None] + w[0], LINEAR),
    "bmm": Case(lambda w, f, h: f[None] @ w[None], PRODUCT),
    "chain_matmul": Case(lambda w, f, h: f @ w @ w, PRODUCT),
    "linalg_multi_dot": Case(lambda w, f, h: jnp.linalg.multi_dot([f, w, w]), PRODUCT),
    "lstm_cell": Case(lstm, {"dot_general": LOW, "logistic": LOW, "add": HIGH}, CARRY),
    "gru_cell": Case(lambda w, f, h: nn.sigmoid(f @ w) * f, {"dot_general": LOW, "logistic": LOW, "mul": HIGH}, CARRY),
    "rnn_tanh_cell": Case(lambda w, f, h: jnp.tanh(f @ w + h @ w), {"dot_general": LOW, "add": LOW, "tanh": LOW}),
    "scaled_dot_product_attention": Case(
        lambda w, f, h: nn.dot_product_attention(*[x.reshape(1, 4, 2, 2) for x in (f, w, f)]),
        {"dot_general": LOW, "exp": HIGH, "reduce_sum": HIGH},
    ),
    "acos": Case(lambda w, f, h: jnp.arccos(h), {"acos": HIGH}, exact=True),
    "asin": Case(lambda w, f, h: jnp.arcsin(h), {"asin": HIGH}, exact=True),
    "cosh": Case(lambda w, f, h: jnp.cosh(h), {"cosh": HIGH}, exact=True),
    "erfinv": Case(lambda w, f, h: jax.scipy.special.erfinv(h), {"erf_inv": HIGH}, exact=True),
    "exp": Case(lambda w, f, h: jnp.exp(h), {"exp": HIGH}, exact=True),
    "expm1": Case(lambda w, f, h: jnp.expm1(h), {"expm1": HIGH}, exact=True),
    "log": Case(lambda w, f, h: jnp.log(h), {"log": HIGH}, exact=True),
    "log10": Case(lambda w, f, h: jnp.log10(h), {"log": HIGH}, exact=True),
    "log2": Case(lambda w, f, h: jnp.log2(h), {"log|log2": HIGH}, exact=True),
    "log1p": Case(lambda w, f, h: jnp.log1p(h), {"log1p": HIGH}, exact=True),
    "reciprocal": Case(lambda w, f, h: jnp.reciprocal(h), {"integer_pow": HIGH}, exact=True),
    "rsqrt": Case(lambda w, f, h: lax.rsqrt(h), {"rsqrt": HIGH}, exact=True),
    "sinh": Case(lambda w, f, h: jnp.sinh(h), {"sinh": HIGH}, exact=True),
    "tan": Case(lambda w, f, h: jnp.tan(h), {"tan": HIGH}, exact=True),
    "pow": Case(lambda w, f, h: h**3 + h**0.5 + h**h + h * h, POWERS, exact=True),
    "softplus": Case(lambda w, f, h: nn.softplus(h), {"exp": HIGH, "log1p": HIGH}, exact=True),
    "layer_norm": Case(lambda w, f, h: nn.standardize(h) * w[0], NORM, exact=True),
    "rms_norm": Case(lambda w, f, h: h * lax.rsqrt(jnp.mean(h * h, 1, keepdims=True)), {"rsqrt": HIGH}, exact=True),
    "group_norm": Case(lambda w, f, h: nn.standardize(h.reshape(4, 2, 2)), NORM, exact=True),
    "frobenius_norm": Case(lambda w, f, h: jnp.linalg.norm(h), {"reduce_sum": HIGH}, exact=True),
    "nuclear_norm": Case(lambda w, f, h: jnp.linalg.norm(h, ord="nuc"), {"svd": HIGH}, exact=True),
    "cosine_similarity": Case(lambda w, f, h: optax.cosine_similarity(h, f), {"reduce_sum": HIGH}, exact=True),
    "poisson_nll_loss": Case(lambda w, f, h: jnp.mean(jnp.exp(h) - f * h), {"exp": HIGH, "sub": HIGH}, exact=True),
    "nll_loss": Case(lambda w, f, h: -nn.log_softmax(h)[jnp.arange(4), 0].mean(), LOG_EXP, exact=True),
    "hinge_embedding_loss": Case(lambda w, f, h: optax.hinge_loss(h, f), {"mul": HIGH, "sub": HIGH}, exact=True),
    "kl_div": Case(lambda w, f, h: optax.kl_divergence(nn.log_softmax(h), f), {"log": HIGH, "mul": HIGH}, exact=True),
    "l1_loss": Case(lambda w, f, h: jnp.mean(jnp.abs(h - f)), {"sub": HIGH, "abs": HIGH}, exact=True),
    "smooth_l1_loss": Case(lambda w, f, h: optax.huber_loss(h, f, delta=0.5), HUBER, exact=True),
    "huber_loss": Case(lambda w, f, h: optax.huber_loss(h, f), HUBER, exact=True),
    "mse_loss": Case(lambda w, f, h: polyamp.losses.mean_squared_error(h, h + h), {"sub": HIGH, "square": HIGH}),
    "margin_ranking_loss": Case(lambda w, f, h: nn.relu(1.0 - (h - h[::-1])), {"sub": HIGH}),
    "soft_margin_loss": Case(lambda w, f, h: jnp.log1p(jnp.exp(-h * f)), {"mul": HIGH, "exp": HIGH}, exact=True),
    "triplet_margin_loss": Case(
        lambda w, f, h: optax.losses.triplet_margin_loss(h, h + h, -h), {"sub": "low, float32", "pow": HIGH}, SHIFT
    ),
    "binary_cross_entropy_with_logits": Case(
        lambda w, f, h: optax.sigmoid_binary_cross_entropy(h, f), {"exp": HIGH, "log1p": HIGH}, exact=True
    ),
    "cdist": Case(lambda w, f, h: jnp.sum((h[:, None] - h) ** 2, -1), {"sub": LOW, "integer_pow": HIGH}, SHIFT),
    "logsumexp": Case(lambda w, f, h: nn.logsumexp(h, 1), {"exp": HIGH, "reduce_sum": HIGH}, exact=True),
    "upsample_nearest2d": Case(lambda w, f, h: jax.image.resize(image(h), (1, 8, 8, 1), "nearest"), {}, exact=True),
    "upsample_bilinear2d": Case(
        lambda w, f, h: jax.image.resize(image(h), (1, 8, 8, 1), "linear"), {"dot_general": HIGH}, exact=True
    ),
    "prod": Case(lambda w, f, h: jnp.prod(h, 1), {"reduce_prod": HIGH}, exact=True),
    "softmax": Case(lambda w, f, h: nn.softmax(h), {"exp": HIGH, "reduce_sum": HIGH, "sub": HIGH}, exact=True),
    "log_softmax": Case(lambda w, f, h: nn.log_softmax(h), {"exp": HIGH, "log": HIGH, "sub": HIGH}, exact=True),
    "cumprod": Case(lambda w, f, h: jnp.cumprod(h, 1), {"cumprod": HIGH}, exact=True),
    "cumsum": Case(lambda w, f, h: jnp.cumsum(h, 1), {"cumsum": HIGH}, exact=True),
    "linalg_vector_norm": Case(lambda w, f, h: jnp.linalg.norm(h, ord=3, axis=1), {"pow": HIGH}, exact=True),
    "linalg_matrix_norm": Case(lambda w, f, h: jnp.linalg.norm(h, ord=1), {"reduce_sum": HIGH}, exact=True),
    "sum": Case(lambda w, f, h: jnp.sum(h), {"reduce_sum": HIGH}, exact=True),
    "norm": Case(lambda w, f, h: jnp.linalg.norm(h, axis=1), {"mul": HIGH, "reduce_sum": HIGH}, exact=True),
    "addcdiv": Case(lambda w, f, h: h + 0.5 * (h / f), {"div": HIGH, "mul": HIGH, "add": HIGH}),
    "addcmul": Case(lambda w, f, h: h + 0.5 * (h * f), {"mul": HIGH, "add": HIGH}),
    "atan2": Case(lambda w, f, h: jnp.arctan2(h, f), {"atan2": HIGH}),
    "bilinear": Case(lambda w, f, h: jnp.einsum("bi,oij,bj->bo", f, w[None].repeat(4, 0), f), BILINEAR, DOT),
    "cross": Case(lambda w, f, h: jnp.cross(h[:, :3], f[:, :3]), {"mul": HIGH, "sub": HIGH}),
    "dot": Case(lambda w, f, h: jnp.dot(f[0], h[0]), {"dot_general": HIGH}, INNER, exact=True),
    "vdot": Case(lambda w, f, h: jnp.vdot(f, h), {"dot_general": HIGH}, INNER, exact=True),
    "grid_sampler": Case(lambda w, f, h: jax.scipy.ndimage.map_coordinates(h, [f, f], 1), {"mul": HIGH, "add": HIGH}),
    "index_put": Case(lambda w, f, h: f.at[jnp.array([0, 1])].set(h[:2]), {"scatter": HIGH}),
    "tensordot": Case(lambda w, f, h: jnp.tensordot(f, w, 1), PRODUCT, DOT),
    "scatter_add": Case(
        lambda w, f, h: h.at[jnp.array([0, 1])].add(h[:2]), {"scatter_add": HIGH}, "a sum (S4)"
    ),
    "__rpow__": Case(lambda w, f, h: 2.0**h, {"pow": HIGH}, exact=True),
    "__rtruediv__": Case(lambda w, f, h: 1.0 / h, {"div": HIGH}, exact=True),
    "cross_entropy": Case(
        lambda w, f, h: polyamp.losses.softmax_cross_entropy(h, jnp.zeros(4, int)),
        {"sub": HIGH, "exp": HIGH, "log": HIGH, "reduce_sum": HIGH},
    ),
    "normalize": Case(lambda w, f, h: h / jnp.linalg.norm(h, axis=1, keepdims=True), {"div": HIGH}, exact=True),
    "cat": Case(lambda w, f, h: jnp.concatenate([h, f]), {"concatenate": HIGH}),
    "stack": Case(lambda w, f, h: jnp.stack([h, f]), {"stack|concatenate": HIGH}),
    "add": Case(lambda w, f, h: h + 1.0, {"add": LOW}),
    "mul": Case(lambda w, f, h: h * np.float32(2), {"mul": LOW}),
    "sub": Case(lambda w, f, h: h - f, {"sub": HIGH}),
    "where": Case(lambda w, f, h: jnp.where(f > 0, h, -h), {"select_n": LOW, "neg": LOW}),
    "gt": Case(lambda w, f, h: h > f, {"gt": HIGH}),
    "maximum": Case(lambda w, f, h: jnp.maximum(h, f), {"max": HIGH}),
    "clamp": Case(lambda w, f, h: jnp.clip(h, 0.0, 1.0), {"max": LOW, "min": LOW}),
    "relu": Case(lambda w, f, h: nn.relu(h), {"max": LOW}),
    "leaky_relu": Case(lambda w, f, h: nn.leaky_relu(h), {"mul": LOW, "select_n": LOW}),
    "gelu": Case(lambda w, f, h: nn.gelu(h, approximate=False), {"erfc": LOW, "mul": LOW}),
    "gelu_tanh": Case(lambda w, f, h: nn.gelu(h), {"integer_pow": HIGH, "tanh": HIGH, "mul": HIGH}, SMOOTH),
    "silu": Case(lambda w, f, h: nn.silu(h), {"logistic": LOW, "mul": LOW}),
    "sigmoid": Case(lambda w, f, h: nn.sigmoid(h), {"logistic": LOW}),
    "tanh": Case(lambda w, f, h: jnp.tanh(h), {"tanh": LOW}),
    "elu": Case(lambda w, f, h: nn.elu(h), {"expm1": HIGH}, SMOOTH),
    "mish": Case(lambda w, f, h: nn.mish(h), {"exp": HIGH, "tanh": HIGH, "mul": HIGH}, SMOOTH),
    "logsigmoid": Case(lambda w, f, h: nn.log_sigmoid(h), {"exp": HIGH, "log1p": HIGH}, SMOOTH),
    "hardtanh": Case(lambda w, f, h: nn.hard_tanh(h), {"gt": LOW, "lt": LOW, "select_n": LOW}),
    "erf": Case(lambda w, f, h: jax.scipy.special.erf(h), {"erf": LOW}),
    "erfc": Case(lambda w, f, h: jax.scipy.special.erfc(h), {"erfc": LOW}),
    "sqrt": Case(lambda w, f, h: jnp.sqrt(h), {"sqrt": LOW}),
    "sin": Case(lambda w, f, h: jnp.sin(h), {"sin": LOW}),
    "mean": Case(lambda w, f, h: jnp.mean(h), {"reduce_sum": HIGH, "div": HIGH}, SUMS, exact=True),
    "var": Case(lambda w, f, h: jnp.var(h), {"reduce_sum": HIGH, "square": HIGH}, SUMS, exact=True),
    "max": Case(lambda w, f, h: jnp.max(h), {"reduce_max": LOW}),
    "sort": Case(lambda w, f, h: jnp.sort(h), {"sort": LOW}),
    "cummax": Case(lambda w, f, h: lax.cummax(h), {"cummax": LOW}),
    "topk": Case(lambda w, f, h: lax.top_k(h, 2)[0], {"top_k": LOW}),
    "avg_pool2d": Case(
        lambda w, f, h: lax.reduce_window(image(h), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        {"reduce_window_sum": HIGH}, SUMS, exact=True,
    ),
    "max_pool2d": Case(
        lambda w, f, h: lax.reduce_window(image(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        {"reduce_window_max": LOW},
    ),
    "embedding": Case(lambda w, f, h: w[jnp.array([0, 1])] + h[:2], {"add": HIGH}),
    "dropout": Case(lambda w, f, h: jnp.where(f > 0.5, h / 0.5, 0.0), {"div": LOW, "select_n": LOW}),
    "batch_norm": Case(lambda w, f, h: nn.standardize(h, axis=0), {"reduce_sum": HIGH, "mul": HIGH}, SUMS, exact=True),
    "lgamma": Case(lambda w, f, h: lax.lgamma(h), {"lgamma": HIGH}, NARROW, exact=True),
    "logcumsumexp": Case(lambda w, f, h: lax.cumlogsumexp(h), {"cumlogsumexp": HIGH}, NARROW, exact=True),
    "fft": Case(lambda w, f, h: jnp.abs(jnp.fft.rfft(h)), {"fft": HIGH}, NARROW, exact=True),
    "cholesky": Case(lambda w, f, h: jnp.linalg.cholesky(h @ h.T), {"cholesky": HIGH}, NARROW),
    "inverse": Case(lambda w, f, h: jnp.linalg.inv(h), {"inv": HIGH}, NARROW, exact=True),
}  # fmt: skip

POLICY: Final = polyamp.Policy(compute="float16", output="float32")
RNG = np.random.default_rng(0)
W, F = (jnp.asarray(RNG.uniform(0.1, 0.4, (4, 4)), jnp.float32) for _ in range(2))


def whole(function: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function with a 16-bit activation made for it, in a scope of its own."""

    def run(w: Any, f: Any) -> Any:
        with jax.named_scope("given"):
            h = f @ w
        return function(w, f, h)

    return run


def report(function: Callable[[Any, Any, Any], Any]) -> polyamp.CastingReport:
    return polyamp.explain(whole(function), POLICY, W, F)


def test_torchs_lists_are_covered() -> None:
    assert sorted(CASES) == sorted(" ".join(LISTS.values()).split())


@pytest.mark.parametrize("name", CASES)
def test_operations_run_as_torchs_lists_say_or_as_said_here(name: str) -> None:
    case = CASES[name]
    found: dict[str, set[str]] = {}
    for row in report(case.function).operations:
        if row.module != "given":
            found[row.name] = found.get(row.name, set()) | {row.dtype}
    for names, dtypes in case.dtypes.items():
        (operation,) = [n for n in names.split("|") if n in found] or [names]
        wanted = {"float16" if dtype == LOW else dtype for dtype in dtypes.split(", ")}
        assert found.get(operation) == wanted, (operation, found)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.exact])
def test_float32_operations_equal_casting_their_input_first(name: str) -> None:
    function = CASES[name].function
    activation = (F.astype("float16") @ W.astype("float16")).astype("float32")
    got, want = POLICY.autocast(whole(function))(W, F), function(W, F, activation)
    assert got.dtype == want.dtype == "float32"
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["cat", "stack", "atan2", "index_put", "maximum", "sub"])
def test_promoting_operations_stay_in_16_bits_among_16_bit_operands(name: str) -> None:
    function = CASES[name].function
    rows = report(lambda w, f, h: function(w, h + 1.0, h)).operations
    assert {row.dtype for row in rows if row.module != "given"} == {"float16"}


@pytest.mark.parametrize(
    "write", [lambda h: jnp.where(h > 0, h, 0), lambda h: jnp.clip(h, 0, 1)], ids=["where", "clip"]
)
def test_python_integers_do_not_promote(write: Callable[[Any], Any]) -> None:
    rows = report(lambda w, f, h: write(h)).operations
    assert {row.dtype for row in rows if row.module != "given"} == {"float16"}
