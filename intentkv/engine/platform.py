"""Entry point of the `sglang.srt.platforms` group: decides whether SGLang should run on intentkv's CPU platform.

SGLang imports this module in every process of every machine where intentkv is installed, so it must stay cheap and must
never touch a machine that has an accelerator. The platform itself lives in `cpu_platform` and is imported only when chosen.
"""

import os
from importlib.metadata import entry_points

import torch

NAME = "intentkv_cpu"
CPU_PLATFORM = "intentkv.engine.cpu_platform.CpuPlatform"


def accelerators() -> list[str]:
    """Names of the kinds of accelerator that torch sees here; the kinds are those SGLang itself looks for."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda" if torch.version.hip is None else "rocm")
    if torch.xpu.is_available():
        found.append("xpu")
    if torch.backends.mps.is_available():
        found.append("mps")
    if getattr(torch.version, "musa", None) is not None:
        found.append("musa")
    # Registered by their vendors' packages, so absent from a plain torch.
    for kind in ("npu", "hpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found.append(kind)
    return found


def activate() -> str | None:
    """Return the platform class for SGLang to load, or None to stay out of the way.

    Asked for by name (`SGLANG_PLATFORM=intentkv_cpu`): always. Otherwise only where nothing else could serve: no accelerator,
    `SGLANG_USE_CPU_ENGINE` not 1 (SGLang's own CPU engine was asked for), and no other platform package installed, because
    SGLang refuses to start when two of them come forward.
    """
    chosen = os.environ.get("SGLANG_PLATFORM")
    if chosen:
        return CPU_PLATFORM if chosen == NAME else None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if any(entry.name != NAME for entry in entry_points(group="sglang.srt.platforms")):
        return None
    return None if accelerators() else CPU_PLATFORM


def cores_of_ranks(ranks: int) -> str:
    """Which cores belong to which rank, as SGLang wants it told where a machine has fewer NUMA nodes than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    return "|".join(
        ",".join(str(cores[(rank * share + i) % len(cores)]) for i in range(share)) for rank in range(ranks)
    )
