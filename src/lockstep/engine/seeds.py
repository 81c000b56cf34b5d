"""Gives each replica its own numbers from seeded random ops.

After ``tf.random.set_seed``, ``tf.random.normal(...)`` carries fixed seeds in its op. Replicas that share one graph
function would then draw the same numbers; TensorFlow's own strategies, which trace once per replica, draw different
ones. So where a stage holds such ops, replica r gets a copy whose ``seed2`` attributes are shifted. (Keras layers draw
from seed variables instead.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_STRIDE = 1_000_003


def _is_seeded(node: Any) -> bool:
    return "seed2" in node.attr and "seed" in node.attr and bool(node.attr["seed"].i or node.attr["seed2"].i)


def _called(node: Any) -> Iterable[str]:
    """Names of the functions that ``node`` refers to."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for func in value.list.func:
            yield func.name


def _seeded_functions(graph_def: Any) -> set[str]:
    """Functions of the library that draw seeded random numbers, directly or through others."""
    bodies = {f.signature.name: f.node_def for f in graph_def.library.function}
    seeded = {name for name, nodes in bodies.items() if any(_is_seeded(n) for n in nodes)}
    while True:
        more = {name for name, nodes in bodies.items() if any(c in seeded for n in nodes for c in _called(n))} - seeded
        if not more:
            return seeded
        seeded |= more


def has_seeded_ops(graph_def: Any) -> bool:
    """Whether running ``graph_def`` on several replicas would draw the same random numbers on all of them."""
    if any(_is_seeded(n) for n in graph_def.node):
        return True
    seeded = _seeded_functions(graph_def)
    return bool(seeded) and any(c in seeded for n in graph_def.node for c in _called(n))


def for_replica(graph_def: Any, replica: int) -> Any:
    """``graph_def`` with its seeds shifted for ``replica``; replica 0 keeps what one device would draw."""
    if replica == 0:
        return graph_def
    shifted = type(graph_def)()
    shifted.CopyFrom(graph_def)
    renamed = {name: f"{name}_replica_{replica}" for name in _seeded_functions(graph_def)}
    for function in shifted.library.function:
        if function.signature.name in renamed:
            function.signature.name = renamed[function.signature.name]
            _shift(function.node_def, replica, renamed)
    _shift(shifted.node, replica, renamed)
    return shifted


def _shift(nodes: Iterable[Any], replica: int, renamed: dict[str, str]) -> None:
    for node in nodes:
        if _is_seeded(node):
            node.attr["seed2"].i += replica * _STRIDE
        for value in node.attr.values():
            if value.HasField("func"):
                value.func.name = renamed.get(value.func.name, value.func.name)
            for func in value.list.func:
                func.name = renamed.get(func.name, func.name)
