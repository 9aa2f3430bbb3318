"""Feature shards on disk: a folder of safetensors files and one index."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from intentkv.checks import shown
from intentkv.score.head.identity import ModelIdentity
from intentkv.train.examples import Row, TraceRows

FORMAT = "intentkv-features"
VERSION = 1
INDEX = "index.json"
TRACES_A_SHARD = 16
_TENSORS = tuple(field.name for field in dataclasses.fields(Row) if field.name != "memory_error")


class ShardWriter:
    """Writes traces to `folder`; a shard at a time is in memory. Nothing can read the folder before `close`."""

    def __init__(self, folder: Path, identity: ModelIdentity) -> None:
        """Raises FileExistsError if `folder` holds anything, so that no two runs mix."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError(f"{folder}: expected a new or an empty folder for the shards; remove it first")
        self._folder = folder
        self._identity = identity
        self._pending: list[TraceRows] = []
        self._shards: list[dict[str, Any]] = []

    def add(self, trace: TraceRows) -> None:
        """Add one trace; one without rows is left out."""
        if trace.rows:
            self._pending.append(trace)
        if len(self._pending) == TRACES_A_SHARD:
            self._flush()

    def close(self, command: str, tally: dict[str, int]) -> str:
        """Write the rest and the index. Returns the data's hash. Raises ValueError if there is not one row."""
        self._flush()
        if not self._shards:
            raise ValueError(
                f"{self._folder}: expected at least one row, got none: no argument of a later tool call literally "
                f"occurs in the history of a trace ({tally})"
            )
        data_hash = hashlib.sha256("".join(shard["sha256"] for shard in self._shards).encode()).hexdigest()
        index = {
            "format": FORMAT,
            "version": VERSION,
            "model": dataclasses.asdict(self._identity),
            "data_hash": data_hash,
            "command": command,
            "tally": tally,
            "shards": self._shards,
        }
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))
        return data_hash

    def _flush(self) -> None:
        if not self._pending:
            return
        tensors: dict[str, Tensor] = {}
        errors: list[list[float]] = []
        for t, trace in enumerate(self._pending):
            tensors[f"{t}.keys"] = trace.keys
            for r, row in enumerate(trace.rows):
                tensors |= {f"{t}.{r}.{name}": getattr(row, name).contiguous() for name in _TENSORS}
            errors.append([row.memory_error for row in trace.rows])
        path = self._folder / f"{len(self._shards):05d}.safetensors"
        shard = save(tensors)
        path.write_bytes(shard)
        sha256 = hashlib.sha256(shard).hexdigest()
        self._shards.append({"file": path.name, "sha256": sha256, "memory_errors": errors})
        self._pending = []


@dataclass(frozen=True)
class Example:
    """A row with its trace's mean keys gathered: `keys` `[n, D]` and `span_keys` `[q, D]`, float32."""

    row: Row
    keys: Tensor
    span_keys: Tensor


class FeatureSet:
    """The rows of a folder, read from disk when asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError with every reason why the folder is no whole feature set."""
        index = _read_index(folder)
        self.identity = ModelIdentity(**index["model"])
        self.data_hash: str = index["data_hash"]
        self.trace_of: list[int] = []  # row -> number of its trace in the set
        self._rows: list[tuple[int, int, int, float]] = []
        self._files: list[Any] = []
        reasons = []
        for number, shard in enumerate(index["shards"]):
            path = folder / shard["file"]
            try:
                if hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]:
                    raise OSError("it is not the file that the index names (another SHA-256)")
                self._files.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                reasons.append(f"{path}: expected a whole shard: {error}")
            for t, errors in enumerate(shard["memory_errors"]):
                self.trace_of += [number * TRACES_A_SHARD + t] * len(errors)
                self._rows += [(number, t, r, error) for r, error in enumerate(errors)]
        if reasons:
            raise ValueError("\n".join(reasons))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Example:
        number, t, r, memory_error = self._rows[i]
        file = self._files[number]
        row = Row(**{name: file.get_tensor(f"{t}.{r}.{name}") for name in _TENSORS}, memory_error=memory_error)
        keys = file.get_tensor(f"{t}.keys")
        return Example(row, keys[row.positions], keys[row.span])


def _read_index(folder: Path) -> dict[str, Any]:
    """The index, of the form that `ShardWriter` gives it. Raises ValueError."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{folder}: expected a folder of scripts/build_dataset.py, cannot read it: {error}") from None
    if not isinstance(index, dict) or (index.get("format"), index.get("version")) != (FORMAT, VERSION):
        found = (index.get("format"), index.get("version")) if isinstance(index, dict) else index
        raise ValueError(
            f"{folder}: expected format and version {(FORMAT, VERSION)}, got {shown(found)}: build the data set again"
        )
    fields = {field.name for field in dataclasses.fields(ModelIdentity)}
    model, shards = index.get("model"), index.get("shards")
    whole = isinstance(model, dict) and model.keys() == fields and isinstance(index.get("data_hash"), str)
    if not whole or not isinstance(shards, list) or not shards or not all(_is_shard(shard) for shard in shards):
        raise ValueError(f"{folder / INDEX}: expected an index as scripts/build_dataset.py writes it; build it again")
    return index


def _is_shard(shard: object) -> bool:
    return (
        isinstance(shard, dict)
        and isinstance(shard.get("file"), str)
        and Path(shard["file"]).name == shard["file"]  # in this folder
        and isinstance(shard.get("sha256"), str)
        and isinstance(shard.get("memory_errors"), list)
        and all(isinstance(errors, list) for errors in shard["memory_errors"])
    )
