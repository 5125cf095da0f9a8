"""Says whether an exercise is repaired, by the test that catches the fault and the rest of its file.

    python exercises/check.py NAME [FOLDER]     (default runs/exercises/NAME)
    python exercises/check.py NAME --hint 2     the second of three hints
    python exercises/check.py NAME --explain    what was wrong, why it hides, where it happened

The tests are those of this repository, whatever stands in the folder.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from start import CORE, HERE, IGNORED, chosen


def failing(folder: Path, test: str) -> list[str]:
    """The tests of a file that fail in the folder; ends the program if they cannot be run there."""
    options = ["--tb=short", "--color=no", "-rfE", "-p", "no:cacheprovider", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, test.split("::")[0]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode not in (0, 1) or bool(found) != bool(done.returncode):
        sys.exit(f"the tests cannot be run in {folder}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?")
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3))
    parser.add_argument("--explain", action="store_true")
    args = parser.parse_args()
    name = chosen(args.name)
    if args.hint:
        print(re.split(r"^\d\. ", (HERE / name / "hints.md").read_text(), flags=re.M)[args.hint].strip())
        return 0
    if args.explain:
        print((HERE / "solutions" / f"{name}.md").read_text())
        return 0
    folder = Path(args.folder or CORE / "runs" / "exercises" / name)
    if not (folder / "grpo.py").exists():
        sys.exit(f"{folder} holds no copy of the core; python exercises/start.py {name} makes one")
    shutil.copytree(CORE / "tests", folder / "tests", ignore=IGNORED, dirs_exist_ok=True)
    test = (HERE / name / "test").read_text().strip()
    broken = failing(folder, test)
    if test in broken:
        print(f"{name}: not repaired yet, the test that catches it fails")
    elif broken:
        print(f"{name}: the test that catches it passes, but now these fail:", *broken, sep="\n")
    else:
        print(f"{name}: repaired")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
