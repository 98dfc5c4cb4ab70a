"""`fold_onnx`: every operator that takes up a norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from bnconvert.export import fold_onnx
from bnconvert.report import Outcome
from tests.onnx_graph import C, Graph, conv, count

if TYPE_CHECKING:
    from pathlib import Path


def build_conv(g: Graph) -> str:
    return g.norm(conv(g, "x", pads=[1, 1, 1, 1]))


def build_conv_without_bias_grouped(g: Graph) -> str:
    return g.norm(conv(g, "x", out=12, group=3, no_bias=True), 12)


def build_transposed(g: Graph) -> str:
    return g.norm(g.call("ConvTranspose", "x", g.weight(C, 4, 2, 2), strides=[2, 2]), 4)


def build_transposed_grouped(g: Graph) -> str:
    weight, bias = g.weight(C, 4, 2, 2), g.weight(12)
    return g.norm(g.call("ConvTranspose", "x", weight, bias, group=3, pads=[1, 1, 1, 1]), 12)


def flat(g: Graph) -> str:
    return g.call("Flatten", g.call("GlobalAveragePool", "x"))


def build_gemm(g: Graph) -> str:
    return g.norm(g.call("Gemm", flat(g), g.weight(C, 5), g.weight(5), alpha=0.5, beta=-2.0), 5)


def build_gemm_transposed_scalar_bias(g: Graph) -> str:
    return g.norm(g.call("Gemm", flat(g), g.weight(5, C), g.weight(1), transB=1, beta=3.0), 5)


def build_gemm_without_bias(g: Graph) -> str:
    return g.norm(g.call("Gemm", flat(g), g.weight(5, C), transB=1, alpha=-1.5), 5)


def build_matmul(g: Graph) -> str:
    return g.norm(g.call("MatMul", flat(g), g.weight(C, 5)), 5)


def build_matmul_add(g: Graph) -> str:
    return g.norm(g.call("Add", g.weight(5), g.call("MatMul", flat(g), g.weight(C, 5))), 5)


def build_tokens(g: Graph) -> str:
    """What levit does: a Linear on tokens, flattened for BatchNorm1d, and shaped back."""
    tokens = g.call("Transpose", g.call("Reshape", "x", g.ints(0, C, 64)), perm=[0, 2, 1])
    rows = g.call("Reshape", g.call("MatMul", tokens, g.weight(C, 5)), g.ints(-1, 5))
    return g.call("Reshape", g.norm(rows, 5), g.ints(-1, 64, 5))


def build_through_transpose(g: Graph) -> str:
    nhwc = g.call("Transpose", "x", perm=[0, 2, 3, 1])
    return g.norm(g.call("Transpose", g.call("MatMul", nhwc, g.weight(C, 5)), perm=[0, 3, 1, 2]), 5)


def build_gemm_to_image(g: Graph) -> str:
    """A generator's first layer: one channel owns many columns of the Gemm."""
    columns = g.call("Gemm", flat(g), g.weight(C, 3 * 16), g.weight(48))
    return g.norm(g.call("Reshape", columns, g.ints(-1, 3, 4, 4)), 3)


def build_norm_norm(g: Graph) -> str:
    return g.norm(g.norm(conv(g, "x")))


def build_arithmetic_between(g: Graph) -> str:
    y = g.call("Mul", conv(g, "x"), g.weight(C, 1, 1))
    return g.norm(g.call("Sub", y, g.weight(1, C, 1, 1)))


def build_more_arithmetic_between(g: Graph) -> str:
    y = g.call("Sub", g.weight(C, 1, 1), g.call("Neg", conv(g, "x")))
    return g.norm(g.call("Div", y, g.weight(C, 1, 1)))


def build_forward_arithmetic(g: Graph) -> str:
    y = g.call("Div", g.norm(g.call("Relu", "x")), g.weight(1, C, 1, 1))
    y = g.call("Add", g.call("Neg", g.call("Mul", g.weight(C, 1, 1), y)), g.weight(C, 1, 1))
    return g.call("Add", conv(g, y), conv(g, y, group=2))


def build_forward_conv(g: Graph) -> str:
    return conv(g, g.norm(g.call("Relu", "x")), group=2)


def build_forward_gemm_flatten(g: Graph) -> str:
    columns = g.call("Flatten", g.norm(g.call("Relu", "x")))
    return g.call("Gemm", columns, g.weight(C * 64, 5), g.weight(5), alpha=0.5)


def build_forward_two_readers(g: Graph) -> str:
    y = g.norm(g.call("Relu", "x"))
    return g.call("Add", conv(g, y), conv(g, y))


def build_forward_matmul(g: Graph) -> str:
    y = g.call("Transpose", g.norm(g.call("Relu", "x")), perm=[0, 2, 3, 1])
    return g.call("MatMul", y, g.weight(C, 5))


def build_average_pool(g: Graph) -> str:
    y = g.call("AveragePool", conv(g, "x"), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    return g.norm(y)


def build_global_average(g: Graph) -> str:
    return g.norm(g.call("GlobalAveragePool", conv(g, "x")))


def build_mean_of_rows(g: Graph) -> str:
    rows = g.call("ReduceMean", conv(g, "x"), axes=[2, 3], keepdims=0)
    return g.norm(rows)


def build_forward_mean(g: Graph) -> str:
    rows = g.call("ReduceMean", g.norm(g.call("Relu", "x")), axes=[-1, -2], keepdims=0)
    return g.call("Gemm", rows, g.weight(C, 5))


def build_forward_padded_average(g: Graph) -> str:
    y = g.norm(g.call("Relu", "x"))
    pooled = g.call("AveragePool", y, kernel_shape=[2, 2], pads=[1, 0, 1, 0])
    return conv(g, pooled)


def build_max_pool_of_positive(g: Graph) -> str:
    y = g.call("MaxPool", conv(g, "x"), kernel_shape=[2, 2], pads=[1, 1, 0, 0])
    return g.norm(y, positive=True)


def build_concat(g: Graph) -> str:
    y = g.call("Concat", conv(g, "x", 2), g.call("MaxPool", "x", **CROP), axis=1)
    z = g.call("Concat", g.norm(conv(g, "x", 4), 4), conv(g, "x", 2), axis=1)
    joined = g.call("Concat", conv(g, "x", 2), conv(g, "x", 3), z, axis=1)
    return g.call("Concat", g.norm(joined, 11), y, axis=1)


def build_concat_of_rows(g: Graph) -> str:
    return g.norm(g.call("Concat", conv(g, "x"), conv(g, "x"), axis=2))


def build_forward_concat(g: Graph) -> str:
    y = g.call("Concat", "x", g.norm(g.call("Relu", "x")), "x", axis=-3)
    return conv(g, g.call("GlobalAveragePool", y), 4, 3 * C, kernel=1)


def tokens(g: Graph) -> str:
    return g.call("Reshape", "x", g.ints(0, C, 64))


def build_matmul_from_the_left(g: Graph) -> str:
    return g.norm(g.call("MatMul", g.weight(5, C), tokens(g)), 5)


def build_forward_matmul_from_the_left(g: Graph) -> str:
    return g.call("MatMul", g.weight(5, C), g.norm(g.call("Relu", tokens(g))))


def build_computed_weights(g: Graph) -> str:
    """As exporters write shared, standardized and normalised weights, and zero biases."""
    weight = g.weight(C, C, 3, 3)
    size = g.call("Sqrt", g.call("Mul", weight, weight))
    y = g.call("Conv", "x", g.call("Identity", g.call("Div", weight, size)))
    scale, zeros = g.call("Identity", g.weight(C)), g.call("ConstantOfShape", g.ints(C))
    shared = g.call("Cast", g.call("Cast", g.weight(C, low=0.3), to=11), to=1)
    return g.call("BatchNormalization", y, scale, zeros, shared, g.call("Identity", shared))


def build_forward_single_kernel_same(g: Graph) -> str:
    y = g.norm(g.call("Relu", "x"))
    return conv(g, y, kernel=1, auto_pad="SAME_UPPER", strides=[2, 2])


def build_pad_of_copies(g: Graph) -> str:
    edges = g.ints(0, 0, 1, 2, 0, 0, 3, 1)
    return g.norm(g.call("Pad", conv(g, "x"), edges, mode="reflect"))


def build_forward_pad_of_copies(g: Graph) -> str:
    y = g.call("Pad", g.norm(g.call("Relu", "x")), g.ints(0, 0, 1, 1, 0, 0, 1, 1), mode="edge")
    return conv(g, y)


def build_resize(g: Graph) -> str:
    y = g.call("Resize", conv(g, "x"), "", g.floats(1, 1, 2, 2), mode="nearest")
    return g.norm(y)


def build_forward_resize(g: Graph) -> str:
    y = g.norm(g.call("Relu", "x"))
    return conv(g, g.call("Resize", y, "", g.floats(1, 1, 2, 2), mode="linear"))


def build_cast_to_the_same(g: Graph) -> str:
    return g.norm(g.call("Cast", conv(g, "x"), to=1))


def split(g: Graph, value: str, *sizes: int) -> list[str]:
    """Return the parts along axis 1."""
    first = g.call("Split", value, g.ints(*sizes), axis=1)
    rest = [f"{first}_{number}" for number in range(1, len(sizes))]
    g.nodes[-1].output.extend(rest)
    return [first, *rest]


def build_split(g: Graph) -> str:
    one, two, three = split(g, conv(g, "x"), 1, 2, 3)
    return g.call("Concat", g.norm(two, 2), g.call("Relu", one), g.norm(three, 3), axis=1)


def build_slice(g: Graph) -> str:
    edges = g.ints(5, 1), g.ints(-99, -1), g.ints(1, -1), g.ints(-2, 2)
    return g.norm(g.call("Slice", conv(g, "x"), *edges), 3)


def build_gather(g: Graph) -> str:
    return g.norm(g.call("Gather", conv(g, "x"), g.ints(4, 0, -1), axis=1), 3)


def build_forward_parts(g: Graph) -> str:
    y = g.norm(g.call("Relu", "x"))
    one, two = split(g, y, 2, 4)
    last = g.call("Gather", y, g.ints(5, 5, 0), axis=1)
    parts = [
        conv(g, one, 4, 2),
        conv(g, g.call("Slice", two, g.ints(1), g.ints(9), g.ints(1)), 4, 3),
    ]
    return g.call("Add", g.call("Add", *parts), conv(g, last, 4, 3))


def build_shuffle(g: Graph) -> str:
    """The channels of two groups in turn, as ShuffleNet and grouped convolutions mix them."""
    y = g.call("Reshape", conv(g, "x"), g.ints(0, 2, 3, 6, 6))
    y = g.call("Transpose", y, perm=[0, 2, 1, 3, 4])
    return g.norm(g.call("Reshape", y, g.ints(0, C, 6, 6)))


def build_forward_shuffle(g: Graph) -> str:
    y = g.call("Reshape", g.norm(g.call("Relu", "x")), g.ints(0, 2, 3, 8, 8))
    y = g.call("Transpose", y, perm=[0, 2, 1, 3, 4])
    return conv(g, g.call("Reshape", y, g.ints(0, C, 8, 8)))


def build_one_channel(g: Graph) -> str:
    row = g.call("Reshape", conv(g, "x", 1), g.ints(0, 1, 36))
    y = g.call("Reshape", g.norm(g.norm(row, 1), 1), g.ints(0, 1, 6, 6))
    return g.norm(g.call("Slice", conv(g, y, 4, 1), g.ints(2), g.ints(3), g.ints(1)), 1)


def build_sum(g: Graph) -> str:
    total = g.call("Sum", conv(g, "x"), conv(g, "x", no_bias=True), conv(g, "x"))
    return g.norm(g.call("Add", total, g.call("Concat", conv(g, "x", 2), conv(g, "x", 4), axis=1)))


CROP = {"kernel_shape": [3, 3]}

FOLDING = {
    name.removeprefix("build_"): value
    for name, value in list(globals().items())
    if name.startswith("build_")
}


@pytest.mark.parametrize("as_constants", [False, True])
@pytest.mark.parametrize("kind", FOLDING)
def test_no_norm_is_left_and_float64_agrees(tmp_path: Path, kind: str, as_constants: bool) -> None:
    g = Graph(kind)
    source = g.save(tmp_path / "in.onnx", [FOLDING[kind](g)], as_constants=as_constants)
    report = fold_onnx(source, tmp_path / "out.onnx")
    assert not report.left
    assert count(tmp_path / "out.onnx") == 0
    assert report.float64 is not None
    assert report.float64 < 1e-12
    assert all(value < 1e-5 for _, value in report.runtime)
    names = [[entry.name for entry in onnx.load(p).graph.output] for p in tmp_path.iterdir()]
    assert names[0] == names[1]


@pytest.mark.parametrize("opset", [7, 8, 9, 11, 13, 15, 18])
def test_every_opset_with_per_channel_statistics(tmp_path: Path, opset: int) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)], opset=opset)
    assert not fold_onnx(source, tmp_path / "out.onnx").left
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version == opset


@pytest.mark.parametrize("inside", [1, 2, 3])
@pytest.mark.parametrize("external", [False, True])
def test_a_norm_in_a_function_of_the_file_is_folded(
    tmp_path: Path, inside: int, external: bool
) -> None:
    """With the convolution before it in the function too, and a Reshape between."""
    g = Graph()
    y = g.call("Reshape", conv(g, g.call("Relu", conv(g, "x"))), g.ints(0, C, 16, 1))
    source = g.save(tmp_path / "in.onnx", [g.norm(y)])
    model = onnx.load(source)
    if external:
        onnx.save(model, source, save_as_external_data=True, location="w", size_threshold=100)
        model = onnx.load(source, load_external_data=False)
    nodes = [model.graph.node.pop() for _ in range(inside)][::-1]
    made = {name for node in nodes for name in node.output}
    given = list(dict.fromkeys(n for node in nodes for n in node.input if n not in made))
    imports = [onnx.helper.make_opsetid("", 17)]
    result = nodes[-1].output
    block = onnx.helper.make_function("own", "Block", given, result, nodes, imports)
    model.functions.append(block)
    model.graph.node.append(onnx.helper.make_node("Block", given, result, domain="own", name="b"))
    model.opset_import.append(onnx.helper.make_opsetid("own", 1))
    source.write_bytes(model.SerializeToString())
    report = fold_onnx(source, tmp_path / "out.onnx")
    assert report.count(Outcome.FOLDED) == 1, str(report)


def test_the_long_name_of_the_domain_is_read(tmp_path: Path) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    model = onnx.load(source)
    model.opset_import[0].domain = "ai.onnx"
    onnx.save(model, source)
    assert not fold_onnx(source, tmp_path / "out.onnx").left


def test_two_norms_go_into_one_matrix_product(tmp_path: Path) -> None:
    g = Graph()
    rows = g.norm(g.call("Flatten", g.norm(g.call("Relu", "x"))), C * 64)
    y = g.norm(g.call("MatMul", rows, g.weight(C * 64, 5)), 5)
    assert not fold_onnx(g.save(tmp_path / "in.onnx", [y]), tmp_path / "out.onnx").left


def test_padding_that_only_crops_is_passed(tmp_path: Path) -> None:
    g = Graph()
    y = g.call("Pad", conv(g, "x"), g.ints(0, 0, -1, 0, 0, 0, 0, -2))
    report = fold_onnx(g.save(tmp_path / "in.onnx", [g.norm(y)]), tmp_path / "out.onnx")
    assert not report.left
    assert report.float64 is None  # onnx's reference does not run it


def test_upsample_of_old_opsets_is_passed(tmp_path: Path) -> None:
    g = Graph()
    y = g.call("Upsample", conv(g, "x"), g.floats(1, 1, 2, 3), mode="linear")
    source = g.save(tmp_path / "in.onnx", [g.norm(y)], opset=9)
    assert not fold_onnx(source, tmp_path / "out.onnx").left


def test_the_default_epsilon_is_that_of_float32(tmp_path: Path) -> None:
    g = Graph()
    y = g.norm(conv(g, "x"))
    g.weights[-1].raw_data = np.full(C, 5e-5, np.float32).tobytes()
    report = fold_onnx(g.save(tmp_path / "in.onnx", [y]), tmp_path / "out.onnx")
    assert report.float64 is not None
    assert report.float64 < 1e-12


def test_readers_without_names_are_told_apart(tmp_path: Path) -> None:
    g = Graph()
    y = g.norm(g.call("Relu", "x"))
    outputs = [conv(g, y), conv(g, y)]
    for node in g.nodes:
        node.name = ""
    assert not fold_onnx(g.save(tmp_path / "in.onnx", outputs), tmp_path / "out.onnx").left


def test_names_that_values_have_are_not_taken(tmp_path: Path) -> None:
    g = Graph()
    y = g.norm(conv(g, "x"))
    z = g.call("Relu", y)
    g.nodes[-1].output[0] = "n0_weight"
    source = g.save(tmp_path / "in.onnx", ["n0_weight" if z else ""])
    assert not fold_onnx(source, tmp_path / "out.onnx").left


def test_a_file_in_half_precision_is_accepted(tmp_path: Path) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [g.norm(conv(g, g.norm(conv(g, "x"))))])
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        half = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(model, source)
    report = fold_onnx(source, tmp_path / "out.onnx")
    assert not report.left
    assert 0.0 < max(difference for _, difference in report.runtime) < 2e-2
