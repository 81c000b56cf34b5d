"""What a train or test step returns, made what one device would have returned: metrics and numbers of the global batch.

Keras's own steps return their metrics, which are read again for all replicas, by name. A step of a user's may return anything
under any name, at any depth: results of metrics, losses, other numbers. In a trace it shows which is which, since a result is
computed from the variables of metrics; in eager mode a result is recognised by its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine import keras_weights, shares
from lockstep.engine.context import TracedContext, current, sum_over_replicas
from lockstep.engine.origins import Again, Flow
from lockstep.engine.tf_private import is_mirrored, nest
from lockstep.engine.variables import variable_of

_FIRST = (tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA)


class Logs:
    """The logs of one step of a model.

    Args:
      model: the model.
      step: its bound train_step or test_step.
    """

    def __init__(self, model: Any, step: Callable):
        self._model, self._step = model, step
        # By path: None for a value that is that of all replicas already, or the metric whose result it is.
        self._known: dict[tuple, Any] = {}

    @property
    def _are_metrics(self) -> bool:
        """Whether all that the step returns is what the model's metrics say."""
        own_metrics = type(self._model).compute_metrics is not keras.Model.compute_metrics
        return keras_weights.is_own_step(self._step) and not own_metrics

    def of_replica(self, logs: Any) -> Any:
        """A replica's ``logs``, in which what is not recognised by name later is that of all replicas. Called in a replica."""
        if not isinstance(logs, dict) or self._are_metrics:
            return logs
        context = tf.distribute.get_replica_context()
        traced = isinstance(context, TracedContext)
        leaves = nest.flatten_with_tuple_paths(logs)
        state = self._from_state(context, leaves) if traced else {}
        if traced:
            self._known = dict.fromkeys(state)
        elif context.replica_id_in_sync_group == 0:
            # Replica 0, which comes first, decides for all: by chance, another may hold the value of some metric.
            self._known = self._by_value(leaves)
        replica = current()
        assert replica is not None
        own = {path: shares.share_of(replica, x) for path, x in leaves if path not in self._known and shares.is_scalar(x)}
        summed = dict(zip(own, sum_over_replicas(list(own.values())), strict=True)) if own else {}
        if traced or context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
            self._known |= dict.fromkeys(summed)
        values = state | summed
        return nest.pack_sequence_as(logs, [values.get(path, x) for path, x in leaves])

    def of_all(self, logs: Any) -> Any:
        """The ``logs`` of all replicas, with every metric over the global batch so far. Called in cross-replica context."""
        if not isinstance(logs, dict):
            return logs
        with self._model.distribute_strategy.scope():
            if self._are_metrics:
                metrics = self._model.get_metrics_result()
                return {name: metrics.get(name, value) for name, value in logs.items()}
            values = [self._value(path, x) for path, x in nest.flatten_with_tuple_paths(logs)]
        return nest.pack_sequence_as(logs, values)

    def beside_metrics(self, logs: Any) -> dict[str, tf.Tensor]:
        """Of a micro-batch, this replica's shares of the float scalars in ``logs`` that no metric holds."""
        if not isinstance(logs, dict) or keras_weights.is_own_step(self._step):
            return {}
        replica = current()
        assert replica is not None
        metrics = self._model.get_metrics_result()
        return {name: shares.share_of(replica, x) for name, x in logs.items() if name not in metrics and shares.is_scalar(x)}

    def _value(self, path: tuple, x: Any) -> Any:
        metric = self._known.get(path)
        if path not in self._known:
            metric = next((m for m in self._metrics() if m.name == path[-1]), None)
        return x if metric is None else metric.result()

    def _metrics(self) -> Iterator[Any]:
        """The model's metrics that have one result each."""
        waiting = list(self._model.metrics)
        while waiting:
            metric = waiting.pop(0)
            inside = getattr(metric, "metrics", None)
            if inside:
                waiting = [*inside, *waiting]
            else:
                yield metric

    def _from_state(self, context: TracedContext, leaves: list[tuple[tuple, Any]]) -> dict[tuple, tf.Tensor]:
        """By path: what is computed from replica-local variables (which metrics' are), of all replicas' instead."""
        trace = context.trace
        local = {}
        for outer, inner in trace.graph.captures:
            variable = variable_of(outer) if inner.dtype == tf.resource else None
            if variable is not None and not is_mirrored(variable):
                local[inner.name] = variable

        def read_of_all(x: tf.Tensor) -> tf.Tensor | None:
            if x.op.type != "ReadVariableOp" or x.op.inputs[0].name not in local:
                return None
            aggregation = local[x.op.inputs[0].name].aggregation
            if aggregation in _FIRST:
                return trace.mark_first(x)
            return context.all_reduce("MEAN" if aggregation == tf.VariableAggregation.MEAN else "SUM", x)

        again = Again(trace, flow := Flow(trace, set(local)), read_of_all)
        found = {}
        for path, x in leaves:
            x = tf.convert_to_tensor(x) if isinstance(x, keras.Variable) else x
            if isinstance(x, tf.Tensor) and flow.reaches(x) and not trace.origins.is_from_batch(x):
                result = again.of(x)
                if result is not None:
                    found[path] = result
        return found

    def _by_value(self, leaves: list[tuple[tuple, Any]]) -> dict[tuple, Any]:
        """By path: the metric whose result in this replica is what the step returns."""
        results = [(metric, tf.convert_to_tensor(metric.result())) for metric in self._metrics()]
        found = {}
        for path, x in leaves:
            if not tf.is_tensor(x) or not isinstance(x, tf.Tensor):
                continue
            same = [metric for metric, result in results if _is_same(x, result)]
            named = [metric for metric in same if metric.name == path[-1]]
            if same:
                found[path] = (named or same)[0]
        return found


def _is_same(x: tf.Tensor, result: tf.Tensor) -> bool:
    if x.dtype != result.dtype or x.shape != result.shape:
        return False
    return bool(tf.reduce_all((x == result) | ((x != x) & (result != result))))
