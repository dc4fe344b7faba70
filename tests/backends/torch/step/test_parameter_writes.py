"""S12: a parameter that the forward pass writes to is running state, which takes effect with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import UnsupportedError

INF = float("inf")


class Net(nn.Module):
    """Writes to one trained and one frozen parameter, before or behind their use."""

    def __init__(self, write: Callable[[torch.Tensor], Any], frozen: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.w = nn.Parameter(torch.tensor([1.1, 0.3, 2.7, -0.9]))
        self.code = nn.Parameter(torch.tensor([1.0, 1.0009765625, 3.0, 4.0]), requires_grad=False)
        self.writes = write, frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        write, frozen = self.writes
        with torch.no_grad():
            write(self.w)
        out: torch.Tensor = self.layer(x) * self.w * self.code.clone()
        with torch.no_grad():
            frozen(self.code)
        return out


def nothing(_: torch.Tensor) -> None:
    """No write."""


def replaced(w: torch.Tensor) -> None:
    w.data = w.data * 0.5


HALVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(0.5),
    "through data": lambda w: w.data.mul_(0.5),
    "data replaced": replaced,
    "one element": lambda w: w[2:3].mul_(0.5),
}


def batch(gain: float = 1.0) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), "gain": torch.full((6,), gain)}


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = (model(batch["x"]).float().square().mean(1) * batch["gain"]).mean()
    return loss


def recipe(mode: Any = "autocast", steps: int = 1, policy: str = "mixed_bfloat16", optimizer: Any = None) -> Any:
    made = polyamp.Policy(policy, mode=mode) if policy != "float32" else polyamp.Policy(policy)
    scaler = polyamp.LossScaler(init_scale=8.0)
    return polyamp.Recipe(policy=made, optimizer=optimizer or polyamp.sgd(0.125), scaler=scaler, accumulate_steps=steps)


def run(net: nn.Module, made: Any, way: str, gains: list[float], **how: Any) -> Any:
    state = polyamp.init(net, made)
    step = polyamp.train_step(loss_fn, made, **how)
    for gain in gains:
        if way == "halves":
            before = state.export()
            _, gradients = polyamp.value_and_grad(loss_fn)(state, batch(gain))
            after = state.export()
            assert all(before[name].tobytes() == after[name].tobytes() for name in before), "half a step moves nothing"
            state, result = polyamp.apply_gradients(state, gradients)
        else:
            state, result = step(state, batch(gain))
        assert bool(result.skipped) is (gain == INF)
    return state


@pytest.mark.parametrize("how", HALVES)
@pytest.mark.parametrize("way", ["step", "halves", "window"])
@pytest.mark.parametrize("mode", ["autocast", "cast", "float32"])
def test_s12_a_write_takes_effect_with_the_step_and_a_skipped_one_takes_it_back(mode: str, way: str, how: str) -> None:
    steps = 2 if way == "window" else 1
    policy = "float32" if mode == "float32" else "mixed_bfloat16"
    made = recipe(mode if policy != "float32" else None, steps, policy)
    net = Net(HALVES[how], lambda code: code[2:].add_(1.0))
    fresh = [p.detach().clone() for p in net.parameters()]
    state = run(net, made, way, [INF, INF])
    assert all(map(torch.equal, net.parameters(), fresh)), "skipped, first and later, bit for bit"
    if way == "halves":
        _, result = polyamp.apply_gradients(state, polyamp.value_and_grad(loss_fn)(state, batch())[1])
    else:
        _, result = polyamp.train_step(loss_fn, made)(state, batch())
    assert not bool(result.skipped)
    # by hand: the pass computes with what it wrote, the next one sees it, the optimizer updates it
    other = Net(HALVES[how], lambda code: code[2:].add_(1.0))
    for part in batch()["x"].chunk(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=policy != "float32"):
            (other(part).float().square().mean() / steps).backward()
    rough = 1e-6 if mode == "float32" else 0.02
    with torch.no_grad():
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q if q.grad is None else q - 0.125 * q.grad, rtol=rough, atol=rough)
    wanted = torch.tensor([1.0, 1.0009765625, 3.0 + steps, 4.0 + steps])
    assert torch.equal(net.code, wanted), "and what it does not change keeps the master's digits"


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s12_policy_autocast_keeps_what_a_model_writes(mode: Any) -> None:
    net = Net(HALVES["in place"], lambda code: code[3:].add_(1.0))
    bound: Any = polyamp.Policy("mixed_float16", mode=mode).autocast(net)
    bound(batch()["x"])
    bound(batch()["x"])
    torch.testing.assert_close(net.w, torch.tensor([0.275, 0.075, 0.675, -0.225]), rtol=1e-3, atol=0.0)
    assert torch.equal(net.code, torch.tensor([1.0, 1.0009765625, 3.0, 6.0]))


def test_s12_in_cast_mode_elements_that_a_pass_leaves_keep_the_masters_digits() -> None:
    net = Net(lambda w: w.clamp_(max=2.0), nothing)
    made = recipe("cast", optimizer=polyamp.sgd(0.0))
    run(net, made, "step", [1.0])
    assert torch.equal(net.w, torch.tensor([1.1, 0.3, 2.0, -0.9]))


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_s12_a_step_that_raises_takes_its_writes_back(mode: Any) -> None:
    def fails(model: Any, batch: Any) -> Any:
        model(batch["x"])
        raise ZeroDivisionError

    net, made = Net(HALVES["through data"], HALVES["in place"]), recipe(mode)
    fresh = [p.detach().clone() for p in net.parameters()]
    state = polyamp.init(net, made)
    for call in (polyamp.train_step(fails, made), polyamp.value_and_grad(fails)) * 2:
        with pytest.raises(ZeroDivisionError):
            call(state, batch())
        assert all(map(torch.equal, net.parameters(), fresh))


def test_s12_a_first_write_in_a_later_step_that_is_skipped_is_an_error() -> None:
    """Its value before is gone. A step that is applied learns of it, and the next one can be taken back."""
    begins = {"now": False}
    net = Net(lambda w: w.mul_(0.5) if begins["now"] else None, nothing)
    made = recipe()
    state = run(net, made, "step", [1.0])
    step = polyamp.train_step(loss_fn, made)
    begins["now"] = True
    scale = float(state.scale_state.scale)
    with pytest.raises(UnsupportedError, match="wrote to the parameter 'w' for the first time"):
        step(state, batch(INF))
    assert (float(state.scale_state.scale), int(state.step)) == (scale, 1)
    before = net.w.detach().clone()
    _, result = step(state, batch(INF))
    assert bool(result.skipped)
    assert torch.equal(net.w, before)


def test_s12_a_write_in_cast_mode_that_cannot_be_kept_is_an_error() -> None:
    def replaces(model: Any, batch: Any) -> Any:
        net.w = nn.Parameter(net.w.detach() * 0.5)
        return loss_fn(model, batch)

    def both(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            polyamp.parameters(model)["w"].mul_(0.5)
        return loss_fn(model, batch)

    for function, words in ((replaces, "replaced the parameter 'w'"), (both, "'w' and to its cast")):
        net = Net(HALVES["in place"], nothing)
        fresh = [p.detach().clone() for p in net.parameters()]
        made = recipe("cast")
        with pytest.raises(UnsupportedError, match=words):
            polyamp.train_step(function, made)(polyamp.init(net, made), batch())
        assert all(map(torch.equal, net.parameters(), fresh))


def test_s12_two_states_take_back_each_its_own() -> None:
    nets = [Net(HALVES["in place"], HALVES["in place"]) for _ in range(2)]
    made = recipe()
    states = [polyamp.init(net, made) for net in nets]

    def two(models: Any, batch: Any) -> Any:
        return loss_fn(models[0], batch) + loss_fn(models[1], {**batch, "gain": torch.full((6,), 1.0)})

    _, gradients = polyamp.value_and_grad(two)(states, batch(INF))
    _, results = polyamp.apply_gradients(states, gradients, skip="each")
    assert [bool(result.skipped) for result in results] == [True, False]
    assert torch.equal(nets[0].code, torch.tensor([1.0, 1.0009765625, 3.0, 4.0]))
    assert torch.equal(nets[1].code, torch.tensor([1.0, 1.0009765625, 3.0, 4.0]) / 2)


@pytest.mark.parametrize(("mode", "steps"), [("autocast", 1), ("cast", 2)])
@pytest.mark.parametrize("native", [False, True])
def test_s12_a_compiled_step_takes_its_writes_back_too(mode: Any, steps: int, native: bool) -> None:
    found = []
    for how in (False, {"backend": "eager"}):
        torch._dynamo.reset()
        net = Net(lambda w: w.clamp_(max=2.0), lambda code: code[2:].add_(1.0))
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.125) if native else None
        made = recipe(mode, steps, optimizer=optimizer)
        fresh = [p.detach().clone() for p in net.parameters()]
        state = polyamp.init(net, made)
        step = polyamp.train_step(loss_fn, made, compile=how)
        _, result = step(state, batch(INF))
        assert bool(result.skipped)
        assert all(map(torch.equal, net.parameters(), fresh))
        for _ in range(2):
            _, result = step(state, batch())
        assert not bool(result.skipped)
        found.append([p.detach() for p in net.parameters()])
    assert torch.equal(found[0][1], torch.tensor([1.0, 1.0009765625, 3.0 + 2 * steps, 4.0 + 2 * steps]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
