"""When a session is looked at for an event: at lengths that follow from its own text and the settings.

How a scheduler cuts a prompt into chunks depends on who else runs, and a retracted request is computed again from
wherever its KV is still found. Neither may change what a session keeps, so events do not happen wherever a forward
happens to end. While a prompt is computed, the scheduler is made to stop at the moments given here (see
`intentkv.engine.admission`); while an answer is generated, every length passes by.
"""

from collections.abc import Callable

from intentkv.observe.spans import GLIMPSE_TOKENS


def glimpse(chunk: int | None) -> int:
    """How many tokens stand in for a query that is not computed yet."""
    return GLIMPSE_TOKENS if chunk is None else min(GLIMPSE_TOKENS, chunk)


def while_computing(start: int, goal: int, chunk: int | None, due: Callable[[int], bool]) -> int:
    """The next length at which a prefill of `[start, goal)` stops for an event; `goal` at the latest.

    That is a multiple of the chunk size, counted from the text's first token so that it does not move when a prompt finds
    a little more or less of itself; one with a whole glimpse of new tokens before it; and the first at which an event is
    due, for which a chunk is worth cutting. What fits one chunk is not cut.

    Args:
        start: tokens found in the cache, or the length of the last event.
        goal: tokens to be computed up to.
        chunk: chunk size of the server, in tokens; None computes all at once.
        due: whether an event at a length would drop anything, by lengths alone.
    """
    if chunk is None or goal - start <= chunk:
        return goal
    first = -(-(start + glimpse(chunk)) // chunk) * chunk
    return next((length for length in range(first, goal, chunk) if due(length)), goal)


def while_generating(length: int, prompt: int, trigger: int) -> int:
    """The next length, beyond `length`, at which a generation is looked at: every `trigger` tokens behind the prompt."""
    return prompt + ((length - prompt) // trigger + 1) * trigger
