"""Ragged, sparse and text batches: the rows of the global batch, in order, also where a replica has none of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from device_tools import devices

pytestmark = pytest.mark.versions
WORDS = [["a"], ["b", "c"], [], ["d", "e", "f"], ["g"], ["h", "i"], ["j"], ["k"], ["l", "m"]]
BATCH = 4


def _dataset() -> tf.data.Dataset:
    counts = np.diag(np.arange(1.0, 10.0, dtype="float32"))
    parts = {
        "words": tf.ragged.constant(WORDS),
        "name": [f"x{i}" for i in range(9)],
        "counts": tf.sparse.from_dense(counts),
        "number": np.arange(9),
    }
    return tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)


def _replica(batch: Any) -> dict[str, Any]:
    return {
        "how many words": tf.size(batch["words"].flat_values),
        "how many rows": tf.cast(batch["words"].nrows(), tf.int32),
        "how many letters": tf.reduce_sum(tf.strings.length(batch["name"])),
        "sum": tf.sparse.reduce_sum(batch["counts"]),
        "words": tf.strings.upper(batch["words"]),
        "name": batch["name"],
        "counts": batch["counts"] * 2.0,
        "joined": tf.strings.reduce_join(batch["name"]),
        "rows": tf.IndexedSlices(tf.ones([tf.shape(batch["number"])[0], 1]), batch["number"], tf.constant([9, 1], tf.int64)),
    }


@pytest.mark.parametrize("way", ["traced", "in threads", "eager"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rows_of_every_kind(count: int, way: str) -> None:
    strategy = lockstep.MirroredStrategy(devices(count))

    def replica(batch: Any) -> dict[str, Any]:
        if way == "in threads":
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        return _replica(batch)

    def run(batch: Any) -> Any:
        return strategy.run(replica, (batch,))

    step: Any = run if way == "eager" else tf.function(run)
    for i, batch in enumerate(strategy.experimental_distribute_dataset(_dataset())):
        numbers = range(BATCH * i, min(BATCH * (i + 1), 9))
        got = step(batch)

        def summed(name: str, got: Any = got) -> int:
            return int(strategy.reduce("SUM", got[name], axis=None))

        assert summed("how many words") == sum(len(WORDS[k]) for k in numbers)
        assert summed("how many rows") == len(numbers)
        assert summed("how many letters") == 2 * len(numbers)
        assert summed("sum") == sum(k + 1 for k in numbers)
        assert strategy.gather(got["words"], axis=0).to_list() == [[w.upper().encode() for w in WORDS[k]] for k in numbers]
        assert strategy.gather(got["name"], axis=0).numpy().tolist() == [f"x{k}".encode() for k in numbers]
        dense = tf.sparse.to_dense(strategy.gather(got["counts"], axis=0)).numpy()
        assert dense.tolist() == [[2.0 * (k + 1) * (j == k) for j in range(9)] for k in numbers]
        joined = b"".join(v.numpy() for v in strategy.experimental_local_results(got["joined"]))
        assert joined == "".join(f"x{k}" for k in numbers).encode()
        rows = strategy.reduce("SUM", got["rows"], axis=None)
        assert rows.indices.numpy().tolist() == list(numbers)
