"""What a check looked at: the evidence that it asked for, so that `--why S21` can say what it saw
and at which lines.

A check asks the Evidence for events (`e.of(Step)`), for facts that watchers noted
(`e.habits["S21"]`) and for attributes. `Looked` stands in place of the Evidence, passes each
question on and keeps a line about the answer. A finding takes its place from there as well, where
its check names none: the line of the last fact that was noted, or else of the last events that it
asked for.

Footgun: a check that asks for nothing here (it looks at modules alone) has no line to name, and
then says so.
"""

import functools
from collections import Counter
from typing import Any

from loopdoctor.evidence import Event, Evidence
from loopdoctor.places import Place, spell

# asked for by nearly all checks
QUIET = {"shown", "rounds", "faults", "declared", "stepped", "tree", "opaque"}
LINES, LETTERS = 3, 160  # places of one kind of event; length of a value


class Written:
    """What is written of the events and places of one Evidence, once for all checks that ask for
    them.
    """

    def __init__(self):
        self.spell = functools.cache(spell)
        # name, first, last, number of events -> text and places
        self.events: dict[tuple, tuple[str, list[Place]]] = {}


class Looked:
    """An Evidence that keeps what was asked of it."""

    def __init__(self, e: Evidence, written: Written):
        self._e, self._written = e, written
        self._said: dict[str, str] = {}  # question -> answer, in the order they were asked
        # where the facts were noted that were asked for and are there
        self._facts: list[Place] = []
        self._events: list[Place] = []  # where the events happened that were asked for last

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._e, name)
        if not callable(value) and name not in QUIET and name != "habits":
            self._said[name] = _short(value)
        return value

    @property
    def habits(self) -> "Habits":
        return Habits(self)

    def of(self, kind: type[Event], **where) -> list[Event]:
        return self._kept(kind, self._e.of(kind, **where))

    def every(self, kind: type[Event]) -> list[Event]:
        return self._kept(kind, self._e.every(kind))

    def by_round(self, kind: type[Event]) -> dict[int, list[Event]]:
        self._kept(kind, self._e.of(kind))
        return self._e.by_round(kind)

    @property
    def forwards(self) -> list[Event]:
        return self._kept("training forwards", self._e.forwards)

    def places(self) -> list[Place]:
        """Return the lines that a finding of this check may name, the surest first."""
        return list(dict.fromkeys(self._facts or self._events))

    def lines(self) -> list[str]:
        """Write what was asked for and what was there."""
        return [f"{question}: {answer}" for question, answer in self._said.items()]

    def _kept(self, kind: type[Event] | str, events: list[Event]) -> list[Event]:
        name = kind if isinstance(kind, str) else f"{kind.__name__} events"
        key = name, id(events[0]) if events else 0, id(events[-1]) if events else 0, len(events)
        if key not in self._written.events:
            self._written.events[key] = self._summary(events)
        self._said[name], places = self._written.events[key]
        if places:
            self._events = places
        return events

    def _summary(self, events: list[Event]) -> tuple[str, list[Place]]:
        counts = Counter(event.place for event in events if event.place is not None)
        places = [place for place, _ in counts.most_common(LINES)]
        rounds = sorted({event.round + 1 for event in events})
        when = f" in steps {rounds[0]} to {rounds[-1]}" if rounds else ""
        return f"{len(events)}{when}" + "".join(
            f"\n    at {self._written.spell(place)}" for place in places
        ), places


class Habits:
    """The facts that watchers noted, by key."""

    def __init__(self, looked: Looked):
        self._looked = looked

    def __getitem__(self, key: str) -> dict[int, Any]:
        facts = self._looked._e.habits[key]
        places = self._looked._e.places.get(key, {})
        there = list(dict.fromkeys(places[turn] for turn in facts if turn in places))
        at = "".join(f"\n    at {self._looked._written.spell(place)}" for place in there[:LINES])
        self._looked._said[f"noted as {key!r}"] = (
            f"in {len(facts)} steps" if facts else "nothing"
        ) + at
        if there:
            self._looked._facts = there
        return facts

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] or default


def _short(value: Any) -> str:
    """Return a value in one line; of what holds tensors or modules only its kind and size."""
    if isinstance(value, (bool, int, float, str, type(None))):
        text = repr(value)
    elif isinstance(value, (list, tuple, set, dict)):
        plain = all(isinstance(x, (int, float, str, bool)) for x in value)
        text = repr(value) if plain and len(value) <= 4 else f"{len(value)} entries"
    else:
        text = type(value).__name__
    return text if len(text) <= LETTERS else text[:LETTERS] + "..."
