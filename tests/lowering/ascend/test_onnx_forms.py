"""What the stock plugins miss: rewritten with equal outputs, or refused; and a finding of the check where it stands."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import defs
from onnx.reference import ReferenceEvaluator

from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower, parser
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from fa_compiler.lowering.ascend.onnx_route.forms import FORMS
from fa_compiler.lowering.ascend.onnx_route.plugin_reads import BY_FACTS, CASES, Known, plugin_rows, rows_of
from tests.lowering.ascend.onnx_models import Arrays, drawn, lowered, parsed, run

X = "float[2,6,4] x"
IMAGE = "float[1,2,7,9] x"
READ = "nothing is found in the original"

EQUAL: dict[str, tuple[int, str, str]] = {
    "shape bounds": (
        17,
        f"g({X}) => (int64[] a, int64[] b, int64[] c, int64[] d) {{ a = Shape<start = 1>(x) "
        "b = Shape<start = -2, end = -1>(x) c = Shape<end = 7>(x) d = Shape<start = 2, end = 1>(x) }",
        "start, which is 1",
    ),
    "shape bounds of open sizes": (
        15,
        "g(float[A,B,4] x) => (int64[] y) { y = Shape<start = 1, end = 2>(x) }",
        "start",
    ),
    "transpose": (17, f"g({X}) => (float[] y) {{ y = Transpose(x) }}", "needs the attribute perm"),
    "transpose of a scalar": (13, "g(float x) => (float y) { y = Transpose(x) }", "perm"),
    "transposed convolution": (
        13,
        "g(float[1,2,5,4] x, float[2,3,3,2] w) => (float[] y) { y = ConvTranspose<strides = [2, 1]>(x, w) }",
        "needs the attribute kernel_shape",
    ),
    "transposed convolution, same": (
        13,
        "g(float[1,2,5,4] x, float[2,3,3,2] w) => (float[] y, float[] z) { y = ConvTranspose<strides = [2, 1], "
        'auto_pad = "SAME_LOWER">(x, w) z = ConvTranspose<strides = [2, 1], auto_pad = "SAME_UPPER">(x, w) }',
        "kernel_shape",
    ),
    "transposed convolution of a shape": (
        11,
        "g(float[1,2,5,4] x, float[2,3,3,2] w) => (float[] y, float[] z) { y = ConvTranspose<strides = [2, 2], "
        "output_shape = [10, 7]>(x, w) z = ConvTranspose<strides = [3, 3], output_shape = [17, 12]>(x, w) }",
        "kernel_shape",
    ),
    "convolution": (
        11,
        "g(float[1,2,8] x, float[3,2,4] w) => (float[] y, float[] z) { y = Conv(x, w) "
        'z = Conv<auto_pad = "SAME_LOWER">(x, w) }',
        "needs kernel_shape, strides, pads or dilations",
    ),
    "convolution with strides": (
        11,
        "g(float[1,2,8] x, float[3,2,4] w) => (float[] y) { y = Conv<strides = [2]>(x, w) }",
        "without kernel_shape",
    ),
    "convolution of a volume without strides": (
        13,
        "g(float[1,2,4,4,4] x, float[2,2,2,2,2] w) => (float[] y) { y = Conv<kernel_shape = [2, 2, 2]>(x, w) }",
        "an image of a volume",
    ),
    "transposed convolution of one axis": (
        13,
        "g(float[1,2,4] x, float[2,2,3] w) => (float[] y) "
        '{ y = ConvTranspose<auto_pad = "SAME_UPPER", kernel_shape = [3], strides = [2]>(x, w) }',
        "auto_pad SAME_UPPER of one axis",
    ),
    "shape of a transposed convolution of one axis": (
        13,
        "g(float[1,2,4] x, float[2,2,3] w) => (float[] y) "
        "{ y = ConvTranspose<kernel_shape = [3], output_shape = [8], strides = [2]>(x, w) }",
        "takes output_shape of images and volumes only",
    ),
    "transposed convolutions behind one of a shape": (
        13,
        "g(float[1,2,5,4] x, float[2,2,3,2] w) => (float[] y, float[] z) "
        "{ y = ConvTranspose<kernel_shape = [3, 2], output_shape = [10, 7], strides = [2, 2]>(x, w) "
        "z = ConvTranspose<kernel_shape = [3, 2]>(x, w) }",
        "z: y has output_shape",
    ),
    "maxima of everything": (
        13,
        "g(float[2,3,8] x, float[2,3,4,5,2] z, float[2,3,4,5] u) => (float[] a, float[] b, float[] c) "
        "{ a = GlobalMaxPool(x) b = GlobalMaxPool(z) c = GlobalMaxPool(u) }",
        "4 dimensions only, and there are 5",
    ),
    "maxima of everything at opset 18": (
        18,
        "g(float[2,3,8] x, int32[2] i) => (float[] a, int32[] b) { a = GlobalMaxPool(x) b = BitwiseNot(i) }",
        "4 dimensions only, and there are 3",
    ),
    "convolution of a volume": (
        11,
        "g(float[1,2,5,6,7] x, float[3,2,2,3,2] w) => (float[] y) "
        '{ y = Conv<auto_pad = "SAME_UPPER", strides = [1, 2, 3], kernel_shape = [2, 3, 2]>(x, w) }',
        "auto_pad SAME_UPPER of volumes",
    ),
    "convolution of open sizes": (
        11,
        "g(float[1,2,H,W] x, float[3,2,2,4] w) => (float[] y) "
        '{ y = Conv<auto_pad = "SAME_LOWER", kernel_shape = [2, 4]>(x, w) }',
        READ,
    ),
    "averages": (
        13,
        f"g({IMAGE}) => (float[] a, float[] b) {{ a = AveragePool<kernel_shape = [2, 4], strides = [2, 3], "
        'auto_pad = "SAME_LOWER">(x) b = AveragePool<kernel_shape = [2, 2], auto_pad = "SAME_LOWER", '
        "count_include_pad = 1>(x) }",
        "auto_pad NOTSET or SAME_UPPER or VALID only",
    ),
    "averages of a volume": (
        13,
        "g(float[1,2,5,6,7] x) => (float[] y) "
        '{ y = AveragePool<kernel_shape = [2, 2, 3], auto_pad = "SAME_UPPER">(x) }',
        "of volumes",
    ),
    "averages of open sizes": (
        13,
        'g(float[1,2,H,W] x) => (float[] y) { y = AveragePool<kernel_shape = [2, 4], auto_pad = "SAME_LOWER">(x) }',
        "auto_pad",
    ),
    "maxima": (
        13,
        f"g({IMAGE}) => (float[] a, float[] b) {{ a = MaxPool<kernel_shape = [2, 4], strides = [2, 3], "
        'auto_pad = "SAME_LOWER">(x) b = MaxPool<kernel_shape = [4, 2], auto_pad = "SAME_LOWER">(x) }',
        "auto_pad",
    ),
    "maxima of a large window": (
        13,
        "g(float[1,1,20,21] x) => (float[] y) "
        '{ y = MaxPool<kernel_shape = [16, 17], auto_pad = "SAME_UPPER", strides = [2, 2]>(x) }',
        "auto_pad beside a window of 272",
    ),
    "maxima with dilations": (
        13,
        f"g({IMAGE}, float[1,2,9] z) => (float[] a, float[] b) {{ a = MaxPool<kernel_shape = [2, 3], "
        "dilations = [2, 1], pads = [1, 0, 0, 1], ceil_mode = 1, strides = [2, 2]>(x) "
        "b = MaxPool<kernel_shape = [3], dilations = [3], pads = [1, 2]>(z) }",
        "dilations for volumes only",
    ),
    "maxima and places that nothing reads": (
        12,
        f"g({IMAGE}) => (float[] y) {{ y, i = MaxPool<kernel_shape = [2, 2], storage_order = 1>(x) }}",
        "a second output",
    ),
    "norms": (
        13,
        f'g({IMAGE}) => (float[] y) {{ y = LpPool<kernel_shape = [2, 2], auto_pad = "SAME_LOWER">(x) }}',
        "auto",
    ),
    "last of the largest": (
        13,
        "g(int64[3,5] x) => (int64[] a, int64[] b, int64[] c, int64[] d) "
        "{ a = ArgMax<select_last_index = 1, axis = 1>(x) b = ArgMax<select_last_index = 1, keepdims = 0>(x) "
        "c = ArgMin<select_last_index = 1, axis = -1>(x) "
        "d = ArgMin<axis = 1>(x) }",
        "select_last_index 0 only",
    ),
    "last of the largest, open sizes": (
        12,
        "g(int64[A,B] x) => (int64[] y) { y = ArgMax<select_last_index = 1, axis = 1>(x) }",
        "select_last_index",
    ),
    "clip without bounds": (13, f"g({X}) => (float[] y) {{ y = Clip(x) }}", "needs a bound"),
    "clip of old": (
        10,
        "g(float[2,3] x, float16[4] h) => (float[] a, float16[] b, float[] c) { a = Clip<min = -0.5>(x) "
        "b = Clip<max = 0.5, min = -0.25>(h) c = Clip(x) }",
        "without max",
    ),
    "clip of old, any type": (
        9,
        "g(float16[2,4] h) => (float16[] y) { z = Clip<max = 0.5, min = -0.25>(h) y = Add(z, h) }",
        "float32 for any type",
    ),
    "infinite on one side": (
        17,
        "g(float[2,3] x) => (bool[] a, bool[] b, bool[] c) { z = Constant<value_float = 0.0>() i = Div(x, z) "
        "a = IsInf<detect_negative = 0>(i) b = IsInf<detect_positive = 0>(i) "
        "c = IsInf<detect_positive = 0, detect_negative = 0>(i) }",
        "detect_negative 1 only",
    ),
    "selu": (17, f"g({X}) => (float[] y) {{ y = Selu<alpha = 1.5, gamma = 0.75>(x) }}", "alpha 1.6732632 only"),
    "selu of one number": (6 + 2, f"g({X}) => (float[] y) {{ y = Selu<gamma = 2.0>(x) }}", "gamma"),
    "batches of indices": (
        13,
        "g(float[2,3,4,5] x, int64[2,3,2,1] i, int64[2,3] j) => (float[] a, float[] b) "
        "{ a = GatherND<batch_dims = 2>(x, i) one = Constant<value_ints = [-1]>() k = Unsqueeze(j, one) "
        "b = GatherND<batch_dims = 1>(x, k) }",
        "batch_dims 0 only",
    ),
    "batches of indices, open sizes": (
        12,
        "g(float[A,4,5] x, int64[A,B,2] i) => (float[] y) { y = GatherND<batch_dims = 1>(x, i) }",
        "batch_dims",
    ),
    "remainders": (
        13,
        "g(int64[7] n, int32[7] m, float[7] f, uint32[7] u) => (int64[] a, int32[] b, float[] c, uint32[] d) "
        "{ two = Constant<value = int64 {2}>() one = Constant<value = int64 {1}>() s = Mul(n, two) "
        "o = Sub(s, one) a = Mod(n, o) e = Cast<to = 6>(o) b = Mod(m, e) c = Mod<fmod = 1>(f, f) d = Mod(u, u) }",
        "treats a node without fmod differently",
    ),
    "dropout": (
        13,
        f"g({X}, bool may) => (float[] a, float[] b, bool[] m, float[] c, float[] d) "
        "{ r = Constant<value_float = 0.5>() "
        "t = Constant<value = bool {0}>() a = Dropout(x, r) b, m = Dropout(x, r, t) "
        "zero = Constant<value_float = 0.0>() "
        "yes = Constant<value = bool {1}>() c = Dropout(x, zero, yes) d = Dropout(x, zero, may) }",
        "no input 1",
    ),
    "dropout of old": (10, f"g({X}) => (float[] y) {{ y, m = Dropout<ratio = 0.3>(x) }}", READ),
    "product without a third input": (
        13,
        "g(float[3,4] a, float[3,5] b) => (float[] y) { y = Gemm<alpha = 0.5, transA = 1>(a, b) }",
        "alpha, which is 0.5",
    ),
    "sums that broadcast": (
        13,
        "g(float[3,4] a, float[4] b, float[3,1] c) => (float[] y, float[] z) { y = Sum(b, a, c) z = Mean(b, a, c) }",
        READ,
    ),
    "softmax of old": (
        11,
        f"g({X}) => (float[] a, float[] b, float[] c, float[] d) {{ a = LogSoftmax(x) b = LogSoftmax<axis = 2>(x) "
        "c = Hardmax(x) d = LogSoftmax<axis = 0>(x) }",
        "without axis",
    ),
    "softmax of several axes": (
        11,
        f"g({X}) => (float[] a, float[] b, float[] c) "
        "{ a = Softmax(x) b = Softmax<axis = -1>(x) c = Softmax<axis = 0>(x) }",
        "computes axis 1 only, and before opset 13 ONNX all axes from it on; this is inferred",
    ),
    "softmax of several axes of the oldest": (
        8,
        f"g({X}) => (float[] a, float[] b) {{ a = Softmax<axis = 2>(x) b = Hardmax<axis = 1>(x) }}",
        "computes axis 1 only",
    ),
    "the largest of old": (
        9,
        "g(float[3,4] x) => (float[] v, int64[] i, float[] b, float[] c) "
        "{ v, i = TopK<k = 2>(x) b = Slice<starts = [1], ends = [-1], axes = [1]>(x) "
        "c = Slice<starts = [0, 1], ends = [2, 9]>(x) }",
        "k as a constant of the wrong size",
    ),
    "the largest of the oldest": (
        8,
        "g(float[2,3,4] x, float[3] s) => (float[] v, int64[] i) "
        "{ n = BatchNormalization<spatial = 1>(x, s, s, s, s) v, i = TopK<k = 2>(n) }",
        "k as a constant of the wrong size",
    ),
    "numbers of elements": (
        13,
        f"g({X}, int32[A,4] z, float v) => (int64[] a, int64[] b, int64[] c) "
        "{ s = Size(x) t = Shape(x) a = Add(s, t) b = Size(z) c = Size(v) }",
        "int64 or int32",
    ),
    "padding of old": (
        10,
        "g(float16[2,4] h) => (float16[] a, float16[] b) { a = Pad<pads = [0, 1, 0, 1], value = 2.0>(h) "
        'b = Pad<pads = [0, 1, 1, 0], mode = "edge">(h) }',
        "pads every type with a number of float32",
    ),
    "normalisation without a bias": (
        17,
        "g(float16[2,4] x, float16[4] s) => (float16[] y) { y = LayerNormalization(x, s) }",
        "a bias of float32",
    ),
    "normalisation without a bias, open sizes": (
        17,
        "g(double[2,A] x, double[A] s) => (double[] y) { y = LayerNormalization(x, s) }",
        "a bias of float32",
    ),
    "sums at indices": (
        16,
        "g(float[A,3,2] x, int64[5,2] i, float[5,2] u) => (float[] y) "
        '{ n = Sub(i, i) y = ScatterND<reduction = "add">(x, n, u) }',
        "drops the reduction, which is add",
    ),
    "products at indices": (
        18,
        "g(float[4,3] x, int64[2,1] i, float[2,3] u) => (float[] y, int64[] z) "
        '{ c = Constant<value = int64[1] {-2}>() n = Add(i, c) y = ScatterND<reduction = "mul">(x, n, u) '
        "z = BitwiseNot(i) }",
        "drops the reduction, which is mul",
    ),
    "parts of one number": (
        18,
        "g(float[2,5] x, int32[2] i) => (float[] a, float[] b, int32[] c) "
        "{ z = Relu(x) a, b = Split<axis = 1, num_outputs = 2>(z) c = BitwiseNot(i) }",
        "crashes on num_outputs",
    ),
    "even parts of one number": (
        18,
        "g(float[2,A] x, int32[2] i) => (float[] a, float[] b, int32[] c) "
        "{ z = Relu(x) a, b = Split<axis = 1, num_outputs = 2>(z) c = BitwiseNot(i) }",
        "crashes on num_outputs",
    ),
    "an output of constants": (
        13,
        "g(float[2] x) => (float[] k, float[] y, float[] z, float[] e) { c = Constant<value = float[3] {1, 2, 3}>() "
        "k = Add(c, c) y = Relu(x) i = Neg(k) z = Identity(i) e = Identity(c) }",
        "the output 'k' depends on constants only",
    ),
    "outputs of constants in branches": (
        13,
        "g(bool p, float[2] x) => (float[] y, float[] z) { c = Constant<value = float[2] {1, 2}>() "
        "y, z = If(p) <then_branch = t() => (float[2] a, float[2] b) { d = Constant<value = float[2] {3, 4}>() "
        "a = Add(d, d) b = Relu(x) }, else_branch = e() => (float[2] f, float[2] h) { f = Neg(c) h = Neg(x) }> }",
        "the output 'a' depends on constants only",
    ),
    "an output of constants in a branch alone": (
        13,
        "g(bool p, float[2] x) => (float[] y, float[] z) { z = Relu(x) "
        "y = If(p) <then_branch = t() => (float[2] a) { d = Constant<value = float[2] {3, 4}>() a = Add(d, d) }, "
        "else_branch = e() => (float[2] f) { g = Constant<value = float[2] {5, 6}>() f = Neg(g) }> }",
        READ,
    ),
    "reduction of old": (
        11,
        f"g({X}) => (float[] a, float[] b) {{ p = Abs(x) a = ReduceLogSum(p) b = ReduceLogSumExp<keepdims = 0>(x) }}",
        "without axes",
    ),
    "what stays at opset 18": (
        18,
        f"g({X}, int32[3] i) => (float[] a, float[] b, float[] c, int32[] d) {{ s = Constant<value_ints = [1]>() "
        "a = ReduceSumSquare(x, s) b = ReduceL2<keepdims = 0>(x, s) p = Constant<value_ints = [1, 2]>() "
        "c = Pad(x, p, , s) d = BitwiseNot(i) }",
        "no plugin is registered for ai.onnx::18::ReduceL2",
    ),
    "identity matrices": (
        13,
        "g(float[3,5] x, int32[A,4] z) => (float[] a, float[] b, int32[] c, double[] d) { a = EyeLike(x) "
        "b = EyeLike<k = 2>(x) c = EyeLike<k = -1>(z) d = EyeLike<dtype = 11>(z) }",
        "without dtype",
    ),
    "identity matrices of old": (10, "g(float[3,5] x) => (float[] a) { a = EyeLike<k = 1>(x) }", "another diagonal"),
    "identity matrices of eight bytes": (
        13,
        "g(float[3,5] x) => (double[] a, int64[] b) { a = EyeLike<dtype = 11>(x) b = EyeLike<dtype = 7>(x) }",
        "with 4 bytes, and GE stops",
    ),
    "grid": (16, "g(float[1,2,5,5] x, float[1,3,3,2] p) => (float[] y) { y = GridSample(x, p) }", "without mode"),
    "blocks of one": (
        13,
        "g(float[1,2,3,3] x) => (float[] y) { y = DepthToSpace<blocksize = 1>(x) }",
        "blocks from 2 on",
    ),
    "losses": (
        13,
        "g(float[3,5,2] x, float[5] w) => (float[] a, float[] b, float[] c, float[] d, float[] p) "
        "{ t = Constant<value = int64[3,2] {0, 4, 2, 1, 2, 3}>() a = SoftmaxCrossEntropyLoss(x, t) "
        'b = SoftmaxCrossEntropyLoss<ignore_index = 2>(x, t, w) c = SoftmaxCrossEntropyLoss<reduction = "none", '
        'ignore_index = -7>(x, t) d, p = SoftmaxCrossEntropyLoss<reduction = "sum">(x, t, w) }',
        "without ignore_index",
    ),
    "losses of old": (
        12,
        "g(float[3,5,2] x) => (float[] y) { t = Constant<value = int64[3,2] {0, 4, 2, 1, 2, 3}>() "
        "y = SoftmaxCrossEntropyLoss<ignore_index = 1>(x, t) }",
        READ,
    ),
    "resized as the operator does": (
        13,
        f"g({IMAGE}) => (float[] a, float[] b) {{ s = Constant<value = float[4] {{1.0, 1.0, 2.0, 3.0}}>() "
        'a = Resize<coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">(x, , s) '
        "b = Resize(x, , s) }",
        READ,
    ),
    "resized otherwise": (
        13,
        f"g({IMAGE}, float[2,3,5] z) => (float[] a, float[] b, float[] c, float[] d, float[] e) "
        "{ s = Constant<value_floats = [1.0, 1.0, 0.5, 0.6]>() t = Constant<value_floats = [1.0, 2.0, 1.7]>() "
        "n = Constant<value_ints = [1, 3, 12, 4]>() "
        'a = Resize<nearest_mode = "ceil">(x, , s) b = Resize<coordinate_transformation_mode = "align_corners", '
        'nearest_mode = "floor">(x, , , n) c = Resize(x, , s) d = Resize(z, , t) '
        'e = Resize<coordinate_transformation_mode = "asymmetric", nearest_mode = "round_prefer_ceil">(x, , , n) }',
        "does not read nearest_mode",
    ),
    "resized axes": (
        18,
        f"g({IMAGE}) => (float[] a, float[] b, float[] c) {{ s = Constant<value_floats = [2.0, 0.5]>() "
        "n = Constant<value_ints = [4, 10]>() "
        'a = Resize<axes = [3, 2], mode = "linear">(x, , s) b = Resize<axes = [-1, 2], mode = "linear">(x, , , n) '
        'c = Resize<axes = [2, 3], nearest_mode = "floor">(x, , s) }',
        "axes, which is [3, 2]",
    ),
    "resized of open sizes": (
        13,
        "g(float[1,2,H,W] x) => (float[] y) "
        "{ s = Constant<value = float[4] {1.0, 1.0, 2.0, 2.0}>() y = Resize(x, , s) }",
        READ,
    ),
    "resized with numbers that say nothing": (
        13,
        f"g({IMAGE}) => (float[] y) {{ s = Constant<value = float[4] {{1.0, 1.0, 2.0, 2.0}}>() "
        'y = Resize<mode = "linear", cubic_coeff_a = -0.5, nearest_mode = "ceil">(x, , s) }',
        READ,
    ),
    "upsampled": (
        9,
        f"g({IMAGE}) => (float[] a, float[] b) {{ s = Constant<value = float[4] {{1.0, 1.0, 2.0, 3.0}}>() "
        "a = Upsample(x, s) t = Constant<value = float[4] {1.0, 1.0, 1.5, 1.3}>() b = Upsample(x, t) }",
        READ,
    ),
    "filled": (13, "g(int64[2] n) => (float16[] y) { y = ConstantOfShape<value = float16[1] {1}>(n) }", "as bytes"),
    "different values of a vector": (
        13,
        "g(int64[6] x) => (int64[] y) { y = Unique<axis = 0>(x) }",
        "axis, which is 0",
    ),
    "absent inputs at the end": (
        13,
        "g(float[2,3] x, float[3,4] w) => (float[] y) { y = Gemm<alpha = 2.0>(x, w, ) }",
        "a",
    ),
    "absent region of a branch": (
        13,
        f"g({IMAGE}, bool c) => (float[] y) {{ s = Constant<value_floats = [1.0, 1.0, 2.0, 3.0]>() "
        "n = Constant<value_ints = [1, 2, 14, 27]>() y = If(c) <then_branch = t() => (float[] a) "
        '{ a = Resize<mode = "linear">(x, , s) }, else_branch = f() => (float[] d) '
        '{ d = Resize<mode = "linear">(x, , , n) }> }',
        "it has an absent input and lies in a branch",
    ),
    "absent inputs of a branch": (
        13,
        f"g({X}, bool c) => (float[] y) {{ h = Constant<value_float = 0.5>() b = Constant<value_ints = [0, 0, 0]>() "
        "n = Constant<value_ints = [2, 5, 4]>() o = Constant<value_ints = [1, 2, 3]>() y = If(c) <then_branch = t() => "
        "(float[] a) { a = Clip(x, , h) }, else_branch = f() => (float[] d) { d = Slice(x, b, n, , o) }> }",
        "it has an absent input and lies in a branch",
    ),
}


def feeds_of(model: onnx.ModelProto, seed: int) -> Arrays:
    """Few different numbers, so that the largest comes more than once; whole numbers of both signs."""
    feeds = drawn(model, seed)
    for name, value in feeds.items():
        if value.dtype.kind == "i" and name in "xnm":
            feeds[name] = np.random.default_rng(seed).integers(-3, 3, value.shape).astype(value.dtype)
        elif value.dtype.kind == "u":
            feeds[name] = value + value.dtype.type(1)
    if "n" in feeds and len(feeds) == 1:
        feeds["n"] = np.array([2, 3])
    return feeds


@pytest.mark.parametrize("case", sorted(EQUAL))
def test_equal_outputs(case: str) -> None:
    version, text, _ = EQUAL[case]
    model = parsed(text, version, ir_version=8)
    result = lowered(model)
    assert [str(each) for each in check_model(result, None) if each.severity is not Severity.NOTE] == []
    for seed in range(3):
        feeds = feeds_of(model, seed)
        with np.errstate(all="ignore"):
            pairs = list(zip(run(model, feeds), run(result, feeds), strict=True))
        for left, right in pairs:
            assert left.dtype == right.dtype
            np.testing.assert_allclose(right, left, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", sorted(EQUAL))
def test_the_check_finds_what_was_rewritten(case: str) -> None:
    version, text, phrase = EQUAL[case]
    if version <= parser.NEWEST:
        found = [str(finding) for finding in check_model(parsed(text, version, ir_version=8), None)]
        assert (not found) if phrase == READ else any(phrase in line for line in found), found


def test_the_check_finds_a_constant_that_is_no_tensor() -> None:
    """The plugin reads the attribute `value` alone, and makes an empty constant of the others."""
    text = "g(float[3] x) => (float[] y) { c = Constant<value_float = 2.0>() y = Add(x, c) }"
    found = [str(finding) for finding in check_model(parsed(text, 13, ir_version=8), None)]
    assert any("does not read value_float" in line for line in found), found


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_batches_first(direction: str) -> None:
    """ONNX Runtime has no layout 1: the original runs in ONNX's reference."""
    count = 2 if direction == "bidirectional" else 1
    body = (
        f"g(float[2,5,4] x, float[{count},9,4] w, float[{count},9,3] r, float[2,{count},3] s) => "
        f"(float[] y, float[] h) {{ y, h = "
        f'GRU<hidden_size = 3, layout = 1, direction = "{direction}">(x, w, r, , , s) }}'
    )
    model = parsed(body, 14, ir_version=8)
    assert any("layout, which is 1" in str(finding) for finding in check_model(model, None))
    result = lowered(model)
    assert check_model(result, None) == []
    feeds = drawn(model)
    if direction == "forward":  # ONNX's reference knows one direction only
        expected = ReferenceEvaluator(model).run(None, feeds)
    else:
        plain = parsed(body.replace("layout = 1", "layout = 0"), 14, ir_version=8)
        del plain.graph.value_info[:]
        turned = {name: value.swapaxes(0, 1) if name in "xs" else value for name, value in feeds.items()}
        for value in plain.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, turned[value.name].shape, strict=True):
                dim.dim_value = size
        for value in plain.graph.output:
            value.type.tensor_type.ClearField("shape")
        found = run(plain, turned)
        expected = [found[0].transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in found[1:])]
    for left, right in zip(expected, run(result, feeds), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


REFUSED: dict[str, tuple[int, str, str]] = {
    "a stride beyond the window": (
        13,
        "g(float[1,2,5] x, float[2,3,2] w) => (float[] y) "
        '{ y = ConvTranspose<strides = [3], auto_pad = "SAME_UPPER">(x, w) }',
        "shorter than its stride",
    ),
    "a stride far beyond the window": (
        13,
        "g(float[1,1,9] x) => (float[] y) "
        '{ y = LpPool<kernel_shape = [1], strides = [3], auto_pad = "SAME_LOWER">(x) }',
        "shorter than its stride",
    ),
    "automatic pads with dilations": (
        13,
        f"g({IMAGE}) => (float[] y) "
        '{ y = MaxPool<kernel_shape = [2, 2], dilations = [2, 2], auto_pad = "SAME_LOWER">(x) }',
        "auto_pad together with dilations",
    ),
    "places of maxima": (
        12,
        f"g({IMAGE}) => (float[] a, int64[] y) {{ a, y = MaxPool<kernel_shape = [2, 2]>(x) }}",
        "no output 1",
    ),
    "the largest of several updates": (
        18,
        "g(float[4,3] x, int64[4,3] i, float[4,3] u) => (float[] y) "
        '{ y = ScatterElements<reduction = "max">(x, i, u) }',
        "reduction none or add or mul only, and it is max",
    ),
    "the smallest of several updates, newer": (
        20,
        'g(float[4] x, int64[2] i, float[2] u) => (float[] y) { y = ScatterElements<reduction = "min">(x, i, u) }',
        "reduction none or add or mul only, and it is min",
    ),
    "the largest at indices": (
        18,
        'g(float[4] x, int64[2,1] i, float[2] u) => (float[] y) { y = ScatterND<reduction = "max">(x, i, u) }',
        "drops the reduction, which is max",
    ),
    "columns": (
        18,
        "g(float[1,5,5] x) => (float[] y) { i = Constant<value = int64[2] {5, 5}>() "
        "b = Constant<value = int64[2] {1, 5}>() y = Col2Im(x, i, b) }",
        "pads of 2 numbers, and images have 4",
    ),
    "the largest of old, upsampled": (
        9,
        "g(float[1,1,3,4] x) => (float[] z, int64[] i) { s = Constant<value = float[4] {1, 1, 2, 2}>() "
        "z, i = TopK<k = 2>(x) y = Upsample(x, s) }",
        "opset 10 does not have this node",
    ),
    "several drawn numbers": (
        15,
        "g(float[2,4] x) => (int32[] y) { y = Multinomial<sample_size = 5>(x) }",
        "sample_size 1 only, and it is 5",
    ),
    "several drawn numbers, counted in int64": (
        15,
        "g(float[2,4] x) => (int64[] z) { y = Multinomial<sample_size = 5, dtype = 7>(x) z = Neg(y) }",
        "sample_size 1 only, and it is 5",
    ),
    "constants that ONNX Runtime does not compute, rewritten": (
        11,
        "g(float[2] x) => (double[] y, float[] z) { c = Constant<value = double[2,1,2] {1, 2, 3, 4}>() "
        "[y] y = Hardmax<axis = 1>(c) z = Neg(x) }",
        "depends on constants only",
    ),
    "a sum whose noop_with_empty_axes is 2": (
        13,
        "g(float[2,4] x) => (float[] y) { y = ReduceSum<noop_with_empty_axes = 2>(x) }",
        "noop_with_empty_axes is 2",
    ),
    "a minimum whose noop_with_empty_axes is 2": (
        18,
        "g(float[2,4] x) => (float[] y) { y = ReduceMin<noop_with_empty_axes = 2>(x) }",
        "noop_with_empty_axes is 2",
    ),
    "random numbers of another type": (
        14,
        "g(float[2] x) => (double[3] y, float[] z) { y = RandomUniform<dtype = 11, shape = [3]>() z = Relu(x) }",
        "dtype 1 or 10 or 6 or 2 only",
    ),
    "padding of old, of double": (
        10,
        "g(double[2,4] x) => (double[] y) { y = Pad<pads = [0, 1, 0, 1]>(x) }",
        "pads every type with a number of float32",
    ),
    "parts without an axis": (
        13,
        "g(float[2,4] x) => (float[4,2] z) { y = SplitToSequence<axis = 1, keepdims = 0>(x) "
        "z = ConcatFromSequence<axis = 0, new_axis = 1>(y) }",
        "loses keepdims",
    ),
    "an output of random numbers": (
        13,
        "g(float[2] x) => (float[] y, float[] z) { r = RandomNormal<shape = [3]>() y = Relu(r) z = Relu(x) }",
        "depends on no input of the graph",
    ),
    "statistics of old": (
        9,
        "g(float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[] y, float[] n) "
        "{ y, n = BatchNormalization(x, s, b, m, v) }",
        "its output 'n' is read",
    ),
    "a memory": (
        14,
        "g(float[5,2,4] x, float[1,12,4] w, float[1,12,3] r) => (float[] y) { y = LSTM<hidden_size = 3>(x, w, r) }",
        "does not store hidden_size",
    ),
    "dropout that trains": (
        13,
        f"g({X}) => (float[] y) {{ r = Constant<value_float = 0.5>() t = Constant<value = bool {{1}}>() "
        "y = Dropout(x, r, t) }",
        "drops values in training",
    ),
    "dropout that may train": (
        13,
        f"g({X}, float r, bool t) => (float[] y) {{ y = Dropout(x, r, t) }}",
        "not constant",
    ),
    "an averaging window of open sizes": (
        13,
        "g(float[1,2,H,W] x) => (float[] y) "
        '{ y = AveragePool<kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_LOWER">(x) }',
        "unknown sizes",
    ),
    "a reset before the product": (
        14,
        "g(float[5,2,4] x, float[1,9,4] w, float[1,9,3] r) => (float[] y) "
        "{ y = GRU<hidden_size = 3, linear_before_reset = 1>(x, w, r) }",
        "linear_before_reset, which is 1",
    ),
    "other activations": (
        14,
        "g(float[5,2,4] x, float[1,9,4] w, float[1,9,3] r) => (float[] y) "
        '{ y = GRU<hidden_size = 3, activations = ["Sigmoid", "Relu"]>(x, w, r) }',
        "activations",
    ),
    "an even window": (13, "g(float[1,4,3,3] x) => (float[] y) { y = LRN<size = 4>(x) }", "windows of an odd size"),
    "places of different values": (
        13,
        "g(float[6] x) => (float[] a, int64[] y) { a, y = Unique(x) }",
        "fills output 1",
    ),
    "statistics": (
        15,
        "g(float[2,3,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[] y, float[] n, float[] w) "
        "{ y, n, w = BatchNormalization<training_mode = 1>(x, s, b, m, v) }",
        "no output 1",
    ),
    "cubic with another number": (
        13,
        f"g({IMAGE}) => (float[] y) {{ s = Constant<value_floats = [1.0, 1.0, 2.0, 2.0]>() "
        'y = Resize<mode = "cubic", cubic_coeff_a = -0.5>(x, , s) }',
        "cubic_coeff_a, which is -0.5",
    ),
    "antialias": (
        18,
        f"g({IMAGE}) => (float[] y) {{ s = Constant<value_floats = [1.0, 1.0, 0.5, 0.5]>() "
        'y = Resize<mode = "linear", antialias = 1>(x, , s) }',
        "antialias",
    ),
    "nearest pixels of open sizes": (
        13,
        "g(float[1,2,H,W] x, int64[4] n) => (float[] y) { y = Resize(x, , , n) }",
        "unknown sizes or scales",
    ),
    "a linear resize of old": (
        10,
        'g(float[1,2,4,4] x, float[4] s) => (float[] y) { y = Resize<mode = "linear">(x, s) }',
        "coordinates of opset 11",
    ),
    "a gap in a branch": (
        14,
        "g(float[5,2,4] x, float[1,9,4] w, float[1,9,3] r, float[1,2,3] s, bool c) => (float[] z) { z = If(c) "
        "<then_branch = t() => (float[] y) { y = GRU<hidden_size = 3>(x, w, r, , , s) }, "
        "else_branch = f() => (float[] d) { d = Relu(x) }> }",
        "input 3, 4 is absent",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refusals_name_the_node(case: str) -> None:
    version, text, phrase = REFUSED[case]
    with pytest.raises(UnsupportedModel) as error:
        lower(ir.from_proto(parsed(text, version, ir_version=8)))
    assert len(error.value.problems) == 1, error.value.problems
    assert phrase in error.value.problems[0]
    assert "y (" in error.value.problems[0] or "a (" in error.value.problems[0]


def test_what_is_not_read_has_its_default() -> None:
    """Momentum, seeds and ratios say nothing; an attribute that has the value of the operator is no finding."""
    text = (
        "g(float[2,3,4] x, float[3] s) => (float[] y) { b = BatchNormalization<momentum = 0.5>(x, s, s, s, s) "
        'l = GRU<hidden_size = 2, activations = ["Sigmoid", "Tanh"]>(b, w, r) y = Relu(b) }'
    ).replace("l = GRU", "w = Constant<value = float[1,6,4] {%s}>() r = Constant<value = float[1,6,2] {%s}>() l = GRU")
    numbers = [", ".join(["0.5"] * count) for count in (24, 12)]
    assert check_model(parsed(text % tuple(numbers), 15, ir_version=8), None) == []


def test_the_table_speaks_of_operators_and_attributes_that_there_are() -> None:
    known: dict[str, set[str]] = {}
    for each in defs.get_all_schemas_with_history():
        if not each.domain:
            known.setdefault(each.name, set()).update(each.attributes)
    for (op_type, version), row in plugin_rows().items():
        assert op_type == "Constant" or parser.takes("", op_type, version), (op_type, version)
        try:
            schema = defs.get_schema(op_type, version)
        except defs.SchemaError:
            continue  # ONNX got the operator later than the plugin
        if schema.since_version <= version and not schema.deprecated:
            assert row.entries.keys() <= known[op_type], (op_type, row.entries.keys() - known[op_type])


def test_every_operator_with_attributes_has_a_row() -> None:
    """What has no row reads no attribute, which holds of few operators that have one."""
    lacking = set()
    for schema in defs.get_all_schemas_with_history():
        for version in range(max(8, schema.since_version), 19):
            if schema.domain or not parser.takes("", schema.name, version) or (schema.name, version) in plugin_rows():
                continue
            if defs.get_schema(schema.name, version).attributes:
                lacking.add(schema.name)
    assert lacking == {"SequenceEmpty", "Shape"}


def test_rules_are_for_operators_of_the_parser() -> None:
    assert set(BY_FACTS) < set(CASES)
    for name in {*FORMS, *CASES}:
        assert any(parser.takes("", name, version) for version in range(8, 19)), name


def test_the_table_says_how_each_row_is_known() -> None:
    """The reader refuses a table that is not in its form, and names the line."""
    good = "Relu\t8-18\t-\t1\t1\tloader"
    assert rows_of(good)["Relu", 8].known is Known.LOADER
    assert rows_of("TopK\t8\taxis k!\t1\t2\tsource topk.cpp")["TopK", 8].source == "topk.cpp"
    for bad, phrase in {
        "Relu\t8-18\t-\t1\t1": "not enough values",
        "Relu\t8-18\t-\t1\t1\tguessed": "'guessed' is not a valid Known",
        "Relu\t8-18\t-\t1\t1\tsource": "the name of a C++ file",
        "Relu\t8-18\t-\t1\t1\tloader relu.cpp": "the name of a C++ file",
        "Relu\t8-18\ta b=1 a?\t1\t1\tloader": "an attribute twice",
        "Relu\t8-18\ta=1|\t1\t1\tloader": "is no attribute",
        "Relu\t8-18\t-\tone\t1\tloader": "invalid literal",
        f"{good}\nRelu\t18\t-\t1\t1\tloader": "has a row for version 18 already",
    }.items():
        with pytest.raises(ValueError, match="of the table is 'Relu") as error:
            rows_of(bad)
        assert phrase in str(error.value)


RANDOM: dict[str, tuple[int, str, str]] = {
    "a seed of 0": (15, "g(float[2,4] x) => (float[2,4] y) { y = Bernoulli<seed = 0.0>(x) }", "a seed of 0"),
    "drawn numbers": (15, "g(float[2,4] x) => (int64[] y) { y = Multinomial<dtype = 7>(x) }", "dtype 6 only"),
    "normal numbers": (
        14,
        "g(float[2,4] x) => (float16[] y) { z = Cast<to = 10>(x) y = RandomNormalLike(z) }",
        "makes float32 of every tensor",
    ),
    "uniform numbers": (
        14,
        "g(float[2,4] x) => (float16[] y) { z = Cast<to = 10>(x) y = RandomUniformLike(z) }",
        "makes float32 of every tensor",
    ),
}


@pytest.mark.parametrize("case", sorted(RANDOM))
def test_random_numbers(case: str) -> None:
    """The numbers differ in every run, their types and shapes do not."""
    version, text, phrase = RANDOM[case]
    model = parsed(text, version, ir_version=8)
    assert any(phrase in str(finding) for finding in check_model(model, None))
    result = lowered(model)
    assert check_model(result, None) == []
    feeds = {name: np.full_like(value, 0.5) for name, value in drawn(model).items()}
    for left, right in zip(run(model, feeds), run(result, feeds), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)


def test_divisions_of_integers_are_a_note() -> None:
    """Nobody knows the kernel of A2, so the node is written, and the check says what is open."""
    model = parsed("g(int64[4] x) => (int64[] y) { c = Constant<value = int64[1] {2}>() y = Div(x, c) }", 14, 8)
    for each in (model, lowered(model)):
        (finding,) = check_model(each, None)
        assert (finding.rule, finding.severity) == ("plugin-unknown", Severity.NOTE)
    floats = parsed("g(float[4] x) => (float[] y) { y = Div(x, x) }", 14, 8)
    assert check_model(floats, None) == []


def test_outputs_that_stay() -> None:
    """What is connected with an input in any direction is kept, and so are nodes without inputs."""
    kept = (
        "g(float[3] x) => (float[] y, float[] k, float[] r, float[] c) { c = Constant<value = float[3] {1, 2, 3}>() "
        "y = Add(x, c) k = Neg(c) r = RandomNormal<shape = [3]>() }"
    )
    assert check_model(parsed(kept, 13, 8), None) == []


def test_an_empty_bias() -> None:
    """An absent input at the end that is written as an empty name."""
    model = parsed("g(float[2,4] x, float[4] s) => (float[] y) { y = LayerNormalization(x, s) }", 17, 8)
    model.graph.node[0].input.append("")
    assert [finding.rule for finding in check_model(model, None)] == ["plugin-form"]
    assert check_model(lowered(model), None) == []
