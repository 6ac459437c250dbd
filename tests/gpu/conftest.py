"""The GPU suite: marked `gpu`, and skipped with the reason where there are not enough CUDA devices.

    pytest tests/gpu -m gpu          # on a machine with one GPU or more

Ranks are forked (tests/harness.py), so this process must never touch a device: devices are counted through NVML.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def devices() -> int:
    """How many CUDA devices there are, found without starting CUDA in this process."""
    import torch

    return torch.cuda.device_count() if torch.version.cuda else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents and "world" in _parameters(item)]
    found = devices() if here else 0
    for item in here:
        item.add_marker(pytest.mark.gpu)
        needed = _parameters(item)["world"]
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {found}"))


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
