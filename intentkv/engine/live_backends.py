"""SGLang's Triton, FlashInfer and FA3 attention backends, reading rows without their tombstones.

All three build the indices of a forward in `init_forward_metadata` (eager, and the breakable prefill graph) or
`init_forward_metadata_out_graph` (before a CUDA graph is captured or replayed), from the batch's rows and lengths and the
table `req_to_token`. So the backends' own code runs, but over a batch in which dropped positions do not exist: the rows
compacted, the lengths live. Nothing else of the forward sees that batch: positions, the scheduler's lengths and the slots
that are written stay logical. The causal mask of these kernels counts from the end, keys carry their rotation, and a
captured graph's buffers are sized for the longest row, so live rows and lengths are all they need. A graph's queries are
kept where the server's scorer looks at them (`graph_queries`).

A forward without holes goes to the backend as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from intentkv.apply.live_view import LiveRows, LiveViews
from intentkv.engine.graph_queries import DECODE_NEEDS, GraphQueries
from intentkv.errors import SettingsError
from intentkv.score.base import Need

BACKENDS: Final = {
    "triton": "sglang.srt.layers.attention.triton_backend.TritonAttnBackend",
    "flashinfer": "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend",
    "fa3": "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend",
}


def live_class(kind: type) -> type:
    """A subclass of a backend class: its two entry points for metadata, shown live rows.

    `views`, the holes of the rows of the backend's `req_to_token`, is None until it is attached: every row reads as stock.
    `make_queries` makes room for the queries of decode graphs of so many tokens, or says None; `graph_queries` is what it
    made, and `hides_queries` whether there are decode graphs without it.
    """

    class LiveAttention(kind):
        views: LiveViews | None = None
        make_queries: Callable[[int], GraphQueries | None]
        graph_queries: GraphQueries | None = None
        hides_queries = False

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
            super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
            self.graph_queries = self.make_queries(max_num_tokens)
            self.hides_queries = self.graph_queries is None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            live = live_rows_of(self.views, forward_batch)
            if live is None:
                super().init_forward_metadata(forward_batch)
                return
            with _reading(self, live):
                super().init_forward_metadata(live_batch(forward_batch, live))

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            live = live_rows_of(self.views, forward_batch)
            if live is None:
                super().init_forward_metadata_out_graph(forward_batch, in_capture)
                return
            with _reading(self, live):
                super().init_forward_metadata_out_graph(live_batch(forward_batch, live), in_capture)

    LiveAttention.__name__ = LiveAttention.__qualname__ = f"Live{kind.__name__}"
    return LiveAttention


def live_rows_of(views: LiveViews | None, forward_batch: Any) -> LiveRows | None:
    """What attention is to read in the forward that is being prepared; None to read its rows as they stand.

    Args:
        forward_batch: the batch, or a CUDA graph's padded view of it: its first requests are those of `views.running`.

    Raises:
        RuntimeError: a row has holes, but the batch does not carry its lengths on the host.
    """
    if views is None or views.running is None or not views.has_holes(views.running):
        return None
    rows = views.running
    if forward_batch.seq_lens_cpu is None:
        raise RuntimeError("expected a batch with seq_lens_cpu: intentkv decides on the host; report this as a bug")
    ends = forward_batch.seq_lens_cpu[: len(rows)].numpy()
    if forward_batch.forward_mode.is_decode_or_idle():
        starts = ends - 1
    else:
        starts = torch.tensor(forward_batch.extend_prefix_lens_cpu[: len(rows)]).numpy()
    return views.live_rows(rows, starts, ends, forward_batch.req_pool_indices)


def live_batch(forward_batch: Any, live: LiveRows) -> Any:
    """A shallow copy of a batch whose rows are those of `live.table` and whose lengths are live ones."""
    batch = copy.copy(forward_batch)
    rows = forward_batch.req_pool_indices
    batch.req_pool_indices = torch.arange(len(rows), dtype=rows.dtype, device=rows.device)
    batch.seq_lens = forward_batch.seq_lens - live.dropped_on_device
    batch.seq_lens_cpu = forward_batch.seq_lens_cpu.clone()
    batch.seq_lens_cpu[: len(live.dropped)] -= torch.from_numpy(live.dropped)
    if forward_batch.seq_lens_sum is not None:
        batch.seq_lens_sum = forward_batch.seq_lens_sum - int(live.dropped.sum())
    if not forward_batch.forward_mode.is_decode_or_idle():
        batch.extend_prefix_lens = forward_batch.extend_prefix_lens - live.dropped_on_device
        lens = forward_batch.extend_prefix_lens_cpu
        batch.extend_prefix_lens_cpu = [n - d for n, d in zip(lens, live.dropped.tolist())] + lens[len(live.dropped) :]
    return batch


@contextlib.contextmanager
def _reading(backend: Any, live: LiveRows) -> Iterator[None]:
    """Let a backend find `live.table` wherever it looks for `req_to_token`, for as long as it builds its indices.

    Triton and FlashInfer read through the translator, FA3 the table itself when it replays a graph and the pool's else.
    """
    translator = copy.copy(backend.kv_index_translator)
    translator.req_to_token = live.table
    stand_ins = {
        "kv_index_translator": translator,
        "req_to_token": live.table,
        "req_to_token_pool": SimpleNamespace(req_to_token=live.table),
    }
    own = {name: value for name, value in vars(backend).items() if name in stand_ins}
    running, backend.views.running = backend.views.running, None  # a backend's entry points may call each other
    vars(backend).update({name: stand_ins[name] for name in own})
    try:
        yield
    finally:
        vars(backend).update(own)
        backend.views.running = running


def register(needs: Callable[[], frozenset[Need]] = frozenset) -> None:
    """Take the seats of the three backends in SGLang's attention registry; call once in a process.

    Args:
        needs: those of the server's scorer; asked when decode graphs are about to be captured.
    """
    for name in BACKENDS:
        register_attention_backend(name)(functools.partial(create_backend, name, ATTENTION_BACKENDS[name], needs=needs))


def create_backend(
    name: str, create: Callable[[Any], Any], runner: Any, needs: Callable[[], frozenset[Need]] = frozenset
) -> Any:
    """The backend that SGLang's own factory makes for `runner`, reading live rows; `needs` as for `register`.

    Raises:
        SettingsError: every reason why it cannot serve this model so.
    """
    backend = create(runner)
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    reasons = unsupported(name, backend, layers)
    if reasons:
        raise SettingsError(reasons)
    backend.__class__ = live_class(type(backend))
    backend.make_queries = lambda tokens: (
        GraphQueries(layers, tokens, runner.dtype, runner.device) if needs() & DECODE_NEEDS else None
    )
    backend.by_pages = name == "fa3"  # its page table names pages of `page_size`; the others' index lists name slots
    return backend


def unsupported(name: str, backend: Any, layers: list[RadixAttention]) -> list[str]:
    """Reasons, one a line, why a backend cannot serve a model with these attention layers with holes; empty if it can."""
    reasons = []
    remedy = "serve it without --enable-intentkv"
    if type(backend) is not pkgutil.resolve_name(BACKENDS[name]):
        reasons.append(
            f"{name} is served by {type(backend).__name__} here, whose indices intentkv does not know: {remedy}"
        )
    elif backend.kv_index_translator.is_translating:
        reasons.append("the unified memory pool names slots by virtual ids: remove --enable-unified-memory")
    if any(getattr(backend, f"{phase}_uses_dequant_workspace", False) for phase in ("prefill", "decode")):
        reasons.append(f"{name} unpacks an FP4 KV cache by logical rows: leave --kv-cache-dtype auto")
    if any(layer.sliding_window_size > -1 for layer in layers):
        reasons.append(f"sliding-window layers count positions: {remedy}")
    if any((layer.xai_temperature_len or -1) > 0 for layer in layers):
        reasons.append(f"the model's attention temperature depends on the number of keys: {remedy}")
    if any(layer.is_cross_attention or layer.attn_type != AttentionType.DECODER for layer in layers):
        reasons.append(f"cross attention and bidirectional attention do not read a row as a text: {remedy}")
    return reasons


def reads_whole_pages(backend: Any) -> bool:
    """Whether a runner's backend, or one of its two, reads rows page by page: no part of a page can be left out then."""
    return any(getattr(part, "by_pages", False) for part in _parts(backend))


def attach_views(backend: Any, views: LiveViews) -> None:
    """Show `views` to the backend of a runner, or to both where prefill and decode have their own.

    Raises:
        RuntimeError: a backend that would read tombstones as keys.
    """
    for part in _parts(backend):
        if not hasattr(part, "views"):
            raise RuntimeError(
                f"{type(part).__name__} does not read live views, so it would read dropped tokens: use one of intentkv_cpu, "
                f"{', '.join(BACKENDS)}"
            )
        part.views = views


def decode_part(backend: Any) -> Any:
    """The backend that decode steps run on."""
    return backend.decode_backend if isinstance(backend, HybridAttnBackend) else backend


def hides_queries(backend: Any) -> bool:
    """Whether the decode steps of a runner run in CUDA graphs that do not keep their queries."""
    return getattr(decode_part(backend), "hides_queries", False)


def _parts(backend: Any) -> tuple[Any, ...]:
    return (backend.prefill_backend, backend.decode_backend) if isinstance(backend, HybridAttnBackend) else (backend,)
