"""Breaking changes of the public API between two trees: names that are gone, and signatures that griffe says broke.

Public is what `docs/site/public_names.py` lists, so a change of an internal function is none. An older tree is read by
the lister of this one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("polyamp", "polyamp_torch", "polyamp_tensorflow", "polyamp_jax")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_LIST_NAMES: Final = """
import json, pathlib, sys
root, tools = map(pathlib.Path, sys.argv[1:])
sys.path.insert(0, str(tools))
import public_names
public_names.ROOT = root
found = {}
for package in public_names.PACKAGES:
    for name in public_names.public_names(package):
        found[name.name] = f"{name.home}.{getattr(name.node, 'name', name.name.rpartition('.')[2])}"
print(json.dumps(found))
"""


def last_tag(root: Path = ROOT) -> str | None:
    """Return the last tag before this commit; None if there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def breaking_changes(reference: str, root: Path = ROOT) -> list[str]:
    """Return a line for each breaking change of the public API since a commit."""
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "tree"
        archive = Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "--output", str(archive), reference], cwd=root, check=True)
        with tarfile.open(archive) as opened:
            opened.extractall(old, filter="data")
        return compare_trees(old, root)


def compare_trees(old: Path, new: Path) -> list[str]:
    """Return a line for each breaking change of the public API between two folders with a source tree."""
    import griffe

    before, after = public_names(old), public_names(new)
    found = [f"{name}: removed" for name in sorted(before.keys() - after.keys())]
    homes = {home: name for name, home in before.items() if name in after}
    for package in PACKAGES:
        sides = [
            griffe.load(package, search_paths=[root, root / "backends"], try_relative_path=False) for root in (old, new)
        ]
        for change in griffe.find_breaking_changes(*sides):
            home = next((each for each in homes if f"{change.obj.path}.".startswith(f"{each}.")), None)
            if home is not None:
                said = _COLOUR.sub("", change.explain()).partition(": ")[2].strip()
                found.append(f"{homes[home]}: {said}")
    return list(dict.fromkeys(found))


def public_names(root: Path) -> dict[str, str]:
    """Return the public names of a tree -> the dotted path of their definition."""
    command = [sys.executable, "-c", _LIST_NAMES, str(root), str(ROOT / "docs" / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names: dict[str, str] = json.loads(done.stdout)
    return names
