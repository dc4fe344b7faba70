"""S3: what the program wrote innermost holds, for the call of the model too: in `loss_fn` a region of torch's or
polyamp's, and a second policy around the model or around a function that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import polyamp
import polyamp_torch

F16, B16, F32 = torch.float16, torch.bfloat16, torch.float32
SECOND = polyamp.Policy("mixed_bfloat16")
WIDE = polyamp.Policy("float32")


class Net(nn.Module):
    """Notes the dtypes of both products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        out: torch.Tensor = self.head(hidden)
        if not torch.compiler.is_compiling():
            self.seen.append((hidden.dtype, out.dtype))
        return out

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def within(region: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    def call(model: Any, x: Any) -> Any:
        with region():
            return model(x)

    return call


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda model, x: model(x),
    "off": within(lambda: torch.autocast("cpu", enabled=False)),
    "bfloat16": within(lambda: torch.autocast("cpu", dtype=B16)),
    "the same": within(lambda: torch.autocast("cpu", dtype=F16)),
    "ours": within(lambda: polyamp_torch.autocast(SECOND, "cpu")),
    "our words": within(lambda: polyamp_torch.autocast("cpu", enabled=False)),
    "off inside bfloat16": lambda model, x: within(lambda: torch.autocast("cpu", dtype=B16))(
        lambda x: within(lambda: torch.autocast("cpu", enabled=False))(model, x), x
    ),
    "a method": lambda model, x: within(lambda: torch.autocast("cpu", enabled=False))(model.method, x),
    "second policy": lambda model, x: SECOND.autocast(model)(x),
    "float32 policy": lambda model, x: WIDE.autocast(model)(x),
    "its method": lambda model, x: WIDE.autocast(model).method(x),
    "cast policy": lambda model, x: SECOND.replace(mode="cast").autocast(model)(x),
    "function": lambda model, x: WIDE.autocast(lambda x: model(x))(x),
    "checkpoint": lambda model, x: checkpoint(
        within(lambda: torch.autocast("cpu", enabled=False)), model, x, use_reentrant=False
    ),
    "in checkpoint's region": lambda model, x: within(lambda: torch.autocast("cpu", enabled=False))(
        lambda x: checkpoint(model, x, use_reentrant=False), x
    ),
}
EXPECTED = {
    "nothing": F16, "the same": F16, "bfloat16": B16, "ours": B16, "second policy": B16, "cast policy": B16,
}  # fmt: skip
IN_CAST = {"off": F16, "our words": F16, "off inside bfloat16": F16, "a method": F16, "checkpoint": F16,
           "in checkpoint's region": F16}  # fmt: skip
"""In mode "cast" the weights are float16 before any region is opened, and where autocast is off an operation runs in
its operands' dtype: as in torch on a model that is `half()`."""


def ran(policy: polyamp.Policy, way: str) -> tuple[list[Any], torch.Tensor, dict[str, torch.Tensor]]:
    net = Net()
    state = polyamp.init(net, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    outs = []

    def loss_fn(model: Any, x: Any) -> Any:
        out = WAYS[way](model, x)
        outs.append(out)
        return out.float().square().mean()

    with set_checkpoint_early_stop(False):
        _, gradients = polyamp.value_and_grad(loss_fn)(state, x)
    assert not torch.is_autocast_enabled("cpu")
    assert all(p.dtype == F32 for p in net.parameters())
    return net.seen, outs[0], gradients.values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s03_the_region_written_innermost_holds_for_the_call_too(mode: Any, way: str) -> None:
    seen, out, gradients = ran(polyamp.Policy("mixed_float16", mode=mode), way)
    wanted = EXPECTED.get(way) or (IN_CAST.get(way, F32) if mode == "cast" else F32)
    assert set(seen) == {(wanted, wanted)}
    assert len(seen) == (2 if "checkpoint" in way else 1), "a checkpoint runs it twice, in the same dtypes"
    assert out.dtype == F32, "the output is the policy's"
    if wanted == F32:
        plain = Net()
        result = plain(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        result.square().mean().backward()
        assert torch.equal(out, result)
        assert all(torch.allclose(gradients[n.replace(".", "/")], p.grad, rtol=1e-6, atol=1e-7)
                   for n, p in plain.named_parameters() if p.grad is not None)  # fmt: skip


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize(
    ("way", "wanted"),
    [("nothing", (F16, B16)), ("off", (F32, F32)), ("bfloat16", (B16, B16)), ("float32 policy", (F32, F32)),
     ("second policy", (B16, B16)), ("function", (F32, F32))],
)  # fmt: skip
def test_s03_an_override_yields_to_what_is_written_further_in(mode: Any, way: str, wanted: Any) -> None:
    """In mode "cast" a region with autocast off says nothing: the weights have the dtypes that they were cast to, and
    what follows an overridden module has the dtype around it."""
    seen, *_ = ran(polyamp.Policy("mixed_float16", mode=mode, overrides={"head": "bfloat16"}), way)
    if mode == "cast" and way in ("nothing", "off"):
        wanted = (F16, F16)
    assert seen == [wanted]


def test_s03_overrides_of_overrides_are_no_strangers() -> None:
    """A module in float32, in it one in bfloat16 that a checkpoint runs again: nobody opened a region of his own."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(self.net, x, use_reentrant=False)
            return out

    model = nn.Sequential(Inner(), nn.Linear(2, 2))
    policy = polyamp.Policy("mixed_float16", overrides={"0": "float32", "0/net": "bfloat16"})
    state = polyamp.init(model, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    with set_checkpoint_early_stop(False):
        polyamp.value_and_grad(lambda bound, x: bound(x).square().mean())(state, torch.ones(3, 4))
    assert model[0].net.seen == [(B16, B16)] * 2  # type: ignore[union-attr]  # a Module's attribute


def test_s03_a_second_policy_around_one_module_does_not_take_another_ones_override() -> None:
    """The second policy sets what the first does and covers `gate` alone: what `gate` calls elsewhere keeps its own."""

    class Gate(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(elsewhere[0](x))

    class Body(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.gate = Body(4, 4), Gate(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = polyamp.Policy("mixed_float16").autocast(self.gate)(x)
            return out

    seen: list[bool] = []
    pair = Pair()
    elsewhere = [pair.body]
    policy = polyamp.Policy("mixed_float16", overrides={"body": "float32"})
    state = polyamp.init(pair, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    polyamp.value_and_grad(lambda model, x: model(x).float().square().mean())(state, torch.ones(3, 4))
    assert seen == [False]


def test_s03_a_hook_of_the_backward_pass_calls_the_model_under_its_policy() -> None:
    net = Net()
    state = polyamp.init(net, polyamp.Recipe(policy="mixed_float16", optimizer=polyamp.sgd(0.1)))

    def loss_fn(model: Any, x: Any) -> Any:
        out = model(x)
        out.register_hook(lambda gradient: model(x) * 0.0 + gradient)
        return out.square().mean()

    polyamp.value_and_grad(loss_fn)(state, torch.ones(3, 4))
    assert net.seen == [(F16, F16)] * 2


@pytest.mark.parametrize(("mode", "way"), [("autocast", "off"), ("autocast", "outside"), ("cast", "bfloat16")])
def test_s03_the_same_in_a_compiled_step(mode: Any, way: str) -> None:
    recipe = polyamp.Recipe(policy=polyamp.Policy("mixed_float16", mode=mode), optimizer=polyamp.sgd(0.1))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    found = []
    for how in (False, {"backend": "eager"}):
        torch._dynamo.reset()
        net = Net()
        second = WIDE.autocast(net)
        use = (lambda model, x: second(x)) if way == "outside" else WAYS[way]  # noqa: B023  # called in this turn
        step = polyamp.train_step(lambda model, x: use(model, x).float().square().mean(), recipe, compile=how)  # noqa: B023
        _, result = step(polyamp.init(net, recipe), x)
        found.append((result.loss, net.body.weight.detach()))
    torch.testing.assert_close(found[1], found[0], rtol=2e-6, atol=1e-7)
    plain = ran(recipe.policy, "nothing")[1].detach().square().mean()
    assert abs(float(found[1][0]) - float(plain)) > 1e-5, "or the region would show nothing"


def step_with(loss_fn: Callable[[Any, Any], Any], policy: polyamp.Policy, net: nn.Module) -> None:
    state = polyamp.init(net, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))
    polyamp.train_step(loss_fn, polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1)))(state, torch.ones(3, 4))


@pytest.mark.parametrize("spelling", ["mixed_bfloat16", "mixed_float16"])
def test_s03_a_call_in_a_hook_of_the_backward_pass_follows_the_policy(spelling: str) -> None:
    """No region is open there: autocast is off, and its dtype on a CPU is bfloat16 nevertheless."""
    net = Net()

    def loss_fn(model: Any, x: Any) -> Any:
        out = model(x)

        def hook(grad: torch.Tensor) -> None:
            with torch.no_grad():
                model(x)

        out.register_hook(hook)
        return out.square().mean()

    step_with(loss_fn, polyamp.Policy(spelling), net)
    wanted = B16 if spelling == "mixed_bfloat16" else F16
    assert net.seen == [(wanted, wanted)] * 2


def test_s03_settings_that_no_region_made_do_not_hold_for_the_call() -> None:
    """torch's weight cache would serve weights from before an update; the precision of products is the policy's."""
    net, seen = Net(), []
    net.register_forward_pre_hook(
        lambda *_: seen.append((torch.is_autocast_cache_enabled(), torch.get_float32_matmul_precision()))
    )

    def loss_fn(model: Any, x: Any) -> Any:
        torch.set_autocast_cache_enabled(True)
        first = model(x)
        torch.set_autocast_cache_enabled(False)
        torch.set_float32_matmul_precision("highest")
        return (first + model(x)).square().mean()

    step_with(loss_fn, polyamp.Policy("mixed_bfloat16", float32_matmul="medium"), net)
    assert seen == [(False, "medium")] * 2
