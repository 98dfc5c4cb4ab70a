"""Files made to harm: nothing in them runs, and each is refused in a sentence, soon and cheaply."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from bnconvert.checkpoint import convert_checkpoint, load_checkpoint
from bnconvert.errors import CheckpointError
from tests.checkpoint_support import STATE, make_specimens

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKER = Path("/tmp/bnconvert-hostile-marker")  # noqa: S108 (must be known to the pickles below)


class Call:
    """Pickles as a call that leaves a mark."""

    def __init__(self, how: str = "reduce") -> None:
        self.how = how

    def __reduce__(self) -> Any:
        target = str(MARKER)
        return {
            "reduce": (os.mkdir, (target,)),
            "eval": (eval, (f"__import__('os').mkdir({target!r})",)),
            "getattr": (getattr, (Path, "mkdir")),
            "import": (__import__, ("antigravity",)),
            "partial": (torch.load, (target,)),
        }[self.how]


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    if MARKER.exists():
        MARKER.rmdir()
    yield
    assert not MARKER.exists()


def places(evil: Any) -> dict[str, Any]:
    return {
        "weights": {**STATE, "x": evil},
        "optimizer": {"state_dict": STATE, "optimizer": {"state": [evil]}, "arch": "a"},
        "callbacks": {"state_dict": STATE, "callbacks": {"c": evil}, "loops": {}},
        "hyper_parameters": {"state_dict": STATE, "hyper_parameters": {"h": evil}},
        "key": {"state_dict": STATE, "callbacks": {(1, 2): [evil]}},
        "root": evil,
        "module": {"model": nn.BatchNorm2d(3), "extra": evil},
    }


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", list(places(None)))
def test_calls_anywhere_in_torch_files_run_nothing(
    tmp_path: Path, place: str, zipped: bool
) -> None:
    torch.save(places(Call())[place], tmp_path / "e.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"calls posix\.mkdir.*save the state dict alone"):
        load_checkpoint(tmp_path / "e.pt", allow_globals=["posix.mkdir"])


@pytest.mark.parametrize("how", ["reduce", "eval", "getattr", "import", "partial"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_every_kind_of_call_is_refused_in_plain_pickles(
    tmp_path: Path, how: str, protocol: int
) -> None:
    content = {"a": np.ones(2, np.float32), "b": Call(how)}
    (tmp_path / "e.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(CheckpointError, match="refused: its pickle calls"):
        load_checkpoint(tmp_path / "e.pkl")


def test_old_instructions_that_call_are_refused(tmp_path: Path) -> None:
    for name, text in {
        "inst": b"(S'" + str(MARKER).encode() + b"'\nios\nmkdir\n.",
        "obj": b"(cos\nmkdir\nS'" + str(MARKER).encode() + b"'\no.",
        "stack": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x01x\x85R.",
        "ext": b"\x80\x02\x82\x01.",
        "buffer": b"\x80\x05\x97.",
    }.items():
        (tmp_path / f"{name}.pkl").write_bytes(b"\x80\x02}X\x01\x00\x00\x00a" + text[:-1] + b"s.")
        with pytest.raises(CheckpointError, match=f"{name}.pkl"):
            load_checkpoint(tmp_path / f"{name}.pkl")


def test_every_global_that_a_file_asks_for_is_listed(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "loops": [Call(), Call("eval"), Path]}, tmp_path / "e.pt")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "e.pt")
    for name in ("posix.mkdir", "builtins.eval"):
        assert name in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_hostile_metadata_shards_and_inner_pickles_run_nothing(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(STATE), checkpoint_id=tmp_path / "d", no_dist=True)
    metadata = (tmp_path / "d" / ".metadata").read_bytes()
    evil = pickle.dumps(Call(), protocol=4)[2:-1]
    (tmp_path / "d" / ".metadata").write_bytes(metadata[:-1] + evil + b"0.")
    with pytest.raises(CheckpointError, match="calls posix"):
        load_checkpoint(tmp_path / "d")

    outside = metadata.replace(b"__0_0.distcp", b"../_0.distcp")
    (tmp_path / "d" / ".metadata").write_bytes(outside)
    with pytest.raises(CheckpointError, match="not inside it"):
        load_checkpoint(tmp_path / "d")

    shards = tmp_path / "s"
    shards.mkdir()
    torch.save({"a": torch.ones(1)}, shards / "1.bin")
    torch.save({"b": torch.ones(1), "c": Call()}, shards / "2.bin")
    index = {"weight_map": {"a": "1.bin", "b": "2.bin"}}
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="calls posix"):
        load_checkpoint(shards)

    np.savez(tmp_path / "o.npz", a=np.array([Call()], dtype=object))
    with pytest.raises(CheckpointError, match="never unpickled"):
        load_checkpoint(tmp_path / "o.npz")

    torch.save({"a": Call()}, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "e.pt2", "w") as archive:
        archive.write(tmp_path / "state.pt", "serialized_state_dict.pt")
    with pytest.raises(CheckpointError, match="calls posix"):
        load_checkpoint(tmp_path / "e.pt2")


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_program_inside_torchscript_is_never_run(tmp_path: Path) -> None:
    torch.jit.script(nn.Sequential(nn.BatchNorm2d(3))).save(tmp_path / "s.pt")  # type: ignore[no-untyped-call]
    with zipfile.ZipFile(tmp_path / "s.pt") as old, zipfile.ZipFile(tmp_path / "e.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data[:-1] + pickle.dumps(Call(), protocol=2)[2:-1] + b"0."
            new.writestr(name, data)
    with pytest.raises(CheckpointError, match="calls posix"):
        load_checkpoint(tmp_path / "e.pt")


def nested(depth: int, kind: bytes) -> bytes:
    start, end = {b"list": (b"]", b"a"), b"tuple": (b"", b"\x85"), b"dict": (b"}K\x01", b"s")}[kind]
    return b"\x80\x02}X\x01\x00\x00\x00a" + start * depth + b"K\x01" + end * depth + b"s."


@pytest.mark.parametrize("kind", [b"list", b"tuple", b"dict"])
def test_deep_structures_end_soon(tmp_path: Path, kind: bytes) -> None:
    start = time.monotonic()
    (tmp_path / "deep.pkl").write_bytes(nested(200_000, kind))
    with pytest.raises(CheckpointError, match=r"deep\.pkl"):
        load_checkpoint(tmp_path / "deep.pkl")
    assert time.monotonic() - start < 60


def test_cyclic_and_repeated_structures_end_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    laughs = b"\x80\x02}X\x01\x00\x00\x00a" + b"]" + b"2\x86" * 2000 + b"s."
    (tmp_path / "laughs.pkl").write_bytes(laughs)
    cyclic: dict[str, Any] = {}
    cyclic["state_dict"] = {"loop": cyclic}
    torch.save(cyclic, tmp_path / "cyclic.pt")
    module = nn.ModuleList([nn.BatchNorm2d(1)])
    module._modules["again"] = module
    torch.save(module, tmp_path / "module.pt")
    doubled: nn.Module = nn.BatchNorm2d(1)
    for _ in range(60):
        doubled = nn.ModuleList([doubled, doubled])
    torch.save(doubled, tmp_path / "doubled.pt")
    for name in ("laughs.pkl", "cyclic.pt", "module.pt", "doubled.pt"):
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name)
    assert time.monotonic() - start < 60


def test_copies_of_copies_and_colliding_keys_end_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    long = b"(" + b"N" * 200_000 + b"lq\x00"
    copies = b"cbuiltins\nlist\nq\x01" + b"h\x01h\x00\x85R" * 20_000
    (tmp_path / "copies.pkl").write_bytes(b"\x80\x02" + long + copies + b".")
    keys = b"".join(
        b"\x8a\x0a" + (index * ((1 << 61) - 1)).to_bytes(10, "little") + b"N"
        for index in range(1, 60_000)
    )
    (tmp_path / "keys.pkl").write_bytes(b"\x80\x02}(" + keys + b"u.")
    for name in ("copies.pkl", "keys.pkl"):
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name)
    assert time.monotonic() - start < 60


def test_hdf5_that_hangs_or_dies_ends_with_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bnconvert.checkpoint.hdf5 as hdf5

    path = make_specimens(tmp_path)["h"]
    for body, text in (("import time\ntime.sleep(60)", "did not answer"),
                       ("import os\nos.abort()", "ended with code -6")):  # fmt: skip
        child = tmp_path / "child.py"
        child.write_text(body)
        monkeypatch.setattr(hdf5, "_CHILD", child)
        monkeypatch.setattr(hdf5, "DEADLINE", 1.0)
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(path)
        assert time.monotonic() - start < 10


def test_hdf5_links_and_external_data_are_not_followed(tmp_path: Path) -> None:
    make_specimens(tmp_path)
    for name, value in {
        "soft": h5py.SoftLink("/bn"),
        "external": h5py.ExternalLink("h.h5", "/bn"),
    }.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["a"] = value
        with pytest.raises(CheckpointError, match="not followed"):
            load_checkpoint(tmp_path / f"{name}.h5")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("a", (4,), "f4", external=[("/etc/hostname", 0, 16)])
    with pytest.raises(CheckpointError, match="not followed"):
        load_checkpoint(tmp_path / "data.h5")


def test_a_huge_number_in_a_small_file_costs_no_memory(tmp_path: Path) -> None:
    limit = 3 << 30
    for name, content in {
        "put.pkl": b"\x80\x02}r\xff\xff\xff\x7f.",
        "bytes.pkl": b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".",
        "long.pkl": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "digits.pkl": b"\x80\x02}X\x01\x00\x00\x00aI" + b"9" * 60_000 + b"\ns.",
        "array.pkl": b"\x80\x02}X\x01\x00\x00\x00acbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Rs.",
    }.items():
        (tmp_path / name).write_bytes(content)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + limit, hard))
    try:
        for name in ("bytes.pkl", "long.pkl", "digits.pkl", "array.pkl", "put.pkl"):
            with pytest.raises(CheckpointError, match=name):
                load_checkpoint(tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_tensor_that_is_expanded_without_end_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "e.pt")
    with pytest.raises(CheckpointError, match="leaves its storage"):
        load_checkpoint(tmp_path / "e.pt")


@pytest.mark.parametrize("name", ["w.safetensors", "w"])
def test_a_conversion_killed_at_any_moment_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, name: str
) -> None:
    source = tmp_path / "src" / "big.pt"
    source.parent.mkdir()
    torch.save({f"t{i}": torch.full((1 << 20,), float(i)) for i in range(30)}, source)
    expected = dict(load_checkpoint(source).tensors)
    target = tmp_path / name
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "bnconvert.checkpoint"])
    complete = 0
    for delay in (0.02, 0.1, 0.3, 60.0):
        if target.suffix:
            target.write_bytes(b"old")
        process = context.Process(
            target=convert_checkpoint, args=(source, target), kwargs={"overwrite": True}
        )
        process.start()
        process.join(timeout=delay)
        process.kill()
        process.join()
        if not target.exists() or (target.suffix and target.read_bytes() == b"old"):
            continue
        loaded = load_checkpoint(target).tensors
        assert all(torch.equal(loaded[key], value) for key, value in expected.items())
        complete += 1
        if target.is_dir():
            break
    assert complete


def test_a_source_that_changes_while_it_is_converted_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bnconvert.checkpoint.safetensors_writer as writer

    source = tmp_path / "w.pt"
    torch.save(STATE, source)
    genuine = writer.write_tensor  # type: ignore[attr-defined]

    def meddling(output: Any, tensor: Any) -> None:
        genuine(output, tensor)
        os.utime(source, ns=(1, 1))

    monkeypatch.setattr(writer, "write_tensor", meddling)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert_checkpoint(source, tmp_path / "o.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]
