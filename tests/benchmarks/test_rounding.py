"""What benchmarks/engine/rounding.py does to a product, by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.engine.rounding import WAYS, rounded_products

A, B = np.float32([[1 + 3 * 2.0**-12, 1 + 2.0**-9]]), np.eye(2, dtype=np.float32)


@pytest.mark.parametrize('way, product', [
    ('float32', A), ('TF32', [[1 + 2.0**-10, 1 + 2.0**-9]]), ('TF32, cut', [[1, 1 + 2.0**-9]]), ('7 bits', [[1, 1]]),
])  # fmt: skip
def test_both_operands_of_a_float32_product_are_rounded_and_only_in_there(way, product):
    with rounded_products(WAYS[way][0]):
        np.testing.assert_array_equal(jnp.matmul(A, B), product)
        np.testing.assert_array_equal(jnp.einsum('ij,kj->ik', B, A), np.transpose(product))
    np.testing.assert_array_equal(jnp.matmul(A, B), A)
