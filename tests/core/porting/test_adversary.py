"""Random architectures, named and ordered as users of two frameworks would: a pairing is the true one, or an error.

A wrong pairing in silence is the worst that `port` can do; an error where everybody could tell the second worst.
"""

from __future__ import annotations

import ast
import random
import re
import time
from collections import Counter
from typing import Final

from polyamp.errors import PortError
from polyamp.porting.layouts.inventory import NativeLayer
from polyamp.porting.matching.matching import match_layers
from tests.core.porting.architectures import ARCHITECTURES
from tests.core.porting.dialects import AUTOMATIC, STYLES, Rendered, rendered
from tests.core.porting.sketch import sketch
from tests.core.porting.test_port import carried

SEEDS: Final = 300
_PROJECTIONS: Final = ("query", "key", "value", "packed", "output")


def models(seed: int) -> tuple[str, Rendered, Rendered]:
    """One architecture, written by two people."""
    rng = random.Random(seed)
    name = rng.choice(list(ARCHITECTURES))
    parts = ARCHITECTURES[name](rng)
    styles = rng.choice(STYLES), rng.choice(STYLES)
    free = not all(style in AUTOMATIC for style in styles)  # names of both that say the same are believed
    one, other = (rendered(parts, style, rng, permuted=free) for style in styles)
    return f"{seed}: {name}, {styles[0]} -> {styles[1]}", one, other


def is_the_same(one: NativeLayer, other: NativeLayer, ours: Rendered, theirs: Rendered) -> bool:
    """Whether two layers are one layer of the architecture; attention by hand is as good as in one piece."""
    some, others = (
        {model.identities[leaf.name.rpartition("/")[0]] for leaf in layer.leaves.values()}
        for layer, model in ((one, ours), (other, theirs))
    )
    if some == others:
        return True
    if len(some) == len(others) == 1 and all(each.rpartition("/")[2] in _PROJECTIONS for each in some | others):
        return False
    whole = [{_whole(each) for each in side} for side in (some, others)]
    return whole[0] == whole[1] and len(whole[0]) == 1


def _whole(identity: str) -> str:
    around, _, last = identity.rpartition("/")
    return around if last in _PROJECTIONS else identity


def test_random_architectures_are_paired_rightly_or_not_at_all() -> None:
    counts: Counter[str] = Counter()
    faults = []
    for seed in range(SEEDS):
        name, ours, theirs = models(seed)
        found = match_layers(ours.inventory, theirs.inventory, {})
        bad = [
            f"{each.source.path} -> {each.target.path} ({each.evidence})"
            for each in found.pairs
            if not is_the_same(each.source, each.target, ours, theirs)
        ]
        if bad:
            faults.append(f"{name}: {'; '.join(bad)}")
        counts["wrong" if bad else "right" if found.is_complete and not found.indistinguishable else "refused"] += 1
    assert not faults, "\n".join(faults)
    assert counts["right"] >= 200, counts


def test_the_choices_of_a_refusal_hold_the_right_one_and_no_line_is_wrong() -> None:
    """Whoever chooses the right one of each settles more in every round, until all is settled; a whole line, where one
    is offered, is right."""
    chosen = offered = 0
    for seed in range(60):
        _, ours, theirs = models(seed)
        layers = {layer.path: layer for layer in ours.inventory.layers}
        others = {layer.path: layer for layer in theirs.inventory.layers}
        names: dict[str, str] = {}
        for _ in range(12):
            try:
                carried(ours.inventory, theirs.inventory, names=names)
                break
            except PortError as error:
                said = str(error)
            more = {}
            for pattern, choices in re.findall(r"^  (r'\^.*\$'): ('.*)$", said, re.MULTILINE):
                path = ast.literal_eval(pattern).strip("^$")
                listed = re.findall(r"'([^']*)'", choices)
                true = [each for each in listed if is_the_same(layers[path], others[each], ours, theirs)]
                assert true or " and " in choices, f"{seed}: {path}: {choices}"  # more than are listed
                more |= {f"^{path}$": each for each in true[:1]}
                chosen += len(true)
            for line in re.findall(r"write: names=(\{.*\})$", said, re.MULTILINE):
                for pattern, path in ast.literal_eval(line).items():
                    assert is_the_same(layers[pattern.strip("^$")], others[path], ours, theirs), f"{seed}: {line}"
                    more[pattern] = path
                    offered += 1
            if not set(more) - set(names):
                break
            names |= more
        else:
            raise AssertionError(f"{seed}: never settled: {names}")
    assert chosen > 60, (chosen, offered)


def test_a_thousand_layers_in_a_row_match_in_seconds() -> None:
    torch = sketch("\n".join(f"layers.{number}: dense 2 2" for number in range(1000)))
    keras = sketch("\n".join(f"dense{f'_{number}' if number else ''}: dense 2 2" for number in range(1000)))
    started = time.process_time()
    found = match_layers(torch, keras, {})
    assert time.process_time() - started < 8
    assert [each.target.path for each in found.pairs[:2]] == ["dense", "dense_1"]
    assert len(found.pairs) == 1000


def test_neither_numbers_nor_an_order_tell_what_lies_beside_each_other() -> None:
    for one, other in (
        ("actor: dense 6 6\ncritic: dense 6 6", "dense_2: dense 6 6\ndense_3: dense 6 6"),
        ("w1: dense 6 24\nw3: dense 6 24", "up_proj: dense 6 24\ngate_proj: dense 6 24"),  # w1 is either
        ("age: dense 6 2\nsex: dense 6 2", "dense_2: dense 6 2\ndense_3: dense 6 2"),
        ("fc_1: dense 6 6\nfc_0: dense 6 6\nhead: dense 6 6", "a: dense 6 6\nb: dense 6 6\nc: dense 6 6"),
    ):
        assert len(match_layers(sketch(one), sketch(other), {}).indistinguishable) == 1, one
