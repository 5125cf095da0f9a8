"""The trackers get what metrics.jsonl gets: the same names, the same steps, numbers only, one run a run.

tensorboard's files are read back where it is installed; wandb and trackio are played by a module that records
how it is called (both were tried by hand as well, wandb offline).
"""

import importlib.machinery
import json
import sys
import types

import pytest

import tracker
from run import Log, write_rows

ROWS = [
    {"step": 0, "eval/correct": 0.25},
    {"step": 1, "reward/mean": -0.5, "note": "text"},
    {"step": 2, "reward/mean": 0, "policy/entropy": 0.1},
]


@pytest.fixture(params=["wandb", "trackio"])
def fake(request, monkeypatch):
    """(name, the calls that a module of this name was given)."""
    calls = []
    module = types.ModuleType(request.param)
    module.Settings = lambda **given: given
    module.init = lambda **given: calls.append(given)
    module.log = lambda found, step: calls.append((step, found))
    module.finish = lambda: None
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param, calls


def test_rows_arrive_by_their_names_and_steps_and_are_numbers_only(fake, tmp_path):
    """A tracker that counts calls itself is off by every evaluation; one that is sent text sends it on to a
    server."""
    name, calls = fake
    log = Log(tmp_path, -1, name, {"seed": 3})
    for row in ROWS:
        log.write(row)
    assert calls[0]["config"] == {"seed": 3} and calls[0]["name"].startswith(f"{tmp_path.name}-")
    expected = [(0, {"eval/correct": 0.25}), (1, {"reward/mean": -0.5})]
    assert calls[1:] == [*expected, (2, {"reward/mean": 0.0, "policy/entropy": 0.1})]
    if name == "wandb":  # else it copies the terminal, with what the model wrote
        assert calls[0]["settings"] == {"console": "off"}


def test_a_resumed_run_goes_on_in_the_same_run_of_the_tracker(fake, tmp_path):
    """A second run in the tracker for each restart cuts the curve into pieces; and a new run in a folder of
    the same name must not be drawn into the old one."""
    name, calls = fake
    (tmp_path / "one").mkdir()
    Log(tmp_path / "one", -1, name, {}).write(ROWS[0])
    log = Log(tmp_path / "one", 0, name, {})
    log.write(ROWS[1])
    log.write(ROWS[1] | {"eval/correct": 0.5})  # its evaluation came later: only that is new
    begun = [call for call in calls if isinstance(call, dict)]
    assert begun[0] == begun[1] and begun[0]["resume"] == "allow"
    sent = [call for call in calls if isinstance(call, tuple)]
    assert sent == [(0, {"eval/correct": 0.25}), (1, {"reward/mean": -0.5}), (1, {"eval/correct": 0.5})]
    (tmp_path / "two" / "one").mkdir(parents=True)
    Log(tmp_path / "two" / "one", -1, name, {})
    assert calls[-1]["name"] != begun[0]["name"]


def test_a_tracker_that_comes_later_gets_the_rows_before(fake, tmp_path):
    """Half a curve is what it would have."""
    name, calls = fake
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Log(tmp_path, 1, name, {})  # step 2 will be done again
    assert calls[1:] == [(0, {"eval/correct": 0.25}), (1, {"reward/mean": -0.5})]


def test_a_tracker_that_does_not_start_ends_with_a_sentence(fake, tmp_path, monkeypatch, capsys):
    """No login, no network: a trace through a library that one did not write helps nobody. Put right, it gets
    the rows before, as one that comes later does."""

    def refuse(**_):
        raise ConnectionError("no route to host")

    write_rows(tmp_path / "metrics.jsonl", ROWS)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys.modules[fake[0]], "init", refuse)
        Log(tmp_path, 1, fake[0], {})
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and "no route to host" in said and fake[0] in said
    Log(tmp_path, 1, fake[0], {})
    assert fake[1][1:] == [(0, {"eval/correct": 0.25}), (1, {"reward/mean": -0.5})]


def test_what_is_wrong_with_a_tracker_is_said_at_the_start(monkeypatch):
    """After the cold start it is too late; and wandb leaves a folder "wandb", which Python takes for a
    package if the real one is missing."""
    assert tracker.tracker_fault("") == ""
    assert all(name in tracker.tracker_fault("wandbb") for name in ("wandbb", *tracker.TRACKERS))
    for found in (None, importlib.machinery.ModuleSpec("wandb", None)):
        monkeypatch.setattr(tracker, "find_spec", lambda name, found=found: found)
        assert tracker.tracker_fault("wandb") == "--tracker wandb is not installed; pip install wandb"


def test_tensorboard_drops_the_steps_that_come_again(tmp_path):
    """Two values at one step draw a zigzag."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path, -1, "tensorboard", {})
    for row in ROWS:
        log.write(row)
    log.close()
    log = Log(tmp_path, 1, "tensorboard", {})  # killed after step 2, the last checkpoint is of step 1
    log.write({"step": 2, "reward/mean": 0.75})
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    curves = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert curves.pop("reward/mean") == [(1, -0.5), (2, 0.75)]
    assert {tag: curve for tag, curve in curves.items() if curve} == {"eval/correct": [(0, 0.25)]}
