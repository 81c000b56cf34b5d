"""The sharded weight update: each replica updates its shard of a variable, then all put the whole together.

Mirrored, every replica repeats the whole update and holds all of the optimizer's slots. Where an optimizer treats each
element by itself, N replicas can update an Nth each: reduce-scatter of the gradient, update, all-gather of the weights. It
costs no more to exchange than the all-reduce it replaces, and slots take an Nth of the memory (Xu et al. 2020, "Automatic
Cross-Replica Sharding of Weight Update in Data-Parallel Training", arXiv 2004.13336).

The optimizer is the user's own: its ``update_step`` runs on shards in place of variables. Which variables are shared out is
decided where their slots are made, since a slot is then a `ShardedVariable`. A variable gets whole slots back when its
gradient turns out to be sparse, because Keras treats sparse gradients in a way that densifying them would change; and when
something else than the engine uses its slots in a replica first, such as an optimizer that calls another's ``update_step``.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine import keras_scope, variables
from lockstep.engine.context import TracedContext, current
from lockstep.engine.shards import ShardedVariable, ShardLayout, by_shards, join
from lockstep.engine.tf_private import DistributedVariable, threads_can_meet

CHOICES = ("auto", "sharded", "mirrored")

# Their update of an element depends on nothing but that element of the variable, the gradient and the slots.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")
_STEPS = frozenset(getattr(keras.optimizers, name).update_step for name in _ELEMENTWISE)
# What a class of a user's may do in its own way besides: none of it meets the shards that an update is given.
_AROUND = ("apply", "apply_gradients", "finalize_variable_values", "from_config", "get_config", "iterations")
_AROUND += ("learning_rate", "load_own_variables", "save_own_variables", "scale_loss", "set_weights", "variables")
# Kept whole: all replicas add to an accumulator, and an average is read as the variable's stand-in.
_WHOLE_SLOTS = ("average", "gradient_accumulator")
# The redundant part of the work that overlapping shards may cost.
_LARGEST_OVERHEAD = 0.05
# Below this size, putting the variable together again costs more than the update that is saved.
_AUTO_ELEMENTS = 1 << 16

# optimizer -> the layouts of the variables whose update it shares out, by the variable's unique id.
_layouts: weakref.WeakKeyDictionary[Any, dict[Any, ShardLayout]] = weakref.WeakKeyDictionary()
# optimizer -> those of them that a step has updated in shards.
_in_use: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
_unsharding = threading.RLock()


def choice(update: str) -> str:
    """``MirroredStrategy(update=...)``, checked.

    Raises:
      ValueError: not one of `CHOICES`.
    """
    if update not in CHOICES:
        raise ValueError(
            f"Unknown kind of update. Received: update={update!r}. Allowed: {', '.join(map(repr, CHOICES))}. "
            "Leave it out to share the update out where that is faster."
        )
    return update


def layouts_of(optimizer: Any) -> dict[Any, ShardLayout]:
    """How the variables whose update ``optimizer`` shares out are cut, by their unique id."""
    return _layouts.get(optimizer, {})


def _new_layout(optimizer: Any, variable: Any, name: str | None) -> ShardLayout | None:
    """How a new slot of ``variable`` is cut; None if it is mirrored."""
    extended = optimizer._distribution_strategy.extended
    choice = getattr(getattr(extended, "options", None), "update", "mirrored")
    if choice == "mirrored" or extended.replicas == 1 or name in _WHOLE_SLOTS:
        return None
    if not _is_elementwise(optimizer) or not isinstance(variable, DistributedVariable):
        return None
    if not variable.shape.is_fully_defined() or not variable.dtype.is_floating:
        return None
    layout = ShardLayout(tuple(variable.shape.as_list()), extended.replicas, variable.dtype)
    if layout.size < (_AUTO_ELEMENTS if choice == "auto" else 1) or layout.overhead > _LARGEST_OVERHEAD:
        return None
    return layout


def _is_elementwise(optimizer: Any) -> bool:
    """Whether the optimizer's update is one that treats each element by itself, with nothing of a user's in it."""
    kind = type(optimizer)
    if kind.update_step not in _STEPS:
        return False
    known = next(i for i, each in enumerate(kind.__mro__) if "update_step" in vars(each))
    own = [item for each in [*kind.__mro__[:known], optimizer] for item in vars(each).items()]
    methods = {name for name, value in own if callable(value) or isinstance(value, (property, classmethod, staticmethod))}
    changed = {name for name in methods if not name.startswith("__") and hasattr(kind.__mro__[known], name)}
    return changed <= set(_AROUND)


def add_slot(original: Callable) -> Callable:
    """Wraps TFOptimizer.add_variable_from_reference: the slot is a sharded variable where the update is shared out."""

    @functools.wraps(original)
    def add_variable_from_reference(self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        strategy, variable = self._distribution_strategy, _value(reference_variable)
        keras_scope.check_slot(self, reference_variable)
        layout = _new_layout(self, variable, name)
        if layout is None:
            return original(self, reference_variable, name=name, initializer=initializer)
        _layouts.setdefault(self, {})[variable._unique_id] = layout
        with strategy.extended.sharded(layout, variable._unique_id):
            slot = original(self, reference_variable, name=name, initializer=initializer)
        slot.value.give_back = functools.partial(_unless_in_use, weakref.ref(self), variable._unique_id)
        return slot

    return add_variable_from_reference


def weight_decay(original: Callable) -> Callable:
    """Wraps TFOptimizer._apply_weight_decay: what is updated in shards decays in shards (`update_step`)."""

    @functools.wraps(original)
    def _apply_weight_decay(self: Any, trainable_variables: Any) -> None:
        if _is_in_replica():
            trainable_variables = [v for v in trainable_variables if _id(v) not in layouts_of(self)]
        return original(self, trainable_variables)

    return _apply_weight_decay


def update_step(original: Callable) -> Callable:
    """Wraps TFOptimizer._backend_update_step: each replica updates its shards; the rest goes the optimizer's own way."""

    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        pairs = list(zip(grads, trainable_variables, strict=True))
        if not _is_in_replica() or not layouts_of(self):
            return original(self, grads, trainable_variables, learning_rate)
        layouts, can_join = layouts_of(self), _can_join()
        not_after_all = [
            variable
            for gradient, variable in pairs
            if _id(variable) in layouts and (isinstance(gradient, tf.IndexedSlices) or not can_join)
        ]
        if not_after_all:
            for variable in not_after_all:
                make_whole(self, _id(variable))
            # It was left out above, to decay with its shards.
            self._apply_weight_decay(not_after_all)
        shared = [pair for pair in pairs if _id(pair[1]) in layouts]
        whole = [pair for pair in pairs if _id(pair[1]) not in layouts]
        if whole:
            original(self, *(list(each) for each in zip(*whole, strict=True)), learning_rate)
        if shared:
            _update_shards(self, shared, learning_rate)

    return _backend_update_step


def scatter(optimizer: Any, grads: dict[int, Any], trainable: Sequence[Any]) -> dict[int, tf.Tensor]:
    """This replica's shards of the sums over replicas of those gradients whose update is shared out, by position.

    Empty where whole gradients are needed: to clip by their norms, to add them up first, to look for overflow.
    """
    layouts = layouts_of(optimizer)
    for i, gradient in grads.items():
        if layouts and isinstance(gradient, tf.IndexedSlices):
            make_whole(optimizer, _id(trainable[i]))
    needs_whole = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.gradient_accumulation_steps
    context = tf.distribute.get_replica_context()
    if needs_whole or not isinstance(context, TracedContext):
        return {}
    cut = {i: layouts[_id(trainable[i])] for i in grads if _id(trainable[i]) in layouts}
    if not cut:
        return {}
    return dict(zip(cut, context.scatter([grads[i] for i in cut], list(cut.values())), strict=True))


def _update_shards(optimizer: Any, pairs: list[tuple[Any, Any]], learning_rate: Any) -> None:
    context = tf.distribute.get_replica_context()
    replica = current()
    assert replica is not None
    number = context.replica_id_in_sync_group
    targets, shards, layouts = [], [], []
    for gradient, variable in pairs:
        variable = _mirrored(variable)
        layout = layouts_of(optimizer)[variable._unique_id]
        _in_use.setdefault(optimizer, set()).add(variable._unique_id)
        shard = Shard(variable, layout.own(variable._get().read_value(), number))
        if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
            rate, decay = (tf.cast(x, shard.dtype) for x in (optimizer.learning_rate, optimizer.weight_decay))
            shard.assign_sub(shard.tensor * decay * rate)
        with by_shards():
            optimizer.update_step(gradient if replica.scattered else layout.own(gradient, number), shard, learning_rate)
        targets.append(variable)
        shards.append(shard.tensor)
        layouts.append(layout)
    for variable, value in zip(targets, join(context, shards, layouts, optimizer.name), strict=True):
        variable._get().assign(value, read_value=False)


class Shard:
    """What an optimizer's ``update_step`` gets in place of a variable: a shard of it, that can be read and assigned to.

    Args:
      variable: the whole variable.
      tensor: this replica's shard of its value.
    """

    def __init__(self, variable: Any, tensor: tf.Tensor):
        self.tensor = tensor
        self.dtype, self.name = variable.dtype, variable.name
        self._unique_id = variable._unique_id

    @property
    def shape(self) -> tf.TensorShape:
        return self.tensor.shape

    def assign(self, value: Any) -> None:
        self.tensor = tf.ensure_shape(tf.convert_to_tensor(value, dtype=self.dtype), self.shape)

    def assign_add(self, value: Any) -> None:
        self.assign(self.tensor + value)

    def assign_sub(self, value: Any) -> None:
        self.assign(self.tensor - value)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self.tensor if dtype in (None, self.dtype) else tf.cast(self.tensor, dtype)


def make_whole(optimizer: Any, whose: Any) -> None:
    """Gives every replica the whole slots of a variable back, whose update cannot be shared out after all."""
    with _unsharding:
        if layouts_of(optimizer).pop(whose, None) is None:
            return
        with tf.init_scope():
            for slot in optimizer._variables:
                shards = slot.value
                if isinstance(shards, ShardedVariable) and shards.whose == whose:
                    extended = optimizer._distribution_strategy.extended
                    slot._value = shards.successor = variables.mirrored(extended, shards.first_or_whole(), slot.name)


def _unless_in_use(reference: Callable[[], Any], whose: Any) -> None:
    """`make_whole`, unless steps exist that update the variable in shards."""
    optimizer = reference()
    if optimizer is not None and whose not in _in_use.get(optimizer, ()):
        make_whole(optimizer, whose)


def _can_join() -> bool:
    """Whether replicas can meet here: not in a branch where each is traced in a thread of its own."""
    return isinstance(tf.distribute.get_replica_context(), TracedContext) or threads_can_meet()


def _is_in_replica() -> bool:
    replica = current()
    return replica is not None and replica.replicas > 1


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _mirrored(variable: Any) -> Any:
    """The mirrored variable that is meant by a Keras variable, by a mirrored one, or by one of its copies."""
    value = _value(variable)
    if isinstance(value, DistributedVariable):
        return value
    found = variables.variable_of(value.handle)
    return value if found is None else found


def _id(variable: Any) -> Any:
    return _mirrored(variable)._unique_id
