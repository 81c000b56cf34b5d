"""``lockstep verify`` tells right from wrong, says where, and recognises each planted fault."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lockstep.errors import VerifyError
from lockstep.training.verify import CAUSES, Verdict, report, verify
from subprocess_tools import REPOSITORY, run_lockstep
from training import planted_faults

MODULE = planted_faults.__name__


def verdict_of(name: str, **options: Any) -> Verdict:
    return verify(f"{MODULE}:{name}", **{"replicas": 3, **options})


def printed(verdict: Verdict) -> str:
    output = io.StringIO()
    report.print_verdict(verdict, Console(width=400, file=output))
    return output.getvalue()


@pytest.mark.parametrize("name", ["right", "right_loop", "right_without_tf_data"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_right_trainings_are_equal(name: str, replicas: int) -> None:
    verdict = verdict_of(name, replicas=replicas)
    assert verdict.is_equal and verdict.causes == ()
    assert verdict.comparison.worst < 1e-4
    assert len(verdict.comparison.norms) == 5
    assert f"EQUAL: {replicas} replicas compute what one device computes. Largest difference over 5 steps" in printed(verdict)


def test_a_bias_without_a_gradient_is_not_counted() -> None:
    verdict = verdict_of("right_without_tf_data")
    found = {name.split("/", 1)[1] for name in verdict.comparison.undetermined}
    # The moving mean is that of what the bias was added to.
    assert found == {"conv2d/bias", "batch_normalization/moving_mean", "batch_normalization/moving_variance"}
    assert "no gradient" in printed(verdict)


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("undistributed_batch", ["undistributed-batch"]),
        ("local_average", ["local-average"]),
        ("local_average_in_train_step", ["local-average"]),
        ("plain_batch_normalization", ["batch-norm"]),
        ("dropout", ["dropout"]),
        ("both", ["batch-norm", "dropout"]),
        ("not_deterministic", ["non-deterministic"]),
        ("unknown", []),
    ],
)
def test_each_fault_is_recognised(name: str, causes: list[str]) -> None:
    verdict = verdict_of(name)
    assert not verdict.is_equal
    assert [cause.name for cause in verdict.causes] == causes
    parting = verdict.comparison.parting
    assert parting is not None and parting.step == 1
    text = printed(verdict)
    assert "DIFFERENT: 3 replicas and one device part in step 1" in text
    for cause in verdict.causes:
        assert f"Likely cause: {cause.name}. {cause.what}\n" in text and f"What to do: {cause.remedy}\n" in text
    assert ("none that lockstep recognises" in text) == (not causes)


def test_the_first_variable_is_named() -> None:
    parting = verdict_of("dropout").comparison.parting
    assert parting is not None and parting.variable is not None
    assert parting.variable.split("/", 1)[1] == "dense/kernel"
    assert parting.difference > 0.01


def test_an_optimizer_that_hides_the_factor_is_seen_through() -> None:
    found = verdict_of("local_average_in_train_step").comparison
    assert found.gradient_ratio == pytest.approx(3.0, rel=0.25)
    # Adam's first steps are as long whatever the size of the gradient.
    assert found.parting is not None and found.parting.gradient == pytest.approx(2.0, rel=0.4)


@pytest.mark.parametrize(
    ("name", "allow"),
    [("dropout", ["dropout"]), ("plain_batch_normalization", ["batch-norm"]), ("both", ["dropout", "batch-norm"])],
)
def test_what_is_allowed_is_taken_out(name: str, allow: list[str]) -> None:
    verdict = verdict_of(name, allow=allow)
    assert verdict.is_equal
    assert f"(without: {', '.join(allow)})" in printed(verdict)


def test_one_of_two_causes_allowed_leaves_the_other() -> None:
    assert [cause.name for cause in verdict_of("both", allow=["batch-norm"]).causes] == ["dropout"]
    assert [cause.name for cause in verdict_of("both", allow=["dropout"]).causes] == ["batch-norm"]


# Wrong arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 1}, "Received: 1 replicas. Allowed: 2 or more"),
        ({"steps": 0}, "Received: 0 steps"),
        ({"steps": 99}, r"too few batches. Received: 6 for 99 steps"),
        ({"tolerance": 0.0}, "Received: 0.0. Allowed: above 0 and below 1"),
        ({"allow": ["local-average"]}, "Received: 'local-average'. Allowed: batch-norm, dropout"),
    ],
)
def test_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(VerifyError, match=words):
        verdict_of("right", **options)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("recipe", "Neither a recipe nor a function. Received: 'recipe'"),
        ("no_such_module:f", "There is no module 'no_such_module'"),
        (f"{MODULE}:rihgt", "has no function 'rihgt'.*Did you mean 'right'"),
        ("builtins:repr", r"returned something else. Received: builtins:repr returned '<lockstep"),
    ],
)
def test_targets(target: str, words: str) -> None:
    with pytest.raises(VerifyError, match=words):
        verify(target, replicas=2)


def test_every_cause_says_what_to_do() -> None:
    assert len(CAUSES) == 5
    assert all(cause.what.endswith(".") and cause.remedy.endswith(".") for cause in CAUSES.values())


# The command.


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(planted_faults.__file__).read_text())
    good = run_lockstep("verify", "mine:right", "--replicas", "2", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert "EQUAL: 2 replicas" in good.stdout
    bad = run_lockstep("verify", "mine:undistributed_batch", "--steps", "2", cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    assert "Likely cause: undistributed-batch." in bad.stdout
    wrong = run_lockstep("verify", "mine:nothing", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "Error: The module mine has no function 'nothing'" in wrong.stderr


def test_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text((REPOSITORY / "recipes" / "digits.toml").read_text().replace("filters = 32", "filters = 4"))
    different = verify(str(recipe), steps=3)
    assert (different.replicas, [cause.name for cause in different.causes]) == (2, ["dropout"])
    assert verify(str(recipe), steps=3, allow=["dropout"]).is_equal
    recipe.write_text(recipe.read_text().replace("global = 64", "per_replica = 32"))
    with pytest.raises(VerifyError, match="Received: per_replica of"):
        verify(str(recipe))
