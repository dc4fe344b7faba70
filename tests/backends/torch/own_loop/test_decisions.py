"""Which gradients decide about a step of `polyamp_torch.GradScaler`, by which scale, and what is read to find out."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch.own_loop import native_scaler
from polyamp_torch.own_loop.gradients import max_flag, overflow_flag, unscale_gradients
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only.loop_record import LoopRecord, OptimizerRecord
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

INF = float("inf")
TINY = 2.0**-10
"""A scale that makes gradients larger when they are divided by it."""

pytestmark = pytest.mark.usefixtures("host")


class Loop:
    """Parameters of one element that start at 0, and an SGD of rate 1 for each."""

    def __init__(self, count: int, *, skip: Any = "all", fused: bool = False, **settings: Any) -> None:
        self.scaler = GradScaler(polyamp.LossScaler(**settings), skip=skip)
        self.parameters = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
        self.optimizers = [torch.optim.SGD([p], 1.0, fused=fused) for p in self.parameters]

    def backward(self, *gains: float) -> None:
        """Gradients of `gains` times the scale."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = [(p * -gain).sum() for p, gain in zip(self.parameters, gains, strict=False)]
        self.scaler.scale(torch.stack(losses).sum()).backward()

    def steps(self, *which: int) -> list[float]:
        """Steps of these optimizers, all by default, and an update; the parameters after them."""
        for index in which or range(len(self.optimizers)):
            self.scaler.step(self.optimizers[index])
        self.scaler.update()
        return [p.item() for p in self.parameters]

    def at(self, index: int, value: float) -> None:
        """Gives a parameter a gradient."""
        self.parameters[index].grad = torch.tensor([value])


@pytest.mark.parametrize("fused", [False, True])
def test_what_stepped_before_counts_for_what_steps_after(fused: bool) -> None:
    """The second one is new: nothing but its own step shows that it is a partner of the third."""
    loop = Loop(3, fused=fused)
    loop.backward(1.0)
    assert loop.steps(0) == [1.0, 0.0, 0.0]
    loop.backward(1.0, INF, 1.0)
    assert loop.steps() == [2.0, 0.0, 0.0], "the first cannot know; the third does"
    loop.backward(1.0, 1.0, 1.0)
    assert loop.steps() == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("overflows", range(4))
def test_in_the_first_iteration_everything_behind_the_loss_counts(overflows: int) -> None:
    loop = Loop(4)
    loop.backward(*[INF if i == overflows else 1.0 for i in range(4)])
    assert loop.steps() == [0.0] * 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("healthy_before", [0, 2])
def test_a_partners_gradient_that_only_unscaling_makes_infinite_counts(fused: bool, healthy_before: int) -> None:
    loop = Loop(2, fused=fused, init_scale=TINY)
    for _ in range(healthy_before):
        loop.backward(1.0, 1.0)
        loop.steps()
    loop.backward(1.0, 1.0)
    loop.at(1, 1e37)
    assert loop.steps() == [healthy_before] * 2
    assert loop.scaler.get_scale() == TINY / 2


@pytest.mark.parametrize("healthy_before", [0, 2])
def test_a_partners_gradient_is_divided_once(healthy_before: int) -> None:
    """After its own step it is unscaled, and finite; divided a second time it would not be."""
    loop = Loop(2, init_scale=TINY)
    for _ in range(healthy_before):
        loop.backward(1.0, 1.0)
        loop.steps()
    loop.backward(0.0, 1.0)
    loop.at(0, -1e35)
    first, second = loop.steps()
    assert (first, second) == (torch.tensor(1e35 / TINY).item(), healthy_before + 1.0)
    assert not loop.scaler.step_was_skipped


@pytest.mark.parametrize("gains", [(INF, 1.0), (1.0, INF)])
def test_one_skip_among_several_steps_is_a_skip(gains: tuple[float, float]) -> None:
    loop = Loop(2, skip="each")
    loop.backward(*gains)
    assert loop.steps() == [float(gain == 1.0) for gain in gains]
    assert loop.scaler.step_was_skipped
    assert (len(loop.scaler.report()), loop.scaler.report().gradients) == (1, 1)
    loop.backward(1.0, 1.0)
    loop.steps()
    assert not loop.scaler.step_was_skipped


def test_the_report_joins_the_skips_of_an_iteration() -> None:
    loop = Loop(3, skip="each")
    loop.backward(INF, 1.0, float("nan"))
    loop.steps()
    report = loop.scaler.report()
    assert [(row.name, row.inf, row.nan) for row in report] == [
        ("group 0, parameter 0", 1, 0),
        ("group 0, parameter 0", 0, 1),
    ]
    assert report.gradients == 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [0, 1, 2])
@pytest.mark.parametrize("scale", [8.0, TINY])
def test_gradients_of_every_dtype_decide_together(fused: bool, overflows: int, scale: float) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    optimizer = torch.optim.SGD(parameters, 1.0, fused=fused)
    scaler = GradScaler(polyamp.LossScaler(init_scale=scale))
    losses = [(p * (INF if i == overflows else 1.0)).sum().float() for i, p in enumerate(parameters)]
    scaler.scale(torch.stack(losses).sum()).backward()
    scaler.step(optimizer)
    assert scaler.step_was_skipped
    assert all((p == 0.0).all() for p in parameters)
    assert [row.dtype for row in scaler.report()] == [("float32", "float64", "bfloat16")[overflows]]


def test_a_gradient_that_is_a_conjugate_view_is_unscaled_in_place() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=8.0))
    scaler.scale(torch.view_as_real(p).sum()).backward()
    p.grad = torch.tensor([8.0 - 16.0j]).conj()
    assert p.grad.is_conj()
    scaler.unscale_(optimizer)
    assert p.grad.item() == 1.0 + 2.0j
    scaler.step(optimizer)
    assert p.item() == -1.0 - 2.0j


def test_an_infinite_part_of_a_complex_gradient_is_counted_before_it_is_unscaled() -> None:
    """An optimizer that divides by itself leaves it scaled; a complex quotient would have NaN for the finite part."""

    class Dividing(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> Any:
            assert vars(self)["found_inf"].item() == 1.0, "the scaler sets it"

    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = Dividing([p], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=8.0))
    scaler.scale(torch.view_as_real(p).sum()).backward()
    p.grad = torch.tensor([complex(1.0, INF), complex(float("nan"), 1.0)])
    scaler.step(optimizer)
    assert [(row.dtype, row.inf, row.nan) for row in scaler.report()] == [("complex64", 1, 1)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [8.0, TINY])
def test_a_gradient_without_elements_is_no_overflow(fused: bool, scale: float) -> None:
    for others in ([], [nn.Parameter(torch.zeros(1))]):
        parameters = [nn.Parameter(torch.zeros(0, 3)), *others]
        optimizer = torch.optim.SGD(parameters, 1.0, fused=fused)
        scaler = GradScaler(polyamp.LossScaler(init_scale=scale))
        scaler.scale(-torch.cat([p.flatten() for p in parameters]).sum()).backward()
        scaler.step(optimizer)
        assert not scaler.step_was_skipped
        assert [p.tolist() for p in others] == [[1.0]] * len(others)


def test_every_device_has_a_flag_of_its_own() -> None:
    """torch keeps "cpu" and "cpu:0" apart; the second stands for another device."""
    devices = torch.device("cpu"), torch.device("cpu", 0)
    grads = [torch.tensor([8.0]), torch.tensor([INF])]
    kinds = {(device, torch.float32): [grad] for device, grad in zip(devices, grads, strict=True)}
    flags = unscale_gradients(kinds, torch.tensor(0.125), torch.tensor(0.0), grows=False)
    assert {device: flag.item() for device, flag in flags.items()} == {devices[0]: 0.0, devices[1]: 1.0}
    assert grads[0].item() == 1.0
    assert max_flag(list(flags.values()), torch.tensor(0.0)).item() == 1.0
    assert overflow_flag({**kinds}, torch.tensor(8.0), grows=False).item() == 1.0


def test_a_report_on_gradients_of_which_some_are_gone_says_so(host: str) -> None:
    loop = Loop(2, skip="each", fused=True)
    loop.backward(INF, INF)
    loop.steps()
    loop.optimizers[0].zero_grad()
    report = loop.scaler.report()
    counted_at_once = host == "reading is free"
    assert (report.gone, report.gradients, len(report)) == ((False, 2, 2) if counted_at_once else (True, 1, 1))


def test_a_report_after_the_next_loss_does_not_count_its_gradients(host: str) -> None:
    loop = Loop(1, fused=True)
    loop.backward(INF)
    loop.steps()
    loop.backward(1.0)
    report = loop.scaler.report()
    assert loop.scaler.step_was_skipped
    assert (report.gone, len(report)) == ((False, 1) if host == "reading is free" else (True, 0))


def test_the_module_that_is_watched_first_names_a_shared_parameter() -> None:
    part = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(part.parameters(), 1.0)
    scaler = GradScaler(polyamp.LossScaler()).watch(nn.ModuleDict({"encoder": part})).watch(part)
    whole = nn.ModuleDict({"decoder": part})
    scaler.watch(whole)
    scaler.scale(part(torch.full((1, 1), INF)).sum()).backward()
    scaler.step(optimizer)
    assert [row.name for row in scaler.report()] == ["weight"], "the first one is gone: it is held weakly"


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_keep_their_scale_when_a_state_is_loaded(fused: bool) -> None:
    loop = Loop(1, fused=fused, init_scale=8.0)
    loop.backward(1.0)
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "scale": 64.0})
    assert loop.steps() == [1.0]
    loop.backward(1.0)
    assert loop.parameters[0].grad == -64.0
    assert loop.steps() == [2.0]


def divides_twice(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> bool:
    """Whether an iteration of a fused optimizer also tests what comes out of the division, a second pass."""
    seen: list[bool] = []

    def counting(*args: Any, grows: bool) -> torch.Tensor:
        seen.append(grows)
        return overflow_flag(*args, grows=grows)

    with monkeypatch.context() as patch:
        patch.setattr(native_scaler, "overflow_flag", counting)
        loop.backward(1.0)
        loop.steps()
    (grows,) = seen
    return grows


def test_a_second_pass_is_made_only_where_the_scale_may_be_below_one(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    loop = Loop(1, fused=True, init_scale=4.0, min_scale=1.0, on_stuck="ignore")
    for _ in range(5):
        loop.backward(INF)
        loop.steps()
    assert not divides_twice(monkeypatch, loop), "the floor keeps it from falling below"
    loop = Loop(1, fused=True, init_scale=2.0, growth_interval=1, patience=4)
    for gain in (INF, INF, 1.0):
        loop.backward(gain)
        loop.steps()
    assert loop.scaler.get_scale() == 1.0
    waits = host == "reading waits"
    assert divides_twice(monkeypatch, loop) is waits, "the host knows only that it may be 0.5"
    assert divides_twice(monkeypatch, loop) is False, "the host looked, as it does every `patience` updates"


def test_an_unfused_step_tells_the_host_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(1, fused=True, init_scale=2.0, growth_interval=1, on_stuck="ignore")
    for gain in (INF, INF, 1.0, 1.0):
        loop.backward(gain)
        loop.steps()
    plain = torch.optim.SGD(loop.parameters, 1.0)
    loop.backward(1.0)
    loop.scaler.step(plain)
    loop.scaler.update()
    assert loop.scaler.get_scale() == 4.0
    assert not divides_twice(monkeypatch, loop)


@pytest.mark.parametrize("fused", [False, True])
def test_the_host_looks_for_a_stuck_scale_every_patience_updates(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    original = GradScaler._check_if_stuck

    def counting(self: GradScaler) -> None:
        looked.append(self._loop.watch.steps)
        original(self)

    monkeypatch.setattr(GradScaler, "_check_if_stuck", counting)
    loop = Loop(1, fused=fused, patience=3)
    for _ in range(7):
        loop.backward(1.0)
        loop.steps()
    assert looked == [3, 6]


@pytest.mark.parametrize("create_graph", [False, True])
def test_scaled_gradients_in_new_tensors_after_unscale_are_refused(create_graph: bool) -> None:
    """Not added in place: the second parameter had none, and with `create_graph` autograd makes a new sum."""
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p, q], 1.0)
    scaler = GradScaler(polyamp.LossScaler())
    scaler.scale((p * p).sum()).backward()
    scaler.unscale_(optimizer)
    reached, name = (p, "parameter 0") if create_graph else (q, "parameter 1")
    for _ in range(2):
        with warnings.catch_warnings(action="ignore"):  # torch warns of the cycle that create_graph makes
            scaler.scale((reached * reached).sum()).backward(create_graph=create_graph)
    with pytest.raises(GradScalerError, match=rf"to unscaled ones, in: group 0, {name}\. Call unscale_ after"):
        scaler.step(optimizer)


def test_nothing_is_remembered_of_optimizers_that_are_gone() -> None:
    scaler, p = GradScaler(polyamp.LossScaler()), nn.Parameter(torch.zeros(1))
    gc.collect()
    gc.freeze()  # what is there already is not looked at in the searches below
    try:
        for _ in range(5):
            scaler.scale(-p.sum()).backward()
            scaler.step(torch.optim.SGD([p], 1.0))
            scaler.update()
            p.grad = None
            gc.collect()
        assert sum(type(item) is OptimizerRecord for item in gc.get_objects()) <= 1
    finally:
        gc.unfreeze()
    assert p.item() == 5.0


def test_what_is_known_of_an_optimizer_is_not_taken_for_anothers() -> None:
    """Python gives the id of an object that is gone to a new one."""
    loop, p = LoopRecord(1.0), nn.Parameter(torch.zeros(1))
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([p], 1.0)
    loop.record_of(first).last_call = 7
    loop._known[id(second)] = loop._known.pop(id(first))
    assert loop.record_of(second).last_call == 0
    assert loop.record_of(second) is loop.record_of(second)
    assert [optimizer for optimizer, _ in loop.optimizers()] == [second]
