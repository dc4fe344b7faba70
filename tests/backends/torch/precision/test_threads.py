"""Regions and bound models in several threads, and under `torch.nn.DataParallel`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import parallel_apply

import polyamp
from polyamp.errors import UnsupportedError
from polyamp_torch.precision.autocast import autocast, carried
from polyamp_torch.precision.policy_module import PolicyModule

BFLOAT16, FLOAT16 = polyamp.Policy("mixed_bfloat16"), polyamp.Policy("mixed_float16")
X = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
Dtypes = tuple[torch.dtype, torch.dtype]


def dtypes() -> Dtypes:
    product = X @ X
    return product.dtype, product.exp().dtype


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at once, each in a thread of its own; an error in one is raised here."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:  # noqa: BLE001  # raised again below
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_trap_autocast_does_not_reach_a_users_thread() -> None:
    with torch.autocast("cpu", torch.float16):
        assert in_threads(dtypes) == [(torch.float32, torch.float32)], "plain torch"
    with autocast(FLOAT16, "cpu"):
        assert in_threads(carried(dtypes)) == [(torch.float16, torch.float32)]


def test_carried_takes_what_is_open_where_it_is_made() -> None:
    with torch.autocast("cpu", torch.float16):
        plain, cache = carried(dtypes), carried(torch.is_autocast_cache_enabled)
    with autocast(BFLOAT16, "cpu"):
        no_cache = carried(torch.is_autocast_cache_enabled)
        mixed = carried(dtypes)
        with torch.autocast("cpu", enabled=False):
            off = carried(dtypes)
        with autocast(BFLOAT16.replace(op_list="native"), "cpu"):
            native = carried(dtypes)
    outside = carried(dtypes)
    want = [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ]
    works = (plain, mixed, off, native, outside)
    assert in_threads(*works) == want
    with autocast(FLOAT16, "cpu"):
        assert [work() for work in works] == want
        assert (cache(), no_cache()) == (True, False)
        assert dtypes() == (torch.float16, torch.float32)


def test_one_region_object_in_two_threads_at_once() -> None:
    region, both = autocast(BFLOAT16, "cpu"), threading.Barrier(2, timeout=30)

    def work() -> list[Dtypes]:
        found = []
        for _ in range(20):
            both.wait()
            with region:
                both.wait()
                found.append(dtypes())
            found.append(dtypes())
        return found

    expected = [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)] * 20
    assert in_threads(work, work) == [expected, expected]


def test_trap_another_threads_open_block_serves_stale_weights() -> None:
    """torch's weight cache belongs to the process: a thread that holds a block open fills it for all others."""

    def product(region: Callable[[], Any]) -> float:
        weight = nn.Parameter(torch.eye(4))
        opened, changed = threading.Event(), threading.Event()

        def holder() -> None:
            with region():
                functional.linear(X, weight)
                opened.set()
                changed.wait(30)

        def trainer() -> float:
            opened.wait(30)
            with torch.no_grad():
                weight.mul_(2.0)
            with region():
                result = functional.linear(X, weight).float().abs().sum().item()
            changed.set()
            return result

        return float(in_threads(holder, trainer)[1])

    right = 2.0 * X.bfloat16().float().abs().sum().item()
    assert product(lambda: torch.autocast("cpu", torch.bfloat16)) == pytest.approx(right / 2), "plain torch"
    assert product(lambda: autocast(BFLOAT16, "cpu")) == pytest.approx(right)


class Model(nn.Module):
    """Two layers that note the dtypes inside, and meet the other thread between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.meet: Callable[[], Any] = lambda: None
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.meet()
        y: torch.Tensor = self.second(h.relu())
        self.seen.append((h.dtype, y.dtype, y.exp().dtype))
        return y


OVERRIDDEN = BFLOAT16.replace(overrides={"second": "float32"})
CAST = BFLOAT16.replace(mode="cast")


@pytest.mark.parametrize("policy", [BFLOAT16, OVERRIDDEN, CAST, CAST.replace(overrides={"second": "float32"})])
def test_two_threads_call_one_bound_model_at_once(policy: polyamp.Policy) -> None:
    alone = Model()
    policy.autocast(alone)(X).square().sum().backward()
    model = Model()
    bound = policy.autocast(model)
    both = threading.Barrier(2, timeout=30)
    model.meet = both.wait  # type: ignore[assignment]  # its result is not looked at

    def forward(grad: bool) -> torch.Tensor | None:
        with torch.enable_grad() if grad else torch.no_grad():
            outputs = [bound(X) for _ in range(10)]
        return outputs[-1] if grad else None

    outputs = in_threads(lambda: forward(True), lambda: forward(False))
    assert set(model.seen) == set(alone.seen)
    outputs[0].square().sum().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got.grad, want.grad)  # type: ignore[arg-type]  # both have one
    assert "forward" not in model.second.__dict__
    assert all(isinstance(p, nn.Parameter) for p in (model.first.weight, model.second.bias))


def test_cast_copies_follow_masters_that_another_thread_changes() -> None:
    model = Model()
    bound: Any = CAST.autocast(model)
    assert isinstance(bound, PolicyModule)
    with bound.installed():
        with torch.no_grad():
            for master in bound._installation.casts.places:
                master.master.zero_()
        (output,) = in_threads(lambda: bound(X))
    assert output.abs().sum().item() == 0.0


@pytest.fixture
def parallel_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`parallel_apply` with the CPU in an accelerator's place; its threads and what it hands them are torch's own."""

    class Stream(contextlib.nullcontext[None]):
        pass

    def nothing(*_: Any) -> Stream:
        return Stream()

    if hasattr(torch.accelerator, "device_index"):
        monkeypatch.setattr(torch.accelerator, "current_stream", nothing)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "device_index", nothing)
    else:  # older versions know CUDA only
        for name in ("current_stream", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, nothing)
        monkeypatch.setattr(torch.amp, "autocast", lambda _, **options: torch.autocast("cpu", **options))
    monkeypatch.setattr(torch, "is_autocast_enabled", _enabled(torch.is_autocast_enabled))


def _enabled(real: Callable[..., bool]) -> Callable[..., bool]:
    return lambda kind="cpu": real(kind)  # asked without a device, it means an accelerator's


class OnCpu(nn.DataParallel[Any]):
    """DataParallel that splits a batch in two on the CPU: its devices have to be accelerators otherwise."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        halves = inputs[0].chunk(2)
        replicas = [_replica(self.module) for _ in halves]
        return torch.cat(self.parallel_apply(replicas, [(half,) for half in halves], [{}] * 2))


def _replica(module: nn.Module) -> nn.Module:
    """One module's copy as `torch.nn.parallel.replicate` makes it, on the device of the original."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, copied in copies.items():
        for name, child in part._modules.items():
            copied._modules[name] = copies.get(child) if child is not None else None  # type: ignore[assignment]  # torch's
        for name, parameter in part._parameters.items():
            setattr(copied, name, None if parameter is None else parameter * 1.0)
    return copies[module]


@pytest.mark.usefixtures("parallel_cpu")
def test_trap_parallel_apply_carries_enabled_and_no_dtype() -> None:
    works = [lambda _: dtypes()] * 2
    with torch.autocast("cpu", torch.float16):
        plain = parallel_apply(works, [X, X], None, [0, 0])  # type: ignore[arg-type]  # functions will do
    assert plain == [(torch.bfloat16, torch.bfloat16)] * 2, "torch's default dtype, not the region's"
    with autocast(FLOAT16, "cpu"):
        got = parallel_apply([carried(work) for work in works], [X, X], None, [0, 0])  # type: ignore[arg-type]  # the same
    assert got == [(torch.float16, torch.float32)] * 2


@pytest.mark.usefixtures("parallel_cpu")
@pytest.mark.parametrize("overrides", [{}, {"second": "float32"}])
def test_data_parallel_runs_under_the_policy(overrides: dict[str, str]) -> None:
    policy = FLOAT16.replace(overrides=overrides)
    alone = Model()
    want = policy.replace(overrides={p.removeprefix("module/"): d for p, d in overrides.items()}).autocast(alone)(X)
    model = Model()
    wrapper = OnCpu(model)
    wrapper.device_ids = [0, 0]
    got = policy.autocast(wrapper)(X)
    assert model.seen == alone.seen * 2, "a replica's list is the original's"
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    assert model.second.weight.grad is not None
    assert "parallel_apply" not in wrapper.__dict__


def test_float32_matmul_of_two_threads_at_once() -> None:
    """Saved and restored by each thread for itself, it stayed changed when two regions overlapped."""
    before = torch.get_float32_matmul_precision()
    wanted = "medium" if before != "medium" else "high"
    policy = BFLOAT16.replace(float32_matmul=wanted)
    entered, leave, seen = threading.Event(), threading.Event(), []

    def overlap() -> None:
        with autocast(policy, "cpu"):
            entered.set()
            leave.wait(20)
            seen.append(torch.get_float32_matmul_precision())

    def other() -> None:
        try:
            with autocast(policy.replace(float32_matmul="highest"), "cpu"):
                pass
        except UnsupportedError as error:
            seen.append(str(error))

    thread = threading.Thread(target=overlap)
    with autocast(policy, "cpu"):
        thread.start()
        assert entered.wait(20)
        refused = threading.Thread(target=other)
        refused.start()
        refused.join(20)
    leave.set()
    thread.join(20)
    assert seen[0].startswith("float32_matmul is one setting of the whole process")
    assert seen[1:] == [wanted]
    assert torch.get_float32_matmul_precision() == before
