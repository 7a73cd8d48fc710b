"""Modules that the forkserver imports once, so that jobs start without import time."""

import gc

import torch.distributed.elastic.multiprocessing.api
import torch.distributed.launcher.api  # noqa: F401 (preloaded for the ranks)
import wandb  # noqa: F401 (as above)

from scalewise.launch import elastic, processes, rank_worker  # noqa: F401 (as above, except processes)

processes.become_subreaper()
gc.freeze()  # ranks never examine the objects of imported modules
