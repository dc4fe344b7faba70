"""S27: what a group is, what a spec takes of groups, and what they come to on a list of parameters."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import polyamp
from polyamp import Group, PolicyError, PolyampError, Recipe, RecipeError, adamw, no_decay, schedules, sgd
from polyamp.array_namespace import PYTHON
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.rules.clip import ClipSet, GradientClip
from polyamp.rules.group_members import GroupMembers, resolve_group_members
from polyamp.rules.parameter_kinds import ParameterLeaf

ANY: Any = None
LEAVES = [
    ParameterLeaf("h/0/attn/weight", 2, ("Linear",)),
    ParameterLeaf("h/0/attn/bias", 1, ("Linear",)),
    ParameterLeaf("h/0/ln/weight", 1, ("LayerNorm",)),
    ParameterLeaf("wte/weight", 2, ("Embedding",), ("wte/weight", "head/weight")),
]


def resolved(optimizer: Any, leaves: list[ParameterLeaf] = LEAVES, **settings: Any) -> GroupMembers:
    """The members of a recipe with this optimizer."""
    made = Recipe(optimizer=optimizer, **settings)
    return resolve_group_members(made, [leaf.path for leaf in leaves], lambda: leaves, backend="torch")


def decays(optimizer: Any, leaves: list[ParameterLeaf] = LEAVES, **settings: Any) -> dict[str, float]:
    """Path -> weight decay."""
    found = resolved(optimizer, leaves, **settings)
    return {path: found.of(path).spec.weight_decay for path in found.numbers}


def test_s27_without_groups_there_is_one_member_and_no_parameter_is_looked_at() -> None:
    def never() -> list[ParameterLeaf]:
        raise AssertionError

    found = resolve_group_members(Recipe(optimizer=sgd(0.1)), ["a", "b"], never, backend="torch")
    assert found.is_ungrouped
    assert found.of("b").spec == sgd(0.1)


def test_s27_nanogpts_rule() -> None:
    found = decays(adamw(1e-3, weight_decay=0.1, groups=no_decay("vector")))
    assert list(found.values()) == [0.1, 0.0, 0.0, 0.1]
    assert list(decays(adamw(weight_decay=0.1, groups=no_decay("bias", "norm", "embedding"))).values()) == [
        0.1,
        0,
        0,
        0,
    ]


def test_s27_a_shared_parameter_is_reached_by_each_of_its_paths() -> None:
    assert decays(adamw(weight_decay=0.1, groups=[Group("head", weight_decay=0.5)]))["wte/weight"] == 0.5


def test_s27_the_rate_is_one_hyperparameter() -> None:
    """An absolute rate and a scale do not add up: the more precise group decides."""
    cosine = schedules.cosine(1.0, 10)
    groups = [Group("**", learning_rate=0.5), Group("h/0/**", learning_rate_scale=0.1)]
    found = resolved(sgd(cosine, groups=groups))
    inside, outside = found.of("h/0/attn/bias"), found.of("wte/weight")
    assert (inside.scale, inside.own_rate, outside.scale, outside.own_rate) == (0.1, False, 1.0, True)
    assert inside.learning_rate(5) == pytest.approx(0.05)
    assert outside.learning_rate == 0.5
    assert resolved(sgd(0.2, groups=[Group("**", learning_rate_scale=0.5)])).distinct[0].whole == sgd(0.1)


def test_s27_a_recipe_with_groups_is_a_record_and_a_file(tmp_path: Path) -> None:
    optimizer = sgd(
        0.1,
        momentum=0.9,
        groups=[
            Group(["**/bias", "head"], weight_decay=0.0),
            Group(kind=("bias", "norm"), learning_rate=schedules.cosine(1.0, 10)),
            Group("encoder", kind="vector", momentum=0.5, nesterov=True, learning_rate_scale=2.0),
            Group("encoder/**", trainable_after=1000),
        ],
    )
    recipe = Recipe(optimizer=optimizer, aliases={"body/*": {"torch": "h/*", "jax": "h_*"}}, clip_norm=1.0)
    for suffix in ("toml", "json"):
        recipe.dump(tmp_path / f"recipe.{suffix}")
        assert Recipe.load(tmp_path / f"recipe.{suffix}") == recipe
    assert "[[optimizer.groups]]" in recipe.to_toml()
    assert eval(repr(recipe), vars(polyamp)) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(Recipe.from_toml(recipe.to_toml()))
    assert sgd(**optimizer.to_dict()) == optimizer
    assert "groups" not in Recipe(optimizer=adamw()).to_toml()
    assert recipe.replace(optimizer=optimizer.replace(groups=optimizer.groups[:1])) != recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group(weight_decay=0.0), "needs paths .* or a kind. Received: neither"),
        (lambda: Group("a"), "sets at least one hyperparameter"),
        (lambda: Group("a.b", weight_decay=0.0), "each of its paths is a module-path glob .*no '.'. Received: 'a.b'"),
        (lambda: Group(ANY, weight_decay=0.0), "paths must be a glob or several"),
        (lambda: Group("a", learning_rate=1.0, learning_rate_scale=1.0), "not both"),
        (lambda: Group("a", learning_rate_scale=-1.0), "learning_rate_scale must be a finite number of at least 0"),
        (lambda: Group("a", trainable_after=-1), "an int of at least 0 .* Received: trainable_after=-1"),
        (lambda: Group("a", trainable_after=True), "Received: trainable_after=True"),
        (lambda: Group("a", trainable_after=1.5), "Received: trainable_after=1.5"),  # type: ignore[arg-type]
        (lambda: Group("a", weigth_decay=0.0), "Did you mean 'weight_decay'"),  # type: ignore[call-arg]  # the mistake
        (lambda: Group("a", centered=True), "Group has the arguments paths, kind, learning_rate"),  # type: ignore[call-arg]  # the mistake
        (lambda: Group(kind="norms", weight_decay=0.0), "Did you mean 'norm'"),
        (lambda: no_decay(), "needs the kinds"),
        (lambda: no_decay("biases"), "kind must be one of"),
        (lambda: no_decay(["bias", "norm"]), r'Write no_decay\("bias", "norm"\)'),  # type: ignore[arg-type]  # the mistake
        (lambda: adamw(groups=Group("a", eps=1.0)), "groups must be a list of polyamp.Group"),  # type: ignore[arg-type]
        (lambda: adamw(groups=[no_decay("bias")]), r"no_decay\(\) gives one itself"),  # type: ignore[list-item]
        (lambda: adamw(groups=[{"paths": "a"}]), "groups must be a list"),  # type: ignore[list-item]  # the mistake
        (lambda: adamw(groups=[Group("a", momentum=0.9)]), r"groups\[0\] \(a\): adamw has learning_rate, betas"),
        (lambda: adamw(groups=[Group("a", betas=(0.9, 1.0))]), r"groups\[0\] \(a\): betas must be"),
        (lambda: adamw(groups=[Group("a", learning_rate=-1.0)]), r"groups\[0\] \(a\): learning_rate must be"),
        (lambda: sgd(groups=[Group("a", momentum=0.9)]), "cannot change which arrays the optimizer keeps"),
        (lambda: Recipe.from_toml('policy = "float32"\n[[optimizer.groups]]\npaths = "a"'), "type"),
        (
            lambda: Recipe.from_toml(
                'policy="float32"\n[optimizer]\ntype="adamw"\n[[optimizer.groups]]\npaths="a"\nlr=1'
            ),
            r"Received: 'lr'\. Did you mean 'learning_rate'\? - at `\$.optimizer.groups\[0\]`",
        ),
    ],
)
def test_s20_what_is_no_group(make: Any, message: str) -> None:
    with pytest.raises(PolyampError, match=message):
        make()


def test_s27_a_kind_that_nothing_tells_asks_for_globs() -> None:
    leaves = [ParameterLeaf("alpha", 1), ParameterLeaf("w", 2)]
    with pytest.raises(RecipeError, match=r"'alpha' .* cannot be told .*\('\*\*/b\*', weight_decay=0.0\)"):
        decays(adamw(groups=no_decay("norm")), leaves)
    assert decays(adamw(weight_decay=0.1, groups=no_decay("vector")), leaves) == {"alpha": 0.0, "w": 0.1}
    assert decays(adamw(groups=[Group("w", kind="bias", weight_decay=0.0)]), leaves) == {"alpha": 0.01, "w": 0.01}


def test_s27_members_are_equal_where_every_parameter_has_the_same_hyperparameters() -> None:
    """Compiled steps are kept by them; a spec that says the same in another way is the same."""
    one = resolved(adamw(groups=no_decay("vector")))
    assert one == resolved(adamw(groups=no_decay("vector")))
    assert hash(one) == hash(resolved(adamw(groups=no_decay("vector"))))
    assert one != resolved(adamw(groups=no_decay("norm")))
    assert one != resolved(adamw(eps=1e-7, groups=no_decay("vector")))
    assert one != "members"


def test_s27_printed_members_say_which_parameters_have_which_hyperparameters() -> None:
    """A line per set of hyperparameters, defaults too; of many parameters the first six and how many more."""
    leaves = [
        *(ParameterLeaf(f"l{number}/weight", 2, ("Linear",)) for number in range(8)),
        ParameterLeaf("l0/bias", 1, ("Linear",)),
    ]
    found = resolved(sgd(0.1, groups=[Group(kind="vector", learning_rate_scale=0.5)]), leaves)
    paths = ", ".join(f"l{number}/weight" for number in range(6))
    spec = "sgd(learning_rate=0.1, momentum=0.0, weight_decay=0.0, nesterov=False)"
    assert repr(found).splitlines() == [
        "Members of 9 parameters:",
        f"  {spec}: {paths} and 2 more",
        f"  {spec}, learning rate times 0.5: l0/bias",
    ]


def test_s27_a_start_is_decided_by_itself() -> None:
    groups = [Group("h/**", trainable_after=10), Group(kind="norm", trainable_after=0), Group("h/**", weight_decay=0.5)]
    found = resolved(adamw(groups=groups))
    assert found.starts == {"h/0/attn/weight": 10, "h/0/attn/bias": 10}
    assert found.of("h/0/attn/bias").spec.weight_decay == 0.5
    assert "weight_decay=0.5, amsgrad=False), trainable after 10 updates: h/0/attn/weight, h/0/attn/bias" in repr(found)
    assert found != resolved(adamw(groups=[Group("h/**", trainable_after=11), *groups[1:]]))


def test_s27_some_parameter_trains_first() -> None:
    groups = [Group("**", trainable_after=7), Group("wte", trainable_after=3)]
    with pytest.raises(RecipeError, match=r"all 4 parameters wait, the first for 3 updates\. Leave trainable_after"):
        resolved(adamw(groups=groups))


def test_s27_groups_that_a_model_does_not_fit() -> None:
    with pytest.raises(RecipeError, match=r"groups\[0\]: the glob 'h/1' matches no trainable parameter. Nearest: 'h/0"):
        resolved(adamw(groups=[Group(["h/0", "h/1"], eps=1.0)]))
    with pytest.raises(PolicyError, match="'nonesuch' on the torch backend, which matches no path"):
        resolved(adamw(groups=[Group("h", eps=1.0)]), aliases={"body": {"torch": "nonesuch"}})


def test_s05_recipe_and_policy_share_the_aliases() -> None:
    mine = {"body/*": {"torch": "h/*"}}
    recipe = Recipe(policy="mixed_bfloat16", aliases=mine)
    assert recipe.policy.aliases == recipe.aliases == mine
    assert recipe.replace(policy="float32").aliases == mine
    assert recipe.replace(aliases={}).policy.aliases == {}
    assert Recipe(policy=recipe.policy).aliases == mine
    other = polyamp.Policy("float32", aliases={"x": {"jax": "y"}})
    assert recipe.replace(policy=other).aliases == {"x": {"jax": "y"}}
    with pytest.raises(RecipeError, match=r"aliases stand in the recipe .* and they differ"):
        Recipe(policy=other, aliases=mine)
    with pytest.raises(PolicyError, match="backend='torch'"):
        polyamp.Policy("float32", overrides={"body": "float32"}, aliases=mine).plan(["h/0"])


def test_s05_an_alias_may_be_of_a_module_that_trains_nothing() -> None:
    """A frozen encoder, or a softmax that an override names."""
    optimizer = adamw(groups=[Group("h/0", eps=1.0)])
    recipe = Recipe(optimizer=optimizer, aliases={"scores": {"torch": "attention/softmax"}})
    found = resolve_group_members(
        recipe, ["h/0"], lambda: [ParameterLeaf("h/0", 2)], backend="torch", modules=lambda: ["attention/softmax"]
    )
    assert found.of("h/0").spec.eps == 1.0
    with pytest.raises(PolicyError, match="matches no path"):
        resolve_group_members(
            recipe, ["h/0"], lambda: [ParameterLeaf("h/0", 2)], backend="torch", modules=lambda: ["attention"]
        )


def test_s27_which_parameters_are_clipped_together() -> None:
    """One limit decides for each parameter; the sets of two groups stay apart, whatever their limits."""
    groups = [Group("wte", clip_norm=1.0), Group("h/**", clip_norm=1.0), Group(kind="vector", clip_value=0.5)]
    found = resolved(adamw(groups=groups))
    by_norm, by_value = ClipLimits(1.0, None, 1e-6), ClipLimits(value=0.5)
    sets = [ClipSet(by_norm, (0,)), ClipSet(by_value, (1, 2)), ClipSet(by_norm, (3,))]
    assert found.clip_sets(ClipLimits(norm=2.0, eps=1e-6)) == sets
    assert found.common_clip(ClipLimits(norm=2.0)) == GradientClip(apart=True)
    assert "clip_value 0.5" in repr(found)
    plain = resolved(adamw(groups=no_decay("vector")))
    common = plain.common_clip(ClipLimits(norm=2.0))
    assert common.factor is not None
    assert (common.factor(4.0, xp=PYTHON), common.transformation, common.apart) == (0.5, None, False)
    assert [limits for limits, _ in plain.clip_sets(ClipLimits(norm=2.0))] == [ClipLimits(norm=2.0)]
