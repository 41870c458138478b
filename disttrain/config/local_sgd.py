"""What may stand beside `strategy.sync_every`, and what must wait for its syncs."""

from __future__ import annotations

from disttrain.config.schema import Config
from disttrain.errors import ConfigError

AMP = "disttrain.callbacks.amp.AMP"
CHECKPOINT = "disttrain.callbacks.checkpoint.Checkpoint"
EMA = "disttrain.callbacks.ema.EMA"


def check_local_sgd(config: Config) -> None:
    """Replicas train by themselves: each must be whole, or cut by tp alone; evaluations and saves fall on syncs."""
    strategy = config.strategy
    if not 0.0 <= strategy.outer_momentum < 1.0:
        raise ConfigError(f"strategy.outer_momentum={strategy.outer_momentum} is at least 0 and less than 1", "strategy.outer_momentum=0.9")
    if strategy.sync_every == 1:
        for name, usual in (("outer_lr", 1.0), ("outer_momentum", 0.0)):
            if getattr(strategy, name) != usual:
                found = f"strategy.{name}={getattr(strategy, name)} belongs to strategy.sync_every of two or more"
                raise ConfigError(found, "strategy.sync_every=8")
        return
    key = f"strategy.sync_every={strategy.sync_every}"
    if strategy.dp_replicate == 1:
        raise ConfigError(f"{key} averages replicas, and strategy.dp_replicate=1 has no other", "strategy=ddp, or strategy.sync_every=1")
    for name in ("pp", "dp_shard", "cp", "ep"):
        if getattr(strategy, name) > 1:
            found = f"{key} with strategy.{name}={getattr(strategy, name)}: replicas that train by themselves are whole, or cut by tp"
            raise ConfigError(found, f"strategy.{name}=1, or strategy.sync_every=1")
    if strategy.compression != "none":
        found = f"{key} sends no gradients, and strategy.compression={strategy.compression} makes them smaller"
        raise ConfigError(found, "strategy.compression=none")
    for name, callback in config.callbacks.items():
        if callback["_target_"] == AMP and callback.get("precision") == "fp16":
            found = f"{key} with callbacks.{name}.precision=fp16: the loss scale would be each replica's own"
            raise ConfigError(found, f"callbacks.{name}.precision=bf16")
        if callback["_target_"] == EMA:
            raise ConfigError(f"{key} with callbacks.{name}: each replica would average weights of its own", f"~callbacks.{name}")
        if callback["_target_"] == CHECKPOINT:
            _falls_on_syncs(strategy.sync_every, f"callbacks.{name}.every", callback.get("every"))
    _falls_on_syncs(strategy.sync_every, "train.eval_every", config.train.eval_every)


def _falls_on_syncs(sync_every: int, key: str, every: int | None) -> None:
    if every is None or every % sync_every == 0:
        return
    below, above = every // sync_every * sync_every, -(-every // sync_every) * sync_every
    nearest = [f"{key}={near}" for near in (below, above) if near]
    raise ConfigError(
        f"{key}={every} is no multiple of strategy.sync_every={sync_every}, and replicas are one model at syncs only; "
        f"nearest: {' or '.join(nearest)}",
        min(nearest, key=lambda one: abs(int(one.split("=")[1]) - every)),
    )
