"""Mistakes with files: recipes that cannot be read, checkpoints that are none, missing folders. Rows of `table`.

What lies in `folder` is made by `files`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.mistakes.table import CORE, EVERYWHERE, Row, every

TEXTS: Final = {
    "key.toml": 'policy = "mixed_float16"\nclip_nrom = 1.0\n',
    "inner.toml": 'policy = "mixed_float16"\n\n[optimizer]\ntype = "adamw"\nlr = 0.1\n',
    "kind.toml": 'policy = "mixed_float16"\nclip_norm = "1.0"\n',
    "type.toml": 'policy = "mixed_float16"\n\n[optimizer]\ntype = "adamW"\n',
    "untyped.toml": 'policy = "mixed_float16"\n\n[optimizer]\nlearning_rate = 0.1\n',
    "schedule.toml": 'policy = "float32"\n\n[optimizer]\ntype = "sgd"\nlearning_rate = {type = "cosin", peak = 1.0}\n',
    "syntax.toml": 'policy = "mixed_float16"\nclip_norm = = 1.0\n',
    "unclosed.toml": 'policy = "mixed_float16\nclip_norm = 1.0\n',
    "syntax.json": '{\n  "policy": "mixed_float16",\n  "clip_norm": 1.0,,\n}\n',
    "policy.toml": "clip_norm = 1.0\n",
    "spelling.toml": 'policy = "Mixed_Float16"\n',
    "table.toml": '[policy]\ncompute = "float16"\noutputt = "float32"\n',
    "scaler.toml": 'policy = "mixed_float16"\n\n[scaler]\ninit_scal = 8.0\n',
    "value.toml": 'policy = "mixed_float16"\naccumulate_steps = 0\n',
    "list.json": "[1, 2]",
    "empty.toml": "",
    "recipe.yaml": "policy: mixed_float16\n",
    "notes.txt": "not a checkpoint",
}
"""Name -> what is in it."""
_LOAD: Final = "Recipe.load(folder / '{}')"
_NONE: Final = r"is not a whole polyamp checkpoint"

ROWS: Final = [
    *every(
        "RecipeError",
        CORE,
        [
            (
                _LOAD.format("key.toml"),
                r"key\.toml: .*the keys policy, scaler, .*Received: 'clip_nrom'\. Did you mean 'clip_norm'",
            ),
            (_LOAD.format("inner.toml"), r"inner\.toml: .*Received: 'lr'.*Did you mean 'learning_rate'.*optimizer"),
            (_LOAD.format("kind.toml"), r"kind\.toml: .*Expected `float \| null`, got `str`.*clip_norm"),
            (
                _LOAD.format("type.toml"),
                r"type\.toml: .*sgd, adam, adamw.*Received: 'adamW'\. Did you mean 'adamw'.*optimizer",
            ),
            (_LOAD.format("untyped.toml"), r"untyped\.toml: .*type.*adamw.*optimizer"),
            (
                _LOAD.format("schedule.toml"),
                r"schedule\.toml: .*constant, .*Received: 'cosin'\. Did you mean 'cosine'.*learning_r",
            ),
            (_LOAD.format("syntax.toml"), r"syntax\.toml: .*line 2"),
            (_LOAD.format("unclosed.toml"), r"unclosed\.toml: .*line 1"),
            (_LOAD.format("syntax.json"), r"syntax\.json: .*line 3"),
            (_LOAD.format("policy.toml"), r"policy\.toml: no policy is named.*Received the keys: clip_norm"),
            (
                _LOAD.format("spelling.toml"),
                r"spelling\.toml: .*Received: 'Mixed_Float16'.*Did you mean 'mixed_float16'",
            ),
            (
                _LOAD.format("table.toml"),
                r"table\.toml: policy has the keys.*Received: 'outputt'.*Did you mean 'output'",
            ),
            (_LOAD.format("scaler.toml"), r"scaler\.toml: .*Received: 'init_scal'.*Did you mean 'init_scale'.*scaler"),
            (_LOAD.format("value.toml"), r"value\.toml: accumulate_steps must be an integer"),
            (
                _LOAD.format("list.json"),
                r"list\.json: .*a table.*Received: a list|list\.json: Expected `object`, got `array`",
            ),
            (_LOAD.format("empty.toml"), r"empty\.toml: no policy is named.*Received the keys: none"),
            (_LOAD.format("recipe.yaml"), r"a recipe file ends in \.toml or \.json\. Received: 'recipe\.yaml'"),
            ("Recipe.from_toml('mixed_float16')", r"TOML text: .*line 1"),
            ("Recipe.from_toml(folder / 'key.toml')", r"text must be TOML.*Received: .*Path.*Recipe\.load"),
            ("Recipe().dump(folder / 'recipe.yaml')", r"a recipe file ends in \.toml or \.json"),
            ("Recipe(optimizer=object()).dump(folder / 'a.toml')", r"a native optimizer.*cannot be written"),
        ],
    ),
    Row("Recipe.load({'policy': 'fp16'})", "ArgumentError", r"path must be.*Received: a dict.*Recipe\(", CORE),
    Row("Recipe.load(Recipe())", "ArgumentError", r"path must be.*Received: a Recipe", CORE),
    Row("Recipe.load(folder / 'kye.toml')", "FileNotFoundError", r"Did you mean 'key\.toml'.*kye\.toml", CORE),
    Row("Recipe.load(folder)", "RecipeError", r"a recipe file ends in \.toml or \.json", CORE),
    Row(
        "Recipe().dump(folder / 'missing' / 'recipe.toml')",
        "FileNotFoundError",
        r"the folder .*missing does not exist.*mkdir",
        CORE,
    ),
    Row(
        "Recipe().dump('/proc/recipe.toml')",
        "OSError",
        r"no file in the folder /proc can be written.*another folder",
        CORE,
    ),
    # checkpoints
    Row(
        "polyamp.save(state, folder / 'missing' / 'state')",
        "FileNotFoundError",
        r"the folder .*missing does not exist.*mkdir",
    ),
    Row(
        "polyamp.save(state, folder / 'missing' / 'state', dry_run=True)",
        "FileNotFoundError",
        r"the folder .*missing does not exist.*mkdir",
    ),
    Row("polyamp.save(state, folder)", "IsADirectoryError", r"is a folder.*a file's path"),
    Row(
        "polyamp.save(state, '/proc/state', dry_run=True)",
        "OSError",
        r"no file in the folder /proc can be written.*another folder",
    ),
    Row(
        "polyamp.save(state, folder / 'notes.txt' / 'state')",
        "NotADirectoryError",
        r"notes\.txt is a file, not a folder",
    ),
    Row("polyamp.restore(state, folder)", "IsADirectoryError", r"without polyamp\.json.*that polyamp\.save wrote"),
    Row(
        "polyamp.restore(state, folder / 'state')",
        "FileNotFoundError",
        r"there is no such file in .*Did you mean 'saved'",
    ),
    *every(
        "CheckpointError",
        EVERYWHERE,
        [
            ("polyamp.restore(state, folder / 'notes.txt')", rf"notes\.txt {_NONE}"),
            ("polyamp.restore(state, folder / 'key.toml')", rf"key\.toml {_NONE}"),
            ("polyamp.restore(state, folder / 'model.pt')", rf"model\.pt {_NONE}.*zip archive.*torch\.save"),
            ("polyamp.restore(state, folder / 'empty.toml')", rf"empty\.toml {_NONE}.*empty"),
            ("polyamp.restore(state, path, on_change='ignore')", r"on_change must be 'error', 'warn' or 'accept'"),
            (
                "polyamp.restore(polyamp.init(model, Recipe(optimizer=polyamp.sgd())), saved)",
                r"belongs to another model, optimizer|another recipe",
            ),
            (
                "polyamp.restore(polyamp.init(model, recipe.replace(clip_norm=1.0)), saved)",
                r"saved with another recipe.*clip_norm.*on_change='accept'",
            ),
        ],
    ),
]


def files(folder: Path) -> None:
    """Make the files in an empty folder."""
    import zipfile

    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("data.pkl", b"")
