"""Which part of a checkpoint holds the weights: one row per tool that writes checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bnconvert.checkpoint.averages import unnamed_average, with_names
from bnconvert.checkpoint.modules import holds_module, module_weights
from bnconvert.checkpoint.names import LEAVES, listed, without_wrappers
from bnconvert.checkpoint.pickle_values import Instance, as_lazy, is_tensor, walk_values
from bnconvert.checkpoint.record import Weights
from bnconvert.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tree = dict[Any, Any]

__all__ = ["LAYOUTS", "Layout", "choose", "holds_module"]


@dataclass(frozen=True)
class Layout:
    """Where one tool keeps weights.

    Attributes:
        name: The tool.
        matches: Whether a checkpoint's top-level dictionary is of this tool.
        raw: Keys that lead to the trained weights; the first that is there counts.
        ema: Keys that lead to their moving average.
    """

    name: str
    matches: Callable[[Tree], bool]
    raw: tuple[str, ...]
    ema: tuple[str, ...] = ()


def _has(*keys: str, any_of: tuple[str, ...] = ()) -> Callable[[Tree], bool]:
    def matches(tree: Tree) -> bool:
        return all(tree.get(key) is not None for key in keys) and (
            not any_of or any(key in tree for key in any_of)
        )

    return matches


RAW_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "net_state_dict",
    "network_state_dict",
    "weights",
    "model_weights",
    "params",
    "student",
)
EMA_KEYS = (
    "state_dict_ema",
    "model_ema",
    "ema_state_dict",
    "model_ema_state_dict",
    "ema_model_state_dict",
    "ema",
    "ema_model",
    "ema_state",
    "params_ema",
    "ema_params",
    "ema_weights",
    "net_ema",
    "weights_ema",
    "swa_state_dict",
    "teacher",
)

COUNTERS = ("n_averaged", "steps")
"""What `AveragedModel` of torch and of mmengine call the number of averaged models."""

_LIGHTNING = ("pytorch-lightning_version", "callbacks", "hyper_parameters", "loops")


def _mm_swapped(tree: Tree) -> bool:
    """Swapped by mmengine as it saves: `state_dict` is the average, `ema_state_dict` is raw."""
    return (
        _has("state_dict", "ema_state_dict", any_of=("message_hub", "meta", "param_schedulers"))(
            tree
        )
        and isinstance(tree["ema_state_dict"], dict)
        and any(key in tree["ema_state_dict"] for key in ("steps", "n_averaged"))
    )


LAYOUTS = (
    Layout(
        "Lightning with WeightAveraging",
        _has("state_dict", "current_model_state", "averaging_state"),
        ("current_model_state",),
        ("state_dict",),
    ),
    Layout("Lightning", _has("state_dict", any_of=_LIGHTNING), ("state_dict",), EMA_KEYS),
    Layout("mmengine", _mm_swapped, ("ema_state_dict",), ("state_dict",)),
    Layout(
        "mmengine",
        _has("state_dict", any_of=("message_hub", "param_schedulers")),
        ("state_dict",),
        EMA_KEYS,
    ),
    Layout("mmcv", _has("state_dict", "meta"), ("state_dict",)),
    Layout(
        "DeepSpeed",
        _has("module", any_of=("ds_config", "ds_version", "param_shapes", "buffer_names")),
        ("module",),
    ),
    Layout(
        "timm",
        _has("state_dict", any_of=("arch", "state_dict_ema", "amp_scaler")),
        ("state_dict",),
        ("state_dict_ema",),
    ),
    Layout("ultralytics", lambda tree: holds_module(tree.get("model")), ("model",), ("ema",)),
    Layout(
        "ultralytics",
        lambda tree: tree.get("model") is None and holds_module(tree.get("ema")),
        (),
        ("ema",),
    ),
    Layout(
        "torchvision",
        _has("model", any_of=("lr_scheduler", "model_ema")),
        ("model",),
        ("model_ema",),
    ),
    Layout("detectron2", _has("model", any_of=("__author__", "matching_heuristics")), ("model",)),
    Layout("fastai", _has("model", "opt"), ("model",)),
    Layout(
        "fvcore",
        _has("model", any_of=("optimizer", "scheduler", "iteration")),
        ("model",),
        EMA_KEYS,
    ),
    Layout("Caffe2", _has("blobs"), ("blobs",)),
)


def choose(tree: Any, weights: str) -> Weights:
    """Return the weights that a checkpoint's object holds.

    Args:
        tree: What the file's pickle or other structure describes.
        weights: "raw", "ema", or "auto" for the average where there is one.

    Raises:
        CheckpointError: There are none, several and none that is usual, or not the kind asked for.
    """
    if holds_module(tree):
        result = module_weights(tree)
        result.layout = "pickled module"
        return _averaged_model(result, weights)
    if not isinstance(tree, dict):
        raise CheckpointError(f"holds {_kind(tree)}, not weights by name")
    if _is_state_dict(tree):
        return _averaged_model(_state_dict(tree), weights)
    layout = next((layout for layout in LAYOUTS if layout.matches(tree)), None)
    if layout is None:
        key = _only_way_in(tree)
        if key is not None:
            result = choose(tree[key], weights)
            result.notes.insert(0, f"everything lies below {key!r}")
            return result
        layout = _generic(tree)
    return _pick(tree, layout, weights)


def _only_way_in(tree: Tree) -> str | None:
    """Return the key below which everything lies, such as Composer's "state" or an "app".

    Averages and optimizers are no way in, and no other value but those of an optimizer may hold a
    tensor.
    """
    holding = [key for key, value in tree.items() if _holds_tensors(value)]
    ways = [key for key in holding if not str(key).startswith(("optim", "opt_"))]
    if len(ways) != 1 or ways[0] in EMA_KEYS or not isinstance(tree[ways[0]], dict):
        return None
    below = tree[ways[0]]
    keys = (*RAW_KEYS, *EMA_KEYS)
    return str(ways[0]) if any(_weights_like(below.get(key)) for key in keys) else None


def _holds_tensors(value: Any) -> bool:
    return any(is_tensor(each) or holds_module(each) for each in walk_values(value))


def _generic(tree: Tree) -> Layout:
    raw = tuple(key for key in RAW_KEYS if _weights_like(tree.get(key)))
    ema = tuple(key for key in EMA_KEYS if _weights_like(tree.get(key)))
    if raw or ema:
        return Layout("training checkpoint", lambda _: True, raw, ema)
    others = tuple(key for key, value in tree.items() if _weights_like(value))
    if len(others) == 1:
        return Layout(f"state dict under {others[0]!r}", lambda _: True, others)
    if others:
        raise CheckpointError(
            f"holds several sets of weights ({listed(others)}); save the one you mean on its own"
        )
    raise CheckpointError(f"holds no tensors by name; its keys are {listed(map(str, tree))}")


def _weights_like(value: Any) -> bool:
    if holds_module(value):
        return True
    if isinstance(value, dict) and isinstance(value.get("module"), dict):
        value = value["module"]
    return isinstance(value, dict) and any(map(is_tensor, value.values()))


def _is_state_dict(tree: Tree) -> bool:
    tensors = sum(map(is_tensor, tree.values()))
    known = any(layout.matches(tree) for layout in LAYOUTS)
    return tensors > 0 and not known and not any(map(_weights_like, tree.values()))


def _pick(tree: Tree, layout: Layout, weights: str) -> Weights:
    raw = _first(tree, layout.raw)
    ema = _first(tree, layout.ema)
    unnamed = unnamed_average(tree, EMA_KEYS) if ema is None and weights != "raw" else None
    if weights == "ema" and ema is None and unnamed is None:
        raise CheckpointError(
            f"holds no EMA weights ({layout.name}, keys {listed(map(str, tree))}); ask for raw"
        )
    if weights == "raw" and raw is None:
        raise CheckpointError(f"holds only averaged weights ({layout.name}); ask for ema")
    key = ema if ema is not None and weights != "raw" else raw
    if key is None:
        raise CheckpointError(f"looks like {layout.name} but holds no weights")
    if raw is not None and unnamed is not None:
        result = _with_unnamed(_value_weights(tree[raw]), raw, *unnamed, weights)
    else:
        result = _value_weights(tree[key])
    if layout.name == "DeepSpeed":
        _refuse_placeholders(result)
    result.layout = layout.name
    if raw is not None and ema is not None:
        other = raw if key == ema else ema
        kind = "EMA" if key == ema else "raw"
        how = "auto chose" if weights == "auto" else "these are"
        result.notes.insert(0, f"{how} the {kind} weights ({key}); the others are in {other}")
        if key == ema:
            _add_buffers(result, _value_weights(tree[raw]), raw)
    arch = tree.get("arch")
    result.architecture = arch if isinstance(arch, str) else ""
    return result


def _with_unnamed(raw: Weights, key: str, ema: str, values: list[Any], wanted: str) -> Weights:
    """Return an average without names under the raw weights' names, or for "auto" the raw ones."""
    try:
        result = with_names(values, raw)
    except CheckpointError as error:
        reason = f"the average in {ema} has no names: {error}"
        if wanted == "ema":
            raise CheckpointError(reason) from error
        raw.notes.insert(0, f"auto chose the raw weights ({key}); {reason}")
        return raw
    how = "auto chose" if wanted == "auto" else "these are"
    result.notes.append(
        f"{how} the EMA weights ({ema}); the others are in {key}, whose names they got in the "
        f"order of the parameters: all {len(values)} shapes agree"
    )
    _add_buffers(result, raw, key)
    return result


def _refuse_placeholders(result: Weights) -> None:
    """Refuse a ZeRO-3 file, whose parameters are empty: the values are in other files."""
    empty = [name for name, tensor in result.tensors.items() if 0 in tensor.shape]
    if empty:
        raise CheckpointError(
            f"is a DeepSpeed ZeRO-3 file: {len(empty)} tensors are empty placeholders "
            f"({listed(empty, 2)}); run the folder's zero_to_fp32.py and name its result"
        )


def _first(tree: Tree, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if _weights_like(tree.get(key))), None)


def _value_weights(value: Any) -> Weights:
    if holds_module(value):
        return module_weights(value)
    if isinstance(value, dict) and isinstance(value.get("module"), dict):
        value = value["module"]
    return _averaged_model(_state_dict(value), "auto")


def _state_dict(tree: Tree) -> Weights:
    result = Weights()
    dropped: list[str] = []
    nameless: list[str] = []
    for name, value in tree.items():
        try:
            tensor = as_lazy(value)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        if tensor is None:
            dropped.append(str(name))
        elif not isinstance(name, str):
            nameless.append(str(name))
        else:
            result.tensors[name] = tensor
    if dropped:
        result.notes.append(f"left out, because they are no tensors: {listed(dropped)}")
    if nameless:
        result.notes.append(f"left out, because their names are no text: {listed(nameless)}")
    state = getattr(tree, "state", None)
    versions = state.get("_metadata") if isinstance(state, dict) else None
    result.versions = plain(versions) if isinstance(versions, dict) else {}
    return result


def plain(versions: Tree) -> dict[str, Any]:
    """Return torch's `_metadata` as plain dictionaries of plain values."""
    return {
        name: {k: v for k, v in entry.items() if isinstance(v, (int, float, str, bool))}
        for name, entry in versions.items()
        if isinstance(name, str) and isinstance(entry, dict)
    }


def _averaged_model(result: Weights, weights: str) -> Weights:
    """Recognise `torch.optim.swa_utils.AveragedModel` by its counter and its one prefix."""
    counter = next((n for n in result.tensors if without_wrappers(n) in COUNTERS), None)
    others = [name for name in result.tensors if name != counter]
    inner = (counter or "").removesuffix(without_wrappers(counter or "")) + "module."
    if counter is None or not others or not all(name.startswith(inner) for name in others):
        if weights == "ema":
            raise CheckpointError("holds one set of weights and no EMA; ask for raw or auto")
        return result
    if weights == "raw":
        raise CheckpointError("holds only averaged weights (AveragedModel); ask for ema")
    del result.tensors[counter]
    result.layout = "AveragedModel"
    result.notes.append(f"averaged weights: the counter {counter} was left out")
    return result


def _add_buffers(result: Weights, raw: Weights, key: str) -> None:
    """Complete an average of the parameters alone with the buffers of the raw weights."""
    own = {name.removeprefix("module."): name for name in result.tensors}
    wrapped = all(name.startswith("module.") for name in result.tensors)
    missing = {
        ("module." if wrapped else "") + short: tensor
        for name, tensor in raw.tensors.items()
        for short in [name.removeprefix("module.")]
        if short not in own and short.rpartition(".")[2] in LEAVES[2:]
    }
    if missing:
        result.tensors.update(missing)
        result.notes.append(
            f"the EMA holds no running statistics; {len(missing)} buffers come from {key}"
        )


def _kind(value: Any) -> str:
    if isinstance(value, Instance):
        return f"an object of class {value.type}"
    return f"a {type(value).__name__}"
