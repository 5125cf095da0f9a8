"""The math grader against itself: is every gold answer equal to itself, and which different ones are called
equal?

    python -W ignore bench/grader.py --data DIR     DIR: math500.jsonl, gsm8k_train.jsonl, aime2024.jsonl, ...
    ... --every 40        one pair in 40: some seconds in place of minutes
    ... --alone           math-verify alone, as it comes, on the same pairs

For each set: each gold stands in a box as the response (must be right); then each ordered pair of different
gold texts is graded, one as gold, the other as response. Pairs judged equal are printed: read them, each
must really be equal. No filter, except that pairs of two integers are compared by int() and counted apart.
"""

import argparse
import json
import logging
import sys
import time
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from math_verify import parse, verify

import math_equal
from reward import math_correct


def math_verify_alone(response: str, gold: str) -> bool:
    """What a grader that only calls math-verify says (no time limit: enough for gold answers)."""
    found = [parse(text, parsing_timeout=None) for text in (f"$\\boxed{{{gold}}}$", response)]
    return verify(*found, timeout_seconds=None)


def check(path: Path, every: int, correct) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [str(row["answer"]).rpartition("####")[2].strip() for row in rows]
    box = "So it is $\\boxed{{{}}}$.".format
    misses = [gold for gold in answers if not correct(box(gold), gold)]
    distinct = sorted(set(answers))
    print(f"\n{path.name}: {len(rows)} golds, {len(distinct)} different; not equal to themselves: {misses}")
    integers = {gold: int(gold) for gold in distinct if gold.lstrip("-").isdigit()}
    same = [(a, b) for a, b in permutations(integers, 2) if integers[a] == integers[b]]
    print(f"  {len(integers) * (len(integers) - 1)} ordered pairs of integers, equal: {same}")
    pairs = [p for p in permutations(distinct, 2) if not integers.keys() >= set(p)][::every]
    start, before, equal, slow = time.perf_counter(), math_equal.counts.copy(), [], 0.0
    for gold, other in pairs:
        began = time.perf_counter()
        equal += [(gold, other)] if correct(box(other), gold) else []
        slow = max(slow, time.perf_counter() - began)
    seconds = time.perf_counter() - start
    print(f"  {len(pairs)} ordered pairs with another kind of answer, {seconds:.0f} s, slowest {slow:.2f} s")
    print(f"  ended otherwise: {dict(math_equal.counts - before)}\n  judged equal: {len(equal)}")
    print(*(f"    {gold}    =    {other}" for gold, other in equal), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl files")
    parser.add_argument("--every", type=int, default=1, help="grade one pair in so many")
    parser.add_argument("--alone", action="store_true", help="grade by math-verify alone, for comparison")
    args = parser.parse_args()
    logging.disable()  # math-verify warns at each call that its own time limit is off
    if not (found := sorted(args.data.glob("*.jsonl"))):
        raise SystemExit(f"no .jsonl file in {args.data}; pass the folder of the data sets with --data")
    for path in found:
        check(path, args.every, math_verify_alone if args.alone else math_correct)
