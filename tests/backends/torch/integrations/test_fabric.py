"""polyamp's precision plugin in a real `lightning.Fabric`: dtypes, inputs, skips, clipping, checkpoints."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as TheirPlugin
from torch import nn

import polyamp
from polyamp.errors import PolicyError, UnsupportedError
from polyamp_torch.lightning import FabricPrecision

INF = float("inf")
SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=4, on_stuck="ignore")


class Net(nn.Module):
    """Two layers and a batch norm; records the dtypes that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        out = self.head(self.norm(hidden))
        self.dtypes = [x.dtype, hidden.dtype, out.dtype]
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


class Loop:
    """A Fabric loop over gains, of which an infinite one overflows."""

    def __init__(self, plugin: Any, make: Any = sgd, *, clip: float | None = None) -> None:
        self.plugin, self.clip = plugin, clip
        self.fabric = Fabric(accelerator="cpu", plugins=plugin)
        self.net = Net()
        self.model, self.optimizer = self.fabric.setup(self.net, make(self.net.parameters()))
        self.weights: list[torch.Tensor] = []
        self.skipped: list[bool] = []
        self.scales: list[float] = []

    def run(self, gains: list[float], first: int = 0) -> Loop:
        for i, gain in enumerate(gains, start=first):
            self.optimizer.zero_grad()
            self.fabric.backward((self.model(batch(i)) * gain).pow(2).mean())
            if self.clip is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.clip, error_if_nonfinite=False)
            self.optimizer.step()
            self.weights.append(self.net.first.weight.detach().clone())
            self.skipped.append(getattr(self.plugin, "step_was_skipped", False))
            self.scales.append(self.plugin.scaler.get_scale() if self.plugin.scaler is not None else 1.0)
        return self


def ours(policy: Any = "mixed_float16", scaler: Any = SCALER) -> FabricPrecision:
    return FabricPrecision(policy, scaler, device="cpu")


def theirs() -> TheirPlugin:
    return TheirPlugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))


@pytest.mark.parametrize(("policy", "word"), [("mixed_float16", "16-mixed"), ("mixed_bfloat16", "bf16-mixed")])
def test_operations_run_in_the_policys_dtype(policy: str, word: str) -> None:
    loop = Loop(FabricPrecision(policy, device="cpu"))
    output = loop.model(batch(0))
    dtype = getattr(torch, polyamp.Policy(policy).compute)
    assert loop.net.dtypes == [torch.float32, dtype, dtype]
    assert output.dtype == torch.float32
    assert loop.plugin.precision == word
    with loop.fabric.autocast():
        assert loop.net.first(batch(0)).dtype == dtype


def test_trap_inputs_beyond_float16_become_inf() -> None:
    class Seconds(nn.Linear):
        """Takes the time in seconds, which it rescales itself."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x / 1e6)

    outputs = []
    for plugin in (theirs(), ours()):
        fabric = Fabric(accelerator="cpu", plugins=plugin)
        model = fabric.setup(Seconds(1, 1))
        outputs.append(float(model(torch.tensor([[100_000.0]])).detach()))
    assert abs(outputs[0]) == INF
    assert abs(outputs[1]) < 2.0


def test_a_skipped_step_changes_nothing_and_the_scale_follows_the_rule() -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0, 1.0, INF, INF, 1.0]
    loop = Loop(ours()).run(gains)
    assert loop.scales == [16.0, 8.0, 8.0, 8.0, 8.0, 16.0, 8.0, 4.0, 4.0]
    assert loop.skipped == [gain == INF for gain in gains]
    assert [torch.equal(a, b) for a, b in zip(loop.weights, loop.weights[1:], strict=False)] == loop.skipped[1:]
    assert int(loop.net.norm.num_batches_tracked) == gains.count(1.0)


def test_trap_a_skipped_step_moves_batch_norm() -> None:
    plain, loop = (Loop(plugin).run([1.0]) for plugin in (theirs(), ours()))
    before = loop.net.norm.running_mean.clone()  # type: ignore[union-attr]  # it tracks statistics
    assert torch.equal(plain.net.norm.running_mean, before)  # type: ignore[arg-type]  # as above
    for item in (plain, loop):
        item.run([INF], first=1)
    assert not torch.equal(plain.net.norm.running_mean, before)  # type: ignore[arg-type]  # as above
    assert torch.equal(loop.net.norm.running_mean, before)  # type: ignore[arg-type]  # as above


def test_trap_fused_optimizers_cannot_be_clipped() -> None:
    with pytest.raises(NotImplementedError, match="clipping is not implemented"):
        Loop(theirs(), fused, clip=0.1).run([1.0])
    loop = Loop(ours(), fused, clip=0.1).run([1.0, INF, 1.0])
    assert loop.skipped == [False, True, False]
    assert torch.equal(loop.weights[0], loop.weights[1])


@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_power_of_two_scale_gives_plain_fabrics_parameters_bit_for_bit(make: Any, clip: float | None) -> None:
    plugin = ours("float32", polyamp.LossScaler.static(1024.0))
    scaled, off = Loop(plugin, make, clip=clip), Loop(ours("float32"), make, clip=clip)
    plain = Fabric(accelerator="cpu")
    net = Net()
    model, optimizer = plain.setup(net, make(net.parameters()))
    for i in range(3):
        optimizer.zero_grad()
        plain.backward(model(batch(i)).pow(2).mean())
        if clip is not None:
            plain.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
    for loop in (scaled.run([1.0] * 3), off.run([1.0] * 3)):
        for name, value in net.state_dict().items():
            assert torch.equal(loop.net.state_dict()[name], value), name


def test_resuming_from_a_checkpoint_equals_not_stopping(tmp_path: Path) -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0]
    straight = Loop(ours()).run(gains + gains)
    first = Loop(ours()).run(gains)
    state = {"model": first.model, "optimizer": first.optimizer, "precision": first.plugin}
    first.fabric.save(tmp_path / "half.ckpt", state)
    second = Loop(ours())
    second.fabric.load(
        tmp_path / "half.ckpt", {"model": second.model, "optimizer": second.optimizer, "precision": second.plugin}
    )
    second.run(gains, first=len(gains))
    assert second.scales == straight.scales[len(gains) :]
    for name, value in straight.net.state_dict().items():
        assert torch.equal(second.net.state_dict()[name], value), name


def test_plugins_and_used_scalers_can_be_pickled() -> None:
    """Launchers that spawn processes do so; a scaler is as it would be after the adjustment that waits."""
    fresh = pickle.loads(pickle.dumps(ours()))
    assert fresh.scaler.get_scale() == 16.0
    used = pickle.loads(pickle.dumps(Loop(ours()).run([1.0, INF]).plugin.scaler))
    assert used.get_scale() == 8.0
    assert not used.has_skipped(torch.optim.SGD(Net().parameters(), 0.1))


def test_overrides_hold_and_leave_nothing_behind() -> None:
    loop = Loop(ours(polyamp.Policy("mixed_float16", overrides={"head": "float32"})))
    loop.run([1.0])
    assert loop.net.dtypes == [torch.float32, torch.float16, torch.float32]
    loop.plugin.teardown()
    assert "forward" not in vars(loop.net.head)
    assert not loop.net._forward_hooks
    with pytest.raises(PolicyError, match="matches no module path"):
        Loop(ours(polyamp.Policy("mixed_float16", overrides={"haed": "float32"})))
    hidden = Fabric(accelerator="cpu", plugins=ours(polyamp.Policy("mixed_float16", overrides={"out_proj": "float32"})))
    with pytest.raises(UnsupportedError, match="never called as a module"):
        hidden.setup(nn.MultiheadAttention(4, 2))(*[torch.ones(2, 1, 4)] * 3)


def test_a_skip_puts_back_the_statistics_of_every_model() -> None:
    plugin = ours()
    fabric = Fabric(accelerator="cpu", plugins=plugin)
    nets = [Net(), Net()]
    models = [fabric.setup(net) for net in nets]
    optimizer: Any = fabric.setup_optimizers(sgd([p for net in nets for p in net.parameters()]))
    for gain, count in ((1.0, 1), (INF, 1), (1.0, 2)):
        optimizer.zero_grad()
        fabric.backward((models[0](batch(0)) + models[1](batch(1))).sum() * gain)
        optimizer.step()
        assert plugin.step_was_skipped is (gain == INF)
        assert [net.state_dict()["norm.num_batches_tracked"].item() for net in nets] == [count, count]


def test_the_backward_pass_has_the_policys_precision_of_float32_products() -> None:
    seen: list[str] = []
    loop = Loop(ours(polyamp.Policy("float32", float32_matmul="medium"), None))
    loss = loop.model(batch(0)).sum()
    loss.register_hook(lambda _: seen.append(torch.get_float32_matmul_precision()))
    loop.fabric.backward(loss)
    assert (seen, torch.get_float32_matmul_precision()) == (["medium"], "highest")


def test_teardown_lets_go_of_the_models() -> None:
    loop = Loop(ours(polyamp.Policy("mixed_float16", overrides={"head": "float32"}))).run([1.0])
    plugin, net = loop.plugin, weakref.ref(loop.net)
    plugin.teardown()
    del loop
    gc.collect()
    assert net() is None


def test_what_fabric_cannot_honour_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Received: mode='cast'"):
        ours(polyamp.Policy("mixed_float16", mode="cast"))
    with pytest.raises(UnsupportedError, match="Received: param='bfloat16'"):
        ours("bfloat16")
    with pytest.raises(polyamp.errors.RecipeError, match="scale the loss a second time"):
        FabricPrecision("mixed_float16", torch.amp.GradScaler("cpu"), device="cpu")  # type: ignore[arg-type]  # refused
    with pytest.raises(UnsupportedError, match="Pass device='cpu'"):
        Loop(FabricPrecision("mixed_bfloat16", device="cuda")).run([1.0])
    with pytest.raises(UnsupportedError, match="LBFGS"):
        Loop(ours(), torch.optim.LBFGS).run([1.0])
