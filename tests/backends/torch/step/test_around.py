"""What is around a torch step: modules that a loss only passes through, threads that save, and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import polyamp
import polyamp_torch
from polyamp.conformance.problems import changed_arrays

pytestmark = pytest.mark.usefixtures("ctrl_c")

PACKAGE = str(Path(polyamp_torch.__file__).parent)
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def generator() -> nn.Module:
    """What is trained."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


def discriminator() -> nn.Module:
    """What the loss runs through."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(seed: int = 0) -> torch.Tensor:
    """Inputs, shape (6, 3)."""
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def made(**settings: Any) -> polyamp.Recipe:
    """Adam under a scale of 1024."""
    settings = {"optimizer": polyamp.adam(0.01), "scaler": polyamp.LossScaler(init_scale=1024.0), **settings}
    return polyamp.Recipe(policy="float32", **settings)


def losses(judge: nn.Module) -> dict[str, Loss]:
    """Ways through a module."""

    def called(how: Callable[[torch.Tensor], Any]) -> Loss:
        return lambda model, x: -how(model(x)).mean()

    return {
        "called": called(judge),
        "checkpointed": called(lambda fake: checkpoint(judge, fake, use_reentrant=False)),
        "reentrant": called(lambda fake: checkpoint(judge, fake, use_reentrant=True)),
        "reentrant, closed over": called(lambda fake: checkpoint(lambda x: judge(x), fake, use_reentrant=True)),
    }


@pytest.mark.parametrize("settings", [{}, {"accumulate_steps": 2}], ids=["whole", "accumulated"])
@pytest.mark.parametrize("way", losses(nn.Identity()))
def test_what_the_loss_passes_through_keeps_its_gradients(way: str, settings: dict[str, Any]) -> None:
    recipe, judge = made(**settings), discriminator()
    state = polyamp.init(generator(), recipe)
    step, run = (
        make(losses(judge)[way], *rest) for make, rest in ((polyamp.train_step, [recipe]), (polyamp.value_and_grad, []))
    )
    first, *rest = judge.parameters()
    kept = first.grad = torch.full_like(first, 7.0)
    for seed in range(3):
        _, result = step(state, batch(seed))
        _, gradients = run(state, batch(seed))
        assert not bool(result.skipped)
        assert all(bool(value.any()) for value in gradients.values.values())
        assert first.grad is kept
        assert bool((kept == 7.0).all())
        assert [p.grad for p in rest] == [None] * len(rest)


def test_a_loop_of_the_users_own_for_the_discriminator() -> None:
    """It forgets `zero_grad` before its first backward, as many do, and meets its own gradients only."""
    judge, recipe = discriminator(), made()
    alone = discriminator()
    state = polyamp.init(generator(), recipe)
    step = polyamp.train_step(lambda model, x: -judge(model(x)).mean(), recipe)
    step(state, batch())
    for module in (judge, alone):
        module(batch(1)).square().mean().backward()
    for p, q in zip(judge.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_a_module_that_comes_in_late_and_one_that_changes() -> None:
    """A warm-up without the discriminator, then one of two that are alike."""
    judges, recipe = [discriminator(), discriminator()], made()
    state = polyamp.init(generator(), recipe)
    uses = iter([None, None, 0, 1, None, 1])

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        fake, use = model(x), next(uses)
        loss: torch.Tensor = fake.square().mean()
        return loss if use is None else loss - judges[use](fake).mean()

    step = polyamp.train_step(loss_fn, recipe)
    for seed in range(6):
        step(state, batch(seed))
        assert all(p.grad is None for judge in judges for p in judge.parameters())


def test_a_checkpoint_whose_inside_alone_has_parameters_still_trains() -> None:
    """`backward(inputs=...)` would not run it."""
    recipe, model = made(), generator()
    state = polyamp.init(model, recipe)

    def loss_fn(bound: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(bound, x.clone().requires_grad_(), use_reentrant=True)
        return out.square().mean()

    before = [p.detach().clone() for p in model.parameters()]
    polyamp.train_step(loss_fn, recipe)(state, batch())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_compiled_step_leaves_the_discriminator_alone_too() -> None:
    judge, recipe = discriminator(), made()
    state = polyamp.init(generator(), recipe)
    how = {"backend": "aot_eager"}
    step = polyamp.train_step(lambda model, x: -judge(model(x)).mean(), recipe, compile=how)
    for seed in range(2):
        step(state, batch(seed))
    assert all(p.grad is None for p in judge.parameters())


def counting() -> tuple[nn.Module, polyamp.Recipe]:
    """A model of one weight that falls by 1 a step and a buffer that counts forward passes."""

    class Counting(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1.0
            return self.weight * x.mean()

    model = Counting()
    native = torch.optim.SGD(model.parameters(), 1.0, momentum=0.0)
    return model, made(optimizer=native)


@pytest.mark.parametrize("moment", ["forward", "before", "after"])
def test_a_thread_that_saves_meanwhile_waits_for_the_step(moment: str) -> None:
    """An export begun in the forward pass, before the update or after it holds a whole step: weight, buffer, count."""
    model, recipe = counting()
    state = polyamp.init(model, recipe)
    exported: list[dict[str, Any]] = []
    threads = []

    def save(*_: object) -> None:
        thread = threading.Thread(target=lambda: exported.append(state.backend.export_state(state)))
        thread.start()
        thread.join(0.1)
        threads.append(thread)

    if moment == "forward":
        model.register_forward_hook(save)
    elif moment == "before":
        recipe.optimizer.register_step_pre_hook(save)
    else:
        recipe.optimizer.register_step_post_hook(save)
    step = polyamp.train_step(lambda bound, x: bound(x), recipe)
    for _ in range(3):
        step(state, torch.ones(2))
    for thread in threads:
        thread.join(10.0)
    steps = [
        (int(arrays["step"]), float(arrays["running/seen"]), -float(arrays["model/weight"])) for arrays in exported
    ]
    assert sorted(steps) == [(1, 1.0, 1.0), (2, 2.0, 2.0), (3, 3.0, 3.0)]


def test_a_thread_that_saves_gets_its_turn_while_another_steps_on() -> None:
    """And two threads that step two states through each other's halves do not wait for each other for ever."""
    model, recipe = counting()
    state = polyamp.init(model, recipe)
    step = polyamp.train_step(lambda bound, x: bound(x), recipe)
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            step(state, torch.ones(2))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = [state.backend.export_state(state) for _ in range(30)]
    finally:
        ended.set()
        thread.join(10.0)
    for arrays in found:
        assert float(arrays["running/seen"]) == -float(arrays["model/weight"]) == int(arrays["step"])


def test_an_interrupt_in_the_update_waits_until_it_is_whole() -> None:
    model = generator()
    native = torch.optim.SGD(model.parameters(), 0.1)
    native.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    state = polyamp.init(model, made(optimizer=native))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        polyamp.train_step(lambda bound, x: bound(x).square().mean(), state.recipe)(state, batch())
    assert int(state.step) == 1
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("where", ["loss_fn", "backward"])
def test_an_interrupt_in_user_code_arrives_at_once_and_changes_nothing(where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = polyamp.init(model, made())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = state.backend.export_state(state)
    reached = []

    def ring(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("past the interrupt")

    def loss_fn(bound: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = bound(x)
        if where == "loss_fn":
            ring()
        else:
            out.register_hook(ring)
        return out.square().mean()

    for run in (polyamp.train_step(loss_fn, state.recipe), polyamp.value_and_grad(loss_fn)):
        with pytest.raises(KeyboardInterrupt):
            run(state, batch())
        assert reached == []
        assert changed_arrays(before, state.backend.export_state(state)) == []
        assert all(p.grad is not None and bool((p.grad == 1.0).all()) for p in model.parameters())


def test_an_interrupt_at_any_line_leaves_a_whole_step_or_none() -> None:
    """And no gradients; the next step is an ordinary one. (Regions: precision/test_interrupts.)"""
    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(0.01), clip_norm=1.0)

    def fresh() -> Any:
        torch.manual_seed(0)
        return polyamp.init(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), recipe)

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x)
        return out.square().mean()

    step = polyamp.train_step(loss_fn, recipe)
    straight = fresh()
    whole = [straight.backend.export_state(straight)]
    for seed in range(2):
        step(straight, batch(seed))
        whole.append(straight.backend.export_state(straight))
    for seen, number in enumerate(range(1, 4000, 17)):
        state = fresh()
        came = _interrupted(lambda state=state: step(state, batch()), number)  # type: ignore[misc]  # a bound default
        assert all(p.grad is None for p in state.model.parameters())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        done = int(state.step)
        assert changed_arrays(whole[done], state.backend.export_state(state)) == []
        step(state, batch(done))
        assert changed_arrays(whole[done + 1], state.backend.export_state(state)) == []
        if not came:
            assert seen > 10
            return
    raise AssertionError("the step has no end")


def _interrupted(run: Callable[[], object], number: int) -> bool:
    """Whether the `number`th line that runs in polyamp's torch package is reached; a SIGINT arrives there."""
    left = number

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


def test_a_mode_of_the_users_around_a_step_sees_its_backward_pass_as_in_a_loop_by_hand() -> None:
    class Calls(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.sgd(0.1))
    state = polyamp.init(nn.Linear(3, 1), recipe)
    step = polyamp.train_step(lambda model, batch: model(batch).mean(), recipe)
    with Calls() as calls:
        step(state, torch.ones(2, 3))
    assert calls.seen.count(torch.autograd.backward) == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_loss_of_a_subclass_sees_its_backward_pass_as_in_a_loop_by_hand(policy: str) -> None:
    seen: list[Any] = []

    class Loss(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    torch.autograd.backward(nn.Linear(3, 1)(torch.ones(2, 3)).mean().as_subclass(Loss))
    by_hand = seen.count(torch.autograd.backward)  # 0 in older torch, which asks no subclass
    seen.clear()
    recipe = polyamp.Recipe(policy=policy, optimizer=polyamp.sgd(0.1))
    state = polyamp.init(nn.Linear(3, 1), recipe)
    step = polyamp.train_step(lambda model, batch: model(batch).mean().as_subclass(Loss), recipe)
    step(state, torch.ones(2, 3))
    assert seen.count(torch.autograd.backward) == by_hand


def test_s04_a_region_of_torchs_that_a_backward_opens_in_a_step_has_islands() -> None:
    """`torch.amp.custom_bwd` opens one, as do hooks of libraries: what is sensitive there is float32 as in forward."""
    seen: list[torch.dtype] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # as torch documents it
            with torch.autocast("cpu", torch.bfloat16):
                seen.append(grad.bfloat16().softmax(-1).dtype)
            return grad

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return Noted.apply(model(batch)).float().square().mean()  # type: ignore[no-any-return, no-untyped-call]  # torch does not annotate it

    loss(generator(), torch.ones(2, 3)).backward()
    recipe = polyamp.Recipe(policy="mixed_bfloat16", optimizer=polyamp.sgd(0.1))
    polyamp.train_step(loss, recipe)(polyamp.init(generator(), recipe), torch.ones(2, 3))
    assert seen == [torch.bfloat16, torch.float32], "plain torch, and a step"
