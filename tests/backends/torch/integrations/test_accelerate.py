"""polyamp's `Accelerator` on the real `accelerate`: dtypes, accumulation, clipping, schedulers, skips, checkpoints."""

from __future__ import annotations

import copy
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, DistributedType, GradScalerKwargs
from torch import nn

import polyamp
import polyamp_torch
from polyamp.errors import BackendNotInstalledError, GradientError, PolicyError, UnsupportedError
from polyamp_torch.accelerate import Accelerator
from polyamp_torch.integrations.accelerate import configure_sharding

INF = float("inf")
SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=4, on_stuck="ignore")


class Net(nn.Module):
    """Two layers and a batch norm; records the dtypes that it computes in."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        out = self.head(self.norm(hidden))
        self.dtypes = [hidden.dtype, out.dtype]
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


def batches(gains: list[float], first: int = 0) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(first + len(gains), 3, 4, generator=generator)[first:]
    data = torch.utils.data.TensorDataset(x, torch.tensor(gains))
    return torch.utils.data.DataLoader(data, batch_size=1)


class Loop:
    """The loop of Accelerate's documentation over gains, of which an infinite one overflows."""

    def __init__(self, made: Any, make: Any = sgd, *, clip: float | None = None) -> None:
        self.made, self.clip, self.net = made, clip, Net()
        optimizer = make(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.model, self.optimizer, self.scheduler = made.prepare(self.net, optimizer, scheduler)
        self.weights: list[torch.Tensor] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []

    def run(self, gains: list[float], first: int = 0) -> Loop:
        for x, gain in self.made.prepare(batches(gains, first)):
            with self.made.accumulate(self.model):
                self.made.backward((self.model(x[0]) * gain).pow(2).mean())
                if self.made.sync_gradients and self.clip is not None:
                    self.norms.append(float(self.made.clip_grad_norm_(self.model.parameters(), self.clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.weights.append(self.net.first.weight.detach().clone())
            self.skipped.append(self.optimizer.step_was_skipped)
            self.scales.append(self.made.scaler.get_scale() if self.made.scaler is not None else 1.0)
            self.rates.append(self.scheduler.get_last_lr()[0])
        return self


def ours(policy: Any = "mixed_float16", scaler: Any = SCALER, **options: Any) -> Accelerator:
    return Accelerator(policy, scaler, cpu=True, **options)


@pytest.mark.parametrize(("policy", "word"), [("mixed_float16", "fp16"), ("mixed_bfloat16", "bf16"), ("float32", "no")])
def test_operations_run_in_the_policys_dtype(policy: str, word: str) -> None:
    loop = Loop(Accelerator(policy, cpu=True)).run([1.0])
    dtype = getattr(torch, polyamp.Policy(policy).compute)
    assert loop.net.dtypes == [dtype, dtype]
    assert loop.model(torch.ones(2, 4)).dtype == torch.float32
    assert {p.dtype for p in loop.model.parameters()} == {torch.float32}
    assert loop.made.mixed_precision == word
    with loop.made.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
        with loop.made.autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_trap_float16_on_the_cpu_is_float32_without_a_word() -> None:
    plain = Loop(accelerate.Accelerator(mixed_precision="fp16", cpu=True)).run([1.0])
    assert plain.made.mixed_precision == "fp16"
    assert plain.net.dtypes == [torch.float32, torch.float32]
    assert plain.made.scaler is None
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Loop(ours()).run([1.0]).net.dtypes == [torch.float16, torch.float16]


def test_a_skipped_step_changes_nothing_and_the_scale_follows_the_rule() -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0, 1.0, INF, INF, 1.0]
    loop = Loop(ours()).run(gains)
    assert loop.scales == [16.0, 8.0, 8.0, 8.0, 8.0, 16.0, 8.0, 4.0, 4.0]
    assert loop.skipped == [gain == INF for gain in gains]
    assert [torch.equal(a, b) for a, b in zip(loop.weights, loop.weights[1:], strict=False)] == loop.skipped[1:]
    assert [a == b for a, b in zip(loop.rates, loop.rates[1:], strict=False)] == loop.skipped[1:]
    assert int(loop.net.norm.num_batches_tracked) == gains.count(1.0)


def test_accumulation_with_clipping_skips_the_whole_window() -> None:
    loop = Loop(ours(gradient_accumulation_steps=2), clip=0.1).run([1.0, 1.0, INF, 1.0, 1.0, 1.0])
    assert loop.scales == [16.0, 16.0, 16.0, 8.0, 8.0, 8.0]
    assert torch.equal(loop.weights[1], loop.weights[3])
    assert not torch.equal(loop.weights[3], loop.weights[5])
    assert int(loop.net.norm.num_batches_tracked) == 4
    assert loop.rates == [0.1, 0.05, 0.05, 0.05, 0.05, 0.025]


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_power_of_two_scale_gives_plain_accelerates_parameters_bit_for_bit(make: Any, clip: float | None) -> None:
    plain = Loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), make, clip=clip).run([1.0] * 4)
    for scaler in (polyamp.LossScaler.static(1024.0), None):
        loop = Loop(ours("float32", scaler, gradient_accumulation_steps=2), make, clip=clip).run([1.0] * 4)
        assert (loop.norms, loop.rates) == (plain.norms, plain.rates)
        for name, value in plain.net.state_dict().items():
            assert torch.equal(loop.net.state_dict()[name], value), name


def overflowing(optimizer: torch.optim.Optimizer, scaler: Any) -> Any:
    """Accelerate's own optimizer after one step whose gradients overflowed."""
    accelerate.Accelerator(cpu=True)
    prepared = AcceleratedOptimizer(optimizer, scaler=scaler)
    weight = optimizer.param_groups[0]["params"][0]
    scaler.scale((weight * INF).sum()).backward()
    prepared.step()
    return prepared


def test_trap_the_skip_of_a_fused_optimizer_is_not_noticed(host: str) -> None:
    """On an accelerator the kernels are called with the flag; on the CPU polyamp reads it and calls nothing."""
    plain = overflowing(fused([nn.Parameter(torch.ones(2))]), torch.amp.GradScaler("cpu"))
    assert not plain.step_was_skipped
    loop = Loop(ours(), fused).run([1.0, INF, 1.0])
    assert loop.skipped == [False, True, False]
    assert loop.rates == [0.005, 0.005, 0.0025]


def test_trap_two_optimizers_after_clipping_are_unscaled_twice() -> None:
    """Clipping unscales all optimizers; the first one's step then ends the iteration, and the second starts anew."""
    accelerate.Accelerator(cpu=True)
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    prepared = [AcceleratedOptimizer(torch.optim.SGD([p], 1.0), scaler=scaler) for p in (first, second)]
    scaler.scale((first + second).sum()).backward()
    for item in prepared:
        scaler.unscale_(item.optimizer)
    for item in prepared:
        item.step()
    assert first.tolist() == [0.0, 0.0]
    assert second.tolist() == [1.0 - 1.0 / 16.0] * 2, "a sixteenth of the update"

    made = ours(scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=1))
    net = Net()
    optimizers = made.prepare(*[torch.optim.SGD(part.parameters(), 1.0) for part in (net.first, net.head)])
    before = net.head.bias.detach().clone()
    made.backward(made.prepare(net)(torch.ones(2, 4)).sum())
    made.clip_grad_norm_(net.parameters(), 1e3)
    for item in optimizers:
        item.step()
    torch.testing.assert_close(before - net.head.bias, torch.full((2,), 2.0))
    assert made.scaler.get_scale() == 32.0, "one adjustment"


@pytest.mark.parametrize("given", [lambda optimizers: None, tuple, list])
def test_unscale_gradients_takes_all_optimizers_or_some(given: Any) -> None:
    made = ours()
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizers = made.prepare(*[torch.optim.SGD([p], 1.0) for p in parameters])
    made.backward(torch.cat([*parameters]).sum())
    made.unscale_gradients(optimizers[0])
    assert [float(p.grad) for p in parameters] == [1.0, 16.0, 16.0]  # type: ignore[arg-type]  # they have one
    made.unscale_gradients(given(optimizers))
    assert [float(p.grad) for p in parameters] == [1.0, 1.0, 1.0]  # type: ignore[arg-type]  # as above


def test_the_backward_pass_has_the_policys_precision_of_float32_products() -> None:
    seen: list[str] = []
    loop = Loop(ours(polyamp.Policy("float32", float32_matmul="medium"), None))
    loss = loop.model(torch.ones(2, 4)).sum()
    loss.register_hook(lambda _: seen.append(torch.get_float32_matmul_precision()))
    loop.made.backward(loss)
    assert (seen, torch.get_float32_matmul_precision()) == (["medium"], "highest")


def test_resuming_from_a_saved_state_equals_not_stopping(tmp_path: Path) -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0]
    straight = Loop(ours()).run(gains)
    straight.made.save_state(str(tmp_path))
    straight.run(gains, first=5)
    resumed = Loop(ours())
    resumed.made.load_state(str(tmp_path))
    assert resumed.made.scaler.get_scale() == 8.0
    resumed.run(gains, first=5)
    assert resumed.scales == straight.scales[5:]
    assert resumed.rates == straight.rates[5:]
    for name, value in straight.net.state_dict().items():
        assert torch.equal(resumed.net.state_dict()[name], value), name


def test_the_model_comes_out_as_it_went_in() -> None:
    made, net = ours(polyamp.Policy("mixed_float16", overrides={"head": "float32"})), Net()
    prepared = made.prepare(net)
    prepared(torch.ones(2, 4))
    assert net.dtypes == [torch.float16, torch.float32]
    assert made.prepare(prepared) is prepared
    clone = copy.deepcopy(prepared)
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    assert clone(torch.randn(2, 4)).abs().sum() > 0.0, "a copy computes with its own parameters"
    assert clone.dtypes == [torch.float16, torch.float32], "and with overrides of its own"
    assert made.unwrap_model(prepared) is net
    assert made.unwrap_model(prepared, keep_fp32_wrapper=False) is net
    for part in net.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    assert "forward" not in vars(net)
    net(torch.ones(2, 4))
    assert net.dtypes == [torch.float32, torch.float32]


def test_a_model_is_under_one_policy_at_a_time() -> None:
    net = Net()
    first = ours()
    first.prepare(net)
    second = ours("mixed_bfloat16")
    with pytest.raises(PolicyError, match="already prepared under"):
        second.prepare(net)
    first.free_memory()
    second.prepare(net)(torch.ones(2, 4))
    assert net.dtypes == [torch.bfloat16, torch.bfloat16]


def test_a_new_accelerator_puts_back_the_statistics_of_a_model_prepared_before() -> None:
    """As in a notebook whose cell runs again; the policy is the same, the scaler is another."""
    net = Net()
    ours().prepare(net)
    made = ours()
    model, optimizer = made.prepare(net, sgd(net.parameters()))
    for gain, count in ((1.0, 1), (INF, 1)):
        made.backward((model(torch.randn(2, 4)) * gain).sum())
        optimizer.step()
        assert net.state_dict()["norm.num_batches_tracked"] == count
    assert model(torch.ones(2, 4)).dtype == torch.float32
    assert net.dtypes == [torch.float16, torch.float16]
    before = len(net._forward_pre_hooks)
    made.free_memory()
    assert len(net._forward_pre_hooks) == before - 1


def test_a_forward_of_the_users_own_is_put_back() -> None:
    made, net = ours(), Net()
    vars(net)["forward"] = own = lambda x: net.first(x)
    assert made.prepare(net)(torch.ones(2, 4)).dtype == torch.float32
    made.unwrap_model(net, keep_fp32_wrapper=False)
    assert vars(net)["forward"] is own


def test_a_compiled_model_comes_out_as_it_went_in() -> None:
    made, net = ours(dynamo_backend="aot_eager"), Net()
    prepared = made.prepare(net)
    assert prepared is not net
    assert "forward" in vars(net)
    made.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert "forward" not in vars(net)


def test_what_accelerate_cannot_honour_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="Received: mode='cast'"):
        ours(polyamp.Policy("mixed_float16", mode="cast"))
    with pytest.raises(UnsupportedError, match="Received: param='bfloat16'"):
        ours("bf16-true")
    with pytest.raises(polyamp.errors.RecipeError, match="scale the loss a second time"):
        Accelerator("mixed_float16", torch.amp.GradScaler("cpu"), cpu=True)  # type: ignore[arg-type]  # refused
    with pytest.raises(PolicyError, match="Received: mixed_precision='bf16'"):
        ours(mixed_precision="bf16")
    with pytest.raises(PolicyError, match="what GradScalerKwargs would"):
        ours(kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    with pytest.raises(PolicyError, match="cache_enabled"), ours().autocast(AutocastKwargs(cache_enabled=True)):
        pass
    with pytest.raises(UnsupportedError, match="LBFGS"):
        ours().prepare(torch.optim.LBFGS(Net().parameters()))
    attention = nn.MultiheadAttention(4, 2)
    made = ours(polyamp.Policy("mixed_float16", overrides={"out_proj": "float32"}))
    with pytest.raises(UnsupportedError, match="never called as a module"):
        made.prepare(attention)(*[torch.ones(2, 1, 4)] * 3)
    with pytest.raises(UnsupportedError, match=r"under DistributedDataParallel or with FSDP2\. Received: .*DEEPSPEED"):
        configure_sharding(SimpleNamespace(distributed_type=DistributedType.DEEPSPEED), None)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(PolicyError, match="Launch with --mixed_precision=fp16"):
        ours()


def test_without_accelerate_the_error_holds_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(BackendNotInstalledError, match=r'pip install "polyamp\[accelerate\]"'):
        runpy.run_path(str(Path(polyamp_torch.__file__).parent / "integrations" / "accelerate.py"))


@pytest.mark.parametrize("make", [sgd, fused])
def test_a_step_without_gradients_is_refused(make: Any) -> None:
    """At the step, not by the update that waits for the next backward pass."""
    accelerator = Accelerator("mixed_float16", SCALER, cpu=True)
    model, optimizer = accelerator.prepare(net := Net(), make(net.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.zero_grad()
    with pytest.raises(GradientError, match="Run a backward pass first"):
        optimizer.step()
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    assert not optimizer.step_was_skipped
