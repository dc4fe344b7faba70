"""S29: a model whose class defines `parameters` or `named_parameters` itself. In `loss_fn` that is what is called, and
gives the masters; what is trained are the parameters of the module tree, and `init` refuses what lists others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyamp
from polyamp.errors import ModelError

POLICIES = ("float32", polyamp.Policy("mixed_bfloat16", mode="cast"), polyamp.Policy("mixed_bfloat16"))
ROWS = torch.ones(2, 4)


class Base(nn.Module):
    """Two trained parameters and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))])
        self.statistics = nn.ParameterList([nn.Parameter(torch.ones(3), requires_grad=False)])

    def forward(self, x: torch.Tensor, own: Any = None) -> torch.Tensor:
        weight, bias = self.vars if own is None else own
        return F.linear(x, weight, bias)


class Listed(Base):
    """MAML's learner: https://github.com/dragen1860/MAML-Pytorch."""

    def parameters(self) -> Any:  # type: ignore[override]  # what programs write
        return self.vars


class Generated(Base):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for p in super().parameters(recurse):
            if p is not self.statistics[0]:
                yield p


class Named(Base):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in super().named_parameters(*args, **kwargs):
            if name.startswith("vars"):
                yield f"own/{name}", p


class InGroups(Base):
    def parameters(self) -> Any:  # type: ignore[override]  # what programs write
        return [{"params": [self.vars[0]]}, {"params": iter([self.vars[1]]), "weight_decay": 0.0}]


class InDict(Base):
    def parameters(self) -> Any:  # type: ignore[override]  # what programs write
        return {"weight": self.vars[0], "bias": self.vars[1]}.values()


def flat(listed: Any) -> list[torch.Tensor]:
    return [p for each in listed for p in (each["params"] if isinstance(each, dict) else [each])]


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The loss of a quick step, as in MAML, and a penalty."""
    fast = [p * 1.0 for p in flat(model.parameters())]
    assert len(fast) == 2, f"{len(fast)} parameters"
    assert all(p.dtype == torch.float32 for p in fast)
    return model(x).float().square().mean() + F.linear(x, *fast).square().mean()  # type: ignore[no-any-return]  # any model


def trained(net: Base, policy: Any, **options: Any) -> polyamp.StepResult[Any]:
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    return polyamp.train_step(penalty, recipe, **options)(polyamp.init(net, recipe), ROWS)[1]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", [Listed, Generated, Named, InGroups, InDict])
def test_s29_what_the_class_defines_is_called_and_gives_the_masters(kind: type[Base], policy: Any) -> None:
    net, hand = kind(), kind()
    optimizer = torch.optim.SGD(flat(hand.parameters()), 0.1)
    loss = penalty(hand, ROWS)
    loss.backward()
    optimizer.step()
    result = trained(net, policy)
    allowed = 1e-6 if policy == "float32" else 2e-2
    assert torch.allclose(result.loss, loss, rtol=allowed)
    assert torch.allclose(net.vars[0], hand.vars[0], atol=allowed)
    assert torch.equal(net.statistics[0], torch.ones(3))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_s29_it_gives_the_parameters_themselves(policy: Any) -> None:
    seen: list[Any] = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        seen.extend([model.parameters(), list(model.named_parameters()), polyamp.parameters(model)])
        return penalty(model, x)

    net, recipe = Listed(), polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    polyamp.train_step(loss_fn, recipe)(polyamp.init(net, recipe), ROWS)
    own, named, trained = seen
    assert len(own) == 2
    assert all(a is b for a, b in zip(own, net.vars, strict=True))
    assert all(a is b for (_, a), (_, b) in zip(named, nn.Module.named_parameters(net), strict=True))
    assert list(trained) == ["vars/0", "vars/1"]
    net_named, recipe = Named(), polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    polyamp.train_step(loss_fn, recipe)(polyamp.init(net_named, recipe), ROWS)
    assert [name for name, _ in seen[4]] == ["own/vars.0", "own/vars.1"]
    assert all(a is b for (_, a), b in zip(seen[4], net_named.vars, strict=True))
    assert list(seen[5]) == ["vars/0", "vars/1"], "polyamp.parameters has the tree's"


@pytest.mark.parametrize(
    ("kind", "policy"), [(Listed, POLICIES[1]), (Generated, POLICIES[0]), (Named, POLICIES[1])], ids=str
)
def test_s29_compiled_as_well(kind: type[Base], policy: Any) -> None:
    one, two = kind(), kind()
    result = trained(one, policy, compile={"backend": "aot_eager"})
    assert torch.allclose(result.loss, trained(two, policy).loss, rtol=1e-2)
    assert torch.allclose(one.vars[0], two.vars[0], atol=1e-2)


def test_other_methods_of_a_module_that_the_class_defines_are_called() -> None:
    class Own(Base):
        def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
            yield torch.tensor(7.0)

        def children(self) -> Iterator[nn.Module]:
            yield self.vars

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        assert [b.item() for b in model.buffers()] == [7.0]
        assert [*model.children()] == [net.vars]
        return model(x).float().mean()  # type: ignore[no-any-return]  # any model

    net, recipe = Own(), polyamp.Recipe(policy=POLICIES[1], optimizer=polyamp.sgd(0.1))
    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(net, recipe), ROWS)
    assert not bool(result.skipped)


def test_a_part_of_the_model_may_define_it_too() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def parameters(self) -> Any:  # type: ignore[override]  # what programs write
            return [self.scale]

        def named_parameters(self) -> Any:  # type: ignore[override]  # what programs write
            return [("s", self.scale)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learner, self.last = Scale(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.learner(x))  # type: ignore[no-any-return]  # a module's

    policy = polyamp.Policy("mixed_bfloat16", overrides={"learner": "float32"})
    groups = [polyamp.Group("learner/**", weight_decay=0.0)]
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1, groups=groups))
    state = polyamp.init(Whole(), recipe)
    _, result = polyamp.train_step(lambda model, x: model(x).float().mean(), recipe)(state, ROWS)
    assert not bool(result.skipped)


@pytest.mark.parametrize("kind", [Listed, Named])
def test_s22_a_checkpoint_has_the_parameters_of_the_tree(kind: type[Base], tmp_path: Path) -> None:
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state, _ = polyamp.train_step(penalty, recipe)(polyamp.init(kind(), recipe), ROWS)
    polyamp.save(state, tmp_path / "saved")
    restored = polyamp.restore(polyamp.init(kind(), recipe), tmp_path / "saved")
    assert torch.equal(restored.model.vars[0], state.model.vars[0])
    assert polyamp.refresh(restored).step == 1


def test_s20_init_refuses_to_train_what_the_class_does_not_list() -> None:
    class Hiding(Base):
        def parameters(self) -> Any:  # type: ignore[override]  # what programs write
            return [self.vars[0]]

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    with pytest.raises(ModelError, match=r"'vars/1' .*Hiding\.parameters\(\).*requires_grad_\(False\)"):
        polyamp.init(Hiding(), recipe)
    net = Hiding()
    net.vars[1].requires_grad_(False)
    assert list(polyamp.init(net, recipe).parameters) == ["vars/0"]
    net = Hiding()
    native = torch.optim.SGD(net.vars.parameters(), 0.1)  # which says itself what it trains
    assert len(polyamp.init(net, recipe.replace(optimizer=native)).parameters) == 2


def test_s20_init_refuses_a_listed_tensor_that_no_module_holds() -> None:
    class Loose(Base):
        def __init__(self) -> None:
            super().__init__()
            self.loose = [torch.zeros(5, requires_grad=True)]

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            yield from super().named_parameters(*args, **kwargs)
            yield "loose", self.loose[0]

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    with pytest.raises(ModelError, match=r"Loose\.named_parameters\(\) lists .* shape \(5,\).*nn\.ParameterList"):
        polyamp.init(Loose(), recipe)


def of_a_rate(_: Any, rate: float) -> float:
    return rate


def count(_: Any) -> int:
    return 2


@pytest.mark.parametrize("method", [of_a_rate, count])
def test_what_is_no_listing_is_not_compared(method: Callable[..., Any]) -> None:
    kind = type("Other", (Base,), {"parameters": method})
    recipe = polyamp.Recipe(policy=POLICIES[1], optimizer=polyamp.sgd(0.1))

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        assert model.parameters(*[2] * (method is of_a_rate)) == 2
        return model(x).float().mean()  # type: ignore[no-any-return]  # any model

    _, result = polyamp.train_step(loss_fn, recipe)(polyamp.init(kind(), recipe), ROWS)
    assert not bool(result.skipped)
