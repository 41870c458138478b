"""Pipeline schedules as facts: how many stages a rank holds, which micro-batches a schedule takes, where stages lie. No torch.

With p ranks, v stages a rank and m micro-batches a step; F, I and W are the times of forward, of the backward for
the input and for the weights of one rank's layers and one micro-batch, and here the same. The bubble is the share of a step
in which ranks wait (`bubble`; measured on the real order of actions in experiments/pipeline_bubble).
"""

from __future__ import annotations

from dataclasses import dataclass

from disttrain.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """One schedule, by its name in the config."""

    torch_name: str
    """Its class in torch.distributed.pipelining, by the name that `get_schedule_class` takes."""
    paper: str
    least_stages: int = 1
    most_stages: int | None = 1
    """Stages a rank; None: any number."""
    v_shaped: bool = False
    """Stages go down the ranks and up again, so that the first rank holds the first stage and the last one."""
    splits_backward: bool = False
    """Backward for inputs and for weights are two actions."""


SCHEDULES = {
    "gpipe": Schedule("GPipe", "Huang et al. 2019, arXiv:1811.06965"),
    "1f1b": Schedule("1F1B", "Narayanan et al. 2019 (PipeDream-Flush), arXiv:2006.09503"),
    "interleaved_1f1b": Schedule("Interleaved1F1B", "Narayanan et al. 2021, arXiv:2104.04473", 2, None),
    "interleaved_zero_bubble": Schedule("InterleavedZeroBubble", "Qi et al. 2023, arXiv:2401.10241", 2, None, splits_backward=True),
    "zbv": Schedule("ZBVZeroBubble", "Qi et al. 2023, arXiv:2401.10241, section 6", 2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule("DualPipeV", "DeepSeek-AI 2024, arXiv:2412.19437", 2, 2, v_shaped=True, splits_backward=True),
}


def stages_a_rank(name: str, asked: int | None) -> int:
    """`strategy.virtual_stages`, or the fewest that the schedule takes. ConfigError for a number that it doesn't take."""
    schedule = SCHEDULES[name]
    least, most = schedule.least_stages, schedule.most_stages
    if asked is None:
        return least
    if asked < least or (most is not None and asked > most):
        takes = f"exactly {least}" if most == least else f"{least} or more"
        raise ConfigError(
            f"strategy.virtual_stages={asked}, but strategy.schedule={name} takes {takes} a rank", f"strategy.virtual_stages={least}"
        )
    return asked


def holders(name: str, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """The rank, by its index on `pp`, that holds each stage."""
    rounds = [range(num_ranks), range(num_ranks - 1, -1, -1)] if SCHEDULES[name].v_shaped else [range(num_ranks)] * 2
    return tuple(rounds[stage // num_ranks % 2][stage % num_ranks] for stage in range(num_stages))


def takes(name: str, num_micro: int, num_ranks: int) -> bool:
    """Whether the schedule takes so many micro-batches a step."""
    if name == "1f1b":
        return num_micro >= num_ranks
    if name.startswith("interleaved"):
        return num_micro % max(1, num_micro // num_ranks) == 0
    if name == "dualpipev":
        return num_micro >= 2 * num_ranks
    return num_micro >= 1


def needs(name: str, num_ranks: int) -> str:
    """`takes` in words."""
    if name == "1f1b":
        return f"at least {num_ranks} micro-batches a step, one a rank"
    if name.startswith("interleaved"):
        return f"micro-batches in rounds of one size, as any multiple of {num_ranks} gives"
    return f"at least {2 * num_ranks} micro-batches a step, one a stage" if name == "dualpipev" else "at least one micro-batch a step"


def nearest(name: str, num_micro: int, num_ranks: int, divides: int | None = None) -> int | None:
    """The number of micro-batches nearest to `num_micro` that the schedule takes; of those that divide `divides`, if given."""
    most = divides or 2 * (num_micro + num_ranks)
    legal = [n for n in range(1, most + 1) if takes(name, n, num_ranks) and (divides is None or divides % n == 0)]
    return min(legal, key=lambda n: abs(n - num_micro), default=None)


def bubble(name: str, num_micro: int, num_ranks: int, virtual_stages: int) -> float:
    """The share of a step in which ranks wait, with F = I = W; of zbv, with at least 2 p - 1 micro-batches."""
    waits = num_ranks - 1
    work = virtual_stages * num_micro
    if SCHEDULES[name].splits_backward:
        return waits / (3 * work + waits)
    return waits / (work + waits)
