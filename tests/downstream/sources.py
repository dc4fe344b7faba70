"""Source distributions from the package index, downloaded and unpacked under `out/downstream/sources`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

from tests.downstream.package import ROOT, Package

SOURCES = ROOT / "out" / "downstream" / "sources"


def source_folder(package: Package) -> Path:
    """Return the folder of the unpacked source distribution, downloaded first where it is missing.

    Raises:
        SystemExit: pip found no source distribution of that version.
    """
    folder = SOURCES / f"{package.name}-{package.version}"
    SOURCES.mkdir(parents=True, exist_ok=True)
    ini = SOURCES / "pytest.ini"
    ini.write_text("# For packages without settings: not those of this repository.\n[pytest]\n", encoding="utf-8")
    if folder.is_dir():
        return folder
    archives = SOURCES / "archives" / folder.name
    if not list(archives.glob("*.tar.gz")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        requirement = f"{package.name}=={package.version}"
        result = subprocess.run(
            [*command, "--no-binary", package.name, "--dest", str(archives), requirement], check=False
        )
        if result.returncode:
            raise SystemExit(f"pip downloads no source distribution of {requirement}; its own message stands above.")
    (archive,) = archives.glob("*.tar.gz")
    temporary = SOURCES / "unpacked" / folder.name
    with tarfile.open(archive) as opened:
        opened.extractall(temporary, filter="data")
    (unpacked,) = temporary.iterdir()
    unpacked.rename(folder)
    temporary.rmdir()
    return folder
