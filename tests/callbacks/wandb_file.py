"""Reads an offline `.wandb` file: W&B's protobuf records in LevelDB's log format.

The file begins with ':W&B', a magic number and a version (7 bytes in all); then come blocks of 32 KiB with
chunks of [crc32 u32, length u16, type u8, data], type 1 being whole, 2 first, 3 middle, 4 last.
"""

import json
import struct

from wandb.proto import wandb_internal_pb2

BLOCK = 32768


def records(path):
    """Every record of the file, in order."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = 7, []
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def _items(items):
    return {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


class Read:
    """What a run's file says: `run` (id, names, config), `history` rows, `exit_code`, `summary`."""

    def __init__(self, folder):
        (self.path,) = folder.glob("*.wandb")
        self.all = list(records(self.path))
        self.run = next(record.run for record in self.all if record.HasField("run"))
        self.config = _items(self.run.config.update)
        self.history = [_items(record.history.item) for record in self.all if record.HasField("history")]
        self.metrics = [record.metric for record in self.all if record.HasField("metric")]
        self.summary = {}
        for record in self.all:
            if record.HasField("summary"):
                self.summary |= _items(record.summary.update)
        self.exit_codes = [record.exit.exit_code for record in self.all if record.HasField("exit")]


def runs(folder):
    """Every run kept in the run folder `folder`, oldest first."""
    return [Read(path) for path in sorted((folder / "wandb").glob("*run-*")) if path.is_dir() and not path.is_symlink()]
