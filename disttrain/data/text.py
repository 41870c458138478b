"""Text as one long row of tokens: any files or folders, or this interpreter's own library source."""

from __future__ import annotations

import hashlib
import os
import shlex
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from disttrain.data import prepared
from disttrain.data.module import DEFAULT_FOLDER, OTHER_FOLDER, DataModule, Kind, Loading
from disttrain.errors import DataError
from disttrain.places import expanded

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = 1
"""Part of the key of prepared files: to be raised when they come to hold something else."""


class TextFiles(DataModule):
    """Next-token samples from text files, train and validation apart by file.

    A file is for validation if the hash of its path below its folder says so; a lone file is cut near its end. Samples are
    windows that follow one another, so an epoch asks for each token once.
    """

    kind: Kind = "tokens"
    needs_prepare: ClassVar[bool] = True
    name: ClassVar[str] = "text"
    excluded: ClassVar[frozenset[str]] = frozenset({"__pycache__"})
    """Names of folders that are left out, beside hidden ones."""

    def __init__(
        self,
        *,
        paths: Sequence[str],
        data_dir: str = DEFAULT_FOLDER,
        context: int = 128,
        vocabulary: Literal["bytes", "characters"] = "bytes",
        validation_fraction: float = 0.1,
        pattern: str = "*",
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = True,
    ) -> None:
        """Nothing is read before `prepare`.

        paths: files, and folders that are searched through for names that match `pattern`.
        data_dir: where the tokens are written. context: tokens a sample.
        vocabulary: the 256 bytes, or the characters that occur (Unicode code points).
        validation_fraction: share of the files; 0 for no validation split.
        """
        if vocabulary not in ("bytes", "characters"):
            raise DataError(f"dataset.vocabulary={vocabulary} is not one of bytes, characters", "dataset.vocabulary=bytes")
        if not 0 <= validation_fraction < 1:
            raise DataError(f"dataset.validation_fraction={validation_fraction} is not in [0, 1)", "dataset.validation_fraction=0.1")
        if context < 1:
            raise DataError(f"dataset.context={context} is not positive", "dataset.context=128")
        self.paths = [paths] if isinstance(paths, str) else list(paths)
        self.folder = expanded(data_dir, OTHER_FOLDER)
        self.context = context
        self.vocabulary = vocabulary
        self.validation_fraction = validation_fraction
        self.pattern = pattern
        self.loading = Loading(num_workers, prefetch, pin_memory)
        self._found: prepared.Prepared | None = None

    def prepare(self) -> None:
        """Write the tokens of all files, once; a later run with unchanged files finds them."""
        files = self._files()
        key = self._key(files)
        self._found = prepared.find(self.folder, self.name, key) or self._convert(files, key)
        for split, wanted in (("train", True), ("validation", self.validation_fraction > 0)):
            num_tokens = self._found.arrays[split]["shape"][0]
            if wanted and num_tokens <= self.context:
                raise DataError(
                    f"too little text: {len(files)} files under dataset.paths give the {split} split {num_tokens} tokens, "
                    f"and one sample takes dataset.context + 1 = {self.context + 1}",
                    f"dataset.context={num_tokens - 1}" if num_tokens > 1 else "dataset.validation_fraction=0, or more dataset.paths",
                )

    def train(self) -> TokenWindows:
        """Windows over the training files."""
        return TokenWindows(self._prepared(), "train", self.context)

    def validation(self) -> TokenWindows | None:
        """Windows over the validation files."""
        return TokenWindows(self._prepared(), "validation", self.context) if self.validation_fraction > 0 else None

    @property
    def vocab_size(self) -> int:
        """256, or the number of different characters."""
        return 256 if self.vocabulary == "bytes" else len(self._characters())

    @property
    def sample_shape(self) -> tuple[int]:
        """As many tokens as a window has."""
        return (self.context,)

    @property
    def bytes_per_token(self) -> float:
        """One, or the mean length of a character in UTF-8, over all files."""
        return 1.0 if self.vocabulary == "bytes" else float(self._prepared().facts["bytes_per_token"])

    def encode(self, text: str) -> list[int]:
        """Token numbers of `text`; DataError on a character that the vocabulary lacks."""
        if self.vocabulary == "bytes":
            return list(text.encode())
        numbers = {character: i for i, character in enumerate(self._characters())}
        unknown = sorted(set(text) - set(numbers))
        if unknown:
            known = "".join(one for one in numbers if one.isprintable() and not one.isspace())[:8]
            raise DataError(
                f"the text doesn't hold the characters {unknown}, so the model knows no token for them",
                f"generate.prompt={shlex.quote(known)}" if known else None,
            )
        return [numbers[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token numbers; bytes that are no UTF-8 become U+FFFD."""
        if self.vocabulary == "bytes":
            return bytes(ids).decode(errors="replace")
        characters = self._characters()
        return "".join(characters[i] for i in ids)

    def _characters(self) -> str:
        return str(self._prepared().facts["characters"])

    def _prepared(self) -> prepared.Prepared:
        if self._found is None:  # a rank that was not forked from the parent that prepared
            self._found = prepared.find(self.folder, self.name, self._key(self._files()))
        if self._found is None:
            raise DataError(f"the text is not prepared under {self.folder}: prepare() comes first, once a node")
        return self._found

    def _files(self) -> list[tuple[str, Path]]:
        """(path below its folder, file), in a fixed order."""
        files: list[tuple[str, Path]] = []
        for given in self.paths:
            path = expanded(given)
            if path.is_file():
                files.append((path.name, path))
            elif path.is_dir():
                files += self._below(path)
            else:
                raise DataError(f"dataset.paths names {given}, which doesn't exist", "dataset.paths=[FOLDER_OR_FILE,...]")
        if not files:
            raise DataError(f"no file under dataset.paths={self.paths} matches dataset.pattern={self.pattern}", "dataset.pattern='*'")
        return files

    def _below(self, top: Path) -> list[tuple[str, Path]]:
        found = []
        for root, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name not in self.excluded and not name.startswith(".")]
            here = Path(root)
            found += [here / name for name in names if fnmatch(name, self.pattern) and not name.startswith(".")]
        return sorted((path.relative_to(top).as_posix(), path) for path in found if path.is_file())

    def _key(self, files: Sequence[tuple[str, Path]]) -> str:
        stats = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in ((name, path.stat()) for name, path in files)]
        return prepared.digest(_FORMAT, self.vocabulary, self.validation_fraction, stats)

    def _is_validation(self, files: Sequence[tuple[str, Path]]) -> list[bool]:
        """Which files are for validation: by hash, but at least one on either side."""
        if self.validation_fraction == 0:
            return [False] * len(files)
        shares = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2.0**64 for name, _ in files]
        chosen = [share < self.validation_fraction for share in shares]
        if not any(chosen):
            chosen[shares.index(min(shares))] = True
        elif all(chosen):
            chosen[shares.index(max(shares))] = False
        return chosen

    def _convert(self, files: Sequence[tuple[str, Path]], key: str) -> prepared.Prepared:
        facts: dict[str, Any] = {}
        table = None
        if self.vocabulary == "characters":
            codes = np.unique(np.concatenate([np.unique(_code_points(path)) for _, path in files]))
            table = np.zeros(int(codes.max(initial=0)) + 1, np.uint8 if len(codes) <= 256 else np.int32)
            table[codes] = np.arange(len(codes))
            num_bytes = sum(path.stat().st_size for _, path in files)
            num_characters = sum(len(_code_points(path)) for _, path in files)
            facts = {"characters": "".join(map(chr, codes)), "bytes_per_token": num_bytes / max(num_characters, 1)}
        splits = {"train": self._chunks(files, False, table), "validation": self._chunks(files, True, table)}
        return prepared.store(self.folder, self.name, key, splits, facts)

    def _chunks(self, files: Sequence[tuple[str, Path]], validation: bool, table: NDArray[Any] | None) -> Iterator[NDArray[Any]]:
        """Tokens of the files of one split."""
        if len(files) == 1:
            tokens = _tokens(files[0][1], table)
            cut = len(tokens) - int(len(tokens) * self.validation_fraction)
            yield tokens[cut:] if validation else tokens[:cut]
            return
        for (_, path), chosen in zip(files, self._is_validation(files), strict=True):
            if chosen == validation:
                yield _tokens(path, table)


class PythonStdlib(TextFiles):
    """The source of this interpreter's own library, without its tests and without installed packages."""

    name: ClassVar[str] = "python_stdlib"
    excluded: ClassVar[frozenset[str]] = frozenset(
        {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"}
    )

    def __init__(
        self,
        *,
        data_dir: str = DEFAULT_FOLDER,
        context: int = 128,
        vocabulary: Literal["bytes", "characters"] = "bytes",
        validation_fraction: float = 0.1,
        num_workers: int = 0,
        prefetch: int = 4,
        pin_memory: bool = True,
    ) -> None:
        """Arguments as in `TextFiles`."""
        super().__init__(
            paths=[sysconfig.get_path("stdlib")],
            data_dir=data_dir,
            context=context,
            vocabulary=vocabulary,
            validation_fraction=validation_fraction,
            pattern="*.py",
            num_workers=num_workers,
            prefetch=prefetch,
            pin_memory=pin_memory,
        )


class TokenWindows:
    """Sample i is tokens [i context, (i + 1) context], targets one to the right of inputs: int64 [n, context] each."""

    def __init__(self, source: prepared.Prepared, split: str, context: int) -> None:
        """Maps the tokens; copies nothing."""
        self.source = source
        self.split = split
        self.context = context
        self.fingerprint = f"{split}-{context}-{source.fingerprint}"
        self._windows = self._map()

    def __len__(self) -> int:
        """Number of whole windows; what is left at the end is not used."""
        return len(self._windows)

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets; nothing is drawn."""
        import torch

        rows = self._windows[indices.numpy()]
        return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))

    def _map(self) -> NDArray[Any]:
        """Overlapping windows [n, context + 1] over the memory map."""
        tokens = self.source.array(self.split)
        count = max(len(tokens) - 1, 0) // self.context
        step = tokens.strides[0]
        return np.lib.stride_tricks.as_strided(tokens, (count, self.context + 1), (self.context * step, step), writeable=False)

    def __getstate__(self) -> dict[str, Any]:
        """A process that gets a copy maps the file itself."""
        return self.__dict__ | {"_windows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map again."""
        self.__dict__.update(state)
        self._windows = self._map()


def _tokens(path: Path, table: NDArray[Any] | None) -> NDArray[Any]:
    """Bytes of a file, or the numbers that `table` [code point] gives its characters."""
    return np.fromfile(path, np.uint8) if table is None else table[_code_points(path)]


def _code_points(path: Path) -> NDArray[Any]:
    try:
        return np.frombuffer(path.read_bytes().decode().encode("utf-32-le"), "<u4")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start})", "dataset.vocabulary=bytes") from error
