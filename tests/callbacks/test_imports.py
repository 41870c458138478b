"""Heavy packages are imported where they are used (J04)."""

import subprocess
import sys

HEAVY = ("wandb", "tensorboard", "torch.utils.tensorboard", "torchmetrics", "torchvision", "matplotlib", "rich", "psutil")

PROGRAM = f"""
import importlib, pkgutil, sys
import torch
before = set(sys.modules)
import disttrain.callbacks, disttrain.checkpoint, disttrain.train.metrics
for package in (disttrain.callbacks, disttrain.checkpoint):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
from disttrain.callbacks.wandb import WandB
WandB(mode="offline")
print(sorted(name for name in set(sys.modules) - before if name in {HEAVY!r}))
"""


def test_callbacks_import_no_heavy_package():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
