"""lightning: the demos in its package, trained by `Trainer` and `Fabric`. Its tests are in no distribution."""

from tests.downstream.package import Package

PACKAGE = Package(
    "lightning",
    "2.6.6",
    "torch",
    "its demos by `Trainer` and `Fabric` in bfloat16 and float16",
    ("lightning MixedPrecision",),
    program="lightning_demos.py",
)
