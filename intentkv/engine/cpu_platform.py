"""SGLang on a machine without an accelerator, from the ordinary wheel, through SGLang's out-of-tree platform interface.

SGLang's own CPU engine needs a CPU build of `sgl_kernel`; without it the base platform dies in the rotary embedding. This
platform runs the "native" (plain PyTorch) form of every operator and brings its own attention backend, `intentkv_cpu`.
"""

import os
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from intentkv.engine.platform import NAME, cores_of_ranks


class CpuPlatform(SRTPlatform):
    """An out-of-tree platform on device "cpu" with no capabilities: no graphs, no Triton, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = NAME
    device_type = "cpu"

    def __init__(self) -> None:
        # For the workers, which read it when they load torch. By default OpenMP threads spin while they wait; on a machine with
        # more busy processes than cores the spinning uses up their time slices, and every operator then waits for the next
        # one: measured 48 ms for a 1.4 ms attention call.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Before the parser is built, so that `--attention-backend intentkv_cpu` is a valid choice.
        if NAME not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([NAME])
            register_resolution_hook("handle_cpu_backends")(_choose_attention_backend)

    def get_device(self, device_id: int | None = 0) -> str:
        """Device name that stands in for a missing `--device`."""
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of memory in the machine."""
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """Bytes in use on the whole machine, so that total - usage is what a KV pool may still take."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(free, total) bytes of the machine."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_default_attention_backend(self) -> str:
        return NAME

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """`torch.compile` would need a compiler at run time, which a bare machine lacks."""
        return "eager"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Turn graph capture off (there is nothing to capture on), let an idle scheduler sleep, give each rank its cores, refuse any
        device but "cpu"."""
        if server_args.device != "cpu":
            raise ValueError(
                f"platform {NAME} serves on the CPU only, but the device is {server_args.device!r}: pass --device cpu, "
                f"or unset SGLANG_PLATFORM to serve on {server_args.device!r}"
            )
        graphs = server_args.cuda_graph_config
        for phase in (Phase.DECODE, Phase.PREFILL):
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = graphs
        # A scheduler that polls takes a whole core, which is what everything else on this machine computes on.
        server_args.sleep_on_idle = True
        ranks = server_args.tp_size * server_args.dp_size
        if ranks > 1:
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(ranks))

    def init_backend(self) -> None:
        """Register the attention backend in this worker; SGLang calls it before any model runner is built."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from intentkv.engine.cpu_attention import create_backend

        register_attention_backend(NAME)(create_backend)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Make bf16 prefill bearable on a CPU without bf16 instructions; called once, before the first forward."""
        from intentkv.engine.cpu_linear import install

        install(model)


def _choose_attention_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrap SGLang's step that defaults `--device cpu` to `intel_amx`, which needs kernels this wheel cannot load."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    if resolving_view(server_args).attention_backend is None:
        declare_resolution(server_args, NAME, attention_backend=NAME)
    previous(server_args)
