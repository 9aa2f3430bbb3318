"""The audit that a running server gives on demand, in SGLang's own answer, with requests running and with a fault."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

from intentkv import __version__
from intentkv.engine import runtime
from intentkv.engine.inventory import load_rows
from intentkv.engine.ranks import Agreement
from intentkv.engine.server_info import add_to_internal_state
from intentkv.score.ranks import ALONE
from tests.host.pools import publish_settings
from tests.host.stories import Stage
from tests.host.test_reclaim import make_world
from tests.host.test_seeded_faults import freed_survivor

publish_settings()


def ask(stage: Stage) -> dict:
    """The internal state as the tokenizer process receives it; SGLang's own part of it is left out."""
    result = GetInternalStateReqOutput(internal_state={"world_size": 1})
    with mock.patch.object(
        runtime, "_runtime", SimpleNamespace(cache=stage.cache, agreement=Agreement(None, check=False), ranks=ALONE)
    ):
        assert add_to_internal_state(result, None, GetInternalStateReq()) is None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(result.internal_state))


@pytest.mark.parametrize(("core", "page_size"), [("rust", 1), ("python", 16)])
def test_server_info_shows_the_audit(core: str, page_size: int) -> None:
    stage = Stage(lambda **sizes: make_world(core, page_size, **sizes))
    stage.drops["s"] = [3, 4]
    stage.say(stage.words("prompt", 12))
    stage.start(stage.words("other", 8), "other")
    state = ask(stage)
    said = state.pop("intentkv")
    assert state == {"world_size": 1}
    live = said.pop("live_tokens")
    assert 0 < live <= 20 * page_size
    assert said == {
        "version": __version__, "audit": [], "ranks": 1, "running": 1, "sessions": 2, "events": 1, "dropped": 2 * page_size,
        "freed": 2 * page_size, "namespaces_evicted": 0,
    }  # fmt: skip
    freed_survivor(stage.world)
    assert any("found 2" in fault for fault in ask(stage)["intentkv"]["audit"])


def test_server_info_hook_is_on_the_method_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook takes what SGLang's method returns, called as the registry calls a hook of this row's kind."""
    (row,) = [row for row in load_rows() if row.load_handler() is add_to_internal_state]
    method = pkgutil.resolve_name(row.target)
    assert row.kind == "after" and method is SchedulerInternalStateController.get_internal_state
    for name in vars(SchedulerInternalStateController):
        if name.startswith("_add_"):  # each asks a part of the scheduler that is not here
            monkeypatch.setattr(SchedulerInternalStateController, name, lambda self, state: None)
    stage = Stage(lambda **sizes: make_world("rust", 1, **sizes))
    arguments = (SchedulerInternalStateController(None, record_step_time=False), GetInternalStateReq())
    result = method(*arguments)
    monkeypatch.setattr(
        runtime, "_runtime", SimpleNamespace(cache=stage.cache, agreement=Agreement(None, check=False), ranks=ALONE)
    )
    add_to_internal_state(result, *arguments)
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(result.internal_state))
    assert said["intentkv"]["audit"] == [] and said["intentkv"]["sessions"] == 0
    assert said["attention_backend"] == "torch_native", "SGLang's own part is still there"
