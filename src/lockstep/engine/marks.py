"""What a trace is made of: a graph, and the marks in it where replicas exchange values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from lockstep.engine.shards import ShardLayout


@dataclass(frozen=True)
class Mark:
    """A place where replicas exchange values.

    Attributes:
      kind: "sum", "mean", "first" (replica 0's value for all), "gather" (along ``axis``), "rows" (IndexedSlices, summed
        or averaged by joining their rows), "scatter" (the sum, of which each gets its shard), "join" (the whole of which
        each hands in its shard), "check" (stop unless all replicas hand in True) or "cond" (all replicas go through one of
        two branches, in which there are marks; the first input says through which).
      inputs: what each replica hands in.
      outputs: what each gets back.
      ops: the names of the ops that the outputs belong to.
      branches: of a cond, what is done if True and if False.
      layout: of a scatter or a join, how the whole is cut.
      message: of a check, what to say where it fails; "replica", its number and the step (a second input) are added.
    """

    kind: str
    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    axis: int = 0
    mean: bool = False
    op: str = ""
    branches: tuple[Region, ...] = ()
    message: str = ""
    layout: ShardLayout | None = None

    @property
    def ops(self) -> set[str]:
        return {self.op} if self.op else {output.op.name for output in self.outputs}


@dataclass(frozen=True)
class Region:
    """A graph with marks: that of the whole replica function, or of a branch in it.

    Attributes:
      graph: the graph.
      inputs: its tensors that come from outside.
      outputs: its tensors that are returned.
      must_run: the ops whose side effects count.
      marks: where replicas exchange values.
    """

    graph: Any
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    must_run: list[tf.Operation]
    marks: list[Mark]
