"""The law of the tree, as tests: who may import what, what `Pure:` means, how large things may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("services", "shared", "proto")

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

# One owner per heavy dependency: module -> files (or folders) that may import it.
OWNERS = {
    "nats": ("shared/bus.py", "shared/bus_streams.py", "shared/bus_work.py"),
    "torch": ("shared/engine/",),
    "transformers": ("shared/engine/", "services/loop/tool_parsing.py"),
    "tokenizers": ("shared/tokenizer.py", "shared/engine/"),
    "lmdb": ("services/kvstore/", "shared/kv_reader.py", "shared/kv_environment.py"),
    "aiohttp.web": ("services/gateway/",),
    "usearch": ("services/retrieval/",),
    "sqlite3": ("services/retrieval/",),
    "sandlock": ("services/tools/",),
}

# A pure module decides; it neither waits nor looks at the world. `now` comes in with the event.
IMPURE = {"asyncio", "time", "random", "os", "torch", "nats", "lmdb", "aiohttp", "socket", "subprocess", "threading"}


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(), ids=name)
def test_heavy_dependencies_have_one_owner(path: Path) -> None:
    """torch in the engine, nats in the bus, lmdb in the tiers: a service that grows a second owner shows here."""
    for imported in imports_of(tree_of(path)):
        for module, owners in OWNERS.items():
            if imported == module or imported.startswith(f"{module}."):
                assert name(path).startswith(owners), f"{name(path)} imports {imported}; its owners are {owners}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_pure_modules_are_pure(path: Path) -> None:
    """A docstring that begins with `Pure:` is a proof, not a wish."""
    tree = tree_of(path)
    if not (ast.get_docstring(tree) or "").startswith("Pure:"):
        return
    impure = {imported for imported in imports_of(tree) if imported.split(".")[0] in IMPURE}
    assert not impure, f"{name(path)} says it is pure and imports {sorted(impure)}"
    waits = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]
    assert not waits, f"{name(path)} says it is pure and waits in lines {waits}"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_files_and_functions_fit_the_eye(path: Path) -> None:
    """Long files hide structure; the bound is where ours must be split."""
    lines = path.read_text().count("\n")
    assert lines <= FILE_LINES_MAX, f"{name(path)} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{name(path)}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", sources(), ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    """The first line of each file is its place in the architecture."""
    assert ast.get_docstring(tree_of(path)), f"{name(path)} has no docstring"


def test_no_silent_and_few_broad_excepts() -> None:
    """`except: pass` hides bugs. One broad except ends a process honestly; the bus hands a handler's bug to it."""
    broad = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                is_silent = all(isinstance(line, ast.Pass) for line in node.body)
                assert not is_silent, f"{name(path)}:{node.lineno} swallows an exception"
                if node.type is None or (
                    isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
                ):
                    broad.append(name(path))
    assert len(broad) == len(set(broad)), broad
    assert set(broad) <= {"shared/service.py", "shared/bus.py", "shared/engine/thread.py"}, broad


def test_our_import_names_are_ours() -> None:
    """proto-plus, for one, installs a top-level `proto` too; then ours would be broken by an unrelated install."""
    owners = packages_distributions()
    for package in PACKAGES:
        assert set(owners.get(package, [])) <= {"roost"}, (package, owners.get(package))
