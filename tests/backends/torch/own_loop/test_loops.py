"""Loops that are legal with torch's scaler: `polyamp_torch.GradScaler` gives the same bits and raises no alarm."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyamp
from polyamp_torch.own_loop.native_scaler import GradScaler
from polyamp_torch.own_loop.torch_only.scaler_checks import GradScalerError

INF = float("inf")

pytestmark = pytest.mark.usefixtures("host")


@dataclasses.dataclass
class Setting:
    """What a loop is given; `optimizer` and `batches` are the same for both scalers."""

    scaler: Any
    fused: bool

    def network(self, seed: int = 0, outputs: int = 3) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 0.1, fused=self.fused)

    def batches(self, count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(1)
        return [(torch.randn(5, 3, generator=random), torch.randn(5, 3, generator=random)) for _ in range(count)]

    def finish(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), y)


Loop = Callable[[Setting], list[nn.Module]]
LOOPS: list[Loop] = []


def legal(loop: Loop) -> Loop:
    LOOPS.append(loop)
    return loop


@legal
def gradient_penalty(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    for x, y in s.batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        scaled = torch.autograd.grad(s.scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / s.scaler.get_scale()
        norm = torch.stack([(grad * inverse).square().sum() for grad in scaled]).sum().sqrt()
        s.scaler.scale(loss + norm).backward()
        s.scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        s.finish(optimizer)
    return [model]


@legal
def two_models_two_losses(s: Setting) -> list[nn.Module]:
    a, b = s.network(0), s.network(1)
    first, second = s.optimizer(a.parameters()), s.optimizer(b.parameters())
    for x, y in s.batches():
        first.zero_grad()
        second.zero_grad()
        u, v = a(x), b(x)
        s.scaler.scale(functional.mse_loss(2 * u + 3 * v, y)).backward(retain_graph=True)
        s.scaler.scale(functional.mse_loss(3 * u - 5 * v, y)).backward()
        s.scaler.unscale_(first)
        s.finish(first, second)
    return [a, b]


@legal
def a_gan_whose_losses_reach_both(s: Setting) -> list[nn.Module]:
    """The generator's loss leaves gradients in the discriminator, stepped already or held back by requires_grad."""
    g, d = s.network(0), s.network(1, 1)
    ours, theirs = s.optimizer(g.parameters()), s.optimizer(d.parameters())
    for index, (x, y) in enumerate(s.batches(8)):
        theirs.zero_grad()
        s.scaler.scale(d(g(x).detach()).mean() - d(y).mean()).backward()
        s.scaler.unscale_(theirs)
        if index % 2:
            s.scaler.step(theirs)
        ours.zero_grad()
        d.requires_grad_(bool(index % 2))
        s.scaler.scale(-d(g(x)).mean()).backward()
        d.requires_grad_(True)
        s.scaler.unscale_(ours)
        s.finish(*([ours] if index % 2 else [ours, theirs]))
    return [g, d]


@legal
def sharpness_aware(s: Setting) -> list[nn.Module]:
    """update() after unscale_() alone; and an iteration that its owner leaves out."""
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    for index, (x, y) in enumerate(s.batches()):
        optimizer.zero_grad()
        s.scaler.scale(loss_of(model, x, y)).backward()
        s.scaler.unscale_(optimizer)
        moves = [(p, p.grad * 0.01) for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        s.scaler.update()
        if index == 2:
            continue
        with torch.no_grad():
            for p, move in moves:
                p.add_(move)
        s.scaler.scale(loss_of(model, x, y)).backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        s.finish(optimizer)
    return [model]


@legal
def one_graph_many_passes(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    for x, y in s.batches():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        once, twice = s.scaler.scale(loss), s.scaler.scale(loss)
        (once * 0.5).backward(retain_graph=True)
        once.backward(retain_graph=True)
        twice.backward()
        s.scaler.unscale_(optimizer)
        with torch.no_grad():
            s.scaler.scale(loss_of(model, x, y))  # a validation loss
        s.finish(optimizer)
    return [model]


@legal
def gradients_that_are_set_by_hand(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    parameters = dict(model.named_parameters())

    def scaled(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = s.scaler.scale(functional.mse_loss(torch.func.functional_call(model, values, (x,)), y))
        return result

    for index, (x, y) in enumerate(s.batches(9)):
        values = {name: p.detach() for name, p in parameters.items()}
        if index % 3 == 0:
            grads = torch.func.grad(scaled)(values, x, y)
        elif index % 3 == 1:
            each = torch.func.vmap(torch.func.grad(scaled), (None, 0, 0))(values, x, y)
            grads = {name: grad.mean(0) for name, grad in each.items()}
        else:
            found = torch.autograd.grad(s.scaler.scale(loss_of(model, x, y)), list(parameters.values()))
            grads = dict(zip(parameters, found, strict=True))
        for name, p in parameters.items():
            p.grad = grads[name]
        s.scaler.unscale_(optimizer)
        for p in parameters.values():
            p.grad = None if p.grad is None or p.numel() == 3 else p.grad * 0.5
        s.finish(optimizer)
    return [model]


@legal
def gradients_in_one_buffer(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    start = 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    for x, y in s.batches():
        flat.zero_()
        s.scaler.scale(loss_of(model, x, y)).backward()
        s.scaler.unscale_(optimizer)
        flat.clamp_(-0.1, 0.1)
        s.finish(optimizer)
    return [model]


@legal
def a_backward_pass_that_fails(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError

    for index, (x, y) in enumerate(s.batches()):
        optimizer.zero_grad()
        hidden = model[0](x)
        if index == 2:
            hidden.register_hook(fail)
        try:
            s.scaler.scale(functional.mse_loss(model[2](hidden.relu()), y)).backward()
        except MemoryError:
            continue
        s.finish(optimizer)
    return [model]


@legal
def steps_within_the_backward_pass(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizers = {p: s.optimizer([p]) for p in model.parameters()}

    def stepped(p: torch.Tensor) -> None:
        s.scaler.step(optimizers[p])
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    for x, y in s.batches():
        s.scaler.scale(loss_of(model, x, y)).backward()
        s.scaler.update()
    return [model]


@legal
def reentrant_checkpoints_after_unscale(s: Setting) -> list[nn.Module]:
    a, b = s.network(0), s.network(1)
    first, second = s.optimizer(a.parameters()), s.optimizer(b.parameters())
    for x, y in s.batches():
        first.zero_grad()
        second.zero_grad()
        s.scaler.scale(loss_of(a, x, y)).backward()
        s.scaler.unscale_(first)
        out: Any = checkpoint(b, x.requires_grad_(), use_reentrant=True)
        s.scaler.scale(functional.mse_loss(out, y)).backward()
        s.finish(first, second)
    return [a, b]


@legal
def parameters_that_come_and_go(s: Setting) -> list[nn.Module]:
    """A group is added, a layer frozen, and the scaler saved, loaded, pickled and copied on the way."""
    model = s.network()
    optimizer = s.optimizer(model[0].parameters())
    for index, (x, y) in enumerate(s.batches(8)):
        optimizer.zero_grad()
        s.scaler.scale(loss_of(model, x, y) * (INF if index == 3 else 1.0)).backward()
        s.finish(optimizer)
        if index == 2:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        if index == 4:
            model[0].requires_grad_(False)
            s.scaler.load_state_dict({**s.scaler.state_dict(), "scale": 4.0})
        if index == 6:
            s.scaler = copy.deepcopy(pickle.loads(pickle.dumps(s.scaler)))
    return [model]


@legal
def optimizers_that_take_turns(s: Setting) -> list[nn.Module]:
    a, b = s.network(0), s.network(1)
    first, second = s.optimizer(a.parameters()), s.optimizer(b.parameters())
    for index, (x, y) in enumerate(s.batches(8)):
        first.zero_grad()
        second.zero_grad()
        s.scaler.scale(functional.mse_loss(a(x) + b(x), y)).backward()
        s.finish(*[(first, second), (first,), (second,)][index % 3])
    return [a, b]


@legal
def a_loss_multiplied_by_hand(s: Setting) -> list[nn.Module]:
    """By the tensor of the scale, which is asked for every time, or once: the scaler writes it in place."""
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    s.scaler._lazy_init_scale_growth_tracker("cpu")
    held = s.scaler._scale
    for index, (x, y) in enumerate(s.batches(10)):
        optimizer.zero_grad()
        factor = (held, s.scaler._get_scale_async())[index % 2].clone()
        (loss_of(model, x, y) * factor * (INF if index == 3 else 1.0)).backward()
        s.finish(optimizer)
        assert held.item() == s.scaler.get_scale()
        if index == 5:
            s.scaler.update(256.0)
    return [model]


@legal
def updates_in_inference_mode(s: Setting) -> list[nn.Module]:
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    for index, (x, y) in enumerate(s.batches()):
        optimizer.zero_grad()
        s.scaler.scale(loss_of(model, x, y) * (INF if index == 3 else 1.0)).backward()
        s.scaler.step(optimizer)
        with torch.inference_mode():
            s.scaler.update()
    return [model]


@legal
def checked_by_hand(s: Setting) -> list[nn.Module]:
    """Without `step`: the flags are torch's private ones."""
    model = s.network()
    optimizer = s.optimizer(model.parameters())
    for index, (x, y) in enumerate(s.batches()):
        optimizer.zero_grad()
        s.scaler.scale(loss_of(model, x, y) * (INF if index == 2 else 1.0)).backward()
        bad = sum(flag.item() for flag in s.scaler._check_inf_per_device(optimizer).values())
        assert bad == (index == 2)
        if not bad:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= s.scaler.get_scale()
            optimizer.step()
        s.scaler.update()
    return [model]


class Slotted:
    """An optimizer of somebody's own, which can be neither hashed nor referenced weakly."""

    __slots__ = ("inner",)
    __hash__ = None  # type: ignore[assignment]  # what a dataclass has

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self) -> None:
        self.inner.step()


@legal
def optimizers_of_ones_own(s: Setting) -> list[nn.Module]:
    """One object for the whole run, and one made anew for every step."""
    model = s.network()
    inner = torch.optim.AdamW(model.parameters(), 0.1)
    whole: Any = Slotted(inner)
    for index, (x, y) in enumerate(s.batches()):
        inner.zero_grad()
        s.scaler.scale(loss_of(model, x, y) * (INF if index == 2 else 1.0)).backward()
        if index % 2:
            s.scaler.unscale_(whole)
        s.finish(whole if index % 3 else Slotted(inner))  # type: ignore[arg-type]  # it is no torch.optim.Optimizer
    return [model]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: str(loop.__name__))
def test_a_legal_loop_gives_the_same_bits(loop: Loop, fused: bool) -> None:
    made, scales = [], []
    for scaler in (torch.amp.GradScaler, GradScaler):
        setting = Setting(scaler("cpu", init_scale=1024.0, growth_interval=3), fused)
        made.append([p for module in loop(setting) for p in module.parameters()])
        scales.append(setting.scaler.state_dict()["scale"])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert scales[0] == scales[1]


@pytest.mark.parametrize("make", [list, tuple, collections.deque, set, lambda losses: dict(enumerate(losses)).values()])
def test_iterables_of_losses(make: Any) -> None:
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), GradScaler("cpu", init_scale=8.0)):
        p = nn.Parameter(torch.tensor([1.0]))
        losses = [p.sum(), 2.0 * p.sum()]
        sum(scaler.scale(make(losses))).backward()  # type: ignore[union-attr]  # a sum of tensors
        assert p.grad is not None
        assert p.grad.item() == 24.0
        assert [[part.item() for part in parts] for parts in scaler.scale([iter([losses[0]])])] == [[8.0]]  # type: ignore[attr-defined,list-item]  # nested iterators
    assert scaler.scale({"a": {"text"}, "b": "text"})["b"] == "text"
    assert scaler.scale(()) == ()


@pytest.mark.parametrize("wrong", [3.0, None, "loss"])
def test_what_holds_no_tensors_is_refused(wrong: Any) -> None:
    with pytest.raises(GradScalerError, match=r"scale\(\) takes a tensor or a container of tensors. Received: "):
        GradScaler("cpu").scale(wrong)


def test_a_replayed_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scale` is called once, while the graph is captured; replays run its kernels on the tensor of then."""
    scaler = GradScaler(polyamp.LossScaler(init_scale=8.0, growth_interval=2))
    p, q = nn.Parameter(torch.tensor([16.0])), nn.Parameter(torch.tensor([16.0]))
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
    multiplied: list[torch.Tensor] = []

    class Captured(torch.Tensor):
        is_cuda = True

        def __mul__(self, scale: Any) -> Any:
            multiplied.append(scale)
            return torch.Tensor(self)

    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        scaler.scale(torch.zeros(()).as_subclass(Captured))
    seen = []
    for gain in (1.0, 1.0, INF, 1.0):
        first.zero_grad()
        second.zero_grad()
        (gain * (p + q).sum() * multiplied[0].clone()).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        seen.append((p.item(), q.item(), scaler.get_scale()))
    assert seen == [(15.0, 15.0, 8.0), (14.0, 14.0, 16.0), (14.0, 14.0, 8.0), (13.0, 13.0, 8.0)]


def test_a_fused_optimizer_without_gradients_does_nothing() -> None:
    """As in torch, so that one of two may have none; alone it is an error of `update`."""
    for scaler in (torch.amp.GradScaler("cpu"), GradScaler("cpu")):
        p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        used, unused = torch.optim.SGD([p], 0.5, fused=True), torch.optim.SGD([q], 0.5, fused=True)
        scaler.scale(p.sum()).backward()
        scaler.step(unused)
        scaler.step(used)
        scaler.update()
        assert (p.item(), q.item()) == (0.5, 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(unused)
        with pytest.raises((AssertionError, GradScalerError), match=r"No inf checks|no step\(\) with gradients since"):
            scaler.update()


@pytest.mark.parametrize("freeze", [False, True])
def test_the_gradients_of_a_partner_that_stops_do_not_hold_the_other_up(freeze: bool) -> None:
    """The partner's last gradients were infinite and stay where they are."""
    p, q = nn.Parameter(torch.tensor([9.0])), nn.Parameter(torch.tensor([9.0]))
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
    scaler = GradScaler(polyamp.LossScaler(init_scale=1024.0))
    for gain in (1.0, INF):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(p.sum() + (q * gain).sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    q.requires_grad_(not freeze)
    for _ in range(4):
        first.zero_grad()
        scaler.scale(p.sum()).backward()
        scaler.step(first)
        scaler.update()
    assert (p.item(), q.item()) == (5.0, 8.0), "one step more is skipped, and then the two are no longer together"
    assert scaler.get_scale() == 256.0


def test_an_update_without_a_step_is_no_skip() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler("cpu")
    for gain, steps, skipped in ((INF, True, True), (1.0, False, False)):
        optimizer.zero_grad()
        scaler.scale((p * gain).sum()).backward()
        scaler.unscale_(optimizer)
        if steps:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped is skipped
    optimizer.zero_grad()
    scaler.scale((p * INF).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update(64.0)
    assert scaler.step_was_skipped, "setting the scale is no iteration"


@pytest.mark.parametrize("fused", [False, True])
def test_a_report_after_update_has_the_scale_of_the_gradients(fused: bool) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 1.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**-10)
    scaler.scale(p.sum()).backward()
    p.grad = torch.tensor([1e38, 3e35])  # divided by half the scale, the second would be infinite too
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**-11
    report = scaler.report()
    assert (report.scale, [(row.inf, row.nan) for row in report]) == (2.0**-10, [(1, 0)])


def test_nothing_is_kept_alive() -> None:
    scaler = GradScaler(polyamp.LossScaler())

    def train() -> list[weakref.ref[Any]]:
        model = nn.Linear(3, 3)
        scaler.watch(model)
        optimizers = [torch.optim.AdamW([p], 0.1) for p in model.parameters()]
        for gain in (1.0, INF):
            scaler.scale(model(torch.ones(1, 3)).sum() * gain).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        return [weakref.ref(item) for item in (model, *model.parameters(), *optimizers, model.weight.grad)]

    references = train()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert len(scaler.report()) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_forgotten_scales_are_still_found(fused: bool) -> None:
    """Reading the scale as a number, as a log does, is no multiplication by it."""
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], 0.5, fused=fused)
    scaler = GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.get_scale()
    scaler.state_dict()
    repr(scaler)
    with pytest.raises(GradScalerError, match=r"scale\(\) was not since the last step"):
        scaler.step(optimizer)


def test_a_grad_scale_of_the_users_own_is_divided_by_as_well() -> None:
    """Fused optimizers may have one already; the quotient is what must be finite."""
    for value, skipped in ((1e34, False), (1e36, True)):
        p = nn.Parameter(torch.zeros(1))
        optimizer: Any = torch.optim.SGD([p], 2.0**-126, fused=True)
        scaler = GradScaler("cpu", init_scale=1024.0)
        scaler.scale(p.sum()).backward()
        p.grad = torch.tensor([value])
        optimizer.grad_scale = torch.tensor(2.0**-20)
        scaler.step(optimizer)
        assert scaler.step_was_skipped is skipped
        assert (p.item() == 0.0) is skipped


def below_one_by_backing_off(scaler: GradScaler) -> None:
    p = nn.Parameter(torch.ones(1))
    for _ in range(3):
        scaler.scale((p * INF).sum()).backward()
        scaler.step(torch.optim.SGD([p], 1.0, fused=True))
        scaler.update()


def below_one_by_update(scaler: GradScaler) -> None:
    scaler.scale(torch.ones(()))
    scaler.update(0.25)


def below_one_by_loading(scaler: GradScaler) -> None:
    scaler.scale(torch.ones(()))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 0.25})


def below_one_in_place(scaler: GradScaler) -> None:
    scaler._lazy_init_scale_growth_tracker("cpu")
    assert scaler._scale is not None
    scaler._scale.fill_(0.25)


def below_one_by_assignment(scaler: GradScaler) -> None:
    scaler._scale = torch.tensor(0.25)


@pytest.mark.parametrize(
    "lower",
    [below_one_by_backing_off, below_one_by_update, below_one_by_loading, below_one_in_place, below_one_by_assignment],
)
@pytest.mark.parametrize("fused", [False, True])
def test_however_the_scale_came_below_one_the_flag_is_exact(lower: Callable[[GradScaler], None], fused: bool) -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    lower(scaler)
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], 1.0, fused=fused)
    scaler.scale(p.sum()).backward()
    assert p.grad is not None
    assert p.grad.item() == 0.25
    p.grad = torch.tensor([2e38])  # finite, and infinite once it is divided by the scale
    scaler.step(optimizer)
    assert scaler.step_was_skipped
    assert p.item() == 0.0


def test_gradients_keep_the_scale_that_made_them() -> None:
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first, second = torch.optim.SGD([p], 1.0), torch.optim.SGD([q], 1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(-(p + q).sum()).backward()
    scaler.step(first)
    scaler.update(64.0)
    scaler.step(second)
    assert (p.item(), q.item()) == (1.0, 1.0)


def test_the_scale_that_is_first_read_after_an_update_is_the_one_that_counts() -> None:
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], 1.0)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(-p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler._scale is not None
    (-p.sum() * scaler._scale).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    scaler.step(optimizer)
    assert p.item() == 2.0
