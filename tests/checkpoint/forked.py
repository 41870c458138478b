"""Runs a function on several ranks forked from this warm process, and brings back what each returned."""

import math
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from disttrain.parallel.mesh import Mesh

FORK = multiprocessing.get_context("fork")


def run(body, degrees, *args, timeout=30):
    """[body(mesh, *args) of each rank] in a world of these `degrees`; body's error is raised here."""
    size = math.prod(degrees.values())
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for rank in range(size):
            mine, theirs = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_rank, args=(theirs, body, degrees, rank, size, Path(folder) / "store", args))
            process.start()
            theirs.close()
            ends.append((mine, process))
        results = []
        try:
            for rank, (mine, process) in enumerate(ends):
                assert mine.poll(timeout), f"rank {rank} hangs"
                ok, value = mine.recv()
                assert ok, f"rank {rank}:\n{value}"
                results.append(value)
                process.join(timeout)
        finally:
            for _, process in ends:
                process.kill()
                process.join()
    return results


def _rank(pipe, body, degrees, rank, size, store, args):
    torch.set_num_threads(1)
    try:
        if size > 1:
            dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
        pipe.send((True, body(Mesh(degrees, rank), *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)  # nothing of the parent's is flushed or torn down twice
