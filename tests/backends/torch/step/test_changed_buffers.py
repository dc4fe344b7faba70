"""S12: a forward pass may change the shape or dtype of a buffer, replace, add or delete one. A skipped step, a step
that raises, and `value_and_grad` leave everything as it was; an applied step keeps the change."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyamp
from polyamp.errors import CheckpointError, UnsupportedError
from polyamp_torch.integrations.loop_adapter import LoopScaler
from polyamp_torch.step.torch_only import buffers

BATCH = torch.ones(2, 4)
MODES = ("autocast", "cast")


class Net(nn.Module):
    """Changes its buffers behind their use; `last` stands behind them, so that their order shows."""

    own: Any

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("own", torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(), persistent=False)
        self.register_buffer("last", torch.zeros(2))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        with torch.no_grad():
            self.change(self)
            self.last += 1
        return out


def resized(net: Any) -> None:
    net.own.resize_(3, 2).copy_(torch.arange(6.0).reshape(3, 2))


def shrunk(net: Any) -> None:
    net.own.resize_(1).fill_(0.5)


def emptied(net: Any) -> None:
    net.own.resize_(0)


def turned(net: Any) -> None:
    net.own.t_().mul_(2.0)


def given_other_data(net: Any) -> None:
    net.own.data = torch.arange(5.0)


def replaced(net: Any) -> None:
    net.own = torch.full((7,), 2.0)


def written_and_replaced(net: Any) -> None:
    net.own.resize_(5).zero_()
    net.own = torch.full((2, 2), 8.0)


def grown(net: Any) -> None:
    net.own = torch.cat([net.own.reshape(-1), torch.ones(2).to(net.own.dtype)])


def of_another_dtype(net: Any) -> None:
    net.own = torch.tensor([[1, 2], [3, 4]])


def none(net: Any) -> None:
    net.own = None


def deleted(net: Any) -> None:
    if hasattr(net, "own"):
        del net.own


def added(net: Any) -> None:
    net.layer.register_buffer("more", torch.full((3,), 2.0), persistent=False)
    net.register_buffer("kept", torch.full((3,), 2.0))


def moved_behind(net: Any) -> None:
    value = net.own
    del net.own
    net.register_buffer("own", value * 2, persistent=False)


def saved_from_now_on(net: Any) -> None:
    net.register_buffer("own", net.own)


CHANGES = (
    *(resized, shrunk, emptied, turned, given_other_data),
    *(replaced, written_and_replaced, grown, of_another_dtype, none, deleted, added, moved_behind, saved_from_now_on),
)
IN_PLACE = (resized, shrunk, emptied, given_other_data)


class Contents:
    """All that a skipped step must leave as it is: order, objects, where they lie, values, what a checkpoint gets."""

    def __init__(self, net: nn.Module) -> None:
        self.slots = [(path, name) for path, part in net.named_modules() for name in part._buffers]
        self.tensors = [buffer for part in net.modules() for buffer in part._buffers.values()]
        self.forms = [None if b is None else (b.shape, b.stride(), b.dtype) for b in self.tensors]
        self.values = [None if b is None else b.clone() for b in self.tensors]
        self.saved = list(net.state_dict())
        self.parameters = [p.detach().clone() for p in net.parameters()]

    def check(self, net: nn.Module) -> None:
        now = Contents(net)
        assert now.slots == self.slots
        assert all(a is b for a, b in zip(now.tensors, self.tensors, strict=True)), "the same tensors"
        assert now.forms == self.forms
        assert all(map(equal, now.values, self.values))
        assert now.saved == self.saved
        assert all(map(torch.equal, now.parameters, self.parameters))


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def recipe_of(mode: Any, accumulate_steps: int = 1) -> polyamp.Recipe:
    return polyamp.Recipe(
        policy=polyamp.Policy("mixed_bfloat16", mode=mode),
        scaler=polyamp.LossScaler(),
        optimizer=polyamp.sgd(0.1),
        accumulate_steps=accumulate_steps,
    )


def mean(model: Any, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch).float().mean()
    return out


def infinite(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mean(model, batch) * torch.inf


def raising(model: Any, batch: torch.Tensor) -> torch.Tensor:
    mean(model, batch)
    raise ValueError("the program's own")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [1, 2])
def test_s12_a_skipped_step_takes_it_back(change: Callable[[Any], Any], mode: str, rows: int) -> None:
    net, recipe = Net(change), recipe_of(mode, rows)
    before, state = Contents(net), polyamp.init(net, recipe)
    _, result = polyamp.train_step(infinite, recipe)(state, BATCH)
    assert bool(result.skipped)
    before.check(net)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [1, 2])
def test_s20_a_step_that_raises_takes_it_back(change: Callable[[Any], Any], mode: str, rows: int) -> None:
    net, recipe = Net(change), recipe_of(mode, rows)
    before, state = Contents(net), polyamp.init(net, recipe)
    with pytest.raises(ValueError, match="the program's own"):
        polyamp.train_step(raising, recipe)(state, BATCH)
    before.check(net)
    with pytest.raises(ValueError, match="the program's own"):
        polyamp.value_and_grad(raising)(state, BATCH)
    before.check(net)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [1, 2])
def test_s12_an_applied_step_keeps_it(change: Callable[[Any], Any], mode: str, rows: int) -> None:
    net, recipe = Net(change), recipe_of(mode, rows)
    hand, own = copy.deepcopy(net), net.own
    polyamp.train_step(mean, recipe)(polyamp.init(net, recipe), BATCH)
    for _ in range(rows):
        hand(BATCH)
    check_as_by_hand(net, hand, order=True)
    if change in IN_PLACE:
        assert net.own is own


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("skips", [False, True])
def test_s12_an_expanded_buffer_that_is_replaced(skips: bool, size: int) -> None:
    """Its elements are one number in memory: nothing can be written into it, and the new one takes its place."""

    def replaced(net: Any) -> None:
        net.own = net.own * 2

    net, recipe = Net(replaced), recipe_of("autocast", 1)
    net.own = torch.ones(1).expand(size)
    own = net.own
    polyamp.train_step(infinite if skips else mean, recipe)(polyamp.init(net, recipe), BATCH)
    assert net.own is own if skips else net.own.tolist() == [2.0] * size


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_s12_the_halves_take_it_back_and_apply_it(change: Callable[[Any], Any], mode: str, skips: bool) -> None:
    net, recipe = Net(change), recipe_of(mode)
    hand, own = copy.deepcopy(net), net.own
    before, state = Contents(net), polyamp.init(net, recipe)
    _, grads = polyamp.value_and_grad(infinite if skips else mean)(state, BATCH)
    before.check(net)
    polyamp.apply_gradients(state, grads)
    if skips:
        before.check(net)
        return
    hand(BATCH)
    if change is not saved_from_now_on:  # what a `state_dict` leaves out is not carried from one half to the other
        check_as_by_hand(net, hand, order=False)
    if change in IN_PLACE:
        assert net.own is own


def check_as_by_hand(net: nn.Module, hand: nn.Module, *, order: bool) -> None:
    ours, theirs = (dict(each.named_buffers()) for each in (net, hand))
    assert sorted(ours) == sorted(theirs)
    assert all(equal(ours[name], theirs[name]) for name in ours)
    assert sorted(net.state_dict()) == sorted(hand.state_dict())
    assert hasattr(net, "own") == hasattr(hand, "own")
    if order:
        assert list(ours) == list(theirs)


def test_a_buffer_in_two_places_stays_one_tensor() -> None:
    net, recipe = Net(resized), recipe_of("autocast")
    net.layer.register_buffer("same", net.own)
    state = polyamp.init(net, recipe)
    _, grads = polyamp.value_and_grad(mean)(state, BATCH)
    polyamp.apply_gradients(state, grads)
    assert net.layer.same is net.own
    assert net.own.shape == (3, 2)
    assert net.own.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("change", CHANGES)
def test_s3_a_change_reaches_the_float32_buffer_of_a_model_in_mode_cast(change: Callable[[Any], Any]) -> None:
    net = Net(change)
    hand, own = copy.deepcopy(net), net.own
    polyamp.Policy("mixed_bfloat16", mode="cast").autocast(net)(BATCH)
    hand(BATCH)
    check_as_by_hand(net, hand, order=True)
    if change in IN_PLACE:
        assert net.own is own


@pytest.mark.parametrize("inner", MODES)
def test_s3_a_change_by_an_inner_policy_stays(inner: Any) -> None:
    net = Net(resized)
    own = net.own
    under = polyamp.Policy("mixed_float16", mode=inner).autocast(net)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = under(x)
        return out

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(x)

    polyamp.Policy("mixed_bfloat16", mode="cast").autocast(Outer())(BATCH)
    assert net.own is own
    assert (net.own.dtype, net.own.tolist()) == (torch.float32, [[0, 1], [2, 3], [4, 5]])


class Quantized(nn.Module):
    """torch's fake quantization, which gives its buffers their shape in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        from torch.ao import quantization

        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.quantize = quantization.FakeQuantize(
            observer=quantization.PerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.quantize(self.first.weight)
        out: torch.Tensor = self.second(F.relu(F.linear(x, weight, self.first.bias)))
        return out


@pytest.fixture
def quantized() -> Iterator[nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's move to another package
        yield Quantized()


ROWS = torch.linspace(-1.0, 1.0, 40).reshape(5, 8)


@pytest.mark.parametrize("halves", [False, True])
def test_quantization_aware_training_is_that_by_hand(quantized: nn.Module, halves: bool) -> None:
    hand = copy.deepcopy(quantized)
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state, optimizer = polyamp.init(quantized, recipe), torch.optim.SGD(hand.parameters(), 0.1)
    step, value_and_grad = polyamp.train_step(mean, recipe), polyamp.value_and_grad(mean)
    for _ in range(3):
        optimizer.zero_grad()
        mean(hand, ROWS).backward()
        optimizer.step()
        if halves:
            polyamp.apply_gradients(state, value_and_grad(state, ROWS)[1])
        else:
            step(state, ROWS)
    ours, theirs = quantized.state_dict(), hand.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["quantize.scale"].shape == (16,)


def test_an_observer_in_mode_cast(quantized: Any) -> None:
    def observed(model: Any, batch: torch.Tensor) -> torch.Tensor:
        model.quantize.activation_post_process(model.first.weight)
        return model.first.weight.float().mean()  # type: ignore[no-any-return]  # of a model of any class

    observer, weight = quantized.quantize.activation_post_process, quantized.first.weight.detach().clone()
    recipe = recipe_of("cast")
    polyamp.train_step(observed, recipe)(polyamp.init(quantized, recipe), ROWS)
    assert torch.equal(observer.min_val, weight.bfloat16().amin(1).float())
    assert torch.equal(observer.max_val, weight.bfloat16().amax(1).float())
    assert observer.min_val.dtype == torch.float32


def test_quantization_in_float32_under_mode_cast(quantized: Any) -> None:
    """In 16 bits torch's kernel of fake quantization fails, by hand as well."""
    policy = polyamp.Policy("mixed_bfloat16", mode="cast", overrides={"quantize": "float32"})
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    polyamp.train_step(mean, recipe)(polyamp.init(quantized, recipe), ROWS)
    assert (quantized.quantize.scale.shape, quantized.quantize.scale.dtype) == ((16,), torch.float32)


@pytest.mark.parametrize("change", [resized, replaced, added, deleted, none])
def test_s20_a_compiled_step_refuses_it_by_name(change: Callable[[Any], Any]) -> None:
    net, recipe = Net(change), recipe_of("autocast")
    before, state = Contents(net), polyamp.init(net, recipe)
    name = "kept" if change is added else "own"
    with pytest.raises(UnsupportedError, match=rf"the forward pass \w+ (the shape of )?the buffer '{name}'"):
        polyamp.train_step(mean, recipe, compile={"backend": "eager"})(state, BATCH)
    before.check(net)


@pytest.mark.parametrize("change", CHANGES)
def test_s12_a_skipped_step_of_a_training_library_takes_it_back(change: Callable[[Any], Any]) -> None:
    net = Net(change)
    before, scaler = Contents(net), LoopScaler(polyamp.LossScaler(), device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler.snapshot_buffers(net)
    scaler.scale(infinite(net, BATCH)).backward()
    scaler.step(optimizer)
    assert scaler.has_skipped(optimizer)
    before.check(net)


def test_a_training_library_remembers_a_module_that_has_no_buffer_yet() -> None:
    class Later(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.register_buffer("seen", torch.ones(1))
            return super().forward(x)

    net = Later(4, 4)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), LoopScaler(polyamp.LossScaler(), device="cpu")
    scaler.snapshot_buffers(net)
    scaler.scale(infinite(net, BATCH)).backward()
    scaler.step(optimizer)
    assert list(net.state_dict()) == ["weight", "bias"]


class Unread(torch.Tensor):
    """A flag that the host must not read."""

    def __bool__(self) -> bool:
        raise AssertionError("the flag was read")


@pytest.mark.parametrize("applied", [False, True])
def test_s9_the_flag_is_read_on_a_device_only_where_a_form_changed(
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "can_read_without_sync", lambda _: False)  # as on an accelerator
    flag = torch.tensor(applied).as_subclass(Unread)
    net = Net(lambda net: net.own.mul_(2))
    own = net.own
    saved = buffers.snapshot(net)
    net(BATCH)
    net.own = net.own + 0  # replaced by one like it
    buffers.commit_or_rollback(saved, flag)
    assert net.own is own
    assert net.own.tolist() == ([[2, 6], [4, 8]] if applied else [[1, 3], [2, 4]])
    saved = buffers.snapshot(net)
    resized(net)
    with pytest.raises(AssertionError, match="the flag was read"):
        buffers.commit_or_rollback(saved, flag)


def test_s22_a_checkpoint_with_buffers_of_other_shapes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    net, recipe = Net(resized), recipe_of("autocast")
    state, _ = polyamp.train_step(mean, recipe)(polyamp.init(net, recipe), BATCH)
    polyamp.save(state, tmp_path / "saved")
    fresh = Net(resized)
    before = Contents(fresh)
    with pytest.raises(CheckpointError, match=r"running/own: float32\[3, 2\] in the file.*before polyamp\.init"):
        polyamp.restore(polyamp.init(fresh, recipe), tmp_path / "saved")
    before.check(fresh)
    fresh(BATCH)
    restored = polyamp.restore(polyamp.init(fresh, recipe), tmp_path / "saved")
    assert torch.equal(restored.model.own, net.own)
