"""Hydra config source of conf/ that merges each config with its schema when it is read.

Hydra alone finds, copies and composes the config and its schema separately, twice the work.
"""

from copy import deepcopy
from pathlib import Path

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf.errors import OmegaConfBaseException

from scalewise import bounded_yaml
from scalewise.compat.hydra import FileConfigSource, header_dict, normalized_file_name
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
