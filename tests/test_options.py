"""Options are the fields of a dataclass; what is wrong with one is said in one sentence."""

import dataclasses

import pytest

from options import parse_args


@dataclasses.dataclass
class Config:
    """A script's settings."""

    model: str  # hub name or folder
    clip_low: float = 0.2  # 100 % of a ratio
    steps: int = 10  # optimizer steps
    tool: bool = True  # with the tool
    limit: int | None = None  # problems; none = all


PRESETS = {"small": {"steps": 3, "tool": False}, "large": {"model": "big"}}


@pytest.mark.parametrize(
    "line, fields",
    [
        ("--model m", {}),
        ("--model=m --clip-low 0.3 --steps 4", {"clip_low": 0.3, "steps": 4}),
        ("--model m --clip_low=-1e-3 --no-tool --limit 5", {"clip_low": -1e-3, "tool": False, "limit": 5}),
        ("--model m --limit 5 --limit none", {}),
        ("--model m --preset small", {"steps": 3, "tool": False}),
        ("--steps 7 --model m --preset small --tool", {"steps": 7}),
        ("--preset large", {"model": "big"}),
    ],
)
def test_options_outrank_the_preset_and_the_preset_the_default(line, fields):
    assert parse_args(Config, line.split(), PRESETS) == Config(**{"model": "m", **fields})


@pytest.mark.parametrize(
    "line, words",
    [
        ("--model m --clip-lo 3", "unknown option '--clip-lo'; did you mean --clip-low?"),
        ("--model m --step 3", "unknown option '--step'; did you mean --steps?"),
        ("--model m zzz", "unknown option 'zzz'; see --help"),
        ("--model m --steps 1.5", "'1.5' is not int"),
        ("--model m --limit x", "'x' is not int | None"),
        ("--model m --steps none", "'none' is not int"),
        ("--model", "expected one argument"),
        ("--steps 3", "--model is required: hub name or folder"),
        ("--model m --preset smal", "there is no preset 'smal'; choose from small, large"),
    ],
)
def test_a_bad_option_ends_with_one_sentence_and_code_2(line, words, capsys):
    """argparse prefers to abbreviate in silence: --step would set --steps, --clip-lo one of two clips."""
    with pytest.raises(SystemExit) as end:
        parse_args(Config, line.split(), PRESETS)
    message = capsys.readouterr().err
    assert end.value.code == 2 and words in message and message.count("\n") == 1


def test_help_is_made_of_the_comments(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(Config, ["--help"], PRESETS)
    text = capsys.readouterr().out
    assert end.value.code == 0 and "100 % of a ratio [default 0.2]" in text
    assert "hub name or folder [required]" in text and "small, large" in text
