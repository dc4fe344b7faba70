"""The op list: the torch functions that run in float32 in autocast mode (S4), by their public names.

It is the float32 part of torch's own CUDA list (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can
autocast to float32") and what S4 names beside it. `islands` acts on it; on CUDA only on what torch's list lacks.

Where it differs from torch's CUDA list, and why:

- exp2, entr, logaddexp, logaddexp2, logcumsumexp, logit, logsigmoid, log_ndtr, xlogy, xlog1py: exponentials and
  logarithms.
- mean, nanmean, nansum, sum_to_size, std, var, cov, corrcoef, trapezoid: sums. torch adds in float32, but rounds to
  16 bits.
- local_response_norm, and batch_norm and instance_norm without a float32 tensor beside the input: statistics. With one,
  as the modules have it, torch's kernels compute the statistics in float32 and round the result once, as in torch.
- ctc_loss, gaussian_nll_loss, multilabel_soft_margin_loss, pairwise_distance: losses and distances beside listed ones.
- linear algebra and FFT: they have no 16-bit kernels, and raise in torch's regions.
- lstm: float16 has no kernel on the CPU, and torch raises.
- upsampling (on CUDA's list in newer versions) is left in the dtype of its input: S4 does not name it.
- lobpcg, pca_lowrank, svd_lowrank: torch shows modes what they call, not them; their products run in 16 bits.
- sigmoid, erf and what else gives probabilities: next to a bound 16 bits lose every digit of the distance, and with it
  of `log(1 - p)`, and torch's modes see one call at a time, not what the result will feed. tanh is left alone: it is an
  activation far more often, and float32 behind every layer costs a third of a step. See docs/guides/torch_autocast.md.
- products without free axes (`dot`, `einsum("bi,bi->b")`) are sums, those that contract nothing (`einsum("i,j->ij")`)
  multiplications: see `products`. multi_dot and chain_matmul: matrix products, so 16-bit, as in torch.
- gathers (indexing, embeddings) have gradients that are sums: see `gathers`.
- in-place forms (`exp_`), `out=`, and calls that name their own `dtype=` are left alone, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.nn import functional

from polyamp_torch.compat import SUM_OF_SPARSE, constant_when_compiled, custom_function_call, set_grad_enabled
from polyamp_torch.precision.gathers import GATHERS
from polyamp_torch.precision.products import PLAIN, PRODUCTS

Function = Callable[..., Any]
Rule = Literal[
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
"""What the islands do with a function:

- "widen": cast its 16-bit floating tensors to float32, then call it;
- "isolate": the same with autocast off inside, because it is made of matrix products too;
- "statistics": cast like "widen", unless a tensor beside the input is float32: then the kernel does it by itself;
- "lstm": like "isolate", in float16 on the CPU only, where torch has no such LSTM and raises;
- "matmul": one of `products.PLAIN`: most calls are matrix products and go straight on, the others are "product";
- "product": like "isolate" where the call's shapes make it a sum, and only the "isolate" of it where they make it a
  multiplication;
- "gather": accumulate its gradient in float32;
- "enter": it is a Python function that calls listed ones: run its body under the islands;
- "unflatten": `Tensor.unflatten`, which torch.compile cannot trace under any mode: call `torch.unflatten`;
- "function": a custom autograd function under `torch.func`: run its methods under the islands;
- "grad_mode": the switch that reentrant checkpointing turns off first: see `recomputation`.
"""


class Row(NamedTuple):
    """A family of functions with one rule.

    Attributes:
        family: of `polyamp.rules.sensitive.FAMILIES`, or of `OWN_FAMILIES`.
        names: function names; each stands for the functions and the method of that name wherever `spaces` have it.
        spaces: where to look: modules, or `torch.Tensor` for methods.
        on_cuda: True where torch's CUDA list has them already.
        rule: what to do.
    """

    family: str
    names: str
    spaces: tuple[ModuleType | type, ...] = (torch, torch.Tensor, torch.special, functional)
    on_cuda: bool = False
    rule: Rule = "widen"


OWN_FAMILIES: Final = {
    "saturating functions": "what feeds a logarithm: next to a bound 16 bits lose every digit of the distance to it",
    "steep trigonometry": "an angle of a 16-bit cosine, and a tangent near its poles",
    "distances": "sums of squares and their roots, as norms",
    "LSTM": "float16 has no kernel on the CPU, and torch raises",
}
"""Families that torch has beyond those of S4, and why."""
ROWS: Final = (
    Row("exponentials", "exp expm1 cosh sinh softplus erfinv", on_cuda=True),
    Row("exponentials", "exp2"),
    Row("logarithms", "log log10 log1p log2", on_cuda=True),
    Row("logarithms", "entr logaddexp logaddexp2 logit logsigmoid log_ndtr xlogy xlog1py"),
    Row(
        "powers",
        "pow rsqrt reciprocal __pow__ __rpow__ __rdiv__ __rtruediv__ lp_pool1d lp_pool2d lp_pool3d",
        on_cuda=True,
    ),
    Row("saturating functions", "sigmoid expit tanhshrink softsign erf erfc ndtr"),
    Row("steep trigonometry", "acos arccos asin arcsin tan", on_cuda=True),
    Row("sums", "sum prod", on_cuda=True),
    Row("sums", f"mean nanmean nansum sum_to_size std std_mean var var_mean trapezoid trapz {SUM_OF_SPARSE}"),
    Row("sums", "embedding_bag", (torch,)),
    Row("cumulative sums", "cumsum cumprod", on_cuda=True),
    Row("cumulative sums", "logcumsumexp cumulative_trapezoid"),
    Row("softmax", "softmax log_softmax softmin", on_cuda=True),
    Row("softmax", "logsumexp gumbel_softmax"),
    Row("softmax", "softmax log_softmax", (torch.sparse,)),
    Row("normalisation", "layer_norm native_layer_norm group_norm normalize norm renorm", on_cuda=True),
    Row("normalisation", "rms_norm native_group_norm local_response_norm"),
    Row("normalisation", "batch_norm native_batch_norm instance_norm", rule="statistics"),
    Row("normalisation", "norm vector_norm matrix_norm", (torch.linalg,), rule="isolate"),
    Row(
        "losses",
        "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy "
        "hinge_embedding_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss "
        "nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
        on_cuda=True,
    ),
    Row(
        "losses", "ctc_loss gaussian_nll_loss huber_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss"
    ),
    Row("distances", "cosine_similarity dist pdist", on_cuda=True),
    Row("distances", "pairwise_distance"),
    Row("distances", "cdist", rule="isolate"),
    Row(
        "linear algebra",
        "cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor "
        "ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_power matrix_rank pinv qr "
        "slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve",
        (torch.linalg,),
        rule="isolate",
    ),
    Row(
        "linear algebra",
        "cholesky cholesky_inverse cholesky_solve corrcoef cov det frobenius_norm geqrf inverse logdet lu "
        "lu_solve matrix_exp matrix_power nuclear_norm orgqr ormqr pinverse qr slogdet svd "
        "trace triangular_solve",
        (torch, torch.Tensor),
        rule="isolate",
    ),
    Row(
        "FFT",
        "fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2 rfftn",
        (torch.fft,),
    ),
    Row("FFT", "stft istft", (torch, torch.Tensor)),
    Row("LSTM", "lstm", (torch,), on_cuda=True, rule="lstm"),
)


def functions(row: Row) -> Iterator[tuple[str, Function]]:
    """The row's functions as they are called: ("torch.exp", torch.exp), ("torch.Tensor.exp", torch.Tensor.exp), ...

    A name that this version of torch lacks is passed over.
    """
    for name in row.names.split():
        for space in row.spaces:
            function = getattr(space, name, None)
            if function is not None:
                where = f"torch.{space.__name__}" if isinstance(space, type) else space.__name__
                yield f"{where}.{name}", function


def without_dispatch(function: Any) -> Function:
    """A copy of one of torch's Python functions that does not look for modes before it runs its body.

    A mode is set aside while it handles a function, so what the body calls would not be seen; and with the mode put
    back, the function would only be handed to it again.
    """
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"} | dict.fromkeys(
        checks, lambda *_: False
    )
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_LINEAR_CROSS_ENTROPY = getattr(functional, "linear_cross_entropy", None)  # newer than the oldest supported torch
BACKWARD: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""They run hooks, custom autograd functions, and what a checkpoint repeats."""
ENTERED: Final[dict[Function, Function]] = {
    function: without_dispatch(function)
    for function in (
        *(functional.multi_head_attention_forward, _LINEAR_CROSS_ENTROPY, *BACKWARD),
        *(functional.embedding, functional.embedding_bag),  # they may write to the weight before they read it
    )
    if function is not None
}
"""Functions of the rule "enter" -> the copy that a compiler traces."""

# Plain dicts: torch.compile reads no other mapping with functions as keys.
ALL_RULES: Final[dict[Function, Rule]] = {
    **{function: row.rule for row in ROWS for _, function in functions(row)},
    **dict.fromkeys(PRODUCTS, "product"),
    **dict.fromkeys(PLAIN, "matmul"),
    **dict.fromkeys(GATHERS, "gather"),
    **dict.fromkeys(ENTERED, "enter"),
    torch.Tensor.unflatten: "unflatten",
    custom_function_call: "function",
    set_grad_enabled: "grad_mode",
}
"""Every sensitive function: for the CPU, whose own list is short, and for devices whose list may be."""

_ON_CUDA: Final = {function for row in ROWS if row.on_cuda for _, function in functions(row)}
CUDA_RULES: Final[dict[Function, Rule]] = {
    function: found for function, found in ALL_RULES.items() if function not in _ON_CUDA
}
"""What torch's CUDA list lacks."""


@constant_when_compiled
def rule(function: Function) -> Rule | None:
    """The rule of a function, or None for most."""
    return ALL_RULES.get(function)


@constant_when_compiled
def cuda_rule(function: Function) -> Rule | None:
    """The rule of a function where torch's CUDA list applies, or None for most."""
    return CUDA_RULES.get(function)
