"""Variables of which each replica holds a part: the slots of an optimizer whose update is shared out (see `update`).

A replica reads and writes its own shard while `by_shards` says so, which is while the engine runs the optimizer's update. To
everybody else, also to what a user does in a replica, the variable is the whole tensor.

A variable of ``size`` elements is cut, flattened, into N shards of equal length. Where N does not divide the size the last
shards begin earlier and overlap: shapes stay the same on all replicas, and what two replicas compute is equal, because the
update of an element depends on nothing else.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import (
    MirroredVariable,
    current_replica,
    default_graph,
    quiet_device_copies,
    threads_can_meet,
)
from lockstep.errors import UnsupportedError

# Shards begin and end on a cache line, so that a shard of a tensor is a view of it, and vector instructions leave no rest.
_LINE_BYTES = 64
_thread = threading.local()


@contextlib.contextmanager
def by_shards() -> Iterator[None]:
    """In this block and thread, sharded variables are the replica's shards, and no longer whole tensors."""
    before, _thread.by_shards = _is_by_shards(), True
    try:
        yield
    finally:
        _thread.by_shards = before


def _is_by_shards() -> bool:
    return getattr(_thread, "by_shards", False)


@dataclass(frozen=True)
class ShardLayout:
    """How a tensor is cut into one flat shard a replica.

    Attributes:
      shape: the whole tensor's shape.
      replicas: N.
      dtype: of its elements.

    >>> layout = ShardLayout((3, 5), 2, tf.float32)
    >>> layout.length
    15
    >>> [ShardLayout((10, 10), 3, tf.float32).begin(r) for r in range(3)]
    [0, 48, 52]
    """

    shape: tuple[int, ...]
    replicas: int
    dtype: tf.DType

    @property
    def size(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Elements of a shard."""
        line = _LINE_BYTES // self.dtype.size
        return min(self.size, -(-self.size // (self.replicas * line)) * line)

    @property
    def overhead(self) -> float:
        """The part of all shards' elements that another shard holds, too: 0 where N divides the size."""
        return self.length * self.replicas / self.size - 1

    def begin(self, replica: Any) -> Any:
        """Where a replica's shard begins; an int for an int, an int32 scalar for a tensor."""
        least = tf.minimum if tf.is_tensor(replica) else min
        return least(replica * self.length, self.size - self.length)

    def own(self, whole: Any, replica: Any) -> tf.Tensor:
        """The shard of ``whole`` that belongs to a replica: shape ``[length]``."""
        return tf.slice(tf.reshape(whole, [-1]), [self.begin(replica)], [self.length])

    def join(self, shards: Sequence[tf.Tensor]) -> tf.Tensor:
        """The whole tensor, from one shard a replica."""
        pieces = []
        for replica, shard in enumerate(shards):
            begin, end = replica * self.length, min((replica + 1) * self.length, self.size)
            if begin < end:
                offset = self.begin(replica)
                pieces.append(shard[begin - offset : end - offset] if (begin, end - begin) != (offset, self.length) else shard)
        return tf.reshape(tf.concat(pieces, 0), self.shape)


class ShardedVariable(MirroredVariable):
    """A variable of which every replica holds its shard.

    In `by_shards`, reading and writing it means the replica's flat shard. Everywhere else it is the whole tensor: its shape,
    its value, what is saved and what is assigned do not depend on N. In a replica, what reads the whole either makes the
    variable mirrored (``give_back``) or, where shards are in use already, has all replicas put it together.
    """

    def __init__(self, strategy: Any, values: Sequence[Any], layout: ShardLayout, whose: Any, initial: Callable[[], tf.Tensor]):
        super().__init__(strategy, list(values), tf.VariableAggregation.NONE)
        self.layout = layout
        # The unique id of the variable that the slot belongs to.
        self.whose = whose
        # Called before the whole is used in a replica: may set the successor.
        self.give_back: Callable[[], None] = lambda: None
        # The mirrored variable that has taken its place.
        self.successor: Any = None
        self._initial = initial

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.layout.shape)

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    def _replica(self) -> int | None:
        """The replica that is running, or being updated; None where there is none."""
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is not self._distribute_strategy:
            return None  # outside of any scope
        return current_replica()

    def _own(self) -> Any | None:
        """The shard of the replica that is running, or the variable's successor; None where the whole is to be used."""
        replica = self._replica()
        if replica is not None and _is_by_shards():
            return self._values[replica]
        if replica is not None and self.successor is None:
            self.give_back()
        return self.successor

    def whole(self) -> tf.Tensor:
        """The whole value, in a replica as well."""
        with quiet_device_copies(), tf.device(self._primary.device):
            return self.layout.join([shard.read_value() for shard in self._values])

    def first_or_whole(self) -> tf.Tensor:
        """The whole value; while the function that makes the variable is being traced, the value that it will start from.

        Call it in eager mode.
        """
        return self.whole() if bool(self._primary.is_initialized()) else self._initial()

    def _together(self) -> tf.Tensor:
        """The whole value, in a replica or out of it."""
        context, replica = tf.distribute.get_replica_context(), self._replica()
        if context is None or replica is None:
            return self.whole()
        (whole,) = join(context, [self._values[replica].read_value()], [self.layout], self.name)
        return whole

    def _get(self) -> Any:
        own = self._own()
        if own is None:
            return self._together()
        return own._get() if own is self.successor else own

    def read_value(self) -> tf.Tensor:
        return tf.identity(self._get())

    def value(self) -> tf.Tensor:
        return self.read_value()

    def numpy(self) -> Any:
        return self.read_value().numpy()

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        del as_ref
        return tf.convert_to_tensor(self._get(), dtype=dtype, name=name)

    def _as_graph_element(self) -> Any:
        return self._get()

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        own = self._own()
        if own is not None:
            return own.assign(value, read_value=read_value)
        with quiet_device_copies():
            value = tf.convert_to_tensor(value, dtype=self.dtype)
            value.shape.assert_is_compatible_with(self.shape)
            value = tf.ensure_shape(value, self.shape)
            context, here = tf.distribute.get_replica_context(), self._replica()
            if context is not None and here is not None:
                number = context.replica_id_in_sync_group
                self._values[here].assign(self.layout.own(value, number), read_value=False)
            else:
                for replica, shard in enumerate(self._values):
                    with tf.device(shard.device):
                        shard.assign(self.layout.own(value, replica), read_value=False)
        return self if read_value else None

    def assign_add(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        own = self._own()
        if own is not None:
            return own.assign_add(value, read_value=read_value)
        return self.assign(self._together() + value, read_value=read_value)

    def assign_sub(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        own = self._own()
        if own is not None:
            return own.assign_sub(value, read_value=read_value)
        return self.assign(self._together() - value, read_value=read_value)

    def scatter_add(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        return self.assign_add(tf.convert_to_tensor(sparse_delta))

    def scatter_sub(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        return self.assign_sub(tf.convert_to_tensor(sparse_delta))

    def scatter_update(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None) -> Any:
        indices = tf.expand_dims(sparse_delta.indices, -1)
        return self.assign(tf.tensor_scatter_nd_update(self.read_value(), indices, sparse_delta.values))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


def join(context: Any, shards: list[tf.Tensor], layouts: list[ShardLayout], name: str) -> list[tf.Tensor]:
    """The whole tensors of which each replica hands in its ``shards``.

    Args:
      context: the replica context.
      shards: one per tensor.
      layouts: how each tensor is cut.
      name: what is put together, for the error.

    Raises:
      UnsupportedError: replicas cannot meet here.
    """
    trace = getattr(context, "trace", None)
    if trace is not None and (trace.can_exchange_in(default_graph()) or not trace.inside_control_flow(default_graph())):
        return [trace.mark_join(shard, layout) for shard, layout in zip(shards, layouts, strict=True)]
    if trace is not None or not threads_can_meet():
        raise UnsupportedError(
            "A slot of which each replica holds a part cannot be put together in a loop, nor in a branch of a function that "
            f"is traced for each replica. Received: {name!r}, read in one. "
            'Read it outside, or make slots whole: lockstep.MirroredStrategy(update="mirrored").'
        )

    def together(strategy: Any, *shards: Any) -> Any:
        return strategy.extended.exchange.join([s.values for s in shards], layouts)

    return context.merge_call(together, args=tuple(shards))


def create(extended: Any, next_creator: Callable, layout: ShardLayout, whose: Any, kwargs: dict[str, Any]) -> ShardedVariable:
    """A sharded variable; ``kwargs`` are those of the whole one."""
    given: Any = kwargs["initial_value"]

    def initial() -> Any:
        return given() if callable(given) else tf.convert_to_tensor(given)

    shards: list[Any] = []
    for replica, device in enumerate(extended.devices):

        def first(replica: int = replica) -> tf.Tensor:
            return layout.own(initial(), replica)

        with tf.device(device), quiet_device_copies():
            name = f"{shards[0].name.split(':')[0]}/replica_{replica}/" if replica else kwargs.get("name")
            own = {**kwargs, "initial_value": first, "name": name, "shape": None}
            shards.append(next_creator(**own))
    variable = ShardedVariable(extended.container, shards, layout, whose, initial)
    for shard in shards:
        shard.handle._lockstep_variable = weakref.ref(variable)
    return variable
