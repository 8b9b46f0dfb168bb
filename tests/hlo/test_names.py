"""Names of operations, scopes and shapes in programs."""

import pytest

from tpugraphs_jax.hlo import names, proto


@pytest.mark.parametrize(
  "op_name, operation, scope",
  [
    ("jit(f)/dot_general", "dot_general", ""),
    ("jit(f)/jvp(CNN)/Conv_1/conv_general_dilated", "conv_general_dilated", "CNN/Conv_1"),
    ("jit(f)/transpose(jvp(CNN))/Conv_1/add", "add", "gradient of CNN/Conv_1"),
    ("jit(f)/jvp(a/b)/tanh", "tanh", "a/b"),
    ("jit(f)/while/body/closed_call/layer/jit(relu)/max", "max", "layer"),
    ("jit(f)/jvp()/checkpoint/rematted_computation/mlp/mul", "mul", "mlp"),
    ("jit(f)/cond/branch_1_fun/head/exp", "exp", "head"),
    ("jit(f)/CNN/Conv_1/layout_group_3/dot_general", "dot_general", "CNN/Conv_1"),
    ("jit(f)/transpose(jvp())/mul", "mul", ""),
    ("w", "w", ""),
    ("", "", ""),
  ],
)
def test_operation_and_scope_are_those_that_the_user_wrote(op_name, operation, scope):
  assert names.operation(op_name) == operation
  assert names.scope(op_name) == scope


def test_shapes_are_written_as_xla_writes_them():
  vector = proto.ShapeProto(element_type=16, dimensions=[8, 128])
  assert names.shape(vector) == "bf16[8,128]"
  both = proto.ShapeProto(element_type=13, tuple_shapes=[vector, vector])
  assert names.shape(both) == "bf16[8,128] and 1 more"
  assert names.shape(proto.ShapeProto(element_type=11)) == "f32[]"
