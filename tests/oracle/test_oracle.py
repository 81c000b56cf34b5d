"""N devices compute what one device computes: the table, drawn cases, and what must hold besides."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from oracle.feeds import FEEDS, Data, Sizes
from oracle.models import MODELS, start_from
from oracle.optimizers import OPTIMIZERS
from oracle.oracle import Case, Outcome, bound_of, compare, compiled, examples, one_device, run, strategy_of, train
from oracle.table import REPLICAS, full_table, short_table

SEVERAL = [n for n in REPLICAS if n > 1]


def assert_close(outcome: Outcome, reference: Outcome, case: Case) -> None:
    differences = compare(outcome, reference, case)
    broken = {part: f"{worst:.1e}" for part, worst in differences.items() if not worst <= bound_of(case, part)}
    assert not broken, f"worst relative differences {broken} of {case}"


def check(case: Case, replicas: int) -> None:
    """Runs ``case`` on one device and on N, and asserts everything that must agree."""
    outcome = run(case, replicas)
    assert outcome.unequal_copies == ()
    if MODELS[case.model].exact:
        assert_close(outcome, one_device(case), case)


def label(value: object) -> str:
    return f"N={value}" if isinstance(value, int) else str(value)


@pytest.mark.parametrize(("case", "replicas"), short_table(), ids=label)
def test_n_devices_compute_what_one_does(case: Case, replicas: int) -> None:
    check(case, replicas)


@pytest.mark.slow
@pytest.mark.parametrize("case", full_table(), ids=str)
@pytest.mark.parametrize("replicas", REPLICAS, ids=label)
def test_every_model_with_every_optimizer(case: Case, replicas: int) -> None:
    check(case, replicas)


# Models that are cheap to trace. Each example still takes seconds, so a failing one is not shrunk.
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    replicas=st.sampled_from(SEVERAL),
    count=st.integers(1, 30),
    batch=st.integers(1, 16),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    model=st.sampled_from(["dense", "two outputs", "regularized + add_loss", "subclassed, unbuilt"]),
)
def test_any_number_of_examples_in_batches_of_any_size(
    replicas: int, count: int, batch: int, optimizer: str, model: str
) -> None:
    case = Case(model, optimizer, "arrays", "even")
    make, rng = MODELS[model].examples, np.random.default_rng(count)
    data = Data(*make(rng, count), *make(rng, 5), Sizes(count, batch))
    outcome = train(case, replicas, data)
    assert outcome.unequal_copies == ()
    assert_close(outcome, train(case, None, data), case)


@pytest.mark.parametrize(("model", "replicas"), [("dense", 4), ("conv + plain BN", 3), ("embedding + LSTM, masked", 2)])
def test_a_run_repeated_is_equal_in_every_bit(model: str, replicas: int) -> None:
    case = Case(model, "adam", "tf.data", "remainder N - 1")
    assert run(case, replicas).digest == run(case, replicas).digest


class Counting(keras.Sequential):
    """Counts how often Python runs its train_step, which is when it is traced."""

    traces = 0

    def train_step(self, data: object) -> object:
        self.traces += 1
        return super().train_step(data)


@pytest.mark.parametrize(
    ("feed", "replicas"),
    [
        *((name, 3) for name, feed in FEEDS.items() if not feed.by_hand and not feed.run_eagerly),
        ("arrays", 1),
        ("arrays", 2),
        ("arrays", 4),
    ],
)
def test_the_second_step_never_retraces(feed: str, replicas: int) -> None:
    start_from(1)
    with strategy_of(replicas).scope():
        model = Counting([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=FEEDS[feed].steps_per_execution)
    after_first: list[int] = []
    counted = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_first.append(model.traces))
    data = examples(Case("dense", "adam", feed, "last batch of 1"))
    fit = model.fit
    model.fit = lambda *args, **kwargs: fit(*args, callbacks=[counted], **kwargs)
    FEEDS[feed].train(model, data, 2)
    if feed == "train_on_batch":
        # No dataset says that sizes vary: to Keras, the first smaller batch is a new shape, on one device as well.
        after_first.append(model.traces)
    FEEDS[feed].train(model, data, 2)
    assert 1 <= after_first[0] == model.traces


# A normalisation that is not synchronised: by design, each replica normalises with the statistics of its own slice.


@pytest.mark.parametrize(("count", "replicas"), [(12, 4), (13, 2), (11, 3), (2, 4)])
def test_moving_statistics_are_the_mean_over_slices_by_examples(count: int, replicas: int) -> None:
    case = Case("conv + plain BN", "sgd", "arrays", "even")
    start_from(1)
    with strategy_of(replicas).scope():
        model = compiled(case)
    x, y = (a[:count] for a in examples(case).training)
    convolved = np.asarray(model.layers[0](x))
    model.train_on_batch(x, y)

    slices = [part for part in np.array_split(convolved, replicas) if len(part)]
    shares = [len(part) / count for part in slices]
    mean = sum(share * part.mean((0, 1, 2)) for share, part in zip(shares, slices, strict=True))
    variance = sum(share * part.var((0, 1, 2)) for share, part in zip(shares, slices, strict=True))
    norm = model.layers[1]
    np.testing.assert_allclose(norm.moving_mean.numpy(), 0.01 * mean, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(norm.moving_variance.numpy(), 0.99 + 0.01 * variance, rtol=1e-6)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_stateful_rnn_carries_the_states_of_its_own_slice(run_eagerly: bool) -> None:
    replicas, batch = 3, 6
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4 * batch, 5, 2)).astype("float32"), rng.integers(0, 3, 4 * batch)

    def trained(scope: Any, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
        start_from(3)
        with scope:
            layers = [keras.Input(batch_shape=(rows, 5, 2)), keras.layers.LSTM(4, stateful=True), keras.layers.Dense(3)]
            model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss, run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        states = [strategy_of(replicas).experimental_local_results(v.value) for v in model.layers[0].states]
        return [w.numpy() for w in model.trainable_variables], np.concatenate(states[0])

    weights, states = trained(strategy_of(replicas).scope(), batch // replicas)
    want_weights, want_states = trained(contextlib.nullcontext(), batch)
    for value, want in zip(weights, want_weights, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(states, want_states, rtol=1e-5)
