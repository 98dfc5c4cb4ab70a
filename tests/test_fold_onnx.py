"""`fold_onnx`: every operator that takes up a norm, what is left and why, and the proof."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from bnconvert.cli.main import group
from bnconvert.errors import BnconvertError, VerificationError
from bnconvert.export import fold_onnx, onnx_folding
from bnconvert.fold.algebra import batchnorm_affine
from bnconvert.report import Outcome

NORM = "BatchNormalization"
C = 6


class Graph:
    """Collects the nodes of a small graph; `call` returns the name of a node's result."""

    def __init__(self, seed: str = "") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(zlib.crc32(seed.encode()))

    def weight(self, *shape: int, low: float = -1.0, high: float = 1.0) -> str:
        values = self._random.uniform(low, high, shape).astype(np.float32)
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def call(self, op: str, *inputs: str, **attributes: Any) -> str:
        result = f"v{len(self.nodes)}"
        node = helper.make_node(op, inputs, [result], name=f"n{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return result

    def norm(self, value: str, channels: int = C, positive: bool = False) -> str:
        weight = self.weight(channels, low=0.1 if positive else -1.0)
        self.weights[-1].raw_data = self._with_zero(self.weights[-1])
        bias, mean = self.weight(channels), self.weight(channels)
        return self.call(NORM, value, weight, bias, mean, self.weight(channels, low=0.3, high=2.0))

    def _with_zero(self, tensor: onnx.TensorProto) -> bytes:
        values = numpy_helper.to_array(tensor).copy()
        values[0] = 0.0
        return bytes(values.tobytes())

    def save(
        self,
        path: Path,
        outputs: list[str],
        shape: tuple[Any, ...] = ("batch", C, 8, 8),
        opset: int = 17,
        as_constants: bool = False,
    ) -> Path:
        nodes, weights = self.nodes, self.weights
        if as_constants:
            made = [helper.make_node("Constant", [], [w.name], value=w) for w in weights]
            nodes, weights = [*made, *nodes], []
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            weights,
        )
        imports = [helper.make_opsetid("", opset)]
        onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
        return path


def count(path: Path, op: str = NORM) -> int:
    return sum(node.op_type == op for node in onnx.load(path).graph.node)


def conv(g: Graph, x: str, out: int = C, inputs: int = C, group: int = 1, **kw: Any) -> str:
    bias = () if kw.pop("no_bias", False) else (g.weight(out),)
    kernel = kw.pop("kernel", 3)
    weight = g.weight(out, inputs // group, kernel, kernel)
    return g.call("Conv", x, weight, *bias, group=group, **kw)


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


@pytest.mark.parametrize("opset", [9, 11, 13, 15, 18])
def test_every_opset_with_per_channel_statistics(tmp_path: Path, opset: int) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)], opset=opset)
    assert not fold_onnx(source, tmp_path / "out.onnx").left
    assert onnx.load(tmp_path / "out.onnx").opset_import[0].version == opset


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
    scale = g.call("Sigmoid", g.weight(C))
    return [
        g.call(NORM, conv(g, "x"), scale, g.weight(C), g.weight(C), g.weight(C, low=0.1, high=1.0))
    ]


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


def left_graph_input(g: Graph) -> list[str]:
    return [g.norm("x")]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (left_two_readers, "the output of Conv n0 is also read by Relu n2"),
        (left_output, "the output of Conv n0 is also an output of the graph"),
        (left_relu_before_and_after, "its reader Relu n3 is not linear"),
        (left_padded_reader, "its reader Conv n2 pads with zeros"),
        (left_padded_reader_same, "its reader Conv n2 pads with zeros"),
        (left_computed, "its weights or statistics are computed"),
        (left_row_bias, "the bias of Gemm n2 differs from row to row"),
        (left_graph_input, "its input is an input of the graph"),
        (left_max_pool, "MaxPool n1 takes a maximum and a scale is negative (-"),
        (left_padded_average, "AveragePool n1 averages zeros of its padding"),
        (left_concat_twice, "Concat n1 reads the output of Conv n0 twice"),
        (left_concat_read_twice, "its reader Conv n3 is reached on two ways"),
        (left_concat_of_input, "its input is an input of the graph"),
        (left_concat_of_other_rows, "Concat n2 joins along another axis than that of its channels"),
        (left_training, "it is in training mode"),
    ],
)
def test_what_cannot_go_is_left_with_its_reason(tmp_path: Path, build: Any, reason: str) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", build(g), shape=(2, C, 8, 8))
    report = fold_onnx(source, tmp_path / "out.onnx")
    assert [layer.outcome for layer in report.layers] == [Outcome.LEFT]
    assert reason in report.layers[0].reason
    assert count(tmp_path / "out.onnx") == 1


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


def test_command_writes_reports_and_refuses(tmp_path: Path) -> None:
    g = Graph()
    source = str(g.save(tmp_path / "in.onnx", left_two_readers(g), shape=("n", C, "h", "w")))
    out = tmp_path / "out.onnx"

    def run(*args: str) -> Any:
        return CliRunner().invoke(group, ("fold-onnx", *args))

    result = run(source, "-o", str(out), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "is also read by" in result.stdout
    assert not out.exists()
    result = run(source, "-o", str(out), "--shape", "x:3,6,10,12", "--strict")
    assert result.exit_code == 3
    assert out.exists()
    for args, message in [
        ((source, "-o", str(out)), "exists"),
        ((source, "-o", source, "--force"), "is the input itself"),
        ((source, "-o", str(out), "--force", "--shape", "y:1"), "has no input y"),
        ((source, "-o", str(out), "--force", "--shape", "x"), "is not NAME:N,N"),
        ((str(tmp_path / "no"), "-o", str(tmp_path / "b")), "no such file"),
    ]:
        error = run(*args).exception
        assert isinstance(error, BnconvertError)
        assert message in str(error)


def spoil(path: Path, kind: str) -> None:
    """Damage a good file, or put something else in its place."""
    content, model = path.read_bytes(), onnx.load(path)
    if kind == "text":
        path.write_text("no model\n" * 9)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "without its weights":
        onnx.save(model, path, save_as_external_data=True, location="w", size_threshold=0)
        (path.parent / "w").unlink()
    elif kind == "negative variance":
        values = numpy_helper.to_array(model.graph.initializer[-1]).copy()
        values[2] = -1.0
        model.graph.initializer[-1].raw_data = values.tobytes()
        onnx.save(model, path)
    elif kind == "unknown operator":
        model.graph.node[0].op_type = "Convolve"
        onnx.save(model, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "in.onnx: is not an ONNX model"),
        ("empty", "in.onnx: holds no graph"),
        ("truncated", "in.onnx: is not an ONNX model"),
        ("without its weights", "in.onnx: its weights are in w, which is not there"),
        ("negative variance", "BatchNormalization n1: its scale: channel 2 has the value nan"),
        ("unknown operator", "Convolve"),
    ],
)
def test_hostile_files_get_one_line(
    tmp_path: Path, kind: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    g = Graph()
    source = g.save(tmp_path / "in.onnx", [build_conv(g)])
    spoil(source, kind)
    with pytest.raises(BnconvertError) as caught:
        fold_onnx(source, tmp_path / "out.onnx")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]
    assert capfd.readouterr() == ("", "")


def test_the_ocr_classifier_loses_its_35_norms(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    assert spec is not None, "pip install --no-deps -r tests/specimens.txt"
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "models"
    source = folder / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    report = fold_onnx(source, tmp_path / "cls.onnx", shapes={"x": (2, 3, 48, 192)})
    assert report.count(Outcome.FOLDED) == 35
    assert count(tmp_path / "cls.onnx") == 0
    assert report.float64 is not None
    assert report.float64 < 1e-12
    images = torch.rand(3, 3, 48, 192).numpy() * 2 - 1
    results = [session(path, images) for path in (source, tmp_path / "cls.onnx")]
    assert np.abs(results[0] - results[1]).max() < 1e-6


def session(path: Path, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    runner = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: np.ndarray = runner.run(None, {"x": images})[0]
    return result
