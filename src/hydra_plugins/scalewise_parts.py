"""Hydra's way to conf/: a part arrives laid over the schema that it stands on.

Hydra would find, copy and compose each of the two by itself; so it has half as many to compose.
"""

from copy import copy

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class PartSource(FileConfigSource):
    """A folder that is read as Hydra reads any, but for files that stand on a schema alone."""

    @staticmethod
    def scheme() -> str:
        """Returns what its place on the search path begins with."""
        return "scalewise-parts"

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns a file; one that contradicts its schema is left for Hydra to complain about."""
        plain = super().load_config(config_path)
        match OmegaConf.to_container(plain.config):
            case {"defaults": [str(schema), "_self_"]} if schema.startswith("/schema/"):
                name = f"{schema[1:].removesuffix('@_here_')}.yaml"
            case _:
                return plain
        own = copy(plain.config)
        assert isinstance(own, DictConfig)
        del own["defaults"]
        try:
            laid = ConfigStore.instance().load(name).node
            assert isinstance(laid, DictConfig)
            laid.merge_with(own)
        except (ConfigLoadError, OmegaConfBaseException):
            return plain
        return ConfigResult(plain.provider, plain.path, laid, plain.header)


class PartSearchPath(SearchPathPlugin):
    """Has conf/ read by it, in the suite and in no other application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Changes the search path."""
        from scalewise.config import tree

        ours = str(tree.root() / "conf")
        for part in search_path.get_path():
            if part.path.removeprefix("file://") == ours:
                part.path = f"{PartSource.scheme()}://{ours}"
