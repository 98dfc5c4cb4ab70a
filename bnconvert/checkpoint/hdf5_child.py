"""Reads one HDF5 file in a process of its own; run by `hdf5.py`, never imported by the library.

libhdf5 can loop or crash on damaged files. Here that ends this process and nothing else: its
memory is limited, it has no other file, and the parent ends it when a deadline passes.

Requests come as JSON lines on stdin: {"list": true} or {"read": NAME}. Every answer on stdout is
one line of JSON with "error" or "nbytes", and that many bytes after it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_ITEMS = 100_000
MAX_ATTRIBUTE = 64 << 20
MAX_DEPTH = 64
BLOCK = 1 << 22


def listing(file: Any) -> dict[str, Any]:
    """Return all datasets and the text attributes, found without following links to other files."""
    import h5py

    found: dict[str, Any] = {"datasets": {}, "attributes": {}}
    pending = [("", file, 0)]
    seen = {}
    while pending:
        path, group, depth = pending.pop()
        where = h5py.h5o.get_info(group.id)
        key = (where.fileno, where.addr)
        if depth > MAX_DEPTH or key in seen:
            raise ValueError(f"group {path} is nested endlessly or linked twice")
        seen[key] = path
        found["attributes"][path] = attributes(group)
        inner_groups = []
        for name in group:
            if len(found["datasets"]) + len(seen) > MAX_ITEMS:
                raise ValueError("more objects than any genuine file has")
            inner = f"{path}/{name}" if path else name
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(  # noqa: TRY004 (of the file, not of a type)
                    f"{inner} is a link to another place, which is not followed"
                )
            item = group[name]
            if isinstance(item, h5py.Dataset):
                found["datasets"][inner] = described(item)
            elif isinstance(item, h5py.Group):
                inner_groups.append((inner, item, depth + 1))
        pending += reversed(inner_groups)
    return found


def described(dataset: Any) -> dict[str, Any]:
    """Return shape and type of a dataset; external storage is refused."""
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{dataset.name} keeps its data in another file, which is not followed")
    stored = dataset.id.get_storage_size()
    if dataset.nbytes > 200 * stored + (64 << 20):
        raise ValueError(f"{dataset.name} would grow from {stored} to {dataset.nbytes} bytes")
    return {"shape": list(dataset.shape or ()), "dtype": dataset.dtype.str}


def attributes(group: Any) -> dict[str, Any]:
    """Return the attributes that are text or lists of text."""
    result = {}
    for name in group.attrs:
        identifier = group.attrs.get_id(name)
        count = 1
        for size in identifier.shape:
            count *= size
        if count * identifier.dtype.itemsize > MAX_ATTRIBUTE:
            continue
        value = group.attrs[name]
        if hasattr(value, "tolist"):
            value = value.tolist()
        plain = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v
                 for v in (value if isinstance(value, list) else [value])]  # fmt: skip
        if all(isinstance(v, str) for v in plain):
            result[name] = plain if isinstance(value, list) else plain[0]
    return result


def answer(header: dict[str, Any], chunks: Iterable[bytes] = ()) -> None:
    """Write one answer."""
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def values(dataset: Any) -> Iterator[bytes]:
    """Yield the bytes of a dataset, row-major and little-endian, in blocks of rows."""
    import numpy

    kind = dataset.dtype.newbyteorder("<")
    if not dataset.shape:
        yield numpy.asarray(dataset[()], dtype=kind).tobytes()
        return
    row = max(1, dataset.nbytes // max(1, dataset.shape[0]))
    step = max(1, BLOCK // row)
    for start in range(0, dataset.shape[0], step):
        yield numpy.ascontiguousarray(dataset[start : start + step], dtype=kind).tobytes()


def main(path: str, memory: int) -> None:
    """Answer requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import h5py

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        descriptor = path.removeprefix("fd:")
        source = os.fdopen(int(descriptor), "rb") if descriptor != path else path
        file = h5py.File(source, "r")
    except Exception as error:
        answer({"error": str(error)[:500]})
        return
    answer({"nbytes": 0})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "list" in request:
                content = json.dumps(listing(file)).encode()
                answer({"nbytes": len(content)}, [content])
            else:
                dataset = file[request["read"]]
                answer({"nbytes": int(dataset.nbytes)}, values(dataset))
        except BrokenPipeError:
            return
        except Exception as error:
            answer({"error": str(error)[:500] or type(error).__name__})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
