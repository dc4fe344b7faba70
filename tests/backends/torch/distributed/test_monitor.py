"""A monitor on several ranks has the figures of one process; a step that is read sends one all-reduce more (S35)."""

from __future__ import annotations

from typing import Any

import polyamp
from polyamp.monitor.records import MonitorRecord
from tests import ranks
from tests.backends.torch.distributed.training import ENGINES, batches, collectives, mean_loss, mlp, part

RECIPE = polyamp.Recipe(policy="float32", optimizer=polyamp.adamw(1e-2), clip_norm=0.5)


def recorded(model: Any, steps: list[Any]) -> list[MonitorRecord]:
    """The records of a training, of which every second step is read."""
    monitor = polyamp.Monitor(every=2, weights=True, activations=True)
    state, step = polyamp.init(model, RECIPE), polyamp.train_step(mean_loss, RECIPE, monitor=monitor)
    for batch in steps:
        state, _ = step(state, batch)
    return monitor.records


def figures(rank: int, world: int) -> dict[str, tuple[list[MonitorRecord], dict[str, int]]]:
    """The records under each engine, and how many collectives more a step sends that is read."""
    found = {}
    for name, wrap in ENGINES.items():
        own = [part(batch, rank, world) for batch in batches(4)]
        records = recorded(wrap(mlp(), world), own)
        monitor = polyamp.Monitor(every=2, weights=True)
        state = polyamp.init(wrap(mlp(), world), RECIPE)
        step = polyamp.train_step(mean_loss, RECIPE, monitor=monitor)
        for batch in own[:2]:
            state, _ = step(state, batch)
        plain = collectives(lambda step=step, state=state, batch=own[2]: step(state, batch))
        read = collectives(lambda step=step, state=state, batch=own[3]: step(state, batch))
        found[name] = (records, dict(read - plain))
    return found


def check_outputs(one: MonitorRecord, other: MonitorRecord, name: str) -> None:
    """Check that two records have the same figures of modules' outputs."""
    found = {each.module: each.activations for each in one.modules}
    wanted = {each.module: each.activations for each in other.modules}
    assert set(found) == set(wanted) == {"", "0", "1", "2", "3", "4"}, name
    for path, stats in found.items():
        alone = wanted[path]
        assert stats is not None
        assert alone is not None
        assert stats.elements == alone.elements, (name, path)
        assert abs(stats.zero - alone.zero) < 1e-6, (name, path)
        assert abs(stats.rms - alone.rms) < 1e-5 * alone.rms, (name, path)
        assert abs(stats.largest - alone.largest) < 1e-5 * alone.largest, (name, path)


def test_s35_ranks_have_the_figures_of_one_process() -> None:
    alone = recorded(mlp(), batches(4))
    for found in ranks.run(figures, 4, 4):
        assert list(found) == list(ENGINES)
        for name, (records, more) in found.items():
            assert more == ({} if name.startswith("ddp") else {"gloo:all_reduce": 1}), name
            assert len(records) == 2
            for one, other in zip(records, alone, strict=True):
                assert abs(one.grad_norm - other.grad_norm) < 1e-5 * other.grad_norm, name
                check_outputs(one, other, name)
                assert [each.module for each in one.modules][:3] == ["0", "2", "4"]
                for own, expected in zip(one.modules[:3], other.modules[:3], strict=True):
                    for kind in ("gradients", "weights"):
                        counted, wanted = getattr(own, kind), getattr(expected, kind)
                        assert counted.elements == wanted.elements, (name, own.module, kind)
                        assert abs(counted.norm - wanted.norm) < 1e-5 * wanted.norm
                        assert (counted.first_exponent, counted.exponents) == (wanted.first_exponent, wanted.exponents)
                    assert abs(own.update_ratio - expected.update_ratio) < 1e-4 * expected.update_ratio
