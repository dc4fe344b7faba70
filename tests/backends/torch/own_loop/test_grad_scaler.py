"""`polyamp_torch.GradScaler` in loops written by hand: what it scales, when it steps, what it reports and refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp.errors import GradientError, LossScaleStuckError, UnsupportedError
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.usefixtures("host")


def weight(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, 2.0)))


def backward(scaler: GradScaler, *parameters: nn.Parameter, gain: float = 1.0) -> None:
    """Gradients of `gain` everywhere."""
    scaler.scale(torch.stack([(p * gain).sum() for p in parameters]).sum()).backward()


def test_the_parts_of_scale() -> None:
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor
        hidden: list[torch.Tensor]

    scaler = GradScaler(polyamp.LossScaler(init_scale=8.0))
    half = torch.tensor([60000.0], dtype=torch.float16)
    outputs = {"a": half, "b": [torch.tensor(2.0), (torch.tensor(3.0, dtype=torch.bfloat16), "text", 4, None)]}
    scaled = scaler.scale(outputs)
    assert scaled["a"].dtype == torch.float32
    assert scaled["a"].tolist() == [480000.0]
    assert scaled["b"][0].item() == 16.0
    assert isinstance(scaled["b"][1], tuple)
    assert (scaled["b"][1][0].dtype, scaled["b"][1][0].item()) == (torch.float32, 24.0)
    assert scaled["b"][1][1:] == ("text", 4, None)
    assert scaler.scale(torch.arange(3)).tolist() == [0, 1, 2]
    assert scaler.scale(Output(torch.tensor(1.0), [torch.tensor(2.0)])).hidden[0].item() == 16.0
    assert [x.item() for x in scaler.scale(iter([torch.tensor(1.0), torch.tensor(2.0)]))] == [8.0, 16.0]
    scaled = scaler.scale(torch.tensor([3.0], dtype=torch.bfloat16))
    assert (scaled.dtype, scaled.tolist()) == (torch.float32, [24.0])
    assert scaler.scale(torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float64
    assert scaler.scale(torch.tensor(1.0 + 1.0j)).item() == 8.0 + 8.0j


def test_a_16_bit_loss_gets_its_gradient_back_in_its_own_dtype() -> None:
    scaler = GradScaler(polyamp.LossScaler(init_scale=8.0))
    p = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    scaler.scale(p.sum()).backward()
    assert p.grad is not None
    assert (p.grad.dtype, p.grad.tolist()) == (torch.bfloat16, [8.0, 8.0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_unscale_step_and_skip(make: Any, fused: bool) -> None:
    p = weight()
    optimizer = make([p], lr=0.5, fused=fused)
    scaler = GradScaler(polyamp.LossScaler(init_scale=1024.0, growth_interval=2))
    trace = []
    for gain in (1.0, INF, 1.0, NAN, 1.0, 1.0):
        before = p.detach().clone()
        optimizer.zero_grad()
        backward(scaler, p, gain=gain)
        scaler.step(optimizer)
        skipped = scaler.step_was_skipped
        scaler.update()
        trace.append(scaler.get_scale())
        assert skipped == scaler.step_was_skipped == torch.equal(before, p) == (gain != 1.0)
    assert trace == [1024.0, 512.0, 512.0, 256.0, 256.0, 512.0]


def test_unscale_by_hand_gives_the_gradients_of_the_loss() -> None:
    p, q = weight(3.0), nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([p, q], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=512.0))
    scaler.scale((p * 2.0).sum() + (q * 4.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert p.grad is not None
    assert q.grad is not None
    assert (p.grad.item(), q.grad.item(), q.grad.dtype) == (2.0, 4.0, torch.float64)
    scaler.step(optimizer)
    scaler.update()
    assert (p.item(), q.item()) == (1.0, -3.0)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-14, 2.0**-1, 1.0, 2.0**15, 2.0**100])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_flag_is_exact_over_the_whole_range(scale: float, unscale: bool, fused: bool) -> None:
    """A step is skipped exactly when a quotient is not finite, whatever the gradient was before (S10)."""
    largest = torch.finfo(torch.float32).max
    for value in (largest, largest / 2, 1e38, 1e20, 1.0, 1e-30, -largest, INF, NAN):
        p = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([p], 1.0, fused=fused)
        scaler = GradScaler(polyamp.LossScaler(init_scale=scale, min_scale=2.0**-120, max_scale=2.0**120))
        scaler.scale(p.sum()).backward()
        p.grad = torch.tensor([value, 0.0])
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        expected = bool(torch.isfinite(torch.tensor(value, dtype=torch.float32) / scale))
        assert scaler.step_was_skipped is not expected, value
        assert torch.isfinite(p).all()


def test_accumulation_over_iterations_of_one_scale_is_legal() -> None:
    p = weight(0.0)
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=64.0))
    for _ in range(3):
        backward(scaler, p, gain=2.0)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == -6.0


def test_what_step_returns_and_passes_on() -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None, *, extra: str = "") -> Any:
            super().step()
            return f"stepped {extra}"

    p = weight()
    optimizer = Odd([p], 0.1)
    scaler = GradScaler(polyamp.LossScaler())
    backward(scaler, p)
    assert scaler.step(optimizer, None, extra="well") == "stepped well"
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, p, gain=INF)
    assert scaler.step(optimizer, closure=None) is None
    with pytest.raises(UnsupportedError, match="takes no closure, by position or by name"):
        scaler.step(torch.optim.SGD([p], 0.1), closure=lambda: 0.0)


def test_none_gradients_frozen_parameters_and_several_groups() -> None:
    used, unused, frozen = weight(1.0), weight(2.0), weight(3.0)
    frozen.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": [used, unused]}, {"params": [frozen], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scaler = GradScaler(polyamp.LossScaler())
    backward(scaler, used)
    scaler.step(optimizer)
    scaler.update()
    assert unused.item() == 2.0
    assert frozen.item() == 3.0
    assert used.item() < 1.0
    optimizer.zero_grad()
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError, match=r"no gradients in the optimizer's parameters. Call backward\(\) first"):
        scaler.step(optimizer)


def test_calls_out_of_order() -> None:
    p = weight()
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(polyamp.LossScaler())
    with pytest.raises(GradScalerError, match=r"update\(\) was called but scale\(\) never was"):
        scaler.update()
    with pytest.raises(GradScalerError, match=r"unscale_\(\) was called but scale\(\) never was"):
        scaler.unscale_(optimizer)
    backward(scaler, p)
    with pytest.raises(GradScalerError, match=r"no step\(\) with gradients since the last update\(\)"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was already called for this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(GradScalerError, match=r"step\(\) was called after step\(\) of this optimizer"):
        scaler.step(optimizer)
    with pytest.raises(GradScalerError, match=r"unscale_\(\) was called after step\(\)"):
        scaler.unscale_(optimizer)


def test_float16_gradients_and_the_meta_device_are_refused() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = GradScaler(polyamp.LossScaler())
    scaler.scale(p.float().sum()).backward()
    for optimizer in (torch.optim.SGD([p], 0.1), torch.optim.SGD([p], 0.1, fused=True)):
        with pytest.raises(UnsupportedError, match="Gradients must not be float16"):
            scaler.step(optimizer)
    with pytest.raises(UnsupportedError, match="meta device"):
        GradScaler(polyamp.LossScaler()).scale(torch.ones((), device="meta"))


def test_setting_the_scale() -> None:
    p = weight()
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = GradScaler(polyamp.LossScaler(init_scale=1024.0))
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update(256.0)
    assert scaler.get_scale() == 256.0
    scaler.update(torch.tensor([64.0]))
    assert scaler.get_scale() == 64.0
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() == 2.0**-14
    scaler.update(torch.tensor(INF))
    assert scaler.get_scale() == 2.0**24
    scaler.update(torch.tensor(NAN))
    assert scaler.get_scale() == 2.0**24
    for wrong in (0.0, INF, NAN, -1.0, 2.0**30):
        with pytest.raises(GradScalerError, match="new_scale must lie between min_scale="):
            scaler.update(wrong)
    with pytest.raises(GradScalerError, match=r"a tensor of shape \(2,\), requires_grad=False"):
        scaler.update(torch.ones(2))


def test_static_and_checking_scalers() -> None:
    for scaler, scale in (
        (GradScaler(polyamp.LossScaler.static(128.0)), 128.0),
        (GradScaler(polyamp.LossScaler.off(check_finite=True)), 1.0),
    ):
        p = weight(1.0)
        optimizer = torch.optim.SGD([p], 1.0)
        for gain, expected in ((INF, 1.0), (2.0, -1.0)):
            optimizer.zero_grad()
            backward(scaler, p, gain=gain)
            scaler.step(optimizer)
            scaler.update()
            assert (p.item(), scaler.get_scale()) == (expected, scale)


def test_disabled_does_nothing() -> None:
    p = weight(1.0)
    optimizer = torch.optim.SGD([p], 1.0)
    for scaler in (GradScaler(enabled=False), GradScaler(polyamp.LossScaler.off())):
        assert not scaler.is_enabled()
        loss = p.sum()
        assert scaler.scale(loss) is loss
        outputs = {"a": "anything"}
        assert scaler.scale(outputs) is outputs
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer, lambda: 7.0) == 7.0
        scaler.update()
        assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
        scaler.load_state_dict({})
        assert (scaler.step_was_skipped, len(scaler.report())) == (False, 0)


@pytest.mark.parametrize("fused", [False, True])
def test_the_report(fused: bool) -> None:
    head, tail = nn.Linear(2, 3), nn.Linear(3, 1)
    model = nn.Sequential(head, tail)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    scaler = GradScaler(polyamp.LossScaler(init_scale=1024.0)).watch(model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    first, last = head.weight.grad, tail.bias.grad
    assert first is not None
    assert last is not None
    first[0, 0], first[1, 1], first[2, 0] = INF, -INF, NAN
    last[0] = NAN
    scaler.step(optimizer)
    report = scaler.report()
    scaler.update()
    assert scaler.report() == report
    assert list(report) == [("0.weight", (3, 2), "float32", 2, 1), ("1.bias", (1,), "float32", 0, 1)]
    assert str(report).splitlines() == [
        "Skipped at loss scale 1024: 2 of 4 gradients are not finite.",
        "parameter  shape   dtype    inf  nan",
        "0.weight   (3, 2)  float32    2    1",
        "1.bias     (1,)    float32    0    1",
    ]
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert (len(scaler.report()), str(scaler.report())) == (0, "No step was skipped.")


def test_the_report_counts_what_only_unscaling_makes_infinite() -> None:
    p = weight(0.0, 0.0)
    for fused in (False, True):
        optimizer = torch.optim.SGD([p], 1.0, fused=fused)
        scaler = GradScaler(polyamp.LossScaler(init_scale=2.0**-10))
        backward(scaler, p)
        p.grad = torch.tensor([1e37, 1.0])
        scaler.step(optimizer)
        assert [(row.name, row.inf, row.nan) for row in scaler.report()] == [("group 0, parameter 0", 1, 0)]


def test_names_in_the_report() -> None:
    named = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(named.named_parameters(), 0.1)
    plain = torch.optim.SGD([{"params": [weight()]}, {"params": [weight(), weight()]}], 0.1)
    scaler = GradScaler(polyamp.LossScaler())
    loss = named(torch.full((1, 1), INF)).sum() + plain.param_groups[1]["params"][1].sum() * NAN
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.step(plain)
    assert [row.name for row in scaler.report()] == ["weight", "group 1, parameter 1"]


def test_a_report_that_is_asked_for_too_late_says_so(host: str) -> None:
    p = weight()
    optimizer = torch.optim.SGD([p], 0.1, fused=True)
    scaler = GradScaler(polyamp.LossScaler())
    backward(scaler, p, gain=INF)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    report = scaler.report()
    assert scaler.step_was_skipped
    if host == "reading is free":
        assert (report.gone, [row.inf for row in report]) == (False, [2])
    else:
        assert (report.gone, len(report)) == (True, 0)
        assert "Call report() before zero_grad() and before the next scale()." in str(report)


def test_a_schedule_moves_with_applied_steps_only() -> None:
    p = weight()
    optimizer = torch.optim.SGD([p], 1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = GradScaler(polyamp.LossScaler())
    for gain in (1.0, INF, INF, 1.0):
        optimizer.zero_grad()
        backward(scaler, p, gain=gain)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.step_was_skipped:
            schedule.step()
    assert schedule.get_last_lr() == [0.25]


@pytest.mark.parametrize("on_stuck", ["raise", "warn", "ignore"])
def test_a_stuck_scale_names_the_parameters(on_stuck: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = polyamp.LossScaler(init_scale=2.0, min_scale=1.0, patience=3, on_stuck=on_stuck)
    scaler = GradScaler(settings).watch(model)

    def iterate() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 1), INF)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    iterate()
    iterate()
    message = "3 steps in a row were skipped .* floor of 1: .*Parameters with inf or NaN gradients: weight. "
    if on_stuck == "raise":
        with pytest.raises(LossScaleStuckError, match=message):
            iterate()
    elif on_stuck == "warn":
        with pytest.warns(UserWarning, match=message):
            iterate()
    else:
        iterate()
    assert (scaler.get_scale(), scaler.state_dict()["polyamp"]["stuck"]) == (1.0, 3)


def test_hysteresis_of_the_rule() -> None:
    """Rule S16's second trace, through the whole scaler."""
    p = weight()
    optimizer = torch.optim.SGD([p], 0.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=16.0, growth_interval=4, hysteresis=2))
    trace = []
    for overflow in (1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1):
        optimizer.zero_grad()
        backward(scaler, p, gain=INF if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        trace.append(int(scaler.get_scale()))
    assert trace == [16, 16, 16, 16, 32, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 16, 32, 32]


def test_scale_in_a_compiled_function_compiles_once() -> None:
    """A break in the graph, as with torch's; `train_step(compile=True)` has none."""
    frames: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(len(inputs))
        return graph.forward

    p = weight(1.0)
    optimizer = torch.optim.SGD([p], 0.125)
    scaler = GradScaler(polyamp.LossScaler(init_scale=64.0))

    @torch.compile(backend=compiler)
    def scaled(x: torch.Tensor) -> Any:
        return scaler.scale((p * x).sum())

    for _ in range(6):
        optimizer.zero_grad()
        scaled(torch.ones(1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (len(frames), p.item()) == (1, 0.25)


def test_optimizers_that_want_the_scaler_itself() -> None:
    """The older contract of fused optimizers: torch passes `grad_scaler`, and they ask it for scale and flag."""

    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            flags = grad_scaler._check_inf_per_device(self)
            assert flags is grad_scaler._found_inf_per_device(self)
            if not sum(flag.item() for flag in flags.values()):
                for p in self.param_groups[0]["params"]:
                    p.grad.div_(grad_scaler._get_scale_async())
                super().step()

    p = weight(1.0)
    optimizer = Older([p], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=32.0))
    for gain, expected, scale in ((2.0, -1.0, 32.0), (INF, -1.0, 16.0)):
        optimizer.zero_grad()
        backward(scaler, p, gain=gain)
        scaler.step(optimizer)
        scaler.update()
        assert (p.item(), scaler.get_scale()) == (expected, scale)
    assert scaler.step_was_skipped
