"""What may stand in one file only, or nowhere: collectives, pickle, hooks that the loop never calls."""

from __future__ import annotations

import ast

import pytest

from disttrain.errors import ConfigError
from disttrain.train.hooks import Callback
from tests.quality.source import Source, room, sources

COLLECTIVES = {
    *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object"),
    *("all_gather_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast"),
    *("broadcast_object_list", "scatter", "scatter_object_list", "gather", "gather_object", "all_to_all", "all_to_all_single"),
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv", "barrier", "monitored_barrier"),
}
ONLY_HERE = "disttrain/parallel/collectives.py"

PICKLE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PICKLE_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "torch.package", "eval", "exec"}
OBJECT_COLLECTIVES = {name for name in COLLECTIVES if "object" in name}
"""They pickle what they send."""

MAY_UNPICKLE_OR_EVAL = {
    "disttrain/launch/wire.py": "between live processes of ours, in memory that has no name; nothing is stored",
    "disttrain/config/components.py": "annotations of our own source, without builtins",
}

PACKAGE = sources("disttrain")


def names_of(source: Source) -> dict[str, str]:
    """{local name: dotted origin} of everything imported anywhere in the file."""
    found = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def used(source: Source) -> list[tuple[str, int]]:
    """(dotted origin, line) of every imported or builtin name, and every attribute of one, that the file uses."""
    origin = names_of(source)
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            first, _, rest = ast.unparse(node).partition(".")
            found.append((".".join(filter(None, [origin.get(first, first), rest])), node.lineno))
    return found


def collectives_in(source: Source) -> list[str]:
    """Uses of `torch.distributed`'s collectives, whatever name they were imported under."""
    homes = (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
        "torch.distributed.nn.functional",
        "torch.distributed._functional_collectives",
    )
    return [
        f"{source.path}:{line} {name}"
        for name, line in used(source)
        if any(name.startswith(home + ".") and name.rpartition(".")[2] in COLLECTIVES for home in homes)
    ]


def pickles_in(source: Source) -> list[str]:
    """Uses of what writes pickle, or runs what it reads."""
    wrong = [(name, line) for name, line in used(source) if name.split(".")[0] in PICKLE_MODULES or name in PICKLE_CALLS]
    wrong += [
        (name, line)
        for name, line in used(source)
        if name.startswith("torch.distributed.") and name.rpartition(".")[2] in OBJECT_COLLECTIVES
    ]
    return [f"{source.path}:{line} {name}" for name, line in wrong]


def test_collectives_are_called_in_one_file() -> None:
    wrong = [line for source in PACKAGE if source.path != ONLY_HERE for line in collectives_in(source)]
    assert not wrong, "strided tensors are silently wrong on gloo: go through " + ONLY_HERE


def test_nothing_that_is_read_can_run() -> None:
    wrong = {source.path: pickles_in(source) for source in PACKAGE if pickles_in(source)}
    assert wrong.keys() == MAY_UNPICKLE_OR_EVAL.keys(), wrong


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed\ndef f():\n    distributed.barrier()",
        "from torch.distributed import all_gather as gather\ngather(x)",
    ],
)
def test_a_planted_collective_is_found(text: str) -> None:
    source = Source("disttrain/planted.py")
    source.__dict__["tree"] = ast.parse(text)
    assert len(collectives_in(source)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.dumps(x)",
        "from pickle import loads\nloads(x)",
        "import torch\ntorch.load(x)",
        "from torch import save\nsave(x)",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "eval(x)",
    ],
)
def test_a_planted_pickle_is_found(text: str) -> None:
    source = Source("disttrain/planted.py")
    source.__dict__["tree"] = ast.parse(text)
    assert pickles_in(source)


def test_callbacks_define_hooks_of_the_loop_only() -> None:
    callbacks = [source for source in PACKAGE if room(source.module) == "callbacks"]
    methods = [node.name for source in callbacks for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    assert {name for name in methods if name.startswith("on_")} <= Callback.HOOKS


@pytest.mark.parametrize(
    ("name", "instead"),
    [("on_train_batch_end", "on_train_step_end"), ("on_train_start", "on_fit_start"), ("on_validation_epoch_end", "on_validation_end")],
)
def test_a_lightning_only_hook_is_refused_with_its_new_name(name: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        type("Mine", (Callback,), {name: lambda self, trainer: None})
