"""`tests.gpu.exact` with a decode CUDA graph that is replayed by hand, for a machine without a GPU.

Real: SGLang's DecodeCudaGraphRunner, so the buffers, what it captures, the padding, and what it writes before a replay; the
attention backend's class and kernels, in Triton's interpreter; the model. Stand-in: the graph. Captured is the call that
SGLang hands over to be recorded; a replay makes it again, with the tensors and the metadata object of its capture, as a
graph's kernels have them, and with hooks in the state that they had then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from tests.gpu import exact

CAPTURED = [2, 4]  # batch sizes; three requests are padded to the second


class ByHand(BaseCudaGraphBackend):
    """Graphs as calls that are made again."""

    def __init__(self, runner: DecodeCudaGraphRunner) -> None:
        self._attention = runner.attn_backend
        self._calls: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self.replays = 0

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], capture_inputs: Any = None, post_warmup_hook: Any = None
    ) -> None:
        forward_fn()
        self._calls[shape_key] = (forward_fn, self._attention.forward_metadata)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._calls

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        call, metadata = self._calls[shape_key]
        self._attention.forward_metadata = metadata
        self.replays += 1
        with model_capture_mode():
            return call()

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    capture_session = None
    cleanup = None


class HandRunner(DecodeCudaGraphRunner):
    """Without the streams, events and memory pools of a device."""

    def capture(self) -> None:
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
        self.buffers.reset_index_buffers()
        self._profiler = None
        self._capture_one_stream()

    def _record_in_graph_metadata_prep_done(self) -> None: ...

    def _publish_read_done(self, in_graph: bool) -> None: ...


def capture(runner: Any) -> None:
    """Give a ModelRunner on a CPU decode graphs, as SGLang gives them to one on a GPU."""
    runner.attn_backend.device_core_count = 8  # a CPU has none, and the kernel that splits long requests would not run
    decode_cuda_graph_runner.resolve_decode_backend = ByHand
    decode_cuda_graph_runner.get_batch_sizes_to_capture = lambda *args, **kwargs: (CAPTURED, [])
    logits = lambda vocabulary, rows: torch.zeros(rows, vocabulary)
    runner.graph_shared_output = SimpleNamespace(get_logits_buffer=logits)
    runner.decode_cuda_graph_runner = HandRunner(runner)


if __name__ == "__main__":
    exact.main(prepare=capture)
