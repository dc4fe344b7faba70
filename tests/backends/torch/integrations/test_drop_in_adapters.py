"""The adapters beside each library's own plugin: the same objects, one `unscale_` a step, the same numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import accelerate
import lightning.pytorch as pl
import pytest
import torch
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as TheirFabric
from lightning.pytorch.plugins import MixedPrecision as TheirPlugin
from torch import nn

import polyamp
from polyamp.errors import PolicyError
from polyamp_torch import GradScaler
from polyamp_torch.accelerate import Accelerator
from polyamp_torch.lightning import FabricPrecision, MixedPrecision

INF = float("inf")
SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=3)
POLICY = polyamp.Policy("mixed_float16", op_list="native")  # the numbers of torch's own region

pytestmark = [
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]


@pytest.fixture
def unscaled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every call of `unscale_`, and every pass over the gradients."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        own = getattr(GradScaler, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(self, *args, **kwargs)

        return call

    for name in ("unscale_", "_unscale_grads_"):
        monkeypatch.setattr(GradScaler, name, noted(name))
    return calls


class Net(pl.LightningModule):
    """Two layers; a batch is (x, gain), and an infinite gain overflows."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.make = make

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, gain = batch
        loss: torch.Tensor = (self.layers(x).float() * gain).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def rows() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.tensor(gain)) for gain in (1.0, INF, 2.0, 1.0, 1.0, 3.0)]


def theirs() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, fused=True)


End = tuple[list[torch.Tensor], float]


def lightning_run(plugin: Any, make: Any) -> End:
    net = Net(make)
    clip = None if make is fused else 0.5  # Lightning's own plugin refuses it there
    trainer = pl.Trainer(plugins=plugin, accelerator="cpu", max_epochs=1, gradient_clip_val=clip, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(rows(), batch_size=None))  # type: ignore[arg-type]  # a list of rows
    return [p.detach() for p in net.parameters()], plugin.scaler.get_scale()


def fabric_run(plugin: Any, make: Any) -> End:
    fabric = Fabric(accelerator="cpu", plugins=plugin)
    net = Net(make)
    layers, optimizer = fabric.setup(net.layers, make(net.layers.parameters()))
    for x, gain in rows():
        optimizer.zero_grad()
        fabric.backward((layers(x).float() * gain).pow(2).mean())
        if make is not fused:
            fabric.clip_gradients(layers, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
    return [p.detach() for p in net.parameters()], plugin.scaler.get_scale()


def accelerate_run(made: Any, make: Any) -> tuple[End, list[bool]]:
    net, skipped = Net(make), []
    layers, optimizer = made.prepare(net.layers, make(net.layers.parameters()))
    for x, gain in rows():
        with made.autocast():
            loss = (layers(x).float() * gain).pow(2).mean()
        made.backward(loss)
        if make is not fused:
            made.clip_grad_norm_(layers.parameters(), 0.5)
        optimizer.step()
        assert optimizer._is_overflow == optimizer.step_was_skipped == made.optimizer_step_was_skipped
        skipped.append(optimizer._is_overflow)
        optimizer.zero_grad()
    return ([p.detach() for p in net.parameters()], made.scaler.get_scale()), skipped


def same(one: End, other: End) -> bool:
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("make", [sgd, fused])
def test_lightnings_own_plugin_gives_the_same_numbers(make: Any, unscaled: list[str]) -> None:
    ours = lightning_run(MixedPrecision(POLICY, SCALER, device="cpu"), make)
    assert unscaled == ["unscale_", "_unscale_grads_"] * 6, "one of each a step"
    stock = TheirPlugin("16-mixed", "cpu", theirs())
    assert same(ours, lightning_run(stock, make))


@pytest.mark.parametrize("make", [sgd, fused])
def test_fabrics_own_plugin_gives_the_same_numbers(make: Any, unscaled: list[str]) -> None:
    class Stock(TheirFabric):
        def convert_input(self, data: Any) -> Any:  # theirs casts inputs at the door
            return data

    ours = fabric_run(FabricPrecision(POLICY, SCALER, device="cpu"), make)
    assert unscaled.count("unscale_") == (0 if make is fused else 6)
    assert unscaled.count("_unscale_grads_") == (0 if make is fused else 6), "fused kernels unscale by themselves"
    assert same(ours, fabric_run(Stock("16-mixed", "cpu", theirs()), make))


@pytest.mark.parametrize("make", [sgd, fused])
def test_accelerates_own_scaler_gives_the_same_numbers_and_skips(make: Any, unscaled: list[str]) -> None:
    ours, skipped = accelerate_run(Accelerator(POLICY, SCALER, cpu=True), make)
    assert skipped == [False, True, False, False, False, False]
    assert unscaled.count("unscale_") == unscaled.count("_unscale_grads_") == (0 if make is fused else 6)
    AcceleratorState._reset_state(reset_partial_state=True)
    stock = accelerate.Accelerator(cpu=True)  # float16 needs a GPU there: its scaler and region are put in by hand
    stock.scaler = theirs()
    stock.unscale_gradients = lambda *_: stock.scaler.unscale_(stock._optimizers[0].optimizer)
    stock.autocast = lambda *_: torch.autocast("cpu", torch.float16, cache_enabled=False)
    if make is fused:  # theirs takes a fused optimizer's skip for a step
        with contextlib.suppress(AssertionError):
            accelerate_run(stock, make)
        return
    other, their_skips = accelerate_run(stock, make)
    assert same(ours, other)
    assert their_skips == skipped


def test_contexts_are_torch_autocast_instances() -> None:
    overridden = polyamp.Policy("mixed_float16", overrides={"2": "float32"})
    layers = Net(sgd).layers
    lightning, fabric = MixedPrecision(overridden, device="cpu"), FabricPrecision(overridden, device="cpu")
    lightning.convert_module(layers)
    contexts = [lightning.forward_context(), lightning.autocast_context_manager(), fabric.forward_context()]
    made = Accelerator("mixed_float16", cpu=True)
    contexts += [made.autocast(), made.autocast(accelerate.utils.AutocastKwargs(enabled=False))]
    seen: list[torch.dtype] = []
    hook = layers[2].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    for context in contexts:
        assert isinstance(context, torch.autocast)
        assert (context.device, context.fast_dtype) == ("cpu", torch.float16)
        with context as entered:
            assert entered is context
            assert torch.is_autocast_enabled("cpu") is context._enabled
            layers(torch.ones(2, 4))
        assert not torch.is_autocast_enabled("cpu")
    hook.remove()
    assert seen == [torch.float32, torch.float32, torch.float16, torch.float16, torch.float32], "S5 in the first two"


def test_accelerates_own_word_for_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator(mixed_precision="fp16", cpu=True).settings.policy == polyamp.Policy("fp16")
    assert Accelerator("mixed_float16", mixed_precision="fp16", cpu=True).mixed_precision == "fp16"
    assert Accelerator(cpu=True).mixed_precision == "no"
    with pytest.raises(PolicyError, match=r"Received: mixed_precision='bf16'\. Drop it, or the policy"):
        Accelerator("mixed_float16", mixed_precision="bf16", cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True).settings.policy == polyamp.Policy("bf16")
    own = Accelerator(mixed_precision="no", cpu=True)  # goes before the launcher's, as in Accelerate
    assert (own.settings.policy, own.mixed_precision) == (polyamp.Policy("float32"), "no")
