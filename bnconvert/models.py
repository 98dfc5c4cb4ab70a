"""Models by their specification, and model folders.

A MODEL is a timm name (`resnet50`), a model folder, or `package.module:callable`. A model folder
holds `model.safetensors` and `config.json` in the Hugging Face layout of timm, which timm itself
loads with `local-dir:FOLDER`; what a state dict does not say about the norm layers stands in the
configuration under "bnconvert".
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bnconvert import __version__
from bnconvert.checkpoint import atomic_file, load_checkpoint, match_checkpoint
from bnconvert.checkpoint.writing import atomic_folder, check_folder
from bnconvert.errors import BnconvertError, first_line
from bnconvert.fold.topology import describe_topology, rebuild_topology
from bnconvert.forwarding import unwrap
from bnconvert.norm_state import describe_norms, restore_norms
from bnconvert.rebuilding import first_difference, lost_hooks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SCHEMA = 1


def load_model(
    spec: str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None = None
) -> nn.Module:
    """Build a model, and load weights into it.

    A folder written by `save_model` comes back with its weights and the state of its norm layers:
    plain, synchronised or frozen, with their eps and momentum.

    Args:
        spec: A timm name, a model folder, or `package.module:callable`, which is called without
            arguments.
        checkpoint: A file or folder of weights; its names may have prefixes or another order.

    Returns:
        The model, in the mode in which its constructor left it.

    Raises:
        BnconvertError: There is no such model, or it cannot be built.
        CheckpointError: The weights are damaged, refused, or of another architecture.
    """
    model = model_without_weights(spec)
    folder = model_folder(spec)
    if checkpoint is not None:
        load_weights(model, Path(checkpoint), recorded_facts(spec))
    elif folder is not None:
        load_weights(model, folder)
    return model


def model_without_weights(spec: str | os.PathLike[str]) -> nn.Module:
    """Build a model as `load_model` does, without the weights of a folder.

    Raises:
        BnconvertError: There is no such model, or it cannot be built.
    """
    folder = model_folder(spec)
    if folder is not None:
        return _from_folder(folder)
    module, colon, name = str(spec).partition(":")
    return _from_callable(module, name) if colon else _from_timm(str(spec))


def recorded_facts(spec: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a model folder records beside its weights; nothing for any other model."""
    folder = model_folder(spec)
    return {} if folder is None else _recorded(folder)


def model_folder(spec: str | os.PathLike[str]) -> Path | None:
    """Return the model folder that a spec names, or None where it names something else."""
    folder = Path(str(spec).removeprefix("local-dir:"))
    return folder if folder.is_dir() else None


def load_weights(model: nn.Module, path: Path, known: Mapping[str, Any] | None = None) -> None:
    """Load a file or folder of weights into a model, in place.

    A folder that `save_model` wrote also brings the dtypes and the state of the norm layers.

    Args:
        model: The model.
        path: The file or folder.
        known: What is recorded about the model, for a file that records nothing itself.

    Raises:
        CheckpointError: The weights are damaged, refused, or of another architecture.
    """
    own = _recorded(path)
    recorded = own or known or {}
    rebuild_topology(model, recorded.get("topology", {}))
    file = path / WEIGHTS
    tensors = match_checkpoint(load_checkpoint(file if file.is_file() else path), model)
    if own:
        _take_dtypes(model, tensors)
    model.load_state_dict(tensors)
    restore_norms(model, recorded.get("norms", []))


def _recorded(path: Path) -> dict[str, Any]:
    if not (path / CONFIG).is_file():
        return {}
    recorded = _read_config(path).get("bnconvert", {})
    if isinstance(recorded, dict) and recorded.get("schema", SCHEMA) == SCHEMA:
        return recorded
    raise BnconvertError(
        f"{path / CONFIG}: its bnconvert section is of an unknown schema; it was written by a "
        "newer bnconvert"
    )


def _take_dtypes(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, target in model.state_dict(keep_vars=True).items():
        stored = tensors[name].dtype
        if target.is_floating_point() and stored != target.dtype:
            target.data = target.data.to(stored)


def _from_timm(name: str, **kwargs: Any) -> nn.Module:
    import timm

    if not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "see timm.list_models()"
        raise BnconvertError(
            f"{name}: is neither a timm model, nor a folder, nor package.module:callable; {hint}"
        )
    with _explained(name, "timm cannot build it"):
        model: nn.Module = timm.create_model(name, pretrained=False, **kwargs)
    return model


def _from_callable(module: str, name: str) -> nn.Module:
    spec = f"{module}:{name}"
    with _explained(spec, f"importing {module} failed"):
        target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part, None)
        if target is None:
            raise BnconvertError(f"{spec}: {module} has no attribute {name}; check the name")
    if not callable(target):
        raise BnconvertError(f"{spec}: is a {type(target).__name__}; name a function or a class")
    with _explained(spec, "calling it without arguments failed"):
        model = target()
    if not isinstance(model, nn.Module):
        raise BnconvertError(
            f"{spec}: returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model


@contextlib.contextmanager
def _explained(spec: str, what: str) -> Iterator[None]:
    """Turn any exception of other people's code into one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise BnconvertError(f"{spec}: {what} ({why})") from error


def _from_folder(folder: Path) -> nn.Module:
    if not (folder / CONFIG).is_file():
        raise BnconvertError(
            f"{folder}: has no {CONFIG}, so it is no model folder; give a timm name or "
            f"package.module:callable, with --checkpoint {folder}"
        )
    config = _read_config(folder)
    architecture = config.get("architecture")
    if not architecture:
        raise BnconvertError(
            f"{folder / CONFIG}: names no timm architecture; give package.module:callable, with "
            f"--checkpoint {folder}"
        )
    import timm

    if not timm.is_model(str(architecture)):
        raise BnconvertError(
            f"{folder / CONFIG}: architecture {architecture!r} is not a timm model of this version"
        )
    with _explained(str(folder), "timm cannot build the model of this folder"):
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False)
    return model


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BnconvertError(f"{path}: is not JSON ({error}); the folder is damaged") from error
    if not isinstance(config, dict):
        raise BnconvertError(f"{path}: holds no JSON object; the folder is damaged")
    return config


def save_model(
    model: nn.Module, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Write a model folder: `model.safetensors` and `config.json`.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` loads the folder of a timm model;
    `load_model` also brings back the state of the norm layers. A model of other origin is loaded
    with its `package.module:callable` and the folder as the checkpoint. So is a timm model that has
    become another since timm built it, which a warning says.

    Args:
        model: The model; wrappers of DistributedDataParallel and `torch.compile` are taken off.
        folder: Where to write; made as a whole, or not at all.
        overwrite: Replace the two files in an existing folder.

    Raises:
        BnconvertError: The folder exists, or the model cannot be described.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    check_output(target, overwrite=overwrite)
    if not isinstance(model, nn.Module):
        raise BnconvertError(f"model: is a {type(model).__name__}; pass a torch.nn.Module")
    model = unwrap(model)
    tensors = _independent(model)
    described = _describe(model)
    _note_differences(model, described)
    config = json.dumps(described, indent=2) + "\n"
    if overwrite and target.is_dir():
        with atomic_file(target / WEIGHTS, overwrite=True) as path:
            save_file(tensors, path, metadata={"format": "pt"})
        with atomic_file(target / CONFIG, overwrite=True) as path:
            path.write_text(config, encoding="utf-8")
        return
    with atomic_folder(target) as path:
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        (path / CONFIG).write_text(config, encoding="utf-8")


def _note_differences(model: nn.Module, config: dict[str, Any]) -> None:
    """Warn where timm builds another model from a configuration, and do not let it then."""
    if not config.get("architecture"):
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")

        def build() -> nn.Module:
            built = _from_folder(Path(folder))
            rebuild_topology(built, config["bnconvert"]["topology"])
            return built

        difference = first_difference(model, build)
    if difference:
        timm_name = config.pop("architecture")
        _warn(f"{difference}, unlike what timm builds as {timm_name}; {_NOT_BY_ITSELF}")
        return
    hooked = lost_hooks(model)
    if hooked:
        name = hooked[0] or "the model"
        _warn(f"{name} has forward hooks, which the folder does not hold; register them again")


_NOT_BY_ITSELF = (
    "load the folder with package.module:callable and --checkpoint, as it does not make the model "
    "itself"
)


def _warn(text: str) -> None:
    warnings.warn(f"save_model: {text}", stacklevel=4)


def check_output(folder: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a model folder that `save_model` would refuse, before any work is done.

    Raises:
        BnconvertError: It exists without `overwrite`, is a file, or has no parent folder.
    """
    target = Path(folder)
    if target.is_dir():
        if not overwrite:
            raise BnconvertError(f"{target}: exists; use --force (overwrite=True) to replace it")
        unknown = sorted({path.name for path in target.iterdir()} - {CONFIG, WEIGHTS})
        if unknown and not (target / CONFIG).is_file():
            raise BnconvertError(
                f"{target}: is no model folder (it holds {unknown[0]}); name another folder"
            )
    else:
        check_folder(target)


def _why_not_stored(tensor: torch.Tensor) -> str:
    """Return why a file cannot hold the values of a tensor, "" if it can."""
    if is_lazy(tensor):
        return "is not initialized; run the model once before saving it"
    if tensor.is_meta:
        return "is on the meta device; load weights before saving the model"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; make it dense before saving the model"
    if hasattr(tensor, "full_tensor"):
        return (
            "is sharded over ranks; gather the weights (get_model_state_dict with "
            "full_state_dict=True) into an unsharded model and save that"
        )
    return ""


def _independent(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with no two tensors in one memory, as safetensors wants it."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise BnconvertError(
                f"{name}: the state dict holds a {type(value).__name__}, which safetensors cannot; "
                "leave it out of the state dict"
            )
        reason = _why_not_stored(value)
        if reason:
            raise BnconvertError(f"{name}: {reason}")
        tensor = value.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in seen or tensor._is_view():
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return tensors


def _describe(model: nn.Module) -> dict[str, Any]:
    """Return the configuration that rebuilds the model."""
    recorded = {
        "schema": SCHEMA,
        "version": __version__,
        "norms": describe_norms(model),
        "topology": describe_topology(model),
    }
    return {**_timm_config(model), "bnconvert": recorded}


def _timm_config(model: nn.Module) -> dict[str, Any]:
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return {}
    from timm.models._hub import save_config_for_hf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / CONFIG
        try:
            save_config_for_hf(model, str(path))
        except Exception as error:  # of models in another form, such as those of features only
            why = f"{type(error).__name__}: {first_line(error)}"
            _warn(f"timm cannot describe the model ({why}); {_NOT_BY_ITSELF}")
            return {}
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
