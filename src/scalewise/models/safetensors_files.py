"""Safetensors files of a pretrained folder: the files that transformers loads, and their tensors.

No pickle file is read. Errors name the option, the file and a fix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from stat import S_IMODE
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from scalewise import regular_files
from scalewise.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERNS = ("*.safetensors", INDEX)
"""Names of the files of a model's weights."""
ADAPTER = "adapter_config.json"
WEIGHTS_FILE_KEY = "transformers_weights"
"""Key of ``config.json`` that names the weights file."""
DOWNLOAD_AGAIN = "download or copy the folder again"
LFS_POINTER = b"version https://git-lfs"


def weight_files(folder: Path, key: str, value: object, fix: str) -> list[Path]:
    """Return the files that ``PreTrainedModel.from_pretrained`` reads from a local folder.

    The file that ``config.json`` names has precedence over ``model.safetensors``, and this over the
    shards of ``model.safetensors.index.json``. Other files, such as ``consolidated.safetensors``,
    are not read.

    Args:
        folder: Local folder of a pretrained model.
        key: Option with the path of the folder, for errors.
        value: Value of this option, for errors.
        fix: Fix for a folder without such files.

    Raises:
        CheckpointError: No such file, an unreadable index, or an adapter in the folder.
    """
    if (folder / ADAPTER).is_file():
        reason = f"contains an adapter ({ADAPTER}), which transformers would add to the weights"
        merge = f"merge the adapter into the weights, or move {ADAPTER} out of the folder"
        raise CheckpointError.for_key(key, value, reason, merge)
    name = _configured_file_name(folder) or next(
        (name for name in (SINGLE, INDEX) if (folder / name).is_file()), None
    )
    if name is None:
        reason = f"has no safetensors weights (neither {SINGLE} nor {INDEX})"
        raise CheckpointError.for_key(key, value, reason, fix)
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()) and ".." in Path(name).parts:
        reason = f"config.json names weights outside of the folder ({WEIGHTS_FILE_KEY}={name})"
        raise CheckpointError.for_key(
            key, value, reason, f"remove {WEIGHTS_FILE_KEY} from config.json"
        )
    if not name.endswith(".index.json"):
        return [file]
    try:
        shard_names = json.loads(regular_files.read_text(file))["weight_map"].values()
        shards = sorted({str(shard) for shard in shard_names})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        reason = f"{name} is not a valid index of shards ({type(error).__name__})"
        raise CheckpointError.for_key(key, value, reason, DOWNLOAD_AGAIN) from error
    return [folder / shard for shard in shards]


def _configured_file_name(folder: Path) -> str | None:
    try:
        config = json.loads(regular_files.read_text(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return None  # the caller that parses config.json reports this error
    name = config.get(WEIGHTS_FILE_KEY) if isinstance(config, dict) else None
    return name if isinstance(name, str) else None


class SafetensorsFiles:
    """Tensors of several safetensors files by name, memory-mapped.

    If two files contain the same name, the later file is read, as in transformers.

    Raises:
        CheckpointError: A file is missing, truncated or of another format.
    """

    def __init__(self, files: Iterable[Path], key: str, value: object) -> None:
        self._key, self._value = key, value
        self._handles: dict[str, Any] = {}
        for file in files:
            handle = self._open(file)
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def _open(self, file: Path) -> Any:
        try:
            regular_files.check_regular(file)
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            reason, fix = _open_error(file, error)
            raise CheckpointError.for_key(self._key, self._value, reason, fix) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


def _open_error(file: Path, error: Exception) -> tuple[str, str]:
    """Return the reason why a file cannot be opened, and the fix."""
    if not file.exists():
        return f"{file.name} is missing", DOWNLOAD_AGAIN
    if isinstance(error, OSError) and error.strerror:
        return f"{file.name} cannot be read ({error.strerror})", f"chmod u+r {file}"
    with file.open("rb") as opened:
        prefix = opened.read(len(LFS_POINTER))
    if prefix == LFS_POINTER:
        return f"{file.name} is a Git LFS pointer, not the weights", "run git lfs pull there"
    reason = f"{file.name} cannot be read as safetensors: it is truncated or of another format"
    return reason, DOWNLOAD_AGAIN


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write tensors with the permissions of the umask; ``save_file`` alone uses mode 0600."""
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(S_IMODE(mode))
