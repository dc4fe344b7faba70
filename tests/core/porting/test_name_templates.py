"""One entry of `names=` for many modules: fields, their order, and what is refused."""

from __future__ import annotations

import re

import pytest

from polyamp.errors import PortError
from polyamp.porting.matching.matching import match_layers
from polyamp.porting.matching.rename_rules import check_rename_rules
from tests.core.porting.sketch import sketch

KERAS = "\n".join(
    f"block{name}_{part}: {spec}"
    for name in ("1a", "2a", "2b", "10a")
    for part, spec in (("dwconv", "conv 1 6 -bias"), ("se_reduce", "conv 6 2"), ("se_expand", "conv 2 6"))
)
TORCH = "\n".join(
    f"net.blocks.{number}.{part}: {spec}"
    for number in range(4)
    for part, spec in (("depthwise", "conv 1 6 -bias"), ("reduce", "conv 6 2"), ("expand", "conv 2 6"))
)


def paired(one: str, other: str, names: dict[str, str]) -> dict[str, str]:
    found = match_layers(sketch(one), sketch(other, ordered=False), check_rename_rules(names))
    assert found.is_complete
    assert not found.indistinguishable
    return {each.source.path: each.target.path for each in found.pairs}


def test_s30_modules_of_other_fields_correspond_in_order() -> None:
    """Numbers by value and then letters: 1a, 2a, 2b, 10a are 0, 1, 2, 3."""
    assert match_layers(sketch(TORCH), sketch(KERAS, ordered=False), {}).indistinguishable
    there = paired(TORCH, KERAS, {"blocks/{i}": "block{n}{l}"})
    assert there["net/blocks/0/reduce"] == "block1a_se_reduce"
    assert there["net/blocks/2/expand"] == "block2b_se_expand"
    assert there["net/blocks/3/depthwise"] == "block10a_dwconv"
    back = paired(KERAS, TORCH, {"block{n}{l}": "blocks/{i}"})
    assert back == {target: source for source, target in there.items()}


def test_s30_modules_of_the_same_fields_correspond_by_them() -> None:
    one = "".join(f"enc.{n}.{m}.a: dense 4 4\nenc.{n}.{m}.b: dense 4 3\n" for n in (1, 0) for m in (0, 1))
    other = "".join(f"stage{m}_{n}/a: dense 4 4\nstage{m}_{n}/z: dense 4 3\n" for n in (0, 1) for m in (0, 1))
    pairs = paired(one, other, {"enc/{n}/{m}": "stage{m}_{n}"})
    assert pairs["enc/1/0/a"] == "stage0_1/a"
    assert pairs["enc/0/1/b"] == "stage1_0/z"


def test_s30_templates_and_expressions_together() -> None:
    one = "h.0.a: dense 4 4\nh.0.b: dense 4 4\nh.1.a: dense 4 4\nh.1.b: dense 4 4"
    other = "layer_1.x: dense 4 4\nlayer_1.y: dense 4 4\nlayer_2.x: dense 4 4\nlayer_2.y: dense 4 4"
    pairs = paired(one, other, {"a$": "y", "h/{i}": "layer_{n}"})
    assert pairs == {"h/0/a": "layer_1/y", "h/0/b": "layer_1/x", "h/1/a": "layer_2/y", "h/1/b": "layer_2/x"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"blocks/{i}": "block"}, "names: 'blocks/{i}' and 'block' must both have fields in braces, or neither"),
        ({"layers/{i}": "block{n}{l}"}, "names: 'layers/{i}' matches no path of the source .* Nearest: 'net/blocks/"),
        ({"blocks/{i}": "stage{n}"}, "names: 'stage{n}' matches no path of the target"),
        (
            {"blocks/{i}": "block2{l}"},
            "matches 4 modules of the source ('net/blocks/0', 'net/blocks/1', 'net/blocks/2'",
        ),
        ({"blocks/{i}": "block{i}{i}"}, "names: a field occurs twice in 'blocks/{i}' or 'block{i}{i}'"),
        ({"{n}": "block{n}a"}, "matches nothing in the target for 'net/blocks/"),
    ],
)
def test_s30_templates_that_say_nothing(names: dict[str, str], message: str) -> None:
    if "block{n}a" in names.values():
        other = sketch("\n".join(f"block{number}a_x: dense 4 4" for number in (1, 2, 3, 4)))
    else:
        other = sketch(KERAS)
    with pytest.raises(PortError) as raised:
        match_layers(sketch(TORCH), other, check_rename_rules(names))
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), str(raised.value)), raised.value


def test_s30_a_template_that_fits_two_modules_is_refused() -> None:
    one = sketch("encoder.h.0.a: dense 4 4\ndecoder.h.0.a: dense 4 4")
    other = sketch("enc_0.a: dense 4 4\ndec_0.a: dense 4 4")
    with pytest.raises(PortError, match=r"'h/\{n\}' matches both 'encoder/h/0' and 'decoder/h/0' of the source"):
        match_layers(one, other, check_rename_rules({"h/{n}": "enc_{n}"}))
    found = match_layers(one, other, check_rename_rules({"encoder/h/{n}": "enc_{n}"}))
    assert {each.source.path: each.target.path for each in found.pairs}["encoder/h/0/a"] == "enc_0/a"
