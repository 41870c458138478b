"""Cross-field checks: degrees, devices, batches. The numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disttrain.config.check import check
from disttrain.config.devices import num_visible
from disttrain.config.paths import anchored
from disttrain.config.schema import Config
from disttrain.errors import ConfigError, LaunchError

Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("words", "world", "dp", "tp"),
    [
        (["strategy=single"], 1, 1, 1),
        (["strategy=ddp"], 2, 2, 1),
        (["strategy=tensor_parallel"], 2, 1, 2),
        (["strategy=ddp_tensor_parallel"], 4, 2, 2),
        (["strategy=tensor_parallel", "strategy.tp=4"], 4, 1, 4),
        (["strategy=ddp", "launch.world_size=4"], 4, 4, 1),
        (["strategy=ddp_tensor_parallel", "launch.world_size=8"], 8, 4, 2),
        (["strategy=fsdp_tensor_parallel", "launch.world_size=8"], 8, 1, 2),
    ],
)
def test_world_without_gpus_is_two_an_axis(checked: Make, words: list[str], world: int, dp: int, tp: int) -> None:
    config = checked(*words)
    assert (config.launch.world_size, config.strategy.dp_replicate, config.strategy.tp) == (world, dp, tp)
    assert (config.launch.device, config.launch.backend) == ("cpu", "gloo")


@pytest.mark.parametrize(
    ("words", "replicate", "shard"),
    [
        (["strategy=fsdp"], 1, 2),
        (["strategy=hsdp"], 2, 2),
        (["strategy=fsdp_tensor_parallel"], 1, 2),
        (["strategy=fsdp", "launch.world_size=3", "train.global_batch_size=48"], 1, 3),
        (["strategy=hsdp", "launch.world_size=8"], 2, 4),
        (["strategy=ddp_tensor_parallel", "strategy.dp_shard=2", "launch.world_size=8"], 2, 2),
    ],
)
def test_shards_fill_the_world(checked: Make, words: list[str], replicate: int, shard: int) -> None:
    strategy = checked(*words).strategy
    assert (strategy.dp_replicate, strategy.dp_shard) == (replicate, shard)


def test_shards_are_data_ranks(checked: Make) -> None:
    with pytest.raises(ConfigError, match=r"times 3 data ranks \(strategy.dp_shard\)"):
        checked("strategy=fsdp", "launch.world_size=3")
    with pytest.raises(ConfigError, match=r"not divisible by 12 data ranks \(strategy.dp_replicate \* strategy.dp_shard\)"):
        checked("strategy=hsdp", "launch.world_size=12", "~callbacks.grad_accumulation")


@pytest.mark.parametrize(("gpus", "strategy", "world"), [(4, "ddp", 4), (4, "ddp_tensor_parallel", 4), (4, "single", 1), (1, "ddp", 1)])
def test_world_with_gpus_is_the_gpus(settled: Make, monkeypatch: pytest.MonkeyPatch, gpus: int, strategy: str, world: int) -> None:
    monkeypatch.setattr("disttrain.config.world.num_gpus", lambda: gpus)
    config = check(settled(f"strategy={strategy}"))
    assert (config.launch.world_size, config.launch.device) == (world, "cuda")
    assert config.launch.backend == "cuda:nccl,cpu:gloo"


def test_too_few_gpus_offer_the_cpu(settled: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.config.world.num_gpus", lambda: 1)
    for words in (["strategy=ddp_tensor_parallel"], ["strategy=ddp", "launch.world_size=4"]):
        with pytest.raises(ConfigError, match="1 GPUs") as caught:
            check(settled(*words))
        assert caught.value.remedy == "launch.device=cpu"
    on_cpu = check(settled("strategy=ddp", "launch.world_size=4", "launch.device=cpu"))
    assert on_cpu.launch.backend == "gloo"


@pytest.mark.parametrize(
    ("visible", "installed", "count"),
    [("", 4, 0), ("0,1", 4, 2), ("1", 4, 1), ("0,7,1", 4, 1), ("-1", 4, 0), ("GPU-abc,GPU-def", 4, 2), ("0,1", 0, 0)],
)
def test_visible_devices_count_as_cuda_counts_them(visible: str, installed: int, count: int) -> None:
    assert num_visible(visible, installed) == count


def test_degrees_that_exceed_the_world_are_named(checked: Make) -> None:
    words = ["strategy.dp_replicate=2", "strategy.tp=2", "strategy.pp=2", "launch.world_size=4"]
    with pytest.raises(ConfigError) as caught:
        checked(*words)
    message = caught.value.message
    assert "strategy.pp * strategy.dp_replicate * strategy.tp = 2 * 2 * 2 = 8, but launch.world_size = 4" in message


def test_degrees_that_fall_short_are_refused_with_the_one_to_raise(checked: Make) -> None:
    with pytest.raises(ConfigError, match=r"strategy.tp = 2, but launch.world_size = 4") as caught:
        checked("strategy=single", "strategy.tp=2", "launch.world_size=4")
    assert caught.value.remedy == "strategy.dp_replicate=2"


def test_a_degree_that_does_not_divide_the_world(checked: Make) -> None:
    with pytest.raises(ConfigError, match=r"launch.world_size=3 is not divisible by strategy.tp = 2"):
        checked("strategy=ddp_tensor_parallel", "launch.world_size=3")


@pytest.mark.parametrize("name", ["ep"])
def test_degrees_of_later_versions_are_refused_by_name(checked: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy\.{name}=2"):
        checked("strategy=single", f"strategy.{name}=2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.tp=3", "model.hidden_size=126", "model.num_heads=6", "model.num_kv_heads=2"], "does not divide model.num_kv_heads=2"),
        (["strategy.tp=3", "model.hidden_size=126", "model.num_heads=6"], "does not divide model.vocab_size=256"),
    ],
)
def test_tp_divides_what_it_cuts(checked: Make, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked("strategy=tensor_parallel", *words)


@pytest.mark.parametrize(
    ("total", "micro", "ranks", "remedy"),
    [
        (32, 8, 4, None),
        (48, 16, 2, "callbacks.grad_accumulation.micro_batch_size=12"),
        (30, 8, 2, "callbacks.grad_accumulation.micro_batch_size=5"),
        (31, 8, 2, "train.global_batch_size=32"),
    ],
)
def test_batches_divide(checked: Make, total: int, micro: int, ranks: int, remedy: str | None) -> None:
    words = [f"train.global_batch_size={total}", f"callbacks.grad_accumulation.micro_batch_size={micro}", f"launch.world_size={ranks}"]
    if remedy is None:
        assert checked(*words).train.global_batch_size == total
        return
    with pytest.raises(
        ConfigError, match=rf"train.global_batch_size={total} .* callbacks.grad_accumulation.micro_batch_size={micro}"
    ) as caught:
        checked(*words)
    assert caught.value.remedy == remedy
    checked(*words, remedy)


def test_without_accumulation_the_local_batch_is_whole(checked: Make) -> None:
    checked("callbacks=none", "train.global_batch_size=6")
    with pytest.raises(ConfigError, match=r"2 data ranks \(strategy.dp_replicate\)"):
        checked("callbacks=none", "train.global_batch_size=7")


def test_a_launched_world_is_taken_and_a_mismatch_named(checked: Make) -> None:
    assert checked("train.global_batch_size=24", launched=3).strategy.dp_replicate == 3
    with pytest.raises(LaunchError, match=r"launch.world_size=4, but 3 ranks were launched"):
        checked("launch.world_size=4", launched=3)


def test_relative_paths_are_taken_against_the_first_folder(settled: Make) -> None:
    config = anchored(settled("dataset=text", "dataset.paths=[books,/abs]", "paths.data=cache", "init_from=old"), "/first")
    assert config.paths.data == config.dataset["data_dir"] == "/first/cache"
    assert (config.dataset["paths"], config.init_from) == (["/first/books", "/abs"], "/first/old")
    assert anchored(settled(), "/first").paths.data.startswith("~")


def test_a_sequence_fits_the_model_and_the_ranks(checked: Make) -> None:
    with pytest.raises(ConfigError, match=r"dataset.context=256 is longer than model.max_seq_len=128") as caught:
        checked("dataset.context=256")
    assert caught.value.remedy == "model.max_seq_len=256"


@pytest.mark.parametrize("name", ["loss", "perplexity", "bits_per_byte"])
def test_a_metric_takes_no_name_of_the_losss(checked: Make, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"metrics.{name}: val/{name} is the name of what an evaluation gives by itself"):
        checked(f"metrics.{name}._target_=torchmetrics.MeanMetric")
    checked(f"metrics.my_{name}._target_=torchmetrics.MeanMetric")


@pytest.mark.parametrize(
    ("word", "message", "remedy"),
    [
        ("callbacks.checkpoint.every=0", "is 0; it is at least 1, or null", "callbacks.checkpoint.every=1"),
        ("callbacks.checkpoint.every_minutes=-1", "more than 0, or null", "callbacks.checkpoint.every_minutes=10"),
        ("callbacks.checkpoint.keep_last=0", "at least 1, or null", "callbacks.checkpoint.keep_last=1"),
        ("+callbacks.amp.init_scale=0", "callbacks.amp.init_scale is 0.0; it is more than 0", "callbacks.amp.init_scale=65536"),
        ("+callbacks.amp.init_scale=inf", "a finite number, more than 0", "callbacks.amp.init_scale=65536"),
        ("+callbacks.amp.growth_factor=1", "more than 1", "callbacks.amp.growth_factor=2"),
        ("+callbacks.amp.backoff_factor=1", "more than 0 and less than 1", "callbacks.amp.backoff_factor=0.5"),
        ("+callbacks.amp.growth_interval=0", "at least 1", "callbacks.amp.growth_interval=2000"),
    ],
)
def test_numbers_of_callbacks_have_limits(checked: Make, word: str, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        checked(word)
    assert caught.value.remedy == remedy
    checked(word, remedy)


def test_choices_of_callbacks_are_known_before_ranks_start(checked: Make) -> None:
    for word in ("+callbacks.checkpoint.mode=foo", "callbacks.amp.precision=fp61"):
        with pytest.raises(ConfigError, match="is not allowed: it takes"):
            checked(word)


def test_what_goes_by_evaluations_needs_some_on_the_way(checked: Make) -> None:
    for words in (["callbacks=[default,early_stopping]"], ["callbacks.checkpoint.keep_best=2"]):
        checked(*words)
        with pytest.raises(ConfigError, match=r"goes by evaluations, and train.eval_every=null makes one at the end only") as caught:
            checked(*words, "train.eval_every=null", "train.steps=50")
        assert caught.value.remedy == "train.eval_every=25"
    mine = ("callbacks=[default,early_stopping,custom]", "callbacks.custom._target_=tests.train.runs.Notes")
    checked(*mine, "train.eval_every=null")


def test_what_works_on_blocks_needs_some(checked: Make) -> None:
    images = ("model=simple_cnn", "dataset=digits")
    for word in ("strategy.compile=true", "strategy.recompute=full", "strategy.offload_activations=true", "optimizer=muon"):
        with pytest.raises(ConfigError, match=r"blocks that repeat, and disttrain.models.cnn.SimpleCNN has none") as caught:
            checked(*images, word)
        checked(*images, word, caught.value.remedy)
