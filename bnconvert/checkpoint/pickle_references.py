"""Names that a pickle may mention, or make inert instances of, in any file."""

from __future__ import annotations

from bnconvert.checkpoint import pickle_numpy
from bnconvert.checkpoint.pickle_calls import CALLS, DESCRIBED, STORAGE_TYPES, TORCH_DTYPES

LOAD_BYTES = "torch.storage._load_from_bytes"
"""How plain `pickle` writes storages; the interpreter hands it to the reader of torch files."""

REFERENCES = frozenset(
    {
        *CALLS,
        LOAD_BYTES,
        *TORCH_DTYPES,
        *STORAGE_TYPES,
        *DESCRIBED,
        "builtins.int",
        "builtins.float",
        "builtins.str",
        "builtins.bool",
        "builtins.object",
        *pickle_numpy.MENTIONED,
        "torch.Tensor",
        "torch._tensor.Tensor",
        "torch.nn.parameter.Buffer",
        "torch.strided",
        "torch.contiguous_format",
        "torch.preserve_format",
        "torch.channels_last",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
    }
)
"""Names that a pickle may mention or make inert instances of, in any file."""
