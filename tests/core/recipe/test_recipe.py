"""`Recipe`: what it refuses, and its TOML and JSON form."""

from __future__ import annotations

import json
import math
import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp
from polyamp import LossScaleError, LossScaler, Policy, PolicyError, Recipe, RecipeError, schedules
from polyamp.recipe.optimizers import SPECS
from polyamp.recipe.scaler import PRESETS

RATES = st.floats(0.0, 10.0)
COUNTS = st.integers(1, 10**6)
ORIGINS = st.integers(-3, 0)
UNIT = st.floats(0.0, 0.999)


def policies() -> st.SearchStrategy[Policy]:
    words = ["float32", "mixed_float16", "mixed_bfloat16", "bfloat16", "float64", "O1", "O2", "p=f32,c=bf16,o=f16"]
    globs = st.text("abc/*", min_size=1, max_size=6).filter(lambda text: text == text.strip("/"))
    return st.builds(
        lambda word, overrides, matmul, op_list: Policy(
            word, overrides=overrides, float32_matmul=matmul, op_list=op_list
        ),
        st.sampled_from(words),
        st.dictionaries(globs, st.sampled_from(["float16", "bf16", "float32"]), max_size=3),
        st.sampled_from([None, "highest", "high", "medium"]),
        st.sampled_from(["polyamp", "native"]),
    )


def learning_rates() -> st.SearchStrategy[Any]:
    warmup = st.integers(1, 1000)
    return st.one_of(
        RATES,
        st.builds(schedules.constant, RATES),
        st.builds(schedules.linear_warmup, RATES, COUNTS, start=RATES, origin=ORIGINS),
        st.builds(schedules.cosine, RATES, COUNTS, end=RATES),
        st.builds(
            schedules.warmup_cosine,
            RATES,
            warmup,
            st.integers(1001, 10**6),
            start=RATES,
            end=RATES,
            origin=ORIGINS,
        ),
        st.builds(schedules.step, RATES, every=COUNTS, factor=RATES),
        st.builds(schedules.wsd, RATES, warmup, st.just(2000), warmup, shape=st.sampled_from(["1-sqrt", "cosine"])),
        st.builds(schedules.one_cycle, RATES, st.floats(0.5, 99.0), st.integers(100, 10**6)),
        st.builds(
            lambda values, factor: schedules.join(
                [schedules.restarts(values[0], 10, factor), schedules.inverse_sqrt(values[1], 0, 5)], [100]
            ),
            st.tuples(RATES, RATES),
            st.integers(1, 3),
        ),
        st.builds(
            lambda values, every: schedules.piecewise(
                tuple(values), boundaries=tuple(every * number for number in range(1, len(values)))
            ),
            st.lists(RATES, min_size=1, max_size=4),
            COUNTS,
        ),
    )


def optimizers() -> st.SearchStrategy[Any]:
    betas, decay, momenta = st.tuples(UNIT, UNIT), RATES, st.floats(0.1, 0.9)
    return st.one_of(
        st.builds(polyamp.sgd, learning_rates(), momentum=momenta, weight_decay=decay, nesterov=st.booleans()),
        st.builds(polyamp.adam, learning_rates(), betas=betas, eps=RATES, weight_decay=decay),
        st.builds(polyamp.adamw, learning_rates(), betas=betas, eps=RATES, weight_decay=decay),
        st.builds(polyamp.rmsprop, learning_rates(), alpha=UNIT, eps=RATES, momentum=UNIT, centered=st.booleans()),
        st.builds(polyamp.adagrad, learning_rates(), lr_decay=RATES, initial_accumulator_value=RATES, eps=RATES),
        st.builds(polyamp.lion, learning_rates(), betas=betas, weight_decay=decay),
    )


def scalers() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from([None, "dynamic", "off", *PRESETS]),
        st.builds(
            LossScaler,
            init_scale=st.floats(1.0, 2.0**20),
            growth_factor=st.floats(1.0, 8.0),
            backoff_factor=st.floats(0.1, 1.0),
            growth_interval=COUNTS,
            hysteresis=st.integers(1, 5),
            consecutive_hysteresis=st.booleans(),
            min_scale=st.floats(2.0**-20, 1.0),
            max_scale=st.floats(2.0**20, 2.0**127),
            patience=COUNTS,
            on_stuck=st.sampled_from(["raise", "warn", "ignore"]),
        ),
        st.builds(LossScaler.static, st.floats(1.0, 2.0**20), patience=COUNTS),
        st.builds(LossScaler.off, check_finite=st.booleans()),
    )


def recipes() -> st.SearchStrategy[Recipe]:
    return st.builds(
        Recipe,
        policy=policies(),
        scaler=scalers(),
        optimizer=optimizers(),
        clip_norm=st.none() | st.floats(1e-6, 1e6) | st.integers(1, 100),
        accumulate_steps=COUNTS,
    )


@given(recipes())
@settings(max_examples=200, deadline=None)
def test_text_round_trips(recipe: Recipe) -> None:
    for other in (Recipe.from_toml(recipe.to_toml()), Recipe.from_json(recipe.to_json())):
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert repr(other.loss_scaler) == repr(recipe.loss_scaler)
    assert tomllib.loads(recipe.to_toml()) == json.loads(recipe.to_json())
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_file_round_trip(suffix: str, tmp_path: Path) -> None:
    recipe = Recipe(
        policy=Policy("mixed_float16", overrides={"encoder/größe*": "float32"}),
        scaler=LossScaler.like("megatron"),
        optimizer=polyamp.sgd(schedules.warmup_cosine(0.1, 10, 100, origin=-1), momentum=0.9),
        clip_norm=1.0,
        accumulate_steps=4,
    )
    for path in (tmp_path / f"recipe{suffix}", str(tmp_path / f"text{suffix}")):
        recipe.dump(path)
        assert Recipe.load(path) == recipe


def test_a_written_file_reads_as_a_person_would_write_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        """
        policy = "mixed_float16"
        scaler = "megatron"
        clip_norm = 1
        accumulate_steps = 2

        [optimizer]
        type = "adamw"
        betas = [0.9, 0.95]
        learning_rate = { type = "warmup_cosine", peak = 1e-3, warmup_steps = 10, total_steps = 100 }
        """
    )
    assert Recipe.load(path) == Recipe(
        policy=Policy("mixed_float16"),
        scaler=LossScaler.like("megatron"),
        optimizer=polyamp.adamw(schedules.warmup_cosine(1e-3, 10, 100), betas=(0.9, 0.95)),
        clip_norm=1.0,
        accumulate_steps=2,
    )


def test_policy_tables() -> None:
    text = '[policy]\nname = "O2"\nfloat32_matmul = "high"\n[policy.overrides]\n"head*" = "f32"\n'
    policy = Policy("O2", float32_matmul="high", overrides={"head*": "float32"})
    assert Recipe.from_toml(text).policy == policy
    assert Recipe.from_toml('policy = {compute = "bf16"}').policy == Policy("mixed_bfloat16")


def test_defaults() -> None:
    recipe = Recipe()
    assert recipe == Recipe.from_toml("policy = 'float32'") == Recipe.from_json('{"policy": "float32"}')
    assert (recipe.policy, recipe.scaler, recipe.optimizer) == (Policy("float32"), None, polyamp.adamw())
    assert (recipe.clip_norm, recipe.accumulate_steps) == (None, 1)


BAD_TOML: list[tuple[str, str]] = [
    ("clip_nrom = 1.0", r"Recipe has the keys policy, .*Received: 'clip_nrom'\. Did you mean 'clip_norm'\?$"),
    ("clip_norm = 'x'", r"Expected `float \| null`, got `str` - at `\$\.clip_norm`"),
    ("clip_norm = -1.0", r"clip_norm must be None or a finite number above 0\. Received: clip_norm=-1\.0"),
    (
        "clip_value = 0.0",
        r"clip_value must be None or a finite number above 0\. Received: .*: clip_value=None",
    ),
    ("clip_norm = 1.0\nclip_value = 1.0", r"clip_norm and clip_value are two ways to clip, of which a recipe has one"),
    ("clip_eps = 1e-6", r"clip_eps is added to the norm and needs clip_norm\. Received: clip_eps=1e-06 without it"),
    ("clip_norm = 1.0\nclip_eps = -1.0", r"clip_eps must be a finite number of at least 0; torch's is 1e-6\. Received"),
    ("clipvalue = 1.0", r"Received: 'clipvalue'\. Did you mean 'clip_value'"),
    ("clip_norm = inf", r"clip_norm must be None or a finite number above 0\. Received: clip_norm=inf"),
    ("accumulate_steps = 2.5", r"Expected `int`, got `float` - at `\$\.accumulate_steps`"),
    ("accumulate_steps = 0", r"accumulate_steps must be an integer of at least 1\. Received: accumulate_steps=0"),
    ("policy = 'mixed_flot16'", r"Received: 'mixed_flot16'\. Did you mean 'mixed_float16'.* - at `\$\.policy`"),
    ("policy = 16", r"policy must be a string or a table\. Received: 16 - at `\$\.policy`"),
    ("[policy]\ncomput = 'bf16'", r"policy has the keys .*'comput'\. Did you mean 'compute'\? - at `\$\.policy`"),
    ("[policy]\ncompute = 'bf61'", r"compute must be one of .*'bf61'.* - at `\$\.policy`"),
    ("[policy]\nparam = 'f16'\ncompute = 'f32'", r"cannot hold the master weights.* - at `\$\.policy`"),
    ("scaler = 'megatorn'", r"scaler must be one of dynamic, off, .*'megatorn'\. Did you mean 'megatron'"),
    ("[scaler]\ninit_scal = 2.0", r"'init_scal'\. Did you mean 'init_scale'\? - at `\$\.scaler`"),
    ("[scaler]\ninit_scale = 0.0", r"init_scale must be a positive float32 number.* - at `\$\.scaler`"),
    ("[scaler]\ninit_scale = 'big'", r"Expected `float`, got `str` - at `\$\.scaler\.init_scale`"),
    ("[scaler]\ngrowth_interval = 0", r"growth_interval must be an integer of at least 1.* - at `\$\.scaler`"),
    ("[scaler]\nkind = 'auto'", r"Invalid enum value 'auto' - at `\$\.scaler\.kind`"),
    ("[optimizer]\ntype = 'adamm'", r"one of sgd, .*'adamm'\. Did you mean 'adam'.* - at `\$\.optimizer\.type`"),
    ("[optimizer]\nlearning_rate = 0.1", r"type must be one of sgd, .*Received: no type\. - at `\$\.optimizer`"),
    ("[optimizer]\ntype = 'adam'\nlr = 0.1", r"adam has .*'lr'\. Did you mean 'learning_rate'\? - at `\$\.optimizer`"),
    ("[optimizer]\ntype = 'adam'\nlearning_rate = -0.1", r"learning_rate must be .*learning_rate=-0\.1.* - at `\$\."),
    ("[optimizer]\ntype = 'adam'\nbetas = [0.9]", r"Expected `array` of length 2, got 1 - at `\$\.optimizer\.betas`"),
    ("[optimizer]\ntype = 'adam'\nbetas = [0.9, 1.0]", r"betas must be .* below 1\. .* - at `\$\.optimizer`"),
    (
        "[optimizer]\ntype = 'sgd'\n[optimizer.learning_rate]\ntype = 'cosin'\npeak = 1.0",
        r"'cosin'\. Did you mean 'cosine'.* - at `\$\.optimizer\.learning_rate\.type`",
    ),
    (
        "[optimizer]\ntype = 'sgd'\n[optimizer.learning_rate]\ntype = 'cosine'\npeak = 1.0\nsteps = 0",
        r"steps must be an integer of at least 1\. Received: steps=0\. - at `\$\.optimizer\.learning_rate`",
    ),
    ("optimizer = 'adamw'", r"Expected `object`, got `str` - at `\$\.optimizer`"),
    ("policy = 'float16'\nscaler = 'dynamic'", r"a loss scaler needs float32 master weights"),
    ("policy = ]\n", r"Invalid value \(at line 1, column 10\)"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TOML)
def test_a_bad_file_names_itself_and_the_path_in_it(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.__cause__ is not None


def test_bad_json_names_its_source() -> None:
    with pytest.raises(RecipeError, match=r"^JSON text: .*truncated"):
        Recipe.from_json('{"clip_norm": ')
    with pytest.raises(RecipeError, match=r"^mine\.json: Expected `int`, got `str` - at `\$\.accumulate_steps`"):
        Recipe.from_json('{"accumulate_steps": "2"}', source="mine.json")
    with pytest.raises(RecipeError, match=r"^TOML text: Recipe has the keys policy, .*Received: 'x'\."):
        Recipe.from_toml("x = 1")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    for call in (Recipe.load, Recipe().dump):
        with pytest.raises(RecipeError, match=r"a recipe file ends in \.toml or \.json\. Received: 'recipe\.yaml'\."):
            call(tmp_path / "recipe.yaml")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"recipe\.toml is not UTF-8 text: "):
        Recipe.load(tmp_path / "recipe.toml")
    with pytest.raises(FileNotFoundError):
        Recipe.load(tmp_path / "none.toml")


class NativeOptimizer:
    """Stands for torch.optim.SGD and its like."""


def test_a_native_optimizer_is_accepted_but_not_written(tmp_path: Path) -> None:
    native: Any = NativeOptimizer()
    recipe = Recipe(optimizer=native)
    assert recipe.optimizer is native
    path = tmp_path / "recipe.toml"
    path.write_text("clip_norm = 1.0")
    calls: list[Callable[[], Any]] = [recipe.to_toml, recipe.to_json, lambda: recipe.dump(path)]
    for call in calls:
        with pytest.raises(RecipeError, match=r"a native optimizer \(NativeOptimizer\) cannot be written"):
            call()
    assert path.read_text() == "clip_norm = 1.0", "a failing dump leaves the file alone"


class GradScaler:
    """Stands for torch.amp.GradScaler and its like."""


INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scaler": GradScaler()}, RecipeError, r"own scaler would scale the loss a second time\. .*a GradScaler \("),
    ({"scaler": 1024.0}, RecipeError, r"scaler must be a polyamp\.LossScaler, .*scaler=1024\.0\. .*static\(1024\.0\)"),
    ({"scaler": "megatorn"}, LossScaleError, r"Did you mean 'megatron'"),
    ({"policy": None}, RecipeError, r"policy must be a polyamp\.Policy .*Received: policy=None\."),
    ({"policy": "fp61"}, PolicyError, r"Received: 'fp61'"),
    ({"optimizer": "adamw"}, RecipeError, r"optimizer must be one of polyamp's specs \(sgd, adam, adamw, rmsprop, "),
    ({"optimizer": None}, RecipeError, r"Received: optimizer=None\."),
    ({"optimizer": {"type": "sgd"}}, RecipeError, r"Received: a dict\. Write polyamp\.sgd\("),
    ({"optimizer": polyamp.adamw}, RecipeError, r"Received: the class adamw\. Call it: polyamp\.adamw\("),
    *(
        ({"clip_norm": value}, RecipeError, r"clip_norm must be None or a finite number above 0\. Received: clip_norm=")
        for value in (0, -1.0, math.nan, math.inf, True, "1")
    ),
    *(
        ({"accumulate_steps": value}, RecipeError, r"accumulate_steps must be an integer of at least 1\. Received: acc")
        for value in (0, -1, 2.0, True, None)
    ),
    *(
        ({"policy": "float16", "scaler": scaler}, RecipeError, r"a loss scaler needs float32 master weights: .*float16")
        for scaler in ("dynamic", "torch", LossScaler(), LossScaler.static(8.0))
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), INVALID)
def test_impossible_values_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Recipe(**arguments)
    with pytest.raises(kind, match=message):
        Recipe().replace(**arguments)


@pytest.mark.parametrize("name", [*PRESETS, "dynamic", "off"])
def test_scalers_by_name(name: str) -> None:
    scaler = Recipe(scaler=name).loss_scaler
    own = {"dynamic": LossScaler(), "off": LossScaler.off()}
    assert scaler == (own[name] if name in own else LossScaler.like(name))


@pytest.mark.parametrize(
    ("policy", "kind"), [("mixed_float16", "dynamic"), ("mixed_bfloat16", "off"), ("float32", "off"), ("O3", "off")]
)
def test_the_policy_chooses_the_scaler(policy: Any, kind: str) -> None:
    recipe = Recipe(policy=policy)
    assert recipe.policy == Policy(policy)
    assert recipe.scaler is None
    assert recipe.loss_scaler.kind == kind
    assert recipe.replace(scaler="off").loss_scaler.kind == "off"


def test_replace() -> None:
    recipe = Recipe(clip_norm=1.0).replace(policy="mixed_float16", accumulate_steps=2)
    assert (recipe.policy, recipe.clip_norm, recipe.accumulate_steps) == (Policy("mixed_float16"), 1.0, 2)
    assert recipe.loss_scaler.kind == "dynamic"
    with pytest.raises(RecipeError, match=r"Recipe has the fields policy, scaler, optimizer, clip_norm, clip_value, "):
        recipe.replace(clip=1.0)
    with pytest.raises(RecipeError, match=r"Received: a, b\."):
        recipe.replace(b=1, a=2)


def test_recipe_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Recipe().clip_norm = 1.0  # type: ignore[misc]


def test_every_spec_has_a_type_in_files() -> None:
    for spec in SPECS:
        name = spec.tag
        assert Recipe.from_toml(f"policy = 'float32'\n[optimizer]\ntype = '{name}'").optimizer == spec()


@pytest.mark.parametrize("name", [name for name in polyamp.Policy.field_names if name != "aliases"])
def test_an_argument_of_the_policy_names_its_place(name: str) -> None:
    hint = rf"It is the policy's: policy=polyamp\.Policy\('mixed_float16', {name}=\.\.\.\)\.$"
    with pytest.raises(polyamp.ArgumentError, match=hint):
        Recipe(**{name: "float32"})
