"""Off is pristine, on is proved: each case in a fresh process with the package installed, on the real SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

FLAG_HOOKS = {
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
}


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("INTENTKV", "SGLANG_PLUGINS"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**env, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def last_json(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_off_is_pristine() -> None:
    """No flag: two hooks, no other module of ours than those that carry the flags, and stock server arguments."""
    found = last_json(
        run_python(
            """
            import json, sys
            from sglang.srt.plugins import load_plugins
            from sglang.srt.plugins.hook_registry import HookRegistry
            load_plugins()
            from sglang.srt.server_args import prepare_server_args
            server_args = prepare_server_args(["--model-path", "m"])
            import sglang.srt.managers.scheduler as scheduler
            from sglang.srt.arg_groups.resolution_hooks import _HOOKS
            from sglang.srt.mem_cache.registry import registered_radix_cache_backends
            ours = lambda hook: hook.__module__.startswith("intentkv")
            print(json.dumps({
                "hooks": sorted(t for t, rows in HookRegistry._hooks.items() if any(ours(h) for _, h, _ in rows)),
                "modules": sorted(m for m in sys.modules if m.startswith("intentkv")),
                "wrapped": hasattr(scheduler.Scheduler.__init__, "__wrapped__"),
                "resolution": [s for s, fns in _HOOKS.items() if any(f.__module__.startswith("intentkv.engine.activation") for f in fns)],
                "caches": registered_radix_cache_backends(),
                "cache": server_args.radix_cache_backend,
            }))
            """
        )
    )
    assert set(found["hooks"]) == FLAG_HOOKS
    assert (
        not found["wrapped"]
        and not found["resolution"]
        and "intentkv" not in found["caches"]
        and found["cache"] is None
    )
    platform = {"intentkv.engine.platform", "intentkv.engine.cpu_platform"}  # the entry point of another group
    carriers = {
        "intentkv", "intentkv.plugin", "intentkv.engine", "intentkv.engine.flags", "intentkv.engine.inventory",
        "intentkv.config", "intentkv.checks", "intentkv.errors", "intentkv.keep", "intentkv.keep.budget", "intentkv.observe",
        "intentkv.observe.call_templates",
        "intentkv.score", "intentkv.score.registry", "intentkv.patches",
    }  # fmt: skip
    assert set(found["modules"]) <= carriers | platform


def test_impossible_start_lists_every_reason() -> None:
    """Flags, server arguments and backend at fault: one exit, before any model file is looked at, naming all of them."""
    flags = "--model-path no-such-model --enable-intentkv --intentkv-budget=-3 --intentkv-scorer intnet --intentkv-trigger x"
    flags += " --enable-hierarchical-cache --attention-backend torch_native --disaggregation-mode prefill"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *flags.split()],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode not in (0, None)
    report = result.stderr[result.stderr.index("intentkv cannot serve") :]
    expected = ["(6 reasons)", "--intentkv-budget", "'-3'", "the nearest is 'intent'", "--intentkv-trigger"]
    expected += [
        "--enable-hierarchical-cache",
        "--disaggregation-mode",
        "--attention-backend torch_native",
        "use one of intentkv_cpu",
    ]
    for said in expected:
        assert said in report, report


def test_flag_without_the_switch_is_refused() -> None:
    result = run_python(
        """
        from sglang.srt.plugins import load_plugins
        load_plugins()
        from sglang.srt.server_args import prepare_server_args
        prepare_server_args(["--model-path", "m", "--intentkv-budget", "25%"])
        """
    )
    assert result.returncode == 1
    assert "--intentkv-budget has no effect without --enable-intentkv: add it" in result.stderr


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[str]]:
    """What the inventory says of four broken hosts, each made in one process from the real rows and pins."""
    return last_json(
        run_python(
            """
            import dataclasses, json, types, sys
            from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
            from intentkv.engine import flags, inventory
            import sglang.srt.managers.schedule_batch as host

            rows = inventory.load_rows()
            pins = inventory.load_pins(inventory.sglang_version())
            row = next(r for r in rows if r.target.endswith("Req.reset_for_retract"))
            out = {"healthy": inventory.problems_before(rows, pins)}
            out["unknown version"] = inventory.problems_before(rows, None)
            out["missing"] = inventory.problems_before([dataclasses.replace(row, target=row.target + "_x")], pins)
            out["signature"] = inventory.problems_before(
                [row], {row.target: dataclasses.replace(pins[row.target], signature="(self, why)")})
            out["drift"] = inventory.source_drift(
                [row], {row.target: dataclasses.replace(pins[row.target], source="0" * 64)})
            out["not applied"] = inventory.problems_after([row])

            HookRegistry.register(row.target, lambda result, req: None, HookType.AFTER, source=HookSource("rival", "rival"))
            out["foreign"] = inventory.problems_before([row], pins)
            HookRegistry._hooks.pop(row.target)

            original = host.Req.reset_for_retract
            def wrapper(self): return original(self)
            wrapper.__wrapped__ = original
            host.Req.reset_for_retract = wrapper
            out["wrapped"] = inventory.problems_before([row], pins)
            host.Req.reset_for_retract = original

            stale = types.ModuleType("sglang.srt.stale_for_test")
            stale.TABLE = {"retract": original}
            sys.modules[stale.__name__] = stale
            flags.register_rows([row])
            HookRegistry.apply_hooks()
            out["stale"] = inventory.problems_after([row])
            stale.TABLE.clear()
            out["in place"] = inventory.problems_after([row])
            print(json.dumps(out))
            """
        )
    )


@pytest.mark.parametrize("case", ["healthy", "in place"])
def test_nothing_to_say_about_a_sound_host(verdicts: dict[str, list[str]], case: str) -> None:
    assert verdicts[case] == []


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unknown version", "was never checked with this intentkv"),
        ("missing", "Req.reset_for_retract_x is missing"),
        ("signature", "expected (self, why), got (self)"),
        ("drift", "Req.reset_for_retract"),
        ("not applied", "is not in place although it was registered"),
        ("foreign", "is hooked by rival too"),
        ("wrapped", "was wrapped by other code than SGLang's hook registry"),
        ("stale", "bypassed by the stale reference sglang.srt.stale_for_test.TABLE[...]"),
    ],
)
def test_each_fault_is_named(verdicts: dict[str, list[str]], case: str, said: str) -> None:
    assert len(verdicts[case]) == 1
    assert said in verdicts[case][0]
