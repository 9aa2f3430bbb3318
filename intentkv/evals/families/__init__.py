"""The worlds that agent sessions are made in, by name."""

from intentkv.evals.families.code_review import CODE_REVIEW
from intentkv.evals.families.device_events import DEVICE_EVENTS
from intentkv.evals.families.night_porter import NIGHT_PORTER
from intentkv.evals.families.operations_log import OPERATIONS_LOG
from intentkv.evals.families.order_desk import ORDER_DESK
from intentkv.evals.families.support_desk import SUPPORT_DESK
from intentkv.evals.families.travel import TRAVEL

SHORT_FACTS = {family.name: family for family in (ORDER_DESK, OPERATIONS_LOG, TRAVEL, CODE_REVIEW)}
"""A fact is a sentence of its own, shorter than the filler around it. What scripts play where nothing else is said."""

LONG_FACTS = {family.name: family for family in (NIGHT_PORTER, DEVICE_EVENTS)}
"""A fact is a few words of a long sentence or line; the filler is short."""

HELD_OUT = {family.name: family for family in (SUPPORT_DESK,)}
"""Nothing was chosen on them. A fact is a sentence about as long as the filler's."""

FAMILIES = SHORT_FACTS | LONG_FACTS | HELD_OUT
