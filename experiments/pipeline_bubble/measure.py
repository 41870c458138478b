"""How long ranks wait under each schedule: the order of actions of real steps on four ranks, run over a clock.

    python experiments/pipeline_bubble/measure.py

writes table.md beside this file. Every schedule trains a step of an eight-layer GPT on four ranks with 4, 8 and 16
micro-batches; each rank notes what it did and in which order. The clock then gives forward and both halves of
backward of a rank's layers the same time, and messages none. zbv comes to its formula from 2 p - 1 = 7 micro-batches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before anything computes: ranks are forked from this process

from disttrain import Trainer  # noqa: E402
from disttrain.callbacks.grad_accumulation import GradAccumulation  # noqa: E402
from disttrain.config.schedules import SCHEDULES, bubble, stages_a_rank, takes  # noqa: E402
from disttrain.launch.place import Place  # noqa: E402
from disttrain.launch.world import run_world  # noqa: E402
from disttrain.models.gpt import GPT  # noqa: E402
from disttrain.parallel.clock import Action, waited  # noqa: E402
from disttrain.parallel.mesh import Mesh  # noqa: E402
from disttrain.parallel.options import Options  # noqa: E402
from disttrain.parallel.pipeline import Pipeline  # noqa: E402

RANKS = 4
MICRO_BATCHES = (4, 8, 16)


class Tokens(torch.utils.data.Dataset[Any]):
    """Sixteen sequences of four tokens."""

    def __len__(self) -> int:
        """Sequences."""
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets."""
        tokens = torch.arange(5).add(index) % 8
        return tokens[:-1], tokens[1:]


def orders(place: Place, micro_batches: Sequence[int]) -> dict[tuple[str, int], list[Action]]:
    """What this rank does in a step, by schedule and number of micro-batches."""
    found = {}
    for schedule in SCHEDULES:
        for num_micro in (n for n in micro_batches if takes(schedule, n, RANKS)):
            trainer = Trainer(
                GPT(num_layers=8, num_heads=1, hidden_size=8, vocab_size=8, max_seq_len=4),
                Tokens(),
                steps=1,
                global_batch_size=num_micro,
                mesh=Mesh({"pp": RANKS}, place.rank),
                options=Options(schedule=schedule),
                callbacks=[GradAccumulation(1)],
            )
            trainer.fit()
            assert isinstance(trainer.strategy.runner, Pipeline)
            found[schedule, num_micro] = list(trainer.strategy.runner.actions)
    return found


def shares(micro_batches: Sequence[int] = MICRO_BATCHES) -> dict[tuple[str, int], float]:
    """The waited share of a step, by schedule and number of micro-batches."""
    by_rank = run_world(orders, RANKS, (micro_batches,))
    return {case: waited([part[case] for part in by_rank], seconds(case[0])) for case in by_rank[0]}


def seconds(schedule: str) -> dict[str, float]:
    """Time of each action, if forward and both halves of backward of a rank's layers take one second."""
    part = 1.0 / stages_a_rank(schedule, None)
    return {"F": part, "B": 2 * part, "I": part, "W": part}


def main() -> None:
    """Measure and write the table."""
    found = shares()
    made = f"{date.today()}, torch {torch.__version__}"
    lines = [
        f"Waited share of a step on {RANKS} ranks: by the measured order of actions and, in brackets, by the formula; {made}.",
        "",
        f"| schedule | {' | '.join(f'{n} micro-batches' for n in MICRO_BATCHES)} |",
        f"|---|{'---|' * len(MICRO_BATCHES)}",
    ]
    for schedule in SCHEDULES:
        formula = {n: bubble(schedule, n, RANKS, stages_a_rank(schedule, None)) for n in MICRO_BATCHES}
        cells = [f"{found[schedule, n]:.4f} ({formula[n]:.4f})" if (schedule, n) in found else "refused" for n in MICRO_BATCHES]
        lines.append(f"| {schedule} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
