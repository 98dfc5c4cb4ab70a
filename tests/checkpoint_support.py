"""What the tests of checkpoints share: a model, a state dict of many dtypes, equal bits,
and small files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import safetensors.torch
import torch
from torch import nn

from bnconvert.testing import randomize_batchnorm

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {"safetensors": "w.safetensors", "torch": "w.pth", "sharded": "w"}
STATE = {
    "bn.weight": torch.ones(3),
    "bn.running_mean": torch.zeros(3),
    "bn.running_var": torch.ones(3),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.BatchNorm1d(5))
    randomize_batchnorm(model, seed)
    return model


def mixed_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {
        f"d.{str(dtype).removeprefix('torch.')}": torch.arange(-3, 4).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16,
            torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
        )
    }  # fmt: skip
    state["empty"] = torch.zeros(0, 3)
    state["scalar"] = torch.tensor(2.5)
    state["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    state["strided"] = torch.randn(4, 6).T
    state["first"] = torch.randn(5)
    state["same"] = state["first"]
    return state


def assert_bits(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert loaded[name].shape == value.shape, name
        left = loaded[name].contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(left, value.contiguous().reshape(-1).view(torch.uint8)), name


def assert_same(loaded: Any, expected: dict[str, Any]) -> None:
    assert set(loaded) == set(expected)
    for name, value in expected.items():
        tensor = torch.as_tensor(value)
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def pack(value: Any) -> bytes:
    """Write MessagePack as Flax does."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(pack(k) + pack(v) for k, v in value.items())
    if isinstance(value, str):
        return bytes([0xA0 | len(value)]) + value.encode()
    if isinstance(value, int):
        return b"\xd2" + struct.pack(">i", value)
    if isinstance(value, (list, tuple)):
        return bytes([0x90 | len(value)]) + b"".join(map(pack, value))
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    array = np.asarray(value)
    inner = pack([list(array.shape), array.dtype.name, array.tobytes()])
    return b"\xc9" + struct.pack(">I", len(inner)) + b"\x01" + inner


def make_specimens(folder: Path) -> dict[str, Path]:
    torch.save(STATE, folder / "zip.pt")
    torch.save(STATE, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(STATE, folder / "s.safetensors")
    np.savez(folder / "n.npz", **{name: value.numpy() for name, value in STATE.items()})  # type: ignore[arg-type]
    with h5py.File(folder / "h.h5", "w") as file:
        for name, value in STATE.items():
            file[name.replace(".", "/")] = value.numpy()
    paths = {path.stem: path for path in folder.iterdir()}
    assert len(paths) == 5
    return paths
