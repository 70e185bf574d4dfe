"""The last lines of scripts/test: what each stage tested, what failed, what was skipped and why, and the sum."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """Outcome of one stage. Skips are (name, reason)."""

    name: str
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    seconds: int = 0

    @property
    def subjects(self) -> str:
        """What was tested, by folder or file, with counts."""
        counts: dict[str, int] = {}
        for name in (*self.passed, *self.failed):
            module = name.partition("::")[0].removeprefix("tests.")
            parts = module.split(".")
            subject = parts[1] if parts[0] in ("unit", "contract") and len(parts) > 2 else parts[-1]
            counts[subject.removeprefix("test_")] = counts.get(subject.removeprefix("test_"), 0) + 1
        return ", ".join(subject if count == 1 else f"{subject} {count}" for subject, count in counts.items())


def read_junit(stage: Stage, path: Path) -> None:
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname') or ''}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            stage.failed.append(name)
        elif skip is not None:
            stage.skipped.append((name, skip.get("message") or "no reason given"))
        else:
            stage.passed.append(name)


def read_tally(stage: Stage, path: Path) -> None:
    for line in path.read_text().splitlines():
        outcome, name, *reason = line.split(" ", 2)
        if outcome == "skipped":
            stage.skipped.append((name, " ".join(reason)))
        else:
            (stage.passed if outcome == "passed" else stage.failed).append(name)


def read_stage(folder: Path, name: str) -> Stage:
    stage = Stage(name)
    stage.seconds = int((folder / f"{name}.ended").read_text()) - int((folder / f"{name}.began").read_text())
    if name == "check":
        tally = folder / "check.tally"
        if tally.exists():
            read_tally(stage, tally)
        else:
            stage.failed.append("check: it did not run")
        return stage
    status, said = (folder / f"{name}.status").read_text().split(" ", 1)
    if status == "missing":
        stage.skipped.append((name, said.strip()))
        return stage
    junit = folder / f"{name}.xml"
    if junit.exists():
        read_junit(stage, junit)
    if int(said) != 0 and not stage.failed:
        stage.failed.append(f"{name}: pytest ended with {said.strip()}")
    return stage


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    stages = [read_stage(folder, name) for name in names]
    print("== summary")
    for stage in stages:
        counts = f"{len(stage.passed)} passed, {len(stage.failed)} failed, {len(stage.skipped)} skipped"
        print(f"{stage.name}: {counts}, {stage.seconds} s ({stage.subjects or 'nothing'})")
    for stage in stages:
        for name, reason in stage.skipped:
            print(f"skipped {name}: {reason}")
    for stage in stages:
        for name in stage.failed:
            print(f"FAILED {name}")
    passed, failed, skipped = (
        sum(len(getattr(stage, kind)) for stage in stages) for kind in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
