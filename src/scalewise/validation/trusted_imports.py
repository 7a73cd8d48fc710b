"""Validation of import paths in a config: callbacks and user-defined modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalewise import callback_config as own_callbacks
from scalewise.data.user_datamodule import UserDataModule
from scalewise.errors import ConfigIssue
from scalewise.objectives import UserModule
from scalewise.run_config import RunConfig
from scalewise.typed_override import format_override

TRUSTED_PACKAGES = ("scalewise", "lightning", "torch", "peft", "transformers")
"""Packages that a config may import from by default."""


def module_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for user-defined modules and data outside of trusted packages."""
    for group, spec in (("objective", run.objective), ("data", run.data)):
        if not isinstance(spec, UserModule | UserDataModule):
            continue
        path, arguments = spec.target, spec.arguments
        if "." not in path and (path or group == "objective"):
            fix = f"set {group}.target=package.module.Class"
            yield ConfigIssue(f"{group}.target", path or "''", "is not a class path", fix)
        elif path:
            yield from _untrusted_issue(run, f"{group}.target", path)
        if nested := [key for key, value in arguments.items() if _names_target(value)]:
            key, reason = nested[0], "nested _target_ is not supported in arguments"
            fix = "use plain values"
            yield ConfigIssue(f"{group}.arguments.{key}", arguments[key], reason, fix)


def _untrusted_issue(run: RunConfig, key: str, path: str) -> Iterator[ConfigIssue]:
    package = path.split(".")[0]
    if package not in (*TRUSTED_PACKAGES, *run.trusted_packages):
        reason = f"the package {package!r} is not trusted"
        trusting = format_override("trusted_packages", [*run.trusted_packages, package])
        fix = f"if you trust it, set {trusting}"
        yield ConfigIssue(key, path, reason, fix)


def callback_issues(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for callbacks that are malformed, not trusted or without effect."""
    if "_target_" in run.callbacks:
        reason = "is at the top level of callbacks, where each callback requires a name"
        fix = "move it below a name in its file: my_callback: {_target_: package.module.Class}"
        yield ConfigIssue("callbacks._target_", run.callbacks["_target_"], reason, fix)
        return
    for name, callback in run.callbacks.items():
        path = callback.get("_target_") if isinstance(callback, Mapping) else None
        if not isinstance(path, str) or "." not in path:
            yield ConfigIssue(
                f"callbacks.{name}",
                callback,
                "is not a callback",
                f"write ++callbacks.{name}._target_=package.module.Class instead",
            )
        elif nested := [key for key, value in callback.items() if _names_target(value)]:
            reason = "nested _target_ is not supported in arguments"
            yield ConfigIssue(f"callbacks.{name}.{nested[0]}", callback[nested[0]], reason)
        elif untrusted := list(_untrusted_issue(run, f"callbacks.{name}._target_", path)):
            yield from untrusted
        elif own_callbacks.is_builtin(path):
            yield from own_callbacks.callback_arg_issues(name, callback)
            if path == own_callbacks.EMA:
                yield from _averaging_issues(name, run)
        elif path.endswith(".EarlyStopping") and run.trainer.validate_every is None:
            reason = "requires validation"
            fix = "set trainer.validate_every=100, or remove it"
            yield ConfigIssue("trainer.validate_every", None, f"callbacks.{name} {reason}", fix)


def _averaging_issues(name: str, run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield issues for weight averaging by a callback."""
    key, conflicts = f"callbacks.{name}", []
    if conflict := run.parallelism.averaging_conflict:
        conflicts.append(conflict)
    if not run.objective.is_user_defined and run.optimizer.averages_weights:
        reason = "is not supported with this optimizer, which averages the weights itself"
        conflicts.append((reason, "set optimizer=adamw"))
    for reason, fix in conflicts:
        yield ConfigIssue(key, own_callbacks.EMA, reason, f"{fix}, or remove it")


def _names_target(value: object) -> bool:
    """Return whether a container has a ``_target_`` at any depth."""
    if isinstance(value, Mapping):
        return "_target_" in value or any(_names_target(entry) for entry in value.values())
    return isinstance(value, list | tuple) and any(_names_target(entry) for entry in value)
