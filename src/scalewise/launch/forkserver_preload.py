"""Imported once by the fork server: what every job needs, so that a job starts in a moment."""

import torch.distributed.elastic.multiprocessing.api
import torch.distributed.launcher.api  # noqa: F401 (imported for the ranks to come)
import wandb  # noqa: F401 (as above)

from scalewise.launch import processes, rank_entrypoint, rank_worker  # noqa: F401 (as above, but for the first)

processes.become_subreaper()
