"""A trainer's surface as callbacks see it, driven by hand."""

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from disttrain.config.schema import Config
from disttrain.parallel.layout import Layout
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.step import Report, Verdict
from disttrain.record import RunFolder
from disttrain.train.progress import Progress


@dataclass
class FakeWindow:
    steps: int = 0
    data_wait_seconds: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self):
        return time.perf_counter() - self.start

    def leave_out(self, seconds):
        self.start += seconds


class FakeTrainer:
    """One rank, one parameter `w` of four numbers."""

    def __init__(self, folder=None, rank=0, num_steps=10, config=None):
        self.folder = RunFolder(folder) if folder is not None else None
        self.mesh = Mesh()
        self.mesh.rank = rank
        self.is_lead = rank == 0
        self.device = torch.device("cpu")
        self.progress = Progress()
        self.update = SimpleNamespace(updates=torch.zeros((), dtype=torch.float64))
        self.strategy = SimpleNamespace(loss_scale=None, apart=SimpleNamespace(size=1))
        self.num_steps = num_steps
        self.eval_every: int | None = None
        self.evaluator = object()
        self.config = config
        self.window = FakeWindow()
        self.callbacks = {}
        self.model = torch.nn.Linear(4, 1, bias=False)
        self.parameters = {"w": torch.nn.Parameter(torch.zeros(4))}
        self.layouts = {"w": Layout((4,))}
        self.task = SimpleNamespace(unit="tokens")
        self.feed = SimpleNamespace(order=SimpleNamespace(global_batch_size=32))


def config(**changes):
    made = Config(callbacks={"wandb": {"_target_": "disttrain.callbacks.wandb.WandB"}}, **changes)
    made.launch.env = {"HF_TOKEN": "hf_sesame", "WANDB_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    return made


def report(loss=1.0, skip=0.0):
    return Report(
        losses=torch.tensor([[loss]], dtype=torch.float64),
        counts=torch.ones(1, dtype=torch.float64),
        grad_norm=torch.tensor(1.0, dtype=torch.float64),
        verdict=torch.zeros(len(Verdict)),
        skip=torch.tensor(skip),
        measured=torch.zeros(1, 0),
        number=1,
    )
