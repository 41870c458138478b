"""What to do about errors that are not the user's mistake and yet in the user's hand: what causes a known symptom, and what helps."""

from __future__ import annotations

import os
import re
import shutil
import sys

from disttrain.errors import is_out_of_memory

_SHARED_MEMORY = re.compile(r"shared memory|/dev/shm|\bshm\b|Bus error", re.IGNORECASE)
_NCCL = re.compile(r"\bNCCL\b", re.IGNORECASE)
_SYMPTOMS = (
    (
        r"doesn't match expected size|op\.preamble|(?i:mismatch) between collectives",
        "ranks handed one collective tensors of different sizes or types",
        "debug=collectives, which names the ranks, the shapes and the call sites",
    ),
    (
        r"(?i:tensors?) must be contiguous|non-contiguous",
        "a collective reads the memory under a tensor, and that is not its elements one after the other",
        "x.contiguous() before the call; debug=collectives names the call",
    ),
    (
        r"on the same device|not on the expected device|No backend type associated with device|Tensors must be CUDA",
        "a tensor lies on another device than this rank's; batches and weights are put there: it was made in a forward, or is no buffer",
        "torch.zeros(..., device=x.device) where it is made, or register_buffer; debug=collectives if it is in a collective",
    ),
    (
        r"(?i:timed out|timeout)|Connection closed by peer|Connection reset by peer",
        "a rank did not come to where the others waited, or has gone; of that one the log says more",
        "callbacks=[default,watchdog] to be told who waits where, debug=collectives to find collectives that don't fit each other",
    ),
    (
        r"EADDRINUSE|(?i:address already in use)",
        "another process listens on the rendezvous' port, perhaps a run that has not ended",
        "MASTER_PORT=<another>, or torchrun --rdzv-endpoint=localhost:0",
    ),
)
"""(what an error says, what it means, what helps), looked at in this order; the last one is the system's as well."""

HINTS = {
    "SIGKILL": "; the kernel does this when memory runs out",
    "SIGABRT": "; its last words stand above or in its log. gloo ends so where ranks hand one collective tensors of different sizes"
    "\n  try: debug=collectives, which names the ranks, the shapes and the call sites",
    "SIGSEGV": "; native code has failed, and the stack of its threads is in its log",
    "SIGBUS": "; a file or /dev/shm is full\n  try: dataset.num_workers=0, or a container with more (docker run --shm-size=8g)",
}
"""By signal that ended a rank."""
MIB = 1 << 20


def advice_for(error: BaseException) -> str:
    """Lines to put under the error's own message; empty where there is nothing to say."""
    kind, text = type(error).__name__, str(error)
    if is_out_of_memory(error):
        return _memory(has_remedy=any("try:" in note for note in getattr(error, "__notes__", ())))
    if _SHARED_MEMORY.search(text):
        return (
            f"\n  /dev/shm has {_free_shared()} free, and loader workers pass samples through it"
            "\n  try: dataset.num_workers=0, or a container with more (docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory)"
        )
    if kind in ("DistBackendError", "DistNetworkError") and _NCCL.search(text):
        return (
            "\n  NCCL could not talk over its network or a rank has gone; the cause stands in the log of the rank that failed first"
            "\n  try: launch.env.NCCL_DEBUG=INFO to see what it does, launch.interface=<the interface that all machines share>, "
            "launch.env.NCCL_P2P_DISABLE=1 if it fails inside one machine"
        )
    for pattern, meaning, remedy in _SYMPTOMS if isinstance(error, RuntimeError) else _SYMPTOMS[-1:] if isinstance(error, OSError) else ():
        if re.search(pattern, text):
            return f"\n  {meaning}\n  try: {remedy}"
    return ""


def allocator_summary() -> str:
    """What CUDA's allocator holds, for a rank's log; empty without CUDA."""
    torch = sys.modules.get("torch")
    return str(torch.cuda.memory_summary()) if torch is not None and torch.cuda.is_initialized() else ""


def _memory(has_remedy: bool) -> str:
    torch = sys.modules.get("torch")
    held = ""
    if torch is not None and torch.cuda.is_initialized():
        free, whole = torch.cuda.mem_get_info()
        tensors, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        numbers = {"tensors": tensors, "kept by the allocator": kept - tensors, "others": whole - free - kept, "free": free}
        parts = ", ".join(f"{name} {size // MIB:,} MiB" for name, size in numbers.items())
        held = f"\n  of {whole // MIB:,} MiB: {parts} (the allocator's summary is in this rank's log)"
    more = "`python -m disttrain plan` with the same overrides tells what each would save"
    if has_remedy:
        return f"{held}\n  {more}"
    three = "callbacks.grad_accumulation.micro_batch_size=<half of it>, strategy.recompute=full, or strategy=fsdp on more ranks"
    return f"{held}\n  try: {three}; {more}"


def _free_shared() -> str:
    return f"{shutil.disk_usage('/dev/shm').free // MIB:,} MiB" if os.path.isdir("/dev/shm") else "nothing"
