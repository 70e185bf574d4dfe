"""Operating errors that stay inside a process. What crosses the wire is proto.errors.WireError."""

from __future__ import annotations


class RoostError(Exception):
    """Base of everything here."""


class StartRefused(RoostError):
    """With these settings and files no start can succeed, so it is not tried again."""


class SettingsError(StartRefused):
    """A setting is malformed or unknown."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable, self.problem = variable, problem


class SequenceConflict(RoostError):
    """An append to a log lost the race: someone else wrote after the record that the caller had seen last."""

    def __init__(self, subject: str, expected: int) -> None:
        super().__init__(f"{subject}: record {expected} is not the last one any more")
        self.subject, self.expected = subject, expected


class ModelNotFound(StartRefused):
    """No model directory, checkpoint or package is known by this name."""

    def __init__(self, name: str, looked: tuple[str, ...]) -> None:
        super().__init__(f"no model {name!r}; looked at {', '.join(looked) or 'nothing'}")
        self.name, self.looked = name, looked
