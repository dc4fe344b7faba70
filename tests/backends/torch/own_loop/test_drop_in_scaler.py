"""`polyamp_torch.GradScaler` typed as `torch.amp.GradScaler` is: signature, methods, and what libraries reach into."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import polyamp
from polyamp_torch import GradScaler, autocast
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

VALUES = {"device": "cpu", "init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3,
          "enabled": True}  # fmt: skip
"""A value for each parameter of torch's signature."""


def facts(scaler: torch.amp.GradScaler) -> tuple[Any, ...]:
    return (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
        scaler.is_enabled(),
        scaler._get_growth_tracker(),
        scaler._device,
        scaler._get_scale_async(),
    )


def test_every_parameter_of_torch_by_position_and_by_name() -> None:
    names = list(inspect.signature(torch.amp.GradScaler).parameters)
    assert names == list(VALUES), "torch.amp.GradScaler has new parameters: take them, and add them here"
    for split in range(len(names) + 1):
        given = [VALUES[name] for name in names[:split]]
        for left_out in [None, *names[max(split, 1) :]]:
            named = {name: VALUES[name] for name in names[split:] if name != left_out}
            assert facts(GradScaler(*given, **named)) == facts(torch.amp.GradScaler(*given, **named))
    words = GradScaler("megatron")
    assert words.loss_scaler == polyamp.LossScaler.like("megatron")
    with pytest.raises(GradScalerError, match=r"a device type such as 'cuda' or 'cpu', or a scaler .* mean 'cuda'"):
        GradScaler("cudda")


def methods(cls: type) -> dict[str, inspect.Signature]:
    found = dict(inspect.getmembers(cls, inspect.isfunction))
    return {name: inspect.signature(value) for name, value in found.items() if not name.startswith("__")}


def test_every_method_of_torch_takes_what_torchs_takes() -> None:
    ours = methods(GradScaler)
    for name, theirs in methods(torch.amp.GradScaler).items():
        have = ours[name].parameters.values()
        for want in theirs.parameters.values():
            kinds = {p.kind for p in have if p.name == want.name}
            assert want.kind in kinds, f"{name}({want.name})"
        extra = [p for p in have if p.name not in theirs.parameters]
        assert all(p.default is not p.empty for p in extra), f"{name} asks for more than torch's"
    theirs = {name for name in vars(torch.amp.GradScaler("cpu")) if not hasattr(GradScaler("cpu"), name)}
    assert not theirs, "attributes that libraries read"


def optimizer_with(*values: float) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    p = nn.Parameter(torch.ones(len(values)))
    p.grad = torch.tensor(values)
    return p, torch.optim.SGD([p], 0.5)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler], ids=["polyamp", "torch"])
def test_private_methods_on_a_fresh_scaler(make: Any) -> None:
    scaler, zero = make("cpu"), torch.zeros(1)
    p, optimizer = optimizer_with(4.0, 8.0)
    flags = scaler._unscale_grads_(optimizer, torch.full((1,), 0.25), zero, False)
    assert p.grad is not None
    assert p.grad.tolist() == [1.0, 2.0]
    assert [flag.item() for flag in flags.values()] == [0.0]
    p, optimizer = optimizer_with(1.0, float("inf"))
    flags = scaler._unscale_grads_(optimizer, torch.ones(1), zero, True)
    assert [flag.item() for flag in flags.values()] == [1.0]
    with pytest.raises((AssertionError, RuntimeError), match=r"_scale is None|scale\(\) never was"):
        scaler._check_inf_per_device(optimizer)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scale, tracker = scaler._check_scale_growth_tracker("step")
    assert (scale.item(), tracker.item(), scale.dtype, tracker.dtype) == (65536.0, 0, torch.float32, torch.int32)
    assert [flag.item() for flag in scaler._check_inf_per_device(optimizer).values()] == [1.0]
    assert [flag.item() for flag in scaler._found_inf_per_device(optimizer).values()] == [1.0]
    assert (scaler._scale.item(), scaler._growth_tracker.item(), scaler._init_scale) == (65536.0, 0, 65536.0)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY"


def test_a_factor_that_makes_finite_gradients_infinite_is_found_s10() -> None:
    p, optimizer = optimizer_with(3e38, 1.0)
    flags = GradScaler("cpu")._unscale_grads_(optimizer, torch.full((1,), 4.0), torch.zeros(1), False)
    assert p.grad is not None
    assert p.grad[0].item() == float("inf")
    assert [flag.item() for flag in flags.values()] == [1.0]


def test_the_error_for_float16_gradients_has_torchs_words_and_class() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.ones(2, dtype=torch.float16)
    for scaler in (GradScaler("cpu"), torch.amp.GradScaler("cpu")):
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.unscale_(torch.optim.SGD([p], 0.1))


@pytest.mark.parametrize("make", [GradScaler, torch.amp.GradScaler], ids=["polyamp", "torch"])
def test_disabled_it_passes_everything_through(make: Any) -> None:
    scaler = make("cpu", enabled=False)
    p, optimizer = optimizer_with(1.0, 2.0)
    loss = p.sum()
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: torch.tensor(5.0)).item() == 5.0, "a closure too"
    assert p.tolist() == [0.5, 0.0]
    scaler.update()
    scaler.update(4.0)
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})
    assert scaler._get_growth_tracker() == 0
    scaler.load_state_dict({})


@pytest.mark.usefixtures("host")
def test_a_subclass_that_steps_in_its_own_way() -> None:
    """torch's hook for that is `_maybe_opt_step`; libraries override it."""
    calls: list[str] = []

    class Own(GradScaler):
        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("asked")
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    scaler = Own("cpu", init_scale=2.0)
    for gain in (1.0, float("inf")):
        p, optimizer = optimizer_with(0.0, 0.0)
        optimizer.zero_grad()
        scaler.scale((p * gain).sum()).backward()
        scaler.step(optimizer)
        assert scaler.step_was_skipped is (gain > 1.0)
        assert p.tolist() == ([0.5, 0.5] if gain == 1.0 else [1.0, 1.0])
        scaler.update()
    assert calls == ["asked", "asked"]


@pytest.mark.usefixtures("host")
def test_torchs_recipe_with_one_changed_import() -> None:
    """The steps of torch's "Automatic Mixed Precision" recipe, with both libraries' names."""

    def train(region: Any, scaling: Any, use_amp: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        device = "cpu"
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = scaling(device, enabled=use_amp)
        data = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(3)]
        for _ in range(2):
            for x, target in data:
                with region(device_type=device, dtype=torch.bfloat16, enabled=use_amp, cache_enabled=False):
                    output = net(x)
                    loss = torch.nn.functional.mse_loss(output.float(), target)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
        scaling(device, enabled=use_amp).load_state_dict(checkpoint["scaler"])
        return list(net.parameters())

    for use_amp in (True, False):
        ours = train(autocast, GradScaler, use_amp)
        theirs = train(torch.autocast, torch.amp.GradScaler, use_amp)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("base", [GradScaler, torch.amp.GradScaler], ids=["polyamp", "torch"])
def test_a_subclass_that_updates_in_its_own_way(base: Any) -> None:
    """As Composer's for closures does: it writes the state's tensors, and steps the optimizer itself."""

    class Own(base):  # type: ignore[misc]  # mypy does not know which of the two
        def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.unscale_(optimizer)
            flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            return None if sum(flag.item() for flag in flags) else optimizer.step()

        def update(self, new_scale: Any = None) -> None:
            scale, tracker = self._check_scale_growth_tracker("update")
            found = [f for state in self._per_optimizer_states.values() for f in state["found_inf_per_device"].values()]
            torch._amp_update_scale_(
                scale, tracker, found[0], self._growth_factor, self._backoff_factor, self._growth_interval
            )
            self._per_optimizer_states.clear()

    scaler, scales = Own("cpu", init_scale=2.0, growth_interval=2), []
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.5)
    for gain in (1.0, float("inf"), float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((p * gain).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0, 1.0, 0.5, 0.5, 1.0]
    assert p.tolist() == [-0.5, -0.5]
