"""Products in 8 bits in torch (S36): codes, products, which calls they are, checkpoints, torch.compile, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
import polyamp_torch
from polyamp import Float8, Policy, UnsupportedError
from polyamp.recipe.float8 import SCALINGS
from polyamp.reference import float8 as reference
from polyamp_torch.precision.torch_only.float8_products import quantize
from tests.fixtures import float8_values

POLICY = Policy("mixed_float8", float8=Float8(emulate=True))
HALF = Policy("mixed_bfloat16")
WIDE_GRADIENTS = Policy("mixed_float8", float8=Float8(emulate=True, gradients="float8_e4m3fn"))
ROW, BLOCK32 = (Policy("mixed_float8", float8=Float8(scaling=each, emulate=True)) for each in ("row", "block32"))


@pytest.mark.parametrize("form", float8_values.FORMATS)
@pytest.mark.parametrize("kind", float8_values.KINDS)
def test_codes_have_the_references_bits(kind: str, form: str) -> None:
    x = float8_values.values(kind)
    want = reference.quantize(x, form)
    got = quantize(torch.from_numpy(x).to(torch.bfloat16), form)
    assert int(got.exponent) == want.exponent
    numbers = got.numbers.view(torch.uint8).numpy().view(getattr(ml_dtypes, form))
    np.testing.assert_array_equal(float8_values.bits(numbers), float8_values.bits(want.numbers))


@pytest.mark.parametrize("form", float8_values.FORMATS)
def test_s36_codes_of_rows_and_blocks_have_the_references_bits(form: str) -> None:
    def codes(x: Any, form: str, scaling: str, axis: int) -> Any:
        got = quantize(torch.from_numpy(x).to(torch.bfloat16), form, scaling, axis=axis)
        return got.numbers.view(torch.uint8).numpy().view(getattr(ml_dtypes, form)), got.exponent

    float8_values.check_codes(codes, form)


@pytest.mark.parametrize("policy", [POLICY, WIDE_GRADIENTS, ROW, BLOCK32], ids=lambda policy: repr(policy.float8))
def test_a_linear_layer_has_the_references_products(policy: Policy) -> None:
    x, w, g = float8_values.products()
    layer = nn.Linear(64, 96, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w.T))
    given = torch.from_numpy(x).requires_grad_()
    out = policy.replace(output="bfloat16").autocast(layer)(given)
    out.backward(torch.from_numpy(g).to(torch.bfloat16))
    found = (out.detach().float(), given.grad, layer.weight.grad.T)
    float8_values.check_products(*(each.numpy() for each in found), policy.float8)


@pytest.mark.parametrize("value", float8_values.NOT_FINITE)
def test_s36_infinity_or_nan_in_the_gradient_alone_is_not_cut(value: float) -> None:
    x, w, _ = float8_values.products()
    layer, given = nn.Linear(64, 96, bias=False), torch.from_numpy(x).requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w.T))
    out = POLICY.autocast(layer)(given)
    out.backward(torch.from_numpy(float8_values.broken_gradient(value)).to(out.dtype))
    assert bool(out.isfinite().all())
    assert layer.weight.grad is not None
    assert given.grad is not None
    float8_values.check_broken_gradients(given.grad.numpy(), layer.weight.grad.numpy())


def test_products_of_a_layer_are_within_two_to_the_minus_20_before_they_are_rounded() -> None:
    x, w, _ = float8_values.products()
    left, right = (quantize(torch.from_numpy(each).to(torch.bfloat16), "float8_e4m3fn") for each in (x, w))
    got = left.numbers.float() @ right.numbers.float()
    want = left.numbers.double() @ right.numbers.double()
    size = left.numbers.double().abs() @ right.numbers.double().abs()
    assert ((got - want).abs() <= 2.0**-20 * size).all()


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first, self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(x)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


BATCH = {
    "x": torch.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16).sin(),
    "y": torch.linspace(-2.0, 1.0, 8 * 16).reshape(8, 16).cos(),
}


def train(model: nn.Module, policy: Policy = POLICY, steps: int = 2, **settings: Any) -> torch.Tensor:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.5), **settings)
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def formats_of(model: nn.Module, policy: Policy = POLICY) -> dict[str, bool]:
    """Return module -> whether one of its operations ran in 8 bits."""
    rows = polyamp.explain(model, policy, BATCH["x"]).operations
    return {
        name: any(row.module == name and row.rule.startswith("float8") for row in rows)
        for name in {row.module for row in rows}
    }


class Call(nn.Module):
    """One product of the activation with one parameter, without a bias, by a function of torch."""

    def __init__(self, function: Callable[[torch.Tensor, nn.Parameter], torch.Tensor], *shape: int) -> None:
        super().__init__()
        values = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(values if shape == (32, 48) else values.t().contiguous())
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


CALLS = {
    "linear": (lambda x, w: functional.linear(x, w), 48, 32),
    "linear by keyword": (lambda x, w: functional.linear(input=x, weight=w), 48, 32),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(48), x, w), 32, 48),
    "mm": (lambda x, w: torch.mm(x, w), 32, 48),
    "x.mm": (lambda x, w: x.mm(mat2=w), 32, 48),
    "@": (lambda x, w: x @ w, 32, 48),
    "matmul of three axes": (lambda x, w: torch.matmul(x.reshape(2, 4, 32), w).reshape(8, 48), 32, 48),
    "parameter on the left": (lambda x, w: (w @ x.t()).t(), 48, 32),
}


def run_and_differentiate(name: str, policy: Policy) -> list[torch.Tensor]:
    """Return the output and the gradients by the input and by the parameter, as (inputs, outputs)."""
    module, x = Call(*CALLS[name]), torch.linspace(-1.0, 1.0, 8 * 32).reshape(8, 32).sin().requires_grad_()
    out = policy.replace(output="bfloat16").autocast(module)(x)
    out.backward(torch.linspace(-1.0, 2.0, 8 * 48).reshape(8, 48).to(torch.bfloat16))
    gradient = module.weight.grad
    assert gradient is not None
    return [out.detach(), x.grad, gradient if gradient.shape == (32, 48) else gradient.t()]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_of_a_product_has_the_same_bits(name: str) -> None:
    for got, want, half in zip(
        run_and_differentiate(name, POLICY),
        run_and_differentiate("linear", POLICY),
        run_and_differentiate(name, HALF),
        strict=True,
    ):
        assert torch.equal(got, want)
        assert not torch.equal(got, half)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda x, w: x @ w.t(), (48, 32)),  # a view of a parameter is none
        (lambda x, w: torch.addmm(torch.zeros(48), x, w, alpha=2), (32, 48)),
        (lambda x, w: torch.mm(x[:, :8], w[:8]), (32, 48)),
    ],
)
def test_what_is_no_such_product_has_the_bits_of_bfloat16(call: Any, shape: tuple[int, int]) -> None:
    x = torch.linspace(-1.0, 1.0, 8 * 32).reshape(8, 32)
    got, want = (policy.autocast(Call(call, *shape))(x) for policy in (POLICY, HALF))
    assert torch.equal(got, want)


@pytest.mark.parametrize("sizes", [(32, 24), (24, 32)])
def test_sizes_that_are_no_multiples_of_16_have_the_bits_of_bfloat16(sizes: tuple[int, int]) -> None:
    layer, x = nn.Linear(*sizes), torch.linspace(-1.0, 1.0, 8 * sizes[0]).reshape(8, sizes[0])
    assert torch.equal(POLICY.autocast(layer)(x), HALF.autocast(layer)(x))


def test_heads_stay_in_16_bits_unless_an_override_says_so() -> None:
    found = formats_of(Net())
    assert (found["first"], found["body"], found["head"]) == (True, True, False)
    chosen = POLICY.replace(overrides={"head": "float8", "first": "bfloat16"})
    found = formats_of(Net(), chosen)
    assert (found["first"], found["body"], found["head"]) == (False, True, True)


@pytest.mark.parametrize("narrow", [POLICY, ROW, BLOCK32], ids=SCALINGS)
def test_saved_activations_are_in_8_bits(narrow: Policy) -> None:
    saved: dict[str, int] = {}
    for name, policy in (("8", narrow), ("16", HALF)):
        layer, x = nn.Linear(256, 256, bias=False), torch.randn(4096, 256, requires_grad=True)
        with torch.no_grad():
            x = x * 1.0  # saved tensors only, not the leaf
        x.requires_grad_()
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.replace(output="bfloat16").autocast(layer)(x)
        saved[name] = total
    assert saved["8"] <= (0.55 if narrow != BLOCK32 else 0.6) * saved["16"]  # exponents of blocks are int32


@pytest.mark.parametrize(("reentrant", "policy"), [(False, POLICY), (True, POLICY), (False, BLOCK32), (True, ROW)])
def test_a_checkpoint_has_the_same_bits(reentrant: bool, policy: Policy) -> None:
    assert torch.equal(train(Net(reentrant=reentrant), policy), train(Net(), policy))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
@pytest.mark.parametrize("policy", [POLICY, ROW, BLOCK32], ids=SCALINGS)
def test_compiled_by_torch_it_has_the_same_bits(policy: Policy) -> None:
    model = Net()
    model.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(train(model, policy), train(Net(), policy))
    torch.compiler.reset()


class Square(torch.autograd.Function):
    """x², whose backward pass is three times its derivative, so that a derivative of the forward pass shows."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 6.0 * ctx.saved_tensors[0] * g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does
def test_a_compiled_step_is_refused_for_gradients_that_the_compiler_takes_of_the_forward_pass() -> None:
    """A graph that differentiates itself, as a compiled step does, has 11.24 for 33.72 in plain torch."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return Square.apply(x).sum()  # type: ignore[no-any-return, no-untyped-call]  # torch does not annotate apply

    gradient, x = torch.func.grad(total), torch.tensor([5.62])
    compiled = torch.compile(gradient, backend="eager", fullgraph=True)
    assert float(gradient(x)) == pytest.approx(33.72)
    assert float(compiled(x)) == pytest.approx(11.24)
    torch.compiler.reset()
    recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.5))
    state, step = polyamp.init(Net(), recipe), polyamp.train_step(loss_fn, recipe, compile=True)
    with pytest.raises(UnsupportedError, match=r"Compile the model, model.compile\(\), and use compile=False"):
        step(state, BATCH)


def test_accumulated_micro_batches_are_products_of_their_own() -> None:
    whole = train(Net(), steps=1)
    recipe = polyamp.Recipe(policy=POLICY, optimizer=polyamp.sgd(0.5), accumulate_steps=2)
    model = Net()
    state, step = polyamp.init(model, recipe), polyamp.train_step(loss_fn, recipe)
    halves = [{name: value[rows] for name, value in BATCH.items()} for rows in (slice(0, 4), slice(4, 8))]
    step(state, halves)
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in model.parameters()]), whole, rtol=0, atol=2.0**-6
    )


def test_a_device_without_such_products_is_refused_before_the_first_step() -> None:
    model = Net()
    with pytest.raises(UnsupportedError, match=r"'cpu'\) multiplies no 8-bit floats.*Float8\(emulate=True\)"):
        polyamp.init(model, polyamp.Recipe(policy="mixed_float8", optimizer=polyamp.sgd(0.5)))
    with pytest.raises(UnsupportedError, match="multiplies no 8-bit floats"):
        Policy("mixed_float8").autocast(model)


def test_a_region_and_a_function_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a region knows no model"):
        polyamp_torch.autocast(POLICY, "cpu")
    with pytest.raises(UnsupportedError, match="needs a module"):
        POLICY.autocast(lambda x: x @ x)(BATCH["x"])


def test_products_of_two_activations_stay_in_16_bits() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dense(x) @ x.t()

    torch.manual_seed(0)
    rows = polyamp.explain(Scores(), POLICY, BATCH["x"]).operations
    products = {(row.module, row.dtype): row.rule for row in rows if row.name in ("mm", "matmul")}
    assert products[("", "bfloat16")] == "compute"
    assert products[("dense", "float32")].startswith("float8")


def test_op_rules_beside_it_are_known_to_be_met(recwarn: pytest.WarningsRecorder) -> None:
    train(Net(), POLICY.replace(op_rules={"relu": "float32"}))
    assert [each for each in recwarn if "op_rules" in str(each.message)] == []
    with pytest.warns(UserWarning, match="called no function 'softmax'"):
        train(Net(), POLICY.replace(op_rules={"softmax": "compute"}))


@pytest.mark.parametrize("way", ["autograd", "func"])
def test_a_gradient_of_a_gradient_is_refused(way: str) -> None:
    """It would be that of the rounding; the bfloat16 policy has it."""

    def penalty(policy: Policy) -> torch.Tensor:
        run = policy.autocast(nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16)))
        x = torch.ones(16, 32, requires_grad=True)
        if way == "func":
            return torch.func.grad(lambda x: torch.func.grad(lambda x: run(x).sum())(x).square().sum())(x)
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    assert bool(penalty(HALF).isfinite().all())
    with pytest.raises(UnsupportedError, match="gradients of a product in 8 bits have no gradients of their own"):
        penalty(POLICY)
