"""Tests that need GPUs are skipped, with the reason, where there are too few."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpus")
        needed = marker.args[0] if marker else 1 if item.get_closest_marker("gpu") else 0
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {num_gpus}"))
