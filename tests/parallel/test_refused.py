"""What a tensor plan would compute wrongly is refused, and what ranks disagree on is settled, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from disttrain.errors import ConfigError
from disttrain.launch.place import Place
from disttrain.models.gpt import GPT
from disttrain.models.task import Classification
from disttrain.parallel.mesh import Mesh
from disttrain.parallel.options import Options
from disttrain.train.trainer import Trainer

CUT = Options(plan={"up": "column", "down": "row"})


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = 24, width: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, width, generator=generator, dtype=torch.float64)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)
        self.task = Classification(accuracy=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x).relu())
        return y


class Alias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.up


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(8, 16)
        self.back.weight = self.up.weight


class Wider(nn.Linear):
    pass


class Subclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up = Wider(8, 16)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda module, inputs, output: 2 * output)


def fit(model: nn.Module, mesh: Mesh, **changes: Any) -> Trainer:
    made = Trainer(
        model, changes.pop("data", None) or Rows(), **{"mesh": mesh, "steps": 3, "global_batch_size": 12, "dtype": torch.float64} | changes
    )
    made.fit()
    return made


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("kind", "what"), [(Alias, "several names"), (Tied, "one parameter"), (Subclass, "does not fit"), (Hooked, "hooks")]
)
def test_a_plan_that_would_lose_something_is_refused(run_world: Any, kind: type[Net], what: str) -> None:
    def entry(place: Place) -> str:
        with pytest.raises(ConfigError, match=what) as caught:
            fit(kind(), Mesh({"tp": 2}, place.rank), options=CUT)
        return str(caught.value)

    assert len(set(run_world(entry))) == 1


class Sloped(Net):
    """A learned slope, one number, between a layer that is cut and the one that sums."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.PReLU(dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.slope(self.up(x)))
        return y


@pytest.mark.world(2)
def test_a_parameter_between_cut_layers_is_refused_unless_its_gradient_is_summed(run_world: Any) -> None:
    def entry(place: Place) -> list[float]:
        losses = []
        for degree, options in ((1, Options()), (2, Options(plan={**CUT.plan, "slope": "summed"}))):
            torch.manual_seed(0)
            losses.append(fit(Sloped(), Mesh({"tp": degree}, place.rank % degree), options=options).metrics["train/loss"])
        with pytest.raises(ConfigError, match=r"different gradients for 'slope.weight'") as caught:
            fit(Sloped(), Mesh({"tp": 2}, place.rank), options=CUT)
        assert caught.value.remedy == "'strategy.plan={slope: summed}'"
        return losses

    for one, two in run_world(entry):
        assert two == pytest.approx(one, rel=1e-12)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16, dtype=torch.float64), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.norm(self.up(x)).relu())
        return y


class Heads(Net):
    num_heads = 3

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 2)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("kind", "what"),
    [(Normed, "'norm', a BatchNorm1d of 16, was fed 8: it follows 'up'"), (Heads, "3 heads .* are not divisible")],
)
def test_what_a_cut_would_tear_apart_is_refused(run_world: Any, kind: type[Net], what: str) -> None:
    def entry(place: Place) -> None:
        with pytest.raises(ConfigError, match=what):
            fit(kind(), Mesh({"tp": 2}, place.rank), options=CUT)

    run_world(entry)


@pytest.mark.world(2)
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_cut(run_world: Any) -> None:
    def entry(place: Place) -> None:
        with pytest.raises(ConfigError, match=r"Adafactor takes means over whole rows and columns, and ranks hold parts of 'up\.weight'"):
            fit(Net(), Mesh({"tp": 2}, place.rank), options=CUT, optimizer=torch.optim.Adafactor)

    run_world(entry)


class Smooth(Classification):
    """A task of somebody's own, which knows nothing of logits that are cut."""

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none", label_smoothing=0.1)
        return {"loss": rows.view(len(targets), -1).sum(1)}


class Tokens(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(16, (9,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [{}, {"head": "column_gather"}], ids=["own task", "own head"])
def test_a_loss_over_whole_logits_gets_whole_logits(run_world: Any, plan: dict[str, str]) -> None:
    def entry(place: Place) -> list[float]:
        losses = []
        for degree in (1, 2):
            torch.manual_seed(0)
            model = GPT(num_layers=1, num_heads=2, hidden_size=16, vocab_size=16, max_seq_len=8)
            mesh = Mesh({"tp": 2}, place.rank) if degree == 2 else Mesh()
            task = Smooth("tokens") if not plan else None
            losses.append(fit(model, mesh, data=Tokens(), task=task, options=Options(plan=plan)).metrics["train/loss"])
        return losses

    for one, two in run_world(entry):
        assert two == pytest.approx(one, rel=1e-12)


@pytest.mark.world(2)
def test_ranks_that_built_different_weights_start_from_the_first_ones(run_world: Any) -> None:
    def entry(place: Place) -> float:
        torch.manual_seed(place.rank)
        trained = fit(Net(), Mesh({"dp_replicate": 2}, place.rank))
        return float(sum(parameter.detach().sum() for parameter in trained.parameters.values()))

    first, second = run_world(entry)
    assert first == second


class Branch(Net):
    """One layer or the other, by the sign of the first sample: ranks differ in what they leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.up if float(x[0, 0]) > 0 else self.other
        y: torch.Tensor = self.down(layer(x).relu())
        return y


@pytest.mark.world(2)
def test_a_parameter_may_be_left_out_on_one_rank_only(run_world: Any) -> None:
    def entry(place: Place) -> float:
        torch.manual_seed(0)
        options = Options(find_unused_parameters=True)
        trained = fit(Branch(), Mesh({"dp_replicate": 2}, place.rank), options=options, steps=6)
        return float(sum(parameter.detach().sum() for parameter in trained.parameters.values()))

    first, second = run_world(entry)
    assert first == second


class Reentrant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda z: self.down(self.up(z).tanh()).repeat(1, 4), x, use_reentrant=True)
        return x[:, :2]


@pytest.mark.world(2)
def test_a_gradient_that_comes_twice_is_refused(run_world: Any) -> None:
    def entry(place: Place) -> str:
        with pytest.raises(ConfigError, match="came twice in one backward") as caught:
            fit(Reentrant(), Mesh({"dp_replicate": 2}, place.rank))
        return caught.value.message

    run_world(entry)


def test_nothing_to_train_is_told() -> None:
    with pytest.raises(ConfigError, match="no parameter to train"):
        fit(Net().requires_grad_(False), Mesh())


@pytest.mark.world(3)
def test_a_batch_that_does_not_come_out_even_is_refused(run_world: Any) -> None:
    def entry(place: Place) -> None:
        with pytest.raises(ConfigError, match="global_batch_size=10 is not divisible by 3 data ranks"):
            fit(Net(), Mesh({"dp_replicate": 3}, place.rank), global_batch_size=10)

    run_world(entry)
