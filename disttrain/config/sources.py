"""Where config files come from: the package's own, the current folder's, the experiments.

Order of search, the first that has a file wins: `-cd`, the current folder's `conf/`, the package's `conf/`, then
experiments. The current folder may add and shadow group files; the primary config stays the package's, because
most folders with a `conf/` have one of that name for something else.
"""

from __future__ import annotations

from pathlib import Path

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource

PACKAGE = Path(__file__).resolve().parent.parent
PRIMARY = "disttrain"
GROUP = "experiment"


def package_folder(name: str) -> Path:
    """`conf` or `experiments`: inside the package in a wheel, beside it in a clone or an editable install."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


class ProjectSource(FileConfigSource):
    """The current folder's `conf/`: everything in it but a primary config."""

    @staticmethod
    def scheme() -> str:
        """Prefix of its paths."""
        return "project"

    def is_config(self, config_path: str) -> bool:
        """Whether it has this file and may offer it."""
        return self._normalize_file_name(config_path) != f"{PRIMARY}.yaml" and super().is_config(config_path)


class ExperimentSource(ConfigSource):
    """Every `<folder>/<name>/config.yaml` as option `<name>` of the group `experiment`."""

    @staticmethod
    def scheme() -> str:
        """Prefix of its paths."""
        return "experiments"

    def load_config(self, config_path: str) -> ConfigResult:
        """The config of one experiment."""
        inner = FileConfigSource(self.provider, f"file://{self.path}")
        found = inner.load_config(f"{self._name(config_path)}/config")
        found.path = self.full_path()
        return found

    def available(self) -> bool:
        """Whether the folder exists."""
        return Path(self.path).is_dir()

    def is_group(self, config_path: str) -> bool:
        """The root, and the one group."""
        return config_path in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        """Whether there is such an experiment."""
        name = self._name(config_path)
        return name is not None and (Path(self.path) / name / "config.yaml").is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names of the experiments."""
        if config_path == "":
            return [] if results_filter == ObjectType.CONFIG else [GROUP]
        if config_path != GROUP or results_filter == ObjectType.GROUP:
            return []
        return sorted(file.parent.name for file in Path(self.path).glob("*/config.yaml"))

    def _name(self, config_path: str) -> str | None:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return name if group == GROUP else None


def register() -> None:
    """Make Hydra know the sources; again and again does no harm (a worker process of a sweep does)."""
    for source in (ProjectSource, ExperimentSource):
        Plugins.instance().register(source)


def search_path(extra: list[str]) -> ConfigSearchPath:
    """Hydra's search path of a run started in the current folder, `extra` folders (`-cd`) first."""
    register()
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in extra:
        path.append("command-line", f"file://{folder}")
    package, project = package_folder("conf"), Path.cwd() / "conf"
    if project.is_dir() and project.resolve() != package.resolve():
        path.append("project", f"project://{project}")
    path.append("main", f"file://{package}")
    folders = [Path.cwd() / "experiments", package_folder("experiments")]
    for experiments in dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()):
        path.append("experiments", f"experiments://{experiments}")
    path.append("schema", "structured://")
    return path
