"""Float32 islands (S4): every function of the op list, in the dtype and with the bits of its float32 self."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import get_overridable_functions

import polyamp
from polyamp_torch.precision.autocast import autocast
from polyamp_torch.precision.op_list import (
    CUDA_RULE_BY_FUNCTION,
    FUNCTIONS_WITHOUT_DISPATCH,
    RULE_BY_FUNCTION,
    TORCH_OP_FAMILIES,
    family_functions,
)
from polyamp_torch.precision.torch_only.compat import NO_CPU_LSTM
from polyamp_torch.precision.torch_only.float32_function_mode import IslandsMode
from polyamp_torch.precision.torch_only.float32_gathers import GATHER_FUNCTIONS
from polyamp_torch.precision.torch_only.product_classification import PRODUCT_CLASSIFIERS

BFLOAT16, FLOAT16 = polyamp.Policy("mixed_bfloat16"), polyamp.Policy("mixed_float16")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between 0.1 and 0.9 as bfloat16."""
    drawn = torch.rand(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 0.8 + 0.1).bfloat16()


X, Y = values(4, 6), values(4, 6, seed=1)
SQUARE = (values(4, 4) + 4 * torch.eye(4)).bfloat16()
SPD = (SQUARE.float() @ SQUARE.float().T).bfloat16()
LOWER = torch.linalg.cholesky(SPD.float()).bfloat16()
B = values(4, 2, seed=2)
IMAGE = values(2, 4, 6, 6)
LABELS = torch.tensor([0, 2, 1, 3])
SIGNS = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.bfloat16)
LU, PIVOTS = (t.bfloat16() if t.is_floating_point() else t for t in torch.linalg.lu_factor(SPD.float()))
LDL, LDL_PIVOTS = (t.bfloat16() if t.is_floating_point() else t for t in torch.linalg.ldl_factor(SPD.float()))
REFLECTORS, TAU = (t.bfloat16() for t in torch.geqrf(SQUARE.float()))
FREE = torch.ones(6), torch.zeros(6)  # parameters, float32
WEIGHT, SHIFT = (torch.full((4,), v) for v in (1.5, 0.5))

# Arguments by function name; a name that is not here takes one tensor.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **dict.fromkeys(("logaddexp", "logaddexp2", "xlogy", "xlog1py", "cosine_similarity", "dist"), ((X, Y), {})),
    **dict.fromkeys(("pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__"), ((X, 3.0), {})),
    **dict.fromkeys(("lp_pool1d", "lp_pool2d", "lp_pool3d"), ((values(2, 4, 4, 4), 2.0, 2), {})),
    "lp_pool1d": ((values(2, 4, 6), 2.0, 2), {}),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), ((X, -1), {})),
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "logsumexp"), ((X, -1), {})),
    "sum_to_size": ((X, 1, 6), {}),
    "layer_norm": ((X, (6,), *FREE), {}),
    "native_layer_norm": ((X, (6,), *FREE, 1e-5), {}),
    "group_norm": ((IMAGE, 2, WEIGHT, SHIFT), {}),
    "native_group_norm": ((IMAGE, WEIGHT, SHIFT, 2, 4, 36, 2, 1e-5), {}),
    "rms_norm": ((X, (6,), FREE[0]), {}),
    "renorm": ((X, 2.0, 0, 1.0), {}),
    "local_response_norm": ((IMAGE, 2), {}),
    "instance_norm": ((IMAGE,), {}),
    "cross_entropy": ((X, LABELS), {}),
    "nll_loss": ((X, LABELS), {}),
    "multi_margin_loss": ((X, LABELS), {}),
    "multilabel_margin_loss": ((X, torch.tensor([[0, 2, -1, 1, 1, 1]] * 4)), {}),
    "cosine_embedding_loss": ((X, Y, SIGNS), {}),
    "margin_ranking_loss": ((X[:, 0], Y[:, 0], SIGNS), {}),
    "gaussian_nll_loss": ((X, Y, X), {}),
    "triplet_margin_loss": ((X, Y, values(4, 6, seed=3)), {}),
    "triplet_margin_with_distance_loss": ((X, Y, values(4, 6, seed=3)), {}),
    "ctc_loss": ((values(5, 2, 4), torch.tensor([[1, 2], [3, 1]]), torch.tensor([5, 5]), torch.tensor([2, 2])), {}),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss"), ((X, Y), {})),
    **dict.fromkeys(("kl_div", "l1_loss", "mse_loss", "poisson_nll_loss", "smooth_l1_loss"), ((X, Y), {})),
    **dict.fromkeys(("soft_margin_loss", "huber_loss", "multilabel_soft_margin_loss"), ((X, Y), {})),
    **dict.fromkeys(("pairwise_distance", "cdist"), ((X, Y), {})),
    "matrix_power": ((SQUARE, 3), {}),
    **dict.fromkeys(("lstsq", "solve", "solve_ex", "tensorsolve"), ((SQUARE, B), {})),
    "tensorsolve": ((SQUARE, B[:, 0]), {}),
    "tensorinv": ((SQUARE,), {"ind": 1}),
    "solve_triangular": ((LOWER, B), {"upper": False}),
    "triangular_solve": ((B, LOWER), {"upper": False}),
    "cholesky_solve": ((B, LOWER), {}),
    "ldl_solve": ((LDL, LDL_PIVOTS, B), {}),
    "householder_product": ((REFLECTORS, TAU), {}),
    "orgqr": ((REFLECTORS, TAU), {}),
    "ormqr": ((REFLECTORS, TAU, B), {}),
    "stft": ((values(64),), {"n_fft": 16, "return_complex": True, "window": torch.ones(16)}),
    "istft": ((torch.stft(values(64).float(), 16, window=torch.ones(16), return_complex=True),),
              {"n_fft": 16, "window": torch.ones(16).bfloat16()}),
}  # fmt: skip
SQUARES = (
    *(
        "cholesky",
        "cholesky_ex",
        "cholesky_inverse",
        "cond",
        "det",
        "eig",
        "eigh",
        "eigvals",
        "eigvalsh",
        "inv",
        "inv_ex",
    ),
    *("inverse", "ldl_factor", "ldl_factor_ex", "logdet", "lu", "lu_factor", "lu_factor_ex", "matrix_exp", "pinverse"),
    *("matrix_rank", "pinv", "qr", "slogdet", "svd", "svdvals", "geqrf", "trace", "frobenius_norm", "nuclear_norm"),
    "matrix_norm",
)
LU_SOLVE = {"torch.linalg.lu_solve": ((LU, PIVOTS, B), {}), "torch.lu_solve": ((B, LU, PIVOTS), {})}
NONE = (None,) * 4
BATCH_NORM = {
    "torch.nn.functional.batch_norm": ((IMAGE, *NONE, True), {}),
    "torch.batch_norm": ((IMAGE, *NONE, True, 0.1, 1e-5, False), {}),
    "torch.native_batch_norm": ((IMAGE, *NONE, True, 0.1, 1e-5), {}),
}
SPECIAL: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    **LU_SOLVE,
    "torch.Tensor.lu_solve": LU_SOLVE["torch.lu_solve"],
    **BATCH_NORM,
    "torch.embedding_bag": ((X, torch.tensor([0, 1, 1]), torch.tensor([0, 1])), {}),
    "torch.instance_norm": ((IMAGE, None, None, None, None, True, 0.1, 1e-5, False), {}),
    "torch.nn.functional.pdist": ((X,), {}),
    "torch._sparse_sum": ((X.to_sparse(),), {}),
    **dict.fromkeys(("torch.sparse.softmax", "torch.sparse.log_softmax"), ((X.to_sparse(), 1), {})),
    "torch.cosine_embedding_loss": ((X, Y, SIGNS), {}),
    "torch.frobenius_norm": ((SQUARE, [0, 1]), {}),
    "torch.ctc_loss": (CALLS["ctc_loss"][0], {}),
    "torch.poisson_nll_loss": ((X, Y, True, False, 1e-8, 1), {}),
    "torch.nn.functional.lp_pool3d": ((values(2, 4, 4, 4, 4), 2.0, 2), {}),
}


def table() -> Iterator[tuple[str, Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]]:
    for row in TORCH_OP_FAMILIES:
        for name, function in family_functions(row) if row.rule != "lstm" else ():
            short = name.rpartition(".")[2]
            found = SPECIAL.get(name) or CALLS.get(short) or (((SPD if short in SQUARES else X),), {})
            yield name, function, found


def tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in tensors(item)] if isinstance(result, tuple | list) else []


def wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)  # gumbel_softmax draws
    return tensors(function(*args, **kwargs))


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning")  # torch's own, on old names of linear algebra
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch's own, on kl_div's default
@pytest.mark.parametrize(("name", "function", "call"), list(table()), ids=[name for name, _, _ in table()])
def test_s04_each_function_equals_itself_on_float32(name: str, function: Any, call: Any) -> None:
    args, kwargs = call
    before = [t.clone() for t in tensors(args)]
    want = outcome(function, tuple(wide(a) for a in args), {n: wide(v) for n, v in kwargs.items()})
    with autocast(BFLOAT16, "cpu"):
        got = outcome(function, args, kwargs)
    assert torch.bfloat16 not in [t.dtype for t in got]
    # LAPACK's last bit depends on where its operands lie in memory; 16 bits would be off by 1e-3 and more
    rtol, atol = (1e-5, 1e-5) if RULE_BY_FUNCTION[function] == "isolate" else (0, 0)
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(before, tensors(args), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # plain torch's rms_norm
def test_s04_trap_plain_torch_leaves_them_in_16_bits_on_the_cpu() -> None:
    chosen = "exp log pow rsqrt sum mean cumsum softmax log_softmax logsumexp var std layer_norm group_norm norm"
    with torch.autocast("cpu", torch.bfloat16):
        narrow = [
            name
            for name, function, (args, kwargs) in table()
            if name.rpartition(".")[2] in chosen.split()
            and "sparse" not in name  # raises
            and function(*args, **kwargs).dtype == torch.bfloat16
        ]
    assert {name.rpartition(".")[2] for name in narrow} == set(chosen.split())
    big = torch.full((2000,), 64.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert torch.isinf(big.sum())
    with autocast(FLOAT16, "cpu"):
        assert big.sum().item() == 128000.0


def test_s04_what_the_islands_leave_alone() -> None:
    x = X.clone()
    with autocast(BFLOAT16, "cpu"):
        assert x.exp_().dtype == torch.bfloat16, "in place"
        assert torch.exp(X, out=torch.empty_like(X)).dtype == torch.bfloat16
        assert functional.softmax(X, -1, dtype=torch.float16).dtype == torch.float16
        assert torch.softmax(X, -1, torch.bfloat16).dtype == torch.bfloat16
        assert X.sum(dtype=torch.float64).dtype == torch.float64
        assert torch.norm(X, 2, None, False, None, torch.bfloat16).dtype == torch.bfloat16, "float32 would raise"
        assert X.to("meta").exp().dtype == torch.bfloat16, "another device"
        assert X.double().exp().dtype == torch.float64
        assert torch.tensor([1, 2]).sum().dtype == torch.int64
        assert X.to(torch.complex64).exp().dtype == torch.complex64
        assert [f(X).dtype for f in (torch.relu, torch.sin, functional.gelu, torch.abs)] == [torch.bfloat16] * 4
        assert (X.dtype, X.half().dtype, X.float().dtype) == (torch.bfloat16, torch.float16, torch.float32)
        assert (X @ Y.T).dtype == torch.linalg.multi_dot([X, Y.T]).dtype == torch.bfloat16
        assert functional.scaled_dot_product_attention(X, X, X).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False}], ids=str)
def test_s04_trap_no_lstm_in_float16_on_the_cpu(options: dict[str, Any]) -> None:
    """torch casts to float16 what no kernel takes; polyamp runs it in float32, and in bfloat16 as torch does where that
    has a kernel for the processor."""
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(6, 4, **options), torch.randn(3, 2, 6)
    with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="primitive"):
        lstm(x)
    state = lstm(x)[1]
    for carried_in in (None, state, tuple(h.half() for h in state)):
        want = lstm(x.half().float(), None if carried_in is None else tuple(h.float() for h in carried_in))
        with autocast(FLOAT16, "cpu"):
            got = lstm(x.half(), carried_in)
        assert {t.dtype for t in tensors(got)} == {torch.float32}
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    got[0].sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in lstm.parameters())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=torch.bfloat16 not in NO_CPU_LSTM):
        want = lstm(x)
    with autocast(BFLOAT16, "cpu"):
        got = lstm(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_torch_has_no_lstm_in_these_dtypes_on_this_cpu() -> None:
    lstm, x, raises = torch.nn.LSTM(6, 4), torch.randn(3, 2, 6), set()
    for dtype in (torch.float16, torch.bfloat16):
        try:
            with torch.autocast("cpu", dtype):
                lstm(x)
        except RuntimeError:
            raises.add(dtype)
    assert raises == NO_CPU_LSTM


@pytest.mark.parametrize("how", ["Tensor.backward", "autograd.backward", "autograd.grad"])
def test_s04_hooks_and_custom_functions_in_a_backward_inside_the_region(how: str) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # as torch documents it
            seen.append((grad.dtype, grad.sum().dtype))
            return grad

    x = X.clone().requires_grad_()
    with autocast(BFLOAT16, "cpu"):
        y = Same.apply(x)  # type: ignore[no-untyped-call]  # torch does not annotate it
        y.register_hook(lambda grad: seen.append((grad.dtype, grad.sum().dtype)))
        loss = y.float().square().sum()
        if how == "Tensor.backward":
            loss.backward()
        elif how == "autograd.backward":
            torch.autograd.backward(loss)
        else:
            torch.autograd.grad(loss, x)
    assert seen == [(torch.bfloat16, torch.float32)] * 2


def test_s04_gradients_through_an_island_come_back_in_the_inputs_dtype() -> None:
    x = X.clone().requires_grad_()
    with autocast(BFLOAT16, "cpu"):
        x.softmax(-1).square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    twin = X.float().requires_grad_()
    twin.softmax(-1).square().sum().backward()
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad.bfloat16())


def test_s04_functions_that_call_sensitive_ones_are_entered() -> None:
    """A mode is set aside while it handles a function, so attention's softmax would stay in 16 bits."""
    q = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    attention = torch.nn.MultiheadAttention(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q)[1].dtype == torch.bfloat16, "plain torch"
    with autocast(BFLOAT16, "cpu"):
        output, weights = attention(q, q, q)
    assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    if hasattr(functional, "linear_cross_entropy"):
        with autocast(BFLOAT16, "cpu"):
            loss = functional.linear_cross_entropy(X.float(), Y.float(), torch.tensor([0, 1, 2, 3]))
            logits = functional.linear(X.float(), Y.float())
        assert logits.dtype == torch.bfloat16
        assert torch.equal(loss, functional.cross_entropy(logits.float(), torch.tensor([0, 1, 2, 3])))


def test_s04_a_tensor_subclass_keeps_its_say() -> None:
    called: list[str] = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    q = torch.ones(3, 2, 4).as_subclass(Own)  # type: ignore[arg-type]  # torch's words for it want a Tensor
    with autocast(BFLOAT16, "cpu"):
        torch.nn.MultiheadAttention(4, 2)(q, q, q)
        soft = torch.softmax(q.bfloat16(), -1)
    assert "multi_head_attention_forward" in called
    assert (type(soft), soft.dtype) == (Own, torch.float32)


def test_s04_attention_that_a_library_put_in_its_place_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = functional.scaled_dot_product_attention, 0

    def replaced(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    q = torch.ones(3, 2, 4)
    attention = torch.nn.MultiheadAttention(4, 2)
    regions = (lambda: autocast(BFLOAT16, "cpu"), lambda: IslandsMode("cpu", contextlib.nullcontext))
    for expected, region in enumerate(regions, 1):
        with region():
            attention(q, q, q, need_weights=False)  # torch's functions are copied, and found again below
        with monkeypatch.context() as patch, region():
            patch.setattr(functional, "scaled_dot_product_attention", replaced)
            attention(q, q, q, need_weights=False)
        assert calls == expected


def test_s04_no_other_function_of_torch_hides_a_sensitive_one() -> None:
    """Every Python function that torch hands to modes is listed, entered, or calls nothing sensitive by name."""
    sensitive = {name for row in TORCH_OP_FAMILIES for name in row.names.split()} - {"trace", "det"}
    sensitive |= {f.__name__ for f in (*PRODUCT_CLASSIFIERS, *GATHER_FUNCTIONS)} - {"__getitem__", "unfold"}
    # Entered by torch itself, with the mode on; or about numbers that are no tensors.
    explained = {"pca_lowrank", "sym_sum"}
    hiding = {
        f.__name__: sorted(sensitive & set(f.__code__.co_names))
        for group in get_overridable_functions().values()
        for f in group
        if isinstance(f, FunctionType) and f not in RULE_BY_FUNCTION and sensitive & set(f.__code__.co_names)
    }
    assert {name: found for name, found in hiding.items() if name not in explained} == {}
    assert functional.multi_head_attention_forward in FUNCTIONS_WITHOUT_DISPATCH


def test_s04_on_cuda_only_what_torchs_list_lacks_is_handled() -> None:
    assert torch.exp not in CUDA_RULE_BY_FUNCTION
    assert torch.lstm not in CUDA_RULE_BY_FUNCTION
    assert functional.layer_norm not in CUDA_RULE_BY_FUNCTION
    assert all(
        f in CUDA_RULE_BY_FUNCTION
        for f in (torch.mean, torch.var, functional.batch_norm, torch.fft.fft, torch.linalg.svd)
    )
    listed = {function for row in TORCH_OP_FAMILIES for _, function in family_functions(row)}
    assert len(listed & set(CUDA_RULE_BY_FUNCTION)) < 0.7 * len(listed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["BatchNorm2d", "InstanceNorm2d"])
@pytest.mark.parametrize("training", [True, False])
def test_s04_norms_with_float32_statistics_are_rounded_once(kind: str, dtype: torch.dtype, training: bool) -> None:
    """Beside float32 tensors torch's kernels compute in float32 by themselves, so what follows stays narrow."""
    x = (3 * torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(0)) + 5).to(dtype)
    norm, plain = (getattr(torch.nn, kind)(4, affine=True, track_running_stats=True) for _ in range(2))
    with autocast(polyamp.Policy(f"mixed_{str(dtype)[6:]}"), "cpu"):
        got = norm.train(training)(x)
    want = plain.train(training)(x.float())
    assert got.dtype == dtype
    off, rounding = (float((y.float() - want).detach().abs().max()) for y in (got, want.to(dtype)))
    assert off == pytest.approx(rounding, rel=1e-3)
    torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["BatchNorm2d", "InstanceNorm2d"])
def test_s04_trap_norms_without_float32_tensors_round_their_statistics(kind: str) -> None:
    x = 3 * torch.randn(4, 4, 5, 5, generator=torch.Generator().manual_seed(0)) + 5
    norm = getattr(torch.nn, kind)(4, affine=False, track_running_stats=False)
    want = norm(x.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        plain = norm(x.bfloat16())
    rounding = float((want.bfloat16().float() - want).abs().max())
    assert float((plain.float() - want).abs().max()) > 1.5 * rounding, "plain torch"
    with autocast(BFLOAT16, "cpu"):
        got = norm(x.bfloat16())
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
