"""The worlds that agent sessions are made in, by name."""

from intentkv.evals.families.code_review import CODE_REVIEW
from intentkv.evals.families.operations_log import OPERATIONS_LOG
from intentkv.evals.families.order_desk import ORDER_DESK
from intentkv.evals.families.travel import TRAVEL

FAMILIES = {family.name: family for family in (ORDER_DESK, OPERATIONS_LOG, TRAVEL, CODE_REVIEW)}
