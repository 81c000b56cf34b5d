"""The only module that imports ``tensorflow.python``.

Each name below is private to TensorFlow and is listed with what the engine needs it for. The versions whose private
parts have been checked are in ``SUPPORTED``; with any other, importing this module raises UnsupportedVersionError at once
instead of training wrongly later.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.errors import StrategyMismatchError, UnsupportedVersionError

SUPPORTED = ("2.20", "2.21")


def check_version(version: str) -> None:
    """Raises UnsupportedVersionError unless ``version`` ("2.21.0") is one whose private parts are known."""
    if version.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
        return
    raise UnsupportedVersionError(
        f"lockstep rests on private parts of TensorFlow and does not know those of version {version}. "
        f"Received: tensorflow {version}. Supported: {', '.join(f'{v}.*' for v in SUPPORTED)}. "
        f"Install one of them: pip install 'tensorflow>={SUPPORTED[0]},<2.{int(SUPPORTED[-1].split('.')[1]) + 1}'."
    )


check_version(tf.__version__)

from tensorflow.core.framework import attr_value_pb2, graph_pb2  # noqa: E402
from tensorflow.core.protobuf import (  # noqa: E402
    config_pb2,
    device_properties_pb2,
    meta_graph_pb2,
    rewriter_config_pb2,
)
from tensorflow.python.autograph.core import ag_ctx  # noqa: E402
from tensorflow.python.autograph.core import config as autograph_config  # noqa: E402
from tensorflow.python.autograph.impl import api as autograph  # noqa: E402
from tensorflow.python.autograph.operators import py_builtins  # noqa: E402
from tensorflow.python.data.ops import dataset_ops, iterator_ops  # noqa: E402
from tensorflow.python.distribute import (  # noqa: E402
    collective_util,
    distribute_lib,
    distribute_utils,
    mirrored_run,
    reduce_util,
    values,
    values_util,
)
from tensorflow.python.eager import context, record  # noqa: E402
from tensorflow.python.eager.polymorphic_function import atomic_function, polymorphic_function  # noqa: E402
from tensorflow.python.framework import (  # noqa: E402
    auto_control_deps,
    auto_control_deps_utils,
    composite_tensor,
    func_graph,
    ops,
)
from tensorflow.python.grappler import cluster, tf_optimizer  # noqa: E402
from tensorflow.python.ops import (  # noqa: E402
    control_flow_util,
    gen_resource_variable_ops,
    handle_data_util,
    resource_variable_ops,
)
from tensorflow.python.ops.control_flow_v2_func_graphs import (  # noqa: E402
    CondBranchFuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
)
from tensorflow.python.types import distribute as distribute_types  # noqa: E402
from tensorflow.python.util import nest as _nest  # noqa: E402
from tensorflow.python.util import pywrap_xla_ops  # noqa: E402

nest: Any = _nest  # its own annotations say less than that it takes and gives structures

# The extension seam itself: what tf.distribute.Strategy calls. V1 is the class that TensorFlow's own strategies extend.
StrategyExtended: Any = distribute_lib.StrategyExtendedV1
ReplicaContext = distribute_lib.ReplicaContext
ReduceOp = reduce_util.ReduceOp
Function = polymorphic_function.Function
FuncGraph = func_graph.FuncGraph

# Per-replica values and mirrored variables, so that TensorFlow and Keras recognise ours.
PerReplica, PerReplicaSpec, Mirrored = values.PerReplica, values.PerReplicaSpec, values.Mirrored
DistributedValues, DistributedVariable = values.DistributedValues, values.DistributedVariable
OnReadPolicy, OnWritePolicy = values.OnReadPolicy, values.OnWritePolicy
CompositeTensor = composite_tensor.CompositeTensor
# Datasets of per-replica batches: native tf.data objects that also are tf.distribute's public types.
DatasetWrapper: Any = dataset_ops.UnaryUnchangedStructureDataset
OwnedIterator, IteratorSpec = iterator_ops.OwnedIterator, iterator_ops.IteratorSpec
DatasetSpec: Any = dataset_ops.DatasetSpec
DistributedDatasetInterface = distribute_types.DistributedDatasetInterface
DistributedIteratorInterface = distribute_types.DistributedIteratorInterface
# What AutoGraph makes of enumerate(), by the type of its argument.
enumerate_registry: Any = py_builtins.enumerate_registry

BranchGraph = CondBranchFuncGraph
ControlFlowGraph = (CondBranchFuncGraph, WhileBodyFuncGraph, WhileCondFuncGraph)

AttrValue, NameAttrList, GraphDef = attr_value_pb2.AttrValue, attr_value_pb2.NameAttrList, graph_pb2.GraphDef
ConfigProto, MetaGraphDef, RewriterConfig = (
    config_pb2.ConfigProto,
    meta_graph_pb2.MetaGraphDef,
    rewriter_config_pb2.RewriterConfig,
)
ControlDependencies = auto_control_deps.AutomaticControlDependencies

# A step that AutoGraph converts calls into lockstep as it calls into TensorFlow: without converting the callee's own code.
autograph_config.CONVERSION_RULES = (
    autograph_config.DoNotConvert("lockstep"),
    *autograph_config.CONVERSION_RULES,
)


def canonical_device(device: str) -> str:
    """The full name of a device: ``"GPU:1"`` -> ``"/job:localhost/replica:0/task:0/device:GPU:1"``."""
    # Not device_util.canonicalize, which starts the runtime: after that no logical device can be added.
    kind, index = device.rsplit(":", 2)[-2:]
    return f"/job:localhost/replica:0/task:0/device:{kind.rsplit('/', 1)[-1].upper()}:{index}"


def started() -> bool:
    """Whether TensorFlow's runtime has been initialised, after which devices and threads are fixed."""
    runtime: Any = context.context()
    return runtime._context_handle is not None


def converted(fn: Callable) -> Callable:
    """``fn`` with AutoGraph applied the way the surrounding tf.function asks for."""
    return autograph.tf_convert(fn, ag_ctx.control_status_ctx())


def may_record_gradients() -> bool:
    """Whether a GradientTape outside is watching: then a step must consist of differentiable ops."""
    return record.could_possibly_record()


def default_graph() -> Any:
    return ops.get_default_graph()


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Tells ``target`` what the resource or variant ``source`` refers to (dtype, shape of the variable)."""
    handle_data_util.copy_handle_data(source, target)


def update_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives an op of a graph that is being built another input."""
    op._update_input(index, tensor)


def mark_read_only_inputs(op: tf.Operation, graph: Any) -> None:
    """Lets automatic control dependencies know which resource inputs the called ``graph`` only reads."""
    indices = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
    ops.set_int_list_attr(op, auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, indices)


def called_writes(op: tf.Operation) -> list[tf.Tensor]:
    """The variables' handles among the inputs of ``op`` that a function it calls (a branch, a loop body) may write."""
    if auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR not in op.node_def.attr:
        return []
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return [handle for handle in writes if _is_variable(handle)]


def _is_variable(handle: tf.Tensor) -> bool:
    """Whether a resource is a variable (whose handle knows its dtype and shape), and not a table, an iterator, ..."""
    data = handle_data_util.get_resource_handle_data(handle)
    return bool(data is not None and data.is_set and data.shape_and_type)


def function_from_graph(name: str, graph: Any, attrs: dict[str, Any]) -> Any:
    """A callable graph function from a FuncGraph whose ``inputs`` and ``outputs`` are set."""
    return atomic_function.from_func_graph(name, graph, attrs)


def labelled_copy(function: Any, label: str) -> Any:
    """A copy of a graph function whose errors say "node {{node LABEL/...}}"."""
    definition = type(function.definition)()
    definition.CopyFrom(function.definition)
    definition.signature.name = f"{definition.signature.name}_{label}"
    for node in definition.node_def:
        original = list(node.experimental_debug_info.original_node_names) or [node.name]
        node.experimental_debug_info.original_node_names[:] = [f"{label}/{name}" for name in original]
    runtime: Any = context.context()
    runtime.add_function_def(definition)
    return atomic_function.AtomicFunction(
        definition.signature.name, runtime, function.function_type, children=function.children
    )


def optimized_graph(config: Any, metagraph: Any, device: str) -> Any:
    """What TensorFlow's graph optimizer (grappler) makes of ``metagraph``; fetches are in its "train_op" collection.

    It is told of one CPU ``device`` of nominal speed. Asked to look for itself, it would start a session on every device of
    the machine, GPUs included.
    """
    properties = device_properties_pb2.DeviceProperties(type="CPU", frequency=2000, num_cores=1)
    devices = [device_properties_pb2.NamedDevice(name=device, properties=properties)]
    known = cluster.Cluster(disable_detailed_stats=True, disable_timeline=True, devices=devices)
    return tf_optimizer.OptimizeGraph(config, metagraph, verbose=False, cluster=known)


@contextlib.contextmanager
def keep_call_options() -> Iterator[None]:
    """Restores on exit how this thread calls graph functions."""
    runtime: Any = context.context()
    before = runtime.function_call_options
    try:
        yield
    finally:
        runtime.function_call_options = before


def switch_graph_optimizer_off() -> None:
    """Lets this thread call graph functions without a pass of the graph optimizer over them."""
    runtime: Any = context.context()
    options = runtime.function_call_options
    runtime.function_call_options = _not_optimizing(options.executor_type, options.config_proto_serialized)


@functools.lru_cache
def _not_optimizing(executor_type: str | None, config_proto: bytes) -> Any:
    config = ConfigProto.FromString(config_proto)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor_type, config)


def run_in_threads(strategy: tf.distribute.Strategy, fn: Callable, args: Any, kwargs: Any) -> Any:
    """Runs or traces ``fn`` once per replica, one thread each, meeting at every ``merge_call``."""
    return mirrored_run._call_for_each_replica(strategy, fn, args, kwargs)


def threads_can_meet() -> bool:
    """Whether a replica in a thread can call ``merge_call`` here: not in a graph that it has opened since it started."""
    return getattr(threading.current_thread(), "graph", None) is ops.get_default_graph() or context.executing_eagerly()


def clone_function(function: Any, python_function: Callable, jit_compile: bool | None) -> Any:
    """A tf.function with the same options as ``function``, but for ``jit_compile``, around another Python function."""
    clone = function._clone(python_function=python_function)
    clone._jit_compile = jit_compile
    return clone


# OptionalXlaContext(True): in this block, graphs are built as XLA needs them (the gradients of loops differ).
OptionalXlaContext = polymorphic_function.OptionalXlaContext


def inside_compiled() -> bool:
    """Whether the current graph is that of a tf.function with jit_compile=True, or is inside of one."""
    return control_flow_util.GraphOrParentsInXlaContext(default_graph())


@functools.cache
def xla_kernels(device: str) -> frozenset[str]:
    """The types of ops that XLA can compile for a device."""
    names = pywrap_xla_ops.get_gpu_kernel_names if ":GPU:" in device else pywrap_xla_ops.get_cpu_kernel_names
    return frozenset(names())


@contextlib.contextmanager
def quiet_device_copies() -> Iterator[None]:
    """Allows copies between devices without a warning each, and records nothing on a gradient tape."""
    with context.device_policy(context.DEVICE_PLACEMENT_SILENT), record.stop_recording():
        yield


def create_mirrored_variable(strategy: Any, create: Callable[..., list], policies: dict, **kwargs: Any) -> Any:
    """The distributed variable around the per-replica variables that ``create`` returns."""
    return distribute_utils.create_mirrored_variable(strategy, create, {"VariableClass": MirroredVariable}, policies, **kwargs)


class CopiedVariable(resource_variable_ops.ResourceVariable):
    """Like the variable ``first``, on the device of the current scope, starting from ``value``. For eager mode.

    What TensorFlow makes gets its name as an attribute of the op that creates its handle. Each variable then needs a kernel
    of its own, which takes longer than all the rest and stays in the runtime's cache for good. Copies share theirs by shape.
    """

    def __init__(self, first: Any, value: Any, name: str, debug_name: str):
        handle = gen_resource_variable_ops.var_handle_op(
            dtype=first.dtype, shape=first.shape, shared_name=context.anonymous_name(), debug_name=debug_name
        )
        handle_data_util.copy_handle_data(first.handle, handle)
        handle._parent_trackable = weakref.ref(self)
        handle._name, handle._unique_id = f"{name}:0", f"{name}_{ops.uid()}"
        gen_resource_variable_ops.assign_variable_op(handle, value)
        resource_variable_ops.BaseResourceVariable.__init__(
            self,
            trainable=first.trainable,
            shape=first.shape,
            dtype=first.dtype,
            handle=handle,
            constraint=first.constraint,
            synchronization=first.synchronization,
            aggregation=first.aggregation,
            distribute_strategy=first._distribute_strategy,
            name=name,
            unique_id=handle._unique_id,
            handle_name=name,
            in_graph_mode=False,
        )

    @staticmethod
    def can_copy(first: Any) -> bool:
        """Whether ``first`` is of the usual kind, and its copies can be made at once."""
        return (
            type(first) is resource_variable_ops.ResourceVariable
            and context.executing_eagerly()
            and first.dtype != tf.variant
            and first._caching_device is None
        )


class MirroredVariable(DistributedVariable):
    """What TensorFlow's distributed variables lack outside of a scope."""

    def _get(self) -> Any:
        """Its value here; outside of any scope, too, a replica-local variable is the aggregate and not replica 0's part."""
        if not isinstance(self._policy, OnReadPolicy):
            return super()._get()
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            return super()._get()

    def _get_replica(self, replica_id: int) -> Any:
        if replica_id < len(self._values):
            return super()._get_replica(replica_id)
        raise StrategyMismatchError(
            "A replica function can only use variables of its own strategy. "
            f"Received: in replica {replica_id}, {self.name!r}, which has {len(self._values)} copies, for it was made in the "
            f"scope of {self._distribute_strategy!r}. "
            "Make the model, optimizer and metrics in the scope of the strategy that trains them."
        )

    # What a tf.Variable can be turned into, outside of a graph.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # what numpy() returns is a copy already
        return np.asarray(self.numpy(), dtype)

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.numpy())


def plain_variable(**kwargs: Any) -> Any:
    """A variable with one copy, whatever the scope."""
    return resource_variable_ops.default_variable_creator_v2(None, **kwargs)


def regroup(per_replica: Sequence[Any], always_wrap: bool = False) -> Any:
    """[structure of replica 0, ...] -> one structure whose leaves hold one value per replica."""
    return distribute_utils.regroup(tuple(per_replica), always_wrap=always_wrap)


def select_replica(replica: int, structure: Any) -> Any:
    """The part of ``structure`` that belongs to one replica; distributed variables stay whole."""
    return distribute_utils.select_replica(replica, structure)


is_mirrored = distribute_utils.is_mirrored
update_regroup = distribute_utils.update_regroup
value_container = distribute_utils.value_container
validate_colocated_variable = distribute_utils.validate_colocate_distributed_variable
current_replica = values_util.get_current_replica_id_as_int
UpdateContext = distribute_lib.UpdateContext
InputContext = distribute_lib.InputContext
# The type of what tf.distribute.experimental.CommunicationOptions(...) returns.
CommunicationOptions = collective_util.Options
ValueContext = distribute_lib.ValueContext
require_cross_replica = distribute_lib._require_cross_replica_or_default_context_extended
