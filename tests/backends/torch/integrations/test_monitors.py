"""`monitor=` of the adapters: records are those of `train_step`, and go to the library's own trackers (S35)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from lightning.pytorch.loggers import CSVLogger

import polyamp
from polyamp.errors import ArgumentError, UnsupportedError
from polyamp_torch.accelerate import Accelerator
from polyamp_torch.lightning import MixedPrecision
from tests.backends.torch.integrations.monitor_loops import (
    LOOPS,
    SCALER,
    Module,
    Net,
    assert_alike,
    batches,
    expected,
    fused,
    loader,
    loss_fn,
    sgd,
    trainer,
)

pytestmark = [
    # Lightning 2.6 asks torch's pytree in a way that torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    # Advice, given on machines with more than two cores.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
]


@pytest.mark.parametrize("library", list(LOOPS))
@pytest.mark.parametrize(
    ("policy", "make"), [("mixed_float16", sgd), ("mixed_float16", fused), ("mixed_bfloat16", sgd)]
)
def test_s35_the_records_are_those_of_train_step(library: str, policy: str, make: Any) -> None:
    """Gradients are those before the clip, and the last step is read too."""
    monitor, bad = polyamp.Monitor(every=1, weights=True), 2 if policy == "mixed_float16" else None
    LOOPS[library](policy, monitor, batches(bad=bad), make)
    assert_alike(monitor.records, expected(policy, bad=bad))


@pytest.mark.parametrize("library", list(LOOPS))
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_s35_a_window_is_one_call_with_the_loss_of_all_its_batches(library: str, policy: str) -> None:
    monitor = polyamp.Monitor(every=1, weights=True)
    LOOPS[library](policy, monitor, batches(4, bad=None), sgd, accumulate=2)
    assert_alike(monitor.records, expected(policy, bad=None))


def test_s35_two_optimizers_of_one_pass_are_one_call() -> None:
    for policy in ("mixed_float16", "mixed_bfloat16"):
        monitor = polyamp.Monitor(every=1, weights=True)
        plugin = MixedPrecision(policy, SCALER if policy == "mixed_float16" else None, device="cpu", monitor=monitor)
        trainer(plugin, gradient_clip_val=None).fit(Module(sgd, manual=True), loader(batches(bad=None)))
        assert [(record.call, record.step, record.skips) for record in monitor.records] == [
            (number, number, 0) for number in range(1, 7)
        ]
        assert monitor.records[0].grad_norm == pytest.approx(expected(policy, bad=None)[0].grad_norm, rel=1e-2)


def logged(path: Path) -> dict[int, float]:
    """Step -> loss scale in a file of Lightning's logger."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("polyamp/loss_scale")]
    return {int(row["step"]): float(row["polyamp/loss_scale"]) for row in rows}


def test_s35_lightnings_loggers_get_the_records_at_the_trainers_steps(tmp_path: Path) -> None:
    """Also after a checkpoint, and by a plugin of a second `fit`."""
    plugin = MixedPrecision("mixed_float16", SCALER, device="cpu", monitor=polyamp.Monitor(every=2))
    logger, module = CSVLogger(tmp_path, version="first"), Module(sgd)
    first = trainer(plugin, logger=logger, log_every_n_steps=1)
    first.fit(module, loader(batches()))
    first.save_checkpoint(tmp_path / "state.ckpt")
    assert logged(tmp_path / "lightning_logs/first/metrics.csv") == {2: 1024.0, 4: 512.0, 6: 512.0}
    assert "on_train_end" not in vars(module)
    monitor = polyamp.Monitor(every=2)
    plugin = MixedPrecision("mixed_float16", SCALER, device="cpu", monitor=monitor)
    second = trainer(plugin, logger=CSVLogger(tmp_path, version="second"), log_every_n_steps=1, max_epochs=2)
    second.fit(Module(sgd), loader(batches(bad=None)), ckpt_path=str(tmp_path / "state.ckpt"))
    assert [record.call for record in monitor.records] == [2, 4, 6]
    assert list(logged(tmp_path / "lightning_logs/second/metrics.csv")) == [8, 10, 12]


class Tracker(GeneralTracker):  # type: ignore[misc]  # accelerate is not annotated
    """Keeps what it is given."""

    name, requires_logging_directory, tracker = "tests", False, None

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, float]] = []
        self.ended = False

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int, **_: Any) -> None:
        assert not self.ended
        self.rows.append((step, values["polyamp/loss_scale"]))

    def finish(self) -> None:
        self.ended = True


def test_s35_accelerates_trackers_get_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, monitor = Tracker(), polyamp.Monitor(every=2)
    made = Accelerator("mixed_float16", SCALER, cpu=True, monitor=monitor, log_with=[tracker])
    made.init_trackers("tests")
    net = Net()
    model, optimizer = made.prepare(net, sgd(net.parameters()))
    for batch in batches():
        made.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert tracker.rows == [(2, 1024.0), (4, 512.0)]
    made.end_training()
    assert tracker.rows == [(2, 1024.0), (4, 512.0), (6, 512.0)]


def test_s35_what_a_monitor_does_not_read_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"monitor must be a polyamp\.Monitor\. Received: 3"):
        MixedPrecision("float32", monitor=3)  # type: ignore[arg-type]  # the mistake
    made = Accelerator("mixed_float16", cpu=True, monitor=polyamp.Monitor())
    made.prepare(Net())
    made.prepare_model(Net(), evaluation_mode=True)
    with pytest.raises(UnsupportedError, match="reads one model of a loop"):
        made.prepare(Net())
    with pytest.raises(UnsupportedError, match="LBFGS"):
        made.prepare(torch.optim.LBFGS(Net().parameters()))
    made.free_memory()
    made.prepare(Net())
    plugin = MixedPrecision("float32", device="cpu", monitor=polyamp.Monitor())
    with pytest.raises(UnsupportedError, match="LBFGS, which evaluates the loss several times"):
        trainer(plugin, gradient_clip_val=None).fit(Module(torch.optim.LBFGS), loader(batches(bad=None)))
