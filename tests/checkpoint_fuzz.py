"""Small specimens of every format, ways to damage them, and what must hold whatever happens."""

from __future__ import annotations

import json
import pickle
import random
import resource
import struct
import time
import warnings
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import onnx
import onnx.helper as oh
import safetensors.torch
import torch
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from bnconvert.checkpoint import load_checkpoint
from bnconvert.checkpoint.conversion import Settings, plan_conversion
from bnconvert.checkpoint.crc32c import masked
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 20.0
MEMORY = 1 << 30

STATE: dict[str, torch.Tensor] = OrderedDict(
    {
        "conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
        "bn.weight": torch.tensor([1.0, -2.0]),
        "bn.bias": torch.zeros(2),
        "bn.running_mean": torch.tensor([0.5, -0.5]),
        "bn.running_var": torch.tensor([1.0, 2.0]),
        "bn.num_batches_tracked": torch.tensor(3),
    }
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 2, bias=False)
        self.bn = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn(self.conv(x))
        return y


def arrays() -> dict[str, Any]:
    return {name: value.numpy() for name, value in STATE.items()}


def torch_file(path: Path, zipped: bool) -> Path:
    torch.save(
        {"state_dict": STATE, "arch": "a", "epoch": 1}, path, _use_new_zipfile_serialization=zipped
    )
    return path


def distributed(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        save_distributed(dict(STATE), checkpoint_id=path.with_suffix(""), no_dist=True)
    return path.with_suffix("") / ".metadata"


def script(path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that TorchScript is deprecated
        torch.jit.script(Net()).save(path)  # type: ignore[no-untyped-call]
    return path


def exported(path: Path) -> Path:
    path = path.with_suffix(".pt2")
    torch.export.save(torch.export.export(Net().eval(), (torch.ones(1, 3, 3, 3),)), path)
    return path


def sharded(path: Path) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    safetensors.torch.save_file(dict(STATE), folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, "a.safetensors")}))
    return index


def onnx_file(path: Path) -> Path:
    names = ["bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    tensors = [numpy_helper.from_array(arrays()[name], name) for name in names[:2]]
    constants = [
        oh.make_node(
            "Constant", [], [name], value=oh.make_tensor(name, 1, [2], STATE[name].tolist())
        )
        for name in names[2:]
    ]
    node = oh.make_node("BatchNormalization", ["x", *names], ["y"], epsilon=1e-3)
    graph = oh.make_graph([*constants, node], "g", [], [], tensors)
    onnx.save(oh.make_model(graph), path)
    return path


def keras(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for name in ("gamma", "beta", "moving_mean", "moving_variance"):
            file[f"model_weights/norm/norm/{name}:0"] = np.ones(4, np.float32)
        file.create_dataset("model_weights/c/c/kernel:0", data=np.ones((2, 2, 3, 4)),
                            chunks=(1, 2, 3, 4), compression="gzip")  # fmt: skip
    return path


def flax(path: Path) -> Path:
    inner = b"\x93\x91\x02\xa7float32\xc4\x08" + np.ones(2, np.float32).tobytes()
    array = b"\xc7" + bytes([len(inner)]) + b"\x01" + inner
    norm = b"\x81\xa2bn\x82\xa5scale" + array + b"\xa4bias" + array
    stats = b"\x81\xa2bn\x82\xa4mean" + array + b"\xa3var" + array
    path.write_bytes(b"\x82\xa6params" + norm + b"\xabbatch_stats" + stats)
    return path


def tensorflow(path: Path) -> Path:
    """Write an index with one block, as TensorFlow does, and its data."""
    values = {name: np.ones(2, np.float32).tobytes() for name in ("bn/beta", "bn/gamma")}
    entries = [(b"", b"\x08\x01\x1a\x02\x08\x01")]
    data = b""
    for name, value in values.items():
        entry = b"\x08\x01\x12\x04\x12\x02\x08\x02" + b"\x20" + bytes([len(data)]) + b"\x28\x08"
        entry += b"\x35" + struct.pack("<I", masked(value))
        entries.append((name.encode(), entry))
        data += value

    def block(items: list[tuple[bytes, bytes]]) -> bytes:
        body = b"".join(
            bytes([0, len(key), len(value)]) + key + value for key, value in items
        ) + struct.pack("<II", 0, 1)  # fmt: skip
        return body + b"\0" + struct.pack("<I", masked(body + b"\0"))

    first = block(entries)
    handle = b"\0" + bytes([len(first) - 5 | 0x80, len(first) - 5 >> 7])
    if len(first) - 5 < 128:
        handle = b"\0" + bytes([len(first) - 5])
    empty, index = block([]), block([(b"z", handle)])
    at = len(first)

    def varint(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])

    footer = varint(at) + varint(len(empty) - 5)
    footer += varint(at + len(empty)) + varint(len(index) - 5)
    footer = footer.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")
    path = path.with_suffix(".index")
    path.write_bytes(first + empty + index + footer)
    Path(str(path).removesuffix(".index") + ".data-00000-of-00001").write_bytes(data)
    return path


def plain(path: Path, content: Any, protocol: int) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


def archive(path: Path, compressed: bool) -> Path:
    path = path.with_suffix(".npz")
    (np.savez_compressed if compressed else np.savez)(path, **arrays())
    return path


def keras_archive(path: Path) -> Path:
    inner = keras(path.with_suffix(".inner"))
    layer = {"class_name": "BatchNormalization", "config": {"name": "norm", "epsilon": 1e-3}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.json", json.dumps({"config": {"layers": [layer]}}))
        file.write(inner, "model.weights.h5")
    inner.unlink()
    return path


def safetensors_file(path: Path) -> Path:
    safetensors.torch.save_file(dict(STATE), path)
    return path


def module(path: Path, zipped: bool) -> Path:
    torch.save({"model": Net(), "ema": None}, path, _use_new_zipfile_serialization=zipped)
    return path


SPECIMENS: dict[str, Callable[[Path], Path]] = {
    "torch zip": lambda path: torch_file(path, True),
    "torch legacy": lambda path: torch_file(path, False),
    "pickled module": lambda path: module(path, False),
    "TorchScript": script,
    "torch.export": exported,
    "DCP metadata": distributed,
    "safetensors": safetensors_file,
    "sharded index": sharded,
    "pickle 0": lambda path: plain(path, dict(STATE), 0),
    "pickle 2": lambda path: plain(path, {"blobs": arrays()}, 2),
    "pickle 4": lambda path: plain(path, {"model": arrays(), "__author__": "a"}, 4),
    "ONNX": onnx_file,
    "Flax": flax,
    "TensorFlow": tensorflow,
    "npz": lambda path: archive(path, False),
    "npz compressed": lambda path: archive(path, True),
}
HDF5 = {"Keras HDF5": keras, "Keras archive": keras_archive}

EXTREMES = (
    b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\xff" * 8, b"\0" * 8,
    (1 << 63).to_bytes(8, "little"), (1 << 31).to_bytes(4, "little"), b"R", b".", b"(", b"}",
)  # fmt: skip

SEEDS = st.integers(0, 2**64 - 1)


def damaged(content: bytes, seed: int) -> bytes:
    """Return a damaged copy: bits and bytes changed, parts removed, repeated, moved or cut off.

    Args:
        content: A file.
        seed: Decides the damage, so that hypothesis draws one number and not dozens.
    """
    draw = random.Random(seed)  # noqa: S311 (damage, no secret)
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        if not data:
            break
        at = draw.randrange(len(data))
        length = draw.randint(1, 64)
        kind = draw.randrange(7)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at] = draw.randrange(256)
        elif kind == 2:
            extreme = draw.choice(EXTREMES)
            data[at : at + len(extreme)] = extreme
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length] * draw.randint(1, 3)
        elif kind == 5:
            source = draw.randrange(len(data))
            data[at : at + length // 4] = data[source : source + length // 4]
        else:
            del data[at:]
    return bytes(data)


def open_files(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, deleted ones as well."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # other threads open and close files meanwhile
            found.append(str(entry.readlink()))
    return [name for name in found if name.startswith(f"{folder.resolve()}/")]


def opened(path: Path) -> Path:
    """Return what is opened to read a specimen's damaged part: distributed metadata's folder."""
    return path.parent if path.name == ".metadata" else path


def use(path: Path) -> str:
    """Open a file, read all of it and plan its conversion; say how it went."""
    try:
        checkpoint = load_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.tensors[name]
        str(checkpoint)
        plan_conversion(checkpoint, Settings())
    except CheckpointError as error:
        text = str(error)
    else:
        return "read"
    assert path.name in text
    assert "\n" not in text
    return "refused"


def check(path: Path, content: bytes) -> str:
    """Use a damaged file; fail on any other error, on slowness, on memory and on open files."""
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = use(opened(path))
    assert time.monotonic() - start < SECONDS
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY, grown
    assert not open_files(path.parent)
    return result
