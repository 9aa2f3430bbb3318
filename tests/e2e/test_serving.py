"""A real server, stock and with intentkv: the same answers where nothing is dropped, proof where something is."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from intentkv.evals.calls import CALL, tool_calling
from intentkv.evals.client import play
from intentkv.evals.families import FAMILIES
from intentkv.evals.model import model_path
from intentkv.evals.server import Server
from intentkv.evals.sessions import make_session

REPORT = {
    "session", "scorer", "budget", "events", "logical_tokens", "live_tokens", "dropped_tokens", "freed_slots",
    "reused_prefix_tokens", "score_ms",
}  # fmt: skip
FILLER = "The quarterly review of the north depot was uneventful and the minutes were filed by the clerk. "


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def generate(server: Server, text: str, tokens: int = 16, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, **more.pop("sampling_params", {})}
    status, answer = post(server, "/generate", {"text": text, "sampling_params": params, **more})
    assert status == 200, answer
    return answer


def chat(server: Server, messages: list[dict[str, str]], **more: Any) -> tuple[int, Any]:
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 8, "return_meta_info": True, **more}
    return post(server, "/v1/chat/completions", body)


TOPICS = (
    "Tides", "Rivers", "Lanterns", "Bridges", "Cheese", "Kites", "Maps", "Bees", "Clocks", "Salt",
    "Glass", "Wool", "Trains", "Paper", "Stars", "Onions", "Rain", "Chess", "Roads", "Lighthouses",
)  # fmt: skip


class TestAgainstStock:
    prompts = tuple(f"{topic}. " + FILLER * (number % 5) + "In short," for number, topic in enumerate(TOPICS))

    def test_identity_with_a_budget_that_nothing_exceeds(self, servers: Any) -> None:
        """20 prompts at temperature 0: the same tokens from stock SGLang and from intentkv on the same backend."""
        stock = [generate(servers.get(), prompt)["output_ids"] for prompt in self.prompts]
        ours = [generate(servers.get("--enable-intentkv"), prompt) for prompt in self.prompts]
        assert len(stock) == 20
        assert [answer["output_ids"] for answer in ours] == stock
        assert all(answer["meta_info"]["intentkv"]["dropped_tokens"] == 0 for answer in ours)


class TestPruning:
    def test_the_session_keeps_its_budget_and_beats_random(self, intentkv_server: Server) -> None:
        """The demo session at 25 %: at least as many right answers as `random`, and live <= forced + budget each turn."""
        session = make_session(FAMILIES["order-desk"], seed=1)
        tokenizer = AutoTokenizer.from_pretrained(model_path())
        right = {}
        for scorer in ("intent", "random"):
            right[scorer] = 0
            for turn, result in zip(
                session.turns, play(session, intentkv_server.url, params={"intentkv_scorer": scorer}), strict=True
            ):
                right[scorer] += result.right
                report = result.intentkv
                assert report is not None and set(report) == REPORT and report["scorer"] == scorer
                assert report["logical_tokens"] == result.prompt_tokens + result.completion_tokens
                assert report["live_tokens"] + report["dropped_tokens"] == report["logical_tokens"]
                newest = len(tokenizer.encode(session.system + turn.messages[-1]["content"]))
                templates_and_recent = 64 + 2 * 16
                # An event needs 64 droppable tokens, so up to 63 may lie above the budget.
                most = 0.25 * result.prompt_tokens + newest + templates_and_recent + 63 + result.completion_tokens
                assert report["live_tokens"] <= most
            assert report["dropped_tokens"] > 1000
        assert right["intent"] >= right["random"]

    def test_actkv_watches_tool_calls_under_a_budget_that_never_shrinks(self, intentkv_server: Server) -> None:
        """ActKV on calls that a grammar makes the model write: a region each, and a budget that never shrinks."""
        session = tool_calling(make_session(FAMILIES["travel"], seed=1, records=2, late=4))
        params = {"intentkv_scorer": "actkv", "intentkv_budget": "auto"}
        budgets = []
        for result in play(session, intentkv_server.url, params=params):
            report = result.intentkv
            assert report is not None and re.fullmatch(CALL, result.answer), result.answer
            assert report["action_regions"] == 1 and sum(report["access"].values()) > 0
            assert np.isfinite(report["confidence_slope"])
            budgets.append(report["budget_tokens"])
        assert report["dropped_tokens"] > 0
        assert budgets == sorted(budgets) and set(budgets) <= {512, 896, 1568, 2744}

    def test_sixty_four_sessions_at_once(self, intentkv_server: Server) -> None:
        """Each answer belongs to its own session, and nobody reads anybody's secret."""

        def talk(number: int) -> tuple[list[str], list[dict[str, Any]]]:
            secret = f"ZX-{1000 + 7 * number}"
            messages = [{"role": "system", "content": "You are a helpful assistant."}]
            answers, reports = [], []
            for question in (f"{FILLER * 8}My badge code is {secret}. Say OK.", f"{FILLER * 4}What is my badge code?"):
                messages.append({"role": "user", "content": question})
                status, answer = chat(intentkv_server, messages, session_id=f"agent-{number}")
                assert status == 200, answer
                choice = answer["choices"][0]
                answers.append(choice["message"]["content"])
                reports.append(choice["meta_info"]["intentkv"])
                messages.append({"role": "assistant", "content": answers[-1]})
            return answers, reports

        with ThreadPoolExecutor(64) as pool:
            talks = list(pool.map(talk, range(64)))
        secrets = [f"ZX-{1000 + 7 * number}" for number in range(64)]
        for number, (answers, reports) in enumerate(talks):
            assert {report["session"] for report in reports} == {f"agent-{number}"}
            assert reports[1]["dropped_tokens"] > 0
            said = " ".join(answers)
            assert not [secret for secret in secrets if secret in said and secret != secrets[number]]
        status, _ = chat(intentkv_server, [{"role": "user", "content": "Hello"}])
        assert status == 200

    def test_a_long_generation_shrinks_while_it_runs(self, intentkv_server: Server) -> None:
        """400 tokens after a short prompt with room for 64: several events, and no more live than one event leaves."""
        params = {"ignore_eos": True, "custom_params": {"intentkv_budget": 64}}
        report = generate(intentkv_server, FILLER, 400, sampling_params=params)["meta_info"]["intentkv"]
        assert report["events"] >= 3 and report["freed_slots"] > 150
        forced, since_the_last_event = 4 + 128 + 64, 2 * 64
        assert report["live_tokens"] <= 64 + forced + since_the_last_event

    def test_one_way_and_proved_turn_by_turn(self, intentkv_server: Server) -> None:
        """What is dropped stays dropped: counts never shrink, and the next turn reuses exactly what was live."""
        messages = [{"role": "system", "content": "You are a helpful assistant."}]
        before = None
        for turn in range(4):
            messages.append({"role": "user", "content": FILLER * 12 + f"This was note {turn}. Say OK."})
            status, answer = chat(intentkv_server, messages, session_id="one-way")
            assert status == 200, answer
            report = answer["choices"][0]["meta_info"]["intentkv"]
            if before is not None:
                assert report["dropped_tokens"] >= before["dropped_tokens"]
                # The last sampled token is never computed, and the template may write the answer's end differently.
                assert before["live_tokens"] - 4 <= report["reused_prefix_tokens"] <= before["live_tokens"]
            before = report
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert before is not None and before["freed_slots"] > 0

    def test_a_template_that_strips_earlier_thoughts(self, intentkv_server: Server) -> None:
        """Each prompt says "OK" where the last answer was 40 tokens long: all before it is found, pruned as it was."""
        messages = [{"role": "system", "content": "You are a helpful assistant."}]
        before = None
        for turn in range(5):
            messages.append({"role": "user", "content": f"{7919 * (turn + 3)} " + FILLER * 12 + "Say OK."})
            status, answer = chat(intentkv_server, messages, session_id="thinks", max_tokens=40, ignore_eos=True)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 40
            report = answer["choices"][0]["meta_info"]["intentkv"]
            if before is not None:
                # Of the answer nothing is found but what happens to be the same: where the end of an answer is ignored,
                # the model may go on with the next message's header, though not with the number that begins it.
                assert before["live_tokens"] - 40 <= report["reused_prefix_tokens"] <= before["live_tokens"] - 28
                assert report["dropped_tokens"] >= before["dropped_tokens"]
                assert report["freed_slots"] > 0
            before = report
            messages.append({"role": "assistant", "content": "OK"})
        assert before is not None and before["dropped_tokens"] > 400

    @pytest.mark.parametrize(
        ("params", "said"),
        [
            ({"custom_params": {"intentkv_budget": "-4"}}, ["intentkv_budget", "'-4'"]),
            ({"custom_params": {"intentkv_budgit": "4"}}, ["intentkv_budgit", "nearest is intentkv_budget"]),
            (
                {"custom_params": {"intentkv_scorer": "x", "intentkv_enabled": 3}},
                ["intentkv_scorer", "intentkv_enabled"],
            ),
            ({"custom_params": {"intentkv_span": "9:2"}}, ["intentkv_span"]),
            ({"custom_params": {"intentkv_span": "0:900000"}}, ["intentkv_span", "end it within the prompt"]),
            ({"session_id": "a\x00b"}, ["session_id"]),
            ({"session_id": "s" * 1_000_000}, ["session_id", "256"]),
            ({"session_id": "a", "custom_params": {"intentkv_session": "b"}}, ["session_id and intentkv_session"]),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_bad_parameters_answer_400(
        self, intentkv_server: Server, params: dict[str, Any], said: list[str], stream: bool
    ) -> None:
        more = {"stream": True, "return_meta_info": False} if stream else {}
        status, answer = chat(intentkv_server, [{"role": "user", "content": "Hello"}], **more, **params)
        assert status == 400
        assert all(word in answer["message"] for word in said), answer

    def test_a_request_can_opt_out(self, intentkv_server: Server) -> None:
        answer = generate(intentkv_server, "Hello", sampling_params={"custom_params": {"intentkv_enabled": False}})
        assert "intentkv" not in answer["meta_info"]

    def test_metrics(self, intentkv_server: Server) -> None:
        """Counters after a session of two turns, scraped from SGLang's own endpoint."""
        messages = [{"role": "user", "content": FILLER * 20 + "Say OK."}]
        for turn in range(2):
            assert chat(intentkv_server, messages, session_id="metrics")[0] == 200
            messages += [
                {"role": "assistant", "content": "OK"},
                {"role": "user", "content": FILLER * 12 + f"Note {turn}."},
            ]
        with urllib.request.urlopen(intentkv_server.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        values = {line.split(" ")[0].split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[:1] != "#"}
        for name in ("events_total", "dropped_tokens_total", "freed_slots_total", "reused_prefix_tokens_total", "sessions",
                     "live_tokens", "score_seconds_count"):  # fmt: skip
            assert values[f"intentkv_{name}"] > 0, name
        assert values["intentkv_namespaces_evicted_total"] == 0
