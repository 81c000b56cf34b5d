"""Checks that a model, its optimizer and its variables were made in the scope of the strategy that trains them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from lockstep.engine.extended import Extended
from lockstep.engine.tf_private import DistributedVariable
from lockstep.engine.variables import variable_of
from lockstep.errors import StrategyMismatchError


def is_lockstep(strategy: Any) -> bool:
    return strategy is not None and isinstance(strategy.extended, Extended)


def check_model(model: Any) -> None:
    """Raises StrategyMismatchError where a model made outside of the scope would be trained, or compiled, inside of it."""
    compiled = getattr(getattr(model, "optimizer", None), "_distribution_strategy", None)
    candidates: list[tuple[Any, str]] = [(tf.distribute.get_strategy(), "trained"), (compiled, "compiled")]
    for strategy, where in candidates:
        if is_lockstep(strategy) and strategy is not model._distribute_strategy and strategy.num_replicas_in_sync > 1:
            raise StrategyMismatchError(
                f"A model must be built in the scope of the strategy that trains it. Received: model {model.name!r}, built "
                f"outside of the scope and {where} inside of it: its variables have one copy, not "
                f"{strategy.num_replicas_in_sync}. "
                "Create the model (and load its weights) inside `with strategy.scope():`, together with compile()."
            )


def check_optimizer(optimizer: Any, strategy: Any) -> None:
    """Raises StrategyMismatchError where an optimizer with one copy of its variables would update all replicas'."""
    if optimizer._distribution_strategy is not strategy:
        raise StrategyMismatchError(
            f"An optimizer must be created in the scope of the strategy that trains with it. Received: {optimizer.name!r}, "
            "created outside of it: its variables (iterations, learning rate, slots) have one copy, but would be updated by "
            f"{strategy.num_replicas_in_sync} replicas. Create it inside `with strategy.scope():`."
        )


def check_slot(optimizer: Any, variable: Any) -> None:
    """Raises StrategyMismatchError where ``optimizer`` is to be built for a variable of another scope than its own."""
    mirrored, strategy = _mirrored(variable), optimizer._distribution_strategy
    if is_lockstep(strategy) and strategy.num_replicas_in_sync > 1:
        check_variables([variable], strategy)
    elif mirrored is not None and is_lockstep(mirrored.distribute_strategy):
        check_optimizer(optimizer, mirrored.distribute_strategy)


def _mirrored(variable: Any) -> Any | None:
    """The mirrored variable that a Keras variable, or one of the copies, stands for; None where there is one copy."""
    value: Any = variable.value if isinstance(variable, keras.Variable) else variable
    return value if isinstance(value, DistributedVariable) else variable_of(value.handle)


def check_variables(variables: Iterable[Any], strategy: Any) -> None:
    """Raises StrategyMismatchError where a variable that ``strategy``'s replicas would update is not one of its own."""
    for variable in variables:
        mirrored = _mirrored(variable)
        if mirrored is not None and mirrored.distribute_strategy is strategy:
            continue
        where = (
            "outside of any scope and has one copy" if mirrored is None else f"in the scope of {mirrored.distribute_strategy!r}"
        )
        raise StrategyMismatchError(
            "A model must be built in the scope of the strategy that trains it. Received: variable "
            f"{getattr(variable, 'path', variable.name)!r}, which was created {where}, but would be updated by "
            f"{strategy.num_replicas_in_sync} replicas of {type(strategy).__name__}. "
            "Create the model (and load its weights) inside `with strategy.scope():`, also a base model that is part of it. "
            "A part that is not to be trained can stay as it is: set its trainable to False."
        )
