"""S4 in detail: saturating functions, inner products and multiplications, gradients of gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp_torch.precision.autocast import autocast

BFLOAT16, FLOAT16 = (polyamp.Policy(name) for name in ("mixed_bfloat16", "mixed_float16"))
Function = Callable[[torch.Tensor], torch.Tensor]
SIGNS = (torch.arange(64) % 2).float()

SATURATING: dict[str, tuple[float, Function]] = {
    "log(p + eps)": (9.0, lambda x: torch.log(torch.sigmoid(x) + 1e-7)),
    "log(1 - p)": (9.0, lambda x: torch.log(1 - x.sigmoid())),
    "sub(1, p)": (9.0, lambda x: torch.sub(torch.ones(()), torch.special.expit(x)).log()),
    "-p + 1": (9.0, lambda x: (-torch.sigmoid(x) + 1).log()),
    "log1p(-p)": (9.0, lambda x: torch.log1p(-nn.Sigmoid()(x))),
    "logsigmoid": (9.0, functional.logsigmoid),
    "clamp": (9.0, lambda x: torch.log(torch.sigmoid(x).clamp(1e-6, 1 - 1e-6))),
    "binary_cross_entropy": (9.0, lambda x: functional.binary_cross_entropy(torch.sigmoid(x), SIGNS, reduction="none")),
    "erfc": (4.0, lambda x: torch.log(torch.special.erfc(x))),
    "1 + erf": (3.0, lambda x: 1 + torch.erf(x)),
    "ndtr": (4.0, lambda x: torch.log(torch.special.ndtr(x))),
    "softsign": (60.0, lambda x: torch.log(1 - functional.softsign(x))),
}


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("name", SATURATING)
def test_s04_what_feeds_a_logarithm_or_a_difference_from_one(name: str, policy: polyamp.Policy) -> None:
    size, function = SATURATING[name]
    narrow = torch.linspace(-size, size, 64).to(getattr(torch, policy.compute))
    want = function(narrow.float())
    with autocast(policy, "cpu"):
        got = function(narrow)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("policy", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("function", [torch.tanh, torch.cos, nn.Tanh()], ids=str)
def test_s04_activations_that_are_no_probabilities_follow_their_input(
    function: Function, policy: polyamp.Policy
) -> None:
    """Or every layer of a network of tanh would be float32 wide."""
    narrow = torch.linspace(-4.0, 4.0, 64).to(getattr(torch, policy.compute))
    with autocast(policy, "cpu"):
        got, wide = function(narrow), torch.log(1 - function(narrow.float()) ** 2 + 1e-6)
    assert got.dtype == narrow.dtype
    assert wide.dtype == torch.float32
    assert torch.equal(wide, torch.log(1 - function(narrow.float()) ** 2 + 1e-6))  # what the docs tell to write


def test_s04_a_handwritten_cross_entropy_and_a_recurrence_near_one() -> None:
    x = torch.tensor([[8.0], [-3.0], [6.0]])
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)

    def loss() -> torch.Tensor:
        p = torch.sigmoid(layer(x))
        return -torch.log(1 - p + 1e-9).mean()

    want = loss().item()
    for policy in (BFLOAT16, FLOAT16):
        with autocast(policy, "cpu"):
            assert loss().item() == pytest.approx(want, rel=1e-3)
    gate = torch.full((1,), 7.0)  # sigmoid(7) = 0.99909, which bfloat16 rounds to 1
    with autocast(BFLOAT16, "cpu"):
        state = gate.bfloat16() * 0 + 1
        for _ in range(1000):
            state = torch.sigmoid(gate.bfloat16()) * state
    assert state.item() == pytest.approx(float(torch.sigmoid(gate)) ** 1000, rel=1e-3)


A, B = torch.linspace(0.5, 3.0, 32).reshape(4, 8), torch.linspace(-1.0, 2.0, 32).reshape(4, 8)
COLUMN, ROW, CUBE = A[:, :1], B[:1], torch.linspace(-1.0, 1.0, 64).reshape(4, 4, 4)
PRODUCTS: dict[str, tuple[str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "dot": ("sum", torch.dot, (A[0], B[0])),
    "Tensor.dot": ("sum", lambda a, b: a.dot(b), (A[0], B[0])),
    "vdot": ("sum", torch.vdot, (A[0], B[0])),
    "inner of vectors": ("sum", torch.inner, (A[0], B[0])),
    "matmul of vectors": ("sum", torch.matmul, (A[0], B[0])),
    "vecdot": ("sum", torch.linalg.vecdot, (A, B)),
    "bi,bi->b": ("sum", lambda a, b: torch.einsum("bi,bi->b", a, b), (A, B)),
    "bi,bi": ("sum", lambda a, b: torch.einsum("bi, bi", a, b), (A, B)),
    "...i,...i->...": ("sum", lambda a, b: torch.einsum("...i,...i->...", a, b), (A, B)),
    "list of operands": ("sum", lambda a, b: torch.einsum("bi,bi->b", [a, b]), (A, B)),
    "sublists": ("sum", lambda a, b: torch.einsum(a, [0, 1], b, [0, 1], [0]), (A, B)),
    "three operands": ("sum", lambda a, b: torch.einsum("bi,bi,bi->b", a, b, b), (A, B)),
    "one operand": ("sum", lambda a, _: torch.einsum("bi->b", a), (A, B)),
    "bmm of rows": ("sum", torch.bmm, (A[:, None], B[:, :, None])),
    "@ of rows": ("sum", lambda a, b: a @ b, (A[:, None], B[:, :, None])),
    "tensordot of everything": ("sum", lambda a, b: torch.tensordot(a, b, 2), (A, B)),
    "vmap of dot": ("sum", lambda a, b: torch.vmap(torch.dot)(a, b), (A, B)),
    "vmap of a sum of products": ("sum", lambda a, b: torch.vmap(lambda x, y: (x * y).sum())(a, b), (A, B)),
    "i,j->ij": ("multiplication", lambda a, b: torch.einsum("i,j->ij", a, b), (A[0], B[0])),
    "bi,bi->bi": ("multiplication", lambda a, b: torch.einsum("bi,bi->bi", a, b), (A, B)),
    "bi,ij->bj with i of 1": ("multiplication", lambda a, b: torch.einsum("bi,ij->bj", a, b), (COLUMN, ROW)),
    "tensordot of nothing": ("multiplication", lambda a, b: torch.tensordot(a, b, 0), (A[0], B[0])),
    "tensordot over 1": ("multiplication", lambda a, b: torch.tensordot(a, b, ([1], [0])), (COLUMN, ROW)),
    "outer": ("multiplication", torch.outer, (A[0], B[0])),
    "matmul over 1": ("multiplication", torch.matmul, (COLUMN, ROW)),
    "mm over 1": ("multiplication", torch.mm, (COLUMN, ROW)),
    "bmm over 1": ("multiplication", torch.bmm, (A[:, :, None], B[:, None])),
    "inner over 1": ("multiplication", torch.inner, (COLUMN, A[:, 1:2])),
    "addr": ("multiplication", lambda a, b: torch.addr(torch.zeros(8, 8), a, b), (A[0], B[0])),
    "matmul": ("product", torch.matmul, (A, B.T)),
    "matmul of one row": ("product", torch.matmul, (A[:1], B[:1].T)),
    "matmul by a vector": ("product", torch.matmul, (CUBE, CUBE[0, 0])),
    "__rmatmul__": ("product", lambda a, b: b.__rmatmul__(a), (A, B.T)),
    "bmm": ("product", torch.bmm, (CUBE, CUBE)),
    "bij,bjk->bik": ("product", lambda a, b: torch.einsum("bij,bjk->bik", a, b), (CUBE, CUBE)),
    "...ij,...jk": ("product", lambda a, b: torch.einsum("...ij,...jk", a, b), (CUBE, CUBE)),
    "inner of matrices": ("product", torch.inner, (A, B)),
    "tensordot": ("product", lambda a, b: torch.tensordot(a, b, 1), (A, B.T)),
    "a layer of one input": ("product", functional.linear, (COLUMN, ROW.T)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_s04_a_product_without_free_axes_is_a_sum_and_one_that_contracts_nothing_a_multiplication(name: str) -> None:
    kind, function, operands = PRODUCTS[name]
    narrow = tuple(x.bfloat16() for x in operands)
    with autocast(BFLOAT16, "cpu"):
        wide_result, narrow_result = function(*operands), function(*narrow)
    if kind == "product":
        assert (wide_result.dtype, narrow_result.dtype) == (torch.bfloat16, torch.bfloat16)
        return
    exact = function(*operands)
    assert wide_result.dtype == torch.float32
    torch.testing.assert_close(wide_result, exact, rtol=1e-6, atol=1e-6)
    assert narrow_result.dtype == torch.float32 if kind == "sum" or name == "addr" else torch.bfloat16
    if name != "vmap of a sum of products":  # its products are multiplications of 16-bit numbers
        want = function(*(x.float() for x in narrow)).to(narrow_result.dtype)
        torch.testing.assert_close(narrow_result, want, rtol=1e-6, atol=1e-6)


def test_s04_operands_of_two_dtypes_are_promoted() -> None:
    with autocast(BFLOAT16, "cpu"):
        angles = torch.einsum("i,j->ij", torch.arange(4096.0), ROW[0].bfloat16())
        assert (A[0] @ B[0].bfloat16()).dtype == torch.float32
        assert (COLUMN.half() @ ROW.bfloat16()).dtype == torch.float32
        assert (COLUMN.double() @ ROW.double()).dtype == torch.float64
        assert (COLUMN.long() @ ROW.long()).dtype == torch.int64
        with pytest.raises(RuntimeError, match=r"subscript i has size 8 .* previously seen size 4|does not broadcast"):
            torch.einsum("i,i->", A[0], A[:, 0])
        with pytest.raises(RuntimeError, match="einsum"):
            torch.einsum("ij,j->i", A[0], A[0])
    assert torch.equal(angles, torch.outer(torch.arange(4096.0), ROW[0].bfloat16().float()))


def test_s04_a_rotary_embedding_written_as_a_product() -> None:
    positions, frequencies = torch.arange(4096.0), torch.logspace(0, -4, 16)
    with autocast(BFLOAT16, "cpu"):
        angles = [torch.einsum("i,j->ij", positions, frequencies), positions[:, None] @ frequencies[None]]
    for got in angles:
        assert torch.equal(got.cos(), torch.outer(positions, frequencies).cos())


def test_s04_inner_products_keep_their_gradients_dtype_in_every_transform() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            return (torch.einsum("bi,bi->b", a, b) ** 2).sum()

    a, b = A.bfloat16().requires_grad_(), B.bfloat16()
    (want,) = torch.autograd.grad(loss(a, b), a)
    assert want.dtype == torch.bfloat16
    torch._dynamo.reset()
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(a, b), a)
    (again,) = torch.autograd.grad(checkpoint(loss, a, b, use_reentrant=False), a)
    functional_grad = torch.func.grad(loss)(a.detach(), b)
    assert all(torch.equal(got, want) for got in (compiled, again, functional_grad))


READS = torch.zeros(8192, dtype=torch.int64)
GATHERS: dict[str, Function] = {
    "index_select": lambda x: x.index_select(0, READS),
    "index_select along 1": lambda x: torch.index_select(x, 1, READS),
    "gather": lambda x: torch.gather(x, 0, READS[:, None].expand(-1, 4)),
    "take": lambda x: x.take(torch.arange(4).repeat(8192)),
    "take_along_dim": lambda x: torch.take_along_dim(x, READS[:, None], 0),
    "x[i]": lambda x: x[READS],
    "x[i, 1:3]": lambda x: x[READS, 1:3],
    "x[list]": lambda x: x[[0] * 8192],
    "x[numpy]": lambda x: x[READS.numpy()],
    "repeat_interleave": lambda x: x.repeat_interleave(8192, 0),
    "repeat": lambda x: x.repeat(8192, 1),
    "expand": lambda x: x[:1].expand(8192, 4),
    "embedding": lambda x: functional.embedding(READS, x),
    "embedding with padding": lambda x: functional.embedding(READS, weight=x, padding_idx=1),
    "embedding_bag": lambda x: functional.embedding_bag(READS[:, None], x, mode="sum"),
    "unfold": lambda x: x.repeat(1, 512).unfold(1, 1024, 1),
}


def gathered_gradient(name: str, x: torch.Tensor) -> torch.Tensor:
    with autocast(BFLOAT16, "cpu"):
        y = GATHERS[name](x)
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, 0.7, dtype=torch.bfloat16).to(y.dtype))
    return grad


@pytest.mark.parametrize("name", GATHERS)
def test_s04_the_gradient_of_a_gather_is_accumulated_in_float32(name: str) -> None:
    x = torch.linspace(0.0, 1.0, 8).reshape(2, 4).bfloat16().requires_grad_()
    kept: list[torch.dtype] = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept.append(saved.dtype)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        got = gathered_gradient(name, x)
    want = gathered_gradient(name, x.detach().float().requires_grad_())
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).norm() < 0.005 * want.norm()
    assert torch.float32 not in kept or name == "embedding_bag"
    with autocast(BFLOAT16, "cpu"):
        result = GATHERS[name](x)
    assert result.dtype == (torch.float32 if name == "embedding_bag" else torch.bfloat16), "a bag is a sum"
    assert torch.equal(result, GATHERS[name](x.detach().float()).to(result.dtype))


def test_s04_an_embedding_with_a_largest_norm_still_writes_to_its_weight() -> None:
    for function in (functional.embedding, functional.embedding_bag):
        x = torch.full((2, 4), 3.0, dtype=torch.bfloat16)
        with autocast(BFLOAT16, "cpu"):
            function(torch.zeros(3, 2, dtype=torch.int64), x.requires_grad_(), max_norm=1.0)
        assert torch.equal(x.detach()[:, 0], torch.tensor([0.5, 3.0], dtype=torch.bfloat16))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode tables
@pytest.mark.parametrize("name", ["x[i]", "embedding", "take", "gather", "take_along_dim"])
def test_s04_the_gradient_of_a_gather_in_every_transform(name: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            return (GATHERS[name](x.clone()) * 0.7).sum()

    x = torch.linspace(0.0, 1.0, 8).reshape(2, 4).bfloat16().requires_grad_()
    (want,) = torch.autograd.grad(loss(x), x)
    assert want[0].tolist() == pytest.approx([5734.0] * 4, rel=0.01), "0.7 in bfloat16, 8192 times"
    torch._dynamo.reset()
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), x)
    (nonreentrant,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
    functional_grad = torch.func.grad(loss)(x.detach())
    mapped = torch.vmap(torch.func.grad(loss))(x.detach()[None])[0]
    (outer,) = torch.autograd.grad(torch.vmap(loss)(x[None]).sum(), x)
    for got in (compiled, nonreentrant, functional_grad, mapped, outer):
        assert torch.equal(got, want)
    tangent = torch.func.jvp(loss, (x.detach(),), (torch.ones_like(x),))[1]
    assert float(tangent) == pytest.approx(4 * 5734.0, rel=0.01)


class Called(TorchFunctionMode):
    """Notes the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_s04_what_reads_no_row_twice_is_left_alone() -> None:
    x, mask = torch.ones(4, 4, dtype=torch.bfloat16, requires_grad=True), torch.tensor([True, False, True, False])
    seen = Called()
    with seen, autocast(BFLOAT16, "cpu"):
        results = [x[0], x[:, 1:], x[..., None], x[mask], x[1, ::2], x[None, 2], x[-1]]
        with torch.no_grad():
            x[[0, 0]]
            functional.embedding(READS, x)
        x.detach()[[0, 0]]
        x.float()[[0, 0]]
    assert all(result.grad_fn is not None and "ToCopy" not in result.grad_fn.name() for result in results)
    assert seen.names.count("float") == 1, "the one above"
    assert set(seen.names) <= {"__getitem__", "embedding", "detach", "float", "_set_grad_enabled", "__get__"}


VECTOR, MATRIX, MATRICES = torch.full((300,), 30.0), torch.full((3, 300), 30.0), torch.full((2, 3, 300), 30.0)
BY_NAME: dict[str, dict[str, object]] = {
    "dot": {"input": VECTOR, "tensor": VECTOR},
    "vdot": {"other": VECTOR, "input": VECTOR},
    "inner": {"other": VECTOR, "input": VECTOR},
    "matmul": {"input": VECTOR, "other": VECTOR},
    "tensordot": {"a": MATRIX, "b": MATRIX, "dims": 2},
    "bmm": {"input": MATRICES[:, :1], "mat2": MATRICES[:, :1].mT},
    "mm": {"mat2": MATRIX[:, :1].T, "input": MATRIX[:, :1]},
    "mv": {"input": MATRIX[:, :1], "vec": VECTOR[:1]},
    "addr": {"input": MATRIX[:, :3], "vec1": VECTOR[:3], "vec2": VECTOR[:3]},
    "addmv": {"input": VECTOR[:3], "mat": MATRIX[:, :1], "vec": VECTOR[:1]},
    "baddbmm": {"input": MATRICES[:, :, :3], "batch1": MATRICES[:, :, :1], "batch2": MATRICES[:, :, :1].mT},
    "addbmm": {"input": MATRIX[:, :3], "batch1": MATRICES[:, :, :1], "batch2": MATRICES[:, :, :1].mT},
}


@pytest.mark.parametrize("name", BY_NAME)
def test_s04_products_are_told_apart_by_names_too(name: str) -> None:
    with autocast(BFLOAT16, "cpu"):
        got = getattr(torch, name)(**BY_NAME[name])
    assert got.dtype == torch.float32
    assert torch.equal(got, getattr(torch, name)(**BY_NAME[name]))


def test_s04_matrix_products_by_name_and_calls_that_torch_refuses() -> None:
    with autocast(BFLOAT16, "cpu"):
        assert torch.matmul(MATRIX, other=MATRIX.T).dtype == torch.bfloat16
        assert torch.matmul(VECTOR, VECTOR, out=torch.empty(())).dtype == torch.float32
        with pytest.raises(TypeError, match="expected Tensor as element 1"):
            torch.einsum("ij,jk", MATRIX, 3)  # type: ignore[arg-type]
