"""The exchange: what makes gradients (or any all-reduced values) the same on all replicas."""

from lockstep.engine.exchange.algorithm import Exchange, add, choose
from lockstep.engine.exchange.checks import as_dense, as_tensors, as_value, check_axis, check_gather, check_sum, reduce_op_of

__all__ = [
    "Exchange",
    "add",
    "as_dense",
    "as_tensors",
    "as_value",
    "check_axis",
    "check_gather",
    "check_sum",
    "choose",
    "reduce_op_of",
]
