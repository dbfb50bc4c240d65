"""Fixtures of the kernel tests: an op's backend, and whether a kernel is interpreted."""

import jax
import pytest
from kernel_cases import IMPLEMENTATIONS

from pallas_kernels import Backend


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("no GPU here")


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.gpu)], scope="module")
def interpret(request: pytest.FixtureRequest) -> bool:
    return request.param
