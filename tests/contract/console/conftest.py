"""Homes in which `roost up` really runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.console.running import Home


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """One that runs in the background; tests leave it with one replica of each service, all ready."""
    home = Home(tmp_path_factory.mktemp("running"))
    started = home.up()
    assert started.returncode == 0, started.stdout + started.stderr
    yield home
    home.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """One in which nothing runs yet."""
    made = Home(tmp_path)
    yield made
    made.close()
