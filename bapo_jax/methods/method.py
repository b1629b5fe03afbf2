"""A method: four choices, as overrides of config fields."""

from __future__ import annotations

from typing import Any, NamedTuple

Fields = dict[str, Any]  # dotted config field -> value


class Method(NamedTuple):
    """A row: overrides of config fields, by choice."""

    summary: str
    source: str
    prompts: Fields = {}  # which prompts
    schedule: Fields = {}  # which policy answers
    batch: Fields = {}  # what is trained on
    learning: Fields = {}  # how it learns
    # Name of a file in configs/ -> what the method's authors changed for that task.
    of_task: dict[str, Fields] = {}

    @property
    def fields(self) -> Fields:
        """All overrides, except those for one task."""
        return {**self.prompts, **self.schedule, **self.batch, **self.learning}

    def but(
        self, summary: str, source: str, *, of_task: dict[str, Fields] | None = None, **choices: Fields
    ) -> Method:
        """A copy of this row with changes to some fields."""
        changed = {choice: {**getattr(self, choice), **fields} for choice, fields in choices.items()}
        return self._replace(
            summary=summary, source=source, of_task=self.of_task if of_task is None else of_task, **changed
        )
