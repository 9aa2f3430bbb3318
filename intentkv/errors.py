"""Errors that a user of intentkv can cause and can mend."""

from collections.abc import Sequence


class SettingsError(ValueError):
    """Settings that cannot be served.

    Attributes:
        reasons: one sentence for each bad value, so that a user mends all of them in one go. `str()` gives one a line.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons: tuple[str, ...] = tuple(reasons)
        super().__init__("\n".join(self.reasons))

    def __reduce__(self) -> tuple[type["SettingsError"], tuple[tuple[str, ...]]]:
        # The default would rebuild from the joined text; the server and its scheduler are different processes.
        return type(self), (self.reasons,)
