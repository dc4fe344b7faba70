"""`custom_fwd` and `custom_bwd` in both styles of `torch.autograd.Function`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.precision.autocast import autocast
from polyamp_torch.precision.torch_only.custom_autograd_function import custom_bwd, custom_fwd

BFLOAT16 = polyamp.Policy("mixed_bfloat16")
Noted = list[tuple[str, torch.dtype, torch.dtype]]
STYLES = ["ctx", "setup_context"]


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(3, 3, generator=generator).requires_grad_() for _ in range(2))
    return x, w


def product(style: str, fwd: Any = custom_fwd, bwd: Any = custom_bwd, noted: Noted | None = None) -> Any:
    """A matrix product that notes the dtype of products and exponentials in its two passes."""

    def note(which: str, x: torch.Tensor) -> None:
        if noted is not None:
            noted.append((which, x.dtype, x.exp().dtype))

    class WithContext(Function):
        @staticmethod
        @fwd
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            y = x @ w
            note("forward", y)
            return y

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return backward(ctx, grad)

    class WithSetup(Function):
        generate_vmap_rule = True

        @staticmethod
        @fwd
        def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            note("forward", y)
            return y

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return backward(ctx, grad)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        gx = grad @ w.mT
        note("backward", gx)
        return gx.float(), (x.mT @ grad).float()

    return {"ctx": WithContext, "setup_context": WithSetup}[style]


def run(function: Any, x: torch.Tensor, w: torch.Tensor, kind: bool | None = None) -> torch.Tensor:
    x.grad = w.grad = None
    with autocast(BFLOAT16, "cpu"):
        output = function.apply(x, w) if kind is None else checkpoint(function.apply, x, w, use_reentrant=kind)
    output.float().square().sum().backward()
    assert x.grad is not None
    return x.grad.clone()


def test_trap_torchs_own_fail_in_backward_with_setup_context() -> None:
    plain = product("setup_context", torch.amp.custom_fwd(device_type="cpu"), torch.amp.custom_bwd(device_type="cpu"))
    with pytest.raises(AttributeError, match="_fwd_used_autocast"):
        run(plain, *operands())
    noted: Noted = []
    run(product("setup_context", noted=noted), *operands())
    assert noted == [(which, torch.bfloat16, torch.float32) for which in ("forward", "backward")]


@pytest.mark.parametrize("kind", [None, True, False])
@pytest.mark.parametrize("style", STYLES)
def test_backward_runs_under_the_forwards_autocast_and_islands(style: str, kind: bool | None) -> None:
    noted: Noted = []
    got = run(product(style, custom_fwd(), custom_bwd(), noted), *operands(), kind)
    forwards = 1 if kind is None else 2
    mixed = (torch.bfloat16, torch.float32)
    assert noted == [*[("forward", *mixed)] * forwards, ("backward", *mixed)]
    assert torch.equal(got, run(product(style), *operands()))
    noted.clear()
    x, w = operands()
    product(style, noted=noted).apply(x, w).sum().backward()
    assert noted == [("forward", torch.float32, torch.float32), ("backward", torch.float32, torch.float32)]
    noted.clear()
    output = product(style, noted=noted).apply(x, w)
    with autocast(BFLOAT16, "cpu"):
        output.sum().backward()
    assert noted == [("forward", torch.float32, torch.float32), ("backward", torch.float32, torch.float32)]


def test_in_a_step_the_islands_act_in_the_backward_of_torchs_own_custom_bwd_too() -> None:
    noted: Noted = []
    plain = product("ctx", torch.amp.custom_fwd(device_type="cpu"), torch.amp.custom_bwd(device_type="cpu"), noted)
    x, _ = operands()
    recipe = polyamp.Recipe(policy=BFLOAT16, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(torch.nn.Linear(3, 3), recipe)
    step = polyamp.train_step(lambda model, x: plain.apply(x, model.weight).float().sum(), recipe)
    step(state, x.detach())
    mixed = (torch.bfloat16, torch.float32)
    assert noted[-2:] == [("forward", *mixed), ("backward", *mixed)]


@pytest.mark.parametrize("style", STYLES)
def test_cast_inputs(style: str) -> None:
    noted: Noted = []
    function = product(style, custom_fwd(device_type="cpu", cast_inputs=torch.float16), custom_bwd, noted)
    run(function, *operands())
    assert noted == [(which, torch.float16, torch.float16) for which in ("forward", "backward")], "autocast is off"
    noted.clear()
    x, w = operands()
    function.apply(x, w).sum().backward()
    assert {item[1] for item in noted} == {torch.float32}, "no effect outside autocast"
    with autocast(BFLOAT16, "cpu"):
        assert function.apply(x.double(), w.double()).dtype == torch.float64


def test_cast_inputs_casts_containers_and_keywords() -> None:
    seen: list[Any] = []

    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, pair: Any, table: Any, *, flag: bool, extra: Any) -> None:
        seen.extend([*(item.dtype for item in pair), table["a"].dtype, table["b"], flag, extra.dtype])

    half = torch.ones(2).half()
    with autocast(BFLOAT16, "cpu"):
        forward(None, (half, torch.arange(2)), {"a": half, "b": "text"}, flag=True, extra=half)
    assert seen == [torch.float32, torch.int64, torch.float32, "text", True, torch.float32]


@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
@pytest.mark.parametrize("style", STYLES)
def test_double_backward(style: str, cast_inputs: torch.dtype | None) -> None:
    """With torch's own cast_inputs, the saved casts have no history, and the second derivative misses them."""

    def second(apply: Any) -> list[torch.Tensor]:
        x, w = operands()
        with autocast(BFLOAT16, "cpu"):
            value = apply(x, w).float().square().sum()
        first = torch.autograd.grad(value, (x, w), create_graph=True)
        loss = sum(g.square().sum() for g in first)
        return list(torch.autograd.grad(loss, (x, w)))  # type: ignore[arg-type]  # two items, so no int

    def plainly(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ w

    got = second(product(style, custom_fwd(cast_inputs=cast_inputs)).apply)
    want = second(plainly)
    if cast_inputs is None:
        torch.testing.assert_close(got, want, rtol=0.1, atol=5.0)  # bfloat16 products; the values are around 100
    else:
        torch.testing.assert_close(got, want)


def test_trap_torchs_cast_inputs_loses_the_second_derivative() -> None:
    plain = product("ctx", torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16),
                    torch.amp.custom_bwd(device_type="cpu"))  # fmt: skip
    ours = product("ctx", custom_fwd(cast_inputs=torch.float16))
    firsts = []
    for function in (plain, ours):
        x, w = operands()
        with autocast(BFLOAT16, "cpu"):
            value = function.apply(x, w).float().sum()
        firsts.append(torch.autograd.grad(value, x, create_graph=True)[0])
    assert not firsts[0].requires_grad, "plain torch: nothing to differentiate again"
    (second,) = torch.autograd.grad(firsts[1].square().sum(), w)
    exact = 6 * operands()[1].sum(1, keepdim=True).expand(3, 3)  # each of 3 rows holds r[j] = sum_k w[j, k]
    torch.testing.assert_close(second, exact, rtol=1e-2, atol=1e-2)  # float16


def test_torch_func_and_a_generated_vmap_rule() -> None:
    noted: Noted = []
    function = product("setup_context", noted=noted)
    x, w = operands()
    want = run(product("setup_context"), x, w)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            return function.apply(x, w.detach()).float().square().sum()  # type: ignore[no-any-return]  # torch's

    batch = torch.stack([x.detach(), 2 * x.detach()])
    each = torch.func.vmap(torch.func.grad(loss))(batch)
    assert torch.equal(each[0], want)
    assert torch.equal(torch.func.grad(loss)(x.detach()), want)
    assert torch.equal(torch.func.grad(lambda b: torch.func.vmap(loss)(b).sum())(batch)[0], want)
    assert {item[1:] for item in noted} == {(torch.bfloat16, torch.float32)}
    assert {item[0] for item in noted} == {"forward", "backward"}


def test_subclasses_note_for_themselves() -> None:
    noted: Noted = []
    base = product("setup_context", noted=noted)
    run(base, *operands())

    class Changed(base):  # type: ignore[misc]  # its base is Any here
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.mark_non_differentiable()

    run(Changed, *operands())
    assert len(noted) == 4
    assert {item[1:] for item in noted} == {(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiles(style: str, where: str) -> None:
    function = product(style)
    x, w = operands()
    want = run(function, x, w)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return function.apply(x, w).float().square().sum()  # type: ignore[no-any-return]  # torch's

    torch._dynamo.reset()
    compiled = torch.compile(
        autocast(BFLOAT16, "cpu")(loss) if where == "inside" else loss, fullgraph=True, backend="aot_eager"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*should not be instantiated", category=DeprecationWarning
        )  # torch's
        with autocast(BFLOAT16, "cpu"):
            output = compiled(x, w)
    (got,) = torch.autograd.grad(output, x)
    assert torch.equal(got, want)


def test_refusals() -> None:
    with pytest.raises(UnsupportedError, match=r"must be one of cpu, cuda, mps, xpu\. Received: device_type='tpu'"):
        custom_fwd(device_type="tpu")
    with pytest.raises(UnsupportedError, match="must be one of"):
        custom_bwd(device_type="tpu")
    with pytest.raises(UnsupportedError, match="Decorate forward with custom_fwd of polyamp_torch as well"):
        run(product("ctx", lambda f: f), *operands())
