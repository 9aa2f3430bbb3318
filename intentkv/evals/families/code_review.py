"""Code review: facts about modules among commit hashes, base64 and stack traces, which surprise a model and are no use."""

import base64
import random

from intentkv.evals.records import Family


def noise(draw: random.Random) -> str:
    """A line of a diff or a build that nobody asks about: a hash, base64, or a frame of a stack trace."""
    return draw.choice((_commit, _integrity, _frame, _address))(draw)


def _commit(draw: random.Random) -> str:
    return f"commit {draw.randbytes(20).hex()}"


def _integrity(draw: random.Random) -> str:
    return f"integrity sha256-{base64.b64encode(draw.randbytes(32)).decode()}"


def _frame(draw: random.Random) -> str:
    path = "/".join(draw.choice(_PATHS) for _ in range(2))
    return (
        f'  File "/srv/{draw.randbytes(4).hex()}/{path}.py", line {draw.randrange(10, 900)}, in {draw.choice(_CALLS)}'
    )


def _address(draw: random.Random) -> str:
    return f"  #{draw.randrange(30)} 0x{draw.randbytes(6).hex()} in {draw.choice(_CALLS)}+0x{draw.randrange(4096):x}"


_PATHS = ("core", "lib", "vendor", "handlers", "codec", "tasks", "schema", "internal")
_CALLS = ("_dispatch", "write_block", "poll_once", "decode_frame", "__exit__", "retry_call", "flush_all", "bind_args")

CODE_REVIEW = Family(
    name="code-review",
    system=(
        "You are the assistant of a code review. Answer each question from the reviews that the tool showed, in one "
        "short sentence, and copy names and codes exactly."
    ),
    tool="show_review",
    action="post_comment",
    style="list",
    noise=noise,
    noise_lines=5,
    titles=(
        "storage refactoring review",
        "payment gateway review",
        "calendar widget review",
        "release pipeline review",
        "translation update review",
        "accessibility audit review",
        "mobile client review",
        "performance sprint review",
    ),
    labels=(
        "build number",
        "test port",
        "error count",
        "bug number",
        "ticket number",
        "advisory number",
        "line count",
        "release number",
        "cache size",
        "timeout value",
        "job number",
        "page count",
        "thread count",
        "byte size",
        "patch number",
    ),
    objects=(
        *("parser module", "login page", "email sender", "image cropper", "search index", "shopping cart"),
        *("backup script", "map view", "audio player", "address book", "password form", "weather panel"),
        *("chat window", "invoice printer", "spell checker", "photo gallery", "bar chart", "cookie banner"),
        *("file uploader", "video editor", "news ticker", "puzzle game", "tax calculator", "sensor driver"),
        *("colour picker", "crash reporter", "font loader", "timer service", "coupon engine", "recipe importer"),
        *("barcode scanner", "quiz generator", "museum guide", "train planner", "garden app", "voting tool"),
    ),
    openings=(
        "The first reviewer",
        "A colleague from the platform team",
        "The continuous build",
        "The author of the change",
        "A new contributor",
        "The style checker",
        "Someone on the mailing list",
        "The test suite",
        "An external auditor",
        "The documentation group",
        "The coverage report",
        "A bot",
        "The team lead",
        "An intern",
    ),
    actions=(
        "asked for a shorter name for the helper function",
        "moved the constants to the top of the file",
        "split the long method into three parts",
        "noticed that a comment was out of date",
        "suggested a table instead of nested conditions",
        "removed an import that was no longer needed",
        "renamed the variables in the inner loop",
        "added a missing case to the unit tests",
        "measured the start-up time on a slow laptop",
        "reverted the formatting of an unrelated file",
        "wrote a paragraph about the trade-offs",
        "questioned the default value of the timeout",
        "replaced the hand-written sort with a library call",
        "found a race between two background jobs",
        "asked whether the cache could be dropped",
        "merged the latest changes from the main line",
        "marked two threads as resolved",
        "preferred an exception to a silent return",
    ),
    reasons=(
        "because the old version was hard to read",
        "since the warning had been ignored for months",
        "while the pipeline was waiting for a machine",
        "after a long discussion in the meeting",
        "as the guidelines recommend it",
        "before the feature freeze on Friday",
        "although the tests had passed without it",
        "because a customer had seen the problem",
        "when the second attempt failed as well",
        "since the interface will change again soon",
        "while reading the code for the first time",
        "because the dependency is going away",
    ),
    closings=(
        "and the change was approved in the end",
        "which made the diff a little smaller",
        "so a follow-up will be needed",
        "and nobody had a better idea",
        "though the effect is hard to measure",
        "and the comment was updated as well",
        "which the author accepted gladly",
        "so the branch had to be rebased",
        "and the example still works",
        "though opinions differ on this point",
        "and the check turned green again",
        "which saved a few lines",
    ),
    details=(
        "{person} pushed patch {code} and estimated {amount} of saved cloud cost.",
        "The bounty of {amount} for report {code} went to {person}.",
        "{person} pinned dependency {code} until the {amount} contract is signed.",
        "Snapshot {code} was taken by {person} before the {amount} migration.",
        "{person} opened discussion {code} about the bill of {amount}.",
        "The mirror {code} is paid by {person} with {amount} a month.",
    ),
)
