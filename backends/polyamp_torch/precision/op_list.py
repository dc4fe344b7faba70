"""Op list: the torch functions that run in float32 in autocast mode (S4), by their public names.

It is the float32 part of torch's CUDA list (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can
autocast to float32") plus the functions that S4 adds. `float32_function_mode` applies it; on CUDA only what
torch's lacks.

Differences from torch's CUDA list, with reasons:

- exp2, entr, logaddexp, logaddexp2, logcumsumexp, logit, logsigmoid, log_ndtr, xlogy, xlog1py: exponentials and
  logarithms.
- mean, nanmean, nansum, sum_to_size, std, var, cov, corrcoef, trapezoid: sums. torch adds in float32, but rounds to
  16 bits.
- local_response_norm, and batch_norm and instance_norm without a float32 argument other than the input: statistics.
  With one, as the modules have it, torch's kernels compute the statistics in float32 and round the result once.
- ctc_loss, gaussian_nll_loss, multilabel_soft_margin_loss, pairwise_distance: losses and distances like listed ones.
- linear algebra and FFT: they have no 16-bit kernels, and raise in torch's regions.
- lstm: float16 has no kernel on the CPU, and torch raises.
- upsampling (on CUDA's list in newer versions) is left in the dtype of its input: S4 does not name it.
- lobpcg, pca_lowrank, svd_lowrank: modes see the functions they call, not them; their products run in 16 bits.
- sigmoid, erf and other functions that return probabilities: near a bound, 16 bits lose every digit of the distance to
  it, and so of `log(1 - p)`. torch's modes see one call at a time, not where its result goes. tanh is left alone: it is
  mostly an activation, and float32 after every layer costs a third of a step. See docs/explanation/torch_autocast.md.
- products without free axes (`dot`, `einsum("bi,bi->b")`) are sums, those that contract nothing (`einsum("i,j->ij")`)
  multiplications: see `products`. multi_dot and chain_matmul: matrix products, so 16-bit, as in torch.
- gathers (indexing, embeddings) have gradients that are sums: see `float32_gathers`.
- in-place forms (`exp_`), `out=`, and calls that name their own `dtype=` are left alone, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.nn import functional

from polyamp_torch.compat import SPARSE_SUM, assume_constant_result, custom_function_call, set_grad_enabled
from polyamp_torch.precision.torch_only.float32_gathers import GATHER_FUNCTIONS
from polyamp_torch.precision.torch_only.product_classification import PLAIN_MATMULS, PRODUCT_CLASSIFIERS

TorchFunction = Callable[..., Any]
OpRule = Literal[
    "widen",
    "isolate",
    "statistics",
    "lstm",
    "matmul",
    "product",
    "gather",
    "enter",
    "unflatten",
    "function",
    "grad_mode",
]
"""How the islands handle a function:

- "widen": cast its 16-bit floating tensors to float32, then call it;
- "isolate": the same with autocast off inside, because it also computes matrix products;
- "statistics": cast like "widen", unless another argument is float32: then the kernel computes in float32 itself;
- "lstm": like "isolate", on the CPU only, in dtypes of which torch has no LSTM there and raises;
- "matmul": one of `products.PLAIN_MATMULS`: most calls are matrix products and run unchanged, the rest are "product";
- "product": like "isolate" where the call's shapes make it a sum; where they make it a multiplication, only turn
  autocast off;
- "gather": accumulate its gradient in float32;
- "enter": a Python function that calls listed ones: run its body under the islands;
- "unflatten": `Tensor.unflatten`, which torch.compile cannot trace under any mode: call `torch.unflatten`;
- "function": a custom autograd function under `torch.func`: run its methods under the islands;
- "grad_mode": the switch that reentrant checkpointing turns off first: see `activation_checkpointing`.
"""


class TorchOpFamily(NamedTuple):
    """Family of functions with one rule.

    Attributes:
        family: of `polyamp.rules.float32_op_families.FAMILIES`, or of `TORCH_ONLY_FAMILIES`.
        names: function names, each looked up in all of `spaces`.
        spaces: modules, or `torch.Tensor` for methods.
        on_cuda: True if torch's CUDA list has them already.
        rule: how the islands handle them.
    """

    family: str
    names: str
    spaces: tuple[ModuleType | type, ...] = (torch, torch.Tensor, torch.special, functional)
    on_cuda: bool = False
    rule: OpRule = "widen"


TORCH_ONLY_FAMILIES: Final = {
    "saturating functions": "what feeds a logarithm: next to a bound 16 bits lose every digit of the distance to it",
    "steep trigonometry": "an angle of a 16-bit cosine, and a tangent near its poles",
    "distances": "sums of squares and their roots, as norms",
    "LSTM": "float16 has no kernel on the CPU, and torch raises",
}
"""Families beyond those of S4, with reasons."""
TORCH_OP_FAMILIES: Final = (
    TorchOpFamily("exponentials", "exp expm1 cosh sinh softplus erfinv", on_cuda=True),
    TorchOpFamily("exponentials", "exp2"),
    TorchOpFamily("logarithms", "log log10 log1p log2", on_cuda=True),
    TorchOpFamily("logarithms", "entr logaddexp logaddexp2 logit logsigmoid log_ndtr xlogy xlog1py"),
    TorchOpFamily(
        "powers",
        "pow rsqrt reciprocal __pow__ __rpow__ __rdiv__ __rtruediv__ lp_pool1d lp_pool2d lp_pool3d",
        on_cuda=True,
    ),
    TorchOpFamily("saturating functions", "sigmoid expit softsign erf erfc ndtr"),
    TorchOpFamily("steep trigonometry", "acos arccos asin arcsin tan", on_cuda=True),
    TorchOpFamily("sums", "sum prod", on_cuda=True),
    TorchOpFamily("sums", f"mean nanmean nansum sum_to_size std std_mean var var_mean trapezoid trapz {SPARSE_SUM}"),
    TorchOpFamily("sums", "embedding_bag", (torch,)),
    TorchOpFamily("cumulative sums", "cumsum cumprod", on_cuda=True),
    TorchOpFamily("cumulative sums", "logcumsumexp cumulative_trapezoid"),
    TorchOpFamily("softmax", "softmax log_softmax softmin", on_cuda=True),
    TorchOpFamily("softmax", "logsumexp"),
    TorchOpFamily("softmax", "softmax log_softmax", (torch.sparse,)),
    TorchOpFamily("normalisation", "layer_norm native_layer_norm group_norm normalize norm renorm", on_cuda=True),
    TorchOpFamily("normalisation", "rms_norm native_group_norm"),
    TorchOpFamily("normalisation", "batch_norm native_batch_norm instance_norm", rule="statistics"),
    TorchOpFamily("normalisation", "norm vector_norm matrix_norm", (torch.linalg,), rule="isolate"),
    TorchOpFamily(
        "losses",
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy "
        "hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss "
        "nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
        on_cuda=True,
    ),
    TorchOpFamily("losses", "ctc_loss huber_loss triplet_margin_with_distance_loss"),
    TorchOpFamily("distances", "cosine_similarity dist pdist", on_cuda=True),
    TorchOpFamily("distances", "pairwise_distance"),
    TorchOpFamily("distances", "cdist", rule="isolate"),
    TorchOpFamily(
        "linear algebra",
        "cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor "
        "ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_power matrix_rank pinv qr "
        "slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve",
        (torch.linalg,),
        rule="isolate",
    ),
    TorchOpFamily(
        "linear algebra",
        "cholesky cholesky_inverse cholesky_solve corrcoef cov det frobenius_norm geqrf inverse logdet lu "
        "lu_solve matrix_exp matrix_power nuclear_norm orgqr ormqr pinverse qr slogdet svd "
        "trace triangular_solve",
        (torch, torch.Tensor),
        rule="isolate",
    ),
    TorchOpFamily(
        "FFT",
        "fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2 rfftn",
        (torch.fft,),
    ),
    TorchOpFamily("FFT", "stft istft", (torch, torch.Tensor)),
    TorchOpFamily("LSTM", "lstm", (torch,), on_cuda=True, rule="lstm"),
)


def family_functions(row: TorchOpFamily) -> Iterator[tuple[str, TorchFunction]]:
    """Yield name and function of a row: ("torch.exp", torch.exp), ("torch.Tensor.exp", torch.Tensor.exp), ...

    Names that this version of torch lacks are skipped.
    """
    for name in row.names.split():
        for space in row.spaces:
            function = getattr(space, name, None)
            if function is not None:
                where = f"torch.{space.__name__}" if isinstance(space, type) else space.__name__
                yield f"{where}.{name}", function


_COPIES: Final[dict[Any, tuple[dict[str, Any], TorchFunction]]] = {}
"""Function of torch -> the contents of its module when it was copied, and the copy."""


def copy_without_dispatch(function: Any) -> TorchFunction:
    """Return a copy of one of torch's Python functions that runs its body without dispatching to modes.

    torch disables a mode while it handles a function, so the mode would not see calls in the body. With the mode
    enabled again, the function itself would be dispatched to it once more. The copy is made again if a library has
    replaced a function in torch's module since.
    """
    known = _COPIES.get(function)
    if known is not None and known[0] == function.__globals__:
        return known[1]
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    before = dict(function.__globals__)
    scope = {name: value for name, value in before.items() if name != "__name__"} | dict.fromkeys(
        checks, lambda *_: False
    )
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    _COPIES[function] = before, copied
    return copied


_LINEAR_CROSS_ENTROPY = getattr(functional, "linear_cross_entropy", None)  # newer than the oldest supported torch
BACKWARD_FUNCTIONS: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions that run hooks, custom autograd functions and the recomputation of checkpoints."""
FUNCTIONS_WITHOUT_DISPATCH: Final[dict[TorchFunction, TorchFunction]] = {
    function: copy_without_dispatch(function)
    for function in (
        *(functional.multi_head_attention_forward, _LINEAR_CROSS_ENTROPY, *BACKWARD_FUNCTIONS),
        *(functional.embedding, functional.embedding_bag),  # they may write to the weight before they read it
        *(functional.gumbel_softmax, functional.local_response_norm),
        *(functional.gaussian_nll_loss, functional.multilabel_soft_margin_loss),
    )
    if function is not None
}
"""Functions with the rule "enter" -> the copy that a compiler traces."""

# Plain dicts: torch.compile reads no other mapping with functions as keys.
RULE_BY_FUNCTION: Final[dict[TorchFunction, OpRule]] = {
    **{function: row.rule for row in TORCH_OP_FAMILIES for _, function in family_functions(row)},
    **dict.fromkeys(PRODUCT_CLASSIFIERS, "product"),
    **dict.fromkeys(PLAIN_MATMULS, "matmul"),
    **dict.fromkeys(GATHER_FUNCTIONS, "gather"),
    **dict.fromkeys(FUNCTIONS_WITHOUT_DISPATCH, "enter"),
    torch.Tensor.unflatten: "unflatten",
    custom_function_call: "function",
    set_grad_enabled: "grad_mode",
}
"""Every sensitive function: for the CPU, whose list in torch is short, and for devices whose list may be short."""

_CUDA_AUTOCAST_FUNCTIONS: Final = {
    function for row in TORCH_OP_FAMILIES if row.on_cuda for _, function in family_functions(row)
}
CUDA_RULE_BY_FUNCTION: Final[dict[TorchFunction, OpRule]] = {
    function: found for function, found in RULE_BY_FUNCTION.items() if function not in _CUDA_AUTOCAST_FUNCTIONS
}
"""The functions that torch's CUDA list lacks."""


@assume_constant_result
def find_rule(function: TorchFunction, device_type: str) -> OpRule | None:
    """Return the rule of a function or None, as a constant of a traced function."""
    return (CUDA_RULE_BY_FUNCTION if device_type == "cuda" else RULE_BY_FUNCTION).get(function)
