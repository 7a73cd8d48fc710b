"""Hydra config source of experiments and sweeps, with default package ``_global_``.

Hydra imports this module in every application, so heavy imports are inside the functions.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from scalewise.compat.hydra import add_listed_name, header_dict, normalized_file_name


class ExperimentSource(ConfigSource):
    """Config source that serves ``scalewise.config.paths.MOUNTED_FILES``."""

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
