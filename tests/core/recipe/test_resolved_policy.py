"""S3, S4, S5: what a policy says of each module, resolved once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from polyamp import Policy, PolicyError
from polyamp.recipe import overrides
from polyamp.recipe.resolved_policy import ModulePrecision, ResolvedPolicy

PATHS = ["", "body", "body/norm1", "body/norm1/inner", "head"]
OVERRIDES = {"body/norm*": "float32", "head": "bfloat16"}


def test_s05_places_are_those_of_the_overrides_and_of_the_policy() -> None:
    plan = Policy("mixed_float16", overrides=OVERRIDES).plan(PATHS)
    assert plan.at("body") == ModulePrecision("float16", None, mixes=True, kept=True) == plan.root
    assert plan.at("body/norm1") == ModulePrecision("float32", "float32", mixes=False, kept=False)
    assert plan.at("body/norm1/inner/deeper").dtype == "float32", "what is inside of a module is covered too"
    assert plan.at("head") == ModulePrecision("bfloat16", "bfloat16", mixes=True, kept=True)
    assert plan.at("headache").named is None
    assert dict(plan.overridden) == {"body/norm1": "float32", "body/norm1/inner": "float32", "head": "bfloat16"}
    assert (plan.narrow, plan.mixes, plan.kept, plan.cast) == (("bfloat16", "float16"), True, True, False)


@pytest.mark.parametrize(
    ("policy", "mixes", "kept", "cast", "narrow"),
    [
        (Policy("float32"), False, True, False, ()),
        (Policy("mixed_bfloat16"), True, True, False, ("bfloat16",)),
        (Policy("mixed_bfloat16", mode="cast"), False, False, True, ("bfloat16",)),
        (Policy("mixed_bfloat16", op_list="native"), True, False, False, ("bfloat16",)),
        (Policy("float16"), False, True, False, ("float16",)),
        (Policy("float32", overrides={"head": "float16"}), True, True, False, ("float16",)),
        (Policy(param="float64", compute="float32"), False, True, False, ()),
    ],
    ids=str,
)
def test_s03_where_autocast_acts(policy: Policy, mixes: bool, kept: bool, cast: bool, narrow: tuple[str, ...]) -> None:
    plan = policy.plan(PATHS)
    assert (plan.mixes, plan.kept, plan.cast, plan.narrow) == (mixes, kept, cast, narrow)


def test_s02_float64_is_cast_only_where_the_policy_names_it() -> None:
    assert Policy(param="float64", compute="float32").plan().float64
    assert not Policy("mixed_float16").plan().float64


def test_s05_a_glob_that_matches_nothing_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(PolicyError, match=r"the glob 'body/nrom\*' matches no module path\. Nearest: 'body/norm1'"):
        Policy("mixed_float16", overrides={"body/nrom*": "float32"}).plan(PATHS)
    assert Policy("mixed_float16", overrides={"nowhere": "float32"}).plan().at("nowhere").named is None


def test_s05_the_longest_glob_wins_and_of_two_the_last_in_the_alphabet() -> None:
    assert overrides.deciding_glob({"*": "float32", "body/*": "float16"}, "body/norm1") == "body/*"
    assert overrides.deciding_glob({"body/n*": "float32", "body/*1": "float16"}, "body/norm1") == "body/n*"
    assert overrides.dtype_at({"tower/dense": "float32"}, "body/norm1", "tower/dense") == "float32"


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_plan_is_frozen_and_equal_to_its_copies(way: Any) -> None:
    plan = Policy("mixed_float16", overrides=OVERRIDES).plan(PATHS)
    other: ResolvedPolicy = way(plan)
    assert other == plan
    assert hash(other) == hash(plan)
    assert other.at("head/x") == plan.at("head/x")
    assert plan != Policy("mixed_float16", overrides=OVERRIDES).plan([*PATHS, "head/x"])
    with pytest.raises(AttributeError, match="Plan is frozen"):
        plan.param = "float16"
