"""The tree of errors. An error is raised where its cause is known and carries what a person needs to act.

`BadInput` and its children are the user's to fix: the command line prints them as one line and exits with 2.
`InfrastructureError` is what the policy did not cause (DESIGN decision 4); it is repaired or voids a group, never scored.
"""

from __future__ import annotations


class EtudeError(Exception):
    """Root of every error that this package raises on purpose."""


class BadInput(EtudeError):
    """Input that cannot be used: names the file (or place), the field, the value found and what was expected."""

    def __init__(self, place: str, field: str, value: object, expected: str) -> None:
        self.place, self.field, self.value, self.expected = place, field, value, expected
        super().__init__(place, field, value, expected)

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= 200 else shown[:197] + "..."
        return f"{self.place}: {self.field} is {shown}; expected {self.expected}"


class ConfigError(BadInput):
    """A config file or override that does not fit the config tree."""


class CheckpointError(BadInput):
    """A checkpoint folder that is missing, incomplete or corrupt."""


class TaskError(BadInput):
    """A task folder that does not hold what a task needs."""


class MissingCapability(BadInput):
    """The machine lacks something (namespaces, a compiler, a free port, disk space); `expected` says what to enable."""


class Unsupported(EtudeError):
    """A capability that this backend or engine names but does not have."""


class PolicyError(EtudeError):
    """Something that the policy caused, such as a malformed tool call; it is scored."""


class InfrastructureError(EtudeError):
    """Something that the policy cannot cause; it is repaired at the smallest scope, counted and shown."""


class PodLost(InfrastructureError):
    """The pod's process or channel is gone."""


class EngineError(InfrastructureError):
    """The inference engine refused or failed a call."""


class PrefixMismatch(EngineError):
    """The engine's copy of a session is not the client's: the client opens a new session with all ids."""


class IntegrityError(EtudeError):
    """An invariant does not hold (a digest, conservation of groups, a version chain): the run stops."""
