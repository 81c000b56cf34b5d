"""Mirrored variables: one component per replica, and what reads and writes of them mean.

Reads in a replica see its own component. Writes by aggregation:

- ``SUM``, ``MEAN``: the value is exchanged, then every replica writes the result (a mean is weighted by the slices' sizes).
- ``ONLY_FIRST_REPLICA``: replica 0's value is written everywhere.
- ``NONE`` (what layers use for state such as moving statistics): each replica writes its own component, and at the end of
  the step all copies become equal: floats the weighted mean over replicas, everything else replica 0's value. A float that
  is written with ``assign_add`` or ``assign_sub`` becomes the plain mean: N times it, which is what an all-reduce of it
  gives, is then the sum of what replicas have added, as gradients accumulated by hand must be. The states of a stateful RNN
  are not made equal: each row of them belongs to one example of the replica's slice.

``ON_READ`` variables (metrics) are written locally and aggregated when read; a replica without examples writes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.engine import shards, values
from lockstep.engine.borrowed import masked
from lockstep.engine.context import FallBack, Replica, TracedContext, current
from lockstep.engine.exchange import as_tensors
from lockstep.engine.tf_private import (
    CopiedVariable,
    OnReadPolicy,
    OnWritePolicy,
    ReduceOp,
    create_mirrored_variable,
    is_mirrored,
    plain_variable,
    quiet_device_copies,
)

_NONE = tf.VariableAggregation.NONE
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


def create(extended: Any, next_creator: Callable, **kwargs: Any) -> Any:
    """A variable with a component on every replica's device, all starting from replica 0's initial value."""
    kwargs.pop("colocate_with", None)
    context = tf.distribute.get_replica_context()
    if isinstance(context, TracedContext) and not tf.executing_eagerly():
        return _create_around(context.trace, extended, next_creator, kwargs)
    return _create(extended, next_creator, kwargs)


def _create(extended: Any, next_creator: Callable, kwargs: dict[str, Any]) -> Any:
    if extended.next_is_sharded is not None:
        layout, whose = extended.next_is_sharded
        return shards.create(extended, next_creator, layout, whose, kwargs)

    def create_components(**kwargs: Any) -> list[Any]:
        components: list[Any] = []
        for replica, device in enumerate(extended.devices):
            with tf.device(device), quiet_device_copies():
                if replica == 0:
                    components.append(next_creator(**kwargs))
                    # Drawn once: a second draw from a random initializer would differ.
                    kwargs["initial_value"] = _initial_value_of(components[0])
                    continue
                name = f"{components[0].name.split(':')[0]}/replica_{replica}"
                if CopiedVariable.can_copy(components[0]):
                    components.append(CopiedVariable(components[0], kwargs["initial_value"], name, f"replica_{replica}"))
                else:
                    components.append(next_creator(**{**kwargs, "name": f"{name}/"}))
        return components

    policies = {
        tf.VariableSynchronization.ON_WRITE: OnWrite,
        tf.VariableSynchronization.ON_READ: OnRead,
    }
    variable = create_mirrored_variable(extended.container, create_components, policies, **kwargs)
    for component in variable.values:
        component.handle._lockstep_variable = weakref.ref(variable)
    return variable


def mirrored(extended: Any, value: tf.Tensor, name: str) -> Any:
    """A mirrored variable that is not trained, starting from ``value``; made outside of any graph, also in a replica."""
    kwargs = {
        "initial_value": value,
        "trainable": False,
        "name": name,
        "synchronization": tf.VariableSynchronization.AUTO,
        "aggregation": _NONE,
    }
    return _create(extended, plain_variable, kwargs)


def _create_around(trace: Any, extended: Any, next_creator: Callable, kwargs: dict[str, Any]) -> Any:
    """A variable that a traced step makes: it gets its first value in the graph around the step, before the step runs.

    In the trace, which stands for every replica, each replica would initialise all N copies, while others write theirs.
    (Made under ``tf.init_scope``, a variable exists at once instead, as any other.)
    """
    initial = kwargs["initial_value"]
    if tf.is_tensor(initial):
        constant = tf.get_static_value(initial)
        if constant is None:
            raise FallBack
        kwargs["initial_value"] = lambda: tf.constant(constant, initial.dtype)
    try:
        with trace.graph.outer_graph.as_default():
            return _create(extended, next_creator, kwargs)
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error) and "FuncGraph" not in str(error):
            raise
        raise FallBack from error  # The first value is computed from what the step computes.


def variable_of(handle: tf.Tensor) -> Any | None:
    """The mirrored variable that a component's handle belongs to, or None."""
    reference = getattr(handle, "_lockstep_variable", getattr(handle, "_distributed_container", None))
    return reference() if reference is not None else None


def _initial_value_of(first: tf.Variable) -> Any:
    return first.value() if tf.executing_eagerly() else lambda: tf.identity(first.value())


class OnWrite(OnWritePolicy):
    """Writes keep the copies equal."""

    def assign(self, var: Any, value: Any, **kwargs: Any) -> Any:
        return super().assign(var, _own(var, value, lambda: _component(var).read_value()), **kwargs)

    def assign_add(self, var: Any, value: Any, **kwargs: Any) -> Any:
        _record_adding(var)
        return super().assign_add(var, _own(var, value), **kwargs)

    def assign_sub(self, var: Any, value: Any, **kwargs: Any) -> Any:
        _record_adding(var)
        return super().assign_sub(var, _own(var, value), **kwargs)

    def _update_replica(self, var: Any, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        replica = current()
        if replica is None:
            return super()._update_replica(var, update_fn, value, **kwargs)
        if _for_all_at_once():
            return _written_everywhere(var, update_fn, value, **kwargs)
        component = var._get_on_device_or_primary()
        if replica.writes_are_equal or replica.replicas == 1:
            return update_fn(component, value, **kwargs)
        if var.aggregation == _NONE:
            if not replica.writes_are_own:
                replica.record_write(var)
            return update_fn(component, value, **kwargs)
        if isinstance(value, tf.IndexedSlices):
            value = as_tensors(value, var.dtype)
        context = tf.distribute.get_replica_context()
        if var.aggregation == tf.VariableAggregation.SUM and isinstance(context, TracedContext):
            _check_per_replica(context, value)
        by_examples = var.aggregation == tf.VariableAggregation.MEAN and replica.active is not None
        if isinstance(context, TracedContext) or by_examples:
            if not isinstance(value, tf.IndexedSlices):
                value = _tensor(value, var)
            return update_fn(component, _aggregated(context, replica, var.aggregation, value), **kwargs)
        return super()._update_replica(var, update_fn, value, **kwargs)


def _check_per_replica(context: TracedContext, value: Any) -> None:
    """As in a thread, where TensorFlow does: one value for all replicas is not summed over them, unless it is 0."""
    is_number = isinstance(value, (bool, int, float, complex, list, tuple))
    if context.trace.origins.is_outside(value) or (is_number and np.any(np.asarray(value) != 0)):
        raise values.not_per_replica(value)


def _for_all_at_once() -> bool:
    """Whether what is done here is done while a trace is made, for every replica (under ``tf.init_scope``)."""
    return tf.executing_eagerly() and isinstance(tf.distribute.get_replica_context(), TracedContext)


def _written_everywhere(var: Any, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
    """All copies written at once, with what N replicas that write the same ``value`` make of it."""
    count = len(var.values)
    if var.aggregation == tf.VariableAggregation.SUM and is_mirrored(var):
        if isinstance(value, tf.IndexedSlices):
            value = as_tensors(value, var.dtype)
            value = tf.IndexedSlices(count * value.values, value.indices, value.dense_shape)
        else:
            value = count * _tensor(value, var)
    return [update_fn(component, value, **kwargs) for component in var.values][0]


def _writes_locally(replica: Replica | None, var: Any) -> bool:
    """Whether what ``replica`` writes to ``var`` is its own, to be made equal at the end of the step."""
    if replica is None or var.aggregation != _NONE or _for_all_at_once():
        return False
    return not replica.writes_are_equal and not replica.writes_are_own


def _record_adding(var: Any) -> None:
    replica = current()
    if replica is not None and _writes_locally(replica, var):
        replica.record_write(var, added=True)


def _own(var: Any, value: Any, otherwise: Callable[[], tf.Tensor] | None = None) -> Any:
    """``value`` as a replica writes it to ``var``: without examples it does not write what it made of a borrowed row."""
    replica = current()
    if replica is None or replica.active is None or not _writes_locally(replica, var):
        return value
    return replica.own(_tensor(value, var), otherwise)


class OnRead(OnReadPolicy):
    """Replica-local state, aggregated when read; a replica that borrowed its row must not count it."""

    def assign(self, var: Any, value: Any, **kwargs: Any) -> Any:
        return super().assign(var, _if_active(value, lambda: _component(var).read_value(), var), **kwargs)

    def assign_add(self, var: Any, value: Any, **kwargs: Any) -> Any:
        return super().assign_add(var, _if_active(value, lambda: tf.zeros_like(_tensor(value, var)), var), **kwargs)

    def assign_sub(self, var: Any, value: Any, **kwargs: Any) -> Any:
        return super().assign_sub(var, _if_active(value, lambda: tf.zeros_like(_tensor(value, var)), var), **kwargs)

    def _update_replica(self, var: Any, update_fn: Callable, value: Any, **kwargs: Any) -> Any:
        if _for_all_at_once():
            return _written_everywhere(var, update_fn, value, **kwargs)
        return super()._update_replica(var, update_fn, value, **kwargs)


def _component(var: Any) -> Any:
    return var._get_on_device_or_primary()


def _tensor(value: Any, var: Any) -> tf.Tensor:
    return tf.convert_to_tensor(value, dtype=var.dtype)


def _if_active(value: Any, otherwise: Callable[[], tf.Tensor], var: Any) -> Any:
    """``value``, or ``otherwise()`` on a replica without examples."""
    if _for_all_at_once():
        return value
    replica = current()
    active = replica.active if replica is not None else None
    return value if active is None else tf.where(active, _tensor(value, var), otherwise())


def _aggregated(context: Any, replica: Replica, aggregation: Any, value: Any) -> Any:
    """``value`` as all replicas together write it."""
    if aggregation == _FIRST:
        return context.trace.mark_first(value)
    if aggregation == tf.VariableAggregation.SUM:
        return context.all_reduce(ReduceOp.SUM, value)
    if replica.active is None:
        return context.all_reduce(ReduceOp.MEAN, value)
    return context.all_reduce(ReduceOp.SUM, weighted(value, replica.fraction))


def weighted(value: Any, fraction: Any) -> Any:
    """``value`` times the slice's fraction of the global batch, in the value's dtype but multiplied in at least float32."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(weighted(value.values, fraction), value.indices, value.dense_shape)
    wide = tf.cast(value, tf.float32) if value.dtype.size < 4 else value
    return tf.cast(wide * tf.cast(fraction, wide.dtype), value.dtype)


def _is_averaged(variable: Any) -> bool:
    return variable.dtype.is_floating or variable.dtype.is_complex


def make_equal_in_trace(trace: Any) -> None:
    """Ends a trace: variables that replicas wrote on their own become equal everywhere."""
    replica = current()
    assert replica is not None
    with replica.equal_writes():
        for variable, added in list(trace.written.values()):
            component = variable._get_replica(0)
            value = component.read_value()
            if not _is_averaged(variable):
                value = trace.mark_first(value)
            elif added:
                value = trace.mark_reduce(ReduceOp.MEAN, value)
            else:
                (share,) = masked([weighted(value, replica.fraction)], replica.active)
                value = trace.mark_reduce(ReduceOp.SUM, share)
            component.assign(tf.ensure_shape(value, variable.shape), read_value=False)


def make_equal(extended: Any, written: Iterable[tuple[Any, bool]], weights: Any) -> None:
    """The same after replicas ran in threads, in cross-replica context."""
    for variable, added in written:
        values = [component.read_value() for component in variable.values]
        result = _equal(extended, values, added, weights) if _is_averaged(variable) else values[0]
        for component, device in zip(variable.values, extended.devices, strict=True):
            with tf.device(device):
                component.assign(result, read_value=False)


def _equal(extended: Any, values: list[tf.Tensor], added: bool, weights: Any) -> tf.Tensor:
    """The mean of ``values``, by examples unless ``added``."""
    if added or weights is None:
        return extended.exchange.reduce([values], [True])[0]
    shares = [weighted(v, f) for v, f in zip(values, weights.fractions, strict=True)]
    shares = [masked([s], a)[0] for s, a in zip(shares, weights.active, strict=True)]
    return extended.exchange.reduce([shares], [False])[0]
