"""What `import polyamp_torch` costs: no compiler, no training library."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, polyamp_torch
print(sorted({"torch._dynamo", "torch._inductor", "lightning", "accelerate"} & set(sys.modules)))
"""


def test_the_compiler_and_the_training_libraries_are_not_imported() -> None:
    """torch._dynamo alone takes two seconds."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
