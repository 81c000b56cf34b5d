"""Optimizes a stage's graph once, instead of once per replica while the first step waits.

TensorFlow runs its graph optimizer each time a function is instantiated on a device: N times the same work. On CPU
devices we run it here. On GPUs the runtime's own pass is kept: it knows the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lockstep.engine.tf_private import (
    ConfigProto,
    MetaGraphDef,
    RewriterConfig,
    keep_call_options,
    optimized_graph,
    switch_graph_optimizer_off,
)


def worthwhile(devices: tuple[str, ...]) -> bool:
    """Whether stages for these devices are optimized here."""
    return len(devices) > 1 and all(":CPU:" in d for d in devices)


def call_config(is_optimized: bool) -> bytes:
    """The serialised ConfigProto for calls of a stage: no second pass over what is optimized already."""
    config = ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = is_optimized
    return config.SerializeToString()


def optimized(graph_def: Any, inputs: dict[str, tf.Tensor], outputs: list[str], must_run: list[str], device: str) -> Any:
    """``graph_def`` as the graph optimizer leaves it, with the same inputs, outputs and side effects.

    Args:
      graph_def: the nodes of a stage; tensors named in ``inputs`` are not among them.
      inputs: name -> tensor from outside.
      outputs: names of the tensors it must still produce.
      must_run: names of the ops whose side effects must stay.
      device: a device of the kind that it will run on.
    """
    metagraph = MetaGraphDef()
    metagraph.graph_def.CopyFrom(graph_def)
    nodes = metagraph.graph_def.node
    produced = {node.name for node in nodes}
    # Several tensors of one op from outside (a call's outputs, say) need a stand-in each.
    stand_ins: dict[str, str] = {}
    for position, (name, tensor) in enumerate(inputs.items()):
        stand_in = f"lockstep_input_{position}"
        stand_ins[name] = stand_in
        node = nodes.add(name=stand_in, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    for node in nodes:
        node.device = node.device or device
        for i, source in enumerate(node.input):
            key = source if ":" in source else f"{source}:0"
            if not source.startswith("^") and source.split(":")[0] not in produced and key in stand_ins:
                node.input[i] = stand_ins[key]
    fetches = [*(o.split(":")[0] for o in outputs), *must_run, *stand_ins.values()]
    metagraph.collection_def["train_op"].node_list.value.extend(dict.fromkeys(fetches))
    config = ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    # A second round takes as long as the first and finds a few percent of the nodes more.
    config.graph_options.rewrite_options.meta_optimizer_iterations = RewriterConfig.ONE
    if any(node.op in ("While", "StatelessWhile") for node in nodes):
        # Loops stay whole (which is what the optimizer does for this executor; the step runs on the usual one). Taken apart
        # they are cycles, in which TensorFlow cannot always infer the shapes of a call ("Missing src context").
        config.experimental.executor_type = "SINGLE_THREADED_EXECUTOR"
    result = optimized_graph(config, metagraph, device)
    return _with_outer_names(result, {v: k for k, v in stand_ins.items()}, device)


def _with_outer_names(graph_def: Any, outer: dict[str, str], device: str) -> Any:
    """``graph_def`` without its stand-ins: their consumers name the outside tensor again, as import_graph_def maps it."""
    kept = [node for node in graph_def.node if node.name not in outer]
    for node in kept:
        if node.device == device:
            node.device = ""
        sources = [s for s in node.input if s.lstrip("^") not in outer or not s.startswith("^")]
        del node.input[:]
        node.input.extend(outer.get(s.removesuffix(":0"), s) for s in sources)
        drop_colocation(node, lambda name: name in outer)
    del graph_def.node[:]
    graph_def.node.extend(kept)
    return graph_def


def drop_colocation(node: Any, is_removed: Callable[[str], bool]) -> None:
    """Frees ``node`` from standing where nodes stand that are no longer in its graph."""
    if "_class" not in node.attr:
        return
    kept = [c for c in node.attr["_class"].list.s if not is_removed(c.decode().removeprefix("loc:@"))]
    if kept:
        node.attr["_class"].list.s[:] = kept
    else:
        del node.attr["_class"]


class _Running(threading.local):
    """The step that this thread is calling."""

    step: Step | None = None


_running = _Running()


class Step:
    """A compiled step, called without a pass of the graph optimizer where its stages have had theirs.

    The graph around the stages holds N calls of each, the exchange, and every variable N times as an argument: there is
    nothing to gain, and N times the stages to go through again. Which step is of that kind shows while it is traced, that
    is during its first call; until then TensorFlow's own choice stands.

    Args:
      function: a function that calls a tf.function.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._is_optimized = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, _running.step = _running.step, self
        try:
            with keep_call_options():
                if self._is_optimized:
                    switch_graph_optimizer_off()
                return self._function(*args, **kwargs)
        finally:
            _running.step = before

    def skip_optimizer(self) -> None:
        """The function being traced now needs no optimizing."""
        self._is_optimized = True
        switch_graph_optimizer_off()


def once(place: Callable[[], Any]) -> Any:
    """Calls ``place``, which adds optimized stages to the graph, in such a way that nobody optimizes them again.

    Inside a `Step` that is for the step to see to. In a graph that others call, they become one function that is called
    without a pass of the optimizer.
    """
    if _running.step is not None:
        _running.step.skip_optimizer()
        return place()
    with keep_call_options():
        switch_graph_optimizer_off()
        return tf.function(place, autograph=False, experimental_attributes={"_noinline": True})()
