"""Runs one function on every replica: traced once, placed N times.

`run` picks the way. Inside a ``tf.function`` with N > 1 a step is: slice the batch (done by the dataset) -> N calls of
stage 0, each on its device with its own variables' handles -> exchange -> N calls of stage 1 -> ... One replica takes
the plain path. What cannot be traced once (a ``merge_call``), and eager calls, run once per replica in threads, with
the same results.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from lockstep.engine import captures, variables, xla
from lockstep.engine.context import FallBack, SoleContext, Written
from lockstep.engine.emit import emit
from lockstep.engine.tf_private import (
    Function,
    clone_function,
    converted,
    inside_compiled,
    may_record_gradients,
    nest,
    regroup,
    run_in_threads,
    select_replica,
)
from lockstep.engine.trace import Trace, trace_replica
from lockstep.engine.weights import Weights, weights_of, with_borrowed_rows, without_borrowed_rows
from lockstep.errors import UnsupportedError


@dataclass
class StepFunction:
    """A replica function that is known to take a batch, with how to run it.

    Attributes:
      function: the function of one replica's arguments.
      borrow: whether a replica without examples gets a borrowed row with weight 0 also where it runs in a thread (else an
        empty batch), and its results are left as they are.
      compiled: whether to compile each replica's stages with XLA.
      after: what to make of the per-replica results, in cross-replica context.
    """

    function: Callable
    borrow: bool = True
    compiled: bool = False
    after: Callable[[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class ThreadRun:
    """Replicas that run in a thread each.

    Attributes:
      weights: those of the batch they work on; None where all slices are equal.
      written: the variables they write.
    """

    weights: Weights | None
    written: Written = field(default_factory=dict)


def run(extended: Any, fn: Callable, args: Any, kwargs: Any, borrow: bool = False, compiled: bool = False) -> Any:
    """Calls ``fn`` on every replica and returns its results as per-replica values.

    Args:
      extended: the strategy's engine.
      fn: the replica function; a ``tf.function`` is traced with the replicas inside of it.
      args, kwargs: its arguments; per-replica leaves are taken apart.
      borrow, compiled: as in `StepFunction`.
    """
    if isinstance(fn, Function):
        with extended.run_options(borrow=borrow):
            return extended.clones.of(fn)(*args, **kwargs)
    strategy, replicas = extended.container, extended.replicas
    if replicas == 1:
        return _run_alone(strategy, fn, args, kwargs)
    if inside_compiled():
        xla.refuse_around(fn, replicas)
    weights = weights_of((args, kwargs), extended.devices, borrow)
    in_threads = tf.executing_eagerly() or may_record_gradients()
    own = (args, kwargs)
    if weights is not None and (borrow or not in_threads):
        args, kwargs = with_borrowed_rows(own, weights, extended.devices)
    in_thread = (args, kwargs) if borrow else own
    if in_threads:
        if compiled and not tf.executing_eagerly():
            xla.warn_not_compiled(extended, fn, xla.HAS_TAPE_AROUND)
        return _run_threads(extended, fn, *in_thread, weights)

    def finish(trace: Trace) -> None:
        if weights is not None and not borrow:
            trace.outputs = without_borrowed_rows(trace)
        variables.make_equal_in_trace(trace)

    try:
        with _no_garbage_collection, captures.mismatch_explained(strategy):
            trace = trace_replica(strategy, fn, args, kwargs, replicas, weights is not None, compiled, finish)
            captures.check(trace, strategy)
            compiled = compiled and xla.can_compile(extended, fn, trace.graph)
            return regroup(emit(extended, trace, (args, kwargs), weights, compiled))
    except FallBack:
        if compiled:
            xla.warn_not_compiled(extended, fn, xla.HAS_MERGE_CALL)
        return _run_threads(extended, converted(fn), *in_thread, weights)


class _NoGarbageCollection:
    """A trace makes very many objects that stay: each pass of the collector would walk all of them and free none.

    The collector is the process's. It is switched off while any thread is in a block, and on again, if it was, by the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_enabled:
                gc.enable()


_no_garbage_collection = _NoGarbageCollection()


class Clones:
    """The clones of tf.functions that run the replicas inside of them; one per function and strategy.

    Where a function asks to be compiled, and there are several replicas, each one's stages are compiled instead of the whole.
    """

    def __init__(self, extended: Any):
        self._extended = extended
        self._lock = threading.Lock()
        self._clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def of(self, fn: Any) -> Callable:
        """The clone of ``fn``. Two threads that ask at once get the same one, which is traced once."""
        with self._lock:
            if fn not in self._clones:
                self._clones[fn] = self._clone(fn)
            return self._clones[fn]

    def _clone(self, fn: Any) -> Callable:
        extended = self._extended
        python_function, compiled = fn.python_function, bool(fn._jit_compile)

        def on_each(*args: Any, **kwargs: Any) -> Any:
            with extended.run_options(compiled=compiled):
                return extended.call_for_each_replica(python_function, args, kwargs)

        return clone_function(fn, on_each, fn._jit_compile if extended.replicas == 1 else None)


def _run_alone(strategy: Any, fn: Callable, args: Any, kwargs: Any) -> Any:
    if not tf.executing_eagerly():
        fn = converted(fn)
    args, kwargs = select_replica(0, (tuple(args), kwargs))
    with captures.mismatch_explained(strategy), SoleContext(strategy):
        return fn(*args, **kwargs)


def _run_threads(extended: Any, fn: Callable, args: Any, kwargs: Any, weights: Weights | None) -> Any:
    run, results = ThreadRun(weights), []

    def replica(*args: Any, **kwargs: Any) -> Any:
        with extended.in_thread_run(run):
            results.append(fn(*args, **kwargs))
        return results[-1]

    with captures.mismatch_explained(extended.container), extended.in_thread_run(run):
        try:
            result = run_in_threads(extended.container, replica, args, kwargs)
        except AssertionError:  # what TensorFlow says of results that do not fit together
            if len(results) == extended.replicas:
                _check_alike(results)
            raise
        variables.make_equal(extended, run.written.values(), weights)
    return result


def _check_alike(results: list[Any]) -> None:
    for replica, result in enumerate(results):
        try:
            nest.assert_same_structure(results[0], result)
        except (ValueError, TypeError) as error:
            raise UnsupportedError(
                "A replica function must return the same structure on every replica. "
                f"Received: {results[0]!r} from replica 0, {result!r} from replica {replica}. "
                "Return the same keys and as many elements everywhere; a tensor may have another shape on each replica."
            ) from error
