"""Rings of tests: what a machine cannot run is skipped with the reason."""

import importlib.util
import logging
from collections.abc import Iterator

import pytest
import torch


def _missing(item: pytest.Item) -> str | None:
    """What this machine lacks for a test, or None."""
    num_gpus = torch.cuda.device_count()
    if item.get_closest_marker("gpu") and not num_gpus:
        return "needs an NVIDIA GPU"
    several = item.get_closest_marker("gpus")
    if several and num_gpus < several.args[0]:
        return f"needs {several.args[0]} NVIDIA GPUs, found {num_gpus}"
    if item.get_closest_marker("compile") and not importlib.util.find_spec("cutlass"):
        return "needs nvidia-cutlass-dsl"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _missing(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reset_logger() -> None:
    logger = logging.getLogger("moe_ep")
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(autouse=True)
def clean_logger() -> Iterator[None]:
    """Commands that a test runs in this process set up logging for a whole program."""
    _reset_logger()
    yield
    _reset_logger()
