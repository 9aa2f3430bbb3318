"""Values that nobody can guess: those of facts, and what filler mentions in passing."""

from __future__ import annotations

import random
from collections.abc import Callable

Draw = Callable[[random.Random], str]


def digits(draw: random.Random) -> str:
    """Four digits: `4417`. What facts are: SmolLM2 takes over the kind of its last answers, so that kinds do not mix well."""
    return str(draw.randrange(1000, 10000))


def code(draw: random.Random) -> str:
    """Two letters and three digits: `KX-402`. In filler only: SmolLM2 loses a letter or a digit of every third one."""
    letters = "".join(draw.choice("ABCDEFGHJKLMNPQRSTVWXYZ") for _ in range(2))
    return f"{letters}-{draw.randrange(100, 1000)}"


def person(draw: random.Random) -> str:
    """First name and surname out of 70 each: `Nina Becker`. In filler only."""
    return f"{draw.choice(FIRST_NAMES)} {draw.choice(SURNAMES)}"


def amount(draw: random.Random) -> str:
    """Whole dollars: `$183`. In filler only: SmolLM2 rather says `$100` than copies one."""
    return f"${draw.randrange(20, 1000)}"


class Fresh:
    """Draws of one session: no name, word or number comes up twice, so that a right answer has one place to come from.

    Parts count one by one: after `Diana Galloway` no other Diana comes, whom SmolLM2 would mistake for her.
    """

    TRIES = 10_000

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._used: set[str] = set()

    def __call__(self, kind: Draw) -> str:
        """A value of `kind` of which this session has seen no part. Raises ValueError where none seems to be left."""
        for _ in range(self.TRIES):
            value = kind(self._draw)
            parts = set(value.replace("-", " ").split())
            if not parts & self._used:
                self._used |= parts
                return value
        raise ValueError(f"the session is too large: no fresh {kind.__name__} is left; make fewer or shorter records")


FIRST_NAMES = (
    *("Maria", "Elena", "Tom", "Anna", "Peter", "Julia", "Omar", "Nina", "Victor", "Clara", "Hugo", "Ruth", "Simon"),
    *("Alice", "Boris", "Diana", "Felix", "Greta", "Ivan", "Karen", "Laura", "Martin", "Oscar", "Paula", "Robert"),
    *("Sofia", "Theo", "Vera", "Walter", "Yusuf", "Amelia", "Bruno", "Carmen", "David", "Edith", "Frank", "Gloria"),
    *("Henry", "Irene", "Jacob", "Klara", "Leon", "Monica", "Nathan", "Olga", "Philip", "Rachel", "Samuel", "Teresa"),
    *("Ursula", "Vincent", "Wendy", "Xavier", "Yvonne", "Zoe", "Adam", "Bella", "Conrad", "Dora", "Emil", "Fiona"),
    *("George", "Hannah", "Isaac", "Judith", "Kevin", "Lydia", "Marcus", "Nora", "Otto"),
)
SURNAMES = (
    *("Lopez", "Novak", "Becker", "Rossi", "Okafor", "Lindqvist", "Tanaka", "Moreau", "Petrov", "Hughes", "Castillo"),
    *("Brandt", "Keller", "Ferrara", "Nakamura", "Doyle", "Sharma", "Whitlock", "Farrow", "Jansen", "Abernathy"),
    *("Drummond", "Galloway", "Kingsley", "Merriman", "Pemberton", "Quintero", "Tremaine", "Underwood", "Blackwood"),
    *("Andersen", "Bishop", "Carver", "Delgado", "Ellsworth", "Fairbanks", "Graham", "Hoffman", "Iverson", "Jarrow"),
    *("Kowalski", "Lockhart", "Mitchell", "Northcott", "Ortega", "Pearson", "Ramirez", "Sanders", "Thornton"),
    *("Vargas", "Wagner", "Yamada", "Zimmerman", "Aldridge", "Barlow", "Chambers", "Dunmore", "Eastwick", "Foster"),
    *("Griffin", "Harper", "Ingram", "Jordan", "Knight", "Larsen", "Morgan", "Nilsson", "Osborne", "Preston"),
    "Reeves",
)
