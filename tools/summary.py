#!/usr/bin/env python3
"""Reads meson's testlog.json and counts single tests: those that a cmocka program names, else the
program as one. Lists what was skipped and why; the last line is `N passed, N failed, N skipped`.
Exits 1 when a test failed or none ran."""
import collections
import json
import re
import sys

CASE = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] (\S+)$")


def cases(output):
    """(result, name, reason) of each cmocka test. A test says `skipped: reason` before it skips."""
    reason = ""
    for line in output.splitlines():
        found = CASE.match(line)
        if line.startswith("skipped: "):
            reason = line[len("skipped: "):]
        elif found:
            yield found.group(1), found.group(2), reason or "no reason given"
            reason = ""


def last_line(run):
    lines = (run.get("stdout", "") + run.get("stderr", "")).strip().splitlines()
    return lines[-1].removeprefix("skipped: ") if lines else "no reason given"


def main(path):
    counts = collections.Counter()
    skipped = collections.defaultdict(lambda: collections.defaultdict(list))
    with open(path, encoding="utf-8") as log:
        runs = [json.loads(line) for line in log]
    for run in runs:
        program = run["name"]
        found = list(cases(run.get("stdout", "")))
        good = run["result"] in ("OK", "EXPECTEDFAIL", "SKIP")
        if run["result"] == "SKIP" or not found:
            result = "SKIPPED" if run["result"] == "SKIP" else "OK" if good else "FAILED"
            found = [(result, program, last_line(run))]
        elif not good and all(result != "FAILED" for result, _, _ in found):
            found.append(("FAILED", program, "")) # crashed, timed out, or failed outside its tests
        for result, name, reason in found:
            counts[result] += 1
            if result == "SKIPPED":
                skipped[reason][program].append(name)
    for reason, programs in skipped.items():
        print(f"\nSkipped: {reason}")
        for program, names in programs.items():
            print(f"    {program}: " + ", ".join(dict.fromkeys(names)))
    print(f"\n{counts['OK']} passed, {counts['FAILED']} failed, {counts['SKIPPED']} skipped")
    sys.exit(counts["FAILED"] > 0 or counts["OK"] == 0)


if __name__ == "__main__":
    main(sys.argv[1])
