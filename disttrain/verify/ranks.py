"""What the ranks of `verify` run: one device writes what it computed, a layout compares its own part with it.

Every step is judged by itself. The layout's gradients are compared first; then its optimizer is fed the
reference's gradients and its update compared (AdamW's eps would blow rounding up by 1e8); then its weights are
set to the reference's, so that no error of one step enters the next.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from disttrain import build
from disttrain.config.schema import Config
from disttrain.data.adapt import numbered
from disttrain.data.dataset import Order, Position
from disttrain.launch.place import Place
from disttrain.models.task import Classification
from disttrain.parallel import collectives
from disttrain.parallel.layout import Copy, Layout, Sum
from disttrain.parallel.mesh import AXES, VIEWS
from disttrain.parallel.step import Report, Step
from disttrain.train.assembly import make_feed
from disttrain.train.batch import train_positions
from disttrain.train.trainer import Trainer
from disttrain.verify import masks
from disttrain.verify.compare import Error, ratio, relative_error, worst_by_step
from disttrain.verify.uneven import Uneven

DRAWN = "drawn.json"
"""In the record of one device: rates of dropout, which the proof sets to zero, and whether it drew random numbers all the same."""


def prepared(config: Config, place: Place) -> Trainer:
    """A trainer whose training data is short and uneven."""
    trainer = build.build_trainer(config, None, place)
    size = config.train.global_batch_size
    dataset = Uneven(numbered(trainer.data.train()), size + size // 2 + 1, isinstance(trainer.task, Classification))
    order = Order(len(dataset), size, config.seed)
    trainer.feed = make_feed(trainer.data, dataset, order, trainer.feed.part, trainer.strategy)
    return trainer


def steps_of(trainer: Trainer) -> Iterator[Step]:
    """The steps to compare."""
    return trainer.feed.steps(train_positions(trainer.feed.order, 0, Position(), trainer.num_steps))


def run_step(trainer: Trainer, step: Step) -> Report:
    """Gradients and agreed numbers of one step, as the loop makes them, without the update."""
    trainer.strategy.count(step)
    trainer.strategy.model.train()
    report = trainer.strategy.finish(trainer.strategy.forward_backward(step), step)
    trainer.update.show_gradients()
    return report


# --- one device ----------------------------------------------------------------------------------------------------------


def reference(config: Config, folder: str, place: Place) -> None:
    """Write start, what the model draws, and every step's gradients, weights after the update and numbers, into `folder`."""
    trainer = prepared(config, place)
    rates = masks.silenced(trainer.model)
    parameters = trainer.parameters
    save_file({name: _own(parameter) for name, parameter in parameters.items()}, Path(folder) / "start.safetensors")
    still_draws = False
    for number, step in enumerate(steps_of(trainer)):
        trainer.strategy.streams.begin(step.number)
        seeded = trainer.strategy.streams.state()
        report = run_step(trainer, step)
        still_draws |= not torch.equal(seeded, trainer.strategy.streams.state())
        buffers = {f"buffer/{name}": _own(buffer) for name, buffer in trainer.model.named_buffers()}
        tensors = {f"gradient/{name}": _own(parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None}
        trainer.update(report)
        tensors |= buffers | {f"after/{name}": _own(parameter) for name, parameter in parameters.items()}
        save_file(tensors, Path(folder) / f"step-{number}.safetensors")
        numbers = {"loss": float(report.loss), "norm": float(report.grad_norm), "samples": _samples(step), "num_micro": len(step.micro)}
        (Path(folder) / f"step-{number}.json").write_text(json.dumps(numbers))
    (Path(folder) / DRAWN).write_text(json.dumps({"rates": rates, "still_draws": still_draws}))


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _samples(step: Step) -> dict[str, list[int]]:
    """Checksum of inputs and targets by sample number, void ones left out."""
    found: dict[str, list[int]] = {}
    for batch in step.micro:
        for row, index in enumerate(batch.indices.tolist()):
            if index >= 0:
                found[str(index)] = [_checksum(batch.inputs, row), _checksum(batch.targets, row)]
    return found


def _checksum(tree: Any, row: int) -> int:
    if isinstance(tree, Tensor):
        return zlib.crc32(tree[row].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    values = tree.values() if isinstance(tree, dict) else tree
    return zlib.crc32(repr([_checksum(value, row) for value in values]).encode())


# --- the layout ------------------------------------------------------------------------------------------------------------


def layout(config: Config, folder: str, place: Place) -> list[dict[str, Any]]:
    """Compare this rank's part of everything with the reference in `folder`; the worst of each step over all ranks, as JSON."""
    trainer = prepared(config, place)
    masks.silenced(trainer.model)
    comparison = _Comparison(trainer, Path(folder))
    comparison.start()
    for number, step in enumerate(steps_of(trainer)):
        comparison.step(number, step)
    every = collectives.gather_json([error.as_json() for error in worst_by_step(comparison.errors)], trainer.mesh.axis("world"))
    merged = worst_by_step([Error.from_json(error) for part in every for error in part])
    return [error.as_json() for error in merged]


def mask_law(config: Config, folder: str, place: Place) -> list[dict[str, Any]]:
    """With dropout on: which ranks of a tensor group draw the same masks, against what the plan says; violations as JSON."""
    trainer = prepared(config, place)
    with masks.recorded(trainer.strategy) as drawn:
        for step in steps_of(trainer):
            run_step(trainer, step)
            trainer.update.optimizer.zero_grad(set_to_none=True)
    return [error.as_json() for error in masks.violations(drawn, trainer.strategy)]


@dataclass
class _Piece:
    """A rank's block of one tensor and the reference's same block."""

    found: Tensor
    wanted: Tensor


def _ratio(pieces: Sequence[_Piece]) -> float | None:
    return ratio(torch.cat([piece.found.flatten() for piece in pieces]), torch.cat([piece.wanted.flatten() for piece in pieces]))


class _Comparison:
    """Collects the errors of this rank."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder
        self.rank = trainer.mesh.rank
        self.at = trainer.mesh.coordinate()
        self.errors: list[Error] = []

    def start(self) -> None:
        """Weights before the first step."""
        with safe_open(self.folder / "start.safetensors", "pt") as file:
            known = set(file.keys())
            for name, parameter in self.trainer.parameters.items():
                if name not in known:
                    self._note("start", name, 0, float("inf"))
                    continue
                self._compare("start", name, 0, parameter.detach(), file.get_tensor(name), 1.0)
            for name in known - set(self.trainer.layouts):
                self._note("start", name, 0, float("inf"))

    def step(self, number: int, step: Step) -> None:
        """Batch, gradients, replicas, norm and loss; then, from the reference's gradients, the update."""
        wanted = json.loads((self.folder / f"step-{number}.json").read_text())
        self._batch(number, step, wanted["samples"])
        report = run_step(self.trainer, step)
        with safe_open(self.folder / f"step-{number}.safetensors", "pt") as file:
            self._gradients(number, file, wanted["norm"])
            self._replicas(number)
            self._scalar("norm", "gradient norm", number, float(report.grad_norm), wanted["norm"])
            self._scalar("loss", "loss", number, float(report.loss), wanted["loss"])
            self._buffers(number, file)
            self._update(number, file, report, wanted["norm"])

    def _batch(self, number: int, step: Step, wanted: dict[str, list[int]]) -> None:
        """This rank holds its slice of the reference's samples, none missing over the data axis, none in two places."""
        mine = _samples(step)
        wrong = sum(1 for index, sums in mine.items() if wanted.get(index) != sums)
        taken = [index for part in collectives.gather_json(sorted(mine), self.trainer.mesh.axis("data")) for index in part]
        wrong += len(set(wanted) ^ set(taken)) + len(taken) - len(set(taken))
        for axis in (self.trainer.mesh.axis(name) for name in AXES if name not in VIEWS["data"]):
            shared = collectives.gather_json(list(mine.items()), axis)  # in the order of rows
            wrong += sum(1 for other in shared if other != shared[axis.index])
        self._note("batch", "samples", number, float(wrong))

    def _gradients(self, number: int, file: Any, norm: float) -> None:
        known = {key.removeprefix("gradient/") for key in file.keys() if key.startswith("gradient/")}  # noqa: SIM118
        for name, parameter in self.trainer.parameters.items():
            if (parameter.grad is None) != (name not in known):
                self._note("gradient", name, number, float("inf"), 0.0 if parameter.grad is None else None)
            elif parameter.grad is not None:
                self._compare("gradient", name, number, parameter.grad, file.get_tensor(f"gradient/{name}"), norm)

    def _buffers(self, number: int, file: Any) -> None:
        """Running statistics and the like, which are whole on every rank; then the reference's are taken up."""
        for name, buffer in self.trainer.model.named_buffers():
            wanted = file.get_tensor(f"buffer/{name}")
            error = relative_error(buffer.cpu(), wanted, float(wanted.abs().max()), 1.0) if wanted.numel() else 0.0
            self._note("buffer", name, number, error)
            buffer.copy_(wanted)

    def _replicas(self, number: int) -> None:
        """Gradients that must be the same on an axis are, bit for bit."""
        for axis_name in AXES:
            axis = self.trainer.mesh.axis(axis_name)
            if axis.size == 1:
                continue
            sums = {
                name: zlib.crc32(_own(parameter.grad).view(torch.uint8).numpy().tobytes())
                for name, parameter in self.trainer.parameters.items()
                if parameter.grad is not None and parameter.dim() and isinstance(self._placement(name, axis_name), (Copy, Sum))
            }
            for other in collectives.gather_json(sums, axis):
                for name in sums:
                    if other.get(name) != sums[name]:
                        self._note("replica", name, number, float("inf"))

    def _placement(self, name: str, axis: str) -> Any:
        return self.trainer.layouts[name].placements.get(axis)

    def _update(self, number: int, file: Any, report: Report, norm: float) -> None:
        """Feed the reference's gradients, compare the step taken, then take up the reference's weights."""
        strategy = self.trainer.strategy
        before = {name: parameter.detach().clone() for name, parameter in self.trainer.parameters.items()}
        for name, parameter in self.trainer.parameters.items():
            if parameter.grad is not None and f"gradient/{name}" in file.keys():  # noqa: SIM118
                for piece in self._pieces(name, parameter.grad, file.get_tensor(f"gradient/{name}")):
                    piece.found.copy_(piece.wanted)
        report.grad_norm = strategy.grad_norm()
        self._scalar("norm", "norm of the reference's gradients", number, float(report.grad_norm), norm)
        report.skip.zero_()
        self.trainer.update(report)
        previous = "start.safetensors" if number == 0 else f"step-{number - 1}.safetensors"
        with safe_open(self.folder / previous, "pt") as earlier, torch.no_grad():
            for name, parameter in self.trainer.parameters.items():
                after = file.get_tensor(f"after/{name}")
                moved = after - earlier.get_tensor(name if number == 0 else f"after/{name}")
                self._compare("update", name, number, parameter.detach() - before[name], moved, 1.0, after.abs().max())
                for piece in self._pieces(name, parameter, after):
                    piece.found.copy_(piece.wanted)

    def _pieces(self, name: str, local: Tensor, whole: Tensor) -> list[_Piece]:
        layout: Layout = self.trainer.layouts[name]
        return [_Piece(local[target], whole[source].to(local.device)) for source, target in layout.pieces(self.at)]

    def _compare(
        self, quantity: str, name: str, step: int, local: Tensor, whole: Tensor, norm: float, rounding_of: Tensor | None = None
    ) -> None:
        """Note the worst error over the pieces of one tensor. `rounding_of`: a value whose own rounding the difference can't be below."""
        layout = self.trainer.layouts[name]
        if tuple(whole.shape) != layout.shape or tuple(local.shape) != layout.local_shape(self.at):
            self._note(quantity, name, step, float("inf"))
            return
        largest = float(whole.abs().max()) if whole.numel() else 0.0
        if rounding_of is not None:
            largest = max(largest, float(rounding_of) * torch.finfo(local.dtype).eps * 1e6)
        pieces = self._pieces(name, local, whole)
        error = max((relative_error(piece.found, piece.wanted, largest, norm) for piece in pieces), default=0.0)
        self._note(quantity, name, step, error, _ratio(pieces) if error > 1e-9 else None)

    def _scalar(self, quantity: str, name: str, step: int, found: float, wanted: float) -> None:
        error = relative_error(torch.tensor(found), torch.tensor(wanted, dtype=torch.float64), abs(wanted), 1.0)
        self._note(quantity, name, step, abs(found - wanted) / max(abs(wanted), 1e-30) if error != float("inf") else error)

    def _note(self, quantity: str, name: str, step: int, error: float, factor: float | None = None) -> None:
        self.errors.append(Error(quantity, name, step, self.rank, error, factor))
