"""Every Triton kernel compiled for four GPU generations, on a machine that has none: registers, spills, shared memory."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from intentkv.kernels import compact, lse, recover, rule_score

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ARCHITECTURES = (80, 90, 100, 120)
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int16: "*i16"}
_LISTS = {"slots": "*i64", "starts": "*i64"}


def attention_kernel(kernel: Any, dtype: torch.dtype, group: int, dim: int) -> tuple[Any, dict, dict]:
    query_and_keys = {"query": POINTER[dtype], "keys": POINTER[dtype]}
    if kernel is recover.recover_kernel:
        rest = {"lse": "*fp32", "out": "*fp32", "scale": "fp32", "slot_stride": "i32", "out_stride": "i32"}
    else:
        rest = {"parts": "*fp32", "scale": "fp32", "slot_stride": "i32", "blocks": "i32"}
    shape = {"HEADS": 8 * group, "GROUP": group, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim)}
    return kernel, query_and_keys | _LISTS | rest, {**shape, "BLOCK": recover.BLOCK}


def copying_kernel(entry: int) -> tuple[Any, dict, dict]:
    pools = {"keys": "*i16", "values": "*i16", "sources": "*i64", "destinations": "*i64"}
    return compact.copy_kernel, pools | {"key_stride": "i32", "value_stride": "i32"}, {"ENTRY": entry, "BLOCK": 1024}


def rule_score_kernel(kernel: Any, dtype: torch.dtype, group: int, dim: int) -> tuple[Any, dict, dict]:
    signature = {"queries": "*fp32", "keys": POINTER[dtype], "slots": "*i64", "peaks": "*fp32", "masses": "*fp32"}
    shape = {"GROUP": group, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "BLOCK": rule_score.BLOCK}
    if kernel is rule_score.peak_kernel:
        signature |= {"n": "i32", "slot_stride": "i32", "splits": "i32"}
        return kernel, signature, {**shape, "GROUP_PAD": triton.next_power_of_2(group)}
    return kernel, {**signature, "out": "*fp32", "n": "i32", "slot_stride": "i32"}, {"KV_HEADS": 8, **shape}


KERNELS = {
    "recover bf16 G4 D128": attention_kernel(recover.recover_kernel, torch.bfloat16, 4, 128),
    "recover f16 G16 D256": attention_kernel(recover.recover_kernel, torch.float16, 16, 256),
    "recover f32 G3 D80": attention_kernel(recover.recover_kernel, torch.float32, 3, 80),
    "lse bf16 G4 D128": attention_kernel(lse.lse_kernel, torch.bfloat16, 4, 128),
    "lse f16 G16 D256": attention_kernel(lse.lse_kernel, torch.float16, 16, 256),
    "rule peaks bf16 G4 D128": rule_score_kernel(rule_score.peak_kernel, torch.bfloat16, 4, 128),
    "rule peaks f16 G8 D64": rule_score_kernel(rule_score.peak_kernel, torch.float16, 8, 64),
    "rule peaks f32 G16 D256": rule_score_kernel(rule_score.peak_kernel, torch.float32, 16, 256),
    "rule shares bf16 G4 D128": rule_score_kernel(rule_score.share_kernel, torch.bfloat16, 4, 128),
    "rule shares f16 G8 D64": rule_score_kernel(rule_score.share_kernel, torch.float16, 8, 64),
    "rule shares f32 G16 D256": rule_score_kernel(rule_score.share_kernel, torch.float32, 16, 256),
    "compact 8 x 128": copying_kernel(8 * 128),
    "compact 3 x 80": copying_kernel(3 * 80),
}


def usage(cubin: bytes, at: Path) -> dict[str, int]:
    """What cuobjdump says of the only kernel in a cubin: registers a thread; bytes of stack, local and shared memory."""
    at.write_bytes(cubin)
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(at)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    assert set(found) == {"REG", "STACK", "SHARED", "LOCAL"}, text
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_every_architecture_without_spills(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert os.access(CUOBJDUMP, os.X_OK)
    kernel, signature, constants = KERNELS[name]
    assert [*signature, *constants] == kernel.arg_names, "the signature here is not the kernel's"
    for architecture in ARCHITECTURES:
        source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        found = usage(compiled.asm["cubin"], tmp_path / "kernel.cubin")
        with capsys.disabled():
            print(
                f"\n  {name:24} sm_{architecture:<4} {found['REG']:3} registers, {found['STACK'] + found['LOCAL']} bytes "
                f"spilled, {compiled.metadata.shared} bytes of shared memory",
                end="",
            )
        assert found["STACK"] == found["LOCAL"] == 0, "registers are spilled"
        assert compiled.metadata.shared <= 48 * 1024
