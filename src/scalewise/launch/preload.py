"""Imported once by the fork server: what every job needs, so that a job starts in a moment."""

import torch.distributed.elastic.multiprocessing.api
import torch.distributed.launcher.api  # noqa: F401
import wandb  # noqa: F401

from scalewise.launch import processes, rank, worker  # noqa: F401

processes.adopt_orphans()
