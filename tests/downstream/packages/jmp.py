"""jmp: its own tests of policies."""

from tests.downstream.package import Package

_CASTS = ("cast_to_param", "cast_to_compute", "cast_to_output")
_REASONS = {
    **dict.fromkeys(
        (f"policy_{cast}{number}" for cast in _CASTS for number in range(0, 10, 2)),
        "The array is NumPy's float64, and polyamp casts float64 only for a policy that names it (S2).",
    ),
    **dict.fromkeys(
        (f"str{number}" for number in range(5)),
        "polyamp writes jmp's words with the dtypes' full names, which `jmp.get_policy` reads too.",
    ),
    "get_policy_almost_dtype": "Both refuse the word, and polyamp's message lists what is accepted.",
}

PACKAGE = Package(
    "jmp",
    "0.0.4",
    "jax",
    "tests of its policies",
    ("jmp.Policy",),
    ("jmp/_src/policy_test.py",),
    differences={f"PolicyTest::test_{name}": reason for name, reason in _REASONS.items()},
)
