"""Fixtures that several test files use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from bnconvert.kernels import comm, selection
from tests.shapes import write_shapes
from tests.shim.driver import ShimDriver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


CPU = torch.device("cpu")


@pytest.fixture
def shim() -> Iterator[ShimDriver]:
    """Make our kernels those of CPU tensors."""
    driver = selection.drivers[CPU] = ShimDriver(multiprocessors=2)
    yield driver
    del selection.drivers[CPU]


@pytest.fixture
def one_rank(tmp_path: Any) -> Iterator[None]:
    """Join a process group of one rank, and make layers synchronise in it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    with comm.forced():
        yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small images of three classes, in train and val."""
    return write_shapes(tmp_path_factory.mktemp("shapes"))
