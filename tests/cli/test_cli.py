"""The command line, in processes of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lockstep
from subprocess_tools import REPOSITORY, run_lockstep, run_snippet


def test_help_does_not_import_tensorflow() -> None:
    result = run_snippet(
        """
        import sys
        from lockstep.cli.main import main
        sys.argv = ["lockstep", "--help"]
        try:
            main()
        except SystemExit as end:
            print("code", end.code)
        print("heavy", sorted({"tensorflow", "keras", "sklearn", "pydantic"} & set(sys.modules)))
        """
    ).check()
    assert "train" in result.stdout
    assert "code 0" in result.stdout
    assert "heavy []" in result.stdout


def test_version() -> None:
    result = run_lockstep("--version").check()
    assert result.stdout == f"lockstep {lockstep.__version__}\n"


def test_a_wrong_recipe_ends_with_2_and_a_message(tmp_path: Path) -> None:
    recipe = tmp_path / "wrong.toml"
    recipe.write_text((REPOSITORY / "recipes" / "digits.toml").read_text().replace("epochs", "epoch"))
    result = run_lockstep("train", str(recipe), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {recipe}, line 26: The key 'epochs' of [train] is missing.")
    assert "line 27: 'epoch' is not a key of [train]" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [["train"], ["train", "a.toml", "--epochs", "3"], ["trian"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    result = run_lockstep(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.versions
def test_train_from_recipe_to_run_folder(tmp_path: Path) -> None:
    import keras

    from lockstep.training import digits

    recipe = REPOSITORY / "recipes" / "digits.toml"
    result = run_lockstep("train", str(recipe), "--run-dir", "out", timeout_s=300, cwd=tmp_path).check()
    last = result.stdout.splitlines()[-1]
    assert last == "run folder out"
    assert "epoch 25/25  step 575" in result.stdout
    assert "2 replicas" in result.stdout

    out = tmp_path / "out"
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("epoch") == 25
    test = events[-1]
    assert (test["event"], test["step"]) == ("test", 575)
    assert test["accuracy"] >= 0.97

    model = keras.saving.load_model(out / "model.keras")
    examples = digits.load().test
    loss, accuracy = model.evaluate(examples.inputs, examples.targets, verbose=0)
    assert loss == pytest.approx(test["loss"], rel=1e-4)
    assert accuracy == pytest.approx(test["accuracy"])

    again = run_lockstep("train", str(recipe), "--run-dir", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert "The run folder exists already. Received: out." in again.stderr
