"""What all machines of one run have done together."""

from collections import Counter

TOTALS: Counter[str] = Counter()
