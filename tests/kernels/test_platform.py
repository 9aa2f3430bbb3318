"""When intentkv's CPU platform comes forward, and what SGLang decides with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from intentkv.engine.platform import CPU_PLATFORM, activate, cores_of_ranks


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without any accelerator and without any SGLANG_ variable, for a test to change."""
    for name in [name for name in os.environ if name.startswith("SGLANG_")]:
        monkeypatch.delenv(name)
    for module in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)
    return monkeypatch


def add_accelerator(machine: pytest.MonkeyPatch, kind: str) -> None:
    present = SimpleNamespace(is_available=lambda: True)
    if kind in ("cuda", "rocm"):
        machine.setattr(torch.cuda, "is_available", lambda: True)
        machine.setattr(torch.version, "hip", "7.0" if kind == "rocm" else None)
    elif kind == "musa":
        machine.setattr(torch.version, "musa", "4.0", raising=False)
    elif kind == "mps":
        machine.setattr(torch.backends.mps, "is_available", lambda: True)
    else:
        machine.setattr(torch, kind, present, raising=False)


def test_comes_forward_where_there_is_no_accelerator() -> None:
    assert activate() == CPU_PLATFORM


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "mps", "musa", "npu", "hpu"])
def test_never_takes_over_a_machine_with_an_accelerator(machine: pytest.MonkeyPatch, kind: str) -> None:
    add_accelerator(machine, kind)
    assert activate() is None
    machine.setenv("SGLANG_PLATFORM", "intentkv_cpu")
    assert activate() == CPU_PLATFORM


def test_leaves_sglangs_own_cpu_engine_alone(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    machine.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == CPU_PLATFORM


def test_makes_way_for_another_platform_package(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "other_platform-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other-platform\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[sglang.srt.platforms]\nother = other:activate\n")
    machine.syspath_prepend(tmp_path)
    assert activate() is None


def python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that sees no GPU: SGLang picks its platform once."""
    command = [sys.executable, "-W", "ignore", "-c", code, *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True)


def test_the_entry_point_imports_nothing_of_sglang() -> None:
    code = "import sys, intentkv.engine.platform as p; p.activate(); print([m for m in sys.modules if m.startswith('sglang')])"
    assert python(code).stdout.strip() == "[]"


RESOLVE = """
import json, os, sys
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolved_view
args = prepare_server_args(sys.argv[1:])
args.resolve_once()
view = resolved_view(args)
print(json.dumps({
    "device": view.device, "attention": view.attention_backend, "sampling": view.sampling_backend,
    "sleeps": view.sleep_on_idle, "waiting": os.environ.get("OMP_WAIT_POLICY"),
    "cores": os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"),
    "graphs": [view.cuda_graph_config.decode.backend, view.cuda_graph_config.prefill.backend],
}))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that is enough of a model for SGLang to resolve its settings."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **heads, **kind}))
    return str(tmp_path)


def resolve(*flags: str) -> subprocess.CompletedProcess[str]:
    return python(RESOLVE, *flags, SGLANG_PLATFORM="intentkv_cpu", SGLANG_PLUGINS="intentkv_cpu")


def test_a_machine_without_accelerator_needs_no_flags(machine: pytest.MonkeyPatch, model: str) -> None:
    machine.delenv("OMP_WAIT_POLICY", raising=False)
    done = resolve("--model-path", model)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "device": "cpu",
        "attention": "intentkv_cpu",
        "sampling": "pytorch",
        "sleeps": True,
        "waiting": "PASSIVE",
        "cores": None,
        "graphs": ["disabled", "disabled"],
    }


def test_tp_ranks_on_a_cpu_need_no_variable(model: str) -> None:
    done = resolve("--model-path", model, "--tp-size", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["cores"] == cores_of_ranks(2)


def test_a_chosen_attention_backend_is_kept(model: str) -> None:
    done = resolve("--model-path", model, "--attention-backend", "torch_native")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["attention"] == "torch_native"


def test_another_device_is_refused_with_what_to_do(model: str) -> None:
    done = resolve("--model-path", model, "--device", "cuda")
    assert done.returncode != 0
    assert "platform intentkv_cpu serves on the CPU only, but the device is 'cuda': pass --device cpu" in done.stderr


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [({0, 1}, 2, "0|1"), ({0, 1, 4, 5}, 2, "0,1|4,5"), ({2, 3, 5}, 2, "2|3"), ({7}, 2, "7|7"), ({0, 1}, 4, "0|1|0|1")],
)
def test_tp_and_dp_ranks_get_their_cores(
    cores: set[int], ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told, SGLang refuses more ranks than a machine has NUMA nodes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert cores_of_ranks(ranks) == expected
