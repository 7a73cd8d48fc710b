"""Hydra config sources: conf/ with its schemas merged, and experiments and sweeps.

Hydra alone finds, copies and composes a config and its schema separately, twice the work.
Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from copy import deepcopy
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scalewise import bounded_yaml
from scalewise.compat.hydra import (
    FileConfigSource,
    add_listed_name,
    header_dict,
    normalized_file_name,
)
from scalewise.compat.omegaconf import yaml_loader

_cache: dict[tuple[Path, int, int], ConfigResult] = {}
"""Configs by file, modification time and size: a sweep composes once per job."""

_LOADER = yaml_loader()
if yaml.__with_libyaml__:  # the C parser is faster: reading took a twelfth of a plan
    _LOADER = type("Loader", (yaml.CSafeLoader, _LOADER), {})


class ConfFolderSource(FileConfigSource):
    """File source that merges a config with its schema if the schema is its only default."""

    @staticmethod
    def scheme() -> str:
        """URL scheme of the source on the search path."""
        return "scalewise-conf"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file, merged with its schema."""
        file = Path(self.path, normalized_file_name(self, config_path))
        key = (file, file.stat().st_mtime_ns, file.stat().st_size)
        if key not in _cache:
            _cache[key] = self._merge_with_schema(file) or super().load_config(config_path)
        result = _cache[key]
        return ConfigResult(
            result.provider, result.path, deepcopy(result.config), dict(result.header)
        )

    def _merge_with_schema(self, file: Path) -> ConfigResult | None:
        """Config merged with its schema; None if it has no schema or contradicts it."""
        try:
            text = file.read_text("utf-8")
            bounded_yaml.check_bounds(text)
            match _LOADER(text).get_single_data():
                case {"defaults": [str(schema), "_self_"], **values} if schema.startswith(
                    "/schema/"
                ):
                    name = f"{schema[1:].removesuffix('@_here_')}.yaml"
                case _:
                    return None
            config = ConfigStore.instance().load(name).node
            config.merge_with(values)
        except (UnicodeDecodeError, yaml.YAMLError, ConfigLoadError, OmegaConfBaseException):
            return None
        path, header = f"{self.scheme()}://{self.path}", header_dict(self, text)
        return ConfigResult(self.provider, path, config, header)


class ConfFolderSearchPath(SearchPathPlugin):
    """Search path plugin that replaces conf/ by ``ConfFolderSource``, in scalewise only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Replace the entry of conf/."""
        from scalewise.config import paths

        conf = str(paths.project_root() / "conf")
        for part in search_path.get_path():
            if part.path.removeprefix("file://") == conf:
                part.path = f"{ConfFolderSource.scheme()}://{conf}"


class ExperimentSource(ConfigSource):
    """Config source of ``scalewise.config.paths.MOUNTED_FILES``, with package ``_global_``."""

    @property
    # Not an attribute: Hydra copies its sources for each config.
    def _files(self) -> dict[str, Path]:
        from scalewise.config.paths import MOUNTED_FILES

        return MOUNTED_FILES

    @staticmethod
    def scheme() -> str:
        """URL scheme of the source on the search path."""
        return "scalewise"

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a mounted file; its package is ``_global_`` unless its header sets one."""
        from scalewise import regular_files

        file = self._files[normalized_file_name(self, config_path)]
        regular_files.check_regular(file)
        try:
            config, header = OmegaConf.load(file), header_dict(self, file.read_text("utf-8"))
        except Exception as error:  # YAML, OmegaConf and the decoder raise unrelated types
            reason = " ".join(str(error).split())
            raise ConfigCompositionException(f"{file} cannot be read: {reason}") from error
        header["package"] = header["package"] or "_global_"
        return ConfigResult(self.provider, self.full_path(), config, header)

    def available(self) -> bool:
        """True: the source exists without mounted files too."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether a file is mounted below a path."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in self._files)

    def is_config(self, config_path: str) -> bool:
        """Whether a file is mounted at a path."""
        return normalized_file_name(self, config_path.rstrip("/")) in self._files

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names directly below a path, sorted."""
        names: list[str] = []
        prefix = f"{config_path}/" if config_path else ""
        relative = [name[len(prefix) :] for name in self._files if name.startswith(prefix)]
        for name in {name.split("/")[0] for name in relative}:
            add_listed_name(self, names, f"{prefix}{name}", name, results_filter)
        return sorted(names)


class ExperimentSearchPath(SearchPathPlugin):
    """Search path plugin: mounted files come after conf/ and before the folder of ``-cd``.

    Hydra reads the folder of ``-cd`` from its command line; other compositions append it here.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Extend the search path of scalewise, and of no other application."""
        from scalewise.config import paths
        from scalewise.config.paths import USER_FOLDERS

        conf = str(paths.project_root() / "conf")
        if any(part.path.endswith(conf) for part in search_path.get_path()):
            search_path.append("scalewise", f"{ExperimentSource.scheme()}://mounted")
            for folder in USER_FOLDERS:
                search_path.append("scalewise", f"file://{folder}")
