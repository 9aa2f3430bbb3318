"""What all machines of one run have done together."""

from collections import Counter

TOTALS: Counter[str] = Counter()


def told() -> str:
    """The totals in one line."""
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in TOTALS.items())
