"""Regenerate the generated parts of the docs from code; with --check, fail if one is stale.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->` in a Markdown file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proto.errors import ErrorCode
from proto.subjects import BUCKETS, SUBJECTS
from shared.settings import RoostSettings, variables_of
from shared.streams import STREAMS

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (?P<name>[a-z_]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def subjects() -> str:
    rows = [
        (
            f"`{subject.template}`",
            subject.plane.value,
            subject.says,
            subject.hears,
            f"`{subject.message.__name__}`" + (f" → `{subject.reply.__name__}`" if subject.reply else ""),
            subject.about,
        )
        for subject in SUBJECTS
    ]
    return table(("subject", "plane", "says", "hears", "message", "about"), rows)


def streams() -> str:
    rows = [
        (
            f"`{stream.name}`",
            f"`{stream.subject.wildcard}`",
            "memory" if stream.in_memory else "disk, fsynced",
            "work queue" if stream.work else "log",
            f"{stream.max_age_s:g} s" if stream.max_age_s else "for ever",
            f"{stream.max_bytes // 2**20} MiB",
            "refuses" if stream.refuses_when_full else "forgets the oldest",
        )
        for stream in STREAMS
    ]
    return table(("stream", "subjects", "storage", "kind", "keeps", "bytes", "when full"), rows)


def buckets() -> str:
    rows = [
        (f"`{bucket.name}`", bucket.says, "memory" if bucket.in_memory else "disk", f"{bucket.ttl_s:g} s", bucket.about)
        for bucket in BUCKETS
    ]
    return table(("bucket", "used by", "storage", "forgets after", "holds"), rows)


def errors() -> str:
    source = (ROOT / "proto" / "errors.py").read_text()
    notes = dict(re.findall(r'^    [A-Z_]+ = "([a-z_]+)"  # (.+)$', source, re.MULTILINE))
    return table(("code", "meaning"), [(f"`{code.value}`", notes.get(code.value, "")) for code in ErrorCode])


def settings() -> str:
    rows = []
    for kind in settings_classes():
        # A field is shown where it is declared: an inherited one is its base's.
        for name in vars(kind).get("__annotations__", {}):
            if name not in kind.model_fields:
                continue
            field = kind.model_fields[name]
            variable = min(variables_of(kind) & alias_names(kind, name), key=lambda text: not text.startswith("ROOST_"))
            default = (
                "" if field.is_required() else str(field.default_factory() if field.default_factory else field.default)
            )  # type: ignore[call-arg]
            rows.append((f"`{variable}`", readers_of(kind), f"`{default}`" if default else "", comment_of(kind, name)))
    return table(("variable", "read by", "default", "meaning"), rows)


def readers_of(kind: type[RoostSettings]) -> str:
    """Names of the services whose settings are of this kind."""
    if kind is RoostSettings:
        return "all"
    services = (one for one in settings_classes() if one.__module__.startswith("services."))
    readers = sorted(one.__name__ for one in services if issubclass(one, kind))
    return ", ".join(name.removesuffix("Settings").lower() for name in readers)


def alias_names(kind: type[RoostSettings], name: str) -> frozenset[str]:
    alias = kind.model_fields[name].validation_alias
    choices = getattr(alias, "choices", None)
    return frozenset(str(choice) for choice in choices) if choices else frozenset({f"ROOST_{name.upper()}"})


def comment_of(kind: type[RoostSettings], name: str) -> str:
    """The comment lines right above the field in its source."""
    import inspect

    comment: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif re.match(rf"{name}\s*:", stripped):
            return " ".join(comment).replace("|", "\\|")
        else:
            comment = []
    return ""


def settings_classes() -> list[type[RoostSettings]]:
    import importlib

    found: list[type[RoostSettings]] = [RoostSettings]
    for path in sorted((ROOT / "services").glob("*/settings.py")) + sorted((ROOT / "shared").glob("*/settings.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found.extend(
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, RoostSettings) and value.__module__ == module.__name__
        )
    return found


def tree() -> str:
    """Every folder and file of the source with the first line of its docstring."""
    lines = []
    for package in ("proto", "shared", "services"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name in ("__init__.py", "__main__.py"):
                continue
            match = re.match(r'(?:#.*\n)*"""(.+?)(?:"""|\n)', path.read_text())
            lines.append(f"{path.relative_to(ROOT).as_posix():<44} {match.group(1).strip() if match else ''}")
    return "```\n" + "\n".join(lines) + "\n```\n"


PARTS: dict[str, Callable[[], str]] = {
    "subjects": subjects,
    "streams": streams,
    "buckets": buckets,
    "errors": errors,
    "settings": settings,
    "tree": tree,
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    stale = []
    for relative in listed.stdout.split():
        path = ROOT / relative
        old = path.read_text()
        new = PART.sub(lambda found: f"{found.group(1)}{PARTS[found.group('name')]()}{found.group(3)}", old)
        if new != old:
            stale.append(relative)
            if not check:
                path.write_text(new)
    for relative in stale:
        print(f"{relative}: {'is stale; run scripts/docs.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
