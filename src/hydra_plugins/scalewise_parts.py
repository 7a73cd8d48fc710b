"""Hydra's way to conf/: a part arrives laid over the schema that it stands on.

Hydra would find, copy and compose each of the two by itself; so it has half as many to compose.
"""

from copy import deepcopy
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from scalewise import bounded_yaml

_read: dict[tuple[Path, int, int], ConfigResult] = {}
"""What was read, by file, its time and size: a sweep composes as often as it has jobs."""

_LOADER = get_yaml_loader()
if yaml.__with_libyaml__:  # the same rules behind a parser in C: reading was a twelfth of a plan
    _LOADER = type("Loader", (yaml.CSafeLoader, _LOADER), {})


class PartSource(FileConfigSource):
    """A folder that is read as Hydra reads any, but for files that stand on a schema alone."""

    @staticmethod
    def scheme() -> str:
        """Returns what its place on the search path begins with."""
        return "scalewise-parts"

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns a file, laid over its schema."""
        file = Path(self.path, self._normalize_file_name(config_path))
        key = (file, file.stat().st_mtime_ns, file.stat().st_size)
        if key not in _read:
            _read[key] = self._merge_with_schema(file) or super().load_config(config_path)
        found = _read[key]
        return ConfigResult(found.provider, found.path, deepcopy(found.config), dict(found.header))

    def _merge_with_schema(self, file: Path) -> ConfigResult | None:
        """Returns a part over its schema; what is no part, or contradicts it, is left to Hydra."""
        try:
            text = file.read_text("utf-8")
            bounded_yaml.check_bounds(text)
            match _LOADER(text).get_single_data():
                case {"defaults": [str(schema), "_self_"], **own} if schema.startswith("/schema/"):
                    name = f"{schema[1:].removesuffix('@_here_')}.yaml"
                case _:
                    return None
            laid = ConfigStore.instance().load(name).node
            laid.merge_with(own)
        except (UnicodeDecodeError, yaml.YAMLError, ConfigLoadError, OmegaConfBaseException):
            return None
        path, header = f"{self.scheme()}://{self.path}", self._get_header_dict(text)
        return ConfigResult(self.provider, path, laid, header)


class PartSearchPath(SearchPathPlugin):
    """Has conf/ read by it, in the suite and in no other application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Changes the search path."""
        from scalewise.config import paths

        ours = str(paths.project_root() / "conf")
        for part in search_path.get_path():
            if part.path.removeprefix("file://") == ours:
                part.path = f"{PartSource.scheme()}://{ours}"
