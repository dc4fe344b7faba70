"""How often N replicas skip together, and where their loss scale settles: a simulation, no framework and no timing.

On every replica the largest gradient of a step is a random number, log-normal with a spread of `--spread` powers of
two; a step is skipped if it overflows float16, scaled, on any of them. The scale moves by the numbers of
`polyamp.LossScaler()`.

    python benchmarks/skip_simulation.py
"""

from __future__ import annotations

import argparse
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

import polyamp

LARGEST = 16.0
"""The first power of two that float16 does not have."""


class Settled(NamedTuple):
    """What a simulated training came to.

    Attributes:
        skipped: share of the steps that were skipped.
        scale: mean power of two of the scale, once it has settled.
    """

    skipped: float
    scale: float


def simulated(replicas: int, steps: int, spread: float = 1.0, seed: int = 0) -> Settled:
    """One training.

    Args:
        replicas: any of which may overflow.
        steps: how many; the first fifth is not counted.
        spread: standard deviation of the largest gradient's power of two, from step to step and replica to replica.
        seed: of the random numbers.
    """
    scaler = polyamp.LossScaler()
    rng, normal = np.random.default_rng(seed), NormalDist(-2.0, spread)
    scale, good, skipped, powers = float(np.log2(scaler.init_scale)), 0, 0, []
    lowest = float(np.log2(scaler.min_scale))
    for step in range(steps):
        largest = normal.inv_cdf(min(rng.random() ** (1 / replicas), 1 - 1e-16))  # of as many independent ones
        counted = step >= steps // 5
        if largest + scale >= LARGEST:
            scale, good = max(scale + float(np.log2(scaler.backoff_factor)), lowest), 0
            skipped += counted
        else:
            good += 1
            if good == scaler.growth_interval:
                scale, good = scale + float(np.log2(scaler.growth_factor)), 0
        if counted:
            powers.append(scale)
    return Settled(skipped / len(powers), float(np.mean(powers)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--spread", type=float, default=1.0)
    options = parser.parse_args()
    print(f"{'replicas':>8}  {'skipped':>9}  {'scale settles at':>16}")
    for replicas in (1, 8, 64, 1024):
        found = simulated(replicas, options.steps, options.spread)
        print(f"{replicas:8}  {found.skipped:9.2e}  {f'2^{found.scale:.1f}':>16}")


if __name__ == "__main__":
    main()
