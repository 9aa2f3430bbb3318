"""The three ways to start SGLang all carry intentkv: launch_server (every other test here), `sglang serve`, and Engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import Any

from intentkv.evals.model import model_path
from intentkv.evals.server import SMALL_POOL, running_server


def test_sglang_serve(servers: Any, tmp_path: Path) -> None:
    """The same flags through `sglang serve`: up, pruning, and reporting it."""
    servers.stop()
    flags = [*SMALL_POOL, "--enable-intentkv", "--intentkv-budget", "128", "--intentkv-trigger", "64"]
    launcher = (str(Path(sys.executable).parent / "sglang"), "serve")
    body = {"text": "The clerk filed the minutes of the north depot. " * 80, "sampling_params": {"max_new_tokens": 4}}
    with running_server(model_path(), flags, tmp_path / "serve.log", launcher=launcher) as server:
        request = urllib.request.Request(
            server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            report = json.load(answer)["meta_info"]["intentkv"]
    assert report["events"] == 1 and report["freed_slots"] > 400


def test_engine(servers: Any) -> None:
    """`intentkv.enable` before `sglang.Engine`: a long prompt is pruned and the answer says so."""
    servers.stop()
    code = f"""
        import json
        import intentkv
        def main():
            intentkv.enable(budget=128, trigger=64)
            import sglang
            engine = sglang.Engine(model_path={str(model_path())!r}, max_total_tokens=4096)
            text = "The clerk filed the minutes of the north depot. " * 80
            answer = engine.generate(text, {{"max_new_tokens": 4, "temperature": 0}})
            print(json.dumps(answer["meta_info"]["intentkv"]))
            engine.shutdown()
        if __name__ == "__main__":
            main()
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert report["events"] == 1 and report["freed_slots"] > 400 and report["budget"] == "128"


def test_enable_after_the_fact_is_refused() -> None:
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); import intentkv; intentkv.enable(budget='25%')"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 1
    assert "call intentkv.enable() before the first Engine" in result.stderr
