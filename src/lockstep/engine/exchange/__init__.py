"""The exchange: what makes gradients (or any all-reduced values) the same on all replicas."""

from lockstep.engine.exchange.algorithm import Exchange, add, choose
from lockstep.engine.exchange.checks import check_gather, check_sum

__all__ = ["Exchange", "add", "check_gather", "check_sum", "choose"]
