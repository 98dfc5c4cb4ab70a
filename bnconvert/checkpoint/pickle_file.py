"""Plain pickles: detectron2 and Caffe2 `.pkl` files, and state dicts saved with `pickle.dump`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint import caffe2, torch_legacy
from bnconvert.checkpoint.layouts import choose, holds_module
from bnconvert.checkpoint.pickle_policy import check
from bnconvert.checkpoint.pickle_reader import PickleReader
from bnconvert.checkpoint.pickle_vm import PickleMachine
from bnconvert.checkpoint.registry import Format, Options
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from bnconvert.checkpoint.probe import Probe
    from bnconvert.checkpoint.record import Weights

PADDLE = "StructuredToParameterName@@"
_OLD_STARTS = (b"(d", b"(l", b"}q", b"}(", b"ccollections\nOrderedDict", b"c__builtin__\n")


def is_pickle(found: Probe) -> bool:
    """Return whether a file begins as a pickle of any protocol."""
    head = found.head
    newer = len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5
    return found.file is not None and (newer or head.startswith(_OLD_STARTS))


def read(found: Probe, options: Options) -> Weights:
    """Return the weights of a plain pickle.

    Raises:
        CheckpointError: It is damaged, asks for what it may not, or is of Paddle.
    """
    extent = found.source.extent()
    with found.source.open() as stream:
        reader = PickleReader(stream, extent.nbytes, extent)
        machine = PickleMachine(reader, None, options.allow, torch_legacy.load_bytes)
        tree = machine.run()
        left = reader.left
    check(machine, str(found.path), holds_module, tree)
    if left:
        raise CheckpointError(f"{found.path}: {left} bytes follow its pickle; it is damaged")
    if isinstance(tree, dict) and PADDLE in tree:
        raise CheckpointError(
            f"{found.path}: is a Paddle state dict; load it with Paddle and save its arrays as .npz"
        )
    weights = choose(_text_keys(tree), options.weights)
    if caffe2.is_caffe2(weights.tensors):
        caffe2.rename(weights)
    return weights


def _text_keys(tree: Any) -> Any:
    """Return a top-level dictionary with keys of Python 2, which are bytes, as text."""
    if not isinstance(tree, dict) or not any(isinstance(key, bytes) for key in tree):
        return tree
    return {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in tree.items()}


FORMAT = Format("pickle", is_pickle, read)
