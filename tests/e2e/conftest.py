"""Fixtures of the end-to-end tests: whole systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.system import System

MakeSystem = Callable[..., System]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs the whole system."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def make_system(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeSystem]:
    """Make systems that are stopped at the end of the run."""
    made: list[System] = []

    def make(**settings: str) -> System:
        made.append(System(tmp_path_factory.mktemp("system"), models, settings))
        return made[-1]

    yield make
    for system in made:
        system.__exit__(None, None, None)


@pytest.fixture(scope="session")
def system(make_system: MakeSystem) -> System:
    """One of each service with the real model. Tests leave it whole: whom they kill they start again."""
    whole = make_system()
    whole.start()
    return whole
