"""Products in 8 bits with scales of rows and blocks beside qwix's (S36): scales, 8-bit numbers, and three products.

    python -m venv qwix && qwix/bin/pip install qwix ml_dtypes
    PYTHONPATH=.:backends qwix/bin/python benchmarks/float8_qwix.py [--matrices 20]

qwix's "mxfp8" has polyamp's scales of blocks: powers of two, rounded up. Its gradients are in float8_e4m3fn then, so
polyamp's are too. qwix's scales of rows are no powers of two, so the two recipes coincide where the largest magnitude
of every row is the format's largest number times a power of two: matrices of that kind are compared, and the distance
is printed for any others. qwix rounds a scale up by its logarithm in float32, which is not exact where the largest
magnitude is 1.75 times a power of two: now and then it takes the next scale, and the numbers of that block differ.
Both sides start from bfloat16 numbers. qwix: https://github.com/google/qwix, release 0.1.8.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import numpy as np

from polyamp.recipe.float8 import LARGEST_EXPONENTS, Float8
from polyamp.reference import float8

FORMAT = "float8_e4m3fn"
ROWS, INPUTS, OUTPUTS = 64, 128, 96
Matrix = np.ndarray[Any, Any]


def bfloat16_numbers(values: Matrix) -> Matrix:
    """Return values rounded to bfloat16, as float32."""
    dtype: Any = importlib.import_module("ml_dtypes").bfloat16
    return np.asarray(values.astype(dtype).astype(np.float32))


def any_matrix(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Return a matrix whose rows and blocks of columns have other sizes."""
    sizes = np.add.outer(rng.integers(-12, 12, rows), np.repeat(rng.integers(-12, 12, -(-columns // 32)), 32)[:columns])
    return bfloat16_numbers(rng.standard_normal((rows, columns)) * np.exp2(sizes))


def common_matrix(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Return a matrix in which the largest magnitude of each row and each column is 1.75 times a power of two."""
    x = np.clip(rng.standard_normal((rows, columns)), -1.75, 1.75)
    x[rng.integers(rows)] = x[:, rng.integers(columns)] = 1.75
    row_sizes, column_sizes = rng.integers(-12, 12, rows), rng.integers(-12, 12, columns)
    row_sizes[(np.abs(x) == 1.75).all(axis=1)] = column_sizes[(np.abs(x) == 1.75).all(axis=0)] = 12
    return bfloat16_numbers(x * np.exp2(np.add.outer(row_sizes, column_sizes)))


def quantize(x: Matrix, scaling: str) -> tuple[Matrix, Matrix]:
    """Return qwix's 8-bit numbers of a matrix along its last axis, and the logarithms of its scales."""
    qwix = importlib.import_module("qwix")
    blocks = {"tiled_axes": {1: 32}} if scaling == "block32" else {}
    made = qwix.quantize(
        x,
        "mxfp8" if scaling == "block32" else importlib.import_module("jax.numpy").float8_e4m3fn,
        channelwise_axes=[0],
        **blocks,
    )
    return np.asarray(made.qvalue), np.log2(np.asarray(made.scale, np.float64))


def differing_numbers(scaling: str, count: int) -> tuple[int, int, int, int]:
    """Return how many scales, of how many, and how many 8-bit numbers, of how many, differ."""
    rng, found = np.random.default_rng(0), np.zeros(4, np.int64)
    make = any_matrix if scaling == "block32" else common_matrix
    for _ in range(count):
        x = make(rng, ROWS, INPUTS)
        numbers, logarithms = quantize(x, scaling)
        own = float8.quantize(x, FORMAT, scaling)
        codes = numbers.view(np.uint8) != own.numbers.view(np.uint8)
        found += [(logarithms != -own.exponent).sum(), logarithms.size, codes.sum(), codes.size]
    return tuple(found.tolist())


def products(x: Matrix, w: Matrix, g: Matrix, scaling: str) -> list[Matrix]:
    """Return qwix's x @ w and its gradients by x and w for the cotangent g."""
    jax = importlib.import_module("jax")
    module = importlib.import_module("qwix._src.core.dot_general_qt")
    form = "mxfp8" if scaling == "block32" else jax.numpy.float8_e4m3fn
    tile = 32 if scaling == "block32" else None
    config = module.DotGeneralQtConfig(
        lhs_qtype=form,
        rhs_qtype=form,
        tile_size=tile,
        dlhs_grad_qtype=form,
        drhs_grad_qtype=form,
        dlhs_tile_size=tile,
        drhs_tile_size=tile,
        use_original_residuals=True,
        dlhs_residual_qtype=form,
        drhs_residual_qtype=form,
    )
    given = [jax.numpy.asarray(each) for each in (x, w)]
    out, back = jax.vjp(lambda x, w: module.dot_general_qt(x, w, (((1,), (0,)), ((), ())), config), *given)
    return [np.asarray(each, np.float64) for each in (out, *back(jax.numpy.asarray(g)))]


def largest_distances(scaling: str, make: Any) -> list[float]:
    """Return the largest distance of each product from polyamp's, over the sum of the magnitudes that it adds."""
    rng = np.random.default_rng(1)
    x, w, g = make(rng, ROWS, INPUTS), make(rng, INPUTS, OUTPUTS), make(rng, ROWS, OUTPUTS)
    settings = Float8(scaling=scaling, gradients=FORMAT, emulate=True)
    own = (float8.multiply(x, w, settings, np.float64), *float8.gradients(x, w, g, settings, np.float64))
    sums = (np.abs(x) @ np.abs(w), np.abs(g) @ np.abs(w.T), np.abs(x.T) @ np.abs(g))
    pairs = zip(own, products(x, w, g, scaling), sums, strict=True)
    return [float((np.abs(a - b) / size).max()) for a, b, size in pairs]


def main() -> None:
    """Print the differences of scales, 8-bit numbers and products, for blocks and for rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--matrices", type=int, default=20)
    count = parser.parse_args().matrices
    assert LARGEST_EXPONENTS[FORMAT] == 8  # 1.75 * 2 ** 8, the largest number, as in `common_matrix`
    for scaling in ("block32", "row"):
        scales, of_scales, numbers, of_numbers = differing_numbers(scaling, count)
        print(f"{scaling}: {scales} of {of_scales} scales and {numbers} of {of_numbers} 8-bit numbers differ")
        for make in (common_matrix, any_matrix):
            distances = largest_distances(scaling, make)
            shown = ", ".join(f"{name} {each:.1e}" for name, each in zip(("y", "dx", "dw"), distances, strict=True))
            print(f"  {make.__name__}: largest distance of the products, over the magnitudes summed: {shown}")


if __name__ == "__main__":
    main()
