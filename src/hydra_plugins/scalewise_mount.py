"""Hydra's way to experiments and sweeps, which speak of the whole config unless they say else.

Hydra imports every module here in every application, so nothing heavy is imported at its head.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf


class MountedSource(ConfigSource):
    """The files of ``scalewise.config.search_path``."""

    @property
    def _files(self) -> dict[str, Path]:  # no attribute: Hydra copies its sources for each config
        from scalewise.config.search_path import MOUNTED_FILES

        return MOUNTED_FILES

    @staticmethod
    def scheme() -> str:
        """Returns what its place on the search path begins with."""
        return "scalewise"

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns a file, its package ``_global_`` where its head names none."""
        from scalewise import regular_files

        file = self._files[self._normalize_file_name(config_path)]
        regular_files.check_regular(file)
        try:
            config, header = OmegaConf.load(file), self._get_header_dict(file.read_text("utf-8"))
        except Exception as error:  # YAML's, OmegaConf's, a decoder's: each its own kind
            reason = " ".join(str(error).split())
            raise ConfigCompositionException(f"{file} cannot be read: {reason}") from error
        header["package"] = header["package"] or "_global_"
        return ConfigResult(self.provider, self.full_path(), config, header)

    def available(self) -> bool:
        """Returns that it is there, even if nothing is mounted."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Returns whether something is mounted below a path."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in self._files)

    def is_config(self, config_path: str) -> bool:
        """Returns whether a file is mounted at a path."""
        return self._normalize_file_name(config_path.rstrip("/")) in self._files

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Returns the names right below a path."""
        found: list[str] = []
        prefix = f"{config_path}/" if config_path else ""
        inside = [name[len(prefix) :] for name in self._files if name.startswith(prefix)]
        for name in {name.split("/")[0] for name in inside}:
            self._list_add_result(found, f"{prefix}{name}", name, results_filter)
        return sorted(found)


class MountedSearchPath(SearchPathPlugin):
    """Puts them behind conf/ and before a folder of ``-cd``, where Hydra would find bare files.

    Hydra knows that folder from its command line; whoever composes otherwise finds it here.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Changes the search path of the suite, and of no other application."""
        from scalewise.config import paths
        from scalewise.config.search_path import USER_FOLDERS

        ours = str(paths.project_root() / "conf")
        if any(part.path.endswith(ours) for part in search_path.get_path()):
            search_path.append("scalewise", f"{MountedSource.scheme()}://mounted")
            for folder in USER_FOLDERS:
                search_path.append("scalewise", f"file://{folder}")
