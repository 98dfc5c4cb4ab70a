"""What `fold_onnx` leaves, with which reason, and what it refuses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from onnx import helper

from bnconvert.errors import BnconvertError, VerificationError
from bnconvert.export import fold_onnx, onnx_folding
from bnconvert.fold.algebra import batchnorm_affine
from bnconvert.report import Outcome
from tests.onnx_graph import NORM, C, Graph, conv, count
from tests.test_fold_onnx import build_conv, flat

if TYPE_CHECKING:
    from pathlib import Path


def left_two_readers(g: Graph) -> list[str]:
    y = conv(g, "x")
    return [g.norm(y), g.call("Relu", y)]


def left_output(g: Graph) -> list[str]:
    y = conv(g, "x")
    return [y, g.norm(y)]


def left_relu_before_and_after(g: Graph) -> list[str]:
    return [g.call("Relu", g.norm(g.call("Relu", conv(g, "x"))))]


def left_padded_reader(g: Graph) -> list[str]:
    return [conv(g, g.norm(g.call("Relu", "x")), pads=[1, 1, 1, 1])]


def left_padded_reader_same(g: Graph) -> list[str]:
    return [conv(g, g.norm(g.call("Relu", "x")), auto_pad="SAME_UPPER")]


def left_computed(g: Graph) -> list[str]:
    scale = g.call("ReduceMean", "x", axes=[0, 2, 3], keepdims=0)
    return [
        g.call(NORM, conv(g, "x"), scale, g.weight(C), g.weight(C), g.weight(C, low=0.1, high=1.0))
    ]


def left_quantised(g: Graph) -> list[str]:
    stored = g.call("Cast", g.weight(C, C, 3, 3, low=-99, high=99), to=3)
    weight = g.call("DequantizeLinear", stored, g.floats(0.01))
    return [g.norm(g.call("Conv", "x", weight))]


def left_cast(g: Graph) -> list[str]:
    return [g.norm(g.call("Cast", g.call("Cast", conv(g, "x"), to=11), to=1))]


def left_zero_pad(g: Graph) -> list[str]:
    return [g.norm(g.call("Pad", conv(g, "x"), g.ints(0, 0, 1, 1, 0, 0, 1, 1)))]


def left_pad_of_channels(g: Graph) -> list[str]:
    padded = g.call("Pad", conv(g, "x"), g.ints(0, 1, 0, 0, 0, 1, 0, 0), mode="reflect")
    return [g.norm(padded, C + 2)]


def left_split_rows(g: Graph) -> list[str]:
    y = g.call("Split", conv(g, "x"), g.ints(3, 3), axis=2)
    g.nodes[-1].output.append("other")
    return [g.norm(y), "other"]


def left_gather_twice(g: Graph) -> list[str]:
    return [g.norm(g.call("Gather", conv(g, "x"), g.ints(0, 0, 1), axis=1), 3)]


def left_pad_that_moves_channels(g: Graph) -> list[str]:
    return [g.norm(g.call("Pad", conv(g, "x"), g.ints(0, 1, 0, 0, 0, -1, 0, 0), mode="edge"))]


def left_cubic(g: Graph) -> list[str]:
    return [g.norm(g.call("Resize", conv(g, "x"), "", g.floats(1, 1, 1.7, 3), mode="cubic"))]


def left_random(g: Graph) -> list[str]:
    shape = {"shape": [C, C, 3, 3], "seed": 1.0}
    return [g.norm(g.call("Conv", "x", g.call("Mul", g.call("RandomNormal", **shape), g.weight())))]


def left_sum_of_one_twice(g: Graph) -> list[str]:
    y = conv(g, "x")
    return [g.norm(g.call("Add", y, y))]


def left_sum_with_the_input(g: Graph) -> list[str]:
    return [g.norm(g.call("Add", conv(g, "x", pads=[1, 1, 1, 1]), "x"))]


def left_swapped_halves(g: Graph) -> list[str]:
    first = g.call("Split", conv(g, "x"), g.ints(2, 4), axis=1)
    g.nodes[-1].output.append("second")
    return [g.norm(g.call("Concat", "second", first, axis=1))]


def left_crop(g: Graph) -> list[str]:
    roi = g.floats(0, 0, -0.5, -0.5, 1, 1, 1.5, 1.5)
    how = {"coordinate_transformation_mode": "tf_crop_and_resize", "mode": "linear"}
    return [g.norm(g.call("Resize", conv(g, "x"), roi, g.floats(1, 1, 2, 2), **how))]


def left_row_bias(g: Graph) -> list[str]:
    return [g.norm(g.call("Gemm", flat(g), g.weight(C, 5), g.weight(2, 5)), 5)]


def left_max_pool(g: Graph) -> list[str]:
    return [g.norm(g.call("MaxPool", conv(g, "x"), kernel_shape=[2, 2]))]


def left_padded_average(g: Graph) -> list[str]:
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}
    return [g.norm(g.call("AveragePool", conv(g, "x"), **window))]


def left_concat_twice(g: Graph) -> list[str]:
    y = conv(g, "x")
    return [g.norm(g.call("Concat", y, y, axis=1), 2 * C)]


def left_concat_read_twice(g: Graph) -> list[str]:
    y = g.norm(g.call("Relu", "x"))
    return [conv(g, g.call("Concat", y, y, axis=1), C, 2 * C)]


def left_concat_of_input(g: Graph) -> list[str]:
    return [g.norm(g.call("Concat", conv(g, "x", pads=[1, 1, 1, 1]), "x", axis=1), 2 * C)]


def left_concat_of_other_rows(g: Graph) -> list[str]:
    y = g.call("Concat", g.norm(g.call("Relu", "x")), "x", axis=2)
    return [conv(g, y)]


def left_training(g: Graph) -> list[str]:
    y = g.norm(conv(g, "x"))
    g.nodes[-1].attribute.append(helper.make_attribute("training_mode", 1))
    g.nodes[-1].output.extend(["mean", "var"])
    return [y, "mean", "var"]


def left_old_training(g: Graph) -> list[str]:
    y = g.norm(conv(g, "x"))
    g.nodes[-1].output.extend(["mean", "var", "saved_mean", "saved_var"])
    return [y]


def left_scaled_with_others(g: Graph) -> list[str]:
    joined = g.call("Concat", g.norm(g.call("Relu", "x")), "x", axis=1)
    return [conv(g, g.call("Mul", joined, g.weight()), C, 2 * C)]


def left_graph_input(g: Graph) -> list[str]:
    return [g.norm("x")]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (left_two_readers, "the output of Conv n0 is also read by Relu n2"),
        (left_output, "the output of Conv n0 is also an output of the graph"),
        (left_relu_before_and_after, "its reader Relu n3 lets no map per channel through"),
        (left_padded_reader, "its reader Conv n2 pads with zeros"),
        (left_padded_reader_same, "its reader Conv n2 pads with zeros"),
        (left_computed, "statistics are not known: v0 is computed from the graph's inputs"),
        (left_quantised, "the weight of Conv n2 is not known: v1 is quantised"),
        (left_cast, "Cast n2 changes the type"),
        (left_zero_pad, "Pad n1 pads with a constant, which the map would change"),
        (left_pad_of_channels, "Pad n1 changes the channels"),
        (left_split_rows, "Split n1 splits along another axis than that of its channels"),
        (left_gather_twice, "Gather n1 uses one channel as several"),
        (left_pad_that_moves_channels, "Pad n1 changes the channels"),
        (left_cubic, "Resize n1 has weights that in onnxruntime do not add up to 1"),
        (left_random, "v1 is computed, by operators that cannot be computed beforehand"),
        (left_sum_of_one_twice, "Add n1 reads the output of Conv n0 twice"),
        (left_sum_with_the_input, "its input is an input of the graph"),
        (left_swapped_halves, "Split n1 is reached on two ways"),
        (left_crop, "Resize n1 fills in a constant outside its input"),
        (left_row_bias, "the bias of Gemm n2 differs from row to row"),
        (left_graph_input, "its input is an input of the graph"),
        (left_max_pool, "MaxPool n1 takes a maximum and a scale is negative (-"),
        (left_padded_average, "AveragePool n1 averages zeros of its padding"),
        (left_concat_twice, "Concat n1 reads the output of Conv n0 twice"),
        (left_concat_read_twice, "its reader Conv n3 is reached on two ways"),
        (left_concat_of_input, "its input is an input of the graph"),
        (left_concat_of_other_rows, "Concat n2 joins along another axis than that of its channels"),
        (left_training, "it is in training mode"),
        (left_scaled_with_others, "its reader Mul n3 lets no map per channel through"),
    ],
)
def test_what_cannot_go_is_left_with_its_reason(tmp_path: Path, build: Any, reason: str) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", build(g), shape=(2, C, 8, 8))
    report = fold_onnx(source, tmp_path / "out.onnx")
    assert [layer.outcome for layer in report.layers] == [Outcome.LEFT]
    assert reason in report.layers[0].reason
    assert count(tmp_path / "out.onnx") == 1


def test_extra_outputs_are_training_mode_where_there_is_no_attribute(tmp_path: Path) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", left_old_training(g), shape=(2, C, 8, 8), opset=13)
    report = fold_onnx(source, None)
    assert "so it is in training mode" in report.layers[0].reason


def test_constants_that_a_caller_may_replace_are_left(tmp_path: Path) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)], shape=(2, C, 8, 8))
    model = onnx.load(source)
    for tensor in model.graph.initializer:
        entry = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(entry)
    onnx.save(model, source)
    reason = fold_onnx(source, None).layers[0].reason
    assert "w2 is an input of the graph as well, so that a caller may replace it" in reason


def test_old_statistics_per_value_are_left(tmp_path: Path) -> None:
    g = Graph()
    y = g.norm(g.call("Gemm", flat(g), g.weight(C, 5), g.weight(5)), 5)
    g.nodes[-1].attribute.append(helper.make_attribute("spatial", 0))
    source = g.save(tmp_path / "in.onnx", [y], opset=8)
    assert "per value and not per channel" in fold_onnx(source, None).layers[0].reason


@pytest.mark.parametrize("shape", [[0, C, 8, 8], [2, C, -8, 8], [99999999999999999999, C, 8, 8]])
def test_sizes_that_prove_nothing_are_refused(tmp_path: Path, shape: list[int]) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    with pytest.raises(BnconvertError, match=r"shapes: x is .*; give sizes of at least 1"):
        fold_onnx(source, tmp_path / "out.onnx", shapes={"x": shape})


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BnconvertError, match="is a device or pipe"):
        fold_onnx(source, tmp_path / "pipe", overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


def test_shared_weights_stay_for_the_other_reader(tmp_path: Path) -> None:
    g = Graph()
    weight, bias = g.weight(C, C, 3, 3), g.weight(C)
    first = g.norm(g.call("Conv", "x", weight, bias))
    second = g.call("Conv", "x", weight, bias)
    third = g.norm(g.call("Conv", "x", weight, bias))
    source = g.save(tmp_path / "in.onnx", [first, second, third])
    assert not fold_onnx(source, tmp_path / "out.onnx").left


def test_a_wrong_fold_is_caught_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    monkeypatch.setattr(
        onnx_folding,
        "batchnorm_affine",
        lambda m, v, eps, *rest: batchnorm_affine(m, v, eps * 1.01, *rest),
    )
    with pytest.raises(VerificationError, match="in float64 the folded graph differs"):
        fold_onnx(source, tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == [source]
