"""The recipe: everything a training run is told, as typed and checked sections.

A recipe is a TOML file. Unknown keys are errors, and every key does something. `recipe_file.py` reads the file and
turns what pydantic finds into messages with line numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["Batch", "Data", "Model", "Optimizer", "Output", "Recipe", "Section", "Strategy", "Train"]

OptimizerName = Literal[
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "rmsprop",
    "sgd",
]
ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]

_IMPORT_PATH = 'an import path "module:function"'
_ARGUMENTS = "a table of the function's keyword arguments"


def key(allowed: str, help: str, **field: Any) -> Any:
    """A recipe key: ``allowed`` says in words which values it takes, ``help`` what it does."""
    return Field(description=help, json_schema_extra={"allowed": allowed}, **field)


class Section(BaseModel):
    """One table of a recipe. Strict: a string is never read as a number, and no key is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Model(Section):
    """``[model]``: what is trained."""

    function: ImportPath = key(_IMPORT_PATH, "Called in the strategy's scope; returns a Keras model, not yet compiled.")
    arguments: dict[str, Any] = key(_ARGUMENTS, "Passed to the function.", default_factory=dict)


class Data(Section):
    """``[data]``: what it is trained on. Exactly one of ``source`` and ``function``."""

    source: Literal["digits"] | None = key('"digits"', "A data set that lockstep knows by name.", default=None)
    function: ImportPath | None = key(_IMPORT_PATH, "Any function that returns a lockstep.training.data.Splits.", default=None)
    arguments: dict[str, Any] = key(_ARGUMENTS, "Passed to the source or function.", default_factory=dict)

    @model_validator(mode="after")
    def _exactly_one(self) -> Data:
        return _require_one(self, "source", "function")


class Strategy(Section):
    """``[strategy]``: which devices train. Without either key: every visible GPU, or one CPU."""

    replicas: int | None = key("a whole number, 1 or more", "How many devices to use, one replica each.", default=None, ge=1)
    devices: list[NonEmpty] | None = key(
        'a list of device names such as ["GPU:0", "GPU:1"]',
        "The devices to use, one replica each.",
        default=None,
        min_length=1,
    )
    logical_replicas: int | None = key(
        "a whole number, a multiple of the number of devices",
        "Train as this many replicas on any number of devices, with bit-identical results.",
        default=None,
        ge=1,
    )
    sync_batch_norm: bool = key(
        "true or false", "Normalise with the statistics of the global batch, not of each slice.", default=False
    )
    exchange_dtype: Literal["bfloat16", "float16", "float32"] | None = key(
        '"bfloat16", "float16" or "float32"', "What gradients are rounded to for the exchange.", default=None
    )
    update: Literal["auto", "sharded", "mirrored"] = key(
        '"auto", "sharded" or "mirrored"',
        "Whether each replica updates its share of the weights and holds its share of the optimizer's slots.",
        default="auto",
    )
    check_finite: bool = key("true or false", "Stop before an update whose loss or gradients are not finite.", default=False)

    @model_validator(mode="after")
    def _at_most_one(self) -> Strategy:
        if self.replicas is not None and self.devices is not None:
            raise _both("replicas", "devices")
        return self


class Batch(Section):
    """``[batch]``: examples per step. Exactly one of ``global`` and ``per_replica``; the other follows from it."""

    global_: int | None = key(
        "a whole number, 1 or more", "Examples of one step over all replicas.", default=None, ge=1, alias="global"
    )
    per_replica: int | None = key("a whole number, 1 or more", "Examples of one step on each replica.", default=None, ge=1)
    micro_batches: int = key(
        "a whole number, 1 or more",
        "Parts that each replica works through one after the other, to need less memory for the same step.",
        default=1,
        ge=1,
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Batch:
        return _require_one(self, "global", "per_replica")

    def global_batch(self, replicas: int) -> int:
        """Examples of one step over ``replicas`` replicas."""
        if self.global_ is not None:
            return self.global_
        assert self.per_replica is not None
        return self.per_replica * replicas


class Optimizer(Section):
    """``[optimizer]``: a Keras optimizer."""

    name: OptimizerName = key("one of the names of Keras optimizers", "Which optimizer.", default="adam")
    learning_rate: float = key("a number above 0", "The learning rate of every step.", default=0.001, gt=0, allow_inf_nan=False)
    arguments: dict[str, Any] = key(
        "a table of the Keras optimizer's keyword arguments", "Passed to the optimizer.", default_factory=dict
    )


class Train(Section):
    """``[train]``: how long, towards what, and from which seed."""

    epochs: int = key("a whole number, 1 or more", "Passes over the training examples.", ge=1)
    seed: int = key(
        "a whole number from 0 to 4294967295",
        "Decides initial weights, shuffling and dropout.",
        default=0,
        ge=0,
        lt=2**32,
    )
    loss: NonEmpty = key("the name of a Keras loss", "What training makes smaller.", default="sparse_categorical_crossentropy")
    metrics: list[NonEmpty] = key(
        "a list of names of Keras metrics", "Reported besides the loss.", default_factory=lambda: ["accuracy"]
    )


class Output(Section):
    """``[output]``: where results go."""

    run_dir: NonEmpty | None = key(
        "a path of a folder that is not there yet",
        "The run folder; without it, a new folder under runs/.",
        default=None,
    )
    log_every_steps: int = key(
        "a whole number, 1 or more", "Steps from one line of metrics.jsonl to the next.", default=10, ge=1
    )


class Recipe(Section):
    """A whole recipe."""

    model: Model = key("a table", "What is trained.")
    data: Data = key("a table", "What it is trained on.")
    strategy: Strategy = key("a table", "Which devices train.", default_factory=Strategy)
    batch: Batch = key("a table", "Examples per step.")
    optimizer: Optimizer = key("a table", "How weights change.", default_factory=Optimizer)
    train: Train = key("a table", "How long, towards what, from which seed.")
    output: Output = key("a table", "Where results go.", default_factory=Output)


def _given(section: Section, name: str) -> bool:
    attribute = "global_" if name == "global" else name
    return getattr(section, attribute) is not None


def _require_one(section: Any, first: str, second: str) -> Any:
    """``section``, if it has exactly one of two keys."""
    if _given(section, first) and _given(section, second):
        raise _both(first, second)
    if not _given(section, first) and not _given(section, second):
        raise PydanticCustomError("neither_key", "neither key", {"keys": [first, second]})
    return section


def _both(first: str, second: str) -> PydanticCustomError:
    return PydanticCustomError("both_keys", "both keys", {"keys": [first, second]})
