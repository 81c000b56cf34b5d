"""The exchange: what makes gradients (or any all-reduced values) the same on all replicas."""

from lockstep.engine.exchange.algorithm import Exchange, choose

__all__ = ["Exchange", "choose"]
