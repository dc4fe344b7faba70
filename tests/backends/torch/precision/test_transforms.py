"""Regions under torch.compile, torch.func, activation checkpointing and inference_mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp_torch.precision.autocast import autocast, carried

BFLOAT16 = polyamp.Policy("mixed_bfloat16")
NATIVE = BFLOAT16.replace(op_list="native")
X = torch.linspace(-1.0, 1.0, 32).reshape(4, 8)


def layers() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


LAYER = layers()
HEADS = nn.MultiheadAttention(8, 2)


def inner(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results whose dtypes show what ran where, by functions of every rule."""
    h = LAYER(x)
    q = h.unflatten(-1, (2, 4)).transpose(0, 1)
    attended, weights = HEADS(x[:, None], x[:, None], x[:, None])
    return (
        *(h, h.exp(), torch.softmax(h, -1), functional.layer_norm(h, (8,)), h**2, 1 / h, h.norm(), torch.cdist(h, h)),
        *(q, functional.scaled_dot_product_attention(q, q, q), h.sum(dtype=torch.float16), attended, weights),
    )


def inside(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with autocast(BFLOAT16, "cpu"):
        return inner(x)


decorated = autocast(BFLOAT16, "cpu")(inner)


class Compiled:
    """A compiled function, and how often it was compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        torch._dynamo.reset()
        self.graphs = 0
        self.run = torch.compile(function, fullgraph=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("way", ["inside", "decorated", "outside"])
def test_compiles_into_one_graph_once(way: str) -> None:
    compiled = Compiled({"inside": inside, "decorated": decorated, "outside": inner}[way])
    want = inside(X)
    for _ in range(3):
        with autocast(BFLOAT16, "cpu") if way == "outside" else contextlib.nullcontext():
            got = compiled.run(X)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert compiled.graphs == 1


def test_compiles_under_other_policies() -> None:
    def nested(x: torch.Tensor) -> Any:
        with autocast(BFLOAT16, "cpu"):
            first = LAYER(x)
            with autocast(NATIVE, "cpu"):
                second = first.exp()
            with autocast(polyamp.Policy("float32"), "cpu"):
                third = LAYER(x)
            with torch.autocast("cpu", enabled=False):
                fourth = first.exp()
            return first, second, third, fourth, first.exp()

    compiled = Compiled(nested)
    for _ in range(2):
        got = compiled.run(X)
    assert [t.dtype for t in got] == [t.dtype for t in nested(X)]
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    assert compiled.graphs == 1


def test_a_compiled_backward_has_the_eager_ones_numbers() -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            return functional.linear(X, weight).softmax(-1).square().sum()

    weight = LAYER.weight.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(weight), weight)
    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(weight), weight)
    assert torch.equal(got, want)


class Region(nn.Module):
    """How a region goes into tools that take modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            return self.layer(x).softmax(-1)


def test_a_module_with_a_region_is_exported() -> None:
    """With strict=True torch.export raises on any cast inside a region, a plain `.float()` in torch's own included."""
    model = Region()
    exported = torch.export.export(model, (X,), strict=False).module()
    assert torch.equal(exported(X), model(X))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")  # torch's own
def test_a_region_is_traced() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = Region()
    want = model(X)
    assert torch.equal(torch.jit.trace(model, X)(X), want)  # type: ignore[no-untyped-call]  # torch's
    with torch.no_grad():
        assert torch.equal(make_fx(model)(X)(X), want)


def test_trap_a_compiled_encoder_layer_takes_torchs_fused_path_in_inference() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    def run(x: torch.Tensor) -> Any:
        with autocast(BFLOAT16, "cpu"):
            return layer(x)

    x = X[None]
    with torch.no_grad():
        want = run(x)
        assert Compiled(run).run(x).dtype == torch.bfloat16, "torch.compile asks no mode there"
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            got = Compiled(run).run(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(got, want)


def test_a_bound_model_compiles_with_its_overrides() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    bound: Any = BFLOAT16.replace(overrides={"1": "float32"}).autocast(model)
    with bound.installed():
        want = bound(X)
        compiled = Compiled(lambda x: bound(x))
        for _ in range(3):
            got = compiled.run(X)
    assert torch.equal(got, want)
    with bound.installed():  # another step
        assert torch.equal(compiled.run(X), want)
    assert compiled.graphs == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward-mode tables
def test_torch_func() -> None:
    parameters = {name: p.detach() for name, p in LAYER.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with autocast(BFLOAT16, "cpu"):
            output = torch.func.functional_call(LAYER, parameters, (x,))
            soft = output.softmax(-1)
            assert soft.dtype == torch.float32
            return soft.square().sum()

    LAYER.zero_grad()
    with autocast(BFLOAT16, "cpu"):
        LAYER(X).softmax(-1).square().sum().backward()
    gradients = torch.func.grad(loss)(parameters, X)
    assert torch.equal(gradients["weight"], LAYER.weight.grad)  # type: ignore[arg-type]  # there is one
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X)
    torch.testing.assert_close(each["weight"].sum(0), gradients["weight"], rtol=2e-2, atol=2e-3)  # bfloat16 products
    value, tangent = torch.func.jvp(lambda x: loss(parameters, x), (X,), (torch.ones_like(X),))
    assert value.dtype == tangent.dtype == torch.float32
    dot = torch.func.grad(lambda x: loss(parameters, x))(X).sum()
    torch.testing.assert_close(tangent, dot, rtol=5e-2, atol=2e-3)  # bfloat16 products in another order


def test_vmap_runs_products_and_islands_in_their_dtypes() -> None:
    weight = LAYER.weight.detach()
    seen: list[torch.dtype] = []

    def row(x: torch.Tensor) -> torch.Tensor:
        product = weight @ x
        soft = product.softmax(-1)
        seen.extend((product.dtype, soft.dtype))
        return soft

    with autocast(BFLOAT16, "cpu"):
        got = torch.func.vmap(row)(X)
    assert seen == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(got, (X.bfloat16() @ weight.bfloat16().T).float().softmax(-1), rtol=1e-2, atol=1e-3)


def test_inference_mode() -> None:
    want = inside(X)
    with torch.inference_mode():
        got = inside(X)
    assert got[0].is_inference()
    torch.testing.assert_close([t.clone() for t in got], [t.detach() for t in want], rtol=0, atol=0)
    cast = BFLOAT16.replace(mode="cast").autocast(nn.Linear(8, 8))
    with torch.inference_mode():
        assert cast(X).dtype == torch.float32


noted: list[torch.dtype] = []


def block(x: torch.Tensor) -> torch.Tensor:
    """A block whose numbers depend on the island in its middle."""
    soft = torch.softmax(LAYER(x), -1)
    noted.append(soft.dtype)
    return LAYER((soft * soft).exp())


def gradient(forward: Callable[[torch.Tensor], torch.Tensor], region: Callable[[], Any]) -> torch.Tensor:
    LAYER.zero_grad()
    noted.clear()
    with region():
        loss = forward(X.clone().requires_grad_()).float().square().sum()
    loss.backward()
    assert LAYER.weight.grad is not None
    return LAYER.weight.grad.clone()


def region() -> Any:
    return autocast(BFLOAT16, "cpu")


NESTINGS = [(True,), (False,), (False, False), (True, True), (False, True), (True, False)]


def checkpointed(kinds: tuple[bool, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    function: Callable[..., Any] = block
    for reentrant in kinds:
        function = _checkpointed(function, reentrant)
    return function


def _checkpointed(function: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda x: checkpoint(function, x, use_reentrant=reentrant)


@pytest.mark.parametrize("kinds", NESTINGS, ids=str)
def test_checkpointing_repeats_the_islands_in_a_backward_outside(kinds: tuple[bool, ...]) -> None:
    want = gradient(block, region)
    got = gradient(checkpointed(kinds), region)
    assert torch.equal(got, want)
    assert set(noted) == {torch.float32}
    assert len(noted) > 1, "the block ran again"


def test_trap_checkpointing_brings_back_no_mode() -> None:
    """A mode of one's own over torch.autocast: the repeated forward pass computes in another dtype."""
    from torch.overrides import TorchFunctionMode

    class Islands(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            widen = func is torch.softmax
            return func(*(a.float() if widen and a is args[0] else a for a in args), **(kwargs or {}))

    @contextlib.contextmanager
    def plain() -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), Islands():
            yield

    gradient(checkpointed((True,)), plain)
    assert noted == [torch.float32, torch.bfloat16]
    gradient(checkpointed((True,)), region)
    assert noted == [torch.float32, torch.float32]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_native_list_where_it_was_chosen(reentrant: bool) -> None:
    @contextlib.contextmanager
    def native() -> Any:
        with autocast(BFLOAT16, "cpu"), autocast(NATIVE, "cpu"):
            yield

    want = gradient(block, native)
    assert torch.equal(gradient(_checkpointed(block, reentrant), native), want)
    assert noted == [torch.bfloat16] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_dropout(reentrant: bool) -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(functional.dropout(LAYER(x), 0.5), -1)

    ends = []
    for forward in (dropped, _checkpointed(dropped, reentrant)):
        torch.manual_seed(1)
        ends.append(gradient(forward, region))
    assert torch.equal(*ends)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_a_bound_models_overrides_outside_the_step(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.plain = False
            self.body[1].register_forward_hook(lambda m, a, out: noted.append(out.dtype))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x) if self.plain else checkpoint(self.body, x, use_reentrant=reentrant)

    ends = []
    noted.clear()
    for plain in (True, False):
        model = Model()
        model.plain = plain
        bound = BFLOAT16.replace(overrides={"body/1": "float32"}).autocast(model)
        bound(X.clone().requires_grad_()).square().sum().backward()
        ends.append(model.body[0].weight.grad)
    assert torch.equal(*ends)
    assert set(noted) == {torch.float32}
    assert len(noted) == (3 if reentrant else 2), "the other kind stops before the last hook"


def test_another_librarys_checkpoint_is_served_by_carried() -> None:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                result: torch.Tensor = function(x)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.function(x)
            torch.autograd.backward(output, grads)
            return None, x.grad

    want = gradient(block, region)
    assert torch.equal(gradient(lambda x: Again.apply(carried(block), x), region), want)  # type: ignore[no-untyped-call]  # torch does not annotate it
    assert noted == [torch.float32] * 2


def test_backward_inside_the_region() -> None:
    want = gradient(block, region)
    LAYER.zero_grad()
    with region():
        checkpoint(block, X.clone().requires_grad_(), use_reentrant=False).float().square().sum().backward()
    assert torch.equal(LAYER.weight.grad, want)  # type: ignore[arg-type]  # there is one
