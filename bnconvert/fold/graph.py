"""A captured graph that folding edits: shapes as numbers, constants in float64, readers.

The graph is a private copy of an exported program's. Its in-place operations are made functional
where nothing else sees the memory they write (`bnconvert.fold.inplace`), so that the value of a
node is what its readers read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg

from bnconvert.fold.algebra import exact
from bnconvert.fold.inplace import make_functional

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

_CONSTANT_INPUTS = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}


@dataclass(frozen=True)
class Added:
    """A constant that folding added to a graph.

    Attributes:
        values: Its values, float64.
        target: Qualified name to store it under; made unique when the program is rebuilt.
        trains: Whether it is a parameter that requires gradients; otherwise it is a buffer.
        bounds: Whether it holds bounds, which may be infinite.
    """

    values: Tensor
    target: str
    trains: bool = False
    bounds: bool = False


def operation(node: fx.Node) -> str:
    """Return the name of the operation without namespace and overload, such as "conv2d"."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return str(getattr(node.target, "__name__", node.target))


def store(value: Any, name: str) -> Any:
    """Stand in a graph for a forward that stores a tensor in an attribute."""
    return value


class FoldGraph:
    """The graph of an exported program together with the values of its weights.

    Attributes:
        program: The program that was captured; never changed.
        graph: A copy of its graph, to be edited.
        names: Qualified name of the parameter, buffer or constant behind a placeholder.
        read: Placeholders of weights that the program reads.
        added: The constants behind placeholders that folding added.
        trusts_numbers: Whether numbers of the code are constants; a graph does not tell them from
            sizes of the example.
        uses_numbers: Whether a map has met one.
    """

    def __init__(self, program: ExportedProgram, stored: tuple[str, ...] = ()) -> None:
        """Read a program.

        Args:
            program: The program.
            stored: Names of attributes that its last outputs are stored in.
        """
        self.program = program
        self.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        output = self.graph.graph_copy(program.graph, copies)
        self.graph.output(output)
        for original, copied in copies.items():
            copied.name = original.name  # fx renames an input that is called `input`
        self.names: dict[fx.Node, str] = {}
        self.added: dict[fx.Node, Added] = {}
        self.trusts_numbers = True
        self.uses_numbers = False
        self._values: dict[fx.Node, Any] = {}
        self._constant: dict[fx.Node, bool] = {}
        by_name = {node.name: copies[node] for node in program.graph.nodes if node in copies}
        for spec in program.graph_signature.input_specs:
            if spec.kind in _CONSTANT_INPUTS and spec.target is not None:
                self.names[by_name[spec.arg.name]] = spec.target
        self.read = {node for node in self.names if node.users}
        inline_no_grad(self.graph, program.graph_module)
        make_functional(self.graph)
        self._note_stored(stored)

    def _note_stored(self, names: tuple[str, ...]) -> None:
        """Give what the forward stores a reader of its own; computed weights do not count."""
        if not names:
            return
        output = self.graph.output_node()
        values: Any = output.args[0]
        outputs, stored = values[: -len(names)], values[-len(names) :]
        kept = []
        for value, name in zip(stored, names, strict=True):
            if isinstance(value, fx.Node) and not self._is_computed_weight(value):
                with self.graph.inserting_before(output):
                    kept.append(self.graph.call_function(store, (value, name)))
        output.args = ((*outputs, *kept),)

    def _is_computed_weight(self, node: fx.Node) -> bool:
        return node not in self.names and self.is_constant(node)

    # -- what a node is ---------------------------------------------------------------------------

    def is_constant(self, node: fx.Node) -> bool:
        """Whether the node's value depends on weights and fixed tensors alone."""
        known = self._constant.get(node)
        if known is None:
            known = self._constant[node] = self._decide_constant(node)
        return known

    def _decide_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node in self.names or node in self.added
        if node.op != "call_function" or not _is_deterministic(node.target):
            return False
        return all(self.is_constant(argument) for argument in node.all_input_nodes)

    def value(self, node: fx.Node) -> Any:
        """Return a constant node's value; floating point tensors as float64 on the CPU."""
        if node.op == "placeholder":
            return self._stored(node)
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _stored(self, node: fx.Node) -> Tensor:
        if node in self.added:
            return self.added[node].values
        name = self.names[node]
        program = self.program
        tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
        assert isinstance(tensor, torch.Tensor)  # noqa: S101 (for the type checker)
        return exact(tensor) if tensor.is_floating_point() else tensor.detach().cpu()

    def _compute(self, node: fx.Node) -> Any:
        args = map_arg(node.args, self.value)
        kwargs = dict(map_arg(node.kwargs, self.value))
        with torch.no_grad():
            return call_in_float64(node.target, self.concrete(args), self.concrete(kwargs))

    def hides(self, path: str) -> bool:
        """Whether a module is called in a sub-graph, such as the body of an autocast block."""
        blocks = [m for m in self.program.graph_module.children() if isinstance(m, fx.GraphModule)]
        nodes = [node for block in blocks for node in block.graph.nodes]
        stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
        return any(entry[0] == path for stack in stacks for entry in stack.values())

    # -- shapes -----------------------------------------------------------------------------------

    def concrete(self, value: Any) -> Any:
        """Replace symbolic sizes, and nodes that hold one, by the number they had in the example.

        Tensors and nodes that hold tensors are kept.
        """
        if isinstance(value, (tuple, list)):
            return type(value)(self.concrete(item) for item in value)
        if isinstance(value, dict):
            return {key: self.concrete(item) for key, item in value.items()}
        if isinstance(value, fx.Node):
            held = value.meta.get("val")
            return self.concrete(held) if isinstance(held, (torch.SymInt, int)) else value
        return value.node.hint if isinstance(value, torch.SymInt) else value

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the shape of the node's tensor in the example."""
        return tuple(self.concrete(list(node.meta["val"].shape)))

    # -- edits ------------------------------------------------------------------------------------

    def add_constant(self, added: Added, like: fx.Node) -> fx.Node:
        """Add a placeholder that holds a constant.

        Args:
            added: The constant.
            like: A node whose tensor shows dtype and device.
        """
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"p_{added.target.replace('.', '_')}")
        node.target = node.name  # made unique by the graph
        fake = like.meta["val"]
        with fake.fake_mode:
            node.meta["val"] = torch.empty(added.values.shape, dtype=fake.dtype, device=fake.device)
        self.added[node] = added
        return node


def inline_no_grad(graph: fx.Graph, root: torch.nn.Module) -> None:
    """Put the operations of `no_grad` blocks that hold a norm into the graph itself.

    Such a block is captured as a call of a sub-graph, into which no other code here looks.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, block, *inputs = node.args
        body = getattr(root, block.target).graph
        if enabled or not any("batch_norm" in operation(inner) for inner in body.nodes):
            continue
        copies = dict(zip(body.find_nodes(op="placeholder"), inputs, strict=True))
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(body, copies)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(block)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_deterministic(target: Any) -> bool:
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    mutates = target._schema.is_mutable
    return not mutates and torch.Tag.nondeterministic_seeded not in target.tags


def call_in_float64(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation with every floating point dtype it names replaced by float64.

    Also moves what it creates to the CPU, where constants are computed.
    """

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args = tuple(widen(value) for value in args)
    kwargs = {key: widen(value) for key, value in kwargs.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return target(*args, **kwargs)
    finally:
        torch.set_default_dtype(before)
