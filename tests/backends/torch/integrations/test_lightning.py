"""polyamp's plugin in a real `lightning.pytorch.Trainer`: dtypes, skips, schedulers, clipping, checkpoints."""

from __future__ import annotations

import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision as TheirPlugin
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

import polyamp
import polyamp_torch
from polyamp.errors import BackendNotInstalledError, PolicyError, UnsupportedError
from polyamp_torch.lightning import MixedPrecision

INF = float("inf")
SCALER = polyamp.LossScaler(init_scale=16.0, growth_interval=4, on_stuck="ignore")

pytestmark = [
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # Advice, given on machines with more than two cores.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]


class Net(pl.LightningModule):
    """Two layers and a batch norm; a batch is (x, gain), and an infinite gain overflows. Records what it sees."""

    def __init__(self, make: Any = None, *, schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.make = make or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
        self.schedule = schedule
        self.dtypes: list[torch.dtype] = []
        self.weights: list[torch.Tensor] = []
        self.running: list[torch.Tensor] = []
        self.scales: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        out = self.head(self.norm(hidden))
        self.dtypes = [hidden.dtype, out.dtype]
        return out

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, gain = batch
        loss: torch.Tensor = (self(x).float() * gain).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.first.weight.grad
        self.norms.append(0.0 if gradient is None else float(gradient.norm()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights.append(self.first.weight.detach().clone())
        self.running.append(self.norm.running_mean.clone())  # type: ignore[union-attr]  # it tracks statistics
        scaler: Any = self.trainer.precision_plugin.scaler  # type: ignore[attr-defined]  # the plugin under test has one
        self.scales.append(scaler.get_scale() if scaler is not None else 1.0)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def batches(gains: list[float]) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(3, 4, generator=generator), torch.full((3, 2), gain)) for gain in gains]
    return torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


def trainer(plugin: Any, **options: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "max_epochs": 1,
    }  # fmt: skip
    return pl.Trainer(plugins=plugin, **(settings | options))


def fit(net: pl.LightningModule, plugin: Any, gains: list[float], **options: Any) -> Any:
    checkpoint = options.pop("ckpt_path", None)
    made = trainer(plugin, **options)
    made.fit(net, batches(gains), ckpt_path=checkpoint)
    return net


def reference_scales(scaler: polyamp.LossScaler, gains: list[float]) -> list[float]:
    """What rule S15 says of these batches."""
    state, scales = scaler.init("reference"), []
    for gain in gains:
        state = scaler.update(state, finite=gain != INF)
        scales.append(float(state.scale))
    return scales


def ours(policy: Any = "mixed_float16", scaler: Any = SCALER) -> MixedPrecision:
    return MixedPrecision(policy, scaler, device="cpu")


@pytest.mark.parametrize(("policy", "word"), [("mixed_float16", "16-mixed"), ("mixed_bfloat16", "bf16-mixed")])
def test_operations_run_in_the_policys_dtype(policy: str, word: str) -> None:
    plugin = MixedPrecision(policy, device="cpu")
    net = fit(Net(), plugin, [1.0])
    dtype = getattr(torch, polyamp.Policy(policy).compute)
    assert net.dtypes == [dtype, dtype]
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert plugin.precision == trainer(plugin).precision == word


def test_validation_and_prediction_run_under_the_policy() -> None:
    class Evaluated(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            self(batch[0])

        def predict_step(self, batch: Any, index: int) -> Any:
            return self(batch[0])

    net = Evaluated()
    trainer(ours()).validate(net, batches([1.0]), verbose=False)
    assert net.dtypes == [torch.float16, torch.float16]
    net.dtypes.clear()
    (output,) = trainer(ours("mixed_bfloat16", None)).predict(net, batches([1.0]))  # type: ignore[misc]  # one loader
    assert net.dtypes == [torch.bfloat16, torch.bfloat16]
    assert output.dtype == torch.bfloat16, "predict_step is the user's as a whole"


def test_a_skipped_step_changes_nothing_and_the_scale_follows_the_rule() -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0, 1.0, INF, INF, 1.0]
    net = fit(Net(), ours(), gains)
    assert net.scales == reference_scales(SCALER, gains) == [16.0, 8.0, 8.0, 8.0, 8.0, 16.0, 8.0, 4.0, 4.0]
    for i, gain in enumerate(gains):
        unmoved = i > 0 and torch.equal(net.weights[i], net.weights[i - 1])
        assert unmoved == (gain == INF)
    assert int(net.norm.num_batches_tracked) == gains.count(1.0)


def test_training_on_after_skips_equals_training_without_them() -> None:
    """Momentum, running statistics and parameters, bit for bit: skipped batches might as well not have been there."""
    static = polyamp.LossScaler.static(16.0)
    whole = batches([1.0, INF, 1.0, INF, 1.0])
    kept = [whole.dataset[i] for i in (0, 2, 4)]
    one, other = Net(), Net()
    trainer(ours(scaler=static)).fit(one, whole)
    trainer(ours(scaler=static)).fit(other, torch.utils.data.DataLoader(kept, batch_size=None))  # type: ignore[arg-type]  # a list is a dataset
    for name, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name


def theirs() -> TheirPlugin:
    return TheirPlugin("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))


def test_trap_sensitive_operations_run_in_16_bits_on_the_cpu() -> None:
    class Summing(Net):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            output = self(batch[0])
            total = output.detach().clamp(20_000.0, 20_000.0).sum()
            self.dtypes = [output.dtype, output.softmax(-1).dtype, total.dtype]
            self.norms.append(float(total))
            return output.float().mean()

    plain, net = (fit(Summing(), plugin, [1.0]) for plugin in (theirs(), ours()))
    assert plain.dtypes == [torch.float16, torch.float16, torch.float16]
    assert net.dtypes == [torch.float16, torch.float32, torch.float32]
    assert (plain.norms[0], net.norms[0]) == (INF, 120_000.0)


def test_trap_a_skipped_step_moves_batch_norm() -> None:
    plain, net = (fit(Net(), plugin, [1.0, INF]) for plugin in (theirs(), ours()))
    assert not torch.equal(plain.running[0], plain.running[1])
    assert torch.equal(net.running[0], net.running[1])


def test_trap_a_skipped_step_moves_the_learning_rate() -> None:
    plain, net = (fit(Net(schedule=True), plugin, [1.0, INF, INF, 1.0]) for plugin in (theirs(), ours()))
    assert plain.rates == [0.05, 0.025, 0.0125, 0.00625]
    assert net.rates == [0.05, 0.05, 0.05, 0.025]


def test_trap_a_first_step_that_is_skipped_warns_of_a_wrong_order() -> None:
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        fit(Net(schedule=True), theirs(), [INF, 1.0])
    net = fit(Net(schedule=True), ours(), [INF, 1.0])
    assert net.rates == [0.1, 0.05]
    assert "lr_scheduler_step" not in vars(net)


def test_trap_fused_optimizers_cannot_be_clipped() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-2, fused=True)

    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Net(make), theirs(), [1.0], gradient_clip_val=0.1)
    gains = [1.0, INF, 1.0, 1.0]
    net = fit(Net(make), ours(), gains, gradient_clip_val=0.1)
    assert net.scales == reference_scales(SCALER, gains)
    assert torch.equal(net.weights[0], net.weights[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "clip",
    [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}],
    ids=["unclipped", "norm", "value"],
)
def test_a_power_of_two_scale_gives_plain_lightnings_parameters_bit_for_bit(fused: bool, clip: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-2, fused=fused)

    plain = Net(make)
    made = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                      enable_model_summary=False, max_epochs=1, **clip)  # fmt: skip
    plain.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]  # there is no scaler to look at
    made.fit(plain, batches([1.0] * 3))
    net = fit(Net(make), ours("float32", polyamp.LossScaler.static(1024.0)), [1.0] * 3, **clip)
    assert net.norms == plain.norms, "unscaled before on_before_optimizer_step"
    for name, value in plain.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_accumulation_skips_the_whole_window() -> None:
    gains = [1.0, 1.0, INF, 1.0, 1.0, 1.0]
    net = fit(Net(), ours(), gains, accumulate_grad_batches=2)
    assert net.scales == [16.0, 16.0, 16.0, 8.0, 8.0, 8.0]
    assert torch.equal(net.weights[1], net.weights[3])
    assert not torch.equal(net.weights[3], net.weights[5])
    assert torch.equal(net.running[1], net.running[3]), "of both micro-batches of the skipped window"
    assert int(net.norm.num_batches_tracked) == 4


def test_a_training_step_that_returns_none_is_passed_over() -> None:
    class Choosy(Net):
        def training_step(self, batch: Any, index: int) -> Any:
            return None if index == 1 else super().training_step(batch, index)

    with pytest.warns(UserWarning, match="returned `None`"):
        net = fit(Choosy(), ours(), [1.0, 1.0, INF])
    assert net.scales == [16.0, 16.0, 8.0]
    assert torch.equal(net.weights[0], net.weights[1])


class Manual(Net):
    """Two optimizers that step after one backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.first, self.head)]

    def training_step(self, batch: Any, index: int) -> Any:  # type: ignore[override]  # manual optimization
        one, two = self.optimizers()  # type: ignore[misc, union-attr]  # two were configured
        loss = super().training_step(batch, index)
        one.zero_grad()
        two.zero_grad()
        self.manual_backward(loss)
        one.step()
        two.step()


def test_trap_two_optimizers_after_one_backward_pass_are_unscaled_by_two_scales() -> None:
    """Lightning adjusts the scale between the two: where it grows, the second update is half of what it should be."""
    plain, tripped, net = Manual(), Manual(), Manual()
    fit(plain, ours("mixed_float16", polyamp.LossScaler.static(16.0)), [1.0])
    growing = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    fit(tripped, TheirPlugin("16-mixed", "cpu", growing), [1.0])
    fit(net, ours(scaler=polyamp.LossScaler(init_scale=16.0, growth_interval=1)), [1.0])
    assert not torch.equal(tripped.head.weight, plain.head.weight)
    assert torch.equal(net.head.weight, plain.head.weight)
    assert torch.equal(net.first.weight, plain.first.weight)
    assert net.scales == [32.0], "one adjustment"


def test_manual_optimization_can_ask_whether_a_step_was_skipped() -> None:
    class Asking(Manual):
        def on_train_batch_end(self, *_: Any) -> None:
            plugin: Any = self.trainer.precision_plugin
            self.rates.append(plugin.step_was_skipped)

    assert fit(Asking(), ours(), [1.0, INF, 1.0]).rates == [False, True, False]


def test_manual_optimization_unscales_before_the_hook_and_leaves_running_statistics_to_the_user() -> None:
    class Fused(Manual):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), 0.1, fused=True) for part in (self.first, self.head)]

    scaled = fit(Fused(), ours(scaler=polyamp.LossScaler.static(1024.0)), [1.0, INF])
    plain = fit(Fused(), ours(scaler=polyamp.LossScaler.static(1.0)), [1.0])
    assert scaled.norms[:2] == pytest.approx(plain.norms, rel=1e-2)
    assert int(scaled.norm.num_batches_tracked) == 2
    assert "lr_scheduler_step" not in vars(scaled)


def test_a_schedule_by_epochs_moves_though_the_last_step_was_skipped() -> None:
    class ByEpoch(Net):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            return {**made, "lr_scheduler": {**made["lr_scheduler"], "interval": "epoch"}}

    assert fit(ByEpoch(schedule=True), ours(), [1.0, INF], max_epochs=2).rates == [0.1, 0.05, 0.05, 0.025]


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")  # of the run that is resumed, on purpose
def test_resuming_from_a_checkpoint_equals_not_stopping(tmp_path: Path) -> None:
    gains = [1.0, INF, 1.0, 1.0, 1.0]
    straight = fit(Net(schedule=True), ours(), gains, max_epochs=2)
    first = trainer(ours(), enable_checkpointing=True, default_root_dir=tmp_path / "first")
    first.fit(Net(schedule=True), batches(gains))
    checkpoint = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]  # checkpointing is on
    saving: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / "second"}
    resumed = fit(Net(schedule=True), ours(), gains, max_epochs=2, ckpt_path=checkpoint, **saving)
    assert resumed.scales == straight.scales[len(gains) :]
    assert resumed.rates == straight.rates[len(gains) :]
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_checkpoints_are_exchanged_with_lightnings_own_plugin(tmp_path: Path) -> None:
    for writer, reader in ((ours(), theirs()), (theirs(), ours())):
        made = trainer(writer)
        made.fit(Net(), batches([INF, INF, 1.0]))
        made.save_checkpoint(tmp_path / "one.ckpt")
        net = fit(Net(), reader, [1.0], max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
        assert net.scales == [4.0]


def test_overrides_hold_while_the_trainer_runs_and_leave_nothing_behind() -> None:
    net = fit(Net(), ours(polyamp.Policy("mixed_float16", overrides={"head": "float32"})), [1.0])
    assert net.dtypes == [torch.float16, torch.float32]
    assert "forward" not in vars(net.head)
    with pytest.raises(PolicyError, match="matches no module path"):
        fit(Net(), ours(polyamp.Policy("mixed_float16", overrides={"haed": "float32"})), [1.0])


def test_an_override_of_what_is_never_called_is_refused() -> None:
    class Attentive(Net):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, _ = self.attention(*[batch[0]] * 3)
            return super().training_step((x, batch[1]), index)

    with pytest.raises(UnsupportedError, match="never called as a module"):
        fit(Attentive(), ours(polyamp.Policy("mixed_float16", overrides={"attention/out_proj": "float32"})), [1.0])


def test_the_backward_pass_has_the_policys_precision_of_float32_products() -> None:
    seen: list[str] = []

    class Looking(Net):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            loss.register_hook(lambda _: seen.append(torch.get_float32_matmul_precision()))  # type: ignore[no-untyped-call]  # torch does not annotate it
            return loss

    fit(Looking(), ours(polyamp.Policy("float32", float32_matmul="medium"), None), [1.0])
    assert (seen, torch.get_float32_matmul_precision()) == (["medium"], "highest")


def test_a_module_inside_ddp_is_found() -> None:
    """Lightning connects the wrapper; `DistributedDataParallel` has the module as an attribute."""
    net, plugin = Net(), ours()
    wrapper = nn.Module()
    wrapper.module = net
    plugin.connect(wrapper, [], [])
    assert "lr_scheduler_step" in vars(net)
    plugin.teardown()
    assert "lr_scheduler_step" not in vars(net)
    with pytest.raises(UnsupportedError, match="a LightningModule is expected"):
        plugin.connect(nn.Linear(1, 1), [], [])


def test_what_the_trainer_cannot_honour_is_refused() -> None:
    for policy, message in (
        (polyamp.Policy("mixed_float16", mode="cast"), "Received: mode='cast'"),
        ("bf16-true", "Received: param='bfloat16'"),
        (polyamp.Policy(compute="bfloat16", output="bfloat16"), "Received: output='bfloat16'"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            MixedPrecision(policy, device="cpu")
    with pytest.raises(polyamp.errors.RecipeError, match="scale the loss a second time"):
        MixedPrecision("mixed_float16", torch.amp.GradScaler("cpu"), device="cpu")  # type: ignore[arg-type]  # refused
    with pytest.raises(UnsupportedError, match="Pass device='cpu'"):
        fit(Net(), MixedPrecision("mixed_bfloat16", device="cuda"), [1.0])
    with pytest.raises(UnsupportedError, match="LBFGS"):
        fit(Net(torch.optim.LBFGS), ours(), [1.0])


def test_trap_sharded_models_cannot_be_trained_in_float16() -> None:
    """Theirs refuses the precision, with which there would be no loss scale; ours runs, see `test_adapter_ranks`."""
    with pytest.raises(ValueError, match=r"`ModelParallelStrategy` does not support .*'16-mixed'"):
        pl.Trainer(strategy=ModelParallelStrategy(), precision="16-mixed", accelerator="cpu")
    plugin = pickle.loads(pickle.dumps(ours()))
    assert plugin.scaler.get_scale() == 16.0, "strategies that spawn processes send it"


def test_without_lightning_the_error_holds_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BackendNotInstalledError, match=r'pip install "polyamp\[lightning\]"'):
        runpy.run_path(str(Path(polyamp_torch.__file__).parent / "integrations" / "lightning.py"))
