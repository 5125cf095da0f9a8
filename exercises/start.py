"""A copy of the core with a fault in it, in a folder of your own.

    python exercises/start.py                   the exercises
    python exercises/start.py NAME [FOLDER]     the default folder is runs/exercises/NAME

If `python grpo.py` was run here, its cold start goes along as FOLDER/cold, unless the fault is in the cold
start: then experiments start from there and take half a minute. git has to be installed.
"""

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parent
NAMES = sorted(folder.parent.name for folder in HERE.glob("*/bug.patch"))
COLD = CORE / "runs" / "tiny-0" / "cold_start"
IN_COLD_START = {"sft.py", "tiny.py"}
NEED_MORE = "test_exercises.py", "test_tools.py"  # than the core
IGNORED = shutil.ignore_patterns("__pycache__", *NEED_MORE)


def chosen(name: str | None) -> str:
    """The name, if there is such an exercise; else the program ends with the list or the nearest name."""
    if not name:
        for each in NAMES:
            title = (HERE / each / "README.md").read_text().split("\n")[0].lstrip("# ")
            print(f"{each:18} {title}")
        raise SystemExit
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1, 0)[0]
        sys.exit(f"there is no exercise {name!r}; did you mean {near}? Without a name: the list")
    return name


def faulty_files(name: str) -> set[str]:
    lines = (HERE / name / "bug.patch").read_text().splitlines()
    return {line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")}


def copy_core(folder: Path, name: str | None) -> None:
    """The core, with its tests, in a new folder; with the fault of an exercise if one is named."""
    if name and not shutil.which("git"):
        sys.exit("git must be installed: it puts the fault in")
    folder.mkdir(parents=True)
    for file in ("*.py", "report_page.html", "README.md", "pyproject.toml", "requirements.txt"):
        for path in CORE.glob(file):
            shutil.copy(path, folder)
    for part in ("kernels", "tests"):
        shutil.copytree(CORE / part, folder / part, ignore=IGNORED)
    if name:  # git must not take the folder for a part of this repository, whose paths would be others
        alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        command = ["git", "apply", str(HERE / name / "bug.patch")]
        if subprocess.run(command, cwd=folder, env=alone).returncode:
            shutil.rmtree(folder)
            sys.exit(
                f"{name}: the fault does not apply to this core; take an unchanged copy of the repository"
            )


def main(name: str | None = None, folder: str | None = None) -> None:
    name = chosen(name)
    folder = Path(folder or CORE / "runs" / "exercises" / name)
    if folder.exists():
        sys.exit(f"{folder} exists already; give another folder, or delete it")
    copy_core(folder, name)
    shutil.copy(HERE / name / "README.md", folder / "exercise.md")
    shutil.copy(HERE / name / "curve.png", folder)
    if not faulty_files(name) & IN_COLD_START:
        if COLD.exists():
            shutil.copytree(COLD, folder / "cold")
        else:
            print("first its cold start, there, two minutes: python sft.py --preset tiny --seed 0 --out cold")
    print(f"{folder}: read exercise.md there; later python exercises/check.py {name} (--hint 1, --explain)")


if __name__ == "__main__":
    main(*sys.argv[1:3])
