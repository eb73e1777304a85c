"""Tests `jaxcross sweep`: values on the command line, and scripts that it refuses before any rank
starts.
"""

import json

import pytest

from jaxcross import cli
from jaxcross.commands import launch
from jaxcross.commands.sweep import parsed, split

SCRIPT = "def train(job, lr, width=32, *, seed=0):\n    pass\n"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,0.2,0.4", [0.1, 0.2, 0.4]),
        ("lr=1e-3, 1", [0.001, 1]),
        ("on=true,False,null,None", [True, False, None, None]),
        ("layers=[1, 2],(3,),[]", [[1, 2], [3], []]),
        ("model=resnet8,'a,b',\"c\"", ["resnet8", "a,b", "c"]),
        ('opt={"name": "adam", "b": 0.9}', [{"name": "adam", "b": 0.9}]),
        ("path=a=b", ["a=b"]),
    ],
)
def test_values_are_read_as_python_or_json(text, values):
    (found,) = parsed([text]).values()
    assert found == values
    assert [type(a) for a in found] == [type(b) for b in values]


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        (["lr"], "must be a name, an equals sign, and values"),
        (["=1"], "must be a name"),
        (["a-b=1"], "must be a name"),
        (["lr=1,,2"], "has an empty value"),
        (["lr="], "has an empty value"),
        (["lr=1", "lr=2"], "`--set lr=...` is given twice"),
    ],
)
def test_values_of_another_form_are_refused(texts, error):
    with pytest.raises(ValueError, match=error):
        parsed(texts)


def test_commas_in_brackets_do_not_separate():
    assert split("f(1,2),{a,b},'x,y'") == ["f(1,2)", "{a,b}", "'x,y'"]


def run(tmp_path, monkeypatch, text, *words):
    """Returns the command's exit code, and the arguments of the program that it would have
    launched.
    """
    started = []
    monkeypatch.setattr(launch, "run", lambda args: started.append(args) or 0)
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    code = cli.main(["sweep", str(script), "--metric", "accuracy", "--mode", "min", *words])
    return code, started


@pytest.mark.parametrize(
    ("text", "words", "error"),
    [
        (None, ["--set", "lr=1"], "cannot be read: No such file"),
        ("def train(job:\n", ["--set", "lr=1"], "is not a Python script"),
        (
            "def fit(job, lr): pass\n",
            ["--set", "lr=1"],
            "has no function `train`. Define `def train(job, lr): ...`",
        ),
        (
            SCRIPT,
            ["--set", "lr=1", "--set", "depth=2"],
            "has no parameter `depth`. Its parameters are: `lr`, `width`,",
        ),
        (SCRIPT, ["--set", "width=1"], "needs `lr`, which has no default"),
        (SCRIPT, ["--set", "lr"], "must be a name, an equals sign"),
        (
            SCRIPT,
            ["--set", "lr=1", "--concurrent", "0"],
            "`--concurrent` must be at least 1, got 0.",
        ),
        (SCRIPT, ["--set", "lr=1", "--trials", "0"], "`--trials` must be at least 1, got 0."),
        (SCRIPT, ["--set", "lr=1", "--seed", "-1"], "`--seed` must be at least 0, got -1."),
    ],
)
def test_commands_that_cannot_be_meant_start_nothing(
    tmp_path, monkeypatch, capsys, text, words, error
):
    code, started = run(tmp_path, monkeypatch, text, *words)
    assert (code, started) == (2, [])
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [SCRIPT, "from fit import train\n", "train = print\n", "def train(job, **k): pass\n"],
    ids=range(4),
)
def test_ranks_are_started_as_launch_does(tmp_path, monkeypatch, text):
    words = ["--set", "lr=0.1,0.2", "--concurrent", "3", "-n", "4", "--trials", "2"]
    code, (args,) = run(tmp_path, monkeypatch, text, *words)
    module, script, task = args.module
    assert (code, args.ranks, module, script) == (
        0,
        4,
        "jaxcross.sweeps.sweep_rank",
        str(tmp_path / "train.py"),
    )
    assert json.loads(task) == {
        "grid": {"lr": [0.1, 0.2]},
        "folder": "sweep",
        "metric": "accuracy",
        "mode": "min",
        "concurrent": 3,
        "trials": 2,
        "seed": 0,
        "prune": None,
    }


def test_command_does_not_guess_what_is_better(tmp_path, capsys):
    """If it guessed, it might maximize an error."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(SystemExit) as ended:
        cli.main(["sweep", str(tmp_path / "train.py"), "--set", "lr=0.1,0.2", "--metric", "error"])
    assert ended.value.code == 2
    assert "the following arguments are required: --mode" in capsys.readouterr().err
