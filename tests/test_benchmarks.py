"""The benchmark: that its smallest part leaves a report, a chart and measurements. Nothing here is about speed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from subprocess_tools import run_python


def results(path: Path, rates: dict[str, list[float]]) -> Path:
    measurements = [
        {"engine": engine, "workload": "mlp", "round": i + 1, "examples_per_s": rate}
        for engine, values in rates.items()
        for i, rate in enumerate(values)
    ]
    settings = {"engines": list(rates), "workloads": ["mlp"], "rounds": 3, "replicas": 2, "steps": {"mlp": 4}}
    values = {"format": 1, "started": "2026-01-02T03:04:05", "about": {"Commit": path.stem}, "settings": settings}
    path.write_text(json.dumps({**values, "measurements": measurements}))
    return path


@pytest.mark.slow
def test_the_smallest_part(tmp_path: Path) -> None:
    options = "--workloads cnn --engines one-device,lockstep --rounds 1 --steps 4 --output"
    run_python(["-m", "benchmarks", *options.split(), str(tmp_path)], timeout_s=240).check()
    (data,) = tmp_path.glob("*.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", data.stem)

    written = json.loads(data.read_text())
    measured = {m["engine"]: m for m in written["measurements"]}
    assert list(measured) == ["one-device", "lockstep"]
    for measurement in measured.values():
        assert measurement["examples_per_s"] > 0
        assert (measurement["steps"], measurement["global_batch"]) == (4, 128)
        assert len(measurement["epochs_examples_per_s"]) == 4
    # Both have trained on the same batches, beginning with the same weights.
    assert measured["lockstep"]["loss"] == pytest.approx(measured["one-device"]["loss"], rel=1e-4)

    report = data.with_suffix(".md").read_text()
    assert "| lockstep | " in report and "| lockstep / one device | " in report
    assert "tensorflow-cpu 2." in report and f"({data.stem}.svg)" in report
    chart = xml.etree.ElementTree.fromstring(data.with_suffix(".svg").read_text())
    words = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert "one device" in words and "lockstep" in words

    compared = run_python(["-m", "benchmarks.compare", str(data), str(data)]).check().stdout
    assert re.search(r"\| lockstep \| cnn \| [\d,]+ \| [\d,]+ \| 1\.00 \|  \|", compared)


def test_compare_tells_changes_beyond_the_spread(tmp_path: Path) -> None:
    old = results(tmp_path / "old.json", {"lockstep": [100, 110, 120], "one-device": [50, 60, 70], "one-core": [40]})
    new = results(tmp_path / "new.json", {"lockstep": [130, 220, 140], "one-device": [69, 40, 45], "one-core": [20], "x": [1]})
    lines = run_python(["-m", "benchmarks.compare", str(old), str(new)]).check().stdout.splitlines()
    assert lines == [
        "Commit: old -> new",
        "| engine | workload | old | new | new / old | beyond the spread |",
        "| --- | --- | --- | --- | --- | --- |",
        "| lockstep | mlp | 110 | 140 | 1.27 | **faster** |",
        "| one device | mlp | 60 | 45 | 0.75 |  |",
        "| one core | mlp | 40 | 20 | 0.50 | **slower** |",
        "| x | mlp |  | 1 |  | newly measured |",
    ]


def test_an_unknown_engine_is_named() -> None:
    done = run_python(["-m", "benchmarks", "--engines", "lockstep,warp"])
    assert done.returncode == 2
    assert "argument --engines: unknown warp. Allowed: one-core, one-device, tf-distribute," in done.stderr
